"""What block decoding costs on this device beside cached AR decoding, whatever a student has learnt: commits are scripted.

    python benchmarks/gpu_decode.py --out decode.json

Random weights in the shape of SmolLM2-135M, so nothing is downloaded. `fixed` with 16/n steps a block of 16
commits n tokens a forward exactly. All ways answer the same prompts in turn, round after round, starting with another
one each time; the first round is thrown away. Without a GPU, or with --dry, a toy shape.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fewstep import machine
from fewstep.runstore import write_atomic
from fewstep.students.decoding import decode

SMOLLM2 = dict(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=True,
)  # fmt: skip
TOY = SMOLLM2 | dict(vocab_size=512, hidden_size=72, intermediate_size=128, num_hidden_layers=2)
BLOCK, TPF, BATCHES = 16, (1, 2, 4, 8), (1, 8)
HF = "HF generate, cached"


@dataclass(frozen=True)
class Way:
    """One way to answer all prompts of a batch; `answer` returns (tokens, forwards)."""

    name: str
    answer: Callable[[], tuple[int, int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of an answer, whole blocks")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    gpu = torch.cuda.is_available() and not args.dry
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    shape = SMOLLM2 if gpu else TOY
    torch.manual_seed(0)
    config = LlamaConfig(**shape, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    model = LlamaForCausalLM(config).to(device, dtype).eval()
    model.config.fewstep = {"attention": "block", "block_size": BLOCK, "mask_token_id": 0}
    model.generation_config.eos_token_id = None  # every answer is of full length
    rows = []
    for batch in BATCHES:
        prompts = torch.randint(3, config.vocab_size, (batch, args.prompt)).tolist()
        rows += measure(batch, ways(model, prompts, args.tokens), args.rounds)
    memory = torch.cuda.max_memory_allocated() / 2**20 if gpu else None
    facts = {"device": device, "dtype": str(dtype).removeprefix("torch."), "shape": shape, "prompt": args.prompt}
    facts |= {"tokens": args.tokens, "rounds": args.rounds, "block_size": BLOCK, "peak_memory_mb": memory}
    facts |= {"hardware": machine.hardware(), "versions": machine.versions(), "cuda": torch.version.cuda}
    write_atomic(args.out, json.dumps({**facts, "rows": rows}, indent=1) + "\n")


def ways(model, prompts: list[list[int]], tokens: int) -> list[Way]:
    """Return HF's cached generate, our loop without drafting, and blocks with each number of tokens a forward."""
    ids = torch.tensor(prompts, device=model.device)  # [B, L]
    given = dict(attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, use_cache=True)

    @torch.inference_mode()
    def hf() -> tuple[int, int]:
        out = model.generate(input_ids=ids, **given)
        return out.shape[0] * (out.shape[1] - ids.shape[1]), tokens

    def ours(**settings) -> tuple[int, int]:
        done = decode(model, prompts, max_new_tokens=tokens, eos_token_ids=[], **settings)
        return sum(len(d.ids) for d in done), max(d.nfe for d in done)

    found = [Way(HF, hf), Way("our loop, AR", lambda: ours(sampler="ar"))]
    for tpf in TPF:
        steps = BLOCK // tpf
        found.append(Way(f"block {BLOCK}, TPF {tpf}", lambda steps=steps: ours(sampler="fixed", steps=steps)))
    return found


def measure(batch: int, contestants: list[Way], rounds: int) -> list[dict]:
    """Time the ways in turn and return a row for each, printed too."""
    seconds: dict[str, list[float]] = {way.name: [] for way in contestants}
    done = {}
    for number in range(rounds + 1):
        turn = number % len(contestants)
        for way in contestants[turn:] + contestants[:turn]:
            start = _now()
            done[way.name] = way.answer()
            seconds[way.name].append(_now() - start)
    rows, hf = [], statistics.median(seconds[HF][1:])
    for way in contestants:
        (tokens, forwards), taken = done[way.name], seconds[way.name][1:]
        assert way.name.split()[-1] not in map(str, TPF) or forwards * int(way.name.split()[-1]) * batch == tokens
        median = statistics.median(taken)
        row = {
            "batch": batch, "way": way.name, "tokens": tokens, "forwards": forwards, "seconds": taken,
            "tokens_per_s": tokens / median, "tokens_per_s_range": [tokens / max(taken), tokens / min(taken)],
            "over_hf_generate": hf / median, "ms_a_forward": 1000 * median / forwards,
        }  # fmt: skip
        rows.append(row)
        low, high = row["tokens_per_s_range"]
        print(
            f"batch {batch}  {way.name:<20} {row['tokens_per_s']:9.1f} tokens/s [{low:.1f}, {high:.1f}]  "
            f"{row['over_hf_generate']:5.2f}x  {row['ms_a_forward']:.2f} ms a forward",
            flush=True,
        )
    return rows


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
