"""Copies of rows from one cache to another, for the tables of moved bytes: pages of 64 rows go to
pages of 16 in any order, or single rows do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import sparse_mla
from bench.common.moves import Move
from sparse_mla._rows import FP8_ROW_BYTES, V4_DATA_BYTES, V4_ROW_BYTES

SRC_PAGE, DST_PAGE = 64, 16
SAMPLED = slice(None, None, 61)
FORMATS = {"fp8_ds_mla": (FP8_ROW_BYTES, FP8_ROW_BYTES), "fp8_v4": (V4_ROW_BYTES, V4_DATA_BYTES)}

Put = Callable[[np.ndarray], Any]


def make_moves(num_rows: int, put: Put, get: Callable[[Any], np.ndarray]) -> Iterator[Move]:
    """`put` moves an array to the device, and `get` moves its bytes back."""
    rng = np.random.default_rng(0)
    for name, (row_bytes, data_bytes) in FORMATS.items():
        shape = (num_rows // SRC_PAGE, SRC_PAGE, row_bytes)
        rows = rng.integers(0, 256, shape, np.uint8)
        src = put(rows)
        for order, run in ("pages", DST_PAGE), ("single rows", 1):
            slots = [draw_slots(rng, num_rows, run) for _ in range(2)]
            dst = put(np.zeros((num_rows // DST_PAGE, DST_PAGE, row_bytes), np.uint8))
            given = (src, dst, *map(put, slots))

            def call(given: tuple[Any, ...] = given) -> object:
                return sparse_mla.transfer_kv_cache(*given)

            def is_right(
                rows: np.ndarray = rows,
                dst: Any = dst,
                slots: list[np.ndarray] = slots,
                data_bytes: int = data_bytes,
            ) -> bool:
                want = split_rows(rows, data_bytes)[slots[0][SAMPLED]]
                got = split_rows(get(dst), data_bytes)[slots[1][SAMPLED]]
                return np.array_equal(got, want)

            num_bytes = 2 * rows.nbytes + sum(x.nbytes for x in slots)
            yield Move(f"transfer_kv_cache, {name}, {order}", call, num_bytes, is_right)


def draw_slots(rng: np.random.Generator, num_rows: int, run: int) -> np.ndarray:
    """All slots in any order, but for runs of so many neighbours."""
    first = rng.permutation(num_rows // run) * run
    return (first[:, None] + np.arange(run)).reshape(-1)


def split_rows(cache: np.ndarray, data_bytes: int) -> np.ndarray:
    """The rows of a cache [pages, page, row] in the order of their slots. In split pages the data
    of all rows comes before their scales."""
    pages, page, row_bytes = cache.shape
    flat = cache.reshape(pages, -1)
    data, scales = flat[:, : page * data_bytes], flat[:, page * data_bytes :]
    parts = data.reshape(-1, data_bytes), scales.reshape(pages * page, row_bytes - data_bytes)
    return np.concatenate(parts, axis=1)
