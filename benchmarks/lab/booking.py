"""The booking task: callers' messages to a car-repair shop, and each booking as one JSON object.

A pure function of a seed. A message is drawn from a template, an opening, a closing and values that
combine freely; every value stands in the message as the booking spells it, so an answer is checkable
and a model has to read, not to know. Templates are split: evaluation phrases are never seen in training.

    python benchmarks/lab/booking.py --out DIR --train 800 --eval 2400 --seed 0
    python benchmarks/lab/booking.py --out DIR --train 0 --eval 6000 --seed 1      (recipes/booking/test.jsonl)
    python benchmarks/lab/booking.py --out DIR --train 0 --eval 0 --fresh 2000     (recipes/booking/fresh.jsonl)
    python benchmarks/lab/booking.py --out DIR --train 2400 --eval 0               (recipes/quickstart/prompts.jsonl)
    python benchmarks/lab/booking.py --out DIR --train 2400 --eval 0 --free 0.5 --more Ben=4
                                                                                   (recipes/quickstart/phrased.jsonl)
"""

import argparse
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

Split = Literal["train", "eval", "fresh"]

KEYS = ("name", "car", "year", "service", "day", "time")

FIRST_NAMES = (
    "Anna", "Ben", "Carla", "David", "Elena", "Frank", "Grace", "Henry", "Irene", "James", "Karen", "Leo",
    "Maria", "Nora", "Oscar", "Paul", "Rosa", "Sam", "Tina", "Victor", "Wendy", "Alice", "Bruno", "Clara",
    "Daniel", "Emma", "Felix", "Hannah", "Ivan", "Julia", "Kevin", "Linda", "Martin", "Nina", "Peter", "Sarah",
)  # fmt: skip
LAST_NAMES = (
    "Adams", "Baker", "Carter", "Davis", "Evans", "Fisher", "Garcia", "Hall", "Jones", "King", "Lopez", "Miller",
    "Nelson", "Owens", "Parker", "Reed", "Scott", "Turner", "Walker", "Young", "Bell", "Cooper", "Diaz", "Foster",
    "Green", "Hughes", "Lee", "Moore", "Price", "Quinn", "Rossi", "Stone", "Ward", "White", "Wood", "Murphy",
)  # fmt: skip
CARS = (
    "Ford Focus", "Ford Fiesta", "Ford Escape", "Toyota Corolla", "Toyota Camry", "Toyota Yaris", "Honda Civic",
    "Honda Accord", "Honda Jazz", "Mazda Tribute", "Nissan Micra", "Nissan Leaf", "Kia Rio", "Kia Soul",
    "Hyundai Elantra", "Hyundai Tucson", "Volkswagen Golf", "Volkswagen Polo", "Jeep Cherokee", "Opel Corsa",
    "Opel Astra", "Renault Clio", "Fiat Panda", "Fiat Punto", "Skoda Fabia", "Seat Ibiza", "Jeep Compass",
    "Subaru Forester", "Suzuki Swift", "Chevrolet Spark", "Dodge Journey",
)  # fmt: skip
YEARS = tuple(range(1998, 2025))
SERVICES = (
    "oil change", "brake check", "tire rotation", "battery test", "wheel alignment", "engine tune-up",
    "coolant flush", "clutch repair", "door repair", "full inspection", "exhaust repair", "windshield repair",
    "filter change", "paint job",
)  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
TIMES = tuple(f"{hour}:{minute:02d}" for hour in range(8, 18) for minute in (0, 15, 30, 45))

OPENINGS = ("", "", "Hi, ", "Hello, ", "Hey, ", "Good morning, ", "Hello! ", "Hi there! ", "Um, ")
CLOSINGS = ("", "", "", " Thanks!", " Thank you.", " Please confirm.", " Bye!")

