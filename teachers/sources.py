"""Where prompts come from: a file's rows, a Hub dataset's, or a reasoning-gym task's; each row with the place it came from.

No torch here: `plan` reads prompts. Libraries that a source needs are imported when it is read.
"""

import csv
import importlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fewstep.errors import UserError, first_line
from fewstep.teachers.config import PromptsConfig

Row = tuple[str, int, dict]  # (place for messages to the user, number of the row or line, its fields)


def read_rows(config: PromptsConfig) -> Iterator[Row]:
    """Yield the rows of `prompts`, at most `config.limit`.

    Raises:
        UserError: they cannot be read, or a row is none; by file and line where there are lines.
    """
    if config.hf is not None:
        yield from _hub(config)
    elif config.reasoning_gym is not None:
        yield from _gym(config)
    else:
        assert config.path is not None
        yield from _FILES[config.source](config.path, config)


def read_jsonl(path: Path, limit: int | None = None) -> list[tuple[int, dict]]:
    """Return (line number, object) of each row; a BOM is skipped, and only line feeds end a line.

    Raises:
        UserError: the file cannot be read, or a line is not a UTF-8 JSON object.
    """
    rows: list[tuple[int, dict]] = []
    # Bytes are split, not text: str.splitlines would cut a row at U+2028, which JSON allows inside strings.
    for number, raw in enumerate(_bytes(path).split(b"\n"), 1):
        if limit is not None and len(rows) >= limit:
            break
        if not raw.strip():
            continue
        where = f"{path}, line {number}"
        rows.append((number, _object(_json(raw, where, "write one object per line"), where)))
    return rows


def _jsonl(path: Path, config: PromptsConfig) -> Iterator[Row]:
    for number, row in read_jsonl(path, config.limit):
        yield f"{path}, line {number}", number, row


def _json_file(path: Path, config: PromptsConfig) -> Iterator[Row]:
    """A list of objects, or an object with one list in it; JSON lines under that name are read as such."""
    data = _bytes(path)
    lines = [line for line in data.split(b"\n") if line.strip()]
    if len(lines) > 1 and all(line.lstrip().startswith(b"{") and line.rstrip().endswith(b"}") for line in lines):
        yield from _jsonl(path, config)
        return
    whole = _json(data, str(path), "write a list of objects")
    if isinstance(whole, dict):
        lists = [value for value in whole.values() if isinstance(value, list)]
        whole = lists[0] if len(lists) == 1 else whole
    if not isinstance(whole, list):
        raise UserError(
            f"{path}: holds a {type(whole).__name__} and no list of rows; write a list of objects, or JSON lines into a .jsonl"
        )
    for number, row in enumerate(whole[: config.limit], 1):
        yield f"{path}, row {number}", number, _object(row, f"{path}, row {number}")


def _csv(path: Path, config: PromptsConfig) -> Iterator[Row]:
    """Columns are named by the first line; an empty cell is no value."""
    reader = csv.DictReader(io.StringIO(_text(path), newline=""), strict=True)
    csv.field_size_limit(2**31 - 1)
    try:
        for count, row in enumerate(reader):
            if count == config.limit:
                return
            where = f"{path}, line {reader.line_num}"
            if None in row or None in row.values():
                raise UserError(
                    f"{where}: has another number of cells than the first line names ({len(reader.fieldnames or ())}); quote cells that hold commas"
                )
            yield where, reader.line_num, {key: value for key, value in row.items() if value != ""}
    except csv.Error as error:
        raise UserError(
            f"{path}, line {reader.line_num + 1}: not CSV ({error}); quote cells that hold quotes"
        ) from None


def _parquet(path: Path, config: PromptsConfig) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        for batch in pq.ParquetFile(path).iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                if number == config.limit:
                    return
                number += 1
                yield f"{path}, row {number}", number, row
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path}: cannot be read as Parquet ({reason}); write the file again") from None


def _lines(path: Path, config: PromptsConfig) -> Iterator[Row]:
    """Each line that is not empty is a message."""
    count = 0
    for number, line in enumerate(_text(path).split("\n"), 1):
        if line.strip() and count != config.limit:
            count += 1
            yield f"{path}, line {number}", number, {config.field: line.removesuffix("\r")}


def _hub(config: PromptsConfig) -> Iterator[Row]:
    hub = config.hf
    assert hub is not None
    try:
        import datasets
    except ModuleNotFoundError:
        raise UserError(f"prompts.hf: {hub.name} needs the library datasets; pip install datasets") from None
    try:
        found = datasets.load_dataset(hub.name, hub.config, split=hub.split, revision=hub.revision)
        rows = [dict(found[i]) for i in range(min(len(found), config.limit or len(found)))]
    except (
        Exception
    ) as error:  # not found, no network, gated, no such split, a broken row: all are named by the library
        reason = first_line(error)
        raise UserError(
            f"prompts.hf: {hub.name} cannot be read ({reason[:200]}); check name, config and split"
        ) from None
    for number, row in enumerate(rows, 1):
        yield f"{hub.name}, row {number}", number, row


def _gym(config: PromptsConfig) -> Iterator[Row]:
    gym = config.reasoning_gym
    assert gym is not None
    try:
        reasoning_gym = importlib.import_module("reasoning_gym")  # an extra, that may be absent
    except ModuleNotFoundError:
        raise UserError(f"prompts.reasoning_gym: {gym.name} needs its library; pip install reasoning-gym") from None
    try:
        made = reasoning_gym.create_dataset(gym.name, seed=gym.seed, size=gym.size, **gym.settings)
        entries = [made[i] for i in range(min(gym.size, config.limit or gym.size))]
    except Exception as error:  # an unknown task or setting
        raise UserError(f"prompts.reasoning_gym: {gym.name} cannot be made ({str(error)[:200]}); check name and settings") from None  # fmt: skip
    for number, entry in enumerate(entries, 1):
        yield f"{gym.name}, entry {number}", number, {config.field: entry["question"], "reference": entry["answer"]}


_FILES = {"jsonl": _jsonl, "json": _json_file, "csv": _csv, "parquet": _parquet, "text": _lines}


def _bytes(path: Path) -> bytes:
    """Return a file's content without a BOM."""
    try:
        return Path(path).read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        reason = "is a folder" if isinstance(error, IsADirectoryError) else (error.strerror or str(error)).lower()
        raise UserError(f"{path}: cannot be read ({reason}); give a file, relative to the recipe") from None


def _text(path: Path) -> str:
    data = _bytes(path)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UserError(f"{path}, line {line}: not UTF-8; save the file as UTF-8") from None


def _json(raw: bytes, where: str, fix: str) -> Any:
    try:
        return json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 at byte {error.start + 1}; save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON ({error.msg} at column {error.colno}); {fix}") from None
    except ValueError as error:
        raise UserError(f"{where}: cannot be read as JSON ({error}); {fix}") from None
    except RecursionError:
        raise UserError(f"{where}: nested too deeply to be read; write a flat object") from None


def _object(row: Any, where: str) -> dict:
    if not isinstance(row, dict):
        raise UserError(f'{where}: a {type(row).__name__} where a JSON object is needed; write {{"field": value}}')
    return row
