"""Pairs of options of the compressor's operators, each byte for byte."""

from __future__ import annotations

import numpy as np
import reference as ref
import row_formats as rows
from compressor_steps import F32, Case
from helpers import assert_same_bits
from library import package, sparse_mla
from pairs import Spy, cover, run_table

OPTIONS = {
    "row": [(name, how) for name in rows.FORMATS for how in rows.layouts_of(name)],
    "ratio": [1, 2, 4, 5, 16],
    "sbs": [1, 4, 7],
    "dtype": [np.dtype(F32), ref.BF16],
    "integers": [np.int32, np.int64],
    "weight": [np.dtype(F32), ref.BF16],
    "requests": [((0, 9),), ((0, 9), (3, 1), (7, 5)), ((17, 16), (0, 0), (15, 1))],
    "padding": [0, 3],
    "gap": [0, 8],
    "eps": [0.0, 1e-6, 1e-2],
    "fused": [False, True],
    "kv_scale": ["number", "array"],
    "named": [False, True],
}


def test_save_and_compress():
    """Both calls, and the one that does both. The whole memory of states and caches is compared."""
    save = Spy(sparse_mla.save_partial_states, package.save_partial_states)
    close = Spy(sparse_mla.compress_norm_rope_store, package.compress_norm_rope_store)

    def run(row, ratio, sbs, dtype, integers, weight, requests, padding, gap, eps, fused, kv_scale,
            named):  # fmt: skip
        case = Case(requests, ratio=ratio, fmt=row[0], layout=row[1], sbs=sbs, dtype=dtype,
                    integers=integers, weight_dtype=weight, padding=padding, gap=gap)  # fmt: skip
        case.options["eps"] = eps
        state = case.want_memory()
        pages = case.want_pages(state)
        options = dict(case.options)
        if "kv_scale" in options and kv_scale == "array":
            options["kv_scale"] = np.full((1,), options["kv_scale"], F32)
        if named:
            options["kv_format"] = row[0]
        a = case.arrays
        if fused:
            options |= case.step
        else:
            kv, score, ape = (case.step[name] for name in ("kv", "score", "ape"))
            got = save(kv, score, ape, a["positions"], a["state"], a["slot_mapping"])
            assert got is a["state"]
            assert_same_bits(case.memory, state, "state")
        assert close(*a.values(), **options) is case.pages.cache
        assert_same_bits(case.memory, state, "state")
        assert_same_bits(case.pages.memory, pages, "cache")

    run_table(cover(OPTIONS), run, save, close)
