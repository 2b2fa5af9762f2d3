"""`fixed`: the same number of denoising steps for every block, most confident positions first."""

from .sampler import Draft, Sampler, Setting


def select(draft: Draft, steps):
    """Commit the k_s most confident positions, k_s = ⌊M/S⌋ + [s < M mod S] at step s of S = `steps`, M the block's size.

    Source: MDLM and LLaDA, sampling with a fixed number of steps.
    """
    steps = steps.long()
    size, step = draft.size[:, None], draft.step[:, None]
    quota = size // steps + (step < size % steps).long()  # [B, 1]
    return draft.rank < quota.clamp(min=1)


FIXED = Sampler("fixed", {"steps": Setting(8, 1, whole=True)}, select)
