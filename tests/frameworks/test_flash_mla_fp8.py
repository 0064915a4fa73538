"""The drop-in for `flash_mla` with e4m3 queries and an e4m3 cache: dense decoding with a scale of
each, as SGLang's and vLLM's FlashMLA backends call it with an fp8 cache."""

from __future__ import annotations

import numpy as np
import pytest
import reference as ref
from dense_cases import Dense, Mask
from flash_mla_cases import DECODE, check_decode, zeros
from helpers import assert_error_text, assert_same_bits
from row_formats import E4M3_576

from sparse_mla import flash_mla

E4M3 = np.dtype(ref.E4M3)
Q_SCALE, K_SCALE = 0.3, 0.7


def make(seq_lens, s_q=2, heads=16, fmt=E4M3_576, causal=True, **changes) -> Dense:
    scales = {"q_scale": Q_SCALE, "kv_scale": K_SCALE} | changes
    return Dense(
        [s_q] * len(seq_lens), seq_lens, heads, fmt, 64, Mask(causal=causal), is_uniform=True,
        e4m3=True, **scales,
    )  # fmt: skip


def one(scale: float) -> np.ndarray:
    return np.array([scale], np.float32)


def decode(arrays, case: Dense, **options) -> list[np.ndarray]:
    """A call as vLLM's backend makes it, with the layer's scales."""
    q, cache, table, lens = case.arguments()
    scales = {"descale_q": one(case.q_scale), "descale_k": one(case.kv_scale)}
    return arrays.call(
        flash_mla.flash_mla_with_kvcache, q, cache[:, :, None].view(E4M3), table, lens, 512,
        flash_mla.get_mla_metadata()[0],
        **({"causal": case.mask.causal, "attn_sink": case.attn_sink} | scales | options),
    )  # fmt: skip


def check(case: Dense, got: list[np.ndarray]) -> None:
    assert got[0].dtype == ref.BF16
    check_decode(case, *got)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("s_q", [1, 2, 3, 4])
@pytest.mark.parametrize("heads", [1, 16, 24, 128])
def test_dense_fp8(arrays, heads, s_q, causal):
    """Also a request without keys, one with a single key, and one with fewer keys than queries."""
    case = make([140, 0, 1, 64], s_q, heads, causal=causal, sink=heads == 24)
    check(case, decode(arrays, case))


@pytest.mark.parametrize("fmt", ["fp8_e4m3", E4M3_576])
@pytest.mark.parametrize("scales", [(1.0, 1.0), (2.0**-20, 2.0**20), (3e-5, 1.7)])
def test_scales_and_sizes(arrays, fmt, scales):
    q_scale, kv_scale = scales
    case = make([70, 3], 1, fmt=fmt, q_scale=q_scale, kv_scale=kv_scale, key_std=kv_scale)
    case.scale = float(np.float32(case.cache.width**-0.5 / q_scale / kv_scale))
    check(case, decode(arrays, case, softmax_scale=case.scale))


def test_scales_that_are_left_out_are_1(arrays):
    case = make([70, 3], q_scale=1.0, kv_scale=1.0)
    got = decode(arrays, case, descale_q=None, descale_k=None, is_fp8_kvcache=True)
    check(case, got)
    for a, b in zip(got, decode(arrays, case), strict=True):
        assert_same_bits(np.ascontiguousarray(a), np.ascontiguousarray(b))


def test_bytes_and_scales_without_dimensions(arrays):
    """The same bytes as uint8, and a scale that a layer keeps as a number in memory."""
    case = make([70, 3])
    want = decode(arrays, case)
    q, cache, table, lens = case.arguments()
    got = arrays.call(
        flash_mla.flash_mla_with_kvcache, q.view(np.uint8), cache[:, :, None], table, lens, 512,
        None, None, None, True, descale_q=np.float32(Q_SCALE).reshape(()), descale_k=one(K_SCALE),
    )  # fmt: skip
    for a, b in zip(got, want, strict=True):
        assert_same_bits(np.ascontiguousarray(a), np.ascontiguousarray(b))


def test_out_is_written_in_bf16(writable_arrays):
    case = make([40, 9])
    put, get = writable_arrays.put, writable_arrays.get
    out = put(zeros(2, 2, 16, 512))
    q, cache, table, lens = map(put, case.arguments())
    result, _ = flash_mla.flash_mla_with_kvcache(
        q, cache[:, :, None], table, lens, 512, None, causal=True,
        descale_q=put(one(Q_SCALE)), descale_k=put(one(K_SCALE)), out=out,
    )  # fmt: skip
    assert result is out
    assert_same_bits(get(out), decode(writable_arrays, case)[0])


def test_bf16_queries_beside_an_e4m3_cache(arrays):
    """They have no scale, so the cache's is 1."""
    case = Dense([1, 1], [70, 3], 16, E4M3_576, 64, is_uniform=True, kv_scale=1.0)
    got = decode(arrays, case, causal=False, descale_q=None, descale_k=None)
    check(case, got)


REFUSED = {
    "descale_q alone": ({"descale_k": None}, ValueError, "descale_k"),
    "descale_k alone": ({"descale_q": None}, ValueError, "descale_q"),
    "two values": ({"descale_q": np.ones(2, np.float32)}, ValueError, "descale_q"),
    "one per head": ({"descale_k": np.ones((2, 16), np.float32)}, ValueError, "descale_k"),
    "no values": ({"descale_k": np.ones(0, np.float32)}, ValueError, "descale_k"),
    "fp64": ({"descale_q": np.ones(1)}, TypeError, "descale_q"),
    "bf16": ({"descale_k": zeros(1)}, TypeError, "descale_k"),
    "a number": ({"descale_k": 0.5}, TypeError, "descale_k"),
    "bf16 queries": ({"q": zeros(2, 2, 16, 576)}, ValueError, "descale_q"),
    "a bf16 cache": (
        {"q": zeros(2, 2, 16, 576), "k_cache": zeros(5, 64, 1, 576)}, ValueError, "descale_q",
    ),
    "a scale of a bf16 cache": (
        {"q": zeros(2, 2, 16, 576), "k_cache": zeros(5, 64, 1, 576), "descale_q": None},
        ValueError, "descale_k",
    ),
    "V3.2's cache": ({"k_cache": zeros(5, 64, 1, 656, dtype=np.uint8)}, ValueError, "descale_q"),
    "indices": ({"indices": zeros(2, 2, 64, dtype=np.int32)}, ValueError, "descale_q"),
    "no FP8": ({"is_fp8_kvcache": False}, ValueError, "is_fp8_kvcache"),
    "two KV heads": ({"causal": True, "k_cache": zeros(5, 64, 2, 576, dtype=np.uint8)}, None, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    changes, error, argument = REFUSED[name]
    q, cache, table, lens = make([40, 9]).arguments()
    out = np.full((2, 2, 16, 512), 7, ref.BF16)
    arguments = {
        "q": q, "k_cache": cache[:, :, None], "block_table": table, "cache_seqlens": lens,
        "head_dim_v": 512, "tile_scheduler_metadata": None, "out": out,
        "descale_q": one(Q_SCALE), "descale_k": one(K_SCALE),
    }  # fmt: skip
    with pytest.raises(error or ValueError) as caught:
        flash_mla.flash_mla_with_kvcache(**(arguments | changes))
    if argument:
        assert_error_text(caught.value, DECODE, [argument])
    else:
        assert_error_text(caught.value, "mla_attention", ["kv_cache"])
    assert (out.astype(np.float32) == 7).all()
