"""From measured answers and timings to results.json and effort.json; nothing is measured here."""

import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fewstep import machine
from fewstep.eval import effort, rows, verdict
from fewstep.eval.quality import Answers
from fewstep.eval.samples import settings_key
from fewstep.eval.speed import Timing

UNDISTILLED_SPEED = "the undistilled student runs the student's own loop: at one setting its speed follows its TPF"


@dataclass(frozen=True)
class Cell:
    """One system under one sampler and setting."""

    system: str
    sampler: str
    settings: dict

    @property
    def key(self) -> str:
        """Name the cell, uniquely among a task's."""
        return f"{self.system} {self.sampler} {settings_key(self.settings)}"


@dataclass
class Task:
    """A task's prompts and everything measured on them."""

    name: str
    version: int
    items: Sequence[Any]  # id, messages, reference
    prompt_hash: str
    score: Any  # (text, reference) -> float
    answers: dict[str, Answers]  # Cell.key → answers
    speed: "Speed | None" = None
    repairs: dict[str, dict] = field(default_factory=dict)  # Cell.key → what `eval.repair` measured


@dataclass
class Speed:
    """Batch-1 timings of a task's speed prompts, by Cell.key."""

    prompts: list[int]  # places among the task's items
    timings: dict[str, list[Timing]]
    implementations: dict[str, str]
    baseline: str  # Cell.key of the faster AR baseline
    ways: list[dict]  # every way to run AR decoding that was tried: system, implementation, tokens_per_s
    pilot_prompts: int

    def to_dict(self) -> dict:
        """Return the JSON-able content."""
        return {**vars(self), "timings": {k: [t.to_dict() for t in v] for k, v in self.timings.items()}}

    @staticmethod
    def from_dict(content: dict) -> "Speed":
        """Return what `to_dict` wrote."""
        return Speed(**{**content, "timings": {k: [Timing(**t) for t in v] for k, v in content["timings"].items()}})


NOT_ASKED = "not among eval.baselines"


def assemble(
    tasks: Sequence[Task],
    cells: Sequence[Cell],
    facts: Mapping[str, dict],
    teacher: str,
    settings: dict,
    baselines: Sequence[str],
    version: int,
    no_teacher: str = NOT_ASKED,
) -> tuple[dict, dict]:
    """Return (results.json, effort.json) of measured tasks; nothing is measured here.

    Args:
        facts: system → its config.json's `fewstep` section.
        teacher: as the recipe names it.
        version: of the evaluation's code.
        no_teacher: why the teacher was not measured, where it was not.
        settings: of the evaluation, as recorded in results.json; `seed` and `max_loss` are used.
    """
    seed, found = settings["seed"], []
    for task in tasks:
        answers = task.answers
        for cell in cells:
            own = answers.get(Cell(cell.system, "ar", {}).key) if cell.system != "teacher" else None
            few_step = cell.system == "student" and cell.sampler != "ar"
            found.append(
                rows.build(
                    task=task.name,
                    task_version=task.version,
                    system=cell.system,
                    sampler=cell.sampler,
                    settings=cell.settings,
                    answers=answers[cell.key],
                    seed=seed,
                    teacher=answers.get(Cell("teacher", "ar", {}).key),
                    no_teacher=no_teacher,
                    own=own,
                    undistilled=answers.get(Cell("undistilled", cell.sampler, cell.settings).key) if few_step else None,
                    timed=_timed(task.speed, cell.key),
                    untimed_reason=UNDISTILLED_SPEED if cell.system == "undistilled" else "not timed",
                    mask_token_id=facts.get(cell.system, {}).get("mask_token_id"),
                    repair=task.repairs.get(cell.key),
                )
            )
    rows.fill_aup(found)
    candidates = [
        effort.Candidate(c.sampler, c.settings, {t.name: t.answers[c.key] for t in tasks})
        for c in cells
        if c.system == "student" and c.sampler != "ar"
    ]
    reference = {t.name: t.answers[Cell("teacher", "ar", {}).key] for t in tasks} if "teacher" in baselines else None
    levels = effort.calibrate(candidates, reference, settings["max_loss"], seed)
    results = {
        "schema": 1,
        "version": version,
        "hardware": machine.hardware(),
        "versions": machine.versions(),
        "commit": machine.commit(),
        "teacher": {"model": teacher},
        "students": dict(facts),
        "settings": settings,
        "tasks": [
            {"name": t.name, "version": t.version, "n": len(t.items), "prompt_hash": t.prompt_hash} for t in tasks
        ],
        "verdicts": verdict.headline(found, levels["levels"]),
        "rows": found,
        "speed": {t.name: _speed_facts(t.speed) for t in tasks if t.speed},
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "not_measured": _left_out(facts, baselines, no_teacher),
    }
    return results, levels


def _left_out(facts: Mapping[str, dict], baselines: Sequence[str], no_teacher: str) -> list[dict]:
    out = [
        ("AR model tuned on the same generated tokens", "no such model was trained in this run"),
        ("Teacher with assisted generation (prompt lookup)", "not among the systems of this evaluation"),
        (
            "Speed at larger batches",
            "speed was measured at batch 1 only, so where AR decoding wins in batches is not known",
        ),
        ("Spread between training runs", "one training seed"),
    ]
    if "teacher" not in baselines:
        out.append(("The teacher", no_teacher))
    if "undistilled" not in facts:
        out.append(("Undistilled student", "the recipe has no distill stage, so the student is the undistilled one"))
    elif "undistilled" not in baselines:
        out.append(("Undistilled student", NOT_ASKED))
    return [{"what": what, "why": why} for what, why in out]


def _timed(found: Speed | None, key: str) -> rows.Timed | None:
    if found is None or key not in found.timings:
        return None
    return rows.Timed(
        found.timings[key], found.timings[found.baseline], found.implementations[key], key == found.baseline
    )


def _speed_facts(found: Speed) -> dict:
    system = found.baseline.split(" ", 1)[0]
    baseline = {"system": system, "implementation": found.implementations[found.baseline]}
    return {"n": len(found.prompts), "pilot_prompts": found.pilot_prompts, "ways": found.ways, "baseline": baseline}
