"""One row of results.json: every figure, or null with the reason why it was not measured."""

from dataclasses import dataclass

import numpy as np

from fewstep.eval import quality, stats, verdict
from fewstep.eval.quality import Answers
from fewstep.eval.speed import Timing

# In the order in which a row's keys are written.
KEYS = (
    "task task_version system sampler settings n score score_ci agreement agreement_ci agreement_own agreement_own_ci "
    "tpf tpf_ci nfe tokens tokens_per_s tokens_per_s_ci ttft_ms p50_ms p95_ms speed_n implementation is_speed_baseline "
    "acceptance perplexity repetition entropy distinct_n memory_mb cost delta delta_ci speedup speedup_ci "
    "against_undistilled aup positions_per_token repair verdict seeds gates not_measured"
).split()

SPEED = ("tokens_per_s", "tokens_per_s_ci", "ttft_ms", "p50_ms", "p95_ms", "speedup", "speedup_ci")

NEVER = {
    "acceptance": "the sampler reports the tokens it commits, not the two distributions whose overlap this is",
    "perplexity": "measured on free text; this task's answers are checked against a reference instead",
    "memory_mb": "all systems share one process, so no peak belongs to one of them",
    "cost": "no hourly price was given",
}


@dataclass
class Timed:
    """Batch-1 timings of one system on the speed prompts, and those of the faster AR baseline."""

    ours: list[Timing]
    baseline: list[Timing]
    implementation: str
    is_baseline: bool


def build(
    *,
    task: str,
    task_version: int,
    system: str,
    sampler: str,
    settings: dict,
    answers: Answers,
    seed: int,
    teacher: Answers | None,
    no_teacher: str,
    own: Answers | None,
    undistilled: Answers | None,
    timed: Timed | None,
    untimed_reason: str,
    mask_token_id: int | None,
    repair: dict | None = None,
) -> dict:
    """Return one row; `aup` is filled in by `fill_aup` once a sampler's other settings are known.

    Args:
        answers: of this row, all prompts of the task.
        teacher: the greedy teacher's answers to the same prompts; None: not measured, and `no_teacher` says why.
        own: the same weights' AR answers; None: not measured.
        undistilled: the undistilled student's answers under the same sampler and setting.
        timed: batch-1 timings; None: `untimed_reason` says why.
        mask_token_id: the student's mask token, which no answer may hold.
        repair: what `eval.repair` measured of a sampler that rewrites.
    """
    n = len(answers.ids)
    row: dict = dict.fromkeys(KEYS)
    why = dict(NEVER)
    row.update(task=task, task_version=task_version, system=system, sampler=sampler, settings=settings, n=n)
    row.update(seeds=[seed], is_speed_baseline=bool(timed and timed.is_baseline))
    row["score"] = float(np.mean(answers.scores))
    row["score_ci"] = list(stats.mean_interval(answers.scores, seed=seed))
    row["tokens"] = sum(answers.tokens)
    row["tpf"] = quality.ratio(answers.tokens, answers.nfe)
    row["tpf_ci"] = _listed(stats.ratio_interval(answers.tokens, answers.nfe, seed=seed))
    row["nfe"] = sum(answers.nfe) / n
    row["positions_per_token"] = sum(answers.positions) / row["tokens"]
    row.update(quality.text_statistics(answers))
    if row["repetition"] is None:
        why["repetition"] = f"no answer has {quality.NGRAM} tokens"
    if row["entropy"] is None:
        why["entropy"] = "every answer is empty"

    if teacher is None:
        for key in ("agreement", "agreement_ci", "delta", "delta_ci"):
            why[key] = f"the teacher: {no_teacher}"
    else:
        same = quality.agreement(answers, teacher)
        row["agreement"], row["agreement_ci"] = float(np.mean(same)), list(stats.mean_interval(same, seed=seed))
        row["delta"] = float(np.mean(answers.scores) - np.mean(teacher.scores))
        row["delta_ci"] = list(stats.paired_interval(answers.scores, teacher.scores, seed=seed))
    if own is None:
        reason = (
            "the teacher's own AR decoding is this row"
            if system == "teacher"
            else f"the {system} student's own AR decoding was not run"
        )
        why["agreement_own"] = why["agreement_own_ci"] = reason
    else:
        same = quality.agreement(answers, own)
        row["agreement_own"], row["agreement_own_ci"] = (
            float(np.mean(same)),
            list(stats.mean_interval(same, seed=seed)),
        )
    if undistilled is None:
        why["against_undistilled"] = (
            "the undistilled student was not measured under this setting"
            if system == "student" and sampler != "ar"
            else "compared only for the student's few-step settings"
        )
    else:
        delta = float(np.mean(answers.scores) - np.mean(undistilled.scores))
        ci = stats.paired_interval(answers.scores, undistilled.scores, seed=seed)
        gained = (
            quality.ratio(answers.tokens, answers.nfe) / quality.ratio(undistilled.tokens, undistilled.nfe)
            if sum(undistilled.nfe)
            else None
        )
        row["against_undistilled"] = {
            "delta": delta,
            "delta_ci": list(ci),
            "tpf_ratio": gained,
            "verdict": verdict.quality(delta, ci, "the undistilled student at this setting"),
        }

    if timed is None:
        for key in (*SPEED, "speed_n", "implementation"):
            why[key] = untimed_reason
    else:
        row.update(speed_figures(timed, seed))
        for key in ("tokens_per_s_ci", "speedup_ci"):
            if row[key] is None:
                why[key] = "one prompt was timed; an interval needs two"
        if row["ttft_ms"] is None:
            why["ttft_ms"] = "this loop returns all tokens at once"
    why["aup"] = "one setting is a point, not a curve"  # until fill_aup sees others

    row["repair"] = repair
    if sampler != "edit":
        why["repair"] = "only the sampler edit rewrites tokens"
    elif system != "student":
        why["repair"] = "measured of the student alone"
    else:
        why["repair"] = "it has no AR decoding" if own is None else "no answer of its own AR decoding is right"
    row["gates"] = {"finished": answers.finish_reason.count("stop") / n}
    if mask_token_id is not None and system != "teacher":
        row["gates"]["mask_free"] = all(mask_token_id not in ids for ids in answers.ids)
    if sampler == "verify" and row["agreement_own"] is not None:
        row["gates"]["equals_own_ar"] = row["agreement_own"] == 1.0
    row["verdict"] = verdict.of_row(row)
    row["not_measured"] = {key: reason for key, reason in why.items() if row[key] is None}
    return row


