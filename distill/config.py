"""Recipe sections `adapt`, `distill`, `engine`, `track` and `publish`."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from fewstep.errors import UserError
from fewstep.schema import Config

# Which settings beside its weight an objective reads; one that is not listed may read any.
OBJECTIVE_SETTINGS = {
    "ce": set(),
    "ar": set(),
    "correction": set(),
    "certainty": {"temperature"},
    "consistency": {"temperature"},
    "kd": {"temperature", "divergence"},
}

TRAINING_VERSION = 5  # raised when the same recipe would now train another student
PUBLISH_VERSION = 1  # raised when a repository would now hold other files

Float = Annotated[float, BeforeValidator(lambda v: float(v) if isinstance(v, str) else v)]
Share = Annotated[Float, Field(ge=0.0, le=1.0)]


class LoraConfig(Config):
    """Low-rank adapters on every linear layer of the body."""

    rank: int = Field(64, ge=1)
    alpha: float | None = Field(None, description="default: the rank, so a scale of 1")
    gated: bool = Field(
        False, description="adapters act on noisy positions only: the clean stream stays the untouched teacher"
    )


class ObjectiveConfig(Config):
    """The weight of one objective, constant or a linear ramp over the stage."""

    weight: Float | None = Field(None, ge=0.0, description="a constant weight")
    start: Float = Field(0.0, ge=0.0, alias="from", description="ramp: weight at the first step")
    end: Float = Field(1.0, ge=0.0, alias="to", description="ramp: weight once `over` of the steps are done")
    over: Float = Field(0.5, gt=0.0, le=1.0, description="ramp: share of the steps it takes")
    temperature: Float = Field(1.0, gt=0.0, description="softmax temperature inside kd, certainty and consistency")
    divergence: Literal["forward", "reverse", "total_variation"] = Field(
        "forward",
        description="of kd: KL(teacher‖student), KL(student‖teacher), or 1 - Σ min(p, q), which raises acceptance in `verify`",
    )

    @model_validator(mode="after")
    def _constant_or_ramp(self):
        if self.weight is not None and self.model_fields_set & {"start", "end", "over"}:
            raise ValueError("has both weight and a ramp (from, to, over); keep one of them")
        return self

    def at(self, progress: float) -> float:
        """Return the weight at `progress`, the share of the stage's steps done, in [0, 1]."""
        if self.weight is not None:
            return self.weight
        return self.start + (self.end - self.start) * min(1.0, progress / self.over)


def _as_objective(value):
    if isinstance(value, bool):
        raise ValueError("is a boolean; give a weight such as 1.0")
    if isinstance(value, (int, float, str)):
        return {"weight": float(value)}
    return value


Objective = Annotated[ObjectiveConfig, BeforeValidator(_as_objective)]


class OnPolicyConfig(Config):
    """Rounds in which the student decodes training prompts and the teacher scores what it wrote."""

    rounds: int = Field(2, ge=1, description="they cut the stage into rounds + 1 equal parts")
    prompts: int = Field(512, ge=1, description="prompts decoded a round")
    threshold: Share = Field(0.9, description="of the sampler that decodes them")
    share: Share = Field(
        0.25,
        gt=0.0,
        lt=1.0,
        description="share of the samples, until the next round, that are the student's own texts",
    )


