"""Checkers against an answer sheet: what counts as right, and what does not."""

import json

import pytest

from fewstep import checkers
from fewstep.errors import UserError

REFERENCE = {
    "name": "Anna Lee",
    "car": "Kia Rio",
    "year": 2014,
    "service": "oil change",
    "day": "Monday",
    "time": "9:15",
}
RIGHT = json.dumps(REFERENCE)


def answer(**changes) -> str:
    return json.dumps({**REFERENCE, **changes})


# text, score, share of right fields
SHEET = {
    "right": (RIGHT, 1.0, 1.0),
    "white space around": (f"\n  {RIGHT}\n", 1.0, 1.0),
    "indented": (json.dumps(REFERENCE, indent=2), 1.0, 1.0),
    "other key order": (json.dumps(dict(reversed(REFERENCE.items()))), 1.0, 1.0),
    "year as text": (answer(year="2014"), 1.0, 1.0),
    "padded value": (answer(name=" Anna Lee "), 1.0, 1.0),
    "wrong value": (answer(day="Tuesday"), 0.0, 5 / 6),
    "two wrong values": (answer(day="Tuesday", year=2015), 0.0, 4 / 6),
    "other case": (answer(name="anna lee"), 0.0, 5 / 6),
    "null value": (answer(time=None), 0.0, 5 / 6),
    "list value": (answer(car=["Kia Rio"]), 0.0, 5 / 6),
    "extra key": (answer(phone="555"), 0.0, 1.0),
    "missing key": (json.dumps({k: v for k, v in REFERENCE.items() if k != "time"}), 0.0, 5 / 6),
    "key of other case": (RIGHT.replace('"day"', '"Day"'), 0.0, 5 / 6),
    "empty object": ("{}", 0.0, 0.0),
    "empty text": ("", 0.0, 0.0),
    "list around": (f"[{RIGHT}]", 0.0, 0.0),
    "broken": (RIGHT[:-1], 0.0, 0.0),
    "trailing comma": (RIGHT[:-1] + ",}", 0.0, 0.0),
    "single quotes": (str(REFERENCE), 0.0, 0.0),
    "text before": (f"Here you are: {RIGHT}", 0.0, 0.0),
    "text after": (f"{RIGHT} Anything else?", 0.0, 0.0),
    "two objects": (RIGHT + RIGHT, 0.0, 0.0),
    "code fence": (f"```json\n{RIGHT}\n```", 0.0, 0.0),
    "duplicate key, last right": ('{"day": "Friday", ' + RIGHT[1:], 0.0, 0.0),
    "duplicate key, both right": ('{"day": "Monday", ' + RIGHT[1:], 0.0, 0.0),
    "not a number": (RIGHT.replace("2014", "NaN"), 0.0, 0.0),
}


@pytest.mark.parametrize("case", SHEET)
def test_booking_scores_the_answer_sheet(case):
    text, score, fields = SHEET[case]
    assert checkers.score("booking", text, REFERENCE) == score
    assert checkers.booking_fields(text, REFERENCE) == pytest.approx(fields, abs=1e-12)


@pytest.mark.parametrize("case", SHEET)
def test_booking_scores_the_same_with_the_reference_as_json(case):
    assert checkers.booking(SHEET[case][0], json.dumps(REFERENCE)) == SHEET[case][1]


@pytest.mark.parametrize(
    ("value", "reference"), [(True, 1), (1, True), (False, 0), ("007", 7), (7, "007"), ("20.5", 20.5), ("²", 2)]
)
def test_booking_values_that_only_look_alike_differ(value, reference):
    text = json.dumps({"year": value})
    assert checkers.booking(text, {"year": reference}) == 0.0
    assert checkers.booking_fields(text, {"year": reference}) == 0.0


@pytest.mark.parametrize("reference", ["", "no json", [1], None])
def test_booking_refuses_a_reference_that_is_no_object(reference):
    with pytest.raises(UserError, match="reference"):
        checkers.booking(RIGHT, reference)


@pytest.mark.parametrize(
    ("text", "reference", "expected"),
    [
        (" 42\n", "42", 1.0),
        ("42", "43", 0.0),
        ("Yes", "yes", 0.0),
        ("42", 42, 1.0),
        ("true", 1, 0.0),
        ("1", True, 0.0),
        ('{"b": [1, 2], "a": 1}', {"a": 1, "b": [1, 2]}, 1.0),
        ('{"b": [2, 1], "a": 1}', {"a": 1, "b": [1, 2]}, 0.0),
        ("[1, true]", [1, 1], 0.0),
        ("forty-two", 42, 0.0),
    ],
)
def test_exact_compares_text_with_text_and_json_with_values(text, reference, expected):
    assert checkers.score("exact", text, reference) == expected


def test_json_needs_an_object_and_nothing_else():
    assert checkers.score("json", ' {"a": {}} ', "") == 1.0
    for text in ("[]", "1", '{"a": 1', '{"a": 1} {}', '{"a": {"b": 1, "b": 1}}', '{"a": Infinity}', "[" * 100_000):
        assert checkers.score("json", text, "") == 0.0, text[:40]


def test_score_names_the_nearest_checker():
    with pytest.raises(UserError, match="'bookings'.*booking, exact, json.*did you mean 'booking'"):
        checkers.score("bookings", RIGHT, REFERENCE)


def test_schema_errors_name_every_path():
    schema = {
        "type": "object",
        "properties": {"year": {"type": "integer"}, "day": {"enum": ["Monday"]}},
        "required": ["year", "day"],
        "additionalProperties": False,
    }
    assert checkers.schema_errors({"year": 1, "day": "Monday"}, schema) == []
    found = checkers.schema_errors({"year": "1", "day": "Sunday"}, schema)
    assert [error.split(":")[0] for error in found] == ["$.day", "$.year"]
    assert "'day' is a required property" in checkers.schema_errors({"year": 1}, schema)[0]


def test_schema_errors_refuse_a_broken_schema_in_one_line():
    with pytest.raises(UserError, match="JSON schema") as caught:
        checkers.schema_errors({}, {"type": "objekt"})
    assert "\n" not in str(caught.value)
