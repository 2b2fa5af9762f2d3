"""Rows, verdicts and effort levels of made-up answers with known differences."""

import pytest
import synthetic
from synthetic import MASK

from fewstep.eval import effort, rows, verdict
from fewstep.eval.assemble import Cell
from fewstep.eval.quality import Answers
from fewstep.eval.speed import Timing


def answers(scores, tokens=4, nfe=2):
    """Return answers whose ids tell right from wrong."""
    n = len(scores)
    ids = [[int(s), *range(10, 10 + tokens - 1)] for s in scores]
    return Answers(
        ids, ["stop"] * n, [nfe] * n, [[0] * tokens] * n, [[]] * n, [8] * n, ["x"] * n, list(map(float, scores))
    )


def build(ours, **given):
    defaults = dict(
        task="t",
        task_version=1,
        system="student",
        sampler="threshold",
        settings={"threshold": 0.9},
        answers=ours,
        seed=3,
        teacher=None,
        no_teacher="not among eval.baselines",
        own=None,
        undistilled=None,
        timed=None,
        untimed_reason="not timed",
        mask_token_id=MASK,
    )
    return rows.build(**(defaults | given))


def test_row_has_known_figures():
    ours, teacher = answers([1] * 90 + [0] * 10), answers([1] * 95 + [0] * 5, nfe=4)
    row = build(ours, teacher=teacher, own=ours)
    assert list(row) == rows.KEYS
    assert (row["n"], row["score"], row["tpf"], row["nfe"], row["tokens"]) == (100, 0.9, 2.0, 2.0, 400)
    assert row["positions_per_token"] == 2.0
    assert row["agreement"] == 0.95
    assert row["agreement_own"] == 1.0
    assert row["delta"] == pytest.approx(-0.05)
    assert row["delta_ci"][0] < -0.05 < row["delta_ci"][1] < 0
    assert row["verdict"].startswith("hurt: −5.0 points")
    assert row["seeds"] == [3]


def test_every_figure_that_is_null_says_why():
    found, _, _, _ = synthetic.results(60)
    for row in [build(answers([1, 0])), *found["rows"]]:
        for key in rows.KEYS:
            if row[key] is None:
                assert row["not_measured"].get(key), f"{row['system']} {row['sampler']}: {key} is null without a reason"
        assert all(row[key] is None for key in row["not_measured"])


def test_speed_up_is_paired_over_the_faster_baseline():
    ours, baseline = [Timing(10, 0.5, 0.1), Timing(30, 1.5, 0.3)], [Timing(10, 2.0, 0.1), Timing(30, 6.0, 0.1)]
    row = build(answers([1, 1]), timed=rows.Timed(ours, baseline, "our decoder", False))
    assert (row["tokens_per_s"], row["speedup"], row["speedup_ci"]) == (20.0, 4.0, [4.0, 4.0])
    assert (row["p50_ms"], row["ttft_ms"]) == (1000.0, pytest.approx(200.0))
    assert "faster: 4.0× [4.0, 4.0] the faster AR baseline's tokens/s" in row["verdict"]


def test_gates_see_a_mask_in_an_answer_and_a_lossy_verify():
    clean, masked = answers([1, 1]), answers([1, 1])
    masked.ids = [[MASK, 1], [2, 3]]
    assert build(clean)["gates"]["mask_free"] is True
    assert build(masked)["gates"]["mask_free"] is False
    row = build(masked, sampler="verify", settings={}, own=clean)
    assert row["gates"]["equals_own_ar"] is False
    assert "NOT lossless: 0.0" in row["verdict"]


def test_against_undistilled_compares_the_same_setting():
    row = build(answers([1] * 50, nfe=1), undistilled=answers([1] * 20 + [0] * 30, nfe=2))
    assert row["against_undistilled"]["delta"] == pytest.approx(0.6)
    assert row["against_undistilled"]["tpf_ratio"] == 2.0
    assert row["against_undistilled"]["verdict"].startswith("helped: +60.0 points")


