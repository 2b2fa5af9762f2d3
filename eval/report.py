"""The report: one HTML page that a team lead understands in a minute, and the same numbers as JSON.

Everything here is lay-out. Figures, intervals and verdicts come from results.json as they stand;
the page holds no script but the one that scrubs through a sample's forwards.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq

from fewstep import runstore
from fewstep.eval import card, plots, verdict
from fewstep.eval.config import REPORT_VERSION
from fewstep.eval.provenance import definitions, effort_levels, not_measured, what_ran
from fewstep.eval.samples import choose, sample_html
from fewstep.eval.tables import SYSTEMS, Row, brackets, more_table, results_table, row_name
from fewstep.markup import page, section, tag, text

MARKS = {"threshold": "circle", "fixed": "square", "verify": "diamond", "ar": "ring", "factor": "up", "entropy": "down"}
MARKS |= {"klass": "left", "margin": "right", "remask": "plus", "edit": "bar"}
HELD_OUT = "held_out_"  # prefix of the held-out losses in metrics.jsonl


def run(folder: Path, manifests: dict[str, dict], eval_folder: Path, recipe: dict) -> dict:
    """Write report.html, report.json and MODEL_CARD.md into `folder`.

    Args:
        folder: the stage's folder, which exists.
        manifests: stage name → manifest of the stages that this report is about.
        eval_folder: a finished eval folder: results.json, effort.json, samples.parquet.
        recipe: the resolved recipe, JSON-able.

    Returns:
        Summary: the verdict sentences and the files written.
    """
    results = json.loads((eval_folder / "results.json").read_text())
    effort = json.loads((eval_folder / "effort.json").read_text())
    samples = choose(pq.ParquetFile(eval_folder / "samples.parquet"), results["verdicts"])
    training = {stage: _held_out(eval_folder.parent, stage, m) for stage, m in manifests.items()}
    training = {stage: lines for stage, lines in training.items() if lines}
    content = {
        "schema": 1,
        "version": REPORT_VERSION,
        "name": recipe.get("name"),
        "verdicts": results["verdicts"],
        "results": results,
        "effort": effort,
        "samples": samples,
        "training": training,
        "recipe": recipe,
        "stages": {stage: _stage_facts(m) for stage, m in manifests.items()},
    }
    runstore.write_atomic(folder / "report.json", json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False))
    runstore.write_atomic(folder / "report.html", html(content))
    runstore.write_atomic(folder / "MODEL_CARD.md", card.write(content))
    return {
        "verdicts": [v["text"] for v in results["verdicts"]],
        "files": ["report.html", "report.json", "MODEL_CARD.md"],
    }


def html(content: dict) -> str:
    """Return the page for the content of report.json."""
    results = content["results"]
    tasks = [t["name"] for t in results["tasks"]]
    parts = [_head(content)]
    for task in tasks:
        rows = [r for r in results["rows"] if r["task"] == task]
        parts.append(_task(task, rows, content, first=task == tasks[0], only=len(tasks) == 1))
    parts += [_samples(content), _training(content["training"]), effort_levels(content["effort"]), what_ran(content)]
    parts.append(definitions())
    parts.append(not_measured(results))
    parts.append(tag("footer", "Written by fewstep. The same figures, unrounded: report.json beside this page."))
    return page(f"{content['name']}: few-step report", "\n".join(p for p in parts if p))


def _head(content: dict) -> str:
    results, verdicts = content["results"], content["verdicts"]
    teacher = results["teacher"]["model"]
    out = tag("p", f"Few-step report · <b>{text(content['name'])}</b> · student of {text(teacher)}", "eyebrow")
    sentence = verdicts[0]["text"] if verdicts else "No few-step setting of the student was measured."
    out += tag("h1", text(sentence))
    if verdicts and verdicts[0]["remark"]:
        out += tag("p", text(verdicts[0]["remark"]), "remark")
    if not verdicts:
        return tag("header", out)
    row = _row_of(results["rows"], verdicts[0])
    return tag("header", out + _figures(row, results["rows"]) + tag("p", text(_caveat(row, results)), "note"))


def _caveat(row: Row, results: dict) -> str:
    machine = results["hardware"]
    where = ", ".join(machine["gpus"]) if machine.get("gpus") else machine.get("cpu") or "an unnamed CPU"
    threads = f", {machine['threads']} thread{'s' if machine['threads'] != 1 else ''}" if machine.get("threads") else ""
    seeds = len(row["seeds"])
    said = f"Task {row['task']}: {row['n']:,} prompts"
    if row["speed_n"]:
        said += f", {row['speed_n']:,} of them timed one by one on {where}{threads}"
    said += ". Brackets are 95 % intervals over prompts; "
    return said + (
        "one training seed, so they say nothing about another training run." if seeds == 1 else f"{seeds} seeds."
    )


def _figures(row: Row, rows: Sequence[Row]) -> str:
    teacher = next((r for r in rows if r["task"] == row["task"] and r["system"] == "teacher"), None)
    lossless = next(
        (r for r in rows if (r["task"], r["system"], r["sampler"]) == (row["task"], "student", "verify")), None
    )
    cells = []
    under = verdict.bracket(row["score_ci"], verdict.share)
    if teacher:
        under += f"; teacher {verdict.percent(teacher['score'])} {verdict.bracket(teacher['score_ci'], verdict.share)}"
    cells.append(("Score", verdict.percent(row["score"]), under))
    under = brackets(row["tpf_ci"], 1) + "; " if row["tpf_ci"] else ""
    cells.append(("Tokens a forward", f"{row['tpf']:.1f}", f"{under}{row['nfe']:.1f} forwards an answer; AR: 1.0"))
    if row["speedup"] is not None:
        under = brackets(row["speedup_ci"], 2) + "; " if row["speedup_ci"] else ""
        under += f"{row['tokens_per_s']:,.0f} tokens/s at batch 1"
        cells.append(("Speed against the faster AR", verdict.times(row["speedup"]), under))
    if lossless and lossless["agreement_own"] is not None:
        under = f"of its answers equal own AR decoding; {lossless['tpf']:.1f} tokens a forward"
        cells.append(("Lossless mode (verify)", verdict.percent(lossless["agreement_own"]), under))
    inner = "".join(
        tag("div", tag("dt", text(k)) + tag("dd", text(v), "value") + tag("dd", text(u), "under")) for k, v, u in cells
    )
    return tag("dl", inner, "figures")


def _row_of(rows: Sequence[Row], said: dict) -> Row:
    wanted = (said["task"], *(said["row"][k] for k in ("system", "sampler", "settings")))
    return next(r for r in rows if (r["task"], r["system"], r["sampler"], r["settings"]) == wanted)


def _task(task: str, rows: Sequence[Row], content: dict, *, first: bool, only: bool) -> str:
    said = next((v for v in content["verdicts"] if v["task"] == task), None)
    chosen = _row_of(rows, said) if said else None
    suffix = "" if only else f": {task}"
    parts = []
    if said and not first:
        parts.append(tag("h2", text(f"Task {task}")) + tag("p", text(said["text"]), "lead"))
    parts.append(
        section(
            f"Quality against steps{suffix}",
            _curve(rows),
            "Up and to the right is better. Each mark is one measured setting, with its 95 % intervals; the dashed line is the teacher, one token a forward.",
        )
    )
    if any(r["tokens_per_s"] is not None for r in rows):
        parts.append(
            section(
                f"Speed at batch 1{suffix}",
                _speed(rows, content["results"]["speed"].get(task)),
                "Generated tokens a second, prefill included; the factor compares with the faster AR baseline.",
            )
        )
    parts.append(section(f"Results{suffix}", results_table(rows, chosen) + more_table(rows)))
    return "".join(parts)


def _both(draw, wide: int = 1030) -> str:
    """Return a plot drawn for a desktop's and for a phone's width; the style sheet shows one."""
    return tag("div", draw(wide), "wide") + tag("div", draw(350), "narrow")


def _curve(rows: Sequence[Row]) -> str:
    teacher = next((r for r in rows if r["system"] == "teacher"), None)
    series: list[plots.Series] = []
    for system in ("undistilled", "student"):
        for sampler, mark in MARKS.items():
            found = [r for r in rows if (r["system"], r["sampler"]) == (system, sampler)]
            if not found:
                continue
            name = f"{SYSTEMS[system].lower()}, {'AR' if sampler == 'ar' else sampler}"
            named = system == "student" and len(found) > 1
            dots = [
                plots.Point(r["tpf"], r["score"], r["tpf_ci"], r["score_ci"], _short(r) if named else "") for r in found
            ]
            series.append(plots.Series(name, system, mark, dots))
    line = plots.Point(1.0, teacher["score"], None, teacher["score_ci"]) if teacher else None
    key = "".join(tag("span", plots.key_mark(s.mark, s.style) + text(s.name)) for s in reversed(series))
    if line:
        key += tag("span", plots.key_mark("line", "teacher") + "teacher, greedy, with interval")
    axes = {"x_title": "tokens a forward (TPF)", "y_title": "score, %"}
    drawn = _both(lambda w: plots.curve(series, line, w, title="score against tokens a forward", **axes))
    return tag("figure", tag("div", key, "key") + drawn)


def _short(row: Row) -> str:
    return ", ".join(f"{v:g}" for v in row["settings"].values())


def _speed(rows: Sequence[Row], speed: dict | None) -> str:
    timed = sorted((r for r in rows if r["tokens_per_s"] is not None), key=lambda r: -r["tokens_per_s"])
    found = []
    for r in timed:
        note = f"{r['tokens_per_s']:,.0f} tokens/s"
        note += " · baseline" if r["is_speed_baseline"] else f" · {verdict.times(r['speedup'])}"
        if not r["is_speed_baseline"] and r["speedup_ci"]:
            note += f" {verdict.factors(r['speedup_ci'])}"
        style = "ar" if r["sampler"] == "ar" else r["system"]
        found.append(plots.Bar(row_name(r), r["tokens_per_s"], r["tokens_per_s_ci"], note, style))
    drawn = _both(lambda w: plots.bars(found, w, title="tokens per second at batch 1"))
    if speed:
        ways = "; ".join(
            f"{w['system']} by {w['implementation']} {w['tokens_per_s']:,.0f} tokens/s" for w in speed["ways"]
        )
        used = speed["baseline"]
        drawn += tag(
            "p",
            text(
                f"Ways to run AR decoding, compared on {speed['pilot_prompts']} prompts: {ways}. The faster way of each system was "
                f"then timed on all {speed['n']}; the baseline is the {used['system']} by {used['implementation']}."
            ),
            "note",
        )
    return tag("figure", drawn)


def _samples(content: dict) -> str:
    if not content["samples"]:
        return ""
    lead = "Each colour is one forward: the small number says which forward committed the tokens before it. Drag the slider to watch the answer appear."
    return section("Three answers, forward by forward", "".join(sample_html(s) for s in content["samples"]), lead)


def _training(training: dict) -> str:
    figures = ""
    for stage, lines in training.items():
        named = [(name, [(x, y) for x, y in line]) for name, line in lines.items()]
        key = "".join(tag("span", _line_key(i) + text(name)) for i, (name, _) in enumerate(named))
        drawn = _both(
            lambda w, named=named, stage=stage: plots.losses(named, w, title=f"held-out loss of {stage}"), 490
        )
        figures += tag("figure", tag("h3", text(stage)) + tag("div", key, "key") + drawn)
    if not figures:
        return ""
    return section("Training", tag("div", figures, "pair"), "Loss on held-out prompts, nats per supervised token.")


def _line_key(i: int) -> str:
    return f'<svg class="plot key" width="22" height="14" viewBox="0 0 22 14" aria-hidden="true"><line class="loss l{i % 4} path" x1="0" y1="7" x2="22" y2="7"/></svg>'


def _stage_facts(manifest: dict) -> dict:
    kept = ("hash", "commit", "commits", "seed", "seconds", "started", "finished", "threads", "upstream")
    licence = (manifest.get("summary") or {}).get("licence")
    return {key: manifest.get(key) for key in kept} | ({"licence": licence} if licence else {})


def _held_out(runs: Path, stage: str, manifest: dict) -> dict[str, list[list[float]]]:
    """Return objective → [[step, loss], …]: the held-out losses in a trained stage's metrics.jsonl."""
    path = runs / f"{stage}-{manifest.get('hash')}" / "metrics.jsonl"
    lines: dict[str, list[list[float]]] = {}
    for line in path.read_text().splitlines() if path.is_file() else []:
        record = json.loads(line)
        for name, value in record.items():
            if name.startswith(HELD_OUT) and not name.startswith(f"{HELD_OUT}accuracy"):
                lines.setdefault(name.removeprefix(HELD_OUT), []).append([record["step"], value])
    return lines
