"""Dense attention on a CUDA device, beside FlashMLA: bf16 query tokens of each request over its
whole paged cache. The L2 cache is flushed before each replay."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import sparse_mla
from bench.common.peer import Peer
from bench.common.timing import Table
from bench.cuda.inputs import FP8_ROW_BYTES
from bench.cuda.judge import exact_keys, judge_token, spread_tokens
from bench.cuda.sides import show_ratio, show_us
from bench.cuda.timing import (
    DEVICE,
    Array,
    CudaEffort,
    describe_error,
    floor_seconds,
    interleave_flushed,
    torch,
)
from sparse_mla._rows import KEY_DIM, KV_LORA_RANK

BLOCK_SIZE = 64
SCALE = KEY_DIM**-0.5
BF16: Final = "bfloat16"
FP8: Final = "fp8_ds_mla"
E4M3: Final = "fp8_e4m3"
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


@dataclass
class Call:
    """The arguments of a call; q [B, n, H, 576]. rows: the cache's keys, which pages lie in."""

    q: Array
    cache: Array
    table: Array
    lens: Array


def measure_dense(effort: CudaEffort, peer: Peer | None) -> Table:
    columns = ["cache", "B", "n", "H", "keys", "µs", "error/bound", "floor µs", "FlashMLA µs"]
    table = Table("Dense attention, L2 flushed", [*columns, "÷ ours"], [], [])
    shapes = [(*shape[:4], [shape[4]] * shape[1], str(shape[4])) for shape in EQUAL]
    shapes += [(*shape, lengths_between(shape[1], 1, 8192), RAGGED) for shape in UNEQUAL]
    for cache, _, query_len, heads, lens, name in shapes[:2] if effort.quick else shapes:
        call = make_call(cache, query_len, heads, lens)
        add_row(table, effort, peer, [cache, len(lens), query_len, heads, name], call)
    return table


def lengths_between(count: int, least: int, most: int) -> list[int]:
    """Equally spaced lengths, in an order that looks random and is always the same."""
    step = (most - least) / (count - 1)
    return [least + round(step * (i * 37 % count)) for i in range(count)]


def make_call(cache: str, query_len: int, heads: int, lens: list[int]) -> Call:
    counts = [-(-length // BLOCK_SIZE) for length in lens]
    pages = torch.randperm(sum(counts), device=DEVICE, dtype=torch.int32)
    table = torch.zeros(len(lens), max(counts), dtype=torch.int32, device=DEVICE)
    for row, part in zip(table, pages.split(counts), strict=True):
        row[: len(part)] = part
    kv = torch.randn(len(pages), BLOCK_SIZE, KEY_DIM, dtype=torch.bfloat16, device=DEVICE)
    if cache == FP8:
        kv = encode(kv)
    elif cache == E4M3:  # the cache's scale is 1
        kv = kv.to(torch.float8_e4m3fn).view(torch.uint8)
    q = torch.randn(len(lens), query_len, heads, KEY_DIM, dtype=torch.bfloat16, device=DEVICE)
    return Call(q, kv, table, torch.tensor(lens, dtype=torch.int32, device=DEVICE))


def encode(keys: Array) -> Array:
    rows = keys.new_empty(*keys.shape[:2], FP8_ROW_BYTES, dtype=torch.uint8)
    flat = keys.view(-1, KEY_DIM)
    slots = torch.arange(len(flat), device=DEVICE)
    sparse_mla.concat_and_cache_mla(
        flat[:, :KV_LORA_RANK], flat[:, KV_LORA_RANK:], rows, slots, kv_cache_dtype=FP8
    )
    return rows


def make_ours(call: Call) -> Callable[[], tuple[Array, Array]]:
    num_reqs, query_len, heads, _ = call.q.shape
    longest = call.table.shape[1] * BLOCK_SIZE
    room = sparse_mla.attention_workspace_size(num_reqs * query_len, heads, longest, device=DEVICE)
    options = {
        "softmax_scale": SCALE,
        "causal": True,
        "out": call.q.new_empty(num_reqs, query_len, heads, KV_LORA_RANK),
        "lse": torch.empty(num_reqs, query_len, heads, device=DEVICE),
        "workspace": torch.empty(max(room, 1), dtype=torch.uint8, device=DEVICE),
    }
    return lambda: sparse_mla.mla_attention(call.q, call.cache, call.table, call.lens, **options)


def judge(call: Call, results: tuple[Array, Array]) -> float:
    """The worst error of some tokens as a fraction of its bound."""
    out, lse = (x.flatten(0, 1) for x in results)
    if not (out.isfinite().all() and lse.isfinite().all()):
        return math.inf
    worst = 0.0
    query_len = call.q.shape[1]
    for token in spread_tokens(len(out)):
        req, query = divmod(token, query_len)
        seen = int(call.lens[req]) - query_len + query + 1
        rows = call.cache[call.table[req].long()].flatten(0, 1)[: max(seen, 0)]
        is_fp8 = rows.shape[-1] == FP8_ROW_BYTES
        if rows.dtype == torch.uint8 and not is_fp8:
            rows = rows.view(torch.float8_e4m3fn)
        q = call.q[req, query]
        given = (q, exact_keys(rows), out[token], lse[token], SCALE, None)
        found = judge_token(*given, is_fp8=is_fp8)
        worst = max(worst, found.out, found.lse)
    return worst


def add_row(
    table: Table, effort: CudaEffort, peer: Peer | None, names: list[object], call: Call
) -> None:
    num_reqs, query_len, heads, _ = call.q.shape
    ours = make_ours(call)
    error = judge(call, ours())
    keys = int(call.lens.sum())
    num_bytes = keys * call.cache.shape[-1] * call.cache.itemsize
    num_bytes += num_reqs * query_len * heads * (KEY_DIM + KV_LORA_RANK) * 2
    flop = 2 * keys * query_len * heads * (KEY_DIM + KV_LORA_RANK)
    floor = floor_seconds(flop, num_bytes)
    sides: dict[str, list[Callable[[], object]]] = {"ours": [ours]}
    name = ", ".join(str(x) for x in names)
    if error > 1:
        table.failures.append(f"{name}: {error:.3g} × bound")
    if peer is not None:
        try:
            cache = call.cache
            if cache.dtype != torch.bfloat16:  # it has no such dense kernel: the same keys in bf16
                cache = sparse_mla.dequantize_kv_cache(cache, dtype=BF16).view(*cache.shape[:2], -1)
            theirs = peer.decode_dense(call.q, cache, call.table, call.lens, SCALE)
            theirs()
            sides["peer"] = [theirs]
        except Exception as reason:  # the peer has no kernel for the shape, or refuses it
            table.failures.append(f"{name}: FlashMLA: {describe_error(reason)}")
    seconds = interleave_flushed(sides, effort)
    beside = seconds.get("peer", math.nan)
    row = [*map(str, names), show_us(seconds["ours"]), f"{error:.3g}", show_us(floor)]
    row += [show_us(beside), show_ratio(beside / seconds["ours"])]
    record = dict(zip(("cache", "B", "n", "H", "keys"), names, strict=True))
    record |= {"us": 1e6 * seconds["ours"], "error_over_bound": error, "floor_us": 1e6 * floor}
    record |= {"peer_us": 1e6 * beside} if beside == beside else {}
    table.add(row, record)