class TrainingConfig(Config):
    """One training stage; `adapt` and `distill` take the same keys and differ in their defaults."""

    max_steps: int = Field(400, ge=1)
    batch_tokens: int = Field(4096, ge=1, description="positions (clean and noisy) per optimizer step, over all ranks")
    gradient_accumulation_steps: int = Field(1, ge=1)
    learning_rate: Float = Field(1e-4, gt=0.0)
    lr_scheduler_type: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_ratio: Share = 0.03
    weight_decay: Float = Field(0.0, ge=0.0, description="of matrices; norms and biases never decay")
    max_grad_norm: Float = Field(1.0, gt=0.0)
    ema: Float = Field(
        0.0,
        ge=0.0,
        lt=1.0,
        description="decay of an exponential mean of the weights, which becomes the student: 0.999 looks back about 1,000 steps; 0: the last weights do; held-out figures are those of the last weights",
    )
    objectives: dict[str, Objective] = Field(
        description="objective name → weight, or {weight, from, to, over, temperature, divergence}"
    )
    lora: LoraConfig | None = Field(None, description="null: full weights")
    order: Literal["noise", "trajectory", "nll"] = Field(
        "noise",
        description="which positions are masked: at random, those that the undistilled student decides last, or those that surprised the teacher most",
    )
    order_share: Share = Field(
        1.0, description="share of samples that `order` acts on; the others are masked at random"
    )
    noise: tuple[Float, Float] = Field((0.05, 1.0), description="range of the share of a block that is masked")
    noise_end: tuple[Float, Float] | None = Field(
        None, description="the range that `noise` has moved to, in a straight line, by the end of the stage"
    )
    suffix: Share = Field(
        0.0,
        description="share of blocks masked from a point to their end: where the teacher's distribution is a valid target",
    )
    right_weighted: Float = Field(
        0.0,
        ge=0.0,
        lt=1.0,
        description="how far masking at random leans to the right: 0 not at all; near 1 a half-masked block's first position is almost never masked, its last almost always",
    )
    anchor: Share = Field(
        0.0,
        description="share of blocks whose first position stays visible, as in a draft of `verify` behind a known token",
    )
    guess: Share = Field(
        0.0,
        description="share of samples whose masked positions hold the student's own guesses: what `correction` learns from",
    )
    guess_noise: Float = Field(0.75, gt=0.0, le=1.0, description="share of a block that is guessed")
    reveal: Float = Field(
        0.5,
        gt=0.0,
        lt=1.0,
        description="share of a block's masked positions that the later of the two states of `consistency` reveals",
    )
    on_policy: OnPolicyConfig | None = Field(
        None,
        description="train also on the student's own texts, labelled by the teacher; null: on the targets alone",
    )
    copies: int = Field(1, ge=1, description="noisy copies of a response that share its clean stream")
    complementary: bool = Field(False, description="add to each copy one with the complementary mask")
    block_sizes: tuple[int, ...] | None = Field(
        None, description="curriculum: block sizes in equal phases; default: student.block_size throughout"
    )
    random_block_size: Share = Field(
        0.0,
        description="last share of the steps in which each step draws its block size from 4, 8, 16, … up to student.block_size, so that any of them may decode",
    )
    random_offset: Share = Field(
        0.5, description="share of samples whose first block has a random length, as `verify` needs"
    )
    fill_weight: Float = Field(0.1, ge=0.0, description="loss weight of the EOS fill after the first EOS")
    logging_steps: int = Field(10, ge=1)
    eval_steps: int = Field(50, ge=1, description="steps between held-out losses")
    save_steps: int = Field(50, ge=1)
    save_total_limit: int = Field(2, ge=1)

    def noise_at(self, progress: float) -> tuple[float, float]:
        """Return the range of the masked share at `progress`, the share of the stage's steps done, in [0, 1]."""
        (low, high), (low_end, high_end) = self.noise, self.noise_end or self.noise
        return low + (low_end - low) * progress, high + (high_end - high) * progress

    def used(self) -> set[str]:
        """Return the names of the objectives that ever have a weight above 0."""
        return {name for name, o in self.objectives.items() if max(o.at(0.0), o.at(1.0)) > 0}


class AdaptConfig(TrainingConfig):
    """From an AR checkpoint to a denoiser."""

    objectives: dict[str, Objective] = Field({"ce": ObjectiveConfig(weight=1.0), "ar": ObjectiveConfig(weight=1.0)})


