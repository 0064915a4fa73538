"""The index lists of DeepSeek V4, compared exactly with tests/kit/reference_index.py
(csrc/cpu/index/index_lists.c, csrc/cuda/index)."""

from __future__ import annotations

import numpy as np
import pytest
import reference_index as ref
from cases import int32
from helpers import assert_same_bits
from index_lists import (
    COMBINE,
    GLOBAL,
    INT32_MAX,
    INT32_MIN,
    MIXED,
    MIXED_BATCH,
    check,
    gathered,
    make_batch,
    mixed_arguments,
    positions,
    validity,
)
from library import DEVICE, sparse_mla

# --- vectors by hand -----------------------------------------------------------------------------


def test_global_topk_by_hand():
    got = sparse_mla.compute_global_topk_indices_and_lens(
        int32([3, 0, -1, 9], [5, -1, -1, -1]), int32(0, 0), int32([6, 1]), 4, np.ones(2, bool)
    )
    assert got[0].tolist() == [[27, 24, -1, -1], [5, -1, -1, -1]]
    assert got[1].tolist() == [2, 1]


def test_combine_by_hand():
    topk = int32([0, -1], [0, -1], [0, 1], [1, 0])
    starts, seq_lens, gather_lens = int32(0, 2, 4), int32(6, 9), int32(4, 4)
    want = [[0, 3, 4, 5, -1], [0, 4, 5, 6, -1], [8, 9, 11, 12, 13], [9, 8, 12, 13, 14]]
    for first in (0, 7, -5):  # the starts of a chunk are those of the batch
        got = sparse_mla.combine_topk_swa_indices(
            topk, starts + first, seq_lens, gather_lens, 3, 4, 2, 8, 3, align=1
        )
        assert got[0].tolist() == want
        assert got[1].tolist() == [4, 4, 5, 5]
    wide, _ = sparse_mla.combine_topk_swa_indices(
        topk, starts, seq_lens, gather_lens, 3, 4, 2, 8, 3
    )
    assert wide.shape == (4, 128)
    assert wide[:, :5].tolist() == want
    assert (wide[:, 5:] == -1).all()


def test_mixed_by_hand():
    got = sparse_mla.build_mixed_sparse_indices(
        int32([8, 9, -1]), int32([2, -1]), None, int32([0, 1], [1, 0]),
        *MIXED_BATCH.values(), decode_indices_are_local=True,
    )  # fmt: skip
    assert got[0].tolist() == [
        [8, 9, -1, 30, -1, -1, -1],
        [21, 22, 23, 12, 13, -1, -1],
        [22, 23, 24, 13, 12, -1, -1],
    ]
    assert got[1].tolist() == [4, 5, 5]


def test_windows_by_hand():
    """The windows of the metadata's example, made by the mixed lists of a batch of prefills."""
    got, lens = sparse_mla.build_mixed_sparse_indices(
        None, None, None, None, int32(0, 1, 4), int32(10, 6), int32(0, 1, 1, 1),
        int32([7, 3, 9], [5, 2, 4]), 4, None, 1, 5, 1, 0,
    )  # fmt: skip
    assert got.tolist() == [
        [13, 14, 15, 36, 37],
        [20, 21, 22, 23, -1],
        [20, 21, 22, 23, 8],
        [21, 22, 23, 8, 9],
    ]
    assert lens.tolist() == [5] * 4


# --- top-k positions to slots --------------------------------------------------------------------


@pytest.mark.parametrize("valid", [None, bool, np.uint8], ids=["all", "bool", "uint8"])
@pytest.mark.parametrize("block_size", [1, 3, 64, 100])
@pytest.mark.parametrize("K", [0, 1, 13, 255, 512, 1025, 2048])
def test_global_topk(K, block_size, valid):
    rng = np.random.default_rng([K, block_size])
    T, R, W = 11, 4, 7
    topk = positions(rng, T, K, W * block_size)
    table = rng.integers(0, 1000, (R, W)).astype(np.int32)
    table[:, 2] = [-1, -7, INT32_MIN, 5]
    ids = rng.integers(0, R, T + 2).astype(np.int32)
    is_valid = validity(rng, T + 1, valid)
    if is_valid is not None:
        ids[:T][is_valid[:T] == 0] = rng.choice([-1, R, INT32_MAX])  # nobody reads them
    want, lens = check(GLOBAL, topk, ids, table, block_size, is_valid)
    if K > 100 and valid is None:
        assert 0 < lens[3] < K, "some entries are dropped, others are kept"
        assert ((want >= 0).sum(1) == lens).all()


