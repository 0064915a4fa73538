"""lightning_indexer on a CUDA device: the chosen keys of causal prefills, beside the two calls that
it joins, whose logits fill memory of their own."""

from __future__ import annotations

from functools import partial

import sparse_mla
from bench.common.timing import Table
from bench.cuda.logits import Work, make_prefill
from bench.cuda.timing import (
    DEVICE,
    PEAK_BYTES,
    Array,
    CudaEffort,
    interleave_flushed,
    torch,
)

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


def measure_lightning(effort: CudaEffort) -> Table:
    columns = ["tokens", "keys", "heads", "chosen", "µs", "floor µs", "logits µs", "top-k µs"]
    table = Table(f"Lightning indexer, FP8, k {TOPK}, cold", columns, [], [])
    for num_tokens, num_keys, heads in SHAPES[:QUICK] if effort.quick else SHAPES:
        choice = Choice(make_prefill(num_tokens, num_keys, heads))
        is_right = choice.is_right()
        if not is_right:
            table.failures.append(f"{choice.work.name}: not the two calls' keys")
        logits = choice.work.call()
        seconds = interleave_flushed(
            {
                "ours": [choice.choose],
                "logits": [choice.work.call],
                "top-k": [partial(choice.select, logits)],
            },
            effort,
        )
        floor = choice.floor()
        row = [str(num_tokens), str(num_keys), str(heads), "right" if is_right else "FAIL"]
        row += [f"{1e6 * x:.1f}" for x in (seconds["ours"], floor)]
        row += [f"{1e6 * seconds[name]:.1f}" for name in ("logits", "top-k")]
        record: dict[str, object] = {
            "tokens": num_tokens,
            "keys": num_keys,
            "heads": heads,
            "right": is_right,
            "us": 1e6 * seconds["ours"],
            "floor_us": 1e6 * floor,
            "logits_us": 1e6 * seconds["logits"],
            "top_k_us": 1e6 * seconds["top-k"],
        }
        table.add(row, record)
        del choice, logits
        torch.cuda.empty_cache()
    return table
