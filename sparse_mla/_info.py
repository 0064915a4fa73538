"""`python -m sparse_mla info` prints what this build is and what it found on this machine."""

from __future__ import annotations

import argparse
import json
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


# The keys of `info --json` -> their values. New releases add keys; they rename and remove none.
KEYS = {
    "version": "of this package",
    "python": "version, system, machine",
    "backends": "the devices that this build has code for",
    "build": "compiler, flags, cuda, cuda_archs and versions, as in build_info()",
    "cpu": "name, instruction_sets",
    "gpu": "names of the driver's GPUs; archs: the kernels' architectures that they can run",
    "openmp": "version (0: not in this build), threads",
    "frameworks": "name -> version, or null where it is not installed",
    "kernels": "the rows of kernels(), first match first",
}
PLAN_KEYS = {
    "num_tokens, num_heads, topk": "the numbers after --plan",
    "plans": "device, kv_format, head_dim, workspace_bytes, runs: [{tokens, splits, kernel}, …], "
    "lack: what the device's best kernel lacks for the call, or null",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--plan",
        nargs=3,
        type=int,
        metavar=("TOKENS", "HEADS", "TOPK"),
        help="how sparse_attention would run such a call: kernel, splits, workspace",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        f"the object's keys:\n{listed(KEYS)}\n\nits keys with --plan:\n{listed(PLAN_KEYS)}"
    )


def listed(keys: dict[str, str]) -> str:
    return "\n".join(f"  {line}" for line in aligned(list(keys.items())))


def run(options: argparse.Namespace) -> int:
    try:
        found = find_facts() if options.plan is None else find_plans(*options.plan)
    except ValueError as error:
        print(f"info: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(found, indent=1))
    elif options.plan is None:
        print_facts(found)
    else:
        print_plans(found)
    return 0


def find_facts() -> dict[str, Any]:
    """A value for each of KEYS."""
    build, kernels = sparse_mla.build_info(), sparse_mla.kernels()
    sets, openmp = build.pop("cpu_features"), build.pop("openmp")
    del build["version"]  # ours, a second time
    archs = [row["arch"] for row in kernels if row["device"] == "cuda" and row["available"]]
    return {
        "version": sparse_mla.__version__,
        "python": {
            "version": platform.python_version(),
            "system": platform.system(),
            "machine": platform.machine(),
        },
        "backends": sorted({row["device"] for row in kernels}),
        "build": build,
        "cpu": {"name": cpu_name(), "instruction_sets": sets},
        "gpu": {"names": gpu_names(), "archs": list(dict.fromkeys(archs))},
        "openmp": {"version": openmp, "threads": num_threads() if openmp else 1},
        "frameworks": {name: find(name) for name in FRAMEWORKS},
        "kernels": kernels,
    }


def print_facts(facts: dict[str, Any]) -> None:
    python, cpu, kernels = facts["python"], facts["cpu"], facts["kernels"]
    frameworks = (f"{name} {version or '–'}" for name, version in facts["frameworks"].items())
    print(f"sparse_mla {facts['version']}")
    print(f"  python      {python['version']}, {python['system']} {python['machine']}")
    print(f"  backends    {', '.join(facts['backends'])}")
    for key, value in facts["build"].items():
        print(f"  {key:11} {value}")
    print(f"  cpu         {cpu['name']}: {', '.join(cpu['instruction_sets'])}")
    if "cuda" in facts["backends"]:
        print(f"  gpu         {gpu_text(**facts['gpu'])}")
    print(f"  openmp      {openmp_text(**facts['openmp'])}")
    print(f"  frameworks  {', '.join(frameworks)}")
    print("\nkernels of sparse_attention, first match first (* = taken on this machine)")
    columns = ("device", "arch", "kv_format", "heads", "name")
    rows = [columns, *(tuple(str(row[column]) for column in columns) for row in kernels)]
    marks = [" ", *("*" if r["selected"] else " " if r["available"] else "-" for r in kernels)]
    for mark, line in zip(marks, aligned(rows), strict=True):
        print(f"{mark} {line}".rstrip())
    if "-" in marks:
        print("- = this machine cannot run it")


def aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """A line for each row of a table, with columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def find_plans(num_tokens: int, num_heads: int, topk: int) -> dict[str, Any]:
    """A value for each of PLAN_KEYS. A call may run in two parts."""
    devices = sorted({row["device"] for row in sparse_mla.kernels() if row["available"]})
    plans = [
        {"device": device, **plan, "runs": [named_run(*run) for run in plan["runs"]]}
        for device in devices
        for plan in ops._attention_plans(num_tokens, num_heads, topk, device=device)
    ]
    return {"num_tokens": num_tokens, "num_heads": num_heads, "topk": topk, "plans": plans}


def named_run(tokens: int, splits: int, kernel: str) -> dict[str, Any]:
    return {"tokens": tokens, "splits": splits, "kernel": kernel}


def print_plans(found: dict[str, Any]) -> None:
    """One line for each run of each plan."""
    heading = ("device", "kv_format", "tokens", "splits", "kernel", "workspace")
    rows: list[tuple[str, ...]] = [heading]
    rows += [
        (
            plan["device"],
            f"{plan['kv_format']} of {plan['head_dim']} values",
            str(run["tokens"]),
            str(run["splits"]),
            run["kernel"] + (f" ({plan['lack']})" if plan["lack"] else ""),
            f"{plan['workspace_bytes']} bytes",
        )
        for plan in found["plans"]
        for run in plan["runs"]
    ]
    print(
        f"sparse_attention of {found['num_tokens']} tokens, {found['num_heads']} heads, "
        f"{found['topk']} indices each"
    )
    print("\n".join(aligned(rows)))


def find(name: str) -> str | None:
    """A framework's version, or None; found without importing the framework."""
    for wheel in WHEELS.get(name, (name,)):
        try:
            return metadata.version(wheel)
        except metadata.PackageNotFoundError:
            pass
    return None


def cpu_name() -> str:
    """Linux's name of the processor, or the architecture where Linux gives no name."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = (line.split(":", 1)[1] for line in lines if line.startswith("model name"))
            return next(names, platform.machine()).strip()
    except OSError:
        return platform.machine()


def gpu_text(names: list[str], archs: list[str]) -> str:
    """The driver's names of the GPUs, and the architectures of the kernels that they can run."""
    text = ", ".join(names)
    if not archs:
        return f"none that this build can use{f': {text}' if text else ''}"
    return f"{text or 'unnamed'}: {', '.join(archs)}"


def what_cuda_lacks() -> str:
    """Why nothing can run on CUDA here; empty where something can."""
    rows = [row for row in sparse_mla.kernels() if row["device"] == "cuda"]
    if not rows:
        return f"no CUDA in this build: {sparse_mla.build_info()['cuda']}"
    if not any(row["available"] for row in rows):
        return "there is no GPU here that this build can use: --device cpu"
    return ""


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


def openmp_text(version: int, threads: int) -> str:
    return f"{version}, {threads} threads" if version else "not in this build: one thread"
