"""Choose effort levels from measured settings, on one half of the prompts, and check them on the other.

A setting picked because it looked best looks better than it is; the prompts that did not take part
in the choice say by how much.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fewstep.eval import stats, verdict
from fewstep.eval.quality import Answers, ratio

SHARES = {"low": 1.0, "medium": 0.5, "high": 0.0}  # share of max_loss that a level may lose


@dataclass(frozen=True)
class Candidate:
    """One student setting, with its answers to each task in the order of its prompts."""

    sampler: str
    settings: dict
    answers: Mapping[str, Answers]  # task → answers


def calibrate(
    candidates: Sequence[Candidate], reference: Mapping[str, Answers] | None, max_loss: float, seed: int
) -> dict:
    """Return `effort.json`: for each level the fastest setting that loses no more than it may.

    `low` may lose `max_loss` of score on each task, `medium` half of it, `high` nothing; all in the
    mean over the calibration half (prompts at even places), where fastest means most tokens a
    forward. `lossless` is the sampler `verify`, whose answers are the student's own AR ones.

    Args:
        candidates: the student's settings, AR excluded.
        reference: the greedy teacher's answers by task; None: no level can be calibrated.
    """
    levels: dict[str, dict] = {}
    for level, share in SHARES.items():
        allowed = share * max_loss
        if reference is None:
            levels[level] = {"reason": "the teacher was not measured: there is nothing to lose against"}
            continue
        losses = {id(c): _worst_loss(c, reference, half=0) for c in candidates}
        kept = [c for c in candidates if losses[id(c)] <= allowed + 1e-12]
        if not kept:
            least = min(losses.values(), default=None)
            measured = "no setting was measured" if least is None else f"the best measured loses {100 * least:.1f}"
            levels[level] = {"reason": f"no setting loses {100 * allowed:g} points or less: {measured}"}
            continue
        levels[level] = _level(max(kept, key=_calibration_tpf), reference, allowed, seed)
    verify = [c for c in candidates if c.sampler == "verify"]
    levels["lossless"] = (
        _level(max(verify, key=_calibration_tpf), reference, None, seed)
        if verify
        else {"reason": "the sampler verify was not among eval.samplers"}
    )
    return {"schema": 1, "max_loss": max_loss, "levels": levels}


def _halves(answers: Answers, half: int) -> tuple[list[float], list[int], list[int]]:
    """Return scores, tokens and forwards at even (half 0: calibration) or odd places (half 1: check)."""
    return answers.scores[half::2], answers.tokens[half::2], answers.nfe[half::2]


def _worst_loss(candidate: Candidate, reference: Mapping[str, Answers], half: int) -> float:
    losses = []
    for task, answers in candidate.answers.items():
        ours, theirs = _halves(answers, half)[0], _halves(reference[task], half)[0]
        losses.append((sum(theirs) - sum(ours)) / len(ours))
    return max(losses)


def _calibration_tpf(candidate: Candidate) -> float:
    halves = [_halves(answers, 0) for answers in candidate.answers.values()]
    return sum(sum(t) for _, t, _ in halves) / sum(sum(f) for _, _, f in halves)


def _level(candidate: Candidate, reference: Mapping[str, Answers] | None, allowed: float | None, seed: int) -> dict:
    level: dict = {"sampler": candidate.sampler, "settings": candidate.settings, "may_lose": allowed, "tasks": {}}
    for task, answers in candidate.answers.items():
        level["tasks"][task] = {"tpf": ratio(answers.tokens, answers.nfe)}
        if reference is None:
            continue
        for name, half in (("calibration", 0), ("check", 1)):
            ours, theirs = _halves(answers, half)[0], _halves(reference[task], half)[0]
            if not ours:
                continue
            delta, ci = (sum(ours) - sum(theirs)) / len(ours), stats.paired_interval(ours, theirs, seed=seed)
            level["tasks"][task][name] = {
                "n": len(ours),
                "delta": delta,
                "delta_ci": list(ci),
                "verdict": verdict.quality(delta, ci),
            }
    return level
