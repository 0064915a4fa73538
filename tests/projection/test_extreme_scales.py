"""Two scales of any size: results are those of fp64 wherever bf16 holds them, although a product of
scales, or a part of a sum, does not fit fp32 (csrc/cpu/projection, csrc/cuda/projection)."""

from __future__ import annotations

import device
import numpy as np
import pytest
import reference as ref
from helpers import assert_same_bits
from library import sparse_mla

F32 = np.float32
MOST_EXACT_TOKENS = 64  # up to so many CUDA multiplies e4m3 without FP8 tensor cores
GROUPS = {"tensor": (-1, -1), "block": (1, 128), "token_tensor": (1, -1), "token_channel": (1, -1)}


def assert_close(got, value, magnitude) -> None:
    """The bounds of fp8_linear. A CPU may take a result below 2^-126 as 0."""
    coarse = device.ON_CUDA and len(value) > MOST_EXACT_TOKENS
    tolerance = 2.0**-8 * np.abs(value) + 2.0 ** (-8 if coarse else -16) * magnitude + 2.0**-126
    assert np.isfinite(value).all()
    fits = np.abs(value) <= 3.3e38
    got = ref.to_f32(np.asarray(got)).astype(np.float64)
    assert fits.any()
    assert np.isfinite(got[fits]).all()
    assert ref.worst_ratio(got[fits], value[fits], tolerance[fits]) <= 1
    larger = np.abs(value) > 3.5e38
    assert np.isinf(got[larger]).all()


