"""Pairs of options of mla_attention, each against fp64."""

from __future__ import annotations

import numpy as np
import pytest
import reference as ref
from dense_cases import DENSE_FORMATS, LAYOUTS, TOKEN, Dense, Mask, has_rope, takes_e4m3
from device import NAME
from helpers import assert_within_bounds
from library import package, sparse_mla
from pairs import OUTPUTS, Output, Spy, cover, run_table
from row_formats import ALL_FORMATS
from scale_cases import SCALES
from test_attention_pairs import has_normal_products, scales_of
from varlen_cases import Varlen, spread

MASKS = {
    "causal": [False, True],
    "window": [(-1, -1), (3, -1), (-1, 2), (1, 0)],
    "chunk": [0, 1, 7],
}
BATCHES = {
    "one": ([4], [9]),
    "empty": ([2, 0, 1, 3], [0, 5, 1, 40]),
    "short keys": ([5, 1], [2, 33]),
    "decodes": ([1, 1, 1], [70, 3, 0]),
}
BOUNDS = (None, "largest", "above", 100_000)  # max_seqlen_q and max_seqlen_k


def bound_of(kind, lens: list[int]) -> dict:
    """A bound of lengths: the largest of the batch, or more; none where it is left out."""
    if kind is None:
        return {}
    return {"largest": max(lens), "above": max(lens) + 9}.get(kind, kind)


def bounds_of(max_q, max_k, query_lens, key_lens) -> dict:
    given = {"max_seqlen_q": (max_q, query_lens), "max_seqlen_k": (max_k, key_lens)}
    return {name: bound_of(*x) for name, x in given.items() if x[0] is not None}


def give_results(spy, arguments, options, shape, width, dtype, out, lse, flat=None) -> dict:
    """Calls with these kinds of results. -> the results of all rows, [T, H(, width)]"""
    results = [Output(out, (*shape, width), dtype), Output(lse, shape, np.float32)]
    for name, x in zip(("out", "lse"), results, strict=True):
        if x.given is not None:
            options[name] = x.given
    got = spy(*arguments, **options)
    found = [r.check(x) for r, x in zip(results, got, strict=True)]
    heads = shape[-1]
    return {"out": found[0].reshape(-1, heads, width), "lse": found[1].reshape(-1, heads)}


# --- mla_attention -------------------------------------------------------------------------------

MLA = MASKS | {
    "fmt": DENSE_FORMATS,
    "batch": [*BATCHES],
    "heads": [1, 5, 17],
    "block_size": [1, 16, 64],
    "layout": [x for x in LAYOUTS if x != "unpaged"],  # it takes pages alone
    "named": [False, True],
    "cp": [None, (0, 2, 4), (1, 3, 1)],
    "table": ["pages", "slots"],
    "query": ["rows", "batch", "pair", "e4m3", "bytes"],
    "starts": [False, True],
    "scales": SCALES,
    "sink": [False, True],
    "softcap": [0.0, 0.5, 30.0],
    "num_splits": [0, 1, 3, 64],
    "holes": [0.0, 0.3],
    "missing": [0, 1],
    "max_q": BOUNDS,
    "max_k": BOUNDS,
    "workspace": [False, True],
    "out": OUTPUTS,
    "lse": ["made", "packed"],
}


MLA_RULES = (
    lambda query, fmt: query != "pair" or has_rope(fmt),
    lambda query, fmt: query not in ("e4m3", "bytes") or takes_e4m3(fmt),
    lambda fmt, scales, query: has_normal_products(fmt, None, scales, query),
    # [B, n, H, D] has requests of one length; without starts, each has one token.
    lambda query, batch: query != "batch" or batch in ("one", "decodes"),
    lambda query, starts: starts != (query == "batch"),
    lambda starts, batch, query: starts or query == "batch" or batch == "decodes",
    # `Output` has wide rows of [T, H, 512] alone.
    lambda out, query: out != "wide" or query != "batch",
)


def test_mla_attention():
    spy = Spy(sparse_mla.mla_attention, package.mla_attention)

    def run(fmt, batch, heads, block_size, layout, named, causal, window, chunk, cp, table, query,
            starts, scales, sink, softcap, num_splits, holes, missing, max_q, max_k,
            workspace, out, lse):  # fmt: skip
        e4m3 = query in ("e4m3", "bytes")
        s = scales_of(scales, fmt, None, e4m3=e4m3)
        width = 576 if has_rope(fmt) else 512
        query_lens, seq_lens = BATCHES[batch]
        case = Dense(
            query_lens, seq_lens, heads, fmt, block_size, Mask(causal, window, chunk, cp),
            has_slots=table == "slots", is_uniform=query == "batch", is_pair=query == "pair",
            e4m3=e4m3, sink=sink, softcap=softcap, num_splits=num_splits, holes=holes,
            missing=missing, key_std=s.kv, scale=float(np.float32(s.softmax * width**-0.5)),
            q_scale=s.q, kv_scale=s.kv, layout=layout,
        )  # fmt: skip
        options = case.options | bounds_of(max_q, max_k, query_lens, seq_lens)
        if named:
            options["kv_format"] = case.cache.format_name
        if "kv_scale" in options or case.cache.scale != 1:
            options["kv_scale"] = s.argument(s.kv)
        if e4m3:
            options["q_scale"] = s.argument(s.q)
        if not starts:
            options.pop("cu_seqlens_q", None)
        if workspace:
            size = package.attention_workspace_size(
                case.tokens, heads, max(seq_lens), num_splits=num_splits, device=NAME
            )
            options["workspace"] = np.zeros(size + 64, np.uint8)
        q, *rest = case.arguments()
        shape = (q[0] if query == "pair" else q).shape[:-1]
        q = q.view(np.uint8) if query == "bytes" else q
        got = give_results(spy, (q, *rest), options, shape, 512, ref.BF16, out, lse)
        assert_within_bounds(case.reference(), got)

    run_table(cover(MLA, *MLA_RULES), run, spy)


# --- bounds of lengths ---------------------------------------------------------------------------


@pytest.mark.parametrize("above", [1, 63, 5000, 2**31 - 400])
@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
def test_bounds_above_the_batch_s_lengths_change_no_bit(name, above):
    """Engines give the largest size of a captured graph, or the model's."""
    lens, keys = [1, 17, 130], [5, 300, 130]
    mask = Mask(causal=True, window=(40, -1))
    dense = Dense(lens, keys, mask=mask)
    varlen = Varlen(lens, keys, mask=mask, dims=(64, 64))
    largest = max(lens if name == "max_seqlen_q" else keys)
    for case, op in ((dense, sparse_mla.mla_attention), (varlen, sparse_mla.varlen_attention)):
        want = case.run(op)
        assert_within_bounds(case.reference(), want)
        got = case.run(op, **{name: largest + above})
        for x in want:
            assert np.array_equal(got[x].view(np.uint8), want[x].view(np.uint8)), x


def test_every_named_format_is_known():
    """The tables above have every format that a cache of keys may have."""
    named = {name for name in DENSE_FORMATS if name not in ALL_FORMATS}
    assert named == {"bf16", "fp8", TOKEN}


def test_strided_rows_are_those_of_the_table():
    """`spread` puts NaN between rows, heads and values: memory that no call may read."""
    x = np.ones((2, 3, 8), ref.BF16)
    assert spread(x).strides != x.strides
    assert np.isnan(spread(x).base.astype(np.float32)).any()
