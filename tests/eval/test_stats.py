"""Intervals cover what they should, and closed forms and areas give known numbers."""

import numpy as np
import pytest

from fewstep.eval import stats


def pairs(rng, n, p_ours, p_theirs, tied):
    """Return two 0/1 score vectors; a share `tied` of the prompts shares its luck between the systems."""
    luck = rng.random(n)
    other = np.where(rng.random(n) < tied, luck, rng.random(n))
    return (luck < p_ours).astype(float), (other < p_theirs).astype(float)


@pytest.mark.parametrize(
    ("n", "ours", "theirs", "tied", "most"),
    [
        (200, 0.9, 0.85, 0.8, 0.97),
        (100, 0.6, 0.5, 0.3, 0.97),
        (200, 0.97, 0.93, 0.7, 0.97),
        (
            500,
            0.99,
            0.985,
            0.7,
            0.99,
        ),  # five pairs differ: counts are so coarse that the closed form errs on the wide side
    ],
)
def test_paired_interval_covers_the_known_difference(n, ours, theirs, tied, most):
    rng = np.random.default_rng(7)
    hits = 0
    for seed in range(1000):
        low, high = stats.paired_interval(*pairs(rng, n, ours, theirs, tied), seed=seed, draws=400)
        hits += low <= ours - theirs <= high
    assert 0.93 <= hits / 1000 <= most  # 95 % nominal; the standard error of 1,000 draws is 0.7 points


def test_paired_interval_calls_equal_systems_different_at_most_five_percent():
    rng = np.random.default_rng(3)
    called = 0
    for seed in range(600):
        low, high = stats.paired_interval(*pairs(rng, 300, 0.9, 0.9, 0.8), seed=seed, draws=400)
        called += not low <= 0 <= high
    assert called / 600 <= 0.05 + 2 * 0.009  # two standard errors of a 5 % rate over 600 draws


def test_ratio_interval_covers_the_known_ratio():
    rng = np.random.default_rng(5)
    hits = 0
    for seed in range(500):
        forwards = rng.integers(2, 9, 150)
        tokens = rng.poisson(8.0 * forwards) + 1  # 8 tokens a forward, and 1 over
        low, high = stats.ratio_interval(tokens, forwards, seed=seed, draws=400)
        hits += low <= 8 + 1 / 5 <= high  # mean forwards are 5
    assert 0.91 <= hits / 500 <= 0.98  # standard error 1 point


def test_mean_interval_of_all_right_answers_stays_open():
    low, high = stats.mean_interval([1.0] * 10)
    assert (round(low, 3), high) == (0.722, 1.0)  # Wilson (1927) for 10 of 10
    low, _ = stats.mean_interval([1.0] * 2000)
    assert low == pytest.approx(0.99808, abs=1e-5)


def test_paired_interval_of_identical_answers_stays_open():
    low, high = stats.paired_interval([1.0] * 100, [1.0] * 100)
    # Agresti-Min with no differing pair: half a count each way of 102, so ±1.95996·√1/102
    assert (low, high) == pytest.approx((-1.959964 / 102, 1.959964 / 102), abs=1e-6)


def test_bootstrap_equals_a_plain_loop_over_the_same_draws():
    rng = np.random.default_rng(0)
    ours, theirs = pairs(rng, 80, 0.6, 0.4, 0.2)
    index = np.random.default_rng([4, 80]).integers(0, 80, size=(50, 80), dtype=np.int32)
    means = [sum(ours[i] - theirs[i] for i in draw) / 80 for draw in index]
    expected = np.quantile(means, [0.025, 0.975])
    assert stats.paired_interval(ours, theirs, seed=4, draws=50) == pytest.approx(tuple(expected), abs=1e-12)


def test_intervals_repeat_under_one_seed_and_move_with_it():
    rng = np.random.default_rng(1)
    values = rng.random(200)
    assert stats.mean_interval(values, seed=1) == stats.mean_interval(values, seed=1)
    assert stats.mean_interval(values, seed=1) != stats.mean_interval(values, seed=2)


def test_paired_ratio_interval_sees_a_constant_speedup_through_noisy_prompts():
    rng = np.random.default_rng(2)
    tokens, seconds = rng.integers(5, 90, 30), rng.random(30) + 0.1
    low, high = stats.paired_ratio_interval((tokens, seconds), (tokens, 3 * seconds))
    assert (low, high) == pytest.approx((3.0, 3.0), abs=1e-12)
    assert stats.paired_ratio_interval(([4], [1.0]), ([4], [2.0])) is None
    assert stats.ratio_interval([4], [1.0]) is None


def test_aup_adds_the_flat_start_and_trapezoids_and_drops_broken_points():
    assert stats.aup([(10.0, 0.9)]) == pytest.approx(9.0)
    # flat to (4, 1.0): 4; then to (8, 0.96): 4·0.98; (16, 0.94) lies 6 points below the best and is dropped
    assert stats.aup([(8.0, 0.96), (16.0, 0.94), (4.0, 1.0)]) == pytest.approx(4 + 4 * 0.98)


def test_scores_outside_the_unit_interval_are_refused():
    with pytest.raises(ValueError, match="expected"):
        stats.mean_interval([0.5, 1.5])
    with pytest.raises(ValueError, match="one per prompt"):
        stats.mean_interval([])
    with pytest.raises(ValueError, match="lengths 2 and 3"):
        stats.paired_interval([0, 1], [0, 1, 1])
    with pytest.raises(ValueError, match="above 0"):
        stats.ratio_interval([1, 2], [1, 0])
