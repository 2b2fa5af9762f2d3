"""Drawing tokens with keyed noise: the same request gets the same text in any batch.

Shapes: n rows, V vocabulary.
"""

import torch

GROUP = 256  # logits whose largest is found first: torch's argmax is slow over a wide row
LIKELY = 256  # tokens that mostly hold a top-p's mass: sorting a whole vocabulary costs more than a forward
DRAFT, ACCEPT, AGAIN = 0, 1, 2  # what a draw is for: independent streams of one position and step


def most_likely(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the index of the largest logit, the lowest one among equals, and its probability.

    Args:
        logits: [..., V].

    Returns:
        [...] int64 and [...] in the logits' dtype.
    """
    token = argmax(logits)
    return token, logits.softmax(-1).gather(-1, token[..., None])[..., 0]


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """Return what `logits.argmax(-1)` does: [...] int64, faster on a CPU by taking the best group first."""
    V = logits.shape[-1]
    if logits.device.type != "cpu" or V < 16 * GROUP:
        return logits.argmax(-1)
    whole = V - V % GROUP
    groups = logits[..., :whole].unflatten(-1, (-1, GROUP)).amax(-1)
    if whole < V:
        groups = torch.cat([groups, logits[..., whole:].amax(-1, keepdim=True)], -1)
    first = groups.argmax(-1) * GROUP
    inside = (first[..., None] + torch.arange(GROUP)).clamp_(max=V - 1)
    return first + logits.gather(-1, inside).argmax(-1)


def distribution(logits: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    """Return the probabilities that tokens are drawn from.

    Args:
        logits: [n, V].
        temperature: > 0 divides the logits; 0 puts everything on the most likely token.
        top_p: of (0, 1]; the least likely tokens beyond this mass are left out, never the most likely one.

    Returns:
        [n, V] f64 that sums to 1: fp32 would cut off tails.
    """
    logits = logits.double()
    if temperature == 0:
        return torch.zeros_like(logits).scatter(-1, argmax(logits)[..., None], 1.0)
    logits = logits - logits.amax(-1, keepdim=True)  # a tiny temperature must not overflow
    probabilities = (logits / temperature).softmax(-1)
    if top_p < 1:
        ordered, place = probabilities.topk(min(LIKELY, probabilities.shape[-1]), dim=-1)
        if float(ordered.sum(-1).min()) < top_p:
            ordered, place = probabilities.sort(dim=-1, descending=True, stable=True)
        beyond = ordered.cumsum(-1) - ordered >= top_p
        probabilities = torch.zeros_like(probabilities).scatter(-1, place, ordered.masked_fill(beyond, 0.0))
        probabilities /= probabilities.sum(-1, keepdim=True)
    return probabilities


def uniform(seed: int, position: int, step: int, purpose: int, count: int) -> torch.Tensor:
    """Return [count] f64 in (0, 1), keyed by the request's seed, the absolute position, the step and the purpose."""
    key = 0
    for part in (seed, position, step, purpose):  # SplitMix64 over the parts: near keys give far seeds
        key = (key + part + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        key ^= key >> 31
    # torch's generator takes 32 bits of a seed; the sum of two, modulo 1, depends on all 64
    halves = (torch.Generator().manual_seed(half) for half in (key & 0xFFFFFFFF, key >> 32))
    total = sum(torch.rand(count, generator=half, dtype=torch.float64) for half in halves)
    return (total % 1.0).clamp(min=1e-300)


def draw(probabilities: torch.Tensor, seed: int, position: int, step: int, purpose: int = DRAFT) -> int:
    """Return a token of [V] probabilities: the Gumbel-max of noise keyed by vocabulary id, in f64."""
    noise = uniform(seed, position, step, purpose, len(probabilities)).to(probabilities.device)
    return int((probabilities.log() - (-noise.log()).log()).argmax())
