"""cp_local_positions, cp_local_topk and cp_local_lengths, compared exactly with a rank's positions
counted one by one (csrc/cpu/index/rank_lists.c, csrc/cuda/index/rank_lists.cu)."""

from __future__ import annotations

import re

import numpy as np
import pytest
from cases import int32
from helpers import Guarded, assert_same_bits
from library import sparse_mla

INT32_MAX, INT32_MIN, INT64_MAX = 2**31 - 1, -(2**31), 2**63 - 1


def deal(count: int, ranks: int, interleave: int) -> tuple[np.ndarray, np.ndarray]:
    """The rank of each position and its number there: runs of positions, dealt like cards."""
    owners, numbers, dealt = [], [], [0] * ranks
    while len(owners) < count:
        for rank in range(ranks):
            for _ in range(interleave):
                owners.append(rank)
                numbers.append(dealt[rank])
                dealt[rank] += 1
    return np.array(owners[:count], np.int64), np.array(numbers[:count], np.int64)


def own_of(positions: np.ndarray, cp) -> np.ndarray:
    """Local positions of small positions."""
    rank, ranks, interleave = cp or (0, 1, 1)
    owners, numbers = deal(max(int(positions.max(initial=0)) + 1, 1), ranks, interleave)
    at = np.maximum(positions, 0)
    own = (positions >= 0) & (owners[at] == rank)
    return np.where(own, numbers[at], -1).astype(positions.dtype)


def check_positions(positions: np.ndarray, cp, want: np.ndarray) -> None:
    """Into an output between red zones, and into a new one."""
    before = positions.copy()
    out = Guarded(want.shape, positions.dtype, row_gap=3 if want.ndim == 2 else 0)
    got = sparse_mla.cp_local_positions(positions, cp=cp, out=out.array)
    assert got is out.array
    assert_same_bits(out.check(), want, "out")
    fresh = sparse_mla.cp_local_positions(positions, cp=cp)
    assert_same_bits(fresh, want, "new out")
    assert_same_bits(positions, before, "positions")


def check_lists(lists: np.ndarray, cp, row_gap: int = 3) -> tuple[np.ndarray, np.ndarray]:
    before = lists.copy()
    own = own_of(lists, cp)
    want, want_lens = np.full_like(own, -1), (own >= 0).sum(1).astype(np.int32)
    for t, row in enumerate(own):
        want[t, : want_lens[t]] = row[row >= 0]
    out = Guarded(want.shape, np.int32, row_gap=row_gap)
    lens = Guarded((len(want), 2), np.int32)
    got = sparse_mla.cp_local_topk(lists, cp=cp, out=out.array, lens=lens.array[:, 0])
    assert got[0] is out.array
    assert_same_bits(out.check(), want, "out")
    assert_same_bits(np.ascontiguousarray(lens.array[:, 0]), want_lens, "lens")
    if want_lens.size:
        assert (np.ascontiguousarray(lens.array[:, 1]).view(np.uint8) == 0xA5).all()
    fresh, fresh_lens = sparse_mla.cp_local_topk(lists, cp=cp)
    assert_same_bits(fresh, want, "new out")
    assert_same_bits(fresh_lens, want_lens, "new lens")
    assert_same_bits(lists, before, "topk_indices")
    return want, want_lens


# --- vectors by hand -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_the_vectors_of_the_contract(dtype):
    positions = np.array([0, 3, 4, 9, -1, 13], dtype)
    for rank, want in enumerate(([0, 3, -1, 5, -1, -1], [-1, -1, 0, -1, -1, 5])):
        check_positions(positions, (rank, 2, 4), np.array(want, dtype))
        check_positions(positions[None], (rank, 2, 4), np.array([want], dtype))
        rows = np.repeat(positions[None], 3, 0)
        check_positions(rows, (rank, 2, 4), np.array([want] * 3, dtype))
    for rank, want in enumerate(([3, 4, 6, 8], [0, 2, 4, 6])):
        got = sparse_mla.cp_local_lengths(int32(3, 6, 10, 14), cp=(rank, 2, 4))
        assert_same_bits(got, int32(*want), "lengths")


