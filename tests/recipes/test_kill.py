"""SIGKILL in any stage: the same command goes on, and ends where an undisturbed run ends."""

import hashlib
import json
import random
import signal
import subprocess
import sys
import time

import pytest

from tests.recipes.test_shipped import SMALL, clean_environment, fewstep

KEYS = [*SMALL, "adapt.max_steps=40", "adapt.save_steps=3", "distill.max_steps=30", "distill.save_steps=3"]
KEYS += ["prompts.limit=96", "targets.shard_size=12", "targets.batch_size=12", "eval.tasks.0.limit=16"]


def start(runs):
    command = [sys.executable, "-m", "fewstep", "run", "quickstart", *KEYS, "--runs", str(runs)]
    return subprocess.Popen(command, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def outcome(runs):
    """Return the hashes of both students and of their losses, and the scores."""
    named = json.loads((runs / "quickstart.json").read_text())["stages"]
    files = [f"{named[s]}/{f}" for s in ("adapt", "distill") for f in ("student/model.safetensors", "metrics.jsonl")]
    rows = json.loads((runs / named["eval"] / "results.json").read_text())["rows"]
    hashes = {f: hashlib.sha256((runs / f).read_bytes()).hexdigest() for f in files}
    return hashes, [(r["system"], r["sampler"], r["score"], r["tpf"], r["agreement"]) for r in rows]


def made(runs):
    """Return the shards and checkpoints there are: what the time of a kill hangs on, fast machine or slow."""
    return {f for f in (*runs.glob("targets-*/shards/*.parquet"), *runs.glob("*/trainer_state/step-*"))}


@pytest.mark.slow
def test_killed_at_random_moments_ends_bit_identical_to_undisturbed(tmp_path):
    assert fewstep("run", "quickstart", *KEYS, runs=tmp_path / "whole").returncode == 0
    rng, kills, stages = random.Random(0), 0, set()
    for _ in range(60):
        process, before, moves = start(tmp_path / "cut"), made(tmp_path / "cut"), rng.randint(1, 4)
        while process.poll() is None and kills < 16 and moves:
            now = made(tmp_path / "cut")
            moves, before = moves - (now != before), now
            time.sleep(0.02)
        if process.poll() is None and kills < 16:
            time.sleep(rng.uniform(0, 0.3))
            process.send_signal(signal.SIGKILL)
            out, err = process.communicate()
            kills += 1
            stages |= {line.split("-")[0] for line in out.splitlines()[-1:]}
            time.sleep(0.1)
            continue
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, err[-3000:]
        break
    assert kills >= 10, f"only {kills} kills landed"
    assert len(stages) >= 3, f"kills landed in {stages}"
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")


def test_second_runner_says_so_in_one_line_and_exits(tmp_path):
    first = start(tmp_path)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("targets-*.lock")) and time.monotonic() < deadline:
        time.sleep(0.05)
    try:
        second = fewstep("run", "quickstart", *KEYS, runs=tmp_path)
    finally:
        first.kill()
        first.communicate()
    assert second.returncode == 1
    assert second.stderr.strip().count("\n") == 0 and "already running" in second.stderr
