"""The booking generator and the data shipped from it."""

import importlib.util
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fewstep import checkers

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks/lab/booking.py"
SHIPPED = ROOT / "recipes/booking"

_spec = importlib.util.spec_from_file_location("lab_booking", SCRIPT)
booking = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(booking)


def read(name: str) -> list[dict]:
    return [json.loads(line) for line in (SHIPPED / name).read_text(encoding="utf-8").splitlines()]


def test_booking_rows_are_a_function_of_split_and_seed():
    assert booking.rows("train", 50, 3) == booking.rows("train", 50, 3)
    assert booking.rows("train", 50, 3) != booking.rows("train", 50, 4)
    assert booking.rows("train", 80, 3)[:50] == booking.rows("train", 50, 3)


def test_booking_seed_is_independent_of_the_global_generator():
    import random

    random.seed(0)
    first = booking.rows("eval", 20, 0)
    random.seed(1)
    assert booking.rows("eval", 20, 0) == first


def test_booking_messages_are_distinct_over_a_long_draw():
    messages = [row["instruction"] for row in booking.rows("train", 5000, 0)]
    assert len(set(messages)) == len(messages)


def test_booking_templates_are_split_and_all_used():
    train = {row["template"] for row in booking.rows("train", 2000, 0)}
    evaluation = {row["template"] for row in booking.rows("eval", 500, 0)}
    fresh = {row["template"] for row in booking.rows("fresh", 500, 0)}
    assert (len(train), len(evaluation), len(fresh)) == (34, 10, 10)
    assert train | evaluation | fresh == set(range(54)) == set(range(len(booking.TEMPLATES)))
    assert len(set(booking.TEMPLATES)) == len(booking.TEMPLATES)


@pytest.mark.parametrize("split", ["train", "eval", "fresh"])
def test_booking_reference_can_be_read_off_the_message(split):
    for row in booking.rows(split, 1000, 5):
        for key in booking.KEYS:
            spelled = str(row["reference"][key])
            # The first letter alone may be raised: a template may start with its service.
            assert spelled in row["instruction"] or spelled.capitalize() in row["instruction"], (key, row)
        named = [name for name in booking.CARS if name in row["instruction"]]
        assert named == [row["reference"]["car"]]


def test_booking_every_template_holds_every_field_once():
    for template in booking.TEMPLATES:
        for key in ("{name}", "{car}", "{year}", "{day}", "{time}", "service}"):
            assert template.count(key) == 1, (key, template)


def test_booking_composed_messages_hold_every_value_once_and_no_evaluation_phrasing():
    found = booking.rows("train", 600, 3, free=1.0)
    for row in found:
        assert row["template"] is None
        for key in ("name", "car", "year", "day", "time"):
            assert row["instruction"].count(str(row["reference"][key])) == 1, (key, row)
        assert row["reference"]["service"] in row["instruction"].lower()
    rng = random.Random(0)
    composed = [booking.compose(rng) for _ in range(4000)]
    for text in composed:
        assert all(text.count(key) == 1 for key in ("{name}", "{car}", "{year}", "{day}", "{time}", "service}")), text
    assert len(set(composed)) > 3000
    seen = runs_of_four(composed) | {run for clauses in booking.CLAUSES.values() for run in runs_of_four(clauses)}
    evaluation = runs_of_four(booking.EVAL_TEMPLATES + booking.FRESH_TEMPLATES)
    assert len(evaluation - runs_of_four(booking.TRAIN_TEMPLATES)) > 60
    assert not seen & evaluation - runs_of_four(booking.TRAIN_TEMPLATES)


def runs_of_four(texts):
    """Return every four words in a row of one sentence."""
    sentences = [re.findall(r"[\w'{}]+", s) for text in texts for s in re.split(r"[.?!]", text.lower())]
    return {tuple(words[i : i + 4]) for words in sentences for i in range(len(words) - 3)}


