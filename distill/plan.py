"""`fewstep plan`: what would run, and what it would need; nothing is written and no weights are read."""

import os
import shutil
from pathlib import Path

from fewstep.distill.chain import chain
from fewstep.distill.checks import check
from fewstep.distill.estimate import estimate, seconds, this_machine, trainable
from fewstep.distill.recipe import Recipe
from fewstep.runstore import StageFolder
from fewstep.teachers.load import describe
from fewstep.teachers.prompts import read_prompts

FIGURES = ("tokens", "flops", "memory_gb", "disk_gb", "seconds")


def plan(recipe: Recipe, runs: Path) -> dict:
    """Return the plan as JSON-able facts.

    Raises:
        UserError: whatever `fewstep run` would refuse before it starts.
    """
    stages = chain(recipe)
    states = {name: _state(runs / stage.folder) for name, stage in stages.items()}
    check(recipe, stages, runs, [name for name, state in states.items() if state != "complete"])
    facts = describe(recipe.teacher.model, recipe.teacher.revision)
    machine = this_machine()
    needs = estimate(recipe, facts)
    rows = []
    for name, stage in stages.items():
        need = needs[name]
        figures = {
            "tokens": need.tokens,
            "flops": need.flops,
            "memory_gb": round(need.memory / 1e9, 2),
            "disk_gb": round(need.disk / 1e9, 4),
            "seconds": round(seconds(need, facts, machine)),
        }
        rows.append({"stage": name, "hash": stage.hash, "folder": stage.folder, "state": states[name], **figures})
    left = [row for row in rows if row["state"] != "complete"]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    free = runs.resolve()
    while not free.exists():
        free = free.parent
    return {
        "recipe": recipe.name,
        "runs": str(runs),
        "teacher": {"model": recipe.teacher.model, **facts},
        "trainable": {s: trainable(c, facts, facts["num_parameters"] or 0) for s, c in recipe.training().items()},
        "prompts": len(read_prompts(recipe.prompts)),
        "not_planned": _not_planned(recipe),
        "stages": rows,
        "total": {
            "stages": len(left),
            "flops": sum(row["flops"] for row in left),
            "peak_memory_gb": max((row["memory_gb"] for row in left), default=0.0),
            "disk_gb": round(sum(row["disk_gb"] for row in left), 4),
            "seconds": sum(row["seconds"] for row in left),
            "device_hours": round(sum(row["seconds"] for row in left) / 3600, 3),
        },
        "machine": {
            "assumption": machine.assumption,
            "memory_gb": round(memory, 1),
            "disk_free_gb": round(shutil.disk_usage(free).free / 1e9, 1),
        },
    }


def _state(folder: Path) -> str:
    if StageFolder(folder).is_complete():
        return "complete"
    return "would resume" if folder.is_dir() and any(folder.iterdir()) else "would run"


def _not_planned(recipe: Recipe) -> dict[str, str]:
    """Return the stages that the recipe leaves out, each with the reason."""
    out = {} if recipe.distill is not None else {"distill": "distill is null"}
    return out if recipe.publish.repo is not None else {**out, "publish": "publish.repo is null"}


def as_text(facts: dict) -> str:
    """Return the plan as a table for people."""
    teacher, total, machine = facts["teacher"], facts["total"], facts["machine"]
    lines = [
        f"{facts['recipe']}: {teacher['model']} ({teacher['model_type']}, {_count(teacher['num_parameters'])} parameters, "
        f"context {teacher['context_length']}), {facts['prompts']} prompts",
        "",
        f"{'stage':<8} {'folder':<17} {'state':<13} {'tokens':>8} {'FLOPs':>8} {'memory':>9} {'disk':>9} {'time':>8}",
    ]
    for row in facts["stages"]:
        lines.append(
            f"{row['stage']:<8} {row['folder']:<17} {row['state']:<13} {_count(row['tokens']):>8} {_flops(row['flops']):>8} "
            f"{_gigabytes(row['memory_gb']):>9} {_gigabytes(row['disk_gb']):>9} {_time(row['seconds']):>8}"
        )
    lines += [f"{stage:<8} {'-':<17} left out: {reason}" for stage, reason in facts["not_planned"].items()]
    for stage, number in facts["trainable"].items():
        if number != teacher["num_parameters"]:
            lines.append(f"{stage} trains {_count(number)} of the parameters (LoRA)")
    lines += [
        "",
        f"left to run: {total['stages']} stages, {_flops(total['flops'])} FLOPs, about {_time(total['seconds'])} "
        f"({total['device_hours']} device hours), {_gigabytes(total['peak_memory_gb'])} of memory at the peak, "
        f"{_gigabytes(total['disk_gb'])} of disk in {facts['runs']}",
        f"assumed: {machine['assumption']}; full-length answers; here are {machine['memory_gb']} GB of memory "
        f"and {machine['disk_free_gb']} GB of free disk",
    ]
    if total["peak_memory_gb"] > machine["memory_gb"]:
        lines.append(
            "the estimate exceeds this machine's memory: lower batch_tokens, raise gradient_accumulation_steps or use lora"
        )
    return "\n".join(lines)


def _count(number: float | None) -> str:
    if number is None:
        return "?"
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{suffix}"
    return f"{number:.0f}"


def _flops(number: float) -> str:
    return f"{number:.1e}" if number else "-"


def _gigabytes(number: float) -> str:
    return f"{number:.1f} GB" if number >= 1 else f"{number * 1000:.0f} MB"


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
