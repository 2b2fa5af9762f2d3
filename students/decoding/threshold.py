"""`threshold`: commit every position that is confident enough."""

from .sampler import Draft, Sampler, Setting


def select(draft: Draft, threshold, leading):
    """Commit candidates with confidence ≥ threshold, and the `leading` first ones whatever theirs.

    What stands behind a block's first open position follows from it where text is worked out from left to
    right: deciding it first lets the rest become sure sooner.

    Source: confidence-aware parallel decoding (Fast-dLLM); `leading` is our own.
    """
    place = draft.candidates.cumsum(-1)  # [B, S], from 1
    return (draft.confidence >= threshold) | (place <= leading)


THRESHOLD = Sampler("threshold", {"threshold": Setting(0.9, 0.0, 1.0), "leading": Setting(0, 0, whole=True)}, select)
