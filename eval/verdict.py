"""Say in words what an interval allows, and no more."""

import math
from collections.abc import Callable, Sequence

MAX_WITHIN = 5  # beyond this many points "within" says nothing worth saying


def direction(low: float, high: float) -> str:
    """Return "helped", "hurt" or "no difference shown" for an interval of ours minus theirs."""
    if low > 0:
        return "helped"
    if high < 0:
        return "hurt"
    return "no difference shown"


def within_points(low: float) -> int | None:
    """Return the least whole number of points N ≥ 1 with `low` > -N points as printed; None past 5.

    The bound is rounded as `points` prints it, so that no claim contradicts the figure beside it.

    Args:
        low: lower bound of the paired difference in score, as a fraction.
    """
    n = max(1, math.floor(round(-100 * low, 1)) + 1)
    return n if n <= MAX_WITHIN else None


def points(value: float) -> str:
    """Return a difference of scores in points with its sign, such as −0.3."""
    text = f"{100 * value:+.1f}".replace("-", "−")
    return "0.0" if text in ("+0.0", "−0.0") else text


def percent(value: float) -> str:
    """Return a share with one decimal, such as 98.9 %."""
    return f"{100 * value:.1f}\N{NO-BREAK SPACE}%"


def times(value: float) -> str:
    """Return a factor such as 5.8×, with a second decimal near and below 1, where it decides."""
    return f"{factor(value)}×"


def factor(value: float) -> str:
    """Return a factor without its sign, for the ends of an interval."""
    return f"{value:.2f}" if value < 1.5 else f"{value:.1f}"


def share(value: float) -> str:
    """Return a share in percent without its sign, for the ends of an interval."""
    return f"{100 * value:.1f}"


def factors(interval: Sequence[float]) -> str:
    """Return an interval of factors, both ends with the decimals that the lower one needs."""
    digits = 2 if interval[0] < 1.5 else 1
    return f"[{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]"


def bracket(interval: Sequence[float], show: Callable[[float], str]) -> str:
    """Return an interval as [low, high], each end through `show`."""
    return f"[{show(interval[0])}, {show(interval[1])}]"


def quality(delta: float, delta_ci: Sequence[float], against: str = "the teacher") -> str:
    """Return the verdict on a paired difference in score, with its interval."""
    text = f"{direction(*delta_ci)}: {points(delta)} points {bracket(delta_ci, points)} against {against}"
    bound = within_points(delta_ci[0])
    if bound is None or delta_ci[0] > 0:
        return text
    return f"{text}, within {bound} point{'s' if bound > 1 else ''}"


def speed(speedup: float, speedup_ci: Sequence[float] | None) -> str:
    """Return the verdict on tokens/s at batch 1 relative to the faster AR baseline."""
    if speedup_ci is None:
        return f"{times(speedup)} the faster AR baseline's tokens/s (one prompt: no interval)"
    low, high = speedup_ci
    word = "faster" if low > 1 else "slower" if high < 1 else "no difference in speed shown"
    return f"{word}: {times(speedup)} {factors(speedup_ci)} the faster AR baseline's tokens/s"


def of_row(row: dict) -> str:
    """Return one row's verdict: quality against the teacher, identity with its own AR stream, speed."""
    if row["system"] == "teacher":
        return "the reference"
    parts = []
    if row["delta"] is not None:
        parts.append(quality(row["delta"], row["delta_ci"]))
    if row["sampler"] == "verify" and row["agreement_own"] is not None:
        own = row["agreement_own"]
        parts.append(
            f"token-identical to its own AR decoding on all {row['n']:,}"
            if own == 1
            else f"NOT lossless: {percent(own)} token-identical to its own AR decoding"
        )
    if row["speedup"] is not None and not row["is_speed_baseline"]:
        parts.append(speed(row["speedup"], row["speedup_ci"]))
    elif row["is_speed_baseline"]:
        parts.append("the faster AR baseline")
    if row["repair"] is not None:
        parts.append(repaired(row["repair"]))
    return "; ".join(parts) or "not comparable: see not_measured"


