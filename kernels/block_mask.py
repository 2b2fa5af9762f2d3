"""The mask of a training batch for flex_attention, whose blocks that hold nothing are never computed.

Shapes: B rows, Q positions.

On a CPU flex_attention has no backward pass (torch 2.13): training takes the dense mask there.
"""

from collections.abc import Callable

import torch

LEAST_HEAD = 16  # width of a head below which flex_attention has no kernel
# Guards differ by mask, gradient mode and the widths of a batch: torch's own limit of 8 would be reached, beyond which
# attention runs uncompiled, with all scores in memory.
VARIANTS = 64
BLOCK = 128  # flex_attention's own; rows as wide as a multiple of it leave no block cut


def block_mask(sees: Callable, rows: int, length: int, device: torch.device):
    """Return the BlockMask [B, 1, Q, Q] of `sees`: (row, head, query, key), indices under vmap → bool.

    On CUDA compiled code builds it, which never holds [B, Q, Q] in one piece.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    with torch.no_grad():
        return create_block_mask(
            sees, rows, None, length, length, device=device, BLOCK_SIZE=BLOCK, _compile=device.type == "cuda"
        )


def prepare() -> None:
    """Let torch compile as many variants as training meets."""
    from torch._dynamo import config

    config.recompile_limit = max(VARIANTS, config.recompile_limit)


def dense_mask(sees: Callable, rows: int, length: int, device: torch.device) -> torch.Tensor:
    """Return `sees` of every pair, [B, Q, Q] bool (query, key): the reference, and the mask of the other attentions."""
    b, at = (torch.arange(n, device=device) for n in (rows, length))
    return sees(b[:, None, None], None, at[:, None], at)


def cases() -> list[tuple[int, int]]:
    """Return (rows, positions) to check: below, at and above blocks."""
    return [(1, 5), (2, 128), (3, 129), (2, 400)]


def path(device: str | None = None) -> str:
    """Return which mask packed rows are trained with here, and why; of a model that flex_attention serves."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return "flex_attention" if device == "cuda" else f"dense: flex_attention has no backward pass on {device}"


def serves(model, device: torch.device) -> bool:
    """Return whether flex_attention can train this model on this device."""
    config = model.config.get_text_config()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return (
        path(device.type) == "flex_attention" and getattr(model, "_supports_flex_attn", False) and width >= LEAST_HEAD
    )
