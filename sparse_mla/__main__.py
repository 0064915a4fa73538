"""`python -m sparse_mla info | demo | bench`."""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import sparse_mla
from sparse_mla import _info
from sparse_mla._demo import run as demo

PACKAGE = Path(__file__).resolve().parent


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m sparse_mla", description=__doc__)
    version = f"sparse_mla {sparse_mla.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", required=True)
    _info.add_arguments(commands.add_parser("info", help="version, kernels, frameworks found"))
    demo.add_arguments(commands.add_parser("demo", help="continuous batching over a real text"))
    tables = commands.add_parser("bench", help="the benchmark tables, from a source tree")
    runs = {"info": _info.run, "demo": demo.run}
    if sys.argv[1:2] == ["bench"]:
        bench = import_bench(parser)
        bench.add_arguments(tables)
        runs["bench"] = bench.run
    options = parser.parse_args()
    run = runs[options.command]
    try:
        status = run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `| head` closed the pipe; the interpreter must not write to it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def import_bench(parser: argparse.ArgumentParser) -> ModuleType:
    """The benchmarks' command line. It is in the source tree alone, beside the package; a variant
    of the package is in build/<variant>/python of that tree."""
    root = PACKAGE.parent
    if root.match("build/*/python"):
        root = root.parents[2]
    folder = root / "benchmarks"
    if not (folder / "bench").is_dir():
        where = "benchmarks/bench of the source tree, where `make bench` runs them"
        parser.exit(2, f"bench: the benchmarks are not installed: they are in {where}\n")
    sys.path.insert(0, str(folder))
    return import_module("bench.run")


if __name__ == "__main__":
    raise SystemExit(main())
