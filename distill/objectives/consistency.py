"""`consistency`: say at once what a later state of the same block says of the positions that are masked in both."""

import torch

from fewstep.distill.config import ObjectiveConfig
from fewstep.distill.objectives.rows import LOWEST, Rows


def weights(rows) -> torch.Tensor:
    """Return [R] f32: the loss weight of positions that are masked in both states."""
    return rows.weight * rows.still


def loss(rows: Rows, settings: ObjectiveConfig) -> torch.Tensor:
    """Return [R] f32 of KL(p(· | later state) ‖ p(· | this state)), no gradient through the later one.

    Source: CDLM; SDTT. The positions revealed in between are taught by `ce` and `kd`.
    """
    if rows.later is None:  # a weight of 0: no later state was drawn
        return torch.zeros_like(rows.nll)
    later = (rows.later / settings.temperature).log_softmax(-1)
    now = rows.logprobs_at(settings.temperature)
    # the suppressed mask token is at -inf in both, where p·(log p - log q) is 0 but would read as nan
    return (later.exp() * (later.clamp(min=LOWEST) - now.clamp(min=LOWEST))).sum(-1)
