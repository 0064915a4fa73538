"""Attention over DeepSeek V4's caches: a window and chosen rows, both of fp8_v4. On the CPU it
stands beside the PyTorch composition; on CUDA beside FlashMLA, with inputs that are flat and as
engines send them, the L2 cache flushed before each replay."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

import sparse_mla
from bench.common import rows
from bench.common.composition import V4Composition, prepare, torch
from bench.common.peer import read_decode
from bench.common.rows import Bench, Call, Work
from bench.common.timing import Table
from bench.cuda.judge import spread_tokens
from bench.cuda.timing import floor_seconds
from sparse_mla._judge import Fractions
from sparse_mla._rows import KV_LORA_RANK, V4_ROW_BYTES

WINDOW, BLOCK_SIZE, ROW_BYTES, DIM = 128, 64, V4_ROW_BYTES, KV_LORA_RANK
PAGE_UNIT = 576  # FlashMLA wants pages of a multiple of it
CPU_PAGES = (256, 256)  # pages of the window's cache and of the compressed one
CUDA_PAGES = (2048, 4096)
MODELS = ((64, 512), (128, 1024))  # heads, chosen rows: V4-Flash and V4-Pro
CPU_TOKENS, QUICK_CPU_TOKENS = (1, 32), (1, 8)
BATCHES = ((2, 1), (16, 1), (64, 1), (64, 2), (128, 1), (128, 2))
MORE_HEADS = ((16, 512), (32, 512))
PREFILL_TOKENS = 4096


@dataclass
class Inputs:
    """A call's inputs; the window has no keys in a prefill of one list."""

    q: Any
    caches: list[Any]
    indices: list[Any]
    scale: float
    sink: Any = None
    num_reqs: int = 1


def spread(inputs: Inputs) -> None:
    inputs.scale = 6 / math.sqrt(DIM)  # logits with a deviation of six


def shorten(inputs: Inputs) -> None:
    inputs.indices[-1][:, 100:] = -1


def make_holes(inputs: Inputs) -> None:
    inputs.indices[-1][:, ::2] = -1


def choose_zeros(inputs: Inputs) -> None:
    chosen = inputs.indices[-1]
    chosen[torch.rand(chosen.shape, device=chosen.device) < 0.02] = 0  # row 0 of a cache is zeros


KINDS: dict[str, Callable[[Inputs], None]] = {
    "flat": lambda inputs: None,
    "spread 6": spread,
    "100 valid": shorten,
    "every second": make_holes,
    "2 % zero rows": choose_zeros,
}


class Shape(NamedTuple):
    num_reqs: int
    query_len: int
    heads: int
    topk: int
    kind: str = "flat"


def cuda_shapes(quick: bool) -> Iterator[Shape]:
    shapes = [Shape(*batch, *model) for model in MODELS for batch in BATCHES]
    shapes += [Shape(128, 2, *more) for more in MORE_HEADS]
    shapes += [Shape(1, PREFILL_TOKENS, *model) for model in MODELS]
    for shape in shapes[:2] if quick else shapes:
        has_all_kinds = shape[:3] == (128, 2, MODELS[0][0])
        yield from (shape._replace(kind=kind) for kind in (KINDS if has_all_kinds else ("flat",)))


def cpu_shapes(quick: bool) -> Iterator[Shape]:
    for model in MODELS[:1] if quick else MODELS:
        for tokens in QUICK_CPU_TOKENS if quick else CPU_TOKENS:
            yield Shape(1, tokens, *model)


def measure(bench: Bench) -> Table:
    if bench.is_cuda:
        title, labels = "DeepSeek V4, caches of fp8_v4, L2 flushed", ["T", "H", "keys", "input"]
        peer = rows.beside("FlashMLA µs")
        columns = [rows.US, rows.ERROR, rows.FLOOR, peer, rows.RATIO]
        shapes, pages, dtype = cuda_shapes(bench.effort.quick), CUDA_PAGES, None
    else:
        dtype, pages = prepare(bench.threads), CPU_PAGES
        num_rows = pages[0] * BLOCK_SIZE
        title = f"DeepSeek V4, {num_rows} rows in each cache, {bench.threads} threads"
        labels, columns = ["cache", "keys", "H", "T"], rows.rates(dtype)
        shapes = cpu_shapes(bench.effort.quick)

    @cache
    def caches() -> list[Any]:
        return [make_cache(bench, count) for count in pages]

    works = [(labels_of(bench, x), partial(make, bench, caches, x, dtype)) for x in shapes]
    return rows.measure_rows(bench, title, labels, columns, works)


