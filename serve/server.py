"""`fewstep serve`: load a student, listen, stop when asked to. FastAPI and uvicorn are imported when it runs."""

import os
import signal
import socket
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from fewstep.chat import eos_ids
from fewstep.errors import UserError
from fewstep.serve.asks import Served
from fewstep.serve.worker import Worker
from fewstep.students.convert import load_student
from fewstep.students.decoding.weights import column_major

KEY = "FEWSTEP_API_KEY"  # the environment only: arguments are seen by every user of the machine
GRACE = 30  # seconds that running answers have to end in once the server was asked to stop
UNDECLARED_CONTEXT = 8192  # tokens, where config.json names no limit
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def run(folder: Path, host: str, port: int, max_batch: int) -> None:
    """Serve the student in `folder` until SIGTERM or SIGINT.

    Args:
        folder: a student.
        port: 0: any free one; the line printed at the start names it.
        max_batch: the most prompts decoded together.

    Raises:
        UserError: the extra is missing, no student is there, or the address cannot be had.
    """
    for needed in ("fastapi", "uvicorn"):
        if find_spec(needed) is None:
            raise UserError(f"serve needs {needed}, which is not installed: pip install 'fewstep[serve]'")
    import uvicorn

    from fewstep.serve.app import make_app

    with _listen(host, port) as listener:
        cuda = torch.cuda.is_available()
        model, tokenizer = load_student(folder, torch.bfloat16 if cuda else torch.float32)
        served = describe(folder, column_major(model.to("cuda" if cuda else "cpu")), tokenizer)
        worker = Worker(served.model, tokenizer, eos_ids(model, tokenizer), max_batch)
        app = make_app(served, worker, os.environ.get(KEY) or None)
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=GRACE)
        server = uvicorn.Server(config)

        def stop(*_: Any) -> None:
            server.should_exit = True

        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, stop)  # uvicorn raises the signal once more after its own handling
        listener.listen()
        address = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
        print(f"serving {served.name} at {address}: API under /v1, playground at /; Ctrl-C stops it", flush=True)
        if host not in LOOPBACK and not os.environ.get(KEY):
            print(f"fewstep: anyone who reaches {host} may use it; set {KEY} to ask for a key", file=sys.stderr)
        worker.start()
        try:
            server.run(sockets=[listener])
        finally:
            worker.stop(timeout=GRACE)
    print("stopped", flush=True)


def describe(folder: Path, model: Any, tokenizer: Any) -> Served:
    """Return the `Served` of a loaded student; a stage's folder lends it its name."""
    folder = folder.absolute()
    name = folder.parent.name if folder.name == "student" else folder.name
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or UNDECLARED_CONTEXT
    effort = getattr(model.generation_config, "fewstep_effort", None) or {}
    return Served(name, model, tokenizer, context, int(time.time()), effort)


def _listen(host: str, port: int) -> socket.socket:
    """Return a bound socket, before anything is loaded: a taken port should not cost a minute."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"--host {host} --port {port}: cannot be listened on ({reason}); choose another") from None
    return listener
