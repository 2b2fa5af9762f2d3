"""What each stage will need: tokens, FLOPs, memory, disk, time. Rough on purpose, and without weights.

P parameters, T tokens or positions. A forward takes 2·P FLOPs a position, training 6·P (4·P where the
base weights are frozen). Texts are taken at 4 bytes a token and answers at their full length, so
disk and decoding are upper bounds.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from fewstep.distill.config import TrainingConfig
from fewstep.distill.memory import PROCESS_BYTES, on_device, training_memory
from fewstep.distill.recipe import Recipe
from fewstep.machine import GPU_FLOPS, GPU_MEMORY, cores
from fewstep.teachers.prompts import read_few_shot, read_prompts

BYTES_PER_TOKEN = 4
UTILISATION = {"cpu": 0.6, "gpu": 0.35}  # share of the matrix-multiplication peak that whole models reach
CPU_FORWARD_S_PER_LAYER = 3e-4  # what one forward of one layer costs however small it is
CPU_BYTES_PER_S = 1e10  # at which weights stream from memory
BLOCKS_PER_ANSWER = 2.5  # forwards that a block takes, commits included, in the estimate of few-step decoding


@dataclass(frozen=True)
class Machine:
    """The device that the estimate is for."""

    name: str
    flops: float  # reached, per second
    gpu: bool
    assumption: str
    memory: float | None = None  # of a device; None: not known


@dataclass(frozen=True)
class Need:
    """What one stage needs; bytes and FLOPs."""

    tokens: int
    flops: float
    parts: dict[str, float]  # of memory, on one rank; `host` is what was offloaded
    disk: float
    forwards: float = 0.0  # sequential forwards, each of which streams the weights once

    @property
    def memory(self) -> float:
        """Bytes that a rank's device must have."""
        return on_device(self.parts)


