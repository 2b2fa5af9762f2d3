"""Requests: every field is honoured or refused by name."""

import dataclasses
import json

import pytest

from fewstep.serve.asks import MAX_TOKENS, Refused, parse
from fewstep.serve.worker import Sampling
from tests.tiny import tiny_tokenizer

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "tiny", "prompt": "hi"}


def ask(served, base=CHAT, **changes):
    kind = "chat" if base is CHAT else "completion"
    return parse(kind, json.dumps({**base, **changes}).encode(), served)


def test_defaults_are_threshold_and_a_limit(served):
    given = ask(served)
    assert given.sampling == Sampling("threshold", MAX_TOKENS) and given.stops == ()
    assert not (given.stream or given.include_usage or given.trace)


def test_chat_prompt_is_the_template_applied(served):
    messages = [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "refusal": None, "tool_calls": None, "annotations": []},
        {"role": "user", "content": [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]},
    ]
    (prompt,) = ask(served, messages=messages).prompts
    assert served.tokenizer.decode(prompt) == (
        "<|im_start|>system\nbe short<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
        "<|im_start|>user\ncd<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("prompt", "count"), [("ab", 1), (["ab", "c"], 2), ([5, 6], 1), ([[5], [6, 7]], 2), (["ab", [5]], 2)]
)
def test_completion_takes_text_and_ids_without_a_template(served, prompt, count):
    prompts = ask(served, TEXT, prompt=prompt).prompts
    assert len(prompts) == count
    assert prompts[0] in ([5, 6], [5], served.tokenizer("ab")["input_ids"])


NEUTRAL = dict(
    temperature=0, top_p=1.0, n=1, frequency_penalty=0.0, presence_penalty=0, logit_bias={}, user="me",
    response_format={"type": "text"}, stop=None, stream=False, stream_options=None, metadata={}, store=False,
)  # fmt: skip


def test_neutral_values_change_nothing(served):
    assert ask(served, **NEUTRAL, logprobs=False, tools=[], tool_choice="auto", top_logprobs=None) == ask(served)
    assert ask(served, TEXT, **NEUTRAL, echo=False, best_of=1, suffix=None, logprobs=None) == ask(served, TEXT)


