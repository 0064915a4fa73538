"""Two sides of a row, ours and FlashMLA's: their calls, their errors, and their times by both
methods of `timing.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import sparse_mla
from bench.common.peer import Peer, read_attend, read_decode
from bench.common.rows import Column, times, us
from bench.common.timing import Table, describe_error
from bench.cuda.inputs import FP8_ROW_BYTES, ROW_BYTES, Inputs
from bench.cuda.judge import judge
from bench.cuda.timing import (
    DEVICE,
    Array,
    CudaEffort,
    floor_seconds,
    interleave,
    interleave_flushed,
    synchronize,
    torch,
)
from sparse_mla._rows import KEY_DIM, KV_LORA_RANK


@dataclass
class Side:
    """Calls over different inputs, and what is known about the first call's result."""

    calls: Sequence[Callable[[], tuple]]
    read: Callable[[tuple], tuple[Array, Array]]  # what a call returned -> out [T, H, 512], lse
    inputs: Inputs  # the first call's
    owned: tuple[Array, ...] = ()  # the arrays given to the first call to write, if any
    error: float = math.nan  # as a fraction of its bound
    seconds: float = math.nan  # time of a call with rotating inputs
    flushed_seconds: float = math.nan
    failure: str = ""

    def check(self) -> None:
        """Runs every call once, which loads the kernels, and judges the first result."""
        for array in self.owned:
            array.fill_(math.inf)
        self.error = judge(self.inputs, self.read(self.calls[0]()))
        if self.owned and not self.error <= 1:
            self.failure = f"error is {self.error:.3g} of its bound"
        for call in self.calls[1:]:
            call()
        synchronize()


def make_ours(inputs: Sequence[Inputs], num_keys: int = 0) -> Side:
    """Calls with all of their memory given, as an engine makes them. They share one workspace, with
    room for so many rows that a prefill may widen."""
    num_tokens, num_heads, _ = inputs[0].q.shape
    topk = inputs[0].indices.shape[1]
    size = sparse_mla.attention_workspace_size(
        num_tokens, num_heads, topk, num_keys=num_keys, device=DEVICE
    )
    workspace = torch.empty(size, dtype=torch.uint8, device=DEVICE)

    def make_call(given: Inputs, out: Array, lse: Array) -> Callable[[], tuple]:
        return lambda: sparse_mla.sparse_attention(
            given.q,
            given.kv,
            given.indices,
            softmax_scale=given.scale,
            attn_sink=given.sink,
            out=out,
            lse=lse,
            workspace=workspace,
        )

    shape = (num_tokens, num_heads)
    outs = [torch.empty((*shape, 512), dtype=torch.bfloat16, device=DEVICE) for _ in inputs]
    lses = [torch.empty(shape, dtype=torch.float32, device=DEVICE) for _ in inputs]
    calls = [make_call(*given) for given in zip(inputs, outs, lses, strict=True)]
    return Side(calls, lambda results: results[:2], inputs[0], (outs[0], lses[0]))


def make_peer(peer: Peer, inputs: Sequence[Inputs]) -> Side:
    """Calls of the peer's decode kernel on FP8 rows, or of its prefill kernel on bf16 rows."""
    first = inputs[0]
    num_heads = first.q.shape[1]
    if first.kv.shape[-1] == FP8_ROW_BYTES:
        plan = peer.get_plan()
        calls = [peer.decode(x.q, x.kv, x.indices, x.scale, x.num_reqs, plan) for x in inputs]
        return Side(calls, lambda results: read_decode(results, num_heads), first)
    calls = [peer.attend(x.q, x.kv, x.indices, x.scale, x.sink) for x in inputs]
    return Side(calls, lambda results: read_attend(results, num_heads), first)


def measure_sides(sides: Mapping[str, Side], effort: CudaEffort, rotating: bool = True) -> None:
    """Fills in errors and times. Where a side fails, the others still get their numbers. Without
    `rotating` there are flushed times only."""
    for side in sides.values():
        try:
            side.check()
        except Exception as error:  # whatever it is, the other rows go on
            side.failure = describe_error(error)
            side.calls = ()
    live = {name: side for name, side in sides.items() if side.calls}
    before = {name: [a.clone() for a in side.owned] for name, side in live.items()}
    try:
        time_sides(live, effort, rotating)
    except Exception:  # a side cannot be captured; time each alone to find out which
        for name, side in live.items():
            try:
                time_sides({name: side}, effort, rotating)
            except Exception as error:
                side.failure = side.failure or describe_error(error)
    for name, side in live.items():
        same = [same_bits(a, b) for a, b in zip(before[name], side.owned, strict=True)]
        if not all(same) and not side.failure:
            side.failure = "replays changed the result's bits"


