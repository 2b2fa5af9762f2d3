"""Measure a student against its teacher on every task: quality in batches, speed one prompt at a time.

Every finished cell (task, system, sampler, setting) lies in partial/ until the whole is written, so a
killed evaluation goes on with the cell it was in. Timings are the exception: they compare systems in
one process, so a task's speed is measured in one go or again.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fewstep import chat, runstore, signals
from fewstep.errors import UserError
from fewstep.eval import quality, repair, speed, stats, tasks_by_name, verdict
from fewstep.eval.assemble import NOT_ASKED, Cell, Speed, Task, assemble
from fewstep.eval.config import EVAL_VERSION, EvalConfig
from fewstep.eval.quality import Answers
from fewstep.eval.samples import SCHEMA, settings_key
from fewstep.eval.speed import Contestant
from fewstep.eval.systems import Models
from fewstep.progress import progress
from fewstep.students.decoding import decode
from fewstep.students.decoding.decode import check_settings
from fewstep.teachers.batch import prefill_prefix, shared_prefix
from fewstep.teachers.config import TargetsConfig, TeacherConfig
from fewstep.teachers.generate import generate

REPAIRED = 200  # answers that errors are put into
STOPPED = "finished rows are in partial/; the same command goes on from there"


def run(
    folder: Path,
    config: EvalConfig,
    teacher: TeacherConfig,
    targets_folder: Path,
    targets: TargetsConfig,
    students: Mapping[str, Path],
    seed: int,
) -> dict:
    """Write samples.parquet, results.json and effort.json into `folder`.

    Args:
        folder: the stage's folder, which exists; partial/ in it holds what an earlier run finished.
        teacher, targets_folder: how to load the teacher (`teachers.load.load_for_stage`).
        targets: how the teacher answers: its few-shot turns and system prompt, the length of answers.
        students: "student" → its folder, and "undistilled" → that of the student before distillation.
        seed: of training, recorded in each row; it also seeds the bootstrap.

    Returns:
        Summary: rows, verdicts, seconds.

    Raises:
        UserError: an unknown task, no tasks, or a prompt longer than a context.
        Stopped: a signal came; the finished cells are kept.
    """
    if not config.tasks:
        raise UserError("eval.tasks is empty; name at least one task, such as {name: booking, path: eval.jsonl}")
    started = time.monotonic()
    partial = folder / "partial"
    partial.mkdir(exist_ok=True)
    limit = config.max_new_tokens or targets.max_new_tokens
    no_teacher = NOT_ASKED
    if teacher.is_endpoint and "teacher" in config.baselines:
        no_teacher = "it is behind a server: without its weights it cannot be compared on this machine"
        config = config.model_copy(update={"baselines": [b for b in config.baselines if b != "teacher"]})
    models = Models(teacher, targets_folder, targets, students)
    facts = {name: _student_facts(path) for name, path in students.items()}
    cells = plan(config, facts)
    measured = []
    for entry in config.tasks:
        module = tasks_by_name.find(entry.name)
        items = module.load(entry.path, entry.field, entry.limit)
        task = Task(entry.name, module.VERSION, items, module.prompt_hash(items), module.score, {})
        for cell in cells:
            name = _digest(EVAL_VERSION, task.name, task.prompt_hash, limit, cell.key)
            task.answers[cell.key] = _kept(
                partial / f"{cell.system}-{cell.sampler}-{name}.json",
                lambda cell=cell, task=task: _answer(task, cell, models, limit, config.batch_size).to_dict(),
                lambda content: Answers(**content),
            )
            if cell.system == "student" and cell.sampler == "edit":
                found = _kept(
                    partial / f"repair-{name}.json",
                    lambda cell=cell, task=task: _repair(task, cell, models, seed),
                    lambda content: content,
                )
                if found:
                    task.repairs[cell.key] = found
        models.drop("undistilled")
        count = min(config.speed_prompts, len(items))
        name = _digest(EVAL_VERSION, task.name, task.prompt_hash, limit, count)
        task.speed = _kept(
            partial / f"speed-{name}.json",
            lambda task=task, count=count: _time(task, cells, models, limit, count).to_dict(),
            Speed.from_dict,
        )
        measured.append(task)
    settings = {
        "seed": seed,
        "max_new_tokens": limit,
        "batch_size": config.batch_size,
        "speed_prompts": config.speed_prompts,
        "max_loss": config.max_loss,
        "bootstrap": {"draws": stats.DRAWS, "level": stats.LEVEL},
    }
    results, levels = assemble(
        measured, cells, facts, teacher.shown, settings, config.baselines, EVAL_VERSION, no_teacher
    )
    _write_samples(folder / "samples.parquet", measured, cells, models)
    runstore.write_atomic(folder / "effort.json", _json(levels))
    runstore.write_atomic(folder / "results.json", _json(results))
    shutil.rmtree(partial)
    return {
        "rows": len(results["rows"]),
        "verdicts": [v["text"] for v in results["verdicts"]],
        "seconds": round(time.monotonic() - started, 1),
    }


def plan(config: EvalConfig, facts: Mapping[str, dict]) -> list[Cell]:
    """Return the cells to measure, in order: the teacher, the student's own AR decoding, then each setting."""
    cells = [Cell("teacher", "ar", {})] if "teacher" in config.baselines else []
    for system in ("student", "undistilled"):
        if system not in facts or (system == "undistilled" and system not in config.baselines):
            continue
        causal = facts[system].get("attention") != "bidirectional"
        if system == "student" and causal:
            cells.append(Cell("student", "ar", {}))
        for sampler in config.samplers:
            if causal or sampler.name != "verify":
                cells += [Cell(system, sampler.name, settings) for settings in sampler.settings()]
    return list({cell.key: cell for cell in cells}.values())


