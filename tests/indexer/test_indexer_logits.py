"""indexer_logits (csrc/cpu/indexer, csrc/cuda/indexer): bounds, masks, and bits that depend on a
row's own query, keys and length alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import device
import numpy as np
import operators
import pytest
import reference as ref
import reference_indexer as indexer
import row_formats as rows
from helpers import Guarded, assert_same_bits
from library import sparse_mla

F32, I32 = np.float32, np.int32
KINDS = ("fp8", "fp4")


def codes(rng, *shape: int, kind: str) -> np.ndarray:
    """Random e4m3 codes, or pairs of e2m1, heavy-tailed and without NaN."""
    x = rng.standard_t(3, shape).astype(F32)
    if kind == "fp8":
        return ref.e4m3_encode(x * F32(20))
    return rows.join_nibbles(rows.e2m1_encode(x).reshape(-1, shape[-1])).reshape(
        *shape[:-1], shape[-1] // 2
    )


def query(rng, T: int, H: int, kind: str) -> tuple[np.ndarray, np.ndarray | None]:
    scale = rng.integers(120, 130, (T, H, 4)).astype(np.uint8) if kind == "fp4" else None
    return codes(rng, T, H, 128, kind=kind), scale


def key_scales(rng, n: int, kind: str) -> np.ndarray:
    """Of fp8_index: any fp32, a few of them negative."""
    if kind == "fp4":
        return rng.integers(110, 135, (n, 4)).astype(np.uint8)
    return (np.exp2(rng.uniform(-9, 3, n)) * np.where(rng.random(n) < 0.05, -1, 1)).astype(F32)


def key_values(k: np.ndarray, scale: np.ndarray, kind: str) -> np.ndarray:
    if kind == "fp4":
        return indexer.query_values(k[:, None], scale[:, None])[:, 0]
    return ref.e4m3_decode(k).astype(np.float64) * scale.astype(np.float64)[:, None]


@dataclass
class Paged:
    """Requests with keys in pages; `lens` are the query tokens of each request."""

    lens: tuple[int, ...]
    contexts: tuple[int, ...]  # context of each request's last token
    H: int = 64
    q_kind: str = "fp8"
    kind: str = "fp8"
    block_size: int = 64
    width: int = 6
    layout: str = "paged"
    seed: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng([self.seed, self.H, self.block_size, sum(self.lens)])
        R, T = len(self.lens), sum(self.lens)
        num_pages = R * self.width + 2
        name = {"fp8": "fp8_index", "fp4": "mxfp4_index"}[self.kind]
        self.pages = rows.Pages(name, self.layout, pages=num_pages, block_size=self.block_size)
        slots = np.arange(num_pages * self.block_size)
        scale = key_scales(rng, len(slots), self.kind)
        data = codes(rng, len(slots), 128, kind=self.kind)
        self.values = key_values(data, scale, self.kind)
        self.pages.put(slots, data, np.ascontiguousarray(scale).view(np.uint8).reshape(-1, 4))
        self.q, self.q_scale = query(rng, T, self.H, self.q_kind)
        self.weights = rng.standard_normal((T, self.H)).astype(F32)
        self.table = rng.permutation(num_pages)[: R * self.width].reshape(R, self.width)
        self.table = self.table.astype(I32)
        self.req = np.repeat(np.arange(R), self.lens).astype(I32)
        last = np.repeat(self.contexts, self.lens)
        behind = np.concatenate([np.arange(n)[::-1] for n in self.lens]) if T else last
        self.lengths = (last - behind).astype(I32)

    @property
    def N(self) -> int:
        return self.width * self.block_size

    def run(self, **options):
        given = {"block_table": self.table, "req_id_per_token": self.req, "q_scale": self.q_scale}
        return sparse_mla.indexer_logits(
            self.q, self.weights, self.pages.cache, self.lengths,
            **given, **self.pages.options, **self.extra, **options,
        )  # fmt: skip

    def want(self, N: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        N = self.N if N is None else N
        columns = np.arange(N)
        keys, exists = [], []
        for t in range(len(self.q)):
            page = np.full(N, -1, np.int64)
            inside = columns < self.N
            page[inside] = self.table[self.req[t], columns[inside] // self.block_size]
            good = (page >= 0) & (page < self.pages.pages)
            slot = np.where(good, page * self.block_size + columns % self.block_size, 0)
            keys.append(self.values[slot])
            exists.append(good)
        q = indexer.query_values(self.q, self.q_scale)
        return indexer.logits(q, self.weights, keys, exists, self.lengths, N)


def bound_of(H: int, q_kind="fp8", kind="fp8") -> float:
    """2^-18 u, but 2^-8 u where Hopper's FP8 tensor cores may serve the call."""
    is_fp8 = device.DEVICE != "cpu" and H in (32, 64) and q_kind == kind == "fp8"
    return 2.0**-8 if is_fp8 else 2.0**-18


