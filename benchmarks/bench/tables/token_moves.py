"""Norms, RoPE and what is quantised with them, by token, as moves of bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np

import sparse_mla
from bench.common.moves import Move, Op, same_bytes, sizes_of
from bench.tables.cache_moves import (
    BLOCK_SIZE,
    INDEX_DATA,
    NOPE,
    ROWS,
    Arrays,
    make_cache,
    make_v4_rows,
    quantise,
)
from sparse_mla._judge import BF16
from sparse_mla._rows import KV_LORA_RANK, V4_DATA_BYTES, V4_ROW_BYTES


class Tokens:
    """Positions, and the slots that tokens are written to: each its own or, by `context`, the last
    position of a request and the first slot of a page."""

    def __init__(self, a: Arrays, count: int, context: int = 0, **options: Any) -> None:
        self.count = count
        self.table = a.put(sparse_mla.rope_table(context or count, **options))
        if context:
            self.positions = a.put(np.full(count, context - 1))
            self.slots = a.randperm(count) * BLOCK_SIZE
            self.num_pages = count
        else:
            self.positions = self.slots = a.put(np.arange(count))
            self.num_pages = count // BLOCK_SIZE + 1


def clear(arrays: Iterable[Any]) -> None:
    """Results that the operator has made, so that what is judged is the next call's."""
    for x in arrays:
        x[...] = 0


def is_rounded(found: np.ndarray, want: np.ndarray) -> bool:
    """Whether bf16 values are as near as a rounding, and a few of fp32, lets them be."""
    error = np.abs(found.astype(np.float64) - want)
    return bool((error <= 1.02 * 2.0**-8 * np.abs(want) + 1e-38).all())


def turned(x: np.ndarray, angles: np.ndarray, *, interleaved: bool = True) -> np.ndarray:
    """apply_rope of [T, H, R] by a row of the table per token."""
    cos, sin = np.split(angles[:, None], 2, axis=-1)
    wide, half = x.astype(np.float32), x.shape[-1] // 2
    a, b = (wide[..., ::2], wide[..., 1::2]) if interleaved else np.split(wide, 2, axis=-1)
    pairs = np.stack((a * cos - b * sin, b * cos + a * sin), -1 if interleaved else -2)
    return pairs.reshape(*x.shape[:2], 2 * half).astype(BF16)


def normed(x: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    norm: np.ndarray = wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)
    return norm


def norm(a: Arrays, count: int, q_size: int) -> Move:
    """q and kv are columns of one buffer, as a fused projection leaves them."""
    buffer, weight = a.randn(count, q_size + 512), a.randn(q_size)
    q, kv = buffer[:, :q_size], buffer[:, q_size:]
    weights = {"q_weight": weight, "kv_weight": weight[:512], "eps": 1e-6}
    outs = {"q_out": a.zeros(count, q_size), "kv_out": a.zeros(count, 512)}
    op = Op(a, "fused_q_kv_rmsnorm", {"q": q, "kv": kv}, weights, outs)

    def judge(at: np.ndarray, *found: np.ndarray) -> bool:
        wants = (normed(x[at]) * weight[: x.shape[1]].astype(np.float64) for x in (q, kv))
        return all(map(is_rounded, found, wants))

    return op.move(f"{op.name}, {q_size} + 512", 2 * buffer.nbytes, judge)


def turn(a: Arrays, t: Tokens, num_heads: int, name: str = "", interleaved: bool = True) -> Move:
    q, k = a.shared(t.count, num_heads, 64), a.shared(t.count, 64)
    outs = {"q_out": a.zeros(*q.shape), "k_out": a.zeros(*k.shape)}
    tokens = {"positions": t.positions, "q_pe": q, "k_pe": k}
    others = {"rope_table": t.table, "interleaved": interleaved}
    op = Op(a, "apply_rope", tokens, others, outs)

    def judge(at: np.ndarray, *found: np.ndarray) -> bool:
        wants = (
            turned(x[at], t.table[t.positions[at]], interleaved=interleaved)
            for x in (q, k[:, None])
        )
        return all(map(same_bytes, found, wants))

    kind = "neighbours" if interleaved else "halves"
    return op.move(f"{op.name}, {name}, {kind}", 2 * (q.nbytes + k.nbytes), judge)


