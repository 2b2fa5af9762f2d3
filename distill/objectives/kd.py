"""`kd`: divergence between the teacher's top-k with tail and the student, where the teacher's row is a valid target.

Shapes: R rows, K teacher top-k.

The teacher's p(x_i | x_<i) is what a masked position i should predict only while no token to its
right in the block is visible: the eligible set.
"""

import torch

from fewstep.distill.config import ObjectiveConfig
from fewstep.distill.objectives.rows import LOWEST, Rows, masked

FLOOR = 1e-6  # of a tail mass: fp32 log-probabilities of the kept tokens sum to 1 ± 1e-7


def weights(rows) -> torch.Tensor:
    """Return [R] f32: the loss weight of eligible masked positions that have a teacher's row."""
    return rows.weight * (masked(rows) & rows.eligible & rows.has_teacher)


def loss(rows: Rows, settings: ObjectiveConfig) -> torch.Tensor:
    """Return [R] f32 of the divergence over the K kept tokens and one bin for the rest.

    With q̂ = [q_1 … q_K, 1-Σq] and p̂ from the student's full-vocabulary softmax: `forward`
    Σ q̂ log(q̂/p̂), `reverse` Σ p̂ log(p̂/q̂), `total_variation` 1 - Σ min(p̂, q̂). At a temperature T ≠ 1
    the kept log-probabilities and the student's logits are divided by T; the tail's own shape is
    unknown, so it is kept as one bin of unchanged relative mass.
    """
    q_log, T = rows.topk_logprobs, settings.temperature
    if q_log.shape[-1] == 0:
        return torch.zeros_like(rows.nll)
    tail = rows.tail_mass.clamp(min=FLOOR)
    if T != 1.0:
        q_log, tail = q_log / T, tail ** (1.0 / T)
        total = q_log.exp().sum(-1) + tail
        q_log, tail = q_log - total.log()[:, None], tail / total
    p_log = rows.logprobs_at(T).gather(-1, rows.topk_ids).clamp(min=LOWEST)
    p_tail = (1.0 - p_log.exp().sum(-1)).clamp(min=FLOOR)
    p_log = torch.cat([p_log, p_tail.log()[:, None]], -1)
    q_log = torch.cat([q_log.clamp(min=LOWEST), tail.log()[:, None]], -1)
    if settings.divergence == "total_variation":
        return 1.0 - torch.minimum(p_log.exp(), q_log.exp()).sum(-1)
    if settings.divergence == "reverse":
        p_log, q_log = q_log, p_log
    return (q_log.exp() * (q_log - p_log)).sum(-1)
