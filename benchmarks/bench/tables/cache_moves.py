"""Rows that are written to a cache and gathered again, as moves of bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

import sparse_mla
from bench.common.moves import Move, Op, same_bytes, sizes_of
from sparse_mla._judge import BF16, SCALE_TILE, exact_v4_rows, upconvert_rows
from sparse_mla._rows import (
    BF16_ROW_BYTES,
    KEY_DIM,
    KV_LORA_RANK,
    V4_DATA_BYTES,
    row_of,
)

Arrays = Any
BLOCK_SIZE = 64
RANDOM = 1  # a run of slots in a row; otherwise it is a page
INDEX_DATA = 128  # values of an indexer's key
NOPE = 448  # values of V4's rows that RoPE leaves alone

CONCAT = ("concat_and_cache_mla", {"kv_c": KV_LORA_RANK, "k_pe": KEY_DIM - KV_LORA_RANK})
INSERT = ("quantize_and_insert_k_cache", {"k": KV_LORA_RANK})
INDEX = ("indexer_k_quant_and_cache", {"k": INDEX_DATA})
# format -> its operator, and the bytes of a row that are not in the scales behind a page's rows
WRITES: dict[str, tuple[tuple[str, dict[str, int]], int]] = {
    "fp8_ds_mla": (CONCAT, 0),
    "bfloat16": (CONCAT, 0),
    "fp8_v4": (INSERT, V4_DATA_BYTES),
    "fp8_e4m3": (INSERT, 0),
    "fp4_v41": (INSERT, 0),
    "fp8_v41_split": (INSERT, KV_LORA_RANK),
    "fp4_v41_split": (INSERT, KV_LORA_RANK // 2),
    "fp8_index": (INDEX, INDEX_DATA),
}
# What a value may be off by, as parts of itself and of its row's largest.
BOUNDS = {"fp8_e4m3": (2.0**-4, 2.0**-10), "fp4_v41": (0.0, 0.25)}


def make_slots(a: Arrays, count: int, run: int = BLOCK_SIZE) -> Any:
    """A prefill fills pages, which lie anywhere. Slots at random are the worst that can be sent: a
    row of 656 bytes shares its last sector of memory with one that is written much later."""
    first = a.randperm(count // run)[:, None] * run
    return (first + a.put(np.arange(run))).reshape(-1)


def make_cache(a: Arrays, fmt: Any, pages: int) -> Any:
    dtype = "bfloat16" if fmt == "bfloat16" else "uint8"
    return a.zeros(pages, BLOCK_SIZE, row_of(fmt), dtype=dtype)


def insert(a: Arrays, fmt: Any, count: int, run: int = BLOCK_SIZE, slots: Any = None) -> Op:
    """Rows to all slots of a cache or, by `slots`, to one page each."""
    (name, widths), data_bytes = WRITES[fmt]
    pages = count // BLOCK_SIZE if slots is None else count
    cache = make_cache(a, fmt, pages)
    values = {x: a.shared(count, width) for x, width in widths.items()}
    options = {} if name == CONCAT[0] else {"kv_format": fmt}
    slots = make_slots(a, count, run) if slots is None else slots
    given = {"kv_cache" if name == CONCAT[0] else "k_cache": cache}
    return Op(a, name, values, options, cache=given, slots=slots, data_bytes=data_bytes)


def inserted(a: Arrays, name: str, fmt: str, op: Op) -> Move:
    values, (cache,), slots = [*op.tokens.values()], op.cache.values(), op.slots
    num_bytes = sizes_of([*values, cache])
    num_bytes += slots.nbytes if a.is_cuda else 0  # the CPU's figures never had them

    def judge(at: np.ndarray, rows: np.ndarray) -> bool:
        given = [x[at] for x in values]
        if fmt not in BOUNDS:
            return same_bytes(rows, ROWS[fmt](*given))
        return is_near(fmt, given[0], widen(fmt, rows))

    return op.move(f"{op.name}, bf16 → {name}", num_bytes, judge)


def widen(fmt: Any, rows: np.ndarray) -> np.ndarray:
    """Rows -> bf16, by the CPU."""
    wide = sparse_mla.dequantize_kv_cache(rows[:, None], kv_format=fmt, dtype="bfloat16")
    return np.asarray(wide)[:, 0]


def is_near(fmt: str, values: np.ndarray, found: np.ndarray) -> bool:
    x, (of_value, of_row) = values.astype(np.float32), BOUNDS[fmt]
    bound = of_value * np.abs(x) + of_row * np.abs(x).max(1, keepdims=True)
    return bool((np.abs(found.astype(np.float32) - x) <= bound).all())


def gathered(a: Arrays, fmt: Any, op: Op, num_requests: int) -> Move:
    """The rows that `op` has written page by page, in the order of its tokens."""
    op.call()
    (cache,), slots = op.cache.values(), op.slots
    count = len(slots)
    length = count // num_requests
    table = a.put((a.get(slots)[::BLOCK_SIZE] // BLOCK_SIZE).astype(np.int32))
    table = table.reshape(num_requests, -1)
    lens = a.put(np.full(num_requests, length, np.int32))
    width = KEY_DIM if op.name == CONCAT[0] else next(iter(op.tokens.values())).shape[1]
    out = a.zeros(num_requests, length, width)
    if op.name == CONCAT[0]:
        name, starts = "gather_kv_cache", a.put(np.arange(num_requests, dtype=np.int32) * length)
        given = {"kv_cache": cache, "block_table": table, "seq_lens": lens}
        given |= {"workspace_starts": starts, "out": out.reshape(count, width)}
    else:
        name = "dequantize_and_gather_k_cache"
        given = {"out": out, "k_cache": cache, "seq_lens": lens, "gather_lens": None}
        given |= {"block_table": table, "block_size": BLOCK_SIZE, "offset": 0, "kv_format": fmt}

    def is_right() -> bool:
        at = a.sample(count)
        rows, found = op.rows(at), a.take(out.reshape(count, width), at)
        if a.is_cuda:
            return same_bytes(found, widen(fmt, rows))
        if fmt in BOUNDS:
            return is_near(fmt, next(iter(op.tokens.values()))[at], found)
        return same_bytes(found, WIDE[fmt](rows))

    call = partial(getattr(sparse_mla, name), **given)
    return Move(f"{name}, {fmt} → bf16", call, cache.nbytes + out.nbytes, is_right)


def dequantised(a: Arrays, count: int) -> Move:
    op = insert(a, "fp8_ds_mla", count)
    op.call()
    cache = op.cache["kv_cache"]

    def call() -> Any:
        return sparse_mla.dequantize_kv_cache(cache, dtype="bfloat16")

    def is_right() -> bool:
        at = a.sample(count)
        slots, wide = a.take(op.slots, at), call().reshape(-1, KEY_DIM)
        return same_bytes(a.take(wide, slots), widen("fp8_ds_mla", op.rows(at)))

    num_bytes = cache.nbytes + count * BF16_ROW_BYTES
    return Move("dequantize_kv_cache, fp8_ds_mla → bf16", call, num_bytes, is_right)


def as_bytes(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate([np.ascontiguousarray(x).view(np.uint8) for x in parts], axis=1)


def quantise(tiles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tiles [n, count, size] of ordinary values -> e4m3, and exponents [n, count] of scales."""
    tiles = tiles.astype(np.float32)
    mantissa, exponent = np.frexp(np.abs(tiles).max(axis=2))
    exponent -= 8 + (mantissa <= 0.875)  # 448 = 0.875 * 2**9
    return np.ldexp(tiles, -exponent[..., None]).astype(ml_dtypes.float8_e4m3fn), exponent


