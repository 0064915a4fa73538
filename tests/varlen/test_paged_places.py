"""paged_attention: results depend on keys and on what a query sees, not on where keys lie."""

from __future__ import annotations

import ctypes
import dataclasses
import mmap

import numpy as np
import pytest
import reference as ref
from borders import on_any_threads
from cases import int32
from dense_cases import Mask
from device import ON_CUDA
from helpers import assert_same_bits, assert_within_bounds
from library import ISAS, sparse_mla
from numpy.lib.stride_tricks import as_strided
from paged_cases import LAYOUTS, Paged, assert_same, check
from varlen_cases import Varlen

import sparse_mla as package

attend = sparse_mla.paged_attention
CAUSAL = Mask(causal=True)
MASKS = {
    "all": Mask(),
    "causal": CAUSAL,
    "window": Mask(causal=True, window=(70, 0)),
    "chunks": Mask(causal=True, chunk=48),
}


# --- the same keys by other ways -----------------------------------------------------------------

# What a Hopper kernel of varlen_attention or paged_attention serves has other bits on CUDA: 192 or
# 128 values of keys and 128 of values, in bf16 or fp16, without windows, chunks or a softcap; in
# pages 64, 128 or 256 of both.
RAGGED = [
    {"dims": (80, 80), "kv_heads": 1},
    {"dims": (40, 24), "kv_heads": 4, "q_type": "fp16", "kv_type": "fp16"},
    {"dims": (576, 512), "heads": 16, "kv_heads": 1},
    {"dims": (64, 64), "kv_heads": 2, "q_type": "e4m3", "kv_type": "e4m3", "descales": "rows"},
    {"dims": (128, 128), "kv_heads": 2, "kv_type": "e4m3", "descales": "number"},
    {"dims": (192, 128), "kv_heads": 4, "softcap": 3.0},
    {"dims": (192, 128), "kv_heads": 2, "mask": Mask(causal=True, window=(20, 0))},
    {"dims": (192, 128), "kv_heads": 2, "mask": Mask(chunk=48)},
]
HOPPER = [
    {"dims": (64, 64), "kv_heads": 2},
    {"dims": (256, 256), "kv_heads": 4, "sink": True},
    {"dims": (128, 128), "kv_heads": 2, "mask": Mask(causal=True, window=(20, 0))},
    {"dims": (128, 128), "kv_heads": 2, "mask": Mask(chunk=48)},
    {"dims": (128, 128), "kv_heads": 2},
    {"dims": (192, 128), "kv_heads": 4, "q_type": "fp16", "kv_type": "fp16"},
]


def as_ragged(case: Paged, **more) -> dict:
    """The results of varlen_attention on the keys of a batch, one behind another."""
    names = [field.name for field in dataclasses.fields(Varlen) if field.init]
    ragged = Varlen(**{name: getattr(case, name) for name in names} | more)
    ragged.q, ragged.k, ragged.v = case.q, case.k, case.v
    ragged.attn_sink, ragged.scales = case.attn_sink, case.scales
    return ragged.run(sparse_mla.varlen_attention)


@pytest.mark.parametrize("leftpad", [None, [3, 0, 17, 64]])
@pytest.mark.parametrize("page_size", [3, 64])
@pytest.mark.parametrize(
    "fields",
    [
        *RAGGED,
        *(pytest.param(x, marks=pytest.mark.skipif(ON_CUDA, reason="Hopper")) for x in HOPPER),
    ],
)
def test_the_bits_of_gathered_keys(fields, page_size, leftpad):
    """varlen_attention's, whatever the padding in front of a request's keys."""
    common = {"mask": CAUSAL, "padding": 2} | fields
    case = Paged([20, 1, 0, 150], [70, 33, 5, 300], page_size=page_size, leftpad=leftpad, **common)
    assert_same(case.run(attend), as_ragged(case))


