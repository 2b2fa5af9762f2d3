"""The run prepared for a GPU: it needs no package that a bare GPU image lacks, and a failing part costs only itself."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "benchmarks"
LACKING = ["deepspeed", "datasets", "wandb", "reasoning_gym", "gguf", "jsonschema"]
LAB = "cli pipeline train tracking publishing".split()
IMPORTS = {
    "lab": [f"fewstep.distill.{m}" for m in LAB]
    + ["fewstep.eval.run", "fewstep.eval.report", "fewstep.teachers.collect", "fewstep.teachers.scoring"],
    "checks, decode, table": ["gpu_checks", "gpu_decode", "gpu_table"],
}
PROBE = """
import importlib, importlib.metadata, importlib.util, sys
absent, modules = sys.argv[1].split(), sys.argv[2].split()
assert not any(importlib.util.find_spec(name) for name in absent)
for name in absent:
    try:
        raise SystemExit(f"{name} {importlib.metadata.version(name)} is listed")
    except importlib.metadata.PackageNotFoundError:
        pass
import fewstep
assert fewstep.__file__ == sys.argv[3], fewstep.__file__
for name in modules:
    importlib.import_module(name)
assert not [name for name in absent if name in sys.modules]
"""


def environment(*folders, **given):
    path = os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | given


@pytest.mark.parametrize("part", IMPORTS)
def test_each_part_imports_without_what_a_gpu_image_lacks(part):
    absent = LACKING if part == "lab" else [*LACKING, "pydantic"]
    done = subprocess.run(
        [sys.executable, "-c", PROBE, " ".join(absent), " ".join(IMPORTS[part]), str(ROOT / "src/fewstep/__init__.py")],
        env=environment(HERE / "absent", HERE, ROOT / "src", ABSENT=" ".join(absent)), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def gpu(out, python=sys.executable, **given):
    env = {"OUT": str(out), "PYTHON": str(python), "OMP_NUM_THREADS": "1", **given}
    done = subprocess.run(
        ["bash", str(HERE / "gpu.sh"), "--dry"], env=os.environ | env, capture_output=True, text=True, cwd=out
    )
    return done, json.loads((out / "gpu.json").read_text())


def test_a_part_that_fails_costs_its_own_figures_alone(tmp_path):
    stub = tmp_path / "python"
    stub.write_text(
        "#!/bin/bash\n"
        'case "$*" in\n'
        "*gpu_checks*) exit 3 ;;\n"
        f'*gpu_table*) exec {sys.executable} "$@" ;;\n'
        """*gpu_decode*) echo '{"device": "cpu", "rows": [{"batch": 1, "way": "w", "tokens_per_s": 2.0, "over_hf_generate": 1.0}]}' > "$3" ;;\n"""
        "esac\n"
    )
    stub.chmod(0o755)
    done, kept = gpu(tmp_path, stub)
    assert done.returncode == 1
    assert [(p["part"], p["exit"]) for p in kept["parts"]] == [("checks", 3), ("lab", 0), ("decode", 0)]
    assert [row["part"] for row in kept["rows"]] == ["decode"]
    assert "checks failed: exit 3" in done.stdout and "2.0 tokens/s" in done.stdout


@pytest.mark.slow
def test_dry_form_goes_through_every_part(tmp_path):
    done, kept = gpu(tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert kept["dry"] and all(p["exit"] == 0 for p in kept["parts"])
    of = {part: [r for r in kept["rows"] if r["part"] == part] for part in ("checks", "lab", "decode")}
    assert of["checks"] and all(r["passed"] for r in of["checks"])
    assert {r["system"] for r in of["lab"]} == {"teacher", "student", "undistilled"}
    assert {(r["batch"], r["tokens"] // r["batch"] // r["forwards"]) for r in of["decode"]} == {
        (batch, tpf) for batch in (1, 8) for tpf in (1, 2, 4, 8)
    }
    assert not set(kept["versions"]) & set(LACKING)
