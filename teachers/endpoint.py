"""Teacher kind `endpoint`: a model behind an OpenAI-compatible server (vLLM, SGLang, llama.cpp, TGI, …).

The server has the weights, the student's base (`student.base`) the tokenizer: a prompt goes out as the ids that the
student will see, or as messages, and an answer comes back as the tokens that the server names, by id, by bytes or by
text. Log-probabilities are the server's, of the unchanged distribution (T = 1): vLLM, SGLang and llama.cpp give these
whatever the sampling temperature.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from fewstep.errors import RunFailed, UserError
from fewstep.teachers.config import TeacherConfig
from fewstep.teachers.generation import WITHHELD, Generation

BROKEN = 3  # times that an answer which is no JSON is asked for again
POLL = 0.5  # seconds after which a signal is noticed at the latest
BY_ID = "token_id:"  # how vLLM and SGLang name a token when they are asked to name it by its id


@dataclass(frozen=True)
class Ask:
    """One request: what the server is told, and what the answer may be."""

    messages: list[dict]
    ids: list[int]  # the same as the student's base encodes it
    max_new_tokens: int
    temperature: float
    seed: int
    top_logprobs: int


def fingerprint(teacher: TeacherConfig) -> str:
    """Return what names a served model: its name, or where it names none its URL, and how it is asked."""
    named = teacher.endpoint.served or teacher.model
    return hashlib.sha256(f"{teacher.endpoint.api} {named}".encode()).hexdigest()


def check(teacher: TeacherConfig) -> None:
    """Raise UserError for an endpoint that cannot be asked, as far as that is known without asking it."""
    url = urlsplit(teacher.model)
    bare = urlunsplit((url.scheme, url.netloc.rpartition("@")[2], url.path, "", ""))
    if url.username or url.password or url.query:
        raise UserError(
            f"teacher.model {bare}: the URL holds a user or a query; set teacher.endpoint.key to the name of an environment "
            "variable that holds the key"
        )
    if not url.hostname:
        raise UserError(f"teacher.model {teacher.model}: names no host; give a URL such as http://localhost:8000/v1")
    key = teacher.endpoint.key
    if key is not None and not os.environ.get(key):
        raise UserError(
            f"teacher.endpoint.key: the environment variable {key} is not set; set it to the server's API key"
        )
    try:
        import openai  # noqa: F401
    except ImportError:
        raise UserError(f"teacher.model {bare}: the client is not installed; pip install 'fewstep[endpoint]'") from None


class Endpoint:
    """A server, and the tokenizer by which its answers are read.

    Args:
        teacher: whose `model` is the server's URL.
        tokenizer: of the student's base.
        eos: ids that end an answer; the first is appended where a server keeps its own to itself.
    """

    def __init__(self, teacher: TeacherConfig, tokenizer: Any, eos: list[int]):
        import openai

        check(teacher)
        self.url, self.config, self._tokenizer, self._eos = teacher.model, teacher.endpoint, tokenizer, eos
        self._openai = openai
        self._client = openai.OpenAI(
            base_url=self.url,
            api_key=os.environ[self.config.key] if self.config.key else "none",
            timeout=self.config.timeout,
            max_retries=self.config.retries,
            # what the client would take from the environment of another account
            default_headers={name: openai.Omit() for name in ("OpenAI-Organization", "OpenAI-Project")},  # type: ignore[dict-item]
        )

    def close(self) -> None:
        """Give up what is under way."""
        self._client.close()

    @cached_property
    def served(self) -> str:
        """The model's name at the server.

        Raises:
            UserError: the server has several and the recipe names none, or not the one that it names.
        """
        content = self._send(lambda: self._client.models.with_raw_response.list(), "its list of models")
        names = [str(m.get("id")) for m in content.get("data") or [] if isinstance(m, dict)]
        wanted = self.config.served
        if wanted is None and len(names) == 1:
            return names[0]
        if wanted is None or (names and wanted not in names):
            got = "" if wanted is None else f" has no {wanted!r}:"
            raise UserError(
                f"teacher.model {self.url}:{got} it serves {', '.join(names[:5]) or 'no model that it names'}; name one as teacher.endpoint.served"
            )
        return wanted

    def answer(self, ask: Ask) -> Generation:
        """Return the server's answer.

        Raises:
            UserError: the server refuses the request, or cannot give what the recipe asks.
            RunFailed: it was asked in vain, or what it says cannot be read.
        """
        body: dict[str, Any] = {
            "model": self.served,
            "max_tokens": ask.max_new_tokens,
            "temperature": ask.temperature,
            "seed": ask.seed,
            # how servers are asked to name tokens by their ids; those that know of no such key ignore it
            "extra_body": {"return_tokens_as_token_ids": True, "skip_special_tokens": False},
        }
        if self.config.api == "chat":
            create, body["messages"] = self._client.chat.completions, ask.messages
            if ask.top_logprobs:
                body |= {"logprobs": True, "top_logprobs": ask.top_logprobs}
        else:
            create, body["prompt"] = self._client.completions, ask.ids
            if ask.top_logprobs:
                body["logprobs"] = ask.top_logprobs
        content = self._send(lambda: create.with_raw_response.create(**body), "an answer")
        self._same_prompt(content, ask)
        choice = (content.get("choices") or [None])[0]
        if not isinstance(choice, dict):
            raise RunFailed(f"teacher.model {self.url}: an answer has no choices: {json.dumps(content)[:200]}")
        return self._read(choice, ask)

    def _read(self, choice: dict, ask: Ask) -> Generation:
        message = choice.get("message")
        text = (message.get("content") if isinstance(message, dict) else choice.get("text")) or ""
        reason = choice.get("finish_reason")
        if reason not in ("stop", "length"):
            return Generation(finish_reason=WITHHELD)
        out = Generation(finish_reason=reason)
        if not ask.top_logprobs:
            out.ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            for token, top in _tokens(choice.get("logprobs"), self.url):
                out.ids.append(self._id(token))
                top = sorted(((t.logprob, self._id(t)) for t in top), key=lambda pair: (-pair[0], pair[1]))
                if len(top) < ask.top_logprobs:
                    raise UserError(
                        f"teacher.model {self.url}: it returns {len(top)} log-probabilities a token where targets.top_logprobs asks "
                        f"for {ask.top_logprobs}; lower that, or let the server return as many"
                    )
                top = top[: ask.top_logprobs]
                out.topk_ids.append([i for _, i in top])
                out.topk_logprobs.append([logprob for logprob, _ in top])
                out.tail_mass.append(max(0.0, 1.0 - sum(math.exp(logprob) for logprob, _ in top)))
        ends = next((i for i, token in enumerate(out.ids) if token in self._eos), None)
        if ask.top_logprobs:
            self._same_text(out.ids[:ends], text)
        if ends is not None:
            out.ids = out.ids[: ends + 1]
            out.topk_ids, out.topk_logprobs, out.tail_mass = (
                rows[: ends + 1] for rows in (out.topk_ids, out.topk_logprobs, out.tail_mass)
            )
            out.finish_reason = "stop"
        elif reason == "stop":
            out.ids.append(self._eos[0])
            if ask.top_logprobs:  # of this token the server said nothing: all of its mass is tail
                out.topk_ids.append(list(range(ask.top_logprobs)))
                out.topk_logprobs.append([float("-inf")] * ask.top_logprobs)
                out.tail_mass.append(1.0)
        return out

    def _same_text(self, ids: list[int], text: str) -> None:
        """Raise RunFailed where the tokens of an answer are not its text: the server has another tokenizer."""
        said = self._tokenizer.decode(ids, skip_special_tokens=True)
        if said.strip() != self._without_special(text).strip():
            raise RunFailed(
                f"teacher.model {self.url}: its tokens make {said[:60]!r} with the tokenizer of student.base, and its text is "
                f"{text[:60]!r}; give the checkpoint that the server runs, or one with its tokenizer, as student.base"
            )

    def _without_special(self, text: str) -> str:
        for token in self._tokenizer.all_special_tokens:
            text = text.replace(token, "")
        return text

    def _same_prompt(self, content: dict, ask: Ask) -> None:
        """Raise UserError where the server counts other tokens in the prompt than were sent, as with a second BOS."""
        counted = (content.get("usage") or {}).get("prompt_tokens")
        if isinstance(counted, int) and counted > 0 and counted != len(ask.ids):
            cause = "template" if self.config.api == "chat" else "beginning-of-text token"
            raise UserError(
                f"teacher.model {self.url}: it sees {counted} tokens where student.base makes {len(ask.ids)} of the same prompt; its "
                f"tokenizer or {cause} is another one; give the checkpoint that the server runs as student.base"
            )

    def _id(self, token: "Token") -> int:
        if token.id is not None:
            return token.id
        found = self._by_bytes.get(token.data)
        if found is None:
            raise RunFailed(
                f"teacher.model {self.url}: its token {token.data!r} is none of student.base's {len(self._tokenizer)}; give the checkpoint "
                "that the server runs, or set teacher.endpoint.api to chat, where tokens come with their bytes"
            )
        return found

    @cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        table: dict[bytes, int] = {}
        for i, data in enumerate(token_bytes(self._tokenizer)):
            table.setdefault(data, i)
        return table

    def _send(self, send: Callable[[], Any], what: str) -> dict:
        """Return the JSON object that the server answers with; the client waits and asks again by itself."""
        fault = ""
        for _ in range(BROKEN):
            try:
                content = json.loads(send().http_response.content)
            except self._openai.APIStatusError as error:
                said = " ".join(str(error.message).split())[:200]
                if error.status_code == 429 or error.status_code >= 500:
                    raise RunFailed(self._in_vain(what, f"{error.status_code}: {said}")) from None
                raise UserError(
                    f"teacher.model {self.url}: it refuses {what} ({error.status_code}: {said}); "
                    "check teacher.endpoint (key, served, api) and targets"
                ) from None
            except self._openai.APIConnectionError as error:  # timeouts are of this kind
                cause = str(error.__cause__ or error).splitlines()
                raise RunFailed(self._in_vain(what, cause[0] if cause and cause[0] else type(error).__name__)) from None
            except ValueError as error:  # no JSON, or no UTF-8
                fault = str(error).splitlines()[0]
                continue
            if isinstance(content, dict):
                return content
            fault = f"a {type(content).__name__} where an object is due"
        raise RunFailed(
            f"teacher.model {self.url}: {what} came {BROKEN} times and could not be read ({fault}); look at the server"
        )

    def _in_vain(self, what: str, last: str) -> str:
        return (
            f"teacher.model {self.url}: {what} was asked for {self.config.retries + 1} times in vain (last: {last}); "
            "finished shards are kept, the same command goes on once the server answers"
        )


def generate(endpoint: Endpoint, asks: list[Ask], on_answer: Callable[[int, int], None]) -> list[Generation]:
    """Return an answer for each request, several being under way at a time.

    Args:
        on_answer: called with (answers, tokens) at least every half second; may raise to stop.

    Raises:
        UserError, RunFailed: as `Endpoint.answer`, for the first that fails.
    """
    pool = ThreadPoolExecutor(endpoint.config.concurrency, thread_name_prefix="endpoint")
    try:
        futures = [pool.submit(endpoint.answer, ask) for ask in asks]
        left = set(futures)
        while left:
            done, left = wait(left, timeout=POLL, return_when=FIRST_COMPLETED)
            on_answer(len(done), sum(len(future.result().ids) for future in done))
        return [future.result() for future in futures]
    except BaseException:
        endpoint.close()
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True)
class Token:
    """A token as a server names it: by its id, else by its bytes."""

    id: int | None
    data: bytes
    logprob: float


def _tokens(logprobs: Any, url: str) -> Iterable[tuple[Token, list[Token]]]:
    """Yield (token, the likeliest at its place) of either form of an answer's log-probabilities."""
    if isinstance(logprobs, dict) and isinstance(logprobs.get("content"), list):  # of chat; llama.cpp's of both
        for entry in logprobs["content"]:
            yield _token(entry), [_token(top) for top in entry.get("top_logprobs") or []]
        return
    if isinstance(logprobs, dict) and isinstance(logprobs.get("tokens"), list):  # of completions
        for token, top in zip(logprobs["tokens"], logprobs.get("top_logprobs") or []):
            entries = [_token({"token": name, "logprob": value}) for name, value in (top or {}).items()]
            yield _token({"token": token}), entries
        return
    raise UserError(
        f"teacher.model {url}: it returns no log-probabilities; set targets.top_logprobs to 0 (kd and order: nll need them), or "
        "start the server so that it does"
    )


