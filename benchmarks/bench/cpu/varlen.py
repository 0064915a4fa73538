"""varlen_attention, causal prefills of bf16, compared with PyTorch's scaled_dot_product_attention:
the quicker of two calls, with values as they are and with values padded to the keys' size, which
lets PyTorch take its flash kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import sparse_mla
from bench.common.timing import Effort, Table, interleave
from bench.common.varlen import JUDGED_HEADS, Shape, judge_head, judged_tokens
from sparse_mla._judge import BF16, Fractions

SHAPES = (
    Shape(1, 2048, 16, 16, (192, 128)),
    Shape(8, 256, 16, 16, (192, 128)),
    Shape(1, 2048, 16, 4, (128, 128)),
)
QUICK = (Shape(1, 512, 4, 4, (192, 128)),)
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


def make_arrays(rng: np.random.Generator, shape: Shape) -> Arrays:
    dim, value_dim = shape.dims
    sizes = (shape.heads, dim), (shape.kv_heads, dim), (shape.kv_heads, value_dim)
    q, k, v = (rng.standard_normal((shape.num_tokens, *size), np.float32) for size in sizes)
    return q.astype(BF16), k.astype(BF16), v.astype(BF16)


def make_ours(shape: Shape, arrays: Arrays) -> Callable[[], tuple]:
    starts = np.arange(shape.num_reqs + 1, dtype=np.int32) * np.int32(shape.length)
    out = np.empty((shape.num_tokens, shape.heads, shape.dims[1]), BF16)
    lse = np.empty((shape.num_tokens, shape.heads), np.float32)
    options: dict[str, Any] = {"softmax_scale": shape.scale, "causal": True, "out": out, "lse": lse}
    return lambda: sparse_mla.varlen_attention(*arrays, starts, starts, **options)


def make_peers(shape: Shape, arrays: Arrays) -> dict[str, Callable[[], object]]:
    from bench.common.composition import from_numpy, torch

    share = shape.heads // shape.kv_heads
    tensors = [from_numpy(x) for x in (arrays[0], *(x.repeat(share, 1) for x in arrays[1:]))]
    by_head = [
        x.view(shape.num_reqs, shape.length, *x.shape[1:]).transpose(1, 2).contiguous()
        for x in tensors
    ]
    q, k, v = by_head
    attend = torch.nn.functional.scaled_dot_product_attention
    padded = torch.nn.functional.pad(v, (0, shape.dims[0] - shape.dims[1]))
    calls: dict[str, Callable[[], object]] = {
        "torch": lambda: attend(q, k, v, is_causal=True, scale=shape.scale)
    }
    if shape.dims[0] != shape.dims[1]:
        calls["torch, padded"] = lambda: attend(q, k, padded, is_causal=True, scale=shape.scale)
    return calls


def judge(shape: Shape, arrays: Arrays, results: tuple) -> Fractions:
    worst = Fractions()
    share = shape.heads // shape.kv_heads
    for token in judged_tokens(shape):
        first = token // shape.length * shape.length
        for head in range(JUDGED_HEADS):
            q = arrays[0][token, head].astype(np.float64)
            k, v = (x[first : token + 1, head // share].astype(np.float64) for x in arrays[1:])
            out = results[0][token, head].astype(np.float64)
            lse = float(results[1][token, head])
            worst.add(judge_head(q, k, v, out, lse, shape.scale, units=16))
    return worst


def measure(effort: Effort, num_threads: int) -> Table:
    from bench.common.composition import prepare  # imports PyTorch

    has_peer = prepare(num_threads) is not None
    labels = [*SHAPES[0].labels()]
    title = f"Causal prefill over contiguous keys, bf16, {num_threads} threads"
    columns = [*labels, "error/bound", "GFLOP/s", *(["PyTorch: GFLOP/s", "ratio"] * has_peer)]
    table = Table(title, columns, [], [])
    rng = np.random.default_rng(0)
    for shape in QUICK if effort.quick else SHAPES:
        arrays = make_arrays(rng, shape)
        sides: dict[str, Callable[[], object]] = {"ours": make_ours(shape, arrays)}
        error = judge(shape, arrays, make_ours(shape, arrays)())
        if has_peer:
            sides |= make_peers(shape, arrays)
        add(table, shape, error, interleave(sides, effort))
    return table


def add(table: Table, shape: Shape, error: Fractions, seconds: dict[str, float]) -> None:
    worst = max(error.out, error.lse)
    rate = shape.flop / seconds["ours"] / 1e9
    record: dict[str, object] = shape.labels()
    record["ours"] = {"error_over_bound": worst, "gflops": rate}
    row = [*map(str, shape.labels().values()), f"{worst:.3g}", f"{rate:.0f}"]
    peers = [x for side, x in seconds.items() if side != "ours"]
    if peers:
        theirs = shape.flop / min(peers) / 1e9
        record |= {"torch": {"gflops": theirs}, "ratio": rate / theirs}
        row += [f"{theirs:.0f}", f"{rate / theirs:.2f}×"]
    if worst > 1:
        table.failures.append(f"{row[0]} H {shape.heads}: {worst:.3g} × bound")
    table.add(row, record)
