"""Plots as inline SVG: drawn by hand so that the page's own colours, dark or light, apply to them.

Each function returns one <svg> for a given width in CSS pixels: a page embeds a wide and a narrow
one and shows the one that fits, so that text keeps its size on a phone. All colours are classes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

CHAR = 6.7  # width of a character at the 12 px of the plots, on the generous side


@dataclass(frozen=True)
class Point:
    """One measured setting: value and interval on both axes, and the label beside it."""

    x: float
    y: float
    x_ci: Sequence[float] | None = None
    y_ci: Sequence[float] | None = None
    label: str = ""


@dataclass(frozen=True)
class Series:
    """Points of one system and sampler; `style` is its CSS class, `mark` its shape."""

    name: str
    style: str  # student, undistilled, ar
    mark: str  # circle, square, diamond, ring
    points: list[Point] = field(default_factory=list)


@dataclass(frozen=True)
class Bar:
    """One bar with its interval and the text at its end."""

    label: str
    value: float
    ci: Sequence[float] | None
    note: str
    style: str


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round numbers that cover [low, high]; the ends are multiples of the step."""
    span = max(high - low, 1e-9)
    raw = span / max(count - 1, 1)
    power = 10 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 10) for i in range(first, max(last, first + 1) + 1)]


def curve(series: Sequence[Series], line: Point | None, width: int, *, x_title: str, y_title: str, title: str) -> str:
    """Return score (y, a fraction) against tokens per forward (x), with intervals.

    Args:
        line: the teacher: its score as a dashed line, its interval as a band; x is not used.
    """
    height, left, right, top, bottom = (380 if width > 500 else 320), 60, 14, 14, 44
    shown = [p for s in series for p in s.points]
    ends = [e for p in [*shown, *([line] if line else [])] for e in (p.y, *(p.y_ci or ()))]
    y_ticks = ticks(min(ends, default=0.0), min(1.0, max(ends, default=1.0)), 7)
    y_ticks = [t for t in y_ticks if -1e-9 <= t <= 1 + 1e-9] or [0.0, 1.0]
    x_ticks = ticks(0, max([e for p in shown for e in (p.x, *(p.x_ci or ()))], default=1.0), 6 if width > 500 else 5)
    x0, x1, y0, y1 = x_ticks[0], x_ticks[-1], min(y_ticks), max(y_ticks)

    def sx(x: float) -> float:
        return left + (x - x0) / (x1 - x0) * (width - left - right)

    def sy(y: float) -> float:
        return top + (y1 - y) / (y1 - y0) * (height - top - bottom)

    out = [_open(width, height, title)]
    decimals = 0 if min((b - a for a, b in zip(y_ticks, y_ticks[1:])), default=1.0) >= 0.01 - 1e-9 else 1
    for t in y_ticks:
        out.append(_segment("grid", left, sy(t), width - right, sy(t)))
        out.append(_text("tick", left - 8, sy(t) + 4, f"{100 * t:.{decimals}f}", "end"))
    for t in x_ticks:
        out.append(_segment("grid faint", sx(t), top, sx(t), height - bottom))
        out.append(_text("tick", sx(t), height - bottom + 18, f"{t:g}", "middle"))
    out.append(_text("axis", (left + width - right) / 2, height - 6, x_title, "middle"))
    out.append(_text("axis", 11, (top + height - bottom) / 2, y_title, "middle", rotate=True))

    taken: list[tuple[float, float, float, float]] = []
    if line is not None:
        if line.y_ci:
            upper, lower = sy(line.y_ci[1]), sy(line.y_ci[0])
            out.append(
                f'<rect class="band" x="{left}" y="{upper:.1f}" width="{width - left - right}" height="{max(lower - upper, 0.5):.1f}"/>'
            )
        out.append(_segment("teacher", left, sy(line.y), width - right, sy(line.y)))
    for s in series:
        if len(s.points) > 1:
            path = " ".join(f"{sx(p.x):.1f},{sy(p.y):.1f}" for p in sorted(s.points, key=lambda p: p.x))
            out.append(f'<polyline class="{s.style} path" points="{path}"/>')
        for p in s.points:
            taken.append((sx(p.x) - 6, sy(p.y) - 6, sx(p.x) + 6, sy(p.y) + 6))
            if p.y_ci:
                taken.append((sx(p.x) - 2, sy(p.y_ci[1]), sx(p.x) + 2, sy(p.y_ci[0])))
    for s in series:
        for p in s.points:
            if p.y_ci:
                out.append(_segment(f"{s.style} whisker", sx(p.x), sy(p.y_ci[0]), sx(p.x), sy(p.y_ci[1])))
            if p.x_ci:
                out.append(_segment(f"{s.style} whisker", sx(p.x_ci[0]), sy(p.y), sx(p.x_ci[1]), sy(p.y)))
            tip = f"{s.name} {p.label}: {100 * p.y:.1f} % at {p.x:.2f} tokens a forward"
            out.append(_mark(s.mark, s.style, sx(p.x), sy(p.y), tip))
    for s in series:
        for p in s.points:
            if p.label:
                out.append(
                    _place(p.label, s.style, sx(p.x), sy(p.y), taken, (left, top, width - right, height - bottom))
                )
    return "".join(out) + "</svg>"


