"""Builds of paged steps on a CUDA device, beside chains of PyTorch operators that make the same
metadata: the time of the host, which waits for nothing, and that of the device."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bench.common.noise import spread_of
from bench.common.paged_steps import (
    DECODE,
    KINDS,
    PAGE_SIZE,
    Batch,
    Kind,
    find_differences,
    make_build,
    make_replay,
)
from bench.common.timing import Table
from bench.cuda.calls import BUILDS, host_seconds
from bench.cuda.timing import (
    DEVICE,
    Array,
    CudaEffort,
    describe_error,
    synchronize,
    torch,
)

DECODES = ((256, 512), (256, 32_768))  # requests, tokens of each
STEPS = (64, 4096)
QUEUED = 8  # calls that the host starts while the device is busy with something else
BUSY_CYCLES = 4_000_000  # longer than the host needs for them
SIDES = {"ours": "build", "replay": "replay", "PyTorch": "PyTorch"}


def measure_paged_steps(effort: CudaEffort) -> Table:
    columns = ["step", "B × tokens", "page"]
    columns += [f"{name}: {where} µs" for name in SIDES.values() for where in ("host", "device")]
    table = Table("Metadata of a paged step", columns, [], [])
    for shape in DECODES[:1] if effort.quick else DECODES:
        add_row(table, DECODE, Batch(*shape, torch, DEVICE), effort)
    batch = Batch(*STEPS, torch, DEVICE)
    for kind in KINDS[1:]:
        try:
            add_row(table, kind, batch, effort)
        except Exception as error:  # the other modes go on
            table.failures.append(f"{kind.name}: {describe_error(error)}")
    return table


def add_row(table: Table, kind: Kind, batch: Batch, effort: CudaEffort) -> None:
    build, replay = make_build(kind, batch), make_replay(kind, batch)
    shape = f"{batch.num_reqs} × {batch.length}"
    wrong = find_differences(build(), kind.chain(batch), to_numpy)
    if replay is not None:
        wrong += find_differences(replay(), kind.chain(batch), to_numpy)
    table.failures += [f"{kind.name}, {shape}: wrong {name}" for name in wrong]
    sides: dict[str, Callable[[], object]] = {"ours": build, "PyTorch": lambda: kind.chain(batch)}
    sides |= {"replay": replay} if replay else {}
    on_host, on_device = host_seconds(sides, BUILDS, effort), device_seconds(sides, effort)
    row = [kind.name, shape, str(PAGE_SIZE)]
    record: dict[str, object] = {"step": kind.name, "B × tokens": shape}
    for side in SIDES:
        if side not in sides:
            row += ["–", "–"]
            continue
        times = 1e6 * on_host[side], 1e6 * on_device[side]
        row += [f"{us:.1f}" for us in times]
        record |= {f"{side}_host_us": times[0], f"{side}_device_us": times[1]}
    table.add(row, record | {"right": not wrong})


def to_numpy(array: Array) -> np.ndarray:
    tensor = array if isinstance(array, torch.Tensor) else torch.from_dlpack(array)
    return tensor.cpu().numpy()


def device_seconds(sides: dict[str, Callable[[], object]], effort: CudaEffort) -> dict[str, float]:
    """Seconds per call on the device, which has all calls in its queue before the first begins. The
    sides are measured in turn."""
    samples: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(effort.rounds):
        for name, side in sides.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(BUSY_CYCLES)
            start.record()
            for _ in range(QUEUED):
                side()
            end.record()
            synchronize()
            samples[name].append(start.elapsed_time(end) / 1e3 / QUEUED)
    effort.spreads += map(spread_of, samples.values())
    return {name: effort.pick(times) for name, times in samples.items()}
