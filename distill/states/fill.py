"""`fill`: masked positions hold the student's own guesses, right or wrong, as they may when it decodes.

Shapes: B rows, Q positions, R supervised rows.
"""

from dataclasses import replace

import torch

from fewstep.students.layout import Batch


def write(batch: Batch, guesses: torch.Tensor) -> Batch:
    """Return the batch with `guesses` [R] int64 in place of the mask token at its rows to be filled.

    Source: on-policy uniform training of DMax; LLaDA 2.1's editing.
    """
    ids = batch.ids.flatten().clone()
    ids[batch.rows[batch.filled]] = guesses[batch.filled]
    return replace(batch, ids=ids.view_as(batch.ids))
