"""Real disks that are full, read-only or gone: one line, nothing lost, and the same command goes on once there is room."""

import shutil
import subprocess

import pytest

from tests.recipes.test_kill import KEYS, outcome
from tests.recipes.test_shipped import fewstep

pytestmark = pytest.mark.slow
FEWER = [*KEYS, "adapt.max_steps=9", "distill.max_steps=6", "prompts.limit=48"]


@pytest.fixture
def disk(tmp_path):
    """A file system of 5 MB, which its argument mounts anew with other options."""
    place = tmp_path / "disk"
    place.mkdir()

    def mount(options: str) -> int:
        return subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(place)], capture_output=True).returncode  # fmt: skip

    if shutil.which("mount") is None or mount("size=5m"):
        pytest.skip("may not mount a file system")
    yield place, lambda options: mount(f"remount,{options}")
    subprocess.run(["umount", str(place)], check=True)


def one_line(done) -> str:
    lines = [line for line in done.stderr.splitlines() if line.startswith("fewstep: ")]
    assert len(lines) == 1 and "Traceback" not in done.stderr, done.stderr[-2000:]
    return lines[0]


def test_a_full_and_a_read_only_disk_cost_a_line_and_no_state(disk, tmp_path):
    place, remount = disk
    runs = place / "runs"
    full = fewstep("run", "quickstart", *FEWER, runs=runs)
    assert full.returncode in (1, 2) and ("free" in one_line(full) or "space" in one_line(full))
    for student in runs.glob("*/student"):
        assert (student / "model.safetensors").is_file()
    for state in runs.glob("*/trainer_state/step-*"):
        assert (state / "checkpoint.json").is_file()
    assert not remount("ro,size=500m")
    locked = fewstep("run", "quickstart", *FEWER, runs=runs)
    assert locked.returncode == 1 and "Read-only file system" in one_line(locked)
    assert not remount("rw,size=500m")
    assert fewstep("run", "quickstart", *FEWER, runs=runs).returncode == 0
    assert fewstep("run", "quickstart", *FEWER, runs=tmp_path / "whole").returncode == 0
    assert outcome(runs) == outcome(tmp_path / "whole")


def test_a_folder_that_is_lost_between_two_runs_is_made_again(tmp_path):
    assert fewstep("targets", "quickstart", *FEWER, runs=tmp_path).returncode == 0
    first = {f.name: f.read_bytes() for f in tmp_path.rglob("*.parquet")}
    shutil.rmtree(next(tmp_path.glob("targets-*")))
    assert fewstep("targets", "quickstart", *FEWER, runs=tmp_path).returncode == 0
    assert first == {f.name: f.read_bytes() for f in tmp_path.rglob("*.parquet")}
