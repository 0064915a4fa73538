"""Calls of an operator in growing sizes, with one, two, three ... of something, and the arrays that
they take. sizes.py makes a table of their times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

import sparse_mla
from bench.cpu.subnormal import Arrays, normal
from sparse_mla._judge import BF16
from sparse_mla._rows import FP8_ROW_BYTES, KEY_DIM, row_of

SLOTS = 1024
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


# --- arrays --------------------------------------------------------------------------------------


def starts(total: int, size: int) -> np.ndarray:
    """Where requests of `size` tokens begin and end, of which the last may have fewer."""
    return np.append(np.arange(0, total, size), total).astype(np.int32)


def full(count: int, value: Any, dtype: Any = np.int32) -> np.ndarray:
    return np.full(count, value, dtype)


def drawn(*shape: int, below: int = SLOTS) -> np.ndarray:
    return np.random.default_rng(shape).integers(0, below, shape).astype(np.int32)


def keep(indices: np.ndarray, which: str) -> np.ndarray:
    """A list of which some entries are left."""
    kept = indices.copy()
    if which != "all":
        kept[..., int(which == "one") :] = -1
    return kept


def place(x: np.ndarray, where: str) -> np.ndarray:
    """A copy that begins one element behind a cache line, or whose rows are an element apart."""
    if where == "rows apart":
        copy = np.empty((*x.shape[:-1], x.shape[-1] + 1), x.dtype)[..., :-1]
    else:
        memory = np.empty(x.nbytes + 128, np.uint8)
        begin = -memory.ctypes.data % 64 + (x.itemsize if where == "not aligned" else 0)
        copy = memory[begin : begin + x.nbytes].view(x.dtype).reshape(x.shape)
    copy[...] = x
    return copy


def placed(make: Callable[[], Arrays], *names: str) -> Callable[[str], Arrays]:
    def moved(where: str) -> Arrays:
        arrays = make()
        return arrays | {name: place(arrays[name], where) for name in names}

    return moved


def format_of(fmt: str) -> Arrays:
    """kv_format=, for formats that rows do not tell."""
    return {"kv_format": fmt} if fmt in ("fp8_v41", "fp8_nope") else {}


def pages_of(fmt: str, page: int) -> np.ndarray:
    if fmt == "bfloat16":
        return np.zeros((SLOTS // page, page, KEY_DIM), BF16)
    row = FP8_ROW_BYTES if fmt == "fp8_ds_mla" else row_of(fmt)  # type: ignore[arg-type]
    return np.zeros((SLOTS // page, page, row), np.uint8)


def cache_of(fmt: str, page: int = 64) -> np.ndarray:
    keys, cache, slots = normal(SLOTS, KEY_DIM), pages_of(fmt, page), np.arange(SLOTS)
    if fmt in ("bfloat16", "fp8_ds_mla"):
        nope, rope = keys[:, :512].copy(), keys[:, 512:].copy()
        return sparse_mla.concat_and_cache_mla(nope, rope, cache, slots)
    if fmt.endswith("index"):
        keys = keys[:, :128].copy()
        return sparse_mla.indexer_k_quant_and_cache(keys, cache, slots)
    keys = keys[:, :512].copy()
    return sparse_mla.quantize_and_insert_k_cache(keys, cache, slots, **format_of(fmt))


def table(requests: int, tokens: int, page: int) -> np.ndarray:
    pages = -(-tokens // page)
    rows = np.arange(requests * pages) % (SLOTS // page)
    return rows.reshape(requests, pages).astype(np.int32)
