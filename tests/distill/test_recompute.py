"""Activation checkpointing changes what is kept, never a gradient."""

import pytest
import torch

from fewstep.distill.config import ObjectiveConfig
from fewstep.distill.recompute import checkpoint_activations
from fewstep.distill.trainee import Trainee, load_objectives
from fewstep.errors import UserError
from fewstep.students.lora import apply_lora
from tests.distill.test_packing import draw, lay
from tests.students.builders import FAMILIES, MASK, student

NAMES = {"ce": ObjectiveConfig(weight=1.0), "correction": ObjectiveConfig(weight=0.7)}


def gradients(family, attention, lora, recompute):
    model = student(family, attention)
    if lora:
        apply_lora(model, 4, None, lora == "gated", model.config.vocab_size if lora == "gated" else MASK)
        if lora == "gated":
            with torch.no_grad():  # or the update would be zero, and what the gate does unseen
                for name, p in model.named_parameters():
                    if "lora_b" in name:
                        p.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    mask = model.config.vocab_size if lora == "gated" else MASK
    trainee = Trainee(model, attention, mask, load_objectives(NAMES), NAMES, True).eval()
    ran = []
    if recompute:
        checkpoint_activations(model)
    layer = next(m for m in model.modules() if type(m).__name__.endswith(("DecoderLayer", "GPT2Block", "GPTNeoXLayer")))
    inside = next(m for m in layer.modules() if "norm" in type(m).__name__.lower())
    inside.register_forward_hook(lambda *a: ran.append(1))
    batch = lay(draw(attention), attention, None)
    if lora == "gated":
        batch.ids[batch.ids == MASK] = mask
    loss, _ = trainee(batch, {"ce": 0.01, "correction": 0.01})
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in trainee.named_parameters() if p.requires_grad}, len(ran)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_recomputed_gradients_equal_kept_ones_in_every_family(family):
    check(family, "block", None)


@pytest.mark.parametrize("lora", ["plain", "gated"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_recomputed_gradients_equal_kept_ones_of_adapters(family, lora):
    check(family, "block", lora)


def check(family, attention, lora):
    kept, again = (gradients(family, attention, lora, recompute) for recompute in (False, True))
    assert again[2] > kept[2]  # something was computed twice
    assert torch.equal(kept[0], again[0]) and kept[1].keys() == again[1].keys()
    for name, grad in kept[1].items():
        assert (grad is None) == (again[1][name] is None), name
        assert grad is None or torch.allclose(grad, again[1][name], rtol=1e-12, atol=1e-12), name


def test_a_class_without_such_layers_is_refused():
    with pytest.raises(UserError, match="activation_checkpointing: Linear"):
        checkpoint_activations(torch.nn.Linear(2, 2))
