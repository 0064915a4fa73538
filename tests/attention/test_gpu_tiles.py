"""mla_attention by tiles of rows, on Hopper: where requests are cut, what plans depend on, and the
rows that the tiles of one launch share."""

import dataclasses

import device
import numpy as np
import pytest
import reference as ref
from dense_cases import Dense, Mask
from helpers import assert_same_bits
from library import sparse_mla
from test_mla_attention import check

attend = sparse_mla.mla_attention
CAUSAL = Mask(causal=True)
# A mask of chunks that hides nothing keeps calls from the kernel for few tiles, which
# test_gpu_few_tiles.py tests.
WIDE = Mask(causal=True, chunk=1 << 20)


def lengths(count: int, most: int, seed=0) -> list[int]:
    return [int(x) for x in np.random.default_rng(seed).integers(0, most, count)]


def test_hopper_takes_its_own_kernel():
    rows = [row for row in sparse_mla.kernels() if "attention_dense" in row["name"]]
    assert {row["kv_format"] for row in rows} == {
        "bfloat16, dense",
        "bfloat16 of 512 values, dense",
    }
    assert all(row["selected"] == row["available"] for row in rows)


@pytest.mark.parametrize("heads", [1, 5, 16, 40, 64, 100, 128])
@pytest.mark.parametrize("queries", [1, 3])
def test_cut_tiles(heads, queries):
    """Few requests of unequal lengths: CTAs take equal shares of all keys, and cut the tiles."""
    lens = [2000, 1, 700, 0, 129, 5]
    check(Dense([queries] * 6, lens, heads=heads, fmt="bf16", mask=WIDE, sink=True))


@pytest.mark.parametrize("fmt", ["bf16", "bf16_512"])
@pytest.mark.parametrize("count", [31, 32, 33, 150, 300])
def test_many_requests(count, fmt):
    """A warp looks at 32 requests at a time; with more tiles than CTAs, some take several."""
    rng = np.random.default_rng(count)
    queries = [int(x) for x in rng.integers(0, 3, count)]
    check(Dense(queries, lengths(count, 600), heads=16, fmt=fmt, mask=WIDE))


@pytest.mark.parametrize("mask", [CAUSAL, WIDE, Mask(window=(100, 0)), Mask(chunk=96)])
def test_more_query_tokens_than_are_cut(mask):
    case = Dense([90, 1, 70], [400, 900, 70], heads=16, fmt="bf16", mask=mask)
    check(case)
    check(dataclasses.replace(case, num_splits=1))


@pytest.mark.parametrize("num_splits", [0, 1])
def test_the_workspace_s_bytes_do_not_matter(num_splits):
    """What an earlier call has left there is not taken for a cut tile."""
    lens = [900, 3, 64, 2000, 0]
    case = Dense([1] * 5, lens, heads=16, fmt="bf16", num_splits=num_splits, mask=WIDE)
    size = sparse_mla.attention_workspace_size(
        5, 16, 2048, num_splits=num_splits, device=device.NAME
    )
    want = case.run(attend)
    for byte in (0, 1, 255):
        workspace = np.full(size, byte, np.uint8)
        got = case.run(attend, workspace=workspace)
        assert_same_bits(got["out"], want["out"])
        assert_same_bits(got["lse"], want["lse"])


def test_the_last_tile_s_bits():
    """A request's bits with one split, whatever stands beside it and however many tiles there are:
    0 to 300 requests in front."""
    rng = np.random.default_rng(5)
    alone = Dense([2], [500], heads=40, fmt="bf16", mask=CAUSAL, num_splits=1)
    want = alone.run(attend)
    for count in (1, 40, 300):
        queries = [int(x) for x in rng.integers(0, 4, count)]
        case = Dense([*queries, 2], [*lengths(count, 300), 500], heads=40, fmt="bf16",
                     mask=CAUSAL, num_splits=1)  # fmt: skip
        keys = case.cache.array.reshape(-1, 576)
        own = alone.cache.array.reshape(-1, 576)
        for mine, there in zip(alone.slots[-1:], case.slots[-1:], strict=True):
            keys[there] = own[mine]
        case.q[-2:] = alone.q
        got = case.run(attend)
        assert_same_bits(got["out"][-2:], want["out"])
        assert_same_bits(got["lse"][-2:], want["lse"])


def test_bits_are_the_same_every_time():
    case = Dense([1] * 40, lengths(40, 3000), heads=16, fmt="bf16", sink=True)
    want = case.run(attend)
    for _ in range(20):
        got = case.run(attend)
        assert_same_bits(got["out"], want["out"])
        assert_same_bits(got["lse"], want["lse"])


def test_a_last_item_of_one_step():
    """Whatever the time that its copies take, a CTA ends after it, not before."""
    for seed in range(100):
        case = Dense([1] * 9, lengths(9, 100, seed), heads=16, fmt="bf16", seed=seed, mask=WIDE)
        want = case.run(attend)
        for _ in range(5):
            assert_same_bits(case.run(attend)["out"], want["out"])


def test_rows_that_are_not_aligned():
    """Rows that begin 2 bytes past a multiple of 16 take the portable kernel, with equal results
    within the bounds."""
    case = Dense([1, 2], [300, 70], heads=16, fmt="bf16", mask=CAUSAL)
    wide = np.zeros((*case.q.shape[:2], case.q.shape[2] + 8), ref.BF16)[..., 1:577]
    wide[...] = case.q
    case.q = wide
    check(case)
