"""The benchmark's command line, which prints where it runs and then the tables."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import sparse_mla
from bench.common import noise, plot
from bench.common.summary import summarise
from bench.common.timing import Effort, Table, describe_error, interleave
from sparse_mla import _info

# The tables in their order -> the module that measures them, which may import PyTorch. Those in
# bench/tables are of both devices.
TABLES = {
    "attention": "cpu.attention",
    "decode": "cuda.decode",
    "prefill": "cuda.prefill",
    "inputs": "cuda.sent",
    "v4": "tables.v4",
    "dense": "tables.dense",
    "varlen": "tables.varlen",
    "paged": "tables.paged",
    "paged_layer": "tables.paged_layer",
    "paged_steps": "tables.paged_steps",
    "dense_prefill": "cuda.dense_prefill",
    "prefill_layer": "cuda.prefill_layer",
    "layer": "tables.layer",
    "bytes": "tables.memory",
    "projection": "tables.projection",
    "linear": "cuda.linear",
    "logits": "cuda.logits",
    "top_k": "tables.top_k",
    "lightning": "cuda.lightning",
    "helpers": "cuda.helpers",
    "calls": "tables.calls",
    "subnormal": "cpu.subnormal",
    "sizes": "cpu.sizes",
}
CPU_TABLES = {name: module for name, module in TABLES.items() if not module.startswith("cuda.")}
CUDA_TABLES = {name: module for name, module in TABLES.items() if not module.startswith("cpu.")}
BY_NAME_ONLY = ("subnormal", "sizes")  # about behaviour, not about the machine: measured on request
WITHOUT_RATES = (
    "paged_layer",
    "paged_steps",
    "layer",
    "top_k",
    "calls",
    "subnormal",
    "sizes",
)  # tables of the CPU that --plot cannot show
CUDA_GROUPS = {
    "attention": ("decode", "prefill", "inputs"),
    "projection": ("projection", "linear"),
}
ROW_OPTIONS = ("cache", "heads", "batches", "kinds")  # options of --only inputs
STDOUT = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], help="cuda, where this build and PyTorch have it"
    )
    parser.add_argument("--quick", action="store_true", help="fewer rows and repeats")
    parser.add_argument("--best", action="store_true", help="the fastest repeat, not the median")
    parser.add_argument(
        "--json",
        nargs="?",
        const=STDOUT,
        metavar="FILE",
        help="numbers for programs to read, into FILE beside the tables or printed instead of them",
    )
    parser.add_argument(
        "--only",
        choices=sorted(TABLES),
        help="one of the tables (attention is decode, prefill and inputs on cuda)",
    )
    parser.add_argument(
        "--threads", type=int, default=2, help="of both sides, on the CPU (%(default)s)"
    )
    parser.add_argument("--plot", metavar="FILE.svg", help="time against floor (cuda); rates (cpu)")
    parser.add_argument(
        "--from", dest="source", metavar="FILE", help="sum up this run's --json, measure nothing"
    )
    rows = parser.add_argument_group("rows of --only inputs (cuda)")
    formats = "fp8_ds_mla, bfloat16, bfloat16_512"
    rows.add_argument("--kv-format", "--cache", dest="cache", metavar="A,B", help=formats)
    rows.add_argument("--heads", metavar="A,B", help="numbers of heads, as 16,64")
    rows.add_argument("--batches", metavar="A,B", help="requests x tokens, as 8x1,128x2,1x1024")
    rows.add_argument("--kinds", metavar="A,B", help="inputs by their names in the table")


def run(options: argparse.Namespace) -> int:
    if options.plot:
        plot.check(options.plot)
    if options.source:
        return sum_up_earlier(options)
    if options.only != "inputs" and row_options(options):
        raise SystemExit(f"bench: --{row_options(options)[0]} needs --only inputs --device cuda")
    device = options.device or find_device()
    if device == "cpu":
        check_cpu(options)
        if os.environ.get("OMP_NUM_THREADS") != str(options.threads):
            restart(options.threads)
        where, tables = describe_cpu(options), measure_cpu(options)
    else:
        check_cuda()
        rows = find_rows(options)
        where, tables = describe_cuda(options), measure_cuda(options, rows)

    prints_tables = options.json != STDOUT
    if prints_tables:
        print("\n".join(f"- {key}: {value}" for key, value in where.items()), flush=True)
    results: dict[str, Any] = dict(where)
    failures: dict[str, list[str]] = {}
    spreads: dict[str, dict[str, float]] = {}
    results["failures"], results["spread"] = failures, spreads
    for table in tables:
        results[table.title] = table.records
        if table.spread:
            spreads[table.title] = table.spread
        if table.failures:
            failures[table.title] = table.failures
        if prints_tables:
            table.print()
        if options.json and prints_tables:  # after every table, in case the run is cut short
            write_json(options.json, results)
    if prints_tables:
        print_summary(results)
    if options.json == STDOUT:
        print(json.dumps(results, indent=1))
    if options.plot:
        plot.write(options.plot, results)
    if failures:
        print(f"\n{sum(map(len, failures.values()))} FAILED", file=sys.stderr)
    return 1 if failures else 0


def sum_up_earlier(options: argparse.Namespace) -> int:
    try:
        results = json.loads(Path(options.source).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SystemExit(f"bench: --from {options.source}: {error}") from None
    has_summary = print_summary(results)
    if options.plot:
        plot.write(options.plot, results)
    elif not has_summary:
        raise SystemExit(f"bench: --from {options.source}: no inputs to sum up; --plot FILE.svg?")
    return 0


def print_summary(results: dict[str, Any]) -> bool:
    """Prints the summary, and returns whether there was one."""
    table = summarise(results)
    if table is not None:
        table.print()
    return table is not None


def row_options(options: argparse.Namespace) -> list[str]:
    """The names of the row options that were given."""
    return [name for name in ROW_OPTIONS if getattr(options, name)]


def write_json(path: str, results: dict[str, Any]) -> None:
    text = json.dumps(results, indent=1, ensure_ascii=False)
    Path(path).write_text(text + "\n", encoding="utf-8")


# --- CPU -----------------------------------------------------------------------------------------


def check_cpu(options: argparse.Namespace) -> None:
    if options.only and options.only not in CPU_TABLES:
        raise SystemExit(f"bench: --only {options.only} is a table of --device cuda")
    if options.plot and options.only in WITHOUT_RATES:
        raise SystemExit(f"bench: --plot shows rates, and --only {options.only} measures none")


def restart(num_threads: int) -> None:
    """Starts the process over, because OpenMP read its environment when it was loaded."""
    os.environ["OMP_NUM_THREADS"] = str(num_threads)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "sparse_mla", *sys.argv[1:]])


def measure_cpu(options: argparse.Namespace) -> Iterator[Table]:
    from bench.common.arrays import NumPyArrays
    from bench.common.rows import Bench

    effort = Effort.of(options.quick, options.best)
    usual = [name for name in CPU_TABLES if name not in BY_NAME_ONLY]
    for name in [options.only] if options.only else usual:
        bench = Bench(NumPyArrays(), effort, interleave, options.threads)
        table: Table = import_module(f"bench.{CPU_TABLES[name]}").measure(bench)
        table.take_spreads(effort.spreads)
        yield table


def describe_cpu(options: argparse.Namespace) -> dict[str, str]:
    selected = [row["arch"] for row in kernels("cpu") if row["selected"]]
    num_cores = len(os.sched_getaffinity(0))
    return {
        "device": f"{_info.cpu_name()}, {num_cores} cores, {', '.join(selected)}",
        **describe_run(options, f"--threads {options.threads}"),
        "with": ", ".join(f"{name} {_info.find(name)}" for name in ("numpy", "torch", "jax")),
    }


# --- CUDA ----------------------------------------------------------------------------------------


def find_device() -> str:
    """cuda where its tables can be measured, else cpu."""
    return "cpu" if what_cuda_lacks() else "cuda"


def check_cuda() -> None:
    lack = what_cuda_lacks()
    if lack:
        raise SystemExit(f"bench: {lack}")


def what_cuda_lacks() -> str:
    """Why nothing can be measured on CUDA; empty where CUDA can be measured. Reasons that no
    installation cures come first, so that nobody installs PyTorch to learn that there is no GPU."""
    lack = _info.what_cuda_lacks()
    if lack:
        return lack
    if find_spec("torch") is None:
        return "--device cuda needs PyTorch, for memory, events and graphs: pip install torch"
    torch: Any = import_module("torch")
    if not torch.cuda.is_available():
        return "PyTorch sees no GPU: --device cpu, or a PyTorch built for CUDA"
    return ""


def find_rows(options: argparse.Namespace) -> Any:
    """The rows of the inputs' table, read before anything is measured to report errors early."""
    from bench.cuda.sent import Rows

    return Rows.of(options)


