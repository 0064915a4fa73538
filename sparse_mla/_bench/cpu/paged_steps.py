"""Builds of paged steps on the CPU, beside chains of NumPy operators for the same metadata."""

from __future__ import annotations

import numpy as np

from sparse_mla._bench.common.paged_steps import (
    DECODE,
    KINDS,
    PAGE_SIZE,
    Batch,
    Kind,
    find_differences,
    make_build,
)
from sparse_mla._bench.common.timing import Effort, Table, interleave

DECODES = ((256, 512), (256, 32_768))  # requests, tokens of each
STEPS = (64, 4096)
QUICK = (4, 512)
COLUMNS = ["step", "B × tokens", "page", "build, µs", "NumPy, µs", "ratio"]


def measure(effort: Effort, num_threads: int) -> Table:
    title = f"Metadata of a paged step, {num_threads} threads"
    table = Table(title, COLUMNS, [], [])
    for shape in [QUICK] if effort.quick else DECODES:
        add_row(table, DECODE, Batch(*shape, np, "cpu"), effort)
    batch = Batch(*(QUICK if effort.quick else STEPS), np, "cpu")
    for kind in KINDS[1:]:
        add_row(table, kind, batch, effort)
    return table


def add_row(table: Table, kind: Kind, batch: Batch, effort: Effort) -> None:
    build = make_build(kind, batch)
    shape = f"{batch.num_reqs} × {batch.length}"
    wrong = find_differences(build(), kind.chain(batch), np.asarray)
    table.failures += [f"{kind.name}, {shape}: wrong {name}" for name in wrong]
    seconds = interleave({"ours": build, "NumPy": lambda: kind.chain(batch)}, effort)
    ours, chain = seconds["ours"], seconds["NumPy"]
    row = [kind.name, shape, str(PAGE_SIZE), f"{1e6 * ours:.1f}", f"{1e6 * chain:.1f}"]
    record: dict[str, object] = {"step": kind.name, "B × tokens": shape, "right": not wrong}
    record |= {"us": 1e6 * ours, "chain_us": 1e6 * chain}
    table.add([*row, f"{chain / ours:.2f}×"], record)