# {a_service} is the service with its article. A template starts in lower case; `_message` raises it.
TRAIN_TEMPLATES = (
    "this is {name}. My {year} {car} needs {a_service}. Can I come on {day} at {time}?",
    "my name is {name} and I would like {a_service} for my {year} {car} on {day} at {time}.",
    "I need {a_service} for my {car} from {year}. {day} at {time} would be great. {name} here.",
    "can you book {a_service} for {name} on {day} at {time}? It is a {year} {car}.",
    "{name} speaking. I want to bring in my {year} {car} on {day}, {time}, for {a_service}.",
    "could I get {a_service} on {day} at {time}? The car is a {car}, {year}. The name is {name}.",
    "is {day} at {time} free? I have a {year} {car} that needs {a_service}. I am {name}.",
    "please put me down for {day} at {time}. {name}, {year} {car}, {service}.",
    "I drive a {car}, year {year}, and it is time for {a_service}. {day} around {time}, under {name}.",
    "it's {name}. Do you have time for {a_service} on {day}? About {time}. My car is a {year} {car}.",
    "at {time} on {day} I could bring my {year} {car}. It needs {a_service}. My name is {name}.",
    "{a_service} please, for a {year} {car}. Name: {name}. {day}, {time}.",
    "book me in for {a_service}: {name}, {car} ({year}), {day} at {time}.",
    "I'd like to book {a_service} for {day} at {time}. The name's {name} and the car is a {year} {car}.",
    "we have a {car} from {year} that needs {a_service}. Could {name} drop it off {day} at {time}?",
    "on {day} I am free at {time}. Could you do {a_service} on my {car}? It's a {year}. I'm {name}.",
    "{name} again. The {year} {car} needs {a_service} after all. Would {day} at {time} work?",
    "my neighbour {name} needs {a_service} for a {year} {car}. Is {time} on {day} okay?",
    "my friend {name} will come by on {day} at {time} with a {year} {car} for {a_service}.",
    "I am calling about my {car}. It was made in {year} and needs {a_service}. {name}, {day}, {time}.",
    "what about {time} on {day} for {a_service}? It's for {name}, and the car is a {car} of {year}.",
    "the name is {name}. I have a {year} {car}. I want {a_service} this {day} at {time}.",
    "reserve {day} {time} for {name}, please: {a_service} on a {year} {car}.",
    "so my {year} {car} is making noise, I think I need {a_service}. {day}, {time}? I'm {name}.",
    "I'm {name} and I own a {car} built in {year}. Can you do {a_service} next {day} at {time}?",
    "next {day} at {time}, can you see my {year} {car}? I'm after {a_service}. Name is {name}.",
    "for {name}: {service}, {year} {car}, {day} at {time}, if you have room.",
    "do you do {service} work? I'd bring my {car}, a {year}, on {day} at {time}. It's {name}.",
    "how about {day}? {time} suits me. {a_service} for my {year} {car}. Put it under {name}.",
    "{name} wants {a_service} for the {year} {car}, and can be there {day} at {time}.",
    "hoping to get {a_service} done on {day} at {time}. {year} {car}. Ask for {name}.",
    "you did my {car} last year. It's the {year} one. Now {a_service}, {day} at {time}. {name}.",
    "my boss {name} asked me to arrange {a_service} for a {year} {car}, {day} at {time}.",
    "I would come {day} at {time} with a {car}. The year is {year}, the job is {a_service}, I'm {name}.",
)
EVAL_TEMPLATES = (
    "I'm {name}, and my {year} {car} is due for {a_service}. Could I come in {day} at {time}?",
    "{name} here. Can I get {a_service} for a {car} from {year} on {day} at {time}?",
    "would {time} on {day} work for {a_service}? My name is {name} and I drive a {year} {car}.",
    "I want to book my {year} {car} for {a_service}. {day} at {time}, please. The name is {name}.",
    "my {car} is from {year} and it needs {a_service}. I am free on {day} at {time}. This is {name}.",
    "please book {name} for {day} at {time}. The car, a {year} {car}, needs {a_service}.",
    "do you have room on {day} at {time}? It's {name} with a {year} {car} for {a_service}.",
    "it is time for {a_service} on my {year} {car}. I'd like {day}, {time}. Put me down as {name}.",
    "can we say {day} at {time}, {a_service}, {year} {car}? That would be for {name}.",
    "I have a {year} {car} here. Could you do {a_service} this {day}, about {time}? I'm {name}.",
)
# Written once every choice had been made, to see how the figures carry to phrasing that no choice looked at.
FRESH_TEMPLATES = (
    "we spoke earlier, {name}. As agreed: {a_service} for the {year} {car}, {day} at {time}.",
    "my wife's {car}, a {year} one, is due {a_service}. Does {day} at {time} suit you? It would be {name}.",
    "good to reach you! {name} wants to know if {a_service} is possible on {day}, {time}. Car: {year} {car}.",
    "quick one: {year} {car} and {a_service}, {day} {time}. Cheers, {name}.",
    "I just bought a {year} {car} and would love {a_service} on {day} at {time}. You can call me {name}.",
    "any chance of {a_service} around {time} on {day}? {name}, owner of a {car} from {year}.",
    "please schedule {a_service} with {name} for {day}, {time}; the vehicle is a {year} {car}.",
    "since {day} at {time} is still open, {name} takes it. It's about {a_service} on a {car}, built {year}.",
    "my mechanic is on holiday, so could you handle {a_service} on my {year} {car}? {name}, {day}, {time}.",
    "the {car} is back, {year} model. This time it needs {a_service}. See you {day} at {time}, {name}.",
)
SPLITS = {"train": TRAIN_TEMPLATES, "eval": EVAL_TEMPLATES, "fresh": FRESH_TEMPLATES}
TEMPLATES = TRAIN_TEMPLATES + EVAL_TEMPLATES + FRESH_TEMPLATES  # a row's `template` is an index into this

