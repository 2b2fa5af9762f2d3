"""`klass`: commit positions that are confident and whose distribution has settled."""

import torch

from .sampler import Draft, Sampler, Setting


def stays(draft: Draft, threshold, kl, history):
    """Return where KL(this step ‖ the step before) < kl, nats; nowhere in a block's first step."""
    p = draft.logprobs
    change = torch.where(p > -torch.inf, p.exp() * (p - draft.previous), 0.0).sum(-1)  # [B, S]; NaN at first
    return change < kl


def select(draft: Draft, threshold, kl, history):
    """Commit candidates with confidence > threshold that stayed for `history` steps.

    Source: KLASS, KL-guided fast inference.
    """
    return (draft.confidence > threshold) & (draft.stable >= history)


KLASS = Sampler(
    "klass",
    {"threshold": Setting(0.9, 0.0, 1.0), "kl": Setting(0.01, 0.0), "history": Setting(1, 1, whole=True)},
    select,
    stays=stays,
)
