"""Attention over DeepSeek V4's caches on a CUDA device, beside FlashMLA: a window and chosen rows,
both of fp8_v4, flat and as engines send them. The L2 cache is flushed before each replay."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import sparse_mla
from bench.common.peer import Peer, read_decode
from bench.common.timing import Table
from bench.cuda.judge import judge_token, spread_tokens
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
from sparse_mla._rows import KV_LORA_RANK, V4_ROW_BYTES

WINDOW, BLOCK_SIZE, ROW_BYTES, DIM = 128, 64, V4_ROW_BYTES, KV_LORA_RANK
PAGE_UNIT = 576  # FlashMLA wants pages of a multiple of it
PAGES = (2048, 4096)  # pages of the window's cache and of the compressed one
DECODE = ((64, 512), (128, 1024))  # heads, chosen rows: V4-Flash and V4-Pro
BATCHES = ((2, 1), (16, 1), (64, 1), (64, 2), (128, 1), (128, 2))
PREFILL_TOKENS = 4096


@dataclass
class Inputs:
    """A call's inputs; the window has no keys in a prefill of one list."""

    q: Array
    indices: list[Array]
    scale: float
    sink: Array


def spread(inputs: Inputs) -> None:
    inputs.scale = 6 / math.sqrt(DIM)  # logits with a deviation of six


def shorten(inputs: Inputs) -> None:
    inputs.indices[-1][:, 100:] = -1


def make_holes(inputs: Inputs) -> None:
    inputs.indices[-1][:, ::2] = -1


def choose_zeros(inputs: Inputs) -> None:
    chosen = inputs.indices[-1]
    chosen[torch.rand(chosen.shape, device=DEVICE) < 0.02] = 0  # row 0 of each cache is zeros


KINDS: dict[str, Callable[[Inputs], None]] = {
    "flat": lambda inputs: None,
    "spread 6": spread,
    "100 valid": shorten,
    "every second": make_holes,
    "2 % zero rows": choose_zeros,
}


def measure_v4(effort: CudaEffort, peer: Peer | None) -> Table:
    columns = ["T", "H", "keys", "input", "µs", "error/bound", "floor µs", "FlashMLA µs", "÷ ours"]
    table = Table("DeepSeek V4, caches of fp8_v4, L2 flushed", columns, [], [])
    caches = [make_cache(pages) for pages in PAGES]
    shapes = [(num, n, *size) for size in DECODE for num, n in BATCHES]
    shapes += [(128, 2, 16, 512), (128, 2, 32, 512), *((1, PREFILL_TOKENS, *s) for s in DECODE)]
    for num_reqs, query_len, heads, topk in shapes[:2] if effort.quick else shapes:
        has_all_kinds = (num_reqs, query_len) == (128, 2) and heads == DECODE[0][0]
        for kind in KINDS if has_all_kinds else ("flat",):
            widths = [topk] if query_len == PREFILL_TOKENS else [WINDOW, topk]
            inputs = make_inputs(num_reqs * query_len, heads, widths)
            KINDS[kind](inputs)
            add_row(
                table,
                effort,
                peer,
                num_reqs=num_reqs,
                kind=kind,
                inputs=inputs,
                caches=caches[-len(widths) :],
            )
    return table


