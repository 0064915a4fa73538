"""The drop-in for `flash_mla` without indices: dense decoding over a paged cache."""

from __future__ import annotations

import numpy as np
import pytest
import reference as ref
from dense_cases import Dense, Mask
from helpers import assert_same_bits, assert_within_bounds
from test_flash_mla import Arrays, arrays, writable_arrays  # noqa: F401 - fixtures

from sparse_mla import flash_mla


def make(seq_lens, s_q=2, heads=16, fmt="bf16", causal=True, **changes) -> Dense:
    mask = Mask(causal=causal)
    queries = [s_q] * len(seq_lens)
    return Dense(queries, seq_lens, heads, fmt, 64, mask=mask, is_uniform=True, **changes)


def decode(arrays: Arrays, case: Dense, **options) -> list[np.ndarray]:  # noqa: F811
    q, cache, table, lens = case.arguments()
    meta = flash_mla.get_mla_metadata()[0]
    common = {"causal": case.mask.causal, "attn_sink": case.attn_sink} | options
    return arrays.call(
        flash_mla.flash_mla_with_kvcache, q, cache[:, :, None], table, lens, 512, meta, **common
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("s_q", [1, 2, 4])
@pytest.mark.parametrize("heads", [1, 3, 63, 128])
def test_dense_decoding(arrays, heads, s_q, causal):  # noqa: F811
    """Also a request without keys, whose lse is +inf, and one with fewer keys than queries."""
    case = make([140, 0, 1, 64], s_q, heads, causal=causal, sink=heads == 3)
    out, lse = decode(arrays, case)
    assert out.shape == (4, s_q, heads, 512)
    assert lse.shape == (4, heads, s_q)
    got = {
        "out": np.asarray(out).reshape(-1, heads, 512),
        "lse": np.ascontiguousarray(np.swapaxes(lse, 1, 2)).reshape(-1, heads),
    }
    want = case.reference()
    empty = np.isneginf(want.lse)
    assert np.isposinf(got["lse"][empty]).all()
    assert empty.any()
    got["lse"] = np.where(empty, -np.inf, got["lse"])
    assert_within_bounds(want, got)


@pytest.mark.parametrize("fmt", ["fp8", "bf16_512"])
def test_other_caches(arrays, fmt):  # noqa: F811
    case = make([70, 3], fmt=fmt)
    out, lse = decode(arrays, case)
    got = {
        "out": np.asarray(out).reshape(-1, 16, 512),
        "lse": np.ascontiguousarray(np.swapaxes(lse, 1, 2)).reshape(-1, 16),
    }
    assert_within_bounds(case.reference(), got)


def test_batch_invariance(arrays):  # noqa: F811
    case = make([300, 9, 128])
    out, _ = decode(arrays, case, enable_batch_invariant=True)
    alone = make([300, 9, 128])
    alone.q, alone.table, alone.seq_lens = case.q[:1], case.table[:1], case.seq_lens[:1]
    alone.cache, alone.query_lens = case.cache, case.query_lens[:1]
    again, _ = decode(arrays, alone, enable_batch_invariant=True)
    assert_same_bits(np.asarray(again)[0], np.asarray(out)[0])


def test_queries_with_gaps_are_copied():
    numpy = Arrays("numpy")
    case = make([40, 9], s_q=3)
    want, _ = decode(numpy, case)
    larger = np.zeros((2, 5, 16, 576), ref.BF16)
    larger[:, :3] = case.q
    case.q = larger[:, :3]
    got, _ = decode(numpy, case)
    assert_same_bits(got, want)


def test_out_is_written(writable_arrays):  # noqa: F811
    case = make([40, 9])
    put, get = writable_arrays.put, writable_arrays.get
    q, cache, table, lens = map(put, case.arguments())
    out = put(np.zeros((2, 2, 16, 512), ref.BF16))
    meta = flash_mla.FlashMLASchedMeta()
    result, _ = flash_mla.flash_mla_with_kvcache(
        q, cache, table, lens, 512, meta, causal=True, out=out
    )
    assert result is out
    assert meta.have_initialized
    assert_same_bits(get(out), decode(writable_arrays, case)[0])
