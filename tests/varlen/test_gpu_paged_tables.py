"""paged_attention over small random tables that are full of junk, on a GPU.

Entries in front of what a request's queries see, and behind it, are junk: negative, past the cache,
such that 32 bits bring them back into it, or places of other keys. So are some entries of keys that
a query would see; they hide these. All bytes of the caches that no query sees are NaN.

SMLA_RANDOM_CASES=1000 runs the cases of seeds 0 to 999; the default is 10000 cases.
SMLA_RANDOM_SEED=4711 runs the case of that seed alone. Sanitizers are too slow for all of them:

    SMLA_RANDOM_CASES=1000 make memcheck ARGS='-m "" tests/varlen/test_gpu_paged_tables.py'
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import reference as ref
from dense_cases import Mask
from device import ON_CUDA
from helpers import assert_within_bounds, find_framework
from varlen_cases import DTYPES

import sparse_mla

SEED = os.environ.get("SMLA_RANDOM_SEED")
COUNT = int(os.environ.get("SMLA_RANDOM_CASES", 10_000))
SEEDS = [int(SEED)] if SEED else range(COUNT)
SHARDS = min(30, len(SEEDS))  # tests that the workers of pytest-xdist share
DIMS = [(64, 64), (128, 128), (256, 256)] * 2 + [(80, 80), (40, 24)]
INT32 = np.iinfo(np.int32)
# In torch every array has memory of its own, so memcheck sees what is read behind its end.
FRAMEWORK = find_framework("torch", "cuda") if ON_CUDA else find_framework("numpy")


class Draw:
    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng([seed, 80])

    def pick(self, *choices):
        return choices[self.rng.integers(len(choices))]

    def happens(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def ints(self, low: int, high, count: int | None = None):
        return self.rng.integers(low, high, count, endpoint=True)

    def rows(self, std: float, kind: str, *shape: int) -> np.ndarray:
        return (std * self.rng.standard_normal(shape, np.float32)).astype(DTYPES[kind])

    def mask(self) -> Mask:
        far = int(self.ints(0, 80))
        windows = (-1, -1), (-1, -1), (far, -1), (far, 0), (3, 5), (0, 0), (-1, 2)
        return Mask(self.happens(0.6), self.pick(*windows), self.pick(0, 0, 0, 1, 7, 32))


class Pages:
    """Where keys lie. An entry of the table names `entry` tokens: a page, or a slot."""

    def __init__(self, draw: Draw, lens: np.ndarray) -> None:
        self.page_size, self.has_slots = draw.pick(1, 3, 16, 64), draw.happens(0.25)
        self.entry = 1 if self.has_slots else self.page_size
        counts = -(-lens // self.page_size)
        self.count = counts.sum() + draw.ints(1, 3)
        self.limit = self.count * self.page_size // self.entry
        places = np.arange(self.count * self.page_size).reshape(self.count, self.page_size)
        own = np.split(draw.rng.permutation(places), np.cumsum(counts))
        self.slots = [x.ravel()[:n] for x, n in zip(own, lens, strict=False)]  # all positions

    def cache(self, rows: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """A cache with rows in these slots and NaN in all others."""
        _, heads, dim = rows.shape
        memory = np.full((self.count * self.page_size, heads, dim * rows.itemsize), 0xFF, np.uint8)
        memory.view(rows.dtype)[slots] = rows
        return memory.view(rows.dtype).reshape(self.count, self.page_size, heads, dim)

    def bad_entries(self, draw: Draw, *parts: int) -> np.ndarray:
        """Entries that hide keys. The last ones do not where 32 bits count parts of tokens."""
        found = [-1, -draw.ints(1, self.limit), INT32.min, INT32.min + draw.ints(0, self.limit)]
        found += [self.limit, self.limit + draw.ints(1, 9), draw.ints(self.limit, INT32.max)]
        found += [2**32 // (n * self.entry) + draw.ints(0, self.limit) for n in parts]
        return np.minimum(found, INT32.max)


class Request:
    """`slots` are those of all positions, of which `pad` are in front of the first key."""

    def __init__(self, draw: Draw, mask: Mask, entry: int, n_q: int, slots: np.ndarray, pad: int):
        self.n_q, self.n_k, self.slots = n_q, len(slots) - pad, slots[pad:]
        self.entries = slots[::entry] // entry
        columns = np.arange(pad, len(slots)) // entry
        pairs = ((j, p) for p in range(self.n_k - n_q, self.n_k) for j in range(self.n_k))
        sees = np.array([mask.sees(*x) for x in pairs], bool).reshape(n_q, self.n_k)
        self.is_used = np.isin(np.arange(len(self.entries)), columns[sees.any(0)])
        chances = draw.rng.random(len(self.entries))
        self.is_hidden = self.is_used & (chances < draw.pick(0, 0.1, 0.5))
        self.sees = sees & ~self.is_hidden[columns]
        self.is_seen = self.sees.any(0)

    def write(self, draw: Draw, row: np.ndarray, bad: np.ndarray) -> None:
        """Writes over junk the entries that a query looks at, and half of the others."""
        row = row[: len(self.entries)]
        is_kept = self.is_used | (draw.rng.random(len(row)) < 0.5)
        row[is_kept] = self.entries[is_kept]
        row[self.is_hidden] = draw.rng.choice(bad, self.is_hidden.sum())

    def attend(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> list[np.ndarray]:
        """out, lse, p_abs_v and logit_abs of ref.Attention. Logits are small."""
        q, k, v = (x.astype(np.float64) for x in (q, k, v))
        (heads, dim), kv_heads = q.shape[1:], k.shape[1]
        q = q.reshape(self.n_q, kv_heads, heads // kv_heads, dim).transpose(1, 2, 0, 3)
        k, v = k.transpose(1, 2, 0)[:, None], v.swapaxes(0, 1)[:, None]
        weights = np.where(self.sees, np.exp(scale * (q @ k)), 0)
        sizes = np.where(self.sees, scale * (np.abs(q) @ np.abs(k)), 0)
        total = weights.sum(-1)
        p = weights / np.where(total, total, 1)[..., None]
        with np.errstate(divide="ignore"):
            found = p @ v, np.log(total), p @ np.abs(v), sizes.max(-1, initial=0)
        return [x.reshape(heads, *x.shape[2:]).swapaxes(0, 1) for x in found]


class Case:
    """A batch, and the arrays and options of its call."""

    def __init__(self, seed: int) -> None:
        draw = Draw(seed)
        count, is_decode = draw.ints(1, 6), draw.happens(0.4)
        n_q = np.ones(count, int) if is_decode else draw.ints(0, 5, count)
        lens = draw.ints(0, 70, count)
        lens[-1] = draw.ints(71, 400) if draw.happens(0.2) else lens[-1]
        pads = draw.ints(0, lens, count) if draw.happens(0.35) else 0 * lens
        mask, pages = draw.mask(), Pages(draw, lens)
        each = zip(n_q, pages.slots, pads, strict=True)
        self.requests = [Request(draw, mask, pages.entry, *x) for x in each]
        self.draw_rows(draw, padding=0 if is_decode else draw.ints(0, 2))
        numbers = {"cache_seqlens": np.where(lens, lens, draw.pick(0, -1, INT32.min))}
        numbers["slot_table" if pages.has_slots else "block_table"] = self.draw_table(draw, pages)
        numbers |= {"cache_leftpad": pads} if pads.any() else {}
        numbers |= {} if is_decode else {"cu_seqlens_q": np.cumsum([0, *n_q])}
        self.arrays = {name: x.astype(np.int32) for name, x in numbers.items()}
        self.arrays |= {"q": self.q} | self.caches(pages)
        self.options = mask.options | {"softmax_scale": self.scale}
        self.options["num_splits"] = draw.pick(0, 1, 3)

    def draw_rows(self, draw: Draw, padding: int) -> None:
        """Each value has one large element, where it shows that a key is missing."""
        kind, (dim, value_dim) = draw.pick("bf16", "fp16"), draw.pick(*DIMS)
        kv_kind, kv_heads = draw.pick(kind, kind, kind, "e4m3"), draw.ints(1, 2)
        tokens, keys = (sum(getattr(r, name) for r in self.requests) for name in ("n_q", "n_k"))
        self.q = draw.rows(1, kind, tokens + padding, kv_heads * draw.pick(1, 2, 4), dim)
        self.q[tokens:] = np.nan
        self.k = draw.rows(0.5, kv_kind, keys, kv_heads, dim)
        self.v = draw.rows(0.1, kv_kind, keys, kv_heads, value_dim)
        large = draw.rng.integers(0, value_dim, (keys, kv_heads, 1))
        np.put_along_axis(self.v, large, self.v.dtype.type(4), -1)
        self.scale = dim**-0.5

    def draw_table(self, draw: Draw, pages: Pages) -> np.ndarray:
        elements = self.k.shape[1] * self.k.shape[2]
        bad = pages.bad_entries(draw, 1, elements, elements * self.k.itemsize)
        junk = np.concatenate([bad, draw.ints(0, pages.limit - 1, len(bad))])
        width = max(len(r.entries) for r in self.requests) + draw.ints(1, 20)
        table = draw.rng.choice(junk, (len(self.requests) + draw.ints(0, 2), width))
        for request, row in zip(self.requests, table, strict=False):
            request.write(draw, row, bad)
        return table

    def caches(self, pages: Pages) -> dict[str, np.ndarray]:
        is_seen = np.concatenate([r.is_seen for r in self.requests])
        slots = np.concatenate([r.slots for r in self.requests])[is_seen]
        return {f"{x}_cache": pages.cache(getattr(self, x)[is_seen], slots) for x in "kv"}

    def reference(self) -> ref.Attention:
        queries, keys = (np.cumsum([getattr(r, x) for r in self.requests]) for x in ("n_q", "n_k"))
        rows = map(np.split, (self.q, self.k, self.v), (queries, keys, keys))
        each = zip(self.requests, *rows, strict=False)
        results = zip(*(r.attend(*x, self.scale) for r, *x in each), strict=True)
        out, lse, p_abs_v, logit_abs = map(np.concatenate, results)
        return ref.Attention(out, lse, lse, p_abs_v, logit_abs, 0 * logit_abs, 0 * logit_abs)


def check(case: Case) -> None:
    moved = {"block_table": None} | {key: FRAMEWORK.put(x) for key, x in case.arrays.items()}
    out, lse = map(FRAMEWORK.get, sparse_mla.paged_attention(**moved, **case.options))
    want = case.reference()
    tokens = len(want.lse)
    assert_within_bounds(want, {"out": out[:tokens], "lse": lse[:tokens]})
    assert not out[tokens:].any()  # rows of no request
    assert np.isneginf(lse[tokens:]).all()


@pytest.mark.parametrize("shard", range(SHARDS))
def test_tables_of_junk(shard):
    for seed in SEEDS[shard::SHARDS]:
        try:
            check(Case(seed))
        except Exception as error:
            raise AssertionError(f"SMLA_RANDOM_SEED={seed}: {error}") from error
