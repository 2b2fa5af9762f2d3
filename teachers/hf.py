"""Teacher kind `hf`: a decoder-only checkpoint in a local folder or on the Hugging Face Hub."""

import hashlib
import json
import math
import os
import re
import socket
import struct
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from fewstep.errors import UserError, first_line
from fewstep.runstore import file_fingerprint
from fewstep.teachers.licences import Licence, card_in, read_licence

_CONTENT = (".json", ".safetensors", ".bin", ".model", ".txt", ".jinja")  # the files that make a model what it is
_DTYPES = {"float32", "bfloat16", "float16"}


def load(
    model: str,
    revision: str | None = None,
    dtype: str = "auto",
    quantize: str | None = None,
    device_map: str | None = None,
) -> tuple[Any, Any]:
    """Return (model, tokenizer) in eval mode, on the GPU where there is one.

    Args:
        model: a folder or a Hub id.
        revision: a Hub commit, branch or tag; ignored for a folder.
        dtype: "float32", "bfloat16", "float16", or "auto": float32 on a CPU, bfloat16 on a GPU.
        quantize: "int8" or "int4": its linear layers in so many bits, by bitsandbytes.
        device_map: "auto": over all devices; None: on one.

    Raises:
        UserError: it cannot be loaded, its weights are not all there, or it is no decoder-only LM.
    """
    require_quantizer(quantize)
    describe(model, revision)
    from transformers import AutoConfig, AutoModelForCausalLM

    path, commit = _locate(model, revision)
    placed = {} if device_map is None and quantize is None else {"device_map": device_map or {"": device()}}
    if quantize is not None:
        from transformers import BitsAndBytesConfig

        nf4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch_dtype(dtype)}
        placed["quantization_config"] = BitsAndBytesConfig(**({"load_in_8bit": True} if quantize == "int8" else nf4))
    try:
        refuse_encoder(AutoConfig.from_pretrained(path, revision=commit), model)
        pair: Any = AutoModelForCausalLM.from_pretrained(
            path, revision=commit, dtype=torch_dtype(dtype), output_loading_info=True, **placed
        )
        loaded, info = pair
    except UserError:
        raise
    except Exception as error:  # transformers raises many kinds; each means that the user's checkpoint does not load
        raise UserError(_cannot_load(model, error)) from None
    missing = sorted(info["missing_keys"]) + sorted(str(key) for key in info.get("mismatched_keys", ()))
    if missing:
        raise UserError(
            f"teacher.model {model}: {len(missing)} weights are missing or have another shape (first: {missing[0]}), "
            "so it would answer at random; give a complete causal-LM checkpoint"
        )
    return (loaded if placed else loaded.to(device())).eval(), load_tokenizer(model, revision)


def require_quantizer(quantize: str | None) -> None:
    """Raise UserError where a teacher is to be quantised and the library is not installed."""
    if quantize is not None and find_spec("bitsandbytes") is None:
        raise UserError(
            f"teacher.quantize {quantize}: bitsandbytes is not installed; pip install 'fewstep[quantize]', or remove it"
        )


def load_tokenizer(model: str, revision: str | None = None) -> Any:
    """Return the tokenizer alone.

    Raises:
        UserError: there is none.
    """
    from transformers import AutoTokenizer

    return _read(AutoTokenizer, model, revision, "its tokenizer cannot be loaded")


def load_config(model: str, revision: str | None = None) -> Any:
    """Return the transformers config.

    Raises:
        UserError: transformers cannot read it.
    """
    from transformers import AutoConfig

    return _read(AutoConfig, model, revision, "its config cannot be read")


def load_stops(model: str, revision: str | None = None) -> Any:
    """Return the config that names the EOS: generation_config.json where there is one, else config.json."""
    from transformers import GenerationConfig

    path, commit = _locate(model, revision)
    try:
        return GenerationConfig.from_pretrained(path, revision=commit)
    except OSError:
        return load_config(model, revision)


def _read(auto: Any, model: str, revision: str | None, fault: str) -> Any:
    path, commit = _locate(model, revision)
    try:
        return auto.from_pretrained(path, revision=commit)
    except Exception as error:  # as in `load`
        raise UserError(_cannot_load(model, error, fault)) from None


def fingerprint(model: str, revision: str | None = None) -> str:
    """Return the hash of a folder's model files, or the commit of a Hub checkpoint; no weights are loaded.

    Raises:
        UserError: nothing is there.
    """
    path, commit = _locate(model, revision)
    if commit is not None:
        return f"{model}@{commit}"
    return _hash_of(f for f in Path(path).iterdir() if f.suffix in _CONTENT and f.name != "trainer_state.json")