def bars(rows: Sequence[Bar], width: int, *, title: str) -> str:
    """Return horizontal bars, one a row, with intervals and the figure at the end of each."""
    narrow = width <= 500
    pitch, thick = (46, 12) if narrow else (32, 16)
    left = 0 if narrow else min(250, 14 + CHAR * max((len(r.label) for r in rows), default=1))
    room = 8 + CHAR * max((len(r.note) for r in rows), default=1)
    height = pitch * len(rows) + 6
    most = max((max(r.value, *(r.ci or (0.0,))) for r in rows), default=1.0)
    scale = (width - left - (8 if narrow else room)) / most
    out = [_open(width, height, title)]
    for i, r in enumerate(rows):
        y = i * pitch + (22 if narrow else (pitch - thick) / 2)
        if narrow:
            out.append(_text("name", 0, y - 7, r.label, "start"))
            out.append(_text("value", width, y - 7, r.note, "end"))
        else:
            out.append(_text("name", left - 12, y + thick / 2 + 4, r.label, "end"))
        out.append(
            f'<rect class="bar {r.style}" x="{left:.1f}" y="{y:.1f}" width="{max(r.value * scale, 1):.1f}" height="{thick}" rx="2"/>'
        )
        end = r.value
        if r.ci:
            out.append(_segment("error", left + r.ci[0] * scale, y + thick / 2, left + r.ci[1] * scale, y + thick / 2))
            end = max(end, r.ci[1])
        if not narrow:
            out.append(_text("value", left + end * scale + 8, y + thick / 2 + 4, r.note, "start"))
    return "".join(out) + "</svg>"


def losses(series: Sequence[tuple[str, Sequence[tuple[float, float]]]], width: int, *, title: str) -> str:
    """Return held-out loss against the optimizer step; one line and one style per named series."""
    height, left, right, top, bottom = 230, 52, 14, 12, 40
    values = [y for _, line in series for _, y in line]
    y_ticks = ticks(min(0.0, *values), max(values), 4)
    x_ticks = ticks(0, max(x for _, line in series for x, _ in line), 5)
    x1, y0, y1 = x_ticks[-1], y_ticks[0], y_ticks[-1]

    def sx(x: float) -> float:
        return left + x / x1 * (width - left - right)

    def sy(y: float) -> float:
        return top + (y1 - y) / (y1 - y0) * (height - top - bottom)

    out = [_open(width, height, title)]
    for t in y_ticks:
        out.append(_segment("grid", left, sy(t), width - right, sy(t)))
        out.append(_text("tick", left - 8, sy(t) + 4, f"{t:g}", "end"))
    for t in x_ticks:
        out.append(_text("tick", sx(t), height - bottom + 18, f"{t:g}", "middle"))
    out.append(_text("axis", (left + width - right) / 2, height - 4, "optimizer step", "middle"))
    for i, (name, line) in enumerate(series):
        path = " ".join(f"{sx(x):.1f},{sy(y):.1f}" for x, y in line)
        out.append(f'<polyline class="loss l{i % 4} path" points="{path}"><title>{escape(name)}</title></polyline>')
        if line:
            x, y = line[-1]
            out.append(f'<circle class="loss l{i % 4} dot" cx="{sx(x):.1f}" cy="{sy(y):.1f}" r="3"/>')
    return "".join(out) + "</svg>"


