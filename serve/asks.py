"""From the JSON of a request to what is decoded. A field is honoured or refused by name, never ignored."""

import difflib
import json
import secrets
from dataclasses import dataclass, field
from typing import Any

from fewstep.chat import encode_prompt
from fewstep.serve.worker import Sampling
from fewstep.students.decoding.decode import SETTINGS as SAMPLER_SETTINGS
from fewstep.students.decoding.decode import SettingError, check_drawing, decode
from fewstep.students.decoding.levels import settings_of

MAX_TOKENS = 512  # of an answer whose request names no limit
MAX_PROMPTS, MAX_STOPS, MAX_STOP_LENGTH = 64, 16, 256

SETTINGS = ("sampler", "block_size", *SAMPLER_SETTINGS)
COMMON = {"model", "max_tokens", "stream", "stream_options", "stop", "temperature", "top_p", "seed", "user", "effort"}
COMMON |= {"trace", *SETTINGS}
KNOWN = {"chat": COMMON | {"messages", "max_completion_tokens"}, "completion": COMMON | {"prompt"}}
# Fields of OpenAI's that are accepted with the values under which they change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "metadata": ({},),
}
WHY = {
    "n": "one answer a prompt: send the request again with another seed",
    "logprobs": "log-probabilities are not returned: leave it out",
    "top_logprobs": "log-probabilities are not returned: leave it out",
}
ROLES = ("system", "user", "assistant")


class Refused(Exception):
    """A request that is not answered: the HTTP status, one line, and the field at fault."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None):
        self.message, self.param, self.status, self.code = " ".join(message.split()), param, status, code
        super().__init__(self.message)


@dataclass(frozen=True)
class Served:
    """The student that is served.

    context: the most tokens of prompt and answer together.
    effort: level → sampler and settings, or the reason why it has none (`fewstep_effort`).
    """

    name: str
    model: Any
    tokenizer: Any
    context: int
    created: int
    effort: dict[str, dict] = field(default_factory=dict)


@dataclass(frozen=True)
class Ask:
    """A valid request."""

    kind: str  # "chat" or "completion"
    prompts: list[list[int]]
    sampling: Sampling
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    trace: bool
    seed: int  # of the first prompt's draws; each further prompt's is one higher


def parse(kind: str, body: bytes, served: Served) -> Ask:
    """Return what a request asks for.

    Args:
        kind: "chat" or "completion".
        body: JSON.

    Raises:
        Refused: with status 400, or 404 for another model's name.
    """
    given = _object(body)
    known = KNOWN[kind] | set(NEUTRAL)
    for name, value in given.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else "; leave it out"
            raise Refused(f"field {name!r} is unknown here{hint}", name)
        if name in NEUTRAL and not (kind == "completion" and name == "logprobs"):
            if not any(_same(value, neutral) for neutral in NEUTRAL[name]):
                raise Refused(f"{name}={_short(value)}: {WHY.get(name, 'not supported: leave it out')}", name)
        elif name == "logprobs":  # in completions even 0 asks for those of the answer itself
            raise Refused(f"logprobs={_short(value)}: {WHY['logprobs']}", name)
    model = _typed(given, "model", str)
    if model is None:
        raise Refused(f"model is missing; this server has {served.name}", "model")
    if model != served.name:
        raise Refused(
            f"model {_short(model)} is not served here; this server has {served.name}", "model", 404, "model_not_found"
        )
    seed = _typed(given, "seed", int)  # gives the same answers again; without one every request draws anew
    _typed(given, "user", str)
    options = _typed(given, "stream_options", dict) or {}
    if set(options) - {"include_usage", "include_obfuscation"} or options.get("include_obfuscation"):
        raise Refused(f"stream_options={_short(options)}: only include_usage is supported", "stream_options")
    sampling = _sampling(given, served)
    if seed is None:
        seed = secrets.randbits(62) if sampling.temperature > 0 else 0
    prompts = _chat(given, served) if kind == "chat" else _completion(given, served)
    for prompt in prompts:
        if not prompt:
            raise Refused("the prompt is empty: give at least one token", "prompt")
        if len(prompt) >= served.context:
            what = f"the prompt has {len(prompt)} tokens, the context holds {served.context} with the answer"
            raise Refused(
                f"{what}: shorten it", "messages" if kind == "chat" else "prompt", 400, "context_length_exceeded"
            )
    return Ask(
        kind,
        prompts,
        sampling,
        _stops(given),
        bool(_typed(given, "stream", bool)),
        bool(_typed(options, "include_usage", bool)),
        bool(_typed(given, "trace", bool)),
        seed,
    )


def _object(body: bytes) -> dict[str, Any]:
    """Return the request's fields without those that are null: null is how clients say nothing."""
    try:
        given = json.loads(body)
        json.dumps(given, ensure_ascii=False).encode()  # lone surrogates are no text
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is not JSON ({type(error).__name__}: {str(error)[:100]})") from None
    if not isinstance(given, dict):
        raise Refused(f"the body is {_short(given)}: give a JSON object")
    return {name: value for name, value in given.items() if value is not None}


