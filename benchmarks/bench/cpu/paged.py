"""paged_attention, one token of each request over pages of keys and values, compared with the
PyTorch composition: gather, matmul, softmax, matmul."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

import sparse_mla
from bench.common.paged import Shape, judge_request
from bench.common.timing import Effort, Table
from bench.cpu.attention import make_table, measure_row
from sparse_mla._judge import BF16, E4M3, Fractions

SHAPES = (
    Shape(4, 4096, 16),
    Shape(4, 4096, 1),
    Shape(4, 4096, 64),
    Shape(1, 32_768, 16),
    Shape(4, 4096, 64, kv_type="float8_e4m3fn"),
)
QUICK = SHAPES[0], SHAPES[-1]
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def make_arrays(rng: np.random.Generator, shape: Shape) -> Arrays:
    """q, both caches, and the block table, whose pages are in random order."""
    count = shape.num_reqs * shape.num_pages
    pages = count, shape.page_size, shape.kv_heads, shape.dim
    q = rng.standard_normal((shape.num_reqs, shape.heads, shape.dim), np.float32).astype(BF16)
    dtype = BF16 if shape.kv_type == "bfloat16" else E4M3
    k, v = (rng.standard_normal(pages, np.float32).astype(dtype) for _ in range(2))
    return q, k, v, rng.permutation(count).reshape(shape.num_reqs, -1).astype(np.int32)


def make_ours(shape: Shape, arrays: Arrays) -> Callable[[], tuple]:
    lens = np.full(shape.num_reqs, shape.length, np.int32)
    out = np.empty((shape.num_reqs, shape.heads, shape.dim), BF16)
    lse = np.empty((shape.num_reqs, shape.heads), np.float32)
    return lambda: sparse_mla.paged_attention(
        *arrays, lens, softmax_scale=shape.scale, out=out, lse=lse
    )


def judge(results: tuple, shape: Shape, arrays: Arrays) -> Fractions:
    worst = Fractions()
    q, k, v, table = arrays
    for req, pages in enumerate(table):
        keys = (x[pages].reshape(-1, *x.shape[2:]).astype(np.float64) for x in (k, v))
        found = (np.asarray(x[req], np.float64) for x in results)
        worst.add(judge_request(shape, q[req].astype(np.float64), *keys, *found, units=16))
    return worst


def measure(effort: Effort, num_threads: int) -> Table:
    from bench.common.composition import PagedComposition, prepare  # imports PyTorch

    dtype = prepare(num_threads)
    title = f"Paged decode with KV heads, {num_threads} threads"
    table = make_table(title, ["cache", "H/Hk", "B × keys", "page"], dtype is not None)
    rng = np.random.default_rng(0)
    for shape in QUICK if effort.quick else SHAPES:
        arrays = make_arrays(rng, shape)
        measure_row(
            table,
            shape.labels(),
            flop=shape.flop,
            ours=make_ours(shape, arrays),
            peer=None if dtype is None else PagedComposition(*arrays, shape.scale, dtype),
            judge_results=partial(judge, shape=shape, arrays=arrays),
            effort=effort,
        )
    return table