def machine_for(recipe: Recipe) -> Machine:
    """Return the device that the recipe is planned for: the one it names, or this machine's."""
    if recipe.plan.device is not None:
        return _gpu(recipe.plan.device)
    name = _gpu_name()
    if name is not None:
        return _gpu(name)
    peak = _measure_cpu()
    reached = peak * UTILISATION["cpu"]
    text = f"{UTILISATION['cpu']:.0%} of the {peak / 1e9:,.0f} GFLOP/s (fp32) just measured on {cores()} CPU cores"
    return Machine("cpu", reached, False, text, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _gpu(name: str) -> Machine:
    known = next((short for short in GPU_FLOPS if short in name), None)
    peak = GPU_FLOPS.get(known or "", 1e14)
    text = f"{UTILISATION['gpu']:.0%} of {peak / 1e12:,.0f} TFLOP/s (bf16) on one {name}"
    return Machine(name, peak * UTILISATION["gpu"], True, text, GPU_MEMORY.get(known or ""))


def _gpu_name() -> str | None:
    """Return the first NVIDIA GPU's name without importing torch."""
    for information in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in information.read_text().splitlines():
            if line.startswith("Model:"):
                return line.split(":", 1)[1].strip()
    return None


def _measure_cpu() -> float:
    """Return the FLOPs per second of a float32 matrix product, best of five."""
    import time

    import numpy as np

    size = 1024
    a = np.ones((size, size), np.float32)
    best = min(_timed(lambda: a @ a, time.perf_counter) for _ in range(5))
    return 2 * size**3 / best


def _timed(work, clock) -> float:
    start = clock()
    work()
    return max(clock() - start, 1e-9)


def seconds(need: Need, facts: dict, machine: Machine) -> float:
    """Return the time of one stage: arithmetic, or the weights' way through memory where that is longer."""
    arithmetic = need.flops / machine.flops
    if machine.gpu:
        return arithmetic + need.forwards * (facts["num_layers"] or 1) * 5e-5
    streaming = 4 * (facts["num_parameters"] or 0) / CPU_BYTES_PER_S
    overhead = (facts["num_layers"] or 1) * CPU_FORWARD_S_PER_LAYER
    return max(arithmetic, need.forwards * streaming) + need.forwards * overhead


def estimate(recipe: Recipe, facts: dict, gpu: bool = False) -> dict[str, Need]:
    """Return what each stage of the recipe needs.

    Args:
        facts: the teacher's shape, as `teachers.load.describe` returns it.
        gpu: whether it runs on one: in 16 bits, unless the recipe says otherwise.
    """
    num_parameters = facts["num_parameters"] or 0
    targets = _targets(recipe, facts, num_parameters, gpu)
    needs = {"targets": targets}
    for stage in recipe.training():
        needs[stage] = _training(recipe, stage, facts, num_parameters, gpu)
    needs["eval"] = _eval(recipe, facts, num_parameters, gpu)
    report = Need(0, 0.0, {"process": 2e8}, 1e7)
    return needs | {"report": report, "publish": report}


def _decoding_memory(facts: dict, models: int, num_parameters: int, cached: int, gpu: bool) -> dict[str, float]:
    """Return the parts of a stage that decodes with `models` models and a cache of so many tokens."""
    size = 2 if gpu else 4
    return {
        "weights": float(models * size * num_parameters),
        "cache": _cache_bytes(facts, cached) * size / 4,
        "process": PROCESS_BYTES["gpu" if gpu else "cpu"],
    }


def _prompt_tokens(rows: list) -> int:
    return sum(len(m["content"].encode()) // BYTES_PER_TOKEN + 8 for row in rows for m in row.messages)


def _cache_bytes(facts: dict, tokens: int) -> float:
    heads = facts["num_heads"] or 1
    kv_width = (facts["hidden_size"] or 0) / heads * (facts["num_kv_heads"] or heads)
    return 2 * 4 * kv_width * (facts["num_layers"] or 0) * tokens


def _targets(recipe: Recipe, facts: dict, num_parameters: int, gpu: bool) -> Need:
    config = recipe.targets
    rows = read_prompts(recipe.prompts)
    prefix = sum(len(m["content"].encode()) // BYTES_PER_TOKEN + 8 for m in read_few_shot(config.few_shot))
    prompt = _prompt_tokens(rows)
    answers = (
        len(rows) * config.max_new_tokens * config.samples
    )  # that may be kept; up to `attempts` times as many are written
    longest = max(_prompt_tokens([row]) for row in rows) + prefix + config.max_new_tokens
    per_token = 12 + 8 * config.top_logprobs  # ids, tail and, for each kept one, an id and a log-probability
    saved = 4 * num_parameters if recipe.teacher.model.endswith(".gguf") else 0
    if recipe.teacher.is_endpoint:  # another machine's work: how long that takes is not known here
        process = {"process": PROCESS_BYTES["cpu"]}
        return Need(tokens=answers, flops=0.0, parts=process, disk=answers * per_token + 8 * prompt)
    return Need(
        tokens=answers,
        flops=2.0 * num_parameters * (prefix + (prompt * config.samples + answers) * config.attempts),
        parts=_decoding_memory(facts, 1, num_parameters, longest * config.batch_size, gpu),
        disk=answers * per_token + 8 * prompt + saved,
        forwards=-(-len(rows) * config.samples // config.batch_size) * config.max_new_tokens * config.attempts,
    )


def trainable(config: TrainingConfig, facts: dict, num_parameters: int) -> int:
    """Return how many parameters a stage trains: all, or those of its adapters."""
    if config.lora is None:
        return num_parameters
    hidden, inner = facts["hidden_size"] or 0, facts["intermediate_size"] or 4 * (facts["hidden_size"] or 0)
    heads = facts["num_heads"] or 1
    kv_width = hidden // heads * (facts["num_kv_heads"] or heads)
    ends = 4 * hidden + 2 * (hidden + kv_width) + 3 * (hidden + inner)  # q, o; k, v; gate, up, down
    return (facts["num_layers"] or 0) * config.lora.rank * ends


def typical_row(recipe: Recipe, config: TrainingConfig, rows: list | None = None) -> int:
    """Return the positions, clean and noisy, of a sample with a prompt of mean length and the longest answer."""
    rows = read_prompts(recipe.prompts) if rows is None else rows
    copies = config.copies * (2 if config.complementary else 1)
    return _prompt_tokens(rows) // len(rows) + recipe.targets.max_new_tokens * (1 + copies)


def training(recipe: Recipe, stage: str, facts: dict, gpu: bool, row: int) -> Need:
    """Return the memory that a rank needs for a training stage, and nothing else about it."""
    config = recipe.training()[stage]
    learns = trainable(config, facts, facts["num_parameters"] or 0)
    return Need(0, 0.0, training_memory(config, recipe.engine, facts, learns, row, recipe.plan.ranks, gpu), 0.0)


def _training(recipe: Recipe, stage: str, facts: dict, num_parameters: int, gpu: bool) -> Need:
    config = recipe.training()[stage]
    positions = config.max_steps * config.batch_tokens
    looks = (config.guess > 0) + ("consistency" in config.used())  # forwards of a step that give no gradient
    learns = trainable(config, facts, num_parameters)
    checkpoint = 12 * learns  # float32 weights and both moments
    # A trajectory-ordered stage decodes every target once with the student it starts from, one token a step.
    rows = read_prompts(recipe.prompts)
    written = len(rows) * recipe.targets.samples * recipe.targets.max_new_tokens
    ordered = written if config.order == "trajectory" else 0
    decoding = 2.0 * num_parameters * ordered * recipe.student.block_size
    texts = 0 if config.on_policy is None else config.on_policy.rounds * config.on_policy.prompts
    answer, size = recipe.targets.max_new_tokens, recipe.student.block_size
    drafted = texts * -(-answer // size) * BLOCKS_PER_ANSWER  # forwards, were every text alone
    # the student decodes in blocks, then the teacher, which is in memory from then on, reads every text once
    decoding += 2.0 * num_parameters * (drafted * size + texts * answer)
    parts = training(recipe, stage, facts, gpu, typical_row(recipe, config, rows)).parts
    if texts:
        parts["teacher"] = float((2 if gpu else 4) * num_parameters)
    topk = 12 + 8 * recipe.targets.top_logprobs
    copied = written * topk + 4 * _prompt_tokens(rows) * recipe.targets.samples  # samples as flat files
    return Need(
        tokens=positions,
        flops=((6.0 if config.lora is None else 4.0) + 2.0 * looks) * num_parameters * positions + decoding,
        parts=parts,
        disk=4 * (num_parameters + learns)
        + checkpoint * (config.save_total_limit + 1)
        + (4 * learns * (config.save_total_limit + 1) if config.ema else 0)
        + copied
        + 16 * ordered
        + texts * answer * (12 + 8 * recipe.targets.top_logprobs),
        forwards=(3.0 + looks) * config.max_steps * config.gradient_accumulation_steps + ordered / 16 + drafted / 64,
    )


def _eval(recipe: Recipe, facts: dict, num_parameters: int, gpu: bool) -> Need:
    config = recipe.eval
    answer = config.max_new_tokens or recipe.targets.max_new_tokens
    settings = sum(len(s.settings()) for s in config.samplers)
    few_step = settings * (2 if "undistilled" in config.baselines and recipe.distill is not None else 1)
    plain = 2 + ("teacher" in config.baselines)  # the student's own AR decoding, timed in two ways, and the teacher's
    tokens, flops, forwards = 0, 0.0, 0.0
    for task in config.tasks:
        rows = read_prompts(task.prompts)
        blocks = -(-answer // recipe.student.block_size)
        batches = -(-len(rows) // config.batch_size)
        timed = min(config.speed_prompts, len(rows))
        tokens += len(rows) * answer * (few_step + plain)
        positions = len(rows) * (few_step * blocks * BLOCKS_PER_ANSWER * recipe.student.block_size + plain * answer)
        flops += 2.0 * num_parameters * (positions + _prompt_tokens(rows) * (few_step + plain))
        forwards += (batches + timed) * (few_step * blocks * BLOCKS_PER_ANSWER + plain * answer)
    parts = _decoding_memory(facts, 3, num_parameters, config.batch_size * 2 * answer, gpu)
    return Need(tokens=tokens, flops=flops, parts=parts, disk=60.0 * tokens, forwards=forwards)
