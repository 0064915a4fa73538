"""top_k_per_row on a CUDA device beside PyTorch's topk, with the L2 cache flushed. The last columns
compare a kind of logits with random ones: no kind may take more than 1.3 times as long."""

from __future__ import annotations

from bench.common.composition import from_numpy
from bench.common.timing import Table
from bench.cpu.top_k import KINDS, Inputs
from bench.cuda.timing import (
    DEVICE,
    PEAK_BYTES,
    CudaEffort,
    interleave_flushed,
    torch,
)

SHAPES = (  # rows, columns, k
    (64, 32768, 512),
    (64, 32768, 2048),
    (64, 131072, 2048),
    (1, 131072, 2048),
    (8, 65536, 512),
    (4, 128000, 2048),
    (1, 1 << 20, 2048),
    (4096, 32768, 2048),
)
QUICK_SHAPES = SHAPES[1:4]


def measure_top_k(effort: CudaEffort) -> Table:
    columns = [
        "rows",
        "k",
        "logits",
        "chosen",
        "µs",
        "floor µs",
        "of random",
        "PyTorch µs",
        "ratio",
    ]
    table = Table("Top-k of fp32 rows, cold", columns, [], [])
    for shape in QUICK_SHAPES if effort.quick else SHAPES:
        random_seconds = 0.0
        for kind in ("random", "constant") if effort.quick else KINDS:
            inputs = Inputs(
                kind, shape, lambda x: from_numpy(x).to(DEVICE), lambda x, n: x.repeat(n, 1)
            )
            inputs.call()
            is_right = inputs.is_right(inputs.out.cpu().numpy())
            if not is_right:
                table.failures.append(f"{shape} {kind}: wrong columns")

            def topk(inputs: Inputs = inputs) -> object:
                return torch.topk(inputs.logits, inputs.k, sorted=False)

            seconds = interleave_flushed({"ours": [inputs.call], "torch": [topk]}, effort)
            random_seconds = random_seconds or seconds["ours"]
            add_row(
                table,
                shape,
                kind,
                is_right=is_right,
                num_bytes=inputs.num_bytes,
                seconds=seconds,
                random_seconds=random_seconds,
            )
    return table


def add_row(
    table: Table,
    shape: tuple[int, int, int],
    kind: str,
    *,
    is_right: bool,
    num_bytes: int,
    seconds: dict[str, float],
    random_seconds: float,
) -> None:
    floor = num_bytes / PEAK_BYTES
    ours, theirs = seconds["ours"], seconds["torch"]
    row = [
        f"{shape[0]} × {shape[1]}",
        str(shape[2]),
        kind,
        "right" if is_right else "FAIL",
        f"{1e6 * ours:.1f}",
        f"{1e6 * floor:.1f}",
        f"{ours / random_seconds:.2f}×",
        f"{1e6 * theirs:.1f}",
        f"{theirs / ours:.2f}×",
    ]
    record = {
        "rows": shape[0],
        "columns": shape[1],
        "k": shape[2],
        "logits": kind,
        "right": is_right,
        "us": 1e6 * ours,
        "floor_us": 1e6 * floor,
        "torch_us": 1e6 * theirs,
    }
    table.add(row, record)