# Training messages may also be put together from clauses, one for each value or for two of them, in any order.
# No four words in a row of an evaluation template stand in them, but those of the training templates (a test).
CLAUSES = {
    ("name",): (
        "this is {name}.", "my name is {name}.", "the name is {name}.", "{name} here.", "{name} speaking.",
        "it's {name}.", "I am {name}.", "you can put {name} on it.", "the booking is for {name}.",
        "under {name}, please.", "name: {name}.", "the customer is {name}.", "ask for {name}.", "{name} calling.",
        "I'm calling for {name}.", "write down {name}.", "it goes under {name}.", "I'm {name}.", "in the name of {name}.",
    ),
    ("car",): (
        "I'm driving a {year} {car}.", "the car is a {year} {car}.", "it's a {car} from {year}.",
        "my car is a {car}, {year}.", "I own a {year} {car}.", "we have a {car} built in {year}.", "{year} {car}.",
        "the vehicle: {car} ({year}).", "it is about my {year} {car}.", "it concerns a {car} of {year}.",
        "the car is a {car}, year {year}.",
    ),
    ("service",): (
        "I need {a_service}.", "it needs {a_service}.", "please do {a_service}.", "I want {a_service}.",
        "{a_service}, please.", "looking for {a_service}.", "the job is {a_service}.", "can you do {a_service}?",
        "it is about {a_service}.", "service: {service}.", "we'd like {a_service}.",
    ),
    ("time",): (
        "{day} at {time}.", "can I come {day} at {time}?", "is {day}, {time}, free?",
        "I could come on {day} around {time}.", "at {time} on {day}, please.", "{day}, {time}.",
        "{time} on {day} suits me.", "would {day} at {time} be fine?", "how about {time}, {day}?",
        "{day} {time}, if possible.", "I'd come {day} at {time}.",
    ),
    ("car", "service"): (
        "my {year} {car} needs {a_service}.", "I need {a_service} for my {car} from {year}.",
        "{a_service} for a {year} {car}.", "my {car}, {year}, wants {a_service}.",
        "please look at my {year} {car}, it needs {a_service}.", "could you do {a_service} on my {car}? It's a {year}.",
    ),
    ("service", "time"): (
        "I'd like {a_service} on {day} at {time}.", "can I have {a_service} {day}, {time}?",
        "{day} at {time} for {a_service}.", "at {time} on {day} I need {a_service}.", "{a_service}, {day} at {time}.",
    ),
    ("name", "car"): (
        "{name}, driving a {year} {car}.", "{name} has a {year} {car}.", "{name}, {year} {car}.",
        "the {year} {car} belongs to {name}.", "my friend {name} owns a {car} from {year}.",
    ),
    ("name", "time"): (
        "{name} would come {day} at {time}.", "book {name} in on {day} at {time}.", "{day} at {time} for {name}.",
        "it's {name}, can I come {day} at {time}?",
    ),
}  # fmt: skip
PAIRS = tuple(values for values in CLAUSES if len(values) == 2)


def response(booking: dict) -> str:
    """Return a booking as the model has to write it: one line, keys in the order of KEYS."""
    return json.dumps({key: booking[key] for key in KEYS}, ensure_ascii=False)


