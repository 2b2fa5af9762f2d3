"""The one thread that owns the model: it decodes waiting requests of the same settings as one batch."""

import copy
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fewstep.serve.text import Detokenizer, Stops
from fewstep.students.decoding import Decoded, decode

MAX_WAITING = 256  # prompts; more are refused at once rather than kept waiting for minutes


@dataclass(frozen=True)
class Sampling:
    """What decides how a prompt is decoded. Only prompts of equal settings share a batch: a last block
    is as long as the budget allows, so another budget could change the text."""

    sampler: str
    max_tokens: int
    block_size: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    settings: tuple[tuple[str, float], ...] = ()  # the sampler's own, sorted by name


@dataclass(frozen=True)
class End:
    """How one answer ended. nfe counts this row's forwards up to its last token."""

    finish_reason: str  # "stop" or "length"
    num_tokens: int
    nfe: int
    tokens: list[str] | None = None  # text of each token, and the forward that committed it, if asked for
    steps: list[int] | None = None


@dataclass(eq=False)
class Job:
    """One prompt that waits for its answer.

    emit: called in the worker's thread with pieces of text, then with one End or one exception.
    gone: set by whoever stopped listening; the answer is dropped.
    """

    prompt: list[int]
    sampling: Sampling
    stops: tuple[str, ...]
    trace: bool
    seed: int
    emit: Callable[[str | End | Exception], None]
    gone: bool = False


class Busy(Exception):
    """Too many prompts wait already."""


class Stopping(Exception):
    """The server stops before this prompt was answered."""


class _Enough(Exception):
    """Nobody waits for what the batch still computes."""


class Worker:
    """Decode jobs in a thread of its own, from `start` to `stop`.

    Args:
        model, tokenizer: the student's. After `start` no other thread may run the model.
        eos: ids that end an answer.
        max_batch: the most prompts decoded together.
    """

    def __init__(self, model: Any, tokenizer: Any, eos: list[int], max_batch: int):
        self._model, self._eos, self._max_batch = model, eos, max_batch
        self._tokenizer = copy.deepcopy(tokenizer)  # a fast tokenizer may not be used by two threads at once
        self._waiting: list[Job] = []
        self._change = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="fewstep-worker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float | None = None) -> None:
        """End the thread; what is not answered yet gets Stopping."""
        with self._change:
            self._stopping = True
            self._change.notify()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def alive(self) -> bool:
        return self._thread.is_alive()

    def waiting(self) -> int:
        return len(self._waiting)

    def submit(self, jobs: list[Job]) -> None:
        """Queue `jobs`, all or none.

        Raises:
            Busy: more than MAX_WAITING would wait.
            Stopping: the worker was told to stop.
        """
        with self._change:
            if self._stopping:
                raise Stopping("the server is stopping")
            if len(self._waiting) + len(jobs) > MAX_WAITING:
                raise Busy(f"{len(self._waiting)} prompts are waiting, at most {MAX_WAITING} may; try again later")
            self._waiting += jobs
            self._change.notify()

    def _run(self) -> None:
        while (batch := self._take()) is not None:
            self._answer(batch)
        for job in self._waiting:
            job.emit(Stopping("the server is stopping"))

    def _take(self) -> list[Job] | None:
        """Wait for work; return the oldest job and those of its settings that wait too, None to stop."""
        with self._change:
            while True:
                self._waiting = [job for job in self._waiting if not job.gone]
                if self._stopping:
                    return None
                if self._waiting:
                    break
                self._change.wait()
            first = self._waiting[0].sampling
            batch = [job for job in self._waiting if job.sampling == first][: self._max_batch]
            self._waiting = [job for job in self._waiting if job not in batch]
            return batch

    def _answer(self, batch: list[Job]) -> None:
        how = batch[0].sampling
        limit = how.max_tokens
        context = getattr(self._model.config.get_text_config(), "max_position_embeddings", None) or 10**9  # as decode
        rows = [_Row(j, self._tokenizer, self._eos, min(limit, context - len(j.prompt))) for j in batch]
        forwards = 0

        def count(*_: Any) -> None:
            nonlocal forwards
            forwards += 1

        def on_tokens(index: int, ids: list[int]) -> None:
            # every row that is not done yet takes part in every forward, so the batch's count is the row's
            rows[index].take(ids, forwards)
            if self._stopping or all(row.closed for row in rows):
                raise _Enough

        hook = self._model.base_model.register_forward_pre_hook(count)
        try:
            decoded = decode(
                self._model,
                [job.prompt for job in batch],
                sampler=how.sampler,
                max_new_tokens=limit,
                eos_token_ids=self._eos,
                block_size=how.block_size,
                temperature=how.temperature,
                top_p=how.top_p,
                seed=[job.seed for job in batch],
                on_tokens=on_tokens,
                **dict(how.settings),
            )
            for row, done in zip(rows, decoded):
                row.close(done)
        except _Enough:
            for row in rows:
                row.fail(Stopping("the server is stopping"))
        except Exception as error:  # out of memory, say: these requests fail, the server goes on
            traceback.print_exc()
            for row in rows:
                row.fail(error)
        finally:
            hook.remove()


class _Row:
    """One answer of a batch on its way to text."""

    def __init__(self, job: Job, tokenizer: Any, eos: list[int], budget: int):
        self._job, self._eos, self._budget = job, eos, budget
        self._detokenizer, self._stops = Detokenizer(tokenizer), Stops(job.stops)
        self._pieces: list[str] = []  # text of each token
        self._length = 0  # characters emitted
        self._end: End | None = None
        self._sent_end = False

    @property
    def closed(self) -> bool:
        """True once nobody waits for more of this row."""
        return self._sent_end or self._job.gone

    def take(self, ids: list[int], forwards: int) -> None:
        """Emit the text of the tokens that joined the answer in forward number `forwards`, and its end."""
        if self.closed or self._end is not None:
            return
        text = ""
        for token in ids:
            self._pieces.append(self._detokenizer.add(token))
            text += self._stops.add(self._pieces[-1])
            if self._stops.hit:
                break
        reason = "stop" if ids[-1] in self._eos else "length" if len(self._pieces) == self._budget else None
        if reason is not None and not self._stops.hit:
            rest = self._detokenizer.flush()
            self._pieces[-1] += rest
            text += self._stops.add(rest) + self._stops.flush()
        self._length += len(text)
        if text:
            self._job.emit(text)
        if self._stops.hit or reason is not None:
            self._end = End("stop" if self._stops.hit else str(reason), len(self._pieces), forwards)
            if not self._job.trace:
                self._send_end(self._end)

    def close(self, done: Decoded) -> None:
        """Send the end that waited for the steps; they are known once the batch is done."""
        if self.closed:
            return
        assert self._end is not None, "decode returned, but this row saw neither an EOS nor the end of its budget"
        tokens, left = [], self._length
        for piece in self._pieces:  # a stop string is no part of the answer: its tokens have no text
            tokens.append(piece[:left])
            left -= len(tokens[-1])
        end = self._end
        self._send_end(End(end.finish_reason, end.num_tokens, end.nfe, tokens, done.steps[: end.num_tokens]))

    def fail(self, error: Exception) -> None:
        if not self.closed:
            self._sent_end = True
            self._job.emit(error)

    def _send_end(self, end: End) -> None:
        self._sent_end = True
        self._job.emit(end)
