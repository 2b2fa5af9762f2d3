"""The training samples: targets on disk, read one at a time, so that memory does not grow with their number.

The shards' columns that training reads are copied once into flat files under `trainer_state/`, one after the other
without compression; a sample is a few reads at known places. In memory stay a handful of numbers a sample. (Mapping
the files instead would count every page that was ever touched as the process's own.)
"""

import json
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fewstep import machine, records
from fewstep.errors import RunFailed
from fewstep.machine import cores
from fewstep.runstore import sync, write_atomic
from fewstep.signals import raise_if_stopped

KINDS = {"prompt_ids": np.int32, "response_ids": np.int32, "topk_ids": np.int32, "topk_logprobs": np.float32,
         "tail_mass": np.float32, "sample_id": np.uint8, "order": np.int64}  # fmt: skip
FORMAT = 2  # of the flat files: another one is written anew
TOPK = ["topk_ids", "topk_logprobs", "tail_mass"]
Order = Callable[["Sample", int], np.ndarray]  # (sample, its place) → the order in which it is unmasked


class Flat:
    """Columns of Parquet files as flat files: `row(column, i)` reads one row's values. Nothing a row is in memory."""

    def __init__(self, folder: Path, columns: list[str]):
        self.columns = columns
        self._folder = folder
        self._files = self._bounds = {}
        self._files = {name: os.open(folder / f"{name}.bin", os.O_RDONLY) for name in columns}
        # a row's values stand between two of its column's bounds
        self._bounds = {name: os.open(folder / f"{name}.bounds", os.O_RDONLY) for name in columns}

    def row(self, column: str, i: int) -> np.ndarray:
        """Return [n], the values of row `i`."""
        kind = np.dtype(KINDS[column])
        first, last = np.frombuffer(os.pread(self._bounds[column], 16, 8 * i), np.int64).tolist()
        return np.frombuffer(os.pread(self._files[column], (last - first) * kind.itemsize, first * kind.itemsize), kind)

    def lengths(self, column: str) -> np.ndarray:
        """Return [N] i32, how many values each row has."""
        return np.diff(np.fromfile(self._folder / f"{column}.bounds", np.int64)).astype(np.int32)

    def __del__(self):
        for handle in [*self._files.values(), *self._bounds.values()]:
            os.close(handle)


