"""Prompt sources: the same rows from every kind of file, what a broken one says, duplicates, and what evaluation shares."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fewstep.errors import UserError
from fewstep.teachers.config import PromptsConfig
from fewstep.teachers.prompts import Prompt, contaminated, read_prompts

ROWS = [
    {"id": "a", "instruction": 'one, "two"\nthree', "reference": "r1"},
    {"id": "b", "instruction": "vier \u2028 fünf 🙂", "reference": "r2"},
    {"id": "c", "instruction": "x" * 100_000, "reference": "r3"},
]


def quoted(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'


def written(folder, kind):
    path = folder / f"prompts.{ {'text': 'txt'}.get(kind, kind) }"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS))
    elif kind == "json":
        path.write_text(json.dumps({"version": 1, "rows": ROWS}))
    elif kind == "csv":
        lines = [",".join(ROWS[0])] + [",".join(map(quoted, row.values())) for row in ROWS]
        path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    else:
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    return path


@pytest.mark.parametrize("kind", ["json", "csv", "parquet"])
def test_every_kind_of_file_gives_the_same_prompts(tmp_path, kind):
    wanted = read_prompts(PromptsConfig(path=written(tmp_path, "jsonl")))
    config = PromptsConfig(path=written(tmp_path, kind))
    assert config.source == kind  # by the file's ending
    assert read_prompts(config) == wanted and [p.reference for p in wanted] == ["r1", "r2", "r3"]
    assert [p.id for p in read_prompts(config.model_copy(update={"limit": 2}))] == ["a", "b"]


def test_json_lines_are_read_whatever_the_file_is_called_and_odd_names_are_refused(tmp_path):
    path = tmp_path / "prompts.json"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert [p.id for p in read_prompts(PromptsConfig(path=path))] == ["a", "b", "c"]
    for odd in (5, ["a"]):
        with pytest.raises(ValueError, match="path"):
            PromptsConfig(path=odd)


def test_a_reference_that_is_no_json_is_named(tmp_path):
    import datetime

    pq.write_table(
        pa.Table.from_pylist([{"instruction": "x", "reference": datetime.date(2026, 1, 1)}]), tmp_path / "p.parquet"
    )
    with pytest.raises(UserError, match="row 1: `reference` holds a date, which is no JSON"):
        read_prompts(PromptsConfig(path=tmp_path / "p.parquet"))


def test_lines_of_a_text_file_are_messages(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes("first\r\n\n  \nsecond \u2028 line\n".encode())
    prompts = read_prompts(PromptsConfig(path=path))
    assert [(p.line, p.messages[0]["content"]) for p in prompts] == [(1, "first"), (4, "second \u2028 line")]


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("p.json", b"[1]", "row 1: a int where a JSON object is needed"),
        ("p.json", b'{"a": 1}', "holds a dict and no list of rows"),
        ("p.json", b'[{"instruction": "x"}, ', "not JSON"),
        ("p.csv", b"instruction,reference\na,b,c\n", "line 2: has another number of cells"),
        ("p.csv", b"instruction,reference\na\n", "line 2: has another number of cells"),
        ("p.csv", b'instruction\n"a" b\n', "line 2: not CSV"),
        ("p.csv", b"instruction\n\xff\n", "line 2: not UTF-8"),
        ("p.csv", b"question\nx\n", "line 2: no field `instruction` (its fields: `question`)"),
        ("p.parquet", b"PAR1", "cannot be read as Parquet"),
        ("p.txt", b"\n \n", "holds no prompts"),
    ],
)
def test_a_broken_source_is_named_in_one_line(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_prompts(PromptsConfig(path=tmp_path / name))
    assert said in str(caught.value) and name in str(caught.value) and "\n" not in str(caught.value)


def test_a_row_with_another_schema_and_nulls_before_text_are_read_or_named(tmp_path):
    path = tmp_path / "p.jsonl"
    lines = [json.dumps({"instruction": f"m{i}", "reference": None}) for i in range(1000)] + [
        '{"instruction": "n", "reference": "t"}'
    ]
    path.write_text("\n".join(lines))
    assert read_prompts(PromptsConfig(path=path))[-1].reference == "t"
    path.write_text("\n".join([json.dumps({"instruction": f"m{i}"}) for i in range(7000)] + ['{"instruction": ']))
    with pytest.raises(UserError, match="line 7001: not JSON"):
        read_prompts(PromptsConfig(path=path))


def test_reasoning_gym_entries_are_prompts_with_their_answers():
    pytest.importorskip("reasoning_gym")
    gym = {"name": "chain_sum", "seed": 3, "size": 5, "settings": {"min_terms": 2, "max_terms": 2}}
    prompts = read_prompts(PromptsConfig(reasoning_gym=gym))
    assert len(prompts) == 5 == len({p.id for p in prompts})
    assert prompts == read_prompts(PromptsConfig(reasoning_gym=gym)) and all(p.reference for p in prompts)
    assert prompts != read_prompts(PromptsConfig(reasoning_gym={**gym, "seed": 4}))
    for wrong in ({"name": "chain_sun"}, {"name": "chain_sum", "settings": {"terms": 2}}):
        with pytest.raises(UserError, match="prompts.reasoning_gym: chain_su. cannot be made"):
            read_prompts(PromptsConfig(reasoning_gym=wrong))


def test_a_hub_dataset_is_read_through_its_library(tmp_path, monkeypatch):
    import datasets

    asked = []

    def load(name, config, split, revision):
        asked.append((name, config, split, revision))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load)
    hub = {"name": "owner/set", "config": "main", "split": "test", "revision": "abc"}
    assert [p.id for p in read_prompts(PromptsConfig(hf=hub, limit=2))] == ["a", "b"]
    assert asked == [("owner/set", "main", "test", "abc")]
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: (_ for _ in ()).throw(ConnectionError("no\nnetwork")))
    with pytest.raises(UserError, match=r"prompts.hf: owner/set cannot be read \(no\)"):
        read_prompts(PromptsConfig(hf=hub))


@pytest.mark.parametrize("given", [{}, {"path": "p.jsonl", "hf": {"name": "a/b"}}])
def test_a_source_is_given_once(given):
    with pytest.raises(ValueError, match="give one of path, hf and reasoning_gym"):
        PromptsConfig(**given)


def test_prompts_that_differ_in_case_and_spaces_alone_are_asked_once(tmp_path):
    path = tmp_path / "p.txt"
    path.write_text("Tell  me\ntell me\nTELL ME \ntell you\n")
    assert [p.line for p in read_prompts(PromptsConfig(path=path, dedupe=True))] == [1, 4]
    assert len(read_prompts(PromptsConfig(path=path))) == 4


def prompt(i, text):
    return Prompt(str(i), [{"role": "system", "content": "same for all of them"}, {"role": "user", "content": text}])


def test_shared_runs_of_words_are_found_whatever_their_case_and_punctuation():
    avoid = [prompt("e", "How many apples does Janet have, after she eats two?"), prompt("f", "Two plus two?")]
    asked = [
        prompt(1, "Say: HOW MANY apples does Janet have now?"),
        prompt(2, "How many pears does Janet have after she eats two?"),
        prompt(3, "two PLUS two"),
        prompt(4, "Two plus three?"),
    ]
    assert contaminated(asked, avoid, 6) == {"1": "how many apples does janet have", "3": "two plus two", "2": "does janet have after she eats"}  # fmt: skip
    assert contaminated(asked, avoid, 8) == {"3": "two plus two"}
