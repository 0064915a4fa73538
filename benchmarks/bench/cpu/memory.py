"""The operators that memory binds (cache write, gather, index conversion, norms and RoPE), compared
with a copy. Samples are judged first, against NumPy."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import ml_dtypes
import numpy as np

import sparse_mla
from bench.common import compressor, heads, transfer
from bench.common.index_lists import make_moves
from bench.common.moves import Move
from bench.common.timing import Effort, Table, interleave
from bench.cpu.attention import TOPK
from sparse_mla._judge import BF16, SCALE_TILE, upconvert_rows
from sparse_mla._rows import (
    BF16_ROW_BYTES,
    FP8_ROW_BYTES,
    KEY_DIM,
    KV_LORA_RANK,
    V4_DATA_BYTES,
    V4_ROW_BYTES,
    row_of,
)
from sparse_mla._types import KvFormat

BLOCK_SIZE = 64
NUM_SLOTS = 65536  # more than processors' caches hold
NUM_PAGES = NUM_SLOTS // BLOCK_SIZE
NUM_QUERIES = 4096
NUM_NORMS = 16384
NUM_OUTPUTS = 1024
NUM_TURNED = 16384
NUM_LIST_TOKENS = 8192
NUM_HEAD_TOKENS = 8192
NUM_COPIED_ROWS = 65536
NUM_STATES = 4096
SAMPLED = slice(None, None, 509)
SLOT_ORDERS = {"page by page": BLOCK_SIZE, "slots at random": 1}  # how many slots are in order
# V4's other rows, and what a value may be off by, as parts of itself and of its row's largest
OTHER_FORMATS: dict[KvFormat, tuple[float, float]] = {
    "fp8_e4m3": (2.0**-4, 2.0**-10),
    "fp4_v41": (0.0, 0.25),
}
drawn: dict[tuple[int, ...], np.ndarray] = {}
INDEX_DATA, INDEX_ROW = 128, row_of("fp8_index")  # bytes per token


def measure(effort: Effort, num_threads: int) -> Table:
    rng = np.random.default_rng(0)
    moves = []
    for name, dtype, width in (
        ("fp8_ds_mla", np.uint8, FP8_ROW_BYTES),
        ("bfloat16", BF16, KEY_DIM),
    ):
        kv_cache = np.zeros((NUM_PAGES, BLOCK_SIZE, width), dtype)
        moves += [make_write(rng, kv_cache, name, order) for order in SLOT_ORDERS]
        moves += [make_gather(rng, kv_cache, name)]
    v4_cache = np.zeros((NUM_PAGES, BLOCK_SIZE, V4_ROW_BYTES), np.uint8)
    moves += [make_insert(rng, v4_cache, order) for order in SLOT_ORDERS]
    moves += [make_last_gather(rng, v4_cache)]
    for name in OTHER_FORMATS:
        moves += make_format_moves(rng, name)
    moves += [make_index_insert(rng, order) for order in SLOT_ORDERS]
    moves += [make_conversion(rng, is_prefill) for is_prefill in (False, True)]
    moves += [make_merge(rng), make_partials(rng), make_norm(rng), make_inverse(), make_queries()]
    moves += [make_turn(interleaved) for interleaved in (True, False)]
    moves.append(make_turned_keys())
    moves += [make_index_queries(rng)]
    moves += heads.make_moves(NUM_HEAD_TOKENS, 1, lambda x: x, lambda x: x.view(np.uint8))
    moves += transfer.make_moves(NUM_COPIED_ROWS, lambda x: x, lambda x: x)
    moves += compressor.make_moves(NUM_STATES, lambda x: x, lambda x: x)
    moves += make_moves(NUM_LIST_TOKENS, lambda x: x, lambda x: x)

    columns = ["operator", "sampled bytes", "GB/s", "copy GB/s", "ratio"]
    title = f"Bytes moved (read + written), beside np.copyto in {num_threads} threads"
    table = Table(title, columns, [], [])
    copy, copy_bytes = make_copy(num_threads)
    if effort.quick:  # there are many rows, so repeats are few and short
        effort = replace(effort, row_seconds=0.15, call_seconds=0.005)
    for move in moves:
        move.call()
        is_right = move.is_right()
        if not is_right:
            table.failures.append(f"{move.name}: wrong values")
        seconds = interleave({"ours": move.call, "copy": copy}, effort)
        rate = move.num_bytes / seconds["ours"] / 1e9
        copy_rate = copy_bytes / seconds["copy"] / 1e9
        cells = [f"{rate:.1f}", f"{copy_rate:.1f}", f"{rate / copy_rate:.2f}×"]
        record = {"operator": move.name, "right": is_right, "gb_s": rate, "copy_gb_s": copy_rate}
        table.add([move.name, "right" if is_right else "FAIL", *cells], record)
    return table


def make_copy(num_threads: int) -> tuple[Callable[[], object], int]:
    source = np.ones((num_threads, NUM_SLOTS * BF16_ROW_BYTES // num_threads), np.uint8)
    target = np.empty_like(source)
    pool = ThreadPoolExecutor(num_threads)
    return lambda: list(pool.map(np.copyto, target, source)), 2 * source.nbytes


def draw(*shape: int) -> np.ndarray:
    """Normal values. Rows of the table with inputs of one shape share them."""
    if shape not in drawn:
        drawn[shape] = np.random.default_rng(0).standard_normal(shape, np.float32).astype(BF16)
    return drawn[shape]


def make_slots(rng: np.random.Generator, order: str) -> np.ndarray:
    """A prefill fills pages, which lie anywhere. Slots at random are the worst that can be sent."""
    run = SLOT_ORDERS[order]
    slots: np.ndarray = rng.permutation(NUM_SLOTS // run)[:, None] * run + np.arange(run)
    return slots.reshape(-1)


def make_write(rng: np.random.Generator, kv_cache: np.ndarray, name: str, order: str) -> Move:
    kv_c = draw(NUM_SLOTS, KV_LORA_RANK)
    k_pe = draw(NUM_SLOTS, 64)
    slot_mapping = make_slots(rng, order)
    rows = kv_cache.reshape(NUM_SLOTS, -1)

    def write() -> object:
        return sparse_mla.concat_and_cache_mla(kv_c, k_pe, kv_cache, slot_mapping)

    def is_right() -> bool:
        want = make_rows(kv_c[SAMPLED], k_pe[SAMPLED], kv_cache.dtype)
        return np.array_equal(rows[slot_mapping[SAMPLED]].view(np.uint8), want.view(np.uint8))

    num_bytes = kv_c.nbytes + k_pe.nbytes + kv_cache.nbytes
    return Move(f"concat_and_cache_mla, bf16 → {name}, {order}", write, num_bytes, is_right)


def make_rows(kv_c: np.ndarray, k_pe: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Cache rows as docs/formats.md describes them."""
    if dtype == BF16:
        return np.concatenate([kv_c, k_pe], axis=1)
    tiles = kv_c.astype(np.float32).reshape(len(kv_c), -1, SCALE_TILE)
    scales = np.abs(tiles).max(axis=2, keepdims=True) / np.float32(448)
    values = (tiles / scales).astype(ml_dtypes.float8_e4m3fn).reshape(kv_c.shape)
    parts = (values, scales[..., 0], k_pe)
    return np.concatenate([part.view(np.uint8) for part in parts], axis=1)


