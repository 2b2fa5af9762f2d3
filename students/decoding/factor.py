"""`factor`: commit as many positions as their joint confidence allows."""

from .sampler import Draft, Sampler, Setting


def select(draft: Draft, factor):
    """Commit the n most confident candidates, n the largest with (n + 1)(1 - c_(n)) < factor.

    The n-th confidence c_(n) bounds how far the product of marginals is from the joint distribution;
    more positions at once must each be surer.

    Source: Fast-dLLM, factor-based parallel decoding.
    """
    ordered = draft.confidence.sort(dim=-1, descending=True, stable=True).values  # [B, S]
    n = ordered.new_tensor(range(1, ordered.shape[1] + 1))
    holds = (n + 1) * (1 - ordered) < factor
    largest = (holds * n).amax(-1, keepdim=True)  # the largest n, though a smaller one may fail
    return draft.rank < largest


FACTOR = Sampler("factor", {"factor": Setting(0.5, 0.0)}, select)
