"""top_k_merge, compared exactly with a sort of all entries, and with top_k_per_row of all keys
(csrc/cpu/topk/top_k_merge.c, csrc/cuda/topk/top_k_merge.cu)."""

from __future__ import annotations

import re

import numpy as np
import pytest
import test_top_k as top_k
from cases import int32
from helpers import Guarded, assert_same_bits
from library import sparse_mla

import sparse_mla as package

INT32_MAX = 2**31 - 1


def expect(indices, values, k: int) -> np.ndarray:
    out = np.full((indices.shape[1], k), -1, np.int32)
    for t in range(len(out)):
        positions, keys = indices[:, t].ravel(), top_k.keys_of(values[:, t].ravel())
        best = sorted((-int(key), int(p)) for p, key in zip(positions, keys, strict=True) if p >= 0)
        chosen = sorted(p for _, p in best[:k])
        out[t, : len(chosen)] = chosen
    return out


def check(indices, values, k: int) -> np.ndarray:
    """A call with an output between red zones, one without outputs, and the sort agree."""
    want = expect(indices, values, k)
    before = indices.copy(), values.copy()
    out = Guarded(want.shape, np.int32, row_gap=3)
    got = sparse_mla.top_k_merge(indices, values, k=k, out=out.array)
    assert got is out.array
    assert_same_bits(out.check(), want, "out")
    assert_same_bits(sparse_mla.top_k_merge(indices, values, k=k), want, "new out")
    assert_same_bits(indices, before[0], "indices")
    assert_same_bits(values, before[1], "values")
    return want


def split(rng, num_lists: int, num_tokens: int, K: int, most: int | None = None):
    """Disjoint lists of ascending positions, of which some are shorter than K."""
    most = most or 3 * num_lists * K + 5
    indices = np.full((num_lists, num_tokens, K), -1, np.int32)
    for t in range(num_tokens):
        order = rng.permutation(most)[: num_lists * K].reshape(num_lists, K)
        for n in range(num_lists):
            count = K if rng.random() < 0.6 else int(rng.integers(0, K + 1))
            indices[n, t, :count] = np.sort(order[n, :count])
    return indices


def scores(rng, kind: str, indices, dtype) -> np.ndarray:
    num_lists, num_tokens, K = indices.shape
    drawn = top_k.KINDS[kind](rng, num_tokens, max(num_lists * K, 1))
    with np.errstate(over="ignore", invalid="ignore"):
        drawn = np.asarray(drawn, np.float32)[:, : num_lists * K].astype(dtype)
    drawn = drawn.reshape(num_tokens, num_lists, K).transpose(1, 0, 2).copy()
    drawn[indices < 0] = -np.inf
    return drawn


# --- vectors by hand -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", top_k.DTYPES)
def test_by_hand(dtype):
    indices = int32([[0, 3, 8]], [[5, 6, -1]])
    values = np.array([[[2, 1, 7]], [[7, 1, -np.inf]]]).astype(dtype)
    for k, want in (
        (1, [5]), (2, [5, 8]), (3, [0, 5, 8]), (4, [0, 3, 5, 8]), (5, [0, 3, 5, 6, 8]),
        (7, [0, 3, 5, 6, 8, -1, -1]),
    ):  # fmt: skip
        assert check(indices, values, k).tolist() == [want]
    # the first positions of equal scores, wherever they are; -0 equals 0; NaN is below -inf
    for numbers, want in (
        ([[1, 1, 1], [1, 1, 1]], [0, 3, 5]),
        ([[-0.0, 0, 0], [0, -0.0, -np.inf]], [0, 3, 5]),
        ([[np.nan, -np.inf, np.nan], [np.nan, 0, 0]], [0, 3, 6]),
        ([[np.nan, np.nan, np.nan], [-np.nan, np.nan, np.nan]], [0, 3, 5]),
        ([[np.inf, 1, 3e38], [np.inf, 3e38, 0]], [0, 5, 6]),
        ([[0, 1e-45, 0], [-1e-45, 0, 0]], [0, 3, 6] if dtype == np.float32 else [0, 3, 5]),
    ):
        values = np.array(numbers, np.float32)[:, None].astype(dtype)
        assert check(indices, values, 3).tolist() == [want], numbers


def test_entries_below_0_are_none():
    """Wherever they stand, and whatever their scores."""
    indices = int32([[-1, 4, -7, 9]], [[-1, -1, 2, -(2**31)]], [[-1] * 4])
    values = np.array([[[9, 1, 9, 2]], [[9, 9, 3, 9]], [[np.inf] * 4]], np.float32)
    assert check(indices, values, 2).tolist() == [[2, 9]]
    assert check(indices, values, 4).tolist() == [[2, 4, 9, -1]]
    assert check(indices[2:], values[2:], 2).tolist() == [[-1, -1]]


def test_the_largest_positions():
    indices = int32([[0, INT32_MAX - 1]], [[INT32_MAX - 2, INT32_MAX]])
    values = np.ones((2, 1, 2), np.float32)
    assert check(indices, values, 3).tolist() == [[0, INT32_MAX - 2, INT32_MAX - 1]]
    assert check(indices, values, 4).tolist() == [[0, *range(INT32_MAX - 2, INT32_MAX), INT32_MAX]]
    values[1, 0, 1] = 2
    assert check(indices, values, 1).tolist() == [[INT32_MAX]]


