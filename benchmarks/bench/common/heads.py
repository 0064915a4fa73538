"""The write of keys and values into their pages, for the tables of moved bytes: tokens of a GQA
model with 8 KV heads of 128 values, page by page in any order, and what NumPy says about some."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

import sparse_mla
from bench.common.moves import Move, rows_at, same_bytes
from sparse_mla._judge import BF16

HEADS, DIM, PAGE = 8, 128, 64
SCALE = 0.37
SAMPLED = slice(None, None, 61)


def make_moves(num_tokens: int, num_calls: int, a: Any) -> Iterator[Move]:
    """A move is so many calls of `num_tokens`, each of other tokens, which no cache of the
    processor holds any more."""
    put = a.put
    rng = np.random.default_rng(0)
    total = num_tokens * num_calls
    k, v = rng.standard_normal((2, total, HEADS, DIM), np.float32).astype(BF16)
    pages = rng.permutation(total // PAGE)
    slots = (pages[:, None] * PAGE + np.arange(PAGE)).reshape(-1)
    parts = [slice(i * num_tokens, (i + 1) * num_tokens) for i in range(num_calls)]
    calls = [(put(k[part]), put(v[part]), put(slots[part])) for part in parts]
    for name, dtype in (("bf16", BF16), ("e4m3", np.dtype(np.uint8))):
        shape = (total // PAGE, PAGE, HEADS, DIM)
        caches = [put(np.zeros(shape, dtype)) for _ in range(2)]
        scales = {"k_scale": SCALE, "v_scale": SCALE} if name == "e4m3" else {}

        def write(caches: list[Any] = caches, scales: dict[str, Any] = scales) -> None:
            for k, v, slots in calls:
                sparse_mla.reshape_and_cache(k, v, caches[0], caches[1], slots, **scales)

        def is_right(caches: list[Any] = caches, dtype: np.dtype = dtype) -> bool:
            flat = [cache.reshape(total // PAGE, PAGE, -1) for cache in caches]
            return all(
                same_bytes(rows_at(a, cache, slots[SAMPLED]), cached(rows[SAMPLED], dtype))
                for rows, cache in zip((k, v), flat, strict=True)
            )

        num_bytes = k.nbytes + v.nbytes + slots.nbytes + sum(cache.nbytes for cache in caches)
        yield Move(f"reshape_and_cache, T {num_tokens}, bf16 → {name}", write, num_bytes, is_right)


def cached(rows: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The bytes of rows of ordinary values in a cache."""
    if dtype != BF16:
        scaled = rows.astype(np.float32) / np.float32(SCALE)
        rows = scaled.astype(ml_dtypes.float8_e4m3fn)
    return rows
