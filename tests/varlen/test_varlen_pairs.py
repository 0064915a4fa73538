"""Pairs of options of varlen_attention, each against fp64."""

from __future__ import annotations

import numpy as np
import reference as ref
from dense_cases import Mask
from helpers import assert_within_bounds
from library import package, sparse_mla
from pairs import OUTPUTS, Spy, cover, run_table
from test_dense_pairs import BATCHES, BOUNDS, MASKS, bounds_of, give_results
from varlen_cases import DTYPES, Varlen

VARLEN = MASKS | {
    "batch": [*BATCHES],
    "heads": [(1, 1), (4, 4), (6, 2), (10, 1)],
    "dims": [(192, 128), (64, 64), (40, 24), (576, 512), (16, 8)],
    "q_type": [*DTYPES],
    "kv_type": [*DTYPES],
    "pairs": ["", "q", "k", "qk"],
    "is_spread": [False, True],
    "descales": ["", "number", "one", "rows", "column", "far"],
    "sink": [False, True],
    "softcap": [0.0, 0.5, 30.0],
    "num_splits": [0, 1, 64],
    "max_q": BOUNDS,
    "max_k": BOUNDS,
    "scale": [0.4, 1.0],
    "workspace": [False, True],
    "wide_out": [False, True],
    "out": ["made", *OUTPUTS[1:3]],
    "lse": ["made", "packed", "gap"],
}
VARLEN_RULES = (
    # Keys have the query's type, or e4m3; a query of e4m3 takes all.
    lambda q_type, kv_type: q_type in (kv_type, "e4m3") or kv_type == "e4m3",
    lambda wide_out, out: out != "made" or not wide_out,
)


class FarVarlen(Varlen):
    """Descales whose product is beyond fp32, and a softmax_scale below its normal numbers that
    brings logits back."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, x in self.scales.items():
            x[...] = {"q": 2.0**80, "k": 2.0**60, "v": 2.0**-40}[name]

    @property
    def softmax_scale(self) -> float:
        power = sum({"q": 80, "k": 60}.get(name, 0) for name in self.scales)
        return self.dims[0] ** -0.5 * 2.0**-power


def test_varlen_attention():
    spy = Spy(sparse_mla.varlen_attention, package.varlen_attention)

    def run(batch, heads, dims, q_type, kv_type, pairs, is_spread, descales, causal, window, chunk,
            sink, softcap, num_splits, max_q, max_k, scale, workspace, wide_out, out,
            lse):  # fmt: skip
        kind = FarVarlen if descales == "far" else Varlen
        case = kind(
            *BATCHES[batch], *heads, dims, q_type, kv_type, pairs,
            mask=Mask(causal, window, chunk), sink=sink, softcap=softcap, is_spread=is_spread,
            descales="rows" if descales == "far" else descales, num_splits=num_splits, std=scale,
        )  # fmt: skip
        options = case.options | bounds_of(max_q, max_k, *BATCHES[batch])
        if workspace:
            options["workspace"] = np.zeros(64, np.uint8)
        dtype = np.dtype(np.float16) if q_type == "fp16" else ref.BF16
        dtype = np.dtype(np.float32) if wide_out else dtype
        shape = (case.tokens, heads[0])
        arguments = case.arguments()
        got = give_results(spy, arguments, options, shape, dims[1], dtype, out, lse)
        assert_within_bounds(case.reference(), got)

    run_table(cover(VARLEN, *VARLEN_RULES), run, spy)
