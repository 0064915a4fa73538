"""Logits that are subnormal numbers, beside values that make the CPU keep such numbers: what is
computed with them and what takes them for 0 must agree (csrc/cpu/attention/softmax_lanes.h)."""

import numpy as np
import pytest
import reference as ref
from library import sparse_mla

KEYS = 5


def exact(q, keys, scale):
    """(out, lse) of one query row per head in fp64."""
    logits = scale * (q @ keys.T)
    weights = np.exp(logits - logits.max(1, keepdims=True))
    lse = logits.max(1) + np.log(weights.sum(1))
    return weights / weights.sum(1, keepdims=True) @ keys, lse


def check(q, keys, scale, got, lse):
    out, want = exact(ref.to_f32(q)[0].astype(np.float64), keys, scale)
    out = out[:, :512]
    assert np.abs(np.asarray(lse)[0] - want).max() < 1e-6
    assert ref.worst_ratio(np.asarray(got)[0], out, 2.0**-7 * np.abs(out) + 2.0**-126) <= 1


@pytest.mark.parametrize("logit", [2e-39, 1e-38, 1e-40, 1.5e-38, 1e-37, -2e-39])
@pytest.mark.parametrize("kv_format", ["fp8_e4m3", "fp8_nope"])
def test_fp8_keys_with_a_huge_scale(logit, kv_format):
    """A scale in a row above 2^64 makes the CPU keep subnormal numbers; a kv_scale need not."""
    codes = ref.e4m3_encode(np.full((KEYS, 1, 512), 0.5, np.float32))
    options = {"kv_scale": 2.0**66}
    if kv_format == "fp8_nope":
        scales = np.full((KEYS, 1, 4), 2.0**66, np.float32).view(np.uint8)
        codes, options = np.concatenate([codes, scales], 2), {}
    q = np.zeros((1, 2, 512), np.float32)
    q[..., 0] = np.sign(logit) * 2.0**-94
    q = ref.to_bf16(q)
    scale = abs(logit) / 2.0**-94 / 0.5 / 2.0**66
    got, lse = sparse_mla.sparse_attention(
        q,
        codes,
        np.arange(KEYS, dtype=np.int32)[None],
        softmax_scale=scale,
        kv_format=kv_format,
        **options,
    )
    keys = np.full((KEYS, 512), 0.5 * 2.0**66)
    check(q, keys, scale, got, lse)


@pytest.mark.parametrize("logit", [2e-39, 1e-38, 1e-40, 1.5e-38, -2e-39])
@pytest.mark.parametrize("is_query", [True, False])
def test_bf16_keys(logit, is_query):
    """A value above 2^64, in a query or in a key."""
    q, keys = np.zeros((1, 2, 576), np.float32), np.zeros((KEYS, 576), np.float32)
    large, small = (q, keys) if is_query else (keys, q)
    large[..., 0], small[..., 0] = 2.0**70, np.sign(logit) * 2.0**-100
    scale = abs(logit) / 2.0**-30
    q, keys = ref.to_bf16(q), ref.to_bf16(keys)
    slots = np.arange(KEYS, dtype=np.int32)[None]
    got, lse = sparse_mla.sparse_attention(q, keys, slots, softmax_scale=scale)
    check(q, ref.to_f32(keys).astype(np.float64), scale, got, lse)
