"""fp8_linear on a CUDA device, at the size of DeepSeek V3's absorbed query matrix, and
scaled_quantize, beside a copy by PyTorch. Calls rotate over inputs that the L2 cache does not hold,
and are measured once more alone, after a flush."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sparse_mla
from bench.common.rows import Bench
from bench.common.timing import Table
from bench.cuda.timing import DEVICE, PEAK_BYTES, PEAK_FLOPS, Array, interleave, torch
from bench.tables.memory import make_copy

INNER, OUTER = 1536, 65536
TOKENS, QUICK_TOKENS = (1, 16, 64, 512), (1, 64)
# scheme -> input group, weight group in the orientation [out, in]
SCHEMES = {
    "block": ((1, 128), (128, 128)),
    "token_channel": ((1, -1), (1, -1)),
    "token_tensor": ((1, -1), (-1, -1)),
    "tensor": ((-1, -1), (-1, -1)),
}
QUANTIZED = 8192, 7168  # x of scaled_quantize
GROUPS = (1, 128), (1, -1), (128, 128), (-1, 1), (-1, -1)
NUM_CALLS = 3  # over inputs of their own
ROUNDS = 4  # a graph repeats the calls, because its start takes as long as a fifth of a call
NUM_JUDGED = 256  # outputs
FINE, COARSE = 2.0**-16, 2.0**-8  # shares of the sum of magnitudes; COARSE: FP8 tensor cores
MOST_EXACT_TOKENS = 64  # csrc/cuda/projection/projection_e4m3.cuh


@dataclass
class Row:
    """A call over each of its inputs, and what it moves and computes."""

    name: str
    num_rows: int
    calls: list[Callable[[], object]]
    worst: float  # error over bound
    num_bytes: int
    flop: int = 0


def measure(bench: Bench) -> Table:
    title = f"FP8 linear layers, {INNER} → {OUTER}, and quantisation, beside a copy by PyTorch"
    columns = ["call", "rows", "error/bound", "MB", "µs", "TB/s", "of the copy", "floor µs"]
    columns += ["alone, cold µs"]
    table = Table(title, columns, [], [])
    copy, copy_bytes = make_copy()
    for scheme in SCHEMES:
        weights = [make_weight(scheme) for _ in range(NUM_CALLS)]
        for num_tokens in bench.choose(TOKENS, QUICK_TOKENS):
            add_row(bench, table, make_linear(scheme, weights, num_tokens), copy, copy_bytes)
    for group in GROUPS:
        add_row(bench, table, make_quantize(group), copy, copy_bytes)
    return table


def add_row(
    bench: Bench, table: Table, row: Row, copy: Callable[[], object], copy_bytes: int
) -> None:
    if not row.worst <= 1:
        table.failures.append(f"{row.name}, {row.num_rows} rows: {row.worst:.3g} × bound")
    sides = {"ours": row.calls * ROUNDS, "copy": [copy] * NUM_CALLS * ROUNDS}
    seconds = interleave(sides, bench.effort)
    alone = bench.time({"ours": row.calls[0]})["ours"]
    rate, copy_rate = row.num_bytes / seconds["ours"], copy_bytes / seconds["copy"]
    floor = max(row.num_bytes / PEAK_BYTES, row.flop / (2 * PEAK_FLOPS))
    text = [
        row.name,
        str(row.num_rows),
        f"{row.worst:.3g}",
        f"{row.num_bytes / 1e6:.1f}",
        f"{1e6 * seconds['ours']:.1f}",
        f"{rate / 1e12:.2f}",
        f"{100 * rate / copy_rate:.0f} %",
        f"{1e6 * floor:.1f}",
        f"{1e6 * alone:.1f}",
    ]
    record = {
        "call": row.name,
        "rows": row.num_rows,
        "error_over_bound": row.worst,
        "us": 1e6 * seconds["ours"],
        "floor_us": 1e6 * floor,
        "of_copy": rate / copy_rate,
        "alone_us": 1e6 * alone,
    }
    table.add(text, record)


# --- fp8_linear ----------------------------------------------------------------------------------


def make_weight(scheme: str) -> tuple[Array, Array]:
    weight = torch.randn(OUTER, INNER, device=DEVICE, dtype=torch.bfloat16) / INNER**0.5
    codes, descale = sparse_mla.scaled_quantize(weight, group=SCHEMES[scheme][1])
    return codes, descale


def make_linear(scheme: str, weights: list[tuple[Array, Array]], num_tokens: int) -> Row:
    group = SCHEMES[scheme][0]
    x = torch.randn(num_tokens, INNER, device=DEVICE).bfloat16()
    out = torch.empty(num_tokens, OUTER, device=DEVICE, dtype=torch.bfloat16)
    workspace = torch.empty(num_tokens * INNER * 2, device=DEVICE, dtype=torch.uint8)

    def call(weight: tuple[Array, Array]) -> Callable[[], object]:
        given: dict[str, Any] = {"input_group": group, "out": out, "workspace": workspace}
        return lambda: sparse_mla.fp8_linear(x, *weight, **given)

    call(weights[0])()
    is_coarse = torch.cuda.get_device_capability(DEVICE) == (9, 0)
    is_coarse = is_coarse and num_tokens > MOST_EXACT_TOKENS
    worst = judge(x, *weights[0], group, out, COARSE if is_coarse else FINE)
    codes, descale = weights[0]
    num_bytes = codes.nbytes + descale.nbytes + x.nbytes + out.nbytes
    flop = 2 * num_tokens * INNER * OUTER
    calls = [call(weight) for weight in weights]
    return Row(f"fp8_linear, {scheme}", num_tokens, calls, worst, num_bytes, flop)


def widen(codes: Array, descale: Array) -> Array:
    """Values times their scales, in fp64."""
    for axis, size in enumerate(codes.shape):
        if descale.shape[axis] not in (1, size):
            descale = descale.repeat_interleave(-(-size // descale.shape[axis]), axis)
    return codes.double() * descale.double()


def judge(
    x: Array, codes: Array, descale: Array, group: tuple[int, int], out: Array, unit: float
) -> float:
    """The largest error of some outputs, as a fraction of its bound."""
    places = torch.randint(OUTER, (NUM_JUDGED,), device=DEVICE)
    places[-1] = OUTER - 1
    a = widen(*sparse_mla.scaled_quantize(x, group=group))
    scales = descale if len(descale) == 1 else descale[places * len(descale) // OUTER]
    w = widen(codes[places], scales).T
    want = a @ w
    bound = COARSE * want.abs() + unit * (a.abs() @ w.abs())
    return float(((out[:, places].double() - want).abs() / bound).max())


# --- scaled_quantize -----------------------------------------------------------------------------


def make_quantize(group: tuple[int, int]) -> Row:
    inputs = [
        torch.randn(*QUANTIZED, device=DEVICE, dtype=torch.bfloat16) for _ in range(NUM_CALLS)
    ]
    out, descale = sparse_mla.scaled_quantize(inputs[0], group=group)
    want, want_descale = sparse_mla.scaled_quantize(inputs[0].cpu(), group=group)
    is_right = torch.equal(out.cpu().view(torch.uint8), want.view(torch.uint8))
    is_right = is_right and torch.equal(descale.cpu(), want_descale)

    def call(x: Array) -> Callable[[], object]:
        given: dict[str, Any] = {"group": group, "out": out, "descale": descale}
        return lambda: sparse_mla.scaled_quantize(x, **given)

    passes = 2 if group == (-1, -1) else 1  # over x, which no cache holds
    num_bytes = passes * inputs[0].nbytes + out.nbytes + descale.nbytes
    name = f"scaled_quantize, {group}" + (", read twice" if passes == 2 else "")
    worst = 0.0 if is_right else float("inf")
    return Row(name, QUANTIZED[0], [call(x) for x in inputs], worst, num_bytes)
