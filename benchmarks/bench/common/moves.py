"""A call of an operator that only moves bytes, as the benchmark measures it, and how such a call is
judged by some of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np

import sparse_mla

Array = Any


@dataclass
class Move:
    """A call over large arrays, the fewest bytes that it moves, and a check of some results."""

    name: str
    call: Callable[[], object]
    num_bytes: int
    is_right: Callable[[], bool]
    peer: Callable[[], object] | None = None  # a copy of as many bytes; None: the table's copy


@dataclass
class Op:
    """An operator's call. `tokens` and `outs` have a row per token; `cache` gets rows at `slots`,
    of which some formats keep the first `data_bytes` of all rows of a page before the others."""

    arrays: Any
    name: str
    tokens: dict[str, Array]
    others: dict[str, Any] = field(default_factory=dict)
    outs: dict[str, Array] = field(default_factory=dict)
    cache: dict[str, Array] = field(default_factory=dict)
    slots: Array = None
    data_bytes: int = 0

    @cached_property
    def call(self) -> Callable[[], Any]:
        given = self.tokens | self.others | self.outs | self.cache
        given |= {"slot_mapping": self.slots} if self.cache else {}
        return partial(getattr(sparse_mla, self.name), **given)

    def is_right(self, judge: Callable[..., bool] | None) -> bool:
        """Looks at some tokens: what `judge` says of their numbers and results or, without it,
        whether the CPU makes the same bytes of them."""
        a = self.arrays
        at = a.sample(len(next(iter(self.tokens.values()))))
        found = [a.take(x, at) for x in self.outs.values()]
        if self.cache:
            found.append(self.rows(at))
        if judge is not None:
            return judge(at, *found)
        return all(map(same_bytes, found, self.on_cpu(at)))

    def rows(self, at: np.ndarray) -> np.ndarray:
        """The rows of tokens in the cache."""
        slots = self.arrays.take(self.slots, at)
        return rows_at(self.arrays, next(iter(self.cache.values())), slots, self.data_bytes)

    def on_cpu(self, at: np.ndarray) -> list[np.ndarray]:
        a = self.arrays
        given = {name: a.take(x, at) for name, x in self.tokens.items()}
        given |= {name: a.get(x) if hasattr(x, "shape") else x for name, x in self.others.items()}
        rows = []
        if self.cache:  # pages of one row, whose parts are side by side
            name, cache = next(iter(self.cache.items()))
            page = a.take(cache, slice(1))[:, :1]
            rows = [np.zeros((len(at), *page.shape[1:]), page.dtype)]
            given |= {name: rows[0], "slot_mapping": np.arange(len(at))}
        made = getattr(sparse_mla, self.name)(**given)
        made = made if isinstance(made, tuple) else (made,)
        return [*made[: len(self.outs)], *rows]

    def move(self, name: str, num_bytes: int, judge: Callable[..., bool] | None = None) -> Move:
        """`judge` is NumPy's, for the CPU, whose results are compared with nothing else."""
        judge = None if self.arrays.is_cuda else judge
        return Move(name, self.call, num_bytes, lambda: self.is_right(judge))


def rows_at(a: Any, cache: Array, slots: np.ndarray, data_bytes: int = 0) -> np.ndarray:
    """Rows of a cache, with the parts of split pages side by side."""
    _, page_rows, row = cache.shape
    page, number = (x[:, None] for x in np.divmod(slots, page_rows))
    data_bytes = data_bytes or row
    scale_bytes, pages = row - data_bytes, cache.reshape(len(cache), -1)
    data = a.take(pages, (page, number * data_bytes + np.arange(data_bytes)))
    first = page_rows * data_bytes + number * scale_bytes
    return np.concatenate([data, a.take(pages, (page, first + np.arange(scale_bytes)))], 1)


def same_bytes(x: Any, y: Any) -> bool:
    x, y = (np.ascontiguousarray(np.asarray(array)) for array in (x, y))
    return x.tobytes() == y.tobytes()


def sizes_of(arrays: Sequence[Array]) -> int:
    return sum(x.nbytes for x in arrays)
