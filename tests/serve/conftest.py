"""A tiny student, served: random weights, so its text is random bytes, some of them broken characters."""

import pytest
import torch

from fewstep.chat import eos_ids
from fewstep.students.config import StudentConfig
from fewstep.students.convert import load_student, make_student, save_student
from tests.tiny import tiny_model, tiny_tokenizer

torch.set_num_threads(1)
EXTRA = "needs the extra serve: pip install 'fewstep[serve]'"


@pytest.fixture(scope="session")
def student_folder(tmp_path_factory):
    """A stage's folder `distill-12345678` with a student of block size 8; no answer ends by itself."""
    folder = tmp_path_factory.mktemp("runs") / "distill-12345678"
    model, tokenizer = tiny_model(), tiny_tokenizer()
    make_student(model, tokenizer, StudentConfig(block_size=8), gated=False, seed=0)
    (folder / "student").mkdir(parents=True)
    save_student(model, tokenizer, folder / "student")
    return folder


@pytest.fixture(scope="session")
def student(student_folder):
    """(model, tokenizer, eos)"""
    model, tokenizer = load_student(student_folder / "student")
    return model, tokenizer, eos_ids(model, tokenizer)


@pytest.fixture
def served(student):
    from fewstep.serve.asks import Served

    model, tokenizer, _ = student
    effort = {
        "low": {"sampler": "threshold", "settings": {"threshold": 0.3}, "tasks": {}},
        "high": {"reason": "no setting loses 0 points or less"},
        "lossless": {"sampler": "verify", "settings": {}},
    }
    return Served("tiny", model, tokenizer, 512, 1_800_000_000, effort)


@pytest.fixture
def worker(student):
    """A worker that is not started; whatever a test starts is stopped."""
    from fewstep.serve.worker import Worker

    worker = Worker(*student, max_batch=3)
    yield worker
    worker.stop(timeout=20)
