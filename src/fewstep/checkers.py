"""Scoring functions, shared by the filters of targets and by the tasks of the evaluation.

A reference is the value of a row's `reference` key, or that value written as JSON (as target shards
store it). Every checker is strict about form: what a program could not read as it stands scores 0.
"""

import difflib
import json
from collections.abc import Callable

from fewstep.errors import UserError


def parse_json_object(text: str) -> dict | None:
    """Parse a text that is one JSON object and nothing else, apart from surrounding white space.

    Returns:
        The object; None for broken JSON, another kind of value, text or a code fence around the object,
        a key given twice at any depth, or NaN and Infinity, which are not JSON.
    """
    try:
        value = json.loads(text, object_pairs_hook=_distinct_keys, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _distinct_keys(pairs: list[tuple[str, object]]) -> dict:
    obj = dict(pairs)
    if len(obj) != len(pairs):
        raise ValueError("a key is given twice")
    return obj


def _refuse_constant(name: str):
    raise ValueError(f"{name} is not JSON")


def schema_errors(obj: object, schema: dict) -> list[str]:
    """Return every violation of a JSON schema as `path: message`, in the order of the paths; [] if none.

    Raises:
        UserError: the schema itself is not a valid JSON schema.
    """
    import jsonschema  # here: a slow import that most commands do without

    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise UserError(
            f"JSON schema: {error.json_path} is {error.instance!r}: {error.message}; correct the schema file"
        ) from error
    found = sorted(kind(schema).iter_errors(obj), key=lambda error: error.json_path)
    return [f"{error.json_path}: {error.message}" for error in found]


def exact(text: str, reference: object) -> float:
    """Return 1.0 if the text is the reference, surrounding white space aside; else 0.0.

    A reference that is not a string is compared as the value that the text spells in JSON.
    """
    if isinstance(reference, str):
        return float(text.strip() == reference.strip())
    try:
        return float(_same(json.loads(text), reference))
    except (ValueError, RecursionError):
        return 0.0


def answer(text: str, reference: object) -> float:
    """Return 1.0 if the text behind the last `=`, or all of it where there is none, is the reference; else 0.0.

    Raises:
        UserError: the reference is no text, or holds an `=`: no answer could be it.
    """
    if not isinstance(reference, str) or "=" in reference:
        raise UserError(
            f"reference is {reference!r}: the answer checker compares with a text without `=`; write the final answer alone, in quotes"
        )
    return exact(text.rpartition("=")[2], reference)


def json_object(text: str, reference: object = None) -> float:
    """Return 1.0 if the text is one JSON object (see `parse_json_object`); the reference is not used."""
    return float(parse_json_object(text) is not None)


def booking(text: str, reference: object) -> float:
    """Return 1.0 if the text is the reference's object: the same keys in any order, each with the same value.

    Values are normalised as `booking_fields` says; nothing is forgiven besides.
    """
    obj, expected = parse_json_object(text), _as_object(reference)
    if obj is None or obj.keys() != expected.keys():
        return 0.0
    return float(all(_same(_plain(obj[key]), _plain(expected[key])) for key in expected))


def booking_fields(text: str, reference: object) -> float:
    """Return the share of the reference's fields that the text's object has right, in [0, 1].

    Normalised on both sides: white space around a string goes, and a string of digits is its integer, so
    a year may come as 2014 or "2014". Upper and lower case differ, true is not 1, and further keys do not
    count here. A text that is no JSON object has no field right.
    """
    obj, expected = parse_json_object(text), _as_object(reference)
    if obj is None or not expected:
        return 0.0
    return sum(key in obj and _same(_plain(obj[key]), _plain(expected[key])) for key in expected) / len(expected)


def _plain(value: object) -> object:
    if not isinstance(value, str):
        return value
    value = value.strip()
    # "007" stays text: its zeros would be lost
    return int(value) if value.isascii() and value.isdigit() and str(int(value)) == value else value


def _same(left: object, right: object) -> bool:
    """Compare as JSON does: Python's True == 1 does not hold, 2014 == 2014.0 does."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_same, left, right))
    return left == right


def _as_object(reference: object) -> dict:
    obj = parse_json_object(reference) if isinstance(reference, str) else reference
    if not isinstance(obj, dict):
        raise UserError(
            f"reference is {reference!r}: the booking checker compares with a JSON object; give each row its booking as `reference`"
        )
    return obj


CHECKERS: dict[str, Callable[[str, object], float]] = {
    "answer": answer,
    "booking": booking,
    "exact": exact,
    "json": json_object,
}


def score(name: str, text: str, reference: object) -> float:
    """Score a text against a reference with the checker of that name, in [0, 1].

    Raises:
        UserError: no checker has that name; the nearest one is named.
    """
    if name not in CHECKERS:
        near = difflib.get_close_matches(name, CHECKERS, n=1, cutoff=0.0)
        raise UserError(
            f"checker is {name!r}: it must be one of {', '.join(sorted(CHECKERS))}; did you mean {near[0]!r}?"
        )
    return CHECKERS[name](text, reference)
