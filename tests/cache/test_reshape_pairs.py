"""Pairs of options of reshape_and_cache, byte for byte against the formula. Rows have any bits."""

from __future__ import annotations

import numpy as np
import reference as ref
from library import package, sparse_mla
from pairs import Spy, cover, run_table
from test_reshape import DTYPES, LAYOUTS, check_call, make_caches, random_bytes

PAGES, SIZE, HEADS = 4, 6, 3
SLOT_LISTS = {
    "some": [19, 0, -1, 7, 4, 5, -(2**31), 12],
    "none": [],
    "one": [PAGES * SIZE - 1],
    "more": [*range(9, 15)],
}
# Scales around the border below which a CPU keeps subnormal numbers, and at the ends of fp32.
SCALES = [
    *(1.0, 0.37, 2.0**-59, 2.0**-61, 2.0**-126, 2.0**101, 2.0**120),
    *(np.float32([0.37]), np.float32(2.0**-125).reshape(()), np.float32([0.37, 2.0**-126, 3.0])),
]
OPTIONS = {
    "layout": LAYOUTS,
    "dtype": [*DTYPES],
    "stored": ["same", "e4m3", "uint8"],
    "k_scale": SCALES,
    "v_scale": SCALES,
    "slots": [*SLOT_LISTS],
    "slot_dtype": [np.int64, np.int32],
    "more": [0, 3],  # rows behind those with slots
    "view": ["packed", "of one projection"],
}


def has_scale(stored, k_scale, v_scale) -> bool:
    return stored != "same" or all(np.isscalar(x) and x == 1 for x in (k_scale, v_scale))


def test_reshape_and_cache():
    spy = Spy(sparse_mla.reshape_and_cache, package.reshape_and_cache)

    def run(layout, dtype, stored, k_scale, v_scale, slots, slot_dtype, more, view):
        rng = np.random.default_rng([more, len(slots)])
        of = {"same": DTYPES[dtype], "e4m3": ref.E4M3, "uint8": np.uint8}[stored]
        at = np.array(SLOT_LISTS[slots], slot_dtype)
        joint = random_bytes(rng, (len(at) + more, HEADS, 48), DTYPES[dtype])
        k, v = joint[..., :24], joint[..., 29:45]
        if view == "packed":
            k, v = k.copy(), v.copy()
        memory, caches = make_caches(layout, PAGES, SIZE, HEADS, (24, 16), of, seed=more)
        check_call(spy, memory, caches, k, v, at, k_scale=k_scale, v_scale=v_scale)

    run_table(cover(OPTIONS, has_scale), run, spy)
