"""The lab: its tasks' answers, its splits, what its jobs share, and how its table reads a curve."""

import json
import random
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
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
        import kept
        import run
        import table
        import tasks

        yield {"run": run, "table": table, "tasks": tasks, "kept": kept}
    finally:
        sys.path.remove(LAB)
        for name in ("run", "table", "tasks", "booking", "stories", "kept"):
            sys.modules.pop(name, None)


def solve(name: str, message: str) -> str:
    """Answer a message of a task by other means than the task's own."""
    if name == "bits":
        return str(bin(int(message.split()[1])).count("1"))
    if name == "base":
        number, _, to = message.split()
        return np.base_repr(int(number), int(to))
    words, _, listed = message.partition(": ")
    if name == "sort":
        return " ".join(sorted(listed.split(), key=int, reverse=words == "sort down"))
    return " ".join(reversed(listed.split()))


@pytest.mark.parametrize("name", ["bits", "base", "sort", "reverse"])
def test_every_row_is_right_and_its_working_ends_in_the_reference(lab, name):
    task = lab["tasks"].TASKS[name]
    for row in lab["tasks"].rows(task, "train", 60, seed=3):
        assert row["reference"] == solve(name, row["instruction"])
        assert checkers.score("answer", row["response"], row["reference"]) == 1.0


@pytest.mark.parametrize("name", ["bits", "base", "sort", "reverse", "modes"])
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


@pytest.mark.parametrize("quick", [False, True])
def test_every_system_is_a_recipe_and_a_groups_jobs_share_their_targets(lab, monkeypatch, quick):
    """Every override is a key that exists; jobs that differ in distillation alone share the adapted student too."""
    run = lab["run"]
    monkeypatch.setattr("fewstep.distill.chain.fingerprint_of", lambda *_: "t")
    monkeypatch.setattr("fewstep.distill.chain.prompts_fingerprint", lambda *_: "p")
    monkeypatch.setattr("fewstep.distill.chain._task_fingerprint", lambda *_: "e")
    first, *others = run.jobs(["bits"], list(run.SYSTEMS), quick)
    assert [job.system for job in first] == list(run.SYSTEMS)  # bits is one of the tasks on which everything runs
    assert {job.system for group in others for job in group} == {n for n, (_, w) in run.SYSTEMS.items() if w == run.ALL}
    recipes = {job.system: load_recipe(run.RECIPES / "bits.yaml", job.overrides(quick)) for job in first}
    stages = {name: chain(recipe) for name, recipe in recipes.items()}
    assert len({s["targets"].hash for s in stages.values()}) == 1
    adapted = {name: s["adapt"].hash for name, s in stages.items()}
    for name in stages:
        changes_adapt = any(o.startswith(("adapt.", "student.")) for o in run.SYSTEMS[name][0])
        assert (adapted[name] != adapted["recommended"]) == changes_adapt, name
    assert len({s["eval"].hash for s in stages.values()}) == len({job.name(quick) for job in first}) == len(first)
    steps = {n: r.adapt.max_steps + (r.distill.max_steps if r.distill else 0) for n, r in recipes.items()}
    assert (
        steps["undistilled, longer"] == steps["gated LoRA, rank 64"] == steps["recommended"] == (750 if quick else 1500)
    )


TEACHER = 0.95


def measured(lab, system, sampler, share, tpf, seeds=(0, 1), prompts=400, seed=0):
    """One setting that is right on `share` of what the teacher has right, at a TPF that differs a little by prompt."""
    rng = np.random.default_rng([seed, len(seeds)])
    teacher = (np.random.default_rng(9).random((1, prompts)) < TEACHER).astype(float).repeat(len(seeds), 0)
    nfe = 12.0 / tpf * rng.uniform(0.9, 1.1, (len(seeds), prompts))
    right = teacher * (rng.random((len(seeds), prompts)) < share)
    return lab["table"].Measured(
        system, sampler, {"threshold": tpf}, list(seeds), right, np.full(right.shape, 12.0), nfe
    )


