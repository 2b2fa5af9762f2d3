"""Recipe sections `teacher`, `prompts` and `targets`."""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from fewstep.schema import Config

TARGETS_VERSION = 1  # raised when the same inputs would give other shards: the stage and all after it run again


class TeacherConfig(Config):
    """Which autoregressive checkpoint answers the prompts."""

    model: str = Field(description="Hub id, folder, .gguf file, or package://module/file.gguf")
    revision: str | None = Field(None, description="Hub commit; ignored for local files")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: float32 on a CPU, bfloat16 on a GPU"
    )


class PromptsConfig(Config):
    """What the teacher is asked."""

    source: Literal["jsonl"] = Field("jsonl", description="kind of the prompt source")
    path: Path = Field(description="a JSONL file, relative to the recipe")
    field: str = Field("instruction", description="the key of a row that holds the user's message")
    limit: int | None = Field(None, ge=1, description="use only the first rows")
    held_out: float = Field(0.05, ge=0.0, lt=1.0, description="share of the prompts kept for the held-out loss")
    checker: str | None = Field(
        None, description="scores the teacher's answers against the rows' `reference`: answer, booking, exact, json"
    )


class KeepConfig(Config):
    """Which answers become targets; what is dropped is counted by reason."""

    finished: bool = Field(True, description="drop answers cut at max_new_tokens")
    json_object: bool = Field(False, alias="json", description="keep answers that parse as a JSON object")
    json_schema: Path | None = Field(None, description="keep answers valid under this JSON schema file")
    regex: str | None = Field(None, description="keep answers that match in full")
    correct: bool = Field(False, description="keep answers that prompts.checker scores 1")


class TargetsConfig(Config):
    """How the teacher answers."""

    max_new_tokens: int = Field(128, ge=1)
    temperature: float = Field(0.0, ge=0.0, description="0: greedy; log-probabilities are stored at T=1 whatever it is")
    top_logprobs: int = Field(16, ge=0, description="log-probabilities stored per token; 0: none (then no kd)")
    batch_size: int = Field(16, ge=1, description="prompts answered together")
    shard_size: int = Field(128, ge=1, description="prompts per Parquet shard: the unit of resuming")
    few_shot: Path | None = Field(
        None, description="JSONL of {user, assistant} turns that the teacher sees and the student does not"
    )
    system_prompt: str | None = Field(
        None, description="a system message that the teacher sees and the student does not"
    )
    min_score: float = Field(
        0.05, ge=0.0, le=1.0, description="a teacher below this score on its own task stops the run"
    )
    keep: KeepConfig = KeepConfig()

    @model_validator(mode="before")
    @classmethod
    def _keep_shorthand(cls, value):
        if isinstance(value, dict) and value.get("keep") == "json":
            return {**value, "keep": {"json": True}}
        return value
