"""paged_attention, one token of each request over pages of keys and values. On the CPU it stands
beside the PyTorch composition: gather, matmul, softmax, matmul; on CUDA beside PyTorch's
scaled_dot_product_attention over the same keys in bf16 without pages, the L2 cache flushed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import sparse_mla
from bench.common import rows
from bench.common.composition import PagedComposition, prepare, torch
from bench.common.rows import Bench, Call, Work
from bench.common.timing import Table
from bench.cuda.timing import floor_seconds
from bench.tables.varlen import JUDGED_HEADS, judge_head
from sparse_mla._judge import Fractions

JUDGED_REQUESTS = 4
LABELS = ["cache", "H/Hk", "B × keys", "page"]


@dataclass
class Shape:
    """A token of each of some equal requests, over the whole of its cache."""

    num_reqs: int
    length: int
    page_size: int
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    kv_type: str = "bfloat16"  # or "float8_e4m3fn"

    @property
    def num_pages(self) -> int:
        """Pages of a request."""
        return -(-self.length // self.page_size)

    @property
    def flop(self) -> int:
        return 4 * self.num_reqs * self.length * self.heads * self.dim

    @property
    def scale(self) -> float:
        return self.dim**-0.5

    def labels(self) -> dict[str, object]:
        return {
            "kv_format": self.kv_type,
            "H": f"{self.heads}/{self.kv_heads}",
            "T": f"{self.num_reqs} × {self.length}",
            "page": self.page_size,
        }


CPU = (
    Shape(4, 4096, 16),
    Shape(4, 4096, 1),
    Shape(4, 4096, 64),
    Shape(1, 32_768, 16),
    Shape(4, 4096, 64, kv_type="float8_e4m3fn"),
)
CUDA = (
    Shape(64, 8192, 64),
    Shape(64, 8192, 16),
    Shape(64, 8192, 1),
    Shape(4, 4096, 16),
    Shape(1, 32_768, 16),
    Shape(64, 8192, 64, kv_type="float8_e4m3fn"),
)


def measure(bench: Bench) -> Table:
    dtype = None if bench.is_cuda else prepare(bench.threads)
    if bench.is_cuda:
        title, shapes = "Paged decode with KV heads, L2 flushed", bench.choose(CUDA, CUDA[:2])
        peer = rows.beside("PyTorch, no pages µs")
        columns = [rows.US, rows.ERROR, rows.FLOOR, peer, rows.RATIO]
    else:
        title = f"Paged decode with KV heads, {bench.threads} threads"
        shapes, columns = bench.choose(CPU, (CPU[0], CPU[-1])), rows.rates(dtype)
    works = [(shape.labels(), partial(make, bench, shape, dtype)) for shape in shapes]
    return rows.measure_rows(bench, title, LABELS, columns, works)


def make(bench: Bench, shape: Shape, dtype: Any = None) -> Work:
    """q, both caches, and the block table, whose pages are in random order."""
    a, num_reqs = bench.arrays, shape.num_reqs
    count = num_reqs * shape.num_pages
    pages = count, shape.page_size, shape.kv_heads, shape.dim
    q = a.randn(num_reqs, shape.heads, shape.dim)
    k, v = (a.randn(*pages, dtype=shape.kv_type) for _ in range(2))
    arrays = q, k, v, a.randperm(count, "int32").reshape(num_reqs, -1)
    lens = a.put(np.full(num_reqs, shape.length, np.int32))
    options = {
        "softmax_scale": shape.scale,
        "max_seqlen_k": shape.length,
        "out": a.zeros(*q.shape),
        "lse": a.zeros(num_reqs, shape.heads, dtype="float32"),
    }
    read = 2 * shape.length * shape.kv_heads * k.itemsize + 4 * shape.heads
    work = Work(
        lambda: sparse_mla.paged_attention(*arrays, lens, **options),
        partial(judge, bench, shape, arrays),
        flop=shape.flop,
        floor=floor_seconds(shape.flop, num_reqs * shape.dim * read),
    )
    if bench.is_cuda:
        work.peers = {"PyTorch": partial(make_peer, shape, arrays)}
    elif dtype is not None:
        work.compose(PagedComposition(*arrays, shape.scale, dtype))
    return work


def gather(shape: Shape, cache: Any, table: Any) -> Any:
    """The rows of requests in bf16, [B, n, Hk, D]."""
    found = cache.view(torch.uint8)[table.long()].view(cache.dtype).bfloat16()
    return found.flatten(1, 2)[:, : shape.length]


def make_peer(shape: Shape, arrays: tuple[Any, ...]) -> Call:
    """PyTorch's kernel over keys and values by request and head."""
    q, *caches, table = arrays
    k, v = (gather(shape, x, table).transpose(1, 2).contiguous() for x in caches)
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda: attend(q[:, :, None], k, v, scale=shape.scale, enable_gqa=True)


def judge(bench: Bench, shape: Shape, arrays: tuple[Any, ...], results: tuple[Any, Any]) -> float:
    """The worst error of some heads of some requests as a fraction of its bound."""
    a, worst = bench.arrays, Fractions()
    q, *caches, table = arrays
    if not a.are_finite(results):
        return math.inf
    for req in range(0, shape.num_reqs, -(-shape.num_reqs // JUDGED_REQUESTS)):
        pages = a.get(table[req])
        keys = (a.take(x, pages).reshape(-1, *x.shape[2:]).astype(np.float64) for x in caches)
        found = (a.wide(x[req]) for x in results)
        worst.add(judge_request(shape, a.wide(q[req]), *keys, *found, units=a.units))
    return max(worst.out, worst.lse)


def judge_request(
    shape: Shape,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    *,
    units: int,
) -> Fractions:
    """Judges some heads of a request's token: q and out [H, D], k and v [n, Hk, D], lse [H]; all
    float64."""
    worst = Fractions()
    for i in range(JUDGED_HEADS):
        head = i * (shape.heads - 1)
        at = head * shape.kv_heads // shape.heads
        keys = k[: shape.length, at], v[: shape.length, at]
        worst.add(judge_head(q[head], *keys, out[head], float(lse[head]), shape.scale, units))
    return worst
