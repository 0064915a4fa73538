"""Norms and RoPE of DeepSeek V4 in NumPy: in fp64 from the formulas, and step by step in fp32 where
the bytes are promised. Shares nothing with csrc."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import reference as ref

HEAD, ROPE, TILE = 512, 64, 128
F32 = np.float32


# --- RoPE ----------------------------------------------------------------------------------------


def yarn_frequency(i: int, size: int, base: float, yarn: dict | None) -> float:
    """The frequency of pair i."""
    f = base ** (-2 * i / size)
    if yarn is None:
        return f

    def turns(beta: float) -> float:
        return size * math.log(yarn["orig_max_pos"] / (2 * math.pi * beta)) / (2 * math.log(base))

    low = max(math.floor(turns(yarn.get("beta_fast", 32))), 0)
    high = min(math.ceil(turns(yarn.get("beta_slow", 1))), size - 1)
    width = high - low if high != low else 0.001
    ramp = min(max((i - low) / width, 0), 1)
    return (f / yarn["factor"]) * ramp + f * (1 - ramp)


def turn_back(o, positions, cos_sin) -> np.ndarray:
    """o [T, H, 512] bf16 -> fp32, the last 64 values turned back; a NaN made by it is positive."""
    return turn(ref.to_f32(np.asarray(o)), positions, cos_sin, -1)


def turn(x, positions, cos_sin, sign=1) -> np.ndarray:
    """x [T, H, 512] fp32, turned by the angles of its positions, or by their negatives."""
    x = x.copy()
    angles = np.asarray(cos_sin)[np.asarray(positions)[: len(x)]][:, None]
    cos, sin = angles[..., : ROPE // 2], F32(sign) * angles[..., ROPE // 2 :]
    a, b = x[..., -ROPE::2].copy(), x[..., -ROPE + 1 :: 2].copy()
    with np.errstate(invalid="ignore", over="ignore"):
        turned = a * cos - b * sin, b * cos + a * sin  # NumPy rounds every product
    for first, values in enumerate(turned):
        assert values.dtype == F32
        x[..., HEAD - ROPE + first :: 2] = np.where(np.isnan(values), F32(np.nan), values)
    return x


def power_of_two_scale(amax: float, top: float, floor: float) -> Fraction:
    """The definition: the smallest power of two s with top * s >= max(amax, floor)."""
    wanted = max(Fraction(float(amax)), Fraction(float(F32(floor))))
    s = Fraction(1)
    while s * Fraction(top) >= wanted:
        s /= 2
    while s * Fraction(top) < wanted:
        s *= 2
    return s


def scales_of(x: np.ndarray, top=448.0, floor=1e-10) -> np.ndarray:
    """A scale per row of [rows, values], fp32."""
    with np.errstate(invalid="ignore"):
        magnitude = np.nan_to_num(np.abs(x), nan=0.0, posinf=np.finfo(F32).max)
    amax = magnitude.max(axis=1)
    known = {a: F32(float(power_of_two_scale(a, top, floor))) for a in np.unique(amax)}
    return np.array([known[a] for a in amax], F32).reshape(-1)


def quantize_tiles(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x [T, H, 512] fp32 -> codes [T, H, 512], scales [T, H, 4] fp32."""
    tiles = x.reshape(-1, TILE)
    scales = scales_of(tiles)
    codes = ref.e4m3_encode((tiles.astype(np.float64) / scales[:, None]).astype(F32))
    return codes.reshape(x.shape), scales.reshape(*x.shape[:2], HEAD // TILE)


def grouped(x: np.ndarray, groups: int) -> np.ndarray:
    """[T, H, n] -> [T, G, H / G * n]."""
    return x.reshape(len(x), groups, x.shape[1] // groups * x.shape[2])


def pack_scales(scales: np.ndarray) -> np.ndarray:
    """[..., 4 k] powers of two -> [..., k] int32 of four exponents, the first in the low byte."""
    exponents = (np.log2(scales.astype(np.float64)) + 127).astype(np.uint8)
    return np.ascontiguousarray(exponents).view("<i4")


def inverse(o, positions, cos_sin, groups: int) -> tuple[np.ndarray, np.ndarray]:
    """-> codes [T, G, ...] and fp32 scales [T, G, ...] of fused_inv_rope_fp8_quant."""
    codes, scales = quantize_tiles(turn_back(o, positions, cos_sin))
    return grouped(codes, groups), grouped(scales, groups)


# --- RMSNorm -------------------------------------------------------------------------------------


def rms_norm(x, weight, eps: float) -> tuple[np.ndarray, np.ndarray]:
    """-> (value, tolerance) in fp64: one rounding to bf16 (half a unit in its last place is up to
    2^-8 of the value), and 2 % of it for the fp32 steps."""
    wide = ref.to_f32(np.asarray(x)).astype(np.float64)
    w = ref.to_f32(np.asarray(weight)).astype(np.float64)
    y = wide / np.sqrt((wide * wide).mean(axis=1, keepdims=True) + eps) * w
    return y, 1.02 * 2.0**-8 * np.abs(y) + 2.0**-134


def rms_norm_bits(x, weight, eps: float) -> np.ndarray:
    """The promised bits: fp32, with the order of the sum that csrc/core/backend.h gives."""
    wide = ref.to_f32(np.asarray(x))
    w = ref.to_f32(np.asarray(weight))
    with np.errstate(all="ignore"):
        y = wide * norm_factors(wide, eps) * w
    assert y.dtype == F32
    return ref.bf16_encode(np.where(np.isnan(y), F32(np.nan), y))


def norm_factors(wide, eps: float) -> np.ndarray:
    """The factor of each row, [T, 1] fp32."""
    padded = np.zeros((len(wide), -(-wide.shape[1] // 256) * 256), F32)
    with np.errstate(all="ignore"):
        padded[:, : wide.shape[1]] = wide * wide
        sums = np.zeros((len(wide), 256), F32)
        for start in range(0, padded.shape[1], 256):
            sums = sums + padded[:, start : start + 256]
        while sums.shape[1] > 32:  # neighbours: 0 + 1, then 2 + 3 ...
            sums = sums[:, 0::2] + sums[:, 1::2]
        while sums.shape[1] > 1:  # halves
            half = sums.shape[1] // 2
            sums = sums[:, :half] + sums[:, half:]
        return F32(1) / np.sqrt(sums / F32(wide.shape[1]) + F32(eps))


# --- fused_qnorm_rope_kv_insert ------------------------------------------------------------------


def queries(q, positions, cos_sin, eps: float) -> np.ndarray:
    """q [T, H, 512] bf16 -> normalised and turned, fp32 by the promised steps; NaN is positive."""
    heads = ref.to_f32(np.asarray(q)).reshape(-1, HEAD)
    with np.errstate(all="ignore"):
        y = heads * norm_factors(heads, eps)
    y = np.where(np.isnan(y), F32(np.nan), y)
    return turn(y.reshape(q.shape), positions, cos_sin)


def exact_queries(q, positions, cos_sin, eps: float) -> tuple[np.ndarray, np.ndarray]:
    """-> (value, m) in fp64; m is the larger magnitude of a value's pair before RoPE."""
    x = ref.to_f32(np.asarray(q)).astype(np.float64)
    x = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)
    angles = np.asarray(cos_sin).astype(np.float64)[np.asarray(positions)[: len(x)]][:, None]
    cos, sin = angles[..., : ROPE // 2], angles[..., ROPE // 2 :]
    a, b = x[..., -ROPE::2], x[..., -ROPE + 1 :: 2]
    y, m = x.copy(), np.abs(x)
    y[..., -ROPE::2], y[..., -ROPE + 1 :: 2] = a * cos - b * sin, b * cos + a * sin
    m[..., -ROPE::2] = m[..., -ROPE + 1 :: 2] = np.maximum(np.abs(a), np.abs(b))
    return y, m


def key_bits(kv, positions, cos_sin) -> np.ndarray:
    """kv [T, 512] bf16 -> the bits of the turned keys. Values that do not turn keep theirs."""
    bits = ref.bf16_encode(turn(ref.to_f32(kv)[:, None], positions, cos_sin)[:, 0])
    bits[:, : HEAD - ROPE] = ref.bits16(np.ascontiguousarray(kv))[:, : HEAD - ROPE]
    return bits
