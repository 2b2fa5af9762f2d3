"""The chain of stages: what each reads, and what names its folder.

    targets → adapt → distill → eval → report → publish

A stage's folder is `<runs>/<stage>-<hash8>`. The hash covers the part of the recipe that the stage
uses, the contents of outside files and the hashes of the stages before it, so the whole chain is
known before anything exists.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fewstep.distill.config import PUBLISH_VERSION, TRAINING_VERSION
from fewstep.distill.recipe import Recipe
from fewstep.errors import UserError
from fewstep.eval.config import EVAL_VERSION, REPORT_VERSION
from fewstep.runstore import stage_hash
from fewstep.teachers.config import TARGETS_VERSION
from fewstep.teachers.hf import tokenizer_fingerprint
from fewstep.teachers.load import fingerprint_of, teacher_fingerprint
from fewstep.teachers.prompts import Prompt, prompts_fingerprint, read_prompts

# A stage's number stands in its room's config.py and is raised when the same recipe would give other outputs.
VERSIONS = {
    "targets": TARGETS_VERSION,
    "adapt": TRAINING_VERSION,
    "distill": TRAINING_VERSION,
    "eval": EVAL_VERSION,
    "report": REPORT_VERSION,
    "publish": PUBLISH_VERSION,
}
STAGES = tuple(VERSIONS)
TRAINED = ("adapt", "distill")
# Keys that came later, with the value at which they change nothing: left out of the hash where they have it, so that
# a new key runs no finished stage again.
LATER: dict[str, dict[str, Any]] = {
    "teacher": {"quantize": None, "runtime": "transformers"},
    "prompts": {"decontaminate": None},
    "targets": {"samples": 1, "attempts": 1},
    "keep": {"loops": None, "refusals": True, "script": None},
}
ASKED = {
    "source",
    "path",
    "hf",
    "reasoning_gym",
    "dedupe",
}  # of prompts: their contents are hashed, wherever they come from
NOT_HASHED = {"logging_steps", "eval_steps", "save_steps", "save_total_limit"}  # cadence: how often, not what


@dataclass(frozen=True)
class Stage:
    """One stage of one recipe, before it runs."""

    name: str
    config: dict  # the part of the recipe that counts, without paths
    inputs: dict[str, str]  # outside file or checkpoint → content fingerprint
    upstream: dict[str, str]  # stage → hash
    hash: str

    @property
    def folder(self) -> str:
        """Return the name of the stage's folder."""
        return f"{self.name}-{self.hash}"


def parts(recipe: Recipe) -> dict[str, dict]:
    """Return the part of the recipe that each of its stages uses, without paths, in the stages' order.

    `distill` is absent where the recipe sets it to null, `publish` where no repository is named.
    """
    engine = recipe.engine.model_dump(mode="json", include={"precision", "threads"})
    student = recipe.student.model_dump(mode="json", exclude={"base"})
    found: dict[str, dict] = {
        "targets": {
            "teacher": _without_later(
                "teacher", recipe.teacher.model_dump(mode="json", include={"dtype", "quantize", "runtime"})
            ),
            "prompts": _without_later("prompts", recipe.prompts.model_dump(mode="json", exclude=ASKED))
            | {"source": "jsonl"},
            "targets": _targets(recipe),
            "threads": recipe.engine.threads,
        },
        "adapt": {"student": student, "adapt": _trained(recipe.adapt), "engine": engine},
    }
    if recipe.distill is not None:
        found["distill"] = {"student": student, "distill": _trained(recipe.distill), "engine": engine}
    evaluation = recipe.eval.model_dump(mode="json", exclude={"tasks": {"__all__": {"path"}}})
    found["eval"] = {"eval": evaluation, "threads": recipe.engine.threads}
    found["report"] = {"name": recipe.name}
    if recipe.publish.repo is not None:
        found["publish"] = {"publish": recipe.publish.model_dump(mode="json")}
    return {name: {**part, "seed": recipe.seed} for name, part in found.items()}


# What a stage reads of the stages before it.
READS = {
    "targets": (),
    "adapt": ("targets",),
    "distill": ("targets", "adapt"),
    "eval": ("targets", "adapt", "distill"),
    "report": ("targets", "adapt", "distill", "eval"),
    "publish": ("adapt", "distill", "eval", "report"),
}


def chain(recipe: Recipe) -> dict[str, Stage]:
    """Return the recipe's stages in order, with every hash; those of `parts`.

    Raises:
        UserError: a file that is an input is missing or broken.
    """
    tasks = {f"tasks.{i}": _task_fingerprint(i, task) for i, task in enumerate(recipe.eval.tasks)}
    base = recipe.student.base
    inputs: dict[str, dict[str, str]] = {
        "targets": {
            "teacher": fingerprint_of(recipe.teacher),
            "prompts": prompts_fingerprint(recipe.prompts, recipe.targets),
            **(tasks if recipe.prompts.decontaminate else {}),
            # the ids of a server's answers are those of the base's tokenizer
            **({"tokenizer": tokenizer_fingerprint(str(base))} if recipe.teacher.is_endpoint else {}),
        },
        "adapt": {} if base is None else {"base": teacher_fingerprint(str(base))},
        "eval": tasks,
    }
    stages: dict[str, Stage] = {}
    for name, config in parts(recipe).items():
        upstream = {read: stages[read].hash for read in READS[name] if read in stages}
        outside = inputs.get(name, {})
        digest = stage_hash(name, VERSIONS[name], config, outside, list(upstream.values()))
        stages[name] = Stage(name, config, outside, upstream, digest)
    return stages


def _targets(recipe: Recipe) -> dict:
    config = recipe.targets.model_dump(mode="json", by_alias=True, exclude={"few_shot": True, "keep": {"json_schema"}})
    return _without_later("targets", config | {"keep": _without_later("keep", config["keep"])})


def _without_later(section: str, config: dict) -> dict:
    neutral = LATER[section]
    return {key: value for key, value in config.items() if key not in neutral or value != neutral[key]}


def _trained(config: Any) -> dict:
    return config.model_dump(mode="json", by_alias=True, exclude=NOT_HASHED)


def evaluation_prompts(recipe: Recipe) -> list[Prompt]:
    """Return the prompts of every evaluation task."""
    return [prompt for task in recipe.eval.tasks for prompt in read_prompts(task.prompts)]


def _task_fingerprint(place: int, task: Any) -> str:
    try:
        return prompts_fingerprint(task.prompts)
    except UserError as error:
        raise UserError(f"eval.tasks.{place} ({task.name}): {error}") from None


def portable(recipe: Recipe) -> dict:
    """Return the resolved recipe as JSON, with file names in place of this machine's paths and no server's address."""

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: strip(v) for k, v in value.items()}
        if isinstance(value, list):
            return [strip(v) for v in value]
        return Path(value).name if isinstance(value, str) and value.startswith("/") else value

    found = strip(recipe.model_dump(mode="json", by_alias=True))
    found["teacher"]["model"] = recipe.teacher.shown if recipe.teacher.is_endpoint else found["teacher"]["model"]
    return found
