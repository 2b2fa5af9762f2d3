"""The block loop: draft a block, commit what the sampler chooses, repeat; then the next block.

Shapes: B rows still active, S largest block among them, V vocabulary.

A finished block enters the cache in the same forward that drafts the next one.
"""

import torch

from .forward import Forward
from .rows import Row
from .sampler import Draft, Sampler
from .sampling import distribution, draw, most_likely

REVISIONS = 4  # changes a position, on average, after which a block's decisions stand


def denoise(forward: Forward, rows: list[Row], block_size: int, sampler: Sampler, settings: dict) -> None:
    """Decode every row to its end, in place.

    Args:
        forward: the student with an empty cache.
        rows: one per prompt.
        block_size: S; a row's last block is shorter where its budget ends.
        sampler: chooses which of the candidate positions to commit; where it chooses none, the most confident is.
        settings: the sampler's, each a number, or a list with one for every row.
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
        draft = _draft(forward, active, current, noisy, mask, sampler)
        values = {name: _column(value, active, draft.probability) for name, value in settings.items()}
        if sampler.stays is not None:
            _follow(draft, current, sampler, values)
        commit = sampler.select(draft, **values) & draft.candidates
        idle = draft.candidates.any(-1) & ~commit.any(-1)
        commit[idle, draft.confidence.argmax(-1)[idle]] = True  # progress: at least one token a forward
        change = _revision(draft, current, commit, sampler, values)

        picked = zip(active, current, commit.tolist(), draft.token.tolist(), draft.confidence.tolist(), change)
        for row, block, commit_r, token_r, confidence_r, change_r in picked:
            block.commit(commit_r, token_r, confidence_r, row.nfe - 1)
            for i, (token, confidence) in change_r.items():
                block.revise(i, token, confidence, row.nfe - 1)
            if block.ids[0] != mask:
                row.saw_token()
            if not whole_canvas:
                row.length, row.pending = row.length + len(row.pending), []
            done = block.finished(row.eos)
            ended = done and row.extend(block.ids, block.steps, block.confidence)
            row.show([] if done else block.ids, mask)
            if done and not ended:
                row.pending = row.pending + block.ids if whole_canvas else block.ids
                blocks[row.index] = _Block(row, block_size, mask)
        kept = [i for i, row in enumerate(active) if row.finish_reason is None]
        if len(kept) < len(active):
            active = [active[i] for i in kept]
            if active:
                forward.cache.keep(kept)


def _draft(forward: Forward, rows: list[Row], blocks: list["_Block"], noisy: list[list[int]], mask: int, sampler: Sampler) -> Draft:  # fmt: skip
    """Return what the sampler sees: drawn where a row has a temperature, the most likely tokens elsewhere.

    Token and probability are 0 where no candidate is, unless the sampler rewrites what is decided. Nothing is asked of
    the canvas beyond the block, which is context only.
    """
    S, keep, device = max(len(b.ids) for b in blocks), max(map(len, noisy)), forward.device
    may = [b.candidates(r.eos, S) for r, b in zip(rows, blocks)]
    candidates = torch.tensor(may, device=device)
    at = torch.ones_like(candidates) if sampler.rewrite else candidates
    token, probability = torch.zeros_like(candidates, dtype=torch.int64), torch.zeros(candidates.shape, device=device)
    asked = [r.length for r in rows], [r.pending for r in rows], noisy, keep
    lean = forward.head is not None and sampler.stays is None and all(row.temperature == 0 for row in rows)
    if lean:
        beyond = torch.zeros(len(rows), keep - S, dtype=torch.bool, device=device)
        said, logits = forward.likely(*asked, torch.cat([at, beyond], 1), sampler.reads == "entropy"), None
        token[at], probability[at] = said.token, said.probability.to(probability.dtype)
    else:
        said, logits = None, forward(*asked)[:, :S]  # [B, S, V]
        probability = probability.to(logits.dtype)
        if bool(at.all()):
            token, probability = most_likely(logits)
        else:  # the rest of a block need not pay for a softmax over the vocabulary
            token[at], probability[at] = most_likely(logits[at])
        for i, (row, block) in enumerate(zip(rows, blocks)):
            if row.temperature > 0:
                places = candidates[i].nonzero().flatten()
                for j, p in zip(places.tolist(), distribution(logits[i, places], row.temperature, row.top_p)):
                    token[i, j] = draw(p, row.seed, row.position + j, block.step)
                    probability[i, j] = logits[i, j].softmax(-1)[token[i, j]]
    ids = torch.tensor([b.ids + [mask] * (S - len(b.ids)) for b in blocks], device=device)
    step, size = torch.tensor([[b.step, len(b.ids)] for b in blocks], device=device).T
    draft = Draft(logits, token, probability, candidates, ids, ids != mask, step, size)
    if said is not None and sampler.reads:
        value = torch.full(candidates.shape, torch.inf if sampler.reads == "entropy" else -torch.inf, device=device)
        value[at] = getattr(said, sampler.reads).to(value.dtype)
        setattr(draft, sampler.reads, value)
    return draft


def _column(value, rows: list[Row], like: torch.Tensor) -> torch.Tensor:
    """Return a setting as [B, 1] f32 of the active rows, or [1, 1] where all share it."""
    values = [value[row.index] for row in rows] if isinstance(value, list) else [value]
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _follow(draft: Draft, blocks: list["_Block"], sampler: Sampler, values: dict) -> None:
    """Show the sampler the step before, and count for how long its `stays` has held."""
    assert sampler.stays is not None
    S = draft.logits.shape[1]
    unknown = torch.full_like(draft.logits[0], torch.nan)
    draft.previous = torch.stack([unknown if b.previous is None else b.previous[:S] for b in blocks])
    held = torch.tensor([b.stable + [0] * (S - len(b.stable)) for b in blocks], device=unknown.device)
    draft.stable = torch.where(sampler.stays(draft, **values), held + 1, 0)
    for block, previous, stable in zip(blocks, draft.logprobs, draft.stable.tolist()):
        block.previous, block.stable = previous, stable[: len(block.ids)]


def _revision(draft: Draft, blocks: list["_Block"], commit: torch.Tensor, sampler: Sampler, values: dict) -> list[dict]:
    """Return, for each row, position → (new token or None for the mask, its confidence)."""
    if sampler.revise is None:
        return [{}] * len(blocks)
    S = commit.shape[1]
    before = torch.tensor([b.confidence + [0.0] * (S - len(b.ids)) for b in blocks], device=commit.device)
    draft.decided = draft.committed | commit
    confidence = torch.where(commit, draft.confidence, before)
    draft.decided_confidence = confidence.masked_fill(~draft.decided, torch.inf)
    change = sampler.revise(draft, **values)
    out: list[dict] = []
    for i, block in enumerate(blocks):
        places = change[i].nonzero().flatten().tolist() if block.revisions < REVISIONS * len(block.ids) else []
        block.revisions += len(places)
        new = [
            (int(draft.token[i, j]), float(draft.probability[i, j])) if sampler.rewrite else (None, 0.0) for j in places
        ]
        out.append(dict(zip(places, new)))
    return out


class _Block:
    """The block being decoded: its ids, and when and how confidently each was committed."""

    def __init__(self, row: Row, block_size: int, mask: int):
        size = min(block_size, row.remaining)
        self.ids, self.steps, self.confidence, self.step = [mask] * size, [0] * size, [0.0] * size, 0
        self.mask, self.revisions = mask, 0
        self.previous: torch.Tensor | None = None
        self.stable = [0] * size

    def candidates(self, eos: frozenset[int], width: int) -> list[bool]:
        """Return which of `width` positions may be committed: masked, and before any EOS already decided."""
        end = next((i for i, t in enumerate(self.ids) if t in eos), len(self.ids))
        return [i < end and t == self.mask for i, t in enumerate(self.ids)] + [False] * (width - len(self.ids))

    def commit(self, chosen: list[bool], token: list[int], confidence: list[float], forward: int) -> None:
        for i, yes in enumerate(chosen):
            if yes:
                self.ids[i], self.steps[i], self.confidence[i] = token[i], forward, confidence[i]
        self.step += 1

    def revise(self, i: int, token: int | None, confidence: float, forward: int) -> None:
        self.ids[i] = self.mask if token is None else token
        self.steps[i], self.confidence[i] = forward, confidence

    def finished(self, eos: frozenset[int]) -> bool:
        """True once every position is decided, or every one up to an EOS."""
        for token in self.ids:
            if token == self.mask:
                return False
            if token in eos:
                return True
        return True
