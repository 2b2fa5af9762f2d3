"""What ran the work: hardware, thread count, package versions, commit."""

import os
import platform
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path

PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "deepspeed",
    "peft",
    "datasets",
    "wandb",
    "huggingface_hub",
    "tokenizers",
    "safetensors",
    "pyarrow",
    "numpy",
    "gguf",
    "triton",
)

# Dense bf16 FLOPs a second at the peak, and memory in bytes, as the makers state them.
GPU_FLOPS = {
    "B200": 2.2e15,
    "H200": 9.9e14,
    "H100": 9.9e14,
    "A100-SXM4-40GB": 3.1e14,
    "A100": 3.1e14,
    "L40S": 3.6e14,
    "RTX 4090": 1.7e14,
}
GPU_MEMORY = {
    "B200": 1.8e11,
    "H200": 1.41e11,
    "H100": 8e10,
    "A100-SXM4-40GB": 4e10,
    "A100": 8e10,
    "L40S": 4.8e10,
    "RTX 4090": 2.4e10,
}


def rank() -> int:
    """Return which of a launcher's processes this one is; 0 where there is no launcher."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Return how many processes the launcher has started; 1 where there is no launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def peak_memory_mb() -> float:
    """Return the most resident memory that this process has had.

    From the kernel's table where there is one: `getrusage` counts what the parent had at the fork, too.
    """
    try:
        with open("/proc/self/status") as table:
            return next(int(line.split()[1]) for line in table if line.startswith("VmHWM")) / 1024
    except (OSError, StopIteration):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def pin_threads(num: int | None) -> int:
    """Fix the number of CPU threads, on which bit-exact repeats depend, and return it.

    Best called before torch is imported: OpenMP reads its variable once.

    Args:
        num: threads; None: OMP_NUM_THREADS where it is set, else all cores.
    """
    given = os.environ.get("OMP_NUM_THREADS", "")
    num = num or (int(given) if given.isdigit() and int(given) > 0 else cores())
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = str(num)
    import torch

    torch.set_num_threads(num)
    return num


def hardware() -> dict:
    """Return the CPU's model, its cores, the memory in GB, the GPUs and the threads in use."""
    torch = sys.modules.get("torch")
    gpus = []
    if torch is not None and torch.cuda.is_available():
        gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": _cpu_model(),
        "cores": cores(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "gpus": gpus,
        "threads": torch.get_num_threads() if torch is not None else None,
    }


@cache
def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


@cache
def versions() -> dict:
    """Return the versions of Python, fewstep and the packages that results depend on."""
    found = {"python": platform.python_version()}
    for name in ("fewstep", *PACKAGES):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


@cache  # what was imported, whatever is committed while it runs
def commit() -> str | None:
    """Return the commit of the source tree that runs, with "-dirty" where anything but a result was edited; None in a wheel."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True)
        status = ["git", "status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results"]
        dirty = subprocess.run(status, cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("-dirty" if dirty.stdout.strip() else "")