def test_equal_quality_is_the_fastest_setting_within_a_point_chosen_on_the_even_prompts(lab):
    table, teacher = lab["table"], measured(lab, "AR teacher", "ar", 1.0, 1.0)
    good, fast = measured(lab, "x", "threshold", 1.0, 3.0), measured(lab, "x", "threshold", 0.6, 9.0)
    assert table.choose([fast, good], teacher) is good
    assert table.choose([fast], teacher) is None
    entry = table.compare([fast, good], teacher, {})
    assert entry["n"] == 200 and entry["tpf"] == pytest.approx(3.0, rel=0.05) and entry["delta"] == 0.0
    assert entry["tpf_ci"][0] < entry["tpf"] < entry["tpf_ci"][1]
    # wrong on odd prompts alone: it is chosen, and its loss is seen where the choice did not look
    good.score[:, 1::2] = 0.0
    entry = table.compare([fast, good], teacher, {})
    assert entry["settings"] == {"threshold": 3.0} and entry["delta"] < -0.9
    nothing = table.compare([fast], teacher, {"undistilled": [good]})
    assert (
        nothing["tpf"] == 1.0
        and nothing["sampler"] is None
        and nothing["to_undistilled"] == pytest.approx(1 / 3, rel=0.05)
    )


def test_systems_are_compared_on_the_seeds_and_prompts_that_both_have(lab):
    table, teacher = lab["table"], measured(lab, "AR teacher", "ar", 1.0, 1.0, (0, 1, 2))
    undistilled = [measured(lab, "undistilled", "verify", 1.0, 2.0, (0, 1, 2))]
    undistilled[0].nfe[1:] = 12.0  # seeds 1 and 2 decode one token a forward
    once = [measured(lab, "once", "verify", 1.0, 4.0, (0,), prompts=100)]
    entry = table.compare(once, teacher, {"undistilled": undistilled})
    assert entry["seeds"] == [0] and entry["to_undistilled"] == pytest.approx(2.0, rel=0.05)
    low, high = entry["to_undistilled_ci"]
    assert 1.9 < low < entry["to_undistilled"] < high < 2.1
    same = table.compare([undistilled[0].cut([0], slice(0, 100))], teacher, {"undistilled": undistilled})
    assert same["to_undistilled_ci"] == [1.0, 1.0]  # the same draws on both sides
    other = [measured(lab, "other", "verify", 1.0, 4.0, (0, 1))]
    assert "to_once" not in table.compare(other, teacher, {"once": once})  # it has neither the seeds nor the prompts


def test_the_table_names_what_was_chosen_and_what_is_missing(lab):
    table = lab["table"]
    teacher, mine = measured(lab, "AR teacher", "ar", 1.0, 1.0), measured(lab, "recommended", "threshold", 1.0, 3.0)
    rows = [table.row("bits", m, teacher) for m in (teacher, mine)]
    summary = [{"task": "bits", "system": "recommended", **table.compare([mine], teacher, {})}]
    text = table.markdown(summary, rows, ["lab-bits-x"])
    assert (
        "| recommended | 2 | threshold 3 | 3.0 [" in text
        and "+0.0 [+0.0, +0.0]" in text
        and "Not run yet: 1 jobs." in text
    )


def test_the_bootstrap_draws_seeds_and_prompts(lab):
    boot = lab["table"].Bootstrap(3, 500, draws=2000)
    by_seed = np.repeat(np.array([[0.0], [0.5], [1.0]]), 500, 1)
    spread = boot.means(by_seed)
    assert spread.mean() == pytest.approx(0.5, abs=0.03) and spread.std() == pytest.approx(0.408 / 3**0.5, rel=0.1)
    by_prompt = np.repeat(np.random.default_rng(1).integers(0, 2, (1, 500)).astype(float), 3, 0)
    assert boot.means(by_prompt).std() == pytest.approx(0.5 / 500**0.5, rel=0.1)


