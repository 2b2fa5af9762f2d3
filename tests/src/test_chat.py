"""The one place that makes ids of messages."""

from types import SimpleNamespace

import pytest

from fewstep.chat import encode_prompt, eos_ids

WORDS = ["<unk>", "<s>", "</s>", "<user>", "<assistant>", "hi", "there", "be", "brief"]
TEMPLATE = (
    "{% for m in messages %}{{ '<user> ' if m.role == 'user' else '<assistant> ' }}{{ m.content }} </s> {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def test_template_is_applied_with_the_header_of_the_answer(tokenizer):
    tokenizer.chat_template = TEMPLATE
    ids = encode_prompt(tokenizer, [{"role": "user", "content": "hi there"}])
    assert [WORDS[i] for i in ids] == ["<user>", "hi", "there", "</s>", "<assistant>"]
    assert type(ids) is list and all(type(i) is int for i in ids)


def test_tokenizer_without_template_gets_the_last_user_message_and_one_bos(tokenizer):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi there"}]
    assert encode_prompt(tokenizer, messages) == [5, 6]
    tokenizer.add_bos_token = True
    assert encode_prompt(tokenizer, messages) == [1, 5, 6]


def test_eos_ids_joins_generation_config_and_tokenizer_without_repeats(tokenizer):
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=[7, 2]))
    assert eos_ids(model, tokenizer) == [7, 2]
    assert eos_ids(SimpleNamespace(eos_token_id=8), tokenizer) == [8, 2]
    assert eos_ids(SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=None)), tokenizer) == [2]
