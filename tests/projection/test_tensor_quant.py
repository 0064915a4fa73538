"""dynamic_per_tensor_quant: e4m3 codes and one scale (csrc/cpu/projection/quant.c)."""

import numpy as np
import pytest
import reference as ref
from helpers import assert_same_bits
from library import sparse_mla


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", [(0, 4), (1,), (3, 129), (2, 3, 5, 7), (1000, 64)])
def test_dynamic_per_tensor_quant(dtype, shape):
    value = np.random.default_rng(7).normal(0, 3, shape).astype(np.float32)
    x = ref.to_bf16(value) if dtype == "bfloat16" else value.astype(dtype)
    codes, scale = sparse_mla.dynamic_per_tensor_quant(x)
    want_codes, want_scale = ref.dynamic_per_tensor_quant(x)
    assert np.asarray(codes).dtype == ref.E4M3
    assert np.asarray(scale).dtype == np.float32
    assert np.asarray(scale).size == 1
    assert np.asarray(scale).reshape(())[()] == want_scale
    assert_same_bits(np.asarray(codes).view(np.uint8), want_codes)


@pytest.mark.parametrize("peak", [0.0, 1e-12, 1e-10, 448.0, 3e38])
def test_dynamic_per_tensor_quant_extremes(peak):
    x = np.linspace(-1, 1, 257).astype(np.float32) * np.float32(peak)
    codes, scale = sparse_mla.dynamic_per_tensor_quant(x)
    want_codes, want_scale = ref.dynamic_per_tensor_quant(x)
    assert np.asarray(scale).reshape(())[()] == want_scale
    assert_same_bits(np.asarray(codes).view(np.uint8), want_codes)


def test_dynamic_per_tensor_quant_strided_into_out():
    x = np.random.default_rng(8).normal(0, 3, (6, 40)).astype(np.float32)[::-2, 3:30]
    out = np.zeros(x.shape, np.uint8)
    codes, _ = sparse_mla.dynamic_per_tensor_quant(x, out=out)
    assert codes is out
    assert_same_bits(out, ref.dynamic_per_tensor_quant(x)[0])
