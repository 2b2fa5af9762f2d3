"""A prompt's text as a model will see it, without torch: `plan` shows it. The ids that are used are those of `fewstep.chat`."""

import json
from pathlib import Path
from typing import Any

from fewstep.errors import UserError
from fewstep.teachers import gguf, hf
from fewstep.teachers.load import kind_of

SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


def prompt_text(model: str, revision: str | None, messages: list[dict], tools: list[dict] | None = None) -> str | None:
    """Return the messages under a checkpoint's chat template, with the header of the answer; None where it cannot be told.

    Raises:
        UserError: the template refuses the messages.
    """
    found = (_of_gguf if kind_of(model) == "gguf" else _of_folder)(model, revision)
    if found is None:
        return None
    template, special, adds_bos = found
    if template is None:  # as `chat.encode_prompt` does
        return (special.get("bos_token", "") if adds_bos else "") + messages[-1]["content"]
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        rendered: Any = render_jinja_template(
            [messages], tools=tools, chat_template=template, add_generation_prompt=True, **special
        )
    except Exception as error:  # whatever a template raises is what it says of the messages
        raise UserError(
            f"{model}: its chat template refuses the first prompt ({' '.join(str(error).split())[:200]}); change the "
            "messages, targets.system_prompt or targets.few_shot"
        ) from None
    return rendered[0][0]


def _of_folder(model: str, revision: str | None) -> tuple[str | None, dict[str, str], bool] | None:
    """Return (template, special tokens, whether a BOS is added) of a folder or a Hub checkpoint."""
    config = _file(model, revision, "tokenizer_config.json")
    if config is None:
        return None
    try:
        settings = json.loads(config)
    except ValueError:
        return None
    template = _file(model, revision, "chat_template.jinja") or settings.get("chat_template")
    if isinstance(template, list):  # several by name
        template = next((t.get("template") for t in template if t.get("name") == "default"), None)
    special = {name: settings.get(name) for name in SPECIAL}
    return (
        template,
        {k: v["content"] if isinstance(v, dict) else v for k, v in special.items() if v is not None},
        bool(settings.get("add_bos_token")),
    )


def _of_gguf(model: str, revision: str | None) -> tuple[str | None, dict[str, str], bool] | None:
    template = gguf.header(model).get("tokenizer.chat_template")
    if template is None or any(name in template for name in SPECIAL):
        return None  # the header is read without its vocabulary, where the special tokens' texts are
    return template, {}, False


def _file(model: str, revision: str | None, name: str) -> str | None:
    path = hf.file_of(model, revision, name)
    return None if path is None else Path(path).read_text(encoding="utf-8")
