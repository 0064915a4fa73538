"""The compressor over the steps of an engine: chunks of a prompt, drafts that are rejected, pages
that are freed, rings. No byte that a query can see depends on them."""

from __future__ import annotations

import os

import numpy as np
import pytest
import reference_compressor as compressor
import row_formats as rows
from helpers import assert_same_bits
from library import sparse_mla

F32 = np.float32
HISTORIES = int(os.environ.get("SMLA_DRAFT_HISTORIES", "1200"))  # 10000 take a minute
BATCH = 100  # histories that run side by side, as requests of one batch
CBS = 4  # rows per page of the cache
CACHES = {128: "fp8_index", 512: "fp8_v4"}  # caches of the indexer's keys and of attention's


def angles(count: int) -> np.ndarray:
    turn = np.random.default_rng(0).uniform(-7, 7, (count, 32))
    return np.concatenate([np.cos(turn), np.sin(turn)], 1).astype(F32)


def first_needed(length: int, ratio: int) -> int:
    """The first position whose state is needed after `length` accepted tokens."""
    return max(0, ratio * (length // ratio - compressor.overlap(ratio) + 1))


def test_first_needed_by_hand():
    assert [first_needed(length, 4) for length in (7, 8, 11, 12)] == [0, 4, 4, 8]
    assert first_needed(300, 128) == 256


class Engine:
    """Requests with tokens of random values, their states and their compressed rows."""

    def __init__(
        self, num_requests: int, length: int, ratio: int, sbs: int, ring=0, seed=0, dim=128
    ):
        rng = np.random.default_rng([seed, ratio])
        self.ratio, self.sbs, self.ring, self.length = ratio, sbs, ring, length
        self.c = compressor.overlap(ratio)
        width = self.c * dim
        self.kv, self.score = rng.normal(0, 2, (2, num_requests, length, width)).astype(F32)
        self.ape = rng.normal(0, 1, (ratio, width)).astype(F32)
        self.weight = rng.normal(1, 0.3, dim).astype(F32)
        blocks = -(-length // sbs)
        used = ring or blocks
        numbers = rng.permutation(num_requests * used).reshape(num_requests, used)
        self.table = numbers[:, np.arange(blocks) % used].astype(np.int32)
        self.state = np.full((num_requests * used, sbs, 2 * width), np.nan, F32)
        kv_blocks = -(-(length // ratio) // CBS) + 1
        self.kv_table = rng.permutation(num_requests * kv_blocks).reshape(num_requests, -1)
        self.format = rows.FORMATS[CACHES[dim]]
        self.cache = np.zeros((num_requests * kv_blocks, CBS, self.format.row_bytes), np.uint8)
        self.cos_sin = angles(length)

    def state_slots(self, requests, positions) -> np.ndarray:
        return self.table[requests, positions // self.sbs] * self.sbs + positions % self.sbs

    def row_slots(self, requests, groups) -> np.ndarray:
        return self.kv_table[requests, groups // CBS] * CBS + groups % CBS

    def step(self, requests, positions, kv, score, fused: bool) -> None:
        """Runs tokens: `requests` and `positions` [T], neighbours in order."""
        closes = (positions + 1) % self.ratio == 0
        row_slots = np.where(closes, self.row_slots(requests, positions // self.ratio), -1)
        slots = self.state_slots(requests, positions)
        assert len(np.unique(slots)) == len(slots)
        step = {"kv": kv, "score": score, "ape": self.ape}
        if not fused:
            sparse_mla.save_partial_states(kv, score, self.ape, positions, self.state, slots)
            step = {}
        sparse_mla.compress_norm_rope_store(
            self.state,
            self.table,
            requests.astype(np.int32),
            positions,
            slots,
            self.cache,
            row_slots,
            self.weight,
            self.cos_sin,
            eps=1e-6,
            ratio=self.ratio,
            **step,
        )

    def run(self, requests, starts, counts, accepted, rng, fused: bool) -> None:
        """A step of counts[i] tokens of requests[i] from starts[i] on, of which the first
        accepted[i] are those of the request. The others are rejected drafts: any values."""
        which = np.repeat(np.arange(len(requests)), counts)
        offsets = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
        positions = np.asarray(starts)[which] + offsets
        tokens = np.asarray(requests)[which]
        kv, score = self.kv[tokens, positions], self.score[tokens, positions]
        wrong = offsets >= np.asarray(accepted)[which]
        kv[wrong], score[wrong] = rng.normal(0, 5, (2, wrong.sum(), kv.shape[1])).astype(F32)
        self.step(tokens, positions, kv, score, fused)

    def rows_of(self, requests, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The bytes of the first `count` compressed rows of each request: data and scales."""
        requests = np.asarray(requests)
        slots = self.row_slots(requests[:, None], np.arange(count))
        flat = self.cache.reshape(len(self.cache), -1)
        pages, offsets = np.divmod(slots, CBS)
        data, scales = np.split(flat, [CBS * self.format.data_bytes], axis=1)
        return tuple(x.reshape(len(x), CBS, -1)[pages, offsets] for x in (data, scales))

    def free_pages(self, request: int, length: int) -> None:
        """Frees the pages that nothing needs any more after `length` accepted tokens."""
        for block in range(first_needed(length, self.ratio) // self.sbs):
            if self.table[request, block] >= 0:
                self.state[self.table[request, block]] = np.nan
                self.table[request, block] = -1


def one_by_one(engine: Engine) -> None:
    """The undrafted run: every request token by token, all requests side by side."""
    requests = np.arange(len(engine.table))
    ones = np.ones(len(requests), np.int64)
    rng = np.random.default_rng(0)
    for p in range(engine.length):
        engine.run(requests, p * ones, ones, ones, rng, fused=False)


@pytest.mark.parametrize("dim", CACHES)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("ratio", [1, 2, 4, 7, 128])
def test_chunks(ratio, fused, dim):
    """One prefill, random chunks, token by token: the same states and the same rows."""
    length = 300 if ratio == 128 else 70
    engines = [Engine(3, length, ratio, sbs=4, dim=dim) for _ in range(3)]
    one_by_one(engines[0])
    requests = np.array([2, 0, 1])
    rng = np.random.default_rng(ratio)
    full = np.full(3, length)
    engines[1].run(requests, 0 * full, full, full, rng, fused)
    done = np.zeros(3, np.int64)
    while (done < length).any():
        left = np.flatnonzero(done < length)
        counts = np.minimum(rng.integers(1, 3 * ratio + 2, len(left)), length - done[left])
        order = rng.permutation(len(left))
        engines[2].run(left[order], done[left[order]], counts[order], counts[order], rng, fused)
        done[left] += counts
    for engine in engines[1:]:
        assert_same_bits(engine.state, engines[0].state, "state")
        assert_same_bits(engine.cache, engines[0].cache, "cache")


def least_ring(ratio: int, most: int, sbs: int) -> int:
    """Pages of a ring that has a row for each position from keep(L) to L + most - 1."""
    return -(-(compressor.overlap(ratio) * ratio + most - 1) // sbs)


def draft(ratio: int, sbs: int, ring: bool, seed: int, most=5, batch=BATCH, dim=128) -> None:
    """Random histories, against the same requests token by token."""
    length = 4 * ratio + 9
    rng = np.random.default_rng(seed)
    pages = least_ring(ratio, most, sbs) if ring else 0
    plain = Engine(batch, length, ratio, sbs, seed=seed, dim=dim)
    drafted = Engine(batch, length, ratio, sbs, ring=pages, seed=seed, dim=dim)
    one_by_one(plain)
    done = np.zeros(batch, np.int64)
    want = plain.rows_of(np.arange(batch), length // ratio)
    while (done < length).any():
        left = np.flatnonzero(done < length)
        counts = np.minimum(rng.integers(1, most + 1, len(left)), length - done[left])
        accepted = rng.integers(0, counts + 1)
        order = rng.permutation(len(left))
        some = left[order]
        fused = bool(rng.integers(2))
        drafted.run(some, done[some], counts[order], accepted[order], rng, fused)
        done[left] += accepted
        groups = done // ratio
        got = drafted.rows_of(np.arange(batch), length // ratio)
        visible = np.arange(length // ratio) < groups[:, None]
        for x, y in zip(got, want, strict=True):
            assert np.array_equal(x[visible], y[visible])
        if not ring:
            for request in left[::7]:
                drafted.free_pages(request, done[request])
    keep = first_needed(length, ratio)
    requests, positions = np.divmod(np.arange(batch * (length - keep)), length - keep)
    positions = positions + keep
    states = [
        x.state.reshape(-1, x.state.shape[2])[x.state_slots(requests, positions)]
        for x in (drafted, plain)
    ]
    assert_same_bits(states[0], states[1], "the states that the next step needs")


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize(("ratio", "sbs"), [(4, 1), (4, 4), (1, 1), (2, 3), (3, 1), (8, 8)])
def test_drafts_leave_no_trace(ratio, sbs, ring):
    """SMLA_DRAFT_HISTORIES random histories in all: steps of 1 to 5 tokens, of which any number is
    accepted, none included, in two calls or in one. After each step every row that a query can see
    is that of the undrafted run."""
    for seed in range(-(-HISTORIES // (12 * BATCH))):
        draft(ratio, sbs, ring, seed)


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize(("ratio", "sbs"), [(4, 4), (2, 3)])
def test_drafts_of_attention_s_keys(ratio, sbs, ring):
    draft(ratio, sbs, ring, seed=1, batch=30, dim=512)


@pytest.mark.parametrize("ring", [False, True])
def test_drafts_at_128(ring):
    draft(128, 8, ring, seed=0, batch=5)


def test_the_ring_is_the_least():
    """With a row less, a draft overwrites a state that a group still needs."""
    assert least_ring(4, 5, 1) == 12
    engine, less = (Engine(1, 40, 4, 1, ring=n) for n in (12, 11))
    for one in (engine, less):
        rng = np.random.default_rng(0)
        for p in range(7):
            one.run([0], [p], [1], [1], rng, fused=True)
        for _ in range(2):  # the second step rewrites what the first one left
            one.run([0], [7], [5], [1], rng, fused=False)
    plain = Engine(1, 40, 4, 1)
    one_by_one(plain)
    want = plain.rows_of([0], 2)
    assert_same_bits(engine.rows_of([0], 2)[0], want[0])
    assert not np.array_equal(less.rows_of([0], 2)[0], want[0])


@pytest.mark.parametrize("fmt", rows.FORMATS)
def test_rows_are_those_of_the_insert(fmt):
    """The bytes of quantize_and_insert_k_cache, or the indexer's, of the bf16 row."""
    f = rows.FORMATS[fmt]
    rng = np.random.default_rng(1)
    dim, count = f.width, 12
    state = rng.normal(0, 2, (count, 1, 2 * dim)).astype(F32)
    token = np.arange(count)
    zero = np.zeros(count, np.int32)
    caches = [rows.Pages(fmt, pages=4, block_size=5) for _ in range(2)]
    keys = np.zeros((count, dim), rows.FORMATS["bfloat16"].row_shape[1])
    arrays = [state, token[None].astype(np.int32), zero, token, token]
    weight, cos_sin = rng.normal(1, 0.3, dim).astype(F32), angles(count)
    options = {"eps": 1e-6, "ratio": 1}
    scale = {"kv_scale": 0.37} if f.scales == "cache" else {}
    sparse_mla.compress_norm_rope_store(
        *arrays, caches[0].cache, token, weight, cos_sin, **options, **caches[0].options, **scale
    )
    for t in range(count):
        group = compressor.find_group(state[:, 0], arrays[1][0], 1, t, 1, dim)
        keys[t] = compressor.key_bits(group, weight, cos_sin, 1e-6).view(keys.dtype)
    insert = "quantize_and_insert_k_cache" if dim == 512 else "indexer_k_quant_and_cache"
    getattr(sparse_mla, insert)(keys, caches[1].cache, token, **caches[1].options, **scale)
    assert_same_bits(caches[0].memory, caches[1].memory)
