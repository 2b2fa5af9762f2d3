"""What a result says of the code behind it."""

import subprocess

from fewstep import machine


def test_a_tree_with_a_new_result_alone_is_not_dirty(tmp_path, monkeypatch):
    code, result = tmp_path / "src/fewstep/machine.py", tmp_path / "benchmarks/results/a.json"
    for file in (code, result):
        file.parent.mkdir(parents=True)
        file.write_text("1")
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "x"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    monkeypatch.setattr(machine, "__file__", str(code))
    result.write_text("2")
    assert len(machine.commit.__wrapped__()) == 40
    code.write_text("2")
    assert machine.commit.__wrapped__().endswith("-dirty")
