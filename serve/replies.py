"""The JSON of OpenAI's API: answers, chunks of a stream, errors."""

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from fewstep.serve.asks import Ask, Served
from fewstep.serve.worker import End


class Reply:
    """What stays the same in every part of one answer.

    Besides OpenAI's fields there is `fewstep`: nfe (forwards), tpf (tokens a forward), the settings, and
    with `trace` in the request the text of each token and the forward that committed it.
    """

    def __init__(self, ask: Ask, served: Served):
        self._ask = ask
        self._chat = ask.kind == "chat"
        self._head = {
            "id": ("chatcmpl-" if self._chat else "cmpl-") + uuid.uuid4().hex,
            "created": int(time.time()),
            "model": served.name,
        }

    def whole(self, texts: Sequence[str], ends: Sequence[End]) -> dict[str, Any]:
        """Return the answer in one piece."""
        choices = []
        for i, (text, end) in enumerate(zip(texts, ends)):
            body = (
                {"message": {"role": "assistant", "content": text, "refusal": None}} if self._chat else {"text": text}
            )
            choices.append({"index": i, **body, "logprobs": None, "finish_reason": end.finish_reason})
        kind = "chat.completion" if self._chat else "text_completion"
        return {
            **self._head,
            "object": kind,
            "choices": choices,
            "usage": self._usage(ends),
            "fewstep": self._fewstep(ends),
        }

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return the first chunk of a choice; completions have none."""
        return self._chunk(index, {"role": "assistant", "content": ""}) if self._chat else None

    def piece(self, index: int, text: str) -> dict[str, Any]:
        """Return a chunk with text."""
        return self._chunk(index, {"content": text} if self._chat else text)

    def closing(self, index: int, end: End, all_ends: Sequence[End] | None) -> dict[str, Any]:
        """Return the last chunk of a choice; that of the last choice to end carries `fewstep`."""
        chunk = self._chunk(index, {} if self._chat else "", end.finish_reason)
        return chunk if all_ends is None else {**chunk, "fewstep": self._fewstep(all_ends)}

    def usage(self, ends: Sequence[End]) -> dict[str, Any]:
        """Return the chunk that `stream_options.include_usage` asks for."""
        return {**self._head, "object": self._chunk_kind(), "choices": [], "usage": self._usage(ends)}

    def _chunk(self, index: int, content: Any, finish_reason: str | None = None) -> dict[str, Any]:
        key = "delta" if self._chat else "text"
        choice = {"index": index, key: content, "logprobs": None, "finish_reason": finish_reason}
        usage = {"usage": None} if self._ask.include_usage else {}
        return {**self._head, "object": self._chunk_kind(), "choices": [choice], **usage}

    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"

    def _usage(self, ends: Sequence[End]) -> dict[str, int]:
        prompt, answer = sum(map(len, self._ask.prompts)), sum(end.num_tokens for end in ends)
        return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}

    def _fewstep(self, ends: Sequence[End]) -> dict[str, Any]:
        tokens, nfe = sum(end.num_tokens for end in ends), sum(end.nfe for end in ends)
        sampling = self._ask.sampling
        out: dict[str, Any] = {"nfe": nfe, "tpf": tokens / nfe, "sampler": sampling.sampler, **dict(sampling.settings)}
        if sampling.block_size is not None:
            out["block_size"] = sampling.block_size
        if sampling.temperature > 0:  # what it takes to get the same answer again
            out |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": self._ask.seed}
        if self._ask.trace:
            out["trace"] = [{"tokens": end.tokens, "steps": end.steps} for end in ends]
        return out


def error(message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return OpenAI's error object."""
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def event(content: dict[str, Any] | str) -> str:
    """Return one server-sent event."""
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return f"data: {text}\n\n"
