"""Each objective against a dense fp64 reference written from its definition; the contract of the kind."""

import math
from dataclasses import replace

import pytest
import torch

from fewstep.distill.config import ObjectiveConfig
from fewstep.distill.objectives import ar, ce, certainty, consistency, correction, kd
from fewstep.distill.objectives.rows import Rows

V, K, R, MASK = 11, 3, 8, 10
OBJECTIVES = {
    "ce": ce,
    "ar": ar,
    "correction": correction,
    "certainty": certainty,
    "consistency": consistency,
    "kd": kd,
    "kd reverse": kd,
    "kd total_variation": kd,
}


def settings(name, T):
    return ObjectiveConfig(weight=1.0, temperature=T, divergence=name.split()[1] if " " in name else "forward")


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
        guessed=torch.tensor([False, False, False, False, False, False, True, False]),
        still=torch.tensor([True, False, True, False, False, False, False, False]),
        later=torch.cat(
            [torch.randn(R, V - 1, generator=g, dtype=dtype) * 2, torch.full((R, 1), -torch.inf, dtype=dtype)], -1
        ),
    )


def log_softmax(values):
    top = max(values)
    total = sum(math.exp(v - top) for v in values)
    return [v - top - math.log(total) if v > -math.inf else -math.inf for v in values]


def dense(name, r, T):
    """The definitions, row by row, with Python floats."""
    out = []
    name, _, divergence = name.partition(" ")
    for i in range(R):
        logp = log_softmax([float(v) / (T if name in ("certainty", "consistency", "kd") else 1.0) for v in r.logits[i]])
        if name == "consistency":
            later = log_softmax([float(v) / T for v in r.later[i]])
            out.append(sum(math.exp(a) * (a - b) for a, b in zip(later, logp) if a > -math.inf))
        elif name in ("ce", "ar", "correction"):
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
            q, p = [*q, tail], [*p, 1 - sum(p)]
            if divergence == "total_variation":
                out.append(1 - sum(min(a, b) for a, b in zip(q, p)))
            elif divergence == "reverse":
                out.append(sum(b * math.log(b / a) for a, b in zip(q, p)))
            else:
                out.append(sum(a * math.log(a / b) for a, b in zip(q, p)))
    return torch.tensor(out, dtype=torch.float64)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("T", [1.0, 0.5])
def test_loss_equals_the_dense_reference(name, T):
    r = rows()
    assert torch.allclose(OBJECTIVES[name].loss(r, settings(name, T)), dense(name, r, T), rtol=1e-9)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradient_is_right_and_finite_beside_the_suppressed_mask_token(name):
    r = rows(requires_grad=True)
    right = r.right  # the gate of certainty has no gradient: hold it fixed

    def total(free):
        full = torch.cat([free, torch.full((R, 1), -torch.inf, dtype=free.dtype)], -1)
        again = Rows(full, **{k: v for k, v in vars(r).items() if k not in ("logits", "logprobs", "nll", "right")})
        again.__dict__["right"] = right
        return OBJECTIVES[name].loss(again, settings(name, 0.7)).sum()

    free = r.logits.detach()[:, :MASK].clone().requires_grad_()
    assert torch.autograd.gradcheck(total, (free,))
    OBJECTIVES[name].loss(r, settings(name, 0.7)).sum().backward()
    assert torch.isfinite(r.logits.grad).all()


def test_each_objective_supervises_its_own_rows_alone():
    r = rows()
    assert ce.weights(r).tolist() == pytest.approx([1, 1, 0.1, 1, 0, 0, 0, 1])
    assert certainty.weights(r).tolist() == ce.weights(r).tolist()
    assert ar.weights(r).tolist() == pytest.approx([0, 0, 0, 0, 1, 0.1, 0, 0])
    assert kd.weights(r).tolist() == pytest.approx([1, 0, 0.1, 0, 0, 0, 0, 1])
    assert correction.weights(r).tolist() == pytest.approx([0, 0, 0, 0, 0, 0, 1, 0])
    assert consistency.weights(r).tolist() == pytest.approx([1, 0, 0.1, 0, 0, 0, 0, 0])


@pytest.mark.parametrize("divergence", ["forward", "reverse", "total_variation"])
def test_kd_is_zero_where_the_student_is_the_teacher(divergence):
    r = rows()
    same = torch.randn(R, V - 1, dtype=torch.float64).log_softmax(-1)
    top = same.topk(K, -1)
    teacher = {"topk_ids": top.indices, "topk_logprobs": top.values, "tail_mass": 1 - top.values.exp().sum(-1)}
    r = replace(r, logits=torch.cat([same, torch.full((R, 1), -torch.inf, dtype=torch.float64)], -1), **teacher)
    assert kd.loss(r, ObjectiveConfig(weight=1.0, divergence=divergence)).abs().max() < 1e-9
    other = replace(r, logits=r.logits.roll(1, 0))
    assert kd.loss(other, ObjectiveConfig(weight=1.0, divergence=divergence)).min() > 1e-3


def test_consistency_is_zero_where_both_states_say_the_same():
    r = rows()
    assert consistency.loss(replace(r, later=r.logits), ObjectiveConfig(weight=1.0)).abs().max() < 1e-12
    assert consistency.loss(r, ObjectiveConfig(weight=1.0)).min() > 1e-3
