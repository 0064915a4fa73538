"""Pairs of options of the operators for a rank's positions, lists and lengths, each exactly."""

from __future__ import annotations

import numpy as np
from helpers import assert_same_bits
from library import package, sparse_mla
from pairs import Output, Spy, cover, run_table
from test_index_pairs import ARRAYS, view_of
from test_rank_lists import by_formula

SHARES = [None, (0, 1, 7), (0, 2, 4), (1, 2, 4), (2, 3, 1), (6, 8, 64)]


def draw(rng, shape: tuple[int, ...], dtype, data: str) -> np.ndarray:
    least, most = {"small": (-3, 40), "any": (-3, 5000), "large": (2**30, 2**31 - 1)}[data]
    return rng.integers(least, most, shape).astype(dtype)


def own_of(x: np.ndarray, cp) -> np.ndarray:
    found = [by_formula(int(value), cp or (0, 1, 1)) for value in x.ravel()]
    return np.array(found, x.dtype).reshape(x.shape)


def turned(x: np.ndarray, view: str) -> np.ndarray:
    """As view_of, or as the columns of another array."""
    return x.T.copy().T if view == "turned" else view_of(x, view)


def test_cp_local_positions():
    spy = Spy(sparse_mla.cp_local_positions, package.cp_local_positions)

    def run(shape, dtype, cp, data, view, out):
        x = draw(np.random.default_rng(len(shape)), shape, dtype, data)
        result = Output(out, shape, dtype)
        given = {} if result.given is None else {"out": result.given}
        got = spy(turned(x, view), cp=cp, **given)
        assert_same_bits(np.ascontiguousarray(result.check(got)), own_of(x, cp))

    table = {
        "shape": [(0,), (1,), (300,), (0, 5), (1, 1), (9, 33), (4, 0)],
        "dtype": [np.int32, np.int64],
        "cp": SHARES,
        "data": ["small", "any", "large"],
        "view": ["packed", "part", "turned"],
        "out": ["made", "packed", "gap"],
    }
    run_table(cover(table, lambda shape, out: out != "gap" or len(shape) == 2), run, spy)


def test_cp_local_topk():
    spy = Spy(sparse_mla.cp_local_topk, package.cp_local_topk)

    def run(tokens, width, cp, data, view, out, lens):
        x = draw(np.random.default_rng(tokens), (tokens, width), np.int32, data)
        own = own_of(x, cp)
        want, counts = np.full_like(own, -1), (own >= 0).sum(1).astype(np.int32)
        for row, entries, count in zip(want, own, counts, strict=True):
            row[:count] = entries[entries >= 0]
        results = {
            "out": Output(out, want.shape, np.int32),
            "lens": Output(lens, (tokens,), np.int32),
        }
        given = {n: x.given for n, x in results.items() if x.given is not None}
        got = spy(view_of(x, view), cp=cp, **given)
        for x, expected, result in zip(got, (want, counts), results.values(), strict=True):
            assert_same_bits(np.ascontiguousarray(result.check(x)), expected)

    table = {
        "tokens": [0, 1, 9],
        "width": [0, 1, 33, 1300],
        "cp": SHARES,
        "data": ["small", "any", "large"],
    }
    run_table(cover(table | ARRAYS), run, spy)


def test_cp_local_lengths():
    spy = Spy(sparse_mla.cp_local_lengths, package.cp_local_lengths)

    def run(requests, cp, data, view, out):
        x = draw(np.random.default_rng(requests), (requests,), np.int32, data)
        rank, ranks, interleave = cp or (0, 1, 1)
        whole, rest = np.divmod(np.maximum(x.astype(np.int64), 0), ranks * interleave)
        want = whole * interleave + np.clip(rest - rank * interleave, 0, interleave)
        result = Output(out, (requests,), np.int32)
        given = {} if result.given is None else {"out": result.given}
        got = spy(view_of(x, view), cp=cp, **given)
        assert_same_bits(np.ascontiguousarray(result.check(got)), want.astype(np.int32))

    table = {
        "requests": [0, 1, 70],
        "cp": SHARES,
        "data": ["small", "any", "large"],
        "view": ["packed", "part"],
        "out": ["made", "packed"],
    }
    run_table(cover(table), run, spy)
