"""Are targets the same whatever runs the teacher: a server, vLLM in this process, and the same weights under transformers?

    llama-server -m teacher-f32.gguf -c 8192 -np 4 -ctk f32 -ctv f32 -fa off --port 8099
    python benchmarks/teachers.py http://127.0.0.1:8099/v1 --name llama.cpp --base FOLDER --prompts questions.jsonl --field turns
    python benchmarks/teachers.py vllm --name vllm --base FOLDER --prompts questions.jsonl --field turns

`--base` is the checkpoint that the server runs. Both answer greedily; log-probabilities are compared at every token up
to the first at which the texts part.
"""

import argparse
import json
import math
import tempfile
import time
from datetime import date
from pathlib import Path

import numpy as np

from fewstep import machine
from fewstep.records import read_rows
from fewstep.runstore import write_atomic
from fewstep.teachers import collect
from fewstep.teachers.config import KeepConfig, PromptsConfig, TargetsConfig, TeacherConfig

RESULTS = Path(__file__).parent / "results"
TARGETS = TargetsConfig(max_new_tokens=40, top_logprobs=8, shard_size=8, keep=KeepConfig(finished=False))


def ask(
    folder: Path, teacher: TeacherConfig, prompts: PromptsConfig, base: str | None = None
) -> tuple[list[dict], float]:
    folder.mkdir()
    start = time.monotonic()
    collect.run(folder, teacher, prompts, TARGETS, 0, None, base)
    return read_rows(folder), time.monotonic() - start


def compare(ours: list[dict], theirs: list[dict]) -> dict:
    """Return how many texts are the same, how far log-probabilities are apart, and how far mass is from 1."""
    apart, mass, unknown, both, either = [], [], 0, 0, 0
    for a, b in zip(ours, theirs, strict=True):
        for i in range(min(len(a["response_ids"]), len(b["response_ids"]))):
            if a["response_ids"][:i] != b["response_ids"][:i]:
                break
            if b["tail_mass"][i] == 1.0:
                unknown += 1
                continue
            here, there = (dict(zip(row["topk_ids"][i], row["topk_logprobs"][i])) for row in (a, b))
            both, either = both + len(here.keys() & there.keys()), either + len(here)
            apart += [abs(here[token] - there[token]) for token in here.keys() & there.keys()]
            mass.append(abs(sum(map(math.exp, there.values())) + b["tail_mass"][i] - 1))
    return {
        "prompts": len(ours), "same_texts": sum(a["response_ids"] == b["response_ids"] for a, b in zip(ours, theirs)),
        "same_top_k": both / either, "logprobs": len(apart), "median": float(np.median(apart)), "p99": float(np.quantile(apart, 0.99)), "max": max(apart),
        "mass": max(mass), "ends_without_distribution": unknown,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", help="the URL of a server, or vllm: its engine in this process")
    parser.add_argument("--base", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--field", default="instruction")
    parser.add_argument("--limit", type=int, default=24)
    parser.add_argument("--name", required=True, help="of the result: benchmarks/results/teacher-NAME.json")
    parser.add_argument("--versions", default="", help="of the server, for the record")
    args = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "prompts.jsonl"
        rows = [json.loads(line)[args.field] for line in args.prompts.read_text().splitlines()[: args.limit]]
        file.write_text("\n".join(json.dumps({"instruction": r if isinstance(r, str) else r[0]}) for r in rows))
        prompts = PromptsConfig(path=file, held_out=0.0)
        ours, seconds = ask(Path(scratch) / "ours", TeacherConfig(model=args.base, dtype="float32"), prompts)
        ways: dict[str, TeacherConfig] = {
            api: TeacherConfig(model=args.what, acknowledge="measured", endpoint={"api": api, "concurrency": 4})  # type: ignore[arg-type]
            for api in ("completions", "chat")
        }
        if args.what == "vllm":
            ways = {"in process": TeacherConfig(model=args.base, dtype="float32", runtime="vllm")}
        for way, teacher in ways.items():
            theirs, took = ask(Path(scratch) / way, teacher, prompts, args.base)
            found.append({"way": way, **compare(ours, theirs), "seconds": took, "seconds_at_hand": seconds})
            print(found[-1], flush=True)
    if args.what == "vllm" and not args.versions:
        import vllm

        args.versions = f"vLLM {vllm.__version__}"
    command = (
        f"python benchmarks/teachers.py {args.what} --name {args.name} --base {Path(args.base).name} "
        f"--prompts {args.prompts.name} --field {args.field} --limit {args.limit}"
    )
    kept = {"command": command, "server": args.versions, "base": Path(args.base).name, "date": str(date.today()), "commit": machine.commit(), "hardware": machine.hardware(), "versions": machine.versions(), "rows": found}  # fmt: skip
    write_atomic(RESULTS / f"teacher-{args.name}.json", json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
