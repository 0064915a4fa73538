"""Measures work on a CUDA device: replays graphs of the sides in turn, and times them by events.

There are two methods, and neither includes host time. With rotating inputs, a side is a list of
calls over different inputs in one graph. A call finds the caches as the calls before it left them:
its rows are cold, its code is warm. Two calls may overlap. With flushing, the graph has one call.
Before each replay, outside the timed interval, come matrix products, as in an engine, and a write
of more bytes than the L2 cache holds. So every side finds other code in the instruction caches,
whatever was measured before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from statistics import median
from time import sleep
from typing import Any

from bench.common.noise import spread_of

torch: Any = import_module("torch") if find_spec("torch") is not None else None
Array = Any

DEVICE = "cuda"
PEAK_FLOPS = 795e12  # an H200's bf16 matrix product of 8192 x 8192 x 8192
PEAK_BYTES = 4.3e12  # an H200's device copy, read + written
WARM_UP_ROUNDS = 3
MIN_ROUNDS = 5
ROUNDS_IN_FLIGHT = 8  # rounds before the host waits
SUSTAINED_SECONDS = 0.5  # seconds for one side alone, after a pause in which the device cools
PAUSE_SECONDS = 0.3
FLUSH_BYTES = 256 << 20  # or twice the L2 cache, where that is more
FLUSH_ORDER = 2048  # rows and columns of the matrices: enough work for every SM


@dataclass
class CudaEffort:
    """How long to measure, and which of the rounds counts."""

    quick: bool = False
    rounds: int = 50
    row_seconds: float = 4.0  # all rounds together, about; at least MIN_ROUNDS are run
    pick: Callable[[list[float]], float] = median
    spreads: list[float] = field(default_factory=list)  # spreads of the current table's times

    @classmethod
    def of(cls, quick: bool, best: bool) -> CudaEffort:
        pick = min if best else median
        return cls(quick=True, rounds=15, row_seconds=1.0, pick=pick) if quick else cls(pick=pick)

    def describe(self) -> str:
        name = "fastest" if self.pick is min else "median"
        return f"{name} of {self.rounds} replays, fewer where a row takes {self.row_seconds:g} s"


class Replay:
    """A CUDA graph of calls in a row. It keeps their results, because replays write to them."""

    def __init__(self, calls: Sequence[Callable[[], object]]) -> None:
        self.num_calls = len(calls)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.results = [call() for call in calls]

    def time(self) -> Callable[[], float]:
        """Starts one replay. The returned function gives its seconds per call, once it is done."""
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
    """Seconds per call of each side. Every round replays each side once, so that the clocks, which
    fall under load, are the same for all sides. `prepare` runs before each replay, on the same
    stream, outside the timed interval."""
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
    seconds = {name: [time() for time in times] for name, times in samples.items()}
    effort.spreads += map(spread_of, seconds.values())
    return {name: effort.pick(times) for name, times in seconds.items()}


def interleave_flushed(
    sides: Mapping[str, Callable[[], object]], effort: CudaEffort
) -> dict[str, float]:
    """Seconds of each side's call, with none of its data in the L2 cache and other code in the
    instruction caches. A kernel that ran last is up to 9 µs faster than after other kernels."""
    return interleave({name: [call] for name, call in sides.items()}, effort, make_flush())


def sustain(call: Callable[[], object], effort: CudaEffort) -> float:
    """Seconds per replay of one call alone, back to back, after a third of the time: then clocks
    have come down to what the device's power allows."""
    replay = Replay([call])
    synchronize()
    replay.time()
    estimate = replay.time()
    synchronize()
    sleep(PAUSE_SECONDS)
    total = SUSTAINED_SECONDS / (5 if effort.quick else 1)
    count = max(3, int(total / max(estimate(), 1e-9)))
    times = [replay.time() for _ in range(count)]
    synchronize()
    later = [time() for time in times[count // 3 :]]
    return sum(later) / len(later)


def make_flush() -> Callable[[], object]:
    """Makes a function that computes products of two dtypes, for their code, and writes so much
    that nothing else stays in the L2 cache."""
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
    """The time that no version can beat by much: the larger of the arithmetic's and the memory's
    time at this chip's best rates."""
    return max(flop / PEAK_FLOPS, num_bytes / PEAK_BYTES)
