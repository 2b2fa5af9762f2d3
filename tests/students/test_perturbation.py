"""Who sees whom, asked of the real model classes: change one token, and see whose output moves.

Shapes: Q positions of one row, B = Q + 1 rows: the row as it is, and once with each token changed.
"""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from fewstep.students.layout import allowed, body_hidden, build_batch
from tests.students.builders import FAMILIES, MASK, student
from tests.students.test_layout import example

PATTERNS = ("block", "block_causal_inside", "bidirectional")


def short_row(attention, prompt, response, block_size, first, copies):
    """Return the shorter row of a batch of two, so that it ends in padding."""
    copies = 1 if attention == "bidirectional" else copies
    rng = np.random.default_rng(0)
    rows = [
        example(rng, prompt, response, block_size, first, copies),
        example(rng, prompt + 1, response + 2, block_size, 1, copies),
    ]
    batch = build_batch(rows, MASK, attention, 0.1)
    shape = batch.ids.shape
    rowwise = {f.name for f in fields(batch) if getattr(getattr(batch, f.name), "shape", None) == shape}
    return replace(batch, **{name: getattr(batch, name)[:1] for name in rowwise}), rowwise


def moved(model, batch, rowwise, attention):
    """Return, after each layer and at the end, [Q, Q] bool: whether the output at the first index moves with the token at the second."""
    Q = batch.ids.shape[1]
    many = replace(batch, **{name: getattr(batch, name).repeat(Q + 1, 1) for name in rowwise})
    own = many.ids.diagonal()
    own.copy_(torch.where(own == 5, 6, 5))
    depths = []
    layers = next(m for m in model.base_model.children() if isinstance(m, torch.nn.ModuleList))
    hooks = [
        layer.register_forward_hook(lambda _, given, out: depths.append(out[0] if isinstance(out, tuple) else out))
        for layer in layers
    ]
    with torch.no_grad():
        depths.append(body_hidden(model, many, attention).unflatten(0, (Q + 1, Q)))
    for hook in hooks:
        hook.remove()
    # fp64: what does not see the token differs by rounding at most; [q, k]
    return [((hidden[:Q] - hidden[Q]).abs().amax(-1).T > 1e-12) for hidden in depths]


def layers_allow(model, batch, attention):
    """Return what each layer may see, [Q, Q] bool, from the class's own list of sliding layers."""
    config, allow = model.config, allowed(batch, attention)[0]
    window = getattr(config, "sliding_window", None)
    window = None if getattr(config, "use_sliding_window", True) is False else window
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"]
    kinds = list(kinds) if len(kinds) == config.num_hidden_layers else list(kinds) * config.num_hidden_layers
    near = allow & (batch.pos[0][:, None] - batch.pos[0][None, :] < (window or 10**9))
    return [near if kind == "sliding_attention" else allow for kind in kinds]


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("attention", PATTERNS)
def test_one_layer_output_changes_exactly_where_the_mask_allows(family, attention):
    model = student(family, attention, num_layers=1)
    batch, rowwise = short_row(attention, prompt=4, response=9, block_size=4, first=2, copies=2)
    (allow,) = layers_allow(model, batch, attention)
    after, end = moved(model, batch, rowwise, attention)
    assert torch.equal(after, allow) and torch.equal(end, allow)


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("attention", PATTERNS)
def test_deep_output_changes_exactly_where_the_composed_masks_reach(family, attention):
    """A layer passes on what it sees and, by its residual, what it had: the reach is a product of boolean matrices."""
    model = student(family, attention, num_layers=3)
    batch, rowwise = short_row(attention, prompt=11, response=12, block_size=4, first=2, copies=2)
    layers = layers_allow(model, batch, attention)
    *after, end = moved(model, batch, rowwise, attention)
    reach = torch.eye(batch.ids.shape[1], dtype=torch.bool)
    for allow, found in zip(layers, after, strict=True):
        reach = (allow.double() @ reach.double() > 0) | reach
        assert torch.equal(found, reach)
    assert torch.equal(end, reach)
    narrowest = torch.stack(layers).all(0)
    windowed = not torch.equal(narrowest, allowed(batch, attention)[0])
    assert not windowed or not torch.equal(reach, narrowest)  # windows reach further together than one does


def test_some_families_slide_in_every_layer_and_some_in_a_few():
    kinds = {}
    for family in FAMILIES:
        model = student(family, num_layers=3)
        batch, _ = short_row("block", prompt=11, response=12, block_size=4, first=2, copies=1)
        whole = allowed(batch, "block")[0]
        kinds[family] = sum(not torch.equal(allow, whole) for allow in layers_allow(model, batch, "block"))
    assert set(kinds.values()) >= {0, 2, 3}, kinds
