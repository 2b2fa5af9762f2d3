"""The chain of stages: what changes a hash, what is skipped, resumed, refused, sealed."""

import json
import os
import re
import shutil
import signal
import threading
import time
from datetime import UTC, datetime

import pytest

from fewstep.distill import pipeline
from fewstep.distill.chain import chain
from fewstep.distill.config import TRAINING_VERSION
from fewstep.distill.pipeline import run
from fewstep.distill.recipe import load_recipe
from fewstep.errors import RunFailed, Stopped, UserError
from fewstep.runstore import StageFolder

from .conftest import write_recipe

ALL = ["targets", "adapt", "distill", "eval", "report"]


def hashes(file, *overrides) -> dict[str, str]:
    return {name: stage.hash for name, stage in chain(load_recipe(file, overrides)).items()}


def test_chain_is_known_before_anything_exists(recipe_file, tmp_path):
    stages = chain(load_recipe(recipe_file))
    assert list(stages) == ALL
    assert all(re.fullmatch(rf"{name}-[0-9a-f]{{8}}", stage.folder) for name, stage in stages.items())
    assert list((tmp_path / "cwd").iterdir()) == []


@pytest.mark.parametrize(
    "override",
    [
        "track.wandb.project=p",
        "track.wandb.mode=online",
        "engine.name=plain",
        "engine.zero_stage=3",
        "adapt.logging_steps=1",
        "adapt.eval_steps=1",
        "adapt.save_steps=1",
        "distill.save_total_limit=5",
        "publish.private=false",
    ],
)
def test_hash_ignores_what_does_not_change_results(recipe_file, override):
    assert hashes(recipe_file, override) == hashes(recipe_file)


@pytest.mark.parametrize(
    ("override", "first"),
    [
        ("targets.temperature=1.0", "targets"),
        ("targets.keep=json", "targets"),
        ("prompts.limit=2", "targets"),
        ("prompts.held_out=0.5", "targets"),
        ("teacher.dtype=bfloat16", "targets"),
        ("seed=1", "targets"),
        ("engine.threads=1", "targets"),
        ("engine.precision=bf16", "adapt"),
        ("student.block_size=4", "adapt"),
        ("adapt.learning_rate=2e-4", "adapt"),
        ("adapt.objectives.ce=0.5", "adapt"),
        ("adapt.lora={rank: 2}", "adapt"),
        ("distill.suffix=0.25", "distill"),
        ("eval.batch_size=2", "eval"),
        ("eval.tasks.0.limit=2", "eval"),
        ("eval.samplers=[{name: fixed, steps: 2}]", "eval"),
        ("name=other", "report"),
    ],
)
def test_hash_of_a_stage_and_of_all_after_it_follows_what_it_uses(recipe_file, override, first):
    if override.startswith("adapt.objectives"):
        recipe_file.write_text(recipe_file.read_text().replace("max_steps: 10", "max_steps: 10, objectives: {ce: 1.0}"))
    before, after = hashes(recipe_file), hashes(recipe_file, override)
    changed = [name for name in ALL if before[name] != after[name]]
    assert changed == ALL[ALL.index(first) :]


def test_hash_follows_contents_of_files_and_not_where_they_are(recipe_file, tmp_path):
    moved = write_recipe(tmp_path / "elsewhere" / "deep")
    assert hashes(moved) == hashes(recipe_file)
    before = hashes(recipe_file)
    with open(recipe_file.parent / "eval.jsonl", "a") as file:
        file.write('\n{"instruction": "one more"}')
    assert [n for n in ALL if hashes(recipe_file)[n] != before[n]] == ["eval", "report"]
    with open(recipe_file.parent / "teacher" / "config.json", "a") as file:
        file.write(" ")
    assert not set(hashes(recipe_file).values()) & set(before.values())


