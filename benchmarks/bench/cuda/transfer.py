"""Copies of rows between caches of a CUDA device, and from and to pinned host memory, where a copy
of as many bytes by the driver takes the same way."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

import sparse_mla
from bench.common import transfer
from bench.common.moves import Move
from bench.cuda.timing import DEVICE, Array, torch
from sparse_mla._rows import FP8_ROW_BYTES

NUM_ROWS = 1 << 18
NUM_HOST_ROWS = 1 << 14
PAGE = 64


def move_transfers() -> Iterator[Move]:
    def put(x: np.ndarray) -> Array:
        return torch.from_numpy(x).to(DEVICE)

    yield from transfer.make_moves(NUM_ROWS, put, lambda x: x.cpu().numpy())
    yield from move_host_rows()


def move_host_rows() -> Iterator[Move]:
    shape = (NUM_HOST_ROWS // PAGE, PAGE, FP8_ROW_BYTES)
    host = torch.randint(256, shape, dtype=torch.uint8).pin_memory()
    cache = torch.randint(256, shape, dtype=torch.uint8, device=DEVICE)
    host_slots = torch.arange(NUM_HOST_ROWS, device=DEVICE)
    pages = torch.randperm(NUM_HOST_ROWS // PAGE, device=DEVICE) * PAGE
    slots = (pages[:, None] + torch.arange(PAGE, device=DEVICE)).flatten()
    for name, src, dst, src_slots, dst_slots in (
        ("pinned host memory → device", host, cache, host_slots, slots),
        ("device → pinned host memory", cache, host, slots, host_slots),
    ):
        other = torch.empty_like(dst, pin_memory=dst is host)
        given = (src, dst, src_slots, dst_slots)

        def call(given: tuple[Array, ...] = given) -> object:
            return sparse_mla.transfer_kv_cache(*given)

        def is_right(given: tuple[Array, ...] = given) -> bool:
            src, dst, src_slots, dst_slots = (x.cpu() for x in given)
            return torch.equal(src.flatten(0, 1)[src_slots], dst.flatten(0, 1)[dst_slots])

        def copy(src: Array = src, other: Array = other) -> object:
            return other.copy_(src, non_blocking=True)

        yield Move(f"transfer_kv_cache, {name}", call, 2 * host.nbytes, is_right, copy)
