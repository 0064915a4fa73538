"""varlen_attention, causal prefills of bf16, beside PyTorch's scaled_dot_product_attention: on the
CPU the quicker of two calls, with values as they are and with values padded to the keys' size,
which lets PyTorch take its flash kernel; on CUDA its flash kernel, padded, and its cuDNN kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

import sparse_mla
from bench.common import rows
from bench.common.composition import prepare, torch
from bench.common.rows import Bench, Call, Column, Work
from bench.common.timing import Table
from bench.cuda.timing import PEAK_FLOPS
from sparse_mla._judge import Fractions

JUDGED_TOKENS = 3
JUDGED_HEADS = 2
# name on CUDA -> PyTorch's backend
BACKENDS = {"flash": "FLASH_ATTENTION", "cuDNN": "CUDNN_ATTENTION"}


@dataclass
class Shape:
    """Causal prefills of equal requests, without cached tokens."""

    num_reqs: int
    length: int
    heads: int
    kv_heads: int
    dims: tuple[int, int]  # D, Dv

    @property
    def num_tokens(self) -> int:
        return self.num_reqs * self.length

    @property
    def flop(self) -> int:
        pairs = self.num_reqs * self.length * (self.length + 1) // 2
        return 2 * self.heads * sum(self.dims) * pairs

    @property
    def scale(self) -> float:
        return self.dims[0] ** -0.5

    def labels(self) -> dict[str, object]:
        return {
            "B × n": f"{self.num_reqs} × {self.length}",
            "H": self.heads,
            "Hk": self.kv_heads,
            "D/Dv": f"{self.dims[0]}/{self.dims[1]}",
        }


CPU = (
    Shape(1, 2048, 16, 16, (192, 128)),
    Shape(8, 256, 16, 16, (192, 128)),
    Shape(1, 2048, 16, 4, (128, 128)),
)
CPU_QUICK = (Shape(1, 512, 4, 4, (192, 128)),)
CUDA = (
    Shape(1, 4096, 128, 128, (192, 128)),
    Shape(8, 1024, 128, 128, (192, 128)),
    Shape(1, 8192, 16, 16, (192, 128)),
)


def measure(bench: Bench) -> Table:
    if bench.is_cuda:
        title = "Causal prefill over contiguous keys, bf16, L2 flushed"
        shapes = bench.choose(CUDA, CUDA[1:])
        peers = [Column(f"{x} µs", partial(show_peer, x)) for x in BACKENDS]
        ratio = Column("÷ ours", rows.RATIO.cell, "peer_us", lambda x: 1e6 * x.beside)
        columns = [rows.US, rows.TFLOPS, rows.ERROR, rows.FLOOR, *peers, ratio]
    else:
        title = f"Causal prefill over contiguous keys, bf16, {bench.threads} threads"
        shapes = bench.choose(CPU, CPU_QUICK)
        rate, ratio = rows.PEER_RATES
        peers = [replace(rate, title="PyTorch: GFLOP/s"), ratio] if prepare(bench.threads) else []
        columns = [*rows.RATES, *peers]
    works = [(shape.labels(), partial(make, bench, shape)) for shape in shapes]
    return rows.measure_rows(bench, title, shapes[0].labels(), columns, works)


def show_peer(name: str, row: rows.Measured) -> str:
    return rows.us(row.seconds.get(name, math.nan))


def make(bench: Bench, shape: Shape) -> Work:
    a, (dim, value_dim) = bench.arrays, shape.dims
    sizes = (shape.heads, dim), (shape.kv_heads, dim), (shape.kv_heads, value_dim)
    q, k, v = arrays = [a.randn(shape.num_tokens, *size) for size in sizes]
    starts = a.put(np.arange(shape.num_reqs + 1, dtype=np.int32) * np.int32(shape.length))
    options = {
        "softmax_scale": shape.scale,
        "causal": True,
        "max_seqlen_q": shape.length,
        "max_seqlen_k": shape.length,
        "out": a.zeros(shape.num_tokens, shape.heads, value_dim),
        "lse": a.zeros(shape.num_tokens, shape.heads, dtype="float32"),
    }
    return Work(
        lambda: sparse_mla.varlen_attention(q, k, v, starts, starts, **options),
        partial(judge, bench, shape, arrays),
        flop=shape.flop,
        floor=shape.flop / PEAK_FLOPS,
        peers=find_peers(bench, shape, arrays),
    )


def find_peers(bench: Bench, shape: Shape, arrays: list[Any]) -> dict[str, Callable[[], Call]]:
    """Calls over the same values by request and head."""
    if torch is None:
        return {}
    padding = shape.dims[0] - shape.dims[1]
    peer = partial(make_peer, bench, shape, arrays)
    if bench.is_cuda:
        paddings = {"flash": padding, "cuDNN": 0}
        return {x: partial(peer, padding, BACKENDS[x]) for x, padding in paddings.items()}
    return {f"padded by {x}": partial(peer, x, "") for x in {0, padding}}


def make_peer(bench: Bench, shape: Shape, arrays: list[Any], padding: int, backend: str) -> Call:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    tensors = map(bench.arrays.tensor, arrays)
    q, k, v = (
        x.view(shape.num_reqs, shape.length, *x.shape[1:])
        .repeat_interleave(shape.heads // x.shape[1], 2)
        .transpose(1, 2)
        .contiguous()
        for x in tensors
    )
    v = torch.nn.functional.pad(v, (0, padding))

    def attend() -> Any:
        with sdpa_kernel(getattr(SDPBackend, backend)) if backend else nullcontext():
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=shape.scale
            )

    return attend


def judge(bench: Bench, shape: Shape, arrays: list[Any], results: tuple[Any, Any]) -> float:
    """The worst error of some heads of some tokens as a fraction of its bound."""
    a = bench.arrays
    if not a.are_finite(results):
        return math.inf
    worst, share = Fractions(), shape.heads // shape.kv_heads
    for token in judged_tokens(shape):
        first = token // shape.length * shape.length
        for head in range(JUDGED_HEADS):
            q, out, lse = (a.wide(x[token, head]) for x in (arrays[0], *results))
            k, v = (a.wide(x[first : token + 1, head // share]) for x in arrays[1:])
            worst.add(judge_head(q, k, v, out, float(lse), shape.scale, units=a.units))
    return max(worst.out, worst.lse)


def judged_tokens(shape: Shape) -> list[int]:
    """The first token, the last, and some between them."""
    last = shape.num_tokens - 1
    return [last * i // (JUDGED_TOKENS - 1) for i in range(JUDGED_TOKENS)]


def judge_head(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: float,
    scale: float,
    units: int,
) -> Fractions:
    """Judges one head of a token: q [D], k [n, D], v [n, Dv], out [Dv]; all float64. `units` of
    2^-24 are allowed in a logit."""
    logits = scale * (k @ q)
    error = units * 2.0**-24 * float((scale * (np.abs(k) @ np.abs(q))).max())
    top = logits.max()
    weights = np.exp(logits - top)
    p = weights / weights.sum()
    want, magnitude = p @ v, p @ np.abs(v)
    bound = 2 * 2.0**-9 * (magnitude + np.abs(want)) + 2 * error * magnitude + 1e-6
    want_lse = float(top + np.log(weights.sum()))
    return Fractions(
        out=float((np.abs(out - want) / bound).max()),
        lse=abs(lse - want_lse) / (error + 1e-6),
        rows=1,
    )