def test_booking_response_is_one_line_in_fixed_key_order():
    row = booking.rows("train", 1, 0)[0]
    shuffled = dict(reversed(row["reference"].items()))
    text = booking.response(shuffled)
    assert list(json.loads(text)) == list(booking.KEYS)
    assert text == booking.response(row["reference"]) and "\n" not in text and '", "' in text
    assert checkers.booking(text, row["reference"]) == 1.0


def test_booking_command_writes_the_shipped_files(tmp_path):
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path), "--train", "800", "--eval", "2400", "--seed", "0"]
    subprocess.run(command, check=True)
    for name in ("train.jsonl", "eval.jsonl"):
        assert (tmp_path / name).read_bytes() == (SHIPPED / name).read_bytes()
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path), "--train", "0", "--eval", "6000", "--seed", "1"]
    subprocess.run(command, check=True)
    assert (tmp_path / "eval.jsonl").read_bytes() == (SHIPPED / "test.jsonl").read_bytes()
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path), "--train", "0", "--eval", "0", "--fresh", "2000"]
    subprocess.run(command, check=True)
    assert (tmp_path / "fresh.jsonl").read_bytes() == (SHIPPED / "fresh.jsonl").read_bytes()
    for name, drawn in (("prompts.jsonl", []), ("phrased.jsonl", ["--free", "0.5", "--more", "Ben=4"])):
        command = [sys.executable, str(SCRIPT), "--out", str(tmp_path), "--train", "2400", "--eval", "0", *drawn]
        subprocess.run(command, check=True)
        assert (tmp_path / "train.jsonl").read_bytes() == (SHIPPED.parent / "quickstart" / name).read_bytes()


def test_booking_draws_a_value_more_often_where_asked():
    often = booking.rows("train", 2000, 0, more={"Ben": 4.0, "Kia Rio": 2.0})
    names = [row["reference"]["name"].split()[0] for row in often]
    assert abs(names.count("Ben") / 2000 - 4 / 39) < 0.02 and abs(names.count("Anna") / 2000 - 1 / 39) < 0.012
    assert abs(sum(row["reference"]["car"] == "Kia Rio" for row in often) / 2000 - 2 / 32) < 0.02


@pytest.mark.parametrize("more", ["Benn=4", "Ben", "Ben=-4", "Ben=x"])
def test_booking_refuses_a_value_that_it_cannot_draw(tmp_path, more):
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path / "out"), "--more", more]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and f"{more!r} is no first name" in done.stderr and not (tmp_path / "out").exists()


def test_booking_shipped_splits_do_not_overlap():
    train, evaluation = read("train.jsonl"), read("eval.jsonl")
    assert (len(train), len(evaluation)) == (800, 2400)
    messages = [row["instruction"] for row in train + evaluation] + [row["user"] for row in read("few_shot.jsonl")]
    assert len(set(messages)) == 3203
    assert {row["template"] for row in train}.isdisjoint(row["template"] for row in evaluation)
    assert len({row["id"] for row in train + evaluation}) == 3200
    test = [row["instruction"] for row in read("test.jsonl")]  # claimed figures come from here, choices never do
    assert len(set(test)) == 6000 and set(test).isdisjoint(messages)
    for name in ("prompts.jsonl", "phrased.jsonl"):
        quickstart = (SHIPPED.parent / "quickstart" / name).read_text().splitlines()
        assert set(test).isdisjoint(json.loads(line)["instruction"] for line in quickstart)


def test_booking_shipped_references_fit_the_shipped_schema():
    schema = json.loads((SHIPPED / "schema.json").read_text())
    for row in read("train.jsonl")[::20] + read("eval.jsonl")[::40]:
        assert checkers.schema_errors(row["reference"], schema) == []
    assert checkers.schema_errors({**read("eval.jsonl")[0]["reference"], "year": "2014"}, schema)


def test_booking_few_shot_examples_answer_in_the_tasks_format():
    shots = read("few_shot.jsonl")
    assert len(shots) == 3
    for shot in shots:
        obj = checkers.parse_json_object(shot["assistant"])
        assert obj is not None and shot["assistant"] == booking.response(obj)
        assert all(str(value) in shot["user"] for value in obj.values())
