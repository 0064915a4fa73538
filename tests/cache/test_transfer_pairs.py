"""Pairs of options of transfer_kv_cache, byte for byte."""

from __future__ import annotations

import numpy as np
from library import package, sparse_mla
from pairs import Spy, cover, run_table
from test_transfer import LAYOUTS, ROWS, check, draw_slots, make_cache

OPTIONS = {
    "fmt": [*ROWS],
    "src_layout": LAYOUTS,
    "dst_layout": LAYOUTS,
    "src_page": [1, 3, 16],
    "dst_page": [1, 3, 64],
    "block_size": ["left out", "given"],
    "src_dtype": [np.int64, np.int32],
    "dst_dtype": [np.int64, np.int32],
    "count": [0, 1, 40],
    "shift": [0, 16],
}


def has_rows(fmt, src_layout, dst_layout) -> bool:
    return ROWS[fmt].scales == 0 or "flat" not in (src_layout, dst_layout)


def has_one_size(src_layout, dst_layout, src_page, dst_page, block_size) -> bool:
    is_one = src_page == dst_page and "flat" not in (src_layout, dst_layout)
    return block_size == "left out" or is_one


def test_pairs():
    spy = Spy(sparse_mla.transfer_kv_cache, package.transfer_kv_cache)

    def run(fmt, src_layout, dst_layout, src_page, dst_page, block_size, **others):
        rng = np.random.default_rng([src_page, dst_page])
        row, count = ROWS[fmt], others["count"]
        src = make_cache(rng, row, src_layout, -(-48 // src_page), src_page, others["shift"])
        dst = make_cache(rng, row, dst_layout, -(-48 // dst_page), dst_page)
        dtypes = (others["src_dtype"], others["dst_dtype"])
        lists = draw_slots(rng, count, src[1], dst[1])
        slots = [x.astype(dtype) for x, dtype in zip(lists, dtypes, strict=True)]
        options = {"block_size": src_page} if block_size == "given" else {}
        check(row, src, dst, *slots, spy, **options)

    run_table(cover(OPTIONS, has_rows, has_one_size), run, spy)
