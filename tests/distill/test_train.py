"""The training stage on a tiny model and a tiny copying task."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel

from fewstep import records
from fewstep.distill import train
from fewstep.distill import trainee as trainee_module
from fewstep.distill.config import AdaptConfig, DistillConfig, EngineConfig, LoraConfig, TrackConfig
from fewstep.distill.ema import Ema
from fewstep.distill.examples import draw_example
from fewstep.distill.samples import open_samples
from fewstep.distill.tracking import Tracker
from fewstep.distill.trainee import Trainee, load_objectives
from fewstep.errors import RunFailed, Stopped, UserError
from fewstep.students.config import StudentConfig
from fewstep.students.convert import load_causal_lm, load_student, make_student
from fewstep.students.decoding import decode
from fewstep.students.layout import body_hidden, build_batch
from fewstep.students.lora import apply_lora
from tests.tiny import tiny_model, tiny_tokenizer

EOS = None


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A teacher folder, and targets that repeat the prompt's token three times, with top-4 log-probs."""
    root = tmp_path_factory.mktemp("train")
    tokenizer = tiny_tokenizer()
    model = tiny_model("llama", vocab=len(tokenizer), seed=0, dtype=torch.float32)
    model.save_pretrained(root / "teacher")
    tokenizer.save_pretrained(root / "teacher")
    eos = tokenizer.eos_token_id
    rng = np.random.default_rng(0)
    rows = []
    for i in range(48):
        token = int(rng.integers(10, 20))
        response = [token] * int(rng.integers(3, 9)) + [eos]
        topk = [[t, (t + 1) % 10, 3, 4] for t in response]
        rows.append(
            dict(sample_id=f"s{i}", prompt_ids=[5, token, 6], response_ids=response, finish_reason="stop", topk_ids=topk,
                 topk_logprobs=[[float(np.log(0.9))] + [float(np.log(0.03))] * 3] * len(response),
                 tail_mass=[0.01] * len(response), text="", reference="", split="train" if i < 40 else "held_out")
        )  # fmt: skip
    (root / "targets" / "shards").mkdir(parents=True)
    records.write_shard(root / "targets" / "shards" / "00000.parquet", rows)
    return root


def go(world, folder, stage="adapt", source=None, engine=None, student=None, score=None, **keys):
    config = (AdaptConfig if stage == "adapt" else DistillConfig)(
        **(
            {
                "max_steps": 12,
                "batch_tokens": 300,
                "learning_rate": 3e-3,
                "save_steps": 4,
                "eval_steps": 6,
                "logging_steps": 1,
            }
            | keys
        )
    )
    folder.mkdir(parents=True, exist_ok=True)
    return train.run(
        folder, stage, config, student or StudentConfig(block_size=4), engine or EngineConfig(name="plain"),
        TrackConfig(), source or world / "teacher", world / "targets", 0, "test", score,
    )  # fmt: skip


def weights(folder):
    return load_file(folder / "student" / "model.safetensors")


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_adapt_learns_and_the_student_still_loads_as_a_plain_ar_model(world, tmp_path):
    summary = go(world, tmp_path, max_steps=60, batch_tokens=600)
    losses = [m["ce"] for m in metrics(tmp_path) if "ce" in m]
    assert losses[-1] < 0.5 * losses[0]
    assert summary["last"]["held_out_ce"] < losses[0]
    model, tokenizer = load_student(tmp_path / "student")
    plain, _ = load_causal_lm(tmp_path / "student")
    prompt = [5, 12, 6]
    ids = plain.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0, 3:].tolist()
    got = decode(model, [prompt], sampler="verify", max_new_tokens=8, eos_token_ids=[tokenizer.eos_token_id])
    assert got[0].ids == ids
    assert (tmp_path / "student" / "custom_generate" / "generate.py").is_file()


