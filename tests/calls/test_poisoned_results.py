"""Every result that a call makes has values of its own in every element, whatever its memory had.

A hand-made framework fills the memory of results before the calls get it. Two calls whose fillings
differ must give the same bits: an element that nobody writes would show the filling.
"""

from __future__ import annotations

import exchange_producer
import numpy as np
import pytest
from example_table import TABLE
from exchange_producer import Exchanged
from helpers import assert_same_bits
from test_operator import WRITTEN, joined

from sparse_mla import ops

EXAMPLES = [
    title
    for title, x in TABLE.items()
    if x.op in ops.OPERATORS and WRITTEN & {kind for _, kind in ops.OPERATORS[x.op].table}
]


def put(x):
    if isinstance(x, (tuple, list)):
        return type(x)(map(put, x))
    if not isinstance(x, np.ndarray):
        return x
    return Exchanged(x.view(np.uint8) if x.dtype == bool else x.copy())


def results(got) -> list[np.ndarray]:
    return [x.array for x in (got if isinstance(got, tuple) else (got,)) if x is not None]


@pytest.mark.parametrize("title", EXAMPLES)
def test_no_element_of_a_result_is_left_unwritten(title, monkeypatch):
    op, example = ops.OPERATORS[TABLE[title].op], TABLE[title]
    values = joined(op, example.arrays | example.options)
    values |= {name: True for name, kind in op.table if kind == "ask"}
    seen = []
    for byte in (0x00, 0x3F, 0xFF):
        monkeypatch.setattr(exchange_producer, "POISON", byte)
        made = Exchanged.allocated
        seen.append(results(op(**{name: put(x) for name, x in values.items()})))
        assert Exchanged.allocated > made or "output or first" in dict(op.table).values()
    for other in seen[1:]:
        for i, (x, y) in enumerate(zip(seen[0], other, strict=True)):
            assert_same_bits(x, y, f"result {i}")
