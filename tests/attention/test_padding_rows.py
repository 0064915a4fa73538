"""Rows behind the last request, in results that a call makes itself: out 0 and lse -inf.

The memory of results is the allocator's, with what its last user left. So a call comes after others
that gave back memory full of one byte, and its results must not depend on the byte. In results that
the caller gives, these rows stay.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
import reference as ref
from dense_cases import Dense, Mask
from device import NAME, ON_CUDA, import_quietly
from exchange_producer import Exchanged
from helpers import Guarded, assert_same_bits
from library import sparse_mla
from paged_cases import Paged
from varlen_cases import F16, Varlen

import sparse_mla as package

CAUSAL = Mask(causal=True)
BYTES = (0x00, 0x3F, 0x7F, 0xFF)  # zeros, numbers near 1, large numbers, NaN


def dirty(shapes: list[tuple], byte: int) -> None:
    """Fills memory that the allocator gives to results of these shapes and dtypes."""
    if ON_CUDA:
        torch = import_quietly("torch")
        sizes = [int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in shapes]
        kept = [torch.full((n,), byte, dtype=torch.uint8, device=NAME) for n in sizes * 4]
    else:
        kept = [np.empty(shape, dtype) for shape, dtype in shapes * 4]
        for x in kept:
            x.view(np.uint8)[...] = byte
    del kept


def op_of(case, library=sparse_mla):
    """The operator of a case. A paged batch is a ragged one, too."""
    kinds = {Paged: "paged_attention", Varlen: "varlen_attention", Dense: "mla_attention"}
    return getattr(library, kinds[type(case)])


def attend(case, **more) -> tuple:
    return op_of(case)(*case.arguments(), **case.options, **more)


def shapes_of(case) -> list[tuple]:
    """Those of out and lse, and their dtypes."""
    rows = case.tokens + case.padding, case.heads
    is_varlen = isinstance(case, Varlen)
    dtype = F16 if is_varlen and case.q_type == "fp16" else ref.BF16
    return [((*rows, case.dims[1] if is_varlen else 512), dtype), (rows, np.dtype(np.float32))]


VARLEN = {
    "usual": Varlen([3, 20], [9, 40], padding=5, mask=CAUSAL),
    "one token of padding": Varlen([1], [1], padding=1),
    "fp16, a sink": Varlen([3, 20], [9, 40], padding=7, q_type="fp16", kv_type="fp16", sink=True),
    "e4m3 with scales": Varlen(
        [2, 9], [30, 9], padding=3, q_type="e4m3", kv_type="e4m3", descales="rows"
    ),
    "64 values, a window": Varlen([4], [30], dims=(64, 64), padding=9, mask=Mask(window=(3, 0))),
    "576 and 512 values": Varlen([4], [30], heads=2, kv_heads=1, dims=(576, 512), padding=4),
    "a softcap": Varlen([4, 0, 6], [30, 5, 0], padding=4, softcap=3.0),
    "more padding than a tile": Varlen([5, 130], [5, 200], padding=300, heads=2, kv_heads=2),
    "128 and 128 values": Varlen([60], [70], dims=(128, 128), padding=40, mask=CAUSAL),
    "no queries": Varlen([0, 0], [5, 9], padding=6),
    "no keys": Varlen([3], [0], padding=6),
    "no requests": Varlen([], [], padding=6),
    "many heads": Varlen([3], [9], heads=128, kv_heads=128, padding=2),
}
PAGED = {
    "usual": Paged([3, 20], [9, 40], padding=5, mask=CAUSAL),
    "one token of padding": Paged([1], [1], padding=1),
    "e4m3 with scales": Paged(
        [2, 9], [30, 9], padding=3, q_type="e4m3", kv_type="e4m3", descales="rows"
    ),
    "fp16, slots": Paged(
        [3, 20], [9, 40], padding=7, q_type="fp16", kv_type="fp16", has_slots=True
    ),
    "qv": Paged([4], [30], heads=16, kv_heads=1, dims=(64, 512), has_qv=True, padding=9),
    "padding in front": Paged([4, 2], [30, 0], dims=(64, 64), leftpad=[3, 5], padding=4),
    "more padding than a tile": Paged([5, 130], [5, 200], padding=300, heads=2, kv_heads=2),
    "no queries": Paged([0, 0], [5, 9], padding=6),
    "no keys": Paged([3], [0], padding=6),
    "no requests": Paged([], [], padding=6),
    "hidden keys": Paged([3, 2], [90, 40], dims=(64, 64), padding=5, holes=0.5),
    "a share": Paged([3, 2], [90, 40], padding=5, mask=Mask(causal=True, cp=(1, 2, 1))),
    "without cu_seqlens_q": Paged([1, 1, 1], [90, 0, 40], is_decode=True),
}
DENSE = {
    "usual": Dense([3, 20], [9, 40], padding=5, mask=CAUSAL),
    "one token of padding": Dense([1], [1], padding=1),
    "fp8_ds_mla": Dense([3, 20], [9, 40], fmt="fp8", padding=5, mask=CAUSAL),
    "fp8_v4, a sink": Dense([3, 2], [9, 40], fmt="v4", padding=5, sink=True),
    "splits": Dense([3, 2], [900, 40], padding=5, num_splits=3),
    "fp8 and splits": Dense([1, 1], [900, 400], fmt="fp8", padding=5, num_splits=4),
    "slots, a window": Dense([4], [30], padding=9, has_slots=True, mask=Mask(window=(3, 0))),
    "a softcap, 33 heads": Dense([4, 0, 6], [30, 5, 0], heads=33, padding=4, softcap=3.0),
    "more padding than tokens": Dense([5, 13], [5, 200], padding=300, heads=2),
    "pages of 64, 64 heads": Dense([2, 1], [300, 70], heads=64, block_size=64, padding=3),
    "128 heads": Dense([1, 1], [300, 70], heads=128, block_size=64, padding=70, mask=CAUSAL),
    "no queries": Dense([0, 0], [5, 9], padding=6),
    "no keys": Dense([3], [0], padding=6),
    "no requests": Dense([], [], padding=6),
    "a share": Dense([3, 2], [90, 40], padding=5, mask=Mask(causal=True, cp=(1, 2, 1))),
}
TABLES = {"varlen": VARLEN, "paged": PAGED, "dense": DENSE}
CASES = [(kind, name) for kind, table in TABLES.items() for name in table]


def case_of(kind: str, name: str):
    return TABLES[kind][name]


def assert_filled(case, got: tuple, empty_lse=-np.inf) -> None:
    out, lse = (np.asarray(x) for x in got)
    assert len(out) == len(lse) == case.tokens + case.padding
    assert not out[case.tokens :].view(np.uint8).any()
    assert (lse[case.tokens :] == empty_lse).all()


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_results_that_a_call_makes(kind, name):
    """Rows of requests have the bits that they have in the caller's results, others are empty."""
    case = case_of(kind, name)
    want = case.run(op_of(case))
    for byte in BYTES:
        dirty(shapes_of(case), byte)
        got = attend(case)
        assert_filled(case, got)
        for x, which in zip(got, ("out", "lse"), strict=True):
            assert_same_bits(np.asarray(x)[: case.tokens], want[which], which)


