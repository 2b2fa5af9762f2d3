"""A whole evaluation of tiny random models: what is equal must come out equal, and a killed one resumes."""

import json

import pyarrow.parquet as pq
import pytest
import tiny

from fewstep import chat
from fewstep.errors import Stopped, UserError
from fewstep.eval import assemble, rows, run, speed
from fewstep.eval.config import EvalConfig, SamplerConfig, TaskConfig
from fewstep.eval.speed import Contestant, Timing
from fewstep.students.config import StudentConfig
from fewstep.students.convert import load_causal_lm, make_student, save_student
from fewstep.teachers.config import TargetsConfig, TeacherConfig

# Many ids end an answer, so that random models stop at different lengths.
ENDS = [tiny.EOS, *range(20, 259, 12)]
TIMED = {*rows.SPEED, "verdict", "is_speed_baseline", "implementation"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a folder with a teacher, two students of its family, a task and few-shot turns."""
    folder = tmp_path_factory.mktemp("eval")
    tiny.save_tiny(folder / "teacher", seed=1, eos_ids=ENDS)
    for name, seed in (("student", 1), ("undistilled", 2)):
        tiny.save_tiny(folder / f"base-{name}", seed=seed, eos_ids=ENDS)
        model, tokenizer = load_causal_lm(folder / f"base-{name}")
        make_student(model, tokenizer, StudentConfig(block_size=4), gated=False, seed=0)
        save_student(model, tokenizer, folder / name)
    lines = [
        {"id": str(i), "instruction": "call " * (i % 5) + chr(97 + i), "reference": {"name": chr(97 + i)}}
        for i in range(14)
    ]
    (folder / "task.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "shots.jsonl").write_text(json.dumps({"user": "hello", "assistant": "{}"}) + "\n")
    return folder


def evaluate(place, out, **given):
    out.mkdir(exist_ok=True)
    samplers = [SamplerConfig(name="threshold", threshold=[0.02, 0.5]), SamplerConfig(name="verify")]
    config = EvalConfig(
        tasks=[TaskConfig(name="booking", path=place / "task.jsonl")], samplers=samplers, batch_size=4, speed_prompts=3
    )
    students = {"student": place / "student", "undistilled": place / "undistilled"}
    targets = given.pop("targets", TargetsConfig(max_new_tokens=12))
    teacher = TeacherConfig(model=str(place / "teacher"))
    config = config.model_copy(update=given)
    return run.run(out, config, teacher, place / "targets", targets, students, 5)


@pytest.fixture(scope="module")
def whole(place):
    evaluate(place, place / "whole")
    return place / "whole"


def by_key(folder):
    found = json.loads((folder / "results.json").read_text())["rows"]
    return {(r["system"], r["sampler"], json.dumps(r["settings"])): r for r in found}


def test_run_measures_every_system_under_every_setting(whole):
    found = by_key(whole)
    settings = ['{"threshold": 0.02}', '{"threshold": 0.5}']
    few_step = [("threshold", settings[0]), ("threshold", settings[1]), ("verify", "{}")]
    assert list(found) == [
        ("teacher", "ar", "{}"),
        ("student", "ar", "{}"),
        *(("student", *s) for s in few_step),
        *(("undistilled", *s) for s in few_step),
    ]
    assert all(set(row) == set(rows.KEYS) for row in found.values())
    assert all(row["n"] == 14 for row in found.values())


def test_ar_is_one_token_a_forward_and_verify_is_lossless(whole):
    found = by_key(whole)
    for system in ("teacher", "student"):
        assert found[system, "ar", "{}"]["tpf"] == 1.0
    verify = found["student", "verify", "{}"]
    assert verify["agreement_own"] == 1.0
    assert verify["gates"] == {
        "finished": pytest.approx(verify["gates"]["finished"]),
        "mask_free": True,
        "equals_own_ar": True,
    }


def test_agreement_is_full_for_the_teachers_own_weights_and_not_for_others(whole):
    """The random student is the teacher's weights: its clean stream is the teacher, its drafts are not."""
    found = by_key(whole)
    assert found["student", "ar", "{}"]["agreement"] == 1.0
    assert found["student", "verify", "{}"]["agreement"] == 1.0
    assert found["undistilled", "verify", "{}"]["agreement"] < 0.5
    assert found["student", "threshold", '{"threshold": 0.02}']["agreement"] < 1.0


def test_samples_hold_every_answer_with_the_forward_of_each_token(whole):
    table = pq.read_table(whole / "samples.parquet").to_pylist()
    assert len(table) == 8 * 14
    for row in table:
        assert len(row["ids"]) == len(row["tokens"]) == len(row["steps"])
        assert max(row["steps"]) < row["nfe"]
    found = by_key(whole)
    mine = [r for r in table if (r["system"], r["sampler"]) == ("student", "verify")]
    assert sum(len(r["ids"]) for r in mine) == found["student", "verify", "{}"]["tokens"]
    assert [r["prompt_index"] for r in mine] == list(range(14))


def test_speed_rows_stand_beside_the_faster_baseline(whole):
    results = json.loads((whole / "results.json").read_text())
    timed = [r for r in results["rows"] if r["tokens_per_s"] is not None]
    assert len(timed) == 5
    best = max((r for r in timed if r["sampler"] == "ar"), key=lambda r: r["tokens_per_s"])
    assert [r["is_speed_baseline"] for r in timed].count(True) == 1 and best["is_speed_baseline"]
    assert best["speedup"] == 1.0
    for r in timed:
        assert r["speedup"] == pytest.approx(r["tokens_per_s"] / best["tokens_per_s"])
    undistilled = next(r for r in results["rows"] if r["system"] == "undistilled")
    assert undistilled["not_measured"]["tokens_per_s"] == assemble.UNDISTILLED_SPEED
    assert {w["implementation"] for w in results["speed"]["booking"]["ways"]} >= {
        "plain loop",
        "our decoder",
        "transformers generate",
    }


@pytest.mark.parametrize("calls", [1, 6, 17])
def test_killed_evaluation_resumes_to_the_same_results(place, whole, tmp_path, monkeypatch, calls):
    decode, count = run.decode, 0

    def dying(*args, **kwargs):
        nonlocal count
        count += 1
        if count > calls:
            raise KeyboardInterrupt
        return decode(*args, **kwargs)

    monkeypatch.setattr(run, "decode", dying)
    with pytest.raises(KeyboardInterrupt):
        evaluate(place, tmp_path / "out")
    kept = len(list((tmp_path / "out" / "partial").glob("*.json")))
    assert kept == 1 + calls // 4  # the teacher, and a cell for every four batches
    assert not (tmp_path / "out" / "results.json").exists()

    again = 0

    def counting(*args, **kwargs):
        nonlocal again
        again += 1
        return decode(*args, **kwargs)

    monkeypatch.setattr(run, "decode", counting)
    evaluate(place, tmp_path / "out")
    assert again == 4 * (8 - kept)  # finished cells are not decoded again
    assert not (tmp_path / "out" / "partial").exists()
    undisturbed, resumed = by_key(whole), by_key(tmp_path / "out")
    for key, row in undisturbed.items():
        same = {k: v for k, v in row.items() if k not in TIMED}
        assert {k: v for k, v in resumed[key].items() if k not in TIMED} == same
    assert (tmp_path / "out" / "samples.parquet").read_bytes() == (whole / "samples.parquet").read_bytes()


def test_stop_between_batches_keeps_finished_cells(place, tmp_path, monkeypatch):
    from fewstep import signals

    def stop(where):
        raise Stopped(15, where)

    monkeypatch.setattr(signals, "raise_if_stopped", stop)
    with pytest.raises(Stopped, match="partial/"):
        evaluate(place, tmp_path / "out")


def test_few_shot_turns_are_the_teachers_alone(place, tmp_path):
    targets = TargetsConfig(max_new_tokens=12, few_shot=place / "shots.jsonl")
    evaluate(place, tmp_path / "out", targets=targets)
    found = by_key(tmp_path / "out")
    assert found["student", "ar", "{}"]["agreement"] < 1.0  # the same weights see another prompt
    assert found["student", "ar", "{}"]["agreement_own"] == 1.0
    ways = json.loads((tmp_path / "out" / "results.json").read_text())["speed"]["booking"]["ways"]
    assert "plain loop, prefix cached" in {w["implementation"] for w in ways if w["system"] == "teacher"}
    assert "plain loop" in {w["implementation"] for w in ways if w["system"] == "student"}


def test_run_without_the_teacher_says_so(place, tmp_path):
    evaluate(place, tmp_path / "out", baselines=[])
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert {r["system"] for r in results["rows"]} == {"student"}
    assert results["rows"][0]["delta"] is None
    assert "eval.baselines" in results["rows"][0]["not_measured"]["delta"]
    effort = json.loads((tmp_path / "out" / "effort.json").read_text())
    assert "teacher was not measured" in effort["levels"]["low"]["reason"]
    assert effort["levels"]["lossless"]["sampler"] == "verify"


def test_bad_requests_are_named_before_anything_runs(place, tmp_path):
    with pytest.raises(UserError, match="no task 'bookings'.*did you mean 'booking'"):
        evaluate(place, tmp_path / "a", tasks=[TaskConfig(name="bookings", path=place / "task.jsonl")])
    with pytest.raises(UserError, match="eval.tasks is empty"):
        evaluate(place, tmp_path / "b", tasks=[])
    (place / "long.jsonl").write_text(json.dumps({"id": "far", "instruction": "x" * 600, "reference": {}}) + "\n")
    with pytest.raises(UserError, match="prompt far has 6.. tokens"):
        evaluate(place, tmp_path / "c", tasks=[TaskConfig(name="booking", path=place / "long.jsonl")])


def test_every_way_to_run_ar_generates_the_same_number_of_tokens(place):
    model, tokenizer = load_causal_lm(place / "teacher")
    prefix = [1, 50, 60, 70, 80]
    prompts = [[*prefix, 100 + i, 90, 33 + i] for i in range(6)]
    expected = [w for w in speed.ar_ways("k", model, prompts, max_new_tokens=15, eos=chat.eos_ids(model, tokenizer))]
    counts = [[way.answer(i).tokens for i in range(6)] for way in expected]
    cached = speed.ar_ways("k", model, prompts, max_new_tokens=15, eos=chat.eos_ids(model, tokenizer), prefix=prefix)
    counts += [[way.answer(i).tokens for i in range(6)] for way in cached]
    assert len(set(counts[0])) > 1 and all(c == counts[0] for c in counts)
    timing = cached[0].answer(0)
    assert 0 < timing.first_token_s <= timing.seconds


def test_contestants_alternate_prompt_by_prompt_and_take_turns_at_going_first():
    calls = []

    def contestant(name, seconds):
        def answer(i):
            calls.append((name, i))
            return Timing(10, seconds, None)

        return Contestant(name, name, answer)

    a, b, c = contestant("a", 1.0), contestant("b", 0.5), contestant("c", 2.0)
    timings = speed.time_alternating([a, b, c], 3)
    assert calls[:3] == [("a", 0), ("b", 0), ("c", 0)]  # the warm-up, not counted
    assert calls[3:] == [("a", 0), ("b", 0), ("c", 0), ("b", 1), ("c", 1), ("a", 1), ("c", 2), ("a", 2), ("b", 2)]
    assert all(len(t) == 3 for t in timings.values())
    best, rates = speed.fastest([a, b, c], 20)
    assert best is b and rates == {"a": 10.0, "b": 20.0, "c": 5.0}
