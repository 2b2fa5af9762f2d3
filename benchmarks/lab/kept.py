"""What the lab's jobs measured, a Parquet file a job in the repository: the table can be made again from it, and the
lab goes on on another machine.

A record holds a row for each prompt of each setting: system, sampler, settings, score, tokens, nfe. Its facts say by
which recipe (`key`) and of which teacher and prompts (`inputs`) it was measured, when, where and by which commit.
"""

import hashlib
import json
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from fewstep.distill.chain import VERSIONS, chain, parts
from fewstep.distill.recipe import Recipe
from fewstep.runstore import StageFolder, canonical_json, write_atomic

FACTS = b"fewstep_lab"
SCHEMA = pa.schema(
    {"system": pa.string(), "sampler": pa.string(), "settings": pa.string(), "score": pa.float32(), "tokens": pa.int16(), "nfe": pa.int16()}
)  # fmt: skip


def key(recipe: Recipe) -> str:
    """Return the hash of everything that the evaluation of a recipe comes from, but for the contents of files."""
    used = {name: [VERSIONS[name], part] for name, part in parts(recipe).items() if name not in ("report", "publish")}
    return hashlib.sha256(canonical_json(used).encode()).hexdigest()[:16]


def inputs(recipe: Recipe) -> dict[str, str]:
    """Return the fingerprints of the teacher, the prompts and the tasks.

    Raises:
        UserError: one of them is missing.
    """
    return {f"{stage.name}.{name}": mark for stage in chain(recipe).values() for name, mark in stage.inputs.items()}


def inputs_of(facts: dict, kind: str) -> dict[str, str]:
    """Return a record's inputs of one kind: "targets." of the teacher and its prompts, "eval." of the task, whose mark depends on how many rows are used."""
    return {name: mark for name, mark in facts["inputs"].items() if name.startswith(kind)}


def keep(recipe: Recipe, runs: Path, path: Path) -> None:
    """Write the record of a finished evaluation."""
    folder = StageFolder(runs / chain(recipe)["eval"].folder)
    manifest = folder.manifest()
    columns: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
    for row in pq.read_table(folder.path / "samples.parquet", partitioning=None).to_pylist():
        row["tokens"] = len(row["ids"])
        for name, values in columns.items():
            values.append(row[name])
    facts = {
        "key": key(recipe),
        "inputs": inputs(recipe),
        "date": str(date.today()),
        **{k: manifest[k] for k in ("commit", "hardware")},
    }
    table = pa.table(columns, schema=SCHEMA).replace_schema_metadata({FACTS: json.dumps(facts)})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", compression_level=19, write_statistics=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, sink.getvalue().to_pybytes())


def read(recipe: Recipe, path: Path) -> tuple[dict, list[dict]] | None:
    """Return a record's facts and rows; None where there is none of this recipe."""
    if not path.is_file():
        return None
    table = pq.read_table(path)
    facts = json.loads(table.schema.metadata[FACTS])
    return (facts, table.to_pylist()) if facts["key"] == key(recipe) else None
