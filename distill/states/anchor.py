"""`anchor`: a block's first position stays visible, as in a draft of `verify` behind a known token."""

import numpy as np


def unmask(masks: np.ndarray, block: np.ndarray, rng: np.random.Generator, share: float) -> np.ndarray:
    """Return `masks` with the first position of about `share` of the blocks unmasked.

    Args:
        masks: [copies, n] bool with at least one mask a block, which stays so.
        block: [n] block of each position.

    Source: our own; `verify` drafts anew from the clean stream's next token.
    """
    begins = np.searchsorted(block, np.unique(block))
    others = np.add.reduceat(masks, begins, axis=1, dtype=int) > masks[:, begins]  # masked behind the first position
    out = masks.copy()
    out[:, begins] &= ~((rng.random(others.shape) < share) & others)
    return out
