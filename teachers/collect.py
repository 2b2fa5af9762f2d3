"""Stage `targets`: the teacher answers the prompts; answers worth learning from become Parquet shards.

Each shard stands on its own (`shards/NNNNN.parquet`, with what was dropped and scored beside it in
`NNNNN.json`), so a run that was stopped goes on with the first shard that is missing.
"""

import gc
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fewstep import checkers, machine, signals
from fewstep.chat import encode_prompt
from fewstep.errors import RunFailed, UserError
from fewstep.progress import progress
from fewstep.records import write_shard
from fewstep.runstore import TEMPORARY, require_disk, write_atomic
from fewstep.teachers import audit
from fewstep.teachers.asking import Asked, Asking, Work, answering
from fewstep.teachers.batch import shared_prefix
from fewstep.teachers.config import PromptsConfig, TargetsConfig, TeacherConfig
from fewstep.teachers.filters import check_references, drop_reason, make_filter
from fewstep.teachers.generation import Generation
from fewstep.teachers.load import SAVED, describe, kind_of, licence, load_for_stage, load_tokenizer
from fewstep.teachers.prompts import (
    Prompt,
    contaminated,
    read_prompts,
    sample_id,
    split,
    teacher_prompts,
)


def run(
    folder: Path,
    teacher: TeacherConfig,
    prompts: PromptsConfig,
    targets: TargetsConfig,
    seed: int,
    avoid: list[Prompt] | None = None,
    base: str | None = None,
) -> dict:
    """Write the targets of one recipe into `folder`, or those that are missing there.

    Args:
        folder: the stage's own folder, which exists and is locked.
        seed: of the noise, when answers are drawn.
        avoid: prompts of evaluation, for `prompts.decontaminate`.
        base: the checkpoint that the student starts from; of a teacher behind a server its tokenizer is that of the targets.

    Under a launcher each rank writes every `world size`th shard, and the first one waits for all and adds them up.

    Returns:
        The summary for the manifest: counts, drops by reason, the teacher's score, tokens, mean length; of other
        ranks than the first nothing.

    Raises:
        UserError: the prompts, the filter or the teacher are not usable; nothing was generated.
        RunFailed: the teacher fails its own task, or every answer was dropped.
        Stopped: a signal came; finished shards stay.
    """
    folder = Path(folder)
    rank, world_size = machine.rank(), machine.world_size()
    if teacher.device_map is not None and world_size > 1:
        raise UserError(
            f"teacher.device_map {teacher.device_map}: each of {world_size} processes would spread a teacher over all GPUs; run "
            "`fewstep targets` in one process first, or remove it"
        )
    if rank == 0:
        for stale in folder.glob(f"{TEMPORARY}*-{SAVED}"):
            shutil.rmtree(stale)
        (folder / "shards").mkdir(exist_ok=True)
    saved = folder / SAVED
    reference = (str(base), None) if teacher.is_endpoint else (teacher.model, teacher.revision)
    info = describe(*reference)
    tokenizer = load_tokenizer(str(saved)) if saved.is_dir() else load_tokenizer(*reference)
    work = prepare(tokenizer, info, prompts, targets, avoid)

    starts = range(0, len(work.prompts), targets.shard_size)
    missing = [i for i in range(len(starts)) if not _is_there(folder, i)]
    converts = kind_of(teacher.model) == "gguf" and not saved.is_dir()
    if rank == 0:
        _require_disk(folder, info, targets, len(missing) * targets.shard_size * targets.samples, converts)
    elif converts:  # the first rank does it; all use what it saved
        _wait(lambda: saved.is_dir())
        converts = False
    missing = [i for i in missing if i % world_size == rank]
    if converts:
        _save_plain(folder, *load_for_stage(teacher, folder))
        gc.collect()
        torch.cuda.empty_cache()  # what the dequantised model held; nothing where there is no GPU
    if missing:
        if saved.is_dir():  # from now on what a resumed run would use
            tokenizer, reference = load_tokenizer(str(saved)), (str(saved), None)
        with answering(folder, teacher, work, targets, seed, tokenizer, reference) as asking:
            _collect(folder, asking, tokenizer, work, teacher.model, prompts, targets, missing)
    if rank > 0:
        return {}
    _wait(lambda: all(_is_there(folder, i) for i in range(len(starts))))
    summary = _finish(folder, work, teacher.model, prompts, targets, len(starts))
    summary["licence"] = licence(teacher).facts()
    if teacher.is_endpoint:
        summary["served"] = json.loads((folder / "served.json").read_text())["model"]
    summary["prompts_from"] = Path(prompts.place).name if prompts.path else prompts.place
    write_atomic(folder / "targets.html", audit.page_of(folder, summary.get("served", teacher.shown), summary))
    return summary


