"""sparse_mla.dense on path "separate": prefills as multi-head attention to up-projected latents,
their cached context in chunks. Compared with fp64 of the whole, within the bounds of its roundings.
"""

from __future__ import annotations

import dataclasses

import cases
import device
import numpy as np
import pytest
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

    @staticmethod
    def join(parts: list[Exact]) -> Exact:
        return Exact(*(np.concatenate([getattr(p, n) for p in parts]) for n in ("out", "bound")))

    def check(self, got) -> None:
        got = wide(got)
        assert np.isfinite(got).all()
        worst = np.abs(got - self.out) - self.bound
        assert worst.max(initial=0) <= 0, f"{worst.max()} past the bound"


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
    p = np.exp(s - s.max(2, keepdims=True))
    p /= p.sum(2, keepdims=True)
    apply = lambda x: np.einsum("hnm,mhv->nhv", p, x, optimize=True)  # noqa: E731
    out, p_abs_v = apply(v), apply(np.abs(v))
    logit = (UNITS * size + moved).max(2).T[..., None]
    bound = (1 + merges) * BF16 * (p_abs_v + np.abs(out)) + 2 * logit * p_abs_v
    return Exact(out, bound + apply(error[..., nope:]) + 1e-6)


def attend_absorbed(q, rows, weight, nope: int, softmax_scale: float, is_fp8: bool) -> Exact:
    """The same with W_UK absorbed into the queries, by latents as values."""
    w_uk, w_uv = weight[..., :nope], weight[..., nope:]
    latents = np.einsum("nhp,lhp->nhl", q[..., :nope], w_uk, optimize=True)
    query = softmax_scale * np.concatenate([latents, q[..., nope:]], -1)
    n, m = len(q), len(rows)
    keys = [rows[: m - n + i + 1] for i in range(n)]
    z = ref.attend_keys(query, keys, has_scales=is_fp8)
    rounded = BF16 * z.nope_abs[..., None] * z.p_abs_v  # the absorbed queries
    error = z.out_tolerance(**device.BOUNDS) + 2 * rounded + 512 * 2.0**-24 * np.abs(z.out)
    out = np.einsum("nhl,lhv->nhv", z.out, w_uv, optimize=True)
    bound = np.einsum("nhl,lhv->nhv", error, np.abs(w_uv), optimize=True)
    return Exact(out, bound + BF16 * np.abs(out) + 1e-6)


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
        return self.fmt in ("fp8_ds_mla", "fp8_nope")

    def encode(self, rng, slots: int) -> np.ndarray:
        """Random rows of the cache."""
        if self.fmt in ("fp8_e4m3", "fp8_nope"):
            bits = random_bf16(rng, slots, 512).view(np.uint16)
            return np.concatenate(row_formats.FORMATS[self.fmt].encode(bits, self.kv_scale), 1)
        rows = cases.make_rows(rng, slots, "fp8" if self.fmt == "fp8_ds_mla" else "bf16")
        return rows if self.rope else np.ascontiguousarray(rows[:, :512])

    def decode(self, cache, slots) -> np.ndarray:
        """The values of rows, fp64."""
        if self.fmt in ("fp8_e4m3", "fp8_nope"):
            rows = cache.reshape(-1, cache.shape[-1])[slots]
            values = row_formats.FORMATS[self.fmt].decode(*np.split(rows, [512], 1), 1.0)
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

    def run(self, *, pair=False, builder=None, bound=0, **changes) -> np.ndarray:
        """A step of one layer, whose results are checked for what they must leave alone.
        -> [T, H, Pv]"""
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
        layer.forward(*trip.put(arrays), self.metadata, **options)
        trip.fetch()
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

    def exact(self, merges: int, path: str = "separate") -> Exact:
        """fp64 of every request, from the rows that its path reads."""
        q, k_pe = self.turned()
        weight = wide(self.weight).reshape(512, self.heads, -1)
        parts = []
        for r, (n, length) in enumerate(zip(self.query_lens, self.lens, strict=True)):
            start = int(self.batch.query_start_loc[r])
            new = slice(start, start + n)
            cached = self.slots_of(r, length - n)
            if path == "mixed" or n <= self.threshold:
                cache = self.cache.copy()
                package.concat_and_cache_mla(
                    *(self.kv_c[new], k_pe[new], cache, self.slots_of(r, length)[length - n :]),
                    kv_scale=self.kv_scale,
                    kv_cache_dtype=self.fmt,
                )
                rows = self.decode(cache, self.slots_of(r, length))
                parts.append(
                    attend_absorbed(
                        q[new], rows, weight, self.nope, self.softmax_scale, self.has_scales
                    )
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


@pytest.mark.parametrize("first", range(0, 104, 8))
def test_random_batches(first):
    """Both plans with small workspaces, from a page up, and one chunk for all, against fp64; and
    requests without context have the bits that they have alone."""
    for seed in range(first, first + 8):
        case = draw(seed)
        rng = np.random.default_rng([10, seed])
        prefills = [c for n, c in zip(case.query_lens, case.contexts, strict=True) if n > 1]
        sharing = max(sum(c > 0 for c in prefills), 1)
        more = int(rng.choice([0, 1, case.page, 3 * case.page + 2, 40]))
        least = {"equal": sharing * case.page, "packed": case.page}
        results = []
        for plan, tokens in least.items():
            options = {"context_plan": plan, "prefill_workspace_tokens": tokens + more}
            got = case.run(pair=seed % 2 == 1, bound=seed % 3, **options)
            assert case.metadata.path == "separate"
            case.exact(count_merges(case)).check(got[: sum(case.query_lens)])
            results.append(got)
        whole = case.run(prefill_workspace_tokens=8 * 384)
        assert count_merges(case) == (max(prefills) > 0)
        case.exact(1).check(whole[: sum(case.query_lens)])
        for r, (n, c) in enumerate(zip(case.query_lens, case.contexts, strict=True)):
            if n > 1 and c == 0:
                start = int(case.batch.query_start_loc[r])
                alone = case.alone(r)
                for got in (*results, whole):
                    assert_same_bits(got[start : start + n], alone, f"request {r} of batch {seed}")


@pytest.mark.parametrize("plan", ["equal", "packed"])
@pytest.mark.parametrize("page", [1, 16])
def test_many_prompts_in_small_chunks(plan, page):
    """256 prompts, a page of each per chunk at most: nearly all have no key left in later chunks of
    plan "equal", and nothing becomes NaN."""
    rng = np.random.default_rng(3)
    contexts = [int(c) for c in rng.integers(0, 3, 256) * rng.integers(0, 3 * page, 256)]
    contexts[100] = 9 * page + 3
    case = Case([2] * 256, contexts, heads=1, page=page, nope=16, values=8)
    rows = page * (sum(c > 0 for c in contexts) if plan == "equal" else 20)
    got = case.run(context_plan=plan, prefill_workspace_tokens=rows)
    if plan == "equal":
        assert max(case.metadata.context_chunk_max_seq_lens) == page
        assert count_merges(case) >= 10
    assert count_merges(case) >= 5
    case.exact(count_merges(case)).check(got)


@pytest.mark.parametrize("plan", ["equal", "packed"])
def test_256_prompts_at_all_stages(plan):
    """Prompts of 2415 tokens, with contexts of every length up to 2413, in chunks of 128 tokens of
    each: later chunks have no key left of more and more of them. On a CPU an eighth of that."""
    tokens, chunk = (2415, 128) if device.ON_CUDA else (302, 16)
    contexts = np.linspace(0, tokens - 2, 256).astype(int).tolist()
    case = Case([2] * 256, contexts, heads=1, page=16, nope=16, values=8)
    got = case.run(context_plan=plan, prefill_workspace_tokens=255 * chunk)
    if plan == "equal":
        assert len(case.metadata.context_chunk_seq_tot) == -(-(tokens - 2) // chunk) == 19
        assert max(case.metadata.context_chunk_max_seq_lens) == chunk
        left = (device.host(case.metadata.context_chunk_seq_lens) > 0).sum(1)
        assert left[0] >= 254 > 15 >= left[-1] > 0
    case.exact(count_merges(case)).check(got)


@pytest.mark.parametrize("page", [1, 16, 64])
def test_both_paths_agree(page):
    """Within the sum of their bounds. A bf16 cache has the same new tokens on both."""
    case = Case([1, 1, 7, 2, 30], [50, 0, 200, 0, 33], page=page, seed=page)
    paths = "separate", "mixed"
    results = [wide(case.run(path=path, prefill_workspace_tokens=3 * 64)) for path in paths]
    exact = [case.exact(4, path) for path in paths]
    assert (results[0] != results[1]).any(), "the paths are one"
    assert (np.abs(results[0] - results[1]) <= exact[0].bound + exact[1].bound).all()
    for result, want in zip(results, exact, strict=True):
        want.check(result)


@pytest.mark.parametrize("fmt", ["bfloat16", "fp8_e4m3", "fp8_nope"])
@pytest.mark.parametrize("path", ["separate", "mixed"])
@pytest.mark.parametrize("plan", ["equal", "packed"])
def test_models_without_rope(fmt, path, plan):
    """Keys are the 512 values of a latent, and a query is one array."""
    case = Case([1, 1, 7, 2, 30], [50, 0, 200, 0, 33], rope=0, padding=1, fmt=fmt)
    got = case.run(path=path, context_plan=plan, prefill_workspace_tokens=64)
    assert case.metadata.head_dim == 512
    case.exact(count_merges(case), path).check(got[:41])
    if path == "separate":
        assert count_merges(case) == {"equal": 7, "packed": 5}[plan]
        assert tuple(case.metadata.chunked_prefill_workspace.shape) == (64, 512)


def test_what_models_without_rope_refuse():
    case = Case([2], [0], rope=0)
    metadata = dense.MetadataBuilder(dataclasses.replace(case.config(), device="cpu")).build(
        case.batch.common(package)
    )
    layer = dense.DenseMLA(case.config(), kv_b_proj=case.weight)
    pair, wide_rows = (case.q, np.zeros((2, 5, 0), ref.BF16)), np.zeros((3, 16, 576), ref.BF16)
    for changes, name in (
        ({"q": pair}, "q"),
        ({"k_pe": np.zeros((2, 64), ref.BF16)}, "k_pe"),
        ({"kv_cache": wide_rows}, "kv_cache"),
    ):
        arrays = {"q": case.q, "kv_c": case.kv_c, "k_pe": None, "kv_cache": case.cache} | changes
        with pytest.raises(ValueError, match=rf"^dense\.forward: `{name}` must"):
            layer.forward(**arrays, metadata=metadata)
    layer.rope_table = package.rope_table(9)
    with pytest.raises(ValueError, match=r"^dense\.forward: `rope_table` must be left out"):
        layer.forward(case.q, case.kv_c, None, case.cache, metadata)


def test_new_tokens_are_not_quantised():
    """On an FP8 cache a prefill without context is that on a bf16 cache, bit for bit."""
    results = [Case([9], [0], fmt=fmt).run() for fmt in ("bfloat16", "fp8_ds_mla")]
    assert_same_bits(*results)
    mixed = Case([9], [0], fmt="fp8_ds_mla").run(path="mixed")
    assert np.abs(wide(mixed) - wide(results[0])).max() > 0


def test_decodes_have_the_bits_of_path_mixed():
    case = Case([1, 1, 1], [40, 0, 299], padding=2)
    assert_same_bits(case.run(), case.run(path="mixed"))


# --- memory --------------------------------------------------------------------------------------


def test_given_workspaces_are_all_that_is_written():
    """Rows past a chunk, and past the step's tokens, stay as they were."""
    case = Case([1, 5, 8], [30, 100, 7], page=16)
    want = case.run(prefill_workspace_tokens=48)
    trip = travel()
    memory = [Guarded((n, m), ref.BF16, poison=NO_NAN) for n, m in ((60, 576), (64, 5 * 80))]
    config = case.config(prefill_workspace_tokens=48)
    given = [trip.put(x.array) for x in memory]
    builder = dense.MetadataBuilder(config, workspace=given[0], up_workspace=given[1])
    own = dense.MetadataBuilder(config)
    assert builder.workspace_bytes == own.workspace_bytes
    assert_same_bits(case.run(builder=builder, pair=True, prefill_workspace_tokens=48), want)
    trip.fetch()
    rows, up = (np.asarray(x.check(written=False)).view(np.uint8) for x in memory)
    written = [len(x) - int((x == NO_NAN).all(1)[::-1].argmin()) for x in (rows, up)]
    largest = max(case.metadata.context_chunk_seq_tot)
    assert written == [largest, max(largest, 13)]


def test_workspace_bytes():
    """All memory of a step: a row more of the workspace adds what it takes, and no more."""
    case = Case([4, 4], [9, 0], page=1)
    sizes = [
        dense.MetadataBuilder(case.config(prefill_workspace_tokens=n)).workspace_bytes
        for n in (999, 1000)
    ]
    assert sizes[1] - sizes[0] == 2 * (576 + 5 * 80)
    mixed = dense.MetadataBuilder(case.config(path="mixed")).workspace_bytes
    assert sizes[0] - mixed >= 2 * 999 * (576 + 5 * 80) + 2 * 8 * 5 * (2 * 48 + 4)
    assert mixed >= 8 * 5 * 2 * 2 * 512
    default = dense.MetadataBuilder(case.config()).workspace_bytes
    tokens = package.get_context_workspace_size(15, 2, 1)
    assert default - sizes[0] == 2 * (tokens - 999) * (576 + 5 * 80)


# --- metadata ------------------------------------------------------------------------------------


def build(case: Case, **changes):
    case.run(**changes)
    return case.metadata


def test_chunks_of_the_equal_plan():
    m = build(
        Case([1, 5, 3, 2], [6, 0, 10, 300], page=64),
        prefill_workspace_tokens=256,
        decode_threshold=1,
    )
    assert m.has_context
    lens = [[0, 10, 128], [0, 0, 128], [0, 0, 44]]
    assert device.host(m.context_chunk_seq_lens).tolist() == lens
    assert device.host(m.context_chunk_starts).tolist() == [[0] * 3, [128] * 3, [256] * 3]
    running = [[0, 0, 10, 138], [0, 0, 0, 128], [0, 0, 0, 44]]
    assert device.host(m.context_chunk_cu_seq_lens).tolist() == running
    assert m.context_chunk_seq_tot == [138, 128, 44]
    assert m.context_chunk_max_seq_lens == [128, 128, 44]
    assert tuple(m.chunked_prefill_workspace.shape) == (256, 576)
    part = m.prefill
    assert (part.max_query_len, part.context_lens.tolist()) == (5, [0, 10, 300])
    assert device.host(part.query_start_loc).tolist() == [0, 5, 8, 10]
    assert device.host(part.seq_lens).tolist() == [5, 13, 302]
    assert part.chunks.context_chunk_seq_tot == [138, 128, 44]
    assert device.host(m.decode.query_start_loc).tolist() == [0, 1]
    assert device.host(m.decode.seq_lens).tolist() == [7]


def test_chunks_of_the_packed_plan():
    m = build(
        Case([5, 3, 2, 4], [300, 10, 0, 40], page=64),
        prefill_workspace_tokens=256,
        context_plan="packed",
    )
    chunks = [(a, b, *(device.host(x).tolist() for x in xs)) for a, b, *xs in m.prefill.chunks]
    assert chunks == [(0, 1, [0], [256]), (0, 2, [256, 0], [44, 10]), (3, 4, [0], [40])]
    assert m.has_context
    assert m.context_chunk_starts is None
    assert (m.context_chunk_seq_tot, m.context_chunk_max_seq_lens) == ([256, 54, 40], [256, 44, 40])


@pytest.mark.parametrize("plan", ["equal", "packed"])
def test_no_context(plan):
    m = build(Case([1, 4], [5, 0]), context_plan=plan)
    assert not m.has_context
    assert m.prefill.chunks is None
    assert m.context_chunk_starts is m.context_chunk_seq_tot is m.chunked_prefill_workspace is None


def choose(query_lens, contexts, **sizes) -> str:
    """The path that a step has if its config leaves it open: no layer runs."""
    case, trip = Case([1], [0]), travel()
    starts = np.cumsum([0, *query_lens]).astype(np.int32)
    lens = np.add(query_lens, contexts).astype(np.int32)
    limits = {"max_num_batched_tokens": int(starts[-1]), "max_model_len": int(lens.max())}
    sizes = {"qk_nope_head_dim": 128, "v_head_dim": 128, "prefill_workspace_tokens": 512} | sizes
    config = case.config(path=None, max_num_seqs=len(lens), **limits, **sizes)
    table = np.zeros((len(lens), -(-int(lens.max()) // 16)), np.int32)
    arrays = (starts, lens, np.zeros(starts[-1], np.int64), table)
    common = package.CommonAttentionMetadata(
        *map(trip.put, arrays), query_start_loc_cpu=starts, seq_lens_cpu=lens
    )
    return dense.MetadataBuilder(config).build(common).path


def test_the_plan_chooses_the_cheaper_path():
    """Clear cases only: where the paths cost about the same, either will do."""
    assert choose([16], [8192]) == "mixed"
    assert choose([2], [100_000]) == "mixed"
    assert choose([4096], [0]) == "separate"
    assert choose([4096], [8192]) == "separate"
    assert choose([2], [0]) == "separate"  # a pair costs less there, and there is nothing to make
    assert choose([2, 4000], [3000, 0]) == "separate"  # the new tokens' own pairs count, too
    assert choose([2, 40], [3000, 0]) == "mixed"
    assert choose([1, 1], [3000, 0]) == "mixed"
    assert choose([9, 1], [0, 0]) == "mixed"  # a decode behind a prefill
    assert choose([9], [0], v_head_dim=127) == "mixed"  # no kernel for values of that size
    assert choose([9], [0], qk_nope_head_dim=520, qk_rope_head_dim=0) == "mixed"  # nor for keys


@pytest.mark.parametrize("context", [500, 8192])
def test_more_new_tokens_never_turn_a_step_to_mixed(context):
    paths = [choose([2**n], [context]) for n in range(1, 13)]
    assert paths == sorted(paths)  # "mixed", then "separate"
    assert len(set(paths)) == 2


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"prefill_workspace_tokens": 15}, "prefill_workspace_tokens.* at least a page"),
        ({"v_head_dim": 20}, '`path` must be "mixed" unless'),
        ({"qk_nope_head_dim": 520, "qk_rope_head_dim": 0}, '`path` .* "separate" with 520 and 48'),
    ],
)
def test_bad_builders(changes, text):
    case = Case([4], [9])
    with pytest.raises(ValueError, match=f"^MetadataBuilder: .*{text}"):
        dense.MetadataBuilder(case.config(**changes))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("context_plan", "even"),
        ("context_plan", None),
        ("prefill_workspace_tokens", 0),
        ("path", "direct"),
        ("qk_rope_head_dim", 32),
        ("qk_rope_head_dim", -1),
    ],
)
def test_bad_configs(name, value):
    with pytest.raises(ValueError, match=f"^Config: `{name}` must be"):
        Case([4], [9]).config(**{name: value})


