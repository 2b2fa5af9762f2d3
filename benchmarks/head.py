"""What a sampler asks of the output head, against the head's matrix product alone and against all logits at once.

    python benchmarks/head.py --threads 1 --base FOLDER

The three take turns, the same rows each time; the ratio is the median over rounds, with the middle half of them. The
head is of SmolLM2-135M's shape (V = 49,152, D = 576). With `--base`, a checkpoint, whole decoding is timed too: with the
statistics and from all logits, which is how a published student decodes by itself; what is said does not matter here.
"""

import argparse
import json
import time
from datetime import date
from pathlib import Path

import numpy as np
import torch

from fewstep import machine
from fewstep.kernels.lm_head_stats import lm_head_stats
from fewstep.runstore import write_atomic
from fewstep.students.config import StudentConfig
from fewstep.students.convert import load_causal_lm, make_student
from fewstep.students.decoding import decode
from fewstep.students.head import attach

RESULTS = Path(__file__).parent / "results"
V, D = 49_152, 576


def naive(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return what is asked for, from all logits: probability, token, second largest, entropy."""
    logits = hidden @ weight.T
    logp = logits.log_softmax(-1)
    top = logp.topk(2, -1)
    return top.values.exp(), top.indices, -(logp.exp() * logp).sum(-1)


@torch.inference_mode()
def measure(rows: int, rounds: int) -> dict:
    torch.manual_seed(rows)
    hidden, weight = torch.randn(rows, D), torch.randn(V, D) * 0.05
    ways = {
        "product": lambda: hidden @ weight.T,
        "statistics": lambda: lm_head_stats(hidden, weight),
        "without entropy": lambda: lm_head_stats(hidden, weight, entropy=False),
        "all logits": lambda: naive(hidden, weight),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 2):
        order = list(ways)[number % len(ways) :] + list(ways)[: number % len(ways)]
        for name in order:
            start = time.perf_counter()
            ways[name]()
            taken[name].append(time.perf_counter() - start)
    seconds = {name: np.array(times[2:]) for name, times in taken.items()}
    found: dict = {"rows": rows, "product_ms": float(np.median(seconds["product"]) * 1e3)}
    for name in list(ways)[1:]:
        ratio = seconds[name] / seconds["product"]
        found[name] = [float(np.median(ratio)), *(float(q) for q in np.quantile(ratio, [0.25, 0.75]))]
    return found


def decoding(base: str, rounds: int) -> list[dict]:
    """Return, for batches of 1 and 4 and two samplers, the seconds from all logits ÷ those with the statistics."""
    model, tokenizer = load_causal_lm(base)
    make_student(model, tokenizer, StudentConfig(block_size=16), gated=False, seed=0)
    attach(model)
    likely, found = model.fewstep_head, []
    rng = np.random.default_rng(0)
    for batch in (1, 4):
        prompts = [rng.integers(100, 9000, 24).tolist() for _ in range(batch)]
        for sampler, settings in (("fixed", {"steps": 4}), ("verify", {})):
            taken: dict[bool, list[float]] = {True: [], False: []}
            for number in range(2 * rounds + 2):
                with_head = number % 2 == 0
                model.fewstep_head = likely if with_head else None
                start = time.perf_counter()
                decode(model, prompts, sampler=sampler, max_new_tokens=32, eos_token_ids=[], **settings)
                taken[with_head].append(time.perf_counter() - start)
            ratio = np.array(taken[False][1:]) / np.array(taken[True][1:])
            quantiles = [float(q) for q in np.quantile(ratio, [0.5, 0.25, 0.75])]
            found.append({"batch": batch, "sampler": sampler, "speed_up": quantiles})
            print(found[-1], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--base", help="a checkpoint to time decoding with")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found = []
    for rows in (1, 4, 16, 32, 64):
        found.append(measure(rows, args.rounds))
        print({k: [round(x, 3) for x in v] if isinstance(v, list) else v for k, v in found[-1].items()}, flush=True)
    decoded = decoding(args.base, 6) if args.base else []
    base = f" --base {Path(args.base).name}" if args.base else ""
    command = f"python benchmarks/head.py --threads {args.threads} --rounds {args.rounds}{base}"
    kept = {"command": command, "date": str(date.today()), "commit": machine.commit(), "hardware": machine.hardware(), "versions": machine.versions(), "rows": found, "decoding": decoded}  # fmt: skip
    write_atomic(RESULTS / "head.json", json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
