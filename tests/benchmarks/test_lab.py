"""The lab: its tasks' answers, its splits, what its jobs share, and how its table reads a curve."""

import random
import sys
from pathlib import Path

import numpy as np
import pytest

from fewstep import checkers
from fewstep.distill.chain import chain
from fewstep.distill.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[2]
LAB = str(ROOT / "benchmarks/lab")


@pytest.fixture(scope="module")
def lab():
    """The lab's modules, imported as its scripts import each other."""
    pytest.importorskip("reasoning_gym", reason="the extra `lab` is not installed (one of its packages is compiled)")
    sys.path.insert(0, LAB)
    try:
        import run
        import table
        import tasks

        yield {"run": run, "table": table, "tasks": tasks}
    finally:
        sys.path.remove(LAB)
        for name in ("run", "table", "tasks", "booking"):
            sys.modules.pop(name, None)


def solve(name: str, message: str) -> str:
    """Answer a message of a task by other means than the task's own."""
    if name == "bits":
        return str(bin(int(message.split()[1])).count("1"))
    if name == "base":
        number, _, to = message.split()
        return np.base_repr(int(number), int(to))
    words, _, numbers = message.partition(": ")
    listed = numbers.split()
    if name == "sort":
        return " ".join(sorted(listed, key=int, reverse=words == "sort down"))
    verb, side, limit = words.split()
    kept = [
        n for n in listed if ((int(n) > int(limit)) if side == "above" else int(n) < int(limit)) == (verb == "keep")
    ]
    return " ".join(kept) or "none"


@pytest.mark.parametrize("name", ["bits", "base", "sort", "filter"])
def test_every_row_is_right_and_its_working_ends_in_the_reference(lab, name):
    task = lab["tasks"].TASKS[name]
    for row in lab["tasks"].rows(task, "train", 60, seed=3):
        assert row["reference"] == solve(name, row["instruction"])
        assert checkers.score("answer", row["response"], row["reference"]) == 1.0


@pytest.mark.parametrize("name", ["bits", "base", "sort", "filter", "modes"])
def test_no_message_is_in_both_splits_and_a_seed_repeats(lab, name):
    task, rows = lab["tasks"].TASKS[name], lab["tasks"].rows
    train, evaluation = ({row["instruction"] for row in rows(task, split, 200, 1)} for split in ("train", "eval"))
    assert len(train) == len(evaluation) == 200 and not train & evaluation
    assert rows(task, "eval", 20, 1) == rows(task, "eval", 20, 1) != rows(task, "eval", 20, 2)


def test_a_task_without_so_many_messages_says_so(lab):
    task = lab["tasks"].Task("few", lab["tasks"]._split(lambda rng: (f"m{rng.randrange(8)}", "=1")), 4)
    with pytest.raises(ValueError, match="few: . distinct messages found where 50"):
        lab["tasks"].rows(task, "train", 50, 0)


def test_both_modes_are_equally_likely_and_nothing_else_is(lab):
    tasks = lab["tasks"]
    drawn = [tasks.modes(random.Random(i))[1] for i in range(2000)]
    assert set(drawn) == set(tasks.MODES) and abs(drawn.count(tasks.MODES[0]) / 2000 - 0.5) < 0.05


def test_every_system_is_a_recipe_and_a_groups_jobs_share_their_targets(lab, monkeypatch):
    """Every override is a key that exists; jobs that differ in distillation alone share the adapted student too."""
    run = lab["run"]
    monkeypatch.setattr("fewstep.distill.chain.teacher_fingerprint", lambda *_: "t")
    monkeypatch.setattr("fewstep.distill.chain.prompts_fingerprint", lambda *_: "p")
    monkeypatch.setattr("fewstep.distill.chain._task_fingerprint", lambda *_: "e")
    for group in run.jobs(["base"], list(run.SYSTEMS), quick=False):
        stages = {
            job.system: chain(load_recipe(run.RECIPES / f"{job.task}.yaml", job.overrides(False))) for job in group
        }
        assert len({s["targets"].hash for s in stages.values()}) == 1
        adapted = {name: s["adapt"].hash for name, s in stages.items()}
        for name in stages:
            changes_adapt = any(o.startswith(("adapt.", "student.")) for o in run.SYSTEMS[name][0])
            assert (adapted[name] != adapted["recommended"]) == changes_adapt, name
        assert len({s["eval"].hash for s in stages.values()}) == len(group)
    assert len({job.name(False) for job in group}) == len(group)


def test_the_curve_is_read_in_a_straight_line_between_its_points(lab):
    tpf_at = lab["table"].tpf_at
    score, tpf = np.array([0.5, 0.9, 0.8]), np.array([8.0, 2.0, 4.0])
    assert tpf_at(score, tpf, 0.9) == 2.0
    assert tpf_at(score, tpf, 0.85) == pytest.approx(3.0)
    assert tpf_at(score, tpf, 0.65) == pytest.approx(6.0)
    assert tpf_at(score, tpf, 0.2) == 8.0
    assert tpf_at(score, tpf, 0.95) == 1.0


def test_equal_quality_takes_the_better_of_verify_and_the_thresholds(lab):
    table = lab["table"]
    seeds, prompts = 2, 400
    rng = np.random.default_rng(0)
    teacher = (rng.random((1, prompts)) < 0.95).astype(float).repeat(seeds, 0)

    def measured(sampler, share, tpf):
        kept = teacher * (rng.random((seeds, prompts)) < share)
        return table.Measured(
            "student", sampler, {}, kept, np.full((seeds, prompts), 12.0), np.full((seeds, prompts), 12.0 / tpf)
        )

    boot = table.Bootstrap(seeds, prompts)
    curve = [measured("threshold", 0.5, 8.0), measured("threshold", 1.0, 2.0)]
    point, draws = table.at_equal_quality(curve, teacher, boot)
    assert 2.0 <= point < 2.5 and boot.interval(draws)[0] <= point <= boot.interval(draws)[1]
    point, _ = table.at_equal_quality([*curve, measured("verify", 1.0, 6.0)], teacher, boot)
    assert point == pytest.approx(6.0)
    point, _ = table.at_equal_quality([*curve, measured("verify", 0.7, 6.0)], teacher, boot)
    assert point < 2.5


def test_the_bootstrap_draws_seeds_and_prompts(lab):
    boot = lab["table"].Bootstrap(3, 500, draws=2000)
    by_seed = np.repeat(np.array([[0.0], [0.5], [1.0]]), 500, 1)
    spread = boot.means(by_seed)
    assert spread.mean() == pytest.approx(0.5, abs=0.03) and spread.std() == pytest.approx(0.408 / 3**0.5, rel=0.1)
    by_prompt = np.repeat(np.random.default_rng(1).integers(0, 2, (1, 500)).astype(float), 3, 0)
    assert boot.means(by_prompt).std() == pytest.approx(0.5 / 500**0.5, rel=0.1)