@pytest.mark.skipif(ON_CUDA, reason="parts of q are other tiles there")
@pytest.mark.parametrize("kind", ["bf16", "fp16", "e4m3"])
def test_qv_is_a_pair(kind):
    """Keys in two parts, of which varlen_attention's first is the value."""
    case = Paged([20, 3], [150, 33], 8, 1, (64, 512), kind, kind, has_qv=True, mask=CAUSAL)
    starts = [np.cumsum([0, *lens]).astype(np.int32) for lens in ([20, 3], [150, 33])]
    q, k = (case.qv, case.q), (case.v, case.k[:, 0])
    options = {"softmax_scale": case.softmax_scale, "causal": True}
    out, lse = sparse_mla.varlen_attention(q, k, case.v, *starts, **options)
    assert_same(case.run(attend), {"out": out, "lse": lse})


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("fields", [*RAGGED[:3], *HOPPER])
def test_no_bit_depends_on_the_page_size(fields, mask):
    """Nor on a table of slots, the layout of the caches, and strides."""
    common = {"leftpad": [5, 0, 70], **fields, "mask": MASKS[mask]}
    case = Paged([20, 1, 70], [70, 33, 300], page_size=16, **common)
    want = check(case)
    for page_size in (1, 3, 64, 256, 16_000):
        assert_same(dataclasses.replace(case, page_size=page_size).run(attend), want)
    for layout in LAYOUTS:
        for is_spread in (False, True):
            if is_spread and ON_CUDA and fields in HOPPER:
                continue  # strides that are no multiples of 16 bytes are another kernel's
            again = dataclasses.replace(case, layout=layout, is_spread=is_spread)
            assert_same(again.run(attend), want)
            assert_same(dataclasses.replace(again, has_slots=True).run(attend), want)


@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 1), (8, 2)])
def test_no_bit_of_the_absorbed_form_depends_on_the_page_size(heads, kv_heads):
    case = Paged([20, 1], [150, 33], heads, kv_heads, (64, 512), has_qv=True, mask=CAUSAL)
    want = check(case)
    for page_size in (1, 3, 64):
        assert_same(dataclasses.replace(case, page_size=page_size).run(attend), want)
    assert_same(dataclasses.replace(case, has_slots=True, layout="row").run(attend), want)


def test_the_absorbed_form_is_mla_attention():
    """Keys of 512 latent and 64 RoPE values, of which K and V are views."""
    case = Paged([20, 1], [150, 33], 16, 1, (64, 512), has_qv=True, mask=CAUSAL, layout="row")
    got = check(case)
    cache = np.concatenate([case.v_cache, case.k_cache], -1)[:, :, 0]
    q, table, lens = (case.qv, case.q), case.table, int32(*case.seq_lens)
    options = {"cu_seqlens_q": int32(0, 20, 21), "softmax_scale": case.softmax_scale}
    out, lse = sparse_mla.mla_attention(q, cache, table, lens, **options, causal=True)
    assert_within_bounds(case.reference(), {"out": out, "lse": lse})
    assert np.abs(np.asarray(lse) - np.asarray(got["lse"])).max() < 1e-5


def test_kv_heads_are_shared():
    """H over Hk heads is attention to repeated keys and values."""
    case = Paged([15, 7], [200, 33], 6, 2, (64, 64), mask=CAUSAL)
    got = check(case)
    again = dataclasses.replace(case, kv_heads=6)
    again.q, again.k, again.v = case.q, case.k.repeat(3, 1), case.v.repeat(3, 1)
    again.put_keys()
    assert_within_bounds(case.reference(), again.run(attend))
    assert np.abs(again.run(attend)["lse"] - got["lse"]).max() < 1e-5


def test_requests_may_share_pages():
    """A prefix of 32 tokens, and a page that stands twice in a row of the table."""
    rng = np.random.default_rng(0)
    k, v = (rng.normal(0, 1, (5, 16, 2, 64)).astype(np.float32).astype(ref.BF16) for _ in range(2))
    q = rng.normal(0, 1, (3, 4, 64)).astype(np.float32).astype(ref.BF16)
    table, lens = int32([3, 1, 0], [3, 1, 4], [2, 2, 2]), int32(40, 48, 48)
    out, lse = attend(q, k, v, table, lens, softmax_scale=0.1)
    for b in range(3):
        keys = [x[table[b]].reshape(48, 2, 64)[: lens[b]] for x in (k, v)]
        starts = int32(0, 1), int32(0, lens[b])
        want = sparse_mla.varlen_attention(q[b : b + 1], *keys, *starts, softmax_scale=0.1)
        if ON_CUDA:  # another kernel's bits
            got, least = (ref.to_f32(x).astype(np.float64) for x in (out[b : b + 1], want[0]))
            assert np.abs(got - least).max() < 0.02
            assert np.abs(np.asarray(lse[b : b + 1]) - np.asarray(want[1])).max() < 1e-5
        else:
            assert_same_bits(out[b : b + 1], want[0])
            assert_same_bits(lse[b : b + 1], want[1])