def test_lists_by_hand():
    lists = int32([13, 0, -1, 4, 3, 9], [5, 6, 7, 4, 12, -9], [-1] * 6)
    out, lens = check_lists(lists, (0, 2, 4))
    assert out.tolist() == [[0, 3, 5, -1, -1, -1], [-1] * 6, [-1] * 6]
    assert lens.tolist() == [3, 0, 0]
    out, lens = check_lists(lists, (1, 2, 4))
    assert out.tolist() == [[5, 0, -1, -1, -1, -1], [1, 2, 3, 0, 4, -1], [-1] * 6]
    assert lens.tolist() == [2, 5, 0]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_one_rank_has_all(dtype):
    """With cp None, and with one rank of any interleave."""
    positions = np.array([5, -1, 0, 7, -3, np.iinfo(dtype).max, np.iinfo(dtype).min], dtype)
    for cp in (None, (0, 1, 1), (0, 1, 64), (0, 1, INT32_MAX)):
        check_positions(positions, cp, np.maximum(positions, -1))
        lens = int32(7, 0, -5, INT32_MAX)
        got = sparse_mla.cp_local_lengths(lens, cp=cp)
        assert_same_bits(got, np.maximum(lens, 0), f"lengths of {cp}")
    out, lens = check_lists(int32([3, -1, 0, -7]), None)
    assert out.tolist() == [[3, 0, -1, -1]]
    assert lens.tolist() == [2]


# --- random worlds -------------------------------------------------------------------------------


@pytest.mark.parametrize("part", range(10))
def test_random_worlds(part):
    """50 worlds of each part: all positions and lengths around every border, and random lists."""
    for seed in range(50 * part, 50 * part + 50):
        rng = np.random.default_rng(seed)
        ranks, interleave = int(rng.integers(1, 9)), int(rng.integers(1, 65))
        period = ranks * interleave
        count = int(rng.integers(1, 4 * period + 2))
        owners, numbers = deal(count, ranks, interleave)
        positions = np.arange(count).astype(rng.choice([np.int32, np.int64]))
        lens = np.unique(np.clip(np.arange(-1, 4) * interleave + rng.integers(-1, 2), -1, count))
        lens = np.concatenate([lens, [0, count, *rng.integers(0, count + 1, 5)]]).astype(np.int32)
        lists = rng.integers(-3, count, (int(rng.integers(1, 5)), int(rng.integers(0, 200))))
        total, num_listed = np.zeros_like(lens), 0
        for rank in range(ranks):
            cp = (rank, ranks, interleave)
            want = np.where(owners == rank, numbers, -1).astype(positions.dtype)
            check_positions(positions, cp, want)
            got = sparse_mla.cp_local_lengths(lens, cp=cp)
            own = [(owners[: max(n, 0)] == rank).sum() for n in lens]
            assert_same_bits(got, int32(*own), f"lengths of seed {seed}")
            total += got
            num_listed += check_lists(lists.astype(np.int32), cp)[1].sum()
        assert (total == np.maximum(lens, 0)).all(), "every position has one rank"
        assert num_listed == (lists >= 0).sum()


@pytest.mark.parametrize("K", [0, 1, 31, 32, 33, 255, 1023, 1024, 1025, 2048, 2049, 5000])
def test_widths(K):
    rng = np.random.default_rng(K)
    lists = rng.integers(-200, 4000, (7, K)).astype(np.int32)
    lists[1], lists[2] = -1, np.arange(K) % 64  # nothing, and entries of rank 0 alone
    lists[3] = 64 + np.arange(K) % 64  # entries of rank 1 alone
    for rank in range(2):
        check_lists(lists, (rank, 2, 64), row_gap=5)
        check_positions(lists, (rank, 2, 64), own_of(lists, (rank, 2, 64)))


