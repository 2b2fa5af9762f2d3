"""What `plan` shows of a prompt is what the tokenizer makes of it."""

import json
from pathlib import Path

import pytest
from tiny import save_tiny, tiny_tokenizer

from fewstep.chat import encode_prompt
from fewstep.errors import UserError
from fewstep.teachers import gguf
from fewstep.teachers.load import load_tokenizer
from fewstep.teachers.preview import prompt_text

TEACHER = str(Path(__file__).resolve().parents[2] / "recipes/quickstart/teacher")
CONVERSATIONS = (
    [{"role": "user", "content": "Hello  world"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "née 👍"}],
)


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_the_text_is_that_of_the_ids(messages, tmp_path):
    model = str(save_tiny(tmp_path / "tiny"))
    tokenizer = load_tokenizer(model)
    assert prompt_text(model, None, messages) == tokenizer.decode(encode_prompt(tokenizer, messages))
    shown = prompt_text(TEACHER, None, messages[:1])
    tokenizer = load_tokenizer(TEACHER)
    assert shown == tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, tokenize=False)


def test_special_tokens_templates_by_name_and_none_at_all(tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    by_name = [
        {"name": "tools", "template": "no"},
        {"name": "default", "template": "{{ eos_token }}{{ messages[0].content }}"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": by_name}))
    assert prompt_text(str(tmp_path), None, [{"role": "user", "content": "x"}]) == "<|im_end|>x"
    settings.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert prompt_text(str(tmp_path), None, CONVERSATIONS[1]) == "née 👍"


def test_a_template_that_refuses_is_a_line(tmp_path):
    tiny_tokenizer(template="{{ raise_exception('no system\nrole') }}").save_pretrained(tmp_path)
    with pytest.raises(UserError, match="its chat template refuses the first prompt .no system role"):
        prompt_text(str(tmp_path), None, CONVERSATIONS[0])


def test_of_a_gguf_the_header_says_it(monkeypatch):
    fields: dict = {"tokenizer.chat_template": "<u>{{ messages[0].content }}"}
    monkeypatch.setattr(gguf, "header", lambda model: fields)
    assert prompt_text("m.gguf", None, CONVERSATIONS[0]) == "<u>Hello  world"
    fields["tokenizer.chat_template"] = "{{ bos_token }}{{ messages[0].content }}"
    assert prompt_text("m.gguf", None, CONVERSATIONS[0]) is None
