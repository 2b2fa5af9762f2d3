"""The three answers that the report shows, chosen by a rule and not by hand, and how they are drawn."""

import json
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from fewstep.markup import tag, text

SCHEMA = pa.schema(
    [
        ("task", pa.string()),
        ("prompt_index", pa.int32()),
        ("prompt", pa.string()),  # the user's message
        ("reference", pa.string()),  # JSON
        ("system", pa.string()),
        ("sampler", pa.string()),
        ("settings", pa.string()),  # JSON
        ("text", pa.string()),  # without special tokens
        ("ids", pa.list_(pa.int32())),
        ("tokens", pa.list_(pa.string())),  # each id decoded on its own
        ("steps", pa.list_(pa.int32())),  # 0-based forward that committed each token
        ("confidence", pa.list_(pa.float32())),  # empty where the decoder does not report it
        ("score", pa.float64()),
        ("nfe", pa.int32()),
        ("finish_reason", pa.string()),
    ]
)

SHADES = 8  # of the style sheet: .b0 … .b7


def settings_key(settings: dict) -> str:
    """Return the settings as the JSON text that samples.parquet holds."""
    return json.dumps(settings, sort_keys=True)


def choose(parquet: Any, verdicts: list[dict]) -> list[dict]:
    """Return three answers of the first verdict's setting: a typical, a slow and a wrong one.

    The typical one is the right answer with the median number of forwards, the slow one the right
    answer with most, the wrong one the first that scores below 1; where none is wrong, the right
    answer with fewest forwards stands in. Ties go to the earlier prompt.

    Args:
        parquet: an open pyarrow ParquetFile with SCHEMA.
        verdicts: of results.json.
    """
    if not verdicts:
        return []
    row, task = verdicts[0]["row"], verdicts[0]["task"]
    table = parquet.read(columns=["task", "system", "sampler", "settings", "prompt_index", "score", "nfe"])
    wanted = {
        "task": task,
        "system": row["system"],
        "sampler": row["sampler"],
        "settings": settings_key(row["settings"]),
    }
    mask = None
    for key, value in wanted.items():
        equal = pc.equal(table[key], value)
        mask = equal if mask is None else pc.and_(mask, equal)
    places = pc.indices_nonzero(mask).to_pylist()
    found = [{**r, "place": p} for r, p in zip(table.take(places).to_pylist(), places)]
    right = sorted((r for r in found if r["score"] == 1), key=lambda r: (r["nfe"], r["prompt_index"]))
    wrong = sorted((r for r in found if r["score"] < 1), key=lambda r: r["prompt_index"])
    picks = []
    if right:
        most = max(r["nfe"] for r in right)
        picks.append(("A typical answer", right[len(right) // 2]))
        picks.append(("The slowest right answer", next(r for r in right if r["nfe"] == most)))
    if wrong:
        picks.append(("A wrong answer", wrong[0]))
    if right and not wrong:
        picks.append(("The fastest right answer; none is wrong", right[0]))
    picks += [("Another wrong answer", r) for r in wrong[1 : 1 + 3 - len(picks)]]
    return [_read(parquet, why, r["place"]) for why, r in picks]


def _read(parquet: Any, why: str, place: int) -> dict:
    for group in range(parquet.num_row_groups):
        size = parquet.metadata.row_group(group).num_rows
        if place < size:
            return {"why": why, **parquet.read_row_group(group).slice(place, 1).to_pylist()[0]}
        place -= size
    raise IndexError(f"row {place} is past the end of the samples")


def runs(sample: dict) -> list[tuple[int, list[tuple[str, int]]]]:
    """Return neighbouring tokens that one forward committed: (1-based forward, [(token, id)])."""
    out: list[tuple[int, list[tuple[str, int]]]] = []
    for token, token_id, step in zip(sample["tokens"], sample["ids"], sample["steps"]):
        if not out or out[-1][0] != step + 1:
            out.append((step + 1, []))
        out[-1][1].append((token, token_id))
    return out


def sample_html(sample: dict) -> str:
    """Return one sample as HTML: the prompt, the reference, and the answer coloured by forward."""
    forwards = sorted({step + 1 for step in sample["steps"]})
    shade = {f: round(i * (SHADES - 1) / max(len(forwards) - 1, 1)) for i, f in enumerate(forwards)}
    last = len(sample["ids"]) - 1
    body, place = "", 0
    for forward, tokens in runs(sample):
        spans = []
        for token, _ in tokens:
            end = place == last and sample["finish_reason"] == "stop"
            shown = "end" if end else token.replace("\n", "⏎")
            spans.append(tag("span", text(shown), "tok end" if end else "tok") + ("<br>" if "\n" in token else ""))
            place += 1
        spans[-1] = tag("span", spans[-1] + tag("sub", str(forward)), "keep")  # no line break before the number
        body += tag("span", "".join(spans), f"run b{shade[forward]}", **{"data-step": str(forward)})
    mark = "right" if sample["score"] == 1 else f"score {sample['score']:g}"
    count = len(sample["ids"])
    head = f"{sample['why']}: {count} tokens in {sample['nfe']} forwards, {mark}"
    top = max(forwards, default=0)
    slider = (
        f'<input type="range" min="0" max="{top}" value="{top}" step="1" aria-label="forwards done">'
        f"<output>after forward {top} of {top}</output>"
    )
    reference = sample["reference"]
    rows = [("Prompt", text(sample["prompt"]), "")]
    if reference:
        rows.append(("Reference", text(reference), "mono"))
    listed = tag("dl", "".join(tag("dt", k) + tag("dd", v, cls) for k, v, cls in rows))
    # A <div>: a label inside would turn taps on tokens into slider moves.
    return tag(
        "article", tag("h3", text(head)) + listed + tag("div", slider, "scrub") + tag("div", body, "tokens"), "sample"
    )
