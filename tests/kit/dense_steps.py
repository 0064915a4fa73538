"""Layers of dense MLA in one step: their inputs, and fp64 results of both paths with the bounds of
their errors."""

from __future__ import annotations

import dataclasses

import cases
import device
import numpy as np
import reference as ref
import row_formats
from cases import random_bf16
from helpers import NO_NAN, Guarded, assert_same_bits

import sparse_mla as package

dense = package.dense
SCALE = 0.07
NOPE, VALUES = 32, 48
BF16 = 2.0**-8  # the largest relative error of a rounding
UNITS = device.BOUNDS.get("units", 16) * 2.0**-24  # the error of an fp32 sum of products
KV_SCALE = 0.03  # a scale for fp8_e4m3
ARRAYS = ("query_start_loc", "seq_lens", "slot_mapping", "block_table")


class Stay:
    """What device.Journey does, for arrays that stay where they are."""

    def put(self, x):
        return x

    def results(self, got):
        return np.asarray(got)

    def fetch(self) -> None:
        pass


travel = Stay if device.DEVICE == "cpu" else device.Journey


# --- fp64 ----------------------------------------------------------------------------------------


def wide(x) -> np.ndarray:
    return ref.to_f32(np.asarray(x)).astype(np.float64)


@dataclasses.dataclass
class Exact:
    """What a layer must give, and how far its roundings may lead away from it."""

    out: np.ndarray  # [T, H, Pv]
    bound: np.ndarray
    lse: np.ndarray  # [T, H]
    lse_bound: np.ndarray

    @staticmethod
    def join(parts: list[Exact]) -> Exact:
        names = [field.name for field in dataclasses.fields(Exact)]
        return Exact(*(np.concatenate([getattr(p, n) for p in parts]) for n in names))

    def check(self, got) -> None:
        got = wide(got)
        assert np.isfinite(got).all()
        worst = np.abs(got - self.out) - self.bound
        assert worst.max(initial=0) <= 0, f"{worst.max()} past the bound"

    def check_lse(self, got) -> None:
        worst = np.abs(got.astype(np.float64) - self.lse) - self.lse_bound
        assert not worst.max(initial=0) > 0, f"{worst.max()} past the bound"
        assert np.isfinite(worst).all()


def attend_up(q, rows, weight, nope: int, merges: int, softmax_scale: float) -> Exact:
    """Causal multi-head attention of the last n tokens, q [n, H, Pn + R], to keys and values that
    the weight [512, H, Pn + Pv] makes of rows [m, 512 + R]."""
    kv = np.tensordot(rows[:, :512], weight, 1)
    sums = 512 * 2.0**-24 * np.tensordot(np.abs(rows[:, :512]), np.abs(weight), 1)
    error = BF16 * np.abs(kv) + sums  # the error of what kv_up_proj makes
    k, v = kv[..., :nope], kv[..., nope:]
    contract = lambda a, b: np.einsum("nhd,mhd->hnm", a, b, optimize=True)  # noqa: E731
    rope = np.einsum("nhd,md->hnm", q[..., nope:], rows[:, 512:], optimize=True)
    rope_abs = np.einsum("nhd,md->hnm", np.abs(q[..., nope:]), np.abs(rows[:, 512:]), optimize=True)
    s = softmax_scale * (contract(q[..., :nope], k) + rope)
    size = abs(softmax_scale) * (contract(np.abs(q[..., :nope]), np.abs(k)) + rope_abs)
    moved = abs(softmax_scale) * contract(np.abs(q[..., :nope]), error[..., :nope])
    n, m = s.shape[1:]
    hidden = np.arange(m)[None] > m - n + np.arange(n)[:, None]
    s[:, hidden], size[:, hidden], moved[:, hidden] = -np.inf, 0, 0
    top = s.max(2, keepdims=True)
    p = np.exp(s - top)
    total = p.sum(2, keepdims=True)
    p /= total
    lse = (top + np.log(total))[..., 0].T
    apply = lambda x: np.einsum("hnm,mhv->nhv", p, x, optimize=True)  # noqa: E731
    out, p_abs_v = apply(v), apply(np.abs(v))
    logit = (UNITS * size + moved).max(2).T[..., None]
    bound = (1 + merges) * BF16 * (p_abs_v + np.abs(out)) + 2 * logit * p_abs_v
    lse_bound = logit[..., 0] + (1 + merges) * (2.0**-20 * (1 + np.abs(lse)))
    return Exact(out, bound + apply(error[..., nope:]) + 1e-6, lse, lse_bound)


