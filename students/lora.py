"""Low-rank adapters on a student under training: PEFT's for plain ones, our own where they are gated."""

from pathlib import Path

from fewstep.errors import UserError
from fewstep.students.decoding.gated import apply_gated


class Adapter:
    """What training needs to know of the adapter it put on a model.

    rank, alpha: of the update alpha/rank · BA. gated: on noisy positions only.
    """

    def __init__(self, rank: int, alpha: float, gated: bool, peft_model=None):
        self.rank, self.alpha, self.gated, self._peft = rank, alpha, gated, peft_model

    def merge(self, beside: Path) -> None:
        """Fold a plain adapter into the model's own weights for good, keeping a copy in `beside`.

        Raises:
            UserError: for a gated adapter.
        """
        if self.gated:
            raise UserError(
                f"a gated adapter of rank {self.rank} cannot be merged: weights act on every position, it on noisy ones "
                "alone; save it beside the base (save_student), or train with lora.gated: false"
            )
        self._peft.save_pretrained(str(beside))
        self._peft.merge_and_unload()


def apply_lora(model, rank: int, alpha: float | None, gated: bool, mask_token_id: int) -> Adapter:
    """Freeze `model` and put adapters on every linear layer of its body; the mask token's row trains too.

    Args:
        model: a causal LM, changed in place.
        rank, alpha: alpha defaults to the rank, a scale of 1.
        gated: adapters that act on noisy positions only.
        mask_token_id: the one row of the embedding that is trained.
    """
    alpha = float(rank if alpha is None else alpha)
    if gated:
        apply_gated(model, rank, alpha, mask_token_id)
        return Adapter(rank, alpha, True)
    from peft import LoraConfig, get_peft_model

    embedding = model.get_input_embeddings()
    name = next(n for n, module in model.named_modules() if module is embedding)
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules="all-linear",
        trainable_token_indices={name.rpartition(".")[2]: [mask_token_id]},
    )
    return Adapter(rank, alpha, False, get_peft_model(model, config))
