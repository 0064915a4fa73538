"""top_k_per_row on rows as an indexer makes them, and on rows that are hard for a selection: beside
NumPy's argpartition and PyTorch's topk, which give no order and choose any of equal logits. On CUDA
the L2 cache is flushed, and a kind of logits is compared with random ones: none may take more than
1.3 times as long."""

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
from bench.cuda.timing import PEAK_BYTES

Shapes = tuple[tuple[int, int, int], ...]  # rows, columns, k
CPU: Shapes = ((16, 32768, 512), (16, 32768, 2048), (1, 131072, 2048))
CUDA: Shapes = (
    (64, 32768, 512),
    (64, 32768, 2048),
    (64, 131072, 2048),
    (1, 131072, 2048),
    (8, 65536, 512),
    (4, 128000, 2048),
    (1, 1 << 20, 2048),
    (4096, 32768, 2048),
)
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


class Inputs:
    """Logits [rows, columns] of a kind, and the call of ours over them. Few rows are made by the
    host, which repeat on the device."""

    def __init__(self, arrays: Any, kind: str, shape: tuple[int, int, int]) -> None:
        num_rows, num_columns, self.k = shape
        self.arrays, rng = arrays, np.random.default_rng(0)
        few = min(num_rows, max(1, SPREAD // num_columns))
        made = [KINDS[kind](rng, num_columns) for _ in range(few)]
        self.rows = np.stack(made).astype(np.float32)
        part = arrays.put(self.rows)
        self.logits = arrays.concat([part] * -(-num_rows // few))[:num_rows]
        self.starts = arrays.put(np.zeros(num_rows, np.int32))
        self.ends = arrays.put(np.full(num_rows, num_columns, np.int32))
        self.out = arrays.put(np.zeros((num_rows, self.k), np.int32))
        self.num_bytes = 4 * num_rows * (num_columns + self.k)

    def call(self) -> object:
        return sparse_mla.top_k_per_row(self.logits, self.starts, self.ends, k=self.k, out=self.out)

    def judge(self, _: object = None) -> float:
        """0 if some rows have the columns that a stable sort puts first, else infinite."""
        out = self.arrays.get(self.out)
        for t in {0, len(out) - 1, *range(min(NUM_JUDGED_ROWS, len(out)))}:
            order = np.argsort(-self.rows[t % len(self.rows)], kind="stable")
            if not np.array_equal(out[t], np.sort(order[: self.k])):
                return np.inf
        return 0.0

    def partition(self) -> object:
        return np.argpartition(self.logits, self.rows.shape[1] - self.k, axis=1)

    def peers(self, bench: Bench) -> dict[str, Callable[[], Call]]:
        """NumPy's partition on the CPU and, where PyTorch is installed, its topk."""

        def make_topk() -> Call:
            x = self.arrays.tensor(self.logits)
            return lambda: torch.topk(x, self.k, sorted=False)

        found: dict[str, Callable[[], Call]] = {}
        if not bench.is_cuda:
            found["numpy"] = lambda: self.partition
        return found | ({"torch": make_topk} if torch is not None else {})


def measure(bench: Bench) -> Table:
    quick = bench.effort.quick
    base: dict[str, float] = {}  # the times of random logits, which come first
    if bench.is_cuda:
        title, shapes = "Top-k of fp32 rows, cold", CUDA[1:4] if quick else CUDA

        def of_random(x: rows.Measured) -> str:
            return f"{x.ours / base.setdefault(str(show(x.labels)[:2]), x.ours):.2f}×"

        columns = [rows.RIGHT, rows.US, rows.FLOOR, Column("of random", of_random)]
        columns += rows.peer("torch", "PyTorch µs")
    else:
        title, shapes = f"Top-k of fp32 rows, {bench.threads} threads", CPU[:1] if quick else CPU
        peers = {"numpy": "argpartition µs"}
        peers |= {"torch": "PyTorch topk µs"} if prepare(bench.threads) else {}
        columns = [rows.RIGHT, Column("µs", lambda x: f"{1e6 * x.ours:.0f}", "us", rows.US.value)]
        columns += [x for side, title in peers.items() for x in rows.peer(side, title, ".0f")]
    works = [
        (
            {"rows": shape[0], "columns": shape[1], "k": shape[2], "logits": kind},
            partial(make, bench, shape, kind),
        )
        for shape in shapes
        for kind in (("random", "constant") if quick else KINDS)
    ]
    return rows.measure_rows(bench, title, ["rows", "k", "logits"], columns, works, show=show)


def show(labels: rows.Labels) -> list[str]:
    num_rows, num_columns, *others = labels.values()
    return [f"{num_rows} × {num_columns}", *map(str, others)]


def make(bench: Bench, shape: tuple[int, int, int], kind: str) -> Work:
    inputs = Inputs(bench.arrays, kind, shape)
    return Work(
        inputs.call,
        inputs.judge,
        floor=inputs.num_bytes / PEAK_BYTES,
        peers=inputs.peers(bench),
    )
