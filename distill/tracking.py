"""Where a run's figures go: always two local JSONL files, and W&B where the recipe names a project.

`metrics.jsonl` holds losses and no timings, so that it is the same, byte for byte, for the same run;
`perf.jsonl` holds timings and memory.
"""

import json
import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path

from fewstep.distill.config import TrackConfig
from fewstep.runstore import write_atomic


class Tracker:
    """Append figures by step; a resume first cuts both files back to the checkpoint's step.

    Args:
        folder: the stage's folder.
        step: steps done; figures of later ones are dropped: they will be written again.
        config: the recipe's `track` section.
        run: {"name", "group", "job_type", "config"} for the tracker.
    """

    def __init__(self, folder: Path, step: int, config: TrackConfig, run: dict):
        self.metrics, self.perf = folder / "metrics.jsonl", folder / "perf.jsonl"
        for path in (self.metrics, self.perf):
            lines = path.read_text().splitlines() if path.exists() else []
            write_atomic(path, "".join(line + "\n" for line in lines if _step(line) <= step))
        self._wandb = _start_wandb(folder, config, run)

    def log(self, step: int, metrics: dict, perf: dict | None = None) -> None:
        """Write one line to each file; floats are kept to 9 significant digits."""
        _append(self.metrics, {"step": step, **metrics})
        if perf:
            _append(self.perf, {"step": step, **perf})
        if self._wandb is not None:
            self._wandb.log({"train/step": step} | {f"train/{k}": v for k, v in (metrics | (perf or {})).items()})

    @property
    def on(self) -> bool:
        """Whether anything but the local files gets the figures."""
        return self._wandb is not None

    def table(self, name: str, make: Callable[[], tuple[list[str], list[list]]]) -> None:
        """Show a table beside the figures; `make` returns its columns and rows, and is called where one is shown."""

        def show(wandb, tracked) -> None:
            columns, rows = make()
            tracked.log({name: wandb.Table(columns=columns, data=rows)})

        self._quietly(show)

    def lineage(self, read: list[Path], made: Path) -> None:
        """Record which stage's folder was made from which others: facts about them, not their contents.

        An offline run cannot name what it used: the names stand in the artifact's metadata too.
        """

        def record(wandb, tracked) -> None:
            for folder in [] if tracked.settings.mode == "offline" else read:
                tracked.use_artifact(_artifact(wandb, folder))
            tracked.log_artifact(_artifact(wandb, made, [folder.name for folder in read]))

        self._quietly(record)

    def _quietly(self, work: Callable) -> None:
        """Do something with W&B, whose trouble must not cost a training run."""
        if self._wandb is None:
            return
        try:
            import wandb

            work(wandb, self._wandb)
        except Exception as error:
            print(f"W&B: {type(error).__name__}: {error}", file=sys.stderr)

    def close(self) -> None:
        if self._wandb is not None:
            self._wandb.finish()


COLUMNS = ("task", "system", "sampler", "settings", "score", "score_ci", "delta", "tpf", "tokens_per_s", "speedup", "speedup_ci")  # fmt: skip


def track_report(folder: Path, config: TrackConfig, run: dict, read: list[Path]) -> None:
    """Give W&B the report: the page as an artifact, the verdicts as the run's summary, the measured settings as a table.

    Args:
        folder: of the report stage, written.
        run: as of `Tracker`.
        read: the stages' folders that it was made from; they close the lineage.
    """
    tracked = _start_wandb(folder, config, run)
    if tracked is None:
        return
    try:
        import wandb

        results = json.loads((folder / "report.json").read_text())["results"]
        for i, verdict in enumerate(results["verdicts"]):
            tracked.summary[f"verdict/{i}"] = verdict["text"]
        data = [
            [json.dumps(v) if isinstance(v, (dict, list)) else v for v in map(row.get, COLUMNS)]
            for row in results["rows"]
        ]
        tracked.log({"settings": wandb.Table(columns=list(COLUMNS), data=data)})
        for made in [] if tracked.settings.mode == "offline" else read:
            tracked.use_artifact(_artifact(wandb, made))
        artifact = _artifact(wandb, folder, [made.name for made in read])
        for name in ("report.html", "report.json", "MODEL_CARD.md"):
            artifact.add_file(str(folder / name))
        tracked.log_artifact(artifact)
    except Exception as error:  # as in Tracker: a tracker's trouble must not cost a report
        print(f"W&B: {type(error).__name__}: {error}", file=sys.stderr)
    finally:
        tracked.finish()  # else the next stage would go on in this run


def _artifact(wandb, folder: Path, read: list[str] | None = None):
    """Return the artifact of a stage's folder: its name, and of a sealed one (not yet that which is being made) the manifest."""
    manifest = folder / "manifest.json"
    sealed = json.loads(manifest.read_text()) if manifest.is_file() else {}
    stage, _, digest = folder.name.rpartition("-")
    about = {"stage": stage, "hash": digest, **{key: sealed.get(key) for key in ("commit", "upstream", "summary")}}
    return wandb.Artifact(folder.name, type=stage or "stage", metadata={**about, "read": read})


def _step(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError):  # half a line, written when the machine went down
        return float("inf")


def _append(path: Path, row: dict) -> None:
    rounded = {k: float(f"{v:.9g}") if isinstance(v, float) else v for k, v in row.items()}
    with open(path, "a") as file:
        file.write(json.dumps(rounded) + "\n")


def _start_wandb(folder: Path, config: TrackConfig, run: dict):
    """Return a W&B run, offline unless the recipe says online and a key is there; never a prompt or a crash."""
    if config.wandb.project is None or config.wandb.mode == "disabled":
        return None
    saved = folder / "wandb_run_id"
    if not saved.exists():
        write_atomic(saved, secrets.token_hex(4))  # one run id across resumes
    for key in ("WANDB_DATA_DIR", "WANDB_ARTIFACT_DIR"):
        os.environ.setdefault(key, str(folder / "trainer_state" / "wandb"))
    try:
        import wandb

        online = config.wandb.mode == "online" and (os.environ.get("WANDB_API_KEY") or wandb.api.api_key)
        (folder / "trainer_state").mkdir(exist_ok=True)
        tracked = wandb.init(
            project=config.wandb.project,
            mode="online" if online else "offline",
            dir=str(folder / "trainer_state"),
            id=saved.read_text().strip(),
            resume="allow" if online else None,
            settings=wandb.Settings(silent=True),
            **run,
        )
        tracked.define_metric("train/step")
        tracked.define_metric("train/*", step_metric="train/step")
    except Exception as error:  # a tracker's trouble must not cost a training run
        print(f"W&B is off ({type(error).__name__}); metrics.jsonl has the figures", file=sys.stderr)
        return None
    return tracked