def _sampling(given: dict[str, Any], served: Served) -> Sampling:
    limits = {name: given[name] for name in ("max_tokens", "max_completion_tokens") if name in given}
    for name, limit in limits.items():
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
            raise Refused(f"{name}={_short(limit)}: must be a whole number ≥ 1", name)
    if len(set(limits.values())) > 1:
        raise Refused("max_tokens and max_completion_tokens differ: give one of them", "max_tokens")
    max_tokens = min(next(iter(limits.values()), MAX_TOKENS), served.context)
    settings = {"sampler": _typed(given, "sampler", str), "block_size": _typed(given, "block_size", int)}
    settings |= {name: _typed(given, name, int, float) for name in SAMPLER_SETTINGS}
    settings = {name: value for name, value in settings.items() if value is not None}
    level = _typed(given, "effort", str)
    if level is not None:
        if settings:
            raise Refused(f"effort names the sampler and its settings: leave out {', '.join(settings)}", "effort")
        try:
            settings = settings_of(served.effort, level)
        except ValueError as error:
            raise Refused(str(error), "effort") from None
    sampler, block_size = settings.pop("sampler", "threshold"), settings.pop("block_size", None)
    temperature, top_p = _typed(given, "temperature", int, float), _typed(given, "top_p", int, float)
    temperature, top_p = 0.0 if temperature is None else temperature, 1.0 if top_p is None else top_p
    try:
        # without a prompt decode checks its settings and returns
        decode(served.model, [], sampler=sampler, max_new_tokens=max_tokens, eos_token_ids=[], block_size=block_size, **settings)  # fmt: skip
        check_drawing(1, temperature, top_p)
    except SettingError as error:
        raise Refused(str(error), error.setting) from None
    if sampler in ("ar", "verify") and served.model.config.fewstep["attention"] == "bidirectional":
        raise Refused(f"sampler {sampler} needs a causal clean stream; this student has none: use threshold", "sampler")
    return Sampling(sampler, max_tokens, block_size, temperature, top_p, tuple(sorted(settings.items())))


def _chat(given: dict[str, Any], served: Served) -> list[list[int]]:
    messages = _typed(given, "messages", list)
    if not messages:
        raise Refused("messages is missing or empty: give at least the user's", "messages")
    messages = [_message(i, m) for i, m in enumerate(messages)]
    if messages[-1]["role"] != "user":
        raise Refused(f"messages: the last is the {messages[-1]['role']}'s; it must be the user's", "messages")
    if len(messages) > 1 and not getattr(served.tokenizer, "chat_template", None):
        raise Refused("messages: this student has no chat template: give one user message", "messages")
    try:
        return [encode_prompt(served.tokenizer, messages)]
    except Exception as error:  # templates refuse with errors of jinja's, such as for roles that do not alternate
        raise Refused(f"messages: the chat template refuses them ({str(error)[:200]})", "messages") from None


def _message(index: int, message: Any) -> dict[str, str]:
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        raise Refused(f"{where} is {_short(message)}: give an object with role and content", "messages")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise Refused(f"{where}.role={_short(role)}: must be one of {', '.join(ROLES)}", "messages")
    # clients send an assistant's message back with all its other fields, empty
    extra = sorted(
        name for name, value in message.items() if name not in ("role", "content") and value not in (None, [])
    )
    if extra:
        raise Refused(f"{where}.{extra[0]} is not supported: leave it out", "messages")
    if isinstance(content, list):
        parts = [p.get("text") if isinstance(p, dict) and p.get("type") == "text" else None for p in content]
        if not all(isinstance(p, str) for p in parts):
            raise Refused(f"{where}.content: only parts of type text are supported", "messages")
        content = "".join(str(p) for p in parts)
    if not isinstance(content, str):
        raise Refused(f"{where}.content={_short(content)}: must be text", "messages")
    return {"role": role, "content": content}


def _completion(given: dict[str, Any], served: Served) -> list[list[int]]:
    """Return the prompts of text, a list of texts, ids, or a list of lists of ids."""
    prompt = given.get("prompt")
    many = isinstance(prompt, list) and bool(prompt) and not all(_is_int(p) for p in prompt)
    prompts = list(prompt) if many else [prompt]
    if len(prompts) > MAX_PROMPTS:
        raise Refused(f"prompt: {len(prompts)} in one request, at most {MAX_PROMPTS}: send several", "prompt")
    width = served.model.config.get_text_config().vocab_size
    encoded = []
    for p in prompts:
        if isinstance(p, str):
            encoded.append(list(served.tokenizer(p)["input_ids"]))
        elif isinstance(p, list) and all(_is_int(t) for t in p):
            if any(not 0 <= t < width for t in p):
                raise Refused(f"prompt: token ids must lie between 0 and {width - 1}", "prompt")
            encoded.append(list(p))
        else:
            raise Refused(f"prompt={_short(p)}: give text, token ids, or a list of one of them", "prompt")
    return encoded


def _stops(given: dict[str, Any]) -> tuple[str, ...]:
    stop = given.get("stop", [])
    stops = [stop] if isinstance(stop, str) else stop
    fits = isinstance(stops, list) and len(stops) <= MAX_STOPS
    if not fits or not all(isinstance(s, str) and 0 < len(s) <= MAX_STOP_LENGTH for s in stops):
        rule = f"give text or a list of at most {MAX_STOPS}, each of 1 to {MAX_STOP_LENGTH} characters"
        raise Refused(f"stop={_short(stop)}: {rule}", "stop")
    return tuple(stops)


def _typed(given: dict[str, Any], name: str, *types: type) -> Any:
    """Return a field's value, None where it is absent; a bool is no number."""
    value = given.get(name)
    if value is None or (isinstance(value, types) and (bool in types or not isinstance(value, bool))):
        return value
    words = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "text",
        list: "a list",
        dict: "an object",
    }
    raise Refused(f"{name}={_short(value)}: must be {words[types[-1]]}", name)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _same(value: Any, neutral: Any) -> bool:
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:59] + "…"
