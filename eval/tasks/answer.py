"""Task: work a question out; right when the final answer, the text behind the last `=`, is the reference."""

from pathlib import Path

from fewstep import checkers
from fewstep.errors import UserError
from fewstep.eval import items
from fewstep.eval.items import Item, prompt_hash

__all__ = ["VERSION", "load", "prompt_hash", "score"]

VERSION = 1  # raised whenever a change here, or in the checker, could change a score


def load(path: Path | str, field: str = "instruction", limit: int | None = None) -> list[Item]:
    """Read the task's rows, whose `reference` is the final answer as text; see `items.load`."""
    loaded = items.load("answer", path, field, limit, str, "the final answer, a text")
    for item in loaded:
        try:
            score("", item.reference)
        except UserError as error:
            raise UserError(f"task answer: {path}, row {item.id}: {error}") from None
    return loaded


def score(text: str, reference: object) -> float:
    """Return 1.0 if what stands behind the text's last `=` (all of it where there is none) is the reference; else 0.0."""
    return checkers.score("answer", text, reference)