def _answer(task: Task, cell: Cell, models: Models, limit: int, batch_size: int) -> Answers:
    """Decode a task's prompts with one cell, in batches, and score the answers."""
    prompts = models.prompts(cell.system, task.items)
    model, tokenizer = models.get(cell.system)
    eos = chat.eos_ids(model, tokenizer)
    references = [item.reference for item in task.items]
    label = f"{task.name}: {cell.system} {verdict.setting_name(cell.sampler, cell.settings)}"

    if cell.system == "teacher":
        prefix = prefill_prefix(model, shared_prefix(prompts))

        def answer(batch: list[int]) -> list:
            chosen = [prompts[i] for i in batch]
            return generate(model, chosen, max_new_tokens=limit, eos_ids=eos, prefix=prefix, batch_size=len(batch))

        finish = quality.from_teacher
    else:

        def answer(batch: list[int]) -> list:
            chosen = [prompts[i] for i in batch]
            return decode(model, chosen, sampler=cell.sampler, max_new_tokens=limit, eos_token_ids=eos, **cell.settings)

        finish = quality.from_decoded

    with progress(label, len(prompts), "prompts") as shown:

        def after_batch(count: int, results: list) -> None:
            shown.advance(count, f"{sum(len(r.ids) for r in results) / count:.0f} tokens an answer")
            signals.raise_if_stopped(STOPPED)

        done = quality.decode_in_batches(len(prompts), [len(p) for p in prompts], batch_size, answer, after_batch)
    return finish(done, tokenizer, references, task.score)


def _repair(task: Task, cell: Cell, models: Models, seed: int) -> dict | None:
    """Put errors into the student's own right AR answers and see what `edit` makes of them; None without such answers."""
    own = task.answers.get(Cell("student", "ar", {}).key)
    right = [i for i, score in enumerate(own.scores) if score == 1 and own.ids[i]][:REPAIRED] if own else []
    if not right:
        return None
    model, _ = models.get("student")
    prompts = models.prompts("student", task.items)
    block_size = cell.settings.get("block_size") or model.config.fewstep["block_size"]
    rewrite = check_settings("edit", {k: v for k, v in cell.settings.items() if k != "block_size"})["rewrite"]
    return repair.measure(
        model, [prompts[i] for i in right], [own.ids[i] for i in right], block_size, rewrite, seed
    )  # fmt: skip


