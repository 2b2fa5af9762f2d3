"""Training and decoding create what they need where the model is, shown on torch's `meta` device: no GPU needed.

Tensors there have shapes and no values, and an operation that meets a tensor of another device raises.
"""

from dataclasses import fields

import numpy as np
import pytest
import torch

from fewstep.distill.config import DistillConfig
from fewstep.distill.trainee import Trainee, load_objectives
from fewstep.students.decoding import masks
from fewstep.students.decoding.decode import BLOCKWISE
from fewstep.students.decoding.forward import Forward
from fewstep.students.decoding.sampler import Draft
from fewstep.students.layout import Batch, Example, body_hidden, build_batch
from tests.students.builders import MASK, student

FAMILIES = ("llama", "qwen2_windows", "gemma2", "gemma3", "gpt2")
PATTERNS = ("block", "block_causal_inside", "bidirectional")
OBJECTIVES = {"ce": 1.0, "ar": 1.0, "kd": 0.3, "certainty": 0.5, "consistency": 1.0}
B, S, V, K = 2, 4, 40, 3


def away(family, attention, alignment="same_position"):
    return student(family, attention, alignment=alignment, dtype=torch.bfloat16).to("meta")


def batch(attention, **given) -> Batch:
    rng = np.random.default_rng(0)
    drawn = []
    for prompt, response in ((5, 8), (9, 6)):
        tokens, half = rng.integers(3, 38, prompt + response), rng.random((1, response)) < 0.5
        half[0, ::S] = True
        drawn.append(
            Example(
                tokens[:prompt], tokens[prompt:], tokens[prompt:], np.arange(response) // S, half, half & False, False,
                rng.integers(3, 38, (response, K)), np.full((response, K), -2.0), np.full(response, 0.1),
            )
        )  # fmt: skip
    return build_batch(drawn, MASK, attention, 0.1, K, **given)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", PATTERNS)
def test_a_training_step_stays_on_its_device(family, attention):
    config = DistillConfig(objectives=OBJECTIVES)
    trainee = Trainee(
        away(family, attention), attention, MASK, load_objectives(OBJECTIVES), config.objectives, guesses=False
    )
    there = batch(attention).to("meta")
    assert all(t.is_meta for f in fields(there) if isinstance(t := getattr(there, f.name), torch.Tensor))
    loss, sums = trainee(there, dict.fromkeys(OBJECTIVES, 0.1))
    loss.backward()
    assert all(t.is_meta for t in (loss, *sums.values()))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", PATTERNS)
@pytest.mark.parametrize("alignment", ["same_position", "shifted"])
def test_a_forward_of_decoding_stays_on_its_device(family, attention, alignment):
    forward = Forward(away(family, attention, alignment), capacity=40)
    for starts, clean in (([0, 0], [[3, 4, 5], [6, 7]]), ([3, 2], [[7, 8, 9], [7, 8]])):
        assert forward(starts, clean, [[MASK] * S, [MASK, 3, MASK]], keep=S).is_meta
    forward.cache.keep([1])
    assert forward([4], [[]], [[MASK] * S], keep=S).is_meta


@pytest.mark.parametrize("name", BLOCKWISE)
def test_a_samplers_choice_stays_on_its_device(name):
    sampler, device = BLOCKWISE[name], "meta"
    logits, share = torch.empty(B, S, V, device=device), torch.empty(B, S, device=device)
    ids, yes = share.long(), share.bool()
    draft = Draft(logits, ids, share, yes, ids, yes, ids[:, 0], ids[:, 1])
    draft.previous, draft.stable, draft.decided, draft.decided_confidence = logits, ids, yes, share
    values = {key: torch.tensor([[float(s.default)]], device=device) for key, s in sampler.settings.items()}
    chosen = [choose(draft, **values) for choose in (sampler.stays, sampler.select, sampler.revise) if choose]
    assert all(t.is_meta for t in chosen)


def test_one_tensor_made_elsewhere_is_found(monkeypatch):
    model, there = away("llama", "block"), batch("block").to("meta")
    body_hidden(model, there, "block")
    monkeypatch.setattr(masks, "_additive", lambda allow, dtype: torch.zeros(allow.shape, dtype=dtype)[:, None])
    with pytest.raises(RuntimeError, match="device"):
        body_hidden(model, there, "block")
