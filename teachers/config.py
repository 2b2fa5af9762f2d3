"""Recipe sections `teacher`, `prompts` and `targets`."""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from fewstep.schema import Config

# Endings of prompt files → the kind of their source.
SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}  # fmt: skip
ENDPOINT = ("http://", "https://")  # how a server's URL begins
TARGETS_VERSION = 1  # raised when the same inputs would give other shards: the stage and all after it run again


class EndpointConfig(Config):
    """How an OpenAI-compatible server is asked."""

    served: str | None = Field(None, description="the model's name there; null: the only one that it serves")
    api: Literal["completions", "chat"] = Field(
        "completions",
        description="completions: the server gets token ids, as the student will see them; chat: it gets messages and applies its own template",
    )
    key: str | None = Field(
        None, description="name of the environment variable that holds the API key; null: none is sent"
    )
    concurrency: int = Field(8, ge=1, description="requests under way at a time")
    timeout: float = Field(300.0, gt=0, description="seconds after which a request is given up and sent again")
    retries: int = Field(
        8, ge=0, description="times that a request is sent again after a 429, a 5xx or a lost connection"
    )


class TeacherConfig(Config):
    """Which autoregressive model answers the prompts."""

    model: str = Field(
        description="Hub id, folder, .gguf file, package://module/file.gguf, or the URL of an OpenAI-compatible server (https://host/v1)"
    )
    revision: str | None = Field(None, description="Hub commit; ignored for local files")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: float32 on a CPU, bfloat16 on a GPU"
    )
    runtime: Literal["transformers", "vllm"] = Field(
        "transformers",
        description="what runs its weights while it answers; vllm, where installed, is faster on a GPU, and `targets.batch_size` is how many rows it takes at a time",
    )
    quantize: Literal["int8", "int4"] | None = Field(
        None,
        description="load its linear layers with bitsandbytes in 8 bits, or in 4 (NF4); the student still starts from the full weights",
    )
    device_map: Literal["auto"] | None = Field(
        None, description="auto: spread a teacher that no single GPU holds over all of them, and the CPU"
    )
    acknowledge: str | None = Field(
        None,
        description="the name of the teacher's licence, where it puts conditions on what is trained on its answers (of an endpoint: always): you have read them and keep to them",
    )
    endpoint: EndpointConfig = EndpointConfig()

    @model_validator(mode="after")
    def _only_checkpoints_are_placed(self):
        for key in ("quantize", "device_map"):
            if getattr(self, key) is not None and (self.is_endpoint or self.model.lower().endswith(".gguf")):
                kind = (
                    "a server loads its model itself"
                    if self.is_endpoint
                    else "a GGUF file is dequantised and loaded whole"
                )
                raise ValueError(f"{key} is {getattr(self, key)!r}, but {kind}; remove it")
        if self.runtime == "vllm" and (self.is_endpoint or self.quantize is not None):
            kind = (
                "a server runs its model itself"
                if self.is_endpoint
                else f"quantize {self.quantize} is transformers' own"
            )
            raise ValueError(f"runtime is 'vllm', but {kind}; remove one of them")
        return self

    @property
    def shown(self) -> str:
        """The teacher's name for pages and cards: of a server its model's, never its address; of a local path its end."""
        if self.is_endpoint:
            return self.endpoint.served or "a served model"
        return "/".join(Path(self.model).parts[-2:]) if Path(self.model).is_absolute() else self.model

    @property
    def is_endpoint(self) -> bool:
        """Whether the model is a server's, so that its weights are not to be had."""
        return self.model.startswith(ENDPOINT)


class HubPromptsConfig(Config):
    """A dataset on the Hugging Face Hub."""

    name: str = Field(description="owner/name")
    config: str | None = None
    split: str = "train"
    revision: str | None = Field(None, description="a commit")


class GymPromptsConfig(Config):
    """A reasoning-gym task; its entries' answers become the rows' `reference`."""

    name: str = Field(description="a reasoning-gym dataset, such as chain_sum")
    seed: int = 0
    size: int = Field(1000, ge=1, description="how many entries")
    settings: dict[str, int | float | bool | str] = Field({}, description="the dataset's own, such as {min_terms: 3}")


