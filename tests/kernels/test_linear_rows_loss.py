"""The chunked head and loss against all logits at once."""

import pytest
import torch

from fewstep.kernels.linear_rows_loss import cases, head_logits, linear_rows_loss, linear_rows_loss_reference


def inputs(R, D, V, bias, dtype):
    g = torch.Generator().manual_seed(R * V)
    h = torch.randn(R, D, generator=g, dtype=dtype).requires_grad_()
    w = torch.randn(V, D, generator=g, dtype=dtype).requires_grad_()
    b = torch.randn(V, generator=g, dtype=dtype).requires_grad_() if bias else None
    y = torch.randint(0, V, (R,), generator=g)
    weight = torch.rand(R, generator=g)

    def loss(logits, rows):
        assert logits.dtype == torch.float32
        logprobs = logits.log_softmax(-1)
        nll = -logprobs.gather(-1, y[rows][:, None])[:, 0]
        return (weight[rows] * (nll + 0.3 * (logprobs.exp() * logprobs).sum(-1))).sum()

    return h, w, b, loss


@pytest.mark.parametrize("name, R, D, V, chunk, softcap, bias", cases(), ids=lambda v: v if isinstance(v, str) else "")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_chunked_loss_and_gradients_equal_the_reference(name, R, D, V, chunk, softcap, bias, dtype):
    h, w, b, loss = inputs(R, D, V, bias, dtype)
    leaves = [t for t in (h, w, b) if t is not None]
    ours = linear_rows_loss(h, w, loss, bias=b, softcap=softcap, scale=0.7, chunk_rows=chunk)
    grads = torch.autograd.grad(3.0 * ours, leaves)
    reference = linear_rows_loss_reference(h, w, loss, bias=b, softcap=softcap, scale=0.7)
    expected = torch.autograd.grad(3.0 * reference, leaves)
    assert torch.allclose(ours, reference, rtol=1e-5)
    for got, want in zip(grads, expected):
        assert got.dtype == want.dtype
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-5)  # the softmax itself is fp32 in both


@pytest.mark.parametrize("softcap, bias", [(None, False), (3.0, True)])
def test_head_logits_are_those_that_the_loss_sees(softcap, bias):
    h, w, b, _ = inputs(9, 8, 50, bias, torch.float32)
    seen = []
    linear_rows_loss_reference(h, w, lambda logits, rows: seen.append(logits) or logits.sum(), bias=b, softcap=softcap, scale=0.7)  # fmt: skip
    assert torch.equal(head_logits(h, w, bias=b, softcap=softcap, scale=0.7), seen[0])


def test_frozen_head_gets_no_gradient_and_no_logits_wider_than_a_chunk_exist():
    h, w, _, loss = inputs(40, 8, 50, False, torch.float32)
    w = w.detach()
    seen = []

    def watch(logits, rows):
        seen.append(tuple(logits.shape))
        return loss(logits, rows)

    linear_rows_loss(h, w, watch, chunk_rows=16).backward()
    assert h.grad is not None and w.grad is None
    assert seen == [(16, 50), (16, 50), (8, 50)]


def test_no_grad_gives_the_same_value():
    h, w, _, loss = inputs(9, 8, 50, False, torch.float32)
    with torch.no_grad():
        quiet = linear_rows_loss(h, w, loss, chunk_rows=4)
    assert torch.equal(quiet, linear_rows_loss(h, w, loss, chunk_rows=4).detach())
