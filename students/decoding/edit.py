"""`edit`: threshold, and decided tokens of the block are rewritten where the student has come to prefer others."""

from .sampler import Draft, Sampler, Setting


def select(draft: Draft, threshold, rewrite):
    """Commit candidates with confidence ≥ threshold."""
    return draft.confidence >= threshold


def revise(draft: Draft, threshold, rewrite):
    """Rewrite decided positions at which another token has a probability > rewrite.

    A student trained on masks alone copies what it sees at a visible position; the objective
    `correction` teaches it to doubt.

    Source: token editing of self-correcting masked diffusion: what is decided may still be replaced.
    """
    return draft.committed & (draft.token != draft.ids) & (draft.probability > rewrite)


EDIT = Sampler(
    "edit",
    {"threshold": Setting(0.9, 0.0, 1.0), "rewrite": Setting(0.9, 0.0, 1.0)},
    select,
    revise=revise,
    rewrite=True,
)
