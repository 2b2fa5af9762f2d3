"""One training stage, adapt or distill: the loop reads top to bottom."""

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from fewstep import machine
from fewstep.chat import eos_ids
from fewstep.distill import checkpoints, on_policy, trajectories
from fewstep.distill.config import EngineConfig, TrackConfig, TrainingConfig, check_training
from fewstep.distill.ema import Ema
from fewstep.distill.engine import build_engine, layout, prepare_environment, training_dtype
from fewstep.distill.examples import StepPlan, curriculum_block_size, draw_example, micro_batches
from fewstep.distill.meter import Meter
from fewstep.distill.recompute import checkpoint_activations
from fewstep.distill.samples import Sample, Samples, open_samples
from fewstep.distill.tracking import Tracker
from fewstep.distill.trainee import (
    NOISE_LEVELS,
    Trainee,
    coefficients,
    judged,
    load_objectives,
    noise_level,
    row_weights,
)
from fewstep.errors import RunFailed, Stopped, UserError
from fewstep.kernels import block_mask
from fewstep.progress import progress
from fewstep.signals import stop_requested
from fewstep.students.attention import attention_of
from fewstep.students.config import StudentConfig
from fewstep.students.convert import load_causal_lm, load_student, make_student, save_student
from fewstep.students.decoding import decode
from fewstep.students.layout import Batch, build_batch
from fewstep.students.lora import Adapter, apply_lora
from fewstep.students.probe import why_class_not_convertible

TABLE_ROWS = 8  # held-out samples that a tracker shows decoded
HELD_OUT_ROWS = 64  # samples behind a held-out loss: enough to see a trend, cheap enough to see it often