def tokenizer_fingerprint(model: str, revision: str | None = None) -> str:
    """Return the hash of what turns text into ids and ends an answer: all files but the weights; of a Hub checkpoint its commit.

    Raises:
        UserError: nothing is there.
    """
    path, commit = _locate(model, revision)
    if commit is not None:
        return f"{model}@{commit}"
    # config.json says the size of the weights, an index where they lie
    others = ("config.json", "trainer_state.json")
    kinds = (".json", ".model", ".txt", ".jinja")
    files = (f for f in Path(path).iterdir() if f.suffix in kinds and f.name not in others)
    mark = _hash_of(f for f in files if not f.name.endswith(".index.json"))
    config = Path(path) / "config.json"
    if (Path(path) / "generation_config.json").is_file() or not config.is_file():
        return mark
    return f"{mark} {json.loads(config.read_text(encoding='utf-8')).get('eos_token_id')}"


def _hash_of(files: Iterable[Path]) -> str:
    """Return one SHA-256 (hex) of files' names and contents."""
    marks = (f"{f.name} {file_fingerprint(f)}" for f in sorted(files) if f.is_file())
    return hashlib.sha256("\n".join(marks).encode()).hexdigest()


def plain_weights(model: str, revision: str | None = None) -> Path:
    """Return the checkpoint's folder, fetched from the Hub at the commit of its fingerprint where need be.

    Raises:
        UserError: nothing is there.
    """
    path, commit = _locate(model, revision)
    if commit is None:
        return Path(path)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, revision=commit))
    except Exception as error:  # no network, gated: named by the library
        raise UserError(_cannot_load(model, error, "its files are not to be had from the Hub")) from None


def licence(model: str, revision: str | None = None) -> Licence:
    """Return what the checkpoint's card says; a Hub checkpoint's card is fetched at its commit.

    Raises:
        UserError: nothing is there.
    """
    path, commit = _locate(model, revision)
    if commit is None:
        return read_licence(card_in(Path(path)))
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.utils import EntryNotFoundError

    try:
        card = Path(hf_hub_download(path, "README.md", revision=commit)).read_text(encoding="utf-8")
    except EntryNotFoundError:
        card = None
    except Exception as error:  # no network, gated: what is not known must not pass for harmless
        cached = try_to_load_from_cache(path, "README.md", revision=commit)
        if not isinstance(cached, str):
            raise UserError(
                _cannot_load(model, error, "its card, which states the licence, is not to be had")
            ) from None
        card = Path(cached).read_text(encoding="utf-8")
    return read_licence(card)


def file_of(model: str, revision: str | None, name: str) -> Path | None:
    """Return one of the checkpoint's files, fetched from the Hub where need be; None where it has none, or none is to be had.

    Raises:
        UserError: there is no such checkpoint.
    """
    path, commit = _locate(model, revision)
    if commit is None:
        return Path(path) / name if (Path(path) / name).is_file() else None
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(path, name, revision=commit))
    except Exception:  # not in the repository, or no network: what asks for it can do without
        return None


def describe(model: str, revision: str | None = None) -> dict:
    """Return what config.json and the weight files' headers say, without loading weights.

    Returns:
        kind, architectures, model_type, num_parameters, context_length, vocab_size, hidden_size, num_layers,
        num_heads, num_kv_heads, intermediate_size; None for what is not declared.

    Raises:
        UserError: no such checkpoint, or one that is not a decoder-only LM that transformers has code for.
    """
    path, commit = _locate(model, revision)
    folder = Path(path) if commit is None else _cached_config(model, revision).parent
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except OSError:
        raise UserError(
            f"teacher.model {model}: no config.json there; give a folder saved by save_pretrained or a Hub id"
        ) from None
    except ValueError as error:
        raise UserError(
            f"teacher.model {model}: config.json is not JSON ({error}); save the checkpoint again"
        ) from None
    _refuse_by_config(config, model)
    text = config.get("text_config") or config
    facts = {
        "kind": "hf",
        "architectures": config.get("architectures"),
        "model_type": config["model_type"],
        "num_parameters": None,
        "context_length": _first(text, "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"),
        "vocab_size": text.get("vocab_size"),
        "hidden_size": _first(text, "hidden_size", "n_embd", "d_model"),
        "num_layers": _first(text, "num_hidden_layers", "n_layer", "n_layers", "num_layers"),
        "num_heads": _first(text, "num_attention_heads", "n_head", "n_heads"),
        "num_kv_heads": _first(text, "num_key_value_heads", "num_attention_heads", "n_head", "n_heads"),
        "intermediate_size": _first(text, "intermediate_size", "n_inner", "ffn_dim"),
    }
    facts["num_parameters"] = _count_parameters(folder) or _estimate_parameters(
        facts, bool(text.get("tie_word_embeddings"))
    )
    return facts