def measure_cuda(options: argparse.Namespace, rows: Any) -> Iterator[Table]:
    from bench.common.arrays import TorchArrays
    from bench.common.peer import find_peer
    from bench.common.rows import Bench
    from bench.cuda.timing import DEVICE, CudaEffort, interleave_flushed, torch

    torch.manual_seed(0)
    effort = CudaEffort.of(options.quick, options.best)
    arrays, (peer, _) = TorchArrays(DEVICE), find_peer()
    bench = Bench(arrays, effort, interleave_flushed, peer=peer, rows=rows)
    only = CUDA_GROUPS.get(options.only, (options.only,))
    for name in only if options.only else CUDA_TABLES:
        try:
            table: Table = import_module(f"bench.{CUDA_TABLES[name]}").measure(bench)
        except Exception as error:  # the device may be lost; earlier tables are still printed
            table = Table(name, ["-"], [], [], failures=[describe_error(error)])
        table.take_spreads(effort.spreads)
        yield table


def describe_cuda(options: argparse.Namespace) -> dict[str, str]:
    from bench.common.peer import find_peer
    from bench.cuda.timing import CudaEffort, torch

    peer, version = find_peer()
    facts = torch.cuda.get_device_properties(0)
    names = dict.fromkeys(row["arch"] for row in kernels("cuda") if row["selected"])
    l2_cache = facts.L2_cache_size >> 20
    others = ", ".join(f"{name} {_info.find(name)}" for name in ("numpy", "cupy", "jax"))
    return {
        "device": f"{facts.name}, {facts.multi_processor_count} SMs, {l2_cache} MiB L2 cache, "
        f"kernels {', '.join(names)}",
        **describe_run(options, "--device cuda"),
        "with": f"torch {torch.__version__}, {others}",
        "build": f"CUDA {sparse_mla.build_info()['cuda']}",
        "beside": f"FlashMLA: {version}" + (", heads padded to 64 or 128" if peer else ""),
        "measured": "CUDA graphs of calls over rotating inputs (cache rows cold, code warm), the "
        f"sides in turn; {CudaEffort.of(options.quick, options.best).describe()}",
        "flushed": "CUDA graphs of one call; before each replay matrix products and a write over "
        "the L2 cache (rows and code cold), the sides in turn; inputs are all measured so",
        "floor": "FLOP / 795 TFLOP/s or bytes / 4.3 TB/s, the larger: an H200's best rates",
        "error/bound": "against fp64 on the bytes that each side was given, sampled tokens; the "
        "bound is the promise for GPUs, with its allowance for fp16 scales where rows are FP8",
    }


# --- both ----------------------------------------------------------------------------------------


def kernels(device: str) -> list[dict[str, Any]]:
    return [row for row in sparse_mla.kernels() if row["device"] == device]


def describe_run(options: argparse.Namespace, last: str) -> dict[str, str]:
    switches = [name for name in ("quick", "best", "json") if getattr(options, name)]
    given = [name for name in ("only", *ROW_OPTIONS) if getattr(options, name)]
    switches += [f"{name} {getattr(options, name)}" for name in given]
    command = ["python -m sparse_mla bench", *(f"--{name}" for name in switches), last]
    return {
        "date": datetime.date.today().isoformat(),
        "commit": find_commit(),
        "command": " ".join(command),
        "host": noise.describe_host(noise.count_busy_cores()),
    }


def find_commit() -> str:
    """The source tree's commit; the version where there is none."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        pass
    return f"version {sparse_mla.__version__}"
