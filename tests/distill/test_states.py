"""Every state: deterministic by key, at least one mask a block, and its own promise."""

import numpy as np
import pytest

from fewstep.distill.config import AdaptConfig, DistillConfig
from fewstep.distill.examples import curriculum_block_size, draw_example, epoch_steps, keyed_rng, micro_batches
from fewstep.distill.samples import Sample
from fewstep.distill.states import anchor, noise, suffix, trajectory, two_step
from fewstep.students.layout import block_index, filled_length

EOS = 1


def sample(length=21, finished=True, order=False, sid="a"):
    response = np.arange(3, 3 + length)
    made = Sample(sid, np.array([5, 6]), response, finished, None, None, None)
    made.order = keyed_rng("order").permutation(length) if order else None
    return made


def has_a_mask_in_every_block(masks, block):
    return all(m[block == b].any() for m in masks for b in range(block[-1] + 1))


@pytest.mark.parametrize("seed", range(5))
def test_states_mask_every_block(seed):
    block = block_index(23, 8, 3)
    rng = np.random.default_rng(seed)
    for drawn in (
        noise.masks(block, rng, 0.0, 0.05, 3),
        suffix.masks(block, rng, 3),
        trajectory.masks(block, rng.permutation(23), rng, 0.0, 0.1, 3),
    ):
        assert drawn.shape == (3, 23) and has_a_mask_in_every_block(drawn, block)


def test_noise_levels_are_spread_evenly_over_a_samples_blocks():
    block = block_index(4000, 1000, 1000)
    share = noise.masks(block, np.random.default_rng(0), 0.0, 1.0, 5).reshape(5, 4, 1000).mean(-1)
    gaps = np.diff(np.sort(share.flatten()))
    assert np.abs(gaps - 1 / 20).max() < 0.06  # 20 levels, 1/20 apart; 1000 draws each have a deviation of ≤0.016


def test_suffix_masks_reach_the_end_of_their_block():
    block = block_index(24, 8, 8)
    for m in suffix.masks(block, np.random.default_rng(1), 4):
        for b in range(3):
            inside = m[block == b]
            assert inside[-1] and not (np.diff(inside.astype(int)) < 0).any()


def test_trajectory_masks_the_positions_decided_last():
    block = block_index(8, 8, 8)
    order = np.array([3, 0, 7, 1, 2, 6, 5, 4])
    masked = trajectory.masks(block, order, np.random.default_rng(0), 0.5, 0.5, 1)[0]
    assert sorted(order[masked]) == [4, 5, 6, 7]
    with pytest.raises(ValueError, match="record it anew"):
        trajectory.masks(block, order[:-1], np.random.default_rng(0), 0.5, 0.5, 1)


@pytest.mark.parametrize("config", [AdaptConfig(complementary=True), DistillConfig()], ids=["adapt", "distill"])
def test_examples_depend_on_seed_epoch_and_sample_alone(config):
    def draw(*key, **kw):
        return draw_example(sample(order=True, **kw), config, 8, EOS, *key, 0.5)

    a, b = draw(0, 3), draw(0, 3)
    assert np.array_equal(a.masks, b.masks) and np.array_equal(a.block, b.block)
    others = [draw(1, 3), draw(0, 4), draw(0, 3, sid="b")]
    assert any(x.masks.shape != a.masks.shape or not np.array_equal(x.masks, a.masks) for x in others)


def test_complementary_copies_supervise_every_position():
    config = AdaptConfig(complementary=True)
    for epoch in range(20):
        e = draw_example(sample(), config, 8, EOS, 0, epoch, 0.0)
        assert e.masks.shape[0] == 2 and e.masks.any(0).all()
        assert has_a_mask_in_every_block(e.masks, e.block)


@pytest.mark.parametrize("length, first", [(1, 1), (5, 8), (8, 8), (9, 8), (21, 3), (3, 3), (4, 3)])
def test_last_block_is_filled_and_a_cut_response_gets_no_eos(length, first):
    n = filled_length(length, 8, first)
    assert n >= length and n - length < 8 and (n == first or (n - first) % 8 == 0)
    config = AdaptConfig(random_offset=0.0)
    whole, cut = (draw_example(sample(length, f), config, 8, EOS, 0, 0, 0.0) for f in (True, False))
    assert (whole.noisy[length:] == EOS).all() and len(whole.noisy) % 8 == 0
    assert len(cut.noisy) == length


