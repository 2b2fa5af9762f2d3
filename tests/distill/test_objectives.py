"""Each objective against a dense fp64 reference written from its definition; the contract of the kind."""

import math

import pytest
import torch

from fewstep.distill.objectives import ar, ce, certainty, kd
from fewstep.distill.objectives.rows import Rows

V, K, R, MASK = 11, 3, 8, 10
OBJECTIVES = {"ce": ce, "ar": ar, "kd": kd, "certainty": certainty}


def rows(dtype=torch.float64, requires_grad=False, seed=0):
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(R, V, generator=g, dtype=dtype) * 2
    logits[:, MASK] = -torch.inf
    teacher = torch.randn(R, V - 1, generator=g, dtype=dtype).log_softmax(-1)
    top = teacher.topk(K, -1)
    labels = logits.argmax(-1)
    labels[::3] = (labels[::3] + 1) % (V - 1)
    return Rows(
        logits=logits.requires_grad_(requires_grad),
        labels=labels,
        weight=torch.tensor([1.0, 1.0, 0.1, 1.0, 1.0, 0.1, 1.0, 1.0]),
        clean=torch.tensor([False, False, False, False, True, True, False, False]),
        eligible=torch.tensor([True, False, True, True, False, False, True, True]),
        topk_ids=top.indices,
        topk_logprobs=top.values,
        tail_mass=1 - top.values.exp().sum(-1),
        has_teacher=torch.tensor([True, True, True, False, True, True, True, True]),
    )


def dense(name, r, T):
    """The definitions, row by row, with Python floats."""
    out = []
    for i in range(R):
        z = [float(v) / T if name in ("certainty", "kd") else float(v) for v in r.logits[i]]
        top = max(z)
        total = sum(math.exp(v - top) for v in z)
        logp = [v - top - math.log(total) if v > -math.inf else -math.inf for v in z]
        if name in ("ce", "ar"):
            out.append(-logp[int(r.labels[i])])
        elif name == "certainty":
            right = max(range(V), key=lambda v: float(r.logits[i, v])) == int(r.labels[i])
            out.append(sum(-math.exp(v) * v for v in logp if v > -math.inf) if right else 0.0)
        else:
            q = [math.exp(float(v)) ** (1 / T) for v in r.topk_logprobs[i]]
            tail = float(r.tail_mass[i]) ** (1 / T)
            norm = sum(q) + tail
            q, tail = [v / norm for v in q], tail / norm
            p = [math.exp(logp[int(k)]) for k in r.topk_ids[i]]
            out.append(sum(a * math.log(a / b) for a, b in zip(q, p)) + tail * math.log(tail / (1 - sum(p))))
    return torch.tensor(out, dtype=torch.float64)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("T", [1.0, 0.5])
def test_loss_equals_the_dense_reference(name, T):
    r = rows()
    assert torch.allclose(OBJECTIVES[name].loss(r, T), dense(name, r, T), rtol=1e-9)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradient_is_right_and_finite_beside_the_suppressed_mask_token(name):
    r = rows(requires_grad=True)
    right = r.right  # the gate of certainty has no gradient: hold it fixed

    def total(free):
        full = torch.cat([free, torch.full((R, 1), -torch.inf, dtype=free.dtype)], -1)
        again = Rows(full, **{k: v for k, v in vars(r).items() if k not in ("logits", "logprobs", "nll", "right")})
        again.__dict__["right"] = right
        return OBJECTIVES[name].loss(again, 0.7).sum()

    free = r.logits.detach()[:, :MASK].clone().requires_grad_()
    assert torch.autograd.gradcheck(total, (free,))
    OBJECTIVES[name].loss(r, 0.7).sum().backward()
    assert torch.isfinite(r.logits.grad).all()


def test_each_objective_supervises_its_own_rows_alone():
    r = rows()
    assert ce.weights(r).tolist() == pytest.approx([1, 1, 0.1, 1, 0, 0, 1, 1])
    assert certainty.weights(r).tolist() == ce.weights(r).tolist()
    assert ar.weights(r).tolist() == pytest.approx([0, 0, 0, 0, 1, 0.1, 0, 0])
    assert kd.weights(r).tolist() == pytest.approx([1, 0, 0.1, 0, 0, 0, 1, 1])


def test_kd_is_zero_where_the_student_is_the_teacher():
    r = rows()
    same = torch.randn(R, V - 1, dtype=torch.float64).log_softmax(-1)
    top = same.topk(K, -1)
    r = Rows(
        torch.cat([same, torch.full((R, 1), -torch.inf, dtype=torch.float64)], -1),
        r.labels, r.weight, r.clean, r.eligible, top.indices, top.values, 1 - top.values.exp().sum(-1), r.has_teacher,
    )  # fmt: skip
    assert kd.loss(r, 1.0).abs().max() < 1e-9