def make_cache(num_pages: int) -> Array:
    page = -(-BLOCK_SIZE * ROW_BYTES // PAGE_UNIT) * PAGE_UNIT
    memory = torch.zeros(num_pages * page, dtype=torch.uint8, device=DEVICE)
    cache = memory.as_strided((num_pages, BLOCK_SIZE, ROW_BYTES), (page, ROW_BYTES, 1))
    keys = torch.randn(num_pages * BLOCK_SIZE, DIM, dtype=torch.bfloat16, device=DEVICE)
    keys[0] = 0
    slots = torch.arange(len(keys), device=DEVICE)
    return sparse_mla.quantize_and_insert_k_cache(keys, cache, slots)


def make_inputs(num_tokens: int, heads: int, widths: list[int]) -> Inputs:
    q = torch.randn(num_tokens, heads, DIM, dtype=torch.bfloat16, device=DEVICE)
    indices = [
        torch.randint(1, pages * BLOCK_SIZE, (num_tokens, width), device=DEVICE, dtype=torch.int32)
        for pages, width in zip(PAGES[-len(widths) :], widths, strict=True)
    ]
    return Inputs(q, indices, DIM**-0.5, torch.randn(heads, device=DEVICE))


def make_ours(inputs: Inputs, caches: list[Array]) -> Callable[[], tuple[Array, Array]]:
    tokens, heads, _ = inputs.q.shape
    extra = len(caches) == 2
    widths = [x.shape[1] for x in inputs.indices]
    room = sparse_mla.attention_workspace_size(
        tokens, heads, widths[0], extra_topk=widths[1] if extra else 0, device=DEVICE
    )
    options = {
        "softmax_scale": inputs.scale,
        "attn_sink": inputs.sink,
        "out": torch.empty_like(inputs.q),
        "lse": torch.empty(tokens, heads, device=DEVICE),
        "workspace": torch.empty(max(room, 1), dtype=torch.uint8, device=DEVICE),
    }
    if extra:
        options |= {"extra_kv_cache": caches[1], "extra_indices": inputs.indices[1]}
    return lambda: sparse_mla.sparse_attention(inputs.q, caches[0], inputs.indices[0], **options)


def judge(inputs: Inputs, caches: list[Array], results: tuple[Array, Array]) -> float:
    """The worst error of some tokens as a fraction of its bound."""
    out, lse = results
    if not (out.isfinite().all() and lse.isfinite().all()):
        return math.inf
    worst = 0.0
    rows = [sparse_mla.dequantize_kv_cache(c, dtype="bfloat16").view(-1, DIM) for c in caches]
    for token in spread_tokens(len(out)):
        chosen = [(r, x[token]) for r, x in zip(rows, inputs.indices, strict=True)]
        keys = torch.cat([r[x[x >= 0].long()].double() for r, x in chosen])
        given = (inputs.q[token], keys, out[token], lse[token], inputs.scale, inputs.sink)
        found = judge_token(*given, is_fp8=False)
        worst = max(worst, found.out, found.lse)
    return worst


def add_row(
    table: Table,
    effort: CudaEffort,
    peer: Peer | None,
    *,
    num_reqs: int,
    kind: str,
    inputs: Inputs,
    caches: list[Array],
) -> None:
    tokens, heads, _ = inputs.q.shape
    ours = make_ours(inputs, caches)
    error = judge(inputs, caches, ours())
    widths = "+".join(str(x.shape[1]) for x in inputs.indices)
    num_keys = sum(int((x >= 0).sum()) for x in inputs.indices)
    num_bytes = num_keys * ROW_BYTES + tokens * heads * DIM * 4
    floor = floor_seconds(4 * num_keys * heads * DIM, num_bytes)
    sides: dict[str, list[Callable[[], object]]] = {"ours": [ours]}
    name = f"T {tokens}, H {heads}, {widths} keys, {kind}"
    if error > 1:
        table.failures.append(f"{name}: {error:.3g} × bound")
    if peer is not None and len(caches) == 2:
        try:
            theirs = peer.decode_v4(inputs.q, caches, inputs.indices, inputs.scale, inputs.sink,
                                    num_reqs)  # fmt: skip
            read_decode(theirs(), heads)
            sides["peer"] = [theirs]
        except Exception as reason:  # the peer has no kernel for the shape, or refuses it
            table.failures.append(f"{name}: FlashMLA: {describe_error(reason)}")
    seconds = interleave_flushed(sides, effort)
    beside = seconds.get("peer", math.nan)
    row = [str(tokens), str(heads), widths, kind, show_us(seconds["ours"]), f"{error:.3g}"]
    row += [show_us(floor), show_us(beside), show_ratio(beside / seconds["ours"])]
    record = {"T": tokens, "H": heads, "keys": widths, "kind": kind}
    record |= {"us": 1e6 * seconds["ours"], "error_over_bound": error, "floor_us": 1e6 * floor}
    record |= {"peer_us": 1e6 * beside} if beside == beside else {}
    table.add(row, record)
