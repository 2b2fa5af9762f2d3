"""What a training step costs against its floor: an AR fine-tuning step, times how many positions more it has.

    python benchmarks/train_step.py

The floor is (clean + noisy positions) ÷ clean positions, times a plain AR step of the same model on the same rows: the
body, the head on the responses' rows, cross entropy, backward, AdamW. Both are timed in turn, step by step; the
interval is over steps. Peak memory is that of a process of its own for each.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import numpy as np
import torch
from memory import SMOL, TEACHER, make_teacher

from fewstep import machine
from fewstep.distill.config import AdaptConfig
from fewstep.distill.examples import draw_example
from fewstep.distill.samples import Sample
from fewstep.distill.trainee import Trainee, coefficients, load_objectives, row_weights
from fewstep.runstore import write_atomic
from fewstep.students.config import StudentConfig
from fewstep.students.convert import load_causal_lm, make_student
from fewstep.students.layout import CLEAN, Batch, build_batch

RESULTS = Path(__file__).parent / "results"
SIZES = {"3M": None, "135M": SMOL}
CONFIG = AdaptConfig(objectives={"ce": 1.0, "ar": 1.0})
DRAWS = 2000  # of the bootstrap over steps
EOS = 1
WINDOW = 16  # steps whose samples are sorted together, as in `examples.epoch_steps`


def examples(rows: int, step: int) -> list:
    """Return the examples of one step, of similar length as training takes them: a slice of a sorted window.

    Prompts have 30 to 90 tokens, responses 20 to 70.
    """
    rng = np.random.default_rng(step)
    drawn = []
    for i in range(rows * WINDOW):
        prompt, response = (rng.integers(4, 400, rng.integers(*bounds)) for bounds in ((30, 90), (20, 70)))
        drawn.append(Sample(f"{step}-{i}", prompt, response, True, None, None, None))
    drawn.sort(key=lambda s: len(s.prompt) + 2 * len(s.response))
    first = rows * int(rng.integers(WINDOW))
    return [draw_example(s, CONFIG, 16, EOS, 0, 0, 0.5) for s in drawn[first : first + rows]]


def ar_step(model, optimizer, batch: list) -> None:
    """Fine-tune on prompt + response: padded rows, causal attention, the head on the responses' rows."""
    length = max(len(e.prompt) + len(e.response) for e in batch)
    ids, labels = torch.zeros(len(batch), length, dtype=torch.long), torch.full((len(batch), length), -100)
    for i, e in enumerate(batch):
        end = len(e.prompt) + len(e.response)
        ids[i, :end] = torch.from_numpy(np.concatenate([e.prompt, e.response]))
        labels[i, len(e.prompt) : end] = torch.from_numpy(e.response)
    hidden = model.base_model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    rows = labels[:, 1:] != -100
    loss = torch.nn.functional.cross_entropy(model.get_output_embeddings()(hidden[rows]), labels[:, 1:][rows])
    loss.backward()
    finish(model, optimizer)


def our_step(trainee: Trainee, optimizer, batch: Batch) -> None:
    totals = row_weights(batch, trainee.objectives)
    loss, _ = trainee(batch, coefficients(CONFIG.objectives, totals, 0.5))
    loss.backward()
    finish(trainee, optimizer)


def finish(module, optimizer) -> None:
    torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def ready(teacher: Path):
    """Return (model, trainee, optimizer, facts)."""
    model, tokenizer = load_causal_lm(teacher, torch.float32)
    facts = make_student(model, tokenizer, StudentConfig(block_size=16), False, 0)
    model.requires_grad_(True)
    trainee = Trainee(model, "block", facts["mask_token_id"], load_objectives(CONFIG.objectives), CONFIG.objectives, False).eval()  # fmt: skip
    return model, trainee, torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True), facts


def lay(batch: list, facts: dict) -> Batch:
    return build_batch(batch, facts["mask_token_id"], "block", CONFIG.fill_weight)


def measure(teacher: Path, rows: int, steps: int) -> dict:
    model, trainee, optimizer, facts = ready(teacher)
    taken: dict[str, list[float]] = {"ar": [], "ours": []}
    floor = []
    for step in range(steps + 1):
        batch = examples(rows, step)
        work = {"ar": lambda: ar_step(model, optimizer, batch), "ours": lambda: our_step(trainee, optimizer, lay(batch, facts))}  # noqa: B023  # fmt: skip
        for kind in sorted(work, reverse=step % 2 == 1):
            start = time.perf_counter()
            work[kind]()
            taken[kind].append(time.perf_counter() - start)
        laid = lay(batch, facts)
        clean = int((laid.valid & (laid.seg == CLEAN)).sum())
        floor.append(int(laid.valid.sum()) / clean)
    ar, ours, floors = (np.array(values[1:]) for values in (taken["ar"], taken["ours"], floor))  # the first warms up
    draws = np.random.default_rng(0).integers(0, steps, (DRAWS, steps))
    ratio = ours.sum() / (ar * floors).sum()
    spread = ours[draws].sum(1) / (ar * floors)[draws].sum(1)
    low, high = np.quantile(spread, [0.025, 0.975])
    return {"ratio": float(ratio), "ci": [float(low), float(high)], "floor": float(floors.mean()),
            "ar_s": float(ar.mean()), "ours_s": float(ours.mean()), "steps": steps, "rows_a_step": rows}  # fmt: skip


def peak(kind: str, teacher: Path, rows: int) -> float:
    """Return the peak memory in MB of two steps of one kind, in a process of its own."""
    code = "import sys, train_step; train_step.only(sys.argv[1], sys.argv[2], int(sys.argv[3]))"
    done = subprocess.run([sys.executable, "-c", code, kind, str(teacher), str(rows)], cwd=Path(__file__).parent,
                          capture_output=True, text=True, check=True, env=os.environ)  # fmt: skip
    return float(done.stdout.splitlines()[-1])


def only(kind: str, teacher: str, rows: int) -> None:
    model, trainee, optimizer, facts = ready(Path(teacher))
    for step in range(2):
        batch = examples(rows, step)
        if kind == "ar":
            ar_step(model, optimizer, batch)
        elif kind == "ours":
            our_step(trainee, optimizer, lay(batch, facts))
    print(machine.peak_memory_mb())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, nargs=2, default=(60, 12), help="of the 3M and of the 135M model")
    parser.add_argument("--rows", type=int, nargs=2, default=(12, 8), help="samples a step, of each")
    args = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        for (name, shape), steps, rows in zip(SIZES.items(), args.steps, args.rows):
            teacher = TEACHER if shape is None else make_teacher(shape, Path(scratch) / "smol")
            row = {"size": name, **measure(teacher, rows, steps)}
            row["peak_mb"] = {kind: peak(kind, teacher, rows) for kind in ("nothing", "ar", "ours")}
            found.append(row)
            print(f"{name}: {row['ratio']:.2f}x of the floor [{row['ci'][0]:.2f}, {row['ci'][1]:.2f}]; AR {row['ar_s']:.3f} s, "
                  f"floor {row['floor']:.2f} times that, ours {row['ours_s']:.3f} s; peak {row['peak_mb']}", flush=True)  # fmt: skip
    kept = {"command": "python benchmarks/train_step.py", "date": str(date.today()), "commit": machine.commit(), "hardware": machine.hardware(), "versions": machine.versions(), "rows": found}  # fmt: skip
    write_atomic(RESULTS / "train_step.json", json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
