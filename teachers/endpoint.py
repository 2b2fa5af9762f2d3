"""Teacher kind `endpoint`: a model behind an OpenAI-compatible server (vLLM, SGLang, llama.cpp, TGI, …).

The server has the weights, the student's base (`student.base`) the tokenizer: a prompt goes out as the ids that the
student will see, or as messages, and an answer comes back as the tokens that the server names, by id, by bytes or by
text. Log-probabilities are the server's; llama.cpp's and vLLM's are those of the unchanged distribution (T = 1) whatever
the sampling temperature.
"""

import hashlib
import json
import math
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from fewstep.errors import RunFailed, UserError
from fewstep.teachers.config import TeacherConfig
from fewstep.teachers.generation import WITHHELD, Generation

LONGEST_WAIT = 8.0  # seconds before an answer that is no JSON is asked for again
POLL = 0.5  # seconds after which a signal is noticed at the latest
BY_ID = "token_id:"  # how vLLM names a token when it is asked to name it by its id
# Nothing but the temperature shapes what is drawn: servers otherwise take top-k, top-p and penalties from their defaults
# or from the model's generation config. A server that does not know a key ignores it.
UNSHAPED = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "repeat_penalty": 1.0}


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
    try:
        url = urlsplit(teacher.model)
        named = url.hostname is not None and (url.port is None or url.port > 0)
    except ValueError:
        named = False
    if not named:
        raise UserError(
            "teacher.model names no host, or a port that is none; give a URL such as http://localhost:8000/v1"
        )
    bare = urlunsplit((url.scheme, url.netloc.rpartition("@")[2], url.path, "", ""))
    if url.username or url.password or url.query:
        raise UserError(
            f"teacher.model {bare}: the URL holds a user or a query; set teacher.endpoint.key to the name of an environment "
            "variable that holds the key"
        )
    _key(teacher)
    if find_spec("openai") is None:
        raise UserError(f"teacher.model {bare}: the client is not installed; pip install 'fewstep[endpoint]'")


def _key(teacher: TeacherConfig) -> str | None:
    """Return the API key, without the line end that a mounted secret may have."""
    name = teacher.endpoint.key
    if name is None:
        return None
    key = os.environ.get(name, "").strip()
    if not key:
        raise UserError(
            f"teacher.endpoint.key: the environment variable {name} is not set; set it to the server's API key"
        )
    if not key.isascii() or not key.isprintable() or " " in key:
        raise UserError(f"teacher.endpoint.key: what the environment variable {name} holds is no key: it has spaces or other characters than ASCII; set it to the key alone")  # fmt: skip
    return key


