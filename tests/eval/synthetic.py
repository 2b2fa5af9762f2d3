"""Made-up measurements in the very form that the evaluation writes, for tests of rows, effort and report."""

import json
import random
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from fewstep.eval import run
from fewstep.eval.assemble import Cell, Speed, Task, assemble
from fewstep.eval.quality import Answers
from fewstep.eval.samples import SCHEMA
from fewstep.eval.speed import Timing

MASK = 9999
SETTINGS = {
    "seed": 0,
    "max_new_tokens": 96,
    "batch_size": 8,
    "speed_prompts": 40,
    "max_loss": 0.01,
    "bootstrap": {"draws": 2000, "level": 0.95},
}
FACTS = {
    "version": 1,
    "attention": "block",
    "alignment": "same_position",
    "block_size": 16,
    "mask_token_id": MASK,
    "adapter": None,
}
RECIPE = {
    "name": "smollm2-135m-booking",
    "seed": 0,
    "teacher": {"model": "HuggingFaceTB/SmolLM2-135M-Instruct", "revision": None, "dtype": "auto"},
    "student": {"base": None, "attention": "block", "block_size": 16},
    "adapt": {
        "max_steps": 400,
        "learning_rate": 1e-4,
        "objectives": {"ce": {"weight": 1.0}},
        "lora": {"rank": 64, "gated": False},
    },
    "publish": {"repo": "acme/booking-fewstep", "private": True},
}
# system, sampler, settings → (share right, tokens a forward, tokens/s)
PROFILE = {
    ("teacher", "ar", ()): (0.993, 1.0, 61.0),
    ("student", "ar", ()): (0.992, 1.0, 63.0),
    ("student", "threshold", (("threshold", 0.5),)): (0.962, 15.2, 452.0),
    ("student", "threshold", (("threshold", 0.7),)): (0.978, 13.9, 421.0),
    ("student", "threshold", (("threshold", 0.9),)): (0.991, 11.4, 366.0),
    ("student", "threshold", (("threshold", 0.95),)): (0.992, 9.7, 318.0),
    ("student", "verify", ()): (0.992, 8.6, 231.0),
    ("undistilled", "threshold", (("threshold", 0.5),)): (0.842, 10.4, None),
    ("undistilled", "threshold", (("threshold", 0.7),)): (0.921, 8.1, None),
    ("undistilled", "threshold", (("threshold", 0.9),)): (0.968, 5.9, None),
    ("undistilled", "threshold", (("threshold", 0.95),)): (0.975, 4.8, None),
    ("undistilled", "verify", ()): (0.992, 6.1, None),
}
PIECES = '{" name ": " Anna  Lee ", " ser vice ": " brake  pads ", " make ": " Vol vo ", " year ": 2 0 1 4 , " day ": " Tues day "} <|im_end|>'.split(
    " "
)


@dataclass
class Item:
    """What a task's `load` returns."""

    id: str
    messages: list[dict]
    reference: object


def answers(key: tuple, num: int, seed: int = 0, token: str | None = None) -> Answers:
    """Return `num` answers of a profile; right ones are the same tokens in every system."""
    share, tpf, _ = PROFILE[key]
    rng = random.Random(f"{key if key[1] != 'verify' else ('student', 'ar', ())} {seed}")
    out = Answers()
    for i in range(num):
        right = random.Random(f"{seed} {i}").random() < share
        ids = list(range(len(PIECES))) if right else [*range(len(PIECES) - 2), 3, len(PIECES) - 1]
        forwards = max(1, round(len(ids) / tpf + rng.uniform(-0.6, 0.6)))
        forwards = len(ids) if key[1] == "ar" else forwards
        steps = sorted(min(forwards - 1, int(t * forwards / len(ids))) for t in range(len(ids)))
        if key[1] == "threshold":
            middle = steps[1:-1]
            rng.shuffle(middle)
            steps = [steps[0], *middle, steps[-1]]
        out.ids.append(ids)
        out.finish_reason.append("stop")
        out.nfe.append(forwards)
        out.steps.append(steps)
        out.confidence.append([0.97] * len(ids))
        out.positions.append(len(ids) if key[1] == "ar" else forwards * 32)
        out.texts.append(token or "".join(PIECES[t] for t in ids[:-1]))
        out.scores.append(float(right))
    return out