def test_the_fill_ends_where_the_models_positions_do():
    """A learned position has no row beyond the context, and in decoding the last block is shorter there too."""
    made = sample(9, order=True)
    for epoch in range(20):
        for config in (AdaptConfig(complementary=True), DistillConfig()):
            for room in (9, 10, 1000):
                e = draw_example(made, config, 8, EOS, 0, epoch, 0.5, context=len(made.prompt) + room)
                free = draw_example(made, config, 8, EOS, 0, epoch, 0.5)
                assert len(e.noisy) == len(e.block) == e.masks.shape[1] == min(room, len(free.noisy))
                assert has_a_mask_in_every_block(e.masks, e.block)


def test_every_sample_is_in_one_step_of_an_epoch_whatever_the_world():
    costs = np.random.default_rng(0).integers(20, 200, 137).tolist()
    for least in (1, 4):
        steps = epoch_steps(costs, 900, 0, 2, least)
        assert sorted(i for s in steps for i in s) == list(range(137))
        assert min(map(len, steps)) >= least
        same, other = ([s.tolist() for s in epoch_steps(costs, 900, 0, epoch, least)] for epoch in (2, 3))
        assert [s.tolist() for s in steps] == same != other
        assert np.mean([max(costs[i] for i in s) * len(s) <= 900 for s in steps]) > 0.9


def test_ranks_and_accumulation_deal_the_same_groups():
    step = list(range(11))
    two_ranks = micro_batches(step, 2, 1)
    two_micro = micro_batches(step, 1, 2)
    assert [two_ranks[0][0], two_ranks[1][0]] == two_micro[0]
    assert sorted(i for rank in micro_batches(step, 2, 3) for group in rank for i in group) == step


def masked_share(config, progress, **kw):
    shares = []
    for epoch in range(200):
        e = draw_example(sample(16, order=True, **kw), config, 16, EOS, 0, epoch, progress)
        shares.append(e.masks.mean())
    return min(shares), max(shares)


@pytest.mark.parametrize("order", ["noise", "nll"])
def test_noise_moves_to_noise_end_over_the_stage(order):
    config = AdaptConfig(order=order, noise=(0.1, 0.3), noise_end=(0.8, 1.0), random_offset=0.0)
    assert config.noise_at(0.0) == (0.1, 0.3) and config.noise_at(1.0) == (0.8, 1.0)
    assert config.noise_at(0.5) == pytest.approx((0.45, 0.65))
    early, late = masked_share(config, 0.0), masked_share(config, 1.0)
    slack = 0.06 if order == "nll" else 0.35  # counts are exact by order and binomial at random
    assert early[1] < 0.3 + slack and late[0] > 0.8 - slack
    constant = AdaptConfig(order=order, noise=(0.1, 0.3), random_offset=0.0)
    assert masked_share(constant, 1.0)[1] < 0.3 + slack


def test_order_share_says_how_many_samples_are_masked_by_order():
    made = sample(16, order=True)

    def follows_order(config, epoch, progress=0.0):
        masked = draw_example(made, config, 16, EOS, 0, epoch, progress).masks[0]
        return made.order[masked].min() > made.order[~masked].max(initial=-1)

    for share in (0.0, 0.4, 1.0):
        config = AdaptConfig(order="nll", order_share=share, noise=(0.3, 0.7), random_offset=0.0)
        found = np.mean([follows_order(config, epoch) for epoch in range(400)])
        assert abs(found - share) < 0.08  # 400 draws: a deviation of at most 0.025


@pytest.mark.parametrize("order, applies", [("nll", True), ("trajectory", False)])
def test_a_recorded_trajectory_is_not_used_on_shifted_blocks(order, applies):
    made = sample(16, order=True)
    config = DistillConfig(order=order, noise=(0.5, 0.5), noise_end=None, random_offset=1.0, suffix=0.0)
    hits = []
    for epoch in range(60):
        e = draw_example(made, config, 16, EOS, 0, epoch, 0.0)
        order_of = np.concatenate([made.order, 100 + np.arange(len(e.noisy) - 16)])
        hits.append(all(order_of[(e.block == b) & e.masks[0]].min() > order_of[(e.block == b) & ~e.masks[0]].max(initial=-1) for b in range(e.block[-1] + 1)))  # fmt: skip
    assert np.mean(hits) == 1.0 if applies else np.mean(hits) < 0.5


