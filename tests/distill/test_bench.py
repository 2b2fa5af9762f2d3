"""`fewstep bench`: whose figures they are, and what is refused."""

import json

import pytest
import torch

from fewstep.distill import bench
from fewstep.distill.cli import _exit_code
from fewstep.eval import speed
from fewstep.students.config import StudentConfig
from fewstep.students.convert import make_student, save_student
from tests.tiny import save_tiny, tiny_model, tiny_tokenizer

torch.set_num_threads(1)


def make(folder, attention="block"):
    model, tokenizer = tiny_model(), tiny_tokenizer()
    make_student(model, tokenizer, StudentConfig(block_size=8, attention=attention), gated=False, seed=0)
    (folder / "student").mkdir(parents=True)
    save_student(model, tokenizer, folder / "student")
    return folder


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    return make(tmp_path_factory.mktemp("bench") / "distill-12345678")


@pytest.fixture
def prompts(tmp_path):
    rows = [json.dumps({"instruction": f"say {i}"}) for i in range(3)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows))
    return tmp_path / "prompts.jsonl"


def test_rows_are_the_systems_in_turn_with_their_own_forwards(student, prompts, tmp_path, capsys, monkeypatch):
    order = []
    real = speed.time_alternating

    def watched(contestants, num, **settings):
        wrapped = [
            speed.Contestant(c.key, c.implementation, lambda i, c=c: (order.append((i, c.key)), c.answer(i))[1])
            for c in contestants
        ]
        return real(wrapped, num, **settings)

    monkeypatch.setattr(speed, "time_alternating", watched)
    monkeypatch.setattr(speed, "PILOT", 1)
    teacher = save_tiny(tmp_path / "teacher", seed=1)
    command = ["bench", str(student), "--against", str(teacher), "--prompts", str(prompts), "--limit", "2"]
    assert _exit_code([*command, "--max-new-tokens", "17", "--threshold", "0", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    rows = {(row["system"], row["sampler"]): row for row in facts["rows"]}
    assert list(rows) == [("teacher", "ar"), ("student", "ar"), ("student", "threshold"), ("student", "verify")]
    for row in rows.values():
        assert row["n"] == 2 and row["tokens"] == 34  # no answer of these random models ends by itself
        assert row["tokens_per_s"] > 0 and row["ttft_ms"] > 0
        assert row["tokens_per_s_ci"][0] <= row["tokens_per_s"] <= row["tokens_per_s_ci"][1]
    assert rows["teacher", "ar"]["tpf"] == rows["student", "ar"]["tpf"] == 1.0
    assert rows["student", "threshold"]["nfe"] == 3  # threshold 0: a forward a block of 8
    assert rows["student", "threshold"]["settings"] == {"threshold": 0.0}
    (baseline,) = [row for row in facts["rows"] if row["is_speed_baseline"]]
    assert baseline["sampler"] == "ar" and baseline["speedup"] == 1.0
    assert baseline["tokens_per_s"] == max(rows[s, "ar"]["tokens_per_s"] for s in ("teacher", "student"))
    for row in facts["rows"]:
        assert row["speedup"] == pytest.approx(row["tokens_per_s"] / baseline["tokens_per_s"])
    timed = order[-8:]  # before them pilots and the warm-up
    assert [i for i, _ in timed] == [0] * 4 + [1] * 4  # every system answers a prompt before any sees the next
    assert {key for _, key in timed[:4]} == {key for _, key in timed[4:]} and timed[0][1] != timed[4][1]
    assert {w["implementation"] for w in facts["ar_ways"]} == {"transformers generate", "plain loop", "our decoder"}


def test_table_shows_rates_intervals_and_the_baseline(student, capsys, monkeypatch):
    monkeypatch.setattr(speed, "PILOT", 1)
    monkeypatch.setattr(bench, "PROMPTS", bench.PROMPTS[:2])
    assert _exit_code(["bench", str(student), "--max-new-tokens", "9"]) == 0
    head, columns, ar, threshold, verify, foot = capsys.readouterr().out.splitlines()
    assert head.startswith("batch 1, 2 prompts in turn, at most 9 tokens each; ")
    assert "AR, greedy" in ar and "1.00 [1.00, 1.00]" in ar and ar.endswith("1 (the baseline)")
    assert "threshold 0.9" in threshold and " ms " in threshold and threshold.endswith("]")
    assert verify.split()[:2] == ["student", "verify"]
    assert "95 % intervals" in foot


def test_student_without_ar_needs_a_teacher(tmp_path, capsys, monkeypatch):
    both = make(tmp_path / "both", attention="bidirectional")
    assert _exit_code(["bench", str(both)]) == 2
    assert "name a teacher with --against" in capsys.readouterr().err
    monkeypatch.setattr(speed, "PILOT", 1)
    monkeypatch.setattr(bench, "PROMPTS", bench.PROMPTS[:1])
    teacher = save_tiny(tmp_path / "teacher")
    assert _exit_code(["bench", str(both), "--against", str(teacher), "--max-new-tokens", "5", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["system"], row["sampler"]) for row in rows] == [("teacher", "ar"), ("student", "threshold")]
    assert rows[0]["tokens_per_s_ci"] is None  # one prompt has no interval


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["/nowhere"], "no config.json there"),
        (["STUDENT", "--against", "./nowhere"], "no such folder"),
        (["STUDENT", "--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (["STUDENT", "--threshold", "2"], "--threshold"),
        (["STUDENT", "--limit", "0"], "--limit"),
    ],
)
def test_wrong_request_is_one_line(student, capsys, arguments, words):
    assert _exit_code(["bench", *(str(student) if a == "STUDENT" else a for a in arguments)]) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1


def test_prompt_that_fills_the_context_is_named(student, tmp_path, capsys):
    (tmp_path / "long.jsonl").write_text(json.dumps({"instruction": "x" * 600}))
    assert _exit_code(["bench", str(student), "--prompts", str(tmp_path / "long.jsonl")]) == 2
    assert "prompt 1 has 619 tokens for the student, whose context holds 512" in capsys.readouterr().err