def turn_and_write(a: Arrays, t: Tokens, num_heads: int, name: str, fmt: Any, slots: Any) -> Move:
    """Queries turned, keys turned and written."""
    q, k, kv_c = (a.shared(t.count, *size) for size in ((num_heads, 64), (64,), (KV_LORA_RANK,)))
    cache = make_cache(a, fmt, t.count // BLOCK_SIZE)
    tokens = {"positions": t.positions, "q_pe": q, "k_pe": k, "kv_c": kv_c}
    outs, others = {"q_out": a.zeros(*q.shape)}, {"rope_table": t.table}
    op = Op(a, "rope_and_cache_mla", tokens, others, outs, {"kv_cache": cache})
    op.slots = slots

    def judge(at: np.ndarray, found: np.ndarray, rows: np.ndarray) -> bool:
        angles = t.table[at]
        wants = turned(q[at], angles), turned(k[at, None], angles)[:, 0]
        return same_bytes(found, wants[0]) and same_bytes(rows, ROWS[fmt](kv_c[at], wants[1]))

    num_bytes = 2 * q.nbytes + k.nbytes + kv_c.nbytes + cache.nbytes
    return op.move(f"{op.name}, {name}, {fmt}", num_bytes, judge)


def turn_back(a: Arrays, t: Tokens, num_heads: int, kind: str = "", **options: Any) -> Move:
    tokens = {"o": a.shared(t.count, num_heads, 512), "positions": t.positions}
    others = {"rope_table": t.table, "groups": num_heads // 8, **options}
    made = sparse_mla.fused_inv_rope_fp8_quant(**tokens, **others)
    results = made if isinstance(made, tuple) else (made,)
    outs = dict(zip(("out", "out_scale"), results, strict=False))
    clear(results)
    op = Op(a, "fused_inv_rope_fp8_quant", tokens, others, outs)

    def judge(at: np.ndarray, found: np.ndarray, scale: np.ndarray) -> bool:
        """Judges the values that RoPE leaves alone: three of a head's four tiles, and a half."""
        tiles = tokens["o"][at].reshape(-1, 4, 128).astype(np.float32)
        by = scale.reshape(-1, 4, 1)
        amax = np.abs(tiles[:, :3]).max(2, keepdims=True)
        fits = (448 * by[:, :3] >= amax) & (224 * by[:, :3] < amax)
        if not fits.all():
            return False
        codes = (tiles / by).astype(ml_dtypes.float8_e4m3fn).reshape(-1, 512)[:, :NOPE]
        return same_bytes(found.reshape(-1, 512)[:, :NOPE], codes)

    num_bytes = sizes_of((tokens["o"], *results))
    return op.move(f"{op.name}, {kind}", num_bytes, judge)


def normalise_and_insert(a: Arrays, t: Tokens, num_heads: int, name: str = "") -> Move:
    """The queries and keys of a step on their way to attention."""
    q, kv = a.shared(t.count, num_heads, 512), a.shared(t.count, 512)
    cache = a.zeros(t.num_pages, BLOCK_SIZE, V4_ROW_BYTES, dtype="uint8")
    tokens = {"q": q, "kv": kv, "positions": t.positions}
    others, outs = {"rope_table": t.table, "eps": 1e-6}, {"q_out": a.zeros(*q.shape)}
    op = Op(a, "fused_qnorm_rope_kv_insert", tokens, others, outs, {"kv_cache": cache})
    op.slots, op.data_bytes = t.slots, V4_DATA_BYTES

    def judge(at: np.ndarray, found: np.ndarray, rows: np.ndarray) -> bool:
        """Judges the values that RoPE leaves alone: 448 of a head and of a key."""
        kept = np.delete(np.arange(V4_ROW_BYTES), np.s_[NOPE:V4_DATA_BYTES])
        is_written = same_bytes(rows[:, kept], make_v4_rows(kv[at])[:, kept])
        return is_written and is_rounded(found[..., :NOPE], normed(q[at])[..., :NOPE])

    num_bytes = 2 * q.nbytes + kv.nbytes + t.count * V4_ROW_BYTES
    return op.move(f"{op.name}, {name}", num_bytes, judge)


def quantise_queries(
    a: Arrays, t: Tokens, num_heads: int, name: str = "", fp4: bool = False
) -> Move:
    """The indexer's queries on their way to the logits."""
    q = a.shared(t.count, num_heads, INDEX_DATA)
    weights = a.randn(t.count, num_heads, dtype="float32")
    tokens = {"q": q, "weights": weights, "positions": t.positions}
    scales = {"softmax_scale": INDEX_DATA**-0.5, "head_scale": num_heads**-0.5}
    others = {"rope_table": t.table, **scales, "use_fp4": fp4}
    made = sparse_mla.fused_indexer_q_rope_quant(**tokens, **others)
    outs = dict(zip(("out", "out_weights", "out_scale"), made, strict=False))
    clear(made)
    op = Op(a, "fused_indexer_q_rope_quant", tokens, others, outs)

    def judge(at: np.ndarray, found: np.ndarray, found_weights: np.ndarray) -> bool:
        x = q[at].astype(np.float32)
        x[..., 64:] = turned(q[at][..., 64:], t.table[at])
        values, exponent = quantise(x.reshape(-1, 1, INDEX_DATA))
        scale = np.float32(INDEX_DATA**-0.5 * num_heads**-0.5)
        wanted = np.ldexp(weights[at] * scale, exponent.reshape(-1, num_heads))
        return same_bytes(found, values) and same_bytes(found_weights, wanted)

    return op.move(f"{op.name}, {name}", sizes_of((q, weights, *made)), judge)