@pytest.mark.parametrize("level", [0.2, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("right", [0.0, 0.5, 0.9])
def test_masking_that_leans_right_keeps_the_level_and_moves_the_masks(right, level):
    block = block_index(80_000, 8, 8)
    share = noise.masks(block, np.random.default_rng(0), level, level, 1, right).reshape(10_000, 8).mean(0)
    lean = right * np.linspace(-1, 1, 8) * min(level, 1 - level)
    assert share == pytest.approx(level + lean, abs=0.04 if level < 0.5 else 0.02)  # a block has at least one mask
    assert noise.masks(block_index(3, 1, 1), np.random.default_rng(0), 0.0, 0.1, 1, right).all()


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_anchor_shows_the_first_position_of_its_share_of_blocks(share):
    block = block_index(8_000, 8, 3)
    begins = np.searchsorted(block, np.unique(block))
    whole = np.ones((2, 8_000), bool)
    out = anchor.unmask(whole, block, np.random.default_rng(0), share)
    assert 1 - out[:, begins].mean() == pytest.approx(share, abs=0.05)
    assert np.delete(out, begins, 1).all() and has_a_mask_in_every_block(out, block)
    only_first = np.zeros((1, 8_000), bool)
    only_first[0, begins] = True
    assert np.array_equal(anchor.unmask(only_first, block, np.random.default_rng(0), share), only_first)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("reveal", [0.1, 0.5, 0.9])
def test_the_later_state_shows_more_of_the_same_block(reveal, ordered):
    block = block_index(35, 8, 3)
    rng = np.random.default_rng(0)
    order = rng.permutation(35) if ordered else None
    masks = noise.masks(block, rng, 0.1, 1.0, 4)
    later = two_step.later(masks, block, order, rng, reveal)
    assert not (later & ~masks).any()
    for m, then in zip(masks, later):
        for b in range(block[-1] + 1):
            before, after = np.flatnonzero(m & (block == b)), np.flatnonzero(then & (block == b))
            shown = np.setdiff1d(before, after)
            assert len(shown) == max(1, min(round(reveal * len(before)), len(before) - 1))
            assert order is None or not len(after) or order[shown].max() < order[after].min()


def test_guessed_samples_are_masked_at_their_own_level_and_have_no_later_state():
    config = AdaptConfig(
        objectives={"ce": 1.0, "correction": 1.0, "consistency": 1.0}, guess=0.5, guess_noise=1.0, noise=(0.4, 0.6)
    )
    drawn = [draw_example(sample(16), config, 8, EOS, 0, epoch, 0.0) for epoch in range(200)]
    assert np.mean([e.guess for e in drawn]) == pytest.approx(0.5, abs=0.1)
    for e in drawn:
        assert e.masks.all() == e.guess and e.later.any() != e.guess


def test_an_anchor_stays_visible_in_complementary_copies():
    config = AdaptConfig(anchor=1.0, complementary=True, random_offset=0.0)
    for epoch in range(20):
        blocks = draw_example(sample(16), config, 8, EOS, 0, epoch, 0.0).masks.reshape(4, 8)  # two copies of two blocks
        assert all(not block[0] or block.sum() == 1 for block in blocks)


def test_block_size_is_drawn_in_the_last_share_of_the_steps():
    config = AdaptConfig(max_steps=400, block_sizes=(8, 32), random_block_size=0.25)
    sizes = [curriculum_block_size(config, 32, step, 0) for step in range(400)]
    assert set(sizes[:150]) == {8} and set(sizes[150:300]) == {32}
    assert {size: sizes[300:].count(size) > 10 for size in (4, 8, 16, 32)} == dict.fromkeys((4, 8, 16, 32), True)
    assert sizes[300:] != [curriculum_block_size(config, 32, step, 1) for step in range(300, 400)]
    for largest, drawn in ((3, {3}), (6, {4, 6}), (24, {4, 8, 16, 24})):
        assert {curriculum_block_size(config, largest, step, 0) for step in range(300, 400)} == drawn
