"""`fewstep doctor`: what this machine has, and which paths a run would take on it."""

import importlib
import logging
import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import fewstep
from fewstep import machine

NEEDED = ("torch", "transformers", "pyarrow", "numpy", "safetensors", "tokenizers")
LITTLE_DISK_GB = 5


def examine(runs: Path) -> dict:
    """Return JSON-able facts: versions, hardware, engines, attention, kernels, disk, network, and a verdict in a line."""
    lacking = [name for name in NEEDED if find_spec(name) is None]
    if lacking:
        return {
            "versions": machine.versions(),
            "verdict": f"not ready: {', '.join(lacking)} missing; pip install fewstep",
        }
    import torch

    hardware = machine.hardware()
    cuda = torch.cuda.is_available()
    compiler = os.environ.get("CXX") or next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), None)
    ninja = shutil.which("ninja") is not None or find_spec("ninja") is not None
    facts = {
        "versions": machine.versions(),
        "commit": machine.commit(),
        "hardware": hardware,
        "device": "cuda" if cuda else "cpu",
        "precision": "bf16" if cuda else "fp32: bf16 matrix products are far slower on a CPU",
        "engines": {"deepspeed": _deepspeed(compiler, ninja), "plain": "ready: one process, the reference"},
        "deepspeed_ops": _deepspeed_ops(),
        "compiler": compiler,
        "ninja": ninja,
        "attention": {
            "training": "SDPA with a dense mask: [clean | noisy] rows are no causal ones, and flash kernels take no mask; of packed rows see block_mask",
            "decoding": "SDPA over the block cache, with a dense mask: a block's rows see its whole prefix",
        },
        "kernels": _kernels(cuda),
        "disk_free_gb": round(shutil.disk_usage(_existing(runs)).free / 1e9, 1),
        "hub": _hub(),
        "wandb": _wandb(),
    }
    return facts | {"verdict": _verdict(facts)}


def _existing(folder: Path) -> Path:
    folder = folder.resolve()
    return next(place for place in (folder, *folder.parents) if place.exists())


def _verdict(facts: dict) -> str:
    ready = [name for name, state in facts["engines"].items() if state.startswith("ready")]
    where = ", ".join(facts["hardware"]["gpus"]) or f"{facts['hardware']['cores']} CPU cores"
    low = f"; only {facts['disk_free_gb']} GB of disk are free" if facts["disk_free_gb"] < LITTLE_DISK_GB else ""
    return f"ready: trains on {where} with engine {' or '.join(ready)}{low}"


def _hub() -> str:
    """Return whether the Hub answers."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "offline (HF_HUB_OFFLINE is set)"
    return _answers(constants.ENDPOINT)


def _answers(url: str) -> str:
    from huggingface_hub.utils import get_session

    try:
        get_session().head(url, timeout=3)  # through the proxies that a download would take
    except Exception as error:  # of whichever HTTP library the Hub's client uses
        return f"{url} does not answer ({error})"
    return f"{url} answers"


def _wandb() -> str:
    """Return what `track.wandb` would do here; a key is looked for, never shown."""
    if find_spec("wandb") is None:
        return "missing: pip install wandb; metrics.jsonl is always written"
    mode = os.environ.get("WANDB_MODE")
    if mode in ("offline", "disabled"):
        return f"{mode} (WANDB_MODE is set)"
    import wandb

    if not (os.environ.get("WANDB_API_KEY") or wandb.api.api_key):
        return "offline: no key (wandb login, or WANDB_API_KEY)"
    return "a key is there; " + _answers(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai"))


def _deepspeed_ops() -> str:
    """Return which of DeepSpeed's compiled ops could be built here; none of them is needed."""
    if find_spec("deepspeed") is None:
        return "none"
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if _cuda() else "cpu")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    try:
        from deepspeed.ops.op_builder.all_ops import ALL_OPS

        found = {name: builder.is_compatible(verbose=False) for name, builder in ALL_OPS.items()}
    except Exception as error:  # its probes run compilers and read drivers
        return f"not known ({type(error).__name__}: {error})"
    fits = sorted(name for name, compatible in found.items() if compatible and name != "deepspeed_not_implemented")
    return f"could be built: {', '.join(fits) or 'none'}"


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _deepspeed(compiler: str | None, ninja: bool) -> str:
    if find_spec("deepspeed") is None:
        return "missing: pip install deepspeed, or use engine.name=plain"
    lacking = [name for name, there in (("a C++ compiler", compiler), ("ninja", ninja)) if not there]
    return f"ready, but {' and '.join(lacking)} not found: ops that compile cannot be built" if lacking else "ready"


def _kernels(cuda: bool) -> dict[str, str]:
    """Return op → the path that runs here, and why; an op with a Triton kernel says so in `path()`."""
    out = {}
    for place in fewstep.__path__:
        for file in sorted(Path(place, "kernels").glob("[!_]*.py")):
            module = importlib.import_module(f"fewstep.kernels.{file.stem}")
            chosen = getattr(module, "path", None)
            reason = "the op has no Triton kernel" if cuda else "there is no GPU"
            out[file.stem] = chosen() if chosen is not None else f"torch: {reason}"
    return out


def as_text(facts: dict) -> str:
    """Return the facts as lines for people."""
    if "hardware" not in facts:
        return f"verdict    {facts['verdict']}"
    hardware = facts["hardware"]
    lines = [
        "versions   " + ", ".join(f"{name} {version}" for name, version in facts["versions"].items()),
        f"commit     {facts['commit'] or 'none: installed from a wheel'}",
        f"hardware   {hardware['cpu']}, {hardware['cores']} cores, {hardware['memory_gb']} GB; "
        f"GPUs: {', '.join(hardware['gpus']) or 'none'}; {hardware['threads']} threads",
        f"device     {facts['device']}, precision {facts['precision']}",
        *(f"engine     {name}: {state}" for name, state in facts["engines"].items()),
        f"ops        DeepSpeed's that {facts['deepspeed_ops']}",
        f"compiler   {facts['compiler'] or 'none'}; ninja {'found' if facts['ninja'] else 'not found'}",
        *(f"attention  {name}: {path}" for name, path in facts["attention"].items()),
        *(f"kernel     {name}: {state}" for name, state in facts["kernels"].items()),
        f"disk       {facts['disk_free_gb']} GB free",
        f"hub        {facts['hub']}",
        f"wandb      {facts['wandb']}",
        f"verdict    {facts['verdict']}",
    ]
    return "\n".join(lines)
