"""Runs FlashMLA's own tests of decoding and sparse prefill through `sparse_mla.flash_mla`, on one
GPU.

    git clone https://github.com/deepseek-ai/FlashMLA
    python buildtools/flash_mla_tests.py FlashMLA/tests

FlashMLA's scripts run case by case, and one of them stops at the first failure. This one takes the
cases out of them, those for measurements too, and gives each process a share in random order.
Cases for which there was no memory beside the others run alone at the end. All 5365 sparse cases of
commit 9241ae3 take 142 s in nine processes on an H200; on an H100, which has less memory, 155 s in
seven and what then runs alone. There are 2352 dense ones. It needs PyTorch with Triton.
"""

import argparse
import collections
import contextlib
import dataclasses
import gc
import importlib
import io
import os
import random
import subprocess
import sys
import tempfile
import textwrap
import time
import types
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PREFILL, DECODE = "test_flash_mla_sparse_prefill", "test_flash_mla_sparse_decoding"
DENSE = "test_flash_mla_dense_decoding"
SUITES = {"sparse": (PREFILL, DECODE), "dense": (DENSE,)}
MANY_TOKENS = 70_000  # a case of so many takes 30 GB, so share 0 has all of them, first


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tests", type=Path, help="the folder tests of FlashMLA's repository")
    parser.add_argument("--processes", type=int, default=9)
    parser.add_argument(
        "--seconds", type=float, default=600, help="a process begins no case after these"
    )
    parser.add_argument("--suite", choices=SUITES, action="append", help="one of the two")
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float16"], default="bfloat16", help="dense"
    )
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--left", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.left is not None:
        return run_cases(options)
    with tempfile.TemporaryDirectory() as folder:
        left = Path(folder, "left")
        left.touch()
        command = [sys.executable, *sys.argv, f"--left={left}"]
        shares = [subprocess.Popen([*command, f"--share={i}"]) for i in range(options.processes)]
        status = max([share.wait() for share in shares])
        if left.read_text():
            status = max(status, subprocess.run(command).returncode)
    return status


def run_cases(options: argparse.Namespace) -> int:
    """Runs a share of the cases, or alone those that the shares have left: their seeds are in the
    file `left`."""
    start = time.monotonic()
    load(options.tests)
    import torch

    suites = options.suite or SUITES
    cases = take_cases(options.tests, [name for suite in suites for name in SUITES[suite]])
    is_alone = options.share is None
    if is_alone:
        seeds = set(map(int, options.left.read_text().split()))
        waiting = [case for case in cases if case[1].seed in seeds]
    else:
        large = [case for case in cases if case[1].s_q >= MANY_TOKENS]
        others = [case for case in cases if case[1].s_q < MANY_TOKENS]
        waiting = (large if options.share == 0 else []) + others[options.share :: options.processes]
    counts: collections.Counter[str] = collections.Counter()
    for name, case in waiting:
        if time.monotonic() - start > options.seconds:
            counts["not begun"] += 1
            continue
        try:
            log, is_right = run_case(name, case, options.dtype)
        except torch.cuda.OutOfMemoryError:
            gc.collect()
            torch.cuda.empty_cache()
            if is_alone:
                counts["out of memory"] += 1
            else:  # other processes have the memory
                with options.left.open("a") as file:
                    file.write(f"{case.seed}\n")
            continue
        size = case.d if name == DENSE else case.d_qk
        counts[f"{'passed' if is_right else 'FAILED'}: {name}, d_qk {size}"] += 1
        if not is_right:
            print(log, flush=True)
    title = "alone" if is_alone else f"share {options.share}"
    print(f"{title}:", dict(sorted(counts.items())), flush=True)
    return 0 if all(key.startswith("passed") for key in counts) else 1


def load(tests: Path) -> None:
    """Makes FlashMLA's modules importable, with ours as `flash_mla`."""
    for name in ("rich", "rich.console", "rich.table"):  # print tables of times
        sys.modules[name] = types.ModuleType(name)
    sys.path[:0] = [str(tests), str(ROOT / "shim/sparse_mla_flash_mla"), str(ROOT)]
    import torch

    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("cuda:0")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 8))


def take_cases(tests: Path, names: list[str]) -> list[tuple[str, object]]:
    """Decode's script makes its cases by a function, the others have lists in their main part."""
    cases: list[tuple[str, object]] = []
    for name in names:
        if name == DECODE:
            found = [raw.to_test_param() for raw in importlib.import_module(DECODE).gen_testcase()]
        else:
            found = list_cases(tests, name)
        cases += [(name, case) for case in found]
    random.Random(0).shuffle(cases)
    without_times = {DENSE: {"test_performance": False}}
    return [
        (name, dataclasses.replace(case, seed=seed, **without_times.get(name, {"num_runs": 0})))
        for seed, (name, case) in enumerate(cases)
    ]


def list_cases(tests: Path, name: str) -> list:
    """The cases that a script's main part lists."""
    text = (tests / f"{name}.py").read_text()
    start, end = text.index("    correctness_cases = ["), text.index("    testcases = ")
    lists = text[start : text.index("\n", end)]
    space = {"TestParam": importlib.import_module(name).TestParam}
    exec(textwrap.dedent(lists), space)
    return space["testcases"]


def run_case(name: str, case, dense_dtype: str) -> tuple[str, bool]:
    import torch

    module = importlib.import_module(name)
    log = io.StringIO()
    # As the scripts have it: the dense one's reference multiplies in full fp32.
    torch.set_float32_matmul_precision("highest" if name == DENSE else "high")
    torch.set_default_dtype(getattr(torch, dense_dtype) if name == DENSE else torch.bfloat16)
    with contextlib.redirect_stdout(log):
        if name == DENSE:
            is_right = passes(module.test_flash_mla, case)
        elif name == PREFILL:
            is_right = module.run_test(case)
        else:
            is_right = module.test_flash_mla(case).is_correct
    return log.getvalue(), is_right


def passes(test: Callable, case: object) -> bool:
    """Whether a test that asserts does so in vain."""
    try:
        test(case)
    except AssertionError as error:
        print(error)
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
