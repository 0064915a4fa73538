"""paged.attention on the CPU: verification beside a decode, a tree beside a chain, and a shared
prefix beside the same call without one."""

from __future__ import annotations

import numpy as np

from bench.common.paged_layer import COLUMNS, Make, Run, add_rows, make_pairs
from bench.common.timing import Effort, Table, interleave
from sparse_mla._judge import BF16

VERIFY, SHARED = (8, 2048), (16, 2048, 64)
QUICK = (2, 512), (4, 512, 64)


def measure(effort: Effort, num_threads: int) -> Table:
    title = f"A paged layer, H 32/8, D 128, bf16, {num_threads} threads"
    table = Table(title, COLUMNS, [], [])
    rng = np.random.default_rng(0)
    make = Make(
        "cpu",
        randn=lambda *shape: rng.standard_normal(shape, np.float32).astype(BF16),
        put=lambda x: x,
        to_numpy=lambda x: np.asarray(x, np.float64),
    )

    def measure_pair(ours: Run, beside: Run) -> list[float]:
        return [*interleave({"ours": ours, "beside": beside}, effort).values()]

    shapes = QUICK if effort.quick else (VERIFY, SHARED)
    add_rows(table, make_pairs(make, *shapes), measure_pair)
    return table
