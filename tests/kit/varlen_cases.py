"""Ragged batches of varlen_attention, and what it must give for them.

The reference asks of every key and every query, by the words of the contract, whether the one sees
the other (dense_cases.Mask). Rows of no request hold NaN, and so does memory between rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import reference as ref
from cases import make_sink
from dense_cases import Mask
from helpers import Guarded

F16 = np.dtype(np.float16)
DTYPES = {"bf16": ref.BF16, "fp16": F16, "e4m3": ref.E4M3}


def spread(x: np.ndarray) -> np.ndarray:
    """The same values as a view whose rows are apart, with NaN between them."""
    gaps = np.full((x.shape[0], *(n + 1 for n in x.shape[1:-1]), x.shape[-1] + 8), np.nan, x.dtype)
    view = gaps[(slice(None), *(slice(n) for n in x.shape[1:-1]), slice(x.shape[-1]))]
    view[...] = x
    return view


@dataclass
class Varlen:
    """A batch: query_lens and key_lens of its requests, and rows of no request behind them."""

    query_lens: list[int]
    key_lens: list[int]
    heads: int = 4
    kv_heads: int = 4
    dims: tuple[int, int] = (192, 128)  # D, Dv
    q_type: str = "bf16"
    kv_type: str = "bf16"
    pairs: str = ""  # "q", "k" or "qk": those are two arrays
    rope_dim: int = 8
    mask: Mask = field(default_factory=Mask)
    sink: bool = False
    softcap: float = 0.0
    padding: int = 0
    is_spread: bool = False
    descales: str = ""  # "", "number", "one", "rows", "column"
    out_type: np.dtype | None = None
    std: float = 1.0
    num_splits: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng([self.seed, self.heads, *self.query_lens, *self.key_lens])
        dim, value_dim = self.dims
        self.tokens, self.keys = sum(self.query_lens), sum(self.key_lens)
        self.q = self.make_rows(rng, self.tokens, self.heads, dim, self.q_type)
        self.k = self.make_rows(rng, self.keys, self.kv_heads, dim, self.kv_type)
        if "k" in self.pairs:  # one k_pe for all heads
            self.k[:, :, -self.rope_dim :] = self.k[:, :1, -self.rope_dim :]
        self.v = self.make_rows(rng, self.keys, self.kv_heads, value_dim, self.kv_type)
        self.attn_sink = make_sink(rng, self.heads) if self.sink else None
        shape = (len(self.query_lens), self.kv_heads)
        self.scales = {}
        for name, kind in (("q", self.q_type), ("k", self.kv_type), ("v", self.kv_type)):
            if self.descales and kind == "e4m3":
                scale = rng.uniform(0.2, 1.5, shape).astype(np.float32)
                if self.descales in ("number", "one"):
                    scale[...] = 0.75
                if self.descales == "column":
                    scale = np.broadcast_to(scale[:, :1], shape)
                self.scales[name] = scale

    def make_rows(self, rng, count: int, heads: int, dim: int, kind: str) -> np.ndarray:
        rows = rng.normal(0, self.std, (count + self.padding, heads, dim)).astype(np.float32)
        rows = rows.astype(DTYPES[kind])
        rows[count:] = np.nan
        return rows

    @property
    def softmax_scale(self) -> float:
        return self.dims[0] ** -0.5

    @property
    def options(self) -> dict:
        found = {key: x for key, x in self.mask.options.items() if key != "cp"}
        found |= {"softmax_scale": self.softmax_scale, "softcap": self.softcap}
        found["num_splits"] = self.num_splits
        if self.attn_sink is not None:
            found["attn_sink"] = self.attn_sink
        for name, scale in self.scales.items():
            if scale.size == 0 or self.descales == "number":
                found[f"{name}_descale"] = 0.75 if self.descales == "number" else scale
            else:
                found[f"{name}_descale"] = scale[0, :1].copy() if self.descales == "one" else scale
        return found

    def arguments(self) -> tuple:
        q, k, v = self.q, self.k, self.v
        if "q" in self.pairs:
            q = (q[..., : -self.rope_dim].copy(), q[..., -self.rope_dim :].copy())
        if "k" in self.pairs:
            k = (k[..., : -self.rope_dim].copy(), k[:, 0, -self.rope_dim :].copy())
        if self.is_spread:
            q, k, v = (
                tuple(map(spread, x)) if isinstance(x, tuple) else spread(x) for x in (q, k, v)
            )
        starts = (np.cumsum([0, *n]).astype(np.int32) for n in (self.query_lens, self.key_lens))
        return q, k, v, *starts

    def run(self, op, **more) -> dict:
        """Runs the batch with guarded outputs, of which rows of no request must stay."""
        rows = self.tokens + self.padding
        out_type = self.out_type or (F16 if self.q_type == "fp16" else ref.BF16)
        out = Guarded((rows, self.heads, self.dims[1]), out_type)
        lse = Guarded((rows, self.heads), np.float32)
        got = op(*self.arguments(), **self.options, out=out.array, lse=lse.array, **more)
        assert got[0] is out.array
        assert got[1] is lse.array
        complete = self.padding == 0
        found = {"out": out.check(written=complete), "lse": lse.check(written=complete)}
        for name, x in found.items():
            left = np.ascontiguousarray(x[self.tokens :]).view(np.uint8)
            assert (left == out.poison).all(), f"{name}: rows of no request were written"
        return {name: x[: self.tokens] for name, x in found.items()}

    def values(self, name: str, rows: np.ndarray, b: int) -> np.ndarray:
        """The effective values of a request's rows, of all query heads, float64."""
        x = rows.astype(np.float64)
        share = self.heads // self.kv_heads
        if name in self.scales:
            scale = self.scales[name][b].astype(np.float64)
            x = x * (scale.repeat(share) if name == "q" else scale)[None, :, None]
        return x if name == "q" else x.repeat(share, 1)

    def reference(self) -> ref.Attention:
        shape = (self.tokens, self.heads)
        wide = (*shape, self.dims[1])
        want = ref.Attention(
            out=np.zeros(wide),
            lse=np.full(shape, -np.inf),
            max_logits=np.full(shape, -np.inf),
            p_abs_v=np.zeros(wide),
            logit_abs=np.zeros(shape),
            nope_abs=np.zeros(shape),
            f16_scale=np.zeros(shape),
        )
        first_query = first_key = 0
        for b, (n_q, n_k) in enumerate(zip(self.query_lens, self.key_lens, strict=True)):
            queries, keys = slice(first_query, first_query + n_q), slice(first_key, first_key + n_k)
            q, k, v = self.effective(b, queries, keys)
            for i in range(n_q):
                seen = self.keys_of(b, i)
                if seen:
                    self.attend(want, first_query + i, q[i] * self.softmax_scale, k[seen], v[seen])
            first_query += n_q
            first_key += n_k
        return want

    def effective(self, b: int, queries: slice, keys: slice) -> tuple:
        """The effective queries, keys and values of a request."""
        return tuple(
            self.values(name, getattr(self, name)[rows], b)
            for name, rows in (("q", queries), ("k", keys), ("v", keys))
        )

    def keys_of(self, b: int, i: int) -> list[int]:
        """The keys that query i of a request sees, numbers in the request."""
        return self.mask.rows_of(self.query_lens[b], self.key_lens[b], i)

    def attend(self, want: ref.Attention, t: int, q, k, v) -> None:
        logit = np.einsum("hd,jhd->hj", q, k)
        want.logit_abs[t] = np.einsum("hd,jhd->hj", np.abs(q), np.abs(k)).max(1)
        if self.softcap:
            logit = self.softcap * np.tanh(logit / self.softcap)
        top = logit.max(1)
        weight = np.exp(logit - top[:, None])
        total = weight.sum(1)
        p = weight / total[:, None]
        want.max_logits[t], want.lse[t] = top, top + np.log(total)
        factor = np.ones(self.heads)
        if self.attn_sink is not None:
            with np.errstate(over="ignore"):
                factor = 1 / (1 + np.exp(self.attn_sink.astype(np.float64) - want.lse[t]))
        want.out[t] = np.einsum("hj,jhd->hd", p, v) * factor[:, None]
        want.p_abs_v[t] = np.einsum("hj,jhd->hd", p, np.abs(v)) * factor[:, None]
