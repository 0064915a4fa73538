"""How far a run's times can be trusted: how much repeats differ, and who else uses the host."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles

HOST_TIMES = Path("/proc/stat")  # its first line has the ticks of all cores together, by state
IDLE_STATES = slice(3, 5)  # idle, and waiting for input or output
NUM_STATES = 8  # the states after these are counted in other states, too
LOOK_SECONDS = 0.2
BUSY_CORES = 0.25  # more of other programs than this makes the run's times longer


def spread_of(times: Sequence[float]) -> float:
    """The range of the middle half of the repeats, as a fraction of their median."""
    first, middle, third = quantiles(times, n=4, method="inclusive")
    return (third - first) / middle


def sum_up_spreads(spreads: Sequence[float]) -> dict[str, float]:
    return {"median": median(spreads), "worst": max(spreads)}


def describe_spreads(summary: dict[str, float]) -> str:
    return (
        f"spread: the middle half of a time's repeats covers {summary['median']:.1%} of the time, "
        f"at most {summary['worst']:.1%}"
    )


def stay(_: int) -> None:
    """What visiting_cores gives, for a thread that stays where it is."""


@contextmanager
def visiting_cores(rounds: int) -> Iterator[Callable[[int], None]]:
    """Gives a function that moves this thread to the next core in time for round i of `rounds`, so
    that each core has its share of neighbouring rounds. A virtual machine's cores differ by a half
    from moment to moment, with what others do beside them, and the fastest round tells of a core
    that was left alone. Afterwards the thread is where it was; where cores cannot be chosen, it
    stays there."""
    if not hasattr(os, "sched_setaffinity"):
        yield stay
        return
    before = os.sched_getaffinity(0)
    cores = sorted(before)
    try:
        yield lambda index: os.sched_setaffinity(0, {cores[index * len(cores) // rounds]})
    finally:
        os.sched_setaffinity(0, before)


def count_busy_cores(seconds: float = LOOK_SECONDS) -> float | None:
    """Cores that other programs keep busy while this one sleeps; None where nothing tells."""
    before = read_ticks()
    time.sleep(seconds)
    after = read_ticks()
    if before is None or after is None:
        return None
    ticks = [end - start for start, end in zip(before, after, strict=True)]
    busy = 1 - sum(ticks[IDLE_STATES]) / max(sum(ticks), 1)
    return max(busy, 0.0) * (os.cpu_count() or 1)


def read_ticks() -> list[int] | None:
    try:
        line = HOST_TIMES.read_text(encoding="ascii").partition("\n")[0]
    except OSError:
        return None
    return [int(word) for word in line.split()[1 : 1 + NUM_STATES]]


def describe_host(busy_cores: float | None) -> str:
    if busy_cores is None:
        return "nothing here tells how busy it is"
    text = f"other programs keep {busy_cores:.1f} of {os.cpu_count()} cores busy"
    return text + (": WARNING, times will be too long" if busy_cores > BUSY_CORES else "")