# --- distributions and sizes ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", top_k.DTYPES)
@pytest.mark.parametrize("kind", top_k.KINDS)
def test_distributions(kind, dtype):
    rng = np.random.default_rng(len(kind))
    for num_lists, K, k in ((1, 70, 20), (3, 40, 40), (8, 33, 64), (2, 300, 300), (5, 7, 50)):
        indices = split(rng, num_lists, 3, K)
        check(indices, scores(rng, kind, indices, dtype), k)


@pytest.mark.parametrize("num_lists", [1, 2, 31, 32, 33, 63, 64])
@pytest.mark.parametrize("K", [0, 1, 31, 32, 33, 100])
def test_sizes(num_lists, K):
    rng = np.random.default_rng([num_lists, K])
    indices = split(rng, num_lists, 4, K)
    for kind in ("random", "few distinct"):
        values = scores(rng, kind, indices, np.float32)
        for k in (1, max(K // 2, 1), K + 1, num_lists * K + 3):
            check(indices, values, k)


@pytest.mark.parametrize("k", [1, 2047, 2048, 4095, 4096, 4097, 8192, 8193, 12_000])
def test_long_results(k):
    """Longer than the runs in which a GPU orders its result, with many equal scores, too."""
    rng = np.random.default_rng(k)
    indices = split(rng, 3, 2, 3900)
    for kind in ("random", "few distinct", "constant"):
        check(indices, scores(rng, kind, indices, np.float32), k)


def test_one_list_in_front_of_the_others():
    """Ranks with neighbouring positions, as with a large interleave."""
    rng = np.random.default_rng(2)
    indices = np.arange(4 * 1500, dtype=np.int32).reshape(4, 1, 1500)
    for kind in ("random", "few distinct", "ascending", "descending"):
        values = scores(rng, kind, indices, np.float32)
        for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
            check(indices[order], values[order], 2048)


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 300])
def test_tokens(num_tokens):
    rng = np.random.default_rng(num_tokens)
    indices = split(rng, 4, num_tokens, 64)
    check(indices, scores(rng, "few distinct", indices, np.float32), 64)


def test_strides():
    """Lists, rows and columns of larger arrays; lists as [T, N, K]; rows in reverse."""
    rng = np.random.default_rng(4)
    indices = split(rng, 4, 6, 20)
    for dtype in top_k.DTYPES:
        values = scores(rng, "few distinct", indices, dtype)
        wide = np.full((5, 9, 23), 7, np.int32)
        wide[1:, 2:8, 3:] = indices
        turned = np.ascontiguousarray(values.transpose(1, 0, 2)).transpose(1, 0, 2)
        check(wide[1:, 2:8, 3:], turned, 20)
        check(indices[::-1], values[::-1], 20)
        check(indices[:, ::-2], values[:, ::-2], 20)
        check(indices[:, :, :11], values[:, :, :11], 20)


def test_the_order_of_lists_does_not_matter():
    rng = np.random.default_rng(5)
    indices = split(rng, 8, 5, 50)
    values = scores(rng, "few distinct", indices, np.float32)
    want = sparse_mla.top_k_merge(indices, values, k=60)
    for _ in range(5):
        order = rng.permutation(8)
        got = sparse_mla.top_k_merge(indices[order], values[order], k=60)
        assert_same_bits(got, want, "another order")


def test_lists_that_break_the_rules_do_no_harm():
    """Lists that share positions, or do not ascend: nothing beside the result is written, and the
    result has positions of the lists, or -1."""
    rng = np.random.default_rng(6)
    for k in (5, 200, 5000):
        indices = rng.integers(-2, 60, (7, 3, 900)).astype(np.int32)
        values = scores(rng, "few distinct", indices, np.float32)
        out = Guarded((3, k), np.int32, row_gap=4)
        sparse_mla.top_k_merge(indices, values, k=k, out=out.array)
        assert np.isin(out.check(), np.arange(-1, 60)).all()


# --- ranks ---------------------------------------------------------------------------------------


