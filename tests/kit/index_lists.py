"""Calls of the index lists of DeepSeek V4, and random batches for them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import reference_index as ref
from cases import int32
from helpers import Guarded, assert_same_bits
from library import sparse_mla

GLOBAL = "compute_global_topk_indices_and_lens"
COMBINE = "combine_topk_swa_indices"
MIXED = "build_mixed_sparse_indices"
INT32_MAX, INT32_MIN = 2**31 - 1, -(2**31)


def check(op: str, *args, row_gap: int = 3, **options):
    """A call with outputs between red zones, one without outputs, and the reference agree."""
    want, want_lens = getattr(ref, op)(*args, **options)
    function = getattr(sparse_mla, op)
    before = [x.copy() if isinstance(x, np.ndarray) else x for x in args]
    out = Guarded(want.shape, np.int32, row_gap=row_gap)
    lens = Guarded((len(want), 2), np.int32)
    given = lens.array[:, 0]
    got = function(*args, out=out.array, lens=given, **options)
    assert got[0] is out.array
    assert got[1] is given
    assert_same_bits(out.check(), want, "out")
    assert_same_bits(given, want_lens, "lens")
    lens.check(written=False)
    if given.size:
        assert (lens.array[:, 1].view(np.uint32) == 0xA5A5A5A5).all(), "lens: a write in a gap"
    fresh, fresh_lens = function(*args, **options)
    assert_same_bits(fresh, want, "new out")
    assert_same_bits(fresh_lens, want_lens, "new lens")
    for x, y in zip(args, before, strict=True):
        if isinstance(x, np.ndarray):
            assert_same_bits(x, y, "an input")
    return want, want_lens


MIXED_BATCH = {
    "query_start_loc": int32(0, 1, 3),
    "seq_lens": int32(3, 9),
    "req_id_per_token": int32(0, 1, 1),
    "swa_block_table": int32([4, 0, 0], [2, 5, 6]),
    "swa_block_size": 4,
    "compressed_block_table": int32([7], [3]),
    "compressed_block_size": 4,
    "window": 3,
    "ratio": 4,
    "topk": 2,
}


# --- random batches ------------------------------------------------------------------------------


@dataclass
class Batch:
    """Requests with their queries: decodes first, of one to three tokens, then prefills."""

    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    req_ids: np.ndarray
    num_decode_tokens: int
    num_tokens: int  # tokens, padding behind the last request included

    def table(self, rng, rows_per_token: int, block_size: int, width: int | None = None):
        """Pages of each request: some missing, some beyond any cache, and some past its end."""
        longest = int(self.seq_lens.max(initial=1)) // rows_per_token
        width = longest // block_size + 1 if width is None else width
        table = rng.integers(0, 900, (len(self.seq_lens), width)).astype(np.int32)
        if table.size:
            flat = table.reshape(-1)
            special = [-1, -7, INT32_MIN, INT32_MAX, INT32_MAX // block_size]
            places = rng.permutation(flat.size)[: min(len(special), flat.size // 3)]
            flat[places] = special[: len(places)]
        return table


def make_batch(rng, decodes=4, prefills=3, *, longest=700, drafts=3, padding=2) -> Batch:
    query_lens = [int(n) for n in rng.integers(1, drafts + 1, decodes)]
    query_lens += [int(n) for n in rng.integers(0, 40, prefills)]
    seq_lens = [max(n, int(rng.integers(n, longest))) for n in query_lens]
    start = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    req_ids = np.repeat(np.arange(len(query_lens)), query_lens)
    req_ids = np.concatenate([req_ids, np.zeros(padding)]).astype(np.int32)
    num_decode_tokens = int(start[decodes])
    return Batch(start, int32(*seq_lens), req_ids, num_decode_tokens, len(req_ids))


def positions(rng, num_tokens: int, width: int, most: int) -> np.ndarray:
    """Lists of positions with entries of every bad kind; one list has none, one only good ones."""
    lists = rng.integers(0, max(most, 1), (num_tokens, width)).astype(np.int32)
    odd = rng.random(lists.shape)
    for low, value in ((0, -1), (0.1, most), (0.13, INT32_MAX), (0.16, INT32_MIN), (0.19, -7)):
        lists[(odd > low) & (odd < low + (0.1 if low == 0 else 0.03))] = value
    if num_tokens > 2:
        lists[1], lists[2] = -1, rng.integers(0, max(most, 1), width)
    return lists


def validity(rng, num_tokens: int, dtype) -> np.ndarray | None:
    if dtype is None:
        return None
    flags = rng.random(num_tokens) < 0.7
    return (
        flags
        if dtype is bool
        else np.where(flags, rng.integers(1, 256, num_tokens), 0).astype(dtype)
    )


def gathered(batch: Batch, window: int) -> np.ndarray:
    query_lens = np.diff(batch.query_start_loc)
    return (query_lens + np.minimum(batch.seq_lens - query_lens, window - 1)).astype(np.int32)


def mixed_arguments(
    rng, batch: Batch, *, window, ratio, topk, decode_topk, local, swa_block_size=16
):
    """The arrays of a call in which positions become slots."""
    num_prefills = batch.num_tokens - batch.num_decode_tokens
    cbs = 5
    most = int(batch.seq_lens.max(initial=1)) // ratio + 1
    decode = positions(rng, batch.num_decode_tokens, decode_topk, most)
    return (
        rng.integers(-1, 9999, (batch.num_decode_tokens, window)).astype(np.int32),
        decode,
        None if local else rng.integers(-2, decode_topk + 3, len(decode)).astype(np.int32),
        positions(rng, num_prefills, topk, most),
        batch.query_start_loc,
        batch.seq_lens,
        batch.req_ids,
        batch.table(rng, 1, swa_block_size),
        swa_block_size,
        batch.table(rng, ratio, cbs),
        cbs,
        window,
        ratio,
        topk,
    )


# --- good calls ----------------------------------------------------------------------------------


def good_global() -> dict:
    return {
        "topk_indices": int32([3, 0], [1, 2]),
        "req_id_per_token": int32(0, 1),
        "block_table": int32([6, 1], [2, 3]),
        "block_size": 4,
        "is_valid": np.ones(2, bool),
    }


def good_combine() -> dict:
    return {
        "topk_indices": int32([0, 1], [1, 0], [0, 0]),
        "query_start_loc": int32(4, 5, 7),
        "seq_lens": int32(6, 9),
        "gather_lens": int32(4, 4),
        "window": 3,
        "ratio": 4,
        "topk": 2,
        "M": 8,
        "N": 3,
    }


def good_mixed() -> dict:
    lists = {
        "decode_swa_indices": int32([8, 9, -1]),
        "decode_compressed_indices": int32([2, -1]),
        "decode_compressed_lens": None,
        "prefill_topk_indices": int32([0, 1], [1, 0]),
    }
    return lists | MIXED_BATCH | {"decode_indices_are_local": True}
