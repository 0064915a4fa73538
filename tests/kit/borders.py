"""Sizes at the borders of plans, and calls on any number of threads.

The borders are read from the C sources, so that a constant that is changed there moves the sizes of
the tests. Calls run in another Python per number of threads, because a process reads
OMP_NUM_THREADS once: 16 threads work on a machine of any number of processors.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import pickle
import re
import subprocess
import sys
import traceback
from functools import cache
from pathlib import Path

import numpy as np
from helpers import (
    BESIDE_TESTS,
    RED,
    RED_ZONE_BYTES,
    TESTS,
    assert_same_bits,
    environment_of_python,
)

CSRC = TESTS.parent / "csrc"
THREADS = (1, 2, 7, 16)
POISON = 0xFF  # what a workspace holds: NaN in all types


# --- sizes ---------------------------------------------------------------------------------------


@cache
def constants(path: str) -> dict[str, int]:
    """The numbers that a file of csrc defines in its enums, and those of the files that it
    includes, by their names."""
    known: dict[str, int] = {}
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", (CSRC / path).read_text(), flags=re.DOTALL)
    for name in re.findall(r'^#include "(.*)"', text, re.MULTILINE):
        known |= constants(name)
    for body in re.findall(r"\benum\s*\w*\s*{(.*?)}", text, re.DOTALL):
        for name, value in re.findall(r"(\w+)\s*=\s*([^,=]+?)\s*(?=,|$)", body):
            if (number := evaluate(value, known)) is not None:
                known[name] = number
    return known


def evaluate(expression: str, known: dict[str, int]) -> int | None:
    """The value of an expression of known numbers; None where it has something else."""
    text = re.sub(r"\b[A-Za-z_]\w*\b", lambda name: str(known.get(name[0], "?")), expression)
    if not re.fullmatch(r"[\dxXa-fA-F+*/<() -]+", text):
        return None
    return int(eval(text.replace("/", "//"), {"__builtins__": {}}))


def sizes_around(*borders: int, least: int = 1, most: int | None = None) -> list[int]:
    """Each border, and the numbers beside it, in order."""
    sizes = {border + step for border in borders for step in (-1, 0, 1)}
    return sorted(n for n in sizes if n >= least and (most is None or n <= most))


def every_address(size: int, align: int):
    """Memory of `size` bytes at every address modulo `align`, which must leave its red zones as
    they are until the next one is asked for."""
    memory = np.empty(size + 2 * RED_ZONE_BYTES + 2 * align, np.uint8)
    first = RED_ZONE_BYTES + -(memory.ctypes.data + RED_ZONE_BYTES) % align
    for offset in range(align):
        start, end = first + offset, first + offset + size
        memory[:start] = memory[end:] = RED
        memory[start:end] = POISON
        yield memory[start:end]
        assert (memory[:start] == RED).all(), f"a write in front, at address {offset}"
        assert (memory[end:] == RED).all(), f"a write behind, at address {offset}"


# --- threads -------------------------------------------------------------------------------------


class OtherPython:
    """Another Python, whose calls have `num_threads` threads. It ends with its standard input."""

    def __init__(self, num_threads: int) -> None:
        script = BESIDE_TESTS + "import borders; borders.serve()"
        # A race is an error of the call in which it is found.
        tsan = f"{os.environ.get('TSAN_OPTIONS', '')} halt_on_error=1"
        environment = {"OMP_NUM_THREADS": str(num_threads), "TSAN_OPTIONS": tsan}
        self.process = subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment_of_python(environment),
        )
        self.name = f"{num_threads} threads"

    def call(self, module: str, function: str, args: tuple):
        try:
            pickle.dump((module, function, args), self.process.stdin)
            self.process.stdin.flush()
            result, error = pickle.load(self.process.stdout)
        except (EOFError, BrokenPipeError):
            self.close()
            find_python.cache_clear()
            code = self.process.returncode
            raise AssertionError(
                f"{self.name}: {function}{args} ended Python with {code}"
            ) from None
        assert error is None, f"{self.name}: {error}"
        return result

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


def serve() -> None:
    """The other Python: answers calls until the end of its input. What calls print goes to stderr,
    like Python's own messages."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            module, function, args = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = getattr(importlib.import_module(module), function)(*args), None
        except Exception:
            answer = None, traceback.format_exc()
        pickle.dump(answer, answers)
        answers.flush()


@cache
def find_python(num_threads: int) -> OtherPython:
    python = OtherPython(num_threads)
    atexit.register(python.close)
    return python


def on_threads(num_threads: int, function, *args):
    """function(*args), which is a test file's, where calls have `num_threads` threads."""
    module = Path(sys.modules[function.__module__].__file__).stem
    return find_python(num_threads).call(module, function.__name__, args)


def on_any_threads(function, *args) -> dict:
    """The arrays that function(*args) returns. They have the same bits on any number of threads."""
    want = on_threads(1, function, *args)
    for num_threads in THREADS[1:]:
        got = on_threads(num_threads, function, *args)
        assert got.keys() == want.keys()
        for name, x in got.items():
            assert_same_bits(x, want[name], f"{name}, {num_threads} threads, {args}")
    return want
