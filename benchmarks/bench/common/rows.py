"""A table is measured row by row: a call is judged, timed beside its peers, shown in columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.common.composition import Composition
from bench.common.timing import Table, describe_error

Call = Callable[[], Any]
Labels = dict[str, Any]  # a row begins with them, and so does its record


@dataclass
class Bench:
    """What a table is measured with: the arrays and the timer of a device."""

    arrays: Any
    effort: Any
    timer: Callable[[Mapping[str, Call], Any], dict[str, float]]
    threads: int = 1
    peer: Any = None  # FlashMLA
    rows: Any = None  # options choose rows of the inputs' table

    @property
    def device(self) -> str:
        device: str = self.arrays.device
        return device

    @property
    def is_cuda(self) -> bool:
        is_cuda: bool = self.arrays.is_cuda
        return is_cuda

    def choose(self, full: Sequence[Any], quick: Sequence[Any]) -> Sequence[Any]:
        return quick if self.effort.quick else full

    def time(self, sides: Mapping[str, Call]) -> dict[str, float]:
        """Seconds of each side, which are measured in turn."""
        return self.timer(sides, self.effort)


@dataclass
class Work:
    """What a row measures: a call of ours, how it is judged, and what it has to do."""

    ours: Call
    judge: Callable[[Any], float]  # the error of a result as a fraction of its bound
    flop: float = 0.0
    floor: float = math.nan  # seconds
    num_bytes: float = 0.0
    peers: dict[str, Callable[[], Call]] = field(default_factory=dict)  # they may fail
    judge_peers: Callable[[], float] | None = None

    def compose(self, peer: Composition) -> None:
        """Puts the PyTorch composition beside it, of which the faster call counts."""
        self.judge_peers = lambda: self.judge(peer.numpy())
        self.peers = {"all tokens": lambda: peer.batched}
        if len(peer.q) > 1:
            self.peers["token by token"] = lambda: peer.by_token


@dataclass
class Measured:
    """A row's error and times."""

    labels: Labels
    work: Work
    error: float
    seconds: dict[str, float]
    peer_error: float = math.nan
    lasting: dict[str, float] = field(default_factory=dict)

    @property
    def ours(self) -> float:
        return self.seconds["ours"]

    @property
    def beside(self) -> float:
        """The time of the quickest peer; NaN without one."""
        return min((x for side, x in self.seconds.items() if side != "ours"), default=math.nan)


@dataclass(frozen=True)
class Column:
    """A cell of a row, and a number in its record, unless that is NaN."""

    title: str
    cell: Callable[[Any], str]
    key: str = ""
    value: Callable[[Any], Any] = lambda row: math.nan


def us(seconds: float) -> str:
    return "" if math.isnan(seconds) else f"{1e6 * seconds:.1f}"


def times(ratio: float) -> str:
    return "" if math.isnan(ratio) else f"{ratio:.2f}×"


def beside(title: str, key: str = "peer_us") -> Column:
    return Column(title, lambda x: us(x.beside), key, lambda x: 1e6 * x.beside)


def peer(side: str, title: str, digits: str = ".1f") -> list[Column]:
    """The time of one side, and its ratio to ours."""

    def spent(x: Measured) -> float:
        return x.seconds.get(side, math.nan)

    def cell(x: Measured) -> str:
        return "-" if math.isnan(spent(x)) else format(1e6 * spent(x), digits)

    return [
        Column(title, cell, f"{side}_us", lambda x: 1e6 * spent(x)),
        Column("ratio", lambda x: times(spent(x) / x.ours) or "-"),
    ]


RIGHT = Column("chosen", lambda x: "FAIL" if x.error else "right", "right", lambda x: not x.error)
US = Column("µs", lambda x: us(x.ours), "us", lambda x: 1e6 * x.ours)
ERROR = Column("error/bound", lambda x: f"{x.error:.3g}", "error_over_bound", lambda x: x.error)
FLOOR = Column("floor µs", lambda x: us(x.work.floor), "floor_us", lambda x: 1e6 * x.work.floor)
TFLOPS = Column("TFLOP/s", lambda x: f"{x.work.flop / x.ours / 1e12:.0f}")
RATIO = Column("÷ ours", lambda x: times(x.beside / x.ours))


def gflops(x: Measured, seconds: float) -> float:
    return x.work.flop / seconds / 1e9


def rated(error: float, rate: float) -> dict[str, float]:
    return {"error_over_bound": error, "gflops": rate} if error == error else {"gflops": rate}


# What a table of the CPU shows, and what it shows of PyTorch's calls beside ours.
RATES = (
    Column("error/bound", lambda x: f"{x.error:.3g}"),
    Column(
        "GFLOP/s",
        lambda x: f"{gflops(x, x.ours):.0f}",
        "ours",
        lambda x: rated(x.error, gflops(x, x.ours)),
    ),
)
PEER_ERROR = Column("PyTorch: error/bound", lambda x: f"{x.peer_error:.3g}")
PEER_RATES = (
    Column(
        "GFLOP/s",
        lambda x: f"{gflops(x, x.beside):.0f}",
        "torch",
        lambda x: rated(x.peer_error, gflops(x, x.beside)),
    ),
    Column("ratio", lambda x: times(x.beside / x.ours), "ratio", lambda x: x.beside / x.ours),
)


def rates(has_peer: object) -> list[Column]:
    return [*RATES, PEER_ERROR, *PEER_RATES] if has_peer else [*RATES]


def make_table(title: str, labels: Iterable[str], columns: Iterable[Column]) -> Table:
    return Table(title, [*labels, *(column.title for column in columns)], [], [])


def show(labels: Labels) -> list[str]:
    return [*map(str, labels.values())]


def measure_row(
    bench: Bench,
    table: Table,
    columns: Iterable[Column],
    row: tuple[Labels, Callable[[], Work]],
    show: Callable[[Labels], list[str]] = show,
    sustain: Callable[[Call, Any], float] | None = None,
) -> None:
    """Makes a row's arrays, judges ours, then times both sides. A peer that fails is a failure, and
    the row goes on. `sustain` gives a second time of each side, alone."""
    labels, make = row
    work, cells = make(), show(labels)
    name = ", ".join(cells)
    error = work.judge(work.ours())
    if not error <= 1:
        found = "wrong" if math.isinf(error) else f"{error:.3g} × bound"
        table.failures.append(f"{name}: {found}")
    sides = {"ours": work.ours}
    for side, make_peer in work.peers.items():
        try:
            call = make_peer()
            call()
            sides[side] = call
        except Exception as reason:  # it has no kernel for the shape, or refuses it
            table.failures.append(f"{name}: {side}: {describe_error(reason)}")
    peer_error = work.judge_peers() if work.judge_peers else math.nan
    found_row = Measured(labels, work, error, bench.time(sides), peer_error)
    if sustain is not None:
        found_row.lasting = {side: sustain(call, bench.effort) for side, call in sides.items()}
    record = {x.key: x.value(found_row) for x in columns if x.key}
    record = {key: value for key, value in record.items() if value == value}
    table.add([*cells, *(x.cell(found_row) for x in columns)], labels | record)


def measure_rows(
    bench: Bench,
    title: str,
    labels: Iterable[str],
    columns: Sequence[Column],
    rows: Iterable[tuple[Labels, Callable[[], Work]]],
    **options: Any,
) -> Table:
    """A table, whose first columns have `labels`. Each row has its arrays alone."""
    table = make_table(title, labels, columns)
    for row in rows:
        measure_row(bench, table, columns, row, **options)
    return table
