"""Pairs of options of RoPE, each byte for byte."""

from __future__ import annotations

import numpy as np
import reference as ref
from helpers import assert_same_bits
from library import package, sparse_mla
from pairs import Output, Spy, cover, run_table
from test_apply_rope import DTYPES, ROWS, made, places, rotate, rounded

HOW = ["made", "packed", "gap", "itself"]
ROPE = {
    "tokens": [0, 1, 7],
    "heads": [1, 3],
    "size": [2, 64, 130],
    "dtype": DTYPES,
    "table": DTYPES,
    "positions": [np.int32, np.int64],
    "more": [0, 3],
    "interleaved": [True, False],
    "inverse": [False, True],
    "view": ["packed", "columns"],
    "has_k": [True, False],
    "q_out": HOW,
    "k_out": HOW,
}


def view_of(x: np.ndarray, view: str) -> np.ndarray:
    """The values packed, or as the last columns of wider rows."""
    if view == "packed":
        return x
    wide = np.zeros((*x.shape[:-1], x.shape[-1] + 6), x.dtype)
    wide[..., 6:] = x
    return wide[..., 6:]


def give(name: str, how: str, x: np.ndarray, options: dict) -> Output:
    result = Output("made" if how == "itself" else how, x.shape, x.dtype)
    if how == "itself":
        options[name] = x
    elif result.given is not None:
        options[name] = result.given
    return result


def test_apply_rope():
    spy = Spy(sparse_mla.apply_rope, package.apply_rope)

    def run(tokens, heads, size, dtype, table, positions, more, interleaved, inverse, view, has_k,
            q_out, k_out):  # fmt: skip
        q = view_of(made((tokens, heads, size), dtype, heads), view)
        k = view_of(made((tokens, size), dtype, 7), view) if has_k else None
        at = places(tokens + more, positions)
        turns = rounded(package.rope_table(ROWS, R=size), table)
        want = [rotate(x, at, turns, interleaved, inverse) for x in (q, k) if x is not None]
        options = {"interleaved": interleaved, "inverse": inverse}
        results = [give("q_out", q_out, q, options)]
        if has_k:
            results.append(give("k_out", k_out, k, options))
        got = spy(at, q, k, turns, **options)
        assert has_k or got[1] is None
        for result, x, right in zip(results, got, want, strict=False):
            assert_same_bits(np.ascontiguousarray(result.check(x)), right)

    run_table(cover(ROPE), run, spy)


CACHED = {
    "tokens": [1, 9],
    "count": [0, 1, 9],  # tokens that have slots, at most
    "heads": [1, 3],
    "dtype": DTYPES,
    "table": DTYPES,
    "positions": [np.int32, np.int64],
    "slots": [np.int32, np.int64],
    "interleaved": [True, False],
    "view": ["packed", "columns"],
    "cache": ["bfloat16", "fp8_ds_mla"],
    "layout": ["paged", "mqa", "padded", "flat"],
    "named": [False, True],
    "kv_scale": ["left out", "one"],
    "q_out": HOW,
}


def test_rope_and_cache_mla():
    """Queries turned, and rows of the turned keys: the bytes of the formulas."""
    spy = Spy(sparse_mla.rope_and_cache_mla, package.rope_and_cache_mla)

    def run(tokens, count, heads, dtype, table, positions, slots, interleaved, view, cache, layout,
            named, kv_scale, q_out):  # fmt: skip
        q = view_of(made((tokens, heads, 64), dtype, heads), view)
        k, kv_c = made((tokens, 64), dtype, 7), made((tokens, 512), dtype, 8)
        k, kv_c = view_of(k, view), view_of(kv_c, view)
        at, turns = places(tokens, positions), rounded(package.rope_table(ROWS), table)
        width, kind = (576, ref.BF16) if cache == "bfloat16" else (656, np.uint8)
        memory = np.full((4, 5 + (layout == "padded"), width), 7, kind)
        pages = memory[:, :5]
        given = {"mqa": pages[:, :, None], "flat": memory.reshape(-1, width)}.get(layout, pages)
        where = np.random.default_rng(count).permutation(20)[: min(count, tokens)].astype(slots)
        where[1:2] = -1
        turned = rotate(k, at, turns, interleaved)
        want_q = rotate(q, at, turns, interleaved)
        expected = memory.copy()
        latents = ref.bf16_decode(ref.to_bf16_bits(kv_c))
        ref.concat_and_cache_mla(latents[: len(where)], ref.to_f32(turned)[: len(where)],
                                 expected[:, :5], where)  # fmt: skip
        options = {"interleaved": interleaved} | ({"kv_cache_dtype": cache} if named else {})
        if kv_scale != "left out":
            options["kv_scale"] = 1.0
        result = give("q_out", q_out, q, options)
        got = spy(at, q, k, turns, kv_c, given, where, **options)
        assert got[1] is given
        assert_same_bits(np.ascontiguousarray(result.check(got[0])), want_q)
        assert_same_bits(memory, expected, "the cache's memory")

    # Neither format has a scale, so the option has one value.
    run_table(cover(CACHED), run, spy, but=("kv_scale",))
