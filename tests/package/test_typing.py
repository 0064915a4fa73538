"""What type checkers find in calls, and what Python and IPython show of signatures."""

import ast
import functools
import inspect
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
from helpers import require

import sparse_mla
from sparse_mla import _C, _types, ops
from sparse_mla.v4 import config as v4

pytestmark = pytest.mark.frameworks

ROOT = Path(__file__).parents[2]
CALLS = ROOT / "tests" / "typing"
EXAMPLES_WITH_TORCH = [
    ROOT / "examples" / f"{name}.py"
    for name in (
        *("cuda_graph", "deepseek_common", "deepseek_v3", "deepseek_v32", "deepseek_v4"),
        *("speculative", "speculative_models", "context_parallel", "context_parallel_models"),
    )
]
EXAMPLES_WITH_JAX = [ROOT / "examples" / "context_parallel_jax.py"]
PACKAGE = Path(sparse_mla.__file__).parent.parent

Errors = list[tuple[str, int]]  # name of a file, line


def mypy(tmp_path, *files: Path) -> Errors:
    """The project's settings leave out the types of optional frameworks."""
    require("mypy")
    command = [sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml"]
    command += ["--cache-dir", tmp_path, "--no-error-summary", "--hide-error-context"]
    run = subprocess.run([*command, *files], cwd=PACKAGE, capture_output=True, text=True)
    assert run.returncode in (0, 1), run.stdout + run.stderr
    found = re.findall(r"^(\S+):(\d+): error: ", run.stdout, re.MULTILINE)
    return [(Path(file).name, int(line)) for file, line in found]


def pyright(tmp_path, *files: Path) -> Errors:
    require("basedpyright")
    settings = {"typeCheckingMode": "standard", "include": [str(file) for file in files]}
    settings["extraPaths"] = [str(PACKAGE), str(ROOT / "examples")]
    config = tmp_path / "pyrightconfig.json"
    config.write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--level", "error"]
    command += ["--project", config, "--pythonpath", sys.executable]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode in (0, 1), run.stdout + run.stderr
    report = json.loads(run.stdout)
    assert report["summary"]["filesAnalyzed"] == len(files)
    return [
        (Path(x["file"]).name, x["range"]["start"]["line"] + 1)
        for x in report["generalDiagnostics"]
    ]


each_checker = pytest.mark.parametrize("check", [mypy, pyright])
WRONG_CALLS = CALLS / "wrong_calls.py"


@functools.cache
def errors_without_frameworks(check: Callable[..., Errors]) -> Errors:
    """Of wrong calls, of right ones, of the examples and of the README: a checker needs seconds to
    start."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    alone = {*(ROOT / "examples").glob("*.py")} - {*EXAMPLES_WITH_TORCH, *EXAMPLES_WITH_JAX}
    with tempfile.TemporaryDirectory() as folder:
        readme = Path(folder, "readme.py")
        readme.write_text("\n".join(blocks))
        return check(Path(folder), WRONG_CALLS, CALLS / "right_calls.py", *alone, readme)


@each_checker
def test_wrong_calls_are_found(check):
    lines = enumerate(WRONG_CALLS.read_text().splitlines(), 1)
    wrong = [(WRONG_CALLS.name, number) for number, line in lines if line.endswith("# wrong")]
    assert len(wrong) == 21
    found = {x for x in errors_without_frameworks(check) if x[0] == WRONG_CALLS.name}
    assert sorted(found) == wrong


@each_checker
def test_right_calls_are_taken(check):
    assert [x for x in errors_without_frameworks(check) if x[0] != WRONG_CALLS.name] == []


@each_checker
@pytest.mark.torch
@pytest.mark.transformers
def test_calls_with_tensors_are_taken(tmp_path, check):
    require("torch")
    require("transformers")
    assert check(tmp_path, *EXAMPLES_WITH_TORCH) == []


@pytest.mark.jax
def test_calls_with_jax_arrays_are_taken(tmp_path):
    """By pyright: mypy finds no operators in the integrations."""
    require("jax")
    assert pyright(tmp_path, *EXAMPLES_WITH_JAX) == []


@pytest.mark.torch
def test_results_have_the_type_of_the_first_array(tmp_path):
    require("torch")
    assert pyright(tmp_path, CALLS / "results.py") == []


def test_literals_are_the_names_of_formats():
    assert {*get_args(_types.KvFormat)} == {"auto", *_C.KV_FORMATS}
    assert {*get_args(_types.ConcatFormat)} == {"auto", *_C.CONCAT_KV_FORMATS}
    assert {*get_args(_types.IndexFormat)} == {*v4.INDEX_CACHE_DTYPES}
    assert {*get_args(_types.CacheDtypeV4)} == {*v4.SYNONYMS, *v4.KV_CACHE_DTYPES}
    assert {*get_args(_types.CompressedDtypeV4)} == {*v4.SYNONYMS, *v4.COMPRESSED_DTYPES}
    assert {*get_args(_types.PathV4)} == {*v4.PATHS}
    assert {*get_args(_types.Path)} == {*sparse_mla.steps.v32.PATHS}
    assert {*get_args(_types.FlashFormat)} == {*sparse_mla.flash_mla.KV_FORMATS}


@pytest.mark.parametrize("name", sorted(ops.OPERATORS))
def test_signatures_are_the_declared_ones(name):
    operator = ops.OPERATORS[name]
    signature = inspect.signature(operator)
    assert signature == inspect.signature(operator.__wrapped__)
    for parameter in signature.parameters.values():
        assert parameter.annotation is not parameter.empty


def test_results_of_two_kinds_have_overloads():
    """In the stubs that the build made."""
    stubs = [ast.parse(path.read_text()) for path in Path(ops.__file__).parent.glob("*.pyi")]
    functions = [x for stub in stubs for x in stub.body if isinstance(x, ast.FunctionDef)]
    found = {x.name for x in functions if x.decorator_list}
    returned = {name: inspect.signature(x).return_annotation for name, x in ops.OPERATORS.items()}
    assert found == {n for n, text in returned.items() if re.search(r"\||\.\.\.", text)} | {
        "concat_and_cache_mla"  # either name of the format is taken
    }


def test_ipython_shows_the_declared_signature():
    oinspect = require("IPython.core.oinspect")
    shown = oinspect.Inspector(theme_name="nocolor").info(sparse_mla.sparse_attention)
    assert "kv_format: 'KvFormat | None' = None" in shown["definition"]
    assert shown["call_def"] is None, "one signature is shown"
    assert shown["docstring"].startswith("Attend to the cached tokens")
