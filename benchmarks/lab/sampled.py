"""The lab's tasks whose answers are drawn at T = 1: what the draws look like, not whether they are right.

    python benchmarks/lab/sampled.py modes
    python benchmarks/lab/sampled.py stories

`modes` is the control: two equally likely answers of two words each. Positions decided in one forward are
drawn independently, so a student that has learnt the task must mix the answers in about half of its
draws with one step a block, and never under `verify`. A lab in which it does not is broken.

`stories` is free text: its perplexity under the AR teacher, which sameness would flatter, stands beside
the entropy and the distinct n-grams of the texts.
"""

import argparse
import json
import math
from collections import Counter
from collections.abc import Callable
from datetime import date
from pathlib import Path

import numpy as np
from run import DATA, RECIPES, RESULTS, ROOT, make
from table import Bootstrap
from tasks import MODES

from fewstep import chat, machine
from fewstep.distill.pipeline import run
from fewstep.distill.recipe import load_recipe
from fewstep.eval import quality
from fewstep.eval.stats import mean_interval
from fewstep.runstore import StageFolder, write_atomic
from fewstep.students.convert import load_student
from fewstep.students.decoding import decode
from fewstep.teachers.generate import generate
from fewstep.teachers.load import load_teacher
from fewstep.teachers.scoring import token_logprobs

BATCH = 250  # prompts at once
DRAWS = 4000  # answers of the control
A_PROMPT = 3  # stories a prompt
MIXED = tuple(f"{a.split()[0]} {b.split()[1]}" for a in MODES for b in MODES if a != b)
VERIFY = ("verify", {})
OF_MODES = {
    "one step a block": ("fixed", {"steps": 1}),
    "threshold 0.9": ("threshold", {"threshold": 0.9}),
    "threshold 0.9, leading 1": ("threshold", {"threshold": 0.9, "leading": 1}),
    "one token a step": ("fixed", {"steps": 16}),
    "verify": VERIFY,
}
OF_STORIES = {f"threshold {t}": ("threshold", {"threshold": t}) for t in (0.3, 0.5, 0.7, 0.9)} | {"verify": VERIFY}


class Drawn:
    """A recipe's student and teacher, and what they draw at T = 1 to prompts of the task's evaluation split."""

    def __init__(self, task: str, runs: Path, overrides: list[str], repeat: Callable[[int], int]):
        """Train what is missing. repeat: from the number of prompts to how many answers are drawn, in turn."""
        recipe = load_recipe(RECIPES / f"{task}.yaml", overrides)
        stages = ["targets", "adapt", *(["distill"] if recipe.distill else [])]
        for stage in stages:
            folders = run(recipe, runs, stage)
        self.manifest = StageFolder(folders[stages[-1]]).manifest()
        self.student, self.tokenizer = load_student(folders[stages[-1]] / "student")
        self.teacher, _ = load_teacher(recipe.teacher.model)
        self.limit, self.eos = recipe.targets.max_new_tokens, chat.eos_ids(self.student, self.tokenizer)
        asked = [json.loads(line)["instruction"] for line in (DATA / task / "eval.jsonl").read_text().splitlines()]
        prompts = [chat.encode_prompt(self.tokenizer, [{"role": "user", "content": text}]) for text in asked]
        self.prompts = [prompts[i % len(prompts)] for i in range(repeat(len(prompts)))]

    def by_teacher(self) -> list:
        """Return the AR teacher's answers."""
        seeds = list(range(len(self.prompts)))
        return generate(
            self.teacher, self.prompts, max_new_tokens=self.limit, eos_ids=self.eos, temperature=1.0, seeds=seeds
        )

    def by_student(self, sampler: str, settings: dict) -> list:
        """Return the student's answers under a sampler; each answer's draws are keyed by its place."""
        out = []
        for first in range(0, len(self.prompts), BATCH):
            chosen = self.prompts[first : first + BATCH]
            out += decode(
                self.student, chosen, sampler=sampler, max_new_tokens=self.limit, eos_token_ids=self.eos,
                temperature=1.0, seed=list(range(first, first + len(chosen))), **settings,
            )  # fmt: skip
        return out


