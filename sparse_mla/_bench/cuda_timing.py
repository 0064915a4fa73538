"""Measures work on a CUDA device: replays of graphs, the sides in turn, timed by events.

There are two methods, and the host is in the numbers of neither. Rotating inputs: a side is a list
of calls over different inputs in one graph, so a call meets the memory that the others left, rows
cold and code warm; two of them may overlap. Flushed: the graph has one call; before each replay,
outside the timed interval, come matrix products, as in an engine, and a write of more than the L2
cache. So every side meets other code in the instruction caches, whatever was measured before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from statistics import median
from typing import Any

torch: Any = import_module("torch") if find_spec("torch") is not None else None
Array = Any

DEVICE = "cuda"
PEAK_FLOPS = 795e12  # an H200's bf16 matrix product of 8192 x 8192 x 8192
PEAK_BYTES = 4.3e12  # an H200's device copy, read + written
WARM_UP_ROUNDS = 3
MIN_ROUNDS = 5
ROUNDS_IN_FLIGHT = 8  # before the host waits
FLUSH_BYTES = 256 << 20  # or twice the L2 cache, where that is more
FLUSH_ORDER = 2048  # of the products: enough work for every SM


@dataclass
class CudaEffort:
    """How long to measure, and which of the rounds counts."""

    quick: bool = False
    rounds: int = 50
    row_seconds: float = 4.0  # of all rounds together, about; there are MIN_ROUNDS at least
    pick: Callable[[list[float]], float] = median

    @classmethod
    def of(cls, quick: bool, best: bool) -> CudaEffort:
        pick = min if best else median
        return cls(quick=True, rounds=15, row_seconds=1.0, pick=pick) if quick else cls(pick=pick)

    def describe(self) -> str:
        name = "fastest" if self.pick is min else "median"
        return f"{name} of {self.rounds} replays, fewer where a row takes {self.row_seconds:g} s"


class Replay:
    """A CUDA graph of calls in a row. Holds what they returned: replays write that memory."""

    def __init__(self, calls: Sequence[Callable[[], object]]) -> None:
        self.num_calls = len(calls)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.results = [call() for call in calls]

    def time(self) -> Callable[[], float]:
        """Starts one replay; the returned function gives its seconds per call, once it is done."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graph.replay()
        end.record()
        return lambda: start.elapsed_time(end) / 1e3 / self.num_calls


def interleave(
    sides: Mapping[str, Sequence[Callable[[], object]]],
    effort: CudaEffort,
    prepare: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """Seconds per call of each side. One replay of each in turn, round after round, so that the
    clocks, which fall under load, are the same for all. `prepare` comes before each replay, on the
    same stream, and is in no interval."""
    replays = {name: Replay(calls) for name, calls in sides.items()}

    def start(replay: Replay) -> Callable[[], float]:
        prepare()
        return replay.time()

    synchronize()
    warm_up = [start(replay) for _ in range(WARM_UP_ROUNDS) for replay in replays.values()]
    synchronize()
    counts = [replay.num_calls for replay in replays.values()] * WARM_UP_ROUNDS
    spent = sum(time() * count for time, count in zip(warm_up, counts, strict=True))
    affordable = int(effort.row_seconds / max(spent / WARM_UP_ROUNDS, 1e-9))
    samples: dict[str, list[Callable[[], float]]] = {name: [] for name in replays}
    for index in range(max(MIN_ROUNDS, min(effort.rounds, affordable))):
        for name, replay in replays.items():
            samples[name].append(start(replay))
        if index % ROUNDS_IN_FLIGHT == 0:
            synchronize()
    synchronize()
    return {name: effort.pick([time() for time in times]) for name, times in samples.items()}


def interleave_flushed(
    sides: Mapping[str, Sequence[Callable[[], object]]], effort: CudaEffort
) -> dict[str, float]:
    """Seconds of each side's first call, with nothing of it in the L2 cache, and other code in the
    instruction caches: a kernel that ran there last is up to 9 µs faster than behind another's."""
    return interleave({name: calls[:1] for name, calls in sides.items()}, effort, make_flush())


def make_flush() -> Callable[[], object]:
    """Products of two kinds, for their code, and a write that leaves nothing else in the L2
    cache."""
    size = max(FLUSH_BYTES, 2 * l2_bytes())
    written = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    factors = [
        torch.ones(FLUSH_ORDER, FLUSH_ORDER, dtype=dtype, device=DEVICE)
        for dtype in (torch.bfloat16, torch.float32)
    ]
    products = [torch.empty_like(factor) for factor in factors]

    def flush() -> None:
        for factor, product in zip(factors, products, strict=True):
            torch.mm(factor, factor, out=product)
        written.zero_()

    return flush


def synchronize() -> None:
    torch.cuda.synchronize()


def l2_bytes() -> int:
    return torch.cuda.get_device_properties(DEVICE).L2_cache_size


def memory_bytes() -> int:
    return torch.cuda.get_device_properties(DEVICE).total_memory


def floor_seconds(flop: float, num_bytes: float) -> float:
    """No version runs much faster: the larger of arithmetic and memory at this chip's best rate."""
    return max(flop / PEAK_FLOPS, num_bytes / PEAK_BYTES)


def describe_error(error: BaseException) -> str:
    """An exception in one line that fits a table."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:160].replace("|", "/")
