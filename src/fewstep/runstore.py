"""Content-addressed stage folders: hashes known before anything exists, manifests that land last.

A stage's folder counts only once `manifest.json` is in it. The manifest is the very last file
written, by atomic rename, after every other file has been hashed and flushed to the disk: a
process killed at any moment leaves either a complete folder or one without a manifest.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fewstep.errors import RunFailed, UserError

MANIFEST = "manifest.json"
TEMPORARY = ".tmp-"  # prefix of files that are being written
UNHASHED = "trainer_state"  # optimizer state: large, and of no use to later stages
REMEMBER_FROM = 64 * 2**20  # bytes; hashes of files this large are remembered across processes


def canonical_json(value: Any) -> str:
    """Return the one JSON text of `value`: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def stage_hash(stage: str, version: int, config: dict, inputs: dict[str, str], upstream: list[str]) -> str:
    """Return the 8 hex digits that name a stage's folder.

    Args:
        stage: the stage's name.
        version: the number that is raised when the stage's outputs change for the same inputs.
        config: JSON-able part of the resolved recipe that the stage uses.
        inputs: name → content fingerprint of every file from outside.
        upstream: hashes of the stages it reads.
    """
    key = {"stage": stage, "version": version, "config": config, "inputs": inputs, "upstream": upstream}
    return hashlib.sha256(canonical_json(key).encode()).hexdigest()[:8]


_fingerprints: dict[tuple[str, int, int], str] = {}


def file_fingerprint(path: str | Path) -> str:
    """Return the SHA-256 (hex) of a file's content, or of a folder's sorted relative names and contents.

    A file's hash is remembered per (path, size, mtime): in this process, and for large files in the
    user's cache folder too.

    Raises:
        FileNotFoundError: nothing is at `path`.
    """
    path = Path(path).resolve()
    if path.is_dir():
        total = hashlib.sha256()
        for file in sorted(p for p in path.rglob("*") if p.is_file()):
            total.update(f"{file.relative_to(path).as_posix()}\0{file_fingerprint(file)}\n".encode())
        return total.hexdigest()
    stat = path.stat()
    key = (str(path), stat.st_size, stat.st_mtime_ns)
    if key not in _fingerprints:
        remembered = _memo_file(key) if stat.st_size >= REMEMBER_FROM else None
        if remembered is not None and remembered.is_file():
            _fingerprints[key] = remembered.read_text()
        else:
            _fingerprints[key] = _sha256(path)
            if remembered is not None:
                _remember(remembered, _fingerprints[key])
    return _fingerprints[key]


def _memo_file(key: tuple[str, int, int]) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "fewstep" / "fingerprints" / hashlib.sha256(canonical_json(key).encode()).hexdigest()


def _remember(file: Path, digest: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, digest)
    except OSError:  # a read-only home: the hash is computed anew next time
        pass


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Flush a file's, or a folder's, entry to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: str | Path, data: str | bytes) -> None:
    """Write `data` so that a reader, or a crash, sees the old file or the new one and nothing between."""
    path = Path(path)
    temporary = path.parent / f"{TEMPORARY}{os.getpid()}-{path.name}"
    with open(temporary, "wb") as file:
        file.write(data.encode() if isinstance(data, str) else data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync(path.parent)


def require_disk(path: str | Path, num_bytes: float, what: str) -> None:
    """Raise UserError unless the disk that `path` is, or will be, on has room for `num_bytes`."""
    place = Path(path).resolve()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < num_bytes:
        raise UserError(
            f"{what} needs {num_bytes / 2**30:.2f} GiB in {path}, where {free / 2**30:.2f} GiB are free; "
            "free some space or choose another disk with --runs"
        )


class StageFolder:
    """One folder `<stage>-<hash8>`: its lock, its manifest and the seal."""

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def is_complete(self) -> bool:
        """Return whether the manifest has landed."""
        return (self.path / MANIFEST).is_file()

    def manifest(self) -> dict:
        """Return the manifest of a complete folder.

        Raises:
            RunFailed: it is no longer what was sealed.
        """
        try:
            found = json.loads((self.path / MANIFEST).read_text())
            if self.path.name.endswith(found.get("hash", "")) and isinstance(found["outputs"], dict):
                return found
        except (ValueError, KeyError, TypeError, AttributeError):
            pass
        raise RunFailed(self._changed(self.path / MANIFEST))

    def _changed(self, file: Path) -> str:
        return (
            f"{file} is missing or was changed after {self.path.name} was sealed; "
            f"delete {self.path} to run the stage again"
        )

    def check(self) -> None:
        """Raise RunFailed if a sealed file is gone or has another size than when it was sealed."""
        for name, sealed in self.manifest()["outputs"].items():
            file = self.path / name
            if not file.is_file() or file.stat().st_size != sealed["bytes"]:
                raise RunFailed(self._changed(file))

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder for this process.

        Raises:
            RunFailed: another process holds it.
        """
        file = self.path.with_name(self.path.name + ".lock")
        file.parent.mkdir(parents=True, exist_ok=True)
        while True:
            handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                pid = os.read(handle, 32).decode().strip() or "unknown"
                os.close(handle)
                raise RunFailed(
                    f"{self.path.name} is already running (pid {pid}); wait for it, or stop it and run again"
                ) from None
            # The previous holder removes the file when it is done: a lock on a removed file is no lock.
            try:
                if os.stat(file).st_ino == os.fstat(handle).st_ino:
                    break
            except FileNotFoundError:
                pass
            os.close(handle)
        try:
            os.ftruncate(handle, 0)
            os.write(handle, str(os.getpid()).encode())
            yield
        finally:
            file.unlink(missing_ok=True)
            os.close(handle)

    def seal(self, manifest: dict) -> None:
        """Hash and flush every output, then let the manifest land: from then on the folder counts.

        Args:
            manifest: JSON-able facts about the run; `outputs` (relative name → sha256, bytes) is added.
        """
        outputs = {}
        for file in sorted(p for p in self.path.rglob("*") if p.is_file()):
            name = file.relative_to(self.path)
            if file.name.startswith(TEMPORARY):
                file.unlink()  # left by a killed write
            elif name.parts[0] != UNHASHED and name != Path(MANIFEST):
                sync(file)
                outputs[name.as_posix()] = {"sha256": _sha256(file), "bytes": file.stat().st_size}
        for folder in [self.path, *(p for p in self.path.rglob("*") if p.is_dir())]:
            sync(folder)
        write_atomic(self.path / MANIFEST, json.dumps({**manifest, "outputs": outputs}, indent=1, allow_nan=False))
