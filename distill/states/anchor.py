"""`anchor`: a block's first position stays visible, as in a draft of `verify` behind a known token."""

import numpy as np


def unmask(masks: np.ndarray, block: np.ndarray, rng: np.random.Generator, share: float) -> np.ndarray:
    """Return `masks` with the first position of about `share` of the blocks unmasked.

    Args:
        masks: [copies, n] bool with at least one mask a block, which stays so.
        block: [n] block of each position.

    Source: our own; `verify` drafts anew from the clean stream's next token.
    """
    out = masks.copy()
    for m in range(len(masks)):
        for b in range(int(block[-1]) + 1):
            where = np.flatnonzero(block == b)
            if rng.random() < share and masks[m, where[1:]].any():
                out[m, where[0]] = False
    return out
