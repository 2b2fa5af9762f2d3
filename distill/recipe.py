"""The recipe: one YAML file that says everything about a run, and every way in which it can be wrong.

Whatever is wrong is said in one line: the key's dotted path, the value, the rule, the fix.
"""

import copy
import difflib
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

import fewstep
from fewstep.distill.config import (
    AdaptConfig,
    DistillConfig,
    EngineConfig,
    PlanConfig,
    PublishConfig,
    TrackConfig,
    check_training,
)
from fewstep.errors import UserError
from fewstep.eval.config import EvalConfig
from fewstep.schema import Config
from fewstep.students.config import StudentConfig
from fewstep.teachers.config import ENDPOINT, PromptsConfig, TargetsConfig, TeacherConfig

Key = tuple[str, ...]  # ("adapt", "lora", "rank"); "*" stands for any item of a list or mapping


class Recipe(Config):
    """A whole run: who teaches what, to which student, how, and how it is judged."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="names runs/<name>.json and the tracked runs"
    )
    seed: int = Field(0, ge=0, description="seed of everything random")
    teacher: TeacherConfig
    prompts: PromptsConfig
    targets: TargetsConfig = TargetsConfig()
    student: StudentConfig = StudentConfig()
    adapt: AdaptConfig = AdaptConfig()
    distill: DistillConfig | None = Field(DistillConfig(), description="null: the adapted student is the result")
    engine: EngineConfig = EngineConfig()
    eval: EvalConfig = EvalConfig()
    track: TrackConfig = TrackConfig()
    publish: PublishConfig = PublishConfig()
    plan: PlanConfig = PlanConfig()

    @model_validator(mode="after")
    def _sections_agree(self):
        gated = self.adapt.lora is not None and self.adapt.lora.gated
        if gated and (self.targets.few_shot or self.targets.system_prompt):
            raise ValueError(
                "adapt.lora.gated: the untouched teacher must see its own prompt; remove targets.few_shot and targets.system_prompt, or set gated to false"
            )
        for stage, config in self.training().items():
            check_training(
                stage, config, self.student.attention, self.student.alignment, gated, self.student.block_size
            )
            needs = {
                "objectives.kd": "kd" in config.used(),
                "order": config.order == "nll",
                "on_policy": config.on_policy is not None,
            }
            if any(needs.values()) and self.targets.top_logprobs == 0:
                key = next(key for key, needed in needs.items() if needed)
                raise ValueError(
                    f"{stage}.{key}: needs the teacher's log-probabilities, and targets.top_logprobs is 0; set it to 16"
                )
        if self.prompts.decontaminate is not None and not self.eval.tasks:
            raise ValueError(
                "prompts.decontaminate: there is no evaluation to share text with; name eval.tasks, or remove it"
            )
        self._endpoint_has_no_weights()
        for sampler in self.eval.samplers:
            sizes = [settings["block_size"] for settings in sampler.settings() if "block_size" in settings]
            if any(size > self.student.block_size for size in sizes):
                raise ValueError(
                    f"eval.samplers: {sampler.name} with block_size {max(sizes)}: the largest trained is student.block_size={self.student.block_size}"
                )
        if self.student.attention == "bidirectional" and any(s.name == "verify" for s in self.eval.samplers):
            raise ValueError(
                "eval.samplers: verify needs a clean stream, which a bidirectional student has not; remove it or set student.attention to block"
            )
        return self

    def _endpoint_has_no_weights(self) -> None:
        if self.student.base is not None and str(self.student.base).startswith(ENDPOINT):
            raise ValueError("student.base: a server has no weights to start from; give a folder or a Hub id")
        if not self.teacher.is_endpoint:
            return
        if self.student.base is None:
            raise ValueError(
                "student.base is missing: a teacher behind a server has no weights to start a student from; give a checkpoint with its tokenizer"
            )
        if any(config.on_policy is not None for config in self.training().values()):
            raise ValueError(
                "distill.on_policy: the teacher's weights score what the student wrote, and a server gives none; remove it"
            )

    @property
    def reference(self) -> tuple[str, str | None]:
        """The checkpoint (model, revision) whose tokenizer and shape count: the teacher, or for one behind a server the student's base."""
        if self.teacher.is_endpoint:
            return str(self.student.base), None
        return self.teacher.model, self.teacher.revision

    def training(self) -> dict[str, AdaptConfig | DistillConfig]:
        """Return the training stages in their order."""
        return {"adapt": self.adapt} | ({"distill": self.distill} if self.distill is not None else {})


