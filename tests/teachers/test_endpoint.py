"""A teacher behind an OpenAI-compatible server: its targets are those of the same weights at hand, whatever goes wrong on the way."""

import copy
import json
import signal
import subprocess
import sys
import time

import pytest
from served import Served, serving
from tiny import TEMPLATE, VOCAB, save_tiny, tiny_model, tiny_tokenizer
from tokenizers import AddedToken, Tokenizer, models
from transformers import PreTrainedTokenizerFast

from fewstep.distill.chain import chain
from fewstep.distill.plan import as_text, plan
from fewstep.distill.recipe import load_recipe
from fewstep.errors import RunFailed, UserError
from fewstep.records import read_rows
from fewstep.teachers import collect, endpoint
from fewstep.teachers.config import KeepConfig, PromptsConfig, TargetsConfig, TeacherConfig
from fewstep.teachers.endpoint import Endpoint
from fewstep.teachers.equivalence import difference, same_tokenizer, strings

EOS = [2, *range(7, VOCAB, 11)]
TEXTS = ["the quick brown fox"[: 3 + i] + str(i) for i in range(9)]
TIMEOUT = 5.0  # no answer takes so long, whatever else runs
SETTINGS = {"max_new_tokens": 10, "top_logprobs": 4, "shard_size": 4, "keep": KeepConfig(finished=False)}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("base"), eos_ids=EOS))


@pytest.fixture(scope="module")
def alone(base, tmp_path_factory):
    """The rows that the same weights give without a server."""
    place = tmp_path_factory.mktemp("alone")
    return collected(place, TeacherConfig(model=base, dtype="float32"))


@pytest.fixture
def server():
    with serving(Served(tiny_model(), tiny_tokenizer(), EOS)) as served:
        yield served


def teacher(server, **keys):
    return TeacherConfig(
        model=server.url, acknowledge="mit", endpoint={"timeout": TIMEOUT, "concurrency": 3, "retries": 6, **keys}
    )


def collected(place, asked, base=None, name="targets", **keys):
    file = place / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"instruction": text}) for text in TEXTS))
    folder = place / name
    folder.mkdir(exist_ok=True)
    targets = TargetsConfig(**{**SETTINGS, **keys})
    collect.run(folder, asked, PromptsConfig(path=file, held_out=0.0), targets, 0, None, base)
    return read_rows(folder)


def same(rows, wanted, of_eos=True):
    assert [r["sample_id"] for r in rows] == [r["sample_id"] for r in wanted]
    for row, other in zip(rows, wanted):
        assert row["response_ids"] == other["response_ids"] and row["prompt_ids"] == other["prompt_ids"]
        assert row["finish_reason"] == other["finish_reason"] and row["text"] == other["text"]
        last = len(row["response_ids"]) - (not of_eos and row["finish_reason"] == "stop")
        assert row["topk_ids"][:last] == other["topk_ids"][:last]
        for i in range(last):  # fp32, in batches of other sizes
            assert row["topk_logprobs"][i] == pytest.approx(other["topk_logprobs"][i], abs=1e-5)
            assert row["tail_mass"][i] == pytest.approx(other["tail_mass"][i], abs=1e-5)


@pytest.mark.parametrize(("api", "names"), [("completions", "id"), ("completions", "token_id"), ("chat", "id"), ("chat", "bytes")])  # fmt: skip
def test_targets_of_a_server_are_those_of_its_weights(server, base, alone, tmp_path, api, names):
    server.names = names
    same(collected(tmp_path, teacher(server, api=api), base), alone)
    assert {r["path"] for r in server.requests} == {"/v1/chat/completions" if api == "chat" else "/v1/completions"}
    assert "stop" in {r["finish_reason"] for r in alone}


