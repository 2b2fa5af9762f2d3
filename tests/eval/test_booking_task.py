"""The booking task: its rows, its scores, its prompt hash."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fewstep.errors import UserError
from fewstep.eval.tasks import booking

SHIPPED = Path(__file__).resolve().parents[2] / "recipes/booking/eval.jsonl"
ROW = {"id": "a", "instruction": "Hello", "reference": {"name": "Anna Lee"}}


def write(path: Path, *rows) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_load_reads_the_shipped_rows_in_order():
    items = booking.load(SHIPPED, "instruction", None)
    assert len(items) == 2400
    first = json.loads(SHIPPED.read_text().splitlines()[0])
    assert items[0] == booking.Item(
        first["id"], [{"role": "user", "content": first["instruction"]}], first["reference"]
    )
    assert booking.load(SHIPPED, "instruction", 7) == items[:7]


def test_load_names_rows_without_id_by_their_line(tmp_path):
    row = {"question": "Hi", "reference": {}}
    items = booking.load(write(tmp_path / "t.jsonl", row, "", row), "question")
    assert [item.id for item in items] == ["0", "2"]


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("{broken", "one JSON object"),
        ('["a"]', "one JSON object"),
        ({"instruction": 3, "reference": {}}, "user's message"),
        ({"text": "Hello", "reference": {}}, "set `field` to one of text, reference"),
        ({"instruction": "Hello"}, "'reference'"),
        ({"instruction": "Hello", "reference": "x"}, "'reference'"),
    ],
)
def test_load_names_the_file_and_line_of_a_bad_row(tmp_path, bad, says):
    path = write(tmp_path / "t.jsonl", ROW, bad)
    with pytest.raises(UserError, match=says) as caught:
        booking.load(path)
    assert f"{path}:2" in str(caught.value) and "\n" not in str(caught.value)


def test_load_refuses_missing_and_empty_files(tmp_path):
    with pytest.raises(UserError, match="not a file"):
        booking.load(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="no rows"):
        booking.load(write(tmp_path / "empty.jsonl", ""))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name": "Anna Lee"}', 1.0),
        ('{"name": "Ben Lee"}', 0.0),
        ('{"name": "Anna Lee", "x": 1}', 0.0),
        ("Anna Lee", 0.0),
        ('{"name"', 0.0),
    ],
)
def test_score_gives_the_answer_sheet(text, expected):
    assert booking.score(text, ROW["reference"]) == expected


def test_prompt_hash_changes_with_every_part_and_with_the_order():
    items = booking.load(SHIPPED, limit=4)
    base = booking.prompt_hash(items)
    assert base == booking.prompt_hash(booking.load(SHIPPED, limit=4)) and len(base) == 16
    variants = [
        items[:3],
        items[::-1],
        [replace(items[0], id="other"), *items[1:]],
        [replace(items[0], messages=[{"role": "user", "content": "other"}]), *items[1:]],
        [replace(items[0], reference={**items[0].reference, "year": 1}), *items[1:]],
    ]
    assert len({base, *map(booking.prompt_hash, variants)}) == 6
