"""Who may import whom. Every import counts, lazy ones too."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("distill", "teachers", "students", "kernels", "eval", "serve")

# The modules of distill that orchestrate; the others are the training loop and what it is made of.
ORCHESTRATE = {
    "cli", "recipe", "recipe_docs", "chain", "checks", "estimate", "plan", "pipeline",
    "doctor", "answering", "bench", "starter", "publishing", "fit", "memory",
}  # fmt: skip
MAY_IMPORT = {
    "common": set(),
    "teachers": set(),
    "kernels": set(),
    "students": {"kernels"},
    "loop": {"students", "kernels"},
    "eval": {"teachers", "students", "kernels"},
    "serve": {"students", "kernels"},
}


def module_files() -> dict[str, Path]:
    """Return module name → file, for every Python file of the package."""
    files = {}
    for base, prefix in [(ROOT / "src" / "fewstep", "fewstep"), *((ROOT / r, f"fewstep.{r}") for r in ROOMS)]:
        for file in base.rglob("*.py"):
            parts = file.relative_to(base).with_suffix("").parts
            name = ".".join([prefix, *(parts[:-1] if parts[-1] == "__init__" else parts)])
            files[name] = file
    return files


FILES = module_files()


def imports(name: str) -> set[str]:
    """Return the modules that a module imports, ours by their full name, others by their top-level one."""
    file, found = FILES[name], set()
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text())):
        targets = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base]) if base else ".".join(parents)
            # `from package import module` imports the module; `from module import name` the module before it.
            targets = [f"{base}.{a.name}" if f"{base}.{a.name}" in FILES else base for a in node.names]
        for target in targets:
            while target.startswith("fewstep.") and target not in FILES:
                target = target.rpartition(".")[0]
            found.add(target if target.split(".")[0] == "fewstep" else target.split(".")[0])
    return found - {name}


def room(name: str) -> str:
    parts = name.split(".")
    if len(parts) < 2 or parts[1] not in ROOMS:
        return "common"
    if parts[1] == "distill":
        return "orchestration" if len(parts) > 2 and parts[2] in ORCHESTRATE else "loop"
    return parts[1]


def test_the_scan_sees_the_package():
    assert {"fewstep.errors", "fewstep.distill.cli", "fewstep.students.decoding.decode", "fewstep.serve.app"} <= set(
        FILES
    )
    assert "fewstep.distill.recipe" in imports("fewstep.distill.chain")
    assert "fewstep.distill.plan" in imports("fewstep.distill.cli")  # a lazy import
    assert "fewstep.students.decoding.fixed" in imports("fewstep.students.decoding.decode")  # a relative one


@pytest.mark.parametrize("name", sorted(FILES))
def test_module_imports_only_the_rooms_that_its_own_may(name):
    own = room(name)
    if own == "orchestration" or name == "fewstep.__main__":
        return
    for target in imports(name):
        if target.split(".")[0] == "fewstep":
            other = room(target)
            assert other in {"common", own} | MAY_IMPORT[own], f"{name} ({own}) imports {target} ({other})"


def test_decoding_imports_only_torch_transformers_and_its_siblings():
    """These files travel to the Hub: an import of ours would fail there."""
    travelling = [n for n in FILES if n.startswith("fewstep.students.decoding")]
    assert len(travelling) > 3
    for name in travelling:
        for node in ast.walk(ast.parse(FILES[name].read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1, f"{name} reaches out of its folder"
        for target in imports(name):
            ours = target.startswith("fewstep.students.decoding")
            # safetensors is transformers' own file format and comes with it.
            known = target in sys.stdlib_module_names or target in ("torch", "transformers", "safetensors")
            assert ours or known, f"{name} imports {target}"


def test_modules_import_each_other_without_cycles():
    graph = {name: sorted(t for t in imports(name) if t in FILES) for name in FILES}
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> None:
        assert name not in path, " → ".join([*path[path.index(name) :], name]) if name in path else ""
        if name not in done:
            for target in graph[name]:
                visit(target, [*path, name])
            done.add(name)

    for name in graph:
        visit(name, [])


def test_no_room_is_a_package_but_decoding():
    """A root `kernels/__init__.py` would shadow PyPI's `kernels`, which transformers imports."""
    packages = {p.parent.relative_to(ROOT).as_posix() for r in ROOMS for p in (ROOT / r).rglob("__init__.py")}
    assert packages == {"students/decoding"}


@pytest.mark.parametrize("module", ["cli", "recipe", "plan", "pipeline"])
def test_commands_that_must_answer_at_once_import_no_heavy_library(module):
    code = f"import sys, fewstep.distill.{module}; print([m for m in ('torch', 'transformers', 'deepspeed', 'pyarrow', 'datasets') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_rooms_are_not_importable_under_their_bare_names(tmp_path):
    """Installed, `eval` or `kernels` of ours must not stand where another package's would."""
    code = "import importlib.util as u; print([n for n in ('distill', 'teachers', 'students', 'eval', 'serve') if u.find_spec(n)])"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
