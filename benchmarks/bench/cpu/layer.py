"""A DeepSeek V4 layer on the CPU: `forward` beside the sum of the operators that it calls. The
projections take no time: they return arrays that are there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import sparse_mla
from bench.common.layer import RATIOS, make_step, names_of, parts_of, width_of
from bench.common.timing import Effort, Table, interleave
from sparse_mla._judge import BF16

CONTEXT = 4096
FULL = [(ratio, num_tokens) for ratio in RATIOS for num_tokens in (1, 16)]
QUICK = [(4, 1)]


def measure(effort: Effort, num_threads: int) -> Table:
    title = f"A DeepSeek V4 layer without its projections, {num_threads} threads"
    columns = ["layer", "T", "context", "forward, ms", "its operators, ms", "÷"]
    table = Table(title, columns, [], [])
    for ratio, num_tokens in QUICK if effort.quick else FULL:
        make = make_arrays(np.random.default_rng(0))
        step = make_step(ratio, num_tokens, CONTEXT, make, "cpu", ready(ratio, num_tokens))
        parts = parts_of(step)

        def run_parts(parts=parts) -> None:
            for _, call in parts:
                call()

        seconds = interleave({"forward": step.run, "operators": run_parts}, effort)
        whole, sum_of_parts = seconds["forward"], seconds["operators"]
        row = [RATIOS[ratio], str(num_tokens), str(CONTEXT), f"{1e3 * whole:.3f}"]
        row += [f"{1e3 * sum_of_parts:.3f}", f"{whole / sum_of_parts:.3f}"]
        record: dict[str, object] = {"layer": RATIOS[ratio], "T": num_tokens, "context": CONTEXT}
        table.add(row, record | {"seconds": whole, "operators_seconds": sum_of_parts})
    return table


def make_arrays(rng: np.random.Generator) -> Callable[..., Any]:
    def make(kind: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        if kind == "zeros":
            return np.zeros(shape, dtype)
        if kind == "angles":
            return sparse_mla.rope_table(shape[0], fp32_angles=True)
        if dtype == "uint8":
            return rng.integers(0, 0x50, shape, np.uint8)  # e4m3, none of them NaN
        values = rng.standard_normal(shape, np.float32)
        return values.astype(BF16) if dtype == "bfloat16" else values

    return make


def ready(ratio: int, num_tokens: int) -> dict[str, Callable[..., np.ndarray]]:
    """Projections that return an array that is there."""
    rng = np.random.default_rng(1)

    def make(name: str) -> Callable[..., np.ndarray]:
        values = rng.standard_normal((num_tokens, width_of(name, ratio)[1]), np.float32)
        y = values if name.endswith("wkv_wgate") else values.astype(BF16)
        return lambda _: y

    return {name: make(name) for name in names_of(ratio)}
