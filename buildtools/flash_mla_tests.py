"""Runs FlashMLA's own tests of sparse attention through `sparse_mla.flash_mla`, on one GPU.

    git clone https://github.com/deepseek-ai/FlashMLA
    python buildtools/flash_mla_tests.py FlashMLA/tests

FlashMLA's scripts run case by case, and one of them stops at the first failure. This one takes the
cases out of them, those for measurements too, and gives each process a share in random order.
Cases for which there was no memory beside the others run alone at the end. All 5365 cases of commit
9241ae3 take 142 s in nine processes on an H200; on an H100, which has less memory, 155 s in seven
and what then runs alone. It needs PyTorch with Triton.
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
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PREFILL, DECODE = "test_flash_mla_sparse_prefill", "test_flash_mla_sparse_decoding"
MANY_TOKENS = 70_000  # a case of so many takes 30 GB, so share 0 has all of them, first


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tests", type=Path, help="the folder tests of FlashMLA's repository")
    parser.add_argument("--processes", type=int, default=9)
    parser.add_argument(
        "--seconds", type=float, default=600, help="a process begins no case after these"
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

    cases = take_cases(options.tests)
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
            log, is_right = run_case(name, case)
        except torch.cuda.OutOfMemoryError:
            gc.collect()
            torch.cuda.empty_cache()
            if is_alone:
                counts["out of memory"] += 1
            else:  # other processes have the memory
                with options.left.open("a") as file:
                    file.write(f"{case.seed}\n")
            continue
        counts[f"{'passed' if is_right else 'FAILED'}: {name}, d_qk {case.d_qk}"] += 1
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
    torch.set_float32_matmul_precision("high")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 8))


def take_cases(tests: Path) -> list[tuple[str, object]]:
    """Prefill's cases are listed in its script's main part, decode's by a function."""
    prefill = importlib.import_module(PREFILL)
    text = (tests / f"{PREFILL}.py").read_text()
    lists = text[text.index("    correctness_cases = [") : text.index("    is_no_cooldown")]
    space = {"TestParam": prefill.TestParam}
    exec(textwrap.dedent(lists), space)
    decode = [raw.to_test_param() for raw in importlib.import_module(DECODE).gen_testcase()]
    cases = [(PREFILL, case) for case in space["testcases"]] + [(DECODE, case) for case in decode]
    random.Random(0).shuffle(cases)
    return [
        (name, dataclasses.replace(case, num_runs=0, seed=seed))
        for seed, (name, case) in enumerate(cases)
    ]


def run_case(name: str, case) -> tuple[str, bool]:
    module = importlib.import_module(name)
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        is_right = (
            module.run_test(case) if name == PREFILL else module.test_flash_mla(case).is_correct
        )
    return log.getvalue(), is_right


if __name__ == "__main__":
    sys.exit(main())
