"""DeepSeek V4's attention on the CPU, beside the PyTorch composition: the keys of the sliding
window and chosen rows, both in caches of fp8_v4."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

import sparse_mla
from bench.common.timing import Effort, Table
from bench.cpu.attention import NUM_JUDGED_TOKENS, make_table, measure_row
from sparse_mla._judge import BF16, Fractions, judge_row
from sparse_mla._rows import KV_LORA_RANK, V4_ROW_BYTES

DIM, ROW_BYTES, BLOCK_SIZE = KV_LORA_RANK, V4_ROW_BYTES, 64
NUM_SLOTS = 16384  # slots of each cache
WINDOW = 128
MODELS = ((64, 512), (128, 1024))  # heads, chosen rows: V4-Flash and V4-Pro
SOFTMAX_SCALE = DIM**-0.5
FULL, QUICK = (1, 32), (1, 8)  # numbers of tokens


def measure(effort: Effort, num_threads: int) -> Table:
    from bench.common.composition import V4Composition, prepare  # imports PyTorch

    dtype = prepare(num_threads)
    title = f"DeepSeek V4, {NUM_SLOTS} rows in each cache, {num_threads} threads"
    table = make_table(title, ["cache", "keys", "H", "T"], dtype is not None)
    rng = np.random.default_rng(0)
    caches = [make_cache(rng) for _ in range(2)]
    for num_heads, topk in MODELS[:1] if effort.quick else MODELS:
        for num_tokens in QUICK if effort.quick else FULL:
            q = rng.standard_normal((num_tokens, num_heads, DIM), np.float32).astype(BF16)
            indices = [
                rng.integers(NUM_SLOTS, size=(num_tokens, width), dtype=np.int32)
                for width in (WINDOW, topk)
            ]
            peer = None
            if dtype is not None:
                peer = V4Composition(q, caches, indices, SOFTMAX_SCALE, dtype)
            labels: dict[str, object] = {"kv_format": "fp8_v4", "keys": f"{WINDOW}+{topk}"}
            measure_row(
                table,
                labels | {"H": num_heads, "T": num_tokens},
                flop=4 * num_tokens * num_heads * (WINDOW + topk) * DIM,
                ours=make_attention(q, caches, indices),
                peer=peer,
                judge_results=partial(judge, q=q, caches=caches, indices=indices),
                effort=effort,
            )
    return table


def make_cache(rng: np.random.Generator) -> np.ndarray:
    keys = rng.standard_normal((NUM_SLOTS, DIM), np.float32)
    cache = np.zeros((NUM_SLOTS // BLOCK_SIZE, BLOCK_SIZE, ROW_BYTES), np.uint8)
    return sparse_mla.quantize_and_insert_k_cache(keys, cache, np.arange(NUM_SLOTS))


def make_attention(
    q: np.ndarray, caches: list[np.ndarray], indices: list[np.ndarray]
) -> Callable[[], tuple]:
    """A call with all of its memory given, as an engine makes it."""
    num_tokens, num_heads, _ = q.shape
    widths = [x.shape[1] for x in indices]
    size = sparse_mla.attention_workspace_size(
        num_tokens, num_heads, widths[0], extra_topk=widths[1], device="cpu"
    )
    options = {
        "softmax_scale": SOFTMAX_SCALE,
        "extra_kv_cache": caches[1],
        "extra_indices": indices[1],
        "out": np.empty(q.shape, BF16),
        "lse": np.empty(q.shape[:2], np.float32),
        "workspace": np.empty(size, np.uint8),
    }
    return lambda: sparse_mla.sparse_attention(q, caches[0], indices[0], **options)


def judge(
    results: tuple, q: np.ndarray, caches: list[np.ndarray], indices: list[np.ndarray]
) -> Fractions:
    worst = Fractions()
    rows = [sparse_mla.dequantize_kv_cache(cache).reshape(NUM_SLOTS, DIM) for cache in caches]
    for token in range(min(NUM_JUDGED_TOKENS, len(q))):
        chosen = [row[x[token]] for row, x in zip(rows, indices, strict=True)]
        keys = np.concatenate(chosen).astype(np.float64)
        out, lse = results[0][token], results[1][token]
        worst.add(judge_row(q[token], keys, out, lse, softmax_scale=SOFTMAX_SCALE))
    return worst
