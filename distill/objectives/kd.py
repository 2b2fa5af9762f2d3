"""`kd`: forward KL from the teacher's top-k with tail to the student, where the teacher's row is a valid target.

Shapes: R rows, K teacher top-k.

The teacher's p(x_i | x_<i) is what a masked position i should predict only while no token to its
right in the block is visible: the eligible set.
"""

import torch

from fewstep.distill.objectives.rows import LOWEST, Rows

FLOOR = 1e-6  # of a tail mass: fp32 log-probabilities of the kept tokens sum to 1 ± 1e-7


def weights(rows) -> torch.Tensor:
    """Return [R] f32: the loss weight of eligible masked positions that have a teacher's row."""
    return rows.weight * (~rows.clean & rows.eligible & rows.has_teacher)


def loss(rows: Rows, temperature: float) -> torch.Tensor:
    """Return [R] f32 of kl_teacher_student over the K kept tokens and one bin for the rest.

    Σ q̂ log(q̂/p̂), q̂ = [q_1 … q_K, 1-Σq], p̂ from the student's full-vocabulary softmax. At a
    temperature T ≠ 1 the kept log-probabilities and the student's logits are divided by T; the tail's
    own shape is unknown, so it is kept as one bin of unchanged relative mass.
    """
    q_log = rows.topk_logprobs
    if q_log.shape[-1] == 0:
        return torch.zeros_like(rows.nll)
    tail = rows.tail_mass.clamp(min=FLOOR)
    if temperature != 1.0:
        q_log, tail = q_log / temperature, tail ** (1.0 / temperature)
        total = q_log.exp().sum(-1) + tail
        q_log, tail = q_log - total.log()[:, None], tail / total
        logprobs = (rows.logits / temperature).log_softmax(-1)
    else:
        logprobs = rows.logprobs
    p_log = logprobs.gather(-1, rows.topk_ids).clamp(min=LOWEST)
    p_tail = (1.0 - p_log.exp().sum(-1)).clamp(min=FLOOR)
    kept = (q_log.exp() * (q_log.clamp(min=LOWEST) - p_log)).sum(-1)
    return kept + tail * (tail.log() - p_tail.log())
