"""mla_attention: query tokens of each request over its whole paged cache. On the CPU it stands
beside the PyTorch composition, which gathers each request's rows and pads them to the longest; on
CUDA beside FlashMLA, the L2 cache flushed before each replay."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

import sparse_mla
from bench.common import rows
from bench.common.composition import Composition, prepare
from bench.common.rows import Bench, Call, Work
from bench.common.timing import Table
from bench.cuda.judge import spread_tokens
from bench.cuda.timing import floor_seconds
from sparse_mla._judge import Fractions
from sparse_mla._rows import FP8_ROW_BYTES, KEY_DIM, KV_LORA_RANK

BLOCK_SIZE = 64
SCALES = {"cpu": (128 + 64) ** -0.5, "cuda": KEY_DIM**-0.5}
BF16: Final = "bfloat16"
FP8: Final = "fp8_ds_mla"
E4M3: Final = "fp8_e4m3"  # the cache's scale is 1
LONGEST, NUM_REQS = 4096, 4  # on the CPU
RAGGED = "1…8192"
EQUAL = (
    (BF16, 128, 1, 16, 4096),
    (BF16, 128, 1, 64, 4096),
    (BF16, 128, 1, 128, 4096),
    (BF16, 128, 2, 128, 4096),
    (BF16, 128, 4, 16, 4096),
    (BF16, 1, 1, 128, 131_072),
    (BF16, 8, 1, 16, 8192),
    (BF16, 1, 1, 16, 4096),
    (BF16, 1, 1, 128, 4096),
    (BF16, 8, 1, 16, 4096),
    (BF16, 32, 1, 16, 4096),
    (BF16, 128, 1, 64, 100),
    (FP8, 128, 1, 16, 4096),
    (FP8, 128, 1, 64, 4096),
    (FP8, 128, 1, 128, 4096),
    (FP8, 1, 1, 128, 131_072),
    (FP8, 8, 1, 16, 8192),
    (E4M3, 128, 1, 16, 4096),
    (E4M3, 128, 1, 64, 4096),
    (E4M3, 128, 1, 128, 4096),
)  # cache, requests, query tokens of each, heads, keys of each
UNEQUAL = (
    (BF16, 128, 1, 16),
    (BF16, 128, 1, 64),
    (BF16, 128, 1, 128),
    (FP8, 128, 1, 64),
)


class Shape(NamedTuple):
    labels: dict[str, Any]
    cache: str
    query_len: int
    heads: int
    lens: list[int]


def cpu_shapes(quick: bool) -> Iterator[Shape]:
    ragged = [LONGEST, 1, LONGEST // 4, LONGEST // 2]
    lengths = {"equal": [LONGEST] * NUM_REQS} | ({} if quick else {"ragged": ragged})
    for cache in (FP8, BF16):
        for heads in (16, 128):
            for name, lens in lengths.items():
                labels = {"kv_format": cache, "H": heads, "T": name}
                yield Shape(labels, cache, 1, heads, lens)


def cuda_shapes() -> Iterator[Shape]:
    shapes = [(*shape[:4], [shape[4]] * shape[1], str(shape[4])) for shape in EQUAL]
    shapes += [(*shape, lengths_between(shape[1], 1, 8192), RAGGED) for shape in UNEQUAL]
    for cache, num_reqs, query_len, heads, lens, name in shapes:
        labels = {"cache": cache, "B": num_reqs, "n": query_len, "H": heads, "keys": name}
        yield Shape(labels, cache, query_len, heads, lens)


def lengths_between(count: int, least: int, most: int) -> list[int]:
    """Equally spaced lengths, in an order that looks random and is always the same."""
    step = (most - least) / (count - 1)
    return [least + round(step * (i * 37 % count)) for i in range(count)]


def measure(bench: Bench) -> Table:
    dtype = None if bench.is_cuda else prepare(bench.threads)
    if bench.is_cuda:
        title, labels = "Dense attention, L2 flushed", ["cache", "B", "n", "H", "keys"]
        peer = rows.beside("FlashMLA µs")
        columns = [rows.US, rows.ERROR, rows.FLOOR, peer, rows.RATIO]
        shapes = [*cuda_shapes()][: 2 if bench.effort.quick else None]
    else:
        title = f"Dense decode, {NUM_REQS} requests of {LONGEST} keys, {bench.threads} threads"
        labels, columns = ["cache", "H", "lengths"], rows.rates(dtype)
        shapes = [*cpu_shapes(bench.effort.quick)]
    works = [(shape.labels, partial(make, bench, shape, dtype)) for shape in shapes]
    return rows.measure_rows(bench, title, labels, columns, works)


class Request:
    """The arguments of a call; on CUDA q has a dimension of tokens, [B, n, H, 576]. The pages of
    requests are in random order."""

    def __init__(self, bench: Bench, shape: Shape) -> None:
        a, num_reqs = bench.arrays, len(shape.lens)
        self.scale = SCALES["cuda" if bench.is_cuda else "cpu"]
        self.arrays, self.shape = a, shape
        counts = [-(-length // BLOCK_SIZE) for length in shape.lens]
        if not bench.is_cuda:  # a table of whole rows, which the composition reads, too
            counts = [max(counts)] * num_reqs
        pages = a.get(a.randperm(sum(counts), "int32"))
        table = np.zeros((num_reqs, max(counts)), np.int32)
        for row, part in zip(table, np.split(pages, np.cumsum(counts)[:-1]), strict=True):
            row[: len(part)] = part
        self.pages = table
        self.cache = make_cache(a, shape.cache, len(pages))
        tokens = (shape.query_len,) if bench.is_cuda else ()
        self.q = a.randn(num_reqs, *tokens, shape.heads, KEY_DIM)
        self.table, self.lens = a.put(table), a.put(np.array(shape.lens, np.int32))

    def call(self) -> Call:
        a, q = self.arrays, self.q
        tokens, longest = len(q) * self.shape.query_len, self.pages.shape[1] * BLOCK_SIZE
        room = sparse_mla.attention_workspace_size(
            tokens, self.shape.heads, longest, device=a.device
        )
        options = {
            "softmax_scale": self.scale,
            "causal": True,
            "out": a.zeros(*q.shape[:-1], KV_LORA_RANK),
            "lse": a.zeros(*q.shape[:-1], dtype="float32"),
            "workspace": a.zeros(max(room, 1), dtype="uint8"),
        }
        arrays = self.q, self.cache, self.table, self.lens
        return lambda: sparse_mla.mla_attention(*arrays, **options)

    def judge(self, results: tuple[Any, Any]) -> float:
        """The worst error of some tokens as a fraction of its bound."""
        a, query_len, heads = self.arrays, self.shape.query_len, self.shape.heads
        out, lse = results[0].reshape(-1, heads, KV_LORA_RANK), results[1].reshape(-1, heads)
        if not a.are_finite((out, lse)):
            return math.inf
        worst, q = Fractions(), self.q.reshape(-1, heads, KEY_DIM)
        for token in spread_tokens(len(out)):
            req, query = divmod(token, query_len)
            seen = self.shape.lens[req] - query_len + query + 1
            keys = self.cache[self.pages[req]].reshape(-1, self.cache.shape[-1])[: max(seen, 0)]
            if self.shape.cache == E4M3:
                keys = a.view(keys, "float8_e4m3fn")
            worst.add(a.judge(q[token], keys, out[token], lse[token], self.scale))
        return max(worst.out, worst.lse)

    def peer(self, peer: Any) -> Call:
        """FlashMLA has no dense kernel for other rows: it gets the same keys in bf16."""
        cache = self.cache
        if self.shape.cache != BF16:
            cache = sparse_mla.dequantize_kv_cache(cache, dtype=BF16).view(*cache.shape[:2], -1)
        call: Call = peer.decode_dense(self.q, cache, self.table, self.lens, self.scale)
        return call

    def composition(self, dtype: Any) -> Composition:
        """It takes the slots of each request's tokens, -1 behind the last."""
        slots = self.pages[:, :, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)
        slots = slots.reshape(len(self.q), -1)
        lens = np.array(self.shape.lens)[:, None]
        slots = np.where(np.arange(slots.shape[1]) < lens, slots, -1).astype(np.int32)
        kv = self.cache.reshape(-1, self.cache.shape[-1])
        return Composition(self.q, kv, slots, self.scale, dtype)