def test_global_topk_without_holes_keeps_everything():
    rng = np.random.default_rng(3)
    topk = np.stack([rng.permutation(4000)[:2000] for _ in range(3)]).astype(np.int32)
    table = rng.permutation(63).astype(np.int32).reshape(1, 63)
    _, lens = check(GLOBAL, topk, np.zeros(3, np.int32), table, 64, None)
    assert lens.tolist() == [2000] * 3


def test_global_topk_of_nothing():
    none = np.zeros((0, 8), np.int32)
    check(GLOBAL, none, np.zeros(0, np.int32), np.zeros((2, 3), np.int32), 4, None)
    check(GLOBAL, none, np.zeros(0, np.int32), np.zeros((0, 0), np.int32), 4, np.zeros(0, bool))
    topk, ids = int32([0, 1], [2, 3]), int32(0, 0)
    check(GLOBAL, topk, ids, np.zeros((1, 0), np.int32), 4, None)  # a table without pages
    check(GLOBAL, topk, int32(9, 9), np.zeros((0, 5), np.int32), 4, np.zeros(2, bool))


def test_global_topk_at_the_end_of_int32():
    most = INT32_MAX
    topk = int32([31, 32, 63, 64, most, 0])
    table = int32([2**26 - 1, 2**26, most])
    want, _ = check(GLOBAL, topk, int32(0), table, 32, None)
    assert want.tolist() == [[most, most - 31, -1, -1, -1, -1]]
    want, _ = check(GLOBAL, int32([most, most - 1, 0]), int32(0), int32([0, 0]), most, None)
    assert want.tolist() == [[0, most - 1, 0]]
    want, _ = check(GLOBAL, int32([most, 3]), int32(0), int32([5, 1]), most, None)
    assert want.tolist() == [[most, -1]]


def test_global_topk_of_strided_arrays():
    rng = np.random.default_rng(5)
    topk, table = positions(rng, 8, 40, 300), rng.integers(0, 99, (6, 10)).astype(np.int32)
    ids, is_valid = rng.integers(0, 6, 16).astype(np.int32), validity(rng, 16, np.uint8)
    check(GLOBAL, topk[::-1, 3:33], ids[::-2], table[::-1, ::-1], 30, is_valid[::-2])
    check(GLOBAL, np.broadcast_to(topk[2:3], (8, 40)), ids[:8], table[:, ::3], 30, is_valid[3:11])
    check(GLOBAL, topk, np.broadcast_to(ids[:1], 8), np.broadcast_to(table[:1], (6, 10)), 30, None)
    pair = np.zeros(8, [("valid", bool), ("other", np.uint8)])
    pair["valid"][::2] = True
    check(GLOBAL, topk, ids[:8], table, 30, pair["valid"])


# --- workspace rows of a prefill chunk -----------------------------------------------------------


@pytest.mark.parametrize("window", [1, 5, 128, 1000])
@pytest.mark.parametrize(("ratio", "topk"), [(1, 0), (4, 64), (4, 600), (128, 9)])
@pytest.mark.parametrize("align", [1, 128])
def test_combine(window, ratio, topk, align):
    rng = np.random.default_rng([window, ratio, topk])
    batch = make_batch(rng, decodes=0, prefills=5)
    M, N = 900, 190
    lists = positions(rng, batch.num_tokens, topk + 2, N)
    arguments = (batch.query_start_loc, batch.seq_lens, gathered(batch, window))
    _, lens = check(COMBINE, lists, *arguments, window, ratio, topk, M, N, align=align)
    assert (lens[batch.query_start_loc[-1] :] == 0).all(), "padding has no rows"
    assert lens.max() > 0
    later = (batch.query_start_loc + 1234, *arguments[1:])
    check(COMBINE, lists, *later, window, ratio, topk, M, N, align=align)


def test_combine_of_one_request_after_another():
    """The chunks of a batch have the rows that the batch would have as one chunk."""
    rng = np.random.default_rng(11)
    batch = make_batch(rng, decodes=3, prefills=7, padding=0)
    lists = np.minimum(positions(rng, batch.num_tokens, 32, 150), 149)
    lens = gathered(batch, 16)
    options = (16, 4, 30, 500, 175)
    whole, _ = check(COMBINE, lists, batch.query_start_loc, batch.seq_lens, lens, *options)
    for first in range(0, 10, 4):
        part = slice(first, min(first + 4, 10))
        starts = batch.query_start_loc[part.start : part.stop + 1]
        rows = slice(starts[0], starts[-1])
        got, _ = check(COMBINE, lists[rows], starts, batch.seq_lens[part], lens[part], *options)
        want = np.where(whole[rows] >= 0, whole[rows] - 500 * first, -1)
        assert_same_bits(got, want.astype(np.int32))


