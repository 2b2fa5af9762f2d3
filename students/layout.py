"""The training layout `[clean | noisy_1 | … | noisy_M]`: every block of a response in one forward.

A row holds one example and padding, or several examples packed: the clean streams of all, then the noisy
copies of all, since the gate of gated adapters is a suffix of the row.

Shapes: B rows, C clean and N noisy positions, Q = C + N, M noisy copies of an example, R supervised rows, K top-k.

Source: block diffusion with a shared clean stream (BD3-LM; Efficient-DLM's context-causal variant).
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
import torch

from fewstep.kernels.block_mask import block_mask, dense_mask
from fewstep.students.decoding.gated import noisy
from fewstep.students.decoding.masks import by_layer, layer_masks
from fewstep.students.packing import packed, padded

CLEAN = -1


@dataclass
class Example:
    """One response with its masks drawn.

    prompt, response: token ids; the response ends with EOS where `finished`.
    noisy: [n] response tokens, filled with EOS to the end of the last block where `finished`.
    block: [n] block of each position, counted from 0; blocks never reach into the prompt.
    masks: [M, n] bool, which positions of each copy are masked; at least one a block.
    later: [M, n] bool, which of them are still masked in a later state, or None: no later state.
    guess: whether the masked positions are to hold the student's own guesses.
    topk_ids, topk_logprobs: [len(response), K] or None; tail_mass: [len(response)].
    labels: [len(response)] the right token behind the tokens before it, where the response may be wrong; None: the response.
    """

    prompt: np.ndarray
    response: np.ndarray
    noisy: np.ndarray
    block: np.ndarray
    masks: np.ndarray
    later: np.ndarray | None = None
    guess: bool = False
    topk_ids: np.ndarray | None = None
    topk_logprobs: np.ndarray | None = None
    tail_mass: np.ndarray | None = None
    labels: np.ndarray | None = None


@dataclass
class Batch:
    """Rows of examples: what the body reads, and which of its positions are supervised.

    ids, pos, seg, block, start: [B, Q] int64; seg is CLEAN or the copy; start is where the block begins.
    valid: [B, Q] bool. num_noisy: N, the gate of gated adapters.
    rows: [R] int64 into the flattened [B·Q] hidden states; labels [R] int64; weight [R] f32;
    clean [R] bool (an AR row), eligible [R] bool (no visible token right of it in its block),
    guessed [R] bool (to hold the student's own guess) and still [R] bool (masked in the later state too);
    noise [R] f32, the masked share of its block (0: an AR row);
    topk_ids [R, K], topk_logprobs [R, K] f32 (natural log), tail_mass [R] f32, with has_teacher [R] bool.
    later_ids: [B, Q] int64, what the body reads in the later state, or None.
    doc: [B, Q] int64, which example of its row a position belongs to, or None: one a row.
    """

    ids: torch.Tensor
    pos: torch.Tensor
    seg: torch.Tensor
    block: torch.Tensor
    start: torch.Tensor
    valid: torch.Tensor
    num_noisy: int
    rows: torch.Tensor
    labels: torch.Tensor
    weight: torch.Tensor
    clean: torch.Tensor
    eligible: torch.Tensor
    guessed: torch.Tensor
    still: torch.Tensor
    noise: torch.Tensor
    topk_ids: torch.Tensor
    topk_logprobs: torch.Tensor
    tail_mass: torch.Tensor
    has_teacher: torch.Tensor
    later_ids: torch.Tensor | None = None
    doc: torch.Tensor | None = None

    def to(self, device) -> "Batch":
        """Move every tensor."""
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        return Batch(**{k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in moved.items()})


def block_index(length: int, block_size: int, first: int) -> np.ndarray:
    """Return the block [length] of each response position; the first block has `first` positions."""
    return (np.arange(length) + block_size - first) // block_size


def filled_length(length: int, block_size: int, first: int) -> int:
    """Return the length at which the last block that `length` tokens reach is full."""
    if length <= first:
        return first
    return first + -(-(length - first) // block_size) * block_size


def build_batch(
    examples: list[Example],
    mask_token_id: int,
    attention: str,
    fill_weight: float,
    num_topk: int = 0,
    alignment: str = "same_position",
    row_tokens: int | None = None,
    multiple: int = 1,
) -> Batch:
    """Lay out examples, their supervised rows in the order given.

    Args:
        mask_token_id: written where `masks` is true.
        attention: `block`, `block_causal_inside` or `bidirectional` (then the clean stream is the
            prompt alone, or the answer would leak).
        fill_weight: loss weight of positions after the first EOS.
        num_topk: K; 0 leaves the teacher's distributions out.
        alignment: `same_position`, or `shifted`: a masked token is said by the position before it, a block's
            first by the clean stream.
        row_tokens: pack examples into rows of at most so many positions, at least one a row; None: one a row, padded.
        multiple: of which the width of packed rows is made one.
    """
    with_response = attention != "bidirectional"
    clean_lengths = [len(e.prompt) + (len(e.response) if with_response else 0) for e in examples]
    lengths = clean_lengths, [len(e.noisy) for e in examples], len(examples[0].masks)
    layout = padded(*lengths) if row_tokens is None else packed(*lengths, row_tokens, multiple)
    B, Q = layout.num_rows, layout.num_clean + layout.num_noisy
    ids, pos, block, start = (np.zeros((B, Q), np.int64) for _ in range(4))
    seg = np.full((B, Q), CLEAN, np.int64)
    valid = np.zeros((B, Q), bool)
    later_ids = None if examples[0].later is None else np.zeros((B, Q), np.int64)
    doc = None if row_tokens is None else np.zeros((B, Q), np.int64)
    out: defaultdict[str, list[np.ndarray]] = defaultdict(list)
    teacher: dict[str, list[np.ndarray]] = {k: [] for k in ("ids", "logprobs", "tail", "has")}
    for e, place in zip(examples, layout.places):
        b, P, L, n = place.row, len(e.prompt), len(e.response), len(e.noisy)
        clean = np.concatenate([e.prompt, e.response]) if with_response else e.prompt
        own = slice(place.clean, place.clean + len(clean))
        ids[b, own], valid[b, own], pos[b, own] = clean, True, np.arange(len(clean))
        if later_ids is not None:
            later_ids[b, own] = clean
        if doc is not None:
            doc[b, own] = place.doc
        response = b * Q + place.clean + P  # where its clean response begins, in the flattened batch
        if with_response:  # AR rows: the position before each response token
            rows = response - 1 + np.arange(L)
            right = e.response if e.labels is None else e.labels
            _supervise(out, rows, right, np.ones(L), clean=True, eligible=False, guessed=False, still=False, noise=0.0)
            _teach(teacher, e, np.full(L, L), num_topk)
        begins = np.searchsorted(e.block, e.block)  # first position of each position's block
        weight = np.where(np.arange(n) < L, 1.0, fill_weight)
        labels = e.noisy if e.labels is None else np.concatenate([e.labels, e.noisy[L:]])
        for m, (at, masked) in enumerate(zip(place.copies, e.masks)):
            own = slice(at, at + n)
            ids[b, own] = np.where(masked, mask_token_id, e.noisy)
            pos[b, own] = P + np.arange(n)
            seg[b, own], valid[b, own] = m, True
            block[b, own], start[b, own] = e.block, P + begins
            if later_ids is not None:
                later_ids[b, own] = np.where(e.later[m], mask_token_id, e.noisy)
            if doc is not None:
                doc[b, own] = place.doc
            where = np.flatnonzero(masked)
            visible_right = _visible_right(masked, e.block)
            eligible = ~visible_right[where] & (where < L)
            still = False if e.later is None else e.later[m, where]
            share = (np.bincount(e.block, weights=masked) / np.bincount(e.block))[e.block[where]]
            rows = b * Q + at + where
            if alignment == "shifted":
                rows = np.where(where == begins[where], response, b * Q + at) + where - 1
            counts = weight[where]
            if e.labels is not None:  # they follow the tokens before them alone, and those that stand there
                counts = counts * ~(visible_right | _behind_wrong(masked & (labels != e.noisy), e.block))[where]
            _supervise(
                out, rows, labels[where], counts,
                clean=False, eligible=eligible, guessed=e.guess, still=still, noise=share,
            )  # fmt: skip
            _teach(teacher, e, where, num_topk)
    return Batch(
        ids=torch.from_numpy(ids),
        pos=torch.from_numpy(pos),
        seg=torch.from_numpy(seg),
        block=torch.from_numpy(block),
        start=torch.from_numpy(start),
        valid=torch.from_numpy(valid),
        num_noisy=layout.num_noisy,
        rows=_cat(out["rows"], torch.int64),
        labels=_cat(out["labels"], torch.int64),
        weight=_cat(out["weight"], torch.float32),
        clean=_cat(out["clean"], torch.bool),
        eligible=_cat(out["eligible"], torch.bool),
        guessed=_cat(out["guessed"], torch.bool),
        still=_cat(out["still"], torch.bool),
        noise=_cat(out["noise"], torch.float32),
        topk_ids=_cat(teacher["ids"], torch.int64),
        topk_logprobs=_cat(teacher["logprobs"], torch.float32),
        tail_mass=_cat(teacher["tail"], torch.float32),
        has_teacher=_cat(teacher["has"], torch.bool),
        later_ids=None if later_ids is None else torch.from_numpy(later_ids),
        doc=None if doc is None else torch.from_numpy(doc),
    )


def sees(batch: Batch, attention: str) -> Callable:
    """Return who may see whom, as a function of indices: (row, head, query, key) → bool; a padded query sees itself alone.

    The indices are tensors that broadcast, or single ones under `vmap`, as flex_attention asks; the head does not matter.

    Clean sees clean causally; noisy sees its own block of its own copy (`block_causal_inside`: up to
    itself), and the clean stream before that block; nothing sees another example.

    Source: block diffusion (BD3-LM), with a causal clean stream as in Efficient-DLM.
    """
    seg, pos, block, valid, doc = batch.seg, batch.pos, batch.block, batch.valid, batch.doc
    clean = seg == CLEAN
    # one comparison serves both kinds of query: clean ones see up to themselves, noisy ones their prefix
    reach = torch.where(clean, pos + 1, batch.start)

    def rule(b, _head, q, k):
        if attention == "bidirectional":
            allow = (seg[b, q] == seg[b, k]) | clean[b, k] | clean[b, q] & (seg[b, k] == 0)
        else:
            own = (seg[b, q] == seg[b, k]) & (block[b, q] == block[b, k]) & ~clean[b, q]
            if attention == "block_causal_inside":
                own = own & (pos[b, k] <= pos[b, q])
            allow = own | clean[b, k] & (pos[b, k] < reach[b, q])
        allow = allow & valid[b, k] & valid[b, q]
        if doc is not None:
            allow = allow & (doc[b, q] == doc[b, k])
        return allow | (q == k) & ~valid[b, q]

    return rule


def allowed(batch: Batch, attention: str) -> torch.Tensor:
    """Return `sees` of every pair, [B, Q, Q] bool (query, key)."""
    return dense_mask(sees(batch, attention), *batch.ids.shape, batch.ids.device)


def attention_masks(model, batch: Batch, attention: str):
    """Return the masks of a batch as the model's attention takes them: flex_attention by blocks, the others dense.

    Returns:
        One mask, or layer type → mask (`students/decoding/masks.by_layer`): BlockMasks of [B, 1, Q, Q], or additive
        floats of that shape.
    """
    config = model.config.get_text_config()
    if model.config._attn_implementation == "flex_attention":
        rule, shape, pos = sees(batch, attention), batch.ids.shape, batch.pos

        def near(window: int):
            return block_mask(
                lambda b, h, q, k: rule(b, h, q, k) & (pos[b, q] - pos[b, k] < window), *shape, pos.device
            )

        return by_layer(config, lambda: block_mask(rule, *shape, pos.device), near)
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    return layer_masks(config, allowed(batch, attention), batch.pos, batch.pos, dtype)


def body_hidden(model, batch: Batch, attention: str) -> torch.Tensor:
    """Run the model's body, without its head, over a batch.

    Returns:
        [B·Q, D] hidden states after the final norm.
    """
    masks = attention_masks(model, batch, attention)
    with noisy(model, batch.num_noisy):
        out = model.base_model(input_ids=batch.ids, attention_mask=masks, position_ids=batch.pos, use_cache=False)
    return out.last_hidden_state.flatten(0, 1)


def _visible_right(masked: np.ndarray, block: np.ndarray) -> np.ndarray:
    """Return, for each position, whether a later position of its block is visible."""
    out = np.zeros(len(masked), bool)
    for i in range(len(masked) - 2, -1, -1):
        out[i] = block[i + 1] == block[i] and (out[i + 1] or not masked[i + 1])
    return out


def _behind_wrong(wrong: np.ndarray, block: np.ndarray) -> np.ndarray:
    """Return, for each position, whether an earlier one of its block is masked and wrong: its label follows another text."""
    before = np.cumsum(wrong) - wrong
    return before > before[np.searchsorted(block, block)]


def _supervise(out, rows: np.ndarray, labels: np.ndarray, weight: np.ndarray, **flags) -> None:
    """Append supervised rows; a flag is [len(rows)], or one value for all of them."""
    for key, value in {"rows": rows, "labels": labels, "weight": weight, **flags}.items():
        out[key].append(np.broadcast_to(value, rows.shape))


def _teach(teacher, e: Example, where: np.ndarray, K: int) -> None:
    """Append the teacher's top-K at response positions `where`; positions past the response have none.

    Nor has one whose tail holds everything: a server may end an answer with a token of which it says nothing.
    """
    if K and e.topk_ids is None:
        raise ValueError("kd needs the teacher's log-probabilities: set targets.top_logprobs above 0")
    at = np.minimum(where, len(e.response) - 1)
    some = K > 0
    has = (where < len(e.response)) & (e.tail_mass[at] < 1.0 if some else False)
    teacher["ids"].append(e.topk_ids[at, :K] if some else np.zeros((len(where), 0)))
    teacher["logprobs"].append(e.topk_logprobs[at, :K] if some else np.zeros((len(where), 0)))
    teacher["tail"].append(e.tail_mass[at] if some else np.zeros(len(where)))
    teacher["has"].append(has)


def _cat(parts: list[np.ndarray], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts)).to(dtype)
