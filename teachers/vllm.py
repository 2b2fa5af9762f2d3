"""Runtime `vllm`: the teacher's weights answer through vLLM's engine, in place of transformers' code.

Prompts go in as token ids and answers come out as token ids; log-probabilities are those of the unchanged distribution
(vLLM's raw ones), whatever the sampling temperature. Later stages load the same weights with transformers.
"""

import math
import os
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fewstep import machine, signals
from fewstep.errors import RunFailed, UserError, first_line
from fewstep.teachers.config import TeacherConfig
from fewstep.teachers.generation import Generation
from fewstep.teachers.load import plain_weights


def check(teacher: TeacherConfig) -> None:
    """Raise UserError where vLLM cannot run this teacher here, as far as that is known without starting it."""
    if find_spec("vllm") is None:
        raise UserError(
            "teacher.runtime vllm: it is not installed; install it (docs/teachers.md), serve the teacher and give its URL as "
            "teacher.model, or remove teacher.runtime"
        )
    if machine.world_size() > 1:
        raise UserError(
            f"teacher.runtime vllm: its engine spreads over GPUs itself, and {machine.world_size()} processes would each start one; run "
            "`fewstep targets` in one process first"
        )


class Engine:
    """A running vLLM engine.

    Args:
        teacher: the recipe's section.
        folder: the teacher's plain weights.
        length: most tokens of a prompt and its answer.
        top_logprobs: K.
        rows: most rows at a time.
    """

    def __init__(self, teacher: TeacherConfig, folder: Path, length: int, top_logprobs: int, rows: int):
        check(teacher)
        # the engine in this process: one in a process of its own could die unnoticed
        quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        for name, value in quiet.items():
            os.environ.setdefault(name, value)
        import torch
        import vllm

        gpus = torch.cuda.device_count()
        dtype = teacher.dtype if teacher.dtype != "auto" else "bfloat16" if gpus else "float32"
        try:
            self._engine = vllm.LLM(
                model=str(folder), dtype=dtype, max_model_len=length, max_num_seqs=rows, max_logprobs=max(1, top_logprobs), seed=0,
                tensor_parallel_size=gpus if teacher.device_map == "auto" and gpus else 1, generation_config="vllm",
                logprobs_mode="raw_logprobs", skip_tokenizer_init=True, disable_log_stats=True, enforce_eager=not gpus,
                **({} if gpus else {"gpu_memory_utilization": 0.5}),  # on a CPU a share of all its memory
            ).llm_engine  # fmt: skip
        except Exception as error:  # a model that it has no code for, or that does not fit
            reason = first_line(error)
            raise UserError(
                f"teacher.runtime vllm: its engine cannot run {teacher.model} ({reason[:300]}); remove teacher.runtime"
            ) from None
        self._vllm, self._top_logprobs = vllm, top_logprobs

    def generate(
        self,
        prompts: list[list[int]],
        *,
        max_new_tokens: int,
        eos_ids: list[int],
        temperature: float,
        seeds: list[int],
        on_batch: Callable[[int, int], None],
    ) -> list[Generation]:
        """Answer each prompt; arguments as in `generate.generate`."""
        out = [Generation() for _ in prompts]
        for i, (ids, seed) in enumerate(zip(prompts, seeds)):
            settings = self._vllm.SamplingParams(
                max_tokens=max_new_tokens, temperature=temperature, seed=seed if temperature > 0 else None, ignore_eos=True,
                stop_token_ids=sorted(eos_ids), logprobs=self._top_logprobs or None, detokenize=False,
            )  # fmt: skip
            self._tried(lambda: self._engine.add_request(str(i), {"prompt_token_ids": ids}, settings))  # noqa: B023
        waiting = set(range(len(prompts)))
        try:
            while waiting:
                done = [said for said in self._tried(self._engine.step) if said.finished]
                for said in done:
                    out[int(said.request_id)] = read(said.outputs[0], self._top_logprobs)
                    waiting.discard(int(said.request_id))
                if done:
                    on_batch(len(done), sum(len(out[int(said.request_id)].ids) for said in done))
        finally:
            if waiting:  # stopped
                with suppress(Exception):  # of an engine that is dead there is nothing to abort
                    self._engine.abort_request([str(i) for i in waiting])
        return out

    def _tried(self, call: Callable) -> Any:
        """Return what the engine does; where it fails, say so in a line, or that a signal came."""
        try:
            return call()
        except Exception as error:
            signals.raise_if_stopped("targets stopped; finished shards are kept")
            reason = first_line(error)
            raise RunFailed(
                f"teacher.runtime vllm: its engine failed ({type(error).__name__}: {reason[:300]}); finished shards are kept, the same "
                "command goes on with the next"
            ) from None

    def close(self) -> None:
        """Give its memory back: training follows in the same process."""
        self._engine.engine_core.shutdown()
        del self._engine


def read(answer: Any, top_logprobs: int) -> Generation:
    """Return a completion of vLLM as a Generation; of its log-probabilities the K likeliest count, not that of a drawn token."""
    if answer.finish_reason not in ("stop", "length"):
        raise RunFailed(
            f"teacher.runtime vllm: its engine ended an answer by itself ({answer.finish_reason}); finished shards are kept, the same "
            "command goes on with the next"
        )
    out = Generation(ids=list(answer.token_ids), finish_reason="stop" if answer.finish_reason == "stop" else "length")
    for said in answer.logprobs or [] if top_logprobs else []:
        best = sorted(said.items(), key=lambda entry: (-entry[1].logprob, entry[0]))[:top_logprobs]
        out.topk_ids.append([token for token, _ in best])
        out.topk_logprobs.append([float(entry.logprob) for _, entry in best])
        out.tail_mass.append(max(0.0, 1.0 - sum(map(math.exp, out.topk_logprobs[-1]))))
    return out


def weights_of(teacher: TeacherConfig, saved: Path) -> Path:
    """Return the folder that the engine loads: what targets saved of a GGUF file, or the checkpoint's own."""
    return saved if saved.is_dir() else plain_weights(teacher.model, teacher.revision)
