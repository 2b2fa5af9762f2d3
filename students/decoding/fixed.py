"""`fixed`: the same number of denoising steps for every block, most confident positions first."""


def select(confidence, candidates, step, size, *, steps: int):
    """Commit the k_s most confident positions, k_s = ⌊M/S⌋ + [s < M mod S] at step s of S.

    Args:
        confidence: [B, S] f32, -inf where not a candidate.
        candidates: [B, S] bool.
        step, size: [B] int64, the block's step and its number of positions M.
        steps: S, denoising steps a block; ≥ 1.

    Returns:
        [B, S] bool.
    """
    quota = size // steps + (step < size % steps).long()  # [B]
    rank = confidence.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    return candidates & (rank < quota.clamp(min=1)[:, None])


def check(steps) -> None:
    """Raise ValueError unless `steps` is a positive whole number."""
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ValueError(f"steps={steps!r}: the sampler `fixed` needs a whole number of denoising steps ≥ 1")
