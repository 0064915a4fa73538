"""SPARSE_MLA_LOG=1: one line on stderr per call, from Python and from C."""

import os
import re
import subprocess

import device
import operators
import pytest
from helpers import BESIDE_TESTS, BUILD, run_python

import sparse_mla

pytestmark = pytest.mark.frameworks

# Every operator that operators.py knows, a call that fails, then a step on path "separate".
CALLS = """
import cases, device, engine, library, operators
import numpy as np
sparse_mla = library.sparse_mla
for name, make in operators.GOOD_CALLS.items():
    make().run(sparse_mla)
call = operators.GOOD_CALLS["sparse_attention"]()
call.set("indices", call.get("indices").astype(np.int64))
try:
    call.run(sparse_mla)
except TypeError:
    pass
config = engine.config(sparse_mla, num_heads=32, fp8=True, path="separate")
batch = cases.make_batch([1, 1, 30], [20, 9, 40], seed=0)
step = engine.make_step(batch, 32, seed=0)
metadata = sparse_mla.MetadataBuilder(config).build(batch.common(sparse_mla))
sparse_mla.SparseMLA(config).forward(step.q, step.fp8_cache, step.topk_indices, metadata)
"""
LINE = re.compile(
    r"sparse_mla: (?P<indent> *)(?P<op>[\w.]+)(?: on (?P<device>cpu|cuda:\d))?:(?P<text>.*) "
    r"\d+\.\d{3} ms(?P<host> of the host)?"
)


@pytest.fixture(scope="module")
def lines():
    done = run_python("-c", BESIDE_TESTS + CALLS, SPARSE_MLA_LOG="1")
    assert done.returncode == 0, done.stderr
    matches = [LINE.fullmatch(line) for line in done.stderr.splitlines()]
    assert all(matches), done.stderr
    return matches


def find(lines, op):
    return next(line for line in lines if line["op"] == op)


def test_every_operator_has_its_line(lines):
    names = {name for name in operators.GOOD_CALLS if hasattr(sparse_mla, name)}
    assert len(names) > 20
    assert names <= {line["op"] for line in lines}


def test_a_line_names_device_arrays_kernel_and_time(lines):
    line = find(lines, "sparse_attention")
    assert line["device"] == ("cuda:0" if device.ON_CUDA else "cpu")
    assert bool(line["host"]) == device.ON_CUDA, "the device's time is not known"
    assert re.search(r" q bfloat16\[\d+, \d+, 576\],", line["text"])
    assert re.search(r" indices int32\[\d+, \d+\],", line["text"])
    kernels = {row["name"] for row in sparse_mla.kernels() if row["available"]}
    pattern = r" kernel (.+?) \(tokens \d+, splits \d+(; [^)]+)?\),"  # "; " what another lacks
    assert re.search(pattern, line["text"])[1] in kernels


def test_a_failed_call_says_so(lines):
    failed = [line for line in lines if "SMLA_ERROR_TYPE," in line["text"]]
    assert [line["op"] for line in failed] == ["sparse_attention"]


def test_a_layer_s_line_has_its_path_and_follows_those_of_its_calls(lines):
    assert " path separate, chunks 1," in find(lines, "MetadataBuilder.build")["text"]
    last = lines[-1]
    assert (last["op"], last["indent"]) == ("forward", "")
    assert " path separate, chunks 1," in last["text"]
    assert last["text"].count(" kv_cache ") == 1, "the chunk's arrays are not the layer's"
    inner = [line["op"] for line in lines if line["indent"]]
    assert inner == [
        "convert_req_index_to_global_index",
        "sparse_attention",
        "gather_kv_cache",
        "sparse_attention",
    ]


@pytest.mark.parametrize("value", ["", "0"])
def test_nothing_is_printed_unless_it_is_asked_for(value):
    done = run_python("-c", BESIDE_TESTS + CALLS, SPARSE_MLA_LOG=value)
    assert (done.returncode, done.stderr) == (0, "")


def test_calls_from_c_have_lines_too():
    """test_merge is a C program without Python."""
    program = BUILD / "tests" / "test_merge"
    if not program.exists():
        pytest.skip("the C tests are not built: make test-c")
    environment = os.environ | {"SPARSE_MLA_LOG": "1"}
    done = subprocess.run([program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^sparse_mla: merge_attn_states on cpu: out_a ", done.stderr, re.MULTILINE)
