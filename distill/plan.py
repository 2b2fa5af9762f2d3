"""`fewstep plan`: what would run, and what it would need; nothing is written and no weights are read."""

import shutil
from pathlib import Path

from fewstep.distill import fit
from fewstep.distill.chain import TRAINED, chain
from fewstep.distill.checks import check
from fewstep.distill.estimate import estimate, machine_for, seconds, trainable
from fewstep.distill.recipe import Recipe
from fewstep.runstore import StageFolder
from fewstep.teachers.load import describe
from fewstep.teachers.preview import prompt_text
from fewstep.teachers.prompts import Prompt, read_prompts, teacher_messages

LONGEST = 1200  # characters of a prompt that are shown


def plan(recipe: Recipe, runs: Path) -> dict:
    """Return the plan as JSON-able facts.

    Raises:
        UserError: whatever `fewstep run` would refuse before it starts.
    """
    stages = chain(recipe)
    states = {name: _state(runs / stage.folder) for name, stage in stages.items()}
    check(recipe, stages, runs, [name for name, state in states.items() if state != "complete"])
    facts = describe(*recipe.reference)
    machine = machine_for(recipe)
    needs = estimate(recipe, facts, machine.gpu)
    rows = []
    for name, stage in stages.items():
        need = needs[name]
        figures = {
            "tokens": need.tokens,
            "flops": need.flops,
            "memory_gb": round(need.memory / 1e9, 2),
            "memory_parts_gb": {part: round(size / 1e9, 3) for part, size in need.parts.items() if size},
            "disk_gb": round(need.disk / 1e9, 4),
            "seconds": round(seconds(need, facts, machine) / (recipe.plan.ranks if name in TRAINED else 1)),
        }
        rows.append({"stage": name, "hash": stage.hash, "folder": stage.folder, "state": states[name], **figures})
    left = [row for row in rows if row["state"] != "complete"]
    hours = sum(row["seconds"] * (recipe.plan.ranks if row["stage"] in TRAINED else 1) for row in left) / 3600
    price = recipe.plan.price_per_hour
    prompts = read_prompts(recipe.prompts)
    free = runs.resolve()
    while not free.exists():
        free = free.parent
    return {
        "recipe": recipe.name,
        "runs": str(runs),
        "teacher": {
            "model": recipe.teacher.model,
            **(dict.fromkeys(facts) | {"kind": "endpoint"} if recipe.teacher.is_endpoint else facts),
        },
        "student": {"model": recipe.reference[0], **facts},
        "trainable": {s: trainable(c, facts, facts["num_parameters"] or 0) for s, c in recipe.training().items()},
        "prompts": len(prompts),
        "first_prompt": _first_prompt(recipe, prompts[0]),
        "not_planned": _not_planned(recipe),
        "stages": rows,
        "total": {
            "stages": len(left),
            "flops": sum(row["flops"] for row in left),
            "peak_memory_gb": max((row["memory_gb"] for row in left), default=0.0),
            "disk_gb": round(sum(row["disk_gb"] for row in left), 4),
            "seconds": sum(row["seconds"] for row in left),
            "device_hours": round(hours, 3),
            "cost": None if price is None else round(price * hours, 2),
        },
        "machine": {
            "name": machine.name,
            "ranks": recipe.plan.ranks,
            "assumption": machine.assumption,
            "memory_gb": None if machine.memory is None else round(machine.memory / 1e9, 1),
            "disk_free_gb": round(shutil.disk_usage(free).free / 1e9, 1),
        },
        "refused": _refusal(recipe, needs, facts, machine, {row["stage"] for row in left}),
    }