def attend_absorbed(
    q, rows, weight, nope: int, softmax_scale: float, is_fp8: bool, merges: int
) -> Exact:
    """The same with W_UK absorbed into the queries, by latents as values."""
    w_uk, w_uv = weight[..., :nope], weight[..., nope:]
    latents = np.einsum("nhp,lhp->nhl", q[..., :nope], w_uk, optimize=True)
    query = softmax_scale * np.concatenate([latents, q[..., nope:]], -1)
    n, m = len(q), len(rows)
    keys = [rows[: m - n + i + 1] for i in range(n)]
    z = ref.attend_keys(query, keys, has_scales=is_fp8)
    rounded = BF16 * z.nope_abs[..., None] * z.p_abs_v  # the absorbed queries
    error = z.out_tolerance(**device.BOUNDS) + 2 * rounded + 512 * 2.0**-24 * np.abs(z.out)
    # Parts that are merged may each be as large as p_abs_v: their latents, and what W_UV makes.
    error = error + 2 * merges * BF16 * z.p_abs_v
    out = np.einsum("nhl,lhv->nhv", z.out, w_uv, optimize=True)
    bound = np.einsum("nhl,lhv->nhv", error, np.abs(w_uv), optimize=True)
    lse_bound = z.lse_tolerance(**device.BOUNDS) + BF16 * z.nope_abs
    return Exact(out, bound + BF16 * np.abs(out) + 1e-6, z.lse, lse_bound)


# --- steps ---------------------------------------------------------------------------------------