def make_fp8_rows(kv_c: np.ndarray, k_pe: np.ndarray) -> np.ndarray:
    tiles = kv_c.astype(np.float32).reshape(len(kv_c), -1, SCALE_TILE)
    scales = np.abs(tiles).max(axis=2, keepdims=True) / np.float32(448)
    values = (tiles / scales).astype(ml_dtypes.float8_e4m3fn).reshape(kv_c.shape)
    return as_bytes(values, scales[..., 0], k_pe)


def make_v4_rows(k: np.ndarray) -> np.ndarray:
    """Data and scales of keys of ordinary size."""
    values, exponent = quantise(k[:, :NOPE].reshape(len(k), 7, 64))
    scales = np.zeros((len(k), 8), np.uint8)
    scales[:, :7] = exponent + 127
    return as_bytes(values.reshape(len(k), NOPE), k[:, NOPE:], scales)


def make_index_rows(k: np.ndarray) -> np.ndarray:
    values, exponent = quantise(k[:, None])
    return as_bytes(values[:, 0], np.ldexp(np.float32(1), exponent))


# Rows as docs/formats.md describes them, and the values of rows.
ROWS: dict[str, Callable[..., np.ndarray]] = {
    "fp8_ds_mla": make_fp8_rows,
    "bfloat16": as_bytes,
    "fp8_v4": make_v4_rows,
    "fp8_index": make_index_rows,
}
WIDE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "fp8_ds_mla": upconvert_rows,
    "bfloat16": lambda rows: rows,
    "fp8_v4": lambda rows: exact_v4_rows(rows[:, None], np.arange(len(rows))).astype(BF16),
}