def load_recipe(recipe: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Recipe:
    """Read a recipe, apply `key=value` overrides and check everything that the text alone can tell.

    Args:
        recipe: a YAML file, or the name of a shipped recipe.
        overrides: dotted `key=value`; values are YAML, paths in them are relative to the working folder.

    Raises:
        UserError: whatever is wrong, in one line.
    """
    file = find_recipe(recipe)
    try:
        raw = _parse(file.read_text(encoding="utf-8"), str(file))
    except UnicodeDecodeError:
        raise UserError(f"{file} is not UTF-8 text; give a YAML recipe") from None
    if not isinstance(raw, dict):
        raise UserError(f"{file} holds {_short(raw)}; a recipe is a mapping of sections such as teacher: and prompts:")
    raw = _absolute(raw, file.resolve().parent)
    alone, keys = copy.deepcopy(raw), []
    for override in overrides:
        dotted, equals, text = override.partition("=")
        if not equals or not dotted:
            raise UserError(f"{override!r} is no override; write key=value, such as adapt.max_steps=100")
        keys.append(tuple(dotted.split(".")))
        _set(raw, keys[-1], _absolute(_parse(text, f"the value of {dotted}"), Path.cwd(), keys[-1]), dotted)
    try:
        return _validated(raw)
    except UserError as error:
        raise UserError(f"{_blamed(str(error), file, alone, keys)}{error}") from None


def _validated(raw: dict) -> Recipe:
    _refuse_booleans(raw)
    try:
        return Recipe.model_validate(raw)
    except ValidationError as error:
        raise UserError(_one_line(error)) from None


def _blamed(wrong: str, file: Path, alone: dict, overrides: list[Key]) -> str:
    """Return how a message begins: with the file's name, unless an override set the key that it names.

    Args:
        alone: what the file says without the overrides.
    """
    if overrides:
        try:
            _validated(alone)
            without = ""
        except UserError as error:
            without = str(error)
        if without != wrong:
            named = tuple(re.split(r"[^\w.-]", wrong, maxsplit=1)[0].split("."))
            if any(named[: len(key)] == key[: len(named)] for key in overrides):
                return ""
            return f"{file.name} with the overrides: "
    return f"{file.name}: "


def recipes_folder() -> Path:
    """Return the folder of the shipped recipes: in a wheel, or at the root of a source tree."""
    return next(Path(place) / "recipes" for place in fewstep.__path__ if (Path(place) / "recipes").is_dir())


def shipped_recipes() -> list[str]:
    """Return the names of the shipped recipes, such as quickstart."""
    folder = recipes_folder()
    return sorted(p.relative_to(folder).with_suffix("").as_posix() for p in folder.rglob("*.yaml"))


def find_recipe(recipe: str | Path) -> Path:
    """Return the file of a recipe given by path or by the name of a shipped one."""
    file = Path(recipe)
    if file.is_file():
        return file
    if str(recipe) in shipped_recipes():
        return recipes_folder() / f"{recipe}.yaml"
    if file.is_dir():
        raise UserError(f"{recipe} is a folder; give a recipe's YAML file or one of: {', '.join(shipped_recipes())}")
    beside = file.with_name(f"{file.name}.yaml")
    near = str(beside) if beside.is_file() else nearest(file.stem, shipped_recipes())
    raise UserError(
        f"recipe {recipe} does not exist, as a file or as a shipped recipe"
        + (f"; did you mean {near}?" if near else f"; shipped are: {', '.join(shipped_recipes())}")
    )


# --- YAML ---------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """PyYAML, but 1e-4 is a float and a key given twice is an error."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:float"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(\d[\d_]*\.[\d_]*([eE][-+]?\d+)?|\.\d[\d_]*([eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+|\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"
    ),
    list("-+0123456789."),
)


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "cannot be read"
        raise UserError(f"{where}{line}: not valid YAML: {problem}; mend that line") from None


