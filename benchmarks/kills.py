"""Kill a run with SIGKILL in every stage and inside its saves, go on each time, and compare with an undisturbed run.

    python benchmarks/kills.py

A round has a runs folder of its own and a kill for each line of PLAN; then the run goes on to its end, and the
students' weights, their losses and the scores must be those of the undisturbed run, to the last bit. Any that are not
end the script with exit code 1.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import date
from pathlib import Path

from fewstep import machine
from fewstep.runstore import write_atomic

RESULTS = Path(__file__).parent / "results"
# (stage, whether inside a save): the kills of one round, in the order in which they come
PLAN = [("targets", False), ("adapt", False), ("adapt", True), ("adapt", True), ("distill", False), ("distill", True),
        ("eval", False), ("eval", False), ("report", False)]  # fmt: skip
KEYS = ["engine.name=plain", "engine.threads=1", "prompts.limit=120", "targets.shard_size=12", "targets.batch_size=12",
        "adapt.max_steps=60", "adapt.save_steps=4", "adapt.batch_tokens=600", "distill.max_steps=60", "distill.save_steps=4",
        "distill.batch_tokens=600", "eval.tasks.0.limit=48", "eval.batch_size=12", "eval.speed_prompts=2"]  # fmt: skip
LATEST = {"targets": 1.0, "adapt": 1.5, "distill": 1.5, "eval": 1.5, "report": 0.05}  # seconds into a stage


def start(runs: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "fewstep", "run", "quickstart", *KEYS, "--runs", str(runs)]
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)  # fmt: skip


def running(runs: Path, stage: str) -> Path | None:
    """Return the stage's folder while it is being worked on."""
    return next((f for f in runs.glob(f"{stage}-*") if f.is_dir() and not (f / "manifest.json").exists()), None)


def kill(runs: Path, stage: str, in_save: bool, rng: random.Random) -> bool:
    """Start the run and kill it in `stage`; return whether the kill landed there."""
    process = start(runs)
    while process.poll() is None and running(runs, stage) is None:
        time.sleep(0.005)
    if in_save:
        saves = rng.randint(1, 3)  # let a few pass
        while process.poll() is None and saves:
            folder = running(runs, stage)
            if folder is None:
                break
            if any((folder / "trainer_state").glob("tmp-*")):
                saves -= 1
                if saves:
                    while any((folder / "trainer_state").glob("tmp-*")):
                        time.sleep(0.0005)
            time.sleep(0.0005)
    else:
        time.sleep(rng.uniform(0, LATEST[stage]))
    folder = running(runs, stage)
    landed = folder is not None and process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    if landed and in_save:
        return any((folder / "trainer_state").glob("tmp-*"))
    return landed


def outcome(runs: Path) -> dict:
    """Return the hashes of weights and losses, and the scores."""
    named = json.loads((runs / "quickstart.json").read_text())["stages"]
    files = [f"{named[s]}/{f}" for s in ("adapt", "distill") for f in ("student/model.safetensors", "metrics.jsonl")]
    rows = json.loads((runs / named["eval"] / "results.json").read_text())["rows"]
    return {file: hashlib.sha256((runs / file).read_bytes()).hexdigest() for file in files} | {
        "scores": [[r["system"], r["sampler"], r["score"], r["tpf"], r["agreement"]] for r in rows]
    }


def finish(runs: Path) -> dict:
    done = start(runs)
    _, err = done.communicate()
    if done.returncode:
        raise SystemExit(f"{runs}: a run did not end after its kills: {err.decode()[-1000:]}")
    return outcome(runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng, landed, differ = random.Random(args.seed), Counter(), []
    with tempfile.TemporaryDirectory() as scratch:
        whole = finish(Path(scratch) / "whole")
        for number in range(args.rounds):
            runs = Path(scratch) / f"round-{number}"
            for stage, in_save in PLAN:
                if kill(runs, stage, in_save, rng):
                    landed[stage] += 1
                    landed["inside a save"] += in_save
            found = finish(runs)
            differ += [f"round {number}: {key}" for key in whole if whole[key] != found[key]]
            print(f"round {number}: {dict(landed)}, {len(differ)} differences", flush=True)
    kills = sum(count for key, count in landed.items() if key != "inside a save")
    print(f"{kills} kills, {landed['inside a save']} of them inside a save; {len(differ)} results differ")
    kept = {"command": "python benchmarks/kills.py", "date": str(date.today()), "commit": machine.commit(), "hardware": machine.hardware(), "versions": machine.versions(), "rows": [{"kills": kills, **landed, "differ": differ}]}  # fmt: skip
    write_atomic(RESULTS / "kills.json", json.dumps(kept, indent=1) + "\n")
    if differ:
        raise SystemExit("\n".join(differ))


if __name__ == "__main__":
    main()
