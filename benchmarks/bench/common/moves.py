"""A call of an operator that only moves bytes, as the benchmark measures it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Move:
    """A call over large arrays, the fewest bytes that it moves, and a check of some results."""

    name: str
    call: Callable[[], object]
    num_bytes: int
    is_right: Callable[[], bool]
    peer: Callable[[], object] | None = None  # a copy of as many bytes; None: the table's copy