def _set(raw: dict, key: Key, value: Any, dotted: str) -> None:
    """Put `value` at `key` in nested mappings and lists, making the mappings that are not there."""
    here: Any = raw
    for depth, part in enumerate(key):
        last = depth == len(key) - 1
        so_far = ".".join(key[:depth])
        if isinstance(here, list):
            if not part.isdigit() or int(part) >= len(here):
                raise UserError(
                    f"{dotted}: {so_far} is a list of {len(here)}; {part!r} is none of its places 0…{len(here) - 1}"
                )
            if last:
                here[int(part)] = value
            else:
                here = here[int(part)]
        elif isinstance(here, dict):
            if last:
                here[part] = value
            else:
                if here.get(part) is None:
                    here[part] = {}
                here = here[part]
        else:
            raise UserError(f"{dotted}: {so_far} is {_short(here)}, which has no keys; set {so_far} itself")


# --- The schema as a list of keys ---------------------------------------------------------------


def known_keys(model: type[BaseModel] = Recipe, prefix: Key = ()) -> Iterator[tuple[Key, FieldInfo, type[BaseModel]]]:
    """Yield every key of the recipe with its field and the class it stands in, depth first, in order."""
    for name, field in model.model_fields.items():
        key = (*prefix, field.alias or name)
        yield key, field, model
        for child, in_container in _models_in(field.annotation):
            yield from known_keys(child, (*key, "*") if in_container else key)


def _models_in(annotation: Any, in_container: bool = False) -> Iterator[tuple[type[BaseModel], bool]]:
    """Yield the config classes inside an annotation, and whether they are items of a list or mapping."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, in_container
    inside = in_container or typing.get_origin(annotation) in (list, dict, tuple)
    for argument in typing.get_args(annotation):
        yield from _models_in(argument, inside)


def _types_in(annotation: Any) -> set[Any]:
    """Return the plain types and values inside an annotation: {Path, NoneType} for Path | None."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if not arguments:
        return {annotation}
    if origin in (typing.Union, UnionType, list, dict, tuple):
        return set().union(*(_types_in(a) for a in arguments))
    return _types_in(arguments[0]) if origin is typing.Annotated else {type(a) for a in arguments}


_FIELDS: dict[Key, FieldInfo] = {key: field for key, field, _ in known_keys()}
_PATHS = {key for key, field in _FIELDS.items() if Path in _types_in(field.annotation)}
_MODELS = {("teacher", "model"), ("student", "base")}  # a path only where something lies there


def _general(key: Key) -> Key:
    """Return `key` as the schema spells it: places in lists and names in mappings become "*"."""
    out: Key = ()
    for part in key:
        out = (*out, part) if (*out, part) in _FIELDS else (*out, "*") if _has_items(out) else (*out, part)
    return out


def _has_items(key: Key) -> bool:
    field = _FIELDS.get(key)
    return field is not None and any(inside for _, inside in _models_in(field.annotation))


def _absolute(value: Any, folder: Path, key: Key = ()) -> Any:
    """Return `value`, found at `key`, with the relative paths in it made absolute from `folder`."""
    if isinstance(value, dict):
        return {k: _absolute(v, folder, (*key, str(k))) for k, v in value.items()}
    if isinstance(value, list):
        return [_absolute(v, folder, (*key, str(i))) for i, v in enumerate(value)]
    if not isinstance(value, str):
        return value
    general = _general(key)
    if general in _MODELS:
        local = value.endswith(".gguf") or value.startswith((".", "~")) or (folder / value).exists()
        return str((folder / Path(value).expanduser()).resolve()) if local and "://" not in value else value
    return str((folder / Path(value).expanduser()).resolve()) if general in _PATHS else value


