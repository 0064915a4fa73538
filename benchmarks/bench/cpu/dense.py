"""mla_attention, one token of each request over its whole paged cache, compared with the PyTorch
composition, which gathers each request's rows. The last row has requests of all lengths, which the
composition pads to the longest."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

import sparse_mla
from bench.common.timing import Effort, Table
from bench.cpu.attention import SOFTMAX_SCALE, make_table, measure_row
from sparse_mla._judge import BF16, Fractions, exact_rows, judge_row
from sparse_mla._rows import FP8_ROW_BYTES, KEY_DIM, KV_LORA_RANK

BLOCK_SIZE = 64
LONGEST = 4096
NUM_REQS = 4


def make_pages(rng: np.random.Generator, kv_format: str) -> tuple[np.ndarray, np.ndarray]:
    """A cache of all requests' tokens, and the block table, whose pages are in random order."""
    pages = NUM_REQS * LONGEST // BLOCK_SIZE
    slots = np.arange(pages * BLOCK_SIZE)
    kv_c = rng.standard_normal((len(slots), KV_LORA_RANK), np.float32)
    k_pe = rng.standard_normal((len(slots), 64), np.float32)
    row, dtype = (FP8_ROW_BYTES, np.uint8) if kv_format == "fp8_ds_mla" else (KEY_DIM, BF16)
    cache = np.zeros((pages, BLOCK_SIZE, row), dtype)
    sparse_mla.concat_and_cache_mla(kv_c, k_pe, cache, slots)
    return cache, rng.permutation(pages).reshape(NUM_REQS, -1).astype(np.int32)


def slots_of(table: np.ndarray, lens: np.ndarray) -> np.ndarray:
    """The slots of each request's tokens, -1 behind the last."""
    slots = (table[:, :, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).reshape(NUM_REQS, -1)
    return np.where(np.arange(LONGEST) < lens[:, None], slots, -1).astype(np.int32)


def judge(results: tuple, q: np.ndarray, kv: np.ndarray, slots: np.ndarray) -> Fractions:
    worst = Fractions()
    for token, row in enumerate(slots):
        keys = exact_rows(kv[row[row >= 0]])
        out, lse = results[0][token], results[1][token]
        worst.add(judge_row(q[token], keys, out, lse, softmax_scale=SOFTMAX_SCALE))
    return worst


def make_decode(
    q: np.ndarray, cache: np.ndarray, table: np.ndarray, lens: np.ndarray
) -> Callable[[], tuple]:
    size = sparse_mla.attention_workspace_size(NUM_REQS, q.shape[1], LONGEST, device="cpu")
    out = np.empty((*q.shape[:2], KV_LORA_RANK), BF16)
    lse = np.empty(q.shape[:2], np.float32)
    workspace = np.empty(size, np.uint8)
    return lambda: sparse_mla.mla_attention(
        q,
        cache,
        table,
        lens,
        softmax_scale=SOFTMAX_SCALE,
        causal=True,
        out=out,
        lse=lse,
        workspace=workspace,
    )


def measure(effort: Effort, num_threads: int) -> Table:
    from bench.common.composition import Composition, prepare  # imports PyTorch

    dtype = prepare(num_threads)
    title = f"Dense decode, {NUM_REQS} requests of {LONGEST} keys, {num_threads} threads"
    table = make_table(title, ["cache", "H", "lengths"], dtype is not None)
    rng = np.random.default_rng(0)
    equal = np.full(NUM_REQS, LONGEST, np.int32)
    ragged = np.array([LONGEST, 1, LONGEST // 4, LONGEST // 2], np.int32)
    for kv_format in ("fp8_ds_mla", "bfloat16"):
        cache, pages = make_pages(rng, kv_format)
        for num_heads in (16, 128):
            q = rng.standard_normal((NUM_REQS, num_heads, KEY_DIM), np.float32).astype(BF16)
            for name, lens in (("equal", equal), ("ragged", ragged)):
                if effort.quick and name == "ragged":
                    continue
                slots = slots_of(pages, lens)
                kv = cache.reshape(-1, cache.shape[-1])
                peer = None
                if dtype is not None:
                    peer = Composition(q, kv, slots, SOFTMAX_SCALE, dtype)
                measure_row(
                    table,
                    {"kv_format": kv_format, "H": num_heads, "T": name},
                    flop=2 * int(lens.sum()) * num_heads * (KEY_DIM + KV_LORA_RANK),
                    ours=make_decode(q, cache, pages, lens),
                    peer=peer,
                    judge_results=partial(judge, q=q, kv=kv, slots=slots),
                    effort=effort,
                )
    return table
