"""lightning_indexer on a CUDA device: the chosen keys of causal prefills, beside the two calls that
it joins, whose logits fill memory of their own."""

from __future__ import annotations

import math
from functools import partial

import sparse_mla
from bench.common import rows
from bench.common.rows import Bench
from bench.common.timing import Table
from bench.cuda.logits import Work, make_prefill
from bench.cuda.timing import DEVICE, PEAK_BYTES, Array, torch

TOPK = 2048
SHAPES = ((2048, 8192, 64), (4096, 32768, 64), (4096, 32768, 32))  # tokens, keys, heads
QUICK = 1  # rows


class Choice:
    """A prefill's choice in one call, and in the two calls that it joins."""

    def __init__(self, work: Work) -> None:
        self.work = work
        num_tokens, num_keys = len(work.lens), len(work.scales)
        size = sparse_mla.lightning_indexer_workspace_size(
            num_tokens, num_keys, k=TOPK, device=DEVICE
        )
        self.workspace = torch.empty(size, dtype=torch.uint8, device=DEVICE)
        self.out, self.other = (
            torch.empty(num_tokens, TOPK, dtype=torch.int32, device=DEVICE) for _ in range(2)
        )
        self.starts = torch.zeros_like(work.lens)

    def choose(self) -> object:
        work = self.work
        return sparse_mla.lightning_indexer(
            work.q,
            work.weights,
            (work.keys, work.scales),
            work.lens,
            k=TOPK,
            out=self.out,
            workspace=self.workspace,
        )

    def select(self, logits: Array) -> object:
        return sparse_mla.top_k_per_row(logits, self.starts, self.work.lens, k=TOPK, out=self.other)

    def is_right(self) -> bool:
        self.choose()
        self.select(self.work.call())
        return bool(torch.equal(self.out, self.other))

    def floor(self) -> float:
        return self.work.floor() + self.out.nbytes / PEAK_BYTES


def measure(bench: Bench) -> Table:
    logits, choice = rows.peer("logits", "logits µs"), rows.peer("top_k", "top-k µs")
    columns = [rows.RIGHT, rows.US, rows.FLOOR, logits[0], choice[0]]
    title = f"Lightning indexer, FP8, k {TOPK}, cold"
    table = rows.make_table(title, ["tokens", "keys", "heads"], columns)
    for shape in bench.choose(SHAPES, SHAPES[:QUICK]):
        labels = dict(zip(("tokens", "keys", "heads"), shape, strict=True))
        rows.measure_row(bench, table, columns, (labels, partial(make, *shape)))
        torch.cuda.empty_cache()
    return table


def make(num_tokens: int, num_keys: int, heads: int) -> rows.Work:
    choice = Choice(make_prefill(num_tokens, num_keys, heads))
    logits = choice.work.call()
    return rows.Work(
        choice.choose,
        lambda _: 0.0 if choice.is_right() else math.inf,
        floor=choice.floor(),
        peers={
            "logits": lambda: choice.work.call,
            "top_k": lambda: partial(choice.select, logits),
        },
    )