@pytest.mark.parametrize("name", ["workspace", "up_workspace"])
@pytest.mark.parametrize("shape", [(15, 576), (64, 575), (8, 400), (64, 399)])
def test_bad_workspaces(name, shape):
    trip, case = travel(), Case([4, 9], [9, 9])
    config = case.config(prefill_workspace_tokens=48)
    with pytest.raises(ValueError, match=f"^MetadataBuilder: `{name}` must have shape"):
        dense.MetadataBuilder(config, **{name: trip.put(np.zeros(shape, ref.BF16))})


def test_a_small_workspace_and_a_bad_order():
    case = Case([4, 9, 2], [9, 9, 9])
    text = "a page of 16 tokens for each of 3 prefills with context, got 47"
    with pytest.raises(ValueError, match=f"^MetadataBuilder.build: .*{text}"):
        case.run(prefill_workspace_tokens=47)
    case.run(prefill_workspace_tokens=47, context_plan="packed")
    with pytest.raises(ValueError, match="`query_start_loc` must have decodes"):
        Case([4, 1], [9, 9]).run()


def test_a_layer_needs_the_weight_and_memory_of_its_own():
    case = Case([4], [9])
    config = case.config(prefill_workspace_tokens=64)
    trip = travel()
    memory = trip.put(np.zeros((64, 400), ref.BF16))
    builder = dense.MetadataBuilder(config, up_workspace=memory)
    common = case.batch.common(
        package, **{name: trip.put(getattr(case.batch, name)) for name in ARRAYS}
    )
    metadata = builder.build(common)
    arrays = trip.put((case.q, case.kv_c, case.k_pe, case.cache))
    weight = trip.put(case.weight)
    layer = dense.DenseMLA(case.config(path="mixed"), kv_b_proj=weight)
    with pytest.raises(ValueError, match=r"^dense\.forward: `kv_b_proj` must"):
        layer.forward(*arrays, metadata)
    layer = dense.DenseMLA(config, kv_b_proj=weight)
    with pytest.raises(ValueError, match=r"^dense\.forward: `out` must not overlap `up_workspace`"):
        layer.forward(*arrays, metadata, out=memory.reshape(-1)[:960].reshape(4, 5, 48))
    assert layer.forward(*arrays, None, out=arrays[0]) is arrays[0]


@pytest.mark.parametrize("kind", ["transposed", "fp32", "fp8"])
def test_other_forms_of_the_weight(kind):
    """The matrix that prefills use is that of W_UK and W_UV."""
    case = Case([4], [0])
    weight, scale = case.weight, None
    if kind == "transposed":
        weight = np.ascontiguousarray(weight.T)
    elif kind == "fp32":
        weight = ref.to_f32(weight)
    else:
        weight = (weight.astype(np.float32) * 4).astype(ref.E4M3)
        scale = np.full((4, 4), 0.25, np.float32)
    layer = dense.DenseMLA(case.config(), kv_b_proj=weight, weight_scale_inv=scale)
    joined = np.concatenate([layer.W_UK, layer.W_UV], -1).reshape(512, -1)
    assert_same_bits(np.ascontiguousarray(layer.kv_b_proj), joined)
    assert np.shares_memory(layer.kv_b_proj, weight) == (kind == "transposed")
