"""Batched, cached decoding of a transformers teacher, with the distribution behind each token.

Rows of similar length are decoded together, right-aligned: [shared prefix | padding | own suffix |
answer]. Padding is never attended and positions skip it, so a row's answer does not depend on its
batch. What all prompts begin with runs through the model once. A finished row leaves the batch.

Shapes: B rows of a batch, P shared prefix, S longest suffix, V vocabulary, K top log-probs,
H key-value heads, D head width.
"""

import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from fewstep.teachers.generation import Generation


@dataclass
class Prefix:
    """What prompts have in common at their start, with the keys and values that the model made of it."""

    ids: list[int]
    layers: list[tuple[torch.Tensor, torch.Tensor]] | None  # per layer [1, H, P, D]; None: this model cannot share it


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
        on_batch: called after each batch with (answers, tokens) of that batch; may raise to stop.

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
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))  # longest first: memory peaks at once, not late
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        _decode_batch(
            model,
            [prompts[i] for i in rows],
            [out[i] for i in rows],
            shared,
            max_new_tokens,
            frozenset(eos_ids),
            temperature,
            [seeds[i] for i in rows] if temperature > 0 and seeds is not None else [],
            top_logprobs,
        )
        if on_batch is not None:
            on_batch(len(rows), sum(len(out[i].ids) for i in rows))
    return out


def row_seed(seed: int, sample_id: str) -> int:
    """Return the seed of one row's noise: it depends on the run's seed and the row, not on the order of rows."""
    digest = hashlib.sha256(f"{seed}:{sample_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # torch takes 63 bits


def shared_prefix(prompts: list[list[int]]) -> list[int]:
    """Return the longest start that all prompts have in common and that leaves each a token of its own."""
    if not prompts:
        return []
    low, high = min(prompts), max(prompts)  # in lexicographic order these two differ first
    length = next((i for i, (a, b) in enumerate(zip(low, high)) if a != b), min(len(low), len(high)))
    return low[: min(length, min(map(len, prompts)) - 1)]


@torch.inference_mode()
def prefill_prefix(model: Any, ids: list[int]) -> Prefix:
    """Run the shared start of all prompts through the model, once.

    Models whose cache is more than keys and values per position (linear attention, convolutions) cannot
    share it; for these `layers` is None and every row computes its own.
    """
    if not ids:
        return Prefix([], None)
    cache = DynamicCache(config=model.config)
    if not all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers) or not cache.layers:
        return Prefix(list(ids), None)
    for layer in cache.layers:
        if isinstance(layer, DynamicSlidingWindowLayer) and layer.sliding_window <= len(ids):
            return Prefix(list(ids), None)  # the window is at work inside the prefix: see _new_cache
    tokens = torch.tensor([ids], device=model.device)  # [1, P]
    positions = torch.arange(len(ids), device=model.device)[None]
    _forward(model, tokens, torch.ones_like(tokens), positions, cache)
    return Prefix(list(ids), [(layer.keys, layer.values) for layer in cache.layers])


class _Slab(DynamicLayer):
    """Keys and values of one layer, written into room set aside once.

    DynamicLayer copies the whole cache at each token; on a CPU that is as dear as the model itself.
    """

    def __init__(self, rows: int, capacity: int, start: tuple[torch.Tensor, torch.Tensor] | None):
        super().__init__()
        self.rows, self.capacity, self.start = rows, capacity, start
        self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.device, self.dtype = key_states.device, key_states.dtype
        self.keys, self.values = (
            states.new_empty(self.rows, states.shape[1], self.capacity, states.shape[3])  # [B, H, P + S + max_new, D]
            for states in (key_states, value_states)
        )
        self.is_initialized = True
        if self.start is not None:
            self.keys[:, :, : self.length] = self.start[0]
            self.values[:, :, : self.length] = self.start[1]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[2]
        self.keys[: self.rows, :, self.length : end] = key_states
        self.values[: self.rows, :, self.length : end] = value_states
        self.length = end
        return self.keys[: self.rows, :, :end], self.values[: self.rows, :, :end]

    def keep(self, slots: list[int]) -> None:
        """Keep these rows, in this order; `slots[i] >= i`, so no row is overwritten before it moves."""
        for new, old in enumerate(slots):
            if new != old:
                self.keys[new, :, : self.length] = self.keys[old, :, : self.length]
                self.values[new, :, : self.length] = self.values[old, :, : self.length]
        self.rows = len(slots)

    def get_seq_length(self, *args: Any) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int, *args: Any) -> tuple[int, int]:
        return self.length + query_length, 0


