"""The benchmark's command line: where it ran, then the tables."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import sparse_mla
from sparse_mla import _info
from sparse_mla._bench import attention, calls, memory
from sparse_mla._bench.timing import Effort, Table

TABLES: dict[str, Callable[[Effort, int], Table]] = {
    "attention": attention.measure,
    "bytes": memory.measure,
    "calls": calls.measure,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="fewer and shorter repeats")
    parser.add_argument("--best", action="store_true", help="the fastest repeat, not the median")
    parser.add_argument("--json", action="store_true", help="print numbers for programs to read")
    parser.add_argument("--only", choices=sorted(TABLES), help="one of the tables")
    parser.add_argument("--threads", type=int, default=2, help="of both sides (%(default)s)")


def run(options: argparse.Namespace) -> int:
    if os.environ.get("OMP_NUM_THREADS") != str(options.threads):
        restart(options.threads)
    effort = Effort.of(options.quick, options.best)
    where = describe(options)
    if not options.json:
        print("\n".join(f"- {key}: {value}" for key, value in where.items()))
    tables = []
    for name in [options.only] if options.only else TABLES:
        tables.append(TABLES[name](effort, options.threads))
        if not options.json:
            tables[-1].print()
    if options.json:
        print(json.dumps(where | {table.title: table.records for table in tables}, indent=1))
    return 0


def restart(num_threads: int) -> None:
    """OpenMP reads its environment when it is loaded, which has happened: start over."""
    os.environ["OMP_NUM_THREADS"] = str(num_threads)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "sparse_mla", *sys.argv[1:]])


def describe(options: argparse.Namespace) -> dict[str, str]:
    selected = [row["arch"] for row in sparse_mla.kernels() if row["selected"]]
    num_cores = len(os.sched_getaffinity(0))
    switches = [name for name in ("quick", "best", "json") if getattr(options, name)]
    switches += [f"only {options.only}"] if options.only else []
    command = ["python -m sparse_mla bench", *(f"--{name}" for name in switches)]
    return {
        "device": f"{_info.cpu_name()}, {num_cores} cores, {', '.join(selected)}",
        "date": datetime.date.today().isoformat(),
        "commit": find_commit(),
        "command": " ".join([*command, f"--threads {options.threads}"]),
        "with": ", ".join(f"{name} {_info.find(name)}" for name in ("numpy", "torch", "jax")),
    }


def find_commit() -> str:
    """The source tree's commit; the version where there is none."""
    root = Path(__file__).parents[2]
    git = ["git", "-C", str(root), "rev-parse", "--short", "HEAD"]
    try:
        if (root / "csrc").is_dir():
            return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        pass
    return f"version {sparse_mla.__version__}"