class DistillConfig(TrainingConfig):
    """Fewer steps at the same quality."""

    max_steps: int = Field(200, ge=1)
    objectives: dict[str, Objective] = Field(
        {
            "ce": ObjectiveConfig(weight=1.0),
            "ar": ObjectiveConfig(weight=1.0),
            "kd": ObjectiveConfig(weight=0.5),
            "certainty": ObjectiveConfig(start=0.0, end=1.0, over=0.5, temperature=0.5),
        }
    )
    order: Literal["noise", "trajectory", "nll"] = "trajectory"
    noise: tuple[Float, Float] = (0.0, 1.0)
    noise_end: tuple[Float, Float] | None = (0.8, 1.0)
    suffix: Share = 0.5


def check_training(
    stage: str, config: TrainingConfig, attention: str, alignment: str, gated: bool, block_size: int
) -> None:
    """Raise UserError for an objective or setting that this kind of student cannot have.

    Args:
        attention: the student's pattern. alignment: whose output says a token.
        gated: whether its clean stream is frozen: adapt put gated adapters on it.
        block_size: its largest block.
    """
    for key, (low, high) in (("noise", config.noise), ("noise_end", config.noise_end or config.noise)):
        if not 0.0 <= low <= high <= 1.0:
            raise UserError(f"{stage}.{key}: [{low}, {high}] is no range of shares; give 0 ≤ low ≤ high ≤ 1")
    for size in config.block_sizes or ():
        if not 1 <= size <= block_size:
            raise UserError(f"{stage}.block_sizes: {size} must lie between 1 and student.block_size={block_size}")
    if stage == "adapt" and config.order == "trajectory":
        raise UserError("adapt.order: trajectory is recorded from an adapted student; use noise or nll here")
    if not config.used():
        raise UserError(f"{stage}.objectives: no objective has a weight above 0; give one, such as ce: 1.0")
    for name, objective in config.objectives.items():
        settings = objective.model_fields_set - {"weight", "start", "end", "over"}
        for key in sorted(settings - OBJECTIVE_SETTINGS.get(name, settings)):
            raise UserError(f"{stage}.objectives.{name}.{key}: {name} does not read it; remove it")
    if ("correction" in config.used()) != (config.guess > 0):
        raise UserError(
            f"{stage}.guess: {config.guess:g} with objectives {', '.join(sorted(config.used()))}: guessed samples are "
            f"what correction learns from; set both {stage}.guess and {stage}.objectives.correction, or neither"
        )
    masked = sorted(config.used() - {"ar", "correction"})
    if config.guess == 1 and masked:
        raise UserError(f"{stage}.guess: 1 leaves no masked position for {', '.join(masked)}; give a share below 1")
    for key, read, needed in (
        ("guess_noise", config.guess > 0, "guess above 0"),
        ("reveal", "consistency" in config.used(), "the objective consistency"),
    ):
        if key in config.model_fields_set and not read:
            raise UserError(f"{stage}.{key}: {getattr(config, key):g} has no use without {needed}; remove it")
    if config.on_policy is not None and config.on_policy.rounds >= config.max_steps:
        raise UserError(
            f"{stage}.on_policy.rounds: {config.on_policy.rounds} do not fit into {config.max_steps} steps; lower them"
        )
    at_random = config.guess > 0 or (config.suffix < 1 and (config.order == "noise" or config.order_share < 1))
    if config.right_weighted and (config.complementary or not at_random):
        why = "a complementary copy leans the other way" if config.complementary else "no position is masked at random"
        raise UserError(f"{stage}.right_weighted: {config.right_weighted:g}, but {why}; set it to 0")
    if gated and "ar" in config.used():
        raise UserError(
            f"{stage}.objectives.ar: the clean stream of a gated LoRA is the untouched teacher and learns nothing; set it to 0"
        )
    if stage == "distill" and config.lora is not None and config.lora.gated != gated:
        raise UserError(
            f"distill.lora.gated: {config.lora.gated}, where adapt.lora.gated is {gated}; remove distill.lora or make them agree"
        )
    if alignment == "shifted":
        if attention == "bidirectional":
            raise UserError(
                "student.alignment: shifted, where a bidirectional student has no clean stream to say a block's first "
                "token; use same_position"
            )
        if config.guess:
            raise UserError(
                f"{stage}.guess: {config.guess:g}, but student.alignment is shifted, a baseline without guesses; set it to 0"
            )
    if attention == "bidirectional":
        if "ar" in config.used():
            raise UserError(f"{stage}.objectives.ar: a bidirectional student has no clean response stream; set it to 0")
        if config.copies > 1 or config.complementary:
            raise UserError(
                f"{stage}.copies: a bidirectional student takes one noisy copy; set copies: 1 and complementary: false"
            )
        if "kd" in config.used() or config.order == "trajectory":
            raise UserError(
                f"{stage}: a bidirectional student sees later blocks, so neither kd nor order: trajectory fits it; remove them"
            )
        if config.on_policy is not None:
            raise UserError(
                f"{stage}.on_policy: a bidirectional student sees tokens that the teacher's labels do not follow; remove it"
            )
        if config.anchor:
            raise UserError(f"{stage}.anchor: a bidirectional student has no clean stream to supply it; set it to 0")
        if config.random_offset:
            raise UserError(f"{stage}.random_offset: a bidirectional student has no blocks to shift; set it to 0")


