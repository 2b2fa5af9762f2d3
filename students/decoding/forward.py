"""One forward of a student over `[clean | noisy]` tokens with an exact cache.

Shapes: B rows, Q = C + S queries (C clean, right-aligned; S noisy, left-aligned), V vocabulary.

A clean token sees the clean tokens up to itself. A noisy one sees the clean tokens before its
block and its whole block (`block`), or its block up to itself (`block_causal_inside`). Both are one
number a query, the limit below which it sees every slot, because the slot of a token is its position.
"""

import inspect

import torch

from .cache import BlockCache
from .gated import noisy as noisy_positions
from .masks import layer_masks


class Forward:
    """Run a model on clean and noisy tokens of several rows, growing their cache.

    Args:
        model: a causal LM in eval mode; `model.config.fewstep` names pattern and mask token. Where it carries a
            `fewstep_head` (fewstep's students/head.py), `likely` asks that instead of all logits.
        capacity: the most positions that any row will reach.

    Raises:
        ValueError: if the attention implementation would drop the mask.
    """

    def __init__(self, model, capacity: int):
        implementation = model.config._attn_implementation
        if implementation not in ("sdpa", "eager"):
            raise ValueError(
                f"attention implementation {implementation!r} may drop block masks; "
                "load the model with attn_implementation='sdpa' or 'eager'"
            )
        facts = getattr(model.config, "fewstep", None) or {}
        self.model = model
        self.config = model.config.get_text_config()
        self.attention = facts.get("attention", "block")
        self.shifted = facts.get("alignment") == "shifted"
        self.mask_token_id = facts.get("mask_token_id")
        self.cache = BlockCache(capacity)
        self.device = model.get_input_embeddings().parameters().__next__().device
        self.dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        takes = inspect.signature(type(model).forward).parameters
        self.cache_name = "cache" if "cache" in takes else "past_key_values"
        head = getattr(model, "fewstep_head", None)
        self.head = head if self.device.type == "cpu" and not self.shifted else None

    @torch.no_grad()
    def __call__(self, starts: list[int], clean: list[list[int]], noisy: list[list[int]], keep: int) -> torch.Tensor:
        """Return logits of the last `keep` of the C + S queries, with the mask token at -inf.

        Args:
            starts: B positions, where each row's clean tokens begin: its length in the cache.
            clean: B lists of tokens to run through the causal stream, and so to commit.
            noisy: B lists, the block that follows the clean tokens, with mask tokens in it.
            keep: number of trailing queries whose logits are wanted.

        Returns:
            [B, keep, V] f32. Clean tokens are aligned to the right end of the first C queries,
            noisy ones to the left end of the last S; what pads them holds no meaning. A noisy query's
            are of its own position, whatever the alignment.
        """
        C, S = max(map(len, clean)), max(map(len, noisy))
        wanted = max(keep, min(S + 1, C + S)) if self.shifted else keep
        logits = self._run(self.model, starts, clean, noisy, logits_to_keep=wanted).logits.float()
        if self.mask_token_id is not None and self.mask_token_id < logits.shape[-1]:
            logits[..., self.mask_token_id] = -torch.inf
        return self._own_positions(logits, clean, S)[:, -keep:] if self.shifted else logits

    @torch.no_grad()
    def likely(self, starts, clean, noisy, keep: int, at: torch.Tensor | None = None, entropy: bool = False):
        """Return what `head` says of the last `keep` queries, or of those of them where `at` [B, keep] is true.

        Its token, probability, entropy and margin are [n], the queries in their order; logits never exist as [n, V].
        """
        assert self.head is not None
        hidden = self._run(self.model.base_model, starts, clean, noisy).last_hidden_state[:, -keep:]
        return self.head(self.model, hidden.flatten(0, 1) if at is None else hidden[at], self.mask_token_id, entropy)

    def _run(self, module, starts: list[int], clean: list[list[int]], noisy: list[list[int]], **more):
        """Run the model, or its body alone, over the tokens."""
        C, S = max(map(len, clean)), max(map(len, noisy))
        trash = self.cache.trash
        ids, slots, limits = [], [], []
        for start, c, x in zip(starts, clean, noisy):
            middle, end = start + len(c), start + len(c) + len(x)
            pad_c, pad_x = C - len(c), S - len(x)
            ids.append([0] * pad_c + c + x + [0] * pad_x)
            slots.append([trash] * pad_c + list(range(start, end)) + [trash] * pad_x)
            causal = self.attention != "bidirectional"
            see_clean = list(range(start + 1, middle + 1)) if causal else [end] * len(c)
            see_noisy = list(range(middle + 1, end + 1)) if self.attention == "block_causal_inside" else [end] * len(x)
            limits.append([1] * pad_c + see_clean + see_noisy + [1] * pad_x)
        visible = max(s + len(c) + len(x) for s, c, x in zip(starts, clean, noisy))
        whole = len(set(starts)) == 1 and all(len(c) == C for c in clean) and all(len(x) == S for x in noisy)
        span = (starts[0], starts[0] + C + S) if whole else None

        slots = torch.tensor(slots, device=self.device)  # [B, Q]
        limits = torch.tensor(limits, device=self.device)
        positions = slots if span else slots.masked_fill(slots == trash, 0)
        self.cache.place(slots, span, visible)
        keys = torch.arange(visible, device=self.device)
        allow = keys < limits[:, :, None]  # [B, Q, K]
        masks = layer_masks(self.config, allow, positions, keys.expand(len(ids), -1), self.dtype)
        with noisy_positions(self.model, S):
            return module(
                input_ids=torch.tensor(ids, device=self.device),
                attention_mask=masks,
                position_ids=positions,
                use_cache=True,
                **{self.cache_name: self.cache},
                **more,
            )

    def _own_positions(self, logits: torch.Tensor, clean: list[list[int]], S: int) -> torch.Tensor:
        """Return shifted logits with every noisy query's own: those of the query before, the first's of the last clean token.

        A row without clean tokens gets what its last one said in an earlier forward.
        """
        last = logits[:, :1] if self.cache.said is None else self.cache.said  # [B, 1, V]
        if logits.shape[1] > S:
            has = torch.tensor([bool(c) for c in clean], device=logits.device)
            last = torch.where(has[:, None, None], logits[:, -S - 1 : logits.shape[1] - S], last)
        self.cache.said = last
        return (
            torch.cat([logits[:, : logits.shape[1] - S], last, logits[:, logits.shape[1] - S : -1]], 1) if S else logits
        )
