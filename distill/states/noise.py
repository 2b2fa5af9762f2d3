"""`noise`: each block masked at its own random level."""

import numpy as np


def masks(
    block: np.ndarray, rng: np.random.Generator, low: float, high: float, copies: int, right: float = 0.0
) -> np.ndarray:
    """Draw masks for the noisy copies of one response.

    Levels are antithetic over the N = copies · blocks of this sample: u ~ U, t_j = (u + j/N) mod 1,
    permuted, scaled to [low, high]; so a sample always sees easy and hard blocks.

    Args:
        block: [n] block of each position, counted from 0.
        rng: keyed by (seed, epoch, sample), never by rank.
        low, high: range of the probability that a position is masked.
        right: how far that probability t leans within a block: from t - right·min(t, 1 - t) at its first
            position in a straight line to t + right·min(t, 1 - t) at its last, so that its mean stays t.

    Returns:
        [copies, n] bool with at least one mask a block.

    Source: antithetic time sampling of MDLM, per block; masking that leans right as in Efficient-DLM.
    """
    num_blocks = int(block[-1]) + 1
    N = copies * num_blocks
    t = rng.permutation((rng.random() + np.arange(N) / N) % 1.0).reshape(copies, num_blocks)
    level = low + (high - low) * t
    draw = rng.random((copies, len(block)))
    share = level[:, block]
    out = draw < share + right * _lean(block) * np.minimum(share, 1.0 - share)
    for m in range(copies):
        for b in range(num_blocks):
            where = np.flatnonzero(block == b)
            if not out[m, where].any():
                out[m, where[np.argmin(draw[m, where])]] = True
    return out


def _lean(block: np.ndarray) -> np.ndarray:
    """Return [n] from -1 at the first position of a block to 1 at its last; 0 in a block of one."""
    begins, ends = np.searchsorted(block, block), np.searchsorted(block, block, "right") - 1
    return np.where(ends > begins, 2.0 * (np.arange(len(block)) - begins) / np.maximum(ends - begins, 1) - 1.0, 0.0)
