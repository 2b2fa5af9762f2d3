"""An OpenAI-compatible server on loopback with a tiny model behind it, that can be told to fail."""

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from fewstep.chat import encode_prompt
from fewstep.teachers.endpoint import token_bytes
from fewstep.teachers.generate import generate

HANG = 1.0  # seconds


class Served:
    """The model, how its answers are written, and what goes wrong.

    names: "id" (llama.cpp), "token_id" (vLLM, asked to), "bytes" (chat), "text" (completions of old).
    faults: taken one a request, from the front; `always` after these.
    """

    def __init__(self, model, tokenizer, eos, names="id", tells_eos=True):
        self.model, self.tokenizer, self.eos, self.names, self.tells_eos = model, tokenizer, eos, names, tells_eos
        self.faults: list[str] = []
        self.always: str | None = None
        self.requests: list[dict] = []
        self.headers: list[dict] = []
        self.models, self.extra_prompt_tokens = ["tiny"], 0
        self.edit = lambda answer: answer  # what else is wrong with an answer
        self._data, self._lock = token_bytes(tokenizer), threading.Lock()
        self.url = ""

    def fault(self) -> str | None:
        with self._lock:
            return self.faults.pop(0) if self.faults else self.always

    def answer(self, body: dict) -> dict:
        chat = "messages" in body
        ids = encode_prompt(self.tokenizer, body["messages"]) if chat else body["prompt"]
        k = body.get("top_logprobs" if chat else "logprobs") or 0
        with self._lock:
            found = generate(
                self.model, [ids], max_new_tokens=body["max_tokens"], eos_ids=self.eos, top_logprobs=max(k, 1)
            )[0]
        shown = len(found.ids) - (found.finish_reason == "stop" and not self.tells_eos)
        own = found.ids[:-1] if found.finish_reason == "stop" else found.ids
        text = self.tokenizer.decode(own, skip_special_tokens=True)
        choice: dict = {"index": 0, "finish_reason": found.finish_reason, "logprobs": None}
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        if k:
            rows = [
                (token, list(zip(found.topk_ids[i], found.topk_logprobs[i])))
                for i, token in enumerate(found.ids[:shown])
            ]
            if self.names in ("token_id", "text") and not chat:
                choice["logprobs"] = {
                    "tokens": [self._name(token) for token, _ in rows],
                    "top_logprobs": [{self._name(i): value for i, value in top} for _, top in rows],
                }
            else:
                choice["logprobs"] = {
                    "content": [
                        self._entry(token, 0.0) | {"top_logprobs": [self._entry(i, value) for i, value in top]}
                        for token, top in rows
                    ]
                }
        usage = {"prompt_tokens": len(ids) + self.extra_prompt_tokens, "completion_tokens": len(found.ids)}
        return {
            "id": "x",
            "object": "text_completion",
            "created": 0,
            "model": "tiny",
            "choices": [choice],
            "usage": usage,
        }

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self.names == "token_id" else self._data[token].decode("utf-8", "replace")

    def _entry(self, token: int, logprob: float) -> dict:
        entry: dict = {"token": self._data[token].decode("utf-8", "replace"), "logprob": logprob}
        if self.names == "id":
            return entry | {"id": token}
        return (
            entry | {"bytes": list(self._data[token])}
            if self.names == "bytes"
            else entry | {"token": self._name(token)}
        )


@contextmanager
def serving(served: Served):
    """Serve on a port of its own; `served.url` is set."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def do_GET(self):
            self._reply(200, {"object": "list", "data": [{"id": name, "object": "model"} for name in served.models]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            served.requests.append({"path": self.path, **body})
            served.headers.append(dict(self.headers))
            fault = served.fault()
            if fault is None:
                return self._reply(200, served.edit(served.answer(body)))
            if fault.isdigit():
                said = f"fault {fault} of {self.headers.get('Authorization')}"
                return self._reply(int(fault), {"error": {"message": said}})
            if fault in ("hang", "long"):
                time.sleep(HANG if fault == "hang" else 60 * HANG)
                self.close_connection = True
            elif fault == "drop":
                content = json.dumps(served.answer(body)).encode()
                self._head(200, len(content))
                self.wfile.write(content[: len(content) // 2])
                self.close_connection = True
            elif fault == "utf8":
                self._raw(b'{"choices": [{"text": "\xff\xfe"}]}')
            elif fault == "no logprobs":
                answer = served.answer(body)
                answer["choices"][0]["logprobs"] = None
                self._reply(200, answer)
            elif fault == "filtered":
                answer = served.answer(body)
                answer["choices"][0]["finish_reason"] = "content_filter"
                self._reply(200, answer)

        def _reply(self, code, content):
            content = json.dumps(content).encode()
            self._head(code, len(content))
            self.wfile.write(content)

        def _raw(self, content):
            self._head(200, len(content))
            self.wfile.write(content)

        def _head(self, code, length):
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(length))
            self.send_header("retry-after-ms", "5")
            self.end_headers()

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request, client_address):  # a client that went away
            pass

    server = Server(("127.0.0.1", 0), Handler)
    served.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
