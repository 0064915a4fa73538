"""Every script and notebook of examples/ runs, and its own assertions hold. `make examples-c` runs
the C examples. test_transformers*.py run deepseek_v32.py, deepseek_v3.py and deepseek_v4.py, which
take minutes, at a smaller size, test_speculative.py speculative.py, and test_context_parallel.py
context_parallel.py, whose ranks are processes.

A new script or notebook is tested as soon as it exists. Its imports at the left margin say what its
test needs: a missing framework skips the test, or fails it if SMLA_REQUIRE demands the framework.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import device
import pytest
from helpers import FRAMEWORKS, find_framework, require, run_python

import sparse_mla

pytestmark = pytest.mark.frameworks

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(
    path for suffix in ("*.py", "*.ipynb") for path in (ROOT / "examples").glob(suffix)
)
NEEDS_A_GPU = {"cuda_graph.py"}
LONG = {"deepseek_v32.py", "deepseek_v3.py", "deepseek_v4.py", "speculative.py"}
LONG |= {"context_parallel.py"}
MODULES = {"deepseek_common.py", "speculative_models.py", "context_parallel_models.py"}
C_EXAMPLES = sorted((ROOT / "examples" / "c").glob("*.[ch]"))
VARIANT = sparse_mla.build_info()["flags"]  # others round in other places
LIBRARY = ROOT / "build" / VARIANT.removeprefix("release") / "lib"  # built with the C tests


def source_of(path: Path) -> str:
    if path.suffix == ".py":
        return path.read_text()
    cells = json.loads(path.read_text())["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


def imports_of(path: Path) -> set[str]:
    return set(re.findall(r"^(?:import|from) (\w+)", source_of(path), re.MULTILINE))


def each():
    for path in [path for path in EXAMPLES if path.name not in LONG | MODULES]:
        names = (imports_of(path) & set(FRAMEWORKS)) - {"numpy"}
        marks = [getattr(pytest.mark, name) for name in sorted(names)]
        yield pytest.param(path, marks=marks, id=path.name)


@pytest.mark.parametrize("path", list(each()))
def test_example(path):
    needed = imports_of(path)
    for name in sorted(needed & set(FRAMEWORKS)):
        find_framework(name)
    for name in sorted(needed - set(FRAMEWORKS) - set(sys.stdlib_module_names)):
        require(name)
    if "ctypes" in needed and not LIBRARY.exists():
        pytest.skip("the C library is not built: make test-c")
    command = [str(path)]
    if path.suffix == ".ipynb":
        require("nbclient")
        command.insert(0, str(ROOT / "tests" / "kit" / "notebook.py"))
    folders = [str(LIBRARY), os.environ.get("LD_LIBRARY_PATH", "")]
    done = run_python(*command, LD_LIBRARY_PATH=os.pathsep.join(filter(None, folders)))
    if path.name in NEEDS_A_GPU and not device.ON_CUDA and done.returncode:
        assert re.fullmatch(rf"{path.stem}: nothing to \w+: .*\n", done.stderr), done.stderr
        return
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip(), "an example shows something"


FIND = "import importlib.util as x; s = x.find_spec('sparse_mla'); print(s.origin if s else '')"
CELL = {"cell_type": "code", "id": "a", "metadata": {}, "outputs": [], "execution_count": None}
NOTEBOOK = {"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [CELL | {"source": FIND}]}


@pytest.mark.parametrize("has_another", [False, True])
def test_the_readme_s_command_runs_a_notebook(has_another, tmp_path):
    """It finds the package of the source tree, unless Python itself finds one."""
    require("nbclient")
    python, *words = re.search(r"`(python \S+) FILE`", (ROOT / "README.md").read_text())[1].split()
    assert python == "python"
    file = tmp_path / "file.ipynb"
    file.write_text(json.dumps(NOTEBOOK))
    environment = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"}
    if has_another:
        (tmp_path / "sparse_mla").mkdir()
        (tmp_path / "sparse_mla" / "__init__.py").touch()
        environment["PYTHONPATH"] = str(tmp_path)

    def printed_by(*command: str | Path) -> str:
        command = (sys.executable, *command)
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    found = printed_by("-P", "-c", FIND)
    assert not has_another or found.startswith(str(tmp_path))
    assert printed_by(*words, file) == (found or str(ROOT / "sparse_mla" / "__init__.py"))


def test_examples_are_found():
    assert {"quickstart.py", "trees.ipynb", "cuda_graph.py"} <= {p.name for p in EXAMPLES}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_readme_names_it(path):
    assert f"examples/{path.name}" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    "path", [p for p in EXAMPLES if p.suffix == ".ipynb"], ids=lambda path: path.name
)
def test_a_notebook_says_what_it_needs(path):
    imported = set(re.findall(r"^ *(?:import|from) (\w+)", source_of(path), re.MULTILINE))
    dependencies = {"sparse_mla", "numpy", "ml_dtypes"}
    needed = imported - dependencies - set(sys.stdlib_module_names)
    first = "".join(json.loads(path.read_text())["cells"][0]["source"])
    line = re.search(r"^\*\*Needs\*\* .*", first, re.MULTILINE)[0]
    assert set(re.findall(r"`(\w+)`", line)) - {"sparse_mla"} == needed


def test_c_examples_are_found():
    names = {path.name for path in C_EXAMPLES}
    assert {"decode.c", "cache.c", "prefill.c", "step.c", "paged.c", "v4.c"} <= names


@pytest.mark.parametrize("path", C_EXAMPLES, ids=lambda path: path.name)
def test_the_index_names_the_c_example(path):
    assert f"[{path.name}]({path.name})" in (path.parent / "README.md").read_text()


@pytest.mark.parametrize(
    "path", [p for p in EXAMPLES if p.suffix == ".ipynb"], ids=lambda path: path.name
)
def test_notebooks_are_stored_without_outputs(path):
    for cell in json.loads(path.read_text())["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
