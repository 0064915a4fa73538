"""apply_rope and rope_and_cache_mla at the borders of how threads divide them, on any number of
threads (csrc/cpu/rope/apply_rope.c): every byte."""

from __future__ import annotations

import device
import numpy as np
import pytest
import test_apply_rope as rope
import test_rope_and_cache as cached
from borders import THREADS, constants, on_threads, sizes_around
from test_apply_rope import F32, ROWS, made, places

import sparse_mla

pytestmark = pytest.mark.skipif(device.ON_CUDA, reason="the borders are those of the CPU's plans")

PLAN = constants("cpu/rope/apply_rope.c")
BLOCK, BLOCKS, PAIRS = PLAN["BLOCK_HEADS"], PLAN["PARALLEL_BLOCKS"], PLAN["CHUNK_PAIRS"]
TOKENS, LONG = PLAN["PARALLEL_WRITE_TOKENS"], PLAN["LONG_WRITE_ROWS"]


def rotate(shapes: list[tuple[int, int, int]]) -> None:
    """Queries of so many tokens and heads, with a key of each token, of so many pairs."""
    for tokens, heads, pairs in shapes:
        table = sparse_mla.rope_table(ROWS, R=2 * pairs)
        q, k = made((tokens, heads, 2 * pairs), F32, heads), made((tokens, 2 * pairs), F32, 7)
        for interleaved in (True, False):
            rope.check(places(tokens), q, k, table, interleaved=interleaved)


@pytest.mark.parametrize("num_threads", THREADS)
def test_blocks_of_heads(num_threads):
    """Heads beside the key: whole blocks, one less and one more; as many blocks as are worth
    threads."""
    heads = sizes_around(BLOCK - 1, 2 * BLOCK - 1, BLOCK * BLOCKS - 1)
    shapes = [(tokens, h, 4) for h in heads for tokens in (1, 3)]
    shapes += [(tokens, 2, 4) for tokens in sizes_around(BLOCKS, num_threads)]
    shapes += [(3, 2, pairs) for pairs in sizes_around(PAIRS, 2 * PAIRS)]
    on_threads(num_threads, rotate, shapes)


def write(counts: list[int]) -> None:
    for count in counts:
        q, k, kv_c = (
            made((count, 1, 64), F32),
            made((count, 64), F32, 1),
            made((count, 512), F32, 2),
        )
        cache = cached.make_cache("bfloat16", num_pages=count // 16 + 2)
        slots = cached.shuffled(count, 16 * (count // 16 + 2))
        table = sparse_mla.rope_table(ROWS)
        for shared in (False, True):
            if shared:  # a slot is in two ranges of tokens
                slots = np.concatenate([slots[:-1], slots[:1]])
            cached.check(places(count), q, k, table, kv_c, cache, slots)


@pytest.mark.parametrize("num_threads", THREADS)
def test_writes(num_threads):
    on_threads(num_threads, write, sizes_around(TOKENS))


@pytest.mark.parametrize("num_threads", [2, 7])
def test_long_writes(num_threads):
    on_threads(num_threads, write, sizes_around(LONG * num_threads))