def labels_of(bench: Bench, shape: Shape) -> rows.Labels:
    tokens, keys = shape.num_reqs * shape.query_len, "+".join(map(str, widths_of(shape)))
    if bench.is_cuda:
        return {"T": tokens, "H": shape.heads, "keys": keys, "kind": shape.kind}
    return {"kv_format": "fp8_v4", "keys": keys, "H": shape.heads, "T": tokens}


def widths_of(shape: Shape) -> list[int]:
    return [shape.topk] if shape.query_len == PREFILL_TOKENS else [WINDOW, shape.topk]


def make_cache(bench: Bench, num_pages: int) -> Any:
    a, used = bench.arrays, BLOCK_SIZE * ROW_BYTES
    page = -(-used // PAGE_UNIT) * PAGE_UNIT if bench.is_cuda else used
    pages = a.zeros(num_pages, page, dtype="uint8")[:, :used]
    cache = pages.reshape(num_pages, BLOCK_SIZE, ROW_BYTES)  # a view
    keys = a.randn(num_pages * BLOCK_SIZE, DIM)
    keys[0] = 0
    return sparse_mla.quantize_and_insert_k_cache(keys, cache, a.put(np.arange(len(keys))))


def make_inputs(bench: Bench, caches: list[Any], shape: Shape) -> Inputs:
    a, tokens = bench.arrays, shape.num_reqs * shape.query_len
    widths = widths_of(shape)
    caches = caches[-len(widths) :]
    indices = [
        a.randint(1, len(cache) * BLOCK_SIZE, tokens, width)
        for cache, width in zip(caches, widths, strict=True)
    ]
    sink = a.randn(shape.heads, dtype="float32") if bench.is_cuda else None
    q = a.randn(tokens, shape.heads, DIM)
    inputs = Inputs(q, caches, indices, DIM**-0.5, sink, shape.num_reqs)
    KINDS[shape.kind](inputs)
    return inputs


def make_ours(bench: Bench, inputs: Inputs) -> Call:
    """A call with all of its memory given, as an engine makes it."""
    a, (first, *extra) = bench.arrays, inputs.indices
    tokens, heads, _ = inputs.q.shape
    extra_topk = extra[0].shape[1] if extra else 0
    room = sparse_mla.attention_workspace_size(
        tokens, heads, first.shape[1], extra_topk=extra_topk, device=a.device
    )
    options = {
        "softmax_scale": inputs.scale,
        "attn_sink": inputs.sink,
        "out": a.zeros(*inputs.q.shape),
        "lse": a.zeros(tokens, heads, dtype="float32"),
        "workspace": a.zeros(max(room, 1), dtype="uint8"),
    }
    if extra:
        options |= {"extra_kv_cache": inputs.caches[1], "extra_indices": extra[0]}
    return lambda: sparse_mla.sparse_attention(inputs.q, inputs.caches[0], first, **options)


def judge(bench: Bench, inputs: Inputs, results: tuple[Any, Any]) -> float:
    """The worst error of some tokens as a fraction of its bound."""
    a, (out, lse) = bench.arrays, results
    if not a.are_finite(results):
        return math.inf
    worst = Fractions()
    keys = [sparse_mla.dequantize_kv_cache(x, dtype="bfloat16") for x in inputs.caches]
    for token in spread_tokens(len(out)):
        chosen = [a.get(x[token]) for x in inputs.indices]
        parts = [key.reshape(-1, DIM)[x[x >= 0]] for key, x in zip(keys, chosen, strict=True)]
        seen = a.concat(parts)
        worst.add(a.judge(inputs.q[token], seen, out[token], lse[token], inputs.scale, inputs.sink))
    return max(worst.out, worst.lse)


def make_peer(bench: Bench, inputs: Inputs) -> Call:
    given = inputs.q, inputs.caches, inputs.indices, inputs.scale, inputs.sink
    call: Call = bench.peer.decode_v4(*given, inputs.num_reqs)
    read_decode(call(), inputs.q.shape[1])
    return call


def make(bench: Bench, caches: Callable[[], list[Any]], shape: Shape, dtype: Any) -> Work:
    inputs = make_inputs(bench, caches(), shape)
    tokens, heads, _ = inputs.q.shape
    num_keys = sum(int((x >= 0).sum()) for x in inputs.indices)
    num_bytes = num_keys * ROW_BYTES + tokens * heads * DIM * 4
    flop = 4 * num_keys * heads * DIM
    work = Work(make_ours(bench, inputs), partial(judge, bench, inputs))
    work.flop, work.floor = flop, floor_seconds(flop, num_bytes)
    if bench.peer is not None and len(inputs.caches) == 2:
        work.peers = {"FlashMLA": partial(make_peer, bench, inputs)}
    elif dtype is not None:
        work.compose(V4Composition(inputs.q, inputs.caches, inputs.indices, inputs.scale, dtype))
    return work