def test_combine_of_nothing():
    none = np.zeros((0, 4), np.int32)
    check(COMBINE, none, int32(5), np.zeros(0, np.int32), np.zeros(0, np.int32), 3, 4, 2, 8, 3)
    check(COMBINE, none, int32(5, 5, 5), int32(7, 9), int32(2, 2), 3, 4, 2, 8, 3)
    only_padding = positions(np.random.default_rng(1), 4, 4, 9)
    starts = int32(5, 5)
    _, lens = check(COMBINE, only_padding, starts, int32(7), int32(2), 3, 4, 2, 8, 3)
    assert lens.tolist() == [0] * 4
    no_columns = np.zeros((2, 0), np.int32)
    check(COMBINE, no_columns, int32(0, 2), int32(9), int32(4), 3, 1, 0, 8, 0, align=1)


def check_combine(lists, starts, seq_lens, gather_lens, window, ratio, topk, M, N) -> bool:
    """Whether the gathered tokens have all windows and their rows. If not, the CPU refuses them,
    and CUDA, which does not look, names no row for a token that is not there."""
    arguments = (lists, starts, seq_lens, gather_lens, window, ratio, topk, M, N)
    is_good = True
    for n, seq_len, gather_len in zip(
        np.diff(starts.astype(np.int64)), seq_lens, gather_lens, strict=True
    ):
        seen = ref.sight(int(seq_len) - int(n), int(window), 1, 0)[0] or [0]
        is_needed = n > 0 and seq_len > 0
        least, most = int(seq_len) - seen[0], min(int(seq_len), M - N)
        is_good = is_good and (not is_needed or least <= gather_len <= most)
    if is_good or DEVICE == "cuda":
        check(COMBINE, *arguments, align=1)
    else:
        with pytest.raises(ValueError, match="`gather_lens` must hold the windows of request"):
            sparse_mla.combine_topk_swa_indices(*arguments, align=1)
    return is_good


def test_combine_at_the_ends_of_int32():
    most = INT32_MAX
    lists = int32([most, most - 5, 0, 5], [most - 6, -1, INT32_MIN, 6])
    for M, is_good in ((0, False), (5, False), (7, True), (most, True)):
        two = int32(0, 1, 2), int32(99, 99), int32(4, 4)
        assert check_combine(lists, *two, 4, 4, 4, M, 3) == is_good
    for N, M in ((0, 9), (0, most), (most - 9, most)):
        assert check_combine(lists, int32(0, 2), int32(99), int32(9), 4, 4, 4, M, N)
    for N in (0, most - 3, most):
        assert not check_combine(lists, int32(0, 2), int32(99), int32(9), 4, 4, 4, 5, N)
    assert check_combine(lists, int32(0, 2), int32(most), int32(9), 4, 4, 4, 29, 20)
    for first in (most - 2, INT32_MIN):
        starts = np.array([first, first + 2], np.int32)
        assert check_combine(lists, starts, int32(99), int32(9), 4, 4, 4, 29, 20)


@pytest.mark.parametrize("window", [1, 3, 128])
@pytest.mark.parametrize("room", [0, 5, 9, 60])
def test_combine_of_every_gather_len(room, window):
    """Rows of tokens are never compressed rows, of the same request or of the next one."""
    lists = positions(np.random.default_rng(2), 9, 8, 50)
    M, N, found = 50 + room, 50, set()
    for seq_len in (*range(12), -3, INT32_MIN):
        for gather_len in (*range(-2, 14), INT32_MIN, INT32_MAX):
            lens = int32(20, seq_len, 4), int32(min(room, 20), gather_len, min(room, 4))
            is_good = check_combine(lists, int32(0, 0, 6, 6), *lens, window, 4, 8, M, N)
            found.add((is_good, seq_len > 0))
    assert found >= {(True, False), (False, True)}
    assert room < 5 or (True, True) in found