def measured(
    num: int = 400, timed: int = 40, name: str = "booking", message: str | None = None, cells=None
) -> tuple[Task, list[Cell]]:
    """Return one task with answers and timings of every profile, and its cells."""
    message = message or "Hi, this is Anna Lee. The brakes on my 2014 Volvo squeal, could you look at them on Tuesday?"
    reference = {"name": "Anna Lee", "service": "brake pads", "make": "Volvo", "year": 2014, "day": "Tuesday"}
    items = [Item(str(i), [{"role": "user", "content": message}], reference) for i in range(num)]
    wanted = [
        (Cell(system, sampler, dict(settings)), (system, sampler, settings)) for system, sampler, settings in PROFILE
    ]
    wanted = [(cell, key) for cell, key in wanted if cells is None or cells(cell)]
    task = Task(name, 1, items, "0123456789abcdef", None, {cell.key: answers(key, num) for cell, key in wanted})
    timings = {}
    for cell, key in wanted:
        if PROFILE[key][2]:
            rng = random.Random(cell.key)
            counts = task.answers[cell.key].tokens[:timed]
            took = [n / PROFILE[key][2] * rng.uniform(0.9, 1.1) for n in counts]
            timings[cell.key] = [Timing(n, s, s / 4) for n, s in zip(counts, took)]
    ways = [
        {"system": "teacher", "implementation": "transformers generate, prefix cached", "tokens_per_s": 41.0},
        {"system": "teacher", "implementation": "plain loop, prefix cached", "tokens_per_s": 61.0},
        {"system": "student", "implementation": "transformers generate", "tokens_per_s": 42.0},
        {"system": "student", "implementation": "plain loop", "tokens_per_s": 63.0},
    ]
    names = {k: "plain loop" if " ar " in k else "our decoder" for k in timings}
    ar = [k for k in timings if " ar " in k]
    baseline = max(ar, key=lambda k: sum(t.tokens for t in timings[k]) / sum(t.seconds for t in timings[k]))
    task.speed = Speed(list(range(timed)), timings, names, baseline, ways, 4)
    return task, [cell for cell, _ in wanted]


def results(num: int = 400, teacher: str = RECIPE["teacher"]["model"], **kwargs) -> tuple[dict, dict, Task, list[Cell]]:
    """Return (results.json, effort.json, task, cells)."""
    task, cells = measured(num, **kwargs)
    facts = {"student": FACTS, "undistilled": FACTS}
    found, levels = assemble([task], cells, facts, teacher, SETTINGS, ["teacher", "undistilled"], 1)
    return found, levels, task, cells


def write_eval(folder: Path, pieces: list[str] = PIECES, **kwargs) -> dict:
    """Write results.json, effort.json and samples.parquet into `folder`; return the results."""
    found, levels, task, cells = results(**kwargs)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(found))
    (folder / "effort.json").write_text(json.dumps(levels))
    with pq.ParquetWriter(folder / "samples.parquet", SCHEMA) as writer:
        for cell in cells:
            columns = run._columns(task, cell, task.answers[cell.key], dict(enumerate(pieces)))
            writer.write_table(pa.table(columns, schema=SCHEMA))
    return found


def write_training(runs: Path) -> dict[str, dict]:
    """Write metrics.jsonl of two trained stages under `runs`; return manifests that name them."""
    manifests = {"targets": {"hash": "aaaa0000", "commit": "0" * 40, "seconds": 812.0, "seed": 0}}
    for stage, start, digest in (("adapt", 6.1, "bbbb1111"), ("distill", 0.62, "cccc2222")):
        manifests[stage] = {"hash": digest, "commit": "0" * 40, "seconds": 95.0, "seed": 0}
        place = runs / f"{stage}-{digest}"
        place.mkdir(parents=True, exist_ok=True)
        lines = [{"step": s, "loss": start * 0.97 ** (s / 4)} for s in range(10, 360, 10)]
        lines += [
            {
                "step": s,
                "held_out_ce": start * 0.975 ** (s / 4) + 0.02,
                "held_out_ar": start * 0.6 * 0.97 ** (s / 4) + 0.01,
            }
            for s in range(0, 360, 50)
        ]
        (place / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    manifests["eval"] = {"hash": "dddd3333", "commit": "0" * 40, "seconds": 240.0, "seed": 0}
    return manifests
