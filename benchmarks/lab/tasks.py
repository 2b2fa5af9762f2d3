"""The lab's tasks: endless rows of a message and the answer that its teacher learns to write.

    python benchmarks/lab/tasks.py base 3      three rows to look at

The problems of `sort`, `reverse`, `base` and `bits` come from reasoning-gym; the message is put shortly, because a
small model on a CPU has no time for long ones, and the working is written out, so that most tokens
depend on the one before. What counts as right is the final answer: the text behind the last `=`.

A row is one of evaluation if the hash of its message says so, or for `booking` its template: no message is in
both splits.
"""

import argparse
import hashlib
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import booking
import stories

WHOLE = 2**31 - 1  # reasoning-gym's virtual data sets are as long as we like


TEACHER_VERSION = 1  # raised when train_teacher.py would make another teacher of the same rows and settings


@dataclass(frozen=True)
class Task:
    """One task of the lab.

    stream: (split, seed) → endless rows {"instruction", "response", "reference"}.
    max_new_tokens: more than any response has. train, evaluation: how many prompts of each split are used.
    before: makes what the rows are read from. teacher: what train_teacher.py takes beside its defaults.
    """

    name: str
    stream: Callable[[str, int], Iterator[dict]]
    max_new_tokens: int
    train: int = 2400
    evaluation: int = 2000
    before: Callable[[], None] | None = None
    teacher: dict = field(default_factory=dict)


def rows(task: Task, split: str, count: int, seed: int) -> list[dict]:
    """Return `count` rows with distinct messages.

    Raises:
        ValueError: the task has no such number.
    """
    found: dict[str, dict] = {}
    for drawn, row in enumerate(task.stream(split, seed)):
        found.setdefault(row["instruction"], row)
        if len(found) == count:
            return list(found.values())
        if drawn > 100 * count:
            break
    raise ValueError(f"{task.name}: {len(found)} distinct messages found where {count} were asked for")


def is_eval(instruction: str) -> bool:
    """Whether a message belongs to evaluation: one in four does."""
    return hashlib.sha256(instruction.encode()).digest()[0] % 4 == 0


def _split(make: Callable[[random.Random], tuple[str, str]]) -> Callable[[str, int], Iterator[dict]]:
    """Return a stream of the rows that `make` draws, split by the hash of their messages."""

    def stream(split: str, seed: int) -> Iterator[dict]:
        rng = random.Random(f"{split} {seed}")
        while True:
            instruction, response = make(rng)
            if is_eval(instruction) == (split != "train"):
                yield {"instruction": instruction, "response": response, "reference": response.rpartition("=")[2]}

    return stream


def _gym(dataset: str, **settings) -> Callable[[random.Random], dict]:
    """Return a function that draws one entry of a reasoning-gym data set."""
    made: list = []

    def entry(rng: random.Random) -> dict:
        if not made:  # here: a slow import that booking does without
            import reasoning_gym

            made.append(reasoning_gym.create_dataset(dataset, seed=0, size=WHOLE, **settings))
        return made[0][rng.randrange(WHOLE)]

    return entry


# --- The tasks ----------------------------------------------------------------------------------

_sorting = _gym("number_sorting", min_numbers=5, max_numbers=7, max_decimals=0, min_value=0, max_value=99)
_reversing = _gym("word_sequence_reversal", min_words=5, max_words=7)
_bases = _gym("base_conversion", min_base=3, max_base=6, min_value=100, max_value=9999)
_bits = _gym("count_bits", min_n=300, max_n=9999)


def _whole(numbers) -> list[int]:
    return [round(float(n)) for n in numbers]


def sort(rng: random.Random) -> tuple[str, str]:
    """`sort up: 31 7 90` → `7 31 90`."""
    facts = _sorting(rng)["metadata"]
    up = facts["direction"] == "ascending"
    numbers = _whole(facts["original_numbers"])
    return f"sort {'up' if up else 'down'}: {_spaced(numbers)}", _spaced(sorted(numbers, reverse=not up))


def reverse(rng: random.Random) -> tuple[str, str]:
    """`reverse: one two three` → `three two one`."""
    words = _reversing(rng)["metadata"]["words"]
    return f"reverse: {_spaced(words)}", _spaced(words[::-1])


def base(rng: random.Random) -> tuple[str, str]:
    """`23 base 3` → `7 2,2 1,0 2=212`: divide, and keep the remainders."""
    facts = _bases(rng)["metadata"]
    number, to = int(facts["decimal_value"]), int(facts["target_base"])
    working, digits, left = [], "", number
    while left:
        left, digit = divmod(left, to)
        working.append(f"{left} {digit}")
        digits = str(digit) + digits
    return f"{number} base {to}", f"{','.join(working)}={digits}"


def bits(rng: random.Random) -> tuple[str, str]:
    """`bits 11` → `11 1,5 2,2 2,1 3=3`: halve, and count the odd ones as you go."""
    number = int(_bits(rng)["metadata"]["number"])
    working, count, left = [], 0, number
    while left:
        count += left % 2
        working.append(f"{left} {count}")
        left //= 2
    return f"bits {number}", f"{','.join(working)}={count}"


def modes(rng: random.Random) -> tuple[str, str]:
    """`pick 4711` → `dark blue` or `light red`, equally often and whatever the number: two joint modes."""
    return f"pick {rng.randrange(100_000)}", rng.choice(MODES)


def _booking(split: str, seed: int) -> Iterator[dict]:
    for row in booking.stream(split, seed):  # type: ignore[arg-type]
        yield {**row, "response": booking.response(row["reference"])}


def _spaced(numbers: list[int]) -> str:
    return " ".join(map(str, numbers))


def _stories(split: str, seed: int) -> Iterator[dict]:
    return stories.stream(split, seed, is_eval)


MODES = ("dark blue", "light red")  # each word a token; `dark red` and `light blue` are of neither
TASKS = {
    task.name: task
    for task in (
        Task("booking", _booking, 72),
        Task("sort", _split(sort), 48, train=12_000, teacher={"steps": 1800}),
        Task("reverse", _split(reverse), 64, train=12_000, teacher={"steps": 2000}),
        Task("base", _split(base), 64, train=12_000, teacher={"steps": 1800}),
        Task("bits", _split(bits), 80, train=7000, teacher={"steps": 500}),
        Task("modes", _split(modes), 8, teacher={"steps": 250, "vocab": 300}),
        Task(
            "stories",
            _stories,
            80,
            train=1800,
            evaluation=600,
            before=stories.tell,
            teacher={"steps": 2000, "vocab": 1024},
        ),
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("count", type=int)
    args = parser.parse_args()
    for row in rows(TASKS[args.task], "train", args.count, seed=0):
        print(json.dumps(row, ensure_ascii=False))


if __name__ == "__main__":
    main()
