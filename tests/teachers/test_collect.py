"""The stage `targets` on tiny teachers: shards, resuming, filters, what teacher and student see."""

import json

import pytest
from tiny import VOCAB, save_tiny, tiny_tokenizer

from fewstep.chat import encode_prompt
from fewstep.errors import RunFailed, Stopped, UserError
from fewstep.records import read_rows
from fewstep.teachers import asking, collect
from fewstep.teachers.config import KeepConfig, PromptsConfig, TargetsConfig, TeacherConfig
from fewstep.teachers.filters import drop_reason, make_filter
from fewstep.teachers.generation import Generation
from fewstep.teachers.prompts import Prompt, prompt_id, teacher_prompts

EOS = list(range(0, VOCAB, 11))
EVERYTHING = KeepConfig(finished=False)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return TeacherConfig(model=str(save_tiny(tmp_path_factory.mktemp("teacher"), eos_ids=EOS)), dtype="float32")


def prompts(tmp_path, texts, references=None, **keys):
    path = tmp_path / "prompts.jsonl"
    rows = [{"instruction": text} for text in texts]
    for row, reference in zip(rows, references or []):
        row["reference"] = reference
    path.write_text("\n".join(map(json.dumps, rows)))
    return PromptsConfig(path=path, **{"held_out": 0.0, **keys})


def texts(count=11):
    return ["the quick brown fox"[: 3 + i] + str(i) for i in range(count)]


def settings(**keys):
    return TargetsConfig(
        **{"max_new_tokens": 10, "top_logprobs": 4, "batch_size": 3, "shard_size": 4, "keep": EVERYTHING, **keys}
    )


def folder(tmp_path, name):
    path = tmp_path / name
    path.mkdir()
    return path


def answering(monkeypatch, answer):
    """Let the teacher answer `answer(prompt ids)`, text followed by EOS; a text that ends in … is cut short."""
    tokenizer = tiny_tokenizer()

    def fake(model, rows, **kwargs):
        out = []
        for row in rows:
            text = answer(tokenizer.decode(row))
            cut = text.endswith("…")
            ids = tokenizer(text.removesuffix("…"), add_special_tokens=False)["input_ids"] + (
                [] if cut else [tokenizer.eos_token_id]
            )
            k = kwargs["top_logprobs"]
            out.append(
                Generation(
                    ids, "length" if cut else "stop", [[0] * k] * len(ids), [[-1.0] * k] * len(ids), [0.5] * len(ids)
                )
            )
        return out

    monkeypatch.setattr(asking, "generate", fake)