def assert_logits(got, want, u, bound: float) -> None:
    got = np.asarray(got)
    is_bf16 = got.dtype == ref.BF16
    got = ref.to_f32(got).astype(np.float64)
    masked = np.isneginf(want)
    assert np.array_equal(np.isneginf(got), masked), "columns without keys"
    assert not np.isnan(got).any()
    error = np.abs(np.where(masked, 0, got) - np.where(masked, 0, want))
    allowed = bound * u + (2.0**-8 * np.abs(np.where(masked, 0, want)) * 1.01 if is_bf16 else 0)
    assert (error <= allowed + 1e-37).all(), (error / (allowed + 1e-37)).max()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("q_kind", KINDS)
@pytest.mark.parametrize("H", [1, 7, 8, 32, 64, 65])
def test_heads(H, q_kind, kind):
    case = Paged((1, 3, 2), (200, 384, 7), H, q_kind, kind)
    assert_logits(case.run(), *case.want(), bound_of(H, q_kind, kind))
    assert_logits(case.run(dtype="bfloat16"), *case.want(), bound_of(H, q_kind, kind))


@pytest.mark.parametrize("H", [130, 300])
def test_many_heads(H):
    """More than fit into a GPU's shared memory at a time, and odd numbers of them."""
    case = Paged((2, 1), (150, 90), H, width=3)
    assert_logits(case.run(), *case.want(), bound_of(H))


@pytest.mark.parametrize("H", [32, 64, 5])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7, 8])
def test_query_tokens_per_request(n, H):
    case = Paged((n, n, n), (300, 64, 333), H)
    assert_logits(case.run(), *case.want(), bound_of(H))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block_size", [1, 2, 3, 16, 64, 100, 128])
