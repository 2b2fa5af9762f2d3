"""The API over HTTP: OpenAI's shapes, streams equal to whole answers, exact stops, errors, the page."""

import asyncio
import base64
import hashlib
import json
import re

import pytest

from tests.serve.conftest import EXTRA

pytest.importorskip("fastapi", reason=EXTRA)

from fastapi.testclient import TestClient  # noqa: E402

from fewstep.chat import encode_prompt  # noqa: E402
from fewstep.serve import app as app_module  # noqa: E402
from fewstep.serve import worker as worker_module  # noqa: E402
from fewstep.serve.app import MAX_BODY, make_app  # noqa: E402
from fewstep.students.decoding import decode  # noqa: E402

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 30}
SAMPLERS = [
    {"sampler": "ar"},
    {"sampler": "fixed", "steps": 3},
    {"sampler": "threshold", "threshold": 0.3},
    {"sampler": "threshold", "threshold": 0.5, "block_size": 5},
    {"sampler": "verify"},
]


@pytest.fixture
def client(served, worker):
    worker.start()
    return TestClient(make_app(served, worker, None), raise_server_exceptions=False)


def chat(client, **changes):
    return client.post("/v1/chat/completions", json={**CHAT, **changes})


def chunks(response):
    """Return the JSON of a stream's events; it must end with [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(e.removeprefix("data: ")) for e in events[:-2]]


def joined(parts):
    return "".join(c["choices"][0]["delta"].get("content", "") for c in parts if c["choices"])


def expected(student, settings, messages=CHAT["messages"], budget=30):
    model, tokenizer, eos = student
    prompt = encode_prompt(tokenizer, messages)
    done = decode(model, [prompt], max_new_tokens=budget, eos_token_ids=eos, **settings)[0]
    return done, tokenizer.decode(done.ids, skip_special_tokens=True), len(prompt)


@pytest.mark.parametrize("settings", SAMPLERS, ids=str)
def test_chat_answers_what_decode_does(client, student, settings):
    done, text, prompt_tokens = expected(student, settings)
    answer = chat(client, **settings).json()
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": text, "refusal": None}
    assert answer["choices"][0]["finish_reason"] == done.finish_reason
    assert answer["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": len(done.ids),
        "total_tokens": prompt_tokens + len(done.ids),
    }
    assert answer["fewstep"] == {"nfe": done.nfe, "tpf": len(done.ids) / done.nfe, **settings}
    assert (answer["object"], answer["model"]) == ("chat.completion", "tiny")


@pytest.mark.parametrize("settings", SAMPLERS, ids=str)
def test_stream_concatenates_to_the_whole_answer(client, settings):
    whole = chat(client, **settings).json()
    parts = chunks(chat(client, **settings, stream=True, stream_options={"include_usage": True}))
    assert joined(parts) == whole["choices"][0]["message"]["content"]
    assert parts[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [c["choices"][0]["finish_reason"] for c in parts[:-1]] == [None] * (len(parts) - 2) + ["length"]
    assert parts[-2]["fewstep"] == whole["fewstep"]
    assert parts[-1]["choices"] == [] and parts[-1]["usage"] == whole["usage"]
    assert all(c["usage"] is None for c in parts[:-1])
    assert len({c["id"] for c in parts}) == 1 and {c["object"] for c in parts} == {"chat.completion.chunk"}
    assert len(parts) >= 3 + 30 / 8  # a piece a block at least


@pytest.mark.parametrize("settings", SAMPLERS, ids=str)
def test_stop_cuts_exactly_across_tokens_streamed_or_not(client, student, settings):
    """Every token is a byte, so a stop string of three characters spans tokens, and blocks at some places."""
    done, text, _ = expected(student, settings)
    for at in (1, len(text) // 2, len(text) - 4):
        stop = text[at : at + 3]
        answer = chat(client, **settings, stop=["never", stop]).json()
        assert answer["choices"][0]["message"]["content"] == text.split(stop)[0]
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert 0 < answer["usage"]["completion_tokens"] <= len(done.ids)
        parts = chunks(chat(client, **settings, stop=stop, stream=True))
        assert joined(parts) == text.split(stop)[0]
        assert parts[-1]["fewstep"] == answer["fewstep"]


def test_eos_ends_an_answer_and_is_no_text(client, worker, student):
    done, text, _ = expected(student, {"sampler": "ar"})
    worker._eos.append(done.ids[4])
    try:
        answer = chat(client, sampler="ar").json()
    finally:
        worker._eos.remove(done.ids[4])
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == done.ids.index(done.ids[4]) + 1


def test_trace_is_given_when_asked_for(client, student):
    done, text, _ = expected(student, {"sampler": "threshold", "threshold": 0.3})
    (trace,) = chat(client, effort="low", trace=True).json()["fewstep"]["trace"]
    assert trace["steps"] == done.steps and "".join(trace["tokens"]) == text


def test_completions_answer_every_prompt_in_order(client, student):
    model, tokenizer, eos = student
    body = {"model": "tiny", "prompt": ["ab", "c"], "max_tokens": 9, "sampler": "verify"}
    prompts = [tokenizer(p)["input_ids"] for p in body["prompt"]]
    done = decode(model, prompts, sampler="verify", max_new_tokens=9, eos_token_ids=eos)
    texts = [tokenizer.decode(d.ids, skip_special_tokens=True) for d in done]
    answer = client.post("/v1/completions", json=body).json()
    assert [(c["index"], c["text"]) for c in answer["choices"]] == list(enumerate(texts))
    assert answer["object"] == "text_completion" and answer["usage"]["completion_tokens"] == 18
    assert answer["fewstep"]["nfe"] == sum(d.nfe for d in done)
    parts = chunks(client.post("/v1/completions", json={**body, "stream": True}))
    for i in (0, 1):
        assert "".join(c["choices"][0]["text"] for c in parts if c["choices"][0]["index"] == i) == texts[i]
    assert [c for c in parts if "fewstep" in c] == parts[-1:]


def test_refusals_have_the_form_of_openai_errors(client):
    answer = chat(client, temperature=-0.5)
    assert answer.status_code == 400
    message = "temperature=-0.5: must be a number ≥ 0"
    assert answer.json() == {
        "error": {"message": message, "type": "invalid_request_error", "param": "temperature", "code": None}
    }
    long = chat(client, messages=[{"role": "user", "content": "x" * 600}])
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
    for response, status in [
        (chat(client, model="other"), 404),
        (client.get("/v1/models/other"), 404),
        (client.get("/nothing"), 404),
        (client.get("/v1/completions"), 405),
        (
            client.post("/v1/completions", content=b"x" * (MAX_BODY + 1), headers={"content-type": "application/json"}),
            413,
        ),
        (client.post("/v1/chat/completions", content=json.dumps(CHAT), headers={"content-type": "text/plain"}), 400),
    ]:
        assert response.status_code == status
        assert response.json()["error"]["message"] and response.json()["error"]["type"] == "invalid_request_error"


def test_decoding_that_fails_is_a_500_or_an_event(client, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("secret path")

    monkeypatch.setattr(worker_module, "decode", broken)
    answer = chat(client)
    assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
    stream = chat(client, stream=True).text
    assert '"server_error"' in stream and "[DONE]" not in stream
    assert "secret" not in answer.text + stream


def test_too_many_waiting_is_a_429(client, monkeypatch):
    monkeypatch.setattr(worker_module, "MAX_WAITING", 0)
    assert chat(client).status_code == 429


def leave(app, body):
    """Send a request whose client leaves at once; return what the server sent."""
    sent, parts = [], [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive():
        return parts.pop() if parts else {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b"", "headers": headers}
    asyncio.run(app(scope, receive, send))
    return sent


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_left_frees_its_place(served, worker, stream, monkeypatch):
    monkeypatch.setattr(app_module, "LOOK_EVERY", 0.01)
    app = make_app(served, worker, None)  # the worker is not started: the prompt waits
    sent = leave(app, {**CHAT, "stream": stream})
    assert sent[0]["status"] == (200 if stream else 499)
    assert [job.gone for job in worker._waiting] == [True]


def test_models_names_the_student_and_its_levels(client):
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list"
    assert listed["data"] == [client.get("/v1/models/tiny").json()]
    assert listed["data"][0]["id"] == "tiny" and listed["data"][0]["max_model_len"] == 512
    assert listed["data"][0]["fewstep"] == {"block_size": 8, "effort": ["low", "lossless"]}


def test_health_follows_the_worker(client, worker):
    assert client.get("/health").json() == {"status": "ok", "model": "tiny", "waiting": 0}
    worker.stop(timeout=20)
    assert client.get("/health").status_code == 503
    assert chat(client).status_code == 503


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Basic right", "Bearer", "Bearer rïght"])
def test_key_guards_the_api_but_not_page_and_health(served, worker, header):
    worker.start()
    client = TestClient(make_app(served, worker, "right"))
    headers = {} if header is None else {"Authorization": header.encode()}
    for response in (
        client.get("/v1/models", headers=headers),
        client.post("/v1/chat/completions", json=CHAT, headers=headers),
        client.post("/v1/completions", json={}, headers=headers),
    ):
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
    assert client.get("/health").status_code == client.get("/").status_code == 200
    assert client.get("/v1/models", headers={"Authorization": "Bearer right"}).status_code == 200


def test_page_runs_only_its_own_code_and_loads_nothing(client):
    response = client.get("/")
    policy = dict(rule.split(" ", 1) for rule in response.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    for tag in ("style", "script"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", response.text, re.S)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    assert not re.search(r"""https?://|//\w|\bsrc=|\bhref=|\bon\w+="|style="|innerHTML""", response.text)