def test_run_writes_rows_in_prompt_order_with_facts_that_agree(tmp_path, teacher):
    where = folder(tmp_path, "targets")
    summary = collect.run(
        where,
        teacher,
        prompts(tmp_path, texts(), references=[{"n": i} for i in range(11)], held_out=0.3),
        settings(),
        seed=0,
    )
    rows = read_rows(where)
    tokenizer = tiny_tokenizer()
    assert [r["prompt_ids"] for r in rows] == [
        encode_prompt(tokenizer, [{"role": "user", "content": t}]) for t in texts()
    ]
    assert [json.loads(r["reference"]) for r in rows] == [{"n": i} for i in range(11)]
    assert sorted(p.name for p in where.glob("shards/*.parquet")) == ["00000.parquet", "00001.parquet", "00002.parquet"]
    for r in rows:
        assert len(r["response_ids"]) == len(r["topk_ids"]) == len(r["topk_logprobs"]) == len(r["tail_mass"]) <= 10
        assert all(
            top[0] == token for top, token in zip(r["topk_ids"], r["response_ids"])
        )  # greedy: aligned with its own token
        assert (r["finish_reason"] == "stop") == (r["response_ids"][-1] in EOS)
        assert r["text"] == tokenizer.decode(r["response_ids"], skip_special_tokens=True)
    assert {r["split"] for r in rows} == {"train", "held_out"}
    assert summary["held_out"] == sum(r["split"] == "held_out" for r in rows) == len(read_rows(where, "held_out"))
    assert summary["kept"] == summary["prompts"] == 11 and summary["dropped"] == {}
    assert summary["tokens"] == sum(len(r["response_ids"]) for r in rows) == summary["mean_length"] * 11
    assert not (where / "teacher").exists()  # it is an ordinary checkpoint already


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_run_resumed_equals_undisturbed(tmp_path, teacher, monkeypatch, temperature):
    source, config = prompts(tmp_path, texts()), settings(temperature=temperature)
    whole, broken = folder(tmp_path, "whole"), folder(tmp_path, "broken")
    summary = collect.run(whole, teacher, source, config, seed=1)

    answer, calls = collect._judged, []

    def fails_in_the_second_shard(*args):
        calls.append(args[3])
        if len(calls) == 2:
            raise KeyboardInterrupt
        return answer(*args)

    monkeypatch.setattr(collect, "_judged", fails_in_the_second_shard)
    with pytest.raises(KeyboardInterrupt):
        collect.run(broken, teacher, source, config, seed=1)
    # as if killed between the notes of a shard and the shard itself
    (broken / "shards" / "00001.json").write_text("{")
    (broken / "shards" / ".tmp-1-00001.parquet").write_text("half")
    calls.clear()
    monkeypatch.setattr(collect, "_judged", lambda *args: calls.append(args[3]) or answer(*args))
    assert collect.run(broken, teacher, source, config, seed=1) == summary
    assert calls == [range(4, 8), range(8, 11)]  # the first shard was not answered again
    assert read_rows(broken) == read_rows(whole)
    monkeypatch.setattr(asking, "load_for_stage", lambda *_: pytest.fail("a complete folder needs no weights"))
    assert collect.run(broken, teacher, source, config, seed=1) == summary


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_run_order_of_prompts_and_batching_change_no_row(tmp_path, teacher, temperature):
    one, two = folder(tmp_path, "one"), folder(tmp_path, "two")
    collect.run(one, teacher, prompts(one, texts()), settings(temperature=temperature), seed=1)
    collect.run(
        two, teacher, prompts(two, texts()[::-1]), settings(temperature=temperature, batch_size=5, shard_size=6), seed=1
    )
    there = {r["sample_id"]: r for r in read_rows(two)}
    for row in read_rows(one):
        other = there[row["sample_id"]]
        for key in ("prompt_ids", "response_ids", "finish_reason", "text", "topk_ids", "split"):
            assert row[key] == other[key], key
        for a, b in zip(row["topk_logprobs"], other["topk_logprobs"]):
            assert a == pytest.approx(b, abs=1e-5)  # fp32 sums in another order


def test_run_draws_by_seed(tmp_path, teacher):
    found = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        collect.run(folder(tmp_path, name), teacher, prompts(tmp_path, texts(4)), settings(temperature=2.0), seed=seed)
        found.append([r["response_ids"] for r in read_rows(tmp_path / name)])
    assert found[0] == found[1] != found[2]


def test_run_shows_examples_to_the_teacher_only(tmp_path, teacher, monkeypatch):
    few = tmp_path / "few.jsonl"
    few.write_text('{"user": "Q1", "assistant": "A1"}\n')
    config = settings(few_shot=few, system_prompt="Be a clerk.")
    asked, prefixes = [], []
    real = asking.generate

    def spy(model, rows, **kwargs):
        asked.extend(rows)
        prefixes.append(kwargs["prefix"].ids)
        return real(model, rows, **kwargs)

    monkeypatch.setattr(asking, "generate", spy)
    summary = collect.run(folder(tmp_path, "t"), teacher, prompts(tmp_path, texts(3)), config, seed=0)
    tokenizer = tiny_tokenizer()
    head = "<|im_start|>system\nBe a clerk.<|im_end|>\n<|im_start|>user\nQ1<|im_end|>\n<|im_start|>assistant\nA1<|im_end|>\n"
    own = [f"<|im_start|>user\n{t}<|im_end|>\n<|im_start|>assistant\n" for t in texts(3)]
    rows = read_rows(tmp_path / "t")
    assert [tokenizer.decode(ids) for ids in asked] == [head + o for o in own]
    assert [tokenizer.decode(r["prompt_ids"]) for r in rows] == own
    assert tokenizer.decode(prefixes[0]).startswith(head) and summary["shared_prefix_tokens"] == len(prefixes[0])
    assert teacher_prompts(tokenizer, [[{"role": "user", "content": t}] for t in texts(3)], config) == asked
    alone = collect.run(folder(tmp_path, "u"), teacher, prompts(tmp_path, texts(3)), settings(), seed=0)
    assert alone["prompts"] == 3 and [r["response_ids"] for r in read_rows(tmp_path / "u")] != [
        r["response_ids"] for r in rows
    ]


def test_teacher_prompts_joins_system_messages(tmp_path):
    messages = [{"role": "system", "content": "Own."}, {"role": "user", "content": "Hi"}]
    (ids,) = teacher_prompts(tiny_tokenizer(), [messages], TargetsConfig(system_prompt="Recipe's."))
    assert (
        tiny_tokenizer().decode(ids).startswith("<|im_start|>system\nRecipe's.\n\nOwn.<|im_end|>\n<|im_start|>user\nHi")
    )