@pytest.mark.parametrize("rows", [0, 1, 40, 700])
def test_many_rows(rows):
    """More than one thread on the CPU, and more rows than a GPU has CTAs at a time."""
    rng = np.random.default_rng(rows)
    lists = rng.integers(-20, 4000, (rows, 129)).astype(np.int32)
    check_lists(lists, (2, 3, 5))
    check_positions(lists, (2, 3, 5), own_of(lists, (2, 3, 5)))
    long = lists.astype(np.int64)
    check_positions(long, (2, 3, 5), own_of(long, (2, 3, 5)))


def test_many_positions_and_lengths():
    positions = np.arange(100_000, dtype=np.int64)[::-1]  # a negative stride
    check_positions(positions, (3, 4, 16), own_of(positions, (3, 4, 16)))
    lens = np.arange(-5, 5000, dtype=np.int32)
    owners, _ = deal(5000, 4, 16)
    counts = np.concatenate([[0] * 6, np.cumsum(owners == 3)])[: len(lens)].astype(np.int32)
    got = sparse_mla.cp_local_lengths(lens, cp=(3, 4, 16))
    assert_same_bits(got, counts, "lengths")
    out = Guarded(lens.shape, np.int32)
    sparse_mla.cp_local_lengths(lens[::-1], cp=(3, 4, 16), out=out.array)
    assert_same_bits(out.check(), counts[::-1].copy(), "lengths")


def test_strides():
    """Every other column, every other row, columns as rows, and one row that stands for all."""
    rng = np.random.default_rng(3)
    wide = rng.integers(-3, 300, (8, 60)).astype(np.int32)
    for view in (wide[:, ::2], wide[::2, 3:50], wide.T, wide[::-1, ::-1]):
        check_positions(view, (1, 3, 4), own_of(view, (1, 3, 4)))
    same = np.broadcast_to(wide[0], (4, 60))
    assert_same_bits(
        sparse_mla.cp_local_positions(same, cp=(1, 3, 4)), own_of(same, (1, 3, 4)), "rows"
    )
    for view in (wide[::2], wide[:, 5:40], wide[::-1]):
        check_lists(view, (1, 3, 4))


# --- the ends of the integers --------------------------------------------------------------------


def by_formula(position: int, cp) -> int:
    rank, ranks, interleave = cp
    if position < 0 or position // interleave % ranks != rank:
        return -1
    return position // (interleave * ranks) * interleave + position % interleave


SHARES = [
    *((rank, ranks, interleave) for ranks, interleave in ((2, 4), (3, 5), (7, 64), (8, 1)) for
      rank in (0, ranks - 1)),
    *((0, INT32_MAX, 1), (INT32_MAX - 1, INT32_MAX, 1), (3, INT32_MAX, INT32_MAX)),
    *((0, 1, INT32_MAX), (0, 2, INT32_MAX), (1, 2, INT32_MAX), (1, 2, 2**30)),
]  # fmt: skip


@pytest.mark.parametrize("cp", SHARES)
def test_large_positions(cp):
    edges = [0, 1, 2**30, INT32_MAX - 1, INT32_MAX, INT32_MIN, -1]
    more = [2**31, 2**32 - 1, 2**32, 2**40 + 7, 2**62, INT64_MAX - 1, INT64_MAX, -(2**63)]
    rng = np.random.default_rng(1)
    for dtype, values in (
        (np.int32, [*edges, *map(int, rng.integers(0, INT32_MAX, 50))]),
        (np.int64, [*edges, *more, *map(int, rng.integers(0, INT64_MAX, 50))]),
    ):
        want = np.array([by_formula(x, cp) for x in values], dtype)
        check_positions(np.array(values, dtype), cp, want)
    lens = int32(0, 1, 2**30, INT32_MAX - 1, INT32_MAX, INT32_MIN)
    got = sparse_mla.cp_local_lengths(lens, cp=cp)
    rank, ranks, interleave = cp
    for n, count in zip(lens.tolist(), got.tolist(), strict=True):
        whole, rest = divmod(max(n, 0), ranks * interleave)
        assert count == whole * interleave + min(max(rest - rank * interleave, 0), interleave)