class Endpoint:
    """A server, and the tokenizer by which its answers are read.

    Args:
        teacher: whose `model` is the server's URL.
        tokenizer: of the student's base.
        stops: ids that end an answer. A server that keeps its own to itself is taken to have ended with the one that
            ends an assistant's turn in the chat template.
        vocab_size: of the student's base.
    """

    def __init__(self, teacher: TeacherConfig, tokenizer: Any, stops: list[int], vocab_size: int | None):
        import openai

        check(teacher)
        self.url, self.config, self._tokenizer, self._stops = teacher.model, teacher.endpoint, tokenizer, stops
        self._rows = max(vocab_size or 0, len(tokenizer))
        self._key, self._openai = _key(teacher), openai
        try:
            self._client = openai.OpenAI(
                base_url=self.url,
                api_key=self._key or "none",
                timeout=self.config.timeout,
                max_retries=self.config.retries,
            )
        except Exception as error:  # an address or a proxy that the HTTP library does not take
            raise UserError(
                f"teacher.model {self.url!r}: the client cannot use it ({type(error).__name__}: {self._safe(str(error).splitlines()[0])}); "
                "give a URL such as http://localhost:8000/v1, and look at the proxy settings"
            ) from None
        # What the client takes from the environment of another account is left out, and so is its stand-in for no key.
        self._client._custom_headers = {}
        left_out = ("OpenAI-Organization", "OpenAI-Project", *(() if self._key else ("Authorization",)))
        self._headers = dict.fromkeys(left_out, openai.Omit())

    def close(self) -> None:
        """Give up what is under way."""
        self._client.close()

    @cached_property
    def served(self) -> str:
        """The model's name at the server.

        Raises:
            UserError: the server has several and the recipe names none, or not the one that it names.
        """
        content = self._send(
            lambda: self._client.models.with_raw_response.list(extra_headers=self._headers), "its list of models"
        )
        listed = content.get("data")
        names = [str(m.get("id")) for m in listed if isinstance(m, dict)] if isinstance(listed, list) else []
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
            "model": self.served, "max_tokens": ask.max_new_tokens, "temperature": ask.temperature, "seed": ask.seed,
            "top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
            "extra_headers": self._headers,
            "extra_body": {"return_tokens_as_token_ids": True, "skip_special_tokens": False, **UNSHAPED},
        }  # fmt: skip
        if self.config.api == "chat":
            create, body["messages"] = self._client.chat.completions, ask.messages
            if ask.top_logprobs:
                body |= {"logprobs": True, "top_logprobs": ask.top_logprobs}
        else:
            create, body["prompt"] = self._client.completions, ask.ids
            if ask.top_logprobs:
                body["logprobs"] = ask.top_logprobs
        content = self._send(lambda: create.with_raw_response.create(**body), "an answer")
        try:
            self._same_prompt(content, ask)
            return self._read(content["choices"][0], ask)
        except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            said = self._safe(json.dumps(content))[:160]
            raise RunFailed(
                f"teacher.model {self.url}: an answer is not of the form that OpenAI's API describes ({type(error).__name__}: {said}…); look at the server"
            ) from None

    def _read(self, choice: dict, ask: Ask) -> Generation:
        message = choice.get("message")
        text = str((choice.get("text") if message is None else message.get("content")) or "")
        reason = choice.get("finish_reason")
        if message is not None and (message.get("reasoning_content") or message.get("reasoning")):
            raise UserError(
                f"teacher.model {self.url}: it takes the reasoning out of an answer's text; start it without a reasoning parser, or "
                "set teacher.endpoint.api to completions"
            )
        if reason not in ("stop", "length"):
            return Generation(finish_reason=WITHHELD)
        out = Generation(finish_reason=reason)
        if not ask.top_logprobs:
            out.ids = list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        for token, top in _tokens(choice.get("logprobs"), self.url) if ask.top_logprobs else ():
            out.ids.append(self._id(token))
            found = sorted(((t.logprob, self._id(t)) for t in top), key=lambda pair: (-pair[0], pair[1]))
            if len(found) < ask.top_logprobs:
                raise UserError(
                    f"teacher.model {self.url}: it returns {len(found)} log-probabilities a token where targets.top_logprobs asks "
                    f"for {ask.top_logprobs}; lower that, or let the server return as many"
                )
            found = found[: ask.top_logprobs]
            out.topk_ids.append([i for _, i in found])
            out.topk_logprobs.append([logprob for logprob, _ in found])
            out.tail_mass.append(max(0.0, 1.0 - sum(math.exp(logprob) for logprob, _ in found)))
        ends = next((i for i, token in enumerate(out.ids) if token in self._stops), None)
        if ask.top_logprobs:
            self._same_text(out.ids[:ends], text, cut=reason == "length")
        if ends is not None:
            out.ids, out.finish_reason = out.ids[: ends + 1], "stop"
            out.topk_ids, out.topk_logprobs, out.tail_mass = (
                rows[: ends + 1] for rows in (out.topk_ids, out.topk_logprobs, out.tail_mass)
            )
        elif reason == "stop":
            out.ids.append(self._end_of_turn)
            if ask.top_logprobs:  # of this token the server said nothing: all of its mass is tail
                out.topk_ids.append(list(range(ask.top_logprobs)))
                out.topk_logprobs.append([float("-inf")] * ask.top_logprobs)
                out.tail_mass.append(1.0)
        return out

    @cached_property
    def _end_of_turn(self) -> int:
        """The stop that follows an answer in the chat template; without a template the tokenizer's EOS."""
        own = self._tokenizer.eos_token_id
        fallback = own if own in self._stops else self._stops[0]
        if not getattr(self._tokenizer, "chat_template", None):
            return fallback
        asked = [{"role": "user", "content": "a"}]
        head = self._tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
        whole = self._tokenizer.apply_chat_template([*asked, {"role": "assistant", "content": "b"}], return_dict=False)
        return next((i for i in whole[len(head) :] if i in self._stops), fallback)

    def _same_text(self, ids: list[int], text: str, cut: bool) -> None:
        """Raise RunFailed where the tokens of an answer are not its text: the server has another tokenizer.

        A cut answer may end inside a character, of which a server shows nothing.
        """
        added = self._tokenizer.added_tokens_decoder.values()
        special = {token.content for token in added if token.special} | set(self._tokenizer.all_special_tokens)
        for token in sorted(special, key=len, reverse=True):
            text = text.replace(token, "")
        said, told = (
            t.rstrip("\ufffd") if cut else t for t in (self._tokenizer.decode(ids, skip_special_tokens=True), text)
        )
        if said.strip() != told.strip():
            raise RunFailed(
                f"teacher.model {self.url}: its tokens make {said[:60]!r} with the tokenizer of student.base, and its text is "
                f"{text[:60]!r}; give the checkpoint that the server runs, or one with its tokenizer, as student.base"
            )

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
        found = self._by_bytes.get(token.data) if token.id is None else token.id
        if found is None or not 0 <= found < self._rows:
            name = f"{token.data!r}" if token.id is None else f"{token.id}"
            raise RunFailed(
                f"teacher.model {self.url}: its token {name} is none of the {self._rows} of student.base; give the checkpoint that the "
                "server runs, or set teacher.endpoint.api to chat, where tokens come with their bytes"
            )
        return found

    @cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        """Text → its token: a piece of the vocabulary before a lone byte, which SentencePiece falls back on."""
        table: dict[bytes, int] = {}
        pieces = self._tokenizer.convert_ids_to_tokens(list(range(len(self._tokenizer))))
        written = token_bytes(self._tokenizer)
        for fallback in (False, True):
            for i, data in enumerate(written):
                if _is_byte(pieces[i]) == fallback:
                    table.setdefault(data, i)
        return table

    def _send(self, send: Callable[[], Any], what: str) -> dict:
        """Return the JSON object that the server answers with; the client waits and asks again by itself."""
        fault = ""
        for attempt in range(self.config.retries + 1):
            if attempt:
                time.sleep(min(LONGEST_WAIT, 0.5 * 2 ** (attempt - 1)))
            try:
                content = json.loads(send().http_response.content)
            except self._openai.APIStatusError as error:
                said = self._safe(" ".join(str(error.message).split()))[:200]
                if error.status_code == 429 or error.status_code >= 500:
                    raise RunFailed(self._in_vain(what, f"{error.status_code}: {said}")) from None
                raise UserError(
                    f"teacher.model {self.url}: it refuses {what} ({error.status_code}: {said}); "
                    "check teacher.endpoint (key, served, api) and targets"
                ) from None
            except self._openai.APIConnectionError as error:  # timeouts are of this kind
                cause = str(error.__cause__ or error).splitlines()
                said = cause[0] if cause and cause[0] else type(error.__cause__ or error).__name__
                raise RunFailed(self._in_vain(what, self._safe(said))) from None
            except ValueError as error:  # no JSON, or no UTF-8
                fault = str(error).splitlines()[0]
                continue
            if isinstance(content, dict):
                return content
            fault = f"a {type(content).__name__} where an object is due"
        raise RunFailed(
            f"teacher.model {self.url}: {what} came {self.config.retries + 1} times and could not be read ({fault}); look at the server"
        )

    def _in_vain(self, what: str, last: str) -> str:
        return (
            f"teacher.model {self.url}: {what} was asked for {self.config.retries + 1} times in vain (last: {last}); "
            "finished shards are kept, the same command goes on once the server answers"
        )

    def _safe(self, said: str) -> str:
        """Return what a server or the client says, without the key that it may repeat."""
        return said.replace(self._key, "***") if self._key else said