def test_run_counts_drops_by_reason(tmp_path, teacher, monkeypatch):
    answers = {
        "cut": '{"a": 1…',
        "empty": "",
        "prose": "Sure! {}",
        "shape": '{"b": 1}',
        "long": '{"a": 1, "pad": "xxxxxxxxxxxxxxxxxxxx"}',
        "wrong": '{"a": 2}',
        "right": '{"a": 1}',
    }
    answering(monkeypatch, lambda asked: next(a for key, a in answers.items() if f"\n{key}<" in asked))
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object", "required": ["a"]}')
    keep = KeepConfig(json_schema=schema, regex=".{1,20}", correct=True)
    source = prompts(tmp_path, list(answers) * 1, references=[{"a": 1}] * len(answers), checker="exact")
    where = folder(tmp_path, "t")
    summary = collect.run(where, teacher, source, settings(keep=keep), seed=0)
    assert summary["dropped"] == {"truncated": 1, "empty": 1, "not_json": 1, "schema": 1, "regex": 1, "incorrect": 1}
    assert [r["text"] for r in read_rows(where)] == ['{"a": 1}'] and summary["kept"] == 1
    assert (summary["teacher_score"], summary["teacher_score_n"]) == (
        pytest.approx(1 / 7),
        7,
    )  # of all answers, before the filter
    drops = json.loads((where / "drops.json").read_text())
    assert drops["counts"] == summary["dropped"]
    assert {r["reason"]: r["text"] for r in drops["rows"]}["not_json"] == "Sure! {}"
    assert len({r["sample_id"] for r in drops["rows"]}) == 6


def test_run_fails_when_everything_is_dropped(tmp_path, teacher, monkeypatch):
    answering(monkeypatch, lambda asked: "prose" if "fox" in asked else "cut…")
    with pytest.raises(RunFailed, match=r"all 20 answers were dropped \(\d+ truncated, \d+ not_json"):
        collect.run(
            folder(tmp_path, "t"), teacher, prompts(tmp_path, texts(20)), settings(keep=KeepConfig(json=True)), seed=0
        )


def test_run_fails_when_nothing_is_left_to_train_on(tmp_path, teacher):
    with pytest.raises(RunFailed, match="no answer is left to train on"):
        collect.run(folder(tmp_path, "t"), teacher, prompts(tmp_path, texts(3), held_out=0.9999), settings(), seed=0)


def test_run_names_a_teacher_that_fails_its_task(tmp_path, teacher, monkeypatch):
    answering(monkeypatch, lambda asked: "yes")
    source = prompts(tmp_path, texts(10), references=["yes"] * 3 + ["no"] * 7, checker="exact")
    with pytest.raises(RunFailed) as error:
        collect.run(folder(tmp_path, "t"), teacher, source, settings(min_score=0.5), seed=0)
    for part in (teacher.model, "0.300", "10 answers", "min_score 0.5"):
        assert part in str(error.value)
    assert collect.run(folder(tmp_path, "u"), teacher, source, settings(min_score=0.3), seed=0)[
        "teacher_score"
    ] == pytest.approx(0.3)


def test_run_does_not_go_on_with_a_hopeless_teacher(tmp_path, teacher, monkeypatch):
    answering(monkeypatch, lambda asked: "no")
    source = prompts(tmp_path, texts(12), references=["yes"] * 12, checker="exact")
    where = folder(tmp_path, "t")
    with pytest.raises(RunFailed, match=r"scores 0.000 .*\(checker exact, 4 answers\)"):
        collect.run(where, teacher, source, settings(min_score=0.9), seed=0)
    assert len(list(where.glob("shards/*.parquet"))) == 1


def test_run_refuses_prompts_beyond_the_context_before_any_work(tmp_path, teacher, monkeypatch):
    monkeypatch.setattr(asking, "load_for_stage", lambda *_: pytest.fail("no weights are needed to see this"))
    source = prompts(tmp_path, ["short", "x" * 484, "y" * 490])
    with pytest.raises(
        UserError,
        match=r"line 2: its prompt has \d+ tokens \(and 1 more\); with targets.max_new_tokens 10 .* context of 512",
    ):
        collect.run(folder(tmp_path, "t"), teacher, source, settings(), seed=0)


