"""reshape_and_cache on a GPU: many tokens, values in device memory that no check has seen."""

from __future__ import annotations

import numpy as np
import pytest
import reference as ref
from device import import_quietly
from helpers import assert_same_bits
from test_reshape import DTYPES, check, make_caches, make_rows

import sparse_mla

torch = import_quietly("torch")


def to_gpu(x: np.ndarray):
    if x.dtype != ref.BF16:
        return torch.from_numpy(x).cuda()
    return torch.from_numpy(x.view(np.int16)).cuda().view(torch.bfloat16)


@pytest.mark.parametrize("dims", [(128, 128), (576, 512), (40, 24)])
@pytest.mark.parametrize("layout", ["apart", "pages in turn", "padded"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_tokens(dtype, layout, dims):
    """More than a grid has at once; some slots are negative."""
    rng = np.random.default_rng(1)
    heads, tokens, pages = (1, 9000, 160) if dims[0] > 128 else (8, 9000, 160)
    rows = make_rows(rng, tokens, heads, dims, DTYPES[dtype])
    slots = rng.permutation(pages * 64)[:tokens]
    slots[::37] = -1
    scales = np.float32(rng.uniform(0.1, 2, heads))
    for stored in (DTYPES[dtype], np.uint8):
        memory, caches = make_caches(layout, pages, 64, heads, dims, stored)
        check(memory, caches, *rows, slots, k_scale=scales, v_scale=0.3)


@pytest.mark.parametrize("slot", [20, 21, 2**31 - 1, 2**40, 2**63 - 1, -(2**63)])
def test_a_slot_outside_the_cache_is_skipped(slot):
    rng = np.random.default_rng(2)
    k, v = make_rows(rng, 4, 2, (8, 16), ref.BF16)
    for stored in (ref.BF16, np.uint8):
        _, caches = make_caches("apart", 4, 5, 2, (8, 16), stored)
        on_gpu = [to_gpu(x) for x in caches]
        sparse_mla.reshape_and_cache(
            to_gpu(k), to_gpu(v), *on_gpu, to_gpu(np.array([1, slot, 3, -1]))
        )
        for rows, cache, got in zip((k, v), caches, on_gpu, strict=True):
            ref.write_heads(rows, cache, [1, -1, 3, -1])
            assert_same_bits(got.view(torch.uint8).cpu().numpy(), cache.view(np.uint8))


def test_tokens_of_one_slot_are_not_mixed_where_they_are_neighbours():
    """The last of 32 neighbours wins, for keys and values alike; other slots are as usual."""
    rng = np.random.default_rng(3)
    k, v = make_rows(rng, 32 * 40, 8, (128, 128), ref.BF16)
    slots = np.repeat(rng.permutation(64)[:40], 32)
    memory, caches = make_caches("apart", 4, 16, 8, (128, 128), ref.BF16)
    check(memory, caches, k, v, slots)


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf, 1e-40])
def test_no_scale_of_the_device_is_unsafe(scale):
    """Nobody has looked at it. What is written means nothing, but goes to the tokens' rows."""
    rng = np.random.default_rng(4)
    k, v = make_rows(rng, 3, 2, (8, 16), ref.BF16)
    _, caches = make_caches("apart", 4, 5, 2, (8, 16), np.uint8)
    on_gpu = [to_gpu(x) for x in caches]
    given = to_gpu(np.full(2, scale, np.float32))
    slots = np.array([7, 0, 19])
    sparse_mla.reshape_and_cache(
        to_gpu(k), to_gpu(v), *on_gpu, to_gpu(slots), k_scale=given, v_scale=given
    )
    for cache, got in zip(caches, on_gpu, strict=True):
        after = got.cpu().numpy().reshape(20, -1)
        rest = np.setdiff1d(np.arange(20), slots)
        assert_same_bits(after[rest], cache.reshape(20, -1)[rest])
