"""An exact key-value cache in which every row of a batch has its own length.

Shapes: B rows, H key-value heads, N slots, Q queries, K visible slots, d head width.

One rule keeps it exact: the slot of a token is its position in its row. A noisy block is written
to the slots of its own positions, where its clean tokens overwrite it once they are committed;
nothing ever reads a slot beyond the limit of its query. The last slot is where padding goes.
"""

import torch
from transformers.cache_utils import Cache


class BlockCache(Cache):
    """Hold keys and values of B rows in N static slots per layer.

    Args:
        capacity: the most positions that any row will reach; one slot more is kept for padding.
    """

    def __init__(self, capacity: int):
        super().__init__(layers=[])
        self.trash = capacity
        self.keys: list[torch.Tensor] = []  # a layer each: [B, H, N, d]
        self.values: list[torch.Tensor] = []
        self.said: torch.Tensor | None = (
            None  # [B, 1, V], where alignment is shifted: logits of a row's last clean token
        )
        self._slots: torch.Tensor | None = None
        self._span = (0, 0)
        self._visible = 0

    def place(self, slots: torch.Tensor, span: tuple[int, int] | None, visible: int) -> None:
        """Say where the next forward's tokens go and how many slots it may see.

        Args:
            slots: [B, Q] int64, the slot of every query; padding goes to `trash`.
            span: (first, last + 1) where all rows share one contiguous run, else None.
            visible: number of leading slots returned to attention.
        """
        self._slots, self._span, self._visible = (None, span, visible) if span else (slots, (0, 0), visible)

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        """Write [B, H, Q, d] keys and values; return the visible [B, H, K, d] ones."""
        if layer_idx == len(self.keys):
            B, H, _, d = key_states.shape
            self.keys.append(key_states.new_zeros(B, H, self.trash + 1, d))
            self.values.append(value_states.new_zeros(B, H, self.trash + 1, value_states.shape[-1]))
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        if self._slots is None:
            first, last = self._span
            keys[:, :, first:last] = key_states
            values[:, :, first:last] = value_states
        else:
            row = torch.arange(len(self._slots), device=keys.device)[:, None]
            keys[row, :, self._slots] = key_states.transpose(1, 2)  # [B, Q, H, d]
            values[row, :, self._slots] = value_states.transpose(1, 2)
        return keys[:, :, : self._visible], values[:, :, : self._visible]

    def keep(self, rows: list[int]) -> None:
        """Drop every row of the batch but `rows`."""
        index = torch.tensor(rows, device=self.keys[0].device) if self.keys else None
        self.keys = [k.index_select(0, index) for k in self.keys]
        self.values = [v.index_select(0, index) for v in self.values]
        self.said = None if self.said is None else self.said.index_select(0, index)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of visible slots (positions are always given explicitly)."""
        return self._visible
