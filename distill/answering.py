"""`fewstep generate`: answer one prompt, and show how the answer came about."""

from pathlib import Path
from typing import Any

from fewstep.errors import UserError

OPEN = "·"  # a position that is not decided yet


def student_folder(student: str) -> Path:
    """Return the folder of a student, given it or the stage's folder that holds it.

    Raises:
        UserError: no student there.
    """
    folder = Path(student)
    if (folder / "student").is_dir():
        folder = folder / "student"
    if not (folder / "config.json").is_file():
        raise UserError(f"STUDENT {student}: no config.json there; give a folder such as runs/distill-…/student")
    return folder


def answer(
    student: str,
    prompt: str,
    sampler: str,
    max_new_tokens: int,
    show_steps: bool,
    given: list[str],
    stop: list[str],
    **settings: Any,
) -> str:
    """Return the text of the answer, its counts, and with `show_steps` the text after every forward.

    Args:
        student: a student's folder, or the folder of the stage that holds it.
        given: further settings of the sampler, each NAME=NUMBER.
        stop: strings that end the answer.
        settings: of `decode`; None: the default.

    Raises:
        UserError: no student there, or settings that do not go together.
    """
    folder = student_folder(student)
    if not prompt.strip():
        raise UserError("PROMPT is empty; give the user's message")
    from fewstep.chat import encode_prompt, eos_ids
    from fewstep.students.convert import load_student
    from fewstep.students.decoding.decode import SETTINGS, decode
    from fewstep.students.decoding.stops import stop_at

    for name, number in map(_number, given):
        if name not in SETTINGS:
            raise UserError(f"--setting {name}: no sampler has it; known: {', '.join(SETTINGS)}")
        settings[name] = number
    model, tokenizer = load_student(folder)
    ids = encode_prompt(tokenizer, [{"role": "user", "content": prompt}])
    try:
        decoded = decode(
            model,
            [ids],
            sampler=sampler,
            max_new_tokens=max_new_tokens,
            eos_token_ids=eos_ids(model, tokenizer),
            stop=stop_at(stop, tokenizer) if stop else None,
            **settings,
        )[0]
    except ValueError as error:  # settings out of range, or a prompt that fills the context
        raise UserError(str(error)) from None
    lines = show(decoded.steps, [tokenizer.decode([i]) for i in decoded.ids]) if show_steps else []
    lines.append(tokenizer.decode(decoded.ids, skip_special_tokens=True))
    rate = len(decoded.ids) / decoded.nfe if decoded.nfe else 0.0
    lines.append(
        f"\n{len(decoded.ids)} tokens in {decoded.nfe} forwards: {rate:.2f} tokens a forward ({sampler}, {decoded.finish_reason})"
    )
    return "\n".join(lines)


def _number(setting: str) -> tuple[str, float]:
    """Return (name, number) of NAME=NUMBER; a whole number stays whole."""
    name, equals, value = setting.partition("=")
    try:
        number = float(value)
        return name.strip(), int(value) if value.strip().lstrip("+-").isdigit() else number
    except ValueError:
        fault = "has no number" if equals else "has no ="
        raise UserError(f"--setting {setting}: {fault}; give NAME=NUMBER, such as gamma=0.1") from None


def show(steps: list[int], tokens: list[str]) -> list[str]:
    """Return one line for each forward that decided something: the text so far, open positions as dots.

    Args:
        steps: for each token, the forward that committed it.
        tokens: the text of each token.
    """
    lines = []
    for step in sorted(set(steps)):
        last = max(i for i, s in enumerate(steps) if s <= step)
        text = "".join(t if s <= step else OPEN for s, t in zip(steps[: last + 1], tokens))
        lines.append(f"{step:>4}  +{steps.count(step):<3} {text}".replace("\n", "⏎"))
    return lines
