"""`suffix`: a block masked from a point to its end, as the AR teacher would see it."""

import numpy as np


def masks(block: np.ndarray, rng: np.random.Generator, copies: int) -> np.ndarray:
    """Mask every block from a random position to its end; half of them from the start.

    On such a block the teacher's p(x_i | x_<i) is a valid target at every masked position whose
    predecessors in the block are visible or of no matter: nothing to its right is visible.

    Returns:
        [copies, n] bool.
    """
    out = np.zeros((copies, len(block)), bool)
    for m in range(copies):
        for b in range(int(block[-1]) + 1):
            where = np.flatnonzero(block == b)
            first = 0 if rng.random() < 0.5 else int(rng.integers(len(where)))
            out[m, where[first:]] = True
    return out