def make_gather(rng: np.random.Generator, kv_cache: np.ndarray, name: str) -> Move:
    block_table = rng.permutation(NUM_PAGES).astype(np.int32).reshape(4, -1)
    seq_lens = np.full(4, NUM_SLOTS // 4, np.int32)
    starts = np.arange(4, dtype=np.int32) * seq_lens
    out = np.zeros((NUM_SLOTS, KEY_DIM), BF16)

    def gather() -> object:
        return sparse_mla.gather_kv_cache(kv_cache, block_table, seq_lens, starts, out=out)

    def is_right() -> bool:
        rows = kv_cache[block_table.reshape(-1)].reshape(NUM_SLOTS, -1)[SAMPLED]
        want = rows if kv_cache.dtype == BF16 else upconvert_rows(rows)
        return np.array_equal(out[SAMPLED].view(np.uint16), want.view(np.uint16))

    num_bytes = kv_cache.nbytes + out.nbytes
    return Move(f"gather_kv_cache, {name} → bf16", gather, num_bytes, is_right)


def make_insert(rng: np.random.Generator, k_cache: np.ndarray, order: str) -> Move:
    k = draw(NUM_SLOTS, KV_LORA_RANK)
    slot_mapping = make_slots(rng, order)

    def insert() -> object:
        return sparse_mla.quantize_and_insert_k_cache(k, k_cache, slot_mapping)

    def is_right() -> bool:
        slots = slot_mapping[SAMPLED]
        data, scales = split_pages(k_cache)
        want = make_v4_rows(k[SAMPLED])
        return np.array_equal(np.concatenate([data[slots], scales[slots]], axis=1), want)

    num_bytes = k.nbytes + k_cache.nbytes
    return Move(f"quantize_and_insert_k_cache, bf16 → fp8_v4, {order}", insert, num_bytes, is_right)


def make_index_insert(rng: np.random.Generator, order: str) -> Move:
    k = draw(NUM_SLOTS, INDEX_DATA)
    slot_mapping = make_slots(rng, order)
    k_cache = np.zeros((NUM_PAGES, BLOCK_SIZE, INDEX_ROW), np.uint8)

    def insert() -> object:
        return sparse_mla.indexer_k_quant_and_cache(k, k_cache, slot_mapping)

    def is_right() -> bool:
        slots = slot_mapping[SAMPLED]
        data, scales = split_pages(k_cache, INDEX_DATA)
        values, exponent = quantise(k[SAMPLED, None])
        return np.array_equal(data[slots], values[:, 0].view(np.uint8)) and np.array_equal(
            scales[slots].view(np.float32), np.ldexp(np.float32(1), exponent)
        )

    num_bytes = k.nbytes + k_cache.nbytes
    return Move(
        f"indexer_k_quant_and_cache, bf16 → fp8_index, {order}", insert, num_bytes, is_right
    )


def split_pages(
    k_cache: np.ndarray, data_bytes: int = V4_DATA_BYTES
) -> tuple[np.ndarray, np.ndarray]:
    """The data and the scales of all tokens of a cache of split pages."""
    pages = k_cache.reshape(len(k_cache), -1)
    data, scales = np.split(pages, [BLOCK_SIZE * data_bytes], axis=1)
    return data.reshape(-1, data_bytes), scales.reshape(-1, k_cache.shape[-1] - data_bytes)


def quantise(tiles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tiles [n, count, size] of ordinary values -> e4m3, and exponents [n, count] of scales."""
    tiles = tiles.astype(np.float32)
    mantissa, exponent = np.frexp(np.abs(tiles).max(axis=2))
    exponent -= 8 + (mantissa <= 0.875)  # 448 = 0.875 * 2**9
    return np.ldexp(tiles, -exponent[..., None]).astype(ml_dtypes.float8_e4m3fn), exponent


def make_v4_rows(k: np.ndarray) -> np.ndarray:
    """Data and scales as docs/formats.md describes them, for keys of ordinary size."""
    values, exponent = quantise(k[:, :448].reshape(len(k), 7, 64))
    scales = np.zeros((len(k), 8), np.uint8)
    scales[:, :7] = exponent + 127
    parts = (values.reshape(len(k), 448), np.ascontiguousarray(k[:, 448:]), scales)
    return np.concatenate([part.view(np.uint8) for part in parts], axis=1)


def make_last_gather(rng: np.random.Generator, k_cache: np.ndarray) -> Move:
    block_table = rng.permutation(NUM_PAGES).astype(np.int32).reshape(4, -1)
    seq_lens = np.full(4, NUM_SLOTS // 4, np.int32)
    out = np.zeros((4, NUM_SLOTS // 4, KV_LORA_RANK), BF16)

    def gather() -> object:
        return sparse_mla.dequantize_and_gather_k_cache(
            out, k_cache, seq_lens, None, block_table, block_size=BLOCK_SIZE, offset=0
        )

    def is_right() -> bool:
        slots = block_table.reshape(-1, 1) * BLOCK_SIZE + np.arange(BLOCK_SIZE)
        slots = slots.reshape(-1)[SAMPLED]
        data, scales = (part[slots] for part in split_pages(k_cache))
        tiles = data[:, :448].view(ml_dtypes.float8_e4m3fn).astype(np.float32).reshape(-1, 7, 64)
        values = np.ldexp(tiles, scales[:, :7, None].astype(np.int32) - 127)
        rope = np.ascontiguousarray(data[:, 448:]).view(BF16)
        want = np.concatenate([values.reshape(-1, 448).astype(BF16), rope], axis=1)
        got = out.reshape(-1, KV_LORA_RANK)[SAMPLED]
        return np.array_equal(got.view(np.uint16), want.view(np.uint16))

    num_bytes = k_cache.nbytes + out.nbytes
    return Move("dequantize_and_gather_k_cache, fp8_v4 → bf16", gather, num_bytes, is_right)


def make_format_moves(rng: np.random.Generator, name: KvFormat) -> list[Move]:
    """Rows written page by page, and gathered again."""
    k, slots = draw(NUM_SLOTS, KV_LORA_RANK), make_slots(rng, "page by page")
    k_cache = np.zeros((NUM_PAGES, BLOCK_SIZE, row_of(name)), np.uint8)
    block_table = (slots[::BLOCK_SIZE] // BLOCK_SIZE).astype(np.int32)[None]
    seq_lens = np.full(1, NUM_SLOTS, np.int32)
    out = np.zeros((1, NUM_SLOTS, KV_LORA_RANK), BF16)

    def insert() -> object:
        return sparse_mla.quantize_and_insert_k_cache(k, k_cache, slots, kv_format=name)

    def gather() -> object:
        return sparse_mla.dequantize_and_gather_k_cache(
            out,
            k_cache,
            seq_lens,
            None,
            block_table,
            block_size=BLOCK_SIZE,
            offset=0,
            kv_format=name,
        )

    def is_right() -> bool:
        gather()
        x, got = k[SAMPLED].astype(np.float32), out[0, SAMPLED].astype(np.float32)
        of_value, of_row = OTHER_FORMATS[name]
        bound = of_value * np.abs(x) + of_row * np.abs(x).max(1, keepdims=True)
        return bool((np.abs(got - x) <= bound).all())

    return [
        Move(
            f"quantize_and_insert_k_cache, bf16 → {name}, page by page",
            insert,
            k.nbytes + k_cache.nbytes,
            is_right,
        ),
        Move(
            f"dequantize_and_gather_k_cache, {name} → bf16",
            gather,
            k_cache.nbytes + out.nbytes,
            is_right,
        ),
    ]


def make_conversion(rng: np.random.Generator, is_prefill: bool) -> Move:
    """Positions become slots of the cache, or a prefill's rows of its workspace."""
    req_ids = np.sort(rng.integers(4, size=NUM_QUERIES, dtype=np.int32))
    block_table = rng.permutation(NUM_PAGES).astype(np.int32).reshape(4, -1)
    topk_indices = rng.integers(-1, NUM_SLOTS // 4, (NUM_QUERIES, TOPK), np.int32)
    starts = np.arange(4, dtype=np.int32) * (NUM_SLOTS // 4)
    out = np.zeros_like(topk_indices)

    def convert() -> object:
        return sparse_mla.convert_req_index_to_global_index(
            req_ids,
            block_table,
            topk_indices,
            block_size=BLOCK_SIZE,
            prefill_request_ids=req_ids if is_prefill else None,
            prefill_workspace_starts=starts if is_prefill else None,
            out=out,
        )

    def is_right() -> bool:
        positions, requests = topk_indices[SAMPLED], req_ids[SAMPLED, None]
        pages = block_table[requests, positions // BLOCK_SIZE]
        slots = pages * BLOCK_SIZE + positions % BLOCK_SIZE
        wanted = starts[requests] + positions if is_prefill else slots
        return np.array_equal(out[SAMPLED], np.where(positions < 0, -1, wanted))

    num_bytes = topk_indices.nbytes + out.nbytes
    to = "rows of a prefill" if is_prefill else "slots"
    return Move(f"convert_req_index_to_global_index, {to}", convert, num_bytes, is_right)


def make_merge(rng: np.random.Generator) -> Move:
    a = draw(NUM_OUTPUTS, 64, KV_LORA_RANK)
    b = np.roll(a, 1, axis=0)
    lse_a, lse_b = rng.standard_normal((2, NUM_OUTPUTS, 64), np.float32)
    out, lse = np.zeros(a.shape, BF16), np.zeros_like(lse_a)

    def merge() -> object:
        return sparse_mla.merge_attn_states(a, lse_a, b, lse_b, out=out, lse=lse)

    def is_right() -> bool:
        wanted = np.logaddexp(lse_a[SAMPLED].astype(np.float64), lse_b[SAMPLED])
        parts = [
            x[SAMPLED].astype(np.float64) * np.exp(part[SAMPLED] - wanted)[..., None]
            for x, part in ((a, lse_a), (b, lse_b))
        ]
        error = np.abs(out[SAMPLED].astype(np.float64) - parts[0] - parts[1])
        bound = 2.0**-8 * (np.abs(parts[0]) + np.abs(parts[1])) + 1e-6
        return bool((error <= bound).all()) and np.allclose(lse[SAMPLED], wanted, 1e-6, 1e-6)

    num_bytes = a.nbytes + b.nbytes + out.nbytes + 3 * lse.nbytes
    return Move("merge_attn_states, bf16, 64 heads", merge, num_bytes, is_right)


def make_partials(rng: np.random.Generator) -> Move:
    one = draw((NUM_OUTPUTS + 3) // 4, 64, KV_LORA_RANK)
    outs = np.stack([np.roll(one, i, axis=0) for i in range(8)])
    lses = rng.standard_normal(outs.shape[:3], np.float32)
    out, lse = np.zeros(outs[0].shape, BF16), np.zeros_like(lses[0])

    def merge() -> object:
        return sparse_mla.merge_attn_partials(outs, lses, out=out, lse=lse)

    def is_right() -> bool:
        rows = slice(None, None, 61)
        wanted = np.logaddexp.reduce(lses[:, rows].astype(np.float64))
        parts = outs[:, rows].astype(np.float64) * np.exp(lses[:, rows] - wanted)[..., None]
        error = np.abs(out[rows].astype(np.float64) - parts.sum(0))
        bound = 2.0**-8 * np.abs(parts).sum(0) + 1e-6
        return bool((error <= bound).all()) and np.allclose(lse[rows], wanted, 1e-6, 1e-6)

    num_bytes = outs.nbytes + out.nbytes + lses.nbytes + lse.nbytes
    return Move("merge_attn_partials, bf16, 64 heads, 8 parts", merge, num_bytes, is_right)


def make_norm(rng: np.random.Generator) -> Move:
    """DeepSeek V4-Flash's: q of 1024 and kv of 512 values are columns of one buffer."""
    buffer = rng.standard_normal((NUM_NORMS, 1536), np.float32).astype(BF16)
    q, kv = buffer[:, :1024], buffer[:, 1024:]
    weight = rng.standard_normal(1024, np.float32).astype(BF16)
    outs = np.zeros(q.shape, BF16), np.zeros(kv.shape, BF16)

    def normalize() -> object:
        return sparse_mla.fused_q_kv_rmsnorm(
            q, kv, weight, weight[:512], eps=1e-6, q_out=outs[0], kv_out=outs[1]
        )

    def is_right() -> bool:
        good = True
        for x, out in zip((q, kv), outs, strict=True):
            wide = x[SAMPLED].astype(np.float64)
            factor = 1 / np.sqrt((wide * wide).mean(1, keepdims=True) + 1e-6)
            want = wide * factor * weight[: x.shape[1]].astype(np.float64)
            error = np.abs(out[SAMPLED].astype(np.float64) - want)
            good = good and bool((error <= 1.02 * 2.0**-8 * np.abs(want) + 1e-38).all())
        return good

    return Move("fused_q_kv_rmsnorm, 1024 + 512", normalize, 2 * buffer.nbytes, is_right)


def turned(x: np.ndarray, angles: np.ndarray, *, interleaved: bool) -> np.ndarray:
    """apply_rope of [T, H, R] by a row of the table per token."""
    cos, sin = np.split(angles[:, None], 2, axis=-1)
    wide, half = x.astype(np.float32), x.shape[-1] // 2
    a, b = (wide[..., ::2], wide[..., 1::2]) if interleaved else np.split(wide, 2, axis=-1)
    pairs = np.stack((a * cos - b * sin, b * cos + a * sin), -1 if interleaved else -2)
    return pairs.reshape(*x.shape[:2], 2 * half).astype(BF16)


def make_turn(interleaved: bool) -> Move:
    q, k = draw(NUM_TURNED, 16, 64), draw(NUM_TURNED, 1, 64)
    positions, table = np.arange(NUM_TURNED), sparse_mla.rope_table(NUM_TURNED)
    outs = np.zeros_like(q), np.zeros_like(k)

    def turn() -> object:
        return sparse_mla.apply_rope(
            *(positions, q, k[:, 0], table),
            interleaved=interleaved,
            q_out=outs[0],
            k_out=outs[1][:, 0],
        )

    def is_right() -> bool:
        angles = table[SAMPLED]
        wants = [turned(x[SAMPLED], angles, interleaved=interleaved) for x in (q, k)]
        return all(np.array_equal(out[SAMPLED], x) for out, x in zip(outs, wants, strict=True))

    kind = "neighbours" if interleaved else "halves"
    return Move(f"apply_rope, 16 heads, {kind}", turn, 2 * (q.nbytes + k.nbytes), is_right)


def make_turned_keys() -> Move:
    q, k, kv_c = draw(NUM_TURNED, 16, 64), draw(NUM_TURNED, 1, 64), draw(NUM_TURNED, 512)
    positions, table = np.arange(NUM_TURNED), sparse_mla.rope_table(NUM_TURNED)
    cache = np.zeros((NUM_TURNED // BLOCK_SIZE + 1, BLOCK_SIZE, KEY_DIM), BF16)
    q_out = np.zeros_like(q)

    def insert() -> object:
        return sparse_mla.rope_and_cache_mla(
            positions,
            q,
            k[:, 0],
            table,
            kv_c=kv_c,
            kv_cache=cache,
            slot_mapping=positions,
            q_out=q_out,
        )

    def is_right() -> bool:
        q_want, k_want = (turned(x[SAMPLED], table[SAMPLED], interleaved=True) for x in (q, k))
        rows = np.concatenate([kv_c[SAMPLED], k_want[:, 0]], axis=1)
        return np.array_equal(q_out[SAMPLED], q_want) and np.array_equal(
            cache.reshape(-1, KEY_DIM)[SAMPLED], rows
        )

    num_bytes = 2 * (q.nbytes + k.nbytes + kv_c.nbytes)
    return Move("rope_and_cache_mla, 16 heads, bfloat16", insert, num_bytes, is_right)


def make_inverse() -> Move:
    o = draw(NUM_OUTPUTS, 64, 512)
    positions, table = np.arange(NUM_OUTPUTS), sparse_mla.rope_table(NUM_OUTPUTS)
    out = np.zeros((8, NUM_OUTPUTS, 4096), np.uint8).swapaxes(0, 1)
    scale = np.zeros((8, 32, NUM_OUTPUTS), np.float32).transpose(2, 0, 1)

    def turn_back() -> object:
        return sparse_mla.fused_inv_rope_fp8_quant(
            o, positions, table, groups=8, out=out, out_scale=scale
        )

    def is_right() -> bool:
        """Judges the values that RoPE leaves alone: three of a head's four tiles, and a half."""
        tiles = o[SAMPLED].reshape(-1, 4, 128).astype(np.float32)
        by = scale[SAMPLED].reshape(-1, 4, 1)
        amax = np.abs(tiles[:, :3]).max(2, keepdims=True)
        fits = (448 * by[:, :3] >= amax) & (224 * by[:, :3] < amax)
        if not fits.all():
            return False
        codes = (tiles / by).astype(ml_dtypes.float8_e4m3fn).reshape(-1, 512)[:, :448]
        return np.array_equal(out[SAMPLED].reshape(-1, 512)[:, :448], codes.view(np.uint8))

    num_bytes = o.nbytes + out.nbytes + scale.nbytes
    return Move("fused_inv_rope_fp8_quant, 64 heads", turn_back, num_bytes, is_right)


def make_queries() -> Move:
    q, kv = draw(NUM_OUTPUTS, 64, 512), draw(NUM_OUTPUTS, 512)
    positions, table = np.arange(NUM_OUTPUTS), sparse_mla.rope_table(NUM_OUTPUTS)
    cache = np.zeros((NUM_OUTPUTS // BLOCK_SIZE + 1, BLOCK_SIZE, V4_ROW_BYTES), np.uint8)
    q_out = np.zeros(q.shape, BF16)

    def insert() -> object:
        return sparse_mla.fused_qnorm_rope_kv_insert(
            q, kv, positions, table, cache, positions, eps=1e-6, q_out=q_out
        )

    def is_right() -> bool:
        """Judges the values that RoPE leaves alone: 448 of a head and of a key."""
        data, scales = split_pages(cache)
        rows = make_v4_rows(kv[SAMPLED])
        written = np.concatenate([data[SAMPLED, :448], scales[SAMPLED]], axis=1)
        wide = q[SAMPLED].astype(np.float64)
        want = (wide / np.sqrt((wide * wide).mean(2, keepdims=True) + 1e-6))[..., :448]
        error = np.abs(q_out[SAMPLED][..., :448].astype(np.float64) - want)
        return np.array_equal(written, np.delete(rows, np.s_[448:V4_DATA_BYTES], axis=1)) and bool(
            (error <= 1.02 * 2.0**-8 * np.abs(want)).all()
        )

    num_bytes = q.nbytes + q_out.nbytes + kv.nbytes + NUM_OUTPUTS * V4_ROW_BYTES
    return Move("fused_qnorm_rope_kv_insert, 64 heads", insert, num_bytes, is_right)


def make_index_queries(rng: np.random.Generator) -> Move:
    heads = 64
    q = draw(NUM_OUTPUTS, 64, 512).reshape(-1, heads, INDEX_DATA)
    weights = rng.standard_normal(q.shape[:2], np.float32)
    positions, table = np.arange(len(q)), sparse_mla.rope_table(len(q))
    out, out_weights = np.zeros(q.shape, np.uint8), np.zeros_like(weights)

    def quantise_queries() -> object:
        return sparse_mla.fused_indexer_q_rope_quant(
            q,
            weights,
            positions,
            table,
            softmax_scale=INDEX_DATA**-0.5,
            head_scale=heads**-0.5,
            out=out,
            out_weights=out_weights,
        )

    def is_right() -> bool:
        x = q[SAMPLED].astype(np.float32)
        cos, sin = np.split(table[SAMPLED, None], 2, axis=2)
        even, odd = x[..., 64::2], x[..., 65::2]
        turned = np.stack([even * cos - odd * sin, odd * cos + even * sin], 3)
        x[..., 64:] = turned.reshape(*x.shape[:2], 64).astype(BF16)
        values, exponent = quantise(x.reshape(-1, 1, INDEX_DATA))
        scale = np.float32(INDEX_DATA**-0.5 * heads**-0.5)
        wanted = np.ldexp(weights[SAMPLED] * scale, exponent.reshape(-1, heads))
        got = out[SAMPLED].reshape(-1, INDEX_DATA)
        return np.array_equal(got, values[:, 0].view(np.uint8)) and np.array_equal(
            out_weights[SAMPLED], wanted
        )

    num_bytes = q.nbytes + out.nbytes + 2 * weights.nbytes
    return Move("fused_indexer_q_rope_quant, 64 heads", quantise_queries, num_bytes, is_right)
