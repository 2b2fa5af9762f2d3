"""Publishing against a Hub that runs on this machine, through the real client."""

import base64
import json
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub
import pytest
import torch
from transformers import AutoModelForCausalLM

from fewstep.distill import publishing
from fewstep.distill.config import PublishConfig
from fewstep.errors import RunFailed, UserError
from fewstep.students.config import StudentConfig
from fewstep.students.convert import make_student, save_student
from tests.tiny import tiny_model, tiny_tokenizer


class Hub(ThreadingHTTPServer):
    """Keeps committed files in memory; answers every request with `status` where one is set."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.created, self.status = {}, {}, None
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args):
        pass

    def answer(self, body, status=200):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        if self.server.status:
            return self.answer({"error": "no"}, self.server.status)
        self.answer({"id": "team/model", "sha": "a" * 40, "siblings": [], "private": True})

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.server.status:
            return self.answer({"error": "no"}, self.server.status)
        if self.path.endswith("/repos/create"):
            self.server.created = json.loads(body)
            return self.answer({"url": "https://huggingface.co/team/model"})
        if "/preupload/" in self.path:
            files = json.loads(body)["files"]
            return self.answer(
                {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]}
            )
        if "/commit/" in self.path:
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    self.server.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            return self.answer(
                {
                    "commitUrl": f"https://huggingface.co/team/model/commit/{'b' * 40}",
                    "commitOid": "b" * 40,
                    "success": True,
                }
            )
        return self.answer({})


@pytest.fixture
def hub(monkeypatch):
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(huggingface_hub, "HfApi", partial(huggingface_hub.HfApi, endpoint=server.url, token="hf_test"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    yield server
    server.shutdown()


@pytest.fixture
def parts(tmp_path):
    model, tokenizer = tiny_model(), tiny_tokenizer()
    make_student(model, tokenizer, StudentConfig(block_size=8), gated=False, seed=0)
    save_student(model, tokenizer, tmp_path / "student")
    (tmp_path / "student" / "adapter").mkdir()
    (tmp_path / "student" / "adapter" / "adapter_config.json").write_text("{}")
    (tmp_path / "report").mkdir()
    for name in ("MODEL_CARD.md", "report.html", "report.json"):
        (tmp_path / "report" / name).write_text(f"content of {name}")
    levels = {"levels": {"low": {"sampler": "threshold", "settings": {"threshold": 0.5}}}}
    (tmp_path / "effort.json").write_text(json.dumps(levels))
    return tmp_path


def publish(parts, **keys):
    config = PublishConfig(**({"repo": "team/model"} | keys))
    (parts / "publish").mkdir(exist_ok=True)
    return publishing.run(parts / "publish", config, parts / "student", parts / "report", parts / "effort.json")


def test_published_repository_is_a_plain_checkpoint_with_card_decoding_and_effort_levels(hub, parts, tmp_path):
    summary = publish(parts)
    assert summary["commit"] == "b" * 40 and hub.created["visibility"] == "private"
    files = hub.files
    assert files["README.md"] == b"content of MODEL_CARD.md"
    assert {"report.html", "config.json", "model.safetensors", "custom_generate/generate.py"} <= set(files)
    assert not any(name.startswith("adapter") for name in files)
    settings = json.loads(files["generation_config.json"])
    assert settings["fewstep_effort"]["low"]["settings"] == {"threshold": 0.5}
    for name, data in files.items():
        (tmp_path / "got" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "got" / name).write_bytes(data)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "got")
    assert model.generation_config.fewstep_effort["low"]["sampler"] == "threshold"
    assert model.generation_config.suppress_tokens == [model.config.fewstep["mask_token_id"]]
    ids = torch.tensor([[5, 6, 7]])
    stranger = dict(input_ids=ids, custom_generate=str(tmp_path / "got"), trust_remote_code=True, max_new_tokens=9)
    assert torch.equal(model.generate(**stranger, effort="low"), model.generate(**stranger, threshold=0.5))
    assert "fewstep_effort" not in (parts / "student" / "generation_config.json").read_text()


def test_refusal_and_outage_are_one_line_each(hub, parts):
    hub.status = 403
    with pytest.raises(UserError, match="publish.repo=team/model.*HF_TOKEN") as refused:
        publish(parts)
    assert "\n" not in str(refused.value) and "hf_test" not in str(refused.value)
    hub.status = 400
    with pytest.raises(RunFailed, match="tries again"):
        publish(parts)
    with pytest.raises(UserError, match="publish.repo: null"):
        publish(parts, repo=None)
