"""Pairs of options of the fused norms, each byte for byte."""

from __future__ import annotations

import numpy as np
import reference as ref
import reference_norm as norm
import row_formats as rows
from cases import random_bf16
from helpers import NO_NAN, Guarded, assert_same_bits
from library import package, sparse_mla
from pairs import Output, Spy, cover, run_table
from test_qnorm_insert import Case

F32 = np.float32


# --- fused_q_kv_rmsnorm --------------------------------------------------------------------------

NORMS = {
    "tokens": [0, 1, 5, 70],
    "size": [8, 96, 1536],
    "q_weight": [ref.BF16, np.dtype(F32)],
    "kv_weight": [ref.BF16, np.dtype(F32)],
    "eps": [0.0, 1e-6, 1e-2],
    "power": [0, -60, 60],
    "buffer": ["one", "two"],
    "q_out": ["made", "packed", "gap", "itself"],
    "kv_out": ["made", "packed", "gap", "itself"],
}


def test_fused_q_kv_rmsnorm():
    spy = Spy(sparse_mla.fused_q_kv_rmsnorm, package.fused_q_kv_rmsnorm)

    def run(tokens, size, q_weight, kv_weight, eps, power, buffer, q_out, kv_out):
        rng = np.random.default_rng([tokens, size])
        both = ref.to_bf16(rng.standard_t(3, (tokens, size + 512)).astype(F32) * F32(2.0**power))
        q, kv = both[:, :size], both[:, size:]
        if buffer == "two":
            q, kv = np.ascontiguousarray(q), np.ascontiguousarray(kv)
        weights = []
        for n, dtype in ((size, q_weight), (512, kv_weight)):
            w = (1 + rng.normal(0, 0.2, n)).astype(F32)
            weights.append(w if dtype == F32 else ref.to_bf16(w))
        want = [norm.rms_norm_bits(x, w, eps) for x, w in zip((q, kv), weights, strict=True)]
        given, results = {}, []
        for name, x, how in (("q_out", q, q_out), ("kv_out", kv, kv_out)):
            result = Output("made" if how == "itself" else how, x.shape, ref.BF16)
            results.append(result)
            if how == "itself":
                given[name] = x
            elif result.given is not None:
                given[name] = result.given
        got = spy(q, kv, *weights, eps=eps, **given)
        for x, y, result in zip(got, want, results, strict=True):
            found = np.ascontiguousarray(result.check(x))
            assert_same_bits(ref.bits16(found), y)

    run_table(cover(NORMS), run, spy)


# --- fused_qnorm_rope_kv_insert ------------------------------------------------------------------

INSERTS = {
    "row": [(name, how) for name in rows.KEY_FORMATS for how in rows.layouts_of(name)],
    "size": [(1, 1), (9, 4), (9, 17)],
    "slots": [0, 3, 9],  # tokens that have slots, at most
    "positions": [np.int32, np.int64],
    "slot_dtype": [np.int32, np.int64],
    "eps": [0.0, 1e-6, 1e-2],
    "queries": ["itself", "q_out", "wide q_out", "codes", "new codes"],
    "scale": [1.0, 3.7, 2.0**-40],  # q_scale_inv
    "as_array": [False, True],
    "kv_scale": [1.0, 0.37, 2.0**-61, 2.0**-125],
    "named": [False, True],
}


def test_fused_qnorm_rope_kv_insert():
    spy = Spy(sparse_mla.fused_qnorm_rope_kv_insert, package.fused_qnorm_rope_kv_insert)

    def run(row, size, slots, positions, slot_dtype, eps, queries, scale, as_array, kv_scale,
            named):  # fmt: skip
        T, H = size
        case = Case(T, H, min(slots, T), *row, position_dtype=positions, slot_dtype=slot_dtype)
        case.kv[:, 16:48] = random_bf16(np.random.default_rng(T), T, 32, std=1e-38)
        want, q = case.want(eps), case.q.copy()
        as_given = (lambda x: np.full((1,), x, F32)) if as_array else float
        options = case.pages.options | {"eps": eps}
        if named:
            options["kv_format"] = case.fmt
        has_scale = case.pages.format.scales == "cache"
        if has_scale:
            options["kv_scale"] = as_given(kv_scale)
        wide = H + 2 if queries == "wide q_out" else H
        is_codes = "codes" in queries
        out = Guarded((T, wide, 512), np.uint8 if is_codes else ref.BF16, row_gap=8, poison=NO_NAN)
        if queries not in ("itself", "new codes"):
            options["q_out"] = out.array
        if is_codes:
            options["q_scale_inv"] = as_given(scale)
        before = case.pages.memory.copy()
        arrays = (case.q, case.kv, case.positions, case.table, case.pages.cache, case.slots)
        got, cache = spy(*arrays, **options)
        assert cache is case.pages.cache
        after = case.pages.memory.copy()
        case.pages.memory[:] = before
        count = len(case.slots)
        bits = norm.key_bits(case.kv[:count], case.positions, case.table)
        case.pages.put(case.slots, *case.pages.format.encode(bits, kv_scale if has_scale else 1.0))
        assert_same_bits(after, case.pages.memory, f"{row}")
        if is_codes:
            with np.errstate(over="ignore", invalid="ignore"):
                expected = ref.e4m3_encode(want * F32(scale))
            found = np.ascontiguousarray(got).view(np.uint8)
        else:
            expected, found = ref.bf16_encode(want), ref.bits16(np.ascontiguousarray(got))
        assert_same_bits(found[:, :H], expected, queries)
        assert not found[:, H:].any(), "heads behind the last"
        out.check(written=False)
        if queries != "itself":
            assert_same_bits(case.q, q, "q stays")

    rules = (lambda queries, scale: "codes" in queries or scale == 1,
             lambda row, kv_scale: row[0] == "fp8_e4m3" or kv_scale == 1)  # fmt: skip
    run_table(cover(INSERTS, *rules), run, spy)
