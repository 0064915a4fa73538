"""The demo's command line: options, one table row per step, totals and the verdict."""

from __future__ import annotations

import argparse
import sys
import time
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import sparse_mla
from sparse_mla._demo.check import Checker
from sparse_mla._demo.engine import Engine, StepResult
from sparse_mla._demo.layers import LAYERS, Layer
from sparse_mla._demo.memory import find_memory
from sparse_mla._demo.scheduler import Batch, Request, Scheduler


class Sizes(NamedTuple):
    """What decides how long a run takes. Each size has an option of its name."""

    requests: int
    context: int
    decode: int
    topk: int


USUAL = Sizes(requests=6, context=3072, decode=16, topk=2048)
SHORT = Sizes(requests=3, context=300, decode=3, topk=64)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], default="cpu", help="where it runs (%(default)s)")
    add("--text", type=Path, help="file to read (default: an essay that comes with the package)")
    short = ", ".join(f"--{name} {size}" for name, size in SHORT._asdict().items())
    add("--short", action="store_true", help=f"a run of a second: {short}, unless they are given")
    add("--requests", type=int, help=f"number of requests ({USUAL.requests})")
    add("--context", type=int, help=f"bytes of the longest request ({USUAL.context})")
    add("--decode", type=int, help=f"tokens that each request decodes ({USUAL.decode})")
    add("--heads", type=int, default=32, help="query heads, 1 to 128 (%(default)s)")
    sparse, dense, v4 = (LAYERS[name] for name in ("sparse", "dense", "v4"))
    rows = f"with --v4 rows of {v4.ratio} tokens ({USUAL.topk // v4.ratio})"
    add("--topk", type=int, help=f"keys that a query attends to ({USUAL.topk}), {rows}")
    add("--dense", action="store_true", help="dense MLA: a query attends to all keys before it")
    add(
        "--v4",
        action="store_true",
        help="a layer of DeepSeek V4 with an indexer: a query attends to the last 128 tokens, and "
        f"to rows of {v4.ratio} tokens each",
    )
    add(
        "--kv-format",
        "--kv-cache-dtype",
        dest="kv_cache_dtype",
        choices=sorted({*sparse.formats, *v4.formats}),
        help=f"the cache's format ({sparse.formats[0]}, with --v4 {v4.formats[0]})",
    )
    add("--block-size", type=int, default=64, help="tokens per cache page (%(default)s)")
    paths = f"force a path (with --dense {dense.paths[0]}, with --v4 {' or '.join(v4.paths)})"
    add("--path", choices=sparse.paths, help=paths)
    add("--tokens-per-step", type=int, default=512, help="the scheduler's budget (%(default)s)")
    add("--pages", type=int, help="pages of the cache (default: for two thirds of all tokens)")
    add("--steps", type=int, help="stop after so many steps")
    add("--seed", type=int, default=0)


def run(options: argparse.Namespace) -> int:
    """Runs the demo; the exit status is 0 when every checked error is within its bound."""
    try:
        requests = make_requests(options)
        engine, scheduler = make_engine(options, requests)
    except (OSError, ValueError) as error:
        raise SystemExit(f"demo: {error}") from None
    checker = find_layer(options).checker(engine, seed=options.seed)
    table = Table(engine, scheduler, requests)
    for step in range(options.steps or sys.maxsize):
        if not (scheduler.waiting or scheduler.running):
            break
        batch = scheduler.next_batch(step)
        if batch is None:
            continue
        result = engine.run_step(batch)
        checker.check_step(batch, result)
        table.add(step, batch, result)
        scheduler.finish(batch)
    table.finish()
    print_verdict(checker)
    return 0 if checker.within else 1


