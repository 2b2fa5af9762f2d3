"""A step's loss and gradients however its samples are laid out, and the training stage with packed rows."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fewstep.distill import train
from fewstep.distill.chain import chain
from fewstep.distill.config import AdaptConfig, EngineConfig, LoraConfig, ObjectiveConfig
from fewstep.distill.examples import draw_example
from fewstep.distill.recipe import load_recipe
from fewstep.distill.samples import Sample
from fewstep.distill.trainee import Trainee, coefficients, load_objectives, row_weights
from fewstep.errors import Stopped
from fewstep.kernels import block_mask
from fewstep.students import layout
from fewstep.students.config import StudentConfig
from fewstep.students.layout import CLEAN, build_batch
from tests.students.builders import EOS, MASK, student
from tests.students.test_packing import softmax_in_fp64  # noqa: F401  (a fixture)

from .test_train import ALL, go, metrics, weights, world  # noqa: F401  (a fixture)

K, ROW_TOKENS = 3, 70  # a packed row holds one to three of the samples below
OFTEN = (3, 4, 5)  # tokens that the samples often hold and the students often say: some of their guesses are right
LENGTHS = ((3, 5), (9, 12), (6, 7), (4, 1), (12, 17), (5, 9))  # prompt and response
OBJECTIVES = ["ce", "ar", "kd forward", "kd reverse", "kd total_variation", "certainty", "consistency", "correction"]
STUDENTS = [("llama", "block"), ("mistral", "block"), ("gemma2", "block"), ("llama", "block_causal_inside"), ("gemma2", "bidirectional")]  # fmt: skip
FAST = STUDENTS[:1] + STUDENTS[-1:]  # the others are left to the slow tests
CASES = [
    pytest.param(o, *s, marks=() if s in FAST else pytest.mark.slow)
    for s in STUDENTS
    for o in OBJECTIVES
    if s[1] != "bidirectional" or o.split()[0] not in ("ar", "kd")
]


def draw(attention, on_policy=False):
    """Return six examples of unequal length with all that an objective may read: guesses, later states, teacher's rows."""
    rng = np.random.default_rng(2)
    config = AdaptConfig(
        objectives=ALL, guess=0.4, suffix=0.3, copies=1 if on_policy or attention == "bidirectional" else 2,
        random_offset=0.0 if attention == "bidirectional" else 0.7,
    )  # fmt: skip
    out = []
    for i, (prompt, response) in enumerate(LENGTHS):
        ids = np.where(
            rng.random(prompt + response) < 0.5,
            rng.choice(OFTEN, prompt + response),
            rng.integers(3, MASK, prompt + response),
        )
        ids[-1] = EOS
        teacher = np.log(rng.dirichlet(np.full(MASK, 0.3), response))  # of every token but the mask's
        top = np.argsort(-teacher, axis=-1)[:, :K]
        kept = np.take_along_axis(teacher, top, -1)
        own = on_policy and i % 2 == 0
        sample = Sample(
            f"s{i}", ids[:prompt], ids[prompt:], True, top, kept.astype(np.float32),
            (1 - np.exp(kept).sum(-1)).astype(np.float32), on_policy=own,
        )  # fmt: skip
        out.append(draw_example(sample, config, 4, EOS, seed=0, epoch=0, progress=0.0))
    assert {e.guess for e in out} == {True, False}
    return out


def lay(examples, attention, row_tokens):
    return build_batch(examples, MASK, attention, 0.1, K, row_tokens=row_tokens)


def trained(name, family, attention):
    """Return (a student in fp64 under one objective, its settings), as the stage has them."""
    name, _, divergence = name.partition(" ")
    settings = {name: ObjectiveConfig(weight=0.7, temperature=0.8, divergence=divergence or "forward")}
    model = student(family, attention)
    with torch.no_grad():
        model.get_output_embeddings().weight[list(OFTEN)] *= 2
    return Trainee(model, attention, MASK, load_objectives(settings), settings, guesses=True)


def loss_and_gradients(trainee, batches):
    """One optimizer step up to its update, as `distill/train` takes it."""
    trainee.zero_grad()
    totals = {name: 0.0 for name in trainee.objectives}
    for batch in batches:
        for name, weight in row_weights(batch, trainee.objectives).items():
            totals[name] += weight
    total = 0.0
    for batch in batches:
        loss, _ = trainee(batch, coefficients(trainee.settings, totals, 0.0))
        loss.backward()
        total += float(loss.detach())
    return total, {n: p.grad.clone() for n, p in trainee.named_parameters() if p.grad is not None}


