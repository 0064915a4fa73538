"""What a newcomer runs: the README's example, and `python -m sparse_mla`."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sparse_mla

ROOT = Path(__file__).parent.parent


def run(*arguments):
    """Python with the package that these tests import."""
    environment = os.environ | {"PYTHONPATH": str(Path(sparse_mla.__file__).parents[1])}
    return subprocess.run(
        [sys.executable, *arguments], text=True, capture_output=True, timeout=300, env=environment
    )


def run_command(*arguments):
    return run("-m", "sparse_mla", *arguments)


def test_the_readme_s_example_runs():
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    assert example == (ROOT / "examples/quickstart.py").read_text()
    done = run(str(ROOT / "examples/quickstart.py"))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "(3, 16, 512) bfloat16 (3, 16)\n"


SHORT = ["--requests", "3", "--context", "300", "--topk", "64", "--decode", "3"]


@pytest.mark.parametrize(
    ("options", "path"),
    [
        (["--heads", "32"], "separate"),
        (["--heads", "8"], "mixed"),
        (["--heads", "3", "--path", "direct", "--block-size", "17"], "direct"),
        (["--heads", "8", "--kv-cache-dtype", "bfloat16"], "bf16"),
    ],
)
def test_demo_takes_the_path_and_is_within_the_bounds(options, path):
    done = run_command("demo", *SHORT, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f" {path} " in done.stdout
    assert "within the bounds" in done.stdout
    assert "0 pages in use at the end" in done.stdout


def test_demo_reads_the_user_s_text(tmp_path):
    text = tmp_path / "text"
    text.write_text("the cat sat on the mat, the dog sat on the log. " * 20)
    done = run_command("demo", *SHORT, "--heads", "2", "--text", str(text))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("options", [["--heads", "200"], ["--path", "bf16"], ["--text", "/none"]])
def test_demo_refuses_in_one_line(options):
    done = run_command("demo", *SHORT, *options)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 3


def test_info_names_what_there_is():
    done = run_command("info")
    assert done.returncode == 0, done.stderr
    for word in ("sparse_mla", "compiler", "openmp", "numpy", "attention_base.c", "fp8_ds_mla"):
        assert word in done.stdout, word
    assert sum(line.startswith("*") for line in done.stdout.splitlines()) == 1


def test_bench_prints_numbers_for_programs():
    done = run_command("bench", "--quick", "--json", "--only", "calls")
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    (rows,) = [value for value in results.values() if isinstance(value, list)]
    assert all(row["seconds"]["NumPy"] > 0 for row in rows)
