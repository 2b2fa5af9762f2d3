"""`targets.html`: what the teacher wrote, for people: how long, what was dropped and why, whose it is, and samples to read."""

import json
from collections import Counter
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq

from fewstep.markup import facts, page, section, tag, text
from fewstep.records import read_rows, shards

SAMPLES, BARS = 20, 24
WIDTH, HEIGHT = 640, 160  # of the histogram


def page_of(folder: Path, teacher: str, summary: dict) -> str:
    """Return the page of a targets folder whose shards are all there.

    Args:
        summary: of the stage's manifest.
    """
    lengths: list[int] = []
    for shard in shards(folder):
        ids = pq.read_table(shard, columns=["response_ids"], partitioning=None)["response_ids"]
        lengths += pc.list_value_length(ids).to_pylist()
    rows = _shown(folder, len(lengths))
    dropped = json.loads((folder / "drops.json").read_text())
    name = Path(teacher).name
    body = tag("h1", text(f"Targets of {name}")) + facts(_facts(name, summary))
    body += section("Length of the answers", histogram(lengths), "Tokens, EOS included.")
    if dropped["counts"]:
        head = "".join(tag("th", text(word)) for word in ("reason", "answers", "one of them"))
        shown = [next(row for row in dropped["rows"] if row["reason"] == reason) for reason in dropped["counts"]]
        lines = "".join(
            tag("tr", tag("td", text(row["reason"])) + tag("td", text(dropped["counts"][row["reason"]])) + tag("td", text(row["text"])))
            for row in shown
        )  # fmt: skip
        body += section("What was dropped", tag("table", tag("tr", head) + lines))
    samples = "".join(
        tag("h3", text(f"{row['sample_id']} ({row['split']}, {row['finish_reason']})")) + tag("pre", text(row["text"]))
        for row in rows
    )
    return page(f"Targets of {name}", body + section("Samples", samples, "Evenly spaced over all answers, not chosen."))


def _shown(folder: Path, count: int) -> list[dict]:
    """Return SAMPLES of the `count` rows, evenly spaced; a shard at a time is in memory."""
    wanted = {i * count // SAMPLES for i in range(SAMPLES)}
    found, first = [], 0
    for shard in shards(folder):
        rows = read_rows(shard, columns=["sample_id", "text", "finish_reason", "split"])
        found += [row for i, row in enumerate(rows, first) if i in wanted]
        first += len(rows)
    return found


def _facts(teacher: str, summary: dict) -> list[tuple[str, str]]:
    licence = summary["licence"]
    score = summary["teacher_score"]
    return [
        ("Teacher", text(teacher)),
        ("Its licence", text(licence["name"] or "not stated") + (text(f": {licence['conditions']}") if licence["conditions"] else "")),
        ("Prompts", text(f"{summary['prompts']:,} from {summary['prompts_from']}")),
        ("Kept", text(f"{summary['kept']:,} answers, {summary['train']:,} to train on, {summary['held_out']:,} held out")),
        ("Tokens", text(f"{summary['tokens']:,} kept of {summary['generated_tokens']:,} written")),
        ("Teacher's score", "" if score is None else text(f"{score:.1%} by checker {summary['checker']} of {summary['teacher_score_n']:,}")),
    ]  # fmt: skip


def histogram(lengths: list[int]) -> str:
    """Return an inline SVG of how many answers have which length."""
    top = max(lengths)
    size = -(-top // BARS)
    counts = Counter((length - 1) // size for length in lengths)
    most, num = max(counts.values()), -(-top // size)
    wide = WIDTH / num
    bars = "".join(
        tag("rect", tag("title", text(f"{i * size + 1}–{(i + 1) * size} tokens: {counts[i]}")), x=f"{i * wide + 1:.1f}",
            y=f"{HEIGHT * (1 - counts[i] / most):.1f}", width=f"{wide - 2:.1f}", height=f"{HEIGHT * counts[i] / most:.1f}", fill="currentColor")
        for i in range(num)
    )  # fmt: skip
    labels = tag("text", "1", x="0", y=str(HEIGHT + 16), fill="currentColor") + tag(
        "text",
        text(f"{num * size} tokens"),
        x=str(WIDTH),
        y=str(HEIGHT + 16),
        fill="currentColor",
        **{"text-anchor": "end"},
    )
    return tag("svg", bars + labels, viewBox=f"0 0 {WIDTH} {HEIGHT + 20}", role="img", **{"aria-label": "histogram of lengths"})  # fmt: skip
