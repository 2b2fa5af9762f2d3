"""Task: read a caller's message, write the booking as JSON; right when every field is."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from fewstep import checkers
from fewstep.errors import UserError

VERSION = 1  # raised whenever a change here, or in the checker, could change a score


@dataclass(frozen=True)
class Item:
    """One prompt and its right answer."""

    id: str
    messages: list[dict]  # [{"role": "user", "content": …}]: what the chat template is applied to
    reference: object


def load(path: Path | str, field: str = "instruction", limit: int | None = None) -> list[Item]:
    """Read the task's rows: {"id"?: str, <field>: str, "reference": {…}}, one JSON object a line.

    Args:
        path: a JSONL file.
        field: the key that holds the user's message.
        limit: use only the first rows; None: all.

    Returns:
        Items in the file's order; a row without `id` is named by its line number, from 0.

    Raises:
        UserError: the file is missing, empty, or has a row that is not of that form; its line is named.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"task booking: {path} is not a file; give the path of a JSONL file of bookings")
    items: list[Item] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            if limit is not None and len(items) == limit:
                break
            if line.strip():
                items.append(_item(line, field, f"{path}:{number + 1}", number))
    if not items:
        raise UserError(f"task booking: {path} holds no rows; give a JSONL file with at least one")
    return items


def _item(line: str, field: str, where: str, number: int) -> Item:
    row = checkers.parse_json_object(line)
    if row is None:
        raise UserError(
            f"task booking: {where} is {line.strip()[:60]!r}: a row must be one JSON object on one line; correct it"
        )
    if not isinstance(row.get(field), str):
        raise UserError(
            f"task booking: {where} has {row.get(field)!r} as {field!r}: it must be the user's message; set `field` to one of {', '.join(row)}"
        )
    if not isinstance(row.get("reference"), dict):
        raise UserError(
            f"task booking: {where} has {row.get('reference')!r} as 'reference': it must be the booking, a JSON object; add it"
        )
    return Item(str(row.get("id", number)), [{"role": "user", "content": row[field]}], row["reference"])


def score(text: str, reference: object) -> float:
    """Return 1.0 if the text is the booking, every field right and no other; else 0.0."""
    return checkers.score("booking", text, reference)


def prompt_hash(items: list[Item]) -> str:
    """Return 16 hex of SHA-256 over ids, messages and references in order: results compare only when it is equal."""
    content = [[item.id, item.messages, item.reference] for item in items]
    return hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:16]
