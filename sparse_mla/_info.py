"""`python -m sparse_mla info` prints what this build is and what it found on this machine."""

from __future__ import annotations

import argparse
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import sparse_mla

# CuPy's wheels are named after the CUDA version that they are for.
WHEELS = {"cupy": ("cupy", "cupy-cuda13x", "cupy-cuda12x")}
DRIVER_FOLDER = Path("/proc/driver/nvidia/gpus")
FRAMEWORKS = ("numpy", "ml_dtypes", "torch", "jax", "cupy", "transformers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds nothing: `info` has no options yet."""


def run(options: argparse.Namespace) -> int:
    build = sparse_mla.build_info()
    kernels = sparse_mla.kernels()
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
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    for mark, row in zip(marks, rows, strict=True):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(f"{mark} {'  '.join(cells)}".rstrip())
    if "-" in marks:
        print("- = this machine cannot run it")
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