def modes(runs: Path) -> None:
    """Measure, for the AR teacher and each way to decode, how often each answer and each mixture is drawn."""
    drawn = Drawn("modes", runs, ["distill=null"], lambda _: DRAWS)
    answers = {"AR teacher": drawn.by_teacher()} | {name: drawn.by_student(*way) for name, way in OF_MODES.items()}
    rows = []
    for name, given in answers.items():
        counts = Counter(drawn.tokenizer.decode(answer.ids, skip_special_tokens=True).strip() for answer in given)
        shares = [counts.pop(mode, 0) / DRAWS for mode in MODES]
        crossed = sum(counts.pop(mixture, 0) for mixture in MIXED)
        row = {"task": "modes", "system": name, "n": DRAWS, "tpf": _tpf(given), "modes": shares}
        row |= {"mixed": crossed / DRAWS, "others": sum(counts.values()) / DRAWS}
        row["mixed_ci"] = list(mean_interval([float(i < crossed) for i in range(DRAWS)]))
        rows.append(row)
        print(f"{name:<24} {shares[0]:.3f} {shares[1]:.3f}  mixed {row['mixed']:.4f}  others {row['others']:.4f}")
    _keep("lab-modes", rows, drawn.manifest)


def stories(runs: Path) -> None:
    """Measure the perplexity of stories under the AR teacher, and how varied they are, beside its own stories."""
    drawn = Drawn("stories", runs, [], lambda count: A_PROMPT * count)
    answers = {"AR teacher": drawn.by_teacher()} | {name: drawn.by_student(*way) for name, way in OF_STORIES.items()}
    rows: list[dict] = []
    of_teacher = None
    for name, given in answers.items():
        texts = quality.Answers(ids=[list(a.ids) for a in given], finish_reason=[a.finish_reason for a in given])
        logprobs = token_logprobs(drawn.teacher, drawn.prompts, texts.ids, BATCH)
        # the unit is the prompt: its answers are summed
        surprise = np.reshape([-sum(values) for values in logprobs], (A_PROMPT, -1)).sum(0)
        tokens = np.reshape(texts.tokens, (A_PROMPT, -1)).sum(0)
        boot = Bootstrap(1, len(tokens))
        nats = boot.means(surprise[None]) / boot.means(tokens[None])
        of_teacher = nats if of_teacher is None else of_teacher
        row = {"task": "stories", "system": name, "n": len(given), "prompts": len(tokens), "tpf": _tpf(given)}
        row |= {"perplexity": math.exp(surprise.sum() / tokens.sum()), "perplexity_ci": boot.interval(np.exp(nats))}
        row["perplexity_ratio"] = row["perplexity"] / rows[0]["perplexity"] if rows else 1.0
        row["perplexity_ratio_ci"] = boot.interval(np.exp(nats - of_teacher))
        row |= quality.text_statistics(texts)
        rows.append(row)
        print(
            f"{name:<18} TPF {row['tpf']:5.2f}  perplexity {row['perplexity']:6.2f} ({row['perplexity_ratio']:.3f} of the teacher's)  "
            f"entropy {row['entropy']:.3f}  distinct-2 {row['distinct_n']['2']:.3f}  repetition {row['repetition']:.4f}"
        )
    _keep("lab-stories", rows, drawn.manifest)


def _tpf(answers: list) -> float:
    """Return tokens over forwards; the teacher's answers, which count none, are AR: 1."""
    return sum(len(a.ids) for a in answers) / sum(getattr(a, "nfe", len(a.ids)) for a in answers)


def _keep(name: str, rows: list[dict], manifest: dict) -> None:
    kept = {"command": f"python benchmarks/lab/sampled.py {name.removeprefix('lab-')}", "commit": manifest["commit"],
            "date": str(date.today()), "hardware": manifest["hardware"], "versions": machine.versions(), "rows": rows}  # fmt: skip
    write_atomic(RESULTS / f"{name}.json", json.dumps(kept, indent=1, ensure_ascii=False) + "\n")


TASKS = {"modes": modes, "stories": stories}


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
