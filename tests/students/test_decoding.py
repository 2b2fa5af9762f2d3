"""Decoding: cached = uncached, batch = singles, lossless verification, and limits that hold."""

import random

import pytest
import torch

from fewstep.students.decoding import decode
from fewstep.students.decoding.forward import Forward
from fewstep.students.decoding.weights import column_major
from tests.students.builders import EOS, FAMILIES, MASK, student

SETTINGS = [
    {"sampler": "ar"},
    {"sampler": "fixed", "steps": 3},
    {"sampler": "threshold", "threshold": 0.0},
    {"sampler": "threshold", "threshold": 0.3},
    {"sampler": "threshold", "threshold": 1.0},
    {"sampler": "threshold", "threshold": 0.5, "leading": 1},
    {"sampler": "factor", "factor": 1.0},
    {"sampler": "entropy", "gamma": 2.0},
    {"sampler": "margin", "margin": 0.2},
    {"sampler": "klass", "threshold": 0.2, "kl": 0.5, "history": 1},
    {"sampler": "remask", "steps": 4, "share": 0.5},
    {"sampler": "edit", "threshold": 0.3, "rewrite": 0.3},
    {"sampler": "verify"},
    {"sampler": "ar", "temperature": 1.0, "seed": 3},
    {"sampler": "threshold", "threshold": 0.3, "temperature": 0.8, "top_p": 0.9, "seed": 3},
    {"sampler": "klass", "temperature": 1.0, "seed": 3},
    {"sampler": "verify", "temperature": 1.0, "seed": 3},
]


def prompts(count, seed=0, longest=20):
    rng = random.Random(seed)
    return [[rng.randrange(3, 38) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


def run(model, batch, budget=21, eos=(EOS,), **settings):
    return decode(model, batch, max_new_tokens=budget, eos_token_ids=list(eos), **settings)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("attention", ["block", "block_causal_inside", "bidirectional"])
def test_decode_batch_equals_singles_in_any_order(settings, attention):
    if attention == "bidirectional" and settings["sampler"] in ("verify", "ar"):
        pytest.skip("refused; see test_verify_is_refused_without_a_clean_stream")
    model, batch = student(attention=attention), prompts(7)
    together = run(model, batch, **settings)
    alone = [run(model, [p], **settings)[0] for p in batch]
    backwards = run(model, batch[::-1], **settings)[::-1]
    for a, b, c in zip(together, alone, backwards):
        assert a.ids == b.ids == c.ids
        assert (a.nfe, a.steps, a.positions) == (b.nfe, b.steps, b.positions)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_verify_equals_plain_generate(family):
    model, batch = student(family), prompts(12, seed=3)
    expected = []
    for prompt in batch:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=25, do_sample=False)
        expected.append(out[0, len(prompt) :].tolist())
    for settings in ({"block_size": 2}, {"block_size": 5}, {"block_size": 8}, {"sampler": "ar"}):
        got = run(model, batch, **{"sampler": "verify", "budget": 25, **settings})
        assert [a.ids for a in got] == expected


def test_ar_takes_exactly_one_forward_a_token():
    for answer in run(student(), prompts(5), sampler="ar"):
        assert answer.nfe == len(answer.ids)


def test_verify_with_a_perfect_drafter_accepts_whole_blocks():
    """With drafts that the clean stream agrees with, prefill and then one forward a block."""
    model = student(block_size=8)
    prompt = prompts(1, seed=5)[0]
    truth = run(model, [prompt], budget=33, eos=(), sampler="ar")[0].ids
    real = Forward.__call__

    def perfect(self, starts, clean, noisy, keep):
        logits = real(self, starts, clean, noisy, keep)
        begin = starts[0] + len(clean[0]) - len(prompt)
        for i in range(len(noisy[0])):
            if begin + i < len(truth):
                logits[0, keep - len(noisy[0]) + i] = 0.0
                logits[0, keep - len(noisy[0]) + i, truth[begin + i]] = 50.0
        return logits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Forward, "__call__", perfect)
        answer = run(model, [prompt], budget=33, eos=(), sampler="verify")[0]
    assert answer.ids == truth
    assert answer.nfe == 1 + 4  # the anchor, then 8 tokens a forward


