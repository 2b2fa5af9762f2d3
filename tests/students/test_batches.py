"""A request's text does not depend on who it is decoded with, nor on the cache: every family, greedy and drawn."""

import random

import pytest
import torch

from fewstep.students.decoding import decode, denoise, verify
from fewstep.students.decoding.forward import Forward
from tests.students.builders import EOS, FAMILIES, student
from tests.students.test_decoding import SETTINGS, prompts
from tests.students.tracing import num_near_ties, trace

SAMPLERS = [{"sampler": "threshold", "threshold": 0.3}, {"sampler": "verify"}, {"sampler": "ar"}]
COUNT = 7
MIXED = dict(temperature=[0.0, 1.0] * 3 + [0.0], top_p=[1.0, 0.9] * 3 + [1.0], seed=list(range(COUNT)))
LIMITS = dict(max_new_tokens=10, eos_token_ids=[EOS])


def some(rows, values=MIXED):
    """Return the settings of some of the rows."""
    return {name: [value[i] for i in rows] for name, value in values.items()}


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("settings", SAMPLERS, ids=str)
def test_seven_rows_equal_pairs_and_singles_in_any_order(family, settings):
    model, batch = student(family, block_size=4), prompts(COUNT, seed=2)
    together = decode(model, batch, **LIMITS, **MIXED, **settings)
    order = list(range(COUNT))
    random.Random(family).shuffle(order)
    for groups in ([order[i : i + 2] for i in range(0, COUNT, 2)], [[i] for i in order]):
        for rows in groups:
            for i, answer in zip(rows, decode(model, [batch[i] for i in rows], **LIMITS, **some(rows), **settings)):
                assert answer.ids == together[i].ids
                assert (answer.nfe, answer.steps) == (together[i].nfe, together[i].steps)


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("settings", SAMPLERS, ids=str)
def test_in_fp32_rows_part_from_themselves_alone_at_near_ties_only(family, settings, record_property):
    model, batch = student(family, block_size=4, dtype=torch.float32), prompts(COUNT, seed=2)
    together = trace(model, batch, **LIMITS, **MIXED, **settings)
    alone = [trace(model, [p], **LIMITS, **some([i]), **settings) for i, p in enumerate(batch)]
    alone = [a[0][0] for a in alone], [a[1][0] for a in alone]
    record_property("near_ties", num_near_ties(batch, together, alone, [t == 0 for t in MIXED["temperature"]]))


@pytest.mark.parametrize("settings", SAMPLERS, ids=str)
@pytest.mark.parametrize("fault", ["rounding", "logits", "token"])
def test_only_a_near_tie_excuses_texts_that_part(settings, fault, monkeypatch):
    """The comparison above on a vocabulary of copies, where rounding decides; anything worse is found."""
    model, batch = student(block_size=4, dtype=torch.float32), prompts(COUNT, seed=2)
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head[20:37] = head[3:20]
    exact = trace(model, batch, **LIMITS, **settings)
    real, generator = Forward.__call__, torch.Generator().manual_seed(0)
    noise = {"rounding": 1e-6, "logits": 1e-3, "token": 0.0}[fault]

    def off(self, starts, clean, noisy, keep):
        logits = real(self, starts, clean, noisy, keep)
        return logits + noise * torch.randn(logits.shape, generator=generator)

    def third(logits):
        token = logits.topk(3).indices[..., 2]
        return token, logits.softmax(-1).gather(-1, token[..., None])[..., 0]

    monkeypatch.setattr(Forward, "__call__", off)
    if fault == "token":
        monkeypatch.setattr(denoise, "most_likely", third)
        monkeypatch.setattr(verify, "most_likely", third)
    near = trace(model, batch, **LIMITS, **settings)
    assert [a.ids for a in near[0]] != [a.ids for a in exact[0]]
    if fault == "rounding":
        assert num_near_ties(batch, exact, near, [True] * COUNT) > 0
    said = {"rounding": "a row that is drawn", "logits": "1e-05", "token": "without a near tie|left open"}[fault]
    with pytest.raises(AssertionError, match=said):
        num_near_ties(batch, exact, near, [fault != "rounding"] * COUNT)


def check_cached(model, batch, settings):
    _, seen = trace(model, batch, max_new_tokens=[9, 21, 14], eos_token_ids=[EOS], **settings)
    assert len({len(forwards) for forwards in seen}) > 1  # rows end apart, and leave the cache
    for forward in (f for forwards in seen for f in forwards):
        fresh = Forward(model, capacity=len(forward.clean) + len(forward.noisy))
        expected = fresh([0], [forward.clean], [forward.noisy], keep=len(forward.logits))[0]
        assert torch.allclose(forward.logits, expected, rtol=1e-6, atol=1e-6)  # fp64 inside, logits in fp32


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("attention", ["block", "block_causal_inside"])
def test_cached_equals_uncached_at_every_forward_of_a_batch(settings, attention):
    check_cached(student(attention=attention), prompts(3, seed=4), settings)


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("settings", SAMPLERS, ids=str)
def test_cached_equals_uncached_for_every_family(family, settings):
    check_cached(student(family), prompts(3, seed=4), settings)