def test_an_eos_that_the_server_keeps_to_itself_is_appended_without_a_distribution(server, base, alone, tmp_path):
    server.tells_eos = False
    rows = collected(tmp_path, teacher(server), base)
    wanted = []
    for row in copy.deepcopy(alone):
        if row["finish_reason"] == "stop":
            row["text"] = tiny_tokenizer().decode(row["response_ids"][:-1])
            row["response_ids"][-1] = 2  # which EOS it was is not known: the base's first stands for it
        if row["text"]:  # the EOS of this test are ordinary bytes
            wanted.append(row)
    same(rows, wanted, of_eos=False)
    ended = [row for row in rows if row["finish_reason"] == "stop"]
    assert ended and all(row["tail_mass"][-1] == 1.0 and len(row["topk_ids"][-1]) == 4 for row in ended)


def test_without_log_probabilities_the_text_is_encoded(server, base, tmp_path):
    def say(answer):
        answer["choices"][0] |= {"text": "a b", "finish_reason": "stop"}
        return answer

    server.edit = say
    rows = collected(tmp_path, teacher(server), base, top_logprobs=0)
    said = tiny_tokenizer()("a b", add_special_tokens=False)["input_ids"]
    assert {tuple(row["response_ids"]) for row in rows} == {(*said, 2)} and not any(row["topk_ids"] for row in rows)
    assert all("logprobs" not in r for r in server.requests)


def test_nothing_but_the_temperature_shapes_what_is_drawn(server, base, tmp_path):
    collected(tmp_path, teacher(server), base, temperature=0.7)
    for body in server.requests:
        assert body["temperature"] == 0.7 and body["top_p"] == 1.0 and body["top_k"] == -1 and body["min_p"] == 0.0
        assert body["repetition_penalty"] == body["repeat_penalty"] == 1.0
        assert body["presence_penalty"] == body["frequency_penalty"] == 0.0
    assert len({body["seed"] for body in server.requests}) == len(TEXTS)


def test_an_answer_that_is_cut_inside_a_character_is_kept(server, base, tmp_path):
    """A server shows nothing of a character until it is whole."""
    whole = server.answer

    def cut(body):
        answer = whole(body)
        choice = answer["choices"][0]
        ids = tiny_tokenizer()("ca\u00e9", add_special_tokens=False)["input_ids"][:3]  # half of the last
        top = [{"id": j, "logprob": -2.0} for j in range(4)]
        entries = [{"id": i, "token": "", "logprob": -0.1, "top_logprobs": top} for i in ids]
        choice |= {"text": "ca", "finish_reason": "length", "logprobs": {"content": entries}}
        return answer

    server.answer = cut
    assert all(len(row["response_ids"]) == 3 for row in collected(tmp_path, teacher(server), base))


@pytest.mark.parametrize("spoil", [
    lambda a: a.update(choices={}), lambda a: a.update(choices=[]), lambda a: a.update(usage=[1]), lambda a: a["choices"][0].update(logprobs={"content": [None]}),
    lambda a: a["choices"][0].update(logprobs={"content": [{"bytes": [300]}]}), lambda a: a["choices"][0].update(logprobs={"tokens": ["a"], "top_logprobs": [{}, {}]}),
])  # fmt: skip
def test_an_answer_of_another_form_is_a_line(server, base, tmp_path, spoil):
    server.edit = lambda answer: spoil(answer) or answer
    with pytest.raises(
        (RunFailed, UserError), match="not of the form that OpenAI's API describes|returns 0 log-prob"
    ) as caught:
        collected(tmp_path, teacher(server), base)
    assert "\n" not in str(caught.value)


def test_a_token_beyond_the_bases_vocabulary_is_named_with_its_size(server, base, tmp_path):
    def widen(answer):
        answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"][0]["id"] = 999_999
        return answer

    server.edit = widen
    with pytest.raises(RunFailed, match=f"its token 999999 is none of the {VOCAB} of student.base"):
        collected(tmp_path, teacher(server), base)


def test_reasoning_that_a_server_takes_out_is_named(server, base, tmp_path):
    def hide(answer):
        answer["choices"][0]["message"] |= {"reasoning_content": "hm"}
        return answer

    server.edit = hide
    with pytest.raises(UserError, match="takes the reasoning out"):
        collected(tmp_path, teacher(server, api="chat"), base)


