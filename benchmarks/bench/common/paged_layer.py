"""paged.attention in steps of speculative decoding and with a shared prefix, each beside the call
that it replaces or extends. Arrays come from functions of the device's table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bench.common.paged import Shape, judge_request
from bench.common.timing import Table
from sparse_mla import paged
from sparse_mla._judge import Fractions

Array = Any
DRAFTS, PAGE_SIZE = 8, 64
COLUMNS = ["call", "B × keys", "error/bound", "µs", "beside", "µs", "ratio"]


@dataclass(frozen=True)
class Make:
    """The arrays of a device."""

    device: str
    randn: Callable[..., Array]  # bf16 of a shape
    put: Callable[[np.ndarray], Array]
    to_numpy: Callable[[Array], np.ndarray]  # float64


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

    def __init__(self, make: Make, num_reqs: int, length: int, shared: int = 0) -> None:
        self.make, self.num_reqs, self.length, self.shared = make, num_reqs, length, shared
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
        self.caches = make.randn(*sizes), make.randn(*sizes)
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
            device=self.make.device,
        )
        put, shape = self.make.put, self.shape
        builder = paged.MetadataBuilder(config, put(self.slots))
        lens = np.full(self.num_reqs, self.length, np.int32)
        given: dict[str, Any] = {"seq_lens_cpu": lens, "common_prefix_len": prefix}
        if is_tree:
            rows = np.concatenate([np.ones((DRAFTS, self.length), bool), self.tree], 1)
            given["custom_mask"] = put(np.tile(rows.ravel(), self.num_reqs))
        rows_of = np.arange(self.num_reqs, dtype=np.int32)
        metadata = builder.build(mode, put(lens), put(rows_of), **given)
        per_req = num_drafts or 1
        q = self.make.randn(self.num_reqs * per_req, shape.heads, shape.dim)
        out, lse = self.make.randn(*q.shape), put(np.empty(q.shape[:2], np.float32))

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
        results, to_numpy = call.run(), self.make.to_numpy
        worst = Fractions()
        for token, slots in call.seen.items():
            page, offset = (self.make.put(x) for x in np.divmod(slots.astype(np.int64), PAGE_SIZE))
            keys = (to_numpy(cache[page, offset]) for cache in self.caches)
            found = (to_numpy(x[token]) for x in results)
            shape = replace(self.shape, length=len(slots))
            q = to_numpy(call.q[token])
            worst.add(judge_request(shape, q, *keys, *found, units=32))
        return max(worst.out, worst.lse)


Pair = tuple[str, Layer, Call, Call]  # where, and a call with what it stands beside
Run = Callable[[], object]


def make_pairs(make: Make, verify: tuple[int, int], shared: tuple[int, int, int]) -> list[Pair]:
    """`verify` is requests and tokens of each; `shared` has the tokens of a shared prefix between
    them."""
    layer = Layer(make, *verify)
    decode = layer.call("decode", "decode")
    chain = layer.call(f"verify, a chain of {DRAFTS}", "target_verify")
    tree = layer.call(f"verify, a tree of {DRAFTS}", "target_verify", is_tree=True)
    where = "{} × {}".format(*verify)
    pairs = [(where, layer, chain, decode), (where, layer, tree, chain)]
    num_reqs, prefix, more = shared
    layer = Layer(make, num_reqs, prefix + more, prefix)
    once = layer.call("decode, a prefix read once", "decode", prefix=prefix)
    each = layer.call("read by each request", "decode")
    return [*pairs, (f"{num_reqs} × ({prefix} + {more})", layer, once, each)]


def add_rows(table: Table, pairs: list[Pair], measure: Callable[[Run, Run], list[float]]) -> None:
    """Judges the calls. `measure` gives the seconds of two, which it measures in turn."""
    for where, layer, call, other in pairs:
        error = max(layer.judge(call), layer.judge(other))
        if not error <= 1:
            table.failures.append(f"{call.name}, {where}: {error:.3g} × bound")
        ours, beside = (1e6 * seconds for seconds in measure(call.run, other.run))
        row = [call.name, where, f"{error:.3g}", f"{ours:.1f}", other.name, f"{beside:.1f}"]
        record: dict[str, object] = {"call": call.name, "B × keys": where, "beside": other.name}
        record |= {"us": ours, "beside_us": beside, "error_over_bound": error}
        table.add([*row, f"{ours / beside:.2f}"], record)
