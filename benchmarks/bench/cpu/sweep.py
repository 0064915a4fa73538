"""Calls of an operator in growing sizes, with one, two, three ... of something. sizes.py makes a
table of their times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

import sparse_mla
from bench.cpu.arguments import Arrays, placed

CALL_SECONDS = 3e-4  # one repeat, at least
FEW = (1, 2, 3, 5, 7, 8)
HEADS = (1, 2, 3, 5, 7, 8, 15, 16, 17, 32)
MANY = (1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 128)
WIDTHS = (*MANY, 129, 256)
PAGES = (1, 2, 64)  # slots of a page
SPARSE = ("none", "one", "all")  # entries of a list that there are
PLACES = ("not aligned", "rows apart", "usual")


@dataclass
class Sweep:
    """Calls of an operator by their work: a later one has as many elements or more."""

    op: str
    of: str  # the noun of the sizes
    sizes: Sequence[Any]
    make: Callable[..., Arrays]
    best: dict[Any, float] = field(default_factory=dict)  # the least seconds so far

    @property
    def title(self) -> str:
        return f"{self.op}, {self.of}"

    def measure(self, repeats: int) -> None:
        """Times the calls in turn. What earlier measurements found counts, too."""
        calls = {x: partial(getattr(sparse_mla, self.op), **self.make(x)) for x in self.sizes}
        counts = {}
        for size, call in calls.items():
            call()
            counts[size] = max(1, round(CALL_SECONDS / max(cpu_seconds(call, 1), 1e-7)))
        for _ in range(repeats):
            for size, call in calls.items():
                seconds = cpu_seconds(call, counts[size])
                self.best[size] = min(self.best.get(size, np.inf), seconds)

    def find_worst(self) -> tuple[float, Any]:
        """The largest ratio of a time to that of the quickest later call or its own, and its
        size."""
        worst, least = (0.0, None), np.inf
        for size in reversed(self.sizes):
            least = min(least, self.best[size])
            worst = max(worst, (self.best[size] / least, size), key=lambda x: x[0])
        return worst

    def measure_within(self, limit: float, repeats: int, attempts: int) -> tuple[float, Any]:
        """find_worst of some repeats, and of more while it is above the limit: the machine may have
        been busy."""
        for _ in range(attempts):
            self.measure(repeats)
            if self.find_worst()[0] <= limit:
                break
        return self.find_worst()


def vary(op: str, make: Callable[..., Arrays], prefix: str = "", **sizes: Any) -> Iterator[Sweep]:
    """Sweeps of one argument of `make` each, by its name. `place` has names of arrays, which lie at
    PLACES."""
    for name, values in sizes.items():
        if name == "place":
            yield Sweep(op, f"{prefix}place", PLACES, placed(make, *values))
        else:
            sized = partial(call_with, make, name)
            yield Sweep(op, prefix + name.replace("_", " "), values, sized)


def call_with(make: Callable[..., Arrays], name: str, value: Any) -> Arrays:
    return make(**{name: value})


def cpu_seconds(call: Callable[[], object], count: int) -> float:
    start = time.thread_time()
    for _ in range(count):
        call()
    return (time.thread_time() - start) / count
