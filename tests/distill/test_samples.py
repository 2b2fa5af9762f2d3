"""Samples that are read one by one equal the shards' rows, whatever is read of them, and are written anew when those change."""

import numpy as np
import pytest

from fewstep import records
from fewstep.distill import samples as samples_module
from fewstep.distill.samples import open_samples, renamed, sample_of
from tests.tiny import in_memory


def row(number: int, length: int, topk: int, split: str = "train") -> dict:
    rng = np.random.default_rng(number)
    return {
        "sample_id": f"s{number}", "prompt_ids": rng.integers(0, 99, 3 + number % 5).tolist(),
        "response_ids": rng.integers(0, 99, length).tolist(), "finish_reason": "stop" if number % 3 else "length",
        "topk_ids": rng.integers(0, 99, (length, topk)).tolist(), "topk_logprobs": (-rng.random((length, topk))).tolist(),
        "tail_mass": rng.random(length).tolist(), "text": "t", "reference": "", "split": split,
    }  # fmt: skip


def written(folder, topk=2):
    rows = [row(i, i % 7, topk, "held_out" if i % 4 == 3 else "train") for i in range(40)]
    (folder / "shards").mkdir(parents=True)
    for first in (0, 15, 30):
        records.write_shard(folder / "shards" / f"{first:05d}.parquet", rows[first : first + 15])
    return rows


def same(a, b) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b


@pytest.mark.parametrize("topk", [0, 2])
@pytest.mark.parametrize("split", ["train", "held_out"])
def test_samples_equal_the_rows_of_the_shards(tmp_path, topk, split):
    rows = written(tmp_path / "targets", topk)
    found = open_samples(tmp_path / "targets", split, tmp_path / "scratch")
    wanted = [sample_of(r) for r in rows if r["split"] == split and r["response_ids"]]
    assert len(found) == len(wanted) > 5
    for a, b in zip(found, wanted):
        assert vars(a).keys() == vars(b).keys() and all(same(v, getattr(b, k)) for k, v in vars(a).items()), a.id
    assert found.response_lengths.tolist() == [len(s.response) for s in wanted]
    assert found.prompt_lengths.tolist() == [len(s.prompt) for s in wanted]
    assert [s.id for s in found[2:5]] == [s.id for s in wanted[2:5]] and found[-1].id == wanted[-1].id
    bare = open_samples(tmp_path / "targets", split, tmp_path / "scratch", topk=False)
    assert [s.id for s in bare] == [s.id for s in wanted] and all(s.topk_ids is None for s in bare)


def test_what_is_left_out_ordered_or_added_keeps_its_place(tmp_path):
    rows = written(tmp_path / "targets")
    found = open_samples(tmp_path / "targets", "train", tmp_path / "scratch")
    short = found.only(found.response_lengths < 4).ordered(
        lambda sample, place: np.arange(len(sample.response)) + place
    )
    extra = renamed(sample_of(rows[5], on_policy=True), 1)
    pool = short.beside([extra])
    assert len(pool) == len(short) + 1 and pool[len(short)] is extra and extra.id == "s5#1"
    assert all(len(s.response) < 4 for s in short) and len(short) < len(found)
    assert [s.order[0] for s in pool[: len(short)]] == list(range(len(short))) and pool[-1].order is None
    assert pool.response_lengths.tolist() == [len(s.response) for s in pool]
    with pytest.raises(IndexError):
        pool[len(pool)]
    assert [s.id for s in in_memory([extra])] == ["s5#1"]


def test_the_flat_files_are_written_once_and_anew_when_a_shard_changes(tmp_path, monkeypatch):
    rows = written(tmp_path / "targets")
    wrote = []
    write = samples_module._write
    monkeypatch.setattr(samples_module, "_write", lambda *a: (wrote.append(a[1]), write(*a)))
    for split in ("train", "held_out"):
        open_samples(tmp_path / "targets", split, tmp_path / "scratch")
    assert len(wrote) == 1
    records.write_shard(tmp_path / "targets" / "shards" / "00000.parquet", [row(77, 5, 2), *rows[:14]])
    assert open_samples(tmp_path / "targets", "train", tmp_path / "scratch")[0].id == "s77" and len(wrote) == 2


def test_half_written_flat_files_are_written_anew(tmp_path, monkeypatch):
    written(tmp_path / "targets")
    whole = [s.id for s in open_samples(tmp_path / "targets", "train", tmp_path / "whole")]
    monkeypatch.setattr(samples_module, "write_atomic", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        open_samples(tmp_path / "targets", "train", tmp_path / "scratch")
    monkeypatch.undo()
    (tmp_path / "scratch" / "samples" / "prompt_ids.bin").write_bytes(b"half")
    assert [s.id for s in open_samples(tmp_path / "targets", "train", tmp_path / "scratch")] == whole
