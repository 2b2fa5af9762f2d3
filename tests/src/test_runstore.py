"""The seal protocol: hashes, atomic writes, locks, and what a kill at any moment leaves behind."""

import json
import os
import signal
import time

import pytest

from fewstep import runstore
from fewstep.errors import RunFailed, UserError
from fewstep.runstore import StageFolder, file_fingerprint, require_disk, stage_hash, write_atomic


def in_child(work) -> int:
    """Run `work` in a forked process and return its wait status."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitpid(pid, 0)[1]


def test_stage_hash_is_pinned_and_ignores_key_order():
    # A change of this value would make every finished run of every user run again.
    config = {"lr": 1e-4, "lora": {"rank": 4, "gated": False}, "name": "é"}
    turned = {"name": "é", "lora": {"gated": False, "rank": 4}, "lr": 0.0001}
    assert stage_hash("adapt", 1, config, {"a": "1", "b": "2"}, ["0a"]) == "c85719fc"
    assert stage_hash("adapt", 1, turned, {"b": "2", "a": "1"}, ["0a"]) == "c85719fc"


def test_stage_hash_depends_on_each_argument():
    base = ("adapt", 1, {"x": 1}, {"f": "aa"}, ["bb"])
    changed = [("distill",), (2,), ({"x": 2},), ({"f": "ab"},), (["bc"],)]
    hashes = {stage_hash(*base)}
    for place, (value,) in enumerate(changed):
        hashes.add(stage_hash(*base[:place], value, *base[place + 1 :]))
    assert len(hashes) == 6


def test_file_fingerprint_follows_content_not_place(tmp_path):
    (tmp_path / "a").write_text("one")
    (tmp_path / "b").write_text("one")
    assert file_fingerprint(tmp_path / "a") == file_fingerprint(tmp_path / "b")
    before = file_fingerprint(tmp_path / "a")
    (tmp_path / "a").write_text("two")  # the same size: the memo must notice by the time alone
    os.utime(tmp_path / "a", ns=(1, 1))
    assert file_fingerprint(tmp_path / "a") != before
    with pytest.raises(FileNotFoundError):
        file_fingerprint(tmp_path / "none")


def test_file_fingerprint_of_a_folder_sees_names_and_contents(tmp_path):
    for folder in ("x", "y"):
        (tmp_path / folder / "sub").mkdir(parents=True)
        (tmp_path / folder / "sub" / "f").write_text("1")
    assert file_fingerprint(tmp_path / "x") == file_fingerprint(tmp_path / "y")
    (tmp_path / "y" / "sub" / "f").rename(tmp_path / "y" / "f")
    assert file_fingerprint(tmp_path / "x") != file_fingerprint(tmp_path / "y")


def test_file_fingerprint_remembers_large_files_across_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(runstore, "REMEMBER_FROM", 2)
    (tmp_path / "a").write_text("one")
    first = file_fingerprint(tmp_path / "a")
    runstore._fingerprints.clear()  # what a new process starts with
    monkeypatch.setattr(runstore, "_sha256", lambda path: pytest.fail("hashed again"))
    assert file_fingerprint(tmp_path / "a") == first


def test_write_atomic_keeps_the_old_file_when_killed(tmp_path):
    file = tmp_path / "f"
    write_atomic(file, "old")

    def killed():
        os.replace = lambda *a: os.kill(os.getpid(), signal.SIGKILL)
        write_atomic(file, "new" * 1000)

    assert os.WTERMSIG(in_child(killed)) == signal.SIGKILL
    assert file.read_text() == "old"


def test_seal_killed_at_any_moment_leaves_a_whole_folder_or_none(tmp_path):
    """The manifest is last: kill the process at every flush and every rename there is."""
    complete, point = False, 0
    while not complete:
        folder = StageFolder(tmp_path / f"s{point}")
        (folder.path / "sub").mkdir(parents=True)
        (folder.path / "sub" / "weights").write_text("w" * 100)
        (folder.path / "log").write_text("l")
        calls = 0

        def dies_at(real, point=point):
            def wrapped(*args):
                nonlocal calls
                if calls == point:
                    os.kill(os.getpid(), signal.SIGKILL)
                calls += 1
                return real(*args)

            return wrapped

        def seal(folder=folder, dies_at=dies_at):
            os.fsync, os.replace = dies_at(os.fsync), dies_at(os.replace)
            folder.seal({"status": "complete"})

        complete = in_child(seal) == 0
        if folder.is_complete():
            assert set(folder.manifest()["outputs"]) == {"sub/weights", "log"}
            folder.check()
        else:
            assert not complete
        point += 1
    assert point > 6  # the loop did kill at several places


def test_seal_hashes_outputs_but_not_trainer_state_or_half_written_files(tmp_path):
    (tmp_path / "trainer_state").mkdir()
    (tmp_path / "trainer_state" / "big").write_text("b")
    (tmp_path / "out").write_text("abc")
    (tmp_path / ".tmp-12-shard").write_text("half")
    StageFolder(tmp_path).seal({"seed": 3})
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # SHA-256 of "abc"
    assert manifest == {"seed": 3, "outputs": {"out": {"sha256": digest, "bytes": 3}}}
    assert not (tmp_path / ".tmp-12-shard").exists()


def test_check_names_a_sealed_file_that_is_gone_or_grew(tmp_path):
    folder = StageFolder(tmp_path)
    (tmp_path / "out").write_text("abc")
    folder.seal({})
    folder.check()
    (tmp_path / "out").write_text("abcd")
    with pytest.raises(RunFailed, match="out is missing or was changed"):
        folder.check()
    (tmp_path / "out").unlink()
    with pytest.raises(RunFailed, match="delete .* to run the stage again"):
        folder.check()


@pytest.mark.parametrize(
    "edit",
    [
        lambda m: "",
        lambda m: "{",
        lambda m: "[]",
        lambda m: json.dumps({**m, "hash": "00000000"}),
        lambda m: json.dumps({k: v for k, v in m.items() if k != "outputs"}),
    ],
    ids=["empty", "half", "list", "hash", "no outputs"],
)
def test_an_edited_manifest_is_refused_in_one_line(tmp_path, edit):
    folder = StageFolder(tmp_path / "adapt-12345678")
    folder.path.mkdir()
    folder.seal({"stage": "adapt", "hash": "12345678"})
    folder.check()
    file = folder.path / "manifest.json"
    file.write_text(edit(json.loads(file.read_text())))
    with pytest.raises(
        RunFailed, match="manifest.json is missing or was changed after adapt-12345678 was sealed; delete"
    ):
        folder.check()


def test_lock_refuses_a_second_process_and_is_free_after_a_kill(tmp_path):
    folder = StageFolder(tmp_path / "adapt-0")
    pid = os.fork()
    if pid == 0:
        with folder.lock():
            (tmp_path / "locked").touch()
            time.sleep(60)
    try:
        deadline = time.monotonic() + 10
        while not (tmp_path / "locked").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(RunFailed, match=rf"adapt-0 is already running \(pid {pid}\)"), folder.lock():
            pass
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    with folder.lock():
        pass
    assert not (tmp_path / "adapt-0.lock").exists()


def test_require_disk_says_what_is_needed_and_free(tmp_path):
    require_disk(tmp_path / "not" / "there" / "yet", 1, "targets")
    with pytest.raises(UserError, match=r"targets needs 976562500.00 GiB"):
        require_disk(tmp_path / "runs", 2**30 * 976562500, "targets")
