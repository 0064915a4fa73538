"""Pairs of options of paged_attention, each against fp64."""

from __future__ import annotations

import numpy as np
import reference as ref
from dense_cases import Mask
from helpers import assert_within_bounds
from library import package, sparse_mla
from paged_cases import LAYOUTS, Paged
from pairs import OUTPUTS, Spy, cover, run_table
from test_dense_pairs import BATCHES, BOUNDS, MASKS, bounds_of, give_results
from test_varlen_pairs import FarVarlen
from varlen_cases import DTYPES

PAGED = MASKS | {
    "batch": [*BATCHES],
    "heads": [(1, 1), (8, 8), (8, 2), (10, 1)],
    "dims": [(192, 128), (64, 64), (40, 24), (576, 512), (64, 512)],
    "q_type": [*DTYPES],
    "kv_type": [*DTYPES],
    "has_bytes": [False, True],
    "page_size": [1, 3, 16, 64],
    "layout": [*LAYOUTS],
    "is_spread": [False, True],
    "table": ["pages", "slots"],
    "has_qv": [False, True],
    "cp": [None, (0, 2, 4), (1, 3, 1)],
    "leftpad": [None, "some"],
    "starts": [False, True],
    "holes": [0.0, 0.3],
    "missing": [0, 1],
    "descales": ["", "number", "one", "rows", "column", "far"],
    "sink": [False, True],
    "softcap": [0.0, 0.5, 30.0],
    "num_splits": [0, 1, 3, 64],
    "max_q": BOUNDS,
    "max_k": BOUNDS,
    "scale": [0.4, 1.0],
    "workspace": [False, True],
    "wide_out": [False, True],
    "out": ["made", *OUTPUTS[1:3]],
    "lse": ["made", "packed", "gap"],
}
PAGED_RULES = (
    # Keys have the query's type, or e4m3; a query of e4m3 takes all.
    lambda q_type, kv_type: q_type in (kv_type, "e4m3") or kv_type == "e4m3",
    lambda wide_out, out: out != "made" or not wide_out,
    lambda dims, has_qv: not has_qv or sum(dims) <= 576,
    lambda cp, leftpad: cp is None or leftpad is None,
    lambda starts, batch: starts or batch == "decodes",
    # Those descales are the same for both parts of q . k.
    lambda descales, has_qv: descales != "far" or not has_qv,
)


class FarPaged(Paged, FarVarlen):
    """Descales whose product is beyond fp32, and a softmax_scale that brings logits back."""

    @property
    def softmax_scale(self) -> float:
        return FarVarlen.softmax_scale.fget(self)


def test_paged_attention():
    spy = Spy(sparse_mla.paged_attention, package.paged_attention)

    def run(batch, heads, dims, q_type, kv_type, has_bytes, page_size, layout, is_spread, table,
            has_qv, causal, window, chunk, cp, leftpad, starts, holes, missing, descales, sink,
            softcap, num_splits, max_q, max_k, scale, workspace, wide_out, out,
            lse):  # fmt: skip
        kind = FarPaged if descales == "far" else Paged
        case = kind(
            *BATCHES[batch], *heads, dims, q_type, kv_type, mask=Mask(causal, window, chunk, cp),
            sink=sink, softcap=softcap, is_spread=is_spread, num_splits=num_splits, std=scale,
            descales="rows" if descales == "far" else descales, page_size=page_size,
            layout=layout, has_slots=table == "slots", has_qv=has_qv, is_decode=not starts,
            leftpad=leftpad and [3, 0, 17, 64][: len(BATCHES[batch][0])], holes=holes,
            missing=missing, has_bytes=has_bytes,
        )  # fmt: skip
        options = case.options | bounds_of(max_q, max_k, *BATCHES[batch])
        shape = (case.tokens, heads[0])
        if workspace:  # as much as a GPU's parts take, or too little for any that it chooses
            rows = case.tokens * heads[0] * (num_splits if num_splits > 1 else 0)
            options["workspace"] = np.zeros(64 + 4 * rows * (dims[1] + 2), np.uint8)
        dtype = np.dtype(np.float16) if q_type == "fp16" else ref.BF16
        dtype = np.dtype(np.float32) if wide_out else dtype
        got = give_results(spy, case.arguments(), options, shape, dims[1], dtype, out, lse)
        assert_within_bounds(case.reference(), got)

    run_table(cover(PAGED, *PAGED_RULES), run, spy)
