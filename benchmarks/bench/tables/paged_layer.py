"""paged.attention in steps of speculative decoding and with a shared prefix, each beside the call
that it replaces or extends: verification beside a decode, a tree beside a chain, and a shared
prefix beside the same call without one. On CUDA the L2 cache is flushed before each replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bench.common.rows import Bench
from bench.common.timing import Table
from bench.tables.paged import Shape, judge_request
from sparse_mla import paged
from sparse_mla._judge import Fractions

Array = Any
DRAFTS, PAGE_SIZE = 8, 64
# device, whether it is quick -> requests and tokens; requests, tokens of a shared prefix, and more
SHAPES = {
    ("cpu", False): ((8, 2048), (16, 2048, 64)),
    ("cpu", True): ((2, 512), (4, 512, 64)),
    ("cuda", False): ((64, 4096), (64, 8192, 256)),
    ("cuda", True): ((8, 4096), (8, 8192, 256)),
}
COLUMNS = ["call", "B × keys", "error/bound", "µs", "beside", "µs", "ratio"]


@dataclass
class Call:
    """A layer's call in a step, and the slots that some of its query tokens see."""

    name: str
    q: Array
    run: Callable[[], tuple[Array, Array]]
    seen: dict[int, np.ndarray]


class Layer:
    """Requests of `length` tokens and some drafts behind them, in pages that are anywhere. The
    first `shared` tokens are the same for all."""

    def __init__(self, arrays: Any, num_reqs: int, length: int, shared: int = 0) -> None:
        self.arrays, self.num_reqs, self.length, self.shared = arrays, num_reqs, length, shared
        self.shape = Shape(num_reqs, length, PAGE_SIZE)
        rng = np.random.default_rng(0)
        width = -(-(length + DRAFTS) // PAGE_SIZE)
        own = width - shared // PAGE_SIZE
        count = shared // PAGE_SIZE + num_reqs * own
        order = rng.permutation(count)
        pages = np.empty((num_reqs, width), np.int64)
        pages[:, : width - own] = order[: width - own]
        pages[:, width - own :] = order[width - own :].reshape(num_reqs, own)
        slots = pages[:, :, None] * PAGE_SIZE + np.arange(PAGE_SIZE)
        self.slots = slots.reshape(num_reqs, -1).astype(np.int32)
        shape = self.shape
        sizes = count, PAGE_SIZE, shape.kv_heads, shape.dim
        self.caches = arrays.randn(*sizes), arrays.randn(*sizes)
        # A tree: each draft hangs on a random one before it.
        self.tree = np.zeros((DRAFTS, DRAFTS), bool)
        for i in range(DRAFTS):
            self.tree[i] = self.tree[rng.integers(0, i)] if i else False
            self.tree[i, i] = True

    def call(self, name: str, mode: str, is_tree: bool = False, prefix: int = 0) -> Call:
        num_drafts = DRAFTS if mode == "target_verify" else 0
        config = paged.Config(
            max_bs=self.num_reqs,
            max_num_tokens=self.num_reqs * DRAFTS,
            max_context_len=self.length,
            page_size=PAGE_SIZE,
            num_draft_tokens=num_drafts,
            topk=2 if is_tree else 1,
            device=self.arrays.device,
        )
        put, shape = self.arrays.put, self.shape
        builder = paged.MetadataBuilder(config, put(self.slots))
        lens = np.full(self.num_reqs, self.length, np.int32)
        given: dict[str, Any] = {"seq_lens_cpu": lens, "common_prefix_len": prefix}
        if is_tree:
            rows = np.concatenate([np.ones((DRAFTS, self.length), bool), self.tree], 1)
            given["custom_mask"] = put(np.tile(rows.ravel(), self.num_reqs))
        rows_of = np.arange(self.num_reqs, dtype=np.int32)
        metadata = builder.build(mode, put(lens), put(rows_of), **given)
        per_req = num_drafts or 1
        q = self.arrays.randn(self.num_reqs * per_req, shape.heads, shape.dim)
        out, lse = self.arrays.randn(*q.shape), put(np.empty(q.shape[:2], np.float32))

        def run() -> tuple[Array, Array]:
            options = {"softmax_scale": shape.scale, "out": out, "lse": lse}
            return paged.attention(metadata, q, *self.caches, **options)

        return Call(name, q, run, self.find_seen(per_req, num_drafts, is_tree))

    def find_seen(self, per_req: int, num_drafts: int, is_tree: bool) -> dict[int, np.ndarray]:
        """The first query token of the first request, and the last one of the last."""
        seen = {}
        for req, i in ((0, 0), (self.num_reqs - 1, per_req - 1)):
            drafts = self.slots[req, self.length : self.length + num_drafts]
            own = drafts[self.tree[i]] if is_tree else drafts[: i + 1]
            seen[req * per_req + i] = np.concatenate([self.slots[req, : self.length], own])
        return seen

    def judge(self, call: Call) -> float:
        """The worst error of some heads of some tokens as a fraction of its bound."""
        results, wide = call.run(), self.arrays.wide
        worst = Fractions()
        for token, slots in call.seen.items():
            page, offset = np.divmod(slots, PAGE_SIZE)
            keys = (wide(cache[page, offset]) for cache in self.caches)
            found = (wide(x[token]) for x in results)
            shape = replace(self.shape, length=len(slots))
            q = wide(call.q[token])
            worst.add(judge_request(shape, q, *keys, *found, units=32))
        return max(worst.out, worst.lse)


Pair = tuple[str, Layer, Call, Call]  # where, and a call with what it stands beside


def make_pairs(arrays: Any, verify: tuple[int, ...], shared: tuple[int, ...]) -> list[Pair]:
    """`verify` is requests and tokens of each; `shared` has the tokens of a shared prefix between
    them."""
    layer = Layer(arrays, *verify)
    decode = layer.call("decode", "decode")
    chain = layer.call(f"verify, a chain of {DRAFTS}", "target_verify")
    tree = layer.call(f"verify, a tree of {DRAFTS}", "target_verify", is_tree=True)
    where = "{} × {}".format(*verify)
    pairs = [(where, layer, chain, decode), (where, layer, tree, chain)]
    num_reqs, prefix, more = shared
    layer = Layer(arrays, num_reqs, prefix + more, prefix)
    once = layer.call("decode, a prefix read once", "decode", prefix=prefix)
    each = layer.call("read by each request", "decode")
    return [*pairs, (f"{num_reqs} × ({prefix} + {more})", layer, once, each)]


def measure(bench: Bench) -> Table:
    where = "L2 flushed" if bench.is_cuda else f"{bench.threads} threads"
    table = Table(f"A paged layer, H 32/8, D 128, bf16, {where}", COLUMNS, [], [])
    shapes = SHAPES["cuda" if bench.is_cuda else "cpu", bench.effort.quick]
    for place, layer, call, other in make_pairs(bench.arrays, *shapes):
        error = max(layer.judge(call), layer.judge(other))
        if not error <= 1:
            table.failures.append(f"{call.name}, {place}: {error:.3g} × bound")
        seconds = bench.time({"ours": call.run, "beside": other.run})
        ours, beside = (1e6 * seconds[side] for side in ("ours", "beside"))
        row = [call.name, place, f"{error:.3g}", f"{ours:.1f}", other.name, f"{beside:.1f}"]
        record: dict[str, object] = {"call": call.name, "B × keys": place, "beside": other.name}
        record |= {"us": ours, "beside_us": beside, "error_over_bound": error}
        table.add([*row, f"{ours / beside:.2f}"], record)
    return table
