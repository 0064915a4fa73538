"""Pairs of options of top_k_per_row and top_k_merge, each exactly."""

from __future__ import annotations

import numpy as np
import reference as ref
import reference_index
import test_top_k_merge as merging
from helpers import assert_same_bits
from library import package, sparse_mla
from pairs import Output, Spy, cover, run_table
from test_top_k import expect

I32 = np.int32
OPTIONS = {
    "shape": [(0, 9), (1, 1), (5, 40), (3, 3000)],
    "dtype": [np.dtype(np.float32), ref.BF16],
    "k": [1, 7, 64, 4000],
    "data": ["any", "ties", "equal", "odd"],
    "layout": ["packed", "apart"],
    "ranges": ["all", "some", "beyond"],
    "slots": [False, True],
    "is_valid": ["none", "bool", "uint8"],
    "page": [1, 16],
    "out": ["made", "packed", "gap"],
    "slots_out": ["made", "packed", "gap"],
    "lens": ["made", "packed"],
    "values": ["none", "packed", "gap"],
    "more": [0, 2],  # entries behind the tokens
}
RULES = (
    lambda slots, is_valid: slots or is_valid == "none",
    lambda slots, slots_out: slots or slots_out == "made",
    lambda slots, lens: slots or lens == "made",
)


def make_logits(rng, shape, dtype, data: str, layout: str) -> np.ndarray:
    x = rng.normal(0, 1, shape).astype(np.float32)
    if data == "ties":
        x = np.round(x)
    elif data == "equal":
        x[:] = -0.0
    elif data == "odd" and x.size:
        x[rng.random(shape) < 0.3] = rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0])
    x = x.astype(dtype)
    if layout == "packed":
        return x
    wide = np.zeros((shape[0], shape[1] + 3), dtype)
    wide[:, : shape[1]] = x
    return wide[:, : shape[1]]


def make_ranges(rng, count: int, columns: int, kind: str) -> tuple[np.ndarray, np.ndarray]:
    starts, ends = np.zeros(count, I32), np.full(count, columns, I32)
    if kind == "some":
        starts = rng.integers(0, columns, count).astype(I32)
        ends = rng.integers(0, columns + 1, count).astype(I32)
    elif kind == "beyond":
        starts[:], ends[:] = -(2**31), 2**31 - 1
    return starts, ends


def test_top_k_per_row():
    spy = Spy(sparse_mla.top_k_per_row, package.top_k_per_row)

    def run(shape, dtype, k, data, layout, ranges, slots, is_valid, page, out, slots_out, lens,
            values, more):  # fmt: skip
        rng = np.random.default_rng([*shape, k])
        T = shape[0]
        logits = make_logits(rng, shape, dtype, data, layout)
        starts, ends = make_ranges(rng, T + more, shape[1], ranges)
        want, want_values = expect(logits, starts[:T], ends[:T], k)
        results, given = [Output(out, (T, k), I32)], {}
        options = {}
        if slots:
            width = -(-shape[1] // page)
            table = rng.integers(-1, 50, (3, width)).astype(I32)
            ids = rng.integers(0, 3, T + more).astype(I32)
            valid = None
            if is_valid != "none":
                valid = (rng.random(T + more) < 0.7).astype(np.dtype(is_valid))
                options["is_valid"] = valid
            options |= {"slots_block_table": table, "slots_block_size": page}
            options["req_id_per_token"] = ids
            wanted = (want, *reference_index.compute_global_topk_indices_and_lens(
                want, ids, table, page, valid))  # fmt: skip
            results += [Output(slots_out, (T, k), I32), Output(lens, (T,), I32)]
        else:
            wanted = (want,)
        chosen = Output("gap" if values == "gap" else "packed", (T, k), dtype)
        if values != "none":
            given["values"] = chosen.given
        for name, result in zip(("out", "slots", "lens"), results, strict=False):
            if result.given is not None:
                given[name] = result.given
        got = spy(logits, starts, ends, k=k, **options, **given)
        for x, y, result in zip(got if slots else (got,), wanted, results, strict=True):
            assert_same_bits(np.ascontiguousarray(result.check(x)), y)
        if values != "none":
            assert_same_bits(np.ascontiguousarray(chosen.check(chosen.given)), want_values)

    run_table(cover(OPTIONS, *RULES), run, spy)


def test_top_k_merge():
    spy = Spy(sparse_mla.top_k_merge, package.top_k_merge)

    def run(lists, tokens, width, dtype, k, data, layout, holes, out):
        rng = np.random.default_rng([lists, tokens, width])
        indices = merging.split(rng, lists, tokens, width)
        if holes and width > 2:
            indices[:, :, 1] = -5
        values = make_logits(rng, (lists * tokens, width), dtype, data, layout)
        values = np.lib.stride_tricks.as_strided(
            values, (lists, tokens, width),
            (tokens * values.strides[0], *values.strides),
        )  # fmt: skip
        if layout == "apart":
            wide = np.full((lists, tokens + 1, width + 2), 3, np.int32)
            wide[:, 1:, :width] = indices
            indices = wide[:, 1:, :width]
        want = merging.expect(indices, values, k)
        result = Output(out, (tokens, k), I32)
        given = {} if result.given is None else {"out": result.given}
        got = spy(indices, values, k=k, **given)
        assert_same_bits(np.ascontiguousarray(result.check(got)), want)

    table = {
        "lists": [1, 2, 7, 64],
        "tokens": [0, 1, 5],
        "width": [0, 1, 40, 300],
        "dtype": [np.dtype(np.float32), ref.BF16],
        "k": [1, 7, 64, 5000],
        "data": ["any", "ties", "equal", "odd"],
        "layout": ["packed", "apart"],
        "holes": [False, True],
        "out": ["made", "packed", "gap"],
    }
    run_table(cover(table), run, spy)
