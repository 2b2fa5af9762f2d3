"""Whatever fails while a stage writes, what is there loads, and the same command ends where an undisturbed run ends."""

import errno
import os
import shutil

import pytest
import torch

from fewstep.distill import checkpoints
from fewstep.errors import RunFailed
from fewstep.students.convert import load_student

from .test_train import go, metrics, weights, world  # noqa: F401  (a fixture)

STEPS = {"max_steps": 6, "save_steps": 2, "eval_steps": 6, "ema": 0.5}
FAST = 9  # faults of the fast suite, spread over the stage; the slow one has them all
FULL, KILLED = OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()


class Faulty:
    """Count what changes the disk, and raise at the n-th time."""

    def __init__(self, patched: pytest.MonkeyPatch, at: int | None, error: BaseException):
        self.count, self.at, self.error = 0, at, error
        for place, name in ((os, "rename"), (os, "replace"), (os, "fsync"), (torch, "save"), (shutil, "rmtree")):
            patched.setattr(place, name, self._counting(getattr(place, name)))
        import safetensors.torch

        patched.setattr(safetensors.torch, "save_file", self._counting(safetensors.torch.save_file))

    def _counting(self, work):
        def counted(*args, **keys):
            self.count += 1
            if self.count == self.at:
                raise self.error
            return work(*args, **keys)

        return counted


def faults(world, folder, error, at=None) -> int:  # noqa: F811
    with pytest.MonkeyPatch.context() as patched:
        faulty = Faulty(patched, at, error)
        if at is None:
            go(world, folder, **STEPS)
        else:
            with pytest.raises(type(error)):
                go(world, folder, **STEPS)
    return faulty.count


def check(world, tmp_path, places):  # noqa: F811
    whole = tmp_path / "whole"
    events = faults(world, whole, FULL)
    assert events > 30
    for at in places(events):
        for error in (FULL, KILLED):
            folder = tmp_path / f"{type(error).__name__}-{at}"
            faults(world, folder, error, at)
            if (folder / "student").exists():
                load_student(folder / "student")
            for state in (folder / "trainer_state").glob("step-*"):
                assert (state / "checkpoint.json").is_file()
            found = checkpoints.latest(folder / "trainer_state")
            assert go(world, folder, **STEPS)["resumed_from"] == (found[1]["step"] if found else 0)
            a, b = weights(whole), weights(folder)
            assert all(torch.equal(a[k], b[k]) for k in a), (at, error)
            assert metrics(folder) == metrics(whole), (at, error)
            shutil.rmtree(folder)
    return events


def test_a_full_disk_or_a_kill_while_writing_costs_nothing_that_was_saved(world, tmp_path):  # noqa: F811
    check(world, tmp_path, lambda events: range(2, events + 1, max(1, events // FAST)))


@pytest.mark.slow
def test_a_full_disk_or_a_kill_at_every_write(world, tmp_path):  # noqa: F811
    assert 2 * check(world, tmp_path, lambda events: range(1, events + 1)) >= 100


def test_a_damaged_shard_and_a_lost_folder_are_named_in_one_line(world, tmp_path):  # noqa: F811
    shutil.copytree(world / "targets", tmp_path / "targets-1")
    shutil.copytree(world / "teacher", tmp_path / "teacher")
    shard = tmp_path / "targets-1" / "shards" / "00000.parquet"
    content = shard.read_bytes()
    (tmp_path / "targets-1").rename(tmp_path / "targets")
    shard = tmp_path / "targets" / "shards" / "00000.parquet"
    for damaged in (
        content[:100],
        b"",
        content[: len(content) // 2] + b"\xff" * 99 + content[len(content) // 2 + 99 :],
    ):
        shard.write_bytes(damaged)
        with pytest.raises(RunFailed, match="00000.parquet is damaged .*; delete .*targets to make it anew"):
            go(tmp_path, tmp_path / "run", **STEPS)
    shard.write_bytes(content)
    go(tmp_path, tmp_path / "run", **STEPS)


def test_a_folder_that_vanishes_mid_run_is_an_os_error_that_names_it(world, tmp_path, monkeypatch):  # noqa: F811
    from fewstep.distill import train

    calls = iter(range(10))
    monkeypatch.setattr(train, "stop_requested", lambda: shutil.rmtree(tmp_path / "run") if next(calls) == 2 else None)
    with pytest.raises(OSError) as caught:
        go(world, tmp_path / "run", **STEPS)
    assert "run" in str(caught.value.filename)
