"""Whether a recipe's training fits into a device's memory, and the smallest change that would make it."""

from pydantic import ValidationError

from fewstep.distill.estimate import Machine, Need, training, typical_row
from fewstep.distill.recipe import Recipe

FILL = 0.95  # share of a device's memory that may be planned for
MOST_RANKS = 1024

Change = dict[str, object]  # dotted key → value


def too_large(recipe: Recipe, needs: dict[str, Need], machine: Machine, left: set[str]) -> str | None:
    """Return which training stage of those `left` fits least, or None if all do (or the device's memory is not known)."""
    sizes = {stage: _size(needs[stage], recipe, machine) for stage in recipe.training() if stage in left}
    if machine.memory is None or not sizes:
        return None
    worst = max(sizes, key=lambda stage: sizes[stage])
    return worst if sizes[worst] > FILL * machine.memory else None


def _size(need: Need, recipe: Recipe, machine: Machine) -> float:
    """Return what the device must hold; the ranks of a CPU share its memory, with all that was offloaded."""
    if machine.gpu:
        return need.memory
    return recipe.plan.ranks * (need.memory + need.parts.get("host", 0.0))


def smallest_change(recipe: Recipe, stage: str, facts: dict, machine: Machine) -> Change | None:
    """Return the first change, from those that cost nothing to those that cost most, with which `stage` fits."""
    row = typical_row(recipe, recipe.training()[stage])  # the prompts are read once
    for change in _changes(recipe, stage, machine):
        tried = changed(recipe, change)
        if tried is not None and _size(training(tried, stage, facts, machine.gpu, row), tried, machine) <= FILL * (
            machine.memory or 0
        ):
            return change
    return None


def _changes(recipe: Recipe, stage: str, machine: Machine):
    """Yield changes: first what gives the same result more slowly, then more ranks, then adapters."""
    config, engine = recipe.training()[stage], recipe.engine
    accumulate = f"{stage}.gradient_accumulation_steps"
    more = [config.gradient_accumulation_steps * 2**i for i in range(1, 8)]
    # a micro-batch of a few samples at least
    more = [steps for steps in more if config.batch_tokens / steps / recipe.plan.ranks >= 1000]
    recompute: Change = {} if engine.activation_checkpointing else {"engine.activation_checkpointing": True}
    yield from ({accumulate: steps} for steps in more)
    least = {accumulate: more[-1]} if more else {}
    if recompute:
        yield recompute
        yield from ({**recompute, accumulate: steps} for steps in more)
    saved = {**least, **recompute}
    if engine.name == "deepspeed":
        sharded = [{"engine.zero_stage": z} for z in (2, 3) if z > engine.zero_stage] if recipe.plan.ranks > 1 else []
        yield from ({**saved, **zero} for zero in sharded)
        if machine.gpu:
            yield {**saved, "engine.zero_stage": max(1, engine.zero_stage), "engine.offload": "optimizer"}
            yield {**saved, "engine.zero_stage": 3, "engine.offload": "all"}
    if machine.gpu:
        ranks = recipe.plan.ranks * 2
        while ranks <= MOST_RANKS:
            if config.batch_tokens / config.gradient_accumulation_steps / ranks >= 1000:
                yield {**recompute, "engine.name": "deepspeed", "engine.zero_stage": 3, "plan.ranks": ranks}
            ranks *= 2
    if config.lora is None:
        yield {**saved, f"{stage}.lora": {"rank": 64}}


def changed(recipe: Recipe, change: Change) -> Recipe | None:
    """Return the recipe with some keys set, or None where it refuses them."""
    raw = recipe.model_dump(by_alias=True, exclude_unset=True)
    for key, value in change.items():
        section, name = key.split(".")
        raw.setdefault(section, {})[name] = value
    try:
        return Recipe.model_validate(raw)
    except ValidationError:
        return None


def as_overrides(change: Change) -> str:
    """Return a change as the command line takes it."""

    def text(value: object) -> str:
        if isinstance(value, dict):
            return '"{' + ", ".join(f"{k}: {v}" for k, v in value.items()) + '}"'
        return str(value).lower() if isinstance(value, bool) else str(value)

    return " ".join(f"{key}={text(value)}" for key, value in change.items())
