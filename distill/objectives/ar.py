"""`ar`: next-token cross entropy on the clean stream; keeps the student a good AR model."""

import torch

from fewstep.distill.config import ObjectiveConfig
from fewstep.distill.objectives.rows import Rows


def weights(rows) -> torch.Tensor:
    """Return [R] f32: the loss weight of rows of the AR stream, zero on masked positions."""
    return rows.weight * rows.clean


def loss(rows: Rows, settings: ObjectiveConfig) -> torch.Tensor:
    """Return [R] f32 of -log p(x_i | x_<i)."""
    return rows.nll