class EngineConfig(Config):
    """What runs the optimizer steps; never part of a stage's hash, but for `precision` and `threads`."""

    name: Literal["deepspeed", "plain"] = "deepspeed"
    zero_stage: Literal[0, 1, 2, 3] = 1
    precision: Literal["auto", "fp32", "bf16"] = Field("auto", description="auto: fp32 on a CPU, bf16 on a GPU")
    packing: Literal["padded", "packed"] = Field(
        "padded",
        description="padded: one sample a row, those of a step of like length; packed: samples stand side by side in rows of up to batch_tokens ÷ (ranks × gradient_accumulation_steps) positions and never see each other, so nothing is padding; on a GPU flex_attention, where the model's class supports it, leaves out what they do not see of one another; elsewhere mask and attention grow with the square of a row",
    )
    activation_checkpointing: bool = Field(
        False,
        description="keep each layer's input alone and compute the rest again in the backward pass: less memory, about a third more time, the same gradients",
    )
    offload: Literal["none", "optimizer", "all"] = Field(
        "none",
        description="what DeepSpeed keeps in the host's memory: with zero_stage 1 or above the optimizer's state, with 3 the weights too (all)",
    )
    threads: int | None = Field(
        None, ge=1, description="CPU threads; bit-exact repeats need the same count. Default: all cores"
    )

    @model_validator(mode="after")
    def _can_offload(self):
        least = {"none": 0, "optimizer": 1, "all": 3}[self.offload]
        if self.offload != "none" and (self.name == "plain" or self.zero_stage < least):
            raise ValueError(f"offload: {self.offload} needs name: deepspeed and zero_stage: {least} or above")
        return self


class WandbConfig(Config):
    """Weights & Biases; metrics.jsonl is written whatever this says."""

    project: str | None = Field(None, description="null: not tracked by W&B")
    mode: Literal["offline", "online", "disabled"] = "offline"


class TrackConfig(Config):
    """Where the figures of a run go besides its own folder."""

    wandb: WandbConfig = WandbConfig()


class PlanConfig(Config):
    """What `fewstep plan` reckons with; nothing that is trained depends on it."""

    device: Literal["B200", "H200", "H100", "A100", "L40S", "RTX 4090"] | None = Field(
        None, description="the GPU that the run is planned for; null: what this machine has"
    )
    ranks: int = Field(1, ge=1, description="how many of them the training stages will use")
    price_per_hour: Float | None = Field(
        None, ge=0.0, description="of one device, in whichever currency; null: no cost is stated"
    )


class PublishConfig(Config):
    """The Hub repository of the student."""

    repo: str | None = Field(None, description="owner/name; null: nothing is published")
    private: bool = True
