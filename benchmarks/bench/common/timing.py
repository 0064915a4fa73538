"""Measures functions against each other, and prints tables of the results."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median

import sparse_mla
from bench.common.noise import describe_spreads, spread_of, sum_up_spreads

ISA_VARIABLE = "SPARSE_MLA_CPU_ISA"
SETTLE_SECONDS = 0.02  # until the other side's OpenMP threads sleep; idle ones spin for a while


@dataclass
class Effort:
    """How much and how long to measure, and which of the repeats counts."""

    quick: bool = False
    repeats: int = 60
    min_repeats: int = 5
    row_seconds: float = 8.0  # all repeats together, about, unless min_repeats take longer
    pick: Callable[[list[float]], float] = median
    call_seconds: float = 0.02  # one repeat, at least
    spreads: list[float] = field(default_factory=list)  # spreads of the current table's times

    @classmethod
    def of(cls, quick: bool, best: bool) -> Effort:
        effort = cls(quick=True, repeats=15, min_repeats=3, row_seconds=0.35) if quick else cls()
        if best:  # short repeats, so that some of them fall into quiet moments
            return replace(effort, repeats=2 * effort.repeats, pick=min, call_seconds=0.001)
        return effort


@dataclass
class Table:
    """Rows of cells, printed as Markdown so that they can be recorded as they are."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    records: list[dict[str, object]]  # the numbers, for --json
    failures: list[str] = field(default_factory=list)  # errors beyond their bounds, exceptions
    notes: list[str] = field(default_factory=list)
    spread: dict[str, float] = field(default_factory=dict)  # "median" and "worst" of its times

    def add(self, row: list[str], record: dict[str, object]) -> None:
        """A row that has been measured; on a terminal a line on stderr counts them."""
        self.rows.append(row)
        self.records.append(record)
        show_progress(f"{self.title}: {len(self.rows)} rows")

    def take_spreads(self, spreads: list[float]) -> None:
        """Moves the spreads of this table's times out of the list."""
        if spreads:
            self.spread = sum_up_spreads(spreads)
            self.notes.append(describe_spreads(self.spread))
        spreads.clear()

    def print(self) -> None:
        show_progress("")
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


def show_progress(text: str) -> None:
    """Shows a text in place of the one before; does nothing where stderr is a file or a pipe."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def interleave(sides: Mapping[str, Callable[[], object]], effort: Effort) -> dict[str, float]:
    """Seconds per call of each function. All are measured in turn, so that a noisy moment of the
    machine affects every side. A call that takes longer than `row_seconds` is measured once."""
    counts = {}
    samples: dict[str, list[float]] = {}
    for name, side in sides.items():
        side()
        seconds = seconds_per_call(side, 1)
        samples[name] = [seconds] if seconds > effort.row_seconds else []
        counts[name] = max(1, round(effort.call_seconds / max(seconds, 1e-9)))
    repeated = [name for name in sides if not samples[name]]
    start = time.perf_counter()
    for repeat in range(effort.repeats):
        if repeat >= effort.min_repeats and time.perf_counter() - start > effort.row_seconds:
            break
        for name in repeated:
            if len(sides) > 1:
                time.sleep(SETTLE_SECONDS)
            sides[name]()
            samples[name].append(seconds_per_call(sides[name], counts[name]))
    effort.spreads += [spread_of(samples[name]) for name in repeated]
    return {name: effort.pick(values) for name, values in samples.items()}


def seconds_per_call(function: Callable[[], object], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        function()
    return (time.perf_counter() - start) / count


def describe_error(error: BaseException) -> str:
    """An exception in one line that fits a table."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:160].replace("|", "/")


def find_isas() -> list[str]:
    """The instruction sets that this machine has and the library has kernels for."""
    rows = sparse_mla.kernels()
    return [row["arch"] for row in rows if row["device"] == "cpu" and row["available"]]


@contextmanager
def on_isa(isa: str) -> Iterator[None]:
    """Lets calls use the kernels of an instruction set."""
    chosen = os.environ.get(ISA_VARIABLE)
    os.environ[ISA_VARIABLE] = isa
    try:
        yield
    finally:
        if chosen is None:
            del os.environ[ISA_VARIABLE]
        else:
            os.environ[ISA_VARIABLE] = chosen
