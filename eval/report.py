"""The report: one HTML page that a team lead understands in a minute, and the same numbers as JSON.

Everything here is lay-out. Figures, intervals and verdicts come from results.json as they stand;
the page holds no script but the one that scrubs through a sample's forwards.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml

from fewstep import runstore
from fewstep.eval import card, plots, verdict
from fewstep.eval.markup import facts, page, tag, text
from fewstep.eval.samples import choose, sample_html

VERSION = 1

Row = dict[str, Any]

MARKS = {"threshold": "circle", "fixed": "square", "verify": "diamond", "ar": "ring"}
SYSTEMS = {"teacher": "Teacher", "student": "Student", "undistilled": "Undistilled student"}
METRICS = {
    "acceptance": "Acceptance (overlap of draft and verify distributions)",
    "perplexity": "Teacher perplexity of the answers",
    "memory_mb": "Memory per system",
    "cost": "Cost per million tokens",
    "agreement": "Agreement with the greedy teacher",
    "delta": "Difference in score from the teacher",
    "agreement_own": "Agreement with the own AR decoding",
    "tokens_per_s": "Tokens/s, latencies and speed-up",
    "ttft_ms": "Time to first token",
    "aup": "AUP",
    "repetition": "Repetition",
    "entropy": "Entropy",
    "against_undistilled": "Difference from the undistilled student",
}
# Reasons are given once for a figure, not again for what is derived from it.
DERIVED = {"agreement_ci", "agreement_own_ci", "delta_ci", "tokens_per_s_ci", "speedup", "speedup_ci", "p50_ms", "p95_ms"}
DERIVED |= {"speed_n", "implementation"}

HELD_OUT = "held_out_"  # prefix of the held-out losses in metrics.jsonl

DEFINITIONS = [
    (
        "Forward (NFE)",
        "Every forward pass of a decoding counts: draft, denoise, verify, commit, and the prefill where its logits yield a token. AR decoding is then exactly one token a forward. In the table: mean forwards per answer.",
    ),
    (
        "Tokens a forward (TPF)",
        "Generated tokens over forwards, both summed over all answers before dividing. The end-of-text token counts once; fill, cut tokens and tokens rewritten later never count.",
    ),
    (
        "AR baseline for speed",
        "The fastest of cached greedy generate of the transformers library and our own loop without drafting, each with the student's weights and prompt and with the teacher and its few-shot prefix already cached. A speed-up over a slower baseline would be no result.",
    ),
    (
        "Tokens/s",
        "At batch 1: generated tokens over seconds, prefill included. All systems answer one prompt before any sees the next, in one process, taking turns at going first.",
    ),
    ("First token", "Median time until the first token of the contiguous prefix is decided."),
    ("Score", "Mean of the task's checker over its prompts, in percent; one point is one percent."),
    ("Agreement", "Share of answers whose token ids equal the greedy teacher's, end to end."),
    (
        "Positions per token",
        "Positions computed after the prompt over generated tokens: what few-step decoding pays in arithmetic for fewer forwards.",
    ),
    (
        "AUP",
        "Area under score against tokens a forward over a sampler's settings, those more than 5 points below the best dropped; its unit is right tokens a forward.",
    ),
    (
        "Intervals and verdicts",
        "95 % intervals from a paired bootstrap over prompts; closed forms (Wilson, Agresti-Min) where too few answers differ to be resampled. Helped and hurt are said only where the paired interval excludes zero; “within N points” only where its lower bound lies above −N.",
    ),
]


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
        "version": VERSION,
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
    parts += [_samples(content), _training(content["training"]), _effort(content["effort"]), _what_ran(content)]
    parts.append(_section("Definitions", facts([(k, text(v)) for k, v in DEFINITIONS])))
    parts.append(_not_measured(results))
    parts.append(tag("footer", "Written by fewstep. The same figures, unrounded: report.json beside this page."))
    return page(f"{content['name']}: few-step report", "\n".join(p for p in parts if p))


def _section(title: str, inner: str, lead: str = "") -> str:
    return tag("section", tag("h2", text(title)) + (tag("p", text(lead), "lead") if lead else "") + inner)


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
    said += "one training seed, so they say nothing about another training run." if seeds == 1 else f"{seeds} training seeds."
    return said


def _figures(row: Row, rows: Sequence[Row]) -> str:
    teacher = next((r for r in rows if r["task"] == row["task"] and r["system"] == "teacher"), None)
    lossless = next((r for r in rows if (r["task"], r["system"], r["sampler"]) == (row["task"], "student", "verify")), None)
    cells = []
    under = verdict.bracket(row["score_ci"], verdict.share)
    if teacher:
        under += f"; teacher {verdict.percent(teacher['score'])} {verdict.bracket(teacher['score_ci'], verdict.share)}"
    cells.append(("Score", verdict.percent(row["score"]), under))
    cells.append(
        (
            "Tokens a forward",
            f"{row['tpf']:.1f}",
            (_ci(row["tpf_ci"], 1) + "; " if row["tpf_ci"] else "") + f"{row['nfe']:.1f} forwards an answer; AR: 1.0",
        )
    )
    if row["speedup"] is not None:
        under = f"{_ci(row['speedup_ci'], 2)}; {row['tokens_per_s']:,.0f} tokens/s at batch 1"
        cells.append(("Speed against the faster AR", verdict.times(row["speedup"]), under))
    if lossless and lossless["agreement_own"] is not None:
        under = f"verify at {lossless['tpf']:.1f} tokens a forward equals own AR decoding"
        cells.append(("Lossless mode, identical", verdict.percent(lossless["agreement_own"]), under))
    inner = "".join(
        tag("div", tag("dt", text(k)) + tag("dd", text(v), "value") + tag("dd", text(u), "under")) for k, v, u in cells
    )
    return tag("dl", inner, "figures")


def _ci(interval: Sequence[float] | None, digits: int) -> str:
    return f"[{interval[0]:,.{digits}f}, {interval[1]:,.{digits}f}]" if interval else ""


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
    parts.append(_section(f"Quality against steps{suffix}", _curve(rows), "Up and to the right is better. Each mark is one measured setting, with its 95 % intervals; the dashed line is the teacher, one token a forward."))
    if any(r["tokens_per_s"] is not None for r in rows):
        parts.append(_section(f"Speed at batch 1{suffix}", _speed(rows, content["results"]["speed"].get(task)), "Generated tokens a second, prefill included; the factor compares with the faster AR baseline."))
    parts.append(_section(f"Results{suffix}", _table(rows, chosen) + _more(rows)))
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
            dots = [plots.Point(r["tpf"], r["score"], r["tpf_ci"], r["score_ci"], _short(r) if named else "") for r in found]
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
            note += f" {verdict.bracket(r['speedup_ci'], verdict.factor)}"
        style = "ar" if r["sampler"] == "ar" else r["system"]
        found.append(plots.Bar(_name(r), r["tokens_per_s"], r["tokens_per_s_ci"], note, style))
    drawn = _both(lambda w: plots.bars(found, w, title="tokens per second at batch 1"))
    if speed:
        ways = "; ".join(f"{w['system']} by {w['implementation']} {w['tokens_per_s']:,.0f} tokens/s" for w in speed["ways"])
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


def _name(row: Row) -> str:
    who = {"teacher": "teacher", "student": "student", "undistilled": "undistilled"}.get(row["system"], row["system"])
    return f"{who}, AR" if row["sampler"] == "ar" else f"{who}, {verdict.setting_name(row['sampler'], row['settings'])}"


def _cell(value: str | None, under: str = "", why: str = "") -> str:
    if value is None:
        return tag("td", "–", "none", title=why or "not measured")
    return tag("td", text(value) + (tag("small", text(under)) if under else ""))


def _groups(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    names = list(dict.fromkeys(r["system"] for r in rows))
    names.sort(key=lambda s: list(SYSTEMS).index(s) if s in SYSTEMS else len(SYSTEMS))
    return [(SYSTEMS.get(s, s), [r for r in rows if r["system"] == s]) for s in names]


def _grid(heads: Sequence[str], rows: Sequence[Row], cells, chosen: Row | None) -> str:
    body = ""
    for group, members in _groups(rows):
        body += tag("tr", tag("td", text(group), colspan=str(len(heads))), "group")
        for r in members:
            label = "AR, greedy" if r["sampler"] == "ar" else verdict.setting_name(r["sampler"], r["settings"])
            body += tag("tr", tag("td", text(label)) + cells(r), "chosen" if r is chosen else "")
    head = tag("thead", tag("tr", "".join(heads)))
    return tag("div", tag("table", head + tag("tbody", body)), "scroll", tabindex="0", role="region")


def _head_cell(name: str, unit: str = "", cls: str = "") -> str:
    return tag("th", text(name) + (tag("small", text(unit)) if unit else ""), cls, scope="col")


def _table(rows: Sequence[Row], chosen: Row | None) -> str:
    heads = [
        _head_cell("System"),
        _head_cell("Score", "%"),
        _head_cell("Δ teacher", "points"),
        _head_cell("Agreement", "% with teacher"),
        _head_cell("TPF", "tokens/forward"),
        _head_cell("NFE", "an answer"),
        _head_cell("Tokens/s", "batch 1"),
        _head_cell("Speed", "× faster AR"),
        _head_cell("Verdict", "", "words"),
    ]

    def cells(r: Row) -> str:
        why = r["not_measured"]
        out = _cell(verdict.share(r["score"]), verdict.bracket(r["score_ci"], verdict.share))
        reference = r["system"] == "teacher"
        out += _cell(*((None, "", "this is the teacher") if reference or r["delta"] is None else (verdict.points(r["delta"]), verdict.bracket(r["delta_ci"], verdict.points))))
        out += _cell(None if r["agreement"] is None or reference else verdict.share(r["agreement"]), verdict.bracket(r["agreement_ci"], verdict.share) if r["agreement_ci"] else "", why.get("agreement", ""))
        out += _cell(f"{r['tpf']:.2f}", _ci(r["tpf_ci"], 2)) + _cell(f"{r['nfe']:.1f}")
        rate = r["tokens_per_s"]
        out += _cell(None if rate is None else f"{rate:,.0f}", _ci(r["tokens_per_s_ci"], 0), why.get("tokens_per_s", ""))
        out += _cell(None if rate is None else verdict.factor(r["speedup"]), _ci(r["speedup_ci"], 2) if not r["is_speed_baseline"] else "baseline", why.get("speedup", ""))
        return out + _words(r["verdict"])

    note = "Brackets: 95 % intervals, paired where two systems are compared. Shaded: the setting of the verdict above." if chosen else ""
    return _grid(heads, rows, cells, chosen) + (tag("p", text(note), "note") if note else "")


def _words(said: str) -> str:
    """Return a verdict's cell, with the word that decides in its colour."""
    for word, cls in (("helped", "helped"), ("hurt", "hurt"), ("NOT lossless", "hurt")):
        said_before, found, after = said.partition(word)
        if found:
            return tag("td", text(said_before) + tag("b", word, cls) + text(after), "words")
    return tag("td", text(said), "words")


