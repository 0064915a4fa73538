"""Every array argument of every operator as a view: sliced, backwards, broadcast, overlapping, at
an offset, the field of a record (csrc/core/rule.c, csrc/python/arrays/array.c).

Each array of each example (example_table.py) in turn is replaced by each view of it, as an object
of each kind of producer. The outcome has every bit of the contiguous call, or is exactly the
refusal that the rules of the argument give. Bytes between and around the elements stay.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from dlpack_producer import DTYPES, READ_ONLY, Producer
from example import DECLARED_AS, U8, UNITS, unit_of
from example_table import ARGUMENTS, TABLE, UNREAD, Calls, Refused, bytes_of
from exchange_producer import Exchanged
from helpers import RED

from sparse_mla import _C, ops

pytestmark = pytest.mark.frameworks

# --- the table -----------------------------------------------------------------------------------

WITHOUT_ARRAYS = {
    "_attention_plans",
    "attention_workspace_size",
    "lightning_indexer_workspace_size",
    "get_context_workspace_size",
    "get_prefill_workspace_size",
    "kernels",
    "build_info",
    "get_include",
    "get_library_dir",
    "rope_table",
    "mla_softmax_scale",
}


# Functions that read the shapes of arrays. The operators they are composed of have rows.
COMPOSED = {"absorb"}


def array_parameters(op) -> set[str]:
    parameters = inspect.signature(op).parameters.values()
    host = ("query_start_loc", "seq_lens", "num_scheduled_tokens", "context_lens", "block_table")
    words = ("Array", "Like[", "Written")  # types of sparse_mla/_types.py
    return {p.name for p in parameters if any(w in p.annotation for w in words) or p.name in host}


def named_in_table(op: str) -> set[str]:
    return {name.partition("[")[0] for x in TABLE.values() if x.op == op for name in x.arrays}


def test_every_array_of_every_operator_has_a_row():
    """A new operator or array argument fails this test until the table has it."""
    operators = {n: x for n, x in vars(ops).items() if isinstance(x, _C.Operator)}
    functions = {
        n: x
        for n, x in vars(ops).items()
        if inspect.isfunction(x) and x.__module__.startswith(ops.__name__) and not n.startswith("_")
    }
    for name in (operators | functions).keys() - COMPOSED:
        declared = getattr(ops, DECLARED_AS.get(name, name))
        assert array_parameters(declared) == named_in_table(name), name
        assert (name in WITHOUT_ARRAYS) == (not named_in_table(name)), name
    assert {example.op for example in TABLE.values()} <= {*operators, *functions, "forward"}
    assert {n for n, x in vars(_C).items() if inspect.isbuiltin(x)} == {
        "reorder_batch",
        "split_context_chunks",
        "split_decodes_and_prefills",
        "split_prefill_chunks",
        "get_context_workspace_size",
        "get_prefill_workspace_size",
        "local_attention_batches",
        "new_array",
        "find_stream",
        "read_stream",
        "order_streams",
        "kernels",
        "build_info",
        "call_exactly",
        "xla_handlers",
    }
    members = {n for n in vars(_C.Step) if not n.startswith("_")}
    assert members == {
        *("build", "check", "layer", "mark_use", "refresh", "warm_up"),
        "workspace_bytes",
    }


# --- views ---------------------------------------------------------------------------------------

MARGIN = 1024  # guard bytes in front of and behind the bytes of a view


class Placed:
    """The elements of `x` in guarded memory, with any strides and offset, both in bytes.

    Where elements share memory the one written last stays; `values` are those that the view has.
    """

    def __init__(self, x: np.ndarray, strides, offset=0) -> None:
        reach = [(n - 1) * s for n, s in zip(x.shape, strides, strict=True)]
        below = -sum(r for r in reach if r < 0)
        below = -(-below // 64) * 64
        above = sum(r for r in reach if r > 0) + x.itemsize
        size = 2 * MARGIN + below + above + offset + 64
        memory = np.full(size, RED, U8)
        start = MARGIN + below + -memory.ctypes.data % 64 + offset
        self.memory = memory
        self.view = np.ndarray(x.shape, x.dtype, memory, start, strides)
        self.view[...] = x
        self.values = self.view.copy()
        mine = np.zeros(size, bool)
        np.ndarray((*x.shape, x.itemsize), bool, mine, start, (*strides, 1))[...] = True
        self.between = ~mine
        self.before = memory.copy()

    def check(self, may_be_written: bool, what: str) -> None:
        same = self.memory == self.before
        assert same[self.between].all(), f"{what}: a write between or around the elements"
        assert may_be_written or same.all(), f"{what} was written"

    def reset(self) -> None:
        self.memory[...] = self.before


def nested(x: np.ndarray, steps=None, order=None, gaps=None) -> list[int]:
    """Strides in bytes, with which each dimension steps over the dimensions inside it. `gaps` adds
    bytes to a dimension's stride, `steps` multiplies it, and `order` lists the dimensions from the
    outermost to the innermost."""
    strides, span = [0] * x.ndim, x.itemsize
    for d in reversed(order or range(x.ndim)):
        strides[d] = span + (gaps or {}).get(d, 0)
        strides[d] *= (steps or {}).get(d, 1)
        span = abs(strides[d]) * x.shape[d]
    return strides


SPLIT_ROWS = {"v4": 584, "index": 132}  # bytes per token in split pages


def split_pages_refusal(in_bytes: list[int], row: int) -> str | None:
    """What is wrong with pages of 4 tokens of `row` bytes."""
    token = in_bytes[1] if len(in_bytes) == 3 else row
    if token != row:
        rule = f"have contiguous pages (a token stride of {row} bytes)"
        return f"{rule}, got a stride of {token}"
    if in_bytes[0] < 4 * row:
        return f"have a page stride of at least {4 * row} bytes, got {in_bytes[0]}"
    return None


def views_of(x: np.ndarray, rules: str) -> dict[str, tuple[list[int], int]]:
    """name -> strides and offset, in bytes."""
    unit = unit_of(x, rules)
    compact = nested(x)
    last = x.ndim - 1
    views = {"contiguous": (compact, 0), "one further": (compact, unit)}
    wide = [d for d in range(x.ndim) if x.shape[d] > 1]
    for d in wide:
        views[f"every second of {d}"] = (nested(x, {d: 2}), 0)
        views[f"every third of {d}"] = (nested(x, {d: 3}), unit)
        views[f"gap in {d}"] = (nested(x, gaps={d: unit}), 0)
        views[f"half a gap in {d}"] = (nested(x, gaps={d: max(unit // 2, 1)}), 0)
        views[f"record field, {d}"] = (nested(x, gaps={d: 1}), 0)
        views[f"backwards in {d}"] = (nested(x, {d: -1}), 0)
        views[f"broadcast in {d}"] = ([0 if i == d else s for i, s in enumerate(compact)], 0)
        if d != last:
            closer = [s - unit if i == d else s for i, s in enumerate(compact)]
            views[f"overlapping in {d}"] = (closer, 0)
    if x.ndim > 1:
        views["backwards but for the last"] = (nested(x, dict.fromkeys(range(last), -1)), 0)
        views["outermost inside"] = (nested(x, order=[*range(1, last), 0, last]), 0)
        views["transposed"] = (nested(x, order=[*range(last, -1, -1)]), 0)
    if len(wide) < x.ndim:
        junk = [s if n > 1 else 7 for n, s in zip(x.shape, compact, strict=True)]
        views["any stride of one element"] = (junk, 0)
    views["a byte off"] = (compact, 1)
    views["half an element off"] = (compact, max(unit // 2, 1))
    return views


def refusal_of(x: np.ndarray, rules: str) -> str | None:
    """The rule that a view breaks and what the view has instead, in the error's words. None where
    the view is good."""
    item = x.itemsize
    in_bytes = [s if n > 1 else 0 for n, s in zip(x.shape, x.strides, strict=True)]
    for d, stride in enumerate(in_bytes):
        if stride % item:
            return (
                f"have strides in multiples of its {item}-byte elements, got {stride} bytes in "
                f"dimension {d}"
            )
    strides = [s // item for s in in_bytes]
    address = x.__array_interface__["data"][0]
    if "host" in rules:
        return "be aligned to its elements, got another address" if address % item else None
    if "strided" not in rules and x.shape[-1] > 1 and strides[-1] != 1:
        return f"have a contiguous last dimension (stride 1), got stride {strides[-1]}"
    unit = unit_of(x, rules)
    if address % unit:
        off = address % unit
        bytes_off = "1 byte" if off == 1 else f"{off} bytes"
        return f"be aligned to {unit} bytes, got an address that is {bytes_off} off"
    row = next((row for rule, row in SPLIT_ROWS.items() if rule in rules), None)
    if row and (broken := split_pages_refusal(in_bytes, row)):
        return broken
    if any(rule in rules for rule in UNITS):
        page, token = (0, in_bytes[0]) if x.ndim == 2 else in_bytes[:2]
        page, token = (in_bytes[0], row) if row else (page, token)
        if page % unit or token % unit:
            return (
                f"have page and token strides in multiples of {unit} bytes, got {page} and {token}"
            )
    if "written" not in rules:
        return None
    for d, (n, stride) in enumerate(zip(x.shape, strides, strict=True)):
        if n > 1 and stride <= 0:
            return f"have positive strides (it is written), got {stride} in dimension {d}"
    span = item
    for stride, n in sorted(zip(in_bytes, x.shape, strict=True)):
        if n > 1 and stride < span:
            return "have elements that do not overlap (it is written), got strides that reach back"
        span += (n - 1) * stride
    return None


def ways_in(x: np.ndarray) -> dict[str, Any]:
    """One view as objects of different kinds, all on the view's memory."""
    ways: dict[str, Any] = {"NumPy": x}
    if x.dtype.isbuiltin == 1:
        ways["buffer"] = memoryview(x)
    if x.dtype in DTYPES and all(s % x.itemsize == 0 for s in x.strides):
        ways["exchange API"] = Exchanged(x)
        ways["capsule"] = Producer(x, byte_offset=640)
        ways["old capsule"] = Producer(x, byte_offset=16, versioned=False)
        if list(x.strides) == nested(x):
            ways["capsule without strides"] = Producer(x, byte_offset=48, null_strides=True)
    return ways


