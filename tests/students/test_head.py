"""Decoding that asks the kernels' head against decoding from all logits."""

import copy

import pytest
import torch

from fewstep.errors import RunFailed
from fewstep.kernels import lm_head_stats as stats
from fewstep.kernels.linear_rows_loss import head_logits
from fewstep.students import head
from fewstep.students.decoding import decode
from fewstep.students.decoding.forward import Forward
from tests.students.builders import EOS, FAMILIES, student

WAYS = [
    dict(sampler="threshold", threshold=0.3, leading=1), dict(sampler="fixed", steps=3), dict(sampler="factor", factor=0.8),
    dict(sampler="entropy", gamma=0.7), dict(sampler="margin", margin=0.2), dict(sampler="remask", steps=3),
    dict(sampler="edit", threshold=0.3, rewrite=0.3), dict(sampler="klass", threshold=0.3), dict(sampler="verify"), dict(sampler="ar"),
]  # fmt: skip
PROMPTS = [[5, 9, 11, 3], [7], [4, 4, 21, 30, 8, 6, 17], [12, 13], [33, 20, 10]]


def both(model):
    """Return the model with its head attached, and a copy without."""
    plain = copy.deepcopy(model)
    head.attach(model)
    assert model.fewstep_head is head.likely and not hasattr(plain, "fewstep_head")
    return model, plain


@pytest.mark.parametrize("way", WAYS, ids=lambda w: w["sampler"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_same_is_decided_in_the_same_steps(family, way, monkeypatch):
    ours, plain = both(student(family))
    asked, likely = [], Forward.likely
    monkeypatch.setattr(Forward, "likely", lambda self, *a, **k: (asked.append(1), likely(self, *a, **k))[1])
    mine, theirs = (decode(m, PROMPTS, max_new_tokens=14, eos_token_ids=[EOS], **way) for m in (ours, plain))
    assert len(asked) == (0 if way["sampler"] == "klass" else max(a.nfe for a in mine))
    for a, b in zip(mine, theirs):
        assert (a.ids, a.steps, a.nfe, a.finish_reason) == (b.ids, b.steps, b.nfe, b.finish_reason)
        assert a.confidence == pytest.approx(b.confidence, abs=1e-5)


@pytest.mark.parametrize("attention", ["block_causal_inside", "bidirectional"])
@pytest.mark.parametrize("way", WAYS[:4], ids=lambda w: w["sampler"])
def test_other_patterns_too(attention, way):
    ours, plain = both(student("llama", attention))
    mine, theirs = (decode(m, PROMPTS, max_new_tokens=14, eos_token_ids=[EOS], **way) for m in (ours, plain))
    assert [(a.ids, a.steps, a.nfe) for a in mine] == [(b.ids, b.steps, b.nfe) for b in theirs]


def test_draws_are_those_of_the_published_code():
    ours, plain = both(student("llama"))
    for way in WAYS[:1] + WAYS[-2:]:
        mine, theirs = (
            decode(m, PROMPTS, max_new_tokens=14, eos_token_ids=[EOS], temperature=[0, 1.0, 0.7, 0, 1.3], seed=[1, 2, 3, 4, 5], **way)
            for m in (ours, plain)
        )  # fmt: skip
        assert [a.ids for a in mine] == [b.ids for b in theirs]


def test_a_block_asks_only_for_what_may_be_committed(monkeypatch):
    model, _ = both(student("llama"))
    rows, ask = [], stats.lm_head_stats
    monkeypatch.setattr(head, "lm_head_stats", lambda hidden, **k: (rows.append(len(hidden)), ask(hidden, **k))[1])
    (answer,) = decode(model, [[5, 9, 11]], max_new_tokens=4, eos_token_ids=[], sampler="fixed", steps=4)
    assert rows == [4, 3, 2, 1] and len(answer.ids) == 4


def test_it_is_not_attached_where_logits_are_made_otherwise():
    model = student("llama")
    made = model.forward
    model.forward = lambda *a, **k: (out := made(*a, **k), setattr(out, "logits", out.logits * 1.5))[0]
    head.attach(model)
    assert not hasattr(model, "fewstep_head")


@pytest.mark.parametrize("family", sorted(FAMILIES))
@torch.no_grad()
def test_head_of_makes_the_models_logits(family):
    model = student(family)
    ids = torch.tensor([[5, 9, 11, 3]])
    hidden = model.base_model(input_ids=ids).last_hidden_state[0]
    assert torch.allclose(head_logits(hidden, **head.head_of(model)), model(input_ids=ids).logits[0].float(), atol=1e-4)


@pytest.mark.parametrize("sampler", ["threshold", "verify"])
def test_states_that_are_not_finite_are_said_and_not_committed(sampler):
    model, _ = both(student("llama"))
    with torch.no_grad():
        model.model.norm.weight[3] = torch.nan
    with pytest.raises(RunFailed, match="hidden states are not finite"):
        decode(model, PROMPTS, max_new_tokens=14, eos_token_ids=[EOS], sampler=sampler)
