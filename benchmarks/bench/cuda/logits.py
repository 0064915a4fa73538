"""indexer_logits on a CUDA device: causal prefills of flat keys and decodes of pages, with FP8 or
MXFP4 keys, beside DeepGEMM where its wheel can be imported (`sgl-deep-gemm`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import sparse_mla
from bench.common import rows
from bench.common.rows import Bench, Column
from bench.common.timing import Table
from bench.cuda.timing import DEVICE, PEAK_BYTES, PEAK_FLOPS, Array, torch

BLOCK_SIZE, DIM = 64, 128
FP8_ROW, FP4_ROW = DIM + 4, DIM // 2 + 4  # bytes of a key
PEAK_FP8 = 2 * PEAK_FLOPS
COARSE, FINE = 2.0**-8, 2.0**-18  # docs/choosing_keys.md
SAMPLED = 8  # tokens that are judged
PREFILLS = ((2048, 8192), (4096, 32768), (4096, 131072))
DECODES = ((1, 32768), (1, 131072), (64, 32768), (128, 32768), (64, 131072))
MORE_TOKENS = (2, 3, 4)  # per request, of 64 x 32768
QUICK = 1  # rows of each kind


@dataclass(kw_only=True)
class Work:
    """A call with its inputs. Token t sees lens[t] keys from first[t] on."""

    name: str
    q: Array  # [T, H, 128] e4m3, or the bf16 values of MXFP4 queries
    weights: Array
    keys: Array  # [S, 128] e4m3, or the bf16 values of MXFP4 keys
    scales: Array  # [S] fp32
    lens: Array
    first: Array  # [T]: the token's key 0
    call: Callable[[], Array]
    peer: Callable[[Any], Callable[[], object]] | None
    row_bytes: int = FP8_ROW

    def is_coarse(self) -> bool:
        """Whether FP8 tensor cores multiply, which Hopper has for 32 and 64 heads."""
        return self.q.dtype == torch.float8_e4m3fn and self.q.shape[1] in (32, 64)

    def count(self) -> int:
        return int(self.lens.sum())

    def floor(self) -> float:
        read = {int(n) for n in self.first.tolist()}
        rows = sum(int(self.lens[self.first == n].max()) for n in read)
        flop = 2 * DIM * self.q.shape[1] * self.count() * (1 if self.is_coarse() else 2)
        return max(flop / PEAK_FP8, (rows * self.row_bytes + 4 * self.count()) / PEAK_BYTES)

    def judge(self, out: Array) -> float:
        """The worst error of some tokens, as a part of the bound."""
        is_hopper = torch.cuda.get_device_capability()[0] == 9
        bound = COARSE if self.is_coarse() and is_hopper else FINE
        worst = 0.0
        for t in range(0, len(self.q), max(1, len(self.q) // SAMPLED)):
            n, first = int(self.lens[t]), int(self.first[t])
            k = (
                self.keys[first : first + n].double()
                * self.scales[first : first + n, None].double()
            )
            q, w = self.q[t].double(), self.weights[t].double()
            want = torch.relu(q @ k.T).T @ w
            size = (q.abs() @ k.abs().T).T @ w.abs()
            got = out[t, :n].double()
            if n > 0:
                worst = max(worst, float(((got - want).abs() / (bound * size + 1e-30)).max()))
            if not torch.isneginf(out[t, n:]).all():
                return float("inf")
        return worst


def make_queries(num_tokens: int, heads: int) -> tuple[Array, Array]:
    q = torch.randn(num_tokens, heads, DIM, device=DEVICE).to(torch.float8_e4m3fn)
    return q, torch.randn(num_tokens, heads, device=DEVICE)


def make_prefill(num_tokens: int, num_keys: int, heads: int) -> Work:
    q, weights = make_queries(num_tokens, heads)
    keys = torch.randn(num_keys, DIM, device=DEVICE).to(torch.float8_e4m3fn)
    scales = torch.rand(num_keys, device=DEVICE) + 0.5
    lens = torch.arange(num_keys - num_tokens + 1, num_keys + 1, device=DEVICE).int()
    out = torch.empty(num_tokens, num_keys, device=DEVICE)
    first = torch.zeros_like(lens)

    def call() -> Array:
        return sparse_mla.indexer_logits(q, weights, (keys, scales), lens, out=out)

    def peer(module: Any) -> Callable[[], object]:
        return lambda: module.fp8_mqa_logits(q, (keys, scales), weights, first, lens)

    name = f"prefill {num_tokens} x {num_keys}"
    inputs = {"q": q, "weights": weights, "keys": keys, "scales": scales}
    return Work(name=name, lens=lens, first=first, call=call, peer=peer, **inputs)


def make_decode(num_reqs: int, context: int, heads: int, next_n: int = 1) -> Work:
    num_tokens, blocks = num_reqs * next_n, context // BLOCK_SIZE
    q, weights = make_queries(num_tokens, heads)
    num_pages = num_reqs * blocks
    keys = torch.randn(num_pages * BLOCK_SIZE, DIM, device=DEVICE).to(torch.float8_e4m3fn)
    scales = torch.rand(num_pages * BLOCK_SIZE, device=DEVICE) + 0.5
    cache = torch.cat(
        [
            keys.view(torch.uint8).view(num_pages, -1),
            scales.view(torch.uint8).view(num_pages, -1),
        ],
        1,
    ).view(num_pages, BLOCK_SIZE, DIM + 4)
    table = torch.arange(num_pages, device=DEVICE).int().view(num_reqs, blocks)
    req = torch.arange(num_reqs, device=DEVICE).int().repeat_interleave(next_n)
    lens = torch.full((num_tokens,), context, device=DEVICE).int()
    out = torch.empty(num_tokens, context, device=DEVICE)

    def call() -> Array:
        return sparse_mla.indexer_logits(
            q, weights, cache, lens, block_table=table, req_id_per_token=req, out=out
        )

    def peer(module: Any) -> Callable[[], object]:
        sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
        fused = cache.view(num_pages, BLOCK_SIZE, 1, DIM + 4)
        query = q.view(num_reqs, next_n, heads, DIM)

        def bind(given: Array) -> Callable[[], object]:
            plan = module.get_paged_mqa_logits_metadata(given, BLOCK_SIZE, sms)
            return lambda: module.fp8_paged_mqa_logits(
                query, fused, weights, given, table, plan, context
            )

        try:  # lengths are [R, next_n] in later versions, [R] in earlier ones
            run = bind(lens[:, None])
            run()
        except Exception:
            run = bind(lens)
        return run

    name = f"decode {num_reqs} x {context}" + (f", {next_n} tokens" if next_n > 1 else "")
    inputs = {"q": q, "weights": weights, "keys": keys, "scales": scales}
    first, beside = req.long() * context, peer if next_n == 1 else None
    return Work(name=name, lens=lens, first=first, call=call, peer=beside, **inputs)


def quantise_fp4(x: Array) -> tuple[Array, Array, Array]:
    """bf16 [n, 128] -> the bytes of e2m1 [n, 64], of scales [n, 4], and their values in bf16."""
    rows = torch.zeros(len(x), 1, FP4_ROW, dtype=torch.uint8, device=DEVICE)
    slots = torch.arange(len(x), device=DEVICE)
    sparse_mla.indexer_k_quant_and_cache(x, rows, slots, kv_format="mxfp4_index")
    values = sparse_mla.dequantize_kv_cache(rows, kv_format="mxfp4_index", dtype="bfloat16")
    codes, scales = rows[:, 0].split([DIM // 2, 4], 1)
    return codes.contiguous(), scales.contiguous(), values[:, 0]


def make_fp4_decode(num_reqs: int, context: int, heads: int) -> Work:
    """The queries are MXFP4, too."""
    blocks, num_pages = context // BLOCK_SIZE, num_reqs * context // BLOCK_SIZE
    count = num_pages * BLOCK_SIZE
    queries = torch.randn(num_reqs * heads, DIM, device=DEVICE).bfloat16()
    codes, scales, q = quantise_fp4(queries)
    weights = torch.randn(num_reqs, heads, device=DEVICE)
    keys = torch.randn(count, DIM, device=DEVICE).bfloat16()
    cache = torch.zeros(num_pages, BLOCK_SIZE, FP4_ROW, dtype=torch.uint8, device=DEVICE)
    slots = torch.arange(count, device=DEVICE)
    sparse_mla.indexer_k_quant_and_cache(keys, cache, slots, kv_format="mxfp4_index")
    values = sparse_mla.dequantize_kv_cache(cache, kv_format="mxfp4_index", dtype="bfloat16")
    given = {
        "q_scale": scales.view(num_reqs, heads, 4),
        "block_table": torch.arange(num_pages, device=DEVICE).int().view(num_reqs, blocks),
        "req_id_per_token": torch.arange(num_reqs, device=DEVICE).int(),
        "kv_format": "mxfp4_index",
        "out": torch.empty(num_reqs, context, device=DEVICE),
    }
    codes = codes.view(num_reqs, heads, DIM // 2)
    lens = torch.full((num_reqs,), context, device=DEVICE).int()

    def call() -> Array:
        return sparse_mla.indexer_logits(codes, weights, cache, lens, **given)

    return Work(
        name=f"decode {num_reqs} x {context}, MXFP4",
        q=q.view(num_reqs, heads, DIM),
        weights=weights,
        keys=values.view(count, DIM),
        scales=torch.ones(count, device=DEVICE),
        lens=lens,
        first=torch.arange(num_reqs, device=DEVICE) * context,
        call=call,
        peer=None,
        row_bytes=FP4_ROW,
    )


def find_deep_gemm() -> Any:
    """The module, or None."""
    try:
        return import_module("deep_gemm")
    except Exception:  # a wheel for another CUDA or PyTorch fails in many ways
        return None


def make_work_items(quick: bool) -> list[partial[Work]]:
    prefills, decodes = (x[:QUICK] if quick else x for x in (PREFILLS, DECODES))
    items = [partial(make_prefill, *shape, heads) for heads in (64, 32) for shape in prefills]
    items += [partial(make_decode, *shape, 64) for shape in decodes]
    items.append(partial(make_decode, 64, 32768, 65))  # a head more: the precise class
    items.append(partial(make_fp4_decode, 64, 32768, 64))
    return items + [
        partial(make_decode, 64, 32768, 64, n) for n in MORE_TOKENS[: QUICK if quick else None]
    ]


def measure(bench: Bench) -> Table:
    theirs = Column(
        "DeepGEMM µs",
        lambda x: rows.us(x.beside) or "-",
        "deep_gemm_us",
        lambda x: None if math.isnan(x.beside) else 1e6 * x.beside,
    )
    ratio = Column("ratio", lambda x: rows.times(x.beside / x.ours) or "-")
    columns = [rows.ERROR, rows.US, rows.TFLOPS, rows.FLOOR, theirs, ratio]
    table = rows.make_table("Logits of the indexer, cold", ["work", "heads"], columns)
    module = find_deep_gemm()
    for make in make_work_items(bench.effort.quick):
        work = make()
        labels = {"work": work.name, "heads": work.q.shape[1]}
        rows.measure_row(bench, table, columns, (labels, partial(make_row, work, module)))
        del work
        torch.cuda.empty_cache()
    return table


def make_row(work: Work, module: Any) -> rows.Work:
    heads, peer = work.q.shape[1], work.peer
    has_peer = module is not None and peer is not None and heads in (32, 64)
    return rows.Work(
        work.call,
        work.judge,
        flop=2 * DIM * heads * work.count(),
        floor=work.floor(),
        peers={"DeepGEMM": partial(peer, module)} if has_peer and peer else {},
    )