def run(
    folder: Path,
    stage: str,
    config: TrainingConfig,
    student: StudentConfig,
    engine: EngineConfig,
    track: TrackConfig,
    source: str | Path,
    targets: Path,
    seed: int,
    run_name: str,
    score: Callable | None = None,
) -> dict:
    """Train one stage to its end and write `student/`; a killed run goes on from its last checkpoint.

    Args:
        folder: the stage's own; gets student/, trainer_state/, metrics.jsonl, perf.jsonl.
        stage: "adapt" makes the student from an AR checkpoint, "distill" trains one on.
        source: the checkpoint to start from.
        targets: folder of the targets stage.
        score: the teacher, asked in on-policy rounds (teachers.scoring.Scorer).

    Returns:
        Facts for the manifest: steps, samples, last losses, parameters trained.

    Raises:
        RunFailed: a loss that is not finite, by step; the last good checkpoint is named.
        Stopped: a signal came; the state is saved.
    """
    ranks = machine.world_size()
    if config.on_policy is not None and engine.name == "deepspeed" and engine.zero_stage == 3 and ranks > 1:
        raise UserError(
            f"{stage}.on_policy: the student decodes on one rank, and engine.zero_stage 3 spreads it over {ranks}; use 2"
        )
    prepare_environment(engine)
    torch.manual_seed(seed)
    model, tokenizer, adapter = _load(stage, config, student, source, seed, training_dtype(engine.precision))
    facts = model.config.fewstep
    state_folder = folder / "trainer_state"
    topk = "kd" in config.used() or config.order == "nll"
    samples, held_out = (open_samples(targets, split, state_folder, topk) for split in ("train", "held_out"))
    samples, too_long = _fitting(samples, model)
    if not samples:
        raise RunFailed(
            f"{stage}: no target fits into the model's context ({too_long} are longer); shorten the prompts"
        )
    held_out = _fitting(held_out, model)[0][:HELD_OUT_ROWS]
    if config.order == "trajectory":
        recorded = model.to("cuda" if torch.cuda.is_available() else "cpu")
        trajectories.record(recorded, samples, folder / "trajectories", facts["block_size"])
        samples = trajectories.attach(samples, folder / "trajectories", state_folder)
    elif config.order == "nll":
        trajectories.nll_order(samples[0])  # refuses targets without log-probabilities now, not at a step
        samples = samples.ordered(lambda sample, place: trajectories.nll_order(sample))

    objectives = load_objectives(config.objectives)
    # eval mode throughout: the masks are the noise, and dropout would draw from a generator that no checkpoint holds
    trainee = Trainee(
        model, facts["attention"], facts["mask_token_id"], objectives, config.objectives, config.guess > 0
    ).eval()
    if engine.activation_checkpointing:
        checkpoint_activations(model)
    trained = [p for p in trainee.parameters() if p.requires_grad]
    # counted now: ZeRO-3 leaves a rank empty parameters
    num_parameters, num_trained = (sum(p.numel() for p in of) for of in (model.parameters(), trained))
    optimizer = torch.optim.AdamW(_groups(trained, config), lr=config.learning_rate, betas=(0.9, 0.95), fused=True)
    found, first_step = checkpoints.latest(state_folder), 0
    worker = build_engine(
        engine, trainee, optimizer, config.gradient_accumulation_steps, config.max_grad_norm, found and found[1].get("layout")
    )  # fmt: skip
    is_main = worker.rank == 0
    if found:
        worker.load(found[0])
        first_step = found[1]["step"]
    named = {name: p for name, p in worker.module.named_parameters() if p.requires_grad}
    ema = Ema(named, config.ema, worker.device) if config.ema else None
    if found and ema:
        ema.load(found[0])
    tracker = Tracker(
        folder, first_step, track, {"name": f"{run_name}-{stage}", "group": run_name, "job_type": stage, "config": config.model_dump(mode="json")}
    ) if is_main else None  # fmt: skip
    eos, context = _eos(model, tokenizer), _context(model)
    kept = samples[0].topk_ids
    num_topk = kept.shape[1] if "kd" in objectives and kept is not None else 0
    if "kd" in config.used() and not num_topk:
        raise UserError("objectives.kd: the targets carry no log-probabilities; set targets.top_logprobs above 0")

    least = worker.world_size * config.gradient_accumulation_steps
    row_tokens = max(1, config.batch_tokens // least) if engine.packing == "packed" else None
    decoding = model.config._attn_implementation
    by_blocks = row_tokens is not None and block_mask.serves(model, worker.device)
    if by_blocks:
        block_mask.prepare()
        model.set_attn_implementation("flex_attention")

    def batch_of(chosen: list[Sample], block_size: int, epoch: int, share: float) -> Batch:
        drawn = [draw_example(s, config, block_size, eos, seed, epoch, share, context) for s in chosen]
        batch = build_batch(
            drawn,
            facts["mask_token_id"],
            facts["attention"],
            config.fill_weight,
            num_topk,
            facts["alignment"],
            row_tokens,
            block_mask.BLOCK if by_blocks else 1,
        )
        return batch.to(worker.device)

    def save_state(step: int) -> None:
        state = {"step": step, "stage": stage, "layout": layout(engine)}

        def write(into: Path) -> None:
            worker.save(into)
            if ema:
                ema.save(into, worker.rank)

        checkpoints.save(state_folder, step, write, state, config.save_total_limit, is_main, worker.barrier)

    def next_round(number: int, step: int, begin: int) -> tuple[Samples, int]:
        path = on_policy.round_file(folder, number)
        if step > begin and not path.exists():
            raise RunFailed(
                f"{stage}: {path} is gone, on which steps {begin + 1} to {step} were trained; run from a new --runs folder"
            )
        if step > first_step and step % config.save_steps:
            save_state(step)  # the round may take long
        with worker.whole_weights(), attention_of(model, decoding):
            if is_main:
                on_policy.record(model, tokenizer, samples, config.on_policy, number, seed, path, score)
        on_policy.wait_for(path)  # no barrier: a round may outlast a collective's patience, or be stopped
        return on_policy.mixed(samples, path, config.on_policy.share, seed)

    if len(samples) < least:
        raise RunFailed(
            f"{stage}: {len(samples)} targets cannot fill {least} micro-batches; lower gradient_accumulation_steps"
        )
    plan, rounds = StepPlan(samples, config, facts["block_size"], seed, least), 0
    last: dict[str, float] = {}
    meter = Meter(num_parameters, frozen=adapter is not None, ranks=worker.world_size)
    with progress(stage, total=config.max_steps - first_step, unit="steps") as bar:
        for step in range(first_step, config.max_steps):
            share = step / config.max_steps
            if (number := on_policy.phase(step, config.max_steps, config.on_policy)) > rounds:
                rounds, begin = number, on_policy.begins(number, config.max_steps, config.on_policy)
                pool, wrong = next_round(number, step, begin)
                plan = StepPlan(pool, config, facts["block_size"], seed, least, begin, number)
                if tracker and step == begin:
                    tracker.log(step + 1, {"on_policy_round": number, "on_policy_wrong": wrong})
            block_size = curriculum_block_size(config, facts["block_size"], step, seed)
            epoch, indices = plan.at(step)
            mine = micro_batches(indices, worker.world_size, config.gradient_accumulation_steps)[worker.rank]
            batches = [batch_of([plan.samples[i] for i in group], block_size, epoch, share) for group in mine]

            # each objective is a mean over the whole step: all ranks, all micro-batches
            per_batch = [row_weights(batch, objectives) for batch in batches]
            totals = worker.all_sum([sum(w[name] for w in per_batch) for name in objectives])
            shares = coefficients(config.objectives, dict(zip(objectives, totals)), share)
            sums = {name: 0.0 for name in objectives}
            loss_sum = 0.0
            for i, batch in enumerate(batches):
                loss, parts = worker.forward(batch, shares)
                worker.backward(loss)
                if i + 1 < len(batches):
                    worker.micro_step()
                loss_sum += float(loss.detach())
                for name in objectives:
                    sums[name] += float(parts[name])
            reduced = worker.all_sum([loss_sum, *sums.values()])
            if not math.isfinite(reduced[0]):
                raise RunFailed(_not_finite(stage, step, reduced[0], state_folder))
            learning_rate = config.learning_rate * schedule(step, config)
            grad_norm = worker.step(learning_rate)
            if not math.isfinite(grad_norm):
                raise RunFailed(_not_finite(stage, step, grad_norm, state_folder, "gradient norm"))

            done = step + 1
            if ema:
                ema.update(done)
            meter.saw(batches)
            means = {n: s / t if t else 0.0 for n, s, t in zip(objectives, reduced[1:], totals)}
            if done % config.logging_steps == 0 or done == config.max_steps or done == 1:
                masked, perf = meter.read(batches, worker.all_sum)
                last = {
                    "loss": reduced[0],
                    **means,
                    "masked": masked,
                    "learning_rate": learning_rate,
                    "grad_norm": grad_norm,
                }
                if tracker:
                    tracker.log(done, last, perf)
            if held_out and (done % config.eval_steps == 0 or done == config.max_steps):
                measured = _held_out(worker, held_out, batch_of, facts["block_size"], objectives)
                last |= measured
                if tracker:
                    tracker.log(done, measured)
            bar.advance(1, note=f"loss {reduced[0]:.3f}")
            # every rank learns of a signal that one of them got, or they would part ways at the next collective
            signum = int(max(worker.all_max(stop_requested() or 0), 0))
            if done % config.save_steps == 0 or done == config.max_steps or signum:
                save_state(done)
            if signum and done < config.max_steps:
                raise Stopped(
                    signum, f"{stage}: stopped after step {done}; its state is saved, the same command goes on"
                )
    if ema:
        ema.give()
    with worker.whole_weights():
        if is_main:
            _write_student(model, tokenizer, folder, adapter, engine)
    worker.barrier()
    if is_main:
        for copied in ("samples", "orders"):
            shutil.rmtree(state_folder / copied, ignore_errors=True)
    if tracker:
        if tracker.on:
            # from the folder: what this rank holds of the model may be a part
            tracker.table("samples", lambda: _decoded(folder / "student", held_out[:TABLE_ROWS], facts["attention"]))
            tracker.lineage([targets] + ([Path(source).parent] if stage == "distill" else []), folder)
        tracker.close()
    return {
        "steps": config.max_steps,
        "samples": len(samples),
        "held_out": len(held_out),
        "too_long": too_long,
        "parameters_trained": num_trained,
        "last": last,
        "engine": type(worker).__name__,
        "world_size": worker.world_size,
        "resumed_from": first_step,
    }


def _groups(trained: list[torch.nn.Parameter], config: TrainingConfig) -> list[dict]:
    """Return the optimizer's parameter groups: matrices decay, where anything does, norms and biases do not."""
    if not config.weight_decay:
        return [{"params": trained, "weight_decay": 0.0}]
    matrices, vectors = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def schedule(step: int, config: TrainingConfig) -> float:
    """Return the learning rate of `step` as a share of its peak: warm-up, then cosine, linear or constant."""
    warmup = max(1, round(config.warmup_ratio * config.max_steps))
    if step < warmup:
        return (step + 1) / warmup
    share = (step - warmup) / max(1, config.max_steps - warmup)
    if config.lr_scheduler_type == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * share))
    return 1.0 - share if config.lr_scheduler_type == "linear" else 1.0


