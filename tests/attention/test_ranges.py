"""Keys by column range: dense columns, a `begin` and an `end` per token, positions that a block
table maps to slots.

No public operator makes such lists yet, so tests/c/ranges calls the backend itself. The oracle is
the public operator, on indices that name the same keys in the same columns.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace

import cases
import numpy as np
import pytest
import reference as ref
from device import DEVICE, ON_CUDA, Journey, address
from dlpack_producer import CPU, CUDA, DTYPES, DLTensor
from helpers import Guarded, assert_same_bits, assert_within_bounds, find_c_test

import sparse_mla


class Ranges(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("begin", "end", "block_table", "req_ids")),
        ("num_reqs", ctypes.c_int64),
        ("num_blocks", ctypes.c_int64),
        ("is_dense", ctypes.c_int32),
    )


@pytest.fixture(scope="module")
def library():
    library = ctypes.CDLL(str(find_c_test("ranges")))
    library.test_attend.argtypes = (
        ctypes.POINTER(ctypes.POINTER(DLTensor)),
        ctypes.c_double,
        ctypes.c_int,
        ctypes.POINTER(Ranges),
        ctypes.c_char_p,
    )
    return library


def dltensor(x: np.ndarray, there) -> DLTensor:
    """A contiguous array as C sees it; `there` is the same array on the device."""
    code, bits = DTYPES[x.dtype]
    shape = (ctypes.c_int64 * x.ndim)(*x.shape)
    device = CUDA if ON_CUDA else CPU
    return DLTensor(address(there), device, 0, x.ndim, code, bits, 1, shape, None, 0)


def attend(library, case, *, begin=None, end=None, table=None, req_ids=None, dense=False) -> dict:
    """Runs the backend on a case whose indices may be replaced by columns."""
    num_tokens, num_heads = case.shape
    indices = np.full_like(case.indices, -7) if dense else case.indices  # never read if dense
    out = Guarded((num_tokens, num_heads, 512), ref.BF16)
    lse = Guarded((num_tokens, num_heads), np.float32)
    workspace = np.zeros(64 << 20, np.uint8)
    arrays = [case.q, case.kv, indices, out.array, lse.array, workspace]
    journey = Journey() if DEVICE != "cpu" else None
    put = journey.put if journey else lambda x: x
    tensors = [dltensor(x, put(x)) for x in arrays]
    pointers = [None if x is None else address(put(x)) for x in (begin, end, table, req_ids)]
    num_reqs, num_blocks = table.shape if table is not None else (0, 0)
    text = ctypes.create_string_buffer(512)
    status = library.test_attend(
        (ctypes.POINTER(DLTensor) * len(tensors))(*map(ctypes.pointer, tensors)),
        case.options["softmax_scale"],
        case.num_splits,
        Ranges(*pointers, num_reqs, num_blocks, dense),
        text,
    )
    if journey:
        journey.fetch()  # waits for the device
    assert status == 0, text.value.decode()
    return {"out": out.check(), "lse": lse.check()}


def expect(case, indices, got: dict) -> None:
    """The reference on explicit indices; on the CPU also the public operator's bits."""
    named = replace(case, indices=np.ascontiguousarray(indices, np.int32))
    assert_within_bounds(named.reference(), got)
    if DEVICE == "cpu":
        out, lse = named.run(sparse_mla.sparse_attention)
        assert_same_bits(got["out"], out, "out")
        assert_same_bits(got["lse"], lse, "lse")


def make(fmt: str, num_tokens: int, width: int, heads=5, splits=1, pages=40):
    """Contiguous inputs whose every row of the cache may be read; pages of 8 tokens."""
    rng = np.random.default_rng([num_tokens, width, heads])
    kv = cases.make_rows(rng, 8 * pages, fmt).reshape(pages, 8, -1)
    indices = rng.integers(-20, 8 * pages + 20, (num_tokens, width)).astype(np.int32)
    q = cases.random_bf16(rng, num_tokens, heads, cases.head_dim(fmt))
    options = {"softmax_scale": cases.head_dim(fmt) ** -0.5}
    return cases.AttentionInputs(q, np.ascontiguousarray(kv), indices, options, splits)


def columns(case) -> np.ndarray:
    """The column numbers of every row of the case's indices."""
    return np.broadcast_to(np.arange(case.indices.shape[1]), case.indices.shape)


def between(case, begin, end) -> np.ndarray:
    """Which columns are inside the ranges."""
    j = columns(case)
    low = 0 if begin is None else begin[:, None]
    high = case.indices.shape[1] if end is None else end[:, None]
    return (low <= j) & (j < high)


FORMATS = ["fp8", "bf16", "bf16_512"]
BEGIN = np.array([0, -3, 5, 64, 130, 299, 300, 0, 70], np.int32)
END = np.array([300, 40, 6, 64, 500, 300, 300, -1, 71], np.int32)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("splits", [0, 1, 3])
@pytest.mark.parametrize("bounds", ["begin", "end", "both"])
def test_ranges_of_index_lists(library, fmt, splits, bounds):
    case = make(fmt, len(BEGIN), 300, splits=splits)
    begin = BEGIN if bounds != "end" else None
    end = END if bounds != "begin" else None
    got = attend(library, case, begin=begin, end=end)
    expect(case, np.where(between(case, begin, end), case.indices, -1), got)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("splits", [0, 1, 3])
@pytest.mark.parametrize("bounded", [False, True])
def test_dense_columns_are_slots(library, fmt, splits, bounded):
    case = make(fmt, len(BEGIN), 300, splits=splits)
    begin, end = (BEGIN, END) if bounded else (None, None)
    got = attend(library, case, begin=begin, end=end, dense=True)
    expect(case, np.where(between(case, begin, end), columns(case), -1), got)


def test_dense_columns_past_the_last_slot_are_none(library):
    case = make("fp8", 2, 50, pages=5)  # 40 slots
    got = attend(library, case, dense=True)
    expect(case, np.where(columns(case) < 40, columns(case), -1), got)


def positions_to_slots(case, positions, table, req_ids) -> np.ndarray:
    """Positions through the table, -1 for none; pages of 8 tokens, of which the cache has 40."""
    slots, _ = ref.convert_req_index_to_global_index(req_ids, table, positions, block_size=8)
    return np.where(slots < 8 * 40, slots, -1)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dense", [False, True])
def test_positions_through_a_block_table(library, fmt, dense):
    rng = np.random.default_rng(1)
    case = make(fmt, 6, 90, splits=2)
    table = rng.integers(0, 40, (3, 11)).astype(np.int32)
    table[1, 4], table[2, 0] = -1, 40  # no page, and one behind the last
    req_ids = np.array([0, 1, 1, 2, 2, 0], np.int32)
    case.indices[:] = rng.integers(-2, 95, case.indices.shape)  # the table has 88 positions
    positions = columns(case) if dense else case.indices
    end = np.array([90, 33, 90, 90, 1, 0], np.int32)
    got = attend(library, case, end=end, table=table, req_ids=req_ids, dense=dense)
    positions = np.where(between(case, None, end), positions, -1)
    expect(case, positions_to_slots(case, positions, table, req_ids), got)


@pytest.mark.parametrize("heads", [1, 16, 33, 128])
def test_every_tile_of_heads(library, heads):
    case = make("fp8", len(BEGIN), 300, heads=heads, splits=1)
    got = attend(library, case, begin=BEGIN, end=END, dense=True)
    expect(case, np.where(between(case, BEGIN, END), columns(case), -1), got)