def key_mark(mark: str, style: str) -> str:
    """Return a small SVG of a mark, for the key beside a plot; the mark "line" is the teacher's dashes."""
    inner = _segment("teacher", 0, 7, 22, 7) if mark == "line" else _mark(mark, style, 11, 7, "")
    return f'<svg class="plot key" width="22" height="14" viewBox="0 0 22 14" aria-hidden="true">{inner}</svg>'


def _open(width: int, height: float, title: str) -> str:
    return (
        f'<svg class="plot" viewBox="0 0 {width} {height:g}" width="{width}" height="{height:g}" '
        f'role="img" aria-label="{escape(title)}">'
    )


def _segment(style: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(style: str, x: float, y: float, text: str, anchor: str, rotate: bool = False) -> str:
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if rotate else ""
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{turn}>{escape(text)}</text>'


def _mark(mark: str, style: str, x: float, y: float, tip: str) -> str:
    shape = {
        "circle": f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5"',
        "ring": f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"',
        "square": f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8"',
        "diamond": f'<path d="M{x:.1f} {y - 6:.1f}l6 6l-6 6l-6 -6z"',
        "up": f'<path d="M{x:.1f} {y - 5.5:.1f}l5.5 9.5l-11 0z"',
        "down": f'<path d="M{x:.1f} {y + 5.5:.1f}l5.5 -9.5l-11 0z"',
        "left": f'<path d="M{x - 5.5:.1f} {y:.1f}l9.5 5.5l0 -11z"',
        "right": f'<path d="M{x + 5.5:.1f} {y:.1f}l-9.5 5.5l0 -11z"',
        "plus": f'<path d="M{x - 1.5:.1f} {y - 5:.1f}h3v3.5h3.5v3h-3.5v3.5h-3v-3.5h-3.5v-3h3.5z"',
        "bar": f'<rect x="{x - 5:.1f}" y="{y - 2:.1f}" width="10" height="4"',
    }[mark]
    inner = f"<title>{escape(tip)}</title>" if tip else ""
    return f'{shape} class="mark {style}{" hollow" if mark == "ring" else ""}">{inner}</{shape[1:].split(" ")[0]}>'


def _place(
    label: str, style: str, x: float, y: float, taken: list[tuple[float, float, float, float]], frame: tuple[float, ...]
) -> str:
    """Return the label at the first free side of its point, or nothing: the table has every figure."""
    w = CHAR * len(label)
    for dx, dy, anchor in (
        (9, -8, "start"),
        (9, 17, "start"),
        (-9, 17, "end"),
        (-9, -8, "end"),
        (11, 4, "start"),
        (-11, 4, "end"),
    ):
        cx, cy = x + dx, y + dy
        x_left = cx - (w / 2 if anchor == "middle" else w if anchor == "end" else 0)
        box = (x_left, cy - 10, x_left + w, cy + 3)
        inside = box[0] >= frame[0] and box[1] >= frame[1] and box[2] <= frame[2] + 10 and box[3] <= frame[3]
        if inside and not any(_overlap(box, other) for other in taken):
            taken.append(box)
            return _text(f"label {style}", cx, cy, label, anchor)
    return ""


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
