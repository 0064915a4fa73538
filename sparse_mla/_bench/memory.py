"""The operators that only move bytes: cache write, gather, index conversion, beside a copy."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import sparse_mla
from sparse_mla._bench.attention import TOPK
from sparse_mla._bench.timing import Effort, Table, interleave
from sparse_mla._judge import BF16, KV_LORA_RANK

BLOCK_SIZE = 64
NUM_SLOTS = 65536  # more than processors cache
NUM_PAGES = NUM_SLOTS // BLOCK_SIZE
NUM_QUERIES = 4096


def measure(effort: Effort, num_threads: int) -> Table:
    rng = np.random.default_rng(0)
    rows: list[tuple[str, Callable[[], object], int]] = []
    for name, dtype, width in (("fp8_ds_mla", np.uint8, 656), ("bfloat16", BF16, 576)):
        kv_cache = np.zeros((NUM_PAGES, BLOCK_SIZE, width), dtype)
        rows.append((f"concat_and_cache_mla, bf16 → {name}", *make_write(rng, kv_cache)))
        rows.append((f"gather_kv_cache, {name} → bf16", *make_gather(rng, kv_cache)))
    rows.append(("convert_req_index_to_global_index", *make_conversion(rng)))

    columns = ["operator", "GB/s", "copy GB/s", "ratio"]
    title = f"Bytes moved (read + written), beside np.copyto in {num_threads} threads"
    table = Table(title, columns, [], [])
    copy, copy_bytes = make_copy(num_threads)
    for name, function, num_bytes in rows:
        seconds = interleave({"ours": function, "copy": copy}, effort)
        rate = num_bytes / seconds["ours"] / 1e9
        copy_rate = copy_bytes / seconds["copy"] / 1e9
        table.rows.append([name, f"{rate:.1f}", f"{copy_rate:.1f}", f"{rate / copy_rate:.2f}×"])
        table.records.append({"operator": name, "gb_s": rate, "copy_gb_s": copy_rate})
    return table


def make_copy(num_threads: int) -> tuple[Callable[[], object], int]:
    source = np.ones((num_threads, NUM_SLOTS * 1152 // num_threads), np.uint8)
    target = np.empty_like(source)
    pool = ThreadPoolExecutor(num_threads)
    return lambda: list(pool.map(np.copyto, target, source)), 2 * source.nbytes


def make_write(rng: np.random.Generator, kv_cache: np.ndarray) -> tuple[Callable[[], object], int]:
    kv_c = rng.standard_normal((NUM_SLOTS, KV_LORA_RANK), np.float32).astype(BF16)
    k_pe = rng.standard_normal((NUM_SLOTS, 64), np.float32).astype(BF16)
    slot_mapping = rng.permutation(NUM_SLOTS)
    num_bytes = kv_c.nbytes + k_pe.nbytes + kv_cache.nbytes
    sparse_mla.concat_and_cache_mla(kv_c, k_pe, kv_cache, slot_mapping)
    return lambda: sparse_mla.concat_and_cache_mla(kv_c, k_pe, kv_cache, slot_mapping), num_bytes


def make_gather(rng: np.random.Generator, kv_cache: np.ndarray) -> tuple[Callable[[], object], int]:
    block_table = rng.permutation(NUM_PAGES).astype(np.int32).reshape(4, -1)
    seq_lens = np.full(4, NUM_SLOTS // 4, np.int32)
    starts = np.arange(4, dtype=np.int32) * seq_lens
    out = np.zeros((NUM_SLOTS, 576), BF16)

    def gather() -> object:
        return sparse_mla.gather_kv_cache(kv_cache, block_table, seq_lens, starts, out=out)

    return gather, kv_cache.nbytes + out.nbytes


def make_conversion(rng: np.random.Generator) -> tuple[Callable[[], object], int]:
    req_ids = np.sort(rng.integers(4, size=NUM_QUERIES, dtype=np.int32))
    block_table = rng.permutation(NUM_PAGES).astype(np.int32).reshape(4, -1)
    topk_indices = rng.integers(-1, NUM_SLOTS // 4, (NUM_QUERIES, TOPK), np.int32)
    out = np.zeros_like(topk_indices)

    def convert() -> object:
        return sparse_mla.convert_req_index_to_global_index(
            req_ids, block_table, topk_indices, block_size=BLOCK_SIZE, out=out
        )

    return convert, topk_indices.nbytes + out.nbytes