@pytest.mark.parametrize("gated", [False, True])
def test_learned_positions_are_trained_up_to_the_last_one(world, tmp_path, gated):
    """The longest answers end where GPT-2's table of positions does, and so must what fills their last block."""
    tokenizer, longest = tiny_tokenizer(), 3 + 9  # prompt, and eight tokens with their EOS
    config = GPT2Config(
        vocab_size=len(tokenizer), n_embd=16, n_head=2, n_layer=1, n_positions=longest,
        bos_token_id=1, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    given = dict(objectives={"ce": 1.0}, lora=LoraConfig(rank=2, gated=True)) if gated else {}
    summary = go(world, tmp_path, source=tmp_path / "gpt2", max_steps=6, **given)
    assert summary["too_long"] == 0
    model, _ = load_student(tmp_path / "student")
    answer = decode(model, [[5, 12, 6]], sampler="threshold", max_new_tokens=30, eos_token_ids=[])[0]
    assert len(answer.ids) == longest - 3
    if gated:
        trained = load_file(tmp_path / "student" / "fewstep_adapter" / "adapter.safetensors")
        moved = [name for name, value in trained.items() if name.endswith("lora_b") and value.any()]
        assert len(moved) == 4  # all linear layers of its one block


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_equals_plain(world, tmp_path, stage):
    go(world, tmp_path / "plain", gradient_accumulation_steps=2)
    go(world, tmp_path / "ds", engine=EngineConfig(zero_stage=stage), gradient_accumulation_steps=2)
    a, b = weights(tmp_path / "plain"), weights(tmp_path / "ds")
    assert a.keys() == b.keys()
    # ZeRO flattens parameters and sums norms in another order: fp32 rounding, amplified by Adam's first steps
    assert max(float((a[k] - b[k]).abs().max()) for k in a) <= 1e-5


@pytest.mark.parametrize("stage, offload", [(1, "optimizer"), (3, "all")])
def test_offloaded_state_and_recomputed_activations_change_nothing(world, tmp_path, stage, offload):
    keys = {"ema": 0.7, "weight_decay": 0.1}
    go(world, tmp_path / "plain", **keys)
    engine = EngineConfig(zero_stage=stage, offload=offload, activation_checkpointing=True)
    go(world, tmp_path / "ds", engine=engine, **keys)
    a, b = weights(tmp_path / "plain"), weights(tmp_path / "ds")
    assert max(float((a[k] - b[k]).abs().max()) for k in a) <= 1e-5
    go(world, tmp_path / "again", engine=EngineConfig(name="plain", activation_checkpointing=True), **keys)
    c = weights(tmp_path / "again")
    assert all(torch.equal(a[k], c[k]) for k in a)  # a CPU computes the same thing twice


def test_the_student_is_the_mean_of_the_weights_where_one_is_asked_for(world, tmp_path):
    seen = []

    class Watched(Ema):
        def update(self, step):
            super().update(step)
            seen.append({n: p.detach().clone() for n, p in self.parameters.items()})

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(train, "Ema", Watched)
        go(world, tmp_path / "mean", ema=0.9)
    go(world, tmp_path / "last")
    last, student = weights(tmp_path / "last"), weights(tmp_path / "mean")
    start = load_file(world / "teacher" / "model.safetensors")
    for name in ("model.layers.0.mlp.up_proj.weight", "model.norm.weight"):
        mean = start[name].double()
        for step, now in enumerate(seen, 1):
            d = min(0.9, (1 + step) / (10 + step))
            mean = d * mean + (1 - d) * now[f"model.{name}"].double()
        assert torch.equal(seen[-1][f"model.{name}"], last[name])  # it does not touch the training
        assert float((student[name] - mean).abs().max()) < 1e-6 < float((student[name] - last[name]).abs().max())


def test_norms_and_biases_never_decay(world, tmp_path):
    go(world, tmp_path / "none", objectives={"ce": 1e-12}, max_grad_norm=1e-9, learning_rate=1e-2)
    go(world, tmp_path / "some", objectives={"ce": 1e-12}, max_grad_norm=1e-9, learning_rate=1e-2, weight_decay=2.0)
    a, b = weights(tmp_path / "none"), weights(tmp_path / "some")
    for name in a:
        shrunk = float(b[name].norm() / a[name].norm())
        assert (shrunk < 0.95) if a[name].ndim > 1 else shrunk == pytest.approx(1.0, abs=1e-3), (name, shrunk)


def test_accumulation_does_not_change_the_result(world, tmp_path):
    go(world, tmp_path / "one")
    go(world, tmp_path / "three", gradient_accumulation_steps=3)
    first = [(m["ce"], m["ar"]) for m in metrics(tmp_path / "one") if "ce" in m][0]
    other = [(m["ce"], m["ar"]) for m in metrics(tmp_path / "three") if "ce" in m][0]
    assert first == pytest.approx(other, abs=1e-6)
    a, b = weights(tmp_path / "one"), weights(tmp_path / "three")
    assert max(float((a[k] - b[k]).abs().max()) for k in a) <= 1e-4  # 12 Adam steps on sums taken in another order


@pytest.mark.parametrize("engine", ["plain", "deepspeed"])
def test_stopped_and_resumed_equals_undisturbed_bit_for_bit(world, tmp_path, engine, monkeypatch):
    engine = EngineConfig(name=engine)
    go(world, tmp_path / "whole", engine=engine, ema=0.8, logging_steps=4)
    asked = iter([None] * 5 + [15])
    monkeypatch.setattr(train, "stop_requested", lambda: next(asked, None))
    with pytest.raises(Stopped, match="step 6"):
        go(world, tmp_path / "cut", engine=engine, ema=0.8, logging_steps=4)
    monkeypatch.undo()
    assert not (tmp_path / "cut" / "student").exists()
    with open(tmp_path / "cut" / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "loss": 1.0}\n{"step": 8, "lo')  # what a kill after the checkpoint may leave
    summary = go(world, tmp_path / "cut", engine=engine, ema=0.8, logging_steps=4)
    assert summary["resumed_from"] == 6
    a, b = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert (tmp_path / "whole" / "metrics.jsonl").read_text() == (tmp_path / "cut" / "metrics.jsonl").read_text()


def test_damaged_newest_checkpoint_falls_back_to_the_one_before(world, tmp_path):
    go(world, tmp_path)
    state = tmp_path / "trainer_state"
    assert sorted(p.name for p in state.glob("step-*")) == ["step-00000008", "step-00000012"]
    file = next((state / "step-00000012").glob("*.pt"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    before = weights(tmp_path)
    shutil.rmtree(tmp_path / "student")
    assert go(world, tmp_path)["resumed_from"] == 8
    after = weights(tmp_path)
    assert all(torch.equal(before[k], after[k]) for k in before)


def test_nan_stops_with_the_step_and_the_last_good_checkpoint(world, tmp_path, monkeypatch):
    real = train.schedule
    monkeypatch.setattr(train, "schedule", lambda step, config: float("nan") if step == 8 else real(step, config))
    with pytest.raises(RunFailed, match=r"nan at step 10.*step-00000008"):
        go(world, tmp_path)


def test_lora_trains_only_the_adapter_and_the_mask_row_and_is_merged(world, tmp_path):
    go(world, tmp_path, lora=LoraConfig(rank=4))
    base, tuned = load_file(world / "teacher" / "model.safetensors"), weights(tmp_path)
    mask = json.loads((tmp_path / "student" / "config.json").read_text())["fewstep"]["mask_token_id"]
    name = next(k for k in base if "embed_tokens" in k)
    rows = len(base[name])
    same = (base[name] == tuned[name][:rows]).all(1)
    assert all(same[i] for i in range(rows) if i != mask)
    assert any(not torch.equal(base[k], tuned[k]) for k in base if "q_proj" in k)
    assert not (tmp_path / "student" / "adapter_config.json").exists()
    assert (tmp_path / "student" / "adapter" / "adapter_config.json").is_file()


def test_gated_lora_leaves_the_base_bit_equal_and_verify_gives_the_teachers_text(world, tmp_path):
    go(world, tmp_path / "adapt", lora=LoraConfig(rank=4, gated=True), objectives={"ce": 1.0})
    base, kept = load_file(world / "teacher" / "model.safetensors"), weights(tmp_path / "adapt")
    assert base.keys() == kept.keys() and all(torch.equal(base[k], kept[k]) for k in base)
    go(
        world,
        tmp_path / "distill",
        "distill",
        tmp_path / "adapt" / "student",
        objectives={"ce": 1.0, "kd": 0.5},
        order="nll",
    )
    kept = weights(tmp_path / "distill")
    assert all(torch.equal(base[k], kept[k]) for k in base)
    a, b = (
        load_file(tmp_path / s / "student" / "fewstep_adapter" / "adapter.safetensors") for s in ("adapt", "distill")
    )
    assert any(not torch.equal(a[k], b[k]) for k in a)
    teacher, tokenizer = load_causal_lm(world / "teacher")
    model, _ = load_student(tmp_path / "distill" / "student")
    for token in range(10, 20):
        ids = teacher.generate(torch.tensor([[5, token, 6]]), max_new_tokens=10, do_sample=False)[0, 3:].tolist()
        got = decode(
            model, [[5, token, 6]], sampler="verify", max_new_tokens=10, eos_token_ids=[tokenizer.eos_token_id]
        )
        assert got[0].ids == ids


def test_distill_records_trajectories_once_and_refuses_foreign_ones(world, tmp_path):
    go(world, tmp_path / "adapt")
    summary = go(world, tmp_path / "distill", "distill", tmp_path / "adapt" / "student")
    assert {"ce", "ar", "kd", "certainty"} <= set(summary["last"])
    shard = tmp_path / "distill" / "trajectories" / "00000.parquet"
    stamp = shard.stat().st_mtime_ns
    go(world, tmp_path / "distill", "distill", tmp_path / "adapt" / "student")
    assert shard.stat().st_mtime_ns == stamp
    import pyarrow.parquet as pq

    table = pq.read_table(shard, partitioning=None).to_pydict()
    assert all(sorted(o[:4]) == list(range(4)) for o in table["order"] if len(o) >= 4)
    table["order"][0] = table["order"][0][:-1]
    import pyarrow as pa

    pq.write_table(pa.table(table), shard)
    with pytest.raises(RunFailed, match="s0.*record them anew"):
        go(world, tmp_path / "distill", "distill", tmp_path / "adapt" / "student")


@pytest.mark.parametrize(
    "keys, message",
    [
        (dict(lora=LoraConfig(rank=4, gated=True)), "objectives.ar"),
        (dict(student=StudentConfig(block_size=4, attention="bidirectional")), "objectives.ar"),
        (dict(objectives={"magic": 1.0}), "magic"),
        (dict(block_sizes=(4, 8)), "block_sizes"),
        (dict(guess=0.5), "adapt.guess"),
        (dict(objectives={"ce": 1.0, "correction": 1.0}), "adapt.guess"),
        (dict(objectives={"ce": 1.0, "correction": 1.0}, guess=1.0), "adapt.guess: 1 leaves"),
        (dict(guess_noise=0.5), "adapt.guess_noise"),
        (
            dict(
                student=StudentConfig(block_size=4, alignment="shifted"),
                guess=0.5,
                objectives={"ce": 1.0, "correction": 1.0},
            ),
            "adapt.guess: 0.5, but student.alignment is shifted",
        ),
        (
            dict(
                student=StudentConfig(block_size=4, alignment="shifted", attention="bidirectional"),
                objectives={"ce": 1.0},
                random_offset=0.0,
            ),
            "student.alignment: shifted",
        ),
        (
            dict(
                student=StudentConfig(block_size=4, attention="bidirectional"),
                objectives={"ce": 1.0},
                random_offset=0.0,
                on_policy={"prompts": 4},
            ),
            "adapt.on_policy: a bidirectional",
        ),
        (dict(reveal=0.3), "adapt.reveal"),
        (dict(right_weighted=0.3, complementary=True), "leans the other way"),
        (dict(right_weighted=0.3, suffix=1.0), "masked at random"),
        (dict(right_weighted=0.3, order="nll"), "masked at random"),
        (dict(objectives={"ce": {"weight": 1.0, "temperature": 0.5}}), "objectives.ce.temperature"),
        (dict(objectives={"ce": 1.0, "certainty": {"weight": 1.0, "divergence": "reverse"}}), "certainty.divergence"),
    ],
)
def test_impossible_combinations_are_named(world, tmp_path, keys, message):
    with pytest.raises(UserError, match=message):
        go(world, tmp_path, **keys)


ALL = {"ce": 1.0, "ar": 0.5, "kd": {"weight": 0.5, "divergence": "reverse"}, "certainty": 0.5, "correction": 1.0, "consistency": 1.0}  # fmt: skip


def test_an_objective_of_weight_zero_changes_nothing(world, tmp_path):
    go(world, tmp_path / "with", objectives={"ce": 1.0, "consistency": 0.0, "certainty": 0.0})
    go(world, tmp_path / "without", objectives={"ce": 1.0})
    a, b = weights(tmp_path / "with"), weights(tmp_path / "without")
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_every_objective_and_state_at_once_and_deepspeed_equals_plain(world, tmp_path):
    keys = {"objectives": ALL, "guess": 0.5, "suffix": 0.3, "anchor": 0.3, "right_weighted": 0.3, "random_block_size": 0.4, "copies": 2}  # fmt: skip
    summary = go(world, tmp_path / "plain", **keys)
    assert all(summary["last"][f"held_out_{name}"] > 0 for name in ALL)
    go(world, tmp_path / "ds", engine=EngineConfig(zero_stage=3), **keys)
    a, b = weights(tmp_path / "plain"), weights(tmp_path / "ds")
    assert max(float((a[k] - b[k]).abs().max()) for k in a) <= 1e-5


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2), LoraConfig(rank=2, gated=True)], ids=["full", "lora", "gated"])  # fmt: skip
@pytest.mark.parametrize("attention", ["block", "block_causal_inside", "bidirectional"])
def test_guessed_positions_hold_the_guesses_and_later_states_their_own_masks(
    world, tmp_path, monkeypatch, attention, lora
):
    if lora and lora.gated and attention == "bidirectional":
        pytest.skip("no such student")
    model, tokenizer = load_causal_lm(world / "teacher")
    student = StudentConfig(block_size=4, attention=attention)
    mask = make_student(model, tokenizer, student, bool(lora and lora.gated), 0)["mask_token_id"]
    if lora:
        apply_lora(model, lora.rank, lora.alpha, lora.gated, mask)
    config = AdaptConfig(objectives={"ce": 1.0, "correction": 1.0, "consistency": 1.0}, guess=0.5)
    samples = open_samples(world / "targets", "train", tmp_path)[:12]
    drawn = [draw_example(s, config, 4, tokenizer.eos_token_id, 0, 0, 0.0) for s in samples]
    batch = build_batch(drawn, mask, attention, 0.1)
    trainee = Trainee(model, attention, mask, load_objectives(config.objectives), config.objectives, True).eval()
    seen = []

    def hidden(model, batch, attention):
        seen.append(batch.ids.clone())
        return body_hidden(model, batch, attention)

    monkeypatch.setattr(trainee_module, "body_hidden", hidden)
    loss, sums = trainee(batch, {"correction": 1.0, "consistency": 1.0})
    loss.backward()
    guessing, later, trained = seen
    assert torch.equal(guessing, batch.ids)

    @torch.no_grad()
    def logits(ids):  # of every supervised row
        out = model.get_output_embeddings()(body_hidden(model, replace(batch, ids=ids), attention)[batch.rows])
        return torch.cat(
            [out[:, :mask], out[:, mask + 1 :]], -1
        )  # a mask token that is no row of the head cuts nothing

    guesses = logits(batch.ids)[batch.guessed].argmax(-1)
    assert torch.equal(trained.flatten()[batch.rows[batch.guessed]], guesses + (guesses >= mask))
    here, then = (logits(ids)[batch.still].log_softmax(-1) for ids in (trained, later))
    divergence = (then.exp() * (then - here)).sum(-1) * batch.weight[batch.still]
    assert float(sums["consistency"]) == pytest.approx(float(divergence.sum()), rel=1e-4) and divergence.sum() > 1e-4
    for b, e in enumerate(drawn):
        n, C = len(e.noisy), batch.ids.shape[1] - batch.num_noisy
        assert (trained[b] == mask).sum() == (0 if e.guess else e.masks.sum())
        assert torch.equal(later[b, C : C + n], torch.from_numpy(np.where(e.later[0], mask, e.noisy)))
        assert torch.equal(later[b, :C], batch.ids[b, :C])


def test_a_shifted_student_trains_and_its_folder_says_so(world, tmp_path):
    summary = go(
        world, tmp_path, student=StudentConfig(block_size=4, alignment="shifted"), max_steps=60, batch_tokens=600
    )
    assert summary["last"]["held_out_ce"] < 0.5 * [m["ce"] for m in metrics(tmp_path) if "ce" in m][0]
    model, tokenizer = load_student(tmp_path / "student")
    assert model.config.fewstep["alignment"] == "shifted"
    prompt = dict(max_new_tokens=8, eos_token_ids=[tokenizer.eos_token_id])
    own = decode(model, [[5, 12, 6]], sampler="ar", **prompt)[0]
    drafted = decode(model, [[5, 12, 6]], sampler="verify", **prompt)[0]
    assert drafted.ids == own.ids and drafted.nfe < own.nfe  # it reads its drafts where it was taught to write them


def test_bidirectional_student_trains_and_decodes(world, tmp_path):
    student = StudentConfig(block_size=4, attention="bidirectional")
    go(world, tmp_path, student=student, objectives={"ce": 1.0}, random_offset=0.0)
    model, tokenizer = load_student(tmp_path / "student")
    got = decode(model, [[5, 12, 6]], sampler="threshold", max_new_tokens=10, eos_token_ids=[tokenizer.eos_token_id])
    assert 1 <= len(got[0].ids) <= 10


def test_plain_generate_after_few_step_decoding_is_still_the_base(world, tmp_path):
    go(world, tmp_path, lora=LoraConfig(rank=4, gated=True), objectives={"ce": 1.0})
    model, tokenizer = load_student(tmp_path / "student")
    prompt = torch.tensor([[5, 12, 6]])

    def plain():
        with torch.no_grad():
            return model(prompt).logits

    before = plain()
    decode(model, [[5, 12, 6]], sampler="threshold", max_new_tokens=8, eos_token_ids=[tokenizer.eos_token_id])
    assert torch.equal(plain(), before)


def test_wandb_offline_gets_the_run_and_is_never_in_the_way(world, tmp_path, monkeypatch, capfd):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    track = TrackConfig(wandb={"project": "test", "mode": "online"})  # no key here: falls back to offline
    logged = []
    lineage = Tracker.lineage

    def watched(self, read, made):
        monkeypatch.setattr(self._wandb, "log_artifact", lambda artifact: logged.append(artifact))
        lineage(self, read, made)

    monkeypatch.setattr(Tracker, "lineage", watched)
    train.run(
        tmp_path, "adapt", AdaptConfig(max_steps=2, batch_tokens=300), StudentConfig(block_size=4),
        EngineConfig(name="plain"), track, world / "teacher", world / "targets", 0, "test",
    )  # fmt: skip
    assert len((tmp_path / "wandb_run_id").read_text()) == 8
    assert list((tmp_path / "trainer_state").rglob("*.wandb"))
    assert [m["step"] for m in metrics(tmp_path) if "ce" in m]
    table = json.loads(next((tmp_path / "trainer_state").rglob("*.table.json")).read_text())
    assert table["columns"] == ["prompt", "teacher", "student", "tokens a forward"] and len(table["data"]) == 8
    assert [a.name for a in logged] == [tmp_path.name] and logged[0].metadata["read"] == ["targets"]
    assert "W&B" not in capfd.readouterr().err


def test_a_tracker_in_trouble_costs_a_line_and_no_run(world, tmp_path, monkeypatch, capsys):
    def broken(self, work):
        raise RuntimeError("no")

    import wandb

    monkeypatch.setattr(wandb, "Table", broken)
    train.run(
        tmp_path, "adapt", AdaptConfig(max_steps=2, batch_tokens=300), StudentConfig(block_size=4),
        EngineConfig(name="plain"), TrackConfig(wandb={"project": "test"}), world / "teacher", world / "targets", 0, "t",
    )  # fmt: skip
    assert (tmp_path / "student" / "config.json").is_file() and "W&B: " in capsys.readouterr().err


def test_what_was_masked_and_what_was_right_is_told_by_noise(world, tmp_path):
    go(world, tmp_path, max_steps=40, noise=(0.5, 1.0), eval_steps=40)
    rows = metrics(tmp_path)
    assert all(0.5 < row["masked"] <= 1 for row in rows if "loss" in row)
    last = rows[-1]
    by_noise = {key: value for key, value in last.items() if key.startswith("held_out_accuracy_")}
    assert "held_out_accuracy_100" in by_noise and "held_out_accuracy_25" not in by_noise
    assert min(by_noise.values()) <= last["held_out_accuracy"] <= max(by_noise.values())
    perf = [json.loads(line) for line in (tmp_path / "perf.jsonl").read_text().splitlines()]
    assert all(row["positions_per_s"] > 0 and "mfu" not in row for row in perf)