def stream(split: Split, seed: int, free: float = 0.0, more: dict[str, float] | None = None) -> Iterator[dict]:
    """Yield rows without end, all of distinct messages, from the templates of one split.

    Args:
        split: "train", "eval" or "fresh".
        seed: rows are a pure function of the arguments; a longer draw starts with the shorter one.
        free: share of training messages that are put together from CLAUSES.
        more: first name or car → how many times as often as the others it is drawn.

    Yields:
        {"id": str, "instruction": str, "reference": {key: str | int for KEYS}, "template": int, or None if free}
    """
    rng = random.Random(f"booking/{split}/{seed}")
    first = TEMPLATES.index(SPLITS[split][0])
    last = first + len(SPLITS[split])
    seen: set[str] = set()
    while True:
        template = rng.randrange(first, last)
        booking = {
            "name": f"{_draw(rng, FIRST_NAMES, more)} {rng.choice(LAST_NAMES)}",
            "car": _draw(rng, CARS, more),
            "year": rng.choice(YEARS),
            "service": rng.choice(SERVICES),
            "day": rng.choice(DAYS),
            "time": rng.choice(TIMES),
        }
        composed = split == "train" and free > 0 and rng.random() < free
        bare = composed and rng.random() < 0.5
        message = _message(rng, compose(rng) if composed else TEMPLATES[template], booking, bare)
        if message in seen:
            continue
        index = None if composed else template
        yield {"id": f"{split}-{len(seen):05d}", "instruction": message, "reference": booking, "template": index}
        seen.add(message)


def compose(rng: random.Random) -> str:
    """Return a template put together from CLAUSES: every value once, in random order, as one to four sentences."""
    left, chosen = ["name", "car", "service", "time"], []
    for pair in rng.sample(PAIRS, len(PAIRS)):
        if set(pair) <= set(left) and rng.random() < 0.35:
            chosen.append(pair)
            left = [value for value in left if value not in pair]
    chosen += [(value,) for value in left]
    rng.shuffle(chosen)
    text = ""
    for values in chosen:
        # any value may open a message: the same name is other tokens there than behind a space
        opens = [] if text or rng.random() < 0.4 else [clause for clause in CLAUSES[values] if clause[0] == "{"]
        clause = rng.choice(opens or CLAUSES[values])
        if not text:
            text = clause
        elif text.endswith(".") and not text.endswith("{time}.") and clause[0] != "I" and rng.random() < 0.25:
            text = f"{text[:-1]}, {clause}"
        else:
            text += " " + (clause if clause[0] == "{" else clause[0].upper() + clause[1:])
    return text


def rows(split: Split, count: int, seed: int, free: float = 0.0, more: dict[str, float] | None = None) -> list[dict]:
    """Return the first `count` rows of `stream(split, seed, free, more)`."""
    source = stream(split, seed, free, more)
    return [next(source) for _ in range(count)]


def _draw(rng: random.Random, values: tuple[str, ...], more: dict[str, float] | None) -> str:
    """Draw one of `values`, evenly but for those named in `more`."""
    return rng.choices(values, [more.get(value, 1.0) for value in values])[0] if more else rng.choice(values)


def _message(rng: random.Random, template: str, booking: dict, bare: bool = False) -> str:
    service = booking["service"]
    article = "an" if service[0] in "aeiou" else "a"
    body = template.format(**booking, a_service=f"{article} {service}")
    opening, closing = "" if bare else rng.choice(OPENINGS), rng.choice(CLOSINGS)
    return opening + (body if opening.endswith(", ") else body[0].upper() + body[1:]) + closing


def write_jsonl(path: Path, items: list[dict]) -> None:
    """Write one JSON object a line."""
    path.write_text("".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items), encoding="utf-8")


def _times(text: str) -> tuple[str, float]:
    value, _, times = text.rpartition("=")
    if value not in FIRST_NAMES + CARS or not re.fullmatch(r"\d+(\.\d+)?", times):
        raise argparse.ArgumentTypeError(f"{text!r} is no first name or car of this task and a number; write Ben=4")
    return value, float(times)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the splits of the booking task as JSON lines.")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--train", type=int, default=800, metavar="ROWS")
    parser.add_argument("--eval", type=int, default=2400, metavar="ROWS")
    parser.add_argument("--fresh", type=int, default=0, metavar="ROWS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--free", type=float, default=0.0, metavar="SHARE", help="of training messages put together from clauses")  # fmt: skip
    parser.add_argument("--more", nargs="*", type=_times, default=[], metavar="VALUE=TIMES", help="training messages with this first name or car that many times as often")  # fmt: skip
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    write_jsonl(args.out / "train.jsonl", rows("train", args.train, args.seed, args.free, dict(args.more)))
    write_jsonl(args.out / "eval.jsonl", rows("eval", args.eval, args.seed))
    write_jsonl(args.out / "fresh.jsonl", rows("fresh", args.fresh, args.seed))


if __name__ == "__main__":
    main()