def _token(entry: dict) -> Token:
    name, data, logprob = str(entry.get("token", "")), entry.get("bytes"), entry.get("logprob")
    value = float(logprob) if isinstance(logprob, (int, float)) else float("-inf")
    if isinstance(entry.get("id"), int):
        return Token(entry["id"], b"", value)
    if name.startswith(BY_ID) and name[len(BY_ID) :].isdecimal():
        return Token(int(name[len(BY_ID) :]), b"", value)
    return Token(None, bytes(data) if isinstance(data, list) else name.encode(), value)


def token_bytes(tokenizer: Any) -> list[bytes]:
    """Return [V] what each token of a Hugging Face tokenizer writes: byte-level BPE, SentencePiece with byte fallback, or plain."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    pieces = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    added = set(tokenizer.get_added_vocab().values())
    to_byte = {char: byte for byte, char in bytes_to_unicode().items()}
    byte_level = any(piece and piece.startswith("Ġ") for piece in pieces)
    out = []
    for i, piece in enumerate(pieces):
        if piece is None:
            out.append(b"")
        elif i in added:
            out.append(piece.encode())
        elif byte_level and all(char in to_byte for char in piece):
            out.append(bytes(to_byte[char] for char in piece))
        elif len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            out.append(bytes([int(piece[3:5], 16)]))
        else:
            out.append(piece.replace("▁", " ").encode())
    return out
