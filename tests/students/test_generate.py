"""`custom_generate/generate.py`, called as transformers calls it: every argument is honoured or refused."""

import pytest
import torch
from transformers import GenerationConfig

from fewstep.students.decoding import decode
from fewstep.students.decoding.generate import generate
from tests.students.builders import student

PROMPT = torch.tensor([[5, 6, 7], [8, 9, 10]])


@pytest.fixture(scope="module")
def model():
    made = student()
    made.generation_config.eos_token_id = None
    return made


def texts(model, **given):
    return generate(model, input_ids=PROMPT, max_new_tokens=12, **given)[:, 3:].tolist()


def wanted(model, **given):
    answers = decode(model, PROMPT.tolist(), max_new_tokens=12, eos_token_ids=[], **given)
    return [a.ids for a in answers]


def test_arguments_reach_the_decoding(model):
    assert texts(model) == wanted(model)
    assert texts(model, threshold=0.2) == wanted(model, threshold=0.2)
    assert texts(model, sampler="entropy", gamma=1.0) == wanted(model, sampler="entropy", gamma=1.0)
    drawn = wanted(model, temperature=0.8, top_p=0.9, seed=[4, 5])
    assert texts(model, temperature=0.8, top_p=0.9, seed=4) == drawn != wanted(model)
    assert texts(model, temperature=0.8, do_sample=False) == wanted(model)
    torch.manual_seed(0)
    first = texts(model, do_sample=True)
    torch.manual_seed(0)
    assert texts(model, do_sample=True) == first != texts(model, do_sample=True)


def test_a_given_generation_config_is_honoured_or_refused(model):
    given = GenerationConfig(do_sample=True, temperature=2.0, top_p=0.5)
    assert texts(model, generation_config=given, seed=4) == wanted(model, temperature=2.0, top_p=0.5, seed=[4, 5])
    assert texts(model, generation_config=GenerationConfig(temperature=2.0)) == wanted(
        model
    )  # greedy: do_sample is off
    for fault in ({"top_k": 5}, {"num_beams": 4}, {"repetition_penalty": 1.2}):
        with pytest.raises(ValueError, match=f"generation_config.{next(iter(fault))}"):
            texts(model, generation_config=GenerationConfig(**fault))


def test_the_length_of_an_answer_is_that_of_plain_generate(model):
    prompt = torch.randint(3, 20, (1, 30), generator=torch.Generator().manual_seed(0))

    def lengths(**given):
        plain = model.generate(input_ids=prompt, do_sample=False, **given).shape[1]
        return plain, generate(model, input_ids=prompt, sampler="ar", **given).shape[1]

    assert lengths() == (50, 50)
    assert lengths(max_length=37) == (37, 37)
    assert lengths(max_new_tokens=9) == (39, 39)
    assert lengths(generation_config=GenerationConfig(max_length=41)) == (41, 41)
    with pytest.raises(ValueError, match="max_length=30 leaves no room behind 30"):
        generate(model, input_ids=prompt, max_length=30)


def test_stop_strings_need_a_tokenizer_and_end_a_row(model):
    class Letters:
        def decode(self, ids):
            return "".join(chr(60 + i) for i in ids)

    whole = wanted(model)
    string = Letters().decode(whole[0][2:4])
    stopped = texts(model, stop_strings=string, tokenizer=Letters(), pad_token_id=0)
    end = Letters().decode(whole[0]).index(string) + 2
    assert stopped[0][:end] == whole[0][:end] and not any(stopped[0][end:])
    with pytest.raises(ValueError, match="stop_strings needs the tokenizer"):
        texts(model, stop_strings="x")
    with pytest.raises(ValueError, match="does not take num_beams"):
        texts(model, num_beams=4)


def test_effort_brings_a_calibrated_level_and_goes_with_no_setting(model, monkeypatch):
    levels = {
        "low": {"sampler": "threshold", "settings": {"threshold": 0.2}},
        "high": {"reason": "no setting loses 0 points"},
    }
    with pytest.raises(ValueError, match="no calibrated levels"):
        texts(model, effort="low")
    monkeypatch.setattr(model.generation_config, "fewstep_effort", levels, raising=False)
    assert texts(model, effort="low") == wanted(model, threshold=0.2) != wanted(model)
    with pytest.raises(ValueError, match="effort='high': no setting loses 0 points; this student has low"):
        texts(model, effort="high")
    with pytest.raises(ValueError, match="effort names the sampler and its settings: leave out threshold"):
        texts(model, effort="low", threshold=0.5)
