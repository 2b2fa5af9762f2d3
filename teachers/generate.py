"""Batched, cached decoding of a transformers teacher, with the distribution behind each token.

Prompts of similar length are decoded together (`batch.py`), and what all begin with runs through the model once. A
finished row leaves its batch; when a few have, prompts that wait take their places.

Shapes: B rows of a batch, V vocabulary, K top log-probs.
"""

import hashlib
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from fewstep.teachers.batch import Prefix, prefill, prefill_prefix
from fewstep.teachers.generation import Generation

FREE_SHARE = 4  # prompts that wait are taken in when a batch has lost one row in so many


@torch.inference_mode()
def generate(
    model: Any,
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    eos_ids: list[int],
    prefix: list[int] | Prefix = [],  # noqa: B006 - never changed
    temperature: float = 0.0,
    seeds: list[int] | None = None,
    top_logprobs: int = 0,
    batch_size: int = 16,
    on_batch: Callable[[int, int], None] | None = None,
) -> list[Generation]:
    """Answer each prompt; the order of prompts and the batch size change speed, not answers.

    Args:
        model: a causal LM of transformers, in eval mode.
        prompts: whole prompts, `prefix` included.
        max_new_tokens: longest answer, EOS included; ≥1.
        eos_ids: ids that end an answer.
        prefix: what every prompt begins with; it is computed once and changes no answer. A list, or the
            `Prefix` of an earlier `prefill_prefix` to use it in several calls.
        temperature: 0 for greedy, else the temperature that tokens are drawn at.
        seeds: one per prompt, needed to draw; a row's noise depends on its seed alone.
        top_logprobs: K, log-probabilities kept per token; always those at T=1 over the whole vocabulary.
        batch_size: rows decoded together; memory grows with it.
        on_batch: called when answers are done, with their number and tokens; may raise to stop.

    Returns:
        One Generation per prompt, in the order of `prompts`.

    Raises:
        ValueError: an empty prompt, one without the prefix, or drawing without a seed per prompt.
    """
    shared = prefix if isinstance(prefix, Prefix) else prefill_prefix(model, prefix)
    head = shared.ids
    for row in prompts:
        if len(row) <= len(head) or row[: len(head)] != head:
            raise ValueError(
                f"a prompt of {len(row)} tokens does not begin with the prefix and go on after it ({len(head)} tokens)"
            )
    if temperature > 0 and (seeds is None or len(seeds) != len(prompts)):
        raise ValueError(f"temperature is {temperature}: drawing needs one seed per prompt")
    out = [Generation() for _ in prompts]
    noise = [torch.Generator().manual_seed(seed) for seed in seeds] if temperature > 0 and seeds is not None else []
    stops = frozenset(eos_ids)

    def say(logits: torch.Tensor, rows: list[int]) -> tuple[torch.Tensor, list[int]]:
        """Give each row its next token; return them [B], and which of the rows go on, as places in `rows`."""
        chosen = _choose(logits, temperature, [noise[row] for row in rows] if noise else [])
        if top_logprobs:
            record(logits, top_logprobs, [out[row] for row in rows])
        alive, done = [], []
        for place, (row, token) in enumerate(zip(rows, chosen.tolist())):
            out[row].ids.append(token)
            if token in stops:
                out[row].finish_reason = "stop"
            ends = token in stops or len(out[row].ids) == max_new_tokens
            (done if ends else alive).append(place)
        if on_batch is not None and done:
            on_batch(len(done), sum(len(out[rows[place]].ids) for place in done))
        return chosen, alive

    # longest first: the first batch is the largest, and a prompt that waits fits into a place that another leaves
    waiting = deque(sorted(range(len(prompts)), key=lambda i: -len(prompts[i])))

    def take(most: int) -> list[int]:
        return [waiting.popleft() for _ in range(min(most, len(waiting)))]

    few = max(1, batch_size // FREE_SHARE)
    while waiting:
        first = take(batch_size)
        batch, logits = prefill(model, first, [prompts[i] for i in first], shared, max_new_tokens)
        batch.keep(*say(logits, first))
        del logits
        while batch.rows:
            while waiting and batch.refills and batch_size - len(batch.rows) >= few:
                more = take(batch_size - len(batch.rows))
                joining, logits = prefill(model, more, [prompts[i] for i in more], shared, 0)
                joining.keep(*say(logits, more))
                batch.join(joining)
                del joining, logits
            batch.keep(*say(batch.step(model), batch.rows))
        del batch  # a batch's cache goes before the next one is made
    return out


def row_seed(seed: int, sample_id: str) -> int:
    """Return the seed of one row's noise: it depends on the run's seed and the row, not on the order of rows."""
    digest = hashlib.sha256(f"{seed}:{sample_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # torch takes 63 bits


def _choose(logits: torch.Tensor, temperature: float, noise: list[torch.Generator]) -> torch.Tensor:
    """Return the next token of each row, [B]: the likeliest, or one drawn by inverting the distribution in fp64."""
    if temperature == 0:
        return logits.argmax(-1)
    cumulative = torch.softmax(logits.double() / temperature, -1).cumsum(-1)  # [B, V] f64
    draws = torch.stack([torch.rand(1, dtype=torch.float64, generator=g) for g in noise]).to(
        logits.device
    )  # [B, 1] f64
    index = torch.searchsorted(cumulative, draws * cumulative[:, -1:], right=True)
    return index[:, 0].clamp_(max=logits.shape[-1] - 1)


def record(logits: torch.Tensor, k: int, out: list[Generation]) -> None:
    """Append to each of B generations the K likeliest tokens of its row of [B, V] logits, with what they leave."""
    logprobs = torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), -1)  # [B, V] f32
    top, ids = logprobs.topk(min(k, logits.shape[-1]), -1)  # [B, K]
    tail = (1 - top.double().exp().sum(-1)).clamp_(min=0)  # [B] f64
    for row, row_ids, row_top, row_tail in zip(out, ids.tolist(), top.tolist(), tail.tolist()):
        row.topk_ids.append(row_ids)
        row.topk_logprobs.append(row_top)
        row.tail_mass.append(row_tail)
