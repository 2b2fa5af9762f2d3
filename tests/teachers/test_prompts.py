import json
import subprocess
import sys

import pytest

from fewstep.errors import UserError
from fewstep.teachers.config import KeepConfig, PromptsConfig, TargetsConfig
from fewstep.teachers.prompts import prompts_fingerprint, read_few_shot, read_prompts, split


def config(tmp_path, data, **keys):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return PromptsConfig(path=path, **keys)


def test_read_prompts_keeps_what_rows_say(tmp_path):
    rows = [
        {"instruction": "one", "reference": {"a": [1, None]}},
        {"id": 7, "instruction": " two ", "reference": "x"},
        {
            "id": "c",
            "instruction": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "three"}],
            "extra": 1,
        },
    ]
    prompts = read_prompts(config(tmp_path, "\n".join(json.dumps(r) for r in rows) + "\n\n"))
    assert [p.messages for p in prompts] == [
        [{"role": "user", "content": "one"}],
        [{"role": "user", "content": " two "}],
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "three"}],
    ]
    assert [p.reference for p in prompts] == [{"a": [1, None]}, "x", None]
    assert [p.id for p in prompts][1:] == ["7", "c"]
    assert len(read_prompts(config(tmp_path, '{"q": "one"}\n{"broken', field="q", limit=1))) == 1


def test_read_prompts_survives_bom_line_separators_crlf_and_long_lines(tmp_path):
    text = "a\u2028b\u2029c\x85d\x0be"
    long = "x" * 1_000_000
    data = (
        b"\xef\xbb\xbf" + "\r\n".join(json.dumps({"instruction": t}, ensure_ascii=False) for t in (text, long)).encode()
    )
    data += b"\n" + b'{"instruction": "y", "reference": null}\n' * 1000 + b'{"instruction": "z", "reference": "text"}'
    prompts = read_prompts(config(tmp_path, data))
    assert [p.messages[0]["content"] for p in prompts[:2]] == [text, long]
    assert len(prompts) == 1003 and prompts[-1].reference == "text"


@pytest.mark.parametrize(
    "line, words",
    [
        ('{"instruction": ', "not JSON"),
        ('["instruction"]', "a list where a JSON object is needed"),
        ('{"prompt": "x"}', "no field `instruction` (its fields: `prompt`)"),
        ('{"instruction": ""}', "is empty"),
        ('{"instruction": " \\n"}', "is empty"),
        ('{"instruction": null}', "must be text"),
        ('{"instruction": 5}', "must be text"),
        ('{"instruction": "\\ud83d"}', "surrogate"),
        ('{"instruction": []}', "must end with the user's message"),
        ('{"instruction": [{"role": "assistant", "content": "x"}]}', "must end with the user's message"),
        ('{"instruction": [{"role": "boss", "content": "x"}]}', "each message needs a role"),
        ('{"instruction": "x", "id": 1.5}', "text or an integer"),
        ('{"instruction": "x", "id": "first"}', "line 1 already"),
        ("[" * 100_000, "nested too deeply"),
        ('{"instruction": ' + "9" * 5000 + "}", "cannot be read as JSON"),
    ],
)
def test_read_prompts_names_the_broken_line(tmp_path, line, words):
    with pytest.raises(UserError) as error:
        read_prompts(config(tmp_path, '{"instruction": "ok", "id": "first"}\n\n' + line + "\n"))
    assert "prompts.jsonl, line 3: " in str(error.value) and words in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


def test_read_prompts_names_a_line_that_is_not_utf8(tmp_path):
    with pytest.raises(UserError, match="line 2: not UTF-8 at byte 18"):
        read_prompts(config(tmp_path, b'{"instruction": "ok"}\n{"instruction": "\xff"}'))


def test_read_prompts_refuses_nothing_at_all(tmp_path):
    with pytest.raises(UserError, match="holds no prompts"):
        read_prompts(config(tmp_path, "\n \n"))
    for path in (tmp_path, tmp_path / "none.jsonl"):
        with pytest.raises(UserError, match="cannot be read"):
            read_prompts(PromptsConfig(path=path))


def test_ids_name_content_and_repeats_stay_in_one_split(tmp_path):
    line = '{"instruction": "%s"}\n'
    a, b, again = read_prompts(config(tmp_path, line % "a" + line % "b" + line % "a"))
    b2, a2 = read_prompts(config(tmp_path, line % "b" + line % "a"))
    assert (a.id, b.id) == (a2.id, b2.id) and len({a.id, b.id, again.id}) == 3
    assert all(split(a.id, h / 100) == split(again.id, h / 100) for h in range(100))


def test_split_holds_out_the_share_and_never_moves_an_id():
    ids = [f"row-{i}" for i in range(4000)]
    held = {i for i in ids if split(i, 0.1) == "held_out"}
    assert 300 < len(held) < 500  # 400 expected, standard deviation 19
    assert held < {i for i in ids if split(i, 0.2) == "held_out"}
    assert {split(i, 0.0) for i in ids} == {"train"}


def test_read_few_shot_gives_turns_and_names_broken_lines(tmp_path):
    path = tmp_path / "few.jsonl"
    path.write_text('{"user": "q", "assistant": "a"}\n{"user": "r", "assistant": "b"}\n')
    assert [(m["role"], m["content"]) for m in read_few_shot(path)] == [
        ("user", "q"),
        ("assistant", "a"),
        ("user", "r"),
        ("assistant", "b"),
    ]
    assert read_few_shot(None) == []
    path.write_text('{"user": "q", "assistant": "a"}\n{"user": "r"}\n')
    with pytest.raises(UserError, match="line 2: no field `assistant`"):
        read_few_shot(path)
    path.write_text("")
    with pytest.raises(UserError, match="holds no turns"):
        read_few_shot(path)


def test_fingerprint_follows_content_not_place(tmp_path):
    def take(folder, text="x", few="f", schema='{"type": "object"}', reference="r", extra=""):
        folder.mkdir(exist_ok=True)
        (folder / "few.jsonl").write_text(json.dumps({"user": few, "assistant": "a"}))
        (folder / "schema.json").write_text(schema)
        prompts = config(folder, json.dumps({"instruction": text, "reference": reference}) + extra)
        return prompts_fingerprint(
            prompts, TargetsConfig(few_shot=folder / "few.jsonl", keep=KeepConfig(json_schema=folder / "schema.json"))
        )

    same = take(tmp_path / "a")
    assert take(tmp_path / "b", extra="\n\n") == same
    others = [dict(text="y"), dict(few="g"), dict(schema='{"type": "array"}'), dict(reference="s")]
    assert len({same, *(take(tmp_path / "a", **o) for o in others)}) == 5


def test_prompts_and_filters_import_without_torch():
    code = "import sys, fewstep.teachers.prompts, fewstep.teachers.filters, fewstep.teachers.load; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
