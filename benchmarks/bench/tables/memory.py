"""The operators that memory binds (cache writes, gathers, index lists, merges, norms, RoPE and what
is quantised with them), compared with a copy. Samples are judged first: on the CPU against NumPy,
on CUDA against the CPU. Every operator moves far more bytes than caches hold, except the calls of 1
and 17 tokens, whose time is that of a launch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import Any

import ml_dtypes
import numpy as np

import sparse_mla
from bench.common import compressor, heads, transfer
from bench.common.composition import torch
from bench.common.index_lists import make_moves as make_lists
from bench.common.moves import Move, Op, same_bytes, sizes_of
from bench.common.rows import Bench
from bench.common.timing import Table, describe_error
from bench.cuda.timing import DEVICE, PEAK_BYTES, interleave
from bench.tables import cache_moves, token_moves
from bench.tables.cache_moves import BLOCK_SIZE, Arrays
from sparse_mla._rows import BF16_ROW_BYTES, KV_LORA_RANK

TOPK = 2048
CALLS_PER_REPLAY = 3
MERGED_ROWS = 32  # rows of a merge that are looked at


@dataclass(frozen=True)
class Sizes:
    """How many there are of what a row is about."""

    slots: int  # a cache that is written and gathered has them
    requests: int
    queries: int  # their positions become slots
    norms: int
    turned: int
    outputs: int  # V4's layers turn them back
    merged: int
    lists: int
    heads: tuple[int, int]  # tokens of a call, calls
    rows: int  # copied from cache to cache
    states: int


CPU = Sizes(
    slots=65536,
    requests=4,
    queries=4096,
    norms=16384,
    turned=16384,
    outputs=1024,
    merged=1024,
    lists=8192,
    heads=(8192, 1),
    rows=65536,
    states=4096,
)
CUDA = Sizes(
    slots=1 << 20,
    requests=32,
    queries=32768,
    norms=65536,
    turned=8192,
    outputs=8192,
    merged=2048,
    lists=32768,
    heads=(8192, 8),
    rows=1 << 18,
    states=8192,
)
PARTIALS = (128, 128)  # tokens and heads of ranks' parts
QUANT_ELEMENTS = 1 << 28


# --- indices, merges, quantisation ---------------------------------------------------------------


def convert(a: Arrays, size: Sizes, to: str = "") -> Move:
    """Positions become slots of the cache or, for a prefill, rows of its workspace."""
    length = size.slots // size.requests
    requests = a.put(np.sort(a.get(a.randint(0, size.requests, size.queries))))
    table = a.randperm(size.slots // BLOCK_SIZE, "int32").reshape(size.requests, -1)
    topk = a.randint(-1, length, size.queries, TOPK)
    given = {"block_table": table, "block_size": BLOCK_SIZE}
    tokens = {"req_id_per_token": requests, "topk_indices": topk}
    starts = np.arange(size.requests, dtype=np.int32) * length
    if to == "rows of a prefill":
        given["prefill_workspace_starts"] = a.put(starts)
        tokens["prefill_request_ids"] = requests
    out = a.zeros(size.queries, TOPK, dtype="int32")
    op = Op(a, "convert_req_index_to_global_index", tokens, given, {"out": out})

    def judge(at: np.ndarray, found: np.ndarray) -> bool:
        positions, request = topk[at], requests[at, None]
        slots = table[request, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        wanted = starts[request] + positions if to == "rows of a prefill" else slots
        return np.array_equal(found, np.where(positions < 0, -1, wanted))

    return op.move(f"{op.name}, {to}" if to else op.name, topk.nbytes + out.nbytes, judge)


def merge(
    a: Arrays, what: str, shape: tuple[int, ...], is_list: bool = False, is_swapped: bool = False
) -> Move:
    """Merges outs of `shape` [parts, tokens, heads] and 512 values; heads are in front of tokens
    where these are swapped."""
    outs, lses = a.randn(*shape, KV_LORA_RANK), a.randn(*shape, dtype="float32")
    if is_swapped:
        outs, lses = outs.swapaxes(1, 2), lses.swapaxes(1, 2)
    out, lse = a.zeros(*outs.shape[1:]), a.zeros(*lses.shape[1:], dtype="float32")
    if what.startswith("merge_attn_states"):
        call = partial(sparse_mla.merge_attn_states, outs[0], lses[0], outs[1], lses[1])
    else:
        parts = ([*outs], [*lses]) if is_list else (outs, lses)
        call = partial(sparse_mla.merge_attn_partials, *parts)

    def is_right() -> bool:
        """Compares with fp64, within one rounding of out to bf16 and a few of lse in fp32."""
        at = a.sample(len(out))[:MERGED_ROWS]
        states = a.take(lses, (slice(None), at)).astype(np.float64)
        wanted = np.logaddexp.reduce(states)
        parts = a.take(outs, (slice(None), at)).astype(np.float64)
        parts *= np.exp(states - wanted)[..., None]
        bound = 2.0**-8 * np.abs(parts).sum(0) + 1e-6
        error = np.abs(a.take(out, at).astype(np.float64) - parts.sum(0))
        lse_error = np.abs(a.take(lse, at) - wanted)
        allowed = 1e-6 + 16 * 2.0**-24 * (1 + np.abs(wanted))
        return bool((error <= bound).all() and (lse_error <= allowed).all())

    num_bytes = sizes_of((outs, lses, out, lse))
    return Move(what, partial(call, out=out, lse=lse), num_bytes, is_right)


def rank_merge(a: Arrays, num_heads: int, order: str = "") -> Move:
    """What a rank of 4 merges in a decode: its heads or all, and its heads as all_to_all gives them
    if attention has written heads in front of tokens. Calls in a row have arrays of their own,
    because those of one call fit in the L2 cache."""
    num_tokens = PARTIALS[0]
    shape = (num_heads, num_tokens) if order else (num_tokens, num_heads)
    what = f"merge_attn_partials, 4 parts, {num_heads} heads{order}"
    count = CALLS_PER_REPLAY + 1
    moves = [merge(a, what, (4, *shape), is_swapped=bool(order)) for _ in range(count)]
    turn = cycle(moves)
    return replace(moves[0], call=lambda: next(turn).call())


def quantised(a: Arrays) -> Move:
    """The scale needs every value, so the input is read at least twice."""
    x = a.randn(QUANT_ELEMENTS)
    out = a.zeros(QUANT_ELEMENTS, dtype="float8_e4m3fn")
    scales: list[Any] = []

    def call() -> object:
        scales[:] = [sparse_mla.dynamic_per_tensor_quant(x, out=out)[1]]
        return scales[0]

    def is_right() -> bool:
        scale = np.maximum(np.float32(float(x.abs().amax())), np.float32(1e-10)) / np.float32(448)
        at = a.sample(QUANT_ELEMENTS)
        values = np.clip(a.take(x, at).astype(np.float32) / scale, -448, 448)
        want = values.astype(ml_dtypes.float8_e4m3fn)
        return float(scales[0]) == float(scale) and same_bytes(a.take(out, at), want)

    num_bytes = 2 * x.nbytes + out.nbytes
    return Move("dynamic_per_tensor_quant, bf16, read twice", call, num_bytes, is_right)


# --- tables --------------------------------------------------------------------------------------


def cpu_moves(a: Arrays, size: Sizes = CPU) -> Iterator[Move]:
    orders = {"page by page": BLOCK_SIZE, "slots at random": cache_moves.RANDOM}
    for formats in (("fp8_ds_mla", "bfloat16", "fp8_v4"), cache_moves.BOUNDS, ("fp8_index",)):
        for fmt in formats:
            ops = {x: cache_moves.insert(a, fmt, size.slots, run) for x, run in orders.items()}
            for order, op in [*ops.items()][: 1 if fmt in cache_moves.BOUNDS else 2]:
                yield cache_moves.inserted(a, f"{fmt}, {order}", fmt, op)
            if fmt != "fp8_index":
                requests = 1 if fmt in cache_moves.BOUNDS else size.requests
                yield cache_moves.gathered(a, fmt, ops["page by page"], requests)
    yield from (convert(a, size, to) for to in ("slots", "rows of a prefill"))
    yield merge(a, "merge_attn_states, bf16, 64 heads", (2, size.merged, 64))
    parts = (8, -(-size.merged // 4), 64)
    yield merge(a, "merge_attn_partials, bf16, 64 heads, 8 parts", parts)
    yield token_moves.norm(a, size.norms, 1024)
    outputs, tokens = token_moves.Tokens(a, size.outputs), token_moves.Tokens(a, size.turned)
    yield token_moves.turn_back(a, outputs, 64, "64 heads")
    yield token_moves.normalise_and_insert(a, outputs, 64, "64 heads")
    yield from (token_moves.turn(a, tokens, 16, "16 heads", x) for x in (True, False))
    yield token_moves.turn_and_write(a, tokens, 16, "16 heads", "bfloat16", tokens.slots)
    yield token_moves.quantise_queries(a, token_moves.Tokens(a, 4 * size.outputs), 64, "64 heads")
    yield from heads.make_moves(*size.heads, a)
    yield from transfer.make_moves(size.rows, a)
    yield from compressor.make_moves(size.states, a)
    yield from make_lists(size.lists, a)


def cuda_writes(a: Arrays, size: Sizes) -> Iterator[Move]:
    for fmt in ("fp8_ds_mla", "bfloat16"):
        for order, run in {"": BLOCK_SIZE, ", random slots": cache_moves.RANDOM}.items():
            yield cache_moves.inserted(
                a, fmt + order, fmt, cache_moves.insert(a, fmt, size.slots, run)
            )


def cuda_inserts(a: Arrays, size: Sizes) -> Iterator[Move]:
    for fmt in ("fp8_v4", "fp8_v41_split", "fp4_v41_split", "fp8_index"):
        op = cache_moves.insert(a, fmt, size.slots)
        yield cache_moves.inserted(a, fmt, fmt, op)
        yield cache_moves.gathered(a, fmt, op, size.requests)


def cuda_gathers(a: Arrays, size: Sizes) -> Iterator[Move]:
    for fmt in ("fp8_ds_mla", "bfloat16"):
        yield cache_moves.gathered(a, fmt, cache_moves.insert(a, fmt, size.slots), size.requests)


def cuda_merges(a: Arrays, size: Sizes) -> Iterator[Move]:
    """The parts of 8 ranks of context parallelism in a decode are in one array, or in a list."""
    yield merge(a, "merge_attn_states, bf16", (2, size.merged, 128))
    for kind, is_list in {"an array": False, "a list": True}.items():
        yield merge(a, f"merge_attn_partials, bf16, 8 parts, {kind}", (8, *PARTIALS), is_list)
    all_heads = PARTIALS[1]
    for num_heads, order in ((all_heads // 4, ""), (all_heads, ""), (all_heads // 4, " in front")):
        yield rank_merge(a, num_heads, order)


def cuda_turns(a: Arrays, size: Sizes) -> Iterator[Move]:
    t = token_moves.Tokens(a, size.turned)
    for num_heads, interleaved in ((16, True), (128, True), (128, False)):
        yield token_moves.turn(a, t, num_heads, f"H {num_heads}", interleaved)
    slots = cache_moves.make_slots(a, size.turned)
    for num_heads, fmt in ((128, "fp8_ds_mla"), (128, "bfloat16"), (16, "fp8_ds_mla")):
        yield token_moves.turn_and_write(a, t, num_heads, f"H {num_heads}", fmt, slots)


def cuda_v4(a: Arrays, size: Sizes) -> Iterator[Move]:
    t = token_moves.Tokens(a, size.turned, fp32_angles=True)
    yield token_moves.turn_back(a, t, 64, "H 64, fp32 scales")
    yield token_moves.turn_back(a, t, 128, "H 128, fp32 scales")
    yield token_moves.turn_back(a, t, 64, "H 64, ue8m0x4", scale_layout="ue8m0x4")
    yield token_moves.turn_back(a, t, 64, "H 64, bf16", quantize=False)
    for num_heads, count in ((64, size.turned), (128, size.turned), (64, 1), (64, 17)):
        some = token_moves.Tokens(a, count, fp32_angles=True)
        yield token_moves.normalise_and_insert(a, some, num_heads, f"H {num_heads}, T {count}")
    yield token_moves.quantise_queries(a, t, 64, "H 64, FP8")
    yield token_moves.quantise_queries(a, t, 64, "H 64, FP4", fp4=True)


# An error ends a family, and the others go on.
CUDA_MOVES: dict[str, Callable[[Arrays, Sizes], Iterable[Move]]] = {
    "writes": cuda_writes,
    "inserts": cuda_inserts,
    "heads": lambda a, size: heads.make_moves(*size.heads, a),
    "copies": lambda a, size: transfer.make_moves(size.rows, a),
    "copies of host memory": lambda a, size: transfer.make_host_moves(a),
    "gathers": cuda_gathers,
    "dequantised": lambda a, size: iter([cache_moves.dequantised(a, size.slots)]),
    "indices": lambda a, size: iter([convert(a, size)]),
    "lists": lambda a, size: make_lists(size.lists, a),
    "merges": cuda_merges,
    "quantised": lambda a, size: iter([quantised(a)]),
    "norms": lambda a, size: (token_moves.norm(a, size.norms, q_size) for q_size in (1024, 1536)),
    "turns": cuda_turns,
    "V4": cuda_v4,
    "states": lambda a, size: compressor.make_moves(size.states, a),
}


def measure(bench: Bench) -> Table:
    return measure_on_cuda(bench) if bench.is_cuda else measure_on_cpu(bench)


def measure_on_cpu(bench: Bench) -> Table:
    columns = ["operator", "sampled bytes", "GB/s", "copy GB/s", "ratio"]
    title = f"Bytes moved (read + written), beside np.copyto in {bench.threads} threads"
    table = Table(title, columns, [], [])
    copy, copy_bytes = make_host_copy(bench.threads)
    if bench.effort.quick:  # there are many rows, so repeats are few and short
        effort = replace(bench.effort, row_seconds=0.15, call_seconds=0.005)
        bench = replace(bench, effort=effort)
    for move in cpu_moves(bench.arrays):
        is_right = judge_move(table, move)
        seconds = bench.time({"ours": move.call, "copy": copy})
        rate = move.num_bytes / seconds["ours"] / 1e9
        copy_rate = copy_bytes / seconds["copy"] / 1e9
        cells = [f"{rate:.1f}", f"{copy_rate:.1f}", f"{rate / copy_rate:.2f}×"]
        record = {"operator": move.name, "right": is_right, "gb_s": rate, "copy_gb_s": copy_rate}
        table.add([move.name, "right" if is_right else "FAIL", *cells], record)
    return table


def judge_move(table: Table, move: Move) -> bool:
    move.call()
    is_right = move.is_right()
    if not is_right:
        table.failures.append(f"{move.name}: wrong values")
    return is_right


def make_host_copy(num_threads: int) -> tuple[Callable[[], object], int]:
    source = np.ones((num_threads, CPU.slots * BF16_ROW_BYTES // num_threads), np.uint8)
    target = np.empty_like(source)
    pool = ThreadPoolExecutor(num_threads)
    return lambda: list(pool.map(np.copyto, target, source)), 2 * source.nbytes


def measure_on_cuda(bench: Bench) -> Table:
    columns = ["operator", "sampled bytes", "GB", "µs", "TB/s", "copy TB/s", "of the copy"]
    columns += [f"of {PEAK_BYTES / 1e12:g} TB/s"]
    table = Table("Bytes moved (read + written), beside a copy by PyTorch", columns, [], [])
    copy, copy_bytes = make_copy()
    for name, make in CUDA_MOVES.items():
        try:
            for move in make(bench.arrays, CUDA):
                add_row(bench, table, move, copy, copy_bytes)
                del move  # frees its memory before the next move is made
        except Exception as error:  # the other operators go on
            table.failures.append(f"{name}: {describe_error(error)}")
    return table


def add_row(
    bench: Bench, table: Table, move: Move, copy: Callable[[], object], copy_bytes: int
) -> None:
    is_right = judge_move(table, move)
    if move.peer is not None:
        copy, copy_bytes = move.peer, move.num_bytes
    sides = {"ours": [move.call] * CALLS_PER_REPLAY, "copy": [copy] * CALLS_PER_REPLAY}
    seconds = interleave(sides, bench.effort)
    us, rate = 1e6 * seconds["ours"], move.num_bytes / seconds["ours"]
    copy_rate = copy_bytes / seconds["copy"]
    row = [move.name, "right" if is_right else "FAIL", f"{move.num_bytes / 1e9:.2f}", f"{us:.1f}"]
    row += [f"{x / 1e12:.2f}" for x in (rate, copy_rate)]
    row += [f"{100 * rate / x:.0f} %" for x in (copy_rate, PEAK_BYTES)]
    record: dict[str, object] = {"operator": move.name, "right": is_right, "us": us}
    record["floor_us"] = 1e6 * move.num_bytes / PEAK_BYTES
    record |= {"tb_s": rate / 1e12, "copy_tb_s": copy_rate / 1e12, "of_copy": rate / copy_rate}
    table.add(row, record)


def make_copy() -> tuple[Callable[[], object], int]:
    """A copy by an elementwise kernel. In a graph `copy_` would be a copy node, which an H200 runs
    at 2.8 TB/s."""
    source = torch.randint(1 << 31, (1 << 28,), dtype=torch.int32, device=DEVICE)
    target = torch.empty_like(source)
    return lambda: torch.bitwise_not(source, out=target), 2 * source.nbytes
