"""Decode a batch of prompts with any sampler: the one entry that evaluation, server and Hub share."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

# transformers copies what it finds in `from .file import name`; `from . import file` would not travel
from .denoise import denoise
from .fixed import check as check_steps
from .fixed import select as select_fixed
from .forward import Forward
from .rows import Row
from .threshold import check as check_threshold
from .threshold import select as select_threshold
from .verify import verify

SAMPLERS = ("ar", "fixed", "threshold", "verify")


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
    max_new_tokens: int,
    eos_token_ids: list[int],
    block_size: int | None = None,
    threshold: float | None = None,
    steps: int | None = None,
    on_tokens: Callable[[int, list[int]], None] | None = None,
) -> list[Decoded]:
    """Answer `prompts` together; every row ends on its own.

    Args:
        model: a causal LM in eval mode. Samplers other than `ar` need a student: `config.fewstep`.
        prompts: token ids, one non-empty list a row.
        sampler: `ar` (cached, no drafting), `fixed`, `threshold` or `verify`.
        max_new_tokens: the most tokens generated a row; less where the context ends.
        eos_token_ids: tokens that end a row.
        block_size: default and most: the student's own.
        threshold: for `threshold`, in [0, 1]; default 0.9.
        steps: for `fixed`, denoising steps a block; default: one a position.
        on_tokens: called with a prompt's index and the tokens that just joined its contiguous answer:
            a finished block, or an accepted run. What it raises ends the decoding of all rows.

    Returns:
        One `Decoded` a prompt, in order.

    Raises:
        ValueError: for settings out of range, an empty prompt, or one that fills the context.
    """
    started = time.perf_counter()
    if sampler not in SAMPLERS:
        raise ValueError(f"sampler {sampler!r} is unknown; use one of {', '.join(SAMPLERS)}")
    if threshold is not None and sampler != "threshold" or steps is not None and sampler != "fixed":
        raise ValueError(
            f"sampler {sampler}: threshold belongs to `threshold` and steps to `fixed`; leave the other out"
        )
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens}: must be ≥ 1")
    block_size = _block_size(model, sampler, block_size)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 10**9
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {i} is empty: give at least one token")
        if len(prompt) >= context:
            raise ValueError(f"prompt {i} has {len(prompt)} tokens, the model's context {context}: shorten the prompt")
    if not prompts:
        return []
    eos = frozenset(eos_token_ids)
    rows = [Row(i, p, min(max_new_tokens, context - len(p)), eos, started, on_tokens) for i, p in enumerate(prompts)]
    forward = Forward(model, capacity=max(len(r.pending) + r.budget for r in rows))
    if sampler == "fixed":
        steps = block_size if steps is None else steps
        check_steps(steps)
        denoise(forward, rows, block_size, partial(select_fixed, steps=steps))
    elif sampler == "threshold":
        threshold = 0.9 if threshold is None else threshold
        check_threshold(threshold)
        denoise(forward, rows, block_size, partial(select_threshold, threshold=threshold))
    else:
        verify(forward, rows, block_size)
    return [
        Decoded(r.ids, r.finish_reason or "length", r.nfe, r.steps, r.confidence, r.positions, r.first_token_s or 0.0)
        for r in rows
    ]


def _block_size(model, sampler: str, block_size: int | None) -> int:
    if sampler == "ar":
        return 1
    trained = (getattr(model.config, "fewstep", None) or {}).get("block_size")
    if trained is None:
        raise ValueError(f"sampler {sampler} needs a few-step student; this config.json has no `fewstep` section")
    if block_size is None:
        return trained
    if not 1 <= block_size <= trained:
        raise ValueError(f"block_size={block_size}: must lie between 1 and {trained}, the largest trained")
    return block_size
