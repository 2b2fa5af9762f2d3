"""Task: read a caller's message, write the booking as JSON; right when every field is."""

from pathlib import Path

from fewstep import checkers
from fewstep.eval import items
from fewstep.eval.items import Item, prompt_hash

__all__ = ["VERSION", "load", "prompt_hash", "score"]

VERSION = 1  # raised whenever a change here, or in the checker, could change a score


def load(path: Path | str, field: str = "instruction", limit: int | None = None) -> list[Item]:
    """Read the task's rows, whose `reference` is the booking as a JSON object; see `items.load`."""
    return items.load("booking", path, field, limit, dict, "the booking, a JSON object")


def score(text: str, reference: object) -> float:
    """Return 1.0 if the text is the booking, every field right and no other; else 0.0."""
    return checkers.score("booking", text, reference)