def test_run_seals_every_stage_and_a_second_run_does_nothing(recipe_file, tmp_path, fake_stages):
    recipe, runs, said = load_recipe(recipe_file), tmp_path / "runs", []
    folders = run(recipe, runs, say=said.append)
    assert fake_stages == ALL == list(folders)
    index = json.loads((runs / "tiny.json").read_text())
    assert index == {"recipe": "tiny", "stages": {name: path.name for name, path in folders.items()}}
    run(recipe, runs, say=said.append)
    assert fake_stages == ALL
    assert said[-1] == "nothing to do: every stage of tiny is complete"
    assert [line.split()[1:] for line in said[-6:-1]] == [["complete,", "skipped"]] * 5
    assert not list(runs.glob("*.lock"))


def test_manifest_holds_what_is_needed_to_repeat_the_stage(recipe_file, tmp_path, fake_stages):
    recipe = load_recipe(recipe_file, ["seed=3"])
    folders = run(recipe, tmp_path / "runs", say=lambda line: None)
    stages = chain(recipe)
    manifest = StageFolder(folders["adapt"]).manifest()
    assert (
        manifest["hash"] == stages["adapt"].hash
        and manifest["stage"] == "adapt"
        and manifest["version"] == TRAINING_VERSION
    )
    assert manifest["upstream"] == {"targets": stages["targets"].hash}
    assert manifest["config"]["adapt"]["learning_rate"] == 1e-4
    assert manifest["seed"] == 3 and manifest["status"] == "complete" and manifest["summary"] == {"stage": "adapt"}
    assert set(manifest["outputs"]) == {"out.txt", "sessions.jsonl"}
    assert set(manifest["hardware"]) == {"cpu", "cores", "memory_gb", "gpus", "threads"}
    assert manifest["versions"]["fewstep"] and "commit" in manifest and manifest["seconds"] >= 0
    assert str(tmp_path) not in json.dumps(manifest)  # another machine's paths help nobody
    assert set(StageFolder(folders["report"]).manifest()["upstream"]) == {"targets", "adapt", "distill", "eval"}
    assert StageFolder(folders["targets"]).manifest()["inputs"].keys() == {"teacher", "prompts"}


def test_recipes_that_differ_late_share_their_early_folders(recipe_file, tmp_path, fake_stages):
    run(load_recipe(recipe_file), tmp_path / "runs", say=lambda line: None)
    fake_stages.clear()
    run(load_recipe(recipe_file, ["distill.suffix=0.25", "name=b"]), tmp_path / "runs", say=lambda line: None)
    assert fake_stages == ["distill", "eval", "report"]


def test_a_failed_stage_is_not_sealed_and_resumes_in_its_folder(recipe_file, tmp_path, fake_stages, monkeypatch):
    recipe, runs, said = load_recipe(recipe_file), tmp_path / "runs", []
    works = pipeline.RUNNERS["adapt"]

    def fails(recipe, folders):
        (folders["adapt"] / "half").write_text("x")
        raise RunFailed("loss is NaN at step 3")

    monkeypatch.setitem(pipeline.RUNNERS, "adapt", fails)
    with pytest.raises(RunFailed, match="NaN"):
        run(recipe, runs, say=said.append)
    monkeypatch.setitem(pipeline.RUNNERS, "adapt", works)
    folders = run(recipe, runs, say=said.append)
    assert fake_stages == ALL  # targets ran once
    assert any(line.startswith("adapt-") and line.endswith(" resumes") for line in said)
    assert "half" in StageFolder(folders["adapt"]).manifest()["outputs"]
    sessions = [json.loads(line) for line in (folders["adapt"] / "sessions.jsonl").read_text().splitlines()]
    assert len(sessions) == 2