@pytest.mark.parametrize(
    ("changes", "status", "param", "words"),
    [
        ({"temperature": -0.7}, 400, "temperature", "must be a number ≥ 0"),
        ({"temperature": False}, 400, "temperature", "must be a number"),
        ({"top_p": 0}, 400, "top_p", "above 0 and at most 1"),
        ({"top_p": 1.5}, 400, "top_p", "above 0 and at most 1"),
        ({"n": 2}, 400, "n", "one answer a prompt"),
        ({"logprobs": True}, 400, "logprobs", "log-probabilities are not returned"),
        ({"top_logprobs": 5}, 400, "top_logprobs", "not returned"),
        ({"frequency_penalty": 0.1}, 400, "frequency_penalty", "not supported"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format", "not supported"),
        ({"tools": [{"type": "function"}]}, 400, "tools", "not supported"),
        ({"max_token": 5}, 400, "max_token", "did you mean max_tokens?"),
        ({"qwxyz": 1}, 400, "qwxyz", "unknown here; leave it out"),
        ({"prompt": "hi"}, 400, "prompt", "unknown"),
        ({"model": "gpt-4"}, 404, "model", "this server has tiny"),
        ({"model": None}, 400, "model", "missing"),
        ({"max_tokens": 0}, 400, "max_tokens", "≥ 1"),
        ({"max_tokens": True}, 400, "max_tokens", "≥ 1"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 400, "max_tokens", "differ"),
        ({"sampler": "magic"}, 400, "sampler", "unknown; use one of"),
        ({"threshold": 1.5}, 400, "threshold", "between 0 and 1"),
        ({"threshold": "high"}, 400, "threshold", "must be a number"),
        ({"sampler": "verify", "threshold": 0.5}, 400, "threshold", "belongs to"),
        ({"sampler": "fixed", "steps": 0}, 400, "steps", "≥ 1"),
        ({"block_size": 9}, 400, "block_size", "largest trained"),
        ({"effort": "medium"}, 400, "effort", "no such level; this student has low, lossless"),
        ({"effort": "high"}, 400, "effort", "no setting loses 0 points"),
        ({"effort": "low", "threshold": 0.5}, 400, "effort", "leave out threshold"),
        ({"stop": ""}, 400, "stop", "1 to 256 characters"),
        ({"stop": ["a"] * 17}, 400, "stop", "at most 16"),
        ({"stop": 5}, 400, "stop", "give text"),
        ({"stream": "yes"}, 400, "stream", "true or false"),
        ({"stream_options": {"other": 1}}, 400, "stream_options", "only include_usage"),
        ({"messages": []}, 400, "messages", "missing or empty"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "messages", "must be one of system, user, assistant"),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "messages", "must be text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages", "only parts of type"),
        ({"messages": [{"role": "user", "content": "x", "name": "me"}]}, 400, "messages", "messages[0].name"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, 400, "messages", "must be the user's"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, 400, "messages", "context holds 512"),
    ],
    ids=str,
)
def test_chat_request_is_refused_with_one_line_and_its_field(served, changes, status, param, words):
    with pytest.raises(Refused) as caught:
        ask(served, **changes)
    assert (caught.value.status, caught.value.param) == (status, param)
    assert words in caught.value.message and "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt": None}, "give text, token ids"),
        ({"prompt": ""}, "empty"),
        ({"prompt": []}, "empty"),
        ({"prompt": [5, 100_000]}, "token ids must lie between"),
        ({"prompt": [{"a": 1}]}, "give text, token ids"),
        ({"prompt": ["a"] * 65}, "at most 64"),
        ({"logprobs": 0}, "not returned"),
        ({"echo": True}, "not supported"),
        ({"messages": []}, "unknown"),
        ({"max_completion_tokens": 5}, "unknown"),
    ],
    ids=str,
)
def test_completion_request_is_refused_with_one_line(served, changes, words):
    with pytest.raises(Refused, match=words) as caught:
        ask(served, TEXT, **changes)
    assert caught.value.status == 400


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"x"', b"\xff", b'{"a": "\\ud800"}', b"[" * 100_000])
def test_body_that_is_no_json_object_is_refused(served, body):
    with pytest.raises(Refused, match="the body is"):
        parse("chat", body, served)


def test_effort_brings_the_calibrated_sampler(served):
    assert ask(served, effort="low", max_tokens=9).sampling == Sampling("threshold", 9, settings=(("threshold", 0.3),))
    assert ask(served, effort="lossless").sampling.sampler == "verify"
    with pytest.raises(Refused, match="no calibrated levels"):
        ask(dataclasses.replace(served, effort={}), effort="low")


def test_sampler_that_the_student_cannot_run_is_refused(served, monkeypatch):
    monkeypatch.setitem(served.model.config.fewstep, "attention", "bidirectional")
    for sampler in ("verify", "ar"):
        with pytest.raises(Refused, match="causal clean stream"):
            ask(served, sampler=sampler)
    assert ask(served, sampler="fixed", steps=2).sampling.settings == (("steps", 2),)


def test_earlier_turns_are_refused_where_no_template_would_show_them(served):
    plain = dataclasses.replace(served, tokenizer=tiny_tokenizer(template=None))
    assert ask(plain).prompts == [served.tokenizer("hi")["input_ids"]]
    with pytest.raises(Refused, match="no chat template"):
        ask(plain, messages=[{"role": "system", "content": "s"}, *CHAT["messages"]])


def test_refusal_of_a_chat_template_is_one_line(served):
    strict = tiny_tokenizer(template="{{ raise_exception('roles must alternate\nhere') }}")
    with pytest.raises(Refused, match="roles must alternate here"):
        ask(dataclasses.replace(served, tokenizer=strict))


def test_limit_beyond_the_context_is_the_context(served):
    assert ask(served, max_completion_tokens=10**9).sampling.max_tokens == 512
