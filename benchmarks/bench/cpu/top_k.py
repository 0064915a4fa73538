"""top_k_per_row on rows as an indexer makes them, and on rows that are hard for a selection: beside
NumPy's argpartition and PyTorch's topk, which give no order and choose any of equal logits."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np

import sparse_mla
from bench.common.timing import Effort, Table, interleave

SHAPES = ((16, 32768, 512), (16, 32768, 2048), (1, 131072, 2048))  # rows, columns, k
QUICK_SHAPES = SHAPES[:1]
NUM_JUDGED_ROWS = 2
SPREAD = 1 << 20  # rows of other kinds than "random" repeat after so many logits

# Each takes (rng, columns).
KINDS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "random": lambda rng, n: rng.standard_normal(n),
    "peaky": lambda rng, n: np.where(rng.random(n) < 0.01, 1e4, 1.0) * rng.standard_normal(n),
    "ascending": lambda rng, n: np.sort(rng.standard_normal(n)),
    "descending": lambda rng, n: -np.sort(rng.standard_normal(n)),
    "few distinct": lambda rng, n: rng.integers(-2, 3, n),
    "constant": lambda rng, n: np.zeros(n),
}

Put = Callable[[np.ndarray], Any]


class Inputs:
    """Logits [rows, columns] of a kind, and the call of ours over them, on the device that `put`
    chooses. `repeat` makes many rows of few on the device, to spare the host random numbers."""

    def __init__(
        self, kind: str, shape: tuple[int, int, int], put: Put, repeat: Callable[[Any, int], Any]
    ) -> None:
        num_rows, num_columns, self.k = shape
        rng = np.random.default_rng(0)
        few = min(num_rows, max(1, SPREAD // num_columns))
        made = [KINDS[kind](rng, num_columns) for _ in range(few)]
        self.rows = np.stack(made).astype(np.float32)
        self.logits = repeat(put(self.rows), -(-num_rows // few))[:num_rows]
        self.starts = put(np.zeros(num_rows, np.int32))
        self.ends = put(np.full(num_rows, num_columns, np.int32))
        self.out = put(np.zeros((num_rows, self.k), np.int32))
        self.num_bytes = 4 * num_rows * (num_columns + self.k)

    def call(self) -> object:
        return sparse_mla.top_k_per_row(self.logits, self.starts, self.ends, k=self.k, out=self.out)

    def is_right(self, out: np.ndarray) -> bool:
        """Whether some rows have the columns that a stable sort puts first."""
        for t in {0, len(out) - 1, *range(min(NUM_JUDGED_ROWS, len(out)))}:
            order = np.argsort(-self.rows[t % len(self.rows)], kind="stable")
            if not np.array_equal(out[t], np.sort(order[: self.k])):
                return False
        return True


def make_peers(inputs: Inputs, x: Any, torch: Any) -> dict[str, Callable[[], object]]:
    """NumPy's partition and, where PyTorch is installed, its topk of the tensor `x`."""
    cut = inputs.rows.shape[1] - inputs.k

    def partition() -> object:
        return np.argpartition(inputs.logits, cut, axis=1)

    def topk() -> object:
        return torch.topk(x, inputs.k, sorted=False)

    return {"numpy": partition} | ({"torch": topk} if torch is not None else {})


def measure(effort: Effort, num_threads: int) -> Table:
    columns = ["rows", "k", "logits", "chosen", "µs", "argpartition µs", "ratio"]
    torch: Any = None
    if find_spec("torch") is not None:
        from bench.common.composition import from_numpy, torch

        torch.set_num_threads(num_threads)
        columns += ["PyTorch topk µs", "ratio"]
    table = Table(f"Top-k of fp32 rows, {num_threads} threads", columns, [], [])
    for shape in QUICK_SHAPES if effort.quick else SHAPES:
        for kind in ("random", "constant") if effort.quick else KINDS:
            inputs = Inputs(kind, shape, lambda x: x, lambda x, n: np.tile(x, (n, 1)))
            inputs.call()
            is_right = inputs.is_right(inputs.out)
            if not is_right:
                table.failures.append(f"{shape} {kind}: wrong columns")
            sides: dict[str, Callable[[], object]] = {"ours": inputs.call}
            sides |= make_peers(inputs, torch and from_numpy(inputs.logits), torch)
            seconds = interleave(sides, effort)
            row = [f"{shape[0]} × {shape[1]}", str(inputs.k), kind, "right" if is_right else "FAIL"]
            row.append(f"{1e6 * seconds['ours']:.0f}")
            record: dict[str, object] = {"rows": shape[0], "columns": shape[1], "k": inputs.k}
            record |= {"logits": kind, "right": is_right, "us": 1e6 * seconds["ours"]}
            for side in list(sides)[1:]:
                row += [f"{1e6 * seconds[side]:.0f}", f"{seconds[side] / seconds['ours']:.2f}×"]
                record[f"{side}_us"] = 1e6 * seconds[side]
            table.add(row, record)
    return table
