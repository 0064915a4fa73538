"""Prefills of multi-head attention with heads of 192/128 on a CUDA device, beside FlashAttention-3
where one of its packages is installed (`fa3-fwd`, `flash_attn_3`).

Two columns compare the sides. Alternating replays, with the L2 cache flushed, share one clock, and
compare cycles. A sustained run replays one side alone, so that the device's power sets its clock:
it compares energy, too."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import accumulate

import sparse_mla
from bench.common import rows
from bench.common.rows import Bench, Column, Work
from bench.common.timing import Table, describe_error
from bench.cuda.timing import DEVICE, PEAK_FLOPS, Array, sustain, torch
from bench.tables.varlen import JUDGED_HEADS, judge_head

NOPE, ROPE, VALUES = 128, 64, 128
SCALE = (NOPE + ROPE) ** -0.5
PEER_MODULES = ("fa3_fwd_interface", "flash_attn_interface")
Call = Callable[[], tuple[Array, Array]]


@dataclass
class Prefill:
    """Requests of (queries, keys). Without `is_causal` the keys are a chunk of their context. Kinds
    of inputs: "flat", N(0, 1); "spread-6", logits of deviation 6; "outliers", deviation 4 and
    2 % of the keys four times as long; "late", one heavy key, the last to be read; "views", the
    arrays that a layer has."""

    name: str
    lens: list[tuple[int, int]]
    heads: int = 128
    is_causal: bool = True
    kind: str = "flat"

    @property
    def flop(self) -> int:
        pairs = (
            n_q * n_k - (n_q * (n_q - 1) // 2 if self.is_causal else 0) for n_q, n_k in self.lens
        )
        return 2 * self.heads * (NOPE + ROPE + VALUES) * sum(pairs)

    def labels(self) -> dict[str, object]:
        return {"requests × tokens": self.name, "H": self.heads, "inputs": self.kind}


RAGGED = [(n, n) for n in (61, 4001, 777, 1333, 128, 2500, 9, 1100)]
PREFILLS = (
    Prefill("8 × 1024", [(1024, 1024)] * 8),
    Prefill("1 × 4096", [(4096, 4096)]),
    Prefill("1 × 4096", [(4096, 4096)], kind="spread-6"),
    Prefill("1 × 4096", [(4096, 4096)], kind="outliers"),
    Prefill("1 × 4096", [(4096, 4096)], kind="late"),
    Prefill("1 × 4096", [(4096, 4096)], kind="views"),
    Prefill("1 × 8192", [(8192, 8192)]),
    Prefill("1 × 8192", [(8192, 8192)], heads=16),
    Prefill("1 × 32768", [(32768, 32768)]),
    Prefill("9 to 4001", RAGGED),
    Prefill("1024 new of 9216", [(1024, 9216)]),
    Prefill("8192 over 8192 cached", [(8192, 8192)], is_causal=False),
)
QUICK = 2  # the first rows


@dataclass
class Arrays:
    q: Array
    k: Array
    v: Array
    query_starts: Array
    key_starts: Array


def make_arrays(prefill: Prefill) -> Arrays:
    """Rows of [tokens, heads, 192] and [tokens, heads, 128]."""
    sums = [[0, *accumulate(lens)] for lens in zip(*prefill.lens, strict=True)]
    starts = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in sums]
    tokens, keys = (x[-1] for x in sums)
    q, k, v = (
        torch.randn(count, prefill.heads, size, dtype=torch.bfloat16, device=DEVICE)
        for count, size in ((tokens, NOPE + ROPE), (keys, NOPE + ROPE), (keys, VALUES))
    )
    if prefill.kind == "spread-6":
        q *= 6
    elif prefill.kind == "outliers":
        q *= 4
        k[torch.rand(keys, device=DEVICE) < 0.02] *= 4
    elif prefill.kind == "late":  # keys are taken from the last one to the first
        k[sums[1][:-1]] *= 8
    elif prefill.kind == "views":
        k[..., NOPE:] = k[:, :1, NOPE:]
    return Arrays(q, k, v, *starts)


def make_ours(prefill: Prefill, a: Arrays) -> Call:
    q, k, v = a.q, a.k, a.v
    if prefill.kind == "views":  # q_nope, q_pe and k_pe apart; k_nope and v of one projection
        up = torch.cat([k[..., :NOPE], v], -1)
        q = (q[..., :NOPE].contiguous(), q[..., NOPE:].contiguous())
        k, v = (up[..., :NOPE], k[:, 0, NOPE:].contiguous()), up[..., NOPE:]
    options = {
        "softmax_scale": SCALE,
        "causal": prefill.is_causal,
        "out": torch.empty(len(a.q), prefill.heads, VALUES, dtype=torch.bfloat16, device=DEVICE),
        "lse": torch.empty(len(a.q), prefill.heads, device=DEVICE),
        "workspace": torch.empty(16, dtype=torch.uint8, device=DEVICE),
    }
    return lambda: sparse_mla.varlen_attention(q, k, v, a.query_starts, a.key_starts, **options)


def find_peer() -> Callable[..., object] | None:
    """FlashAttention-3's function, or None."""
    for name in PEER_MODULES:
        try:
            return import_module(name).flash_attn_varlen_func
        except (ImportError, AttributeError, OSError):
            continue
    return None


