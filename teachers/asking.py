"""A teacher made ready to be asked, whatever its kind: weights at hand, vLLM's engine, or a server.

All take the same questions and give `Generation`s; nothing behind this file knows which it was.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fewstep import machine
from fewstep.chat import eos_ids
from fewstep.errors import UserError
from fewstep.runstore import write_atomic
from fewstep.teachers import endpoint, vllm
from fewstep.teachers.batch import prefill_prefix, shared_prefix
from fewstep.teachers.config import TargetsConfig, TeacherConfig
from fewstep.teachers.endpoint import Endpoint
from fewstep.teachers.filters import Filter
from fewstep.teachers.generate import generate, row_seed
from fewstep.teachers.generation import Generation
from fewstep.teachers.hf import load_stops
from fewstep.teachers.load import SAVED, describe, load_for_stage
from fewstep.teachers.prompts import Prompt, sample_id, teacher_messages


@dataclass
class Work:
    """Everything that is known before the first answer."""

    prompts: list[Prompt]
    student_ids: list[list[int]]  # what the student will see
    teacher_ids: list[list[int]]  # the same behind the system prompt and the examples
    rules: Filter
    contaminated: dict[str, str]  # id → what it shares with evaluation; these are not among `prompts`


@dataclass(frozen=True)
class Asked:
    """One answer that the teacher is asked for: of which prompt, which of its samples, at which attempt."""

    row: int
    sample: int
    attempt: int

    def key(self, prompts: list[Prompt]) -> str:
        """Return what its noise depends on, beside the seed."""
        first = sample_id(prompts[self.row].id, self.sample)
        return first if self.attempt == 0 else f"{first} attempt {self.attempt}"


OnAnswers = Callable[[int, int], None]  # (answers, their tokens), called as they come; may raise to stop
Asking = Callable[[list["Asked"], OnAnswers], list[Generation]]  # a teacher, whatever its kind


@contextmanager
def answering(
    folder: Path,
    teacher: TeacherConfig,
    work: Work,
    targets: TargetsConfig,
    seed: int,
    tokenizer: Any,
    reference: tuple,
) -> Iterator[Asking]:
    """Make the teacher ready to be asked, whatever its kind, and let it go afterwards.

    Args:
        tokenizer, reference: of its weights; of a server those of the student's base.
    """
    limits = dict(max_new_tokens=targets.max_new_tokens, temperature=targets.temperature)
    if teacher.runtime == "transformers" and not teacher.is_endpoint:
        model, _ = load_for_stage(teacher, folder)
        _check_ids(work, model.get_input_embeddings().weight.shape[0], teacher.model)
        # Over all prompts, not those of a shard: the same split of the computation whatever is resumed.
        prefix = prefill_prefix(model, shared_prefix(work.teacher_ids))
        asked = dict(prefix=prefix, top_logprobs=targets.top_logprobs, batch_size=targets.batch_size)
        stops = _stops(model, tokenizer, teacher.model)
        yield _by_ids(partial(generate, model, eos_ids=stops, **limits, **asked), work, seed)
        return
    stops = _stops(load_stops(*reference), tokenizer, reference[0])
    rows = describe(*reference)["vocab_size"]
    if teacher.is_endpoint:
        server = Endpoint(teacher, tokenizer, stops, rows)
        _same_model(folder, server)
        yield _of_endpoint(server, work, targets, seed)
        return
    _check_ids(work, rows, teacher.model)
    length = max(map(len, work.teacher_ids)) + targets.max_new_tokens
    weights = vllm.weights_of(teacher, folder / SAVED)
    engine = vllm.Engine(teacher, weights, length, targets.top_logprobs, targets.batch_size)
    try:
        yield _by_ids(partial(engine.generate, eos_ids=stops, **limits), work, seed)
    finally:
        engine.close()


def _by_ids(answer: Callable[..., list[Generation]], work: Work, seed: int) -> Asking:
    """Ask by token ids: `answer` takes prompts, and `seeds` and `on_batch` by name."""

    def ask(wanted: list[Asked], on_answers: OnAnswers) -> list[Generation]:
        seeds = [row_seed(seed, a.key(work.prompts)) for a in wanted]
        return answer([work.teacher_ids[a.row] for a in wanted], seeds=seeds, on_batch=on_answers)

    return ask


def _of_endpoint(server: Endpoint, work: Work, targets: TargetsConfig, seed: int) -> Asking:
    messages = teacher_messages([prompt.messages for prompt in work.prompts], targets)

    def ask(wanted: list[Asked], on_answers: OnAnswers) -> list[Generation]:
        requests = [
            endpoint.Ask(
                messages[a.row],
                work.teacher_ids[a.row],
                targets.max_new_tokens,
                targets.temperature,
                row_seed(seed, a.key(work.prompts)) % 2**31,  # servers take 32 bits
                targets.top_logprobs,
            )
            for a in wanted
        ]
        return endpoint.generate(server, requests, on_answers)

    return ask


def _same_model(folder: Path, server: Endpoint) -> None:
    """Note the model that a server serves, and refuse to go on with another one's targets."""
    noted = folder / "served.json"
    before = json.loads(noted.read_text())["model"] if noted.is_file() else None
    if before not in (None, server.served):
        raise UserError(
            f"teacher.model {server.url}: it serves {server.served}, and the targets in {folder} were begun with {before}; serve that "
            "one again, or name the new one as teacher.endpoint.served to begin anew"
        )
    if machine.rank() == 0 and before is None:
        write_atomic(noted, json.dumps({"model": server.served}))


def _stops(model_or_config: Any, tokenizer: Any, name: str) -> list[int]:
    stops = eos_ids(model_or_config, tokenizer)
    if not stops:
        raise UserError(
            f"teacher.model {name}: neither its tokenizer nor its generation config names an EOS; set eos_token_id there"
        )
    return stops


def _check_ids(work: Work, rows: int | None, name: str) -> None:
    highest = max(max(ids) for ids in work.teacher_ids)
    if rows is not None and highest >= rows:
        raise UserError(
            f"teacher.model {name}: its tokenizer gives id {highest}, its embedding has {rows} rows; give a checkpoint whose tokenizer fits"
        )