@pytest.mark.parametrize(
    "keys, checker, words",
    [
        ({"keep": KeepConfig(regex="(")}, None, "targets.keep.regex: '\\(' is no regular expression"),
        ({"keep": KeepConfig(correct=True)}, None, "set prompts.checker"),
        ({}, "exakt", "did you mean 'exact'"),
        ({}, "booking", "line 1: reference is 'text'"),
    ],
)
def test_run_refuses_rules_that_cannot_be_applied(tmp_path, teacher, keys, checker, words):
    with pytest.raises(UserError, match=words):
        collect.run(
            folder(tmp_path, "t"),
            teacher,
            prompts(tmp_path, ["a"], references=["text"], checker=checker),
            settings(**keys),
            seed=0,
        )


def test_run_refuses_a_checker_without_references(tmp_path, teacher):
    with pytest.raises(UserError, match="line 1: no `reference`"):
        collect.run(folder(tmp_path, "t"), teacher, prompts(tmp_path, ["a"], checker="exact"), settings(), seed=0)


def test_run_refuses_a_full_disk_before_any_work(tmp_path, teacher, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 100})())
    monkeypatch.setattr(asking, "load_for_stage", lambda *_: pytest.fail("no weights are needed to see this"))
    with pytest.raises(UserError, match="targets needs"):
        collect.run(folder(tmp_path, "t"), teacher, prompts(tmp_path, texts()), settings(), seed=0)


def test_run_stops_between_batches_and_keeps_finished_shards(tmp_path, teacher, monkeypatch):
    source, where = prompts(tmp_path, texts()), folder(tmp_path, "t")
    write = collect._write

    def then_signal(*args):
        write(*args)
        monkeypatch.setattr("fewstep.signals._requested", 15)

    monkeypatch.setattr(collect, "_write", then_signal)
    with pytest.raises(Stopped) as stopped:
        collect.run(where, teacher, source, settings(), seed=0)
    assert stopped.value.signum == 15 and len(list(where.glob("shards/*.parquet"))) == 1
    monkeypatch.undo()
    collect.run(where, teacher, source, settings(), seed=0)
    whole = folder(tmp_path, "whole")
    collect.run(whole, teacher, source, settings(), seed=0)
    assert read_rows(where) == read_rows(whole)


def test_run_saves_a_quantised_teacher_once_as_plain_weights(tmp_path, teacher, monkeypatch):
    """The kind is faked: what is proved is the saving, not the dequantising."""
    import torch

    from fewstep.teachers.load import load_for_stage, load_teacher

    monkeypatch.setattr(collect, "kind_of", lambda _: "gguf")
    where, source = folder(tmp_path, "t"), prompts(tmp_path, texts(5))
    stale = where / f".tmp-1-{collect.SAVED}"
    stale.mkdir()
    (stale / "model.safetensors").write_text("half")
    collect.run(where, teacher, source, settings(), seed=0)
    assert not list(where.glob(".tmp-*"))
    plain, original = (
        load_for_stage(TeacherConfig(model="gone", dtype="float32"), where)[0],
        load_teacher(teacher.model)[0],
    )
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), original.parameters()))
    monkeypatch.setattr(collect, "_save_plain", lambda *_: pytest.fail("it is there already"))
    (where / "shards" / "00001.parquet").unlink()
    collect.run(where, teacher, source, settings(), seed=0)


def test_answers_are_drawn_again_until_they_are_kept_and_resumed_equals_undisturbed(teacher, tmp_path):
    asked = prompts(tmp_path, texts(9))
    keep = KeepConfig(finished=True, regex="[^aeiou]*")
    keys = dict(temperature=1.0, keep=keep, max_new_tokens=6)
    once = collect.run(folder(tmp_path, "once"), teacher, asked, settings(**keys), seed=0)
    often = collect.run(folder(tmp_path, "often"), teacher, asked, settings(**keys, attempts=40), seed=0)
    assert often["kept"] > once["kept"] and often["generated_tokens"] > once["generated_tokens"]
    first = {r["sample_id"]: r["text"] for r in read_rows(tmp_path / "once")}
    rows = read_rows(tmp_path / "often")
    assert all(not set("aeiou") & set(r["text"]) and r["finish_reason"] == "stop" for r in rows)
    assert first.items() <= {r["sample_id"]: r["text"] for r in rows}.items()  # what was kept at once stays
    (tmp_path / "often" / "shards" / "00001.parquet").unlink()
    collect.run(tmp_path / "often", teacher, asked, settings(**keys, attempts=40), seed=0)
    assert read_rows(tmp_path / "often") == rows


