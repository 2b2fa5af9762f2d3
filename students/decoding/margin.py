"""`margin`: commit positions whose best token is well ahead of the second best."""

from .sampler import Draft, Sampler, Setting


def select(draft: Draft, margin):
    """Commit candidates with p(1st) - p(2nd) ≥ margin.

    Source: top probability margin (Kim et al., Train for the worst, plan for the best), as a threshold.
    """
    return draft.margin >= margin


MARGIN = Sampler("margin", {"margin": Setting(0.8, 0.0, 1.0)}, select, reads="margin")