def _more(rows: Sequence[Row]) -> str:
    heads = [_head_cell("More figures")]
    heads += [_head_cell(*h) for h in (("Own AR", "% identical"), ("Positions", "a token"), ("First token", "ms"), ("Latency", "p50 ms"), ("Latency", "p95 ms"), ("Finished", "%"), ("Repetition", "4-grams"), ("Entropy", "nats"), ("Distinct-2",), ("AUP",), ("Δ undistilled", "points"))]

    def cells(r: Row) -> str:
        why, against = r["not_measured"], r["against_undistilled"]

        def show(key: str, form) -> str:
            return _cell(None if r[key] is None else form(r[key]), "", why.get(key, ""))

        out = show("agreement_own", verdict.share) + show("positions_per_token", "{:.2f}".format)
        out += show("ttft_ms", "{:,.1f}".format) + show("p50_ms", "{:,.0f}".format) + show("p95_ms", "{:,.0f}".format)
        out += _cell(verdict.share(r["gates"]["finished"])) + show("repetition", "{:.3f}".format) + show("entropy", "{:.2f}".format)
        distinct = r["distinct_n"]["2"]
        out += _cell(None if distinct is None else f"{distinct:.3f}") + show("aup", "{:.2f}".format)
        return out + (_cell(verdict.points(against["delta"]), verdict.bracket(against["delta_ci"], verdict.points)) if against else _cell(None, "", why.get("against_undistilled", "")))

    return _grid(heads, rows, cells, None)


