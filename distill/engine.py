"""What runs a training step: DeepSpeed under Accelerate, and a plain loop as its reference.

Both offer the same few verbs, so the training loop does not know which one it has:
`forward`, `backward`, `step`, `save`, `load`, `whole_weights`, `all_sum`.
"""

import atexit
import os
import shutil
import socket
import sys
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path

import torch

from fewstep import machine
from fewstep.distill.config import EngineConfig
from fewstep.errors import RunFailed, UserError


def build_engine(
    config: EngineConfig,
    module: torch.nn.Module,
    optimizer,
    accumulation: int,
    max_grad_norm: float,
    written_by: dict | None = None,
):
    """Return a PlainEngine or a DeepSpeedEngine around `module`.

    Args:
        optimizer: a torch optimizer over the trainable parameters.
        accumulation: micro-batches of a rank in one step.
        max_grad_norm: gradients are clipped to this global L2 norm.
        written_by: `layout()` of the checkpoint that will be loaded, if one will.

    Raises:
        UserError: that checkpoint cannot be read by this engine.
    """
    here = layout(config)
    if written_by and any(written_by[key] != here[key] for key in ("engine", "zero_stage")):
        raise UserError(
            f"engine: {_described(here)}, but this stage's checkpoint was written by {_described(written_by)}; set "
            "engine.name and engine.zero_stage back, or run from a new --runs folder"
        )
    if config.name == "plain":
        return PlainEngine(module, optimizer, max_grad_norm)
    resharded = bool(written_by) and written_by["world_size"] != here["world_size"]
    return DeepSpeedEngine(config, module, optimizer, accumulation, max_grad_norm, resharded)


def layout(config: EngineConfig) -> dict:
    """Return what decides how a checkpoint is cut into files."""
    world_size = machine.world_size()
    return {
        "engine": config.name,
        "zero_stage": None if config.name == "plain" else config.zero_stage,
        "world_size": world_size,
    }


def _described(cut: dict) -> str:
    return cut["engine"] if cut["zero_stage"] is None else f"{cut['engine']} with zero_stage {cut['zero_stage']}"


def training_dtype(precision: str) -> torch.dtype:
    """Return the dtype of weights: fp32 on a CPU (its bf16 is 100 times slower), bf16 on a GPU."""
    if precision == "auto":
        return torch.bfloat16 if torch.cuda.is_available() else torch.float32
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]


