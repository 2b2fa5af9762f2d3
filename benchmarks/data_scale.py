"""Train on 10,000 and on 1,000,000 targets: memory, start-up and the time of a step must not notice.

    python benchmarks/data_scale.py
    python benchmarks/data_scale.py --kd

Targets of random tokens are written for the purpose; the quickstart's teacher is adapted on them for a few steps, each
size in a process of its own, in turn, with other seeds each time: the longest row of a few steps is chance. What is not the same within its bound ends the script with exit code 1. With
`--kd` the teacher's distributions are read too, which are most of the data: start-up is then shown and not bound.
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
from statistics import median

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fewstep import machine, records
from fewstep.runstore import write_atomic

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results"
SHARD, VOCABULARY, TOPK = 10_000, 500, 8
PROMPT, RESPONSE = (30, 90), (20, 70)  # tokens, drawn evenly
STEPS = 40
SLOWER, HEAVIER, START = 1.10, 1.10, 10.0  # the bounds: ratios of step time and memory, seconds


def lists(lengths: np.ndarray, values: pa.Array) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32()), values)


def write_targets(folder: Path, rows: int) -> None:
    """Write shards of random targets, with the teacher's distributions."""
    (folder / "shards").mkdir(parents=True)
    rng = np.random.default_rng(rows)
    for number, first in enumerate(range(0, rows, SHARD)):
        n = min(SHARD, rows - first)
        prompt, response = (rng.integers(*bounds, n) for bounds in (PROMPT, RESPONSE))
        total = int(response.sum())
        draw = lambda size, kind: pa.array(rng.integers(4, VOCABULARY, size).astype(kind))  # noqa: E731
        even = lambda values: pa.FixedSizeListArray.from_arrays(values, TOPK).cast(pa.list_(values.type))  # noqa: E731
        columns = {
            "sample_id": pa.array([f"s{first + i}" for i in range(n)]),
            "prompt_ids": lists(prompt, draw(int(prompt.sum()), np.int32)),
            "response_ids": lists(response, draw(total, np.int32)),
            "finish_reason": pa.array(["stop"] * n),
            "topk_ids": lists(response, even(draw(total * TOPK, np.int32))),
            "topk_logprobs": lists(response, even(pa.array(np.full(total * TOPK, -3.0, np.float32)))),
            "tail_mass": lists(response, pa.array(np.full(total, 0.1, np.float32))),
            "text": pa.array([""] * n),
            "reference": pa.array([""] * n),
            "split": pa.array(["held_out" if i % 100 == 0 else "train" for i in range(n)]),
        }
        pq.write_table(pa.table(columns, schema=records.SCHEMA), folder / "shards" / f"{number:05d}.parquet", compression="zstd")  # fmt: skip


def train(targets: Path, folder: Path, seed: int, kd: bool) -> None:
    from fewstep.distill import train as stage
    from fewstep.distill.config import AdaptConfig, EngineConfig, TrackConfig
    from fewstep.students.config import StudentConfig

    config = AdaptConfig(max_steps=STEPS, batch_tokens=1500, logging_steps=1, eval_steps=STEPS, save_steps=STEPS,
                         objectives={"ce": 1.0, "ar": 1.0} | ({"kd": 0.3} if kd else {}))  # fmt: skip
    teacher = ROOT / "recipes" / "quickstart" / "teacher"
    stage.run(folder, "adapt", config, StudentConfig(block_size=16), EngineConfig(name="plain", threads=1), TrackConfig(),
              teacher, targets, seed, "data-scale")  # fmt: skip


def measure(targets: Path, folder: Path, rows: int, seed: int, kd: bool) -> dict:
    """Train in a process of its own and return what it cost; `start_s` is the time to the end of the first step."""
    folder.mkdir(parents=True)
    begin = time.time()
    child = subprocess.Popen([sys.executable, __file__, "--train", str(targets), str(folder), str(seed), *(["--kd"] if kd else [])], env=os.environ | {"OMP_NUM_THREADS": "1"})  # fmt: skip
    metrics, first = folder / "metrics.jsonl", None
    while child.poll() is None:
        if first is None and metrics.is_file() and metrics.stat().st_size:
            first = time.time() - begin
        time.sleep(0.02)
    if child.returncode or first is None:
        raise SystemExit(f"training on {rows} rows ended with exit code {child.returncode}")
    perf = [json.loads(line) for line in (folder / "perf.jsonl").read_text().splitlines()]
    taken = np.diff([row["seconds"] for row in perf])
    return {"rows": rows, "start_s": first, "step_s": float(median(taken[5:])), "memory_mb": perf[-1]["memory_mb"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs=2, default=(10_000, 1_000_000))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kd", action="store_true", help="distil from the teacher's distributions")
    parser.add_argument("--train", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        targets, folder, seed = args.train
        return train(Path(targets), Path(folder), int(seed), args.kd)
    found: dict[int, list[dict]] = {rows: [] for rows in args.rows}
    with tempfile.TemporaryDirectory() as scratch:
        for rows in args.rows:
            write_targets(Path(scratch) / str(rows), rows)
        for repeat in range(args.repeats):
            for rows in args.rows:
                found[rows].append(
                    measure(Path(scratch) / str(rows), Path(scratch) / f"run-{rows}-{repeat}", rows, repeat, args.kd)
                )
                print(found[rows][-1], flush=True)
    few, many = (
        {key: median(run[key] for run in found[rows]) for key in ("rows", "start_s", "step_s", "memory_mb")}
        for rows in args.rows
    )
    ratios = {key: many[key] / few[key] for key in ("step_s", "memory_mb")}
    print(f"{many['rows']:,} rows against {few['rows']:,}: step {ratios['step_s']:.2f}x, memory {ratios['memory_mb']:.2f}x, start-up {many['start_s']:.1f} s against {few['start_s']:.1f} s")  # fmt: skip
    kept = {"command": "python benchmarks/data_scale.py" + (" --kd" if args.kd else ""), "date": str(date.today()), "commit": machine.commit(), "hardware": machine.hardware(), "versions": machine.versions(), "rows": [few, many, {"ratios": ratios}]}  # fmt: skip
    write_atomic(RESULTS / f"data_scale{'_kd' if args.kd else ''}.json", json.dumps(kept, indent=1) + "\n")
    if ratios["step_s"] > SLOWER or ratios["memory_mb"] > HEAVIER or (many["start_s"] > START and not args.kd):
        raise SystemExit("a bound is broken")


if __name__ == "__main__":
    main()