def scale_shape(scheme, out, k):
    return {"block": (-(-out // 128), k // 128), "token_channel": (out,)}.get(scheme, (1,))


def run_linear(scheme, x, weight, descale):
    got = sparse_mla.fp8_linear(x, weight, descale, input_group=GROUPS[scheme])
    codes, scale = ref.scaled_quantize(x, GROUPS[scheme])
    wide = descale if scheme == "block" else descale.reshape(-1, 1)
    return (got, *ref.fp8_linear(codes, scale, weight, wide))


# T, out, in: on CUDA the kernels of few, of some and of many tokens, and of wide weights.
SIZES = [(1, 40, 256), (5, 130, 384), (40, 129, 256), (70, 130, 256), (3, 36000, 256)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", GROUPS)
def test_zero_weights(scheme, size):
    """0 times scales whose product overflows is 0, and no other row becomes NaN."""
    T, out, k = size
    x = ref.to_bf16(np.random.default_rng(0).normal(0, 1, (T, k)).astype(F32))
    x[0] = 1e30
    descale = np.full(scale_shape(scheme, out, k), 1e12, F32)
    got, value, magnitude = run_linear(scheme, x, np.zeros((out, k), np.uint8), descale)
    assert (ref.to_f32(np.asarray(got)) == 0).all()
    assert_close(got, value, magnitude)


@pytest.mark.parametrize("weight_scale", [1.2e-38, 1e-30, 1e-12, 1e12, 1e25, 3e38])
@pytest.mark.parametrize("row", [1e-38, 1e-30, 1e30, 3e38])
@pytest.mark.parametrize("scheme", GROUPS)
def test_rows_and_weight_scales(scheme, row, weight_scale):
    """Weights are so small or large codes that some results fit and some do not."""
    rng = np.random.default_rng(1)
    for T, out, k in SIZES[:4]:
        x = (rng.uniform(0.25, 1, (T, k)) * rng.choice([-1, 1], (T, k))).astype(F32)
        x[:: 2 if T > 1 else 1] *= row
        codes = rng.integers(0, 0x7F, (out, k)).astype(np.uint8)
        codes[: out // 2, :-1] = 0
        codes[: out // 4] = 0
        descale = np.full(scale_shape(scheme, out, k), weight_scale, F32)
        args = ref.to_bf16(x), codes, descale
        if device.ON_CUDA and is_subnormal(scheme, *args):
            continue
        assert_close(*run_linear(scheme, *args))


def is_subnormal(scheme, x, weight, descale):
    """Whether a product of scales is, which keeps fewer bits on a GPU."""
    scale = ref.scaled_quantize(x, GROUPS[scheme])[1].astype(np.float64)
    return scale.min() * float(descale.min()) < 2.0**-126


@pytest.mark.parametrize("T", [3, 70])
def test_parts_that_cancel(T):
    """Two parts of a sum overflow fp32, and their sum is small."""
    x = np.full((T, 512), 1e38, F32)
    x[:, 256:] *= -1
    weight = np.full((70, 512), ref.e4m3_encode(F32(1.0)), np.uint8)
    weight[:, 100:256] = 0
    weight[:, 356:] = 0
    weight[3, 0] = ref.e4m3_encode(F32(1.125))
    for scheme in GROUPS:
        descale = np.ones(scale_shape(scheme, 70, 512), F32)
        got, value, _ = run_linear(scheme, ref.to_bf16(x), weight, descale)
        got = ref.to_f32(np.asarray(got))
        assert (got[:, :3] == 0).all()
        assert np.allclose(got[:, 3], value[:, 3], rtol=2.0**-8)


def test_ordinary_rows_keep_their_bits():
    """A row's result does not depend on its neighbours' scales."""
    rng = np.random.default_rng(2)
    x = ref.to_bf16(rng.normal(0, 1, (6, 384)).astype(F32))
    weight = ref.e4m3_encode(rng.normal(0, 1, (130, 384)).astype(F32))
    descale = np.full((130,), 0.5, F32)
    want = np.asarray(sparse_mla.fp8_linear(x, weight, descale, input_group=(1, -1)))
    x[2], x[4] = 3e38, 1e-38
    got = np.asarray(sparse_mla.fp8_linear(x, weight, descale, input_group=(1, -1)))
    assert_same_bits(got[[0, 1, 3, 5]], want[[0, 1, 3, 5]])


@pytest.mark.parametrize("exponents", [(-120, 100), (100, -120), (90, 45), (-60, -60), (-70, 120)])
@pytest.mark.parametrize("size", [(1, 1, 1, 128), (5, 2, 130, 384), (70, 1, 130, 256)])
def test_grouped_projection(size, exponents):
    """Scales of tiles that differ: each tile's product of scales is what counts, not each scale."""
    T, G, N, R = size
    rng = np.random.default_rng(3)
    o, weight = rng.integers(0, 0x7F, (T, G, R)), rng.integers(0, 0x7F, (G, N, R))
    o, weight = o.astype(np.uint8), weight.astype(np.uint8)
    if sum(exponents) > 100:
        weight[...] = 0
        weight[:, :, 5] = 1
        o[...] = np.minimum(o, 8)
    o_scale = np.full((T, G, R // 128), 2.0 ** exponents[0], F32)
    weight_scale = np.full((G, -(-N // 128), R // 128), 2.0 ** exponents[1], F32)
    o_scale[..., 1::2], weight_scale[..., 1::2] = 2.0 ** exponents[1], 2.0 ** exponents[0]
    args = o, o_scale, weight, weight_scale
    got = sparse_mla.grouped_output_projection(*args)
    assert_close(got, *ref.grouped_output_projection(*args))


def test_grouped_projection_of_unaligned_rows():
    """On CUDA the kernel for any strides."""
    rng = np.random.default_rng(4)
    o = rng.integers(0, 0x40, (3, 1, 259)).astype(np.uint8)[..., 1:257]
    weight = np.zeros((1, 40, 259), np.uint8)[..., 1:257]
    weight[0, :20, 3] = 1
    o_scale, weight_scale = np.full((3, 1, 2), 1e28, F32), np.full((1, 1, 2), 1e12, F32)
    args = o, o_scale, weight, weight_scale
    got = sparse_mla.grouped_output_projection(*args)
    assert_close(got, *ref.grouped_output_projection(*args))