class PlainEngine:
    """One process, plain torch: the obviously right one.

    A 16-bit weight has an fp32 master, which the optimizer moves and the weight is rounded from, as under DeepSpeed:
    by itself a bf16 weight stays where it is under any update below 1/256 of it, and late in training most are.
    """

    rank, world_size = 0, 1

    def __init__(self, module, optimizer, max_grad_norm: float):
        if machine.world_size() > 1:
            raise UserError("engine.name=plain: runs in one process; use engine.name=deepspeed for several")
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.module, self.optimizer, self.max_grad_norm = module.to(self.device), optimizer, max_grad_norm
        self.masters: dict[torch.nn.Parameter, torch.nn.Parameter] = {}  # 16-bit parameter → what is optimized
        for group in optimizer.param_groups:
            group["params"] = [self._master(p) for p in group["params"]]

    def _master(self, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        if parameter.dtype not in (torch.bfloat16, torch.float16):
            return parameter
        master = self.masters[parameter] = torch.nn.Parameter(parameter.detach().float())

        def take_gradient(p: torch.nn.Parameter) -> None:
            grad = p.grad.float()
            master.grad = grad if master.grad is None else master.grad.add_(grad)
            p.grad = None

        parameter.register_post_accumulate_grad_hook(take_gradient)
        return master

    def forward(self, *args):
        return self.module(*args)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def micro_step(self) -> None:
        """Nothing happens between micro-batches."""

    def step(self, learning_rate: float) -> float:
        """Clip, update, clear; return the gradient norm before clipping."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        parameters = [p for g in self.optimizer.param_groups for p in g["params"]]
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for parameter, master in self.masters.items():
                parameter.copy_(master)
        return float(norm)

    def all_sum(self, values: list[float]) -> list[float]:
        """Return the sums over all ranks."""
        return values

    def all_max(self, value: float) -> float:
        """Return the largest value of all ranks."""
        return value

    def barrier(self) -> None:
        """Wait for every rank."""

    def save(self, folder: Path) -> None:
        """Write everything a bit-exact continuation needs into `folder`."""
        named = self.module.named_parameters()
        trained = {n: self.masters.get(p, p).detach() for n, p in named if p.requires_grad}
        torch.save({"weights": trained, "optimizer": self.optimizer.state_dict()}, folder / "plain.pt")

    def load(self, folder: Path) -> None:
        state = torch.load(folder / "plain.pt", map_location=self.device, weights_only=True)
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                if name in state["weights"]:
                    parameter.copy_(state["weights"][name])
                    if parameter in self.masters:
                        self.masters[parameter].copy_(state["weights"][name])
        self.optimizer.load_state_dict(state["optimizer"])

    def whole_weights(self):
        """Context in which the module's parameters are complete on this rank."""
        return nullcontext()


class DeepSpeedEngine:
    """DeepSpeed ZeRO 0-3 through Accelerate, on one or many processes, on a GPU or a CPU."""

    def __init__(
        self, config: EngineConfig, module, optimizer, accumulation: int, max_grad_norm: float, resharded: bool
    ):
        self.zero_stage = config.zero_stage
        # without ZeRO every rank's state is whole, and any number of them reads it
        self.resharded = resharded and config.zero_stage > 0
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState
        from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        AcceleratorState._reset_state()  # adapt and distill may follow each other in one process
        bf16 = training_dtype(config.precision) == torch.bfloat16
        plugin = DeepSpeedPlugin(
            hf_ds_config={
                "train_micro_batch_size_per_gpu": 1,  # we build the micro-batches; DeepSpeed only counts them
                "gradient_accumulation_steps": accumulation,
                "gradient_clipping": max_grad_norm,
                "zero_optimization": _zero(config),
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
                "bf16": {"enabled": bf16},
                "steps_per_print": 10**9,
                "checkpoint": {"load_universal": self.resharded},
            }
        )
        handlers = [] if torch.cuda.is_available() else [InitProcessGroupKwargs(backend="gloo")]
        accelerator = Accelerator(
            deepspeed_plugin=plugin,
            kwargs_handlers=handlers,
            gradient_accumulation_steps=accumulation,
            mixed_precision="bf16" if bf16 else "no",
        )
        engine, _ = accelerator.prepare(module, optimizer)
        unset_hf_deepspeed_config()  # or transformers would load the next stage's model in ZeRO-3 partitions
        if type(engine).__name__ != "DeepSpeedEngine" or engine.zero_optimization_stage() != config.zero_stage:
            raise RunFailed(
                f"asked for DeepSpeed ZeRO-{config.zero_stage}, Accelerate returned {type(engine).__name__}"
            )
        self.engine, self.accelerator, self.module = engine, accelerator, engine.module
        self.rank, self.world_size, self.device = (
            accelerator.process_index,
            accelerator.num_processes,
            accelerator.device,
        )
        self.accumulation = accumulation

    def forward(self, *args):
        return self.engine(*args)

    def backward(self, loss: torch.Tensor) -> None:
        # DeepSpeed takes means over micro-batches and ranks; our losses are shares of one sum
        self.engine.backward(loss * (self.accumulation * self.world_size))

    def micro_step(self) -> None:
        """Count a micro-batch that does not end the step."""
        self.engine.step()

    def step(self, learning_rate: float) -> float:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = learning_rate
        norm = None
        if self.zero_stage == 0:  # plain data parallelism: DeepSpeed clips, but reports no norm
            grads = [p.grad for p in self.module.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(grads)
        self.engine.step()
        return float(norm if norm is not None else self.engine.get_global_grad_norm())

    def all_sum(self, values: list[float]) -> list[float]:
        if self.world_size == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(total)
        return total.tolist()

    def all_max(self, value: float) -> float:
        if self.world_size == 1:
            return value
        highest = torch.tensor(value, dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(highest, torch.distributed.ReduceOp.MAX)
        return float(highest)

    def barrier(self) -> None:
        if self.world_size > 1:
            torch.distributed.barrier()

    def save(self, folder: Path) -> None:
        self.engine.save_checkpoint(str(folder), tag="state", exclude_frozen_parameters=True)

    def load(self, folder: Path) -> None:
        tag = "state"
        if self.resharded:
            tag = "universal"
            if self.rank == 0:
                to_universal(folder / "state", folder / tag)
            self.barrier()
        path, _ = self.engine.load_checkpoint(str(folder), tag=tag, load_module_strict=False)
        if path is None:
            raise RunFailed(
                f"checkpoint {folder}: DeepSpeed could not load it; delete the folder to start the stage anew"
            )

    @contextmanager
    def whole_weights(self):
        if self.zero_stage < 3:
            yield
            return
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(self.module.parameters())):
            yield


def _zero(config: EngineConfig) -> dict:
    """Return DeepSpeed's section on ZeRO."""
    host = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    optimizer = {} if config.offload == "none" else {"offload_optimizer": host}
    weights = {} if config.offload != "all" else {"offload_param": host}
    return {"stage": config.zero_stage, **optimizer, **weights}


def to_universal(state: Path, out: Path) -> None:
    """Write a ZeRO checkpoint in DeepSpeed's form that any number of ranks can read."""
    from deepspeed.checkpoint import ds_to_universal

    shutil.rmtree(out, ignore_errors=True)
    asked = ["--input_folder", str(state), "--output_folder", str(out), "--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state"]  # fmt: skip
    given = sys.argv
    try:
        sys.argv = ["ds_to_universal", *asked]
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            ds_to_universal.main(ds_to_universal.parse_arguments())
    finally:
        sys.argv = given


@atexit.register
def _leave_gloo() -> None:
    """End gloo's threads while Python still runs: at exit, without this, they now and then abort the process."""
    if torch.distributed.is_initialized() and torch.distributed.get_backend() == "gloo":
        torch.distributed.destroy_process_group()


def prepare_environment(config: EngineConfig) -> None:
    """Make DeepSpeed start on a bare machine: no MPI, no launcher, no two-minute compile.

    Called before a model is loaded, because transformers imports DeepSpeed then.
    """
    if config.name != "deepspeed":
        return
    if "RANK" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        alone = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({k: str(v) for k, v in alone.items()})
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    os.environ.pop("ACCELERATE_USE_CPU", None)  # by `accelerate launch --cpu`, and would mean plain data parallelism
    import logging

    import deepspeed.ops

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if not torch.cuda.is_available():
        # its shared-memory collectives save nothing for one process and cost a two-minute compile
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
