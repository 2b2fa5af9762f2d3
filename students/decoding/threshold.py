"""`threshold`: commit every position that the student is confident of (Fast-dLLM's parallel decoding)."""

from .sampler import Draft, Sampler, Setting


def select(draft: Draft, threshold):
    """Commit candidates with confidence ≥ threshold; 0 commits a whole block at once.

    Source: Fast-dLLM, confidence-aware parallel decoding.
    """
    return draft.confidence >= threshold


THRESHOLD = Sampler("threshold", {"threshold": Setting(0.9, 0.0, 1.0)}, select)
