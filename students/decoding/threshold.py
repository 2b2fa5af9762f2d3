"""`threshold`: commit every position that the student is confident of (Fast-dLLM's parallel decoding)."""


def select(confidence, candidates, step, size, *, threshold: float):
    """Commit candidates with confidence ≥ threshold.

    Args:
        confidence: [B, S] f32, the probability of the most likely token; -inf where not a candidate.
        candidates: [B, S] bool.
        step, size: unused; every sampler has one signature.
        threshold: in [0, 1]; 0 commits a whole block at once.

    Returns:
        [B, S] bool. Source: Fast-dLLM, confidence-aware parallel decoding.
    """
    return candidates & (confidence >= threshold)


def check(threshold) -> None:
    """Raise ValueError unless `threshold` lies in [0, 1]."""
    if not isinstance(threshold, (int, float)) or isinstance(threshold, bool) or not 0.0 <= threshold <= 1.0:
        raise ValueError(f"threshold={threshold!r}: the sampler `threshold` needs a number between 0 and 1")