# --- batch invariance ----------------------------------------------------------------------------


def alone(case: Paged, b: int, tokens: slice) -> tuple[tuple, dict, np.ndarray]:
    """Some query tokens at the end of one request of a batch, alone, and their numbers."""
    first = sum(case.query_lens[:b])
    rows = np.arange(first, first + case.query_lens[b])[tokens]
    q, k_cache, v_cache, table, lens = case.arguments()
    options = case.options | {"cu_seqlens_q": int32(0, len(rows))}
    if "cache_leftpad" in options:
        options["cache_leftpad"] = options["cache_leftpad"][b : b + 1]
    return (q[rows], k_cache, v_cache, table[b : b + 1], lens[b : b + 1]), options, rows


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("mask", ["causal", "window"])
@pytest.mark.parametrize("leftpad", [None, [9, 0, 1, 40, 0, 3, 3, 100]])
def test_a_row_does_not_depend_on_others(kv_heads, mask, leftpad):
    """Alone, in a batch, and without the query rows in front of it; with hidden keys."""
    rng = np.random.default_rng(3)
    queries = [1, 1, 2, *(int(x) for x in rng.integers(1, 80, 5))]
    lens = [n + int(x) for n, x in zip(queries, rng.integers(0, 160, 8), strict=True)]
    case = Paged(
        queries, lens, 4, kv_heads, (64, 64), mask=MASKS[mask], sink=True, leftpad=leftpad,
        page_size=3, holes=0.1, num_splits=1,
    )  # fmt: skip
    got = check(case)
    for b in (0, 1, 2, 3, 7):
        for tokens in (slice(None), slice(-1, None), slice(-5, None)):
            arguments, options, rows = alone(case, b, tokens)
            out, lse = attend(*arguments, **options)
            assert_same_bits(out, got["out"][rows], "out")
            assert_same_bits(lse, got["lse"][rows], "lse")


def run(case: Paged) -> dict[str, np.ndarray]:
    return case.run(package.paged_attention)


@pytest.mark.skipif(ON_CUDA, reason="the CPU's threads")
@pytest.mark.parametrize("page_size", [1, 64])
def test_any_number_of_threads(page_size):
    case = Paged(
        [1] * 40 + [90, 2], [5, 0, 70, 1] * 10 + [700, 40], 8, 2, (64, 64), mask=CAUSAL,
        page_size=page_size, holes=0.05,
    )  # fmt: skip
    assert_within_bounds(case.reference(), on_any_threads(run, case))


# --- hidden keys ---------------------------------------------------------------------------------


@pytest.fixture(params=[None] if ON_CUDA else ISAS)
def isa(request, monkeypatch):
    if request.param is not None:
        monkeypatch.setenv("SPARSE_MLA_CPU_ISA", request.param)


def hide(case: Paged, b: int, *positions: int, entry: int = -1) -> None:
    """Hides keys of a batch whose table is one of slots, and makes their memory NaN."""
    for x in positions:
        case.table[b, x] = entry
    for cache in (case.k_cache, case.v_cache):
        cache[...] = np.nan
    case.put_keys()


HOLES = {
    "the first": [0],
    "the last": [299],
    "in a block": [17, 18, 40],
    "a block": range(64, 128),
    "all but one": [x for x in range(300) if x != 133],
    "all but the last": range(299),
    "every other one": range(0, 300, 2),
    "all": range(300),
}


@pytest.mark.parametrize("holes", HOLES)
@pytest.mark.parametrize("kind", ["bf16", "fp16", "e4m3"])
@pytest.mark.parametrize("entry", [-1, 2**31 - 1])
def test_hidden_keys(holes, kind, entry, isa):
    """Rows that see one key, few or many, of which some are hidden; beside a request without."""
    case = Paged([3, 1, 2], [300, 40, 9], 4, 2, (64, 40), kind, kind, mask=CAUSAL, has_slots=True)
    hide(case, 0, *HOLES[holes], entry=entry)
    got = check(case)
    if holes == "all":
        assert not np.asarray(got["out"][:3]).view(np.uint8).any()
        assert np.isneginf(got["lse"][:3]).all()


