"""Which values of the booking task a student copies wrong: error rates by first name and by car, worst first.

    python benchmarks/by_value.py runs/distill-<hash>/student --sampler threshold --threshold 0.8

Beside each value stands how many others have as many tokens: its length decides where all behind it in its block stands.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fewstep import checkers
from fewstep.chat import encode_prompt, eos_ids
from fewstep.students.convert import load_student
from fewstep.students.decoding import decode
from fewstep.students.decoding.weights import column_major

EVAL = Path(__file__).parents[1] / "recipes" / "booking" / "eval.jsonl"
BATCH = 96


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("student", type=Path)
    parser.add_argument("--path", type=Path, default=EVAL, help="messages with their bookings, JSON lines")
    parser.add_argument("--rows", type=int, default=2400)
    parser.add_argument("--sampler", default="threshold")
    parser.add_argument("--threshold", type=float, help="of that sampler")
    parser.add_argument("--top", type=int, default=8, help="values shown of each kind")
    args = parser.parse_args()
    model, tokenizer = load_student(args.student)
    column_major(model)
    rows = [json.loads(line) for line in args.path.read_text().splitlines()[: args.rows]]
    prompts = [encode_prompt(tokenizer, [{"role": "user", "content": row["instruction"]}]) for row in rows]
    settings = {} if args.threshold is None else {"threshold": args.threshold}
    done = []
    for first in range(0, len(rows), BATCH):
        done += decode(model, prompts[first : first + BATCH], sampler=args.sampler, max_new_tokens=72, eos_token_ids=eos_ids(model, tokenizer), **settings)  # fmt: skip
    texts = tokenizer.batch_decode([answer.ids for answer in done], skip_special_tokens=True)
    wrong = [checkers.booking(text, row["reference"]) < 1 for text, row in zip(texts, rows)]
    console = Console()
    console.print(f"{sum(wrong)} of {len(rows)} wrong, {sum(len(a.ids) for a in done) / sum(a.nfe for a in done):.1f} tokens a forward")  # fmt: skip
    for kind, value_of in (("first name", lambda r: r["name"].split()[0]), ("car", lambda r: r["car"])):
        groups = defaultdict(list)
        for row, failed in zip(rows, wrong):
            groups[value_of(row["reference"])].append(failed)
        lengths = {value: len(tokenizer.tokenize(f'"{value}')) - 1 for value in groups}
        table = Table(kind, "tokens", "values as long", "rows", "wrong")
        for value in sorted(groups, key=lambda v: sum(groups[v]) / len(groups[v]), reverse=True)[: args.top]:
            alike, failed = sum(n == lengths[value] for n in lengths.values()), groups[value]
            table.add_row(value, str(lengths[value]), str(alike), str(len(failed)), f"{sum(failed) / len(failed):.1%}")
        console.print(table)


if __name__ == "__main__":
    main()
