"""`trajectory`: the positions that the undistilled student would decide last are masked."""

import numpy as np


def masks(
    block: np.ndarray, order: np.ndarray, rng: np.random.Generator, low: float, high: float, copies: int
) -> np.ndarray:
    """Mask the last r·B positions of each block's recorded order, r ~ U(low, high).

    Args:
        block: [n] block of each position.
        order: [n] step at which the undistilled student decided each position of its block.
        low, high: range of r.

    Returns:
        [copies, n] bool with at least one mask a block.

    Raises:
        ValueError: if the recording belongs to another response: a silent fallback to random masks
            would hide that nothing was learnt from it.

    Source: d3LLM, pseudo-trajectory distillation.
    """
    if len(order) != len(block):
        raise ValueError(f"trajectory has {len(order)} positions, the response {len(block)}: record it anew")
    out = np.zeros((copies, len(block)), bool)
    for m in range(copies):
        for b in range(int(block[-1]) + 1):
            where = np.flatnonzero(block == b)
            count = max(1, round((low + (high - low) * rng.random()) * len(where)))
            out[m, where[np.argsort(order[where], kind="stable")[::-1][:count]]] = True
    return out