def test_a_resumed_stage_counts_the_time_and_the_commits_of_all_its_sessions(recipe_file, tmp_path, fake_stages):
    recipe, runs = load_recipe(recipe_file), tmp_path / "runs"
    run(recipe, runs, only="targets", say=lambda line: None)
    adapt = runs / chain(recipe)["adapt"].folder
    adapt.mkdir()
    now = time.time()
    began = datetime.fromtimestamp(now - 3600, UTC).isoformat(timespec="seconds")
    killed = {"started": began, "commit": "a" * 40, "seconds_before": 100.0}
    (adapt / "sessions.jsonl").write_text(json.dumps(killed) + "\n")
    os.utime(adapt / "sessions.jsonl", (now - 3500, now - 3500))
    (adapt / "step").write_text("x")
    os.utime(adapt / "step", (now - 3000, now - 3000))  # its last sign of life, 600 s after it began
    run(recipe, runs, only="adapt", say=lambda line: None)
    manifest = StageFolder(adapt).manifest()
    assert 699 <= manifest["seconds"] <= 705
    assert manifest["commits"][0] == "a" * 40 and len(manifest["commits"]) == 2
    assert manifest["started"] == began


def test_stage_alone_needs_the_stages_before_it(recipe_file, tmp_path, fake_stages):
    recipe, runs = load_recipe(recipe_file), tmp_path / "runs"
    with pytest.raises(UserError, match=r"adapt reads targets-.*not complete; run `fewstep targets`"):
        run(recipe, runs, only="adapt")
    assert not runs.exists()
    run(recipe, runs, only="targets", say=lambda line: None)
    run(recipe, runs, only="adapt", say=lambda line: None)
    assert fake_stages == ["targets", "adapt"]


def test_report_alone_is_written_anew(recipe_file, tmp_path, fake_stages):
    recipe, runs = load_recipe(recipe_file), tmp_path / "runs"
    run(recipe, runs, say=lambda line: None)
    folders = run(recipe, runs, only="report", say=lambda line: None)
    assert fake_stages == [*ALL, "report"]
    assert StageFolder(folders["report"]).is_complete()
    run(recipe, runs, only="eval", say=lambda line: None)
    assert fake_stages == [*ALL, "report"]


def test_stages_that_the_recipe_leaves_out_are_refused_by_name(recipe_file, tmp_path, fake_stages):
    with pytest.raises(UserError, match="publish.repo is null, so there is no stage publish"):
        run(load_recipe(recipe_file), tmp_path / "runs", only="publish")
    with pytest.raises(UserError, match="distill is null"):
        run(load_recipe(recipe_file, ["distill=null"]), tmp_path / "runs", only="distill")


def test_students_without_distillation_is_the_adapted_one(tmp_path):
    folders = {"targets": tmp_path / "t", "adapt": tmp_path / "a"}
    assert pipeline.students(folders) == {"student": tmp_path / "a" / "student"}
    folders["distill"] = tmp_path / "d"
    assert pipeline.students(folders) == {
        "student": tmp_path / "d" / "student",
        "undistilled": tmp_path / "a" / "student",
    }


def test_publish_runs_only_with_a_repository(recipe_file, tmp_path, fake_stages):
    run(load_recipe(recipe_file, ["publish.repo=me/student"]), tmp_path / "runs", say=lambda line: None)
    assert fake_stages == [*ALL, "publish"]


@pytest.mark.parametrize("stage", ["targets", "adapt"])
def test_a_signal_stops_the_stage_without_a_seal(recipe_file, tmp_path, fake_stages, monkeypatch, stage):
    from fewstep import signals

    old = {s: signal.getsignal(s) for s in signals.SIGNALS}
    signals.install()
    went_on = []

    def stopped(recipe, folders):
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.01)
        went_on.append(signals.stop_requested())
        return {}

    monkeypatch.setitem(pipeline.RUNNERS, stage, stopped)
    try:
        with pytest.raises(Stopped) as caught:
            run(load_recipe(recipe_file), tmp_path / "runs", say=lambda line: None)
    finally:
        signals.install()
        for signum, handler in old.items():
            signal.signal(signum, handler)
    assert caught.value.signum == signal.SIGUSR1 and "the same command goes on" in str(caught.value)
    # Training goes on to where it can save; the others leave at once.
    assert went_on == ([signal.SIGUSR1] if stage == "adapt" else [])
    assert not list((tmp_path / "runs").glob(f"{stage}-*/manifest.json"))