@pytest.mark.parametrize("layout", ["paged", "padded", "mqa", "bytes"])
def test_pages(layout, block_size, kind):
    width = -(-300 // block_size)
    case = Paged((2, 9), (250, 299), 64, kind, kind, block_size, width, layout)
    assert_logits(case.run(), *case.want(), bound_of(64, kind, kind))


@pytest.mark.parametrize("H", [64, 3])
def test_prefill(H):
    """A causal prefill of many tokens beside others, so that blocks of tokens have several runs."""
    case = Paged((40, 1, 61), (384, 200, 100), H)
    assert_logits(case.run(), *case.want(), bound_of(H))


@pytest.mark.parametrize("H", [64, 7])
@pytest.mark.parametrize("N", [1, 63, 64, 65, 384, 385, 1000])
def test_any_number_of_columns(N, H):
    """Lengths are clamped to N. Columns that the table lacks have no keys."""
    case = Paged((2, 3), (2**31 - 1, 300), H)
    case.lengths[3] = -5
    out = Guarded((5, N), F32, row_gap=4)
    got = case.run(out=out.array)
    assert got is out.array
    assert_logits(out.check(), *case.want(N), bound_of(H))


@pytest.mark.parametrize("H", [64, 7])
def test_columns_behind_the_context_are_left_alone(H):
    case = Paged((3, 2), (200, 0), H)
    out = np.full((5, case.N), 77, F32)
    case.run(out=out, clean=False)
    want, u = case.want()
    behind = np.arange(case.N) >= np.maximum(case.lengths, 0)[:, None]
    assert (out[behind] == 77).all()
    out[behind] = -np.inf
    assert_logits(out, want, u, bound_of(H))


@pytest.mark.parametrize("H", [64, 7])
def test_bad_pages(H):
    case = Paged((2, 3), (384, 300), H)
    case.table[0, 2], case.table[1, 0], case.table[1, 3] = -1, 2**31 - 1, case.pages.pages
    assert_logits(case.run(), *case.want(), bound_of(H))


@pytest.mark.parametrize("H", [64, 7])
@pytest.mark.parametrize("bad", [-1, 2, 2**31 - 1])
def test_bad_requests(bad, H):
    """An error on the CPU before anything is written; -inf on CUDA. Padding may have any id."""
    case = Paged((2, 3), (384, 300), H)
    want, u = case.want()
    case.lengths[4] = 0
    case.req[4] = bad
    want[4], u[4] = -np.inf, 0
    assert_logits(case.run(), want, u, bound_of(H))
    case.req[1] = bad
    out = np.full((5, case.N), 77, F32)
    if device.DEVICE == "cpu":
        with pytest.raises(ValueError, match="req_id_per_token") as info:
            case.run(out=out)
        assert str(info.value) == (
            "indexer_logits: `req_id_per_token` must be 0 to 1 (rows of `block_table`), got "
            f"{bad} at token 1"
        )
        assert (out == 77).all()
        return
    case.run(out=out)
    want[1], u[1] = -np.inf, 0
    assert_logits(out, want, u, bound_of(H))


def test_nothing_to_do():
    case = Paged((), ())
    assert case.run().shape == (0, case.N)
    case = Paged((2, 1), (0, 0))
    assert np.isneginf(np.asarray(case.run())).all()
    assert case.run(out=np.zeros((3, 0), F32)).shape == (3, 0)
    case.pages.cache = case.pages.cache[:0]
    case.lengths[:] = 9
    assert np.isneginf(np.asarray(case.run())).all()
    case.table = case.table[:, :0]
    case.req[:] = -1  # a table without columns has no keys to look for
    assert case.run().shape == (3, 0)
    assert np.isneginf(np.asarray(case.run(out=np.zeros((3, 5), F32)))).all()


# --- flat keys -----------------------------------------------------------------------------------


@dataclass
class Flat:
    T: int
    S: int
    H: int = 64
    q_kind: str = "fp8"
    kind: str = "fp8"
    seed: int = 1

    def __post_init__(self) -> None:
        rng = np.random.default_rng([self.seed, self.T, self.S, self.H])
        self.q, self.q_scale = query(rng, self.T, self.H, self.q_kind)
        self.weights = rng.standard_normal((self.T, self.H)).astype(F32)
        self.k, self.scale = (
            codes(rng, self.S, 128, kind=self.kind),
            key_scales(rng, self.S, self.kind),
        )
        self.starts = np.sort(rng.integers(0, self.S // 2, 3))[
            np.sort(rng.integers(0, 3, self.T))
        ].astype(I32)
        self.lengths = rng.integers(0, self.S // 2, self.T).astype(I32)

    def run(self, **options):
        return sparse_mla.indexer_logits(
            self.q, self.weights, (self.k, self.scale), self.lengths, q_scale=self.q_scale,
            starts=self.starts, **options,
        )  # fmt: skip

    def want(self) -> tuple[np.ndarray, np.ndarray]:
        values = key_values(self.k, self.scale, self.kind)
        starts = np.zeros(self.T, I32) if self.starts is None else self.starts
        slots = starts[:, None].astype(np.int64) + np.arange(self.S)
        exists = (slots >= 0) & (slots < self.S)
        keys = [values[np.where(e, s, 0)] for s, e in zip(slots, exists, strict=True)]
        q = indexer.query_values(self.q, self.q_scale)
        return indexer.logits(q, self.weights, keys, exists, self.lengths, self.S)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("q_kind", KINDS)
@pytest.mark.parametrize("H", [1, 7, 32, 64])
def test_flat(H, q_kind, kind):
    case = Flat(19, 300, H, q_kind, kind)
    assert_logits(case.run(), *case.want(), bound_of(H, q_kind, kind))
    case.starts = None
    assert_logits(case.run(dtype="bfloat16"), *case.want(), bound_of(H, q_kind, kind))


@pytest.mark.parametrize("H", [64, 7])
def test_flat_keys_that_do_not_exist(H):
    case = Flat(6, 200, H)
    case.starts[:] = [-3, -3, 190, 199, 2**31 - 1, -(2**31)]
    case.lengths[:] = 200
    assert_logits(case.run(), *case.want(), bound_of(H))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("H", [64, 7])
def test_views(H, kind):
    """Gaps everywhere, at addresses that no vector load takes."""
    case = Flat(9, 200, H, kind, kind)
    plain = np.asarray(case.run())
    width = case.q.shape[2]
    q = np.zeros((9, H, width + 5), np.uint8)
    q[..., 3 : 3 + width] = case.q
    case.q = q[..., 3 : 3 + width]
    k = np.zeros((200, width + 4), np.uint8)
    k[:, 4:] = case.k
    case.k = k[:, 4:]
    case.scale = np.repeat(case.scale, 2, 0)[::2]
    case.weights = np.concatenate([case.weights, case.weights], 1)[:, :H]
    case.lengths, case.starts = (np.repeat(x, 2)[::2] for x in (case.lengths, case.starts))
    if case.q_scale is not None:
        case.q_scale = np.concatenate([case.q_scale, case.q_scale], 2)[..., :4]
    assert_logits(case.run(), *case.want(), bound_of(H, kind, kind))
    if bound_of(H, kind, kind) == 2.0**-18:
        assert_same_bits(np.asarray(case.run()), plain)


# --- bits ----------------------------------------------------------------------------------------


def tokens_of(case: Paged, tokens) -> Paged:
    part = Paged.__new__(Paged)
    vars(part).update(vars(case))
    for name in ("q", "weights", "req", "lengths"):
        setattr(part, name, np.ascontiguousarray(getattr(case, name)[tokens]))
    part.q_scale = None if case.q_scale is None else np.ascontiguousarray(case.q_scale[tokens])
    return part


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("H", [64, 32, 7])
def test_bits_depend_on_the_row_alone(H, kind):
    """Alone, in pairs, in another order, with fewer columns, in a longer batch, in bf16 rounded."""
    case = Paged((1, 2, 30, 4), (384, 300, 250, 77), H, kind, kind)
    whole = np.asarray(case.run())
    T = len(case.q)
    rng = np.random.default_rng(5)
    parts = [np.array([t]) for t in (0, 1, 2, 5, 33, 36)]
    parts += [np.arange(4), np.arange(3, 20), rng.permutation(T), np.repeat(np.arange(T), 3)]
    for tokens in parts:
        assert_same_bits(np.asarray(tokens_of(case, tokens).run()), whole[tokens])
    for N in (70, 200):
        out = np.zeros((T, N), F32)
        case.run(out=out)
        inside = np.arange(N) < case.lengths[:, None]
        assert_same_bits(out[inside], whole[:, :N][inside])
    half = np.asarray(case.run(dtype="bfloat16"))
    assert_same_bits(half, ref.to_bf16(whole))


@pytest.mark.parametrize("H", [64, 7])
def test_pages_and_flat_keys_give_the_same_bits(H):
    case = Paged((9,), (384,), H)
    slots = (case.table[0][:, None] * 64 + np.arange(64)).reshape(-1)
    data, scales = case.pages.get(slots)
    scale = np.ascontiguousarray(scales).view(F32)[:, 0]
    flat = sparse_mla.indexer_logits(
        case.q, case.weights, (np.ascontiguousarray(data), scale), case.lengths
    )
    assert_same_bits(np.asarray(flat), np.asarray(case.run()))


# --- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("H", [64, 7])
def test_nan_is_visible_where_it_takes_part(H):
    case = Flat(5, 130, H)
    case.starts = None
    case.lengths[:] = 130
    case.k = case.k.copy()
    clean = np.asarray(case.run())
    case.k[17, 5], case.scale[40] = 0x7F, np.nan
    case.q = case.q.copy()
    case.q[2, H - 1, 9], case.weights[3, 0] = 0xFF, np.nan
    got = np.asarray(case.run())
    want = np.zeros(got.shape, bool)
    want[:, [17, 40]], want[2:4] = True, True
    assert np.array_equal(np.isnan(got), want)
    assert_same_bits(got[~want], clean[~want])


@pytest.mark.parametrize("H", [64, 32, 7])
@pytest.mark.parametrize("shape", ["alike", "one large", "signs"])
def test_hard_sums(shape, H):
    """Sums of which all terms are alike, of which one is large, and that nearly cancel."""
    case = Flat(4, 256, H)
    rng = np.random.default_rng(8)
    case.lengths[:], case.starts = 256, None
    if shape == "alike":
        case.q = rng.integers(0x50, 0x58, case.q.shape).astype(np.uint8)
        case.k = rng.integers(0x50, 0x58, case.k.shape).astype(np.uint8)
        case.weights = np.abs(case.weights)
    elif shape == "one large":
        case.q[..., 3], case.k[:, 3] = 0x7E, 0x7E
    else:
        case.q = np.repeat(case.q[..., :64], 2, 2)
        case.k = np.repeat(case.k[:, :64], 2, 1)
        case.k[:, 1::2] ^= 0x80
    assert_logits(case.run(), *case.want(), bound_of(H))


def test_against_the_operators_that_write():
    """From bf16 queries and keys, through both quantisers: near the logits without quantisation."""
    rng = np.random.default_rng(2)
    T, H, S = 6, 64, 200
    q, k = rng.standard_normal((T, H, 128)), rng.standard_normal((S, 128))
    weights, table = rng.standard_normal((T, H)).astype(F32), np.repeat([[1, 0]], 32, 1)
    scales = {"softmax_scale": 128**-0.5, "head_scale": H**-0.5}
    for kind, fp4 in (("fp8_index", False), ("mxfp4_index", True)):
        pages = rows.Pages(kind, pages=4, block_size=64)
        sparse_mla.indexer_k_quant_and_cache(
            ref.to_bf16(k.astype(F32)), pages.cache, np.arange(S), **pages.options
        )
        made = sparse_mla.fused_indexer_q_rope_quant(
            ref.to_bf16(q.astype(F32)), weights, np.zeros(T, np.int64),
            table.reshape(1, 64).astype(F32), use_fp4=fp4, **scales,
        )  # fmt: skip
        got = sparse_mla.indexer_logits(
            made[0], made[1], pages.cache, np.full(T, S, I32), q_scale=made[2] if fp4 else None,
            block_table=np.arange(4, dtype=I32)[None], req_id_per_token=np.zeros(T, I32),
        )  # fmt: skip
        want = np.einsum("th,thn->tn", weights, np.maximum(np.einsum("thd,nd->thn", q, k), 0))
        want *= 128**-0.5 * H**-0.5
        error = np.abs(np.asarray(got)[:, :S] - want)
        assert error.mean() < (0.35 if fp4 else 0.06) * np.abs(want).mean()


def test_texts():
    def text_of(change, **options) -> str:
        call = operators.GOOD_CALLS["indexer_logits"]()
        change(call.args)
        for name, value in options.items():
            call.set(name, value)
        with pytest.raises((ValueError, TypeError)) as info:
            call.run(sparse_mla)
        return str(info.value).removeprefix("indexer_logits: ")

    def nothing(args):
        pass

    pair = np.zeros((8, 128), np.uint8), np.ones(8, F32)
    none = {"block_table": None, "req_id_per_token": None}

    def flat(args):
        args["k_cache"] = pair

    assert text_of(nothing, block_table=None) == "`block_table` must be given, got none"
    assert text_of(nothing, req_id_per_token=None) == "`req_id_per_token` must be given, got none"
    assert text_of(nothing, starts=np.zeros(3, I32)) == (
        "`starts` must be None for keys in pages, got another value"
    )
    assert text_of(flat) == (
        "`block_table` must be None for a pair of keys and scales, got another value"
    )
    assert text_of(flat, block_table=None) == (
        "`req_id_per_token` must be None for a pair of keys and scales, got another value"
    )
    assert text_of(flat, **none, block_size=8) == (
        "`block_size` must be None for a pair of keys and scales, got another value"
    )
    assert text_of(lambda a: a.update(k_cache=(pair[0], pair[1], 1)), **none) == (
        "`k_cache` must be an array or the pair (k, scale), got 3 items"
    )
    assert text_of(lambda a: a.update(k_cache=(pair[0][:, :100], pair[1])), **none) == (
        "`k_cache[0]` must have 128 bytes (FP8) or 64 (FP4) per key, got 100"
    )
    assert text_of(flat, **none, kv_format="mxfp4_index") == (
        '`kv_format` must be "fp8_index" for keys of 128 bytes, got another format'
    )
    assert text_of(lambda a: a.update(q=a["q"][:, :0])) == "`q` must have at least one head, got 0"
