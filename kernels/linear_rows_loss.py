"""Output head and loss in one pass over chunks of supervised rows: logits never exist as [R, V].

Shapes: R supervised rows, r rows of one chunk, D width, V vocabulary.

The gradient is taken inside the forward, chunk by chunk, so the backward only scales it. Every
objective that is a function of a row's logits rides along; there is one loss over the vocabulary in
this project and it is computed here.

Source: the chunked linear cross entropy of Liger Kernel (arXiv 2410.10989) as an idea; this one takes
any per-row loss.
"""

from collections.abc import Callable

import torch

# loss_fn(logits [r, V] f32, chunk) -> scalar: the chunk's share of the total loss
LossFn = Callable[[torch.Tensor, slice], torch.Tensor]

CHUNK_ROWS = 256  # whose logits exist at once


def head_logits(hidden, weight, *, bias=None, softcap=None, scale=1.0) -> torch.Tensor:
    """Return [r, V] f32 logits of [r, D] rows: softcap makes them c·tanh(logits / c), scale multiplies first."""
    return _cap(torch.nn.functional.linear(hidden, weight, bias), softcap, scale)


def linear_rows_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    loss_fn: LossFn,
    *,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    chunk_rows: int = CHUNK_ROWS,
) -> torch.Tensor:
    """Return Σ over chunks of loss_fn(logits of the chunk), differentiable in hidden, weight and bias.

    Args:
        hidden: [R, D] rows after the final norm.
        weight: [V, D] of the head; bias: [V] or None.
        loss_fn: called once a chunk with its f32 logits and the slice of rows they belong to.
        softcap: logits become c·tanh(logits / c) (Gemma 2); scale multiplies logits (Cohere, Granite).
        chunk_rows: rows whose logits exist at once.

    Returns:
        Scalar f32.
    """
    grad_enabled = torch.is_grad_enabled()  # inside apply it always reads as off
    return _LinearRowsLoss.apply(hidden, weight, bias, loss_fn, softcap, scale, chunk_rows, grad_enabled)


def linear_rows_loss_reference(hidden, weight, loss_fn, *, bias=None, softcap=None, scale=1.0):
    """Compute the same with all logits at once and plain autograd."""
    logits = torch.nn.functional.linear(hidden, weight, bias).float() * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    return loss_fn(logits, slice(0, len(hidden)))


def _cap(raw: torch.Tensor, softcap: float | None, scale: float) -> torch.Tensor:
    logits = raw.float() * scale
    return softcap * torch.tanh(logits / softcap) if softcap else logits


class _LinearRowsLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, loss_fn, softcap, scale, chunk_rows, grad_enabled):
        need_h, need_w, need_b = (n and grad_enabled for n in ctx.needs_input_grad[:3])
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        d_hidden = torch.empty_like(hidden) if need_h else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if need_w else None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if need_b and bias is not None else None
        for first in range(0, len(hidden), chunk_rows):
            rows = slice(first, min(first + chunk_rows, len(hidden)))
            h = hidden[rows]
            raw = torch.nn.functional.linear(h, weight, bias)
            with torch.enable_grad():
                raw = raw.detach().requires_grad_()
                loss = loss_fn(_cap(raw, softcap, scale), rows)
                (grad,) = torch.autograd.grad(loss, raw) if need_h or need_w or need_b else (None,)
            total += loss.detach()
            if need_h:
                d_hidden[rows] = grad @ weight
            if need_w:
                d_weight.addmm_(grad.T.float(), h.float())
            if d_bias is not None:
                d_bias += grad.float().sum(0)
        ctx.grads = (d_hidden, d_weight, d_bias)
        ctx.dtypes = (hidden.dtype, weight.dtype, bias.dtype if bias is not None else None)
        return total

    @staticmethod
    def backward(ctx, upstream):
        scaled = [None if g is None else (g * upstream).to(dtype) for g, dtype in zip(ctx.grads, ctx.dtypes)]
        ctx.grads = None
        return *scaled, None, None, None, None, None


def cases():
    """Yield (name, R, D, V, chunk_rows, softcap, bias): odd sizes, one row, a chunk larger than R."""
    yield "odd", 37, 19, 101, 8, None, False
    yield "one_row", 1, 8, 33, 256, None, False
    yield "softcap", 21, 16, 64, 5, 3.0, False
    yield "bias", 13, 24, 50, 4, None, True
    yield "exact_chunks", 32, 16, 64, 8, None, False
