"""The thread that owns the model: what shares a batch, when a row ends, and what an error costs."""

import queue

import pytest

from fewstep.serve import worker as module
from fewstep.serve.worker import Busy, End, Job, Sampling, Stopping
from fewstep.students.decoding import decode

AR = Sampling("ar", 12)


class Listener:
    """Collects what one job emits."""

    def __init__(self, sampling=AR, prompt=(5, 6, 7), stops=(), trace=False, on_event=lambda event: None):
        self.events = queue.Queue()
        self.text = ""

        def emit(event):
            on_event(event)
            self.events.put(event)

        self.job = Job(list(prompt), sampling, tuple(stops), trace, 0, emit)

    def wait(self):
        """Return the End or exception that closes the answer; its text is in `text`."""
        while True:
            event = self.events.get(timeout=20)
            if not isinstance(event, str):
                return event
            self.text += event


@pytest.fixture
def batches(monkeypatch):
    """The prompts of every call of decode."""
    seen = []

    def spy(model, prompts, **settings):
        seen.append(prompts)
        return decode(model, prompts, **settings)

    monkeypatch.setattr(module, "decode", spy)
    return seen


def expected(student, sampling, prompt=(5, 6, 7)):
    model, tokenizer, eos = student
    given = dict(sampler=sampling.sampler, **dict(sampling.settings))
    done = decode(model, [list(prompt)], max_new_tokens=sampling.max_tokens, eos_token_ids=eos, **given)[0]
    return done, tokenizer.decode(done.ids, skip_special_tokens=True)


def test_waiting_jobs_of_equal_settings_are_one_batch(worker, student, batches):
    other = Sampling("threshold", 12, settings=(("threshold", 0.5),))
    settings = [AR, other, AR, AR, AR, Sampling("ar", 13)]
    listeners = [Listener(s, prompt=(5, 6, 7 + i)) for i, s in enumerate(settings)]
    worker.submit([listener.job for listener in listeners])
    worker.start()
    ends = [listener.wait() for listener in listeners]
    last = [[p[-1] for p in prompts] for prompts in batches]
    assert last == [[7, 9, 10], [8], [11], [12]]  # max_batch is 3; the oldest goes first
    for i, (listener, sampling, end) in enumerate(zip(listeners, settings, ends)):
        done, text = expected(student, sampling, (5, 6, 7 + i))
        assert listener.text == text
        assert (end.finish_reason, end.num_tokens, end.nfe) == (done.finish_reason, len(done.ids), done.nfe)


def test_row_that_ends_early_does_not_wait_for_its_batch(worker, student):
    """One answer is stopped in its middle; its end comes before the other's."""
    order = []
    sampling = Sampling("ar", 40)
    _, text = expected(student, sampling)
    first = Listener(sampling, stops=[text[3]], on_event=lambda e: isinstance(e, End) and order.append("first"))
    second = Listener(sampling, (9, 8), on_event=lambda e: order.append("second's end" if isinstance(e, End) else "."))
    worker.submit([first.job, second.job])
    worker.start()
    end = first.wait()
    second.wait()
    assert first.text == text[: text.index(text[3])]
    assert end.finish_reason == "stop" and end.nfe == end.num_tokens < 40
    assert order.index("first") < len(order) - 10 and order[-1] == "second's end"


def test_stopped_answer_ends_the_decoding(worker, student):
    model, forwards = student[0], []
    _, text = expected(student, Sampling("ar", 200))
    listener = Listener(Sampling("ar", 200), stops=[text[2]])
    hook = model.base_model.register_forward_pre_hook(lambda *_: forwards.append(1))
    worker.submit([listener.job])
    worker.start()
    end = listener.wait()
    worker.stop(timeout=20)
    hook.remove()
    assert len(forwards) == end.nfe < 10


