"""Which answers become targets; no torch here, so `plan` can check the rules."""

import re
import unicodedata
from dataclasses import dataclass

from fewstep import checkers
from fewstep.errors import UserError
from fewstep.teachers.config import KeepConfig, PromptsConfig, TargetsConfig
from fewstep.teachers.generation import WITHHELD
from fewstep.teachers.prompts import Prompt, read_schema

LOOP_WORDS = 8  # the longest run of words that is looked for
SCRIPT_SHARE = 0.9
_REFUSAL = re.compile(
    r"\s*(?:(?:i['’]?m|i am) (?:very |so |really )?sorry|sorry,|i apologi[sz]e|as an ai\b|as a (?:large )?language model|"
    r"(?:i['’]?m|i am) (?:unable|not able)|i (?:can(?:no|['’])t|will not|won['’]t|am not able))",
    re.IGNORECASE,
)
_SCRIPTS = (
    "latin",
    "cyrillic",
    "greek",
    "arabic",
    "hebrew",
    "devanagari",
    "han",
    "hiragana",
    "katakana",
    "hangul",
    "thai",
)
_NO_REFERENCE = {"json"}  # checkers that look at the answer alone


@dataclass(frozen=True)
class Filter:
    """`targets.keep`, ready to be applied."""

    keep: KeepConfig
    pattern: re.Pattern | None
    schema: dict | None


def make_filter(prompts: PromptsConfig, targets: TargetsConfig) -> Filter:
    """Return the filter that the recipe asks for.

    Raises:
        UserError: a regex that does not compile, a schema that is none, an unknown checker, or `correct` without one.
    """
    keep = targets.keep
    pattern = None
    if keep.regex is not None:
        try:
            pattern = re.compile(keep.regex, re.DOTALL)
        except re.error as error:
            raise UserError(
                f"targets.keep.regex: {keep.regex!r} is no regular expression ({error}); correct it"
            ) from None
    schema = read_schema(keep.json_schema)
    if schema is not None:
        checkers.schema_errors({}, schema)  # names a schema that is not valid itself
    if keep.script is not None and keep.script.lower() not in _SCRIPTS:
        raise UserError(f"targets.keep.script: {keep.script!r} is unknown; use one of {', '.join(_SCRIPTS)}")
    if keep.correct and prompts.checker is None:
        raise UserError("targets.keep.correct: true needs a checker that says what is correct; set prompts.checker")
    if prompts.checker is not None and prompts.checker not in checkers.CHECKERS:
        checkers.score(prompts.checker, "", None)  # raises, naming the nearest
    return Filter(keep, pattern, schema)


def check_references(checker: str | None, prompts: list[Prompt], path: object) -> None:
    """Raise UserError, naming the line, unless every prompt can be scored by the checker."""
    if checker is None or checker in _NO_REFERENCE:
        return
    for prompt in prompts:
        where = f"{path}, line {prompt.line}"
        if prompt.reference is None:
            raise UserError(
                f"{where}: no `reference`, which prompts.checker {checker} compares answers with; add it or drop the checker"
            )
        try:
            checkers.score(checker, "", prompt.reference)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None


def drop_reason(rules: Filter, text: str, finish_reason: str, score: float | None) -> str | None:
    """Return why an answer is dropped, or None if it is kept; the first reason that holds counts.

    Args:
        rules: what `make_filter` returned.
        text: the answer without special tokens.
        finish_reason: "stop", "length", or of a server that holds its answer back WITHHELD.
        score: the checker's, in [0, 1]; None where there is no checker.
    """
    keep = rules.keep
    if finish_reason == WITHHELD:
        return "withheld"
    if keep.finished and finish_reason != "stop":
        return "truncated"
    if not text.strip():
        return "empty"
    if keep.json_object or rules.schema is not None:
        obj = checkers.parse_json_object(text)
        if obj is None:
            return "not_json"
        if rules.schema is not None and checkers.schema_errors(obj, rules.schema):
            return "schema"
    if rules.pattern is not None and not rules.pattern.fullmatch(text):
        return "regex"
    if keep.loops is not None and longest_loop(text) >= keep.loops:
        return "looping"
    if not keep.refusals and _REFUSAL.match(text):
        return "refusal"
    if keep.script is not None and script_share(text, keep.script) < SCRIPT_SHARE:
        return "script"
    if keep.correct and score != 1.0:
        return "incorrect"
    return None


def longest_loop(text: str) -> int:
    """Return how many times a run of up to LOOP_WORDS words stands in a row, at most."""
    words = text.split()
    longest = 1 if words else 0
    for size in range(1, LOOP_WORDS + 1):
        same = 0  # words in a row that equal the one `size` before
        for i in range(size, len(words)):
            same = same + 1 if words[i] == words[i - size] else 0
            longest = max(longest, 1 + same // size)
    return longest


def script_share(text: str, script: str) -> float:
    """Return the share of the letters that are of a Unicode script, by their names; 1 where there are none."""
    letters = [c for c in text if c.isalpha()]
    own = sum(_of_script(c, script.upper()) for c in letters)
    return own / len(letters) if letters else 1.0


def _of_script(letter: str, script: str) -> bool:
    name = unicodedata.name(letter, "")
    return name.startswith("CJK UNIFIED" if script == "HAN" else script)
