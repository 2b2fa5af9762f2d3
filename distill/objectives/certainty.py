"""`certainty`: entropy at masked positions that are right already, so that more of them pass a threshold."""

import torch

from fewstep.distill.config import ObjectiveConfig
from fewstep.distill.objectives.rows import LOWEST, Rows, masked


def weights(rows) -> torch.Tensor:
    """Return [R] f32: the loss weight of masked positions (known before the forward, unlike which are right)."""
    return rows.weight * masked(rows)


def loss(rows: Rows, settings: ObjectiveConfig) -> torch.Tensor:
    """Return [R] f32: entropy (nats) of softmax(logits / T) where the most likely token is the label, else 0.

    Source: dParallel, certainty-forcing distillation; CAP. Deviation: the mean runs over all masked
    positions, not only over right ones, so that a micro-batch's share is known in advance.
    """
    logprobs = rows.logprobs_at(settings.temperature)
    # the suppressed mask token is at -inf, where p·log p is 0 but its gradient would be 0·inf
    entropy = -(logprobs.exp() * logprobs.clamp(min=LOWEST)).sum(-1)
    return entropy * rows.right
