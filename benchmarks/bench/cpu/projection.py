"""grouped_output_projection of DeepSeek V4-Flash beside PyTorch's batched product of bf16: errors,
then rates and their ratio."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

import sparse_mla
from bench.common.timing import Effort, Table, interleave
from sparse_mla._judge import BF16, SCALE_TILE

GROUPS, INNER, OUTER = 8, 4096, 1024
TOKENS, QUICK_TOKENS = (1, 16, 256), (1, 16)
KINDS = "e4m3", "bfloat16"
NUM_JUDGED_TOKENS = 3
FINE, COARSE = 2.0**-16, 2.0**-8  # shares of the sum of magnitudes; COARSE: FP8 tensor cores
NUM_CODES = 0x78  # positive codes up to 256

Put = Callable[[np.ndarray], Any]


class Inputs:
    """Values, their scales or None, and the call of ours over them, on the device that `put`
    chooses. bf16 values are those of the codes."""

    def __init__(self, kind: str, num_tokens: int, put: Put) -> None:
        rng = np.random.default_rng(0)
        codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(BF16)
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


def make_peer(torch: Any, o: Any, weight: Any) -> Callable[[], object]:
    """[T, G, R] x [G, N, R] -> [G, T, N] by one batched product, with `out` as cuBLAS likes it."""
    out = torch.empty(GROUPS, len(o), OUTER, dtype=o.dtype, device=o.device)

    def multiply() -> object:
        return torch.bmm(o.transpose(0, 1), weight.transpose(1, 2), out=out)

    return multiply


def measure(effort: Effort, num_threads: int) -> Table:
    from bench.common.composition import from_numpy, prepare, torch

    dtype = prepare(num_threads)
    has_torch = dtype is not None
    title = f"Grouped output projection, {GROUPS} x ({INNER} → {OUTER}), {num_threads} threads"
    columns = ["values", "T", "error/bound", "GFLOP/s"]
    columns += ["PyTorch: GFLOP/s", "ratio"] if has_torch else []
    table = Table(title, columns, [], [])
    for kind in KINDS:
        for num_tokens in QUICK_TOKENS if effort.quick else TOKENS:
            inputs = Inputs(kind, num_tokens, lambda x: x)
            inputs.call()
            worst = inputs.judge(inputs.out, FINE)
            if worst > 1:
                table.failures.append(f"{kind} T {num_tokens}: {worst:.3g} × bound")
            sides: dict[str, Callable[[], object]] = {"ours": inputs.call}
            if has_torch:
                sides["torch"] = make_peer(torch, *(from_numpy(x).to(dtype) for x in inputs.wide))
            seconds = interleave(sides, effort)
            rates = {side: inputs.flop() / spent / 1e9 for side, spent in seconds.items()}
            row = [kind, str(num_tokens), f"{worst:.3g}", f"{rates['ours']:.0f}"]
            record: dict[str, object] = {"values": kind, "T": num_tokens}
            record |= {"error_over_bound": worst, "gflops": rates["ours"]}
            if has_torch:
                row += [f"{rates['torch']:.0f}", f"{rates['ours'] / rates['torch']:.2f}×"]
                record["torch_gflops"] = rates["torch"]
            table.add(row, record)
    return table
