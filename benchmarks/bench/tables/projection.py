"""grouped_output_projection of DeepSeek V4-Flash beside PyTorch's batched product of bf16, which is
cuBLAS's on CUDA: errors, then rates and their ratio."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import sparse_mla
from bench.common import rows
from bench.common.composition import prepare, torch
from bench.common.rows import Bench, Call, Column, Work
from bench.common.timing import Table
from bench.cuda.timing import PEAK_BYTES, PEAK_FLOPS
from sparse_mla._judge import BF16, E4M3, SCALE_TILE

GROUPS, INNER, OUTER = 8, 4096, 1024
CPU_TOKENS, CPU_QUICK = (1, 16, 256), (1, 16)
CUDA_TOKENS, CUDA_QUICK = (1, 16, 64, 128, 512, 2048, 8192), (1, 64, 2048)
MOST_EXACT_TOKENS = 64  # csrc/cuda/projection/projection_e4m3.cuh
KINDS = "e4m3", "bfloat16"
NUM_JUDGED_TOKENS = 3
FINE, COARSE = 2.0**-16, 2.0**-8  # shares of the sum of magnitudes; COARSE: FP8 tensor cores
NUM_CODES = 0x78  # positive codes up to 256


class Inputs:
    """Values, their scales or None, and the call of ours over them, on the device that `put`
    chooses. bf16 values are those of the codes."""

    def __init__(self, kind: str, num_tokens: int, put: Callable[[np.ndarray], Any]) -> None:
        rng = np.random.default_rng(0)
        codes = np.arange(256, dtype=np.uint8).view(E4M3).astype(BF16)
        o, weight = (
            rng.integers(NUM_CODES, size=shape, dtype=np.uint8)
            | rng.integers(2, size=shape, dtype=np.uint8) << 7
            for shape in ((num_tokens, GROUPS, INNER), (GROUPS, OUTER, INNER))
        )
        self.wide = codes[o], codes[weight]
        self.scales: tuple[np.ndarray | None, np.ndarray | None] = (None, None)
        if kind == "e4m3":
            tiles = INNER // SCALE_TILE
            shapes = (num_tokens, GROUPS, tiles), (GROUPS, OUTER // SCALE_TILE, tiles)
            exponents = rng.integers(-10, -6, shapes[0]).astype(np.float32)
            scales = rng.uniform(1e-3, 1e-2, shapes[1]).astype(np.float32)
            self.scales = np.exp2(exponents), scales
        self.kind = kind
        values = (o, weight) if kind == "e4m3" else self.wide
        self.out = put(np.zeros((num_tokens, GROUPS, OUTER), BF16))
        given = [put(x) for x in values]
        by = [None if x is None else put(x) for x in self.scales]
        self.args = given[0], by[0], given[1], by[1]

    def call(self) -> object:
        return sparse_mla.grouped_output_projection(*self.args, out=self.out)

    def judge(self, out: np.ndarray, unit: float) -> float:
        """The largest error of some tokens' results, as a fraction of its bound."""
        tokens = np.linspace(0, len(out) - 1, NUM_JUDGED_TOKENS).astype(int)
        o, weight = self.wide[0][tokens].astype(np.float64), self.wide[1]
        if self.scales[0] is not None:
            o *= self.scales[0][tokens].repeat(SCALE_TILE, 2)
        worst = 0.0
        for group in range(GROUPS):
            w = weight[group].astype(np.float64)
            if self.scales[1] is not None:
                w *= self.scales[1][group].repeat(SCALE_TILE, 0).repeat(SCALE_TILE, 1)
            want = o[:, group] @ w.T
            bound = COARSE * np.abs(want) + unit * (np.abs(o[:, group]) @ np.abs(w).T)
            error = np.abs(out[tokens, group].astype(np.float64) - want)
            worst = max(worst, float((error / bound).max()))
        return worst

    def num_bytes(self) -> int:
        scales = sum(x.nbytes for x in self.scales if x is not None)
        size = 1 if self.kind == "e4m3" else 2
        return size * sum(x.size for x in self.wide) + scales + 2 * self.count(OUTER)

    def flop(self) -> int:
        return 2 * self.count(OUTER * INNER)

    def count(self, per_group: int) -> int:
        return len(self.wide[0]) * GROUPS * per_group


def make_peer(o: Any, weight: Any) -> Callable[[], object]:
    """[T, G, R] x [G, N, R] -> [G, T, N] by one batched product, with `out` as cuBLAS likes it."""
    out = torch.empty(GROUPS, len(o), OUTER, dtype=o.dtype, device=o.device)

    def multiply() -> object:
        return torch.bmm(o.transpose(0, 1), weight.transpose(1, 2), out=out)

    return multiply


def measure(bench: Bench) -> Table:
    columns = [rows.ERROR]
    dtype = torch.bfloat16 if bench.is_cuda else prepare(bench.threads)
    title = f"Grouped output projection, {GROUPS} x ({INNER} → {OUTER})"
    if bench.is_cuda:
        title, tokens = f"{title}, cold", bench.choose(CUDA_TOKENS, CUDA_QUICK)
        moved = Column("TB/s", lambda x: f"{x.work.num_bytes / x.ours / 1e12:.2f}")
        theirs, ratio = rows.peer("torch", "PyTorch bf16 µs")
        rate = Column("TFLOP/s", lambda x: f"{x.work.flop / x.beside / 1e12:.0f}")
        columns += [rows.US, rows.TFLOPS, moved, rows.FLOOR, theirs, rate, ratio]
    else:
        title, tokens = f"{title}, {bench.threads} threads", bench.choose(CPU_TOKENS, CPU_QUICK)
        columns.append(rate_of("GFLOP/s", "gflops", lambda x: x.ours))
        if dtype is not None:
            columns.append(rate_of("PyTorch: GFLOP/s", "torch_gflops", lambda x: x.beside))
            columns.append(Column("ratio", lambda x: rows.times(x.beside / x.ours)))
    works = [
        ({"values": kind, "T": count}, partial(make, bench, kind, count, dtype))
        for kind in KINDS
        for count in tokens
    ]
    return rows.measure_rows(bench, title, ["values", "T"], columns, works)


def rate_of(title: str, key: str, seconds: Callable[[rows.Measured], float]) -> Column:
    def rate(x: rows.Measured) -> float:
        return rows.gflops(x, seconds(x))

    return Column(title, lambda x: f"{rate(x):.0f}", key, rate)


def make(bench: Bench, kind: str, num_tokens: int, dtype: Any) -> Work:
    a = bench.arrays
    inputs = Inputs(kind, num_tokens, a.put)
    is_coarse = bench.is_cuda and kind == "e4m3" and num_tokens > MOST_EXACT_TOKENS
    is_coarse = is_coarse and torch.cuda.get_device_capability(a.device) == (9, 0)
    unit = COARSE if is_coarse else FINE

    def make_their_call() -> Call:
        return make_peer(*(a.tensor(a.put(x)).to(dtype) for x in inputs.wide))

    peak = PEAK_FLOPS * (2 if kind == "e4m3" else 1)
    return Work(
        inputs.call,
        lambda _: inputs.judge(a.get(inputs.out), unit),
        flop=inputs.flop(),
        num_bytes=inputs.num_bytes(),
        floor=max(inputs.flop() / peak, inputs.num_bytes() / PEAK_BYTES),
        peers={} if dtype is None else {"torch": make_their_call},
    )
