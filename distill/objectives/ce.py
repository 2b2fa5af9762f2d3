"""`ce`: cross entropy to the target at masked positions, the denoiser's own objective."""

import torch

from fewstep.distill.config import ObjectiveConfig
from fewstep.distill.objectives.rows import Rows, masked


def weights(rows) -> torch.Tensor:
    """Return [R] f32: the loss weight of masked positions, zero on the AR stream."""
    return rows.weight * masked(rows)


def loss(rows: Rows, settings: ObjectiveConfig) -> torch.Tensor:
    """Return [R] f32 of -log p(x_0).

    Source: masked diffusion with flat weights (MDLM without the 1/t factor).
    """
    return rows.nll
