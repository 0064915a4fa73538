"""Batches of paged_attention, and what it must give for them.

A batch is one of varlen_attention (varlen_cases.Varlen) whose keys lie in pages. The reference asks
of every key and every query whether the one sees the other, and of every key whether its entry of
the table names a place. All bytes of the caches that no query sees are NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np
import reference as ref
from dense_cases import owner
from helpers import assert_same_bits, assert_within_bounds
from library import sparse_mla
from varlen_cases import DTYPES, Varlen, spread

LAYOUTS = ("apart", "row", "page", "heads")


def assert_same(got: dict, want: dict) -> None:
    for name in ("out", "lse"):
        assert_same_bits(got[name], want[name], name)


def apart(x: np.ndarray) -> np.ndarray:
    """The same integers as a view with odd strides, with junk between them."""
    junk = np.full(tuple(2 * n + 1 for n in x.shape), 2**31 - 1, x.dtype)
    view = junk[tuple(slice(1, None, 2) for _ in x.shape)]
    view[...] = x
    return view


@dataclass
class Paged(Varlen):
    """A batch whose keys lie in pages. D and Dv are those of the caches, key_lens is without the
    padding in front of keys. Rows of `k` and `v` are the keys and values of all requests."""

    page_size: int = 16
    layout: str = "apart"  # "row": K and V in a row, "page": in a page, "heads": heads first
    has_slots: bool = False
    has_qv: bool = False
    is_decode: bool = False  # without cu_seqlens_q: a token of each request
    leftpad: list[int] | None = None
    holes: float = 0.0  # the share of bad entries of the table
    missing: int = 0  # columns that the table lacks
    has_bytes: bool = False  # e4m3 arrays are given as uint8

    def __post_init__(self) -> None:
        super().__post_init__()
        assert not self.is_decode or (set(self.query_lens) <= {1} and not self.padding)
        rng = np.random.default_rng([self.seed, self.page_size, self.tokens, self.keys])
        if self.has_qv:
            latent = np.random.default_rng([self.seed, self.heads, self.tokens])
            self.qv = self.make_rows(latent, self.tokens, self.heads, self.dims[1], self.q_type)
        self.pads = self.leftpad or [0] * len(self.key_lens)
        self.entry = 1 if self.has_slots else self.page_size
        # The positions of each request's table row that keys of this rank have.
        self.rows = [[x for _, x in self.places(b)] for b in range(len(self.key_lens))]
        lengths = [max(rows, default=-1) + 1 for rows in self.rows]
        own = [-(-n // self.page_size) for n in lengths]
        self.pages = sum(own) + 3
        self.table = self.make_table(rng, lengths, own)
        self.k_cache, self.v_cache = self.make_caches()
        self.put_keys()

    @property
    def softmax_scale(self) -> float:
        return (self.dims[0] + (self.dims[1] if self.has_qv else 0)) ** -0.5

    # --- where keys lie ---------------------------------------------------------------------------

    def places(self, b: int) -> Iterator[tuple[int, int]]:
        """Each key of a request that this rank has, and its position in the row of the table."""
        cp = self.mask.cp
        for j in range(self.key_lens[b]):
            if cp is None:
                yield j, self.pads[b] + j
            elif owner(j, cp)[0] == cp[0]:
                yield j, owner(j, cp)[1]

    def seen_rows(self, b: int) -> set[int]:
        """The positions of a request that any of its queries sees."""
        n_q, n_k = self.query_lens[b], self.key_lens[b]
        rows = (self.mask.rows_of(n_q, n_k, i) for i in range(n_q))
        return {self.pads[b] + x for found in rows for x in found}

    def make_table(self, rng, lengths: list[int], own: list[int]) -> np.ndarray:
        """Each request has pages of its own, in any order. Columns behind its length, and half of
        those whose keys no query sees, hold junk."""
        entry, limit = self.entry, self.pages * self.page_size // self.entry
        width = max(0, -(-max(lengths, default=0) // entry) - self.missing)
        spare = 1 - self.seed % 2  # a row of no request
        table = rng.integers(-5, limit + 9, (len(lengths) + spare, width)).astype(np.int32)
        pages = rng.permutation(self.pages)
        bad = np.array([-1, -(2**31), limit, 2**31 - 1])
        for b, length in enumerate(lengths):
            mine, pages = pages[: own[b]].astype(np.int64), pages[own[b] :]
            if entry == 1:
                mine = (mine[:, None] * self.page_size + np.arange(self.page_size)).ravel()[:length]
            mine = mine[:width]
            seen = {x // entry for x in self.seen_rows(b)}
            for column in range(len(mine)):
                is_junk = column not in seen and rng.random() < 0.5
                if is_junk or rng.random() < self.holes:
                    mine[column] = rng.choice(bad)
            table[b, : len(mine)] = mine
        return table

    def slot_at(self, b: int, x: int) -> int:
        """The slot of a position, -1 for a hidden key."""
        column = x // self.entry
        if column >= self.table.shape[1]:
            return -1
        slot = int(self.table[b, column]) * self.entry + x % self.entry
        return slot if 0 <= slot < self.pages * self.page_size else -1

    # --- caches -----------------------------------------------------------------------------------

    def make_caches(self) -> tuple[np.ndarray, np.ndarray]:
        """[P, ps, Hk, D] and [P, ps, Hk, Dv], full of NaN."""
        dim, value_dim = self.dims
        gap = 3 * self.is_spread  # elements behind a row, odd on purpose
        sizes = (self.pages, self.page_size + self.is_spread, self.kv_heads)
        cut = (slice(self.pages), slice(self.page_size), slice(self.kv_heads))

        def full(*shape: int) -> np.ndarray:
            memory = np.full(prod(shape) * DTYPES[self.kv_type].itemsize, 0xFF, np.uint8)
            return memory.view(DTYPES[self.kv_type]).reshape(shape)

        if self.layout == "row":
            both = full(*sizes, dim + value_dim + gap)[cut]
            return both[..., :dim], both[..., dim : dim + value_dim]
        if self.layout == "page":
            both = full(sizes[0], 2, *sizes[1:], max(self.dims) + gap)
            return both[:, 0][cut][..., :dim], both[:, 1][cut][..., :value_dim]
        if self.layout == "heads":
            sizes = (sizes[0], sizes[2], sizes[1])
            k, v = (full(*sizes, n + gap).swapaxes(1, 2)[cut] for n in self.dims)
        else:
            k, v = (full(*sizes, n + gap)[cut] for n in self.dims)
        return k[..., :dim], v[..., :value_dim]

    def put_keys(self) -> None:
        """Writes the keys that a query sees."""
        starts = np.cumsum([0, *self.key_lens])
        for b in range(len(self.key_lens)):
            seen = self.seen_rows(b)
            for j, x in self.places(b):
                slot = self.slot_at(b, x) if x in seen else -1
                if slot >= 0:
                    at = divmod(slot, self.page_size)
                    self.k_cache[at], self.v_cache[at] = (
                        y[starts[b] + j] for y in (self.k, self.v)
                    )

    # --- the call ---------------------------------------------------------------------------------

    def given(self, x: np.ndarray) -> np.ndarray:
        return x.view(np.uint8) if self.has_bytes and x.dtype == ref.E4M3 else x

    @property
    def seq_lens(self) -> list[int]:
        """A request without positions may have a negative length."""
        lens = [n + pad for n, pad in zip(self.key_lens, self.pads, strict=True)]
        return [n or -(self.seed % 3) for n in lens]

    @property
    def options(self) -> dict:
        vector = apart if self.is_spread else lambda x: x
        found = super().options | {"cp": self.mask.cp}
        if not self.is_decode:
            found["cu_seqlens_q"] = vector(np.cumsum([0, *self.query_lens]).astype(np.int32))
        if self.leftpad is not None:
            found["cache_leftpad"] = vector(np.array(self.leftpad, np.int32))
        if self.has_slots:
            found["slot_table"] = vector(self.table)
        if self.has_qv:
            found["qv"] = self.given(spread(self.qv) if self.is_spread else self.qv)
        return found

    def arguments(self) -> tuple:
        vector = apart if self.is_spread else lambda x: x
        table = None if self.has_slots else vector(self.table)
        arrays = (spread(self.q) if self.is_spread else self.q, self.k_cache, self.v_cache)
        return *map(self.given, arrays), table, vector(np.array(self.seq_lens, np.int32))

    # --- what it must give ------------------------------------------------------------------------

    def keys_of(self, b: int, i: int) -> list[int]:
        rows = self.mask.rows_of(self.query_lens[b], self.key_lens[b], i)
        seen = {self.pads[b] + x for x in rows}
        return [j for j, x in self.places(b) if x in seen and self.slot_at(b, x) >= 0]

    def effective(self, b: int, queries: slice, keys: slice) -> tuple:
        q, k, v = super().effective(b, queries, keys)
        if self.has_qv:
            q = np.concatenate([self.values("q", self.qv[queries], b), q], -1)
            k = np.concatenate([v, k], -1)
        return q, k, v


def check(case: Paged) -> dict:
    """The results of a batch, which are within the bounds."""
    got = case.run(sparse_mla.paged_attention)
    assert_within_bounds(case.reference(), got)
    return got