@pytest.mark.parametrize(
    "sampling",
    [AR, Sampling("verify", 30), Sampling("fixed", 30, settings=(("steps", 3),)), Sampling("threshold", 30)],
    ids=str,
)
def test_trace_names_the_forward_of_every_token(worker, student, sampling):
    done, text = expected(student, sampling)
    stop = text[len(text) // 2]
    plain, cut = Listener(sampling, trace=True), Listener(sampling, trace=True, stops=[stop])
    worker.submit([plain.job, cut.job])
    worker.start()
    end = plain.wait()
    assert (end.steps, "".join(end.tokens), end.nfe) == (done.steps, text, done.nfe)
    end = cut.wait()
    assert "".join(end.tokens) == cut.text == text.split(stop)[0]
    assert end.steps == done.steps[: end.num_tokens] and len(end.tokens) == end.num_tokens


def test_every_token_of_a_bounded_context_is_counted(worker, student):
    listener = Listener(Sampling("threshold", 100, settings=(("threshold", 0.0),)), prompt=[5] * 500)
    worker.submit([listener.job])
    worker.start()
    assert listener.wait() == End("length", 12, 2)


def test_job_that_nobody_waits_for_is_not_decoded(worker, batches):
    gone, here = Listener(), Listener(prompt=(9,))
    gone.job.gone = True
    worker.submit([gone.job, here.job])
    worker.start()
    here.wait()
    assert batches == [[[9]]] and gone.events.empty()


def test_decoding_ends_once_the_client_is_gone(worker, student):
    def leave(_):
        listener.job.gone = True

    listener = Listener(Sampling("ar", 400), on_event=leave)
    after, forwards = Listener(), []
    hook = student[0].base_model.register_forward_pre_hook(lambda *_: forwards.append(1))
    worker.submit([listener.job, after.job])
    worker.start()
    after.wait()
    hook.remove()
    assert len(forwards) < 40


def test_failure_is_told_and_the_next_request_is_answered(worker, student, monkeypatch, capfd):
    def out_of_memory(*args, **kwargs):
        monkeypatch.setattr(module, "decode", decode)
        raise MemoryError("too much")

    monkeypatch.setattr(module, "decode", out_of_memory)
    first, second = Listener(), Listener(Sampling("ar", 5))
    worker.submit([first.job, second.job])
    worker.start()
    assert isinstance(first.wait(), MemoryError)
    second.wait()
    assert second.text == expected(student, Sampling("ar", 5))[1]
    assert "MemoryError: too much" in capfd.readouterr().err


def test_stop_tells_those_that_run_and_those_that_wait(worker):
    started = queue.Queue()
    running = Listener(Sampling("ar", 400), on_event=started.put)
    waiting = Listener(Sampling("ar", 3))
    worker.submit([running.job, waiting.job])
    worker.start()
    started.get(timeout=20)
    worker.stop(timeout=20)
    assert not worker.alive()
    assert isinstance(running.wait(), Stopping) and isinstance(waiting.wait(), Stopping)
    with pytest.raises(Stopping):
        worker.submit([waiting.job])


def test_more_than_may_wait_are_refused(worker, monkeypatch):
    monkeypatch.setattr(module, "MAX_WAITING", 2)
    worker.submit([Listener().job, Listener().job])
    with pytest.raises(Busy, match="2 prompts are waiting"):
        worker.submit([Listener().job])
    assert worker.waiting() == 2


def test_each_job_of_a_batch_draws_with_its_own_seed(worker, student, batches):
    model, tokenizer, eos = student
    sampling = Sampling("threshold", 20, temperature=1.0, settings=(("threshold", 0.5),))
    listeners = [Listener(sampling) for _ in range(3)]
    for listener, seed in zip(listeners, (1, 2, 1)):
        listener.job.seed = seed
    worker.submit([listener.job for listener in listeners])
    worker.start()
    for listener in listeners:
        listener.wait()
    assert len(batches) == 1
    alone = [
        decode(model, [[5, 6, 7]], sampler="threshold", threshold=0.5, max_new_tokens=20, eos_token_ids=eos, temperature=1.0, seed=seed)[0].ids
        for seed in (1, 2)
    ]  # fmt: skip
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in alone]
    assert [listener.text for listener in listeners] == [texts[0], texts[1], texts[0]] and texts[0] != texts[1]
