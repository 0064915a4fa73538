"""The operators that build index lists, DeepSeek V4's and a rank's, for the tables of moved bytes:
a batch of long requests, as a step of prefills has it, and what NumPy says about some tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import sparse_mla
from bench.common.moves import Move

NUM_REQUESTS = 32
CONTEXT = 65536
BLOCK_SIZE = 64
WINDOW, RATIO, TOPK = 128, 4, 512
INTERLEAVE = 64
SAMPLED = slice(None, None, 127)


def make_moves(num_tokens: int, a: Any) -> Iterator[Move]:
    put, get = a.put, a.get
    rng = np.random.default_rng(0)
    query_len = num_tokens // NUM_REQUESTS
    rows, pages = CONTEXT // RATIO, CONTEXT // BLOCK_SIZE
    gather_len = query_len + WINDOW - 1
    workspace_rows = rows + gather_len

    topk = rng.integers(0, (CONTEXT - query_len) // RATIO, (num_tokens, TOPK)).astype(np.int32)
    starts = np.arange(NUM_REQUESTS + 1, dtype=np.int32) * query_len
    ids = np.repeat(np.arange(NUM_REQUESTS, dtype=np.int32), query_len)
    tables = [
        rng.permutation(NUM_REQUESTS * n).astype(np.int32).reshape(NUM_REQUESTS, -1)
        for n in (pages, pages // RATIO)
    ]
    lengths = [np.full(NUM_REQUESTS, n, np.int32) for n in (CONTEXT, gather_len)]

    tokens = np.arange(num_tokens)[SAMPLED]
    last = CONTEXT - query_len + tokens % query_len
    window = (last[:, None] - WINDOW + 1) + np.arange(WINDOW)
    chosen, request = topk[tokens], ids[tokens, None]
    chosen_slots = find_slots(tables[1], request, chosen)
    base = workspace_rows * request
    gathered = base + rows + window - (CONTEXT - gather_len)
    wanted = {
        "compute_global_topk_indices_and_lens": chosen_slots,
        "combine_topk_swa_indices": np.concatenate([chosen + base, gathered], 1),
        "build_mixed_sparse_indices": np.concatenate(
            [find_slots(tables[0], request, window), chosen_slots], 1
        ),
    }

    lists, at, requests = put(topk), put(starts), put(ids)
    swa, compressed = (put(table) for table in tables)
    ends, gathers = (put(x) for x in lengths)
    shape = (WINDOW, RATIO, TOPK)
    arguments: dict[str, tuple[Any, ...]] = {
        "compute_global_topk_indices_and_lens": (lists, requests, compressed, BLOCK_SIZE, None),
        "combine_topk_swa_indices": (lists, at, ends, gathers, *shape, workspace_rows, rows),
        "build_mixed_sparse_indices": (
            *(None, None, None, lists, at, ends, requests),
            *(swa, BLOCK_SIZE, compressed, BLOCK_SIZE, *shape),
        ),
    }
    for name, want in wanted.items():
        out = put(np.zeros((num_tokens, want.shape[1]), np.int32))
        lens = put(np.zeros(num_tokens, np.int32))
        operator = getattr(sparse_mla, name)
        given = arguments[name]

        def call(
            operator: Any = operator, given: Any = given, out: Any = out, lens: Any = lens
        ) -> object:
            return operator(*given, out=out, lens=lens)

        def is_right(want: np.ndarray = want, out: Any = out, lens: Any = lens) -> bool:
            lengths_are_right = bool((get(lens) == want.shape[1]).all())
            return lengths_are_right and np.array_equal(get(out)[SAMPLED], want)

        yield Move(name, call, topk.nbytes + out.nbytes, is_right)
    yield from make_rank_moves(topk, a)


def make_rank_moves(topk: np.ndarray, a: Any) -> Iterator[Move]:
    """The lists of a rank of two, with holes and without."""
    put, get = a.put, a.get
    lists, out = put(topk), put(np.zeros_like(topk))
    lens = put(np.zeros(len(topk), np.int32))
    sampled = topk[SAMPLED]
    is_own = sampled // INTERLEAVE % 2 == 0
    own = np.where(is_own, sampled // (2 * INTERLEAVE) * INTERLEAVE + sampled % INTERLEAVE, -1)
    order = np.argsort(own < 0, axis=1, kind="stable")
    cp = (0, 2, INTERLEAVE)

    def close_holes() -> object:
        return sparse_mla.cp_local_topk(lists, cp=cp, out=out, lens=lens)

    def keep_holes() -> object:
        return sparse_mla.cp_local_positions(lists, cp=cp, out=out)

    def is_closed() -> bool:
        are_counted = np.array_equal(get(lens)[SAMPLED], is_own.sum(1))
        closed = np.take_along_axis(own, order, 1)
        return are_counted and np.array_equal(get(out)[SAMPLED], closed)

    def is_kept() -> bool:
        return np.array_equal(get(out)[SAMPLED], own)

    yield Move("cp_local_topk", close_holes, 2 * topk.nbytes, is_closed)
    yield Move("cp_local_positions", keep_holes, 2 * topk.nbytes, is_kept)


def find_slots(table: np.ndarray, request: np.ndarray, positions: np.ndarray) -> np.ndarray:
    return table[request, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
