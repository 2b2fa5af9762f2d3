"""No key or token that a run may use stands in anything that it writes or says."""

import os
import subprocess
import sys

from .test_shipped import SMALL, clean_environment

KEYS = {
    "HF_TOKEN": "hf_cAnArYhUbToKeN0123456789abcdefghij",
    "WANDB_API_KEY": "c0ffee" + "ab12" * 8 + "99",
    "OPENAI_API_KEY": "sk-canary-of-openai-77",
    "AWS_SECRET_ACCESS_KEY": "canary/of/aws/secret/key+0123456789abcd",
}
CACHED = "hf_cAnArYfRoMaFiLe0123456789abcdefghi"  # as `hf auth login` leaves it


def test_no_key_in_any_file_or_line_of_a_run(tmp_path):
    home = tmp_path / "home"
    (home / "hf").mkdir(parents=True)
    (home / "hf" / "token").write_text(CACHED)
    (home / ".netrc").write_text(f"machine api.wandb.ai\n  login user\n  password {KEYS['WANDB_API_KEY']}\n")
    places = {"HOME": home, "HF_HOME": home / "hf", "TMPDIR": tmp_path / "temporary"}
    (tmp_path / "temporary").mkdir()
    places |= {f"WANDB_{kind}_DIR": home / f"wandb-{kind.lower()}" for kind in ("CACHE", "CONFIG", "DATA", "ARTIFACT")}
    environment = clean_environment() | {name: str(place) for name, place in places.items()} | KEYS

    def said(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "fewstep", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
        return done.returncode, done.stdout + done.stderr

    runs = ["--runs", str(tmp_path / "runs")]
    code, output = said("run", "quickstart", *SMALL, "track.wandb.project=p", *runs)
    assert code == 0, output[-3000:]
    refused = [
        said("publish", "quickstart", *SMALL, "publish.repo=team/model", *runs),  # no network: HF_HUB_OFFLINE
        said("plan", "quickstart", *SMALL, "teacher.model=team/model", *runs),
        said("doctor", "--json"),
    ]
    assert 0 not in [code for code, _ in refused[:2]]
    assert list((tmp_path / "runs").rglob("*.wandb"))  # W&B was asked, and wrote offline
    output += "".join(text for _, text in refused)
    for name, key in (*KEYS.items(), ("cached", CACHED)):
        assert key not in output, name
        found = [
            os.path.join(folder, file)
            for folder, _, files in os.walk(tmp_path)
            for file in files
            if key.encode() in open(os.path.join(folder, file), "rb").read()
        ]
        assert [f for f in found if not f.endswith((".netrc", "hf/token"))] == [], name