def test_another_model_behind_the_same_address_is_refused_on_resuming(server, base, alone, tmp_path):
    server.faults, server.always = [None] * 5, "500"  # type: ignore[list-item]
    with pytest.raises(RunFailed):
        collected(tmp_path, teacher(server, retries=0, concurrency=1), base)
    server.always, server.models = None, ["other"]
    with pytest.raises(UserError, match="it serves other, and the targets in .* were begun with tiny"):
        collected(tmp_path, teacher(server), base)
    server.models = ["tiny"]
    same(collected(tmp_path, teacher(server), base), alone)


def test_the_stop_that_ends_a_turn_is_the_one_that_is_appended():
    tokenizer = tiny_tokenizer()
    of = lambda stops: Endpoint(TeacherConfig(model="http://h/v1"), tokenizer, stops, VOCAB)._end_of_turn  # noqa: E731
    assert of([0, 2]) == 2 and of([0]) == 0
    tokenizer.chat_template = TEMPLATE + "{% if not add_generation_prompt %}{{ '<|pad|>' }}{% endif %}"
    assert of([0, 2]) == 2  # what ends the turn, not what ends the text
    tokenizer.chat_template = None
    assert of([0, 2]) == 2  # the tokenizer's own


def test_a_special_token_in_an_answer_is_no_other_tokenizer():
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("<|tool|>", special=True)])
    server = Endpoint(TeacherConfig(model="http://h/v1"), tokenizer, [2], VOCAB)
    ids = tokenizer("<|tool|>ab", add_special_tokens=False)["input_ids"]
    server._same_text(ids, "<|tool|>ab", cut=False)
    with pytest.raises(RunFailed, match="its tokens make 'ab'"):
        server._same_text(ids, "<|tool|>ac", cut=False)


@pytest.mark.parametrize("url", ["http://host/v1\n", "http://-a_\u00fc/v1"])
def test_an_address_that_the_client_does_not_take_is_a_line(url):
    with pytest.raises(UserError, match="cannot use it|names no host") as caught:
        Endpoint(TeacherConfig(model=url), tiny_tokenizer(), [2], VOCAB)
    assert "\n" not in str(caught.value)


def test_a_piece_of_the_vocabulary_comes_before_a_lone_byte():
    vocab = {"<unk>": 0, "<0x41>": 1, "A": 2, "\u2581A": 3, "<0xC3>": 4}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    )
    server = Endpoint(TeacherConfig(model="http://h/v1"), tokenizer, [0], None)
    assert endpoint.token_bytes(tokenizer)[1:] == [b"A", b"A", b" A", b"\xc3"]
    assert [server._by_bytes[data] for data in (b"A", b" A", b"\xc3")] == [2, 3, 4]


def test_a_process_that_is_to_end_does_not_wait_for_a_server_that_hangs(server, recipe, tmp_path):
    server.always = "long"
    process = subprocess.Popen(
        [sys.executable, "-m", "fewstep", "targets", str(recipe(server.url, ", acknowledge: mit")), "--runs", str(tmp_path / "runs")],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while not server.requests and process.poll() is None:
        time.sleep(0.05)
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 143 and time.monotonic() - begin < 5, err


@pytest.mark.parametrize(
    "faults", [["429"], ["500", "500", "500"], ["503", "drop", "429"], ["drop"], ["hang"], ["utf8", "utf8"]]
)
def test_what_passes_is_asked_again_and_nothing_is_lost_or_doubled(server, base, alone, tmp_path, faults):
    server.faults = list(faults)
    keys = {"timeout": 0.5} if "hang" in faults else {}
    same(collected(tmp_path, teacher(server, **keys), base), alone)
    if not keys:  # with so short a timeout a busy machine asks again what is under way
        assert len(server.requests) == len(TEXTS) + len(faults)


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        ("500", RunFailed, "asked for 3 times in vain .last: 500: .*fault 500.*finished shards are kept"),
        ("429", RunFailed, "in vain .last: 429"),
        ("hang", RunFailed, "in vain"),
        ("drop", RunFailed, "in vain"),
        ("utf8", RunFailed, "could not be read"),
        ("401", UserError, "refuses an answer .401: .*fault 401.* check teacher.endpoint"),
        ("404", UserError, "refuses an answer .404"),
        ("no logprobs", UserError, "no log-probabilities; set targets.top_logprobs to 0"),
        ("filtered", RunFailed, "all 9 answers were dropped .9 withheld"),
    ],
)
def test_what_does_not_pass_is_one_line_and_finished_shards_stay(server, base, alone, tmp_path, fault, error, words):
    keys = {"keep": KeepConfig()} if fault == "filtered" else {}
    server.always = fault
    with pytest.raises(error, match=words) as caught:
        collected(tmp_path, teacher(server, retries=2, timeout=0.5 if fault == "hang" else TIMEOUT), base, **keys)
    assert "\n" not in str(caught.value)
    if fault != "filtered":
        server.always = None
        same(collected(tmp_path, teacher(server), base), alone)


