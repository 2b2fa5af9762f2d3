"""From messages to token ids: the one place where a chat template is applied."""

from typing import Any


class Untold(ValueError):
    """Tools that a prompt has and its text would not show."""


def encode_prompt(tokenizer: Any, messages: list[dict], tools: list[dict] | None = None) -> list[int]:
    """Return the ids of `messages` followed by the header of the assistant's turn.

    A tokenizer without a chat template gets the last user message as plain text, after one BOS if
    the tokenizer is of the kind that adds one.

    Args:
        tokenizer: a Hugging Face tokenizer.
        messages: dicts of `role` and `content`; the last is the user's.
        tools: JSON schemas of functions that the chat template shows; None: none.

    Raises:
        Untold: there are tools, and the template (or its absence) would not show them.
    """
    if getattr(tokenizer, "chat_template", None):
        told = {"add_generation_prompt": True, "return_dict": False}
        if not tools:
            return list(tokenizer.apply_chat_template(messages, **told))
        ids = list(tokenizer.apply_chat_template(messages, tools=tools, **told))
        if ids == list(tokenizer.apply_chat_template(messages, **told)):
            raise Untold("its chat template shows no tools")
        return ids
    if tools:
        raise Untold("it has no chat template, which would show the tools")
    text = next(m["content"] for m in reversed(messages) if m["role"] == "user")
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if getattr(tokenizer, "add_bos_token", False) and tokenizer.bos_token_id is not None:
        return [tokenizer.bos_token_id, *ids]
    return ids


def eos_ids(model_or_config: Any, tokenizer: Any) -> list[int]:
    """Return the ids that end an answer: the generation config's (or the config's) and the tokenizer's, each once."""
    config = getattr(model_or_config, "generation_config", None)
    declared = getattr(config if config is not None else model_or_config, "eos_token_id", None)
    ids = list(declared) if isinstance(declared, (list, tuple)) else [declared]
    if tokenizer is not None:
        ids.append(tokenizer.eos_token_id)
    return list(dict.fromkeys(i for i in ids if i is not None))
