"""`fewstep generate`: answer one prompt, and show how the answer came about."""

from collections.abc import Callable
from itertools import groupby, zip_longest
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
    max_new_tokens: int,
    show_steps: bool,
    effort: str | None,
    given: list[str],
    stop: list[str],
    **settings: Any,
) -> str:
    """Return the text of the answer, its counts, and with `show_steps` first the text after every forward.

    Args:
        student: a student's folder, or the folder of the stage that holds it.
        effort: a level of the student's generation config, in place of the sampler and its settings.
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
    from fewstep.students.decoding.levels import settings_of
    from fewstep.students.decoding.stops import stop_at
    from fewstep.teachers.hf import device, torch_dtype

    for name, number in map(_number, given):
        if name not in SETTINGS:
            raise UserError(f"--setting {name}: no sampler has it; known: {', '.join(SETTINGS)}")
        settings[name] = number
    model, tokenizer = load_student(folder, torch_dtype("auto"))
    model.to(device())
    settings = {k: v for k, v in settings.items() if v is not None}
    if effort is not None:
        own = [k for k in settings if k in ("sampler", "block_size", *SETTINGS)]
        if own:
            raise UserError(f"--effort {effort}: it names the sampler and its settings; leave out {', '.join(own)}")
        try:
            settings |= settings_of(getattr(model.generation_config, "fewstep_effort", None), effort)
        except ValueError as error:
            raise UserError(f"--{error}") from None
    sampler = settings.setdefault("sampler", "threshold")
    states: list[list[int | None]] = []
    ids = encode_prompt(tokenizer, [{"role": "user", "content": prompt}])
    try:
        decoded = decode(
            model,
            [ids],
            max_new_tokens=max_new_tokens,
            eos_token_ids=eos_ids(model, tokenizer),
            stop=stop_at(stop, tokenizer) if stop else None,
            on_step=lambda _, ids: states.append(ids),
            **settings,
        )[0]
    except ValueError as error:  # settings out of range, or a prompt that fills the context
        raise UserError(str(error)) from None
    lines = show(states, tokenizer.decode) if show_steps else []
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


def show(states: list[list[int | None]], text_of: Callable[[list[int]], str]) -> list[str]:
    """Return one line for each forward: what it changed, and the text as it then stood, open positions as dots.

    `+` counts positions it decided, `~` those it rewrote, `-` those it took back, or that an end before them cut off.

    Args:
        states: for each forward the answer so far, None where nothing is decided.
        text_of: turns ids into text.
    """
    lines, before = [], []
    for forward, ids in enumerate(states):
        pairs = list(zip_longest(before, ids))
        counts = {
            "+": sum(old is None and new is not None for old, new in pairs),
            "~": sum(old is not None and new is not None and old != new for old, new in pairs),
            "-": sum(old is not None and new is None for old, new in pairs),
        }
        changed = " ".join(f"{sign}{count}" for sign, count in counts.items() if count or sign == "+")
        runs = groupby(ids, key=lambda token: token is None)
        text = "".join(OPEN * len(list(run)) if is_open else text_of(list(run)) for is_open, run in runs)
        lines.append(f"{forward:>4}  {changed:<8} {text}".replace("\n", "⏎"))
        before = ids
    return lines
