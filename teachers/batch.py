"""Rows that a transformers teacher decodes together, and their cache.

[shared prefix | padding | own tokens]: all rows end at one column, whatever they began with. Padding is never attended
and positions skip it, so a row does not depend on its neighbours. Rows leave when they end, and others take their places.

Shapes: B rows, P shared prefix, S longest own part of a prompt, V vocabulary, H key-value heads, D head width.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer


@dataclass
class Prefix:
    """What prompts have in common at their start, with the keys and values that the model made of it."""

    ids: list[int]
    layers: list[tuple[torch.Tensor, torch.Tensor]] | None  # per layer [1, H, P, D]; None: this model cannot share it


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

    def join(self, other: "_Slab", own: list[int], num_shared: int) -> None:
        """Take in the rows of another slab, of which the last `own` columns and the prefix count."""
        for i, n in enumerate(own):
            for mine, its in ((self.keys, other.keys), (self.values, other.values)):
                row = mine[self.rows + i]
                row[:, num_shared : self.length - n] = 0  # never attended, but what stands there must be a number
                row[:, self.length - n : self.length] = its[i, :, other.length - n : other.length]
        self.rows += len(own)

    def shift(self, own: list[int], length: int) -> None:
        """Let every row end at column `length`, which is left of where they end now."""
        for i, n in enumerate(own):
            for states in (self.keys, self.values):
                states[i, :, length - n : length] = states[i, :, self.length - n : self.length].clone()
        self.length = length

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


class Batch:
    """What is decoded together, one token a step.

    rows: the caller's number of each row, in the order of their slots.
    refills: whether other rows may join.
    """

    def __init__(
        self, rows: list[int], cache: DynamicCache, own: torch.Tensor, num_shared: int, length: int, capacity: int
    ):
        self.rows, self._cache, self._own, self._capacity = list(rows), cache, own, capacity
        self._num_shared, self._length = num_shared, length
        self._tokens: torch.Tensor  # [B, 1], of each row the last; there once `keep` was told the first ones
        self.refills = all(isinstance(layer, _Slab) for layer in cache.layers)

    def keep(self, chosen: torch.Tensor, alive: list[int]) -> None:
        """Go on with the tokens `chosen` [B] and the rows in the slots `alive`; the others have ended."""
        self._tokens = chosen[:, None]
        if len(alive) == len(self.rows):
            return
        slots = _compact(alive)
        self.rows = [self.rows[slot] for slot in slots]
        if not slots:
            return
        index = torch.tensor(slots, device=chosen.device)
        self._tokens, self._own = self._tokens[index], self._own[index]
        if self.refills:
            for layer in self._cache.layers:
                layer.keep(slots)
        else:
            self._cache.reorder_cache(index)

    def join(self, other: "Batch") -> None:
        """Take in the rows of another batch; none of them may be longer than this one's longest."""
        if not other.rows:
            return
        own = other._own.tolist()
        for ours, theirs in zip(self._cache.layers, other._cache.layers):
            ours.join(theirs, own, self._num_shared)
        self.rows += other.rows
        self._own, self._tokens = torch.cat([self._own, other._own]), torch.cat([self._tokens, other._tokens])

    def step(self, model: Any) -> torch.Tensor:
        """Run each row's last token through the model; return the logits after it, [B, V]."""
        if self._length == self._capacity:  # rows that joined late are still short: close the gap before them
            own = self._own.tolist()
            self._length = self._num_shared + max(own)
            for layer in self._cache.layers:
                layer.shift(own, self._length)
        columns = torch.arange(self._length + 1, device=self._tokens.device)
        mask = (columns < self._num_shared) | (columns >= self._length - self._own[:, None])
        positions = self._num_shared + self._own[:, None]
        logits = _forward(model, self._tokens, mask.long(), positions, self._cache)
        self._length += 1
        self._own = self._own + 1
        return logits


def prefill(
    model: Any, rows: list[int], prompts: list[list[int]], prefix: Prefix, room: int
) -> tuple[Batch, torch.Tensor]:
    """Run prompts through the model, without what they share.

    Args:
        rows: the caller's number of each prompt.
        room: columns to set aside for answers.

    Returns:
        (the batch, logits after each prompt [B, V]).
    """
    longest = max(map(len, prompts))
    cache, shares = _new_cache(model, len(prompts), longest + room, prefix)
    num_shared = len(prefix.ids) if shares else 0
    tokens = torch.zeros(len(prompts), longest - num_shared, dtype=torch.long)  # [B, S]
    positions = torch.zeros_like(tokens)
    mask = torch.ones(len(prompts), longest, dtype=torch.long)  # [B, P + S]
    for i, row in enumerate(prompts):
        pad = longest - len(row)
        tokens[i, pad:] = torch.tensor(row[num_shared:])
        positions[i, pad:] = torch.arange(num_shared, len(row))
        mask[i, num_shared : num_shared + pad] = 0
    tokens, positions, mask = (t.to(model.device) for t in (tokens, positions, mask))
    logits = _forward(model, tokens, mask, positions, cache)
    own = torch.tensor([len(row) - num_shared for row in prompts], device=model.device)
    return Batch(rows, cache, own, num_shared, longest, longest + room), logits


def _compact(alive: list[int]) -> list[int]:
    """Return the live slots so that those of the end fill the holes and the others stay where they are."""
    count, live = len(alive), set(alive)
    movers = [slot for slot in alive if slot >= count]
    return [slot if slot in live else movers.pop() for slot in range(count)]


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
