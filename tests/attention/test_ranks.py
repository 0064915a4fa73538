"""Dense attention of a request whose cache is split over ranks: every rank has a cache, tables and
slots of its own keys alone, and the merged results are those of the whole request."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import reference as ref
from cases import make_sink, picker, random_bf16
from dense_cases import Cache, Mask, owner
from helpers import assert_same_bits, assert_within_bounds
from library import sparse_mla
from row_formats import E4M3_576

attend = sparse_mla.mla_attention
FORMATS = ("bf16", "bf16", "bf16_512", "fp8", "fp8_token", E4M3_576, "fp8_v4", "fp8_nope")


@dataclass
class World:
    """Requests with their keys, which a cache of any rank is made of."""

    query_lens: list[int]
    seq_lens: list[int]  # one below 0 counts as 0
    heads: int
    fmt: str
    block_size: int
    mask: Mask  # without a share
    has_slots: bool
    softcap: float
    num_splits: int
    padding: int
    seed: int

    def __post_init__(self) -> None:
        rng = np.random.default_rng([self.seed, 1])
        self.counts = [max(n, 0) for n in self.seq_lens]
        self.keys = [rng.normal(0, 1, (n, 576)).astype(np.float32) for n in self.counts]
        self.sink = make_sink(rng, self.heads)
        self.tokens = sum(self.query_lens)
        width = Cache(self.fmt, 1, 1).width
        self.q = random_bf16(rng, self.tokens + self.padding, self.heads, width)

    def own(self, b: int, cp) -> np.ndarray:
        """The positions of request b that a rank has, in their order."""
        every = np.arange(self.counts[b])
        return (
            every if cp is None else np.array([x for x in every if owner(x, cp)[0] == cp[0]], int)
        )

    def attend(self, cp, **more) -> tuple[np.ndarray, np.ndarray]:
        """The call of one rank. Where it has no key, its cache is NaN and its table junk."""
        rng = np.random.default_rng([self.seed, 2, 0 if cp is None else cp[0]])
        own = [self.own(b, cp) for b in range(len(self.seq_lens))]
        pages = [-(-len(x) // self.block_size) for x in own]
        cache = Cache(self.fmt, sum(pages) + 2, self.block_size)
        free = rng.permutation(sum(pages) + 2)
        entry = 1 if self.has_slots else self.block_size
        width = max([-(-len(x) // entry) for x in own], default=0) + int(rng.integers(0, 3))
        table = rng.integers(-5, cache.num_slots // entry + 9, (len(own), width)).astype(np.int32)
        for b, (positions, count) in enumerate(zip(own, pages, strict=True)):
            mine, free = free[:count], free[count:]
            slots = (mine[:, None] * self.block_size + np.arange(self.block_size)).ravel()
            slots = slots[: len(positions)].astype(np.int64)
            cache.put(slots, self.keys[b][positions])
            entries = slots if self.has_slots else mine
            table[b, : len(entries)] = entries
        options = {"softmax_scale": cache.width**-0.5, "softcap": self.softcap}
        options |= self.mask.options | cache.options | {"num_splits": self.num_splits, "cp": cp}
        options["cu_seqlens_q"] = np.cumsum([0, *self.query_lens]).astype(np.int32)
        if self.has_slots:
            options["slot_table"] = table
        lens = np.array(self.seq_lens, np.int32)
        out, lse = attend(
            self.q, cache.array, None if self.has_slots else table, lens, **(options | more)
        )
        return np.asarray(out), np.asarray(lse)

    def reference(self) -> ref.Attention:
        """The whole, from the keys as a cache of the format has them."""
        cache = Cache(self.fmt, 1, max(sum(self.counts), 1))
        first = np.cumsum([0, *self.counts])
        found = []
        for b, (n_q, n_k) in enumerate(zip(self.query_lens, self.counts, strict=True)):
            cache.put(first[b] + np.arange(n_k), self.keys[b])
            rows = [self.mask.rows_of(n_q, n_k, i) for i in range(n_q)]
            found += [cache.keys(first[b] + np.array(seen, np.int64)) for seen in rows]
        query = ref.to_f32(self.q[: self.tokens]).astype(np.float64) * cache.width**-0.5
        return ref.attend_keys(
            query, found, self.sink, has_scales=cache.has_scales, softcap=self.softcap
        )


def draw(seed: int) -> tuple[World, int, int]:
    rng = np.random.default_rng(seed)
    pick = picker(rng)
    ranks, interleave = int(rng.integers(1, 9)), int(rng.integers(1, 65))
    count = int(rng.integers(1, 4))
    query_lens = [int(rng.integers(0, 5)) for _ in range(count)]
    borders = [n * interleave for n in range(2 * ranks + 1) if n * interleave < 300]
    seq_lens = [max(int(pick(*borders)) + pick(-1, 0, 1), 0) for _ in range(count)]
    if rng.random() < 0.2:
        seq_lens[0] = -3  # padding
    window = pick((-1, -1), (-1, -1), (int(rng.integers(0, 90)), -1), (3, 5))
    mask = Mask(bool(rng.random() < 0.7), window, pick(0, 0, 0, 7, 64))
    world = World(
        query_lens, seq_lens, pick(1, 4, 16), pick(*FORMATS), pick(1, 3, 16), mask,
        bool(rng.random() < 0.3), pick(0.0, 0.0, 5.0), pick(0, 0, 1, 3), pick(0, 0, 2), seed,
    )  # fmt: skip
    return world, ranks, interleave


def check(world: World, ranks: int, interleave: int, what: str) -> int:
    """Returns how many parts of rows had no key."""
    parts = [world.attend((rank, ranks, interleave)) for rank in range(ranks)]
    num_empty = 0
    for rank, (out, lse) in enumerate(parts):
        empty = np.isneginf(lse)
        num_empty += int(empty[: world.tokens].sum())
        assert not np.asarray(out, np.float32)[empty].any(), f"{what}: a row of rank {rank}"
    outs, lses = (list(x) for x in zip(*parts, strict=True))
    out, lse = sparse_mla.merge_attn_partials(outs, lses, attn_sink=world.sink)
    got = {"out": np.asarray(out)[: world.tokens], "lse": np.asarray(lse)[: world.tokens]}
    try:
        assert_within_bounds(world.reference(), got, merges=1)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{what}") from error
    padding = np.asarray(out, np.float32)[world.tokens :]
    assert not padding.any(), f"{what}: rows of no request are 0"
    assert np.isneginf(np.asarray(lse)[world.tokens :]).all()
    return num_empty


@pytest.mark.parametrize("part", range(20))
def test_random_worlds(part):
    """25 worlds of each part: 1 to 8 ranks, interleaves of 1 to 64, lengths around every border,
    formats, drafts, padding, and ranks without a key."""
    num_empty = 0
    for seed in range(25 * part, 25 * part + 25):
        world, ranks, interleave = draw(seed)
        num_empty += check(world, ranks, interleave, f"seed {seed}, cp (., {ranks}, {interleave})")
    assert num_empty > 0


@pytest.mark.parametrize("fmt", sorted({*FORMATS}))
def test_one_rank_has_the_bits_of_no_share(fmt):
    for seed, interleave in enumerate((1, 5, 64, 1000)):
        world = World(
            [3, 1, 2], [130, 40, 2], 16, fmt, 16, Mask(True, (50, -1)), False, 0.0, 0, 0, seed
        )
        want, got = world.attend(None), world.attend((0, 1, interleave))
        for name, x, y in zip(("out", "lse"), want, got, strict=True):
            assert_same_bits(y, x, f"{name}, interleave {interleave}")
        out, lse = sparse_mla.merge_attn_partials([got[0]], [got[1]])
        assert_same_bits(np.asarray(out), want[0], "merged out")
        assert_same_bits(np.asarray(lse), want[1], "merged lse")


def test_ranks_without_a_key_leave_no_trace():
    """Eight ranks and runs of 64: only rank 0 has the first 64 positions."""
    world = World([2, 1], [64, 9], 4, "bf16", 16, Mask(True), False, 0.0, 0, 0, 1)
    parts = [world.attend((rank, 8, 64)) for rank in range(8)]
    for out, lse in parts[1:]:
        assert not np.asarray(out, np.float32).any()
        assert np.isneginf(lse).all()
    outs, lses = (list(x) for x in zip(*parts, strict=True))
    out, lse = sparse_mla.merge_attn_partials(outs, lses)
    assert_same_bits(np.asarray(out), parts[0][0], "out")
    assert_same_bits(np.asarray(lse), parts[0][1], "lse")
