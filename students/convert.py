"""From a causal LM to a student: pick the mask token, write the facts, save, load.

Shapes: V vocabulary rows, D width.
"""

import shutil
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from fewstep.errors import UserError, first_line
from fewstep.students.attention import attention_implementation
from fewstep.students.config import StudentConfig
from fewstep.students.decoding.gated import GatedEmbedding, GatedLinear, load_adapter, save_adapter
from fewstep.students.head import attach

FACTS_VERSION = 1
ALIGNMENTS = ("same_position", "shifted")  # a noisy position predicts its own token, or the one after it
logging.disable_progress_bar()  # stages show their own
DECODING = Path(__file__).parent / "decoding"


def load_causal_lm(folder: str | Path, dtype: torch.dtype = torch.float32):
    """Load a checkpoint and its tokenizer for training or decoding, with attention that honours masks.

    Raises:
        UserError: if it cannot be loaded as a decoder-only LM.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        config = AutoConfig.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=attention_implementation(config)
        )
    except Exception as error:  # a broken file fails in as many ways as there are formats
        raise UserError(
            f"checkpoint {folder}: cannot be loaded as a decoder-only LM ({first_line(error)}); check the path"
        ) from None
    return model.eval(), tokenizer


def load_student(folder: str | Path, dtype: torch.dtype = torch.float32):
    """Load a student folder ready for `decode`; a gated adapter beside it is applied.

    Returns:
        (model, tokenizer); `model.config.fewstep` holds the facts.

    Raises:
        UserError: if the folder is no student.
    """
    model, tokenizer = load_causal_lm(folder, dtype)
    facts = getattr(model.config, "fewstep", None)
    if not facts:
        raise UserError(
            f"student {folder}: its config.json has no `fewstep` section; give a folder that adapt or distill wrote"
        )
    if facts.get("version") != FACTS_VERSION or facts.get("alignment") not in ALIGNMENTS:
        raise UserError(
            f"student {folder}: its facts are version {facts.get('version')}, alignment {facts.get('alignment')}; "
            f"this fewstep reads version {FACTS_VERSION}, {' or '.join(ALIGNMENTS)}: convert it anew"
        )
    if facts.get("adapter") == "gated":
        load_adapter(model, Path(folder) / "fewstep_adapter")
    attach(model.eval())
    return model, tokenizer


def unused_token(model, tokenizer) -> int | None:
    """Return the first row of the embedding that the tokenizer can never emit, or None.

    A row with a name, such as <|reserved_0|>, is not free: a prompt that spells the name would encode to it.
    """
    taken = set(tokenizer.get_vocab().values())
    width = model.get_input_embeddings().weight.shape[0]
    special = {getattr(model.config, k, None) for k in ("pad_token_id", "bos_token_id")} | set(
        _ids(model.config.eos_token_id)
    )
    return next((i for i in range(width) if i not in taken and i not in special), None)


def make_student(model, tokenizer, config: StudentConfig, gated: bool, seed: int) -> dict:
    """Choose the mask token, add its row where none is free, and write the facts into the config.

    Args:
        model: the base, changed in place: at most one new row (mean of the others plus small noise).
        gated: keep the base untouched; the mask token then lies outside the vocabulary.
        seed: of the new row's noise.

    Returns:
        The facts, as they will stand in config.json under `fewstep`.

    Raises:
        UserError: if the mask token asked for is one that the tokenizer can emit.
    """
    width = model.get_input_embeddings().weight.shape[0]
    if gated:
        if config.mask_token != "auto":
            raise UserError(f"student.mask_token={config.mask_token}: a gated student learns a mask vector; use auto")
        mask = width
    elif config.mask_token == "auto":
        free = unused_token(model, tokenizer)
        mask = width if free is None else free
    else:
        mask = config.mask_token
        emitted = (
            set(tokenizer.get_vocab().values())
            | set(_ids(model.config.eos_token_id))
            | set(_ids(model.config.pad_token_id))
        )
        if mask in emitted or not 0 <= mask < width:
            raise UserError(
                f"student.mask_token={mask}: must be an unused row of the {width} in the vocabulary; use auto"
            )
    if mask == width and not gated:
        model.resize_token_embeddings(width + 1, mean_resizing=False)
        noise = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for layer in {id(m): m for m in (model.get_input_embeddings(), model.get_output_embeddings())}.values():
                old = layer.weight[:width].float()
                row = old.mean(0) + 0.1 * old.std(0) * torch.randn(old.shape[1], generator=noise).to(old.device)
                layer.weight[width] = row.to(layer.weight.dtype)
    model.config.fewstep = {
        "version": FACTS_VERSION,
        "attention": config.attention,
        "alignment": config.alignment,
        "block_size": config.block_size,
        "mask_token_id": mask,
        "adapter": "gated" if gated else None,
    }
    return model.config.fewstep


def save_student(model, tokenizer, folder: Path, lora: dict | None = None) -> None:
    """Write an ordinary checkpoint that also carries its few-step decoding.

    Args:
        model: the student; low-rank adapters are merged already, gated ones are saved beside the base.
        folder: is created; `config.json` gets the facts, `custom_generate/` the decoding files.
        lora: {"rank", "alpha"} of a gated adapter.
    """
    facts = model.config.fewstep
    width = model.get_input_embeddings().weight.shape[0] if facts["adapter"] is None else None
    if width is not None and facts["mask_token_id"] < width:
        also = model.generation_config.suppress_tokens or []
        model.generation_config.suppress_tokens = sorted(
            {*also, facts["mask_token_id"]}
        )  # a plain generate never writes it
    if facts["adapter"] == "gated":
        assert lora is not None, "a gated student is saved with its rank and alpha"
        save_adapter(model, folder / "fewstep_adapter", lora["rank"], lora["alpha"])
        with base_weights(model):
            model.save_pretrained(folder)
    else:
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    target = folder / "custom_generate"
    target.mkdir(exist_ok=True)
    for file in sorted(DECODING.glob("*.py")):
        shutil.copyfile(file, target / file.name)


@contextmanager
def base_weights(model):
    """Take a gated student's wrappers off for a while, leaving the base's own modules and names."""
    wrapped = [(n, m) for n, m in model.named_modules() if isinstance(m, (GatedLinear, GatedEmbedding))]
    for name, module in wrapped:
        model.set_submodule(name, module.base)
    try:
        yield model
    finally:
        for name, module in wrapped:
            model.set_submodule(name, module)


def _ids(value) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)