def _load(stage, config, student, source, seed, dtype) -> tuple:
    """Return (model, tokenizer, adapter or None) with every parameter that is to train marked so."""
    lora = config.lora
    if stage == "adapt":
        model, tokenizer = load_causal_lm(source, dtype)
        reason = why_class_not_convertible(model.config, model)
        if reason:
            raise UserError(
                f"checkpoint {source}: cannot become a student: {reason}; give one whose layers are attention"
            )
        facts = make_student(model, tokenizer, student, bool(lora and lora.gated), seed)
    else:
        model, tokenizer = load_student(source, dtype)
        facts = model.config.fewstep
        if facts["adapter"] == "gated":
            spec = json.loads((Path(source) / "fewstep_adapter" / "adapter.json").read_text())
            if lora is not None and (not lora.gated or lora.rank != spec["rank"]):
                raise UserError(
                    f"{stage}.lora: the student carries a gated adapter of rank {spec['rank']}, which is trained on; "
                    f"remove {stage}.lora or repeat it"
                )
            check_training(stage, config, facts["attention"], facts["alignment"], True, facts["block_size"])
            return model, tokenizer, Adapter(spec["rank"], spec["alpha"], True)
    check_training(
        stage, config, facts["attention"], facts["alignment"], facts["adapter"] == "gated", facts["block_size"]
    )
    if lora is None:
        return model.requires_grad_(True), tokenizer, None
    return model, tokenizer, apply_lora(model, lora.rank, lora.alpha, lora.gated, facts["mask_token_id"])