@pytest.mark.parametrize("mask", [Mask(causal=True, window=(0, 0)), Mask(causal=True, chunk=1)])
@pytest.mark.parametrize("has_qv", [False, True])
def test_a_hidden_only_key(mask, has_qv, isa):
    """Each query sees one key, which is its token's; some are hidden."""
    case = Paged([5, 1], [40, 9], 4, 2, (64, 64), mask=mask, has_slots=True, has_qv=has_qv)
    hide(case, 0, 36, 39)
    hide(case, 1, 8)
    got = check(case)
    empty = [1, 4, 5]
    assert np.isneginf(got["lse"][empty]).all()
    assert not np.asarray(got["out"][empty]).view(np.uint8).any()
    assert np.isfinite(np.delete(got["lse"], empty, 0)).all()


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_hidden_keys_of_rows_that_are_computed_exactly(kind, isa):
    """An infinite value that a row sees, among hidden keys."""
    case = Paged([2], [90], 4, 2, (64, 64), kind, kind, mask=CAUSAL, has_slots=True)
    want = case.run(attend)
    case.v[89, 0, 3] = np.inf  # the last query alone sees it
    hide(case, 0, 5, 50)
    got = case.run(attend)
    assert np.isinf(np.asarray(got["out"][1, :2, 3], np.float32)).all()
    assert np.isfinite(np.asarray(got["out"][1, 2:], np.float32)).all()
    assert np.isfinite(np.asarray(got["lse"], np.float32)).all()
    assert (np.asarray(got["lse"]) != np.asarray(want["lse"])).all()


def test_a_table_ends_before_its_request():
    """Keys behind the last column are hidden, those of a whole request, too."""
    for missing in (1, 2, 5, 100):
        check(Paged([3, 1], [70, 9], 4, 2, (64, 64), mask=CAUSAL, missing=missing))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("page_size", [1, 16])