def _time(task: Task, cells: Sequence[Cell], models: Models, limit: int, count: int) -> Speed:
    """Time every AR baseline and every student setting on `count` prompts spread over the task."""
    places = sorted({int(i) for i in np.linspace(0, len(task.items) - 1, count)})
    items = [task.items[i] for i in places]
    ar = [cell for cell in cells if cell.sampler == "ar"]
    contestants: list[Contestant] = []
    ways: list[dict] = []
    for cell in ar:
        prompts = models.prompts(cell.system, items)
        model, tokenizer = models.get(cell.system)
        eos = chat.eos_ids(model, tokenizer)
        # Only the teacher has turns of its own before every message; a student's prompt is all its own.
        prefix = shared_prefix(prompts) if cell.system == "teacher" else []
        tried = speed.ar_ways(cell.key, model, prompts, max_new_tokens=limit, eos=eos, prefix=prefix)
        best, rates = speed.fastest(tried, len(places))
        contestants.append(best)
        ways += [{"system": cell.system, "implementation": k, "tokens_per_s": v} for k, v in rates.items()]
    prompts = models.prompts("student", items)
    model, tokenizer = models.get("student")
    for cell in cells:
        if cell.system == "student" and cell.sampler != "ar":
            eos = chat.eos_ids(model, tokenizer)
            contestants.append(speed.own_loop(cell.key, model, prompts, cell.sampler, limit, eos, cell.settings))
    with progress(f"{task.name}: speed at batch 1", len(places), "prompts") as shown:
        timings = speed.time_alternating(contestants, len(places), after_prompt=lambda: shown.advance(1))
    baseline = max((cell.key for cell in ar), key=lambda k: speed.rate(timings[k]), default=None)
    if baseline is None:
        raise UserError(
            "eval.baselines is empty and the student has no AR stream: nothing to compare speed with; add teacher"
        )
    names = {c.key: c.implementation for c in contestants}
    return Speed(places, timings, names, baseline, ways, min(speed.PILOT, len(places)))


def _write_samples(path: Path, tasks: Sequence[Task], cells: Sequence[Cell], models: Models) -> None:
    """Write every answer, one row group a cell, so that the file is whole or absent."""
    _, tokenizer = models.get("student")
    strings: dict[int, str] = {}
    temporary = path.with_name(f"{runstore.TEMPORARY}{path.name}")
    with pq.ParquetWriter(temporary, SCHEMA, compression="zstd") as writer:
        for task in tasks:
            for cell in cells:
                found = task.answers[cell.key]
                for token in {t for ids in found.ids for t in ids if t not in strings}:
                    strings[token] = tokenizer.decode([token])
                writer.write_table(pa.table(_columns(task, cell, found, strings), schema=SCHEMA))
    temporary.replace(path)


def _columns(task: Task, cell: Cell, found: Answers, strings: Mapping[int, str]) -> dict:
    n = len(found.ids)
    return {
        "task": [task.name] * n,
        "prompt_index": list(range(n)),
        "prompt": [item.messages[-1]["content"] for item in task.items],
        "reference": [json.dumps(item.reference, ensure_ascii=False) for item in task.items],
        "system": [cell.system] * n,
        "sampler": [cell.sampler] * n,
        "settings": [settings_key(cell.settings)] * n,
        "text": found.texts,
        "ids": found.ids,
        "tokens": [[strings[t] for t in ids] for ids in found.ids],
        "steps": found.steps,
        "confidence": found.confidence,
        "score": found.scores,
        "nfe": found.nfe,
        "finish_reason": found.finish_reason,
    }


def _kept(path: Path, measure: Any, read: Any) -> Any:
    """Return what `path` keeps from an earlier run, else measure it and keep it."""
    if path.is_file():
        return read(json.loads(path.read_text()))
    content = measure()
    runstore.write_atomic(path, json.dumps(content, ensure_ascii=False, allow_nan=False))
    return read(content)


def _student_facts(path: Path) -> dict:
    return json.loads((Path(path) / "config.json").read_text()).get("fewstep") or {}


def _digest(*parts: Any) -> str:
    return hashlib.sha256(runstore.canonical_json(list(parts)).encode()).hexdigest()[:12]


def _json(content: dict) -> str:
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