def repaired(repair: dict) -> str:
    """Return what became of errors put into right answers."""
    text = f"of right answers it damaged {percent(repair['damaged_clean'])} of the tokens"
    if not repair["errors"]:
        return text
    interval = f" {bracket(repair['repaired_ci'], share)}" if repair["repaired_ci"] else ""
    return (
        f"of {repair['errors']:,} wrong tokens put into {repair['n']:,} right answers ({100 * repair['share']:g} %) it repaired "
        f"{percent(repair['repaired'])}{interval}; {text}"
    )


def setting_name(sampler: str, settings: dict) -> str:
    """Return how a person names a sampler with its settings, such as threshold 0.9 or fixed, 2 steps."""
    text = "AR, greedy" if sampler == "ar" else sampler
    if sampler in settings:  # threshold, factor and margin take a number of their own name
        text += f" {settings[sampler]:g}"
    if "steps" in settings:
        text += f", {settings['steps']} step{'s' if settings['steps'] != 1 else ''} a block"
    named = {k: v for k, v in settings.items() if k not in (sampler, "steps", "block_size")}
    text += "".join(f", {key} {value:g}" for key, value in named.items())
    if "block_size" in settings:
        text += f", block {settings['block_size']}"
    return text


def headline(rows: Sequence[dict], levels: dict) -> list[dict]:
    """Return one verdict per task: a sentence, a remark on the lossless mode, and the row that it is about.

    The row is the fastest calibrated effort level; where no setting keeps the allowed loss it is the
    student's best-scoring setting, and the sentence says what is lost.
    """
    out = []
    for task in dict.fromkeys(row["task"] for row in rows):
        mine = [r for r in rows if r["task"] == task and r["system"] == "student" and r["sampler"] != "ar"]
        if not mine:
            continue
        chosen = next((levels[name] for name in ("low", "medium", "high") if levels.get(name, {}).get("sampler")), None)
        row = next(
            (r for r in mine if chosen and (r["sampler"], r["settings"]) == (chosen["sampler"], chosen["settings"])),
            max((r for r in mine if r["sampler"] != "verify"), key=lambda r: r["score"], default=mine[0]),
        )
        teacher = next((r for r in rows if r["task"] == task and r["system"] == "teacher"), None)
        lossless = next((r for r in mine if r["sampler"] == "verify" and r is not row), None)
        out.append(
            {
                "task": task,
                "text": _sentence(row, teacher),
                "remark": _remark(lossless) if lossless else None,
                "row": {"system": row["system"], "sampler": row["sampler"], "settings": row["settings"]},
            }
        )
    return out


def _sentence(row: dict, teacher: dict | None) -> str:
    text = f"With {setting_name(row['sampler'], row['settings'])} the student"
    if row["speedup"] is not None:
        interval = f" {factors(row['speedup_ci'])}" if row["speedup_ci"] else ""
        text += f" generates {times(row['speedup'])}{interval} the tokens/s of the faster AR baseline"
        text += f" at {row['tpf']:.1f} tokens a forward, and scores {percent(row['score'])}"
    else:
        text += f" commits {row['tpf']:.1f} tokens a forward and scores {percent(row['score'])}"
    if teacher is None or row["delta"] is None:
        return f"{text} {bracket(row['score_ci'], share)}."
    text += f" against its teacher's {percent(teacher['score'])}: {points(row['delta'])} points"
    text += f" {bracket(row['delta_ci'], points)}, {direction(*row['delta_ci'])}"
    bound = within_points(row["delta_ci"][0])
    if bound is not None and row["delta_ci"][0] <= 0:
        text += f", within {bound} point{'s' if bound > 1 else ''}"
    return text + "."


def _remark(row: dict) -> str:
    own = row["agreement_own"]
    text = f"The lossless mode (verify) commits {row['tpf']:.1f} tokens a forward"
    if row["speedup"] is not None:
        interval = f" {factors(row['speedup_ci'])}" if row["speedup_ci"] else ""
        text += f" at {times(row['speedup'])}{interval} the baseline's tokens/s"
    if own is not None:
        on = f"all {row['n']:,}" if own == 1 else f"{percent(own)} of the {row['n']:,}"
        text += f"; its answers are token-identical to the student's own AR decoding on {on} prompts"
    return text + "."
