"""grouped_output_projection on a CUDA device beside PyTorch's batched product of bf16 (cuBLAS)."""

from __future__ import annotations

from bench.common.composition import from_numpy
from bench.common.timing import Table
from bench.cpu.projection import (
    COARSE,
    FINE,
    GROUPS,
    INNER,
    KINDS,
    OUTER,
    Inputs,
    make_peer,
)
from bench.cuda.timing import (
    DEVICE,
    PEAK_BYTES,
    PEAK_FLOPS,
    CudaEffort,
    interleave_flushed,
    torch,
)
from sparse_mla._judge import BF16

TOKENS, QUICK_TOKENS = (1, 16, 64, 128, 512, 2048, 8192), (1, 64, 2048)
MOST_EXACT_TOKENS = 64  # csrc/cuda/projection/projection_e4m3.cuh


def measure_projections(effort: CudaEffort) -> Table:
    title = f"Grouped output projection, {GROUPS} x ({INNER} → {OUTER}), cold"
    columns = ["values", "T", "error/bound", "µs", "TFLOP/s", "TB/s", "floor µs"]
    columns += ["PyTorch bf16 µs", "TFLOP/s", "ratio"]
    table = Table(title, columns, [], [])
    is_hopper = torch.cuda.get_device_capability(DEVICE) == (9, 0)
    for kind in KINDS:
        for num_tokens in QUICK_TOKENS if effort.quick else TOKENS:
            inputs = Inputs(kind, num_tokens, lambda x: from_numpy(x).to(DEVICE))
            inputs.call()
            is_coarse = kind == "e4m3" and is_hopper and num_tokens > MOST_EXACT_TOKENS
            out = inputs.out.view(torch.int16).cpu().numpy().view(BF16)
            worst = inputs.judge(out, COARSE if is_coarse else FINE)
            if worst > 1:
                table.failures.append(f"{kind} T {num_tokens}: {worst:.3g} × bound")
            peer = make_peer(torch, *(from_numpy(x).to(DEVICE) for x in inputs.wide))
            peer()  # loads cuBLAS, which must not happen in a capture
            seconds = interleave_flushed({"ours": [inputs.call], "torch": [peer]}, effort)
            add_row(table, inputs, num_tokens, worst, seconds)
    return table


def add_row(
    table: Table, inputs: Inputs, num_tokens: int, worst: float, seconds: dict[str, float]
) -> None:
    peak = PEAK_FLOPS * (2 if inputs.kind == "e4m3" else 1)
    floor = max(inputs.flop() / peak, inputs.num_bytes() / PEAK_BYTES)
    ours, theirs = seconds["ours"], seconds["torch"]
    row = [
        inputs.kind,
        str(num_tokens),
        f"{worst:.3g}",
        f"{1e6 * ours:.1f}",
        f"{inputs.flop() / ours / 1e12:.0f}",
        f"{inputs.num_bytes() / ours / 1e12:.2f}",
        f"{1e6 * floor:.1f}",
        f"{1e6 * theirs:.1f}",
        f"{inputs.flop() / theirs / 1e12:.0f}",
        f"{theirs / ours:.2f}×",
    ]
    record = {
        "values": inputs.kind,
        "T": num_tokens,
        "error_over_bound": worst,
        "us": 1e6 * ours,
        "floor_us": 1e6 * floor,
        "torch_us": 1e6 * theirs,
    }
    table.add(row, record)
