"""Runs FlashAttention-3's own tests of attention to a cache and of ragged requests through
`sparse_mla.flash_attn`.

    git clone https://github.com/Dao-AILab/flash-attention
    python buildtools/flash_attn_tests.py flash-attention/hopper

Of all cases of `test_flash_attn_kvcache` and `test_flash_attn_varlen_output` a seed draws those
that run: per test `--cases` that must pass, and `--refused` that must be refused by name. Those
have new keys or RoPE in the call, a table beside `cache_batch_idx`, or gaps between queries. It
needs PyTorch and einops, and a GPU, unless `--device cpu` is given.
"""

import argparse
import collections
import contextlib
import inspect
import io
import itertools
import os
import random
import re
import subprocess
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KVCACHE, VARLEN = "test_flash_attn_kvcache", "test_flash_attn_varlen_output"
REFUSED = {
    KVCACHE: lambda case: case["new_kv"] or (case["has_batch_idx"] and case["page_size"]),
    # a single query per request is never left out
    VARLEN: lambda case: case["add_unused_qkv"] and case["seqlen_q"] > 1,
}
REFUSAL = re.compile(
    r"flash_attn_\w+: `(k|rotary_cos|cache_batch_idx|seqused_q)` must be None[, ].*, got an array"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "hopper", type=Path, help="the folder hopper of FlashAttention's repository"
    )
    parser.add_argument("--test", choices=REFUSED, action="append", help="one of the two")
    parser.add_argument("--cases", type=int, default=600)
    parser.add_argument("--refused", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dims", help=f"values of d in the place of those that {KVCACHE} has")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument(
        "--seconds", type=float, default=540, help="a process begins no case after these"
    )
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.share is not None:
        return run_share(options)
    command = [sys.executable, *sys.argv]
    shares = [subprocess.Popen([*command, f"--share={i}"]) for i in range(options.processes)]
    return max([share.wait() for share in shares])


def run_share(options: argparse.Namespace) -> int:
    start = time.monotonic()
    tests = load(options.hopper, options.device)
    counts: collections.Counter[str] = collections.Counter()
    for name in options.test or REFUSED:
        for is_refused in (False, True):
            quota = options.refused if is_refused else options.cases
            left = len(range(options.share, quota, options.processes))
            for case in draw_cases(name, tests[name], options, is_refused):
                if left == 0:
                    break
                if time.monotonic() - start > options.seconds:
                    counts[f"{name}: not begun"] += left
                    break
                end, log = run_case(tests[name], case, is_refused)
                counts[f"{name}: {end}"] += 1
                left -= end != "skipped"
                if end == "FAILED":
                    print(name, case, log, sep="\n", flush=True)
    print(f"share {options.share}:", dict(sorted(counts.items())), flush=True)
    is_good = all(key.endswith(("passed", "refused", "skipped")) for key in counts)
    return 0 if is_good else 1


def load(hopper: Path, device: str) -> dict[str, Callable]:
    """The tests, for which our functions are those of FlashAttention-3."""
    os.environ["FLASH_ATTENTION_DISABLE_BACKWARD"] = "TRUE"
    sys.path[:0] = [str(hopper), str(ROOT)]
    import torch

    from sparse_mla import flash_attn

    interface = types.ModuleType("flash_attn_interface")
    vars(interface).update(
        flash_attn_with_kvcache=flash_attn.flash_attn_with_kvcache,
        flash_attn_varlen_func=without_counts(flash_attn.flash_attn_varlen_func),
        get_scheduler_metadata=lambda *args, **kwargs: None,  # a schedule is not read
        flash_attn_func=None,  # other tests call these two
        flash_attn_combine=None,
    )
    # RoPE turns the arguments of calls that are refused.
    rotary = types.ModuleType("flash_attn.layers.rotary")
    vars(rotary).update(apply_rotary_emb=lambda x, *args, **kwargs: x)
    for module in (interface, rotary, types.ModuleType("flash_attn.layers")):
        sys.modules[module.__name__] = module
    sys.modules["flash_attn"] = types.ModuleType("flash_attn")
    text = (hopper / "test_flash_attn.py").read_text()
    if device != "cuda":
        text = text.replace('device = "cuda"', f'device = "{device}"')
        vars(torch.cuda)["get_device_capability"] = lambda *args: (9, 0)  # it has e4m3, too
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 8))
    space: dict = {"__name__": "test_flash_attn"}
    exec(compile(text, str(hopper / "test_flash_attn.py"), "exec"), space)
    return {name: space[name] for name in REFUSED}


def without_counts(attend: Callable) -> Callable:
    """The test always counts the queries and keys in use. Counts of all queries are left out here,
    and of all keys in every other call: contiguous keys then go another way."""

    def call(q, k, v, cu_seqlens_q, cu_seqlens_k, *others, seqused_q, seqused_k, pack_gqa, **more):
        if bool((cu_seqlens_q.diff() == seqused_q).all()):
            seqused_q = None
        if pack_gqa and bool((cu_seqlens_k.diff() == seqused_k).all()):
            seqused_k = None
        more |= {"seqused_q": seqused_q, "seqused_k": seqused_k, "pack_gqa": pack_gqa}
        return attend(q, k, v, cu_seqlens_q, cu_seqlens_k, *others, **more)

    return call


def draw_cases(
    name: str, test: Callable, options: argparse.Namespace, is_refused: bool
) -> Iterator[dict]:
    """This share of the cases in random order."""
    names, values = [], []
    for mark in vars(test)["pytestmark"]:
        names.append(mark.args[0].split(","))
        values.append([x if len(names[-1]) > 1 else (x,) for x in mark.args[1]])
        if names[-1] == ["d"] and options.dims and name == KVCACHE:
            values[-1] = [(int(d),) for d in options.dims.split(",")]
    keys = [key for group in names for key in group]
    assert {*keys} == {*inspect.signature(test).parameters}
    cases = [
        dict(zip(keys, itertools.chain(*case), strict=True)) for case in itertools.product(*values)
    ]
    cases = [case for case in cases if bool(REFUSED[name](case)) == is_refused]
    random.Random(options.seed).shuffle(cases)
    yield from cases[options.share :: options.processes]


def run_case(test: Callable, case: dict, is_refused: bool) -> tuple[str, str]:
    """How it ended, and what it printed."""
    import pytest
    import torch

    log = io.StringIO()
    try:
        with contextlib.redirect_stdout(log), torch.no_grad():
            test(**case)
    except pytest.skip.Exception:
        return "skipped", ""
    except Exception as error:
        if is_refused and isinstance(error, ValueError) and REFUSAL.match(str(error)):
            return "refused", ""
        return "FAILED", log.getvalue() + traceback.format_exc()
    return ("FAILED", "it was not refused") if is_refused else ("passed", "")


if __name__ == "__main__":
    sys.exit(main())