def test_a_stop_that_a_library_turned_into_an_error_is_still_a_stop(recipe_file, tmp_path, fake_stages, monkeypatch):
    from fewstep import signals

    def swallowed(recipe, folders):
        signals._request(signal.SIGTERM, None) if stage_is_lenient else None
        raise RuntimeError("loading failed")

    stage_is_lenient = True
    monkeypatch.setitem(pipeline.RUNNERS, "adapt", swallowed)
    try:
        with pytest.raises(Stopped):
            run(load_recipe(recipe_file), tmp_path / "runs", say=lambda line: None)
    finally:
        signals._requested = None
    stage_is_lenient = False
    with pytest.raises(RuntimeError, match="loading failed"):
        run(load_recipe(recipe_file), tmp_path / "runs", say=lambda line: None)


def test_another_commit_is_printed_when_a_stage_is_skipped(recipe_file, tmp_path, fake_stages, monkeypatch):
    said = []
    monkeypatch.setattr(pipeline.machine, "commit", lambda: "a" * 40)
    run(load_recipe(recipe_file), tmp_path / "runs", say=said.append)
    monkeypatch.setattr(pipeline.machine, "commit", lambda: "b" * 40 + "-dirty")
    run(load_recipe(recipe_file), tmp_path / "runs", say=said.append)
    assert said[-2].endswith("complete, skipped (made at commit aaaaaaaa, this is bbbbbbbb-dirty)")


def test_a_sealed_folder_that_was_changed_is_refused(recipe_file, tmp_path, fake_stages):
    folders = run(load_recipe(recipe_file), tmp_path / "runs", say=lambda line: None)
    (folders["targets"] / "out.txt").write_text("other length")
    with pytest.raises(RunFailed, match="changed after targets-"):
        run(load_recipe(recipe_file), tmp_path / "runs", say=lambda line: None)
    shutil.rmtree(folders["targets"])
    run(load_recipe(recipe_file), tmp_path / "runs", say=lambda line: None)
    assert fake_stages == [*ALL, "targets"]


def test_a_second_runner_is_refused_while_the_first_works(recipe_file, tmp_path, fake_stages):
    recipe, runs = load_recipe(recipe_file), tmp_path / "runs"
    with (
        StageFolder(runs / chain(recipe)["targets"].folder).lock(),
        pytest.raises(RunFailed, match=f"already running .pid {os.getpid()}"),
    ):
        run(recipe, runs, say=lambda line: None)
    assert fake_stages == []


def test_what_is_no_number_is_sealed_as_null(recipe_file, tmp_path, fake_stages, monkeypatch):
    monkeypatch.setitem(
        pipeline.RUNNERS, "targets", lambda recipe, folders: {"loss": float("nan"), "all": [1.0, float("inf")]}
    )
    folders = run(load_recipe(recipe_file), tmp_path / "runs", only="targets", say=lambda line: None)
    assert StageFolder(folders["targets"]).manifest()["summary"] == {"loss": None, "all": [1.0, None]}


def test_other_ranks_train_but_leave_folder_and_seal_to_the_first(recipe_file, tmp_path, fake_stages, monkeypatch):
    recipe, runs = load_recipe(recipe_file), tmp_path / "runs"
    folders = {name: runs / stage.folder for name, stage in chain(recipe).items()}
    monkeypatch.setitem(pipeline.RUNNERS, "adapt", lambda recipe, folders: fake_stages.append("adapt") or {})
    monkeypatch.setenv("RANK", "1")

    def first_rank():
        for name in ALL:
            time.sleep(0.05)
            folders[name].mkdir(parents=True)
            StageFolder(folders[name]).seal({"commit": None})

    monkeypatch.setitem(pipeline.RUNNERS, "distill", lambda recipe, folders: fake_stages.append("distill") or {})
    thread = threading.Thread(target=first_rank)
    thread.start()
    run(recipe, runs, say=lambda line: None)
    thread.join()
    assert fake_stages == ["adapt", "distill"]
    assert not (runs / "tiny.json").exists()
