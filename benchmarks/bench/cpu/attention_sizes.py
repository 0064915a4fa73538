"""Sweeps of attention and merges, for sizes.py."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from bench.cpu.arguments import (
    SLOTS,
    Arrays,
    cache_of,
    codes,
    drawn,
    format_of,
    full,
    keep,
    normal,
    starts,
    table,
)
from bench.cpu.sweep import FEW, HEADS, MANY, PAGES, SPARSE, WIDTHS, Sweep, vary
from sparse_mla._judge import BF16
from sparse_mla._rows import KEY_DIM

EIGHTHS = tuple(8 * n for n in (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 24))


def varlen(
    tokens: int = 128,
    keys: int = 128,
    heads: int = 4,
    kv_heads: int = 4,
    dims: tuple[int, int] = (192, 128),
    size: int = 0,
    kind: Any = BF16,
    **options: Any,
) -> Arrays:
    """Requests of `size` tokens and as many keys; without, a single one."""
    dim, value_dim = dims
    q, k, v = ((tokens, heads, dim), (keys, kv_heads, dim), (keys, kv_heads, value_dim))
    is_e4m3 = kind == np.uint8
    shapes = {"q": q, "k": k, "v": v}
    make = codes if is_e4m3 else partial(normal, dtype=kind)
    ones = np.ones((len(starts(tokens, size or tokens)) - 1, kv_heads), np.float32)
    return {
        **{name: make(*shape) for name, shape in shapes.items()},
        "cu_seqlens_q": starts(tokens, size or tokens),
        "cu_seqlens_k": starts(keys, size or keys),
        "softmax_scale": 0.07,
        "out": np.empty((tokens, heads, value_dim), BF16 if is_e4m3 else kind),
        "lse": np.empty((tokens, heads), np.float32),
        **({f"{name}_descale": ones for name in shapes} if is_e4m3 else {}),
        **options,
    }


def varlen_sweeps() -> Iterator[Sweep]:
    sweep = partial(Sweep, "varlen_attention")
    prompts = (1, 2, 3, 4, 5, 7, 8, 16, 32, 64)
    for kind in (BF16, np.float16, np.uint8):
        name = "e4m3" if kind == np.uint8 else np.dtype(kind).name
        yield sweep(f"{name} keys", MANY, lambda n, k=kind: varlen(keys=n, kind=k))
        causal = partial(varlen, causal=True, kind=kind)
        yield sweep(f"{name} tokens per prompt", prompts, lambda n, f=causal: f(size=n))
    sinks: dict[str, Any] = {"attn_sink": np.zeros(4, np.float32), "causal": True}
    yield sweep("tokens per prompt, sinks", prompts, lambda n: varlen(size=n, **sinks))
    yield sweep("window", (1, 2, 3, 64), lambda n: varlen(causal=True, window_size=(n - 1, 0)))
    yield sweep("heads", HEADS, lambda n: varlen(heads=n, kv_heads=n))
    yield sweep("heads of a KV head", HEADS, lambda n: varlen(tokens=1, heads=n, kv_heads=1))
    yield sweep("tokens", MANY, lambda n: varlen(tokens=n))
    yield sweep("values of a key", EIGHTHS, lambda n: varlen(dims=(n, 64)))
    yield sweep("values", EIGHTHS, lambda n: varlen(dims=(64, n)))
    yield from vary("varlen_attention", varlen, place=("q", "k", "v"))


def attend(
    fmt: str, tokens: int = 4, heads: int = 16, keys: int = 64, page: int = 64, **options: Any
) -> Arrays:
    dim = KEY_DIM if fmt in ("bfloat16", "fp8_ds_mla") else 512
    return {
        "q": normal(tokens, heads, dim),
        "kv_cache": cache_of(fmt, page),
        "indices": drawn(tokens, keys),
        "softmax_scale": 0.05,
        "out": np.empty((tokens, heads, 512), BF16),
        "lse": np.empty((tokens, heads), np.float32),
        **format_of(fmt),
        **options,
    }


def attention_sweeps() -> Iterator[Sweep]:
    sweep = partial(Sweep, "sparse_attention")
    for fmt in ("bfloat16", "fp8_ds_mla", "fp8_v4", "fp8_e4m3", "fp8_v41", "fp8_nope"):
        sizes = {"keys": MANY, "heads": HEADS, "page": PAGES}
        yield from vary("sparse_attention", partial(attend, fmt), f"{fmt}, ", **sizes)
    rows = partial(attend, "fp8_ds_mla")
    lists = {which: keep(drawn(4, 64), which) for which in SPARSE}
    yield sweep("tokens", FEW, lambda n: rows(tokens=n))
    yield sweep("slots in a list", SPARSE, lambda which: rows(indices=lists[which]))
    yield sweep("length", (0, 1, 2, 63, 64), lambda n: rows(topk_length=full(4, n)))
    sinks = partial(rows, attn_sink=np.linspace(-1, 1, 16, dtype=np.float32))
    yield sweep("length, sinks", (1, 64), lambda n: sinks(topk_length=full(4, n)))
    extra: dict[str, Any] = {
        "extra_kv_cache": cache_of("bfloat16"),
        "extra_indices": drawn(4, 64),
    }
    yield sweep(
        "keys of two lists",
        ((0, 1), (1, 0), (1, 1), (1, 64), (64, 64)),
        lambda n: rows(topk_length=full(4, n[0]), extra_topk_length=full(4, n[1]), **extra),
    )
    yield from vary("sparse_attention", rows, place=("q",))


def v4(tokens: int = 4, heads: int = 16, keys: int = 64, window: int = 64) -> Arrays:
    cache = cache_of("fp8_v4")
    return {
        "query": normal(tokens, heads, 512),
        "swa_kv_cache": cache,
        "workspace_buffer": None,
        "sparse_indices": drawn(tokens, window + keys),
        "compressed_kv_cache": cache,
        "sparse_topk_lens": full(tokens, window + keys),
        "seq_lens": full(1, SLOTS),
        "bmm1_scale": 0.05,
        "window": window,
        "out": np.empty((tokens, heads, 512), BF16),
    }


def v4_sweeps() -> Iterator[Sweep]:
    op = "sparse_mla_dsv4"
    yield from vary(op, v4, keys=(0, *MANY), window=MANY)
    yield Sweep(op, "keys of both lists", MANY, lambda n: v4(window=n, keys=n))
    yield from vary(op, v4, heads=HEADS, tokens=FEW)


def mla(
    requests: int = 4,
    size: int = 1,
    keys: int = 64,
    heads: int = 16,
    page: int = 64,
    **options: Any,
) -> Arrays:
    tokens = requests * size
    return {
        "q": normal(tokens, heads, KEY_DIM),
        "kv_cache": cache_of("fp8_ds_mla", page),
        "block_table": table(requests, keys, page),
        "cache_seqlens": full(requests, keys),
        "cu_seqlens_q": starts(tokens, size),
        "softmax_scale": 0.05,
        "out": np.empty((tokens, heads, 512), BF16),
        "lse": np.empty((tokens, heads), np.float32),
        **options,
    }


def mla_sweeps() -> Iterator[Sweep]:
    sweep = partial(Sweep, "mla_attention")
    yield from vary("mla_attention", mla, keys=MANY, heads=HEADS, page=PAGES, requests=FEW)
    yield sweep("tokens of a request", FEW, lambda n: mla(1, n, causal=True))
    yield sweep("tokens per prompt", (1, 2, 4, 8), lambda n: mla(16 // n, n, n, causal=True))
    yield sweep("keys of a row", (0, 1, 2, 64), lambda n: mla() | {"cache_seqlens": full(4, n)})
    yield sweep("window", (1, 2, 64), lambda n: mla(1, 16, causal=True, window_size=(n - 1, 0)))


def paged(
    requests: int = 16,
    size: int = 1,
    keys: int = 64,
    heads: int = 8,
    kv_heads: int = 2,
    page: int = 16,
    **options: Any,
) -> Arrays:
    tokens = requests * size
    k_cache, v_cache = (normal(SLOTS // page, page, kv_heads, 128) for _ in range(2))
    return {
        "q": normal(tokens, heads, 128),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_table": table(requests, keys, page),
        "cache_seqlens": full(requests, keys),
        "cu_seqlens_q": starts(tokens, size),
        "softmax_scale": 0.09,
        "out": np.empty((tokens, heads, 128), BF16),
        "lse": np.empty((tokens, heads), np.float32),
        **options,
    }


def paged_sweeps() -> Iterator[Sweep]:
    sweep = partial(Sweep, "paged_attention")
    yield sweep("keys", MANY, lambda n: paged(keys=n))
    yield sweep("heads", HEADS, lambda n: paged(heads=n, kv_heads=n))
    yield sweep("heads of a KV head", HEADS, lambda n: paged(heads=n, kv_heads=1))
    yield from vary("paged_attention", paged, page=PAGES, requests=FEW)
    yield sweep("tokens of a request", FEW, lambda n: paged(4, n, causal=True))
    yield sweep("window", (1, 2, 64), lambda n: paged(4, 16, causal=True, window_size=(n - 1, 0)))


def merge_sweeps() -> Iterator[Sweep]:
    def lses(*shape: int) -> np.ndarray:
        return normal(*shape, dtype=np.float32)

    def two(tokens: int = 64, heads: int = 4, values: int = 256, kind: Any = BF16) -> Arrays:
        outs = {f"out_{side}": normal(tokens, heads, values, dtype=kind) for side in "ab"}
        return outs | {f"lse_{side}": lses(tokens, heads) for side in "ab"}

    def several(parts: int = 4, tokens: int = 32, heads: int = 4) -> Arrays:
        outs = normal(parts, tokens, heads, 512, dtype=np.float32)
        return {"outs": outs, "lses": lses(parts, tokens, heads)}

    op = "merge_attn_states"
    for kind in (BF16, np.float16, np.float32):
        yield from vary(op, partial(two, kind=kind), f"{np.dtype(kind).name} ", values=WIDTHS)
    yield from vary(op, two, heads=HEADS, tokens=FEW, place=("out_a", "out_b"))
    op, many = "merge_attn_partials", (64, 32, 16, 8, 5, 4, 3, 2)
    yield from vary(op, several, parts=FEW)
    yield Sweep(op, "parts of 128 rows", many, lambda n: several(n, 128 // n))
    yield from vary(op, several, heads=FEW, tokens=FEW)


FAMILIES = (varlen_sweeps, attention_sweeps, v4_sweeps, mla_sweeps, paged_sweeps, merge_sweeps)
