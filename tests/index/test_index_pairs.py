"""Pairs of options of the index conversions and lists, each exactly."""

from __future__ import annotations

import numpy as np
import reference as ref
import reference_index
from helpers import assert_same_bits
from index_lists import gathered, make_batch, positions, validity
from library import package, sparse_mla
from pairs import Output, Spy, cover, run_table

I32 = np.int32
KINDS = {"none": None, "bool": bool, "uint8": np.uint8}
ARRAYS = {"view": ["packed", "part"], "out": ["made", "packed", "gap"], "lens": ["made", "packed"]}


def view_of(x: np.ndarray, view: str) -> np.ndarray:
    """The same entries packed, or as every second one of a longer array, in wider rows."""
    if view == "packed":
        return x
    wide = np.full([2 * x.shape[0], *(n + 3 for n in x.shape[1:])], 99, x.dtype)
    part = wide[::2, : x.shape[1]] if x.ndim == 2 else wide[::2]
    part[...] = x
    return part


def give(spy, args, options, wanted, outs) -> None:
    """Calls with these kinds of outputs, and compares every entry."""
    results = []
    for name, want, how in zip(("out", "lens"), wanted, outs, strict=False):
        results.append(Output(how, want.shape, I32))
        if results[-1].given is not None:
            options[name] = results[-1].given
    got = spy(*args, **options)
    got = got if isinstance(got, tuple) else (got,)
    for x, want, result in zip(got, wanted, results, strict=True):
        assert_same_bits(np.ascontiguousarray(result.check(x)), want)


def test_convert_req_index_to_global_index():
    spy = Spy(sparse_mla.convert_req_index_to_global_index,
              package.convert_req_index_to_global_index)  # fmt: skip

    def run(tokens, width, page, columns, prefills, counts, view, out):
        rng = np.random.default_rng([tokens, width])
        topk = positions(rng, tokens, width, page * columns)
        table = rng.integers(-1, 50, (4, columns)).astype(I32)
        ids = rng.integers(0, 4, tokens).astype(I32)
        options = {}
        if prefills:
            options["prefill_request_ids"] = rng.integers(-1, 3, tokens).astype(I32)
            options["prefill_workspace_starts"] = I32([0, 1000, 40])
        want = ref.convert_req_index_to_global_index(ids, table, topk, block_size=page, **options)
        if counts:
            options["valid_counts"] = True
        options |= {"block_size": page}
        args = [view_of(x, view) for x in (ids, table, topk)]
        result = Output(out, want[0].shape, I32)
        if result.given is not None:
            options["out"] = result.given
        got = spy(*args, **options)
        got = got if counts else (got,)
        assert_same_bits(np.ascontiguousarray(result.check(got[0])), want[0])
        if counts:
            assert_same_bits(np.ascontiguousarray(got[1]), want[1])

    table = {
        "tokens": [0, 1, 9],
        "width": [0, 1, 13, 300],
        "page": [1, 5, 64],
        "columns": [1, 4],
        "prefills": [False, True],
        "counts": [False, True],
        "view": ["packed", "part"],
        "out": ["made", "packed", "gap"],
    }
    run_table(cover(table), run, spy)


def test_compute_global_topk_indices_and_lens():
    name = "compute_global_topk_indices_and_lens"
    spy = Spy(getattr(sparse_mla, name), getattr(package, name))

    def run(tokens, width, page, columns, valid, more, view, out, lens):
        rng = np.random.default_rng([tokens, width])
        topk = positions(rng, tokens, width, page * columns)
        table = rng.integers(-1, 50, (4, columns)).astype(I32)
        ids = rng.integers(0, 4, tokens + more).astype(I32)
        is_valid = validity(rng, tokens + more, KINDS[valid])
        want = getattr(reference_index, name)(topk, ids, table, page, is_valid)
        args = [view_of(x, view) for x in (topk, ids, table)]
        given = None if is_valid is None else view_of(is_valid, view)
        give(spy, (*args, page, given), {}, want, (out, lens))

    table = {
        "tokens": [0, 1, 9],
        "width": [0, 1, 13, 300],
        "page": [1, 5, 64],
        "columns": [1, 4],
        "valid": [*KINDS],
        "more": [0, 2],
    }
    run_table(cover(table | ARRAYS), run, spy)


