"""sparse_attention compared with the PyTorch composition: errors, then rates and their ratio.

PyTorch's rate is the better one of two calls: all tokens at once, and token by token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np

import sparse_mla
from bench.common import rows
from bench.common.composition import Composition, prepare
from bench.common.rows import Bench, Work
from bench.common.timing import Table
from sparse_mla._judge import BF16, Fractions, exact_rows, judge_row
from sparse_mla._rows import FP8_ROW_BYTES, KEY_DIM, KV_LORA_RANK

TOPK = 2048
NUM_SLOTS = 16384
SOFTMAX_SCALE = (128 + 64) ** -0.5
NUM_JUDGED_TOKENS = 2
FULL = (16, 64, 128), (1, 32)  # numbers of heads and of tokens
QUICK = (16, 128), (1, 8)


def make_cache(arrays: Any, kv_format: str) -> np.ndarray:
    """[S, row], filled through the library's own cache write."""
    kv_c, k_pe = (arrays.randn(NUM_SLOTS, n, dtype="float32") for n in (KV_LORA_RANK, 64))
    is_fp8 = kv_format == "fp8_ds_mla"
    kv_cache = np.zeros(
        (NUM_SLOTS, FP8_ROW_BYTES if is_fp8 else KEY_DIM), np.uint8 if is_fp8 else BF16
    )
    return sparse_mla.concat_and_cache_mla(kv_c, k_pe, kv_cache, np.arange(NUM_SLOTS))


def make_attention(q: np.ndarray, kv: np.ndarray, indices: np.ndarray) -> Callable[[], tuple]:
    """A call with all of its memory given, as an engine makes it."""
    num_tokens, num_heads, _ = q.shape
    size = sparse_mla.attention_workspace_size(num_tokens, num_heads, TOPK, device="cpu")
    out = np.empty((num_tokens, num_heads, KV_LORA_RANK), BF16)
    lse = np.empty((num_tokens, num_heads), np.float32)
    workspace = np.empty(size, np.uint8)
    return lambda: sparse_mla.sparse_attention(
        q, kv, indices, softmax_scale=SOFTMAX_SCALE, out=out, lse=lse, workspace=workspace
    )


def judge(results: tuple, q: np.ndarray, kv: np.ndarray, indices: np.ndarray) -> float:
    worst = Fractions()
    for token in range(min(NUM_JUDGED_TOKENS, len(q))):
        keys = exact_rows(kv[indices[token]])
        out, lse = results[0][token], results[1][token]
        worst.add(judge_row(q[token], keys, out, lse, softmax_scale=SOFTMAX_SCALE))
    return max(worst.out, worst.lse)


def measure(bench: Bench) -> Table:
    dtype = prepare(bench.threads)
    title = f"Sparse attention, K = {TOPK}, {NUM_SLOTS} cached tokens, {bench.threads} threads"
    caches = cache(partial(make_cache, bench.arrays))
    head_counts, token_counts = bench.choose(FULL, QUICK)
    works = [
        (
            {"kv_format": kv_format, "H": num_heads, "T": num_tokens},
            partial(make, bench, caches, kv_format, num_heads, num_tokens, dtype=dtype),
        )
        for kv_format in ("fp8_ds_mla", "bfloat16")
        for num_heads in head_counts
        for num_tokens in token_counts
    ]
    return rows.measure_rows(bench, title, ["cache", "H", "T"], rows.rates(dtype), works)


def make(
    bench: Bench,
    caches: Callable[[str], np.ndarray],
    kv_format: str,
    num_heads: int,
    num_tokens: int,
    dtype: Any,
) -> Work:
    kv = caches(kv_format)
    q = bench.arrays.randn(num_tokens, num_heads, KEY_DIM)
    indices = bench.arrays.randint(0, NUM_SLOTS, num_tokens, TOPK)
    work = Work(
        make_attention(q, kv, indices),
        partial(judge, q=q, kv=kv, indices=indices),
        flop=2 * num_tokens * num_heads * TOPK * (KEY_DIM + KV_LORA_RANK),
    )
    if dtype is not None:
        work.compose(Composition(q, kv, indices, SOFTMAX_SCALE, dtype))
    return work
