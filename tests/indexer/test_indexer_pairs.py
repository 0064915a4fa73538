"""Pairs of options of the indexer's operators, against fp64 or byte for byte."""

from __future__ import annotations

import numpy as np
import reference as ref
import test_index_query
from cases import angles
from device import NAME
from helpers import NO_NAN, Guarded, assert_same_bits
from library import package, sparse_mla
from pairs import Output, Spy, assert_complete, cover, run_table
from test_index_query import MAX_POS, queries
from test_indexer_logits import Flat, Paged, assert_logits, bound_of
from test_lightning_indexer import inputs, two_calls

F32, I32 = np.float32, np.int32


# --- fused_indexer_q_rope_quant ------------------------------------------------------------------

QUERIES = {
    "tokens": [0, 1, 9],
    "heads": [1, 3, 64],
    "weights": [np.dtype(F32), ref.BF16],
    "positions": [np.int32, np.int64],
    "more": [0, 2],
    "fp4": [False, True],
    "scales": [(0.125, 0.5), (2.0**-70, 2.0**60), (2.0**80, 2.0**-90)],
    "view": ["packed", "columns"],
    "out": ["made", "packed", "gap"],
    "out_weights": ["made", "packed", "gap"],
    "out_scale": ["made", "packed", "gap"],
}


def test_fused_indexer_q_rope_quant(monkeypatch):
    spy = Spy(sparse_mla.fused_indexer_q_rope_quant, package.fused_indexer_q_rope_quant)

    def run(tokens, heads, weights, positions, more, fp4, scales, view, out, out_weights,
            out_scale):  # fmt: skip
        q, w = queries(tokens, heads, dtype=weights)
        at = np.random.default_rng(1).integers(0, MAX_POS, tokens + more).astype(positions)
        table = angles()
        monkeypatch.setattr(test_index_query, "SOFTMAX_SCALE", scales[0])
        want = test_index_query.reference(q, w, at, table, fp4, scales[1])
        if view == "columns":
            wide = np.zeros((tokens, heads + 1, 136), q.dtype)
            wide[:, 1:, 8:] = q
            q = wide[:, 1:, 8:]
        options = {"softmax_scale": scales[0], "head_scale": scales[1], "use_fp4": fp4}
        buffers = []
        names = ("out", "out_weights", "out_scale")
        for name, how, x in zip(names, (out, out_weights, out_scale), want, strict=False):
            gap = 8 if how == "gap" else 0
            buffers.append(Guarded(x.shape, x.dtype, row_gap=gap, poison=NO_NAN))
            if how != "made":
                options[name] = buffers[-1].array
        got = spy(q, w, at, table, **options)
        for x, y, buffer, name in zip(got, want, buffers, names, strict=False):
            if name in options:
                assert x is buffer.array
                buffer.check(written=False)
            found = np.ascontiguousarray(x)
            assert_same_bits(found.view(y.dtype) if found.dtype == ref.E4M3 else found, y, name)

    run_table(cover(QUERIES), run, spy)


# --- indexer_logits and lightning_indexer --------------------------------------------------------

LAYOUTS = ("paged", "mqa", "padded", "bytes", "flat")
KEYS = {
    "layout": LAYOUTS,
    "heads": [1, 7, 32, 64],
    "q_kind": ["fp8", "fp4"],
    "kind": ["fp8", "fp4"],
    "block_size": [1, 16, 64],
    "starts": [False, True],
    "named": [False, True],
    "dtype": ["float32", "bfloat16"],
    "size": [1.0, 1e-20, 1e20],  # the size of the weights
}
KEY_RULES = (lambda layout, starts: layout == "flat" or not starts,)