def generate(endpoint: Endpoint, asks: list[Ask], on_answer: Callable[[int, int], None]) -> list[Generation]:
    """Return an answer for each request, several being under way at a time.

    Args:
        on_answer: called with (answers, tokens) at least every half second; may raise to stop.

    Raises:
        UserError, RunFailed: as `Endpoint.answer`, for the first that fails.
    """
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[int, Generation | BaseException]] = queue.SimpleQueue()
    for i in range(len(asks)):
        waiting.put(i)

    def work() -> None:
        while True:
            try:
                i = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                done.put((i, endpoint.answer(asks[i])))
            except BaseException as error:  # raised where the answers are awaited
                done.put((i, error))
                return

    found: dict[int, Generation] = {}
    try:
        # Daemons: a request under way must not hold the process back when it is to end.
        for _ in range(min(endpoint.config.concurrency, len(asks))):
            threading.Thread(target=work, daemon=True, name="endpoint").start()
        while len(found) < len(asks):
            try:
                i, answer = done.get(timeout=POLL)
            except queue.Empty:
                on_answer(0, 0)
                continue
            if isinstance(answer, BaseException):
                raise answer
            found[i] = answer
            on_answer(1, len(answer.ids))
    except BaseException:
        with suppress(queue.Empty):
            while True:  # no thread begins another
                waiting.get_nowait()
        endpoint.close()
        raise
    return [found[i] for i in range(len(asks))]


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
    elif isinstance(logprobs, dict) and isinstance(logprobs.get("tokens"), list) and logprobs.get("top_logprobs"):
        for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):  # of completions
            yield _token({"token": token}), [_token({"token": name, "logprob": p}) for name, p in (top or {}).items()]
    else:
        raise UserError(
            f"teacher.model {url}: it returns no log-probabilities; set targets.top_logprobs to 0 (kd and order: nll need them), "
            "or start the server so that it does"
        )


def _token(entry: dict) -> Token:
    name, data, logprob = str(entry.get("token", "")), entry.get("bytes"), entry.get("logprob")
    value = float(logprob) if isinstance(logprob, (int, float)) else float("-inf")
    if isinstance(entry.get("id"), int):
        return Token(entry["id"], b"", value)
    if name.startswith(BY_ID) and name[len(BY_ID) :].isdecimal():
        return Token(int(name[len(BY_ID) :]), b"", value)
    # A part of a character that is named by text is "\ufffd", whichever it is: no token of any vocabulary.
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
        elif _is_byte(piece):
            out.append(bytes([int(piece[3:5], 16)]))
        else:
            out.append(piece.replace("▁", " ").encode())
    return out


def _is_byte(piece: str | None) -> bool:
    """Whether a piece of a vocabulary stands for one byte: <0x41>."""
    return piece is not None and re.fullmatch(r"<0x[0-9A-F]{2}>", piece) is not None
