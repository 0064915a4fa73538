"""Rows of fp8_token: those of fp8_ds_mla with one scale, written by their name, read as those."""

from __future__ import annotations

import cases
import numpy as np
import pytest
import reference as ref
import row_formats
from helpers import assert_same_bits
from library import sparse_mla

NAMED = {"kv_cache_dtype": "fp8_token"}
EDGES = (0.0, -0.0, np.nan, np.inf, -np.inf, 448.0, 2.0**-133, ref.FLT_MIN, ref.FLT_MAX)


def keys(dtype: str, *, data: str) -> tuple[np.ndarray, np.ndarray]:
    """Latents and RoPE parts of 40 tokens, whose tiles differ in size by far."""
    rng = np.random.default_rng(len(data))
    if data == "patterns":
        kv_c = row_formats.random_patterns(rng, 40, 512)
        kv_c = ref.bf16_decode(kv_c)
    else:
        sizes = 10.0 ** rng.uniform(
            -30 if data == "tiny" else -3, -20 if data == "tiny" else 3, 160
        )
        kv_c = (rng.standard_t(2, (160, 128)) * sizes[:, None]).astype(np.float32).reshape(40, 512)
        kv_c[:9, 200] = EDGES
        kv_c[9] = 0
        kv_c[10] = np.nan
    k_pe = rng.normal(size=(40, 64)).astype(np.float32)
    with np.errstate(over="ignore"):
        to = ref.to_bf16 if dtype == "bfloat16" else lambda x: x.astype(dtype)
        return to(kv_c), to(k_pe)


def patterns(x: np.ndarray) -> np.ndarray:
    """The bf16 patterns that a write rounds its values to."""
    x = np.ascontiguousarray(x)
    return x.view(np.uint16) if x.dtype == ref.BF16 else ref.bf16_encode(x.astype(np.float32))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("data", ["normal", "tiny", "patterns"])
def test_written_bytes(data, dtype):
    kv_c, k_pe = keys(dtype, data=data)
    slots = np.random.default_rng(3).permutation(60)[:40].astype(np.int64)
    slots[5] = -1
    cache = np.full((4, 15, 656), 0x5A, np.uint8)
    want = cache.reshape(60, 656).copy()
    rows = ref.quantize_rows(patterns(kv_c), patterns(k_pe), has_one_scale=True)
    want[slots[slots >= 0]] = rows[slots >= 0]
    sparse_mla.concat_and_cache_mla(kv_c, k_pe, cache, slots, **NAMED)
    assert_same_bits(cache.reshape(60, 656), want)
    scales = cache.reshape(60, 656)[slots[slots >= 0], 512:528].view(np.float32)
    assert (scales == scales[:, :1]).all()


def test_a_token_of_one_size_is_a_row_of_fp8_ds_mla():
    """Where all tiles have one maximum, both formats have the same bytes."""
    kv_c, k_pe = cases.random_bf16(np.random.default_rng(0), 7, 512), np.zeros((7, 64), ref.BF16)
    kv_c[:, ::128] = 9
    caches = [np.zeros((7, 656), np.uint8) for _ in "ab"]
    for cache, name in zip(caches, ("fp8_ds_mla", "fp8_token"), strict=True):
        sparse_mla.concat_and_cache_mla(kv_c, k_pe, cache, np.arange(7), kv_cache_dtype=name)
    assert_same_bits(*caches)


def test_rows_are_read_as_those_of_fp8_ds_mla():
    """With scales that differ, too: the name changes nothing that is read."""
    rng = np.random.default_rng(1)
    cache = cases.make_rows(rng, 24, "fp8").reshape(3, 8, 656)
    table, lens = np.array([[2, 0, 1]], np.int32), np.array([21], np.int32)
    q = cases.random_bf16(rng, 1, 4, 576)

    def read(**name):
        out = np.zeros((21, 576), ref.BF16)
        sparse_mla.gather_kv_cache(cache, table, lens, np.zeros(1, np.int32), out=out, **name)
        wide = sparse_mla.dequantize_kv_cache(cache, **name)
        attended = sparse_mla.mla_attention(q, cache, table, lens, softmax_scale=0.1, **name)
        return out, wide, *attended

    for plain, named in zip(read(), read(kv_format="fp8_token"), strict=True):
        assert_same_bits(named, plain)


def test_who_does_not_take_the_name():
    rng = np.random.default_rng(2)
    cache = cases.make_rows(rng, 8, "fp8").reshape(1, 8, 656)
    q, indices = cases.random_bf16(rng, 1, 4, 576), np.zeros((1, 4), np.int32)
    with pytest.raises(ValueError, match=r"`kv_cache` must be of a format .*, got fp8_token"):
        sparse_mla.sparse_attention(q, cache, indices, softmax_scale=0.1, kv_format="fp8_token")
    given = np.zeros((1, 512), ref.BF16)
    with pytest.raises(ValueError, match=r"`k_cache` must be of a format .*, got fp8_token"):
        sparse_mla.quantize_and_insert_k_cache(
            given, cache, np.zeros(1, np.int64), kv_format="fp8_token"
        )
    with pytest.raises(ValueError, match="`kv_scale` must be 1 for format fp8_token"):
        sparse_mla.concat_and_cache_mla(
            given, given[:, :64], cache, np.zeros(1, np.int64), kv_scale=2.0, **NAMED
        )
