"""What an objective sees: supervised rows, their logits, and what is known of each.

Shapes: R rows, V vocabulary, K teacher top-k.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from fewstep.students.decoding.sampling import argmax

LOWEST = -1e4  # stands in for -inf where a log-probability is multiplied by a probability of 0


def masked(rows) -> torch.Tensor:
    """Return [R] bool: positions that hold the mask token; `rows` is a Batch or Rows."""
    return ~rows.clean & ~rows.guessed


@dataclass
class Rows:
    """A chunk of supervised rows.

    logits: [R, V] f32, the mask token at -inf. labels: [R] int64. weight: [R] f32.
    clean: [R] bool, rows of the AR stream; the others are masked positions of noisy blocks.
    eligible: [R] bool, masked positions with no visible token to their right inside the block.
    topk_ids [R, K] int64, topk_logprobs [R, K] f32 and tail_mass [R] f32 of the teacher at T=1, where
    has_teacher [R] bool.
    guessed: [R] bool, positions that hold the student's own guess; still: [R] bool, positions that are
    masked in a later state too, whose logits there are later [R, V] f32 (None: no later state).
    """

    logits: torch.Tensor
    labels: torch.Tensor
    weight: torch.Tensor
    clean: torch.Tensor
    eligible: torch.Tensor
    topk_ids: torch.Tensor
    topk_logprobs: torch.Tensor
    tail_mass: torch.Tensor
    has_teacher: torch.Tensor
    guessed: torch.Tensor
    still: torch.Tensor
    later: torch.Tensor | None = None

    @cached_property
    def logprobs(self) -> torch.Tensor:
        """[R, V] natural log-probabilities at T=1."""
        return self.logits.log_softmax(-1)

    def logprobs_at(self, temperature: float) -> torch.Tensor:
        """Return [R, V] natural log-probabilities of the logits divided by `temperature`."""
        return self.logprobs if temperature == 1.0 else (self.logits / temperature).log_softmax(-1)

    @cached_property
    def nll(self) -> torch.Tensor:
        """[R] negative log-likelihood of the labels."""
        return -self.logprobs.gather(-1, self.labels[:, None])[:, 0]

    @cached_property
    def right(self) -> torch.Tensor:
        """[R] bool, rows whose most likely token is the label."""
        return argmax(self.logits.detach()) == self.labels