@pytest.mark.parametrize("given", ["out", "lse"])
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_one_result_is_the_caller_s(kind, name, given):
    """Its rows of no request stay, and those of the other are empty."""
    case = case_of(kind, name)
    shapes = shapes_of(case)
    mine = Guarded(*shapes[given == "lse"])
    for byte in BYTES[2:]:
        dirty(shapes, byte)
        got = dict(zip(("out", "lse"), attend(case, **{given: mine.array}), strict=True))
        assert got[given] is mine.array
        left = np.ascontiguousarray(mine.check(written=False)[case.tokens :])
        assert (left.view(np.uint8) == mine.poison).all(), f"{given}: rows were written"
        other = np.asarray(got["lse" if given == "out" else "out"])[case.tokens :]
        assert (other == (-np.inf if given == "out" else 0)).all()


@pytest.mark.skipif(ON_CUDA, reason="this framework's memory is the host's")
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_results_of_an_allocator_that_never_clears(kind, name):
    """The same with a framework that fills results with NaN before it gives them."""
    case = case_of(kind, name)

    def put(x):
        if isinstance(x, tuple):
            return tuple(map(put, x))
        return Exchanged(x) if isinstance(x, np.ndarray) else x

    op = op_of(case, package)
    got = op(*map(put, case.arguments()), **{n: put(x) for n, x in case.options.items()})
    assert_filled(case, tuple(x.array for x in got))


# --- other doors ---------------------------------------------------------------------------------


def tensors(torch, *arrays):
    return [torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).to(NAME) for x in arrays]


def ragged(torch) -> tuple:
    """A batch of 2 requests and 5 more rows, in PyTorch: q, k, v, starts."""
    case = Varlen([3, 20], [3, 20], padding=5)
    q, k, v, starts, _ = case.arguments()
    k, v = (np.concatenate([x, x[:5]]) for x in (k, v))
    return (*tensors(torch, q, k[: len(q)], v[: len(q)]), torch.from_numpy(starts).to(NAME))


@pytest.mark.torch
@pytest.mark.parametrize("given", ["", "out", "lse"])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_pytorch_s_operators(torch, given, is_compiled):
    from sparse_mla.integrations import torch as smla

    q, k, v, starts = ragged(torch)
    mine = {
        "out": torch.full((len(q), 4, 128), 7, dtype=torch.bfloat16, device=NAME),
        "lse": torch.full((len(q), 4), 7, dtype=torch.float32, device=NAME),
    }

    def call(q, k, v, starts, **results):
        return smla.varlen_attention(q, k, v, starts, starts, softmax_scale=0.1, **results)

    if is_compiled:
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    for byte in BYTES:
        kept = [torch.full_like(x.view(torch.uint8), byte) for x in mine.values() for _ in range(4)]
        del kept
        out, lse = call(q, k, v, starts, **({given: mine[given]} if given else {}))
        assert (out[23:].float() == (7 if given == "out" else 0)).all()
        assert (lse[23:] == (7 if given == "lse" else -np.inf)).all()
        assert out[:23].isfinite().all()


@pytest.mark.jax
@pytest.mark.skipif(ON_CUDA, reason="test_gpu_jax_ffi.py has the GPU's")
def test_jax_s_calls(jax):
    from sparse_mla.integrations import jax as smla

    def put(x):
        return jax.numpy.asarray(x) if isinstance(x, np.ndarray) else x

    for table in TABLES.values():
        case = table["usual"]
        options = {name: put(x) for name, x in case.options.items()}
        attend = jax.jit(functools.partial(op_of(case, smla), **options))
        for byte in BYTES:
            dirty(shapes_of(case), byte)
            assert_filled(case, tuple(map(np.asarray, attend(*map(put, case.arguments())))))


@pytest.mark.skipif(ON_CUDA, reason="the drop-in calls the same operators there")
def test_the_drop_in_s_varlen_functions():
    from sparse_mla import flash_mla

    case = Varlen([3, 20], [3, 20], padding=5)
    q, k, v, starts, _ = case.arguments()
    for byte in BYTES:
        dirty(shapes_of(case), byte)
        got = flash_mla.flash_attn_varlen_func(q, k, v, starts, starts, 20, 20)
        assert_filled(case, got)