def make_case(layout, heads, q_kind, kind, block_size, starts, size) -> Paged | Flat:
    if layout == "flat":
        case = Flat(7, 60, heads, q_kind, kind)
        if not starts:
            case.starts = None
    else:
        width = -(-64 // block_size)
        lens, contexts = (3, 1, 2), (60, 5, 33)
        case = Paged(lens, contexts, heads, q_kind, kind, block_size, width, layout)
    case.weights = (case.weights * F32(size)).astype(F32)
    return case


def options_of(case, named: bool) -> tuple[list, dict]:
    args, options = inputs(case)
    options = {name: x for name, x in options.items() if x is not None}
    if named and isinstance(case, Paged):
        options["kv_format"] = case.pages.format.name
    return args, options


def test_indexer_logits():
    spy = Spy(sparse_mla.indexer_logits, package.indexer_logits)

    def run(layout, heads, q_kind, kind, block_size, starts, named, dtype, size, clean, out):
        case = make_case(layout, heads, q_kind, kind, block_size, starts, size)
        args, options = options_of(case, named)
        want, u = case.want()
        kept = np.zeros(want.shape, bool)
        if out != "made":
            number = np.dtype(F32) if dtype == "float32" else ref.BF16
            gap = 5 if out == "gap" else 0
            buffer = Guarded(want.shape, number, row_gap=gap, poison=NO_NAN)
            options["out"] = buffer.array
            if not clean:
                kept = np.arange(want.shape[1]) >= case.lengths[:, None]
        else:
            clean = True
        got = spy(*args, clean=clean, dtype=dtype, **options)
        found = np.array(got)
        if out != "made":
            assert got is buffer.array
            buffer.check(written=False)
            left = found.view(np.uint8).reshape(*found.shape, -1)[kept]
            assert (left == NO_NAN).all(), "a column behind the context was written"
            found[kept] = -np.inf
        assert_logits(found, want, u, bound_of(heads, q_kind, kind))

    table = KEYS | {"clean": [True, False], "out": ["made", "packed", "gap"]}
    run_table(cover(table, *KEY_RULES), run, spy)


def test_lightning_indexer():
    """The bits of the two calls, whatever the chunks."""
    spy = Spy(sparse_mla.lightning_indexer, package.lightning_indexer)
    size_spy = Spy(package.lightning_indexer_workspace_size)

    def run(layout, heads, q_kind, kind, block_size, starts, named, dtype, size, k, slots,
            is_valid, out, values, lens, most, workspace):  # fmt: skip
        case = make_case(layout, heads, q_kind, kind, block_size, starts, size)
        args, options = options_of(case, named)
        tokens = len(case.q)
        more, ids = {}, {}
        if slots:
            more = {"slots_block_size": 8}
            more["slots_block_table"] = np.random.default_rng(k).permutation(27).astype(I32)
            more["slots_block_table"] = more["slots_block_table"].reshape(3, 9)
            if isinstance(case, Flat):
                ids["req_id_per_token"] = (np.arange(tokens) % 3).astype(I32)
            if is_valid:
                more["is_valid"] = np.arange(tokens) % 2 == 0
        own = {"req_id_per_token": case.req} if slots and isinstance(case, Paged) else ids
        want, want_values = two_calls(case, k, dtype, **more, **own)
        results = [Output(out, want[0].shape, I32)]
        given = {} if results[0].given is None else {"out": results[0].given}
        if slots:
            results += [Output(out, want[1].shape, I32), Output("made", want[2].shape, I32)]
            if out != "made":
                given["slots"] = results[1].given
            if lens:
                results[2] = Output("packed", want[2].shape, I32)
                given["lens"] = results[2].given
        chosen = Output("gap" if values == "gap" else "packed", want_values.shape,
                        want_values.dtype)  # fmt: skip
        if values != "none":
            given["values"] = chosen.given
        if most is not None:
            given["max_logits_bytes"] = most
        if workspace:
            columns = case.S if isinstance(case, Flat) else case.N
            limits = {"max_logits_bytes": most} if most is not None else {}
            least = size_spy(tokens, columns, k=k, dtype=dtype, device=NAME, **limits)
            given["workspace"] = np.zeros(least + 1, np.uint8)
        got = spy(*args, k=k, dtype=dtype, **options, **more, **ids, **given)
        for x, y, result in zip(got if slots else (got,), want, results, strict=True):
            assert_same_bits(np.ascontiguousarray(result.check(x)), y)
        if values != "none":
            assert_same_bits(np.ascontiguousarray(chosen.check(chosen.given)), want_values)

    table = KEYS | {
        "k": [1, 5, 80],
        "slots": [False, True],
        "is_valid": [False, True],
        "out": ["made", "packed", "gap"],
        "values": ["none", "packed", "gap"],
        "lens": [False, True],
        "most": [None, 512, 1 << 16],
        "workspace": [False, True],
    }
    rules = (
        *KEY_RULES,
        lambda slots, is_valid: slots or not is_valid,
        lambda slots, lens: slots or not lens,
    )
    run_table(cover(table, *rules), run, spy)
    assert_complete(size_spy, but=("device",))
