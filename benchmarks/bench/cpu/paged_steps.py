"""Builds of paged steps on the CPU, beside chains of NumPy operators for the same metadata."""

from __future__ import annotations

import numpy as np

from bench.common.paged_steps import (
    DECODE,
    KINDS,
    PAGE_SIZE,
    Batch,
    Kind,
    find_differences,
    make_build,
    make_replay,
)
from bench.common.timing import Effort, Table, interleave

DECODES = ((256, 512), (256, 32_768))  # requests, tokens of each
STEPS = (64, 4096)
QUICK = (4, 512)
COLUMNS = ["step", "B × tokens", "page", "build, µs", "replay, µs", "NumPy, µs", "ratio"]


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
    build, replay = make_build(kind, batch), make_replay(kind, batch)
    shape = f"{batch.num_reqs} × {batch.length}"
    wrong = find_differences(build(), kind.chain(batch), np.asarray)
    if replay is not None:
        wrong += find_differences(replay(), kind.chain(batch), np.asarray)
    table.failures += [f"{kind.name}, {shape}: wrong {name}" for name in wrong]
    sides = {"build": build, "NumPy": lambda: kind.chain(batch)}
    seconds = interleave(sides | ({"replay": replay} if replay else {}), effort)
    us = {name: 1e6 * x for name, x in seconds.items()}
    row = [kind.name, shape, str(PAGE_SIZE)]
    row += [f"{us[side]:.1f}" if side in us else "–" for side in ("build", "replay", "NumPy")]
    record: dict[str, object] = {"step": kind.name, "B × tokens": shape, "right": not wrong}
    record |= {"us": us["build"], "replay_us": us.get("replay"), "chain_us": us["NumPy"]}
    table.add([*row, f"{us['NumPy'] / us['build']:.2f}×"], record)
