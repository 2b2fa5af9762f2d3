"""Target records: rows come back as written, by split and in order, and a bad row leaves no shard."""

import pytest

from fewstep.records import SCHEMA, read_rows, write_shard


def row(name: str, split: str = "train") -> dict:
    return {
        "sample_id": name,
        "prompt_ids": [5, 6],
        "response_ids": [7, 2],
        "finish_reason": "stop",
        "topk_ids": [[7, 9], [2, 1]],
        "topk_logprobs": [[-0.5, -1.0], [-0.25, -2.0]],  # exact in float32
        "tail_mass": [0.125, 0.0],
        "text": "é\u2028",
        "reference": '{"a": 1}',
        "split": split,
    }


def test_rows_come_back_as_written_in_the_order_of_shards(tmp_path):
    (tmp_path / "shards").mkdir()
    write_shard(tmp_path / "shards" / "00001.parquet", [row("c")])
    write_shard(tmp_path / "shards" / "00000.parquet", [row("a"), row("b", "held_out")])
    assert read_rows(tmp_path) == [row("a"), row("b", "held_out"), row("c")]
    assert read_rows(tmp_path / "shards") == read_rows(tmp_path)
    assert [r["sample_id"] for r in read_rows(tmp_path, "train")] == ["a", "c"]
    assert read_rows(tmp_path, "held_out", columns=["text"]) == [{"text": "é\u2028"}]
    assert [p.name for p in sorted((tmp_path / "shards").iterdir())] == ["00000.parquet", "00001.parquet"]


def test_order_of_rows_is_that_of_shard_names_not_of_the_folder(tmp_path):
    for i in (7, 2, 9, 0, 4, 1, 8, 3, 6, 5):
        write_shard(tmp_path / f"{i:05d}.parquet", [row(str(i))])
    assert [r["sample_id"] for r in read_rows(tmp_path, columns=["sample_id"])] == [str(i) for i in range(10)]


def test_shard_without_log_probabilities_is_readable(tmp_path):
    bare = {**row("a"), "topk_ids": [[], []], "topk_logprobs": [[], []]}
    write_shard(tmp_path / "00000.parquet", [bare])
    assert read_rows(tmp_path) == [bare]


@pytest.mark.parametrize("column", SCHEMA.names)
def test_row_without_a_column_is_refused_and_nothing_lands(tmp_path, column):
    broken = row("a")
    del broken[column]
    with pytest.raises(KeyError, match=column):
        write_shard(tmp_path / "00000.parquet", [broken])
    assert list(tmp_path.iterdir()) == []
