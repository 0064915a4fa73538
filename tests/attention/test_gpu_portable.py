"""The tests of attention with the portable kernels, on a GPU that has special kernels.

They run in other processes, because a process reads once which kernels it may use.
"""

import pytest
from helpers import printed_by_python

ARCHS = """
import sparse_mla
print({row["arch"] for row in sparse_mla.kernels() if row["device"] == "cuda" and row["selected"]})
"""


# pytest-benchmark, where it is installed, warns in workers of pytest-xdist; warnings are errors.
WITHOUT = ["-p", "no:cacheprovider", "-p", "no:benchmark"]


def run_portable(*arguments: str) -> str:
    return printed_by_python(*arguments, SPARSE_MLA_CUDA_ARCH="80")  # no kernels for newer GPUs


def test_no_others_are_left():
    assert run_portable("-c", ARCHS).strip() == "{'sm_80+'}"


# A test of the host's checks alone is skipped where numbers are on the device.
FILES = {
    "test_attention.py": [],
    "test_one_key.py": [],
    "test_gpu_attention.py": [],
    "test_mla_attention.py": ["-k", "not query_starts_are_checked"],
}


@pytest.mark.parametrize("name", FILES)
def test_attention(name):
    path = f"tests/attention/{name}"
    summary = run_portable("-m", "pytest", "-q", *WITHOUT, path, *FILES[name])
    assert " passed" in summary
    assert " skipped" not in summary


def test_one_key_is_its_value():
    """test_one_key.py, which runs above, has the other cases of one key."""
    summary = run_portable(
        "-m", "pytest", "-q", *WITHOUT, "tests/attention/test_gpu_growth.py", "-k", "one_key"
    )
    assert " passed" in summary
    assert " skipped" not in summary
