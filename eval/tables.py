"""The report's tables: one row a measured setting, grouped by system."""

from collections.abc import Callable, Sequence
from typing import Any

from fewstep.eval import verdict
from fewstep.markup import tag, text

Row = dict[str, Any]

SYSTEMS = {"teacher": "Teacher", "student": "Student", "undistilled": "Undistilled student"}


def brackets(interval: Sequence[float] | None, digits: int) -> str:
    """Return an interval as [low, high], or nothing where there is none."""
    return f"[{interval[0]:,.{digits}f}, {interval[1]:,.{digits}f}]" if interval else ""


def row_name(row: Row) -> str:
    """Return how the page calls a row, such as student, threshold 0.9."""
    if row["sampler"] == "ar":
        return f"{row['system']}, AR"
    return f"{row['system']}, {verdict.setting_name(row['sampler'], row['settings'])}"


def head_cell(name: str, unit: str = "", cls: str = "") -> str:
    """Return a column's head with its unit below."""
    return tag("th", text(name) + (tag("small", text(unit)) if unit else ""), cls, scope="col")


def cell(value: str | None, under: str = "", why: str = "not measured") -> str:
    """Return a cell; a value that is None is a dash that says `why` when pointed at."""
    if value is None:
        return tag("td", "–", "none", title=why)
    return tag("td", text(value) + (tag("small", text(under)) if under else ""))


def results_table(rows: Sequence[Row], chosen: Row | None) -> str:
    """Return the main table; the row of the verdict is shaded."""
    heads = [
        head_cell("System"),
        head_cell("Score", "%"),
        head_cell("Δ teacher", "points"),
        head_cell("Agreement", "% with teacher"),
        head_cell("TPF", "tokens/forward"),
        head_cell("NFE", "an answer"),
        head_cell("Tokens/s", "batch 1"),
        head_cell("Speed", "× faster AR"),
        head_cell("Verdict", "", "words"),
    ]

    def cells(r: Row) -> str:
        teacher = r["system"] == "teacher"
        out = _figure(r, "score", verdict.share, lambda ci: verdict.bracket(ci, verdict.share))
        if teacher:
            out += cell(None, why="this is the teacher") * 2
        else:
            out += _figure(r, "delta", verdict.points, lambda ci: verdict.bracket(ci, verdict.points))
            out += _figure(r, "agreement", verdict.share, lambda ci: verdict.bracket(ci, verdict.share))
        out += _figure(r, "tpf", "{:.2f}".format, lambda ci: brackets(ci, 2))
        out += _figure(r, "nfe", "{:.1f}".format)
        out += _figure(r, "tokens_per_s", "{:,.0f}".format, lambda ci: brackets(ci, 0))
        if r["is_speed_baseline"]:
            out += cell("1", "baseline")
        else:
            out += _figure(r, "speedup", verdict.factor, lambda ci: brackets(ci, 2))
        return out + _words(r["verdict"])

    note = "Brackets: 95 % intervals, paired where two systems are compared."
    note += " Shaded: the setting of the verdict above." if chosen else ""
    return _grid(heads, rows, cells, chosen) + tag("p", text(note), "note")


def more_table(rows: Sequence[Row]) -> str:
    """Return the second table: identity with the own AR stream, latencies, text statistics, areas."""
    heads = [
        head_cell("More figures"),
        head_cell("Own AR", "% identical"),
        head_cell("Positions", "a token"),
        head_cell("First token", "ms"),
        head_cell("Latency", "p50 ms"),
        head_cell("Latency", "p95 ms"),
        head_cell("Finished", "%"),
        head_cell("Repetition", "4-grams"),
        head_cell("Entropy", "nats"),
        head_cell("Distinct-2"),
        head_cell("AUP"),
        head_cell("Δ undistilled", "points"),
    ]

    def cells(r: Row) -> str:
        out = _figure(r, "agreement_own", verdict.share) + _figure(r, "positions_per_token", "{:.2f}".format)
        out += _figure(r, "ttft_ms", "{:,.1f}".format)
        out += _figure(r, "p50_ms", "{:,.0f}".format) + _figure(r, "p95_ms", "{:,.0f}".format)
        out += cell(verdict.share(r["gates"]["finished"]))
        out += _figure(r, "repetition", "{:.3f}".format) + _figure(r, "entropy", "{:.2f}".format)
        distinct = r["distinct_n"]["2"]
        out += cell(None if distinct is None else f"{distinct:.3f}", why="no answer has 2 tokens")
        out += _figure(r, "aup", "{:.2f}".format)
        against = r["against_undistilled"]
        if against is None:
            return out + cell(None, why=r["not_measured"]["against_undistilled"])
        return out + cell(verdict.points(against["delta"]), verdict.bracket(against["delta_ci"], verdict.points))

    return _grid(heads, rows, cells, None)


def _figure(row: Row, key: str, show: Callable[[float], str], show_ci: Callable[[Any], str] | None = None) -> str:
    """Return the cell of one figure of a row: its value over its interval, or a dash with the reason."""
    if row[key] is None:
        return cell(None, why=row["not_measured"][key])
    ci = row.get(f"{key}_ci")
    return cell(show(row[key]), show_ci(ci) if show_ci and ci else "")


def _grid(heads: Sequence[str], rows: Sequence[Row], cells: Callable[[Row], str], chosen: Row | None) -> str:
    """Return a table of rows grouped by system; `cells` writes all but a row's first cell."""
    order = [s for s in SYSTEMS if any(r["system"] == s for r in rows)]
    body = ""
    for system in order:
        body += tag("tr", tag("td", text(SYSTEMS[system]), colspan=str(len(heads))), "group")
        for r in rows:
            if r["system"] == system:
                label = verdict.setting_name(r["sampler"], r["settings"])
                body += tag("tr", tag("td", text(label)) + cells(r), "chosen" if r is chosen else "")
    head = tag("thead", tag("tr", "".join(heads)))
    return tag("div", tag("table", head + tag("tbody", body)), "scroll", tabindex="0", role="region")


def _words(said: str) -> str:
    """Return a verdict's cell, with the word that decides in its colour."""
    for word, cls in (("helped", "helped"), ("hurt", "hurt"), ("NOT lossless", "hurt")):
        before, found, after = said.partition(word)
        if found:
            return tag("td", text(before) + tag("b", word, cls) + text(after), "words")
    return tag("td", text(said), "words")
