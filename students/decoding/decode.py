"""Decode a batch of prompts with any sampler: the one entry that evaluation, server and Hub share."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

# transformers copies what it finds in `from .file import name`; `from . import file` would not travel
from .denoise import denoise
from .edit import EDIT
from .entropy import ENTROPY
from .factor import FACTOR
from .fixed import FIXED
from .forward import Forward
from .klass import KLASS
from .margin import MARGIN
from .remask import REMASK
from .rows import Row
from .threshold import THRESHOLD
from .verify import verify

BLOCKWISE = {s.name: s for s in (FIXED, THRESHOLD, FACTOR, ENTROPY, KLASS, MARGIN, REMASK, EDIT)}
SAMPLERS = ("ar", *BLOCKWISE, "verify")
SETTINGS = tuple(dict.fromkeys(key for sampler in BLOCKWISE.values() for key in sampler.settings))


class SettingError(ValueError):
    """A setting that is unknown, of another sampler, or out of range; `setting` is its name."""

    def __init__(self, setting: str, message: str):
        super().__init__(message)
        self.setting = setting


@dataclass
class Decoded:
    """One answer and how it came about.

    ids: generated tokens, the EOS included, never more than max_new_tokens.
    finish_reason: "stop" or "length".
    nfe: forwards of this row: prefill, drafts, denoising, verification.
    steps, confidence: for each token the 0-based forward that committed it, and its probability there.
    positions: positions computed after the prompt.
    first_token_s: seconds until the first token of the contiguous prefix was decided.
    """

    ids: list[int]
    finish_reason: str
    nfe: int
    steps: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    positions: int = 0
    first_token_s: float = 0.0


def decode(
    model,
    prompts: list[list[int]],
    *,
    sampler: str = "threshold",
    max_new_tokens: int | list[int],
    eos_token_ids: list[int],
    block_size: int | None = None,
    temperature: float | list[float] = 0.0,
    top_p: float | list[float] = 1.0,
    seed: int | list[int] = 0,
    stop: Callable[[list[int], int], int | None] | None = None,
    on_tokens: Callable[[int, list[int]], None] | None = None,
    on_step: Callable[[int, list[int | None]], None] | None = None,
    **settings,
) -> list[Decoded]:
    """Answer `prompts` together; every row ends on its own, and none depends on the others.

    Args:
        model: a causal LM in eval mode. Samplers other than `ar` need a student: `config.fewstep`.
        prompts: token ids, one non-empty list a row.
        sampler: `ar` (cached, no drafting), `verify` (lossless), or one of BLOCKWISE.
        max_new_tokens: the most tokens generated a row; less where the context ends.
        eos_token_ids: tokens that end a row.
        block_size: default and most: the student's own.
        temperature: 0 is greedy; above it tokens are drawn, keyed by (seed, position, step).
        top_p: of (0, 1]; drawn are the likeliest tokens that hold this mass.
        seed: of the row's draws.
        stop: see `stops.stop_at`.
        on_tokens: called with a prompt's index and the tokens that just joined its contiguous answer:
            a finished block, or an accepted run. What it raises ends the decoding of all rows.
        on_step: called after each of a prompt's forwards with its index and its answer as it then stands, None where a
            position of the open block is not decided. It may still change there: `remask` and `edit` revise.
        settings: the sampler's own (`threshold`, `steps`, …; see its file), each a number or one a row.

    Returns:
        One `Decoded` a prompt, in order.

    Raises:
        ValueError: for settings out of range, an empty prompt, or one that fills the context.
    """
    started = time.perf_counter()
    settings = check_settings(sampler, settings)
    block_size = _block_size(model, sampler, block_size)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 10**9
    for i, prompt in enumerate(prompts):
        name = "the prompt" if len(prompts) == 1 else f"prompt {i + 1}"
        if not prompt:
            raise ValueError(f"{name} is empty: give at least one token")
        if len(prompt) >= context:
            raise ValueError(f"{name} has {len(prompt)} tokens, the model's context {context}: shorten it")
    budgets = _per_row("max_new_tokens", max_new_tokens, len(prompts), lambda v: v >= 1, "must be ≥ 1")
    drawing = check_drawing(len(prompts), temperature, top_p, seed)
    for name, value in settings.items():
        if isinstance(value, list) and len(value) != len(prompts):
            raise ValueError(f"{name} has {len(value)} values for {len(prompts)} prompts: give one, or one for each")
    if not prompts:
        return []
    eos = frozenset(eos_token_ids)
    told = dict(on_tokens=on_tokens, on_step=on_step, stop=stop)
    rows = [
        Row(i, p, min(n, context - len(p)), eos, started, temperature=t, top_p=tp, seed=s, **told)
        for i, (p, n, (t, tp, s)) in enumerate(zip(prompts, budgets, drawing))
    ]
    forward = Forward(model, capacity=max(len(r.pending) + r.budget for r in rows))
    if sampler in BLOCKWISE:
        denoise(forward, rows, block_size, BLOCKWISE[sampler], settings)
    else:
        verify(forward, rows, block_size)
    return [
        Decoded(r.ids, r.finish_reason or "length", r.nfe, r.steps, r.confidence, r.positions, r.first_token_s or 0.0)
        for r in rows
    ]


def check_drawing(count: int, temperature=0.0, top_p=1.0, seed=0) -> list[tuple[float, float, int]]:
    """Return (temperature, top_p, seed) of each of `count` rows.

    Raises:
        ValueError: for one out of range, or a list of another length.
    """
    return list(
        zip(
            _per_row("temperature", temperature, count, lambda v: 0 <= v < float("inf"), "must be a number ≥ 0"),
            _per_row("top_p", top_p, count, lambda v: 0 < v <= 1, "must be above 0 and at most 1"),
            _per_row("seed", seed, count, lambda v: isinstance(v, int), "must be a whole number"),
        )
    )


def check_settings(sampler: str, settings: dict) -> dict:
    """Return every setting of a sampler with its value: as given, or the default where None.

    Raises:
        ValueError: for an unknown sampler, a setting of another one, or one out of range.
    """
    if sampler not in SAMPLERS:
        raise SettingError("sampler", f"sampler {sampler!r} is unknown; use one of {', '.join(SAMPLERS)}")
    own = BLOCKWISE[sampler].settings if sampler in BLOCKWISE else {}
    out = {}
    for key, value in settings.items():
        if value is not None and key not in own:
            owners = [name for name, other in BLOCKWISE.items() if key in other.settings]
            also = f"belongs to {', '.join(owners)}" if owners else "is no setting of any sampler"
            raise SettingError(key, f"sampler {sampler}: {key} {also}; leave it out")
    for key, setting in own.items():
        value = settings.get(key)
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        for one in values:
            if one is not None and not setting.takes(one):
                raise SettingError(key, f"{key}={one!r}: the sampler `{sampler}` needs {setting.wanted()}")
        filled = [setting.default if one is None else one for one in values]
        out[key] = filled if isinstance(value, (list, tuple)) else filled[0]
    return out


def _per_row(name: str, value, count: int, holds: Callable, rule: str) -> list:
    """Return one value a row, each of them checked."""
    given = list(value) if isinstance(value, (list, tuple)) else [value]
    values = given if isinstance(value, (list, tuple)) else given * count
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} values for {count} prompts: give one, or one for each")
    for one in given:
        if isinstance(one, bool) or not isinstance(one, (int, float)) or not holds(one):
            raise SettingError(name, f"{name}={one!r}: {rule}")
    return values


def _block_size(model, sampler: str, block_size: int | None) -> int:
    if sampler == "ar":
        return 1
    trained = (getattr(model.config, "fewstep", None) or {}).get("block_size")
    if trained is None:
        raise SettingError(
            "sampler", f"sampler {sampler} needs a few-step student; this config.json has no `fewstep` section"
        )
    if block_size is None:
        return trained
    if not 1 <= block_size <= trained:
        raise SettingError(
            "block_size", f"block_size={block_size}: must lie between 1 and {trained}, the largest trained"
        )
    return block_size
