"""Prompts: rows of a source, each with a stable id; no torch here, `plan` imports this."""

import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fewstep.chat import encode_prompt
from fewstep.errors import UserError
from fewstep.teachers.config import PromptsConfig, TargetsConfig
from fewstep.teachers.sources import read_jsonl, read_rows

ROLES = ("system", "user", "assistant")
_REPEATED = re.compile(r"([0-9a-f]{16})-\d+")  # an id of our own for a message that came before


@dataclass(frozen=True)
class Prompt:
    """One prompt: what is asked and what a right answer is checked against."""

    id: str
    messages: list[dict]  # dicts of role and content; the last one is the user's
    reference: Any = None  # any JSON
    tools: list[dict] | None = None  # JSON schemas of functions, for the chat template
    line: int = field(default=0, compare=False)  # 1-based, for messages to the user


def read_prompts(config: PromptsConfig) -> list[Prompt]:
    """Return the prompts of a source, in its order.

    `config.field` of a row holds the user's message, or a list of role/content messages that ends with the
    user's. `id` (text or integer), `reference` (any JSON) and `tools` (a list of JSON schemas of functions, or its text)
    are optional; without an id a row is named by the hash of its messages and tools.

    Raises:
        UserError: no such source, no rows, or a row that breaks a rule, by line number.
    """
    prompts: list[Prompt] = []
    places: dict[str, str] = {}  # id -> where it was given
    repeats: dict[str, int] = {}
    seen: set[str] = set()
    for where, number, row in read_rows(config):
        if config.field not in row:
            names = ", ".join(f"`{name}`" for name in list(row)[:6]) or "none"
            raise UserError(
                f"{where}: no field `{config.field}` (its fields: {names}); prompts.field names the one with the message"
            )
        messages, tools = _messages(row[config.field], where, config.field), read_tools(row.get("tools"), where)
        if config.dedupe:
            told = [[m["role"], " ".join(m["content"].lower().split())] for m in messages]
            alike = _sha256([told, tools] if tools else told)
            if alike in seen:
                continue
            seen.add(alike)
        prompt_id = _given_id(row, where)
        if prompt_id is None:
            prompt_id = _sha256([messages, tools] if tools else messages)[:16]
            repeats[prompt_id] = repeats.get(prompt_id, 0) + 1
            if repeats[prompt_id] > 1:
                prompt_id = f"{prompt_id}-{repeats[prompt_id]}"
        if prompt_id in places:
            raise UserError(f"{where}: id {prompt_id!r} was given in {places[prompt_id]} already; ids must differ")
        try:
            json.dumps(row.get("reference"))
        except (TypeError, ValueError):
            kind = type(row["reference"]).__name__
            raise UserError(f"{where}: `reference` holds a {kind}, which is no JSON; write it as text") from None
        places[prompt_id] = where.rpartition(", ")[2]
        prompts.append(Prompt(prompt_id, messages, row.get("reference"), tools, number))
    if not prompts:
        raise UserError(f"{config.place}: holds no prompts; write one JSON object with `{config.field}` per line")
    return prompts


def contaminated(prompts: list[Prompt], avoid: list[Prompt], words: int) -> dict[str, str]:
    """Return id → the shared words, of prompts that share so many words in a row with one of `avoid`.

    A prompt of fewer words is compared whole. Case and punctuation do not count.
    """
    runs: set[tuple[str, ...]] = set()
    short: set[tuple[str, ...]] = set()
    for prompt in avoid:
        said = _words(prompt)
        runs.update(tuple(said[i : i + words]) for i in range(len(said) - words + 1))
        short.add(tuple(said))
    found = {}
    for prompt in prompts:
        said = _words(prompt)
        if len(said) < words:
            if said and tuple(said) in short:
                found[prompt.id] = " ".join(said)
            continue
        shared = next((run for i in range(len(said) - words + 1) if (run := tuple(said[i : i + words])) in runs), None)
        if shared is not None:
            found[prompt.id] = " ".join(shared)
    return found


def _words(prompt: Prompt) -> list[str]:
    said = " ".join(m["content"] for m in prompt.messages if m["role"] == "user")
    return re.findall(r"\w+", said.lower())


def read_few_shot(path: Path | None) -> list[dict]:
    """Return the messages of a JSONL file of {user, assistant} turns; none for no file.

    Raises:
        UserError: no such file, no rows, or a broken row, by line number.
    """
    if path is None:
        return []
    messages = []
    for number, row in read_jsonl(path):
        for role in ("user", "assistant"):
            where = f"{path}, line {number}"
            if role not in row:
                raise UserError(f"{where}: no field `{role}`; each row of targets.few_shot is {{user, assistant}}")
            messages.append({"role": role, "content": _text(row[role], where, role)})
    if not messages:
        raise UserError(
            f"{path}: holds no turns; write one {{user, assistant}} object per line or remove targets.few_shot"
        )
    return messages