def flat(files: list[Path], columns: list[str], folder: Path) -> Flat:
    """Return columns of Parquet files as flat files in `folder`, written unless they are there.

    Under a launcher the first rank writes them, and the others wait.
    """
    made_of = json.dumps([[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files] + [columns, FORMAT])
    done = folder / "made_of.json"
    if machine.rank() == 0 and not (done.is_file() and done.read_text() == made_of):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        _write(files, columns, folder)
        for written in folder.iterdir():
            sync(written)
        write_atomic(done, made_of)
    while not (done.is_file() and done.read_text() == made_of):
        raise_if_stopped("stopped before the first step; the same command goes on")
        time.sleep(0.2)
    return Flat(folder, columns)


def _write(files: list[Path], columns: list[str], folder: Path) -> None:
    bounds: dict[str, list[np.ndarray]] = {name: [np.zeros(1, np.int64)] for name in columns}
    out = {name: open(folder / f"{name}.bin", "wb") for name in columns}
    groups = ((file, i) for file in files for i in range(_num_groups(file)))
    threads = cores()
    with ThreadPoolExecutor(threads) as pool:
        reading: deque = deque()
        for group in [*groups, *[None] * threads]:  # a few row groups are ahead of what is written, never all
            if group is not None:
                reading.append(pool.submit(_read_group, *group, columns))
            if len(reading) > threads or (group is None and reading):
                for name, (values, ends) in reading.popleft().result().items():
                    out[name].write(values.data)
                    bounds[name].append(ends + bounds[name][-1][-1])
    for name in columns:
        out[name].close()
        np.concatenate(bounds[name]).tofile(folder / f"{name}.bounds")


def _num_groups(file: Path) -> int:
    with _named(file):
        return pq.read_metadata(file).num_row_groups


@contextmanager
def _named(file: Path) -> Iterator[None]:
    """Turn what Parquet's reader says of a damaged file into a line that names it."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise RunFailed(f"{file} is damaged ({str(error).splitlines()[0][:80]}); delete {_made_in(file)} to make it anew") from None  # fmt: skip


def _made_in(file: Path) -> Path:
    """Return what to delete so that a file is made again: of targets the stage's folder, of trajectories their own."""
    return file.parents[1] if file.parent.name == "shards" else file.parent


def _read_group(file: Path, group: int, columns: list[str]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return column → its values, and where each row ends among them, of one row group."""
    with _named(file):
        table = pq.ParquetFile(file).read_row_group(group, columns=columns, use_threads=False)
    found = {name: _leaves(table[name].combine_chunks()) for name in columns}
    return {name: (values.astype(KINDS[name], copy=False), ends) for name, (values, ends) in found.items()}


def _leaves(column: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Return the innermost values of a column, and where each of its rows ends among them."""
    if pa.types.is_string(column.type):
        column = column.cast(pa.binary()).cast(pa.large_binary())
        ends = np.cumsum(pc.binary_length(column).to_numpy())
        return np.frombuffer(b"".join(column.to_pylist()), np.uint8), ends
    ends = np.cumsum(pc.list_value_length(column).to_numpy())
    values = column.flatten()
    while pa.types.is_list(values.type):
        inner = np.concatenate([[0], np.cumsum(pc.list_value_length(values).to_numpy())])
        ends, values = inner[ends], values.flatten()
    return values.to_numpy(), ends


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
    """Rows of flat files, and a few samples beside them, as one sequence.

    Args:
        rows: columns of `records.SCHEMA`; None where all are beside them.
        kept, finished: [N] the rows that count, in order, and whether each has its EOS.
        extra: samples that come after them.
    """

    def __init__(self, rows: Flat | None, kept: np.ndarray, finished: np.ndarray, extra: Iterable[Sample] = (), order: Order | None = None):  # fmt: skip
        self._rows, self._kept, self._finished, self._extra, self._order = rows, kept, finished, list(extra), order
        self.prompt_lengths = self._lengths("prompt_ids", "prompt")
        self.response_lengths = self._lengths("response_ids", "response")

    def _lengths(self, column: str, attribute: str) -> np.ndarray:
        read = np.zeros(0, np.int32) if self._rows is None else self._rows.lengths(column)[self._kept]
        return np.concatenate([read, np.array([len(getattr(s, attribute)) for s in self._extra], np.int32)])

    def __len__(self) -> int:
        return len(self._kept) + len(self._extra)

    @overload
    def __getitem__(self, i: int) -> Sample: ...

    @overload
    def __getitem__(self, i: slice) -> list[Sample]: ...

    def __getitem__(self, i):
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(len(self)))]
        if not -len(self) <= i < len(self):
            raise IndexError(i)
        i %= len(self)
        if i >= len(self._kept):
            return self._extra[i - len(self._kept)]
        sample = self._read(int(self._kept[i]), bool(self._finished[i]))
        if self._order is not None:
            sample.order = self._order(sample, i)
        return sample

    def _read(self, row: int, finished: bool) -> Sample:
        assert self._rows is not None
        read = {name: self._rows.row(name, row) for name in self._rows.columns}
        prompt, response = (read[name].astype(np.int64) for name in ("prompt_ids", "response_ids"))
        sample = Sample(read["sample_id"].tobytes().decode(), prompt, response, finished, None, None, None)
        if len(read.get("topk_ids", ())):
            sample.topk_ids = read["topk_ids"].reshape(len(response), -1).astype(np.int64)
            sample.topk_logprobs = read["topk_logprobs"].reshape(len(response), -1)
            sample.tail_mass = read["tail_mass"]
        return sample

    def only(self, which: np.ndarray) -> "Samples":
        """Return the samples at which `which` [N] bool holds; none may stand beside the files yet."""
        assert not self._extra and self._order is None
        return Samples(self._rows, self._kept[which], self._finished[which])

    def ordered(self, order: Order) -> "Samples":
        """Return the same samples, each of the files' with an order."""
        return Samples(self._rows, self._kept, self._finished, self._extra, order)

    def beside(self, extra: Iterable[Sample]) -> "Samples":
        """Return these samples with others after them."""
        return Samples(self._rows, self._kept, self._finished, [*self._extra, *extra], self._order)


def open_samples(targets: Path, split: str, scratch: Path, topk: bool = True) -> Samples:
    """Return one split of a targets folder, rows without a response left out.

    Args:
        scratch: gets the flat files.
        topk: whether the samples shall carry the teacher's distributions, as far as the targets have them.
    """
    shards = records.shards(targets)
    if not shards:
        raise RunFailed(f"{targets} holds no targets; delete it to make them anew")
    rows = flat(shards, ["sample_id", "prompt_ids", "response_ids"] + (TOPK if topk else []), scratch / "samples")
    in_split, stopped = [], []
    for shard in shards:
        with _named(shard):
            facts = pq.read_table(shard, columns=["split", "finish_reason"], partitioning=None)
        in_split.append(pc.equal(facts["split"], split).to_numpy())
        stopped.append(pc.equal(facts["finish_reason"], "stop").to_numpy())
    kept = np.flatnonzero(np.concatenate(in_split) & (rows.lengths("response_ids") > 0)).astype(np.int32)
    return Samples(rows, kept, np.concatenate(stopped)[kept])


def renamed(sample: Sample, copy: int) -> Sample:
    """Return a sample under another id, so that other masks are drawn for it."""
    return replace(sample, id=f"{sample.id}#{copy}")
