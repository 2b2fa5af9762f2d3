"""Write docs/recipes.md from the schema: `python -m fewstep.distill.recipe_docs > docs/recipes.md`."""

import json
import typing
from pathlib import Path
from types import UnionType
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from fewstep.distill.recipe import known_keys

HEAD = """# Recipes

<!-- Generated from the schema by `make docs`; a test fails where this file is out of date. -->

A recipe is one YAML file. Unknown keys are refused, paths are relative to the recipe's file, `5e-5` is a
number, and there is no interpolation. On the command line `key=value` sets a dotted path
(`adapt.max_steps=100`, `eval.tasks.0.limit=20`, `distill=null`); values are YAML, and a path given there
is relative to the working folder.

`fewstep init NAME` writes a commented recipe to start from; `fewstep plan RECIPE` shows what it would do.
"""


def page() -> str:
    """Return docs/recipes.md: one table for every section."""
    lines = [HEAD, "## Top level\n", *_table_head()]
    tables: dict[str, list[str]] = {}
    for key, field, _ in known_keys():
        row = f"| `{'.'.join(key[1:]) or key[0]}` | {_type(field.annotation)} | {_default(field)} | {_cell(field.description)} |"
        if len(key) == 1 and not _is_section(field):
            lines.append(row)
        elif len(key) == 1:
            doc = (_section(field).__doc__ or "").strip().splitlines()[0]
            optional = "" if field.is_required() else " May be left out."
            nullable = f" {_sentence(field.description)}" if field.description else ""
            tables[key[0]] = [f"\n## `{key[0]}`\n", f"{doc}{optional}{nullable}\n", *_table_head()]
        else:
            tables[key[0]].append(row)
    return "\n".join([*lines, *(line for table in tables.values() for line in table)]) + "\n"


def _table_head() -> list[str]:
    return ["| key | value | default | meaning |", "|---|---|---|---|"]


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:].rstrip(".") + "."


def _cell(text: str | None) -> str:
    return (text or "").replace("|", "\\|")


def _section(field: FieldInfo) -> type[BaseModel]:
    candidates = [field.annotation, *typing.get_args(field.annotation)]
    return next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))


def _is_section(field: FieldInfo) -> bool:
    candidates = [field.annotation, *typing.get_args(field.annotation)]
    return any(isinstance(c, type) and issubclass(c, BaseModel) for c in candidates)


def _type(annotation: Any) -> str:
    """Return an annotation in words, for readers of YAML."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type(arguments[0])
    if origin is typing.Literal:
        return ", ".join(f"`{a}`" for a in arguments)
    if origin in (typing.Union, UnionType):
        return " or ".join(dict.fromkeys(_type(a) for a in arguments))
    if origin is list or (origin is tuple and Ellipsis in arguments):
        return f"list of {_type(arguments[0])}"
    if origin is tuple:
        return f"list of {len(arguments)}: {', '.join(_type(a) for a in arguments)}"
    if origin is dict:
        return f"mapping of names to {_type(arguments[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "keys below"
    words = {
        "str": "text",
        "int": "integer",
        "float": "number",
        "bool": "true or false",
        "Path": "path",
        "NoneType": "null",
    }
    return words[annotation.__name__]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "" if value is PydanticUndefined else f"`{json.dumps(_plain(value))}`".replace("|", "\\|")


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return {k: v for k, v in value.model_dump(mode="json", by_alias=True, exclude_unset=True).items()}
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, Path) else value


if __name__ == "__main__":
    print(page(), end="")
