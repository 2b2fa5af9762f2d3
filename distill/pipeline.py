"""Run a recipe's stages: skip what is complete, lock, run, seal.

Heavy libraries are imported only when a stage really runs.
"""

import json
import math
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fewstep import machine
from fewstep.distill.chain import TRAINED, VERSIONS, Stage, chain, evaluation_prompts, portable
from fewstep.distill.checks import check
from fewstep.distill.recipe import Recipe
from fewstep.errors import UserError
from fewstep.runstore import MANIFEST, TEMPORARY, StageFolder, write_atomic
from fewstep.signals import raise_if_stopped, stop_at_once
from fewstep.teachers.load import SAVED, plain_weights

# --- What each stage calls ----------------------------------------------------------------------


def _targets(recipe: Recipe, folders: dict[str, Path]) -> dict:
    from fewstep.teachers.collect import run

    avoid = evaluation_prompts(recipe) if recipe.prompts.decontaminate else None
    base = recipe.student.base
    return run(
        folders["targets"], recipe.teacher, recipe.prompts, recipe.targets, recipe.seed, avoid, None if base is None else str(base)
    )  # fmt: skip


def _adapt(recipe: Recipe, folders: dict[str, Path]) -> dict:
    saved = folders["targets"] / SAVED
    if recipe.student.base is not None:
        source = plain_weights(str(recipe.student.base))
    else:
        source = saved if saved.is_dir() else plain_weights(recipe.teacher.model, recipe.teacher.revision)
    return _train("adapt", recipe, folders, source)


def _distill(recipe: Recipe, folders: dict[str, Path]) -> dict:
    return _train("distill", recipe, folders, folders["adapt"] / "student")


def _train(stage: str, recipe: Recipe, folders: dict[str, Path], source: Path) -> dict:
    from fewstep.distill.train import run
    from fewstep.teachers.scoring import scorer

    return run(
        folders[stage],
        stage,
        recipe.training()[stage],
        recipe.student,
        recipe.engine,
        recipe.track,
        source,
        folders["targets"],
        recipe.seed,
        recipe.name,
        scorer(recipe.teacher, recipe.prompts, recipe.targets, folders["targets"]),
    )


def students(folders: dict[str, Path]) -> dict[str, Path]:
    """Return the checkpoints that are evaluated: the student, and the one before distillation if there was any."""
    if "distill" not in folders:
        return {"student": folders["adapt"] / "student"}
    return {"student": folders["distill"] / "student", "undistilled": folders["adapt"] / "student"}


def _eval(recipe: Recipe, folders: dict[str, Path]) -> dict:
    from fewstep.eval.run import run

    return run(
        folders["eval"],
        recipe.eval,
        recipe.teacher,
        folders["targets"],
        recipe.targets,
        students(folders),
        recipe.seed,
    )


def _report(recipe: Recipe, folders: dict[str, Path]) -> dict:
    from fewstep.distill.tracking import track_report
    from fewstep.eval.report import run

    read = [stage for stage in folders if stage not in ("report", "publish")]
    manifests = {stage: StageFolder(folders[stage]).manifest() for stage in read}
    summary = run(folders["report"], manifests, folders["eval"], portable(recipe))
    named = {"name": f"{recipe.name}-report", "group": recipe.name, "job_type": "report", "config": portable(recipe)}
    track_report(folders["report"], recipe.track, named, [folders[stage] for stage in read])
    return summary


def _publish(recipe: Recipe, folders: dict[str, Path]) -> dict:
    from fewstep.distill.publishing import run

    student = students(folders)["student"]
    return run(folders["publish"], recipe.publish, student, folders["report"], folders["eval"] / "effort.json")


RUNNERS: dict[str, Callable[[Recipe, dict[str, Path]], dict]] = {
    "targets": _targets,
    "adapt": _adapt,
    "distill": _distill,
    "eval": _eval,
    "report": _report,
    "publish": _publish,
}


# --- Running ------------------------------------------------------------------------------------


def run(recipe: Recipe, runs: Path, only: str | None = None, say: Callable[[str], None] = print) -> dict[str, Path]:
    """Run the recipe's stages, or one of them, and return the folder of each.

    Args:
        recipe: what to run.
        runs: where the stages' folders are.
        only: run this stage alone; those before it must be complete. The report alone is written anew.
        say: takes each line for the user.

    Raises:
        UserError: the request is wrong; nothing has been written.
        RunFailed, Stopped: while running.
    """
    stages = chain(recipe)
    folders = {name: runs / stage.folder for name, stage in stages.items()}
    if only is not None and only not in stages:
        key = {"distill": "distill is null", "publish": "publish.repo is null"}[only]
        raise UserError(f"{recipe.name}: {key}, so there is no stage {only}; set it in the recipe or as key=value")
    for name in stages[only].upstream if only else ():
        if not StageFolder(folders[name]).is_complete():
            raise UserError(
                f"{only} reads {stages[name].folder}, which is not complete; run `fewstep {name}` or `fewstep run` on this recipe first"
            )
    todo = [
        n for n in stages if only in (None, n) and (n == only == "report" or not StageFolder(folders[n]).is_complete())
    ]
    check(recipe, stages, runs, todo)

    here = machine.commit()
    if todo:
        machine.pin_threads(recipe.engine.threads)
        runs.mkdir(parents=True, exist_ok=True)
        _name_folders(recipe, stages, runs)
    for name, stage in stages.items():
        if name in todo:
            seconds = _run_stage(recipe, stage, folders, say)
            say(f"{stage.folder:<17} done in {seconds:.0f} s")
        elif only in (None, name):
            StageFolder(folders[name]).check()
            made = StageFolder(folders[name]).manifest().get("commit")
            note = f" (made at commit {_short(made)}, this is {_short(here)})" if made != here else ""
            say(f"{stage.folder:<17} complete, skipped{note}")
    if not todo:
        say(f"nothing to do: {only or 'every stage'} of {recipe.name} is complete")
    return folders


