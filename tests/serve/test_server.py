"""The command as a process: the openai client against it, and how it comes to its end."""

import importlib.util
import signal
import socket
import subprocess
import sys

import pytest

from fewstep.distill.cli import _exit_code
from fewstep.serve import server
from tests.serve.conftest import EXTRA

pytest.importorskip("fastapi", reason=EXTRA)
pytest.importorskip("uvicorn", reason=EXTRA)


@pytest.fixture
def process(student_folder, monkeypatch):
    """`fewstep serve` on a free port, and its address."""
    monkeypatch.setenv("FEWSTEP_API_KEY", "secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = [sys.executable, "-m", "fewstep", "serve", str(student_folder), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    assert line.startswith("serving distill-12345678 at http://127.0.0.1:"), line + process.stderr.read()
    process.address = line.split()[3].rstrip(":")
    yield process
    process.kill()
    process.communicate()


def test_openai_client_is_answered_and_sigterm_lets_a_stream_end(process):
    openai = pytest.importorskip("openai", reason="needs openai, which the extra dev installs")
    client = openai.OpenAI(base_url=f"{process.address}/v1", api_key="secret", max_retries=0, timeout=60)
    model = client.models.list().data[0].id
    given = dict(model=model, messages=[{"role": "user", "content": "hi"}], temperature=0)
    whole = client.chat.completions.create(**given, max_tokens=300, extra_body={"sampler": "verify"})
    text = whole.choices[0].message.content
    assert whole.usage.completion_tokens == 300 and whole.fewstep["sampler"] == "verify"
    completion = client.completions.create(model=model, prompt="ab", max_tokens=5)
    assert completion.choices[0].finish_reason == "length"
    drawn = {**given, "temperature": 0.9, "seed": 5, "max_tokens": 30, "extra_body": {"sampler": "verify"}}
    first, again = (client.chat.completions.create(**drawn) for _ in range(2))
    assert first.choices[0].message.content == again.choices[0].message.content
    assert first.choices[0].message.content != text[: len(first.choices[0].message.content)]
    with pytest.raises(openai.BadRequestError, match="above 0 and at most 1"):
        client.chat.completions.create(**given, top_p=1.5)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**{**given, "model": "gpt-4"})
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{process.address}/v1", api_key="wrong", max_retries=0).models.list()

    stream = client.chat.completions.create(**given, max_tokens=300, stream=True, extra_body={"sampler": "ar"})
    parts = [next(stream), next(stream)]
    process.send_signal(signal.SIGTERM)
    parts += list(stream)
    assert "".join(p.choices[0].delta.content or "" for p in parts) == text  # verify is lossless
    assert parts[-1].choices[0].finish_reason == "length" and parts[-1].fewstep["tpf"] == 1.0
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, "stopped\n", "")


def test_sigint_ends_an_idle_server(process):
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, "stopped\n", "")


def test_missing_extra_is_one_line(student_folder, monkeypatch, capsys):
    real = importlib.util.find_spec
    monkeypatch.setattr(server, "find_spec", lambda name: None if name == "uvicorn" else real(name))
    assert _exit_code(["serve", str(student_folder)]) == 2
    assert capsys.readouterr().err == (
        "fewstep: error: serve needs uvicorn, which is not installed: pip install 'fewstep[serve]'\n"
    )


def test_taken_port_is_one_line_before_the_model_is_loaded(student_folder, monkeypatch, capsys):
    monkeypatch.setattr(server, "load_student", lambda *_: pytest.fail("loaded"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert _exit_code(["serve", str(student_folder), "--port", str(port)]) == 2
    err = capsys.readouterr().err
    assert f"--port {port}: cannot be listened on" in err and err.count("\n") == 1


def test_no_student_is_one_line(tmp_path, capsys):
    assert _exit_code(["serve", str(tmp_path)]) == 2
    assert "no config.json there" in capsys.readouterr().err


def test_student_is_named_by_its_stage_and_its_levels_come_from_its_files(student_folder, student):
    import json
    import shutil

    from fewstep.students.convert import load_student

    served = server.describe(student_folder / "student", *student[:2])
    assert (served.name, served.context, served.effort) == ("distill-12345678", 512, {})
    copy = student_folder.parent / "published"
    shutil.copytree(student_folder / "student", copy)
    file = copy / "generation_config.json"
    settings = json.loads(file.read_text())
    settings.pop("_from_model_config", None)
    levels = {"low": {"sampler": "threshold", "settings": {"threshold": 0.3}}}
    file.write_text(json.dumps({**settings, "fewstep_effort": levels}))  # as publishing writes it
    served = server.describe(copy, *load_student(copy))
    assert (served.name, served.effort) == ("published", levels)
