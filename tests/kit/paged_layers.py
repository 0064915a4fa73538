"""Layers of paged steps: their caches, and fp64 results with the mask of every query written out.

A query sees a list of slots, which is found key by key from the engine's arrays, not from metadata.
All bytes of a cache that no query sees are NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import device
import numpy as np
import reference as ref
from helpers import assert_within_bounds
from paged_steps import Batch, map_slot

import sparse_mla

TYPES = {"bf16": ref.BF16, "fp16": np.dtype(np.float16)}


@dataclass
class Layer:
    """A layer of a step, of random queries, keys and values."""

    batch: Batch
    kind: str = "full"  # "window", "local" or "cross"
    left: int = -1
    is_latent: bool = False  # rows of 576, else keys and values of heads
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (64, 64)
    dtype: str = "bf16"
    softcap: float = 0.0
    has_sink: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng([self.seed, 3])
        batch, (h, kv_heads) = self.batch, self.heads
        self.seen = [slots for b in range(len(batch.seq_lens)) for slots in self.rows_of(b)]
        self.is_pooled = batch.mapping is not None and self.kind in ("window", "local")
        slots = int(batch.mapping.max(initial=0)) + 1 if self.is_pooled else batch.num_slots
        pages = -(-max(slots, batch.num_slots) // batch.page_size)
        total = pages * batch.page_size
        used = sorted({s for row in self.seen for s in row if 0 <= s < total})
        self.seen = [[s for s in row if 0 <= s < total] for row in self.seen]
        type_, shape = TYPES[self.dtype], (pages, batch.page_size)
        if self.is_latent:
            self.dims = (576, 512)
            rows = np.full((total, 576), np.nan, np.float32)
            rows[used] = rng.normal(0, 1, (len(used), 576))
            self.caches = (rows.astype(ref.BF16).reshape(*shape, 576), None)
        else:
            self.caches = tuple(
                self.fill(rng, total, used, kv_heads, n).astype(type_).reshape(*shape, kv_heads, n)
                for n in self.dims
            )
        self.share_prefix()
        q = rng.normal(0, 1, (len(self.seen), h, self.dims[0]))
        self.q = q.astype(ref.BF16 if self.is_latent else type_)
        self.sink = rng.normal(0, 2, h).astype(np.float32) if self.has_sink else None
        self.scale = float(self.dims[0] ** -0.5)

    @staticmethod
    def fill(rng, total: int, used: list[int], heads: int, values: int) -> np.ndarray:
        rows = np.full((total, heads, values), np.nan, np.float32)
        rows[used] = rng.normal(0, 1, (len(used), heads, values))
        return rows

    def share_prefix(self) -> None:
        """The tokens of a shared prefix are the same in each request's own pages. A request without
        queries has not seen its own."""
        batch, size = self.batch, self.batch.page_size
        has_queries = [b for i, b in enumerate(batch.pool) if self.count_queries(i)]
        for b in batch.pool if batch.prefix and has_queries else ():
            for x in range(batch.prefix):
                first = self.slot(batch.req_to_token[int(has_queries[0])], x)
                own = self.slot(batch.req_to_token[int(b)], x)
                for cache in self.caches:
                    if cache is not None:
                        cache[own // size, own % size] = cache[first // size, first % size]

    # --- what a query sees ------------------------------------------------------------------------

    def slot(self, row: np.ndarray, x: int) -> int:
        """The slot of position x, by its page."""
        size = self.batch.page_size
        first = int(row[x - x % size])
        is_pooled = self.batch.mapping is not None and self.kind in ("window", "local")
        page = (map_slot(self.batch, first) if is_pooled else first) // size
        return -1 if page < 0 else page * size + x % size

    def rows_of(self, b: int) -> list[list[int]]:
        """The slots that each query of a request sees."""
        batch = self.batch
        n = int(batch.seq_lens[b])
        count = self.count_queries(b)
        if n <= 0:
            return [[]] * count
        row = batch.req_to_token[int(batch.pool[b])]
        e = 0 if batch.encoder_lens is None else int(batch.encoder_lens[b])
        if self.kind == "cross":
            return [[self.slot(row, x) for x in range(e)]] * count
        if batch.is_tree:
            return [self.branch(b, i, row, n) for i in range(count)]
        added = {"draft": (batch.spec_step or 0) + 1, "target_verify": batch.num_draft_tokens}
        keys = n + added.get(batch.mode, 0)
        rows = []
        for i in range(count):
            p = keys - count + i
            chunk = batch.attention_chunk
            rows.append(
                [
                    self.slot(row, e + j)
                    for j in range(p + 1)
                    if (self.kind != "window" or j >= p - self.left)
                    and (self.kind != "local" or j // chunk == p // chunk)
                ]
            )
        return rows

    def branch(self, b: int, i: int, row: np.ndarray, n: int) -> list[int]:
        """The prefix and a row's own drafts; a window is the end of that list."""
        batch = self.batch
        prefix = [self.slot(row, x) for x in range(n)]
        if batch.mode == "draft":
            first = (b * batch.topk + i) * batch.speculative_num_steps
            own = [int(s) for s in batch.out_cache_loc[first : first + batch.spec_step + 1]]
        else:
            drafts = row[n : n + batch.num_draft_tokens]
            own = [int(s) for s, sees in zip(drafts, batch.masks[b][i], strict=True) if sees]
        if self.kind == "window":
            prefix = [int(s) for s in row[:n]]
            if batch.mapping is not None:
                prefix = [map_slot(batch, s) for s in prefix]
                own = [map_slot(batch, s) for s in own]
            return (prefix + own)[max(len(prefix + own) - self.left - 1, 0) :]
        return prefix + own

    def count_queries(self, b: int) -> int:
        batch = self.batch
        if batch.mode in ("extend", "mixed", "draft_extend"):
            given = batch.seq_lens if batch.extend_seq_lens is None else batch.extend_seq_lens
            return max(int(given[b]), 0) if batch.seq_lens[b] > 0 else 0
        counts = {"draft": max(batch.topk, 1), "target_verify": batch.num_draft_tokens}
        return counts.get(batch.mode, 1)

    # --- results ----------------------------------------------------------------------------------

    def reference(self) -> ref.Attention:
        tokens, h = len(self.seen), self.heads[0]
        shape, wide = (tokens, h), (tokens, h, self.dims[1])
        want = ref.Attention(
            out=np.zeros(wide),
            lse=np.full(shape, -np.inf),
            max_logits=np.full(shape, -np.inf),
            p_abs_v=np.zeros(wide),
            logit_abs=np.zeros(shape),
            nope_abs=np.zeros(shape),
            f16_scale=np.zeros(shape),
        )
        k_rows, v_rows = self.heads_of_rows()
        for t, slots in enumerate(self.seen):
            if slots:
                self.attend(want, t, k_rows[slots], v_rows[slots])
        return want

    def heads_of_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of all query heads by slot, float64."""
        if self.is_latent:
            rows = ref.to_f32(self.caches[0]).astype(np.float64).reshape(-1, 1, 576)
            rows = rows.repeat(self.heads[0], 1)
            return rows, rows[..., :512]
        share = self.heads[0] // self.heads[1]
        k, v = (ref.to_f32(x).astype(np.float64).reshape(-1, *x.shape[2:]) for x in self.caches)
        return k.repeat(share, 1), v.repeat(share, 1)

    def attend(self, want: ref.Attention, t: int, k: np.ndarray, v: np.ndarray) -> None:
        q = ref.to_f32(self.q[t]).astype(np.float64) * self.scale
        logit = np.einsum("hd,jhd->hj", q, k)
        want.logit_abs[t] = np.einsum("hd,jhd->hj", np.abs(q), np.abs(k)).max(1)
        if self.softcap:
            logit = self.softcap * np.tanh(logit / self.softcap)
        top = logit.max(1)
        weight = np.exp(logit - top[:, None])
        total = weight.sum(1)
        p = weight / total[:, None]
        want.lse[t] = top + np.log(total)
        factor = np.ones(self.heads[0])
        if self.sink is not None:
            factor = 1 / (1 + np.exp(self.sink.astype(np.float64) - want.lse[t]))
        want.out[t] = np.einsum("hj,jhd->hd", p, v) * factor[:, None]
        want.p_abs_v[t] = np.einsum("hj,jhd->hd", p, np.abs(v)) * factor[:, None]

    def run(self, metadata, **more: Any) -> dict[str, np.ndarray]:
        put = device.Journey().put if device.DEVICE != "cpu" else lambda x: x
        caches = [put(x) for x in self.caches]
        out, lse = sparse_mla.paged.attention(
            metadata,
            put(self.q),
            *caches,
            softmax_scale=self.scale,
            softcap=self.softcap,
            attn_sink=None if self.sink is None else put(self.sink),
            sliding_window_size=self.left if self.kind == "window" else -1,
            is_local=self.kind == "local",
            is_cross=self.kind == "cross",
            **more,
        )
        return {"out": device.host(out), "lse": device.host(lse)}

    def check(self, metadata, **more: Any) -> dict[str, np.ndarray]:
        got = self.run(metadata, **more)
        is_merged = self.kind == "full" and (metadata.expand or metadata.prefix) is not None
        merges = {"merges": 1} if is_merged and self.is_latent else {}
        assert_within_bounds(self.reference(), got, **merges)
        return got


def kinds_of(rng, batch: Batch) -> list[tuple[str, int]]:
    """The layers that a batch serves, each with the left of its window."""
    kinds = [("full", -1)]
    most = batch.sliding_window_size if batch.is_tree else batch.max_context_len
    if most >= 0 and not batch.prefix:
        kinds.append(("window", int(rng.integers(0, most + 1))))
        if batch.sliding_window_size >= 0:
            kinds.append(("window", batch.sliding_window_size))
    if batch.attention_chunk:
        kinds.append(("local", -1))
    if batch.encoder_lens is not None:
        kinds.append(("cross", -1))
    return kinds