def test_combine_topk_swa_indices():
    name = "combine_topk_swa_indices"
    spy = Spy(getattr(sparse_mla, name), getattr(package, name))

    def run(prefills, padding, window, ratio, topk, rows, first, align, view, out, lens):
        rng = np.random.default_rng([prefills, window, topk])
        batch = make_batch(rng, decodes=0, prefills=prefills, padding=padding)
        lists = positions(rng, batch.num_tokens, topk + 2, 190)
        args = (
            lists, (batch.query_start_loc + first).astype(I32), batch.seq_lens,
            gathered(batch, window),
        )  # fmt: skip
        sizes = (window, ratio, topk, *rows)
        options = {} if align == 128 else {"align": align}
        want = getattr(reference_index, name)(*args, *sizes, **options)
        give(spy, (*(view_of(x, view) for x in args), *sizes), options, want, (out, lens))

    table = {
        "prefills": [1, 5],
        "padding": [0, 2],
        "window": [1, 5, 130],
        "ratio": [1, 4, 128],
        "topk": [0, 9, 64],
        "rows": [(900, 190), (1000, 200)],  # M and N
        "first": [0, 1234],
        "align": [1, 4, 128],
    }
    run_table(cover(table | ARRAYS), run, spy)


def test_build_mixed_sparse_indices():
    """Decodes, prefills and both, whose compressed rows are slots, positions or not there."""
    name = "build_mixed_sparse_indices"
    spy = Spy(getattr(sparse_mla, name), getattr(package, name))

    def run(parts, width, decode_lens, is_local, valid, window, ratio, topk, pages, padding, view,
            out, lens):  # fmt: skip
        rng = np.random.default_rng([window, ratio, topk])
        decodes, prefills = (parts != "prefills") * 4, (parts != "decodes") * 3
        batch = make_batch(rng, decodes, prefills, padding=padding)
        Td = batch.num_decode_tokens
        swa = rng.integers(-1, 300, (Td, window)).astype(I32) if Td else None
        compressed = local = None
        if Td and width:
            compressed = positions(rng, Td, width, 90)
            if not is_local:
                compressed = np.where(compressed < 0, -1, compressed).astype(I32)
        if decode_lens and Td:
            local = rng.integers(-2, width + 3, Td).astype(I32)
        topk_lists = None
        if parts != "decodes":
            topk_lists = positions(rng, batch.num_tokens - Td, topk + 1, 90)
        swa_table = batch.table(rng, 1, pages[0])
        rows_table = batch.table(rng, ratio, pages[1])
        args = (
            swa, compressed, local, topk_lists, batch.query_start_loc, batch.seq_lens,
            batch.req_ids, swa_table, pages[0], rows_table, pages[1], window, ratio,
            topk if topk_lists is not None else 0,
        )  # fmt: skip
        is_valid = validity(rng, Td + padding, KINDS[valid]) if Td else None
        options = {"decode_indices_are_local": is_local}
        if is_valid is not None:
            options["is_valid"] = is_valid
        if parts == "decodes":  # tokens of the request ids, all of them decodes
            args = (*args[:6], batch.req_ids[:Td], *args[7:])
        want = getattr(reference_index, name)(*args, **options)
        if is_valid is not None:
            options["is_valid"] = view_of(is_valid, view)
        args = [view_of(x, view) if isinstance(x, np.ndarray) else x for x in args]
        give(spy, args, options, want, (out, lens))

    table = {
        "parts": ["decodes", "prefills", "both"],
        "width": [0, 3, 20],
        "decode_lens": [False, True],
        "is_local": [False, True],
        "valid": [*KINDS],
        "window": [1, 5, 130],
        "ratio": [1, 4, 128],
        "topk": [0, 9, 64],
        "pages": [(4, 16), (64, 1)],
        "padding": [0, 2],
    }
    run_table(cover(table | ARRAYS), run, spy, but=("compressed_block_table",))
