"""The runtime `vllm` against transformers' own code, with an engine of this process in the library's place."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from test_collect import EOS, folder, prompts, settings, texts
from tiny import save_tiny
from transformers import AutoModelForCausalLM

from fewstep.errors import RunFailed, Stopped, UserError
from fewstep.records import read_rows
from fewstep.teachers import collect, vllm
from fewstep.teachers.config import TeacherConfig
from fewstep.teachers.generate import generate


class Library(ModuleType):
    """What of `vllm` is used: answers come from the weights, a few at a step, in an order of their own."""

    def __init__(self):
        super().__init__("vllm")
        self.made, self.asked, self.aborted, self.closed, self.steps = [], {}, [], 0, 0
        library = self

        class SamplingParams:
            def __init__(self, **keys):
                self.__dict__.update(keys)

        class LLM:
            def __init__(self, **keys):
                library.made.append(keys)
                self.model = AutoModelForCausalLM.from_pretrained(keys["model"], dtype=torch.float32).eval()
                self.llm_engine = self
                self.engine_core = SimpleNamespace(shutdown=lambda: setattr(library, "closed", library.closed + 1))

            def add_request(self, name, prompt, params):
                assert name not in library.asked and params.ignore_eos and params.detokenize is False
                library.asked[name] = (prompt["prompt_token_ids"], params)

            def step(self):
                library.steps += 1
                if library.steps % 3 == 0:
                    return [SimpleNamespace(request_id="0", finished=False)]  # under way
                named = sorted(library.asked, reverse=True)[:2]
                return [SimpleNamespace(request_id=n, finished=True, outputs=[self.said(*library.asked.pop(n))]) for n in named]  # fmt: skip

            def said(self, ids, params):
                seeds = None if params.seed is None else [params.seed]
                (answer,) = generate(
                    self.model, [ids], max_new_tokens=params.max_tokens, eos_ids=params.stop_token_ids,
                    temperature=params.temperature, seeds=seeds, top_logprobs=params.logprobs or 0,
                )  # fmt: skip
                rows = [
                    {token: SimpleNamespace(logprob=logprob) for token, logprob in zip(*pair)}
                    for pair in zip(answer.topk_ids, answer.topk_logprobs)
                ]
                for token, row in zip(answer.ids, rows):  # the one that was drawn is always among them
                    row.setdefault(token, SimpleNamespace(logprob=-50.0))
                return SimpleNamespace(token_ids=tuple(answer.ids), finish_reason=answer.finish_reason, logprobs=rows or None)  # fmt: skip

            def abort_request(self, names):
                library.aborted += names

        self.LLM, self.SamplingParams = LLM, SamplingParams


@pytest.fixture
def library(monkeypatch):
    made = Library()
    monkeypatch.setitem(sys.modules, "vllm", made)
    monkeypatch.setattr(vllm, "find_spec", lambda name: made)
    return made


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("teacher"), eos_ids=EOS))


def teacher(weights, **keys):
    return TeacherConfig(model=weights, dtype="float32", **keys)


@pytest.mark.parametrize("temperature, top_logprobs", [(0.0, 4), (1.3, 4), (0.0, 0)])
def test_targets_are_those_of_the_weights(tmp_path, weights, library, temperature, top_logprobs):
    asked = prompts(tmp_path, texts(11)), settings(temperature=temperature, top_logprobs=top_logprobs), 5
    found = []
    for runtime in ("transformers", "vllm"):
        where = folder(tmp_path, runtime)
        summary = collect.run(where, teacher(weights, runtime=runtime), *asked)
        found.append((read_rows(where), {k: v for k, v in summary.items() if k != "seconds"}))
    (rows, summary), (ours, said) = found
    assert [row["response_ids"] for row in ours] == [row["response_ids"] for row in rows] and said == summary
    for row, own in zip(rows, ours):
        assert row["topk_ids"] == own["topk_ids"] and row["tail_mass"] == pytest.approx(own["tail_mass"], abs=1e-5)
    (made,) = library.made
    assert made["max_num_seqs"] == 3 and made["dtype"] == "float32" and made["max_logprobs"] == max(1, top_logprobs)
    assert made["logprobs_mode"] == "raw_logprobs" and made["generation_config"] == "vllm"
    assert library.closed == 1 and not library.aborted


def test_a_stop_aborts_what_is_under_way_and_closes_the_engine(tmp_path, weights, library, monkeypatch):
    def stop(message):
        raise Stopped(15, message)

    monkeypatch.setattr(collect.signals, "raise_if_stopped", stop)
    where = folder(tmp_path, "stopped")
    with pytest.raises(Stopped):
        collect.run(where, teacher(weights, runtime="vllm"), prompts(tmp_path, texts(11)), settings(), 5)
    assert library.closed == 1 and len(library.aborted) == 2  # two of a shard of four had been answered
    monkeypatch.undo()


@pytest.mark.parametrize("how", ["dies", "aborts"])
def test_an_engine_that_fails_ends_in_a_line_and_keeps_what_was_finished(tmp_path, weights, library, monkeypatch, how):
    where, step = folder(tmp_path, how), library.LLM.step

    def failing(self):
        done = step(self)
        if library.steps < 4:
            return done
        if how == "dies":
            raise RuntimeError("engine core is gone\nmore")
        return [SimpleNamespace(request_id=s.request_id, finished=True, outputs=[SimpleNamespace(token_ids=(), finish_reason="abort", logprobs=None)]) for s in done]  # fmt: skip

    monkeypatch.setattr(library.LLM, "step", failing)
    with pytest.raises(RunFailed, match="RuntimeError: engine core is gone|ended an answer by itself .abort."):
        collect.run(where, teacher(weights, runtime="vllm"), prompts(tmp_path, texts(11)), settings(), 5)
    assert len(list((where / "shards").glob("*.parquet"))) == 1 and library.closed == 1
    monkeypatch.undo()


def test_what_cannot_be_run_is_refused_in_a_line(weights, library, monkeypatch):
    def broken(**_):
        raise ValueError("\n  no code for this architecture\nmore")

    monkeypatch.setattr(library, "LLM", broken)
    with pytest.raises(UserError, match="its engine cannot run .*no code for this architecture"):
        vllm.Engine(teacher(weights, runtime="vllm"), weights, 20, 4, 8)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="2 processes would each start one; run `fewstep targets` in one process first"):
        vllm.check(teacher(weights, runtime="vllm"))
    monkeypatch.undo()
    if vllm.find_spec("vllm") is None:
        with pytest.raises(UserError, match="teacher.runtime vllm: it is not installed"):
            vllm.check(teacher(weights, runtime="vllm"))


@pytest.mark.parametrize(
    "keys, said",
    [
        ({"model": "http://host/v1"}, "a server runs its model itself"),
        ({"model": "team/model", "quantize": "int8"}, "quantize int8 is transformers' own"),
    ],
)
def test_the_recipe_may_not_ask_for_both(keys, said):
    with pytest.raises(ValueError, match=said):
        TeacherConfig(runtime="vllm", **keys)