def test_a_server_that_goes_away_in_the_middle_is_gone_on_with(server, base, alone, tmp_path):
    server.faults = [None] * 5  # type: ignore[list-item]
    server.always = "500"
    with pytest.raises(RunFailed, match="in vain"):
        collected(tmp_path, teacher(server, retries=1, concurrency=1), base)
    kept = read_rows(tmp_path / "targets")
    assert len(kept) == 4
    server.always, asked = None, len(server.requests)
    same(collected(tmp_path, teacher(server), base), alone)
    assert len(server.requests) - asked == len(TEXTS) - 4


def test_another_tokenizer_or_a_second_bos_is_named(server, base, tmp_path):
    server.extra_prompt_tokens = 1
    with pytest.raises(UserError, match="it sees .. tokens where student.base makes .. of the same prompt"):
        collected(tmp_path, teacher(server), base)
    server.extra_prompt_tokens = 0
    server._data = [bytes(reversed(data)) if i > 2 else data for i, data in enumerate(server._data)]
    server._data[10:] = server._data[11:] + [b"zz"]
    server.names = "bytes"
    with pytest.raises(RunFailed, match="student.base"):
        collected(tmp_path, teacher(server, api="chat"), base)


def test_fewer_log_probabilities_than_asked_for_are_named(server, base, tmp_path, monkeypatch):
    answer = server.answer

    def fewer(body):
        return answer({**body, "logprobs": 2})

    server.answer = fewer
    with pytest.raises(UserError, match="returns 2 log-probabilities a token where targets.top_logprobs asks for 4"):
        collected(tmp_path, teacher(server), base)


def test_several_models_need_a_name(server, base, alone, tmp_path):
    server.models = ["a", "b"]
    with pytest.raises(UserError, match="it serves a, b; name one as teacher.endpoint.served"):
        collected(tmp_path, teacher(server), base)
    with pytest.raises(UserError, match="has no 'c': it serves a, b"):
        collected(tmp_path, teacher(server, served="c"), base)
    same(collected(tmp_path, teacher(server, served="b"), base), alone)
    assert {r["model"] for r in server.requests} == {"b"}


def test_the_key_is_sent_and_written_nowhere(server, base, tmp_path, monkeypatch, capsys):
    canary = "sk-canary-93d1"
    monkeypatch.setenv("TEACHER_KEY", canary)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-other-771")
    monkeypatch.setenv("OPENAI_ORG_ID", "org-other-771")
    monkeypatch.setenv(
        "OPENAI_CUSTOM_HEADERS", "X-Other: other-771\nAuthorization: Bearer other-771\nauthorization: other-771"
    )
    monkeypatch.setenv("TEACHER_KEY", canary + "\n")  # as a mounted secret ends
    collected(tmp_path, teacher(server, key="TEACHER_KEY"), base)
    sent = json.dumps(server.headers)
    assert canary in sent and "other-771" not in sent
    server.always = "401"  # the server says the key that it got
    with pytest.raises(UserError, match=r"401: .*Bearer \*\*\*") as caught:
        collected(tmp_path, teacher(server, key="TEACHER_KEY"), base, name="again")
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    shown = capsys.readouterr()
    assert canary.encode() not in written and canary not in shown.out + shown.err + str(caught.value)


