"""The rows of a task's JSONL: a user's message and what a right answer is checked against."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from fewstep import checkers
from fewstep.errors import UserError
from fewstep.teachers.prompts import read_tools


@dataclass(frozen=True)
class Item:
    """One prompt and its right answer."""

    id: str
    messages: list[dict]  # [{"role": "user", "content": …}]: what the chat template is applied to
    reference: object
    tools: list[dict] | None = None  # JSON schemas of functions, for the chat template


def load(task: str, path: Path | str, field: str, limit: int | None, kind: type, meaning: str) -> list[Item]:
    """Read a task's rows: {"id"?: str, <field>: str, "reference": …, "tools"?: …}, one JSON object a line.

    Args:
        task: its name, for messages.
        path: a JSONL file.
        field: the key that holds the user's message.
        limit: use only the first rows; None: all.
        kind: what a reference must be, dict or str. meaning: the same in words.

    Returns:
        Items in the file's order; a row without `id` is named by its line number, from 0.

    Raises:
        UserError: the file is missing, empty, or has a row that is not of that form; its line is named.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"task {task}: {path} is not a file; give the path of a JSONL file")
    items: list[Item] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            if limit is not None and len(items) == limit:
                break
            if line.strip():
                items.append(_item(task, line, field, f"{path}:{number + 1}", number, kind, meaning))
    if not items:
        raise UserError(f"task {task}: {path} holds no rows; give a JSONL file with at least one")
    return items


def _item(task: str, line: str, field: str, where: str, number: int, kind: type, meaning: str) -> Item:
    row = checkers.parse_json_object(line)
    if row is None:
        raise UserError(
            f"task {task}: {where} is {line.strip()[:60]!r}: a row must be one JSON object on one line; correct it"
        )
    if not isinstance(row.get(field), str):
        raise UserError(
            f"task {task}: {where} has {row.get(field)!r} as {field!r}: it must be the user's message; set `field` to one of {', '.join(row)}"
        )
    if not isinstance(row.get("reference"), kind):
        raise UserError(
            f"task {task}: {where} has {row.get('reference')!r} as 'reference': it must be {meaning}; write it so"
        )
    messages = [{"role": "user", "content": row[field]}]
    return Item(
        str(row.get("id", number)), messages, row["reference"], read_tools(row.get("tools"), f"task {task}: {where}")
    )


def prompt_hash(items: list[Item]) -> str:
    """Return 16 hex of SHA-256 over ids, messages and references in order: results compare only when it is equal."""
    content = [[item.id, item.messages, item.reference, *([item.tools] if item.tools else [])] for item in items]
    return hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:16]
