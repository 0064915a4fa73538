"""The fp64 reference that the demo and the benchmarks judge results by, and its error bounds.

The reference uses NumPy only, straight from the formulas: out = softmax(softmax_scale q kᵀ) v over
the selected rows of a cache, read from the cache's own bytes. The bounds are the accuracy promise
of the library. An error is reported as a fraction of its bound, so that 1.0 is the limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from sparse_mla._rows import (
    FP8_ROW_BYTES,
    KV_LORA_RANK,
    ROPE_BYTES,
    V4_DATA_BYTES,
    V4_ROW_BYTES,
    V4_SCALE_BYTES,
)

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
SCALE_TILE = 128
NUM_TILES = KV_LORA_RANK // SCALE_TILE

# Every e4m3 byte as fp32, by its definition: sign, 4 exponent bits (bias 7), 3 mantissa bits.
E4M3_VALUES = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)


def split_fp8_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """[n, 656] bytes -> e4m3 values [n, 4, 128] fp32, scales [n, 4, 1] fp32, RoPE [n, 64] bf16."""
    rows = np.ascontiguousarray(rows.view(np.uint8))
    values = E4M3_VALUES[rows[:, :KV_LORA_RANK]].reshape(len(rows), NUM_TILES, SCALE_TILE)
    scales = rows[:, KV_LORA_RANK:-ROPE_BYTES].copy().view(np.float32)[..., None]
    return values, scales, rows[:, -ROPE_BYTES:].copy().view(BF16)


def exact_rows(rows: np.ndarray) -> np.ndarray:
    """Cache rows of either format -> the keys they stand for [n, 576] fp64, no rounding."""
    if rows.shape[1] != FP8_ROW_BYTES:
        return rows.astype(np.float64)
    values, scales, rope = split_fp8_rows(rows)
    nope = values.astype(np.float64) * scales
    return np.concatenate([nope.reshape(-1, KV_LORA_RANK), rope.astype(np.float64)], axis=1)


def upconvert_rows(rows: np.ndarray) -> np.ndarray:
    """FP8 cache rows -> bf16 rows [n, 576], what gather_kv_cache must write, bit for bit."""
    values, scales, rope = split_fp8_rows(rows)
    nope = (values * scales).astype(BF16)
    return np.concatenate([nope.reshape(-1, KV_LORA_RANK), rope], axis=1)


def exact_v4_rows(cache: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """Rows of a cache of 512 bf16 or of "fp8_v4" -> the keys they stand for [n, 512] fp64."""
    num_pages, page_rows, row = cache.shape
    if row != V4_ROW_BYTES:
        return cache.reshape(-1, row)[slots].astype(np.float64)
    pages = cache.reshape(num_pages, -1)  # the data of all rows, then their scales
    page, number = (x[:, None] for x in np.divmod(slots, page_rows))
    data = pages[page, number * V4_DATA_BYTES + np.arange(V4_DATA_BYTES)]
    first_scale = page_rows * V4_DATA_BYTES + number * V4_SCALE_BYTES
    exponents = pages[page, first_scale + np.arange(V4_SCALE_BYTES - 1)].astype(np.int32) - 127
    codes, rope = np.split(data, [V4_DATA_BYTES - ROPE_BYTES], axis=1)
    values = E4M3_VALUES[codes].reshape(*exponents.shape, -1).astype(np.float64)
    nope = np.ldexp(values, exponents[..., None]).reshape(len(slots), -1)
    return np.concatenate([nope, rope.copy().view(BF16).astype(np.float64)], axis=1)


@dataclass
class Fractions:
    """The worst errors seen, as fractions of their bounds."""

    out: float = 0.0
    lse: float = 0.0
    rows: int = 0

    def add(self, other: Fractions) -> None:
        self.out = worse(self.out, other.out)
        self.lse = worse(self.lse, other.lse)
        self.rows += other.rows

    @property
    def within(self) -> bool:
        return self.out <= 1 and self.lse <= 1


def worse(a: float, b: float) -> float:
    """The larger error; NaN counts as infinite, because no bound admits it."""
    return max(np.inf if np.isnan(a) else a, np.inf if np.isnan(b) else b)


def judge_row(
    q: np.ndarray,
    keys: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    **allowed: Any,
) -> Fractions:
    """Judges one query token: out [H, 512] bf16 and lse [H] fp32. attend_row has the others."""
    if len(keys) == 0:
        empty = not out.astype(np.float64).any() and bool(np.isneginf(lse).all())
        return Fractions(out=0.0 if empty else np.inf, lse=0.0 if empty else np.inf, rows=1)
    exact = attend_row(q, keys, **allowed)
    return Fractions(
        out=float((np.abs(out.astype(np.float64) - exact.out) / exact.out_bound).max()),
        lse=float((np.abs(lse.astype(np.float64) - exact.lse) / exact.lse_bound).max()),
        rows=1,
    )


def judge_values(
    q: np.ndarray,
    keys: np.ndarray,
    w_uv: np.ndarray,
    values: np.ndarray,
    lse: np.ndarray | None = None,
    *,
    turn: np.ndarray | None = None,
    **allowed: Any,
) -> Fractions:
    """Judges what a layer makes of one query token: values [H, V] bf16, by W_UV [512, H, V].

    attend_row has the others. The layer rounds the attention's result to bf16, and what W_UV makes
    of it again. A layer of V4 turns the result before W_UV, by `turn` [512, 512], and rounds it.
    """
    exact = attend_row(q, keys, **allowed)
    out, out_bound = exact.out, exact.out_bound
    if turn is not None:
        out = out @ turn
        out_bound = out_bound @ np.abs(turn) + 2.0**-9 * np.abs(out)
    w_uv = w_uv.astype(np.float64)
    want = np.einsum("hl,lhv->hv", out, w_uv)
    magnitude = np.einsum("hl,lhv->hv", np.abs(out), np.abs(w_uv))
    bound = np.einsum("hl,lhv->hv", out_bound, np.abs(w_uv))
    bound += (2.0**-8 + KV_LORA_RANK * 2.0**-24) * magnitude + 1e-6
    error = np.abs(values.astype(np.float64) - want)
    judged = Fractions(out=float((error / bound).max()), rows=1)
    if lse is not None:
        lse_error = np.abs(lse.astype(np.float64) - exact.lse)
        judged.lse = float((lse_error / exact.lse_bound).max())
    return judged


def inverse_rope(angles: np.ndarray) -> np.ndarray:
    """The matrix [512, 512] that turns a row's last values back. `angles` is the table's row of a
    position: the cosines of pairs of neighbours, then their sines."""
    cos, sin = np.split(angles.astype(np.float64), 2)
    turn = np.eye(KV_LORA_RANK)
    first = np.arange(KV_LORA_RANK - len(angles), KV_LORA_RANK, 2)
    turn[first, first] = turn[first + 1, first + 1] = cos
    turn[first + 1, first], turn[first, first + 1] = sin, -sin
    return turn


@dataclass
class Exact:
    """The attention of one query token in fp64, and how far a result may be from it."""

    out: np.ndarray  # [H, 512], as is its bound
    out_bound: np.ndarray
    lse: np.ndarray  # [H], as is its bound
    lse_bound: np.ndarray


def attend_row(
    q: np.ndarray,
    keys: np.ndarray,
    *,
    softmax_scale: float,
    gathered: bool = False,
    units: int = 16,
    f16_scales: bool = False,
    sink: np.ndarray | None = None,
) -> Exact:
    """Attends from q [H, 576] bf16 to keys [n, 576] fp64 (the selected rows, n >= 1).

    `gathered`: the kernel read these keys rounded to bf16, so the bounds allow for that rounding.
    A GPU is allowed 32 `units` of 2^-24 in the logits, and `f16_scales` of FP8 rows: e4m3 times its
    scale is rounded to fp16. Keys of V4 have 512 values, and its heads have a `sink` [H], a logit
    without a value, which is not in lse.
    """
    q = q.astype(np.float64)
    values = keys[:, :KV_LORA_RANK]
    logits = softmax_scale * q @ keys.T
    peak = logits.max(axis=1)
    exact_lse = peak + np.log(np.exp(logits - peak[:, None]).sum(axis=1))
    p = np.exp(logits - exact_lse[:, None])
    if sink is not None:
        p /= 1 + np.exp(sink - exact_lse)[:, None]
    exact_out = p @ values

    magnitude = p @ np.abs(values)
    a = (softmax_scale * np.abs(q) @ np.abs(keys).T).max(axis=1)
    e = units * 2.0**-24 * a
    if f16_scales:
        tiles = (len(q), NUM_TILES, SCALE_TILE), (len(keys), NUM_TILES, SCALE_TILE)
        nope = q[:, :KV_LORA_RANK]
        by_tile = np.einsum("htd,ktd->hkt", nope.reshape(tiles[0]), values.reshape(tiles[1]))
        squares = np.sqrt(nope**2 @ (values**2).T)
        scaled = softmax_scale * (np.abs(by_tile).sum(axis=2) + 2 * squares)
        e += 2.0**-11 * scaled.max(axis=1)
    out_bound = 2 * 2.0**-9 * (magnitude + np.abs(exact_out)) + 2 * e[:, None] * magnitude + 1e-6
    lse_bound = e + 1e-6
    if gathered:
        nope = softmax_scale * np.abs(q[:, :KV_LORA_RANK]) @ np.abs(values).T
        e_gather = 2.0**-9 * nope.max(axis=1)
        lse_bound += e_gather
        out_bound += (2 * e_gather + 2.0**-9)[:, None] * magnitude
    return Exact(exact_out, out_bound, exact_lse, lse_bound)