def _samples(content: dict) -> str:
    if not content["samples"]:
        return ""
    lead = "Each colour is one forward: the small number says which forward committed the tokens before it. Drag the slider to watch the answer appear."
    return _section("Three answers, forward by forward", "".join(sample_html(s) for s in content["samples"]), lead)


def _training(training: dict) -> str:
    figures = ""
    for stage, lines in training.items():
        named = [(name, [(x, y) for x, y in line]) for name, line in lines.items()]
        key = "".join(tag("span", _line_key(i) + text(name)) for i, (name, _) in enumerate(named))
        drawn = _both(lambda w, named=named, stage=stage: plots.losses(named, w, title=f"held-out loss of {stage}"), 490)
        figures += tag("figure", tag("h3", text(stage)) + tag("div", key, "key") + drawn)
    return _section("Training", tag("div", figures, "pair"), "Loss on held-out prompts, nats per supervised token.") if figures else ""


def _line_key(i: int) -> str:
    return f'<svg class="plot key" width="22" height="14" viewBox="0 0 22 14" aria-hidden="true"><line class="loss l{i % 4} path" x1="0" y1="7" x2="22" y2="7"/></svg>'


def _effort(effort: dict) -> str:
    items = ""
    for name, level in effort["levels"].items():
        if not level.get("sampler"):
            items += tag("li", f"<b>{text(name)}</b>: {text(level['reason'])}")
            continue
        said = verdict.setting_name(level["sampler"], level["settings"])
        tasks = []
        for task, found in level["tasks"].items():
            one = f"{task}: {found['tpf']:.1f} tokens a forward"
            if "check" in found:
                one += f"; checked on the other {found['check']['n']:,} prompts: {found['check']['verdict']}"
            tasks.append(one)
        items += tag("li", f"<b>{text(name)}</b>: {text(said)}. {text('. '.join(tasks))}")
    lead = f"Settings chosen on one half of the prompts and checked on the other. Low may lose {verdict.share(effort['max_loss'])} points of score, medium half of that, high nothing; lossless is the student's own AR answer."
    return _section("Effort levels", tag("ul", items, "words-list"), lead)