@dataclasses.dataclass
class Case:
    """One step of one layer: the batch, a cache with its requests' context, and new tokens."""

    query_lens: list[int]
    contexts: list[int]
    heads: int = 5
    page: int = 16
    fmt: str = "bfloat16"
    padding: int = 0
    seed: int = 0
    nope: int = NOPE
    values: int = VALUES
    rope: int = 64
    threshold: int = 1  # query tokens of the longest decode
    interleaved: bool = True
    softmax_scale: float = SCALE
    scale: float = KV_SCALE  # for a cache of fp8_e4m3

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        self.lens = [n + c for n, c in zip(self.query_lens, self.contexts, strict=True)]
        self.batch = cases.make_batch(
            self.query_lens,
            self.lens,
            block_size=self.page,
            pad_tokens=self.padding,
            seed=self.seed,
        )
        slots = self.batch.num_pages * self.page
        rows = self.encode(rng, slots)
        used = np.concatenate([self.slots_of(r, c) for r, c in enumerate(self.contexts)])
        nothing = np.ones(slots, bool)
        nothing[used.astype(int)] = False
        rows.view(np.uint8).reshape(slots, -1)[nothing] = 0xFF  # NaN in both formats
        self.cache = rows.reshape(self.batch.num_pages, self.page, -1)
        count = self.batch.num_actual_tokens
        self.q = random_bf16(rng, count, self.heads, self.nope + self.rope)
        self.kv_c, self.k_pe = random_bf16(rng, count, 512), random_bf16(rng, count, self.rope)
        for x in (self.q, self.kv_c, self.k_pe):
            x[count - self.padding :] = np.nan
        columns = self.heads * (self.nope + self.values)
        self.weight = random_bf16(rng, 512, columns, std=512**-0.5)
        self.table = package.rope_table(max([*self.lens, 1])) if self.rope else None

    @property
    def kv_scale(self) -> float:
        return self.scale if self.fmt == "fp8_e4m3" else 1.0

    @property
    def has_scales(self) -> bool:
        return self.fmt in ("fp8_ds_mla", "fp8_nope", "fp8_token")

    @property
    def format(self) -> row_formats.Format | None:
        """The format of rows that `row_formats` has, else None."""
        if self.fmt == "fp8_e4m3" and self.rope:
            return row_formats.ALL_FORMATS[row_formats.E4M3_576]
        return row_formats.FORMATS[self.fmt] if self.fmt in ("fp8_e4m3", "fp8_nope") else None

    def encode(self, rng, slots: int) -> np.ndarray:
        """Random rows of the cache."""
        if self.format is not None:
            bits = random_bf16(rng, slots, self.format.width).view(np.uint16)
            return np.concatenate(self.format.encode(bits, self.kv_scale), 1)
        if self.fmt == "fp8_token":
            return cases.encode_keys(rng.normal(size=(slots, 576)).astype(np.float32), self.fmt)
        rows = cases.make_rows(rng, slots, "fp8" if self.fmt == "fp8_ds_mla" else "bf16")
        return rows if self.rope else np.ascontiguousarray(rows[:, :512])

    def decode(self, cache, slots) -> np.ndarray:
        """The values of rows, fp64."""
        if self.format is not None:
            rows = cache.reshape(-1, cache.shape[-1])[slots]
            parts = np.split(rows, [self.format.data_bytes], 1)
            values = self.format.decode(*parts, 1.0)
            return values.astype(np.float64) * self.kv_scale
        return ref.decode_rows(cache, slots)

    def slots_of(self, request: int, length: int) -> np.ndarray:
        at = np.arange(length)
        pages = self.batch.block_table[request, at // self.page].astype(np.int64)
        return pages * self.page + at % self.page

    def config(self, **changes) -> dense.Config:
        options = {
            "softmax_scale": self.softmax_scale,
            "interleaved": self.interleaved,
            "decode_threshold": self.threshold,
            "qk_nope_head_dim": self.nope,
            "qk_rope_head_dim": self.rope,
            "v_head_dim": self.values,
            "kv_cache_dtype": self.fmt,
            "block_size": self.page,
            "max_num_seqs": max(len(self.lens), 1),
            "max_num_batched_tokens": self.batch.num_actual_tokens,
            "max_model_len": max(self.lens) + 2,  # seq_lens_cpu may be bounds
            "path": "separate",
            "device": device.NAME,
        }
        return dense.Config(self.heads, **(options | changes))

    def run(self, *, pair=False, builder=None, bound=0, lse=None, **changes) -> np.ndarray:
        """A step of one layer, whose results are checked for what they must leave alone. `lse`
        [>= T, H] is given to the layer. -> [T, H, Pv]"""
        config = self.config(**changes)
        trip = travel()
        builder = builder or dense.MetadataBuilder(config)
        batch = self.batch
        bounds = batch.seq_lens + np.int32(bound) * (np.diff(batch.query_start_loc) == 1)
        common = package.CommonAttentionMetadata(
            *(trip.put(getattr(batch, name)) for name in ARRAYS),
            query_start_loc_cpu=batch.query_start_loc,
            seq_lens_cpu=bounds.astype(np.int32),
            num_actual_tokens=batch.num_actual_tokens,
        )
        self.metadata = builder.build(common)
        weight, table = trip.put(self.weight), trip.put(self.table)
        layer = dense.DenseMLA(config, kv_b_proj=weight, rope_table=table)
        shape = (batch.num_actual_tokens + 2, self.heads, self.values)
        out = Guarded(shape, ref.BF16, poison=NO_NAN)
        q = self.q
        if pair:
            q = tuple(np.ascontiguousarray(x) for x in np.split(q, [self.nope], -1))
        before = [x.copy() for x in (self.q, self.kv_c, self.k_pe)]
        arrays = (q, self.kv_c, self.k_pe if self.rope else None, self.cache.copy())
        options = {"out": trip.put(out.array), "kv_scale": self.kv_scale}
        given = {} if lse is None else {"lse": trip.put(lse)}
        layer.forward(*trip.put(arrays), self.metadata, **options, **given)
        trip.fetch()
        self.written = arrays[3]
        for x, y in zip(before, (self.q, self.kv_c, self.k_pe), strict=True):
            assert_same_bits(x, y, "an input")
        got = np.asarray(out.check(written=False))
        assert (got[-2:].view(np.uint8) == NO_NAN).all(), "a row past the step was written"
        got = got[:-2]
        assert not wide(got[len(got) - self.padding :]).any()
        return got

    def turned(self) -> tuple[np.ndarray, np.ndarray]:
        """Queries and RoPE parts of keys, as RoPE leaves them."""
        if not self.rope:
            return wide(self.q), self.k_pe
        positions = np.concatenate(
            [
                *(np.arange(n - q, n) for n, q in zip(self.lens, self.query_lens, strict=True)),
                np.zeros(self.padding, np.int64),
            ]
        ).astype(np.int64)
        q_pe = np.ascontiguousarray(self.q[..., self.nope :])
        q_pe, k_pe = package.apply_rope(
            positions, q_pe, self.k_pe, self.table, interleaved=self.interleaved
        )
        return np.concatenate([wide(self.q[..., : self.nope]), wide(q_pe)], -1), k_pe

    def exact(self, merges: int, path: str = "separate", ranks: int = 1) -> Exact:
        """fp64 of every request, from the rows that its path reads. Results of several ranks are
        merged once more."""
        merges, of_ranks = merges + (ranks > 1), int(ranks > 1)
        q, k_pe = self.turned()
        weight = wide(self.weight).reshape(512, self.heads, -1)
        parts = []
        for r, (n, length) in enumerate(zip(self.query_lens, self.lens, strict=True)):
            start = int(self.batch.query_start_loc[r])
            new = slice(start, start + n)
            if n == 0:
                continue
            cached = self.slots_of(r, length - n)
            if path == "mixed" or n <= self.threshold:
                cache = self.cache.copy()
                package.concat_and_cache_mla(
                    *(self.kv_c[new], k_pe[new], cache, self.slots_of(r, length)[length - n :]),
                    kv_scale=self.kv_scale,
                    kv_cache_dtype=self.fmt,
                )
                rows = self.decode(cache, self.slots_of(r, length))
                scale, has_scales = self.softmax_scale, self.has_scales
                parts.append(
                    attend_absorbed(q[new], rows, weight, self.nope, scale, has_scales, of_ranks)
                )
            else:
                context = ref.to_f32(ref.to_bf16(self.decode(self.cache, cached)))
                fresh = np.concatenate([wide(self.kv_c[new]), wide(k_pe[new])], -1)
                rows = np.concatenate([context.astype(np.float64), fresh])
                parts.append(attend_up(q[new], rows, weight, self.nope, merges, self.softmax_scale))
        return Exact.join(parts)

    def alone(self, request: int) -> np.ndarray:
        """The result of one request, without context, as the only one of a step."""
        assert self.contexts[request] == 0
        start, n = int(self.batch.query_start_loc[request]), self.query_lens[request]
        case = Case([n], [0], self.heads, self.page, self.fmt, nope=self.nope, values=self.values)
        case.weight, case.table = self.weight, self.table
        for name in ("q", "kv_c", "k_pe"):
            setattr(case, name, getattr(self, name)[start : start + n])
        return case.run()


def count_merges(case: Case) -> int:
    """Merges of bf16 parts that any row has been through: of its chunks, and the last one."""
    chunks = case.metadata.prefill and case.metadata.prefill.chunks
    if not chunks:
        return 0
    return len(chunks if isinstance(chunks, list) else chunks.context_chunk_seq_tot)


def draw(seed: int) -> Case:
    """Decodes, then prefills, of which some have context."""
    rng = np.random.default_rng([9, seed])
    decodes, prefills = int(rng.integers(0, 4)), int(rng.integers(1, 6))
    lens = [1] * decodes + [int(n) for n in rng.integers(2, 20, prefills)]
    contexts = [int(c) if rng.random() < 0.7 else 0 for c in rng.integers(0, 301, len(lens))]
    return Case(
        lens,
        contexts,
        heads=int(rng.choice([1, 5, 16])),
        page=int(rng.choice([1, 16, 64])),
        fmt=str(rng.choice(["bfloat16", "fp8_ds_mla"])),
        padding=int(rng.choice([0, 0, 3])),
        seed=seed,
    )
