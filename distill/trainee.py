"""The module that the engine trains: a student's body, its head on supervised rows, and the objectives.

Shapes: B rows, Q positions, R supervised rows, V vocabulary.
"""

import importlib
from dataclasses import fields, replace
from pathlib import Path

import torch
from torch import nn

from fewstep.distill.objectives.rows import Rows, masked
from fewstep.distill.states import guess
from fewstep.errors import UserError
from fewstep.kernels.linear_rows_loss import head_logits, linear_rows_loss
from fewstep.students.head import head_of, likely
from fewstep.students.layout import Batch, body_hidden

NOISE_LEVELS = 4
_OF_BATCH = [f.name for f in fields(Rows) if f.name not in ("logits", "later")]  # of a row, known before the forward


def load_objectives(names) -> dict:
    """Return name → module of `distill/objectives/`, in the order given.

    Raises:
        UserError: for a name without a file.
    """
    here = Path(__file__).parent / "objectives"
    known = sorted(p.stem for p in here.glob("*.py") if p.stem != "rows")
    for name in names:
        if name not in known:
            raise UserError(f"objective {name!r} is unknown; use one of {', '.join(known)}")
    return {name: importlib.import_module(f"fewstep.distill.objectives.{name}") for name in names}


class Trainee(nn.Module):
    """A student under training; its forward returns one scalar and detached sums for the log.

    Args:
        model: the causal LM (adapters applied).
        attention: the pattern of its noisy positions.
        mask_token_id: at -inf in every loss where it is a row of the head.
        objectives: name → module.
        settings: name → its settings in the recipe.
        guesses: whether samples may hold the student's own guesses: then every batch takes a forward for
            them, so that the ranks stay in step.
    """

    def __init__(self, model, attention: str, mask_token_id: int, objectives: dict, settings: dict, guesses: bool):
        super().__init__()
        self.model, self.attention, self.mask_token_id = model, attention, mask_token_id
        self.objectives, self.settings, self.guesses = objectives, settings, guesses

    def forward(self, batch: Batch, coefficients: dict[str, float]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return Σ_objectives coefficient · Σ_rows weight · loss, and the sums behind it.

        Args:
            coefficients: name → weight of the objective ÷ Σ of its row weights over the whole step.

        Returns:
            (scalar f32, {"<objective>": Σ weight·loss, "right": [NOISE_LEVELS] right ones of the masked positions, by the
            masked share of their block}).
        """
        if self.guesses:
            batch = guess.write(batch, self._guess(batch))
        later = None
        if batch.later_ids is not None:
            with torch.no_grad():
                later = self._hidden(replace(batch, ids=batch.later_ids))
        hidden = self._hidden(batch)
        sums = {name: hidden.new_zeros((), dtype=torch.float32) for name in self.objectives}
        sums |= {"right": hidden.new_zeros(NOISE_LEVELS, dtype=torch.float32)}
        levels = noise_level(batch)

        def of_chunk(logits: torch.Tensor, rows: slice) -> torch.Tensor:
            chunk = Rows(self._without_mask(logits), **{f: getattr(batch, f)[rows] for f in _OF_BATCH})
            if later is not None:
                with torch.no_grad():
                    chunk.later = self._without_mask(head_logits(later[rows], **head_of(self.model)))
            total = logits.new_zeros(())
            for name, objective in self.objectives.items():
                part = (objective.weights(chunk) * objective.loss(chunk, self.settings[name])).sum()
                sums[name] += part.detach()
                if coefficients.get(name):
                    total = total + coefficients[name] * part
            sums["right"].index_add_(0, levels[rows], (chunk.right & judged(chunk)).float())
            # every row's logits take part, so that a step without an active objective still has a gradient of zero
            return total + 0.0 * chunk.nll.sum()

        return linear_rows_loss(hidden, loss_fn=of_chunk, **head_of(self.model)), sums

    def _hidden(self, batch: Batch) -> torch.Tensor:
        """Return [R, D], the supervised rows after the final norm."""
        return body_hidden(self.model, batch, self.attention)[batch.rows]

    @torch.no_grad()
    def _guess(self, batch: Batch) -> torch.Tensor:
        """Return [G] int64, the most likely token of every row that is to be guessed."""
        return likely(self.model, self._hidden(batch)[batch.guessed], self.mask_token_id).argmax

    def _without_mask(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits with the mask token, where it is one of their columns, at -inf."""
        if self.mask_token_id >= logits.shape[-1]:
            return logits
        blocked = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
        blocked[self.mask_token_id] = True
        return logits.masked_fill(blocked, -torch.inf)


def judged(rows) -> torch.Tensor:
    """Return [R] bool, the masked positions that an accuracy counts: not the EOS fill; `rows` is a Batch or Rows."""
    return masked(rows) & (rows.weight == 1)


def noise_level(batch: Batch) -> torch.Tensor:
    """Return [R] int64, which of NOISE_LEVELS equal ranges of the masked share a row's block falls into."""
    return (batch.noise * NOISE_LEVELS).ceil().long().clamp(1, NOISE_LEVELS) - 1


def row_weights(batch: Batch, objectives: dict) -> dict[str, float]:
    """Return Σ of each objective's row weights over a batch: what its mean is taken over."""
    return {name: float(objective.weights(batch).sum()) for name, objective in objectives.items()}


def coefficients(settings: dict, totals: dict[str, float], progress: float) -> dict[str, float]:
    """Return what each objective's weighted sum counts, so that it is a mean over the whole step.

    Args:
        settings: name → its settings in the recipe.
        totals: name → Σ of its row weights over all ranks and micro-batches (`row_weights`).
        progress: share of the stage's steps done, in [0, 1].
    """
    return {name: settings[name].at(progress) / total if total else 0.0 for name, total in totals.items()}
