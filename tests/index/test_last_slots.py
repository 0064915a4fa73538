"""Neighbouring slots and rows that pass 2^31 - 1: int32 holds the first ones, the others are -1."""

from __future__ import annotations

import numpy as np
import pytest
from library import sparse_mla

END = 2**31


def held(rows) -> list[int]:
    return [row if row < END else -1 for row in rows]


@pytest.mark.parametrize("held_rows", [0, 1, 4, 7, 8])
@pytest.mark.parametrize("window", [8, 40])
def test_rows_of_a_workspace(window, held_rows):
    """The rows of the second request's window; the last ones pass the end, or none does."""
    M = 2**30 + window
    N = END - M - held_rows  # the request's token 0 is row M + N
    starts, lens = np.array([0, 1, 2], np.int32), np.array([1, window], np.int32)
    topk = np.full((2, 1), -1, np.int32)
    assert window <= M - N
    out, counts = sparse_mla.combine_topk_swa_indices(
        topk, starts, lens, lens, window, 4, 0, M, N, align=4
    )
    assert np.asarray(counts).tolist() == [1, window]
    assert np.asarray(out)[1, :window].tolist() == held(range(M + N, M + N + window))


@pytest.mark.parametrize("block_size", [1, 3, 15, 24, 100])
@pytest.mark.parametrize("window", [3, 40, 130])
def test_slots_of_a_window(window, block_size):
    """The last page of int32's slots, and one that begins behind them."""
    pages = -(-window // block_size) + 1
    table = np.arange(pages, dtype=np.int64) + END // block_size - pages // 2
    table = np.minimum(table, END - 1)
    out, _ = sparse_mla.build_mixed_sparse_indices(
        None, None, None, None, np.array([0, 1], np.int32), np.array([window], np.int32),
        np.zeros(1, np.int32), table.astype(np.int32)[None], block_size, None, 1,
        window=window, ratio=4, topk=0,
    )  # fmt: skip
    position = np.arange(window)
    want = table[position // block_size] * block_size + position % block_size
    assert np.asarray(out)[0, :window].tolist() == held(want.tolist())


def test_tokens_of_no_request():
    """What lies behind the arrays of a batch without requests is not read."""
    starts, lens = np.array([0, 3], np.int32)[:1], np.array([9], np.int32)[:0]
    topk = np.zeros((3, 2), np.int32)
    out, counts = sparse_mla.combine_topk_swa_indices(topk, starts, lens, lens, 4, 1, 2, 20, 10)
    assert (np.asarray(out) == -1).all()
    assert not np.asarray(counts).any()
