"""From "who may see whom" to what each layer of a checkpoint's own code takes.

Shapes: B rows, Q queries, K keys.
"""

from collections.abc import Callable

import torch


def layer_masks(config, allow: torch.Tensor, query_pos: torch.Tensor, key_pos: torch.Tensor, dtype: torch.dtype):
    """Return additive masks: one tensor, or one per layer type where the architecture mixes them.

    Args:
        config: the text config of the model.
        allow: [B, Q, K] bool, the structural pattern without any sliding window.
        query_pos, key_pos: [B, Q] and [B, K] int64 positions, for the window.
        dtype: the model's floating dtype.

    Returns:
        [B, 1, Q, K] additive mask (0 or the dtype's lowest value), or a dict of layer type → mask.
        Additive floats are exact under both eager and sdpa; bool masks are wrong under eager.
    """

    def near(window: int) -> torch.Tensor:
        # a query always keeps itself, so the window alone can never empty a row that had a key in reach
        return _additive(allow & (query_pos[:, :, None] - key_pos[:, None, :] < window), dtype)

    return by_layer(config, lambda: _additive(allow, dtype), near)


def by_layer(config, full: Callable, near: Callable):
    """Return full() where no layer has a sliding window, near(window) where all have, a dict of layer type → mask where some have."""
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    kinds = set(getattr(config, "layer_types", None) or [])
    if not window or kinds == {"full_attention"}:
        return full()
    if not kinds or kinds == {"sliding_attention"}:
        return near(window)
    return {"full_attention": full(), "sliding_attention": near(window)}


def _additive(allow: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    blocked = torch.zeros(allow.shape, dtype=dtype, device=allow.device)
    return blocked.masked_fill_(~allow, torch.finfo(dtype).min)[:, None]