def prepare(
    tokenizer: Any, info: dict, prompts: PromptsConfig, targets: TargetsConfig, avoid: list[Prompt] | None = None
) -> Work:
    """Read and encode the prompts and check every rule that needs no model.

    Args:
        tokenizer: the teacher's.
        info: what `load.describe` says of the teacher.
        avoid: prompts of evaluation, for `prompts.decontaminate`.

    Raises:
        UserError: a broken file, a rule that cannot be applied, or a prompt that does not fit into the context.
    """
    rules = make_filter(prompts, targets)
    rows = read_prompts(prompts)
    shared = contaminated(rows, avoid, prompts.decontaminate.words) if prompts.decontaminate and avoid else {}
    rows = [row for row in rows if row.id not in shared]
    if not rows:
        raise UserError(
            f"prompts.decontaminate: all {len(shared)} prompts of {prompts.place} share {prompts.decontaminate.words} words "  # type: ignore[union-attr]
            "with evaluation; give others, or raise words"
        )
    check_references(prompts.checker, rows, prompts.place)
    tools = [row.tools for row in rows]
    student_ids = [encode_prompt(tokenizer, row.messages, row.tools) for row in rows]
    teacher_ids = teacher_prompts(tokenizer, [row.messages for row in rows], targets, tools)
    limit = info["context_length"]
    if limit is not None:
        long = [i for i, ids in enumerate(teacher_ids) if len(ids) + targets.max_new_tokens > limit]
        if long:
            first = long[0]
            more = f" (and {len(long) - 1} more)" if len(long) > 1 else ""
            raise UserError(
                f"{prompts.place}, line {rows[first].line}: its prompt has {len(teacher_ids[first])} tokens{more}; with "
                f"targets.max_new_tokens {targets.max_new_tokens} the teacher's context of {limit} is exceeded; shorten one of them"
            )
    return Work(rows, student_ids, teacher_ids, rules, shared)


def _collect(
    folder: Path,
    asking: Asking,
    tokenizer: Any,
    work: Work,
    name: str,
    prompts: PromptsConfig,
    targets: TargetsConfig,
    missing: list[int],
) -> None:
    shards = {i: range(i * targets.shard_size, min((i + 1) * targets.shard_size, len(work.prompts))) for i in missing}
    with progress(
        "targets", sum(map(len, shards.values())) * targets.samples, "answers" if targets.samples > 1 else "prompts"
    ) as bar:
        start, tokens, first_attempt = time.monotonic(), 0, True

        def on_answers(num_answers: int, num_tokens: int) -> None:
            nonlocal tokens
            tokens += num_tokens
            bar.advance(
                num_answers if first_attempt else 0,
                note=f"{tokens / max(time.monotonic() - start, 1e-9):,.1f} tokens/s",
            )
            signals.raise_if_stopped(f"targets stopped; finished shards are kept in {folder}")

        def ask(wanted: list[Asked]) -> list[Generation]:
            nonlocal first_attempt
            first_attempt = wanted[0].attempt == 0
            return asking(wanted, on_answers)

        for i, rows in shards.items():
            judged = _judged(ask, tokenizer, work, rows, prompts, targets)
            _write(folder, i, work, rows, judged, prompts)
            _stop_hopeless(folder, i, name, prompts, targets)