def time_sides(sides: Mapping[str, Side], effort: CudaEffort, rotating: bool) -> None:
    calls = {name: side.calls for name, side in sides.items()}
    if rotating:
        for name, seconds in interleave(calls, effort).items():
            sides[name].seconds = seconds
    first = {name: side.calls[0] for name, side in sides.items()}
    for name, seconds in interleave_flushed(first, effort).items():
        sides[name].flushed_seconds = seconds


def same_bits(a: Array, b: Array) -> bool:
    """Compares bytes, because a NaN does not equal itself."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


# --- rows ----------------------------------------------------------------------------------------


@dataclass
class Work:
    """What a call must do: its FLOP, and its fewest bytes to and from memory."""

    num_tokens: int
    num_heads: int
    topk: int
    num_keys: int  # keys in the cache
    kv_format: str

    @property
    def flop(self) -> float:
        return 2 * self.num_tokens * self.num_heads * self.topk * (KEY_DIM + KV_LORA_RANK)

    @property
    def num_bytes(self) -> float:
        rows = min(self.num_tokens * self.topk, self.num_keys)
        return rows * ROW_BYTES[self.kv_format] + self.num_tokens * self.num_heads * 2 * (
            KEY_DIM + KV_LORA_RANK
        )

    @property
    def floor(self) -> float:
        return floor_seconds(self.flop, self.num_bytes)


@dataclass
class Pair:
    """What columns are made of."""

    ours: Side
    peer: Side | None
    beside: Any  # a Work; the flat input's Side in the table of inputs


def number(title: str, digits: str, key: str, value: Callable[[Any], float]) -> Column:
    return Column(title, lambda x: format(value(x), digits), key, value)


def spent(title: str, key: str, seconds: Callable[[Any], float]) -> Column:
    return Column(title, lambda x: us(seconds(x)), key, lambda x: 1e6 * seconds(x))


def ratio(title: str, key: str, value: Callable[[Any], float]) -> Column:
    return Column(title, lambda x: times(value(x)), key, value)


OUR_ERROR = Column(
    "error/bound",
    lambda x: f"{'FAIL ' if x.ours.failure else ''}{x.ours.error:.3g}",
    "error_over_bound",
    lambda x: x.ours.error,
)
OURS = (
    spent("µs", "us", lambda x: x.ours.seconds),
    number("TFLOP/s", ".0f", "tflops", lambda x: x.beside.flop / x.ours.seconds / 1e12),
    spent("floor µs", "floor_us", lambda x: x.beside.floor),
    number("× floor", ".2f", "over_floor", lambda x: x.ours.seconds / x.beside.floor),
    OUR_ERROR,
    spent("flushed µs", "flushed_us", lambda x: x.ours.flushed_seconds),
)
PEER_ERROR = number("error/bound", ".3g", "peer_error_over_bound", lambda x: x.peer.error)
PEER = (
    spent("FlashMLA µs", "peer_us", lambda x: x.peer.seconds),
    ratio("÷ ours", "peer_over_ours", lambda x: x.peer.seconds / x.ours.seconds),
    PEER_ERROR,
    spent("flushed µs", "peer_flushed_us", lambda x: x.peer.flushed_seconds),
    ratio(
        "÷ ours",
        "peer_over_ours_flushed",
        lambda x: x.peer.flushed_seconds / x.ours.flushed_seconds,
    ),
)


def add_row(
    table: Table,
    labels: dict[str, Any],
    pair: Pair,
    ours: Sequence[Column] = OURS,
    peer: Sequence[Column] = PEER,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """A row in columns of both sides; the record has `more`. A side without a time has no cells.
    Our failure is also a failure of the table; the peer's failure is only a note."""
    record, row = {**labels, **more}, [*map(str, labels.values())]
    for side, columns, failed in ((pair.ours, ours, "FAIL"), (pair.peer, peer, "failed")):
        if side is None:
            continue
        if columns[0].cell(pair):
            row += [x.cell(pair) for x in columns]
            record |= {x.key: finite(x.value(pair)) for x in columns}
        else:
            row += [failed] + [""] * (len(columns) - 1)
        if not side.failure:
            continue
        if side is pair.ours:
            record["failure"] = side.failure
            table.failures.append(f"{show_labels(labels)}: {side.failure}")
        else:
            record["peer_failure"] = side.failure
            table.notes.append(f"FlashMLA, {show_labels(labels)}: {side.failure}")
    table.add(row, record)


def show_labels(labels: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in labels.items())


def finite(value: float) -> float | None:
    """The value, or None where it is not finite, because JSON cannot hold that."""
    return value if math.isfinite(value) else None
