"""Intervals and areas: what a difference between two decoders is worth.

Legend: N prompts, R bootstrap draws.

Every interval resamples prompts, the unit that was drawn, never tokens. It is the percentile
bootstrap, but where almost nothing varies there is nothing to resample: 2,000 right answers of
2,000 would give [1, 1], a certainty that nobody has. There the interval is the closed form for
rare events named in the function, which stays open and is exact enough for small counts.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

DRAWS = 2000
LEVEL = 0.95
RARE = 25  # fewer events than this and a bootstrap of them understates the interval

Interval = tuple[float, float]


def mean_interval(values: Sequence[float], *, seed: int = 0, draws: int = DRAWS, level: float = LEVEL) -> Interval:
    """Return a confidence interval of the mean of per-prompt scores.

    Args:
        values: [N] scores in [0, 1], one per prompt.

    Raises:
        ValueError: no values, or a value outside [0, 1].
    Source: percentile bootstrap (Efron 1979); with fewer than RARE successes or failures the score
        interval of Wilson (1927), conservative for scores between 0 and 1.
    """
    v = _array(values, 0.0, 1.0)
    n = len(v)
    if min(v.sum(), n - v.sum()) < RARE:
        z = _z(level)
        mean = float(v.mean())
        centre = (mean + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n))
        return max(0.0, centre - half), min(1.0, centre + half)
    return _percentiles(v[_resamples(n, draws, seed)].mean(axis=1), level)


def paired_interval(
    ours: Sequence[float], baseline: Sequence[float], *, seed: int = 0, draws: int = DRAWS, level: float = LEVEL
) -> Interval:
    """Return a confidence interval of mean(ours) - mean(baseline) on the same prompts.

    Args:
        ours, baseline: [N] scores in [0, 1]; index i is the same prompt in both.

    Raises:
        ValueError: different lengths, no values, or a value outside [0, 1].
    Source: paired percentile bootstrap; where the pairs that differ weigh less than RARE the
        adjusted Wald interval for matched pairs (Agresti and Min 2005), half a count per cell.
    """
    a, b = _array(ours, 0.0, 1.0), _array(baseline, 0.0, 1.0)
    if len(a) != len(b):
        raise ValueError(f"paired scores have lengths {len(a)} and {len(b)}; they must cover the same prompts")
    d = a - b
    n = len(d)
    won, lost = float(d[d > 0].sum()), float(-d[d < 0].sum())
    if won + lost < RARE:
        won, lost, total = won + 0.5, lost + 0.5, n + 2.0
        mean = (won - lost) / total
        half = _z(level) * math.sqrt((won + lost) - (won - lost) ** 2 / total) / total
        return max(-1.0, mean - half), min(1.0, mean + half)
    return _percentiles(d[_resamples(n, draws, seed)].mean(axis=1), level)


def ratio_interval(
    numerator: Sequence[float], denominator: Sequence[float], *, seed: int = 0, draws: int = DRAWS, level: float = LEVEL
) -> Interval | None:
    """Return an interval of Σ numerator / Σ denominator over prompts; None with fewer than two.

    Args:
        numerator: [N], such as tokens.
        denominator: [N] positive, such as seconds or forwards.

    Raises:
        ValueError: different lengths, or a denominator that is not positive.
    Source: percentile bootstrap of a ratio of sums.
    """
    num, den = _pair_of_sums(numerator, denominator)
    if len(num) < 2:
        return None
    index = _resamples(len(num), draws, seed)
    return _percentiles(num[index].sum(axis=1) / den[index].sum(axis=1), level)


def paired_ratio_interval(
    ours: tuple[Sequence[float], Sequence[float]],
    baseline: tuple[Sequence[float], Sequence[float]],
    *,
    seed: int = 0,
    draws: int = DRAWS,
    level: float = LEVEL,
) -> Interval | None:
    """Return an interval of (Σa/Σb of ours) / (Σa/Σb of the baseline), such as a speed-up in tokens/s.

    Args:
        ours, baseline: ([N] numerator, [N] denominator) on the same prompts.

    Raises:
        ValueError: different lengths, or a denominator that is not positive.
    Source: paired percentile bootstrap: one draw of prompts serves both systems.
    """
    a, b = _pair_of_sums(*ours)
    c, d = _pair_of_sums(*baseline)
    if len(a) != len(c):
        raise ValueError(f"paired ratios have lengths {len(a)} and {len(c)}; they must cover the same prompts")
    if len(a) < 2:
        return None
    index = _resamples(len(a), draws, seed)
    ratios = (a[index].sum(axis=1) / b[index].sum(axis=1)) / (c[index].sum(axis=1) / d[index].sum(axis=1))
    return _percentiles(ratios, level)


def aup(points: Sequence[tuple[float, float]], tolerance: float = 0.05) -> float:
    """Return the area under score against TPF of one system's sampler (AUP).

    A point more than `tolerance` below the curve's best score is dropped, so that speed bought
    with broken answers earns nothing. From TPF 0 to the first point kept the curve is flat; between
    points it is straight. With scores as fractions the unit is correct tokens per forward.

    Args:
        points: (tpf, score) of each setting, any order.

    Raises:
        ValueError: no points.
    Source: AUP of d3LLM, without its exponential weight; flat up to the first point, as there.
    """
    if not points:
        raise ValueError("aup needs at least one (tpf, score) point, got none")
    best = max(score for _, score in points)
    kept = sorted((tpf, score) for tpf, score in points if score >= best - tolerance)
    area = kept[0][0] * kept[0][1]
    for (x0, y0), (x1, y1) in zip(kept, kept[1:]):
        area += (x1 - x0) * (y0 + y1) / 2
    return area


def _array(values: Sequence[float], low: float, high: float) -> np.ndarray:
    v = np.asarray(values, dtype=np.float64)
    if v.ndim != 1 or len(v) == 0:
        raise ValueError(f"scores have shape {v.shape}; expected one or more values, one per prompt")
    if not ((v >= low) & (v <= high)).all():
        raise ValueError(f"scores lie in [{v.min()}, {v.max()}]; expected [{low}, {high}]")
    return v


def _pair_of_sums(numerator: Sequence[float], denominator: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    num, den = np.asarray(numerator, dtype=np.float64), np.asarray(denominator, dtype=np.float64)
    if num.shape != den.shape:
        raise ValueError(f"numerator and denominator have shapes {num.shape} and {den.shape}; they must match")
    if not (den > 0).all():
        raise ValueError(f"a denominator is {den.min()}; each must be above 0")
    return num, den


def _resamples(n: int, draws: int, seed: int) -> np.ndarray:
    """Return [R, N] prompt indices, the same for every statistic of n prompts under one seed."""
    return np.random.default_rng([seed, n]).integers(0, n, size=(draws, n), dtype=np.int32)


def _percentiles(statistics: np.ndarray, level: float) -> Interval:
    tail = (1 - level) / 2
    low, high = np.quantile(statistics, [tail, 1 - tail])
    return float(low), float(high)


def _z(level: float) -> float:
    """Return the two-sided normal quantile of a confidence level."""
    return NormalDist().inv_cdf((1 + level) / 2)