class DecontaminateConfig(Config):
    """Leave out prompts that share text with the recipe's evaluation tasks; what is left out is counted and listed."""

    words: int = Field(
        13, ge=1, description="a prompt is left out that shares so many words in a row with one of evaluation"
    )


class PromptsConfig(Config):
    """What the teacher is asked: rows of a file, of a Hub dataset, or of a reasoning-gym task."""

    source: Literal["jsonl", "json", "csv", "parquet", "text"] = Field(
        "jsonl", description="kind of the file; where it is not given, the ending of path says it"
    )
    path: Path | None = Field(None, description="a file of prompts, relative to the recipe")
    hf: HubPromptsConfig | None = Field(None, description="in place of path: a Hub dataset")
    reasoning_gym: GymPromptsConfig | None = Field(None, description="in place of path: a reasoning-gym task")
    field: str = Field("instruction", description="the key of a row that holds the user's message")
    limit: int | None = Field(None, ge=1, description="use only the first rows")
    held_out: float = Field(0.05, ge=0.0, lt=1.0, description="share of the prompts kept for the held-out loss")
    dedupe: bool = Field(False, description="keep the first of prompts that differ in case and spaces alone")
    decontaminate: DecontaminateConfig | None = Field(None, description="null: nothing is left out")
    checker: str | None = Field(
        None, description="scores the teacher's answers against the rows' `reference`: answer, booking, exact, json"
    )

    @model_validator(mode="before")
    @classmethod
    def _by_ending(cls, value):
        if isinstance(value, dict) and "source" not in value and isinstance(value.get("path"), (str, Path)):
            kind = SUFFIXES.get(Path(value["path"]).suffix.lower())
            return value if kind in (None, "jsonl") else {**value, "source": kind}
        return value

    @model_validator(mode="after")
    def _one_place(self):
        given = [key for key in ("path", "hf", "reasoning_gym") if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError(f"has {' and '.join(given) or 'no source'}; give one of path, hf and reasoning_gym")
        return self

    @property
    def place(self) -> str:
        """Return the source's name, for messages."""
        return str(self.path or (self.hf or self.reasoning_gym).name)  # type: ignore[union-attr]


class KeepConfig(Config):
    """Which answers become targets; what is dropped is counted by reason."""

    finished: bool = Field(True, description="drop answers cut at max_new_tokens")
    json_object: bool = Field(False, alias="json", description="keep answers that parse as a JSON object")
    json_schema: Path | None = Field(None, description="keep answers valid under this JSON schema file")
    regex: str | None = Field(None, description="keep answers that match in full")
    correct: bool = Field(False, description="keep answers that prompts.checker scores 1")
    loops: int | None = Field(
        None, ge=2, description="drop answers in which a run of words stands so many times in a row; 4 is a safe choice"
    )
    refusals: bool = Field(True, description="false: drop answers that begin as a refusal does")
    script: str | None = Field(
        None, description="keep answers whose letters are nine in ten of this Unicode script: latin, cyrillic, han, …"
    )


class TargetsConfig(Config):
    """How the teacher answers."""

    max_new_tokens: int = Field(128, ge=1)
    temperature: float = Field(0.0, ge=0.0, description="0: greedy; log-probabilities are stored at T=1 whatever it is")
    top_logprobs: int = Field(16, ge=0, description="log-probabilities stored per token; 0: none (then no kd)")
    samples: int = Field(1, ge=1, description="answers drawn for each prompt; those alike count once")
    attempts: int = Field(
        1, ge=1, description="an answer that `keep` drops is drawn again, until so many were (rejection sampling)"
    )
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

    @model_validator(mode="after")
    def _greedy_is_always_the_same(self):
        for key in ("samples", "attempts"):
            if getattr(self, key) > 1 and self.temperature == 0:
                raise ValueError(f"{key}: {getattr(self, key)} greedy answers are one answer; set temperature above 0")
        return self

    @model_validator(mode="before")
    @classmethod
    def _keep_shorthand(cls, value):
        if isinstance(value, dict) and value.get("keep") == "json":
            return {**value, "keep": {"json": True}}
        return value