def test_no_bit_depends_on_where_a_table_ends(mask, page_size, isa):
    """Columns that a table lacks hide their keys as entries of no page do, all but one or all."""
    width = -(-70 // page_size)
    for missing in (1, width // 2, width - 1, width):
        case = Paged([3, 1], [70, 9], 4, 2, (64, 64), mask=MASKS[mask], missing=missing)
        got = case.run(attend)
        case.table = np.pad(case.table, ((0, 0), (0, missing)), constant_values=-1)
        assert_same(case.run(attend), got)


@pytest.mark.parametrize("num_queries", [1, 40])
@pytest.mark.parametrize("num_splits", [0, 1, 5])
def test_lengths_far_behind_the_table(num_queries, num_splits):
    """What a padded row of an engine may have: keys that no table names cost the CPU no time."""
    case = Paged([num_queries], [48], 4, 2, (64, 64), num_splits=num_splits)
    *arrays, length = case.arguments()
    length[0] = 1_000_000 if ON_CUDA else 2**31 - 1
    out, lse = attend(*arrays, length, **case.options)
    assert_within_bounds(case.reference(), {"out": out, "lse": lse})


# --- memory that must not be read ----------------------------------------------------------------


class Unreadable:
    """Caches whose pages are pages of memory, of which those that are not in `used` cannot be read.
    Each page ends where its memory ends, so nothing behind a row may be read either."""

    def __init__(self, pages: int, shape: tuple[int, ...], used: list[int]) -> None:
        self.bytes = int(np.prod(shape)) * 2
        size = -(-self.bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.memory = mmap.mmap(-1, pages * size)
        self.start = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        rows = np.frombuffer(self.memory, ref.BF16).reshape(pages, size // 2)
        strides = size, *np.empty(shape, ref.BF16).strides
        self.array = as_strided(rows[:, (size - self.bytes) // 2 :], (pages, *shape), strides)
        self.hidden = [page for page in range(pages) if page not in used]
        self.size = size

    def protect(self, how: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        for page in self.hidden:
            at = ctypes.c_void_p(self.start + page * self.size)
            assert libc.mprotect(at, ctypes.c_size_t(self.size), how) == 0

    def __enter__(self) -> np.ndarray:
        self.protect(0)
        return self.array

    def __exit__(self, *error) -> None:
        self.protect(mmap.PROT_READ | mmap.PROT_WRITE)


@pytest.mark.skipif(ON_CUDA, reason="memory of the host")
@pytest.mark.parametrize("dims", [(64, 64), (40, 24), (128, 72)])
@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({}, [6, 2, 4]),
        ({"window_size": (7, -1)}, [2, 4]),
        ({"attention_chunk": 16}, [4]),
        ({"cache_leftpad": int32(8)}, [2, 4]),
        ({"window_size": (0, -1)}, [4]),
        ({"cp": (1, 2, 8)}, [6]),
    ],
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_pages_without_a_visible_key_are_not_read(dims, options, seen, is_causal, isa):
    """Not by the kernel, and not by a prefetch that reads. Pages have 8 tokens, the request 21; the
    table has more columns, and an entry of other requests."""
    rng = np.random.default_rng(0)
    q = rng.normal(0, 1, (1, 4, dims[0])).astype(np.float32).astype(ref.BF16)
    table, lens = int32([6, 2, 4, 1, 9], [3, 3, 3, 3, 3]), int32(21)
    k, v = (Unreadable(9, (8, 2, n), seen) for n in dims)
    for cache in (k, v):
        cache.array[seen] = rng.normal(0, 1, (len(seen), *cache.array.shape[1:]))
    more = {"softmax_scale": 0.1, "causal": is_causal, **options}
    with k as k_cache, v as v_cache:
        got = package.paged_attention(q, k_cache, v_cache, table, lens, **more)
    again = package.paged_attention(q, k.array.copy(), v.array.copy(), table, lens, **more)
    assert np.isfinite(got[1]).all()
    for x, y in zip(got, again, strict=True):
        assert_same_bits(x, y)


@pytest.mark.skipif(ON_CUDA, reason="memory of the host")
def test_requests_without_queries_are_not_read(isa):
    """Nor those that are behind the last one of cu_seqlens_q's tokens."""
    k, v = (Unreadable(4, (8, 2, 64), [1]) for _ in range(2))
    for cache in (k, v):
        cache.array[1] = 1
    q, table = np.ones((2, 4, 64), ref.BF16), int32([0, 2], [1, 3], [2, 3])
    more = {"cu_seqlens_q": int32(0, 0, 2, 2), "softmax_scale": 0.1}
    with k as k_cache, v as v_cache:
        out, _ = package.paged_attention(q, k_cache, v_cache, table, int32(16, 8, 16), **more)
    assert np.abs(np.asarray(out, np.float32) - 1).max() <= 2.0**-8


# --- context parallelism -------------------------------------------------------------------------


@pytest.mark.parametrize("cp", [(2, 1), (2, 4), (3, 16), (8, 1)])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("has_qv", [False, True])
def test_ranks_merge_to_the_whole(cp, mask, has_qv):
    """Each rank has its own keys alone. Sinks go to the merge."""
    dims = (64, 512) if has_qv else (64, 64)
    common = {"has_qv": has_qv, "page_size": 3, "out_type": np.dtype(np.float32)}
    whole = Paged([20, 1, 3], [90, 33, 2], 4, 1, dims, mask=MASKS[mask], **common)
    parts = []
    for rank in range(cp[0]):
        share = dataclasses.replace(MASKS[mask], cp=(rank, *cp))
        part = dataclasses.replace(whole, mask=share)
        parts.append(check(part))
    sink = np.linspace(-2, 2, 4, dtype=np.float32)
    outs, lses = ([part[name].copy() for part in parts] for name in ("out", "lse"))
    out, lse = sparse_mla.merge_attn_partials(outs, lses, attn_sink=sink)
    whole.attn_sink = sink
    assert_within_bounds(whole.reference(), {"out": out, "lse": lse}, merges=1)


@pytest.mark.parametrize("cut", [1, 63, 64, 130, 199])
def test_parts_of_the_keys_merge_to_the_whole(cut):
    """Split at any key: the front half by its length, the other one by its padding."""
    case = Paged([3, 1], [203, 260], 8, 2, (64, 64), has_slots=True, page_size=3)
    q, k, v, _, lens = case.arguments()
    options = case.options
    front = attend(q, k, v, None, np.minimum(lens, cut), **options)
    behind = attend(q, k, v, None, lens, cache_leftpad=int32(cut, cut), **options)
    out, lse = sparse_mla.merge_attn_states(*front, *behind)
    assert_within_bounds(case.reference(), {"out": out, "lse": lse}, merges=1)