class Unknown:
    """A NumPy array as an array of an unknown framework. NumPy's capsule tells whether it is
    read-only."""

    def __init__(self, x: np.ndarray) -> None:
        self.__dlpack__, self.__dlpack_device__ = x.__dlpack__, x.__dlpack_device__


@pytest.mark.parametrize(("example", "name"), ARGUMENTS)
def test_views(example, name):
    rules = example.rules[name]
    calls = Calls(example, name)
    accepted, refused, outcomes = set(), set(), []
    for view, (strides, offset) in views_of(calls.plain, rules).items():
        placed = Placed(calls.plain, strides, offset)
        broken = refusal_of(placed.view, rules)
        if broken is None:
            values = placed.values.copy()
            want = calls.run(values, values)
            outcomes.append(want)
            assert view.startswith(("broadcast", "overl")) or not isinstance(want[0], Refused), view
            accepted.add(view)
        else:
            want = calls.refused(placed.values, broken)
            refused.add(view)
        for way, given in ways_in(placed.view).items():
            what = f"{view}, {way}"
            assert calls.run(placed.view, given) == want, what
            placed.check("written" in rules and broken is None, what)
            placed.reset()
    assert {"contiguous", "one further"} <= accepted
    assert refused or (calls.plain.itemsize == 1 and "written" not in rules)
    # Views whose elements share memory have other values, which must change the results. A vector
    # that must be contiguous has no such view, nor have split pages and arrays of one element.
    is_fixed = calls.plain.ndim == 1 and "strided" not in rules and "host" not in rules
    shares = not any(rule in rules for rule in SPLIT_ROWS) and calls.plain.size > 1
    if (
        "written" not in rules
        and (example.op, name) not in UNREAD
        and name != "seq_lens_cpu"
        and not is_fixed
        and shares
    ):
        results = [(got, {n: x for n, x in after.items() if n != name}) for got, after in outcomes]
        assert any(result != results[0] for result in results), "an argument without effect"


@pytest.mark.parametrize(("example", "name"), ARGUMENTS)
def test_read_only_arrays(example, name):
    """A call accepts read-only arrays of every kind of producer where it reads them, and refuses
    them where it writes them."""
    calls = Calls(example, name)
    x = calls.plain.copy()
    want = calls.run(x, x)[0]
    x = calls.plain.copy()
    ways: dict[str, Any] = {"ndarray": x.view()}
    ways["ndarray"].flags.writeable = False
    if x.dtype.isbuiltin == 1:
        ways["memoryview"] = memoryview(x).toreadonly()
    if x.dtype in DTYPES:
        ways["Producer"] = Producer(x, flags=READ_ONLY)
        ways["Exchanged"] = Exchanged(x, is_read_only=True)
    if x.dtype.isbuiltin == 1:
        ways["Unknown"] = Unknown(ways["ndarray"])
    for kind, given in ways.items():
        got, _ = calls.run(x, given)
        if "written" in example.rules[name]:
            who = f"{example.blames(name)}: `{name}`"
            text = f"{who} must be writable, got a read-only {kind}"
            assert got == Refused(BufferError, text)
            assert bytes_of(x) == bytes_of(calls.plain)
        else:
            assert got == want, kind