@dataclass
class Judged:
    """An answer, its text and score, and why it is dropped, if it is; `tokens` were written for it in all."""

    asked: Asked
    answer: Generation
    text: str
    score: float | None
    reason: str | None
    tokens: int


def _judged(ask: Any, tokenizer: Any, work: Work, rows: range, prompts: PromptsConfig, targets: TargetsConfig) -> list[Judged]:  # fmt: skip
    """Return an answer for each prompt and sample of a shard; one that is dropped is asked for again, as long as it may be."""
    found: dict[tuple[int, int], Judged] = {}
    wanted = [Asked(row, sample, 0) for row in rows for sample in range(targets.samples)]
    for attempt in range(targets.attempts):
        for asked, answer in zip(wanted, ask(wanted)):
            prompt = work.prompts[asked.row]
            text = tokenizer.decode(answer.ids, skip_special_tokens=True)
            score = None if prompts.checker is None else checkers.score(prompts.checker, text, prompt.reference)
            reason = drop_reason(work.rules, text, answer.finish_reason, score)
            before = found.get((asked.row, asked.sample))
            found[asked.row, asked.sample] = Judged(
                asked, answer, text, before.score if before else score, reason, len(answer.ids) + (before.tokens if before else 0)
            )  # fmt: skip
        wanted = [Asked(j.asked.row, j.asked.sample, attempt + 1) for j in found.values() if j.reason is not None]
        if not wanted:
            break
    said: set[tuple[int, str]] = set()
    for judged in found.values():
        if judged.reason is None and (judged.asked.row, judged.text) in said:
            judged.reason = "repeated"
        if judged.reason is None:
            said.add((judged.asked.row, judged.text))
    return list(found.values())


def _write(folder: Path, shard: int, work: Work, rows: range, answers: list[Judged], prompts: PromptsConfig) -> None:
    """Write one shard; its notes land first, so that a shard is never without them.

    The teacher's score is that of its first attempts.
    """
    records, dropped = [], []
    for judged in answers:
        prompt, answer = work.prompts[judged.asked.row], judged.answer
        own_id = sample_id(prompt.id, judged.asked.sample)
        if judged.reason is not None:
            dropped.append({"sample_id": own_id, "reason": judged.reason, "text": judged.text[:400]})
            continue
        records.append(
            {
                "sample_id": own_id,
                "prompt_ids": work.student_ids[judged.asked.row],
                "response_ids": answer.ids,
                "finish_reason": answer.finish_reason,
                "topk_ids": answer.topk_ids,
                "topk_logprobs": answer.topk_logprobs,
                "tail_mass": answer.tail_mass,
                "text": judged.text,
                "reference": "" if prompt.reference is None else json.dumps(prompt.reference),
                "split": split(prompt.id, prompts.held_out),
            }
        )
    scores = [j.score for j in answers if j.score is not None]
    notes = {
        "prompts": len(rows),
        "generated_tokens": sum(j.tokens for j in answers),
        "kept": dict(Counter(r["split"] for r in records)),
        "kept_tokens": sum(len(r["response_ids"]) for r in records),
        "score": sum(scores),
        "scored": len(scores),
        "dropped": dropped,
    }
    write_atomic(_shard(folder, shard).with_suffix(".json"), json.dumps(notes, indent=1))
    write_shard(_shard(folder, shard), records)


