"""`correction`: cross entropy where the student's own guess stands, so that it learns to mend what it wrote."""

import torch

from fewstep.distill.config import ObjectiveConfig
from fewstep.distill.objectives.rows import Rows


def weights(rows) -> torch.Tensor:
    """Return [R] f32: the loss weight of guessed positions, right guesses included."""
    return rows.weight * rows.guessed


def loss(rows: Rows, settings: ObjectiveConfig) -> torch.Tensor:
    """Return [R] f32 of -log p(x_0), the position's own guess in sight.

    Source: on-policy uniform training of DMax. It is what makes the `edit` sampler safe.
    """
    return rows.nll