def test_combine_of_strided_arrays():
    rng = np.random.default_rng(6)
    batch = make_batch(rng, decodes=0, prefills=4)
    lists = positions(rng, batch.num_tokens, 40, 90)
    twice = [np.repeat(x, 2) for x in (batch.query_start_loc, batch.seq_lens, gathered(batch, 8))]
    options = (8, 4, 20, 400, 180)
    check(COMBINE, lists[:, 3:30], *(x[::2] for x in twice), *options)
    back = [np.ascontiguousarray(x[::-2])[::-1] for x in twice]
    check(COMBINE, np.broadcast_to(lists[:1], lists.shape), *back, *options)


# --- slots of a mixed batch ----------------------------------------------------------------------


@pytest.mark.parametrize("valid", [None, bool, np.uint8], ids=["all", "bool", "uint8"])
@pytest.mark.parametrize("local", [True, False], ids=["local", "global"])
@pytest.mark.parametrize("window", [1, 7, 128, 900])
@pytest.mark.parametrize(
    ("ratio", "topk", "decode_topk"), [(4, 32, 32), (4, 301, 0), (128, 0, 6), (128, 5, 512)]
)
def test_mixed(window, ratio, topk, decode_topk, local, valid):
    rng = np.random.default_rng([window, ratio, topk, local])
    batch = make_batch(rng)
    arguments = mixed_arguments(
        rng, batch, window=window, ratio=ratio, topk=topk, decode_topk=decode_topk, local=local
    )
    options = {"is_valid": validity(rng, batch.num_decode_tokens + 1, valid)}
    want, lens = check(MIXED, *arguments, decode_indices_are_local=local, **options)
    assert want.shape[1] == window + -(-max(topk, decode_topk) // 4) * 4
    padding = slice(int(batch.query_start_loc[-1]), None)
    assert (want[padding] == -1).all()
    assert (lens[padding] == window).all()


@pytest.mark.parametrize("decodes", [0, 3])
@pytest.mark.parametrize("prefills", [0, 3])
@pytest.mark.parametrize("width", [0, 1, 40])
def test_mixed_tables_shorter_and_longer_than_contexts(decodes, prefills, width):
    rng = np.random.default_rng([decodes, prefills, width])
    batch = make_batch(rng, decodes, prefills)
    arguments = list(
        mixed_arguments(rng, batch, window=20, ratio=4, topk=9, decode_topk=9, local=True)
    )
    arguments[7] = batch.table(rng, 1, 16, width)
    arguments[9] = batch.table(rng, 4, 5, width)
    check(MIXED, *arguments, decode_indices_are_local=True)


def test_mixed_without_lengths_has_the_whole_width():
    rng = np.random.default_rng(8)
    batch = make_batch(rng, 3, 0, padding=0)
    arguments = list(
        mixed_arguments(rng, batch, window=6, ratio=4, topk=0, decode_topk=7, local=False)
    )
    arguments[2] = None
    _, lens = check(MIXED, *arguments)
    assert (lens == 13).all()


def test_mixed_layers_without_compressed_rows():
    """As for layers that see the window alone: no compressed lists, no compressed table."""
    rng = np.random.default_rng(9)
    batch = make_batch(rng)
    (swa, _, _, prefill, *rest) = mixed_arguments(
        rng, batch, window=9, ratio=1, topk=0, decode_topk=0, local=False
    )
    rest[5:7] = None, 16
    for decode in (None, np.zeros((len(swa), 0), np.int32)):
        for local in (False, True):
            check(MIXED, swa, decode, None, prefill, *rest, decode_indices_are_local=local)
            check(MIXED, swa, decode, None, None, *rest, decode_indices_are_local=local)


def test_mixed_parts_that_are_absent():
    rng = np.random.default_rng(10)
    batch = make_batch(rng, 0, 3)
    (swa, decode, _, prefill, *rest) = mixed_arguments(
        rng, batch, window=9, ratio=4, topk=8, decode_topk=12, local=True
    )
    check(MIXED, swa, decode, None, prefill, *rest, decode_indices_are_local=True)
    check(MIXED, None, None, None, prefill, *rest)
    check(MIXED, swa[:, :0], decode[:, :0], None, prefill, *rest)  # without rows, any width
    check(MIXED, None, None, int32(), prefill, *rest)
    decodes = make_batch(rng, 3, 0, padding=0)
    (swa, decode, _, prefill, *rest) = mixed_arguments(
        rng, decodes, window=9, ratio=4, topk=8, decode_topk=6, local=True
    )
    for none in (prefill, prefill[:, :0], None):  # without rows, `topk` only makes columns
        check(MIXED, swa, decode, None, none, *rest, decode_indices_are_local=True)


def test_mixed_of_nothing():
    none = np.zeros((0, 0), np.int32)
    empty = np.zeros(0, np.int32)
    rest = (int32(0), empty, empty, none, 4, none, 4, 3, 4, 2)
    check(MIXED, none, none, None, none, *rest)
    check(MIXED, None, None, None, None, *rest)


def test_mixed_windows_at_the_ends_of_int32():
    most = INT32_MAX
    table = int32([0, 0, 0], [most, 1, -1])
    for block_size in (most, most - 1, 2**30, 1):
        for seq_len in (most, most - 2, 5):
            check(
                MIXED, None, None, None, int32([0, most], [1, most - 1]),
                int32(0, 1, 2), int32(seq_len, seq_len), int32(0, 1), table, block_size,
                table, block_size, 6, 1, 2,
            )  # fmt: skip


def test_mixed_batches_that_cannot_be():
    """Requests shorter than their queries, tokens of another request: nothing breaks, and no token
    past the end of its request sees anything."""
    rng = np.random.default_rng(12)
    topk = positions(rng, 6, 8, 20)
    table = np.arange(20, dtype=np.int32).reshape(2, 10)
    for seq_len in (5, 1, 0, -3, INT32_MIN):
        rest = (
            int32(0, 6, 6),
            int32(seq_len, 9),
            np.zeros(6, np.int32),
            table,
            4,
            table,
            4,
            5,
            4,
            8,
        )
        check(MIXED, None, None, None, topk, *rest)
    rest = (int32(0, 3, 6), int32(9, 30), np.zeros(6, np.int32), table, 4, table, 4, 5, 4, 8)
    out, lens = sparse_mla.build_mixed_sparse_indices(None, None, None, topk, *rest)
    assert (out[3:] == -1).all()
    assert lens[3:].tolist() == [5] * 3


def test_mixed_of_strided_arrays():
    rng = np.random.default_rng(13)
    batch = make_batch(rng)
    arguments = list(
        mixed_arguments(rng, batch, window=9, ratio=4, topk=8, decode_topk=8, local=True)
    )
    for i in (0, 1, 3):  # columns of a wider array, last row first
        wide = np.full((len(arguments[i]), arguments[i].shape[1] + 5), 77, np.int32)
        wide[::-1, 2:-3] = arguments[i]
        arguments[i] = wide[::-1, 2:-3]
    for i in (4, 5, 6):
        arguments[i] = np.repeat(arguments[i], 3)[::3]
    for i in (7, 9):
        arguments[i] = np.ascontiguousarray(arguments[i].T[::-1, ::-1])[::-1, ::-1].T
    is_valid = np.repeat(validity(rng, batch.num_decode_tokens, bool), 2)[::2]
    check(MIXED, *arguments, decode_indices_are_local=True, is_valid=is_valid)


def test_lists_are_the_same_for_any_number_of_tokens():
    """Enough tokens to share out among threads, and to give each a warp of its own on GPUs of up to
    150 multiprocessors, and their rows are those of the tokens alone."""
    rng = np.random.default_rng(14)
    batch = make_batch(rng, 900, 100)
    assert batch.num_tokens > 2400
    (swa, decode, _, prefill, *rest) = mixed_arguments(
        rng, batch, window=128, ratio=4, topk=64, decode_topk=64, local=True
    )
    whole, lens = check(MIXED, swa, decode, None, prefill, *rest, decode_indices_are_local=True)
    some = batch.num_decode_tokens
    alone = sparse_mla.build_mixed_sparse_indices(
        swa[7:9], decode[7:9], None, None, *rest[:2], rest[2][7:9], *rest[3:],
        decode_indices_are_local=True,
    )  # fmt: skip
    assert_same_bits(alone[0], whole[7:9])
    assert_same_bits(alone[1], lens[7:9])
    topk, ids = np.tile(decode, (4, 5)), np.tile(rest[2][:some], 4)
    check(GLOBAL, topk, ids, rest[5], 5, None)
    prefills = make_batch(rng, 0, 140)
    assert prefills.num_tokens > 2400
    lists = positions(rng, prefills.num_tokens, 300, 190)
    check(
        COMBINE, lists, prefills.query_start_loc, prefills.seq_lens, gathered(prefills, 16),
        16, 4, 300, 900, 190, row_gap=4,
    )  # fmt: skip