def _refusal(recipe: Recipe, needs: dict, facts: dict, machine, left: set[str]) -> str | None:
    """Return why the training that is left cannot fit, and the smallest change with which it would."""
    stage = fit.too_large(recipe, needs, machine, left)
    if stage is None:
        return None
    parts = sorted(needs[stage].parts.items(), key=lambda part: -part[1])[:2]
    most = ", ".join(f"{_gigabytes(size / 1e9)} of {part}" for part, size in parts)
    change = fit.smallest_change(recipe, stage, facts, machine)
    fix = (
        "none of accumulation, recomputing, ZeRO, offloading, more ranks and adapters is enough"
        if change is None
        else f"the smallest change: {fit.as_overrides(change)}"
    )
    return (
        f"{stage} needs {_gigabytes(needs[stage].memory / 1e9)} a rank ({most}), {machine.name} has "
        f"{_gigabytes((machine.memory or 0) / 1e9)}; {fix}"
    )


def _state(folder: Path) -> str:
    if StageFolder(folder).is_complete():
        return "complete"
    return "would resume" if folder.is_dir() and any(folder.iterdir()) else "would run"


def _not_planned(recipe: Recipe) -> dict[str, str]:
    """Return the stages that the recipe leaves out, each with the reason."""
    out = {} if recipe.distill is not None else {"distill": "distill is null"}
    return out if recipe.publish.repo is not None else {**out, "publish": "publish.repo is null"}


def _first_prompt(recipe: Recipe, prompt: Prompt) -> dict[str, str | None]:
    """Return the first prompt as the teacher and as the student will see it, special tokens and all."""
    told = {"teacher": teacher_messages([prompt.messages], recipe.targets)[0], "student": prompt.messages}
    return {who: prompt_text(*recipe.reference, messages, prompt.tools) for who, messages in told.items()}


def as_text(facts: dict) -> str:
    """Return the plan as a table for people."""
    teacher, total, machine = facts["student"], facts["total"], facts["machine"]
    served = f"{facts['teacher']['model']} (a server) teaches " if facts["teacher"].get("kind") == "endpoint" else ""
    lines = [
        f"{facts['recipe']}: {served}{teacher['model']} ({teacher['model_type']}, {_count(teacher['num_parameters'])} parameters, "
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
        f"({total['device_hours']} device hours{_cost(total['cost'])}), {_gigabytes(total['peak_memory_gb'])} of memory at the peak, "
        f"{_gigabytes(total['disk_gb'])} of disk in {facts['runs']}",
        f"assumed: {machine['assumption']}{_ranks(machine['ranks'])}; full-length answers; "
        f"{'unknown' if machine['memory_gb'] is None else machine['memory_gb']} GB of memory a device "
        f"and {machine['disk_free_gb']} GB of free disk",
    ]
    for row in facts["stages"]:
        if row["stage"] in TRAINED:
            parts = ", ".join(f"{part} {_gigabytes(size)}" for part, size in row["memory_parts_gb"].items())
            lines.append(f"memory of {row['stage']}, a rank: {parts}")
    first = facts["first_prompt"]
    sees = ["teacher and student"] if first["teacher"] == first["student"] else ["teacher", "student"]
    for who in sees:
        text = first[who.split()[0]]
        lines += ["", f"the first prompt as the {who} will see it:" if text else f"the first prompt of the {who}: not shown, the teacher's files do not tell its template or its special tokens"]  # fmt: skip
        lines += [_indented(text)] if text else []
    return "\n".join(lines)


def _indented(text: str) -> str:
    """Return a text for the terminal: every line set in, the middle of a long one left out, no control characters."""
    if len(text) > LONGEST:
        text = f"{text[: LONGEST // 2]} […] {text[-LONGEST // 2 :]}"
    lines = ("".join(c if c.isprintable() else repr(c)[1:-1] for c in line) for line in text.split("\n"))
    return "\n".join(f"    {line}" for line in lines)


def _cost(cost: float | None) -> str:
    return "" if cost is None else f", {cost:,.2f} by plan.price_per_hour"


def _ranks(ranks: int) -> str:
    return "" if ranks == 1 else f", {ranks} of them for training"


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