def _finish(
    folder: Path, work: Work, name: str, prompts: PromptsConfig, targets: TargetsConfig, num_shards: int
) -> dict:
    """Add up the shards' notes, write drops.json, and refuse targets that nothing can be learned from."""
    notes = [_notes(folder, i) for i in range(num_shards)]
    dropped = [
        {"sample_id": i, "reason": "contaminated", "text": words[:400]} for i, words in work.contaminated.items()
    ]
    dropped += [row for note in notes for row in note["dropped"]]
    reasons = dict(Counter(row["reason"] for row in dropped).most_common())
    write_atomic(folder / "drops.json", json.dumps({"counts": reasons, "rows": dropped}, indent=1))
    kept = Counter()
    for note in notes:
        kept.update(note["kept"])
    scored = sum(note["scored"] for note in notes)
    score = sum(note["score"] for note in notes) / scored if scored else None
    if score is not None and score < targets.min_score:
        raise RunFailed(_fails(name, score, scored, prompts, targets))
    counts = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
    if not kept:
        raise RunFailed(
            f"teacher {name}: all {len(dropped)} answers were dropped ({counts}; see {folder / 'drops.json'}); change targets.keep, targets.max_new_tokens or the teacher's prompt"
        )
    if not kept["train"]:
        raise RunFailed(
            f"teacher {name}: no answer is left to train on ({kept['held_out']} held out; dropped: {counts or 'none'}); lower prompts.held_out or add prompts"
        )
    tokens = sum(note["kept_tokens"] for note in notes)
    return {
        "prompts": len(work.prompts),
        "kept": kept.total(),
        "train": kept["train"],
        "held_out": kept["held_out"],
        "dropped": reasons,
        "checker": prompts.checker,
        "teacher_score": score,
        "teacher_score_n": scored,
        "tokens": tokens,
        "generated_tokens": sum(note["generated_tokens"] for note in notes),
        "mean_length": tokens / kept.total(),
        "shared_prefix_tokens": len(shared_prefix(work.teacher_ids)),
        "shards": num_shards,
    }


def _stop_hopeless(folder: Path, shard: int, name: str, prompts: PromptsConfig, targets: TargetsConfig) -> None:
    """Fail now, not after hours, when not one answer so far is right and `min_score` makes that all but impossible."""
    notes = [_notes(folder, i) for i in range(shard + 1) if _is_there(folder, i)]
    scored = sum(note["scored"] for note in notes)
    if scored and sum(note["score"] for note in notes) == 0 and (1 - targets.min_score) ** scored < 1e-3:
        raise RunFailed(_fails(name, 0.0, scored, prompts, targets))


def _fails(name: str, score: float, scored: int, prompts: PromptsConfig, targets: TargetsConfig) -> str:
    return (
        f"teacher {name} scores {score:.3f} on its own task (checker {prompts.checker}, {scored} answers), below targets.min_score "
        f"{targets.min_score}; show it examples with targets.few_shot or choose another teacher"
    )


def _require_disk(folder: Path, info: dict, targets: TargetsConfig, num_prompts: int, converts: bool) -> None:
    shards = num_prompts * targets.max_new_tokens * (16 + 8 * targets.top_logprobs)
    plain = 4 * (info["num_parameters"] or 0) if converts else 0
    require_disk(folder, shards + plain, "targets")


def _save_plain(folder: Path, model: Any, tokenizer: Any) -> None:
    """Save a dequantised teacher as an ordinary checkpoint that is either whole or absent."""
    temporary = folder / f"{TEMPORARY}{os.getpid()}-{SAVED}"
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    for path in [*temporary.iterdir(), temporary]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    os.rename(temporary, folder / SAVED)


def _shard(folder: Path, number: int) -> Path:
    return folder / "shards" / f"{number:05d}.parquet"


def _is_there(folder: Path, number: int) -> bool:
    return _shard(folder, number).exists() and _shard(folder, number).with_suffix(".json").exists()


def _wait(ready: Callable[[], bool]) -> None:
    """Wait for another rank; the launcher ends all where one has failed."""
    while not ready():
        signals.raise_if_stopped("targets stopped; finished shards are kept")
        time.sleep(0.2)


def _notes(folder: Path, number: int) -> dict:
    return json.loads(_shard(folder, number).with_suffix(".json").read_text())