def test_no_key_is_sent_unless_the_recipe_names_one(server, base, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-other-771")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "Authorization: Bearer other-771")
    collected(tmp_path, teacher(server), base)
    assert all("authorization" not in map(str.lower, headers) for headers in server.headers)


@pytest.mark.parametrize(
    ("model", "keys", "words"),
    [
        ("http://me:secret@host/v1", {}, "holds a user or a query; set teacher.endpoint.key"),
        ("http://host/v1?api_key=secret", {}, "holds a user or a query"),
        ("http:///v1", {}, "names no host"),
        ("http://host:abc/v1", {}, "a port that is none"),
        ("http://[::1/v1", {}, "names no host"),
        ("http://host/v1", {"key": "NO_SUCH_KEY"}, "the environment variable NO_SUCH_KEY is not set"),
    ],
)
def test_what_cannot_be_asked_is_refused_without_asking(model, keys, words):
    with pytest.raises(UserError, match=words) as caught:
        endpoint.check(TeacherConfig(model=model, endpoint=keys))
    assert "secret" not in str(caught.value)


# --- As a recipe ---------------------------------------------------------------------------------


def run(recipe, tmp_path):
    return subprocess.run(
        [sys.executable, "-m", "fewstep", "run", str(recipe), "--runs", str(tmp_path / "runs")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture
def recipe(tmp_path, base):
    def write(url, more=""):
        rows = [{"instruction": text, "reference": text} for text in TEXTS]
        (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (tmp_path / "e.jsonl").write_text(
            "\n".join(json.dumps({"instruction": t + "?", "reference": t}) for t in TEXTS)
        )
        text = (
            f"name: served\nteacher: {{model: '{url}', dtype: float32{more}}}\nprompts: {{path: p.jsonl, held_out: 0.2}}\n"
            f"targets: {{max_new_tokens: 10, top_logprobs: 4, keep: {{finished: false}}}}\nstudent: {{base: '{base}', block_size: 4}}\n"
            "adapt: {max_steps: 2, batch_tokens: 200}\ndistill: {max_steps: 2, batch_tokens: 200, order: nll, objectives: {ce: 1, kd: 0.5}}\n"
            "engine: {name: plain, threads: 1}\neval: {tasks: [{name: answer, path: e.jsonl}], samplers: [{name: threshold, threshold: [0.9]}], speed_prompts: 2}\n"
        )
        path = tmp_path / "served.yaml"
        path.write_text(text)
        return path

    return write


def test_a_recipe_runs_with_a_teacher_behind_a_server(server, recipe, tmp_path):
    server.tells_eos = False  # so that kd and nll meet a token of which nothing is known
    done = run(recipe(server.url, ", acknowledge: mit"), tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    runs = tmp_path / "runs"
    stages = json.loads((runs / "served.json").read_text())["stages"]
    results = json.loads((runs / stages["eval"] / "results.json").read_text())
    assert {row["system"] for row in results["rows"]} == {"student", "undistilled"}
    left = {m["what"]: m["why"] for m in results["not_measured"]}
    assert "behind a server" in left["The teacher"]
    assert all("behind a server" in row["not_measured"]["delta"] for row in results["rows"])
    assert "behind a server" in (runs / stages["report"] / "report.html").read_text()
    assert json.loads((runs / stages["targets"] / "manifest.json").read_text())["summary"]["licence"]["name"] == "mit"
    kept = b"".join(
        p.read_bytes() for pattern in ("*.html", "*.md", "report.json", "manifest.json") for p in runs.rglob(pattern)
    )
    assert server.url.encode() not in kept and b"tiny" in (runs / stages["targets"] / "targets.html").read_bytes()
    asked = len(server.requests)
    assert run(recipe(server.url, ", acknowledge: mit"), tmp_path).returncode == 0 and len(server.requests) == asked


@pytest.mark.parametrize(
    ("more", "words", "said"),
    [
        ("", (), "set teacher.acknowledge to its name"),
        (", acknowledge: gpl", ("student.base=null",), "student.base is missing"),
        (", acknowledge: gpl", ("student.base=http://h/v1",), "a server has no weights to start from"),
        (", acknowledge: gpl", ("distill.on_policy={rounds: 2, prompts: 4}",), "distill.on_policy"),
        (", acknowledge: gpl, endpoint: {key: NO_SUCH_KEY}", (), "NO_SUCH_KEY is not set"),
        (", acknowledge: gpl, endpoint: {api: chat}", ("prompts.path=tools.jsonl",), "a chat server takes their calls"),
        (", acknowledge: gemma-x", (), None),
    ],
)
def test_a_recipe_that_cannot_run_is_refused_before_the_server_is_asked(recipe, tmp_path, more, words, said):
    file, runs = recipe("http://127.0.0.1:9/v1", more), tmp_path / "runs"
    (tmp_path / "tools.jsonl").write_text(json.dumps({"instruction": "x", "tools": [{"name": "f"}]}))
    words = [word.replace("tools.jsonl", str(tmp_path / "tools.jsonl")) for word in words]
    if said is None:
        found = plan(load_recipe(file, words), runs)
        assert (
            found["teacher"] | {"model": "http://127.0.0.1:9/v1", "kind": "endpoint", "num_parameters": None}
            == found["teacher"]
        )
        assert found["stages"][0]["flops"] == 0 and "a server" in as_text(found)
        return
    with pytest.raises(UserError, match=said) as caught:
        plan(load_recipe(file, words), runs)
    assert "\n" not in str(caught.value) and not runs.exists()


# --- One tokenizer -------------------------------------------------------------------------------


def test_a_base_with_another_tokenizer_is_refused_before_any_work(base, recipe, tmp_path):
    assert len(strings()) == len(set(strings())) == 200
    assert difference(tiny_tokenizer(), tiny_tokenizer()) is None
    other = tiny_tokenizer()
    other.add_tokens(["fox"])
    with pytest.raises(UserError, match="student.base b: its tokenizer is not that of teacher.model a: .*fox"):
        same_tokenizer(tiny_tokenizer(), other, "a", "b")
    other = tiny_tokenizer()
    other.eos_token = "<|pad|>"
    assert "its EOS is 0 where the teacher's is 2" in str(difference(tiny_tokenizer(), other))
    other = tiny_tokenizer(template="{% for m in messages %}{{ m['content'] }}{% endfor %}")
    assert "under the chat template" in str(difference(tiny_tokenizer(), other))
    folder = save_tiny(tmp_path / "base", eos_ids=EOS)
    served = {
        b: chain(load_recipe(recipe("http://h/v1"), [f"student.base={b}"]))["targets"].hash for b in (base, folder)
    }
    assert len(set(served.values())) == 1
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["fox"])
    tokenizer.save_pretrained(folder)
    file = recipe(base)
    assert plan(load_recipe(file, [f"student.base={base}"]), tmp_path / "runs")["total"]["stages"] == 5
    with pytest.raises(
        UserError, match=f"student.base {folder}: its tokenizer is not that of teacher.model {base}: .*fox"
    ):
        plan(load_recipe(file, [f"student.base={folder}"]), tmp_path / "runs")


def test_token_bytes_are_what_each_token_writes():
    tokenizer = tiny_tokenizer()
    found = endpoint.token_bytes(tokenizer)
    assert sorted(found[3:]) == [bytes([i]) for i in range(256)] and found[1] == b"<|im_start|>"
    for text in strings():
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert b"".join(found[i] for i in ids) == text.encode()
