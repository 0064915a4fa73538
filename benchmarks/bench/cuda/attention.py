"""sparse_attention on a CUDA device compared with FlashMLA and with the floor; errors come first.

Logits are flat and every entry is valid; `kinds.py` has other inputs. Decode rotates over more
inputs than the L2 cache can hold. Prefill's queries alone are larger than the L2 cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from bench.common.peer import Peer
from bench.common.timing import Table
from bench.cuda.inputs import (
    ROW_BYTES,
    Inputs,
    Requests,
    draw_slots,
    make_cache,
    make_requests,
    upconvert,
)
from bench.cuda.sides import (
    Side,
    finite,
    make_ours,
    make_peer,
    measure_sides,
    show_labels,
    show_ratio,
    show_us,
    tell_failures,
)
from bench.cuda.timing import (
    DEVICE,
    Array,
    CudaEffort,
    describe_error,
    floor_seconds,
    l2_bytes,
    torch,
)
from sparse_mla._rows import KEY_DIM, KV_LORA_RANK

MAX_INPUT_SETS = 128
MIN_CALLS = 12  # calls per replay, to share the cost of its start; large batches need fewer
LARGE_BYTES = 1 << 30
PREFILL_TOKENS = 4096
PREFILL_TOPK = 2048

# kv_format, K, head counts, (requests, tokens per request)
FULL_BATCHES = [(2**i, 1) for i in range(9)] + [(n, 2) for n in (1, 8, 32, 64, 128, 256)]
FULL_DECODES = [
    ("fp8_ds_mla", 2048, (16, 32, 64, 128), FULL_BATCHES),
    ("fp8_ds_mla", 16384, (64, 128), [(148, 2)]),
    ("bfloat16", 2048, (16, 64, 128), [(1, 1), (8, 1), (64, 1), (128, 1), (128, 2)]),
]
QUICK_DECODES = [
    ("fp8_ds_mla", 2048, (16, 64, 128), [(1, 1), (8, 1), (64, 1), (128, 2)]),
    ("bfloat16", 2048, (128,), [(64, 1)]),
]
FULL_PREFILL_KEYS = (8192, 32768, 131072)
QUICK_PREFILL_KEYS = (32768,)
PREFILL_HEADS = (64, 128)

SIDE_COLUMNS = ["µs", "TFLOP/s", "floor µs", "× floor", "error/bound", "flushed µs"]
PEER_COLUMNS = ["FlashMLA µs", "÷ ours", "error/bound", "flushed µs", "÷ ours"]


# --- one row -------------------------------------------------------------------------------------


@dataclass
class Work:
    """What a call must do: its FLOP, and its fewest bytes to and from memory."""

    num_tokens: int
    num_heads: int
    topk: int
    num_keys: int  # keys in the cache
    kv_format: str
    labels: dict[str, Any] = field(default_factory=dict)

    @property
    def flop(self) -> float:
        return 2 * self.num_tokens * self.num_heads * self.topk * (KEY_DIM + KV_LORA_RANK)

    @property
    def num_bytes(self) -> float:
        rows = min(self.num_tokens * self.topk, self.num_keys)
        return rows * ROW_BYTES[self.kv_format] + self.num_tokens * self.num_heads * 2 * (
            KEY_DIM + KV_LORA_RANK
        )


def add_row(table: Table, work: Work, ours: Side, peer: Side | None) -> None:
    floor = floor_seconds(work.flop, work.num_bytes)
    row = [str(value) for value in work.labels.values()]
    record: dict[str, object] = dict(work.labels) | {"floor_us": 1e6 * floor}
    if math.isnan(ours.seconds):
        row += ["FAIL"] + [""] * (len(SIDE_COLUMNS) - 1)
    else:
        row += [
            show_us(ours.seconds),
            f"{work.flop / ours.seconds / 1e12:.0f}",
            show_us(floor),
            f"{ours.seconds / floor:.2f}",
            f"{'FAIL ' if ours.failure else ''}{ours.error:.3g}",
            show_us(ours.flushed_seconds),
        ]
        record |= {
            "us": 1e6 * ours.seconds,
            "tflops": work.flop / ours.seconds / 1e12,
            "over_floor": ours.seconds / floor,
            "error_over_bound": finite(ours.error),
            "flushed_us": finite(1e6 * ours.flushed_seconds),
        }
    if peer is not None:
        row += peer_cells(ours, peer, record)
    tell_failures(table, work.labels, record, ours, peer)
    table.add(row, record)


def peer_cells(ours: Side, peer: Side, record: dict[str, object]) -> list[str]:
    if math.isnan(peer.seconds):
        record["peer_failure"] = peer.failure
        return ["failed"] + [""] * (len(PEER_COLUMNS) - 1)
    ratio = peer.seconds / ours.seconds
    flushed_ratio = peer.flushed_seconds / ours.flushed_seconds
    record |= {
        "peer_us": 1e6 * peer.seconds,
        "peer_over_ours": finite(ratio),
        "peer_error_over_bound": finite(peer.error),
        "peer_flushed_us": finite(1e6 * peer.flushed_seconds),
        "peer_over_ours_flushed": finite(flushed_ratio),
    }
    return [
        show_us(peer.seconds),
        show_ratio(ratio),
        f"{peer.error:.3g}",
        show_us(peer.flushed_seconds),
        show_ratio(flushed_ratio),
    ]


# --- decode --------------------------------------------------------------------------------------


def measure_decode(effort: CudaEffort, peer: Peer | None) -> Table:
    columns = ["cache", "H", "requests", "K", *SIDE_COLUMNS, *(PEER_COLUMNS if peer else [])]
    table = Table("Decode, lengths around 32k, uniformly random slots", columns, [], [])
    for kv_format, topk, head_counts, batches in QUICK_DECODES if effort.quick else FULL_DECODES:
        try:
            requests = make_requests(max(num_reqs for num_reqs, _ in batches), kv_format, topk)
        except Exception as error:  # for example no memory; other formats may fit
            table.failures.append(f"{kv_format} K {topk}: {describe_error(error)}")
            continue
        for num_heads in head_counts:
            for num_reqs, query_len in batches:
                labels = {
                    "kv_format": kv_format,
                    "H": num_heads,
                    "requests": f"{num_reqs} × {query_len}",
                    "K": topk,
                }
                num_tokens = num_reqs * query_len
                num_keys = int(requests.lengths.sum())
                work = Work(num_tokens, num_heads, topk, num_keys, kv_format, labels)
                try:
                    add_decode(table, work, num_reqs, requests, peer, effort)
                except Exception as error:  # no memory, or a device that an earlier row has lost
                    table.failures.append(f"{show_labels(labels)}: {describe_error(error)}")
        del requests  # frees its memory before the next one is made
    return table


def add_decode(
    table: Table,
    work: Work,
    num_reqs: int,
    requests: Requests,
    peer: Peer | None,
    effort: CudaEffort,
) -> None:
    num_sets = max(2, min(MAX_INPUT_SETS, math.ceil(2 * l2_bytes() / work.num_bytes)))
    shape = (num_reqs, work.num_tokens // num_reqs, work.num_heads, work.topk)
    inputs = [requests.draw(*shape, first=index * num_reqs) for index in range(num_sets)]
    sides = {"ours": make_ours(inputs)}
    if peer is not None:
        sides["peer"] = make_peer(peer, inputs)
    repeats = 1 if work.num_bytes > LARGE_BYTES else math.ceil(MIN_CALLS / num_sets)
    for side in sides.values():
        side.calls = list(side.calls) * repeats
    measure_sides(sides, effort)
    add_row(table, work, sides["ours"], sides.get("peer"))


# --- prefill -------------------------------------------------------------------------------------


def measure_prefill(effort: CudaEffort, peer: Peer | None) -> Table:
    """Compares our ways with the peer's kernel on the bf16 workspace. The peer's users must gather
    that workspace first; no number here includes the gather. Numbers of "wide" include the pass
    that widens FP8 rows."""
    columns = ["kv", "H", "keys", *SIDE_COLUMNS, *(PEER_COLUMNS if peer else [])]
    title = f"Prefill, T = {PREFILL_TOKENS}, K = {PREFILL_TOPK}, with a sink"
    table = Table(title, columns, [], [])
    for num_keys in QUICK_PREFILL_KEYS if effort.quick else FULL_PREFILL_KEYS:
        cache = make_cache(num_keys, "fp8_ds_mla")
        workspace = upconvert(cache)
        for num_heads in PREFILL_HEADS:
            try:
                add_prefills(table, num_heads, cache, workspace, peer, effort)
            except Exception as error:  # no memory, or a device that an earlier row has lost
                labels = {"H": num_heads, "keys": num_keys}
                table.failures.append(f"{show_labels(labels)}: {describe_error(error)}")
    return table


def add_prefills(
    table: Table,
    num_heads: int,
    cache: Array,
    workspace: Array,
    peer: Peer | None,
    effort: CudaEffort,
) -> None:
    num_keys = len(workspace)
    q = torch.randn(PREFILL_TOKENS, num_heads, KEY_DIM, device=DEVICE).bfloat16()
    starts = torch.zeros(PREFILL_TOKENS, dtype=torch.long, device=DEVICE)
    indices = draw_slots(starts, starts + num_keys, PREFILL_TOPK)
    direct = Inputs(q, cache, indices, sink=torch.randn(num_heads, device=DEVICE))
    gathered = replace(direct, kv=workspace)
    sides = {
        "workspace": make_ours([gathered]),
        "direct": make_ours([direct]),
        "wide": make_ours([direct], num_keys),
    }
    if peer is not None:
        sides["peer"] = make_peer(peer, [gathered])
    measure_sides(sides, effort)
    for name, kv_format in (
        ("workspace", "bfloat16"),
        ("direct", "fp8_ds_mla"),
        ("wide", "fp8_ds_mla"),
    ):
        shown = f"{kv_format}, wide" if name == "wide" else kv_format
        labels = {"kv_format": shown, "H": num_heads, "keys": num_keys}
        work = Work(PREFILL_TOKENS, num_heads, PREFILL_TOPK, num_keys, kv_format, labels)
        add_row(table, work, sides[name], sides.get("peer"))