def record(lab, job, score, tokens, task_mark, teacher="t"):
    """Write what a job measured: the student's verify and AR streams, and of the recommended recipe the baselines too."""
    kept, count = lab["kept"], 40 if "all" in task_mark else 20
    systems = [("student", "verify", tokens), ("student", "ar", 1)]
    if job.system == "recommended":
        systems += [("teacher", "ar", 1), ("undistilled", "verify", 2)]
    rows = [
        {"system": system, "sampler": sampler, "settings": "{}", "score": score, "tokens": 12, "nfe": 12 // each}
        for system, sampler, each in systems
        for _ in range(count)
    ]
    facts = {
        "key": kept.key(job.recipe(False)), "inputs": {"targets.teacher": teacher, "targets.prompts": "p", "eval.tasks.0": task_mark},
        "date": "2026-12-01", "commit": "c", "hardware": {"cpu": "x"},
    }  # fmt: skip
    path = job.record(False, None)
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(rows, schema=kept.SCHEMA).replace_schema_metadata({kept.FACTS: json.dumps(facts)})
    pq.write_table(table, path)


def test_the_table_is_made_of_records_of_the_same_teacher_whatever_part_of_the_task_they_used(
    lab, tmp_path, monkeypatch
):
    monkeypatch.setattr(lab["run"], "RESULTS", tmp_path)
    whole, part, other, stale = (
        next(job for group in lab["run"].jobs(["bits"], [system], False) for job in group)
        for system in ("recommended", "ce alone", "ce + kd", "block 4")
    )
    record(lab, whole, 1.0, 6, "all 2000")
    record(lab, part, 1.0, 4, "the first 1000")
    record(lab, other, 1.0, 4, "the first 1000", teacher="another")
    record(lab, stale, 1.0, 4, "the first 1000")
    changed = next(job for group in lab["run"].jobs(["bits"], ["block 8"], False) for job in group)
    record(lab, changed, 1.0, 4, "another 1000")
    monkeypatch.setitem(lab["run"].SYSTEMS, "block 4", (["student.block_size=5"], lab["run"].SOME))
    systems, missing, facts = lab["table"].read("bits", tmp_path, False)
    assert set(systems) == {"AR teacher", "undistilled", "recommended", "ce alone"} and len(facts) == 2
    assert whole.name(False) not in missing and {other.name(False), stale.name(False), changed.name(False)} <= set(
        missing
    )
    summary = {row["system"]: row for row in lab["table"].of_task("bits", tmp_path, False)[1]}
    assert summary["recommended"]["tpf"] == 6.0 and summary["recommended"]["to_undistilled"] == 3.0
    assert summary["ce alone"]["tpf"] == 4.0 and summary["ce alone"]["to_recommended"] == pytest.approx(4 / 6)


def test_a_job_leaves_a_record_and_is_not_run_again_for_the_same_teacher(lab, tmp_path, monkeypatch):
    kept, job = lab["kept"], lab["run"].Job("bits", "recommended", 0)
    for name in ("fingerprint_of", "prompts_fingerprint", "_task_fingerprint"):
        monkeypatch.setattr(f"fewstep.distill.chain.{name}", lambda *_, name=name: name)
    recipe = job.recipe(False)
    folder = tmp_path / chain(recipe)["eval"].folder
    folder.mkdir()
    row = {"system": "student", "sampler": "ar", "settings": "{}", "ids": [5, 6], "score": 1.0, "nfe": 2}
    pq.write_table(pa.Table.from_pylist([row]), folder / "samples.parquet")
    monkeypatch.setattr(kept.StageFolder, "manifest", lambda self: {"commit": "c", "hardware": {"cpu": "x"}})
    kept.keep(recipe, tmp_path, tmp_path / "r.parquet")
    facts, rows = kept.read(recipe, tmp_path / "r.parquet")
    assert rows == [{"system": "student", "sampler": "ar", "settings": "{}", "score": 1.0, "tokens": 2, "nfe": 2}]
    assert facts["inputs"] == kept.inputs(recipe) and facts["commit"] == "c"
    assert kept.read(lab["run"].Job("bits", "recommended", 1).recipe(False), tmp_path / "r.parquet") is None
    assert kept.read(recipe, tmp_path / "none.parquet") is None
