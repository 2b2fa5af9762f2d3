"""Train a few steps of several configurations and compare what `fewstep plan` says they need with their measured peak.

    python benchmarks/memory.py

Each runs in a process of its own. The models have random weights of published shapes, the targets are random tokens.
An estimate off by more than its bound ends the script with exit code 1.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

from data_scale import write_targets

from fewstep import machine
from fewstep.distill.config import AdaptConfig, EngineConfig
from fewstep.distill.memory import on_device, training_memory
from fewstep.runstore import write_atomic
from fewstep.teachers.load import describe

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results"
TEACHER = ROOT / "recipes" / "quickstart" / "teacher"
BOUND = 0.15
ROWS, ROW = 400, 150  # targets, and the positions of one: its prompt, its response and a noisy copy
SMOL = dict(hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, vocab_size=49152, max_position_embeddings=2048, tie_word_embeddings=True)  # fmt: skip
CONFIGS: dict[str, tuple[dict | None, dict, dict]] = {
    "3M, plain": (None, {"batch_tokens": 1500}, {"name": "plain"}),
    "135M, plain": (SMOL, {"batch_tokens": 1500}, {"name": "plain"}),
    "135M, two micro-batches, ZeRO-1": (SMOL, {"batch_tokens": 3000, "gradient_accumulation_steps": 2}, {"zero_stage": 1}),
    "135M, LoRA of rank 16, plain": (SMOL, {"batch_tokens": 1500, "lora": {"rank": 16}}, {"name": "plain"}),
    "135M, recomputed, plain": (SMOL, {"batch_tokens": 1500}, {"name": "plain", "activation_checkpointing": True}),
}  # fmt: skip


def train(name: str, teacher: Path, targets: Path, folder: Path) -> None:
    from fewstep.distill import train as stage
    from fewstep.distill.config import TrackConfig
    from fewstep.students.config import StudentConfig

    _, training, engine = CONFIGS[name]
    config = AdaptConfig(max_steps=3, logging_steps=1, eval_steps=3, save_steps=3, **training)
    stage.run(folder, "adapt", config, StudentConfig(block_size=16), EngineConfig(threads=1, **engine), TrackConfig(),
              teacher, targets, 0, "memory")  # fmt: skip


def make_teacher(shape: dict, folder: Path) -> Path:
    """Write a Llama with random weights and the quickstart teacher's tokenizer."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(TEACHER)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    LlamaForCausalLM(LlamaConfig(**shape, **ids)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=CONFIGS)
    parser.add_argument("--train", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        return train(args.train[0], *map(Path, args.train[1:]))
    from fewstep.distill.estimate import trainable

    found = []
    with tempfile.TemporaryDirectory() as scratch:
        targets, smol = Path(scratch) / "targets", None
        write_targets(targets, ROWS)
        for name in args.only or CONFIGS:
            shape, training, engine = CONFIGS[name]
            if shape is not None and smol is None:
                smol = make_teacher(shape, Path(scratch) / "smol")
            teacher, folder = TEACHER if shape is None else smol, Path(scratch) / f"run-{len(found)}"
            folder.mkdir()
            facts, config = describe(str(teacher)), AdaptConfig(**training)
            learns = trainable(config, facts, facts["num_parameters"])
            parts = training_memory(config, EngineConfig(**engine), facts, learns, ROW, 1, gpu=False)
            subprocess.run([sys.executable, __file__, "--train", name, str(teacher), str(targets), str(folder)], check=True,
                           env=os.environ | {"OMP_NUM_THREADS": "1"})  # fmt: skip
            peak = max(json.loads(line)["memory_mb"] for line in (folder / "perf.jsonl").read_text().splitlines())
            estimated = on_device(parts) / 2**20
            found.append({"configuration": name, "estimated_mb": estimated, "measured_mb": peak, "ratio": estimated / peak,
                          "parts_mb": {part: size / 2**20 for part, size in parts.items()}})  # fmt: skip
            print(f"{name:<34} estimated {estimated:6.0f} MB, measured {peak:6.0f} MB: {estimated / peak:.2f}  ", {k: round(v) for k, v in found[-1]["parts_mb"].items()}, flush=True)  # fmt: skip
    if not args.only:
        kept = {"command": "python benchmarks/memory.py", "date": str(date.today()), "commit": machine.commit(), "hardware": machine.hardware(), "versions": machine.versions(), "rows": found}  # fmt: skip
        write_atomic(RESULTS / "memory.json", json.dumps(kept, indent=1) + "\n")
    if any(abs(row["ratio"] - 1) > BOUND for row in found):
        raise SystemExit("a bound is broken")


if __name__ == "__main__":
    main()