def _new_cache(model: Any, rows: int, capacity: int, prefix: Prefix) -> tuple[DynamicCache, bool]:
    """Return (cache, whether it begins with the prefix).

    A sliding window counts places in the cache. Padding between prefix and suffix would shift them, so
    the prefix is shared only where the window is wider than everything.
    """
    cache = DynamicCache(config=model.config)
    plain = bool(cache.layers) and all(
        type(layer) is DynamicLayer or (type(layer) is DynamicSlidingWindowLayer and layer.sliding_window > capacity)
        for layer in cache.layers
    )
    if not plain:
        return cache, False
    shares = prefix.layers is not None
    cache.layers = [
        _Slab(rows, capacity, prefix.layers[i] if prefix.layers else None) for i in range(len(cache.layers))
    ]
    for layer in cache.layers:
        layer.length = len(prefix.ids) if shares else 0
    return cache, shares


def _keep_rows(cache: DynamicCache, slots: list[int], device: torch.device) -> None:
    if all(isinstance(layer, _Slab) for layer in cache.layers):
        for layer in cache.layers:
            layer.keep(slots)
    else:
        cache.reorder_cache(torch.tensor(slots, device=device))


def _decode_batch(
    model: Any,
    prompts: list[list[int]],
    out: list[Generation],
    prefix: Prefix,
    max_new_tokens: int,
    eos_ids: frozenset[int],
    temperature: float,
    seeds: list[int],
    top_logprobs: int,
) -> None:
    device = model.device
    longest = max(map(len, prompts))
    capacity = longest + max_new_tokens
    cache, shares = _new_cache(model, len(prompts), capacity, prefix)
    num_shared = len(prefix.ids) if shares else 0
    width = longest - num_shared
    tokens = torch.zeros(len(prompts), width, dtype=torch.long)  # [B, S]
    positions = torch.zeros(len(prompts), width, dtype=torch.long)  # [B, S]
    mask = torch.ones(len(prompts), capacity, dtype=torch.long)  # [B, P + S + max_new]
    for i, row in enumerate(prompts):
        pad = longest - len(row)
        tokens[i, pad:] = torch.tensor(row[num_shared:])
        positions[i, pad:] = torch.arange(num_shared, len(row))
        mask[i, num_shared : num_shared + pad] = 0
    tokens, positions, mask = tokens.to(device), positions.to(device), mask.to(device)
    noise = [torch.Generator().manual_seed(seed) for seed in seeds]
    slots = list(range(len(prompts)))  # slot of the batch -> row of `out`
    length = longest

    for step in range(max_new_tokens):
        logits = _forward(model, tokens, mask[:, :length], positions, cache)  # [B, V]
        chosen = _choose(logits, temperature, [noise[row] for row in slots] if noise else [])
        picked = chosen.tolist()
        if top_logprobs:
            record(logits, top_logprobs, [out[row] for row in slots])
        alive = []
        for slot, (row, token) in enumerate(zip(slots, picked)):
            out[row].ids.append(token)
            if token in eos_ids:
                out[row].finish_reason = "stop"
            else:
                alive.append(slot)
        if not alive or step + 1 == max_new_tokens:
            return
        positions = positions[:, -1:] + 1  # [B, 1]
        tokens = chosen[:, None]
        if len(alive) < len(slots):
            kept = _compact(alive)
            index = torch.tensor(kept, device=device)
            tokens, positions, mask = tokens[index], positions[index], mask[index]
            _keep_rows(cache, kept, device)
            slots = [slots[slot] for slot in kept]
        length += 1


def _compact(alive: list[int]) -> list[int]:
    """Return the live slots so that those of the end fill the holes and the others stay where they are."""
    count, live = len(alive), set(alive)
    movers = [slot for slot in alive if slot >= count]
    return [slot if slot in live else movers.pop() for slot in range(count)]


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


def _forward(
    model: Any, tokens: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: DynamicCache
) -> torch.Tensor:
    """Return the logits of each row's last position, [B, V]."""
    accepted = inspect.signature(model.forward).parameters
    arguments: dict[str, Any] = {"input_ids": tokens, "attention_mask": mask, "use_cache": True}
    arguments["cache" if "cache" in accepted else "past_key_values"] = cache  # the name changed within transformers 5
    if "position_ids" in accepted:
        arguments["position_ids"] = positions
    if "logits_to_keep" in accepted:
        arguments["logits_to_keep"] = 1  # the head over a whole prompt would cost more than the model at V = 49,152
    return model(**arguments).logits[:, -1]