def _refuse_booleans(value: Any, key: Key = ()) -> None:
    """Raise where a boolean stands for a number or text: pydantic would read true as 1."""
    if isinstance(value, dict):
        for name, item in value.items():
            _refuse_booleans(item, (*key, str(name)))
    elif isinstance(value, list):
        for place, item in enumerate(value):
            _refuse_booleans(item, (*key, str(place)))
    elif isinstance(value, bool):
        field = _FIELDS.get(_general(key))
        if field is not None and bool not in _types_in(field.annotation):
            raise UserError(f"{'.'.join(key)}: got {str(value).lower()}; {_rule(field)}; give such a value")


# --- Errors in one line -------------------------------------------------------------------------


def _rule(field: FieldInfo) -> str:
    """Return what a field accepts, in words."""
    names = {
        "NoneType": "null",
        "str": "text",
        "int": "an integer",
        "float": "a number",
        "bool": "true or false",
        "Path": "a path",
    }
    origin = typing.get_origin(field.annotation)
    if origin is typing.Literal:
        return "must be one of " + ", ".join(str(a) for a in typing.get_args(field.annotation))
    kinds = sorted(
        names.get(t.__name__, t.__name__)
        for t in _types_in(field.annotation)
        if isinstance(t, type) and not issubclass(t, BaseModel)
    )
    if any(_models_in(field.annotation)):
        kinds.insert(0, "a mapping of keys")
    return "must be " + " or ".join(kinds)


def nearest(name: str, names: list[str]) -> str | None:
    """Return the name most like a misspelt one, if any is close."""
    return next(iter(difflib.get_close_matches(name, names, n=1, cutoff=0.5)), None)


def _short(value: Any) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _known_part(loc: tuple[int | str, ...]) -> Key:
    """Return a pydantic location without what names the branches of unions."""
    key: Key = ()
    for part in loc:
        if isinstance(part, str) and _general((*key, part)) not in _FIELDS and not _has_items(_general(key)):
            break
        key = (*key, str(part))
    return key


def _one_line(error: ValidationError) -> str:
    """Return the first thing that is wrong; a misspelt key goes before what is missing because of it."""
    errors = error.errors(include_url=False)
    unknown = next((e for e in errors if e["type"] == "extra_forbidden"), None)
    if unknown is not None:
        *section, name = (str(part) for part in unknown["loc"])
        parent = _general(tuple(section))
        siblings = [key[-1] for key in _FIELDS if key[:-1] == parent]
        anywhere = {key[-1]: ".".join(key) for key in _FIELDS}
        near, other = nearest(name, siblings), nearest(name, list(anywhere))
        fix = f"did you mean {'.'.join([*section, near])}?" if near else None
        fix = fix or (f"did you mean {anywhere[other]}?" if other else f"known there: {', '.join(siblings)}")
        return f"{'.'.join([*section, name])}: unknown key (value {_short(unknown['input'])}); {fix}"
    first = errors[0]
    if not first["loc"]:  # a rule between sections, which names its keys itself
        return first["msg"].removeprefix("Value error, ")
    key = _known_part(first["loc"])
    name = ".".join(key)
    field = _FIELDS.get(_general(key))
    if first["type"] == "missing":
        about = f" ({field.description})" if field is not None and field.description else ""
        return f"{name}: missing; this key is required{about}; add it"
    rules = []
    for one in errors:
        if _known_part(one["loc"]) == key:
            rule = (
                one["msg"]
                .removeprefix("Value error, ")
                .replace("Input should be", "must be")
                .replace("String should", "must")
            )
            rule = re.sub(r"a valid dictionary or instance of \w+", "a mapping of keys", rule)
            rules.append(re.sub(r", unable to parse string.*", "", rule))
    about = f" ({field.description})" if field is not None and field.description else ""
    fix = f"; without the key it is {_short(field.default)}" if field is not None and _plain_default(field) else ""
    return f"{name}{about}: got {_short(first['input'])}; {' or '.join(dict.fromkeys(rules))}{fix}"


def _plain_default(field: FieldInfo) -> bool:
    return not field.is_required() and isinstance(field.default, (int, float, str, type(None)))
