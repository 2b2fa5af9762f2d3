"""Score an evaluation's rows apart: those that choices were made on, and those that nothing looked at.

    python benchmarks/untouched.py runs/eval-<hash> --from 1000

The first 1,000 rows of recipes/booking/eval.jsonl decided when the small teacher's training stopped and
which settings the recipes have; the rest took part in no choice.
"""

import argparse
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

DRAWS = 2000  # of the paired bootstrap


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--from", type=int, default=1000, dest="first", help="the first row that nothing looked at")
    args = parser.parse_args()
    columns = ["prompt_index", "system", "sampler", "settings", "score"]
    scores: dict[tuple, dict[int, float]] = {}
    for row in pq.read_table(args.folder / "samples.parquet", columns=columns).to_pylist():
        key = (row["system"], row["sampler"], row["settings"])
        scores.setdefault(key, {})[row["prompt_index"]] = row["score"]
    teacher = next(by_row for key, by_row in scores.items() if key[0] == "teacher")
    rng = np.random.default_rng(0)
    for key, by_row in scores.items():
        for name, rows in (
            ("chosen on", [i for i in sorted(by_row) if i < args.first]),
            ("untouched", [i for i in sorted(by_row) if i >= args.first]),
        ):
            if not rows:
                continue
            delta = np.array([by_row[i] - teacher[i] for i in rows])
            low, high = 100 * np.quantile(delta[rng.integers(0, len(rows), (DRAWS, len(rows)))].mean(1), [0.025, 0.975])
            score = 100 * np.mean([by_row[i] for i in rows])
            print(
                f"{' '.join(key)}  {name}, n={len(rows)}: {score:.1f} %, {100 * delta.mean():+.1f} [{low:+.1f}, {high:+.1f}]"
            )


if __name__ == "__main__":
    main()