def test_several_samples_a_prompt_have_ids_of_their_own_and_one_split(teacher, tmp_path):
    asked = prompts(tmp_path, texts(9), held_out=0.4)
    many = collect.run(folder(tmp_path, "many"), teacher, asked, settings(temperature=1.0, samples=3), seed=0)
    rows = read_rows(tmp_path / "many")
    one = collect.run(folder(tmp_path, "one"), teacher, asked, settings(temperature=1.0), seed=0)
    assert one["kept"] == 9 < many["kept"] == len({r["sample_id"] for r in rows})
    ids = lambda rows: [(r["sample_id"], r["response_ids"]) for r in rows]  # noqa: E731
    assert ids(r for r in rows if "~" not in r["sample_id"]) == ids(read_rows(tmp_path / "one"))
    by_prompt = {}
    for r in rows:
        by_prompt.setdefault(prompt_id(r["sample_id"]), []).append(r)
    assert len(by_prompt) == 9 and all(len({r["split"] for r in own}) == 1 for own in by_prompt.values())
    assert all(len({r["text"] for r in own}) == len(own) for own in by_prompt.values())  # those alike count once


@pytest.mark.parametrize("key", ["samples", "attempts"])
def test_several_greedy_answers_are_refused(key):
    with pytest.raises(ValueError, match=f"{key}: 2 greedy answers are one"):
        settings(**{key: 2})


@pytest.mark.parametrize(
    "text, keep, reason",
    [
        ("so it goes on and on and on and on and on", {"loops": 4}, "looping"),
        ("a b c d a b c d a b c d", {"loops": 3}, "looping"),
        ("a b c d a b c d a b c", {"loops": 3}, None),
        ("no no no", {"loops": 4}, None),
        ("I'm sorry, but I can't do that", {"refusals": False}, "refusal"),
        ("As an AI language model, I do not", {"refusals": False}, "refusal"),
        ("I cannot help", {"refusals": False}, "refusal"),
        ("I can help. Sorry to hear that", {"refusals": False}, None),
        ("I’m unable to", {"refusals": True}, None),
        ("Привет, как дела", {"script": "latin"}, "script"),
        ("Bonjour à tous 123 !", {"script": "latin"}, None),
        ("你好,世界", {"script": "han"}, None),
        ("12 + 3", {"script": "latin"}, None),
    ],
)
def test_loops_refusals_and_other_scripts_are_dropped_by_name(text, keep, reason):
    rules = make_filter(PromptsConfig(path="p.jsonl"), TargetsConfig(keep=KeepConfig(**keep)))
    assert drop_reason(rules, text, "stop", None) == reason


def test_an_unknown_script_is_refused():
    with pytest.raises(UserError, match="targets.keep.script: 'latn' is unknown; use one of latin"):
        make_filter(PromptsConfig(path="p.jsonl"), TargetsConfig(keep=KeepConfig(script="latn")))


def test_prompts_that_evaluation_shares_are_left_out_and_listed(teacher, tmp_path):
    asked = prompts(tmp_path, ["the quick brown fox jumps", "a slow green turtle walks"], decontaminate={"words": 3})
    avoid = [Prompt("e", [{"role": "user", "content": "Brown fox: the QUICK brown fox!"}])]
    summary = collect.run(folder(tmp_path, "out"), teacher, asked, settings(), 0, avoid)
    assert summary["kept"] == 1 and summary["dropped"] == {"contaminated": 1}
    listed = json.loads((tmp_path / "out" / "drops.json").read_text())["rows"]
    assert [row["text"] for row in listed] == ["the quick brown"]
    with pytest.raises(UserError, match="all 2 prompts"):
        collect.run(folder(tmp_path, "none"), teacher, asked, settings(), 0, [*avoid, Prompt("f", [{"role": "user", "content": "slow green turtle walks"}])])  # fmt: skip


def test_the_audit_page_shows_counts_and_escapes_what_was_said(teacher, tmp_path, monkeypatch):
    (tmp_path / "teacher").mkdir()
    hostile = "<script>alert(1)</script>\u202e"
    answering(monkeypatch, lambda prompt: hostile if "fox" in prompt else "")
    asked = prompts(tmp_path, ["fox one", "fox two", "cat"])
    summary = collect.run(folder(tmp_path, "out"), teacher, asked, settings(keep=KeepConfig()), seed=0)
    page = (tmp_path / "out" / "targets.html").read_text()
    assert "<script>alert" not in page and "&lt;script&gt;alert(1)" in page and "⟨U+202E⟩" in page
    assert summary["dropped"] == {"empty": 1} and "<td>empty</td><td>1</td>" in page and "<svg" in page
    assert "Its licence</dt><dd>not stated" in page and summary["prompts_from"] == "prompts.jsonl"