def teacher_messages(messages_list: list[list[dict]], targets: TargetsConfig) -> list[list[dict]]:
    """Return what the teacher is told: `targets.system_prompt` and `targets.few_shot` before each conversation.

    A system message of the conversation's own comes after the recipe's, in one message.
    """
    examples = read_few_shot(targets.few_shot)
    out = []
    for messages in messages_list:
        own = [m["content"] for m in messages if m["role"] == "system"]
        system = [targets.system_prompt, *own] if targets.system_prompt else own
        head = [{"role": "system", "content": "\n\n".join(system)}] if system else []
        out.append(head + examples + [m for m in messages if m["role"] != "system"])
    return out


def teacher_prompts(
    tokenizer: Any,
    messages_list: list[list[dict]],
    targets: TargetsConfig,
    tools: list[list[dict] | None] | None = None,
) -> list[list[int]]:
    """Return the ids that the teacher sees: those of `teacher_messages`, with the tools of each conversation.

    Raises:
        Untold: as `chat.encode_prompt`.
    """
    told = teacher_messages(messages_list, targets)
    return [encode_prompt(tokenizer, messages, own) for messages, own in zip(told, tools or [None] * len(told))]


def sample_id(prompt_id: str, number: int) -> str:
    """Return the id of a prompt's answer `number`, counted from 0; the first bears the prompt's own."""
    return prompt_id if number == 0 else f"{prompt_id}~{number + 1}"


def prompt_id(sample: str) -> str:
    """Return the id of the prompt that a sample answers."""
    return re.sub(r"~\d+$", "", sample)


def split(prompt_id: str, held_out: float) -> str:
    """Return "held_out" for a share `held_out` of all ids and "train" for the others.

    It depends on the id alone, so adding prompts moves none between the two; repeated messages fall together.
    """
    own = _REPEATED.fullmatch(prompt_id)
    digest = hashlib.sha256((own[1] if own else prompt_id).encode()).digest()
    return "held_out" if int.from_bytes(digest[:8], "big") < held_out * 2**64 else "train"


def prompts_fingerprint(prompts: PromptsConfig, targets: TargetsConfig | None = None) -> str:
    """Return the SHA-256 (hex) of what the prompts say, wherever their files lie.

    With `targets`, the few-shot turns and the JSON schema that it names count too.

    Raises:
        UserError: as `read_prompts`, `read_few_shot` and `read_schema`.
    """
    content: list[Any] = [
        [p.id, p.messages, p.reference, *([p.tools] if p.tools else [])] for p in read_prompts(prompts)
    ]
    if targets is not None:
        content = [content, read_few_shot(targets.few_shot), read_schema(targets.keep.json_schema)]
    return _sha256(content)


def read_schema(path: Path | None) -> dict | None:
    """Return a JSON schema file's object.

    Raises:
        UserError: the file cannot be read or holds no JSON object.
    """
    if path is None:
        return None
    try:
        schema = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"targets.keep.json_schema: {path} cannot be read ({' '.join(str(error).split())}); give a JSON schema file"
        ) from None
    if not isinstance(schema, dict):
        raise UserError(f"targets.keep.json_schema: {path} holds a {type(schema).__name__}; a JSON schema is an object")
    return schema


def _given_id(row: dict, where: str) -> str | None:
    value = row.get("id")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise UserError(f"{where}: `id` is {value!r}; it must be text or an integer")
    return _text(str(value), where, "id")


def _messages(value: Any, where: str, name: str) -> list[dict]:
    if not isinstance(value, list):
        return [{"role": "user", "content": _text(value, where, name)}]
    messages = []
    for message in value:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise UserError(
                f"{where}: `{name}` holds {message!r:.80}; each message needs a role ({', '.join(ROLES)}) and a content"
            )
        messages.append({"role": message["role"], "content": _text(message.get("content"), where, f"{name}.content")})
    if not messages or messages[-1]["role"] != "user":
        raise UserError(f"{where}: `{name}` must end with the user's message, which the teacher answers")
    return messages


def read_tools(value: Any, where: str) -> list[dict] | None:
    """Return a row's tools; some data sets keep them as text."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError:
            raise UserError(
                f"{where}: `tools` is {value[:60]!r}, which is no JSON; write a list of JSON schemas"
            ) from None
    if value is None or value == "" or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) and tool for tool in value):
        raise UserError(f"{where}: `tools` is {value!r:.80}; it must be a list of JSON schemas, an object each")
    return value


def _text(value: Any, where: str, name: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{where}: `{name}` is {value!r:.80}; it must be text")
    if not value.strip():
        raise UserError(f"{where}: `{name}` is empty; remove the row or write the text")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise UserError(
                f"{where}: `{name}` holds half of a surrogate pair; remove it or write the whole character"
            ) from None
    return value


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
