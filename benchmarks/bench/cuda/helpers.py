"""The operators around attention on a CUDA device, in a step of few tokens: their time is that of a
launch, and of what a kernel waits for. Calls in a row are measured, and a first call whose inputs
and code are not in the caches. Results are judged elsewhere, at larger sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

import sparse_mla
from bench.common.rows import Bench
from bench.common.timing import Table, describe_error
from bench.cuda.timing import Array, interleave, torch
from bench.tables import cache_moves, token_moves
from sparse_mla._rows import V4_ROW_BYTES, row_of

TOKENS = (1, 17, 128)
CALLS_PER_REPLAY = 20
HEADS, INDEX_HEADS, Q_LORA, TOPK, WINDOW = 64, 64, 1024, 512, 128  # V4-Flash
BLOCK_SIZE, PAGES = 64, 64  # per request
CONTEXT = BLOCK_SIZE * PAGES
LONG, LONG_TOPK, RANKS = 65536, 2048, 4  # DeepSeek-V3.2
STATE_BLOCK_SIZES = {4: 4, 128: 8}

Arrays = Any
Named = Iterator[tuple[str, Callable[[], object]]]


def measure(bench: Bench) -> Table:
    columns = ["operator", *(f"T {n}, µs" for n in TOKENS), f"T {TOKENS[0]}, flushed, µs"]
    title = f"Operators of a decode, {CALLS_PER_REPLAY} calls per graph; flushed: one call"
    table = Table(title, columns, [], [])
    times: dict[str, list[float]] = {}
    flushed: dict[str, float] = {}
    for num_tokens in TOKENS:
        for make in (launches, *HELPERS):
            try:
                for name, call in make(bench.arrays, num_tokens):
                    call()
                    sides = {"ours": [call] * CALLS_PER_REPLAY}
                    times.setdefault(name, []).append(interleave(sides, bench.effort)["ours"])
                    if num_tokens == TOKENS[0]:
                        flushed[name] = bench.time({"ours": call})["ours"]
            except Exception as error:  # the other operators go on
                table.failures.append(f"{make.__name__}, T {num_tokens}: {describe_error(error)}")
    for name, seconds in times.items():
        row = [f"{1e6 * x:.2f}" for x in seconds] + ["-"] * (len(TOKENS) - len(seconds))
        record: dict[str, object] = {"operator": name, "us_flushed": 1e6 * flushed[name]}
        record |= {f"us_{n}": 1e6 * x for n, x in zip(TOKENS, seconds, strict=False)}
        table.add([name, *row, f"{1e6 * flushed[name]:.2f}"], record)
    return table


def launches(a: Arrays, num_tokens: int) -> Named:
    """PyTorch's addition to one number. It begins when the call before has ended."""
    one = a.zeros(1, dtype="float32")
    yield "torch.add of one number, for comparison", lambda: torch.add(one, 1, out=one)


def make_table(a: Arrays, num_tokens: int, pages: int) -> Array:
    """A block table with pages of its own for every request."""
    return a.randperm(num_tokens * pages, "int32").reshape(num_tokens, pages)


def moved(a: Arrays, num_tokens: int) -> Named:
    """Calls of the tables of moved bytes."""
    t = token_moves.Tokens(a, num_tokens, CONTEXT, fp32_angles=True)
    yield "fused_q_kv_rmsnorm", token_moves.norm(a, num_tokens, Q_LORA).call
    yield "fused_qnorm_rope_kv_insert", token_moves.normalise_and_insert(a, t, HEADS).call
    for fmt in ("fp8_v4", "fp8_index"):
        op = cache_moves.insert(a, fmt, num_tokens, slots=t.slots)
        yield f"{op.name}, {fmt}", op.call


def queries(a: Arrays, num_tokens: int) -> Named:
    t = token_moves.Tokens(a, num_tokens, CONTEXT, fp32_angles=True)
    for name, fp4 in (("FP8", False), ("FP4", True)):
        move = token_moves.quantise_queries(a, t, INDEX_HEADS, name, fp4)
        yield move.name, move.call


