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