@pytest.mark.parametrize("block_size", [1, 2, 7, 16, 32])
def test_outputs_hold_no_mask_no_excess_and_nothing_after_eos(block_size):
    model = student(block_size=32)
    rng = random.Random(block_size)
    for settings in SETTINGS[1:]:
        budget = rng.randrange(1, 70)
        for p, a in zip(
            batch := prompts(4, seed=block_size, longest=2 * block_size + 2),
            run(model, batch, budget=budget, block_size=block_size, **settings),
        ):
            assert MASK not in a.ids and 1 <= len(a.ids) <= budget and p
            assert EOS not in a.ids[:-1]
            assert (a.finish_reason == "stop") == (a.ids[-1] == EOS)
            assert len(a.steps) == len(a.confidence) == len(a.ids)
            assert a.nfe >= 1 + max(a.steps)
            assert a.finish_reason == "stop" or len(a.ids) == budget


def test_threshold_zero_takes_one_forward_a_block():
    answer = run(student(block_size=8), prompts(1, seed=11), budget=32, eos=(), sampler="threshold", threshold=0.0)[0]
    assert answer.nfe == -(-len(answer.ids) // 8)
    assert answer.steps == [i // 8 for i in range(len(answer.ids))]


def test_threshold_above_reach_takes_one_forward_a_token():
    answer = run(student(block_size=8), prompts(1, seed=11), budget=20, eos=(), sampler="threshold", threshold=1.0)[0]
    assert answer.nfe >= len(answer.ids)


def test_fixed_spends_its_steps_on_every_block():
    answer = run(student(block_size=8), prompts(1, seed=11), budget=16, eos=(), sampler="fixed", steps=4)[0]
    assert answer.finish_reason == "length"
    assert answer.nfe == 8
    assert sorted(answer.steps).count(0) == 2


def test_verify_is_refused_without_a_clean_stream():
    with pytest.raises(ValueError, match="clean stream"):
        run(student(attention="bidirectional"), prompts(1), sampler="verify")


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"sampler": "magic"}, "unknown"),
        ({"sampler": "threshold", "threshold": 1.5}, "between 0 and 1"),
        ({"sampler": "fixed", "steps": 0}, "≥ 1"),
        ({"sampler": "verify", "threshold": 0.5}, "belongs to"),
        ({"sampler": "threshold", "block_size": 9}, "largest trained"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        run(student(), prompts(1), **settings)


def test_context_limit_shortens_the_budget():
    model = student()
    prompt = [5] * 250
    answer = run(model, [prompt], budget=50, eos=(), sampler="threshold", threshold=0.0)[0]
    assert len(prompt) + len(answer.ids) <= 256
    with pytest.raises(ValueError, match="^the prompt has 256 tokens, the model's context 256: shorten it$"):
        run(model, [[5] * 256], sampler="threshold")
    with pytest.raises(ValueError, match="^prompt 2 is empty"):
        run(model, [[5], []], sampler="threshold")


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox"])
def test_column_major_weights_hold_the_same_values_and_give_the_same_text(family):
    model = student(family)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batch = prompts(5)
    expected = {s: run(model, batch, sampler=s) for s in ("ar", "threshold", "verify")}
    assert column_major(model) is model
    assert (
        not model.base_model.get_submodule("layers.0")
        .mlp.get_submodule("dense_h_to_4h" if family == "gpt_neox" else "up_proj")
        .weight.is_contiguous()
    )
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    for sampler, answers in expected.items():
        assert [a.ids for a in run(model, batch, sampler=sampler)] == [a.ids for a in answers]
