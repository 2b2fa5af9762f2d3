"""Find a task's file by its name."""

import difflib
from importlib import import_module
from pathlib import Path
from types import ModuleType

from fewstep.errors import UserError


def find(name: str) -> ModuleType:
    """Return the module eval/tasks/<name>.py: VERSION, load, score, prompt_hash.

    Raises:
        UserError: there is no such file; the nearest one is named.
    """
    known = sorted(p.stem for p in (Path(__file__).parent / "tasks").glob("*.py") if not p.stem.startswith("_"))
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        raise UserError(
            f"eval.tasks: no task {name!r}; it must be one of {', '.join(known)}; did you mean {near[0]!r}?"
        )
    return import_module(f"fewstep.eval.tasks.{name}")
