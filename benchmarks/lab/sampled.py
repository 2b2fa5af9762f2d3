"""The lab's tasks whose answers are drawn at T = 1: what the draws look like, not whether they are right.

    python benchmarks/lab/sampled.py modes

`modes` is the control: two equally likely answers of two words each. Positions decided in one forward are
drawn independently, so a student that has learnt the task must mix the answers in about half of its
draws with one step a block, and never under `verify`. A lab in which it does not is broken.
"""

import argparse
import json
from collections import Counter
from datetime import date
from pathlib import Path

from run import RECIPES, ROOT, make
from tasks import MODES

from fewstep import chat, machine
from fewstep.distill.pipeline import run
from fewstep.distill.recipe import load_recipe
from fewstep.eval.stats import mean_interval
from fewstep.runstore import StageFolder, write_atomic
from fewstep.students.convert import load_student
from fewstep.students.decoding import decode
from fewstep.teachers.generate import generate
from fewstep.teachers.load import load_teacher

WAYS = {
    "one step a block": ("fixed", {"steps": 1}),
    "threshold 0.9": ("threshold", {"threshold": 0.9}),
    "one token a step": ("fixed", {"steps": 16}),
    "verify": ("verify", {}),
}
DRAWS = 4000
MIXED = tuple(f"{a.split()[0]} {b.split()[1]}" for a in MODES for b in MODES if a != b)


def modes(runs: Path) -> list[dict]:
    """Return, for the AR teacher and each way to decode, how often each answer and each mixture was drawn."""
    recipe = load_recipe(RECIPES / "modes.yaml", ["distill=null"])
    for stage in ("targets", "adapt"):
        folders = run(recipe, runs, stage)
    model, tokenizer = load_student(folders["adapt"] / "student")
    teacher, _ = load_teacher(recipe.teacher.model)
    lines = (RECIPES / "data" / "modes" / "eval.jsonl").read_text().splitlines()
    prompts = [
        chat.encode_prompt(tokenizer, [{"role": "user", "content": json.loads(x)["instruction"]}]) for x in lines
    ]
    prompts = [prompts[i % len(prompts)] for i in range(DRAWS)]
    eos, seeds = chat.eos_ids(model, tokenizer), list(range(DRAWS))
    answers = {"AR teacher": generate(teacher, prompts, max_new_tokens=8, eos_ids=eos, temperature=1.0, seeds=seeds)}
    for name, (sampler, settings) in WAYS.items():
        answers[name] = []
        for first in range(0, DRAWS, 250):
            answers[name] += decode(
                model, prompts[first : first + 250], sampler=sampler, max_new_tokens=8, eos_token_ids=eos,
                temperature=1.0, seed=seeds[first : first + 250], **settings,
            )  # fmt: skip
    rows = []
    for name, drawn in answers.items():
        counts = Counter(tokenizer.decode(answer.ids, skip_special_tokens=True).strip() for answer in drawn)
        shares = [counts.pop(mode, 0) / DRAWS for mode in MODES]
        crossed = sum(counts.pop(mixture, 0) for mixture in MIXED)
        mixed = [float(i < crossed) for i in range(DRAWS)]
        row = {
            "task": "modes",
            "system": name,
            "n": DRAWS,
            "modes": shares,
            "mixed": crossed / DRAWS,
            "mixed_ci": list(mean_interval(mixed)),
            "others": sum(counts.values()) / DRAWS,
        }
        if name != "AR teacher":
            row["tpf"] = sum(len(a.ids) for a in drawn) / sum(a.nfe for a in drawn)
        rows.append(row)
        print(
            f"{name:<18} {row['modes'][0]:.3f} {row['modes'][1]:.3f}  mixed {row['mixed']:.4f}  others {row['others']:.4f}"
        )
    _keep("lab-modes", rows, StageFolder(folders["adapt"]).manifest())
    return rows


def _keep(name: str, rows: list[dict], manifest: dict) -> None:
    kept = {"command": f"python benchmarks/lab/sampled.py {name.removeprefix('lab-')}", "commit": manifest["commit"],
            "date": str(date.today()), "hardware": manifest["hardware"], "versions": machine.versions(), "rows": rows}  # fmt: skip
    write_atomic(
        ROOT / "benchmarks" / "results" / f"{name}.json", json.dumps(kept, indent=1, ensure_ascii=False) + "\n"
    )


TASKS = {"modes": modes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "lab")
    args = parser.parse_args()
    machine.pin_threads(1)
    make(args.task)
    TASKS[args.task](args.runs)


if __name__ == "__main__":
    main()