def _what_ran(content: dict) -> str:
    results, stages = content["results"], content["stages"]
    machine = results["hardware"]
    gpus = ", ".join(machine.get("gpus") or []) or "no GPU"
    pairs = [
        ("Teacher", text(results["teacher"]["model"])),
        ("Student", text(", ".join(f"{k} {v}" for k, v in results["students"].get("student", {}).items() if isinstance(v, (str, int, float))))),
        ("Hardware", text(f"{machine.get('cpu')}; {machine.get('cores')} cores, threads: {machine.get('threads')}, {machine.get('memory_gb')} GB; {gpus}")),
        ("Versions", text(", ".join(f"{k} {v}" for k, v in results["versions"].items()))),
        ("Commit", text(results["commit"] or "an installed package, not a source tree")),
        ("Seed", text(results["settings"]["seed"])),
    ]
    for t in results["tasks"]:
        pairs.append((f"Task {t['name']}", text(f"version {t['version']}, {t['n']:,} prompts, prompt hash {t['prompt_hash']}")))
    body = ""
    for stage, m in stages.items():
        when = (m["finished"] or "")[:16].replace("T", " ") or None
        seconds = None if m["seconds"] is None else f"{m['seconds']:,.0f}"
        body += tag("tr", tag("td", text(stage)) + _cell(m["hash"]) + _cell((m["commit"] or "")[:12] or None) + _cell(when) + _cell(seconds))
    table = ""
    if body:
        head = tag("thead", tag("tr", _head_cell("Stage") + _head_cell("Hash") + _head_cell("Commit") + _head_cell("Finished") + _head_cell("Seconds")))
        table = tag("div", tag("table", head + tag("tbody", body), "left"), "scroll")
    recipe = tag("pre", text(yaml.safe_dump(content["recipe"], sort_keys=False, allow_unicode=True, width=100)))
    return _section("What was run", facts(pairs) + table + tag("h3", "Recipe, resolved", "spaced") + recipe)


def _not_measured(results: dict) -> str:
    found: dict[tuple[str, str], list[str]] = {}
    for row in results["rows"]:
        for key, why in row["not_measured"].items():
            if key not in DERIVED:
                found.setdefault((METRICS.get(key, key), why), []).append(_name(row))
    total = len(results["rows"])
    items = "".join(tag("li", f"<b>{text(m['what'])}</b>: {text(m['why'])}.") for m in results["not_measured"])
    for (metric, why), names in found.items():
        names = list(dict.fromkeys(names))
        where = "" if len(names) >= total else f" ({', '.join(names) if len(names) <= 4 else f'{len(names)} of {total} rows'})"
        items += tag("li", f"<b>{text(metric)}</b>{text(where)}: {text(why)}.")
    return _section("What was not measured, and why", tag("ul", items, "words-list"))


def _stage_facts(manifest: dict) -> dict:
    kept = ("hash", "commit", "seed", "seconds", "started", "finished", "threads", "upstream")
    return {key: manifest.get(key) for key in kept}


def _held_out(runs: Path, stage: str, manifest: dict) -> dict[str, list[list[float]]]:
    """Return objective → [[step, loss], …]: the held-out losses in a trained stage's metrics.jsonl."""
    path = runs / f"{stage}-{manifest.get('hash')}" / "metrics.jsonl"
    lines: dict[str, list[list[float]]] = {}
    for line in path.read_text().splitlines() if path.is_file() else []:
        record = json.loads(line)
        for name, value in record.items():
            if name.startswith(HELD_OUT) and name != f"{HELD_OUT}accuracy":
                lines.setdefault(name.removeprefix(HELD_OUT), []).append([record["step"], value])
    return lines
