"""The training samples: targets on disk, read one at a time, so that memory does not grow with their number.

The shards' columns that training reads are written once, uncompressed, into an Arrow file under `trainer_state/`,
which is mapped into memory. What stays in memory is a handful of numbers a sample.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fewstep import machine, records
from fewstep.runstore import file_fingerprint
from fewstep.signals import raise_if_stopped

COLUMNS = ["sample_id", "prompt_ids", "response_ids", "finish_reason", "split"]
TOPK = ["topk_ids", "topk_logprobs", "tail_mass"]


@dataclass
class Sample:
    """One target, as the teacher wrote it; arrays as in `Example`, plus the order in which it is unmasked."""

    id: str
    prompt: np.ndarray
    response: np.ndarray
    finished: bool
    topk_ids: np.ndarray | None
    topk_logprobs: np.ndarray | None
    tail_mass: np.ndarray | None
    order: np.ndarray | None = None
    on_policy: bool = False  # the student wrote the response, and the teacher's tokens are its labels


def sample_of(row: dict, on_policy: bool = False) -> Sample:
    """Return one row of a shard (`records.SCHEMA`) as a Sample."""
    has = bool(row["topk_ids"]) and len(row["topk_ids"][0]) > 0
    return Sample(
        id=row["sample_id"],
        prompt=np.asarray(row["prompt_ids"], np.int64),
        response=np.asarray(row["response_ids"], np.int64),
        finished=row["finish_reason"] == "stop",
        topk_ids=np.asarray(row["topk_ids"], np.int64) if has else None,
        topk_logprobs=np.asarray(row["topk_logprobs"], np.float32) if has else None,
        tail_mass=np.asarray(row["tail_mass"], np.float32) if has else None,
        on_policy=on_policy,
    )


class Samples(Sequence[Sample]):
    """Rows of a mapped Arrow file, and a few samples beside them, as one sequence.

    Args:
        table: columns COLUMNS, and TOPK if they are to be read.
        kept: [N] the rows that count, in order.
        extra: samples that come after them.
        order: (Sample, its place) → the order in which it is unmasked, or None where there is none.
    """

    def __init__(self, table: pa.Table, kept: np.ndarray, extra: Sequence[Sample] = (), order=None):
        self._table, self._kept, self._extra, self._order = table, kept, list(extra), order
        self.prompt_lengths = self._lengths("prompt_ids", "prompt")
        self.response_lengths = self._lengths("response_ids", "response")

    def _lengths(self, column: str, attribute: str) -> np.ndarray:
        rows = pc.list_value_length(self._table[column]).to_numpy()[self._kept]
        return np.concatenate([rows, [len(getattr(s, attribute)) for s in self._extra]]).astype(np.int64)

    def __len__(self) -> int:
        return len(self._kept) + len(self._extra)

    def __getitem__(self, i):
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(len(self)))]
        if not -len(self) <= i < len(self):
            raise IndexError(i)
        i %= len(self)
        if i >= len(self._kept):
            return self._extra[i - len(self._kept)]
        row = int(self._kept[i])
        prompt, response = self._array("prompt_ids", row), self._array("response_ids", row)
        sample = Sample(
            self._table["sample_id"][row].as_py(), prompt.astype(np.int64), response.astype(np.int64),
            self._table["finish_reason"][row].as_py() == "stop", None, None, None,
        )  # fmt: skip
        if "topk_ids" in self._table.column_names:
            ids = self._array("topk_ids", row)
            if len(ids):
                sample.topk_ids = ids.reshape(len(response), -1).astype(np.int64)
                sample.topk_logprobs = self._array("topk_logprobs", row).reshape(len(response), -1)
                sample.tail_mass = self._array("tail_mass", row)
        if self._order is not None:
            sample.order = self._order(sample, i)
        return sample

    def _array(self, column: str, row: int) -> np.ndarray:
        values = self._table[column][row].values
        while pa.types.is_list(values.type):
            values = values.flatten()
        return values.to_numpy()

    def only(self, which: np.ndarray) -> "Samples":
        """Return the samples at which `which` [N] bool holds; there must be none beside the table yet."""
        assert not self._extra and self._order is None
        return Samples(self._table, self._kept[which])

    def ordered(self, order) -> "Samples":
        """Return the same samples, each with what `order(sample, place)` returns as its order."""
        return Samples(self._table, self._kept, self._extra, order)

    def beside(self, extra: Sequence[Sample]) -> "Samples":
        """Return these samples with others after them."""
        return Samples(self._table, self._kept, [*self._extra, *extra], self._order)

    @property
    def ids(self) -> pa.ChunkedArray:
        """Return the ids of the table's samples."""
        return self._table["sample_id"].take(self._kept)


def open_samples(targets: Path, split: str, scratch: Path, topk: bool = True) -> Samples:
    """Return one split of a targets folder, rows without a response left out.

    Args:
        scratch: gets the Arrow file.
        topk: whether the samples shall carry the teacher's distributions, as far as the targets have them.
    """
    schema = pa.schema([records.SCHEMA.field(name) for name in COLUMNS + (TOPK if topk else [])])
    table = mapped(records.shards(targets), schema, scratch / f"samples{'-topk' if topk else ''}.arrow")
    in_split = pc.equal(table["split"], split).to_numpy()
    answered = pc.list_value_length(table["response_ids"]).to_numpy() > 0
    return Samples(table, np.flatnonzero(in_split & answered))


def mapped(files: list[Path], schema: pa.Schema, path: Path) -> pa.Table:
    """Return columns of Parquet files as a table that lies in `path` and is mapped, not read.

    The file is written anew where another set of files stands behind it; under a launcher by the first rank.
    """
    made_of = repr([(file.name, file_fingerprint(file)) for file in files]).encode()
    if machine.rank() == 0 and _made_of(path) != made_of:
        records.write_arrow(files, schema.with_metadata({b"made_of": made_of}), path)
    while _made_of(path) != made_of:
        raise_if_stopped("stopped before the first step; the same command goes on")
        time.sleep(0.2)
    with pa.memory_map(os.fspath(path)) as file:
        return pa.ipc.open_file(file).read_all()


def _made_of(path: Path) -> bytes | None:
    if not path.is_file():
        return None
    with pa.memory_map(os.fspath(path)) as file:
        return (pa.ipc.open_file(file).schema.metadata or {}).get(b"made_of")


def renamed(sample: Sample, copy: int) -> Sample:
    """Return a sample under another id, so that other masks are drawn for it."""
    return replace(sample, id=f"{sample.id}#{copy}")
