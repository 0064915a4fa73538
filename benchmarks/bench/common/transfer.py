"""Copies of rows from one cache to another, for the tables of moved bytes: pages of 64 rows go to
pages of 16 in any order, or single rows do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import sparse_mla
from bench.common.arrays import NumPyArrays
from bench.common.composition import torch
from bench.common.moves import Move, rows_at
from sparse_mla._rows import FP8_ROW_BYTES, V4_DATA_BYTES, V4_ROW_BYTES

SRC_PAGE, DST_PAGE = 64, 16
HOST_ROWS = 1 << 14
SAMPLED = slice(None, None, 61)
FORMATS = {"fp8_ds_mla": (FP8_ROW_BYTES, FP8_ROW_BYTES), "fp8_v4": (V4_ROW_BYTES, V4_DATA_BYTES)}


def make_moves(num_rows: int, a: Any) -> Iterator[Move]:
    put, host = a.put, NumPyArrays()
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
                before, after = (x[SAMPLED] for x in slots)
                want = rows_at(host, rows, before, data_bytes)
                return np.array_equal(rows_at(a, dst, after, data_bytes), want)

            num_bytes = 2 * rows.nbytes + sum(x.nbytes for x in slots)
            yield Move(f"transfer_kv_cache, {name}, {order}", call, num_bytes, is_right)


def draw_slots(rng: np.random.Generator, num_rows: int, run: int) -> np.ndarray:
    """All slots in any order, but for runs of so many neighbours."""
    first = rng.permutation(num_rows // run) * run
    return (first[:, None] + np.arange(run)).reshape(-1)


def make_host_moves(a: Any) -> Iterator[Move]:
    """From and to pinned host memory, where a copy of as many bytes by the driver takes the same
    way."""
    device = a.device
    shape = (HOST_ROWS // SRC_PAGE, SRC_PAGE, FP8_ROW_BYTES)
    host = torch.randint(256, shape, dtype=torch.uint8).pin_memory()
    cache = torch.randint(256, shape, dtype=torch.uint8, device=device)
    host_slots = torch.arange(HOST_ROWS, device=device)
    pages = torch.randperm(HOST_ROWS // SRC_PAGE, device=device) * SRC_PAGE
    slots = (pages[:, None] + torch.arange(SRC_PAGE, device=device)).flatten()
    for name, src, dst, src_slots, dst_slots in (
        ("pinned host memory → device", host, cache, host_slots, slots),
        ("device → pinned host memory", cache, host, slots, host_slots),
    ):
        other = torch.empty_like(dst, pin_memory=dst is host)
        given = (src, dst, src_slots, dst_slots)

        def call(given: tuple[Any, ...] = given) -> object:
            return sparse_mla.transfer_kv_cache(*given)

        def is_right(given: tuple[Any, ...] = given) -> bool:
            src, dst, src_slots, dst_slots = (x.cpu() for x in given)
            return torch.equal(src.flatten(0, 1)[src_slots], dst.flatten(0, 1)[dst_slots])

        def copy(src: Any = src, other: Any = other) -> object:
            return other.copy_(src, non_blocking=True)

        yield Move(f"transfer_kv_cache, {name}", call, 2 * host.nbytes, is_right, copy)
