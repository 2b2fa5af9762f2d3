"""`two_step`: a state of a block, and a later one of the same block with more of it revealed."""

import numpy as np


def later(
    masks: np.ndarray, block: np.ndarray, order: np.ndarray | None, rng: np.random.Generator, reveal: float
) -> np.ndarray:
    """Return what is still masked in the later state.

    Args:
        masks: [copies, n] bool of the earlier state.
        block: [n] block of each position.
        order: [n] step at which each position is decided; those decided first are revealed. None: at random.
        reveal: share of a block's masked positions that are revealed: at least one, and all only where one is masked.

    Returns:
        [copies, n] bool, a subset of `masks`.

    Source: CDLM (a state and the completed block); SDTT. Here the later state is drawn from the
    teacher's response, so no trajectory has to be stored.
    """
    out = masks.copy()
    for m in range(len(masks)):
        for b in range(int(block[-1]) + 1):
            where = np.flatnonzero(masks[m] & (block == b))
            count = max(1, min(round(reveal * len(where)), len(where) - 1))
            first = np.argsort(order[where], kind="stable") if order is not None else rng.permutation(len(where))
            out[m, where[first[:count]]] = False
    return out
