"""Files stay short, and speak of the project alone."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (
    "src",
    "distill",
    "teachers",
    "students",
    "kernels",
    "eval",
    "serve",
    "benchmarks",
    "tests",
    "recipes",
    "docs",
    ".ci",
)
MOST_LINES = 500

# Longer files, each with the reason why it is not split.
LONG: dict[str, str] = {}


def files(*suffixes: str) -> list[Path]:
    found = [
        p
        for folder in FOLDERS
        for p in (ROOT / folder).rglob("*")
        if p.suffix in suffixes and "__pycache__" not in p.parts
    ]
    return sorted([*found, *(p for p in ROOT.iterdir() if p.suffix in suffixes)])


def test_python_files_are_short_or_listed_with_a_reason():
    long = {p.relative_to(ROOT).as_posix() for p in files(".py") if len(p.read_text().splitlines()) > MOST_LINES}
    assert long == set(LONG)  # a listed file that has become short is taken off the list
    assert all(LONG.values())


@pytest.mark.parametrize(
    "path", files(".py", ".md", ".yaml", ".toml", ".txt", ".html"), ids=lambda p: p.relative_to(ROOT).as_posix()
)
def test_file_names_no_place_of_one_machine(path):
    text = path.read_text(encoding="utf-8")
    for place in (str(ROOT), str(Path.home()) + "/"):
        assert place not in text, f"{place} in {path.name}"
