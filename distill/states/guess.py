"""`guess`: masked positions hold the student's own guesses, right or wrong, as they may when it decodes.

Shapes: B rows, Q positions, G positions to be guessed.
"""

from dataclasses import replace

import torch

from fewstep.students.layout import Batch


def write(batch: Batch, tokens: torch.Tensor) -> Batch:
    """Return the batch with `tokens` [G] int64 in place of the mask token at its rows to be guessed.

    Source: on-policy uniform training of DMax; LLaDA 2.1's editing.
    """
    ids = batch.ids.flatten().clone()
    ids[batch.rows[batch.guessed]] = tokens
    return replace(batch, ids=ids.view_as(batch.ids))