def refuse_encoder(config: Any, model: str) -> None:
    """Raise UserError unless transformers loads `config` as a causal LM that attends to the left only."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as MASKED

    encoder = config.model_type in MASKED and not getattr(config, "is_decoder", False)
    if config.model_type not in CAUSAL or encoder or getattr(config, "is_encoder_decoder", False):
        raise UserError(_not_a_decoder(model, config.model_type))


def device() -> str:
    """Return where models are put: a GPU where there is one (under a launcher each rank's own), else "cpu"."""
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"


def torch_dtype(dtype: str) -> Any:
    """Return the torch dtype that a recipe's word means on this machine."""
    import torch

    if dtype == "auto":
        return torch.bfloat16 if device() != "cpu" else torch.float32
    assert dtype in _DTYPES, dtype
    return getattr(torch, dtype)


def _locate(model: str, revision: str | None) -> tuple[str, str | None]:
    """Return (folder, None) or (Hub id, commit). A branch is pinned to the commit that the cache holds."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return str(folder), None
    if model.startswith((".", "/", "~")) or model.count("/") > 1 or folder.exists():
        raise UserError(
            f"teacher.model {model}: no such folder; give a folder saved by save_pretrained, a .gguf file or a Hub id"
        )
    return model, _cached_config(model, revision).parent.name


def _cached_config(model: str, revision: str | None) -> Path:
    """Return config.json in the Hub's cache, fetched if need be; its folder is named by the commit."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(model, "config.json", revision=revision)
        if isinstance(cached, str):
            return Path(cached)
        _require_hub()
        return Path(hf_hub_download(model, "config.json", revision=revision))
    except Exception as error:  # not found, no network, gated, malformed id: all are named by the library
        raise UserError(_cannot_load(model, error, "no such folder, and it is not to be had from the Hub")) from None


def _require_hub() -> None:
    """Raise OSError at once where the Hub cannot be reached; the library would retry for half a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise OSError("HF_HUB_OFFLINE is set")
    url = urlsplit(constants.ENDPOINT)
    if getproxies().get(url.scheme) or url.hostname is None:
        return  # a proxy answers for it, so a direct connection proves nothing
    with socket.create_connection((url.hostname, url.port or (80 if url.scheme == "http" else 443)), timeout=5):
        pass


def _refuse_by_config(config: Any, model: str) -> None:
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise UserError(f"teacher.model {model}: config.json names no model_type; give a transformers checkpoint")
    names = config.get("architectures") or []
    causal_name = not names or any(
        name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")) for name in names
    )
    if config.get("is_encoder_decoder") or not causal_name:
        raise UserError(_not_a_decoder(model, ", ".join(names) or config["model_type"]))
    # A family's own folder is proof without the seconds that importing transformers' table of all of them takes.
    spec = find_spec("transformers")
    families = Path(spec.origin).parent / "models" if spec and spec.origin else Path()
    if (families / config["model_type"].replace("-", "_")).is_dir() and re.fullmatch(r"[\w-]+", config["model_type"]):
        return
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if config["model_type"] not in CONFIG_MAPPING_NAMES:
        raise UserError(
            f"teacher.model {model}: this transformers has no code for model_type {config['model_type']!r}, and code that a "
            "checkpoint brings along is not run; give a checkpoint of a built-in family or update transformers"
        )


def _not_a_decoder(model: str, what: str) -> str:
    return f"teacher.model {model}: {what} is not a decoder-only language model; give a causal-LM checkpoint (…ForCausalLM)"


def _cannot_load(model: str, error: Exception, what: str = "it cannot be loaded") -> str:
    reason = first_line(error)
    return f"teacher.model {model}: {what} ({type(error).__name__}: {reason[:200]}); give a folder, a .gguf file or a Hub id"


def _first(config: dict, *names: str) -> int | None:
    return next((config[name] for name in names if isinstance(config.get(name), int)), None)


def _count_parameters(folder: Path) -> int | None:
    """Return the exact count from the safetensors headers, or None where there are none."""
    total = 0
    for file in folder.glob("*.safetensors"):
        with open(file, "rb") as handle:
            size = handle.read(8)
            if len(size) < 8 or struct.unpack("<Q", size)[0] > 2**28:
                return None  # loading will name the broken file
            try:
                header = json.loads(handle.read(struct.unpack("<Q", size)[0]))
            except ValueError:
                return None
        total += sum(math.prod(t["shape"]) for name, t in header.items() if name != "__metadata__")
    return total or None


def _estimate_parameters(facts: dict, tied: bool) -> int | None:
    """Return the count of a Llama-like model of these sizes, or None where they are not declared."""
    hidden, layers, vocab = facts["hidden_size"], facts["num_layers"], facts["vocab_size"]
    if not (hidden and layers and vocab and facts["num_heads"]):
        return None
    kv_share = facts["num_kv_heads"] / facts["num_heads"]
    inner = facts["intermediate_size"] or 4 * hidden
    layer = round(hidden * hidden * (2 + 2 * kv_share)) + 3 * hidden * inner + 2 * hidden
    return layers * layer + vocab * hidden * (1 if tied else 2) + hidden