def make_requests(options: argparse.Namespace) -> list[Request]:
    """Requests of half to all of --context bytes of the text; one arrives every other step."""
    for option in ("requests", "context", "decode", "topk", "block_size", "tokens_per_step"):
        value = getattr(options, option)
        if value is not None and value < 1:
            raise ValueError(f"--{option.replace('_', '-')} must be at least 1")
    check_layer(options)
    sizes = find_sizes(options)
    text = read_text(options.text)
    rng = np.random.default_rng(options.seed)
    requests = []
    for name in range(sizes.requests):
        length = int(rng.integers(-(-sizes.context // 2), sizes.context + 1))
        length = max(length, 2)
        start = int(rng.integers(len(text)))
        cut = np.take(text, np.arange(start, start + length), mode="wrap")
        prompt_len = max(1, length - sizes.decode)
        requests.append(Request(name, arrival_step=2 * name, text=cut, prompt_len=prompt_len))
    return requests


def find_layer(options: argparse.Namespace) -> Layer:
    if options.dense and options.v4:
        raise ValueError("--dense and --v4 exclude each other")
    return LAYERS["dense" if options.dense else "v4" if options.v4 else "sparse"]


def check_layer(options: argparse.Namespace) -> None:
    """Refuses options that the layer does not have."""
    layer = find_layer(options)
    if options.topk is not None and layer.ratio == 0:
        raise ValueError(f"--topk is not for --{layer.name}, where a query attends to {layer.keys}")
    for option, value, allowed in (
        ("path", options.path, layer.paths),
        ("kv-format", options.kv_cache_dtype, layer.formats),
    ):
        if value is not None and value not in allowed:
            raise ValueError(
                f"--{option} must be {' or '.join(allowed)} for a {layer.name} layer, got {value}"
            )
    if layer.ratio > 1 and options.block_size % layer.ratio:
        raise ValueError(
            f"--block-size must be a multiple of {layer.ratio} for --{layer.name}, "
            f"got {options.block_size}"
        )


def find_sizes(options: argparse.Namespace) -> Sizes:
    """The given sizes; the others are those of a usual or of a short run."""
    given = {name: getattr(options, name) for name in Sizes._fields}
    others = SHORT if options.short else USUAL
    others = others._replace(topk=others.topk // max(find_layer(options).ratio, 1))
    return others._replace(**{name: size for name, size in given.items() if size is not None})


def read_text(path: Path | None) -> np.ndarray:
    """The bytes of a text, which are its tokens."""
    if path is None:
        content = resources.files("sparse_mla").joinpath("data", "attention.txt").read_bytes()
    else:
        content = path.read_bytes()
    if not content:
        raise ValueError(f"{path} is empty")
    return np.frombuffer(content, np.uint8)


def make_engine(options: argparse.Namespace, requests: list[Request]) -> tuple[Engine, Scheduler]:
    longest = max(len(request.text) for request in requests)
    all_pages = sum(-(-len(request.text) // options.block_size) for request in requests)
    least_pages = -(-longest // options.block_size)
    if options.pages is not None and options.pages < least_pages:
        raise ValueError(
            f"--pages must be at least {least_pages}, the pages of the longest request, "
            f"got {options.pages}"
        )
    memory = find_memory(options.device)
    layer, topk = find_layer(options), find_sizes(options).topk
    fields: dict[str, Any] = {
        "num_heads": options.heads,
        "kv_cache_dtype": options.kv_cache_dtype or layer.formats[0],
        "block_size": options.block_size,
        "max_num_seqs": len(requests),
        "max_num_batched_tokens": options.tokens_per_step,
        "max_model_len": longest,
        "path": options.path,
        "device": memory.device,
    }
    config = layer.config(fields, topk)
    scheduler = Scheduler(
        requests,
        num_pages=options.pages or max(-(-2 * all_pages // 3), least_pages),
        block_size=options.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
    )
    model = layer.model(options.heads, options.seed)
    print(
        f"sparse_mla {sparse_mla.__version__} · {len(requests)} requests of up to {longest} bytes"
        f" · {options.heads} heads · {layer.keys.format(topk)} · {config.kv_cache_dtype} cache of "
        f"{scheduler.pool.num_pages} pages × {options.block_size} tokens"
        f" · {memory.name} arrays, {memory.device}\n"
    )
    return layer.engine(model, config, scheduler.pool.num_pages, memory), scheduler


class Table:
    """Prints a row per step and, at the end, the totals; a progress bar runs on stderr."""

    def __init__(self, engine: Engine, scheduler: Scheduler, requests: list[Request]) -> None:
        self.engine = engine
        self.scheduler = scheduler
        self.progress = Progress(sum(len(request.text) for request in requests))
        counts = np.bincount(np.concatenate([request.text for request in requests]))
        self.commonest = counts.max() / counts.sum()
        self.num_tokens = self.num_decode_tokens = self.num_steps = self.hits = 0
        self.library_seconds = self.total_seconds = 0.0
        print("step   requests        tokens     path      chunks   pages   library   whole step")
        print("      run  wait  decode  prefill                     in use        ms     tokens/s")

    def add(self, step: int, batch: Batch, result: StepResult) -> None:
        metadata = result.metadata
        is_gathered = metadata.path == "separate" and metadata.prefill is not None
        chunks = len(metadata.prefill.chunks) if is_gathered else 0
        self.num_steps += 1
        self.num_tokens += batch.num_tokens
        self.num_decode_tokens += metadata.num_decode_tokens
        self.library_seconds += result.library_seconds
        self.total_seconds += result.total_seconds
        self.hits += count_hits(batch, result.predicted)
        self.progress.clear()
        print(
            f"{step:4} {len(self.scheduler.running):4} {len(self.scheduler.waiting):5} "
            f"{metadata.num_decode_tokens:7} {metadata.num_prefill_tokens:8}  "
            f"{metadata.path:9} {chunks:6} {self.scheduler.pool.in_use:7} "
            f"{1e3 * result.library_seconds:9.1f} {batch.num_tokens / result.total_seconds:12.0f}",
            flush=True,
        )
        self.progress.advance(batch.num_tokens)

    def finish(self) -> None:
        self.progress.finish()
        pool = self.scheduler.pool
        cache = self.engine.kv_cache
        rows, row_bytes = pool.peak * cache.shape[1], cache.shape[2] * cache.itemsize
        in_bf16 = self.engine.bf16_row_bytes
        print(
            f"\n{self.num_tokens} tokens ({self.num_decode_tokens} decoded) in {self.num_steps} "
            f"steps: {self.num_tokens / self.total_seconds:.0f} tokens/s, "
            f"{self.num_tokens / self.library_seconds:.0f} tokens/s in the library alone "
            f"({self.library_seconds:.1f} of {self.total_seconds:.1f} s)"
        )
        print(
            f"cache at its peak: {pool.peak} of {pool.num_pages} pages, "
            f"{rows * row_bytes / 1e6:.1f} MB; {rows * in_bf16 / 1e6:.1f} MB in bf16, "
            f"{row_bytes / in_bf16:.0%}; {pool.in_use} pages in use at the end"
        )
        print(
            f"next byte predicted: {self.hits / self.num_tokens:.0%} of {self.num_tokens}; "
            f"always naming the most common one: {self.commonest:.0%}"
        )


def count_hits(batch: Batch, predicted: np.ndarray) -> int:
    hits = 0
    for request, rows, positions in batch.parts():
        known = positions + 1 < len(request.text)
        hits += int((predicted[rows][known] == request.text[positions[known] + 1]).sum())
    return hits


def print_verdict(checker: Checker) -> None:
    print("\nworst error against fp64, as a fraction of its bound")
    print(f"  {'':36} rows     out" + "     lse" * checker.has_lse)
    for what, fractions in sorted(checker.fractions.items()):
        lse = f" {fractions.lse:7.3f}" if checker.has_lse else ""
        print(f"  {what:36} {fractions.rows:4} {fractions.out:7.3f}{lse}")
    if checker.gathered_rows:
        print(
            f"  gather to the bf16 workspace: {checker.gathered_rows} rows compared, "
            f"{checker.wrong_gathered_rows} differ"
        )
    print("within the bounds" if checker.within else "OUTSIDE THE BOUNDS")


class Progress:
    """A bar on a terminal; a line per quarter elsewhere."""

    WIDTH = 40

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0
        self.is_terminal = sys.stderr.isatty()
        self.start = time.perf_counter()

    def clear(self) -> None:
        if self.is_terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def advance(self, count: int) -> None:
        before, self.done = self.done, self.done + count
        share = self.done / self.total
        elapsed = time.perf_counter() - self.start
        if self.is_terminal:
            bar = "#" * int(self.WIDTH * share)
            text = f"[{bar:<{self.WIDTH}}] {share:4.0%} {elapsed:4.0f} s"
            print(text, end="", file=sys.stderr, flush=True)
        elif 4 * self.done // self.total > 4 * before // self.total:
            print(f"demo: {share:.0%} after {elapsed:.0f} s", file=sys.stderr, flush=True)

    def finish(self) -> None:
        self.clear()
