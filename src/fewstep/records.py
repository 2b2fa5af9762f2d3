"""The record of one target: what the teacher answered, and how sure it was of each token.

Row i of `topk_ids` and `topk_logprobs` is the teacher's distribution that response token i was
drawn from, so it is aligned with the student's own prediction of that token (no shift).
"""

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from fewstep.runstore import TEMPORARY, sync

SCHEMA = pa.schema(
    [
        ("sample_id", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),  # the student's prompt, chat template applied
        ("response_ids", pa.list_(pa.int32())),  # with EOS where finish_reason is "stop"
        ("finish_reason", pa.string()),  # "stop" or "length"
        ("topk_ids", pa.list_(pa.list_(pa.int32()))),  # [response, K]
        ("topk_logprobs", pa.list_(pa.list_(pa.float32()))),  # [response, K]; ln p at T=1 over the full vocabulary
        ("tail_mass", pa.list_(pa.float32())),  # [response]; 1 - the sum of the kept probabilities
        ("text", pa.string()),  # the response without special tokens
        ("reference", pa.string()),  # JSON of the prompt's reference, or ""
        ("split", pa.string()),  # "train" or "held_out"
    ]
)


def write_shard(path: str | Path, rows: list[dict]) -> None:
    """Write one Parquet shard so that it is either whole or absent.

    Raises:
        pa.ArrowInvalid, KeyError: a row does not follow SCHEMA.
    """
    path = Path(path)
    columns = {name: [row[name] for row in rows] for name in SCHEMA.names}
    temporary = path.parent / f"{TEMPORARY}{os.getpid()}-{path.name}"
    with open(temporary, "wb") as file:
        pq.write_table(pa.table(columns, schema=SCHEMA), file, compression="zstd")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync(path.parent)


def shards(folder: str | Path) -> list[Path]:
    """Return the shards of a targets folder (or of its shards/, or the one shard that `folder` is), by name."""
    folder = Path(folder)
    folder = folder / "shards" if (folder / "shards").is_dir() else folder
    found = [folder] if folder.is_file() else sorted(folder.glob("*.parquet"))
    return [shard for shard in found if not shard.name.startswith(TEMPORARY)]


def read_rows(folder: str | Path, split: str | None = None, columns: list[str] | None = None) -> list[dict]:
    """Return the rows of a targets folder (or of its shards/, or of one shard), in the order of shard names and rows.

    Args:
        folder: the stage's folder, the folder with the shards, or a shard.
        split: "train" or "held_out"; None: both.
        columns: read only these; None: all.
    """
    rows: list[dict] = []
    for shard in shards(folder):
        filters = None if split is None else [("split", "=", split)]
        # ParquetFile semantics on one file: no dataset discovery, so no partition columns are inferred.
        rows += pq.read_table(shard, columns=columns, filters=filters, partitioning=None).to_pylist()
    return rows
