"""paged_attention on a CUDA device, one token of each request over pages of keys and values in bf16
or e4m3, beside PyTorch's scaled_dot_product_attention over the same keys in bf16 without pages. The
L2 cache is flushed before each replay."""

from __future__ import annotations

import math
from collections.abc import Callable

import sparse_mla
from bench.common.paged import Shape, judge_request
from bench.common.timing import Table
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

SHAPES = (
    Shape(64, 8192, 64),
    Shape(64, 8192, 16),
    Shape(64, 8192, 1),
    Shape(4, 4096, 16),
    Shape(1, 32_768, 16),
    Shape(64, 8192, 64, kv_type="float8_e4m3fn"),
)
JUDGED_REQUESTS = 2
Arrays = tuple[Array, Array, Array, Array]


def make_arrays(shape: Shape) -> Arrays:
    """q, both caches, and the block table, whose pages are in random order."""
    count = shape.num_reqs * shape.num_pages
    pages = count, shape.page_size, shape.kv_heads, shape.dim
    q = torch.randn(shape.num_reqs, shape.heads, shape.dim, dtype=torch.bfloat16, device=DEVICE)
    kind = getattr(torch, shape.kv_type)
    k, v = (torch.randn(*pages, dtype=torch.bfloat16, device=DEVICE).to(kind) for _ in range(2))
    table = torch.randperm(count, device=DEVICE, dtype=torch.int32).view(shape.num_reqs, -1)
    return q, k, v, table


def make_ours(shape: Shape, arrays: Arrays) -> Callable[[], tuple[Array, Array]]:
    q = arrays[0]
    lens = torch.full((shape.num_reqs,), shape.length, dtype=torch.int32, device=DEVICE)
    options = {
        "softmax_scale": shape.scale,
        "max_seqlen_k": shape.length,
        "out": torch.empty_like(q),
        "lse": torch.empty(shape.num_reqs, shape.heads, device=DEVICE),
    }
    return lambda: sparse_mla.paged_attention(*arrays, lens, **options)


def gather(shape: Shape, cache: Array, table: Array) -> Array:
    """The rows of requests in bf16, [B, n, Hk, D]."""
    found = cache.view(torch.uint8)[table.long()].view(cache.dtype).bfloat16()
    return found.flatten(1, 2)[:, : shape.length]


def make_peer(shape: Shape, arrays: Arrays) -> Callable[[], Array]:
    """PyTorch's kernel over keys and values by request and head."""
    q, *caches, table = arrays
    k, v = (gather(shape, x, table).transpose(1, 2).contiguous() for x in caches)
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda: attend(q[:, :, None], k, v, scale=shape.scale, enable_gqa=True)


def judge(shape: Shape, arrays: Arrays, results: tuple[Array, Array]) -> float:
    """The worst error of some heads of some requests as a fraction of its bound."""
    if not all(x.isfinite().all() for x in results):
        return math.inf
    worst = 0.0
    q, *caches, table = arrays
    for req in range(0, shape.num_reqs, -(-shape.num_reqs // JUDGED_REQUESTS)):
        keys = [gather(shape, x, table[req : req + 1])[0] for x in caches]
        given = (x.double().cpu().numpy() for x in (q[req], *keys, *(x[req] for x in results)))
        found = judge_request(shape, *given, units=32)
        worst = max(worst, found.out, found.lse)
    return worst


def measure_paged(effort: CudaEffort) -> Table:
    labels = ["cache", "H/Hk", "B × keys", "page"]
    columns = [*labels, "µs", "error/bound", "floor µs", "PyTorch, no pages µs", "÷ ours"]
    table = Table("Paged decode with KV heads, L2 flushed", columns, [], [])
    for shape in SHAPES[:2] if effort.quick else SHAPES:
        add_row(table, effort, shape)
    return table


def add_row(table: Table, effort: CudaEffort, shape: Shape) -> None:
    arrays = make_arrays(shape)
    ours = make_ours(shape, arrays)
    error = judge(shape, arrays, ours())
    name = ", ".join(map(str, shape.labels().values()))
    if error > 1:
        table.failures.append(f"{name}: {error:.3g} × bound")
    sides: dict[str, list[Callable[[], object]]] = {"ours": [ours]}
    try:
        peer = make_peer(shape, arrays)
        peer()
        sides["peer"] = [peer]
    except Exception as reason:  # PyTorch has no such kernel for the shape or the device
        table.failures.append(f"{name}: PyTorch: {describe_error(reason)}")
    seconds = interleave_flushed(sides, effort)
    rows = 2 * shape.length * shape.kv_heads * arrays[1].element_size() + 4 * shape.heads
    num_bytes = shape.num_reqs * shape.dim * rows
    floor = floor_seconds(shape.flop, num_bytes)
    beside = seconds.get("peer", math.nan)
    row = [*map(str, shape.labels().values()), show_us(seconds["ours"]), f"{error:.3g}"]
    row += [show_us(floor), show_us(beside), show_ratio(beside / seconds["ours"])]
    record = shape.labels() | {"us": 1e6 * seconds["ours"], "error_over_bound": error}
    record |= {"floor_us": 1e6 * floor}
    record |= {"peer_us": 1e6 * beside} if beside == beside else {}
    table.add(row, record)
