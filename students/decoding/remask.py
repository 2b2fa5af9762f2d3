"""`remask`: a fixed number of steps a block, at most one a position, in which the least confident decisions are taken back and made anew."""

import torch

from .sampler import Draft, Sampler, Setting


def _decided(draft: Draft, steps):
    """Return [B, 1] int64: positions that are decided once this step's revision is done."""
    size = draft.size[:, None]
    steps = torch.minimum(steps.long(), size)  # more steps than positions would commit less than one a forward
    return (((draft.step[:, None] + 1) * size + steps - 1) // steps).clamp(max=size)


def select(draft: Draft, steps, share):
    """Commit the most confident candidates, as many as `fixed` would, and those that replace what is taken back."""
    wanted = _decided(draft, steps)
    spare = torch.minimum((wanted * share).long(), draft.size[:, None] - wanted).clamp(min=0)
    return draft.rank < wanted + spare - draft.committed.sum(-1, keepdim=True)


def revise(draft: Draft, steps, share):
    """Mask the least confidently committed positions again, down to the step's number; none in the last step.

    Source: ReMDM with confidence-based remasking. Deviation: the least confident positions are taken
    back rather than positions drawn in proportion, so greedy decoding stays deterministic.
    """
    surplus = draft.decided.sum(-1, keepdim=True) - _decided(draft, steps)
    doubt = draft.decided_confidence.argsort(dim=-1, stable=True).argsort(dim=-1)
    return draft.decided & (doubt < surplus)


REMASK = Sampler(
    "remask", {"steps": Setting(8, 1, whole=True), "share": Setting(0.25, 0.0, 1.0)}, select, revise=revise
)