def make_cache(a: Any, cache: str, num_pages: int) -> Any:
    if cache != FP8:
        shape = num_pages, BLOCK_SIZE, KEY_DIM
        e4m3 = "float8_e4m3fn"
        return a.randn(*shape) if cache == BF16 else a.view(a.randn(*shape, dtype=e4m3), "uint8")
    slots = a.put(np.arange(num_pages * BLOCK_SIZE))
    kv_c, k_pe = (a.randn(len(slots), size) for size in (KV_LORA_RANK, KEY_DIM - KV_LORA_RANK))
    rows_of = a.zeros(num_pages, BLOCK_SIZE, FP8_ROW_BYTES, dtype="uint8")
    return sparse_mla.concat_and_cache_mla(kv_c, k_pe, rows_of, slots, kv_cache_dtype=FP8)


def make(bench: Bench, shape: Shape, dtype: Any = None) -> Work:
    call, keys = Request(bench, shape), sum(shape.lens)
    width = KEY_DIM + KV_LORA_RANK
    tokens = len(shape.lens) * shape.query_len
    num_bytes = keys * call.cache.shape[-1] * call.cache.itemsize + 2 * tokens * shape.heads * width
    flop = 2 * keys * shape.query_len * shape.heads * width
    work = Work(call.call(), call.judge, flop, floor_seconds(flop, num_bytes))
    if bench.peer is not None:
        work.peers = {"FlashMLA": partial(call.peer, bench.peer)}
    elif dtype is not None:
        work.compose(call.composition(dtype))
    return work
