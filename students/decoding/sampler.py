"""The interface of a sampler: what it sees of one step, and what it decides.

Shapes: B rows still active, S largest block among them, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

LARGE = 2**24  # beyond it a float32 holds no whole number, and no sampler has a use for it


@dataclass(frozen=True)
class Setting:
    """A number that a sampler takes: its default and its range, both ends included; whole: an int."""

    default: float
    low: float
    high: float = float("inf")
    whole: bool = False

    def wanted(self) -> str:
        """Return what must be given, in words."""
        kind = "a whole number" if self.whole else "a number"
        if self.high == float("inf"):
            return f"{kind} ≥ {self.low:g}"
        return f"{kind} between {self.low:g} and {self.high:g}"

    def takes(self, value) -> bool:
        """Return whether `value` is such a number."""
        kinds = int if self.whole else (int, float)
        return (
            isinstance(value, kinds)
            and not isinstance(value, bool)
            and self.low <= value <= self.high
            and value < LARGE
        )


class Draft:
    """One step of every active row's block.

    logits: [B, S, V] f32, or None where the head said what is asked of them: then `entropy` and `margin` are given.
    token: [B, S] int64, the token that would be committed: the most likely one, or at a candidate one drawn.
    probability: [B, S] f32, the student's probability of `token`. Where no candidate is, both are 0 and mean
    nothing, but for a sampler that rewrites.
    confidence: [B, S] f32, the same, -inf where not a candidate.
    candidates: [B, S] bool, masked positions before any EOS that is decided.
    ids: [B, S] int64, the block as the forward saw it; committed: [B, S] bool, what was decided in it.
    decided: [B, S] bool, the same with what this step commits; for `revise`.
    decided_confidence: [B, S] f32, the confidence with which each was decided; +inf where it is not.
    step, size: [B] int64, steps the block has had, and its number of positions.
    previous: [B, S, V] f32 log-probabilities of the step before, NaN in a block's first; for `stays`.
    stable: [B, S] int64, for how many steps `stays` has held.
    """

    previous: torch.Tensor
    stable: torch.Tensor
    decided: torch.Tensor
    decided_confidence: torch.Tensor

    def __init__(self, logits, token, probability, candidates, ids, committed, step, size):
        self.logits, self.token, self.probability, self.candidates = logits, token, probability, candidates
        self.confidence = probability.masked_fill(~candidates, -torch.inf)
        self.ids, self.committed, self.step, self.size = ids, committed, step, size

    @cached_property
    def logprobs(self) -> torch.Tensor:
        """[B, S, V] f32."""
        return self.logits.log_softmax(-1)

    @cached_property
    def entropy(self) -> torch.Tensor:
        """[B, S] f32, nats; +inf where not a candidate."""
        terms = self.logprobs.exp() * self.logprobs.clamp(min=torch.finfo(torch.float32).min)
        return (-terms.sum(-1)).masked_fill(~self.candidates, torch.inf)

    @cached_property
    def margin(self) -> torch.Tensor:
        """[B, S] f32, how far the largest probability is above the second."""
        best = self.logprobs.topk(2, dim=-1).values.exp()  # [B, S, 2]
        return best[..., 0] - best[..., 1]

    @cached_property
    def rank(self) -> torch.Tensor:
        """[B, S] int64, 0 for a row's most confident candidate; ties go to the left."""
        return self.confidence.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)


# select(draft, **settings) -> [B, S] bool, the candidates to commit; each setting is [B, 1] f32
Select = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Sampler:
    """A way to decide a block.

    settings: name → range and default.
    select: which candidates to commit; where it chooses none, the most confident one is.
    revise: which decided positions change: `rewrite` gives them `draft.token`, else they are masked again.
    reads: "entropy" or "margin", where `select` reads that of the draft.
    stays: [B, S] bool from draft and settings, counted into `draft.stable` while it holds; needs `draft.previous`.
    """

    name: str
    settings: dict[str, Setting]
    select: Select
    revise: Select | None = None
    rewrite: bool = False
    reads: str = ""
    stays: Select | None = None
