"""Decode with weights laid out by rows and by columns, prompt by prompt in alternating order.

    python benchmarks/linear_layout.py runs/distill-<hash>/student --prompts 50

Prints and keeps, for each sampler, how many times the tokens/s of the row layout the column layout reaches, with a
95 % interval over prompts, and what that does to the speed-up over AR decoding.
"""

import argparse
import copy
import json
import time
from datetime import date
from pathlib import Path

import numpy as np

from fewstep import machine
from fewstep.chat import encode_prompt, eos_ids
from fewstep.runstore import write_atomic
from fewstep.students.convert import load_student
from fewstep.students.decoding import decode
from fewstep.students.decoding.weights import column_major

WAYS = {"ar": {}, "verify": {}, "threshold": {"threshold": 0.9}}
EVAL = Path(__file__).parents[1] / "recipes" / "booking" / "eval.jsonl"
RESULTS = Path(__file__).parent / "results"
DRAWS = 2000  # of the bootstrap over prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("student", type=Path)
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--name", default="linear_layout", help="of the result file")
    args = parser.parse_args()
    rows, tokenizer = load_student(args.student)
    models = {"rows": rows, "columns": column_major(copy.deepcopy(rows))}
    messages = [json.loads(line)["instruction"] for line in EVAL.read_text().splitlines()[: args.prompts]]
    prompts = [encode_prompt(tokenizer, [{"role": "user", "content": text}]) for text in messages]
    seconds = {(layout, way): [] for layout in models for way in WAYS}
    for i, prompt in enumerate([prompts[0], *prompts]):  # the first one warms up
        for layout in sorted(models, reverse=i % 2 == 1):
            for way, settings in WAYS.items():
                start = time.perf_counter()
                decode(models[layout], [prompt], sampler=way, max_new_tokens=72, eos_token_ids=eos_ids(rows, tokenizer), **settings)  # fmt: skip
                seconds[layout, way].append(time.perf_counter() - start)
    taken = {key: np.array(values[1:]) for key, values in seconds.items()}
    draws = np.random.default_rng(0).integers(0, len(prompts), (DRAWS, len(prompts)))
    total = {key: values[draws].sum(1) for key, values in taken.items()}
    found = []
    for way in WAYS:
        ratio = total["rows", way] / total["columns", way]
        point = taken["rows", way].sum() / taken["columns", way].sum()
        low, high = np.quantile(ratio, [0.025, 0.975])
        over_ar = {layout: taken[layout, "ar"].sum() / taken[layout, way].sum() for layout in models}
        found.append({"sampler": way, "columns_over_rows": point, "ci": [low, high], "over_ar": over_ar})
        print(f"{way:<10} columns {point:.2f}x rows [{low:.2f}, {high:.2f}]", *(f"  {k}: {v:.2f}x AR" for k, v in over_ar.items()))  # fmt: skip
    kept = {"command": f"python benchmarks/linear_layout.py STUDENT --prompts {args.prompts} --name {args.name}", "date": str(date.today()), "commit": machine.commit(), "hardware": machine.hardware(), "versions": machine.versions(), "rows": found}  # fmt: skip
    write_atomic(RESULTS / f"{args.name}.json", json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