def turns(a: Arrays, num_tokens: int) -> Named:
    t = token_moves.Tokens(a, num_tokens, CONTEXT, fp32_angles=True)
    yield "apply_rope", token_moves.turn(a, t, HEADS).call
    yield "fused_inv_rope_fp8_quant", token_moves.turn_back(a, t, HEADS).call


def compressors(a: Arrays, num_tokens: int) -> Named:
    for ratio, dim, row, closes in (
        (4, 512, V4_ROW_BYTES, True),
        (4, 512, V4_ROW_BYTES, False),
        (128, 512, V4_ROW_BYTES, True),
        (128, 512, V4_ROW_BYTES, False),
        (4, 128, row_of("fp8_index"), True),
    ):
        block_size, width = STATE_BLOCK_SIZES[ratio], dim * (2 if ratio == 4 else 1)
        t = token_moves.Tokens(a, num_tokens, CONTEXT, fp32_angles=True)
        table = make_table(a, num_tokens, CONTEXT // block_size)
        requests, rows = (a.put(np.arange(num_tokens, dtype=x)) for x in ("int32", "int64"))
        rows, positions = rows * BLOCK_SIZE, t.positions  # each closes a group, of any ratio
        if not closes:
            rows, positions = rows * 0 - 1, positions - 1
        slots = table[:, -1] * block_size + positions % block_size
        kv, score, ape = (
            a.randn(count, width, dtype="float32") for count in (num_tokens, num_tokens, ratio)
        )
        compress = partial(
            sparse_mla.compress_norm_rope_store,
            state=a.randn(len(table) * len(table[0]), block_size, 2 * width, dtype="float32"),
            block_table=table,
            req_id_per_token=requests,
            positions=positions,
            slot_mapping=slots,
            kv_cache=a.zeros(num_tokens, BLOCK_SIZE, row, dtype="uint8"),
            kv_slot_mapping=rows,
            norm_weight=a.put(np.ones(dim, np.float32)),
            rope_table=t.table,
            eps=1e-6,
            ratio=ratio,
            kv=kv,
            score=score,
            ape=ape,
        )
        what = "" if closes else ", no group ends"
        yield f"compress_norm_rope_store with save, C{ratio}, D {dim}{what}", compress


def lists(a: Arrays, num_tokens: int) -> Named:
    table = make_table(a, num_tokens, PAGES)
    topk = a.randint(0, CONTEXT // 4, num_tokens, TOPK)
    requests = a.put(np.arange(num_tokens, dtype=np.int32))
    yield (
        "compute_global_topk_indices_and_lens",
        partial(
            sparse_mla.compute_global_topk_indices_and_lens,
            *(topk, requests, table, BLOCK_SIZE, None),
            out=a.zeros(*topk.shape, dtype="int32"),
            lens=a.zeros(num_tokens, dtype="int32"),
        ),
    )


def rank_lists(a: Arrays, num_tokens: int) -> Named:
    """Lists of DeepSeek-V3.2, of which one rank of two has half, and the choices of four ranks."""
    topk = a.randint(0, LONG, num_tokens, LONG_TOPK)
    out, lens = a.zeros(*topk.shape, dtype="int32"), a.zeros(num_tokens, dtype="int32")
    own = partial(sparse_mla.cp_local_topk, topk, cp=(0, 2, 64), out=out, lens=lens)
    yield f"cp_local_topk, K {LONG_TOPK}", own
    dealt = a.randperm(RANKS * LONG_TOPK, "int32").reshape(RANKS, 1, LONG_TOPK)
    indices = dealt.sort(-1).values.expand(-1, num_tokens, -1).contiguous()
    scores = a.randn(*indices.shape, dtype="float32")
    merge = partial(sparse_mla.top_k_merge, indices, scores, k=LONG_TOPK, out=out)
    yield f"top_k_merge, {RANKS} lists of {LONG_TOPK}", merge


HELPERS: tuple[Callable[[Arrays, int], Named], ...] = (
    moved,
    compressors,
    queries,
    lists,
    rank_lists,
    turns,
)
