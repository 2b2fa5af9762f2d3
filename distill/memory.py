"""How much memory one rank needs, part by part; without weights and without torch.

P parameters, T trained ones, N ranks. What a byte count per parameter stands for:

| | 16-bit (GPU) | 32-bit (CPU) |
|---|---|---|
| weights | 2 | 4 |
| gradients | 2, and 4 for the optimizer's | 4, under ZeRO as much again for the optimizer's |
| optimizer | 12: master and both moments | 8, under ZeRO 12: it keeps a copy of the weights |

ZeRO-1 divides the optimizer's share by N, ZeRO-2 the gradients too, ZeRO-3 the weights too. The sums for 16 bits are those
of DeepSpeed's own estimators.
"""

from fewstep.distill.config import EngineConfig, TrainingConfig

PROCESS_BYTES = {"cpu": 4.6e8, "gpu": 8e8}  # Python and the libraries; on a GPU its context and their workspaces
# What autograd keeps of a position and layer: 10 tensors of the hidden width and 4 of the inner one (Llama, SDPA).
HIDDEN_KEPT, INNER_KEPT = 10, 4
# A CPU's allocator keeps what batches of other shapes left behind; a GPU's caches by size and wastes less.
SLACK = {"cpu": 1.25, "gpu": 1.1}
# Of what recomputing gives up, a CPU's allocator keeps about a third: measured, benchmarks/memory.py.
KEPT_DESPITE = {"cpu": 0.35, "gpu": 0.0}
CHUNK_ROWS, CHUNK_COPIES = 256, 4  # rows of logits at a time (kernels/linear_rows_loss), and how often they exist


def training_memory(
    config: TrainingConfig, engine: EngineConfig, facts: dict, learns: int, row: int, ranks: int, gpu: bool
) -> dict[str, float]:
    """Return part → bytes on one rank; `host` is what was offloaded, and counts towards no device.

    Args:
        facts: the teacher's shape (`teachers.load.describe`).
        learns: T.
        row: positions of a typical sample, clean and noisy.
        ranks: N.
    """
    kind = "gpu" if gpu else "cpu"
    total = facts["num_parameters"] or 0
    frozen = 0 if config.lora is None else total
    short = engine.precision == "bf16" or (engine.precision == "auto" and gpu)
    size = 2 if short else 4
    stage = engine.zero_stage if engine.name == "deepspeed" else 0
    hidden, inner = facts["hidden_size"] or 0, facts["intermediate_size"] or 4 * (facts["hidden_size"] or 0)
    parts = _states(learns, ranks, engine, short)
    parts["host" if engine.offload == "all" else "weights"] += size * frozen / (ranks if stage == 3 else 1)
    if stage == 3:
        parts["weights"] += 2 * size * largest_layer(facts)  # gathered, and its gradient
    if config.lora is not None and not config.lora.gated:
        parts["weights"] += (
            4 * size * hidden * (facts["vocab_size"] or 0)
        )  # the mask token's row: PEFT copies the matrix
        parts["saving"] = size * frozen  # merged into a copy of the weights
    if config.ema:
        parts["optimizer"] += 4 * learns / (ranks if stage == 3 else 1)
    positions = config.batch_tokens / config.gradient_accumulation_steps / ranks
    layer = positions * (HIDDEN_KEPT * hidden + INNER_KEPT * inner) * size
    layers = facts["num_layers"] or 0
    kept = layers * layer
    if engine.activation_checkpointing:
        kept = max(KEPT_DESPITE[kind] * kept, layers * positions * hidden * size + layer)
    wide = positions if engine.packing == "packed" else row
    # and dense masks; flex_attention's, which some classes have on a GPU, are smaller
    parts["activations"] = SLACK[kind] * kept + positions * wide * (1 + size)
    parts["logits"] = CHUNK_COPIES * min(CHUNK_ROWS, positions) * (facts["vocab_size"] or 0) * 4
    parts["process"] = PROCESS_BYTES[kind]
    return parts


def largest_layer(facts: dict) -> int:
    """Return the parameters of the largest module that ZeRO-3 gathers: usually the embedding."""
    hidden, inner = facts["hidden_size"] or 0, facts["intermediate_size"] or 4 * (facts["hidden_size"] or 0)
    return hidden * max(facts["vocab_size"] or 0, inner)


def _states(learns: int, ranks: int, engine: EngineConfig, short: bool) -> dict[str, float]:
    """Return the bytes of what is trained, its gradients and the optimizer's state on one rank."""
    weights, gradients, optimizer = (2, 2, 12) if short else (4, 4, 8)
    stage = engine.zero_stage if engine.name == "deepspeed" else 0
    if short:
        own = 4  # gradients in 32 bits
    else:
        own, optimizer = (4, 12) if stage else (0, 8)
    by = {kind: ranks if stage >= least else 1 for kind, least in (("optimizer", 1), ("gradients", 2), ("weights", 3))}
    parts = {
        "weights": weights * learns / by["weights"],
        "gradients": gradients * learns / by["gradients"] + own * learns / by["optimizer"],
        "optimizer": optimizer * learns / by["optimizer"],
        "host": 0.0,
    }
    if stage == 3 and short:
        parts["gradients"] -= 2 * learns / ranks  # DeepSpeed reduces them into the 32-bit ones as they come
    if stage and not short:
        parts["saving"] = optimizer * learns / ranks  # DeepSpeed copies the optimizer's share to write it
    moved = {"none": (), "optimizer": ("optimizer", "gradients"), "all": ("optimizer", "gradients", "weights")}[
        engine.offload
    ]
    for part in moved:
        parts["host"] += parts[part]
        parts[part] = 0.0
    return parts


def on_device(parts: dict[str, float]) -> float:
    """Return the bytes that the rank's device must have."""
    return sum(size for part, size in parts.items() if part != "host")
