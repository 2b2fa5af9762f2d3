"""A class of models converts if its body follows the masks and positions it is given; asked by perturbation."""

import re

import pytest
import torch
import transformers

from fewstep.students.attention import attention_implementation
from fewstep.students.families import PROBED
from fewstep.students.probe import tiny_like, why_class_not_convertible, why_not_convertible
from tests.tiny import tiny_model


def default_config(model_type: str):
    return transformers.AutoConfig.for_model(model_type)


@pytest.mark.parametrize("model_type", PROBED)
def test_families_that_plan_takes_as_known_really_convert(model_type):
    config = default_config(model_type)
    model = tiny_like(config)
    assert model is not None and model.config.model_type == model_type
    assert sum(p.numel() for p in model.parameters()) < 25e6
    assert why_not_convertible(model) is None


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("mpt", {}, "order of storage"),  # ALiBi
        ("falcon", {"alibi": True}, "4-D masks|order of storage"),
        ("bloom", {}, "4-D masks|order of storage"),
        ("jamba", {}, "keep a state"),
        ("recurrent_gemma", {}, "keep a state"),
        ("mamba", {}, "no attention heads"),
        ("rwkv", {}, "no attention heads"),
    ],
)
def test_models_that_cannot_be_converted_are_named_with_the_reason(model_type, settings, reason):
    config = transformers.AutoConfig.for_model(model_type, **settings)
    assert re.search(reason, why_class_not_convertible(config) or "converts")


def test_linear_attention_among_full_attention_is_found():
    config = transformers.AutoConfig.for_model(
        "qwen3_next", num_hidden_layers=4, head_dim=16, linear_key_head_dim=8, linear_value_head_dim=8
    )
    assert "keep a state" in why_class_not_convertible(config)


@pytest.mark.parametrize("fault", ["ignores_mask", "causal_only", "storage_order"])
def test_a_llama_with_a_fault_is_refused(fault, monkeypatch):
    model = tiny_model("llama")
    assert why_not_convertible(model) is None
    body = model.base_model
    whole = body.forward

    def broken(input_ids, attention_mask, position_ids, use_cache):
        lowest = torch.finfo(attention_mask.dtype).min
        if fault == "ignores_mask":
            attention_mask = torch.zeros_like(attention_mask)
        if fault == "causal_only":
            size = attention_mask.shape[-1]
            attention_mask = attention_mask + torch.full((size, size), lowest / 2).triu(1)
        if fault == "storage_order":
            position_ids = torch.arange(input_ids.shape[1])[None]
        return whole(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=use_cache)

    monkeypatch.setattr(body, "forward", broken)
    expected = {
        "ignores_mask": "hides a block",
        "causal_only": "see to its right",
        "storage_order": "order of storage",
    }
    assert expected[fault] in why_not_convertible(model)


def test_only_the_text_config_and_the_random_state_of_the_caller_are_left_alone():
    config = default_config("llama")
    before, state = config.to_dict(), torch.get_rng_state()
    tiny_like(config)
    assert config.to_dict() == before and torch.equal(torch.get_rng_state(), state)


def test_attention_implementation_is_eager_where_sdpa_refuses():
    assert attention_implementation(default_config("llama")) == "sdpa"
    assert attention_implementation(default_config("gemma2")) == "eager"
    assert attention_implementation(default_config("gpt_oss")) == "eager"
