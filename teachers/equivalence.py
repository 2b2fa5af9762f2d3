"""Whether two tokenizers are one: a teacher's targets are token ids, and a student that starts elsewhere must read them alike."""

import random
from typing import Any

from fewstep.chat import encode_prompt
from fewstep.errors import UserError

COUNT = 200  # strings that are compared
CONVERSATIONS = (
    [{"role": "user", "content": "Hello, world!"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  two  spaces\nand a line "}],
    [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "és ¿qué?"},
    ],
)
PARTS = (
    "the quick brown fox", "Straße", "naïve café", "e\u0301 a\u0308", "こんにちは世界", "你好，世界", "안녕하세요", "שלום", "مرحبا", "नमस्ते",
    "👍🏽", "👩‍👩‍👧", "🇩🇪", "𝔘𝔫𝔦", "\t", "\n\n", "   ", "\u2028", "\u00a0", "\ufeff", "\u200d", "1234567890", "3.14159e-10", "0xDEADBEEF", "{\"a\": [1, 2]}",
    "def f(x):\n    return x", "<|im_start|>", "</s>", "<s>", "<|endoftext|>", "[MASK]", "https://a.b/c?d=e&f", "ſ", "ﬁ", "\x00", "\x1b[0m",
)  # fmt: skip


def strings() -> list[str]:
    """Return the strings that are compared, always the same: scripts, emoji, combining marks, controls, code, special tokens."""
    rng = random.Random(0)
    mixed = ["".join(rng.choices(PARTS, k=rng.randint(2, 5))) for _ in range(COUNT - len(PARTS) - 1)]
    return ["", *PARTS, *mixed]


def same_tokenizer(teacher: Any, base: Any, teacher_name: str, base_name: str) -> None:
    """Raise UserError, in a line that names the first difference, unless both make the same ids of everything.

    Compared are strings with and without special tokens, conversations under the chat template, and the EOS.
    """
    fault = difference(teacher, base)
    if fault is not None:
        raise UserError(
            f"student.base {base_name}: its tokenizer is not that of teacher.model {teacher_name}: {fault}; give a base with the teacher's tokenizer"
        )


def difference(one: Any, other: Any) -> str | None:
    """Return the first thing that two tokenizers treat differently, or None."""
    for text in strings():
        for special in (True, False):
            ids = [tokenizer(text, add_special_tokens=special)["input_ids"] for tokenizer in (one, other)]
            if ids[0] != ids[1]:
                return f"{text!r} is {_parting(*ids)}"
    if one.eos_token_id != other.eos_token_id:
        return f"its EOS is {other.eos_token_id} where the teacher's is {one.eos_token_id}"
    for messages in CONVERSATIONS:
        prompts = [_prompt(tokenizer, messages) for tokenizer in (one, other)]
        if prompts[0] != prompts[1]:
            return f"{messages[-1]['content']!r} under the chat template is {_parting(*prompts)}"
    return None


def _prompt(tokenizer: Any, messages: list[dict]) -> list[int] | str:
    try:
        return encode_prompt(tokenizer, messages)
    except Exception as error:  # a template may refuse a role; both must then
        return type(error).__name__


def _parting(teacher: list[int] | str, base: list[int] | str) -> str:
    """Return where two encodings part, in words."""
    if isinstance(teacher, str) or isinstance(base, str):
        return f"{teacher if isinstance(teacher, str) else 'encoded'} of the teacher, {base if isinstance(base, str) else 'encoded'} of the base"
    at = next((i for i, (a, b) in enumerate(zip(teacher, base)) if a != b), min(len(teacher), len(base)))
    return f"{teacher[at : at + 6]} of the teacher and {base[at : at + 6]} of the base from token {at} on"
