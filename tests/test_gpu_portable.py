"""The portable kernels, on a GPU that has kernels of its own: the tests of attention once more.

In other processes, because which kernels there are is read once.
"""

import pytest
from helpers import printed_by_python

ARCHS = """
import sparse_mla
print({row["arch"] for row in sparse_mla.kernels() if row["device"] == "cuda" and row["selected"]})
"""


# pytest-benchmark, where it is installed, warns of workers, and warnings are errors.
WITHOUT = ["-p", "no:cacheprovider", "-p", "no:benchmark"]


def run_portable(*arguments: str) -> str:
    return printed_by_python(*arguments, SPARSE_MLA_CUDA_ARCH="80")  # newer ones' kernels left out


def test_no_others_are_left():
    assert run_portable("-c", ARCHS).strip() == "{'sm_80+'}"


@pytest.mark.parametrize("name", ["test_attention.py", "test_gpu_attention.py"])
def test_attention(name):
    summary = run_portable("-m", "pytest", "-q", *WITHOUT, f"tests/{name}")
    assert " passed" in summary
    assert " skipped" not in summary


def test_one_key_is_its_value():
    """test_attention.py has the other cases of one key."""
    summary = run_portable(
        "-m", "pytest", "-q", *WITHOUT, "tests/test_gpu_growth.py", "-k", "one_key"
    )
    assert " passed" in summary
    assert " skipped" not in summary