def make_peer(prefill: Prefill, a: Arrays, function: Callable[..., object]) -> Callable[[], object]:
    longest = [max(lens) for lens in zip(*prefill.lens, strict=True)]
    return lambda: function(
        *(a.q, a.k, a.v, a.query_starts, a.key_starts, *longest),
        softmax_scale=SCALE,
        causal=prefill.is_causal,
    )


def judge(prefill: Prefill, a: Arrays, results: tuple[Array, Array]) -> float:
    """The worst error of some heads of each request's first and last token, as a fraction of its
    bound."""
    out, lse = results
    if not (out.isfinite().all() and lse.isfinite().all()):
        return math.inf
    worst = 0.0
    first_query = first_key = 0
    for n_q, n_k in prefill.lens:
        for token in {0, n_q - 1}:
            end = n_k - n_q + token + 1 if prefill.is_causal else n_k
            for head in range(JUDGED_HEADS):
                at = first_query + token, head
                q, out_row = (x[at].double().cpu().numpy() for x in (a.q, out))
                keys = slice(first_key, first_key + end)
                k, v = (x[keys, head].double().cpu().numpy() for x in (a.k, a.v))
                got = float(lse[at])
                found = judge_head(q, k, v, out_row, got, SCALE, units=32)
                worst = max(worst, found.out, found.lse)
        first_query, first_key = first_query + n_q, first_key + n_k
    return worst


def measure(bench: Bench) -> Table:
    columns = [rows.US, rows.TFLOPS, rows.ERROR, rows.FLOOR, rows.beside("FA3 µs"), rows.RATIO]
    columns += [
        Column(
            "sustained TFLOP/s",
            lambda x: f"{x.work.flop / x.lasting['ours'] / 1e12:.0f}",
            "sustained_us",
            lambda x: 1e6 * x.lasting["ours"],
        ),
        Column(
            "÷ ours sustained",
            lambda x: rows.times(x.lasting.get("FA3", math.nan) / x.lasting["ours"]),
            "peer_sustained_us",
            lambda x: 1e6 * x.lasting.get("FA3", math.nan),
        ),
    ]
    title = "Prefill, heads of 192/128, bf16, beside FlashAttention-3"
    table = rows.make_table(title, PREFILLS[0].labels(), columns)
    peer = find_peer()
    for prefill in bench.choose(PREFILLS, PREFILLS[:QUICK]):
        try:
            row = prefill.labels(), partial(make, prefill, peer)
            rows.measure_row(bench, table, columns, row, sustain=sustain)
        except torch.cuda.OutOfMemoryError as reason:
            table.failures.append(f"{prefill.name}: {describe_error(reason)}")
    return table


def make(prefill: Prefill, peer: Callable[..., object] | None) -> Work:
    arrays = make_arrays(prefill)
    return Work(
        make_ours(prefill, arrays),
        partial(judge, prefill, arrays),
        flop=prefill.flop,
        floor=prefill.flop / PEAK_FLOPS,
        peers={} if peer is None else {"FA3": partial(make_peer, prefill, arrays, peer)},
    )
