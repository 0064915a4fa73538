"""`python -m sparse_mla info` prints what this build is and what it found on this machine."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import sparse_mla
from sparse_mla import ops

# CuPy's wheels are named after the CUDA version that they are for.
WHEELS = {"cupy": ("cupy", "cupy-cuda13x", "cupy-cuda12x")}
DRIVER_FOLDER = Path("/proc/driver/nvidia/gpus")
FRAMEWORKS = ("numpy", "ml_dtypes", "torch", "jax", "cupy", "transformers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--plan",
        nargs=3,
        type=int,
        metavar=("TOKENS", "HEADS", "TOPK"),
        help="how sparse_attention would run such a call: kernel, splits, workspace",
    )


def run(options: argparse.Namespace) -> int:
    kernels = sparse_mla.kernels()
    if options.plan is not None:
        return print_plans(kernels, *options.plan)
    build = sparse_mla.build_info()
    devices = sorted({row["device"] for row in kernels})
    print(f"sparse_mla {sparse_mla.__version__}")
    print(f"  python      {platform.python_version()}, {platform.system()} {platform.machine()}")
    print(f"  backends    {', '.join(devices)}")
    for key, value in build.items():
        if key not in ("version", "cpu_features", "openmp"):
            print(f"  {key:11} {value}")
    print(f"  cpu         {cpu_name()}: {', '.join(build['cpu_features'])}")
    if "cuda" in devices:
        print(f"  gpu         {gpu_text(kernels)}")
    print(f"  openmp      {openmp_text(build['openmp'])}")
    print(f"  frameworks  {', '.join(f'{name} {find(name)}' for name in FRAMEWORKS)}")
    print("\nkernels of sparse_attention, first match first (* = taken on this machine)")
    columns = ("device", "arch", "kv_format", "heads", "name")
    rows = [columns, *(tuple(str(row[column]) for column in columns) for row in kernels)]
    marks = [" ", *("*" if r["selected"] else " " if r["available"] else "-" for r in kernels)]
    for mark, line in zip(marks, aligned(rows), strict=True):
        print(f"{mark} {line}".rstrip())
    if "-" in marks:
        print("- = this machine cannot run it")
    return 0


def aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """A line for each row of a table, with columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def print_plans(kernels: list[dict[str, Any]], num_tokens: int, num_heads: int, topk: int) -> int:
    """One line for each run of each plan: a call may run in two parts."""
    heading = ("device", "kv_format", "tokens", "splits", "kernel", "workspace")
    rows: list[tuple[str, ...]] = [heading]
    for device in sorted({row["device"] for row in kernels if row["available"]}):
        try:
            plans = ops._attention_plans(num_tokens, num_heads, topk, device=device)
        except ValueError as error:
            print(f"info: {error}", file=sys.stderr)
            return 2
        for plan in plans:
            rows += [
                (
                    device,
                    f"{plan['kv_format']} of {plan['head_dim']} values",
                    str(tokens),
                    str(splits),
                    str(name),
                    f"{plan['workspace_bytes']} bytes",
                )
                for tokens, splits, name in plan["runs"]
            ]
    print(f"sparse_attention of {num_tokens} tokens, {num_heads} heads, {topk} indices each")
    print("\n".join(aligned(rows)))
    return 0


def find(name: str) -> str:
    """A framework's version, found without importing the framework."""
    for wheel in WHEELS.get(name, (name,)):
        try:
            return metadata.version(wheel)
        except metadata.PackageNotFoundError:
            pass
    return "–"


def cpu_name() -> str:
    """Linux's name of the processor, or the architecture where Linux gives no name."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = (line.split(":", 1)[1] for line in lines if line.startswith("model name"))
            return next(names, platform.machine()).strip()
    except OSError:
        return platform.machine()


def gpu_text(kernels: list[dict[str, Any]]) -> str:
    """The driver's names of the GPUs, and the architectures of the kernels that they can run."""
    runnable = [row["arch"] for row in kernels if row["device"] == "cuda" and row["available"]]
    names = ", ".join(gpu_names())
    if not runnable:
        return f"none that this build can use{f': {names}' if names else ''}"
    return f"{names or 'unnamed'}: {', '.join(dict.fromkeys(runnable))}"


def gpu_names(folder: Path = DRIVER_FOLDER) -> list[str]:
    """The name of every GPU that NVIDIA's driver lists; empty where the driver lists none."""
    names = []
    for path in sorted(folder.glob("*/information")):
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        names += [line.split(":", 1)[1].strip() for line in lines if line.startswith("Model:")]
    return names


def num_threads() -> int:
    """Threads that OpenMP starts: OMP_NUM_THREADS, else the processors this process may use."""
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return int(wanted) if wanted.isdecimal() else len(os.sched_getaffinity(0))


def openmp_text(version: int) -> str:
    return f"{version}, {num_threads()} threads" if version else "not in this build: one thread"