def assert_equal(ours, theirs, tolerance):
    """Compare two steps; the head and its loss are fp32 whatever the body is."""
    assert theirs[0] > 1e-3 and abs(ours[0] - theirs[0]) <= tolerance * theirs[0]
    assert ours[1].keys() == theirs[1].keys()
    for name, gradient in theirs[1].items():
        assert gradient.any(), name
        assert (ours[1][name] - gradient).abs().max() <= tolerance * gradient.abs().max(), name


@pytest.mark.parametrize("objective, family, attention", CASES)
@pytest.mark.usefixtures("softmax_in_fp64")
def test_packing_and_accumulation_change_neither_loss_nor_gradients(objective, family, attention):
    trainee, examples = trained(objective, family, attention), draw(attention)
    whole = loss_and_gradients(trainee, [lay(examples, attention, None)])
    for row_tokens in (None, ROW_TOKENS, 1000):
        for size in (6, 2, 1):  # micro-batches of 6, of 2 and of 1
            batches = [lay(examples[i :: 6 // size], attention, row_tokens) for i in range(6 // size)]
            assert row_tokens is None or size == 1 or sum(len(b.ids) for b in batches) < 6
            assert_equal(loss_and_gradients(trainee, batches), whole, 1e-6)


@pytest.mark.parametrize("row_tokens", [None, ROW_TOKENS])
@pytest.mark.parametrize("objective, family, attention", CASES)
def test_padding_and_labels_of_weight_zero_are_inert(objective, family, attention, row_tokens):
    trainee, batch = trained(objective, family, attention), lay(draw(attention), attention, row_tokens)
    rng = torch.Generator().manual_seed(0)

    def other(ids, where):
        return torch.where(where, torch.randint(3, MASK, ids.shape, generator=rng), ids)

    (unused,) = (objective.weights(batch) == 0 for objective in trainee.objectives.values())
    assert unused.any() and not batch.valid.all()
    changed = replace(
        batch,
        ids=other(batch.ids, ~batch.valid),
        later_ids=other(batch.later_ids, ~batch.valid),
        labels=other(batch.labels, unused),
        topk_ids=other(batch.topk_ids, unused[:, None]),
        topk_logprobs=torch.where(unused[:, None], batch.topk_logprobs - 1.0, batch.topk_logprobs),
        tail_mass=torch.where(unused, 0.5 * batch.tail_mass, batch.tail_mass),
    )
    assert not torch.equal(changed.ids, batch.ids) and not torch.equal(changed.labels, batch.labels)
    assert_equal(loss_and_gradients(trainee, [changed]), loss_and_gradients(trainee, [batch]), 0.0)


@pytest.mark.parametrize("row_tokens", [None, ROW_TOKENS])
@pytest.mark.parametrize("objective", [o for o in OBJECTIVES if o != "ar"])
def test_labels_of_visible_positions_are_inert(objective, row_tokens):
    """The teacher's labels of a student's text, and its distributions, count at masked positions alone."""
    trainee, examples = trained(objective, "llama", "block"), draw("block", on_policy=True)
    before = loss_and_gradients(trainee, [lay(examples, "block", row_tokens)])
    labels = distributions = 0
    for e in examples:
        visible = ~e.masks[:, : len(e.response)].any(0)
        distributions += int(visible.sum())
        e.topk_ids, e.topk_logprobs, e.tail_mass = (v.copy() for v in (e.topk_ids, e.topk_logprobs, e.tail_mass))
        e.topk_ids[visible] = (e.topk_ids[visible] + 5) % MASK
        e.topk_logprobs[visible] -= 1.0
        if e.labels is not None:
            e.labels = np.where(visible, (e.labels + 7) % MASK, e.labels)
            labels += int(visible.sum())
    assert labels and distributions > labels
    assert_equal(loss_and_gradients(trainee, [lay(examples, "block", row_tokens)]), before, 0.0)


@pytest.mark.parametrize("row_tokens", [None, ROW_TOKENS])
@pytest.mark.parametrize("attention", ["block", "block_causal_inside", "bidirectional"])
def test_no_row_is_supervised_but_the_responses_and_masked_positions(attention, row_tokens):
    examples = draw(attention)
    batch = lay(examples, attention, row_tokens)
    assert len(set(batch.rows.tolist())) == len(batch.rows)
    seg, ids, valid = batch.seg.flatten(), batch.ids.flatten(), batch.valid.flatten()
    clean, noisy = batch.rows[batch.clean], batch.rows[~batch.clean]
    responses = [] if attention == "bidirectional" else np.concatenate([e.response for e in examples]).tolist()
    assert batch.labels[batch.clean].tolist() == responses  # no token of a prompt
    assert ids[clean + 1].tolist() == responses and (seg[clean + 1] == CLEAN).all() and valid[clean + 1].all()
    assert sorted(noisy.tolist()) == ((seg != CLEAN) & (ids == MASK) & valid).nonzero()[:, 0].tolist()


def test_the_clean_stream_is_blind_to_the_noisy_copies():
    trainee, examples = trained("ar", "llama", "block"), draw("block")
    for row_tokens in (None, ROW_TOKENS):
        before = loss_and_gradients(trainee, [lay(examples, "block", row_tokens)])
        others = [replace(e, noisy=(e.noisy + 3) % MASK, masks=~e.masks, later=e.later & ~e.masks) for e in examples]
        assert_equal(loss_and_gradients(trainee, [lay(others, "block", row_tokens)]), before, 1e-6)  # chunks differ


def test_packing_names_no_stage(recipe_file):
    hashes = [
        {name: stage.hash for name, stage in chain(load_recipe(recipe_file, [f"engine.packing={value}"])).items()}
        for value in ("packed", "padded")
    ]
    assert hashes[0] == hashes[1]


@pytest.fixture
def num_rows(monkeypatch):
    """The rows of every batch that a stage builds, beside its samples."""
    seen = []

    def build(examples, *args, **keys):
        batch = build_batch(examples, *args, **keys)
        seen.append((len(batch.ids), len(examples)))
        return batch

    monkeypatch.setattr(train, "build_batch", build)
    return seen


def far(a, b) -> float:
    a, b = weights(a), weights(b)
    assert a.keys() == b.keys()
    return max(float((a[k] - b[k]).abs().max()) for k in a)


@pytest.mark.parametrize(
    "keys",
    [
        dict(objectives=ALL, guess=0.5, suffix=0.3, copies=2),
        dict(objectives={"ce": 1.0}, lora=LoraConfig(rank=2, gated=True)),
        dict(objectives={"ce": 1.0}, random_offset=0.0, student=StudentConfig(block_size=4, attention="bidirectional")),
    ],
    ids=["all", "gated", "bidirectional"],
)
def test_packed_run_equals_padded(world, tmp_path, num_rows, keys):  # noqa: F811
    for name in ("padded", "packed"):
        num_rows.clear()
        go(world, tmp_path / name, engine=EngineConfig(name="plain", packing=name), **keys)
        assert all(
            rows == samples if name == "padded" else rows < samples or samples == 1 for rows, samples in num_rows
        )
    first = [[m for m in metrics(tmp_path / name) if "grad_norm" in m][0] for name in ("padded", "packed")]
    assert first[0] == pytest.approx(first[1], rel=1e-6)
    # sums over rows of another width: fp32 rounding, amplified by Adam's first steps as between engines
    assert far(tmp_path / "padded", tmp_path / "packed") <= 1e-5


def test_packed_under_deepspeed_with_accumulation_and_a_resume(world, tmp_path, num_rows, monkeypatch):  # noqa: F811
    engine, keys = EngineConfig(zero_stage=1, packing="packed"), dict(gradient_accumulation_steps=3, batch_tokens=400)
    go(world, tmp_path / "padded", engine=EngineConfig(name="plain", packing="padded"), **keys)
    num_rows.clear()
    go(world, tmp_path / "whole", engine=engine, **keys)
    assert sum(rows for rows, _ in num_rows) < 0.5 * sum(samples for _, samples in num_rows)
    # ZeRO flattens parameters and sums norms in another order, as without packing
    assert far(tmp_path / "padded", tmp_path / "whole") <= 1e-4
    asked = iter([None] * 5 + [15])
    monkeypatch.setattr(train, "stop_requested", lambda: next(asked, None))
    with pytest.raises(Stopped, match="step 6"):
        go(world, tmp_path / "cut", engine=engine, **keys)
    monkeypatch.setattr(train, "stop_requested", lambda: None)
    assert go(world, tmp_path / "cut", engine=engine, **keys)["resumed_from"] == 6
    assert far(tmp_path / "whole", tmp_path / "cut") == 0.0


def test_where_flex_attention_serves_packed_rows_are_trained_with_it(world, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(train.block_mask, "serves", lambda model, device: True)
    widths = []
    body = layout.body_hidden

    def seen(model, batch, attention):
        widths.append((model.config._attn_implementation, batch.ids.shape[1] % block_mask.BLOCK))
        return body(model, batch, attention)

    monkeypatch.setattr("fewstep.distill.trainee.body_hidden", seen)
    with (
        torch.compiler.set_stance("force_eager"),
        pytest.raises(RuntimeError, match="does not support backward on CPU"),
    ):
        go(world, tmp_path / "packed", engine=EngineConfig(name="plain", packing="packed"))
    assert widths == [("flex_attention", 0)]  # a step reached the layers; only CUDA has the backward pass
    widths.clear()
    go(world, tmp_path / "padded", engine=EngineConfig(name="plain"))
    assert {how for how, _ in widths} == {"sdpa"}