# --- errors --------------------------------------------------------------------------------------

SHARE = "`cp` must be (rank, ranks, interleave) with 0 <= rank < ranks and interleave >= 1, got {}"
CALLS = {
    "cp_local_positions": lambda **more: sparse_mla.cp_local_positions(int32(1, 2), **more),
    "cp_local_topk": lambda **more: sparse_mla.cp_local_topk(int32([1, 2]), **more),
    "cp_local_lengths": lambda **more: sparse_mla.cp_local_lengths(int32(1, 2), **more),
}


@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize(
    "cp", [(2, 2, 1), (-1, 2, 1), (0, 0, 1), (0, 2, 0), (0, -2, 1), (0, 2, -1), (1, 0, 0),
           (0, 2**31, 1), (0, 2, 2**31)],
)  # fmt: skip
def test_bad_shares(op, cp):
    out = Guarded((1, 2) if op == "cp_local_topk" else (2,), np.int32)
    text = f"{op}: {SHARE.format(cp)}"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        CALLS[op](cp=cp, out=out.array)
    out.check(written=False)
    assert (np.ascontiguousarray(out.array).view(np.uint8) == 0xA5).all(), "nothing is written"


@pytest.mark.parametrize("op", CALLS)
def test_a_share_is_needed(op):
    with pytest.raises(TypeError, match=r"missing .*'cp'"):
        CALLS[op]()
    with pytest.raises(ValueError, match=r"`cp` must be a tuple of 3 ints, got \(0, 2\)"):
        CALLS[op](cp=(0, 2))


def test_bad_arrays():
    cp, x = (0, 2, 4), int32([1, 2], [3, 4])
    for call, text in (
        (lambda: sparse_mla.cp_local_positions(x[None], cp=cp),
         "cp_local_positions: `positions` must have 1 or 2 dimensions, got shape [1, 2, 2]"),
        (lambda: sparse_mla.cp_local_positions(np.array(3, np.int32), cp=cp),
         "`positions` must have 1 or 2 dimensions, got shape []"),
        (lambda: sparse_mla.cp_local_lengths(x[0], cp=cp, out=np.zeros(4, np.int32)[::2]),
         "`out` must have a contiguous last dimension"),
        (lambda: sparse_mla.cp_local_positions(x, cp=cp, out=x[:1]),
         "`out` must have shape [2, 2], got [1, 2]: the shape of `positions`"),
        (lambda: sparse_mla.cp_local_positions(x, cp=cp, out=x),
         "`out` must not overlap `positions`"),
        (lambda: sparse_mla.cp_local_topk(x[0], cp=cp),
         "`topk_indices` must have shape [any, any], got [2]"),
        (lambda: sparse_mla.cp_local_topk(x, cp=cp, lens=int32(1)),
         "`lens` must have shape [2], got [1]"),
        (lambda: sparse_mla.cp_local_lengths(x, cp=cp),
         "`seq_lens` must have shape [any], got [2, 2]"),
    ):  # fmt: skip
        with pytest.raises((ValueError, TypeError), match=re.escape(text)):
            call()
    for call, text in (
        (lambda: sparse_mla.cp_local_positions(x.astype(np.int16), cp=cp),
         "`positions` must be int32 or int64, got int16"),
        (lambda: sparse_mla.cp_local_positions(x, cp=cp, out=np.zeros((2, 2), np.int64)),
         "`out` must be int32, got int64"),
        (lambda: sparse_mla.cp_local_topk(x.astype(np.int64), cp=cp),
         "`topk_indices` must be int32, got int64"),
        (lambda: sparse_mla.cp_local_lengths(x[0].astype(np.int64), cp=cp),
         "`seq_lens` must be int32, got int64"),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=re.escape(text)):
            call()
