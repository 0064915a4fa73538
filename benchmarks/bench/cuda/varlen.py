"""varlen_attention on a CUDA device: causal prefills of bf16, beside PyTorch's
scaled_dot_product_attention by its flash and its cuDNN kernel. The L2 cache is flushed before each
replay. PyTorch's flash kernel gets values that are padded to the keys' size."""

from __future__ import annotations

import math
from collections.abc import Callable

import sparse_mla
from bench.common.timing import Table
from bench.common.varlen import JUDGED_HEADS, Shape, judge_head, judged_tokens
from bench.cuda.sides import show_ratio, show_us
from bench.cuda.timing import (
    DEVICE,
    PEAK_FLOPS,
    Array,
    CudaEffort,
    describe_error,
    interleave_flushed,
    torch,
)

SHAPES = (
    Shape(1, 4096, 128, 128, (192, 128)),
    Shape(8, 1024, 128, 128, (192, 128)),
    Shape(1, 8192, 16, 16, (192, 128)),
)
PEERS = {"FLASH_ATTENTION": "flash", "CUDNN_ATTENTION": "cuDNN"}
Arrays = tuple[Array, Array, Array]


def make_arrays(shape: Shape) -> Arrays:
    dim, value_dim = shape.dims
    sizes = (shape.heads, dim), (shape.kv_heads, dim), (shape.kv_heads, value_dim)
    q, k, v = (
        torch.randn(shape.num_tokens, *size, dtype=torch.bfloat16, device=DEVICE) for size in sizes
    )
    return q, k, v


def make_ours(shape: Shape, arrays: Arrays) -> Callable[[], tuple[Array, Array]]:
    steps = [i * shape.length for i in range(shape.num_reqs + 1)]
    starts = torch.tensor(steps, dtype=torch.int32, device=DEVICE)
    options = {
        "softmax_scale": shape.scale,
        "causal": True,
        "max_seqlen_q": shape.length,
        "max_seqlen_k": shape.length,
        "out": arrays[0].new_empty(shape.num_tokens, shape.heads, shape.dims[1]),
        "lse": torch.empty(shape.num_tokens, shape.heads, device=DEVICE),
    }
    return lambda: sparse_mla.varlen_attention(*arrays, starts, starts, **options)


def make_peer(shape: Shape, arrays: Arrays, kind: str) -> Callable[[], Array]:
    """A call of one of PyTorch's kernels over the same values by request and head."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (
        x.view(shape.num_reqs, shape.length, *x.shape[1:]).transpose(1, 2).contiguous()
        for x in arrays
    )
    if kind == "FLASH_ATTENTION":
        v = torch.nn.functional.pad(v, (0, shape.dims[0] - shape.dims[1]))

    def attend() -> Array:
        with sdpa_kernel(getattr(SDPBackend, kind)):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=shape.scale
            )

    return attend


def judge(shape: Shape, arrays: Arrays, results: tuple[Array, Array]) -> float:
    """The worst error of some heads of some tokens as a fraction of its bound."""
    out, lse = results
    if not (out.isfinite().all() and lse.isfinite().all()):
        return math.inf
    worst = 0.0
    for token in judged_tokens(shape):
        first = token // shape.length * shape.length
        for head in range(JUDGED_HEADS):
            q, out_row = (x[token, head].double().cpu().numpy() for x in (arrays[0], out))
            k, v = (x[first : token + 1, head].double().cpu().numpy() for x in arrays[1:])
            found = judge_head(q, k, v, out_row, float(lse[token, head]), shape.scale, units=32)
            worst = max(worst, found.out, found.lse)
    return worst


def measure_varlen(effort: CudaEffort) -> Table:
    labels = [*SHAPES[0].labels()]
    columns = [*labels, "µs", "TFLOP/s", "error/bound", "floor µs"]
    columns += [*(f"{name} µs" for name in PEERS.values()), "÷ ours"]
    table = Table("Causal prefill over contiguous keys, bf16, L2 flushed", columns, [], [])
    for shape in SHAPES[1:] if effort.quick else SHAPES:
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
    for kind in PEERS:
        try:
            peer = make_peer(shape, arrays, kind)
            peer()
            sides[kind] = [peer]
        except Exception as reason:  # PyTorch has no such kernel for the shape or the device
            table.failures.append(f"{name}: {PEERS[kind]}: {describe_error(reason)}")
    seconds = interleave_flushed(sides, effort)
    floor = shape.flop / PEAK_FLOPS
    beside = min((seconds[kind] for kind in PEERS if kind in seconds), default=math.nan)
    row = [*map(str, shape.labels().values()), show_us(seconds["ours"])]
    row += [f"{shape.flop / seconds['ours'] / 1e12:.0f}", f"{error:.3g}", show_us(floor)]
    row += [show_us(seconds.get(kind, math.nan)) for kind in PEERS]
    record = shape.labels() | {"us": 1e6 * seconds["ours"], "error_over_bound": error}
    record |= {"floor_us": 1e6 * floor}
    record |= {"peer_us": 1e6 * beside} if beside == beside else {}
    table.add([*row, show_ratio(beside / seconds["ours"])], record)
