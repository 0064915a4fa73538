"""Measures functions against each other, and tables of the results."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

MIN_REPEATS = 5
SETTLE_SECONDS = 0.02  # idle OpenMP threads spin for a while: let those of the other side sleep


@dataclass
class Effort:
    """How long to measure, and which of the repeats counts."""

    repeats: int
    row_seconds: float  # of all repeats together, about; there are MIN_REPEATS at least
    pick: Callable[[list[float]], float] = median
    call_seconds: float = 0.02  # of one repeat, at least

    @classmethod
    def of(cls, quick: bool, best: bool) -> Effort:
        repeats, row_seconds = (15, 2.0) if quick else (60, 8.0)
        if best:  # short repeats, so that some of them fall into quiet moments
            return cls(2 * repeats, row_seconds, min, call_seconds=0.001)
        return cls(repeats, row_seconds)


@dataclass
class Table:
    """Rows of cells, printed as Markdown so that they can be recorded as they are."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    records: list[dict[str, object]]  # the numbers, for --json
    failures: list[str] = field(default_factory=list)  # errors beyond their bounds, exceptions
    notes: list[str] = field(default_factory=list)

    def print(self) -> None:
        widths = [max(map(len, column)) for column in zip(self.columns, *self.rows, strict=True)]
        print(f"\n### {self.title}\n")
        rule = ["-" * width for width in widths]
        for row in (self.columns, rule, *self.rows):
            cells = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            print(f"| {' | '.join(cells)} |")
        if self.failures or self.notes:
            print()
        for line in (*(f"FAIL {failure}" for failure in self.failures), *self.notes):
            print(f"- {line}")
        sys.stdout.flush()


def interleave(sides: Mapping[str, Callable[[], object]], effort: Effort) -> dict[str, float]:
    """Seconds per call of each function, all of them measured in turn, so that a noisy moment of
    the machine meets every side."""
    counts = {}
    for name, side in sides.items():
        side()
        counts[name] = max(1, round(effort.call_seconds / max(seconds_per_call(side, 1), 1e-9)))
    samples: dict[str, list[float]] = {name: [] for name in sides}
    start = time.perf_counter()
    for repeat in range(effort.repeats):
        if repeat >= MIN_REPEATS and time.perf_counter() - start > effort.row_seconds:
            break
        for name, side in sides.items():
            time.sleep(SETTLE_SECONDS)
            side()
            samples[name].append(seconds_per_call(side, counts[name]))
    return {name: effort.pick(values) for name, values in samples.items()}


def seconds_per_call(function: Callable[[], object], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        function()
    return (time.perf_counter() - start) / count
