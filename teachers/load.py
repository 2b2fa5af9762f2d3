"""Find a teacher's kind by its name, and load, describe or fingerprint it."""

from pathlib import Path
from types import ModuleType
from typing import Any

from fewstep.errors import UserError
from fewstep.teachers import endpoint, gguf, hf
from fewstep.teachers.config import ENDPOINT, TeacherConfig
from fewstep.teachers.licences import Licence, read_licence

SAVED = "teacher"  # the folder, inside that of targets, with the plain weights of a teacher that came as GGUF


def kind_of(model: str) -> str:
    """Return the file of this room that stands for `model`: "hf", "gguf" or "endpoint".

    Raises:
        UserError: it is empty.
    """
    if not model.strip():
        raise UserError("teacher.model is empty; give a folder, a .gguf file, package://module/file.gguf or a Hub id")
    if model.startswith(ENDPOINT):
        return "endpoint"
    return "gguf" if model.startswith("package://") or model.lower().endswith(".gguf") else "hf"


def _module(model: str) -> ModuleType:
    kind = kind_of(model)
    if kind == "endpoint":
        raise UserError(f"{model}: an endpoint gives no weights; give a folder, a .gguf file or a Hub id")
    return gguf if kind == "gguf" else hf


def load_teacher(
    model: str,
    revision: str | None = None,
    dtype: str = "auto",
    quantize: str | None = None,
    device_map: str | None = None,
) -> tuple[Any, Any]:
    """Return (model, tokenizer), the model in eval mode and on the GPU where there is one.

    Args:
        model: a folder, a .gguf file, package://module/file.gguf, or a Hub id.
        revision: a Hub commit, branch or tag; ignored for local files.
        dtype: "float32", "bfloat16", "float16", or "auto": float32 on a CPU, bfloat16 on a GPU.

        quantize, device_map: of a checkpoint that is no GGUF file; see `hf.load`.

    Raises:
        UserError: it cannot be loaded or is no decoder-only LM.
    """
    if kind_of(model) == "gguf":
        return gguf.load(model, revision, dtype)
    return hf.load(model, revision, dtype, quantize, device_map)


def load_tokenizer(model: str, revision: str | None = None) -> Any:
    """Return the teacher's tokenizer without its weights.

    Raises:
        UserError: there is none, or it cannot be rebuilt.
    """
    return _module(model).load_tokenizer(model, revision)


def load_config(model: str, revision: str | None = None) -> Any:
    """Return the transformers config of a teacher, without its weights.

    Raises:
        UserError: there is none, or transformers cannot read it.
    """
    return _module(model).load_config(model, revision)


def teacher_fingerprint(model: str, revision: str | None = None) -> str:
    """Return what names the teacher's content (a hash, or a Hub commit), without loading weights.

    Raises:
        UserError: nothing is there.
    """
    return _module(model).fingerprint(model, revision)


def fingerprint_of(teacher: TeacherConfig) -> str:
    """Return what names a recipe's teacher: the content of its files, or a server's model.

    Raises:
        UserError: nothing is there.
    """
    if teacher.is_endpoint:
        return endpoint.fingerprint(teacher)
    return teacher_fingerprint(teacher.model, teacher.revision)


def describe(model: str, revision: str | None = None) -> dict:
    """Return the teacher's shape from its config or header, without loading weights; see `hf.describe`.

    Raises:
        UserError: nothing is there, or it is no decoder-only LM that transformers has code for.
    """
    return _module(model).describe(model, revision)


def licence(teacher: TeacherConfig) -> Licence:
    """Return the teacher's licence: as its card (or its GGUF header) states it, of an endpoint as the recipe does.

    Raises:
        UserError: nothing is there.
    """
    if teacher.is_endpoint:
        return read_licence(None, teacher.acknowledge)
    return _module(teacher.model).licence(teacher.model, teacher.revision)


def plain_weights(model: str, revision: str | None = None) -> Path:
    """Return a folder with the checkpoint as safetensors; a Hub checkpoint is fetched at the commit that names it.

    Raises:
        UserError: nothing is there, or it is a GGUF file.
    """
    return _module(model).plain_weights(model, revision)


def load_for_stage(teacher: TeacherConfig, targets_folder: Path | str) -> tuple[Any, Any]:
    """Return (model, tokenizer) for a later stage: the plain weights that targets saved, where it did."""
    saved = Path(targets_folder) / SAVED
    if saved.is_dir():
        return load_teacher(str(saved), None, teacher.dtype)
    return load_teacher(teacher.model, teacher.revision, teacher.dtype, teacher.quantize, teacher.device_map)
