"""Recipe section `eval`."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from fewstep.schema import Config
from fewstep.teachers.config import PromptsConfig

EVAL_VERSION = 3  # raised whenever a change could change a figure
REPORT_VERSION = 1  # raised when the same figures would now be shown otherwise
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Shares = Annotated[list[Share], Field(min_length=1)]
Positive = Annotated[float, Field(ge=0.0)]
Positives = Annotated[list[Positive], Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]
Counts = Annotated[list[Count], Field(min_length=1)]
Whole = Annotated[int, Field(ge=0)]
Wholes = Annotated[list[Whole], Field(min_length=1)]
# setting → the samplers that take it; the same as in students/decoding, which would import torch
OWNERS = {
    "threshold": ("threshold", "klass", "edit"),
    "leading": ("threshold",),
    "steps": ("fixed", "remask"),
    "factor": ("factor",),
    "gamma": ("entropy",),
    "margin": ("margin",),
    "kl": ("klass",),
    "history": ("klass",),
    "share": ("remask",),
    "rewrite": ("edit",),
}


class TaskConfig(Config):
    """One task: prompts whose answers can be checked."""

    name: str = Field(description="a file of eval/tasks: answer, booking")
    path: Path = Field(description="the task's JSONL, relative to the recipe")
    field: str = Field("instruction", description="the key of a row that holds the user's message")
    limit: int | None = Field(None, ge=1)

    @property
    def prompts(self) -> PromptsConfig:
        """Its rows, as prompts are read."""
        return PromptsConfig(source="jsonl", path=self.path, field=self.field, limit=self.limit)


class SamplerConfig(Config):
    """One sampler; a list as a setting means one row of results for each value."""

    name: Literal["threshold", "verify", "fixed", "factor", "entropy", "klass", "margin", "remask", "edit"]
    threshold: Share | Shares | None = Field(
        None, description="threshold, klass, edit: commit positions at least this confident; default 0.9"
    )
    leading: Whole | Wholes | None = Field(
        None,
        description="threshold: so many of a block's first open positions are committed however unsure; default 0",
    )
    steps: Count | Counts | None = Field(None, description="fixed, remask: denoising steps a block; default 8")
    factor: Positive | Positives | None = Field(
        None, description="factor: commit n positions while (n + 1)(1 - c_n) is below; default 0.5"
    )
    gamma: Positive | Positives | None = Field(
        None, description="entropy: nats of entropy that may be committed at once; default 0.1"
    )
    margin: Share | Shares | None = Field(
        None, description="margin: least lead of the best token over the second; default 0.8"
    )
    kl: Positive | Positives | None = Field(
        None, description="klass: most nats that a settled distribution may move; default 0.01"
    )
    history: Count | Counts | None = Field(None, description="klass: steps for which it must have settled; default 1")
    share: Share | Shares | None = Field(
        None, description="remask: share of decisions taken back in a step; default 0.25"
    )
    rewrite: Share | Shares | None = Field(
        None, description="edit: rewrite decided tokens where another is surer than this; default 0.9"
    )
    block_size: Count | Counts | None = Field(None, description="default: the student's own")

    @model_validator(mode="after")
    def _settings_belong_to_the_sampler(self):
        for key, owners in OWNERS.items():
            if getattr(self, key) is not None and self.name not in owners:
                raise ValueError(f"`{key}` is a setting of {', '.join(owners)}, not of {self.name}; remove it")
        return self

    def settings(self) -> list[dict]:
        """Return one dict of decoding settings per combination of the listed values."""
        out: list[dict] = [{}]
        for key in (*OWNERS, "block_size"):
            value = getattr(self, key)
            if value is not None:
                out = [{**s, key: v} for s in out for v in (value if isinstance(value, list) else [value])]
        return out


class EvalConfig(Config):
    """What is measured, and against whom."""

    tasks: list[TaskConfig] = Field(default_factory=list)
    samplers: list[SamplerConfig] = Field(
        default_factory=lambda: [
            SamplerConfig(name="threshold", threshold=[0.5, 0.7, 0.9, 0.95]),
            SamplerConfig(name="verify"),
        ]
    )
    baselines: list[Literal["teacher", "undistilled"]] = ["teacher", "undistilled"]
    max_new_tokens: int | None = Field(None, ge=1, description="default: targets.max_new_tokens")
    batch_size: int = Field(8, ge=1, description="prompts decoded together when only quality is measured")
    speed_prompts: int = Field(32, ge=1, description="prompts timed one by one, systems alternating")
    max_loss: float = Field(
        0.01, ge=0.0, description="score that a calibrated effort level may lose against the teacher"
    )