def speed_figures(timed: Timed, seed: int) -> dict:
    """Return tokens/s, latencies and the speed-up over the faster AR baseline, with paired intervals."""
    tokens, seconds = [t.tokens for t in timed.ours], [t.seconds for t in timed.ours]
    firsts = [t.first_token_s for t in timed.ours]
    theirs = [t.tokens for t in timed.baseline], [t.seconds for t in timed.baseline]
    p50, p95 = np.quantile(seconds, [0.5, 0.95]) * 1000
    rate = quality.ratio(tokens, seconds)
    speedup = rate / quality.ratio(*theirs)
    return {
        "tokens_per_s": rate,
        "tokens_per_s_ci": _listed(stats.ratio_interval(tokens, seconds, seed=seed)),
        "ttft_ms": None if None in firsts else float(np.median(firsts)) * 1000,
        "p50_ms": float(p50),
        "p95_ms": float(p95),
        "speed_n": len(tokens),
        "implementation": timed.implementation,
        "speedup": speedup,
        "speedup_ci": _listed(stats.paired_ratio_interval((tokens, seconds), theirs, seed=seed)),
    }


def fill_aup(rows: list[dict]) -> None:
    """Set `aup` of every row whose (task, system, sampler) was measured at two settings or more; in place."""
    curves: dict[tuple, list[dict]] = {}
    for row in rows:
        if row["sampler"] not in ("ar", "verify"):
            curves.setdefault((row["task"], row["system"], row["sampler"]), []).append(row)
    for curve in curves.values():
        if len(curve) > 1:
            area = stats.aup([(row["tpf"], row["score"]) for row in curve])
            for row in curve:
                row["aup"] = area
                del row["not_measured"]["aup"]


def _listed(interval: tuple[float, float] | None) -> list[float] | None:
    return None if interval is None else list(interval)
