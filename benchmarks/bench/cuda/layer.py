"""A DeepSeek V4 layer on a CUDA device, projections by PyTorch included: without streams beside the
main one and with them, and each of its parts. One call, L2 flushed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import sparse_mla
from bench.common.layer import RATIOS, Step, make_step, names_of, parts_of, width_of
from bench.common.timing import Table
from bench.cuda.timing import (
    DEVICE,
    Array,
    CudaEffort,
    describe_error,
    interleave_flushed,
    torch,
)

SHAPES = ((1, 4096), (1, 65536), (128, 4096), (128, 65536), (8192, 0))  # tokens, context
QUICK = SHAPES[:1]
STREAMS = (1, 2, 3)


def measure_layer(effort: CudaEffort) -> Table:
    columns = ["layer", "T", "context", "part", "µs", *(f"{n} streams" for n in STREAMS), "÷"]
    table = Table("A DeepSeek V4 layer (V4-Flash) and its parts, L2 flushed, µs", columns, [], [])
    for num_tokens, context in QUICK if effort.quick else SHAPES:
        for ratio, name in RATIOS.items():
            try:
                step = make_step(
                    ratio, num_tokens, context, make_array, DEVICE, make_projections(ratio)
                )
                add_rows(table, effort, step, {"layer": name, "T": num_tokens, "context": context})
            except Exception as error:  # the other layers go on
                text = describe_error(error)
                table.failures.append(f"{name}, T {num_tokens}, context {context}: {text}")
    return table


def add_rows(table: Table, effort: CudaEffort, step: Step, labels: dict[str, object]) -> None:
    want = step.run()
    sides: dict[str, list[Callable[[], object]]] = {"one": [step.run]}
    for count in STREAMS:
        call = partial(step.run, streams=[torch.cuda.Stream() for _ in range(count)])
        if not torch.equal(call(), want):
            table.failures.append(f"{labels}: {count} streams change the result")
        sides[str(count)] = [call]
    seconds = interleave_flushed(sides, effort)
    with_streams = [seconds[str(count)] for count in STREAMS]
    best = min(with_streams) / seconds["one"]
    cells = [f"{1e6 * x:.1f}" for x in (seconds["one"], *with_streams)]
    first = [str(x) for x in labels.values()]
    record = labels | {"us": 1e6 * seconds["one"], "us_streams": [1e6 * x for x in with_streams]}
    table.add([*first, "all", *cells, f"{best:.2f}"], record)
    parts = parts_of(step)
    names = [f"{i} {name}" for i, (name, _) in enumerate(parts)]
    calls = {name: [call] for name, (_, call) in zip(names, parts, strict=True)}
    for name, spent in interleave_flushed(calls, effort).items():
        part = name.split(" ", 1)[1]
        row = [*first, part, f"{1e6 * spent:.1f}", *[""] * len(STREAMS), ""]
        table.add(row, labels | {"part": part, "us": 1e6 * spent})


def make_array(kind: str, shape: tuple[int, ...], dtype: str) -> Array:
    if kind == "zeros":
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=DEVICE)
    if kind == "angles":
        return torch.from_numpy(sparse_mla.rope_table(shape[0], fp32_angles=True)).to(DEVICE)
    if dtype == "uint8":
        return torch.randint(0, 0x50, shape, dtype=torch.uint8, device=DEVICE)  # e4m3, no NaN
    return torch.randn(shape, device=DEVICE).to(getattr(torch, dtype))


def make_projections(ratio: int) -> dict[str, Callable[..., Any]]:
    """Products by PyTorch. The compressors' are bf16: the compressor takes them, too."""

    def make(name: str) -> Callable[..., Any]:
        rows, columns = width_of(name, ratio)
        weight = torch.randn(rows, columns, device=DEVICE).bfloat16() / rows**0.5
        return lambda x: torch.mm(x, weight)

    return {name: make(name) for name in names_of(ratio)}
