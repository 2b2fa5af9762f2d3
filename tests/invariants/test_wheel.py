"""The wheel: every room under `fewstep`, the shipped recipes with their files, and nothing else."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("distill", "teachers", "students", "kernels", "eval", "serve", "recipes")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The unpacked wheel."""
    pytest.importorskip("hatchling")
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(out / "site")
    return out / "site"


def tracked(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts}


def test_wheel_holds_every_file_of_every_room_and_installs_one_name(site):
    assert {p.name for p in site.iterdir() if not p.name.endswith(".dist-info")} == {"fewstep"}
    for room in ROOMS:
        assert tracked(site / "fewstep" / room) == tracked(ROOT / room), room
    inside = tracked(site / "fewstep")
    own = tracked(ROOT / "src" / "fewstep")
    assert own <= inside
    assert all(f in own or f.split("/")[0] in ROOMS for f in inside)


def test_wheel_finds_its_shipped_recipes_from_anywhere(site, tmp_path):
    code = (
        "import fewstep; from fewstep.distill import cli, recipe\n"
        "print(*fewstep.__path__, recipe.recipes_folder(), sep='\\n'); print(*recipe.shipped_recipes())"
    )
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    places, recipes = done.stdout.splitlines()[:-1], done.stdout.splitlines()[-1].split()
    assert places == [str(site / "fewstep"), str(site / "fewstep" / "recipes")]
    assert recipes == sorted(
        p.relative_to(ROOT / "recipes").with_suffix("").as_posix() for p in (ROOT / "recipes").rglob("*.yaml")
    )
