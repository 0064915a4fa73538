"""paged.attention on a CUDA device: verification beside a decode, a tree beside a chain, and a
shared prefix beside the same call without one. The L2 cache is flushed before each replay."""

from __future__ import annotations

from bench.common.paged_layer import COLUMNS, Make, Run, add_rows, make_pairs
from bench.common.timing import Table
from bench.cuda.timing import DEVICE, CudaEffort, interleave_flushed, torch

VERIFY, SHARED = (64, 4096), (64, 8192, 256)
QUICK = (8, 4096), (8, 8192, 256)


def measure_paged_layer(effort: CudaEffort) -> Table:
    table = Table("A paged layer, H 32/8, D 128, bf16, L2 flushed", COLUMNS, [], [])
    make = Make(
        DEVICE,
        randn=lambda *shape: torch.randn(*shape, dtype=torch.bfloat16, device=DEVICE),
        put=lambda x: torch.from_numpy(x).to(DEVICE),
        to_numpy=lambda x: x.double().cpu().numpy(),
    )

    def measure_pair(ours: Run, beside: Run) -> list[float]:
        return [*interleave_flushed({"ours": [ours], "beside": [beside]}, effort).values()]

    shapes = QUICK if effort.quick else (VERIFY, SHARED)
    add_rows(table, make_pairs(make, *shapes), measure_pair)
    return table
