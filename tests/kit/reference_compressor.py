"""DeepSeek V4's compressor in NumPy: in fp64 from the formulas, and step by step in fp32, where the
bytes are promised (csrc/core/params_compressor.h). Shares nothing with csrc."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import reference as ref
from reference_norm import norm_factors

F32 = np.float32
ROPE = 64


def overlap(ratio: int) -> int:
    """c: how many groups a compressed row pools."""
    return 2 if ratio == 4 else 1


def state_rows(kv, score, ape, positions) -> np.ndarray:
    """[T, 2 c D] fp32."""
    kv, score = ref.to_f32(np.asarray(kv)), ref.to_f32(np.asarray(score))
    with np.errstate(invalid="ignore"):
        sums = score + ape[np.asarray(positions, np.int64) % len(ape)]
    assert sums.dtype == F32
    return np.concatenate([kv, np.where(np.isnan(sums), F32(np.nan), sums)], 1)


def slot_of(table_row, position: int, block_size: int) -> int:
    """slot(table, pos, bs) of the contract."""
    block = position // block_size
    if position < 0 or block >= len(table_row) or table_row[block] < 0:
        return -1
    return int(table_row[block]) * block_size + position % block_size


@dataclass
class Group:
    """The states of a group: values and scores [c r, D] fp32; scores of absent ones are -inf."""

    values: np.ndarray
    scores: np.ndarray
    first: int  # the position that RoPE turns the row to


def find_group(rows, table_row, block_size: int, position: int, ratio: int, dim: int) -> Group:
    """`rows`: the state as [slots, 2 c D]."""
    c = overlap(ratio)
    values = np.zeros((c * ratio, dim), F32)
    scores = np.full((c * ratio, dim), -np.inf, F32)
    for j in range(c * ratio):
        slot = slot_of(table_row, position - c * ratio + 1 + j, block_size)
        if slot >= 0:
            start = 0 if j < (c - 1) * ratio else (c - 1) * dim
            values[j] = rows[slot, start : start + dim]
            scores[j] = rows[slot, c * dim + start : c * dim + start + dim]
    return Group(values, scores, position // ratio * ratio)


# --- as promised, in fp32 ------------------------------------------------------------------------


def _hex(text: str) -> np.float32:
    return F32(float.fromhex(text))


TERMS = [
    _hex(x)
    for x in (
        *("0x1.41fbbcp-13", "0x1.5f3e54p-10", "0x1.3b2d4cp-7", "0x1.c6aee8p-5"),
        *("0x1.ebfbdcp-3", "0x1.62e430p-1", "0x1p0"),
    )
]
LOG2_E = _hex("0x1.715476p0")


def exp(x: np.ndarray) -> np.ndarray:
    """e^x for x <= 0, each operation rounded to fp32."""
    with np.errstate(all="ignore"):
        x = x * LOG2_E
        n = np.rint(x)
        f = x - n
        p = np.full_like(x, TERMS[0])
        for term in TERMS[1:]:
            p = p * f + term
        power = np.ldexp(
            F32(1), np.where(np.isfinite(n), np.clip(n, -126, 127), 0).astype(np.int32)
        )
        assert p.dtype == power.dtype == F32
        return np.where(x < -126, F32(0), p * power)


def base(largest: np.ndarray) -> np.ndarray:
    return np.where(largest > -np.inf, largest, F32(0))


def larger(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A NaN is never larger."""
    with np.errstate(invalid="ignore"):
        return np.where(b > a, b, a)


def pool(group: Group) -> np.ndarray:
    """[D] fp32."""
    count, dim = group.values.shape
    padded = -(-count // 8) * 8
    values = np.zeros((padded, dim), F32)
    scores = np.full((padded, dim), -np.inf, F32)
    values[:count], scores[:count] = group.values, group.scores
    values = np.where(scores == -np.inf, F32(0), values)
    with np.errstate(all="ignore"):
        largest = np.full((4, dim), -np.inf, F32)
        weights, totals = np.zeros((4, dim), F32), np.zeros((4, dim), F32)
        for i in range(0, padded, 8):
            pair = scores[i : i + 4], scores[i + 4 : i + 8]
            top = larger(larger(largest, pair[0]), pair[1])
            factor = exp(largest - base(top))
            weights, totals, largest = weights * factor, totals * factor, top
            for k in range(2):
                weight = exp(pair[k] - base(top))
                weights = weights + weight
                totals = totals + weight * values[i + 4 * k : i + 4 * k + 4]
        top = largest[0]
        for s in range(1, 4):
            top = larger(top, largest[s])
        factor = exp(largest - base(top))
        weights, totals = weights * factor, totals * factor
        weight = (weights[0] + weights[1]) + (weights[2] + weights[3])
        total = (totals[0] + totals[1]) + (totals[2] + totals[3])
        x = np.where(weight == 0, F32(0), total / weight)
    assert x.dtype == F32
    return x


def turned(x: np.ndarray, cos_sin: np.ndarray) -> np.ndarray:
    """The last 64 values of x [D] turned, in the precision of x and cos_sin."""
    x = x.copy()
    cos, sin = cos_sin[: ROPE // 2], cos_sin[ROPE // 2 :]
    a, b = x[-ROPE::2].copy(), x[-ROPE + 1 :: 2].copy()
    with np.errstate(all="ignore"):
        x[-ROPE::2], x[-ROPE + 1 :: 2] = a * cos - b * sin, b * cos + a * sin
    return x


def key_bits(group: Group, weight, cos_sin, eps: float) -> np.ndarray:
    """The bf16 patterns [D] of a compressed row."""
    x = pool(group)
    with np.errstate(all="ignore"):
        x = x * norm_factors(x[None], eps)[0] * ref.to_f32(np.asarray(weight))
    y = turned(np.where(np.isnan(x), F32(np.nan), x), np.asarray(cos_sin)[group.first])
    assert y.dtype == F32
    return ref.bf16_encode(np.where(np.isnan(y), F32(np.nan), y))


# --- from the formulas, in fp64 ------------------------------------------------------------------


def exact_key(group: Group, weight, cos_sin, eps: float) -> tuple[np.ndarray, float]:
    """-> (y [D], A) in fp64."""
    values, scores = group.values.astype(np.float64), group.scores.astype(np.float64)
    is_there = scores > -np.inf
    top = np.where(is_there.any(0), scores.max(0), 0)
    shares = np.where(is_there, np.exp(scores - top), 0)
    total = shares.sum(0)
    shares = shares / np.where(total == 0, 1, total)
    values = np.where(is_there, values, 0)
    x, size = (shares * values).sum(0), (shares * np.abs(values)).sum(0)
    w = ref.to_f32(np.asarray(weight)).astype(np.float64)
    factor = 1 / np.sqrt((x * x).mean() + eps)
    y = turned(x * factor * w, np.asarray(cos_sin)[group.first].astype(np.float64))
    return y, float((np.abs(w) * factor * size).max())


def compress(call: dict[str, Any], rows: np.ndarray) -> dict[int, Group]:
    """Slot of the cache -> the group whose row a call puts there. `rows`: the state [slots, 2 c D]
    once it has those of the step."""
    state, ratio, dim = call["state"], call["ratio"], len(call["norm_weight"])
    groups = {}
    for t, slot in enumerate(call["slot_mapping"]):
        p, kv_slot = int(call["positions"][t]), int(call["kv_slot_mapping"][t])
        if slot >= 0 and kv_slot >= 0 and (p + 1) % ratio == 0:
            table = call["block_table"][call["req_id_per_token"][t]]
            groups[kv_slot] = find_group(rows, table, state.shape[1], p, ratio, dim)
    return groups