def merge_ranks(logits, ends, k: int, ranks: int, interleave: int, K: int) -> np.ndarray:
    """Each rank chooses among its own columns; all their choices are merged."""
    num_tokens, num_columns = logits.shape
    columns = np.arange(num_columns)
    indices = np.empty((ranks, num_tokens, K), np.int32)
    values = np.empty((ranks, num_tokens, K), logits.dtype)
    for rank in range(ranks):
        cp = (rank, ranks, interleave)
        own = columns[columns // interleave % ranks == rank].astype(np.int32)
        own_ends = sparse_mla.cp_local_lengths(ends, cp=cp)
        mine = np.ascontiguousarray(logits[:, own])
        chosen = sparse_mla.top_k_per_row(
            mine, np.zeros(num_tokens, np.int32), np.asarray(own_ends), k=K, values=values[rank]
        )
        chosen = np.asarray(chosen)
        runs, rest = np.divmod(chosen, interleave)
        whole = (runs * ranks + rank) * interleave + rest
        indices[rank] = np.where(chosen < 0, -1, whole)
        back = sparse_mla.cp_local_positions(indices[rank], cp=cp)
        assert_same_bits(back, chosen, "local positions")
    return np.asarray(sparse_mla.top_k_merge(indices, values, k=k))


@pytest.mark.parametrize("part", range(10))
def test_ranks_choose_what_one_device_does(part):
    """50 random worlds of each part: lengths around every border, ties everywhere, ranks without
    keys, padding."""
    kinds = list(top_k.KINDS)
    for seed in range(50 * part, 50 * part + 50):
        rng = np.random.default_rng(seed)
        ranks, interleave = int(rng.integers(1, 9)), int(rng.integers(1, 65))
        period = ranks * interleave
        width = int(rng.integers(1, min(4 * period, 700) + 1))
        borders = np.arange(width // interleave + 1) * interleave
        ends = rng.choice(borders, 6) + rng.integers(-1, 2, 6)
        ends[-1] = rng.choice([0, -1, width, interleave])  # padding, all, or rank 0 alone
        ends = np.minimum(ends, width).astype(np.int32)
        k = int(rng.integers(1, rng.choice([4, 40, width + 5]) + 1))
        dtype = top_k.DTYPES[rng.integers(2)]
        kind = rng.choice(["few distinct", "constant", "special", *kinds])
        with np.errstate(over="ignore", invalid="ignore"):
            logits = np.asarray(top_k.KINDS[kind](rng, 6, width), np.float32).astype(dtype)
        starts = np.zeros(6, np.int32)
        want = sparse_mla.top_k_per_row(logits, starts, ends, k=k)
        got = merge_ranks(logits, ends, k, ranks, interleave, k)
        assert_same_bits(got, want, f"seed {seed}: {kind}, cp (., {ranks}, {interleave}), k {k}")


def test_ranks_of_a_long_request():
    rng = np.random.default_rng(7)
    ends = int32(20_000, 19_999, 4097, 64, 0)
    logits = rng.choice(rng.standard_normal(300), (5, 20_000)).astype(np.float32)
    for ranks, interleave in ((2, 1), (4, 64), (8, 4096)):
        want = sparse_mla.top_k_per_row(logits, 0 * ends, ends, k=2048)
        got = merge_ranks(logits, ends, 2048, ranks, interleave, 2048)
        assert_same_bits(got, want, f"cp (., {ranks}, {interleave})")


# --- errors --------------------------------------------------------------------------------------


def test_bad_arguments():
    indices, values = np.zeros((2, 3, 4), np.int32), np.zeros((2, 3, 4), np.float32)
    merge = sparse_mla.top_k_merge
    out = Guarded((3, 4), np.int32)
    for call, text in (
        (lambda: merge(indices, values, k=0, out=out.array), "`k` must be 1 to 2147483647, got 0"),
        (lambda: merge(indices[:0], values[:0], k=4, out=out.array),
         "`indices` must have 1 to 64 lists, got 0"),
        (lambda: merge(np.zeros((65, 3, 4), np.int32), values, k=4, out=out.array),
         "`indices` must have 1 to 64 lists, got 65"),
        (lambda: merge(indices, values[:1], k=4, out=out.array),
         "`values` must have shape [2, 3, 4], got [1, 3, 4]: a score per index"),
        (lambda: merge(indices[0], values, k=4, out=out.array),
         "`indices` must have shape [any, any, any], got [3, 4]: N lists [T, K]"),
        (lambda: merge(indices, values, k=5, out=out.array),
         "`out` must have shape [3, 5], got [3, 4]: `k` columns per token"),
        (lambda: merge(indices, values, k=4, out=indices[0]),
         "`out` must not overlap `indices`, got arrays that share memory"),
        (lambda: merge(indices[:, :, ::2], values[:, :, :2], k=4, out=out.array),
         "`indices` must have a contiguous last dimension"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="^top_k_merge: " + re.escape(text)):
            call()
    for call, text in (
        (lambda: merge(indices.astype(np.int64), values, k=4),
         "`indices` must be int32, got int64"),
        (lambda: merge(indices, values.astype(np.float16), k=4),
         "`values` must be bfloat16 or float32, got float16"),
    ):  # fmt: skip
        with pytest.raises(TypeError, match="^top_k_merge: " + re.escape(text)):
            call()
    out.check(written=False)
    assert (np.ascontiguousarray(out.array).view(np.uint8) == 0xA5).all(), "nothing is written"


def test_too_many_entries():
    """Nothing of such lists is read. No device has them, so the CPU refuses them."""
    one = np.zeros(1, np.int32)
    indices = np.lib.stride_tricks.as_strided(one, (64, 1, 2**25), (0, 0, 4))
    text = (
        "top_k_merge: `indices` must have at most 2147483647 entries per token, got 64 x 33554432"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        package.top_k_merge(indices, indices.view(np.float32), k=1)
    most = np.zeros((2, 0, 2**30 - 1), np.int32)
    assert sparse_mla.top_k_merge(most, most.view(np.float32), k=1).shape == (0, 1)