@pytest.mark.parametrize(
    ("low", "claim"),
    [(-0.004, 1), (-0.0094, 1), (-0.0096, 2), (-0.01, 2), (-0.0139, 2), (-0.049, 5), (-0.051, None), (0.01, 1)],
)
def test_within_is_claimed_only_where_the_printed_bound_allows(low, claim):
    assert verdict.within_points(low) == claim


def test_direction_needs_an_interval_that_excludes_zero():
    assert [verdict.direction(*ci) for ci in [(0.01, 0.02), (-0.2, -0.1), (0.0, 0.1), (-0.1, 0.1)]] == [
        "helped",
        "hurt",
        "no difference shown",
        "no difference shown",
    ]


def test_aup_is_of_curves_and_not_of_points():
    found, _, _, _ = synthetic.results(60)
    by_sampler = {(r["system"], r["sampler"]): r["aup"] for r in found["rows"]}
    assert by_sampler["student", "verify"] is None
    assert by_sampler["student", "threshold"] > by_sampler["undistilled", "threshold"] > 1


def candidate(threshold, scores, nfe):
    return effort.Candidate("threshold", {"threshold": threshold}, {"t": answers(scores, nfe=nfe)})


def test_effort_is_chosen_on_one_half_and_checked_on_the_other():
    teacher = {"t": answers([1] * 200)}
    lucky = [1, 0] * 100  # right wherever the choice looks, wrong elsewhere
    safe = candidate(0.9, [1] * 200, nfe=2)
    levels = effort.calibrate([candidate(0.5, lucky, nfe=1), safe], teacher, 0.01, 0)["levels"]
    assert levels["low"]["settings"] == {"threshold": 0.5}
    assert levels["low"]["tasks"]["t"]["calibration"]["delta"] == 0
    assert levels["low"]["tasks"]["t"]["check"]["delta"] == -1
    assert levels["lossless"] == {"reason": "the sampler verify was not among eval.samplers"}


def test_effort_levels_take_the_fastest_setting_within_their_loss():
    teacher = {"t": answers([1] * 400)}
    one, four = [0, 0, *[1] * 398], [0] * 8 + [1] * 392  # 0.5 and 2 points of the calibration half
    given = [candidate(0.3, four, 1), candidate(0.5, one, 2), candidate(0.9, [1] * 400, 4)]
    levels = effort.calibrate(given, teacher, 0.01, 0)["levels"]
    assert [levels[k]["settings"]["threshold"] for k in ("low", "medium", "high")] == [0.5, 0.5, 0.9]
    levels = effort.calibrate(given[:1], teacher, 0.01, 0)["levels"]
    assert levels["low"]["reason"] == "no setting loses 1 points or less: the best measured loses 2.0"


def test_headline_is_the_fastest_calibrated_setting():
    found, levels, _, _ = synthetic.results(400)
    said = found["verdicts"][0]
    assert said["row"] == {"system": "student", "sampler": "threshold", "settings": {"threshold": 0.9}}
    assert levels["levels"]["low"]["settings"] == {"threshold": 0.9}
    row = next(r for r in found["rows"] if r["settings"] == {"threshold": 0.9} and r["system"] == "student")
    assert f"{row['speedup']:.1f}× [" in said["text"]
    assert "token-identical" in said["remark"]


def test_headline_says_what_is_lost_where_no_setting_keeps_the_allowed_loss():
    # the student's settings are only those that lose more than a point
    found, levels, _, _ = synthetic.results(
        400, cells=lambda c: c.sampler == "ar" or c.settings.get("threshold") in (0.5, 0.7)
    )
    assert "no setting loses" in levels["levels"]["low"]["reason"]
    assert "points" in found["verdicts"][0]["text"] and "hurt" in found["verdicts"][0]["text"]


def test_cells_have_distinct_keys():
    assert Cell("student", "threshold", {"threshold": 0.5}).key != Cell("student", "threshold", {"threshold": 0.7}).key
