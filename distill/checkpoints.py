"""Training checkpoints that are either complete or not there.

`trainer_state/step-00000050/` appears by one rename, after its files and a manifest of their hashes
are on disk; a kill at any moment leaves the previous checkpoint untouched.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from fewstep.errors import RunFailed
from fewstep.runstore import file_fingerprint, sync, write_atomic


def save(root: Path, step: int, write: Callable[[Path], None], state: dict, keep: int, is_main: bool, barrier) -> None:
    """Write checkpoint `step`, then delete all but the `keep` newest complete ones.

    Args:
        write: writes this rank's files into the folder that it is given.
        state: JSON facts of the loop (step, epoch, tracker id).
        barrier: called between the phases when several ranks write.
    """
    temporary = root / f"tmp-{step:08d}"
    if is_main:
        for left in root.glob("tmp-*"):  # by a save that was killed
            shutil.rmtree(left)
        temporary.mkdir(parents=True)
    barrier()
    write(temporary)
    barrier()
    if is_main:
        files = sorted(p for p in temporary.rglob("*") if p.is_file())
        for file in files:
            sync(file)
        hashes = {str(p.relative_to(temporary)): file_fingerprint(p) for p in files}
        write_atomic(temporary / "checkpoint.json", json.dumps({"state": state, "files": hashes}, indent=1) + "\n")
        final = root / f"step-{step:08d}"
        shutil.rmtree(final, ignore_errors=True)
        os.rename(temporary, final)
        sync(root)
        for old in _complete(root)[:-keep]:
            shutil.rmtree(old)
    barrier()


def latest(root: Path) -> tuple[Path, dict] | None:
    """Return the newest complete checkpoint and its state; damaged ones are skipped, by name.

    Raises:
        RunFailed: if there are checkpoints and every one is damaged.
    """
    found = _complete(root)
    for folder in reversed(found):
        manifest = json.loads((folder / "checkpoint.json").read_text())
        if all((folder / f).is_file() and file_fingerprint(folder / f) == h for f, h in manifest["files"].items()):
            return folder, manifest["state"]
    if found:
        raise RunFailed(f"{root}: every checkpoint is damaged; delete the folder to start the stage anew")
    return None


def _complete(root: Path) -> list[Path]:
    return sorted(p for p in root.glob("step-*") if (p / "checkpoint.json").is_file())
