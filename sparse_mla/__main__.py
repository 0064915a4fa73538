"""`python -m sparse_mla info | demo | bench`."""

from __future__ import annotations

import argparse
import os
import sys

import sparse_mla
from sparse_mla import _info
from sparse_mla._bench import run as bench
from sparse_mla._demo import run as demo


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m sparse_mla", description=__doc__)
    version = f"sparse_mla {sparse_mla.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", required=True)
    _info.add_arguments(commands.add_parser("info", help="version, kernels, frameworks found"))
    demo.add_arguments(commands.add_parser("demo", help="continuous batching over a real text"))
    bench.add_arguments(commands.add_parser("bench", help="the benchmark tables"))
    options = parser.parse_args()
    run = {"info": _info.run, "demo": demo.run, "bench": bench.run}[options.command]
    try:
        status = run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `| head` closed the pipe; the interpreter must not write to it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
