"""`fewstep doctor`: what this machine has, and which paths a run would take on it."""

import importlib
import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import fewstep
from fewstep import machine


def examine() -> dict:
    """Return JSON-able facts: versions, hardware, engines, kernels, tracking, and what is missing."""
    import torch

    hardware = machine.hardware()
    cuda = torch.cuda.is_available()
    compiler = os.environ.get("CXX") or next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), None)
    ninja = shutil.which("ninja") is not None or find_spec("ninja") is not None
    return {
        "versions": machine.versions(),
        "commit": machine.commit(),
        "hardware": hardware,
        "device": "cuda" if cuda else "cpu",
        "precision": "bf16" if cuda else "fp32: bf16 matrix products are far slower on a CPU",
        "engines": {"deepspeed": _deepspeed(compiler, ninja), "plain": "ready: one process, the reference"},
        "compiler": compiler,
        "ninja": ninja,
        "kernels": _kernels(cuda),
        "hub": _hub(),
        "wandb": os.environ.get("WANDB_MODE", "as track.wandb.mode says"),
    }


def _hub() -> str:
    """Return whether the Hub answers."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return "offline (HF_HUB_OFFLINE is set)"
    try:
        get_session().head(constants.ENDPOINT, timeout=3)  # through the proxies that a download would take
    except Exception as error:  # of whichever HTTP library the Hub's client uses
        return f"{constants.ENDPOINT} does not answer ({error})"
    return f"{constants.ENDPOINT} answers"


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
    hardware = facts["hardware"]
    lines = [
        "versions   " + ", ".join(f"{name} {version}" for name, version in facts["versions"].items()),
        f"commit     {facts['commit'] or 'none: installed from a wheel'}",
        f"hardware   {hardware['cpu']}, {hardware['cores']} cores, {hardware['memory_gb']} GB; "
        f"GPUs: {', '.join(hardware['gpus']) or 'none'}; {hardware['threads']} threads",
        f"device     {facts['device']}, precision {facts['precision']}",
        *(f"engine     {name}: {state}" for name, state in facts["engines"].items()),
        f"compiler   {facts['compiler'] or 'none'}; ninja {'found' if facts['ninja'] else 'not found'}",
        *(f"kernel     {name}: {state}" for name, state in facts["kernels"].items()),
        f"hub        {facts['hub']}",
        f"wandb      {facts['wandb']}",
    ]
    return "\n".join(lines)
