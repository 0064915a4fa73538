"""Calls as of FlashAttention-3: batches of paged_attention (paged_cases) by its arguments. Dense
decodes of FlashMLA over several KV heads are such batches, too.

A batch is given ragged, uniform (as many queries of each request), or with a room of the cache for
each request in the place of a table.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from cases import picker
from dense_cases import Mask
from flash_mla_cases import Arrays
from helpers import assert_within_bounds
from paged_cases import Paged

from sparse_mla import flash_attn, flash_mla


@dataclass
class Attn(Paged):
    """A batch of `flash_attn_with_kvcache`."""

    is_uniform: bool = False
    has_rooms: bool = False  # no table: a page is all room of a request

    def kvcache(self) -> dict:
        """The arguments of `flash_attn_with_kvcache`."""
        q, k_cache, v_cache, table, lens = self.arguments()
        found = self.options
        found["sinks"] = found.pop("attn_sink", None)
        for name in ("cp", "num_splits"):
            del found[name]
        found |= {"q": q, "k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": lens}
        if self.has_rooms:
            assert table.shape[1] == 1
            found["cache_batch_idx"] = table[: len(lens), 0]
        else:
            found["page_table"] = table
        if self.is_uniform:
            del found["cu_seqlens_q"]
            for name in {"q", "qv"} & found.keys():
                x = found[name]
                found[name] = x.reshape(len(lens), max(self.query_lens, default=1), *x.shape[1:])
        return found

    def flat(self, out: np.ndarray, lse: np.ndarray) -> dict:
        """Results of the call as those of paged_attention, without rows of no request."""
        if self.is_uniform:
            batch, num_queries, *rest = out.shape
            assert lse.shape == (batch, self.heads, num_queries)
            out, lse = out.reshape(-1, *rest), lse.swapaxes(1, 2).reshape(-1, self.heads)
        else:
            assert lse.shape == (self.heads, self.tokens + self.padding)
            lse = lse.T
        return {"out": out[: self.tokens], "lse": np.ascontiguousarray(lse[: self.tokens])}

    def check(self, arrays: Arrays, **more) -> dict:
        """Runs the call, and compares it with fp64."""
        options = self.kvcache() | {"return_softmax_lse": True} | more
        out, lse = arrays.call(flash_attn.flash_attn_with_kvcache, **options)
        got = self.flat(out, lse)
        assert_within_bounds(self.reference(), got)
        return got


def draw(seed: int) -> Attn:
    """A random batch: masks, softcap, padding in front of keys, GQA, qv, e4m3 with descales."""
    rng = np.random.default_rng([seed, 79])
    pick = picker(rng)
    happens = lambda share: bool(rng.random() < share)  # noqa: E731
    count = int(rng.integers(0, 5))
    is_uniform, has_rooms, has_qv = happens(0.5), happens(0.3), happens(0.25)
    n = int(rng.integers(0, 5))
    queries = [n if is_uniform else int(rng.integers(0, 30)) for _ in range(count)]
    keys = [int(rng.integers(0, pick(3, 40, 150))) for _ in range(count)]
    pads = [int(rng.integers(0, 20)) for _ in range(count)] if happens(0.3) else None
    longest = max([1, *(a + b for a, b in zip(keys, pads or [0] * count, strict=True))])
    dims = pick((64, 64), (128, 128), (192, 128), (40, 24), (256, 256))
    q_type = pick("bf16", "bf16", "fp16", "e4m3")
    window = pick((-1, -1), (-1, -1), (int(rng.integers(0, 90)), -1), (3, 5), (0, 0), (-1, 2))
    kv_heads = pick(1, 2, 8)
    return Attn(
        queries,
        keys,
        kv_heads * pick(1, 3, 4),
        kv_heads,
        pick((64, 256), (64, 512)) if has_qv else dims,
        q_type,
        pick(q_type, "e4m3"),
        mask=Mask(happens(0.6), window, pick(0, 0, 0, 1, 7, 64)),
        sink=happens(0.3),
        softcap=pick(0.0, 0.0, 0.3, 15.0),
        padding=0 if is_uniform else pick(0, 2),
        is_spread=happens(0.3),
        descales=pick("", "number", "one", "rows", "column"),
        page_size=longest + pick(0, 3) if has_rooms else pick(1, 3, 16, 64),
        layout=pick("apart", "row", "page", "heads"),
        has_qv=has_qv,
        leftpad=pads,
        holes=0.0 if has_rooms else pick(0.0, 0.2),
        has_bytes=happens(0.2),
        is_uniform=is_uniform,
        has_rooms=has_rooms and max(keys, default=0) > 0,
        seed=seed,
    )


@dataclass
class Heads(Paged):
    """A dense decode of FlashMLA over several KV heads: values are the first 512 of each key."""

    def make_caches(self) -> tuple[np.ndarray, np.ndarray]:
        self.v = self.k[..., :512]
        k, _ = super().make_caches()
        return k, k[..., :512]

    def decode(self, arrays: Arrays, **more) -> list[np.ndarray]:
        """out [b, s_q, H, 512] and lse [b, H, s_q]."""
        q, k_cache, _, table, lens = self.arguments()
        q = q.reshape(len(lens), max(self.query_lens, default=1), *q.shape[1:])
        options = {"causal": self.mask.causal, "attn_sink": self.attn_sink} | more
        return arrays.call(
            flash_mla.flash_mla_with_kvcache, q, k_cache, table, lens, 512, None, **options
        )

    def check(self, arrays: Arrays) -> None:
        """Compares a call with fp64. Rows without keys have an lse of +inf."""
        out, lse = self.decode(arrays)
        want = self.reference()
        assert lse.shape == (len(self.query_lens), self.heads, out.shape[1])
        lse = np.ascontiguousarray(lse.swapaxes(1, 2)).reshape(-1, self.heads)
        empty = np.isneginf(want.lse)
        assert np.isposinf(lse[empty]).all()
        got = {"out": out.reshape(-1, *out.shape[2:]), "lse": np.where(empty, -np.inf, lse)}
        assert_within_bounds(want, got)
