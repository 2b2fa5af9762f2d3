"""The block loop: draft a block, commit the confident positions, repeat; then the next block.

Shapes: B rows still active, S largest block among them, V vocabulary.

A finished block enters the cache in the same forward that drafts the next one.
"""

from collections.abc import Callable

import torch

from .forward import Forward
from .rows import Row

# select(confidence [B, S] f32, candidates [B, S] bool, step [B] int64, size [B] int64) -> [B, S] bool
Select = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def denoise(forward: Forward, rows: list[Row], block_size: int, select: Select) -> None:
    """Decode every row to its end, in place.

    Args:
        forward: the student with an empty cache.
        rows: one per prompt.
        block_size: S; a row's last block is shorter where its budget ends.
        select: which of the candidate positions to commit; the most confident one always is.
    """
    mask = forward.mask_token_id
    if mask is None:
        raise ValueError("this model is no few-step student: its config.json has no `fewstep` section")
    whole_canvas = forward.attention == "bidirectional"
    blocks = {row.index: _Block(row, block_size, mask) for row in rows}
    active = list(rows)
    while active:
        current = [blocks[row.index] for row in active]
        noisy = [b.ids + [mask] * (r.remaining - len(b.ids) if whole_canvas else 0) for r, b in zip(active, current)]
        for row, x in zip(active, noisy):
            row.count(len(row.pending) + len(x))
        logits = forward([r.length for r in active], [r.pending for r in active], noisy, keep=max(map(len, noisy)))
        S = max(len(b.ids) for b in current)
        logits = logits[:, :S]  # [B, S, V]; the canvas beyond the block is context only
        top, token = logits.max(-1)
        confidence = (top - logits.logsumexp(-1)).exp()  # [B, S]
        candidates = torch.tensor([b.candidates(row.eos, mask, S) for row, b in zip(active, current)])
        candidates = candidates.to(confidence.device)
        confidence = confidence.masked_fill(~candidates, -torch.inf)
        step, size = torch.tensor([[b.step, len(b.ids)] for b in current], device=confidence.device).T
        commit = select(confidence, candidates, step, size) & candidates
        best = confidence.argmax(-1)
        commit[torch.arange(len(active)), best] = True  # progress: at least one token a forward

        picked = zip(active, current, commit.tolist(), token.tolist(), confidence.tolist())
        for row, block, commit_r, token_r, confidence_r in picked:
            block.commit(commit_r, token_r, confidence_r, row.nfe - 1)
            if block.ids[0] != mask:
                row.saw_token()
            if not whole_canvas:
                row.length, row.pending = row.length + len(row.pending), []
            if block.finished(row.eos, mask) and not row.extend(block.ids, block.steps, block.confidence):
                row.pending = row.pending + block.ids if whole_canvas else block.ids
                blocks[row.index] = _Block(row, block_size, mask)
        kept = [i for i, row in enumerate(active) if row.finish_reason is None]
        if len(kept) < len(active):
            active = [active[i] for i in kept]
            if active:
                forward.cache.keep(kept)


class _Block:
    """The block being decoded: its ids, and when and how confidently each was committed."""

    def __init__(self, row: Row, block_size: int, mask: int):
        size = min(block_size, row.remaining)
        self.ids, self.steps, self.confidence, self.step = [mask] * size, [0] * size, [0.0] * size, 0

    def candidates(self, eos: frozenset[int], mask: int, width: int) -> list[bool]:
        """Return which of `width` positions may be committed: masked, and before any EOS already decided."""
        end = next((i for i, t in enumerate(self.ids) if t in eos), len(self.ids))
        return [i < end and t == mask for i, t in enumerate(self.ids)] + [False] * (width - len(self.ids))

    def commit(self, chosen: list[bool], token: list[int], confidence: list[float], forward: int) -> None:
        for i, yes in enumerate(chosen):
            if yes:
                self.ids[i], self.steps[i], self.confidence[i] = token[i], forward, confidence[i]
        self.step += 1

    def finished(self, eos: frozenset[int], mask: int) -> bool:
        """True once every position is decided, or every one up to an EOS."""
        for token in self.ids:
            if token == mask:
                return False
            if token in eos:
                return True
        return True