def _short(commit: str | None) -> str:
    return "unknown" if commit is None else commit[:8] + ("-dirty" if commit.endswith("-dirty") else "")


def _name_folders(recipe: Recipe, stages: dict[str, Stage], runs: Path) -> None:
    """Write `<runs>/<recipe name>.json`, which names the recipe's folders."""
    names = {"recipe": recipe.name, "stages": {name: stage.folder for name, stage in stages.items()}}
    text = json.dumps(names, indent=1)
    file = runs / f"{recipe.name}.json"
    if machine.rank() == 0 and (not file.is_file() or file.read_text() != text):
        write_atomic(file, text)


def _run_stage(recipe: Recipe, stage: Stage, folders: dict[str, Path], say: Callable[[str], None]) -> float:
    """Run one stage in its locked folder and seal it; return the seconds it took."""
    folder = StageFolder(folders[stage.name])
    start = time.monotonic()
    if machine.rank() > 0:
        # Under a launcher every rank answers prompts and trains; the first one alone holds the folder and does the rest.
        while stage.name == "targets" and not (_begun(folder.path) or folder.is_complete()):
            _rest()
        if stage.name in TRAINED or (stage.name == "targets" and not folder.is_complete()):
            RUNNERS[stage.name](recipe, folders)
        while not folder.is_complete():
            _rest()
        return time.monotonic() - start
    with folder.lock():
        if folder.is_complete() and stage.name != "report":
            return 0.0  # another runner finished it before this one held the lock
        resumed = folder.path.is_dir() and any(folder.path.iterdir())
        folder.path.mkdir(exist_ok=True)
        if folder.is_complete():  # only a report that is written anew is
            (folder.path / MANIFEST).unlink()
            (folder.path / "sessions.jsonl").unlink()
        say(f"{stage.folder:<17} {'resumes' if resumed else 'runs'}")
        sessions = _open_session(folder.path)
        write_atomic(folder.path / RANKS, _launch())  # the lock is held: other ranks may begin
        try:
            summary = _until_stopped(recipe, stage.name, folders)
        finally:
            (folder.path / RANKS).unlink(missing_ok=True)
        folder.seal(_manifest(recipe, stage, summary, sessions, time.monotonic() - start))
    return time.monotonic() - start


RANKS = f"{TEMPORARY}ranks"  # there while the first rank works in a stage's folder


def _launch() -> str:
    """Return what the processes of one launch have in common and those of another have not, as far as launchers say it."""
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID")
    here = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")  # all are children of one launcher
    return " ".join([*(os.environ.get(name, "") for name in names), str(os.getppid()) if here else ""])


def _begun(folder: Path) -> bool:
    """Whether the first rank of this launch works in the folder."""
    try:
        return (folder / RANKS).read_text() == _launch()
    except OSError:
        return False


def _rest() -> None:
    raise_if_stopped(f"rank {machine.rank()} stopped")
    time.sleep(0.2)


def _written(file: Path) -> float:
    """Return when a file was written; 0 for a folder, or for what another process has just moved."""
    try:
        return file.stat().st_mtime if file.is_file() else 0.0
    except FileNotFoundError:
        return 0.0


def _open_session(folder: Path) -> list[dict]:
    """Append this session to `sessions.jsonl` and return all of them, this one last.

    A killed session cannot say how long it ran: it is taken to have ended when it last wrote a file.
    """
    file = folder / "sessions.jsonl"
    sessions = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    before = 0.0
    if sessions:
        last_write = max(map(_written, folder.rglob("*")), default=0.0)
        began = datetime.fromisoformat(sessions[-1]["started"]).timestamp()
        before = sessions[-1].get("seconds_before", 0.0) + max(0.0, last_write - began)
    sessions.append({"started": _now(), "commit": machine.commit(), "seconds_before": round(before, 1)})
    with open(file, "a") as appended:
        appended.write(json.dumps(sessions[-1]) + "\n")
    return sessions


def _until_stopped(recipe: Recipe, stage: str, folders: dict[str, Path]) -> dict:
    """Run one stage's function, and turn whatever a signal made of it into Stopped."""
    where = f"{stage} stopped, its state is saved; the same command goes on from there"
    # Training polls the signal between steps, where it can save; the others are safe to leave anywhere.
    try:
        with nullcontext() if stage in TRAINED else stop_at_once(where):
            summary = RUNNERS[stage](recipe, folders)
    except Exception:
        raise_if_stopped(where)
        raise
    raise_if_stopped(where)
    return summary


def _manifest(recipe: Recipe, stage: Stage, summary: dict, sessions: list[dict], seconds: float) -> dict:
    hardware = machine.hardware()
    return {
        "schema": 1,
        "stage": stage.name,
        "hash": stage.hash,
        "version": VERSIONS[stage.name],
        "status": "complete",
        "config": stage.config,
        "inputs": stage.inputs,
        "upstream": stage.upstream,
        "recipe": portable(recipe),
        "commit": machine.commit(),
        "commits": list(dict.fromkeys(session["commit"] for session in sessions)),
        "versions": machine.versions(),
        "hardware": hardware,
        "threads": hardware["threads"],
        "seed": recipe.seed,
        "started": sessions[0]["started"],
        "finished": _now(),
        "seconds": round(sessions[-1]["seconds_before"] + seconds, 1),
        "summary": _finite(summary),
    }


def _finite(value: Any) -> Any:
    """Return `value` with null for NaN and infinity, which are no JSON."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