def _fitting(samples: Samples, model) -> tuple[Samples, int]:
    """Leave out samples that do not fit into the context; return how many were."""
    fits = samples.prompt_lengths + samples.response_lengths <= _context(model)
    return samples.only(fits), int((~fits).sum())


def _context(model) -> int:
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or 10**9


def _eos(model, tokenizer) -> int:
    """Return the token that ends a response and fills its last block."""
    eos = model.generation_config.eos_token_id
    if isinstance(eos, list):
        eos = tokenizer.eos_token_id if tokenizer.eos_token_id in eos else eos[0]
    return tokenizer.eos_token_id if eos is None else eos


@torch.no_grad()
def _held_out(worker, held_out, batch_of, block_size, objectives) -> dict[str, float]:
    """Return held-out means of every objective, and the share of masked positions that are right, in all and by noise."""
    totals, sums = {n: 0.0 for n in objectives}, {n: 0.0 for n in objectives}
    right, count = torch.zeros(NOISE_LEVELS), torch.zeros(NOISE_LEVELS)
    for first in range(0, len(held_out), 16):
        batch = batch_of(held_out[first : first + 16], block_size, -1, 1.0)  # epoch -1: the same masks every time
        _, parts = worker.forward(batch, {})
        for name, weight in row_weights(batch, objectives).items():
            totals[name] += weight
            sums[name] += float(parts[name])
        right += parts["right"].cpu()
        count += torch.bincount(noise_level(batch)[judged(batch)], minlength=NOISE_LEVELS).cpu()
    measured = {f"held_out_{n}": sums[n] / totals[n] for n in objectives if totals[n]}
    if count.any():
        measured["held_out_accuracy"] = float(right.sum() / count.sum())
    for level in count.nonzero().flatten().tolist():  # of blocks masked up to this share, in percent
        measured[f"held_out_accuracy_{100 * (level + 1) // NOISE_LEVELS}"] = float(right[level] / count[level])
    return measured


def _decoded(student: Path, samples: list[Sample], attention: str) -> tuple[list[str], list[list]]:
    """Return a table's columns and rows: prompts, the teacher's answers and the student's, which it decodes."""
    columns = ["prompt", "teacher", "student", "tokens a forward"]
    if not samples:
        return columns, []
    model, tokenizer = load_student(student)
    ways = {"sampler": "threshold"} if attention == "bidirectional" else {"sampler": "verify"}
    longest = max(len(s.response) for s in samples)
    answers = decode(model, [s.prompt.tolist() for s in samples], max_new_tokens=longest, eos_token_ids=eos_ids(model, tokenizer), **ways)  # fmt: skip
    text = lambda ids: tokenizer.decode(ids, skip_special_tokens=True)  # noqa: E731
    return columns, [
        [text(s.prompt), text(s.response), text(a.ids), round(len(a.ids) / a.nfe, 2)] for s, a in zip(samples, answers)
    ]


def _write_student(model, tokenizer, folder: Path, adapter: Adapter | None, engine: EngineConfig) -> None:
    """Write student/ beside its final name, then rename."""
    temporary, final = folder / ".student", folder / "student"
    shutil.rmtree(temporary, ignore_errors=True)
    model.eval()
    if adapter is not None and not adapter.gated:
        adapter.merge(temporary / "adapter")
    lora = {"rank": adapter.rank, "alpha": adapter.alpha} if adapter is not None and adapter.gated else None
    save_student(model, tokenizer, temporary, lora)
    shutil.rmtree(final, ignore_errors=True)
    os.rename(temporary, final)


def _not_finite(stage, step, value, state_folder, what="loss") -> str:
    found = checkpoints.latest(state_folder)
    good = f"the last good checkpoint is {found[0]}" if found else "no checkpoint was saved before it"
    return f"{stage}: the {what} is {value} at step {step + 1}; {good}; lower {stage}.learning_rate and run again"
