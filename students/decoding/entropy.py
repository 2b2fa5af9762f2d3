"""`entropy`: commit as many positions as a budget of entropy allows (EB-Sampler)."""

import torch

from .sampler import Draft, Sampler, Setting


def select(draft: Draft, gamma):
    """Commit the k candidates of least entropy, k the largest with Σ_{i≤k} H_i - max_{i≤k} H_i ≤ gamma (nats).

    The sum without its largest term bounds the mutual information that drawing them independently ignores.

    Source: EB-Sampler (entropy-bounded unmasking).
    """
    entropy, place = draft.entropy.sort(dim=-1, stable=True)  # ascending, so H_k is the largest of the first k
    finite = entropy.isfinite()
    spent = torch.where(finite, entropy, 0.0).cumsum(-1) - torch.where(finite, entropy, 0.0)
    within = (spent <= gamma) & finite
    return torch.zeros_like(within).scatter(-1, place, within)


ENTROPY = Sampler("entropy", {"gamma": Setting(0.1, 0.0)}, select, reads="entropy")
