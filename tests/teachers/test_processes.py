"""Several processes under a launcher share the targets."""

import json
import os
import shutil
import subprocess
import sys

from fewstep.records import read_rows
from tests.teachers.test_collect import prompts, teacher, texts  # noqa: F401  (a fixture)


def test_two_processes_share_the_work_and_leave_what_one_does(tmp_path, teacher):  # noqa: F811
    prompts(tmp_path, texts())
    (tmp_path / "r.yaml").write_text(
        f"name: shared\nteacher: {{model: '{teacher.model}', dtype: float32}}\nprompts: {{path: prompts.jsonl, held_out: 0}}\n"
        "targets: {max_new_tokens: 10, top_logprobs: 4, batch_size: 3, shard_size: 2, temperature: 1.0, keep: {finished: false}}\nengine: {threads: 1}\n"
    )

    def start(runs, rank, world_size):
        own = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        return subprocess.Popen(
            [sys.executable, "-m", "fewstep", "targets", str(tmp_path / "r.yaml"), "--runs", str(tmp_path / runs)],
            env=own | {"RANK": str(rank), "WORLD_SIZE": str(world_size), "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def finish(runs, world_size):
        for process in [start(runs, rank, world_size) for rank in reversed(range(world_size))]:
            _, err = process.communicate(timeout=120)
            assert process.returncode == 0, err

    finish("one", 1)
    whole = next((tmp_path / "one").glob("targets-*"))
    begun = tmp_path / "two" / whole.name
    shutil.copytree(whole, begun)  # a folder that was left in the middle
    (begun / "manifest.json").unlink()
    for number in (0, 1, 4):
        (begun / "shards" / f"{number:05d}.parquet").unlink()
    finish("two", 2)
    assert not list(begun.glob(".tmp-*"))
    one, two = (next((tmp_path / runs).glob("targets-*")) for runs in ("one", "two"))
    assert read_rows(one) == read_rows(two) and len(list((two / "shards").glob("*.parquet"))) == 6
    first, second = (json.loads((place / "manifest.json").read_text()) for place in (one, two))
    for manifest in (first, second):
        manifest["outputs"].pop("sessions.jsonl")  # when it ran
    assert first["summary"] == second["summary"] and first["outputs"] == second["outputs"]
