"""Pairs of options of the operators that write and read caches, each byte for byte against the
formats' formulas. Keys have values of every size, subnormal ones and NaN among them."""

from __future__ import annotations

import numpy as np
import reference as ref
from helpers import NO_NAN, Guarded, assert_same_bf16, assert_same_bits
from library import package, sparse_mla
from pairs import Spy, cover, run_table
from row_formats import ALL_FORMATS, E4M3_576, Pages, random_keys

from sparse_mla import _C

PAGES, SIZE = 4, 6  # pages, and tokens of one
SLOTS = PAGES * SIZE
DTYPES = {"bf16": ref.to_bf16, "fp16": np.float16, "fp32": np.float32}
LAYOUTS = ("paged", "mqa", "padded", "unpaged")
# Every format with every number of values that its keys may have.
ALL_ROWS = [(name, dim) for name, rows in _C.KV_FORMATS.items() for dim in rows.values()]
# Scales around the border below which a CPU keeps subnormal numbers, and at the ends of fp32.
KV_SCALES = [
    *(1.0, 0.37, 2.0**-59, 2.0**-61, 2.0**-119, 2.0**-126, 2.0**101, 2.0**120),
    *(np.float32([0.37]), np.float32(2.0**-125).reshape(())),
]


def has_pages(row, layout) -> bool:
    """Flat rows are one page; split pages may be rows of bytes."""
    return layout != "unpaged" or row[0] in _C.SPLIT_KV_FORMATS


def has_scale(row, kv_scale) -> bool:
    return row[0] == "fp8_e4m3" or (np.isscalar(kv_scale) and kv_scale == 1)


class Cache:
    """A cache of random bytes in any format; `row` is a format's name and its values per key."""

    def __init__(self, row, layout: str, seed=0) -> None:
        self.name, self.dim = row
        self.pages = None
        key = E4M3_576 if row == ("fp8_e4m3", 576) else self.name
        if key in ALL_FORMATS and ALL_FORMATS[key].width == self.dim:
            other = "bytes" if ALL_FORMATS[key].split else "flat"
            how = other if layout == "unpaged" else layout
            self.pages = Pages(key, how, pages=PAGES, block_size=SIZE, seed=seed)
            self.memory, self.array = self.pages.memory, self.pages.cache
            return
        width, dtype = (656, np.uint8) if self.is_fp8 else (self.dim, ref.BF16)
        gap = 1 if layout == "padded" else 0
        self.memory = np.random.default_rng(seed).integers(
            0, 256, PAGES * (SIZE + gap) * width * np.dtype(dtype).itemsize, dtype=np.uint8
        )
        whole = self.memory.view(dtype).reshape(PAGES, SIZE + gap, width)
        self.rows = whole[:, :SIZE]
        views = {"mqa": self.rows[:, :, None], "unpaged": whole.reshape(-1, width)}
        self.array = views.get(layout, self.rows)

    @property
    def is_fp8(self) -> bool:
        return self.name in ("fp8_ds_mla", "fp8_token")

    @property
    def is_bytes(self) -> bool:
        return self.pages is not None and self.pages.layout == "bytes"

    def options(self, is_named: bool, *, has_size=True) -> dict:
        """The keywords that name the format, where that is needed or asked for."""
        found = dict(self.pages.options) if self.pages else {}
        if is_named or self.name == "fp8_token":
            found["kv_format"] = self.name
        if not has_size:
            found.pop("block_size", None)
        return found

    def put(self, slots, bits: np.ndarray, kv_scale) -> None:
        """Writes keys [n, dim] of bf16 patterns, by the formula."""
        if self.pages is not None:
            scale = float(np.asarray(kv_scale).reshape(()))
            self.pages.put(slots, *self.pages.format.encode(bits, scale))
        else:
            has_one_scale = self.name == "fp8_token"
            ref.concat_and_cache_mla(bits[:, :512], bits[:, 512:], self.rows, slots, has_one_scale)

    def bf16(self, slots, kv_scale) -> np.ndarray:
        """Keys as patterns of bf16: bf16(code * scale)."""
        if self.pages is not None:
            scale = float(np.asarray(kv_scale).reshape(()))
            return ref.bf16_encode(self.pages.values(slots, scale))
        rows = ref.raw_rows(self.rows, slots)
        return ref.upconvert_rows(rows) if self.is_fp8 else rows

    def fp32(self, slots, kv_scale) -> np.ndarray:
        if self.pages is not None:
            scale = float(np.asarray(kv_scale).reshape(()))
            return self.pages.values(slots, scale)
        rows = ref.raw_rows(self.rows, slots)
        return ref.dequantize_rows(rows) if self.is_fp8 else ref.bf16_decode(rows)


# --- writers -------------------------------------------------------------------------------------

SLOT_LISTS = {
    "some": [19, 0, -1, 7, 4, 5, -(2**31), 12],
    "none": [],
    "one": [SLOTS - 1],
    "more": [*range(9, 15)],
}
WRITERS = {
    "layout": LAYOUTS,
    "dtype": [*DTYPES],
    "kv_scale": KV_SCALES,
    "slots": [*SLOT_LISTS],
    "slot_dtype": [np.int64, np.int32],
    "more": [0, 3],  # rows of keys behind those with slots
    "view": ["packed", "columns"],
    "named": [False, True],
}


def make_keys(rng, count: int, dim: int, dtype: str, view: str) -> np.ndarray:
    """Keys of all sizes, each with values that are subnormal in bf16."""
    bits = random_keys(rng, count, dim)
    bits[:, 16:48] = rng.integers(1, 0x80, (count, 32)) | rng.integers(0, 2, (count, 32)) << 15
    with np.errstate(over="ignore", invalid="ignore"):
        keys = DTYPES[dtype](ref.bf16_decode(bits))
        if dtype == "fp16":
            keys[np.isnan(keys)] = np.nan  # its payloads have no bits of bf16
    if view == "packed":
        return keys
    wide = np.zeros((count, dim + 24), keys.dtype)
    wide[:, 16 : 16 + dim] = keys
    return wide[:, 16 : 16 + dim]


def check_written(cache: Cache, call, slots, bits, kv_scale) -> None:
    before = cache.memory.copy()
    assert call() is cache.array
    after = cache.memory.copy()
    cache.memory[...] = before
    cache.put(slots, bits[: len(slots)], kv_scale)
    assert_same_bits(after, cache.memory, "the cache's memory")


def test_concat_and_cache_mla():
    spy = Spy(sparse_mla.concat_and_cache_mla, package.concat_and_cache_mla)
    rows = [row for row in ALL_ROWS if row[0] in _C.CONCAT_KV_FORMATS]

    def run(row, layout, dtype, kv_scale, slots, slot_dtype, more, view, named, no_rope):
        rng = np.random.default_rng([more, len(slots)])
        cache = Cache(row, layout)
        at = np.array(SLOT_LISTS[slots], slot_dtype)
        keys = make_keys(rng, len(at) + more, row[1], dtype, view)
        kv_c, k_pe = keys[:, :512], keys[:, 512:]
        if row[1] == 512 and no_rope:
            k_pe = None
        options = {} if np.isscalar(kv_scale) and kv_scale == 1 else {"kv_scale": kv_scale}
        if named or row[0] in ("fp8_nope", "fp8_token"):
            options["kv_cache_dtype"] = row[0]
        call = lambda: spy(kv_c, k_pe, cache.array, at, **options)  # noqa: E731
        check_written(cache, call, at, ref.to_bf16_bits(keys), kv_scale)

    options = WRITERS | {"row": rows, "no_rope": [False, True]}
    run_table(cover(options, has_scale), run, spy)


def insert(name: str, rows, kv_scales) -> None:
    spy = Spy(getattr(sparse_mla, name), getattr(package, name))

    def run(row, layout, dtype, kv_scale, slots, slot_dtype, more, view, named):
        rng = np.random.default_rng([more, len(slots)])
        cache = Cache(row, layout)
        at = np.array(SLOT_LISTS[slots], slot_dtype)
        keys = make_keys(rng, len(at) + more, row[1], dtype, view)
        options = cache.options(named)
        if not np.isscalar(kv_scale) or kv_scale != 1:
            options["kv_scale"] = kv_scale
        call = lambda: spy(keys, cache.array, at, **options)  # noqa: E731
        check_written(cache, call, at, ref.to_bf16_bits(keys), kv_scale)

    run_table(cover(WRITERS | {"row": rows, "kv_scale": kv_scales}, has_scale), run, spy)


def test_quantize_and_insert_k_cache():
    insert("quantize_and_insert_k_cache", [r for r in ALL_ROWS if r[1] == 512], KV_SCALES)


def test_indexer_k_quant_and_cache():
    insert("indexer_k_quant_and_cache", [r for r in ALL_ROWS if r[1] == 128], [1.0])


# --- readers -------------------------------------------------------------------------------------

REQUESTS = {
    "some": [(3, 1), (0, 0), (SLOTS // 2, 5), (1, 7)],  # lengths, and first positions
    "one": [(SIZE, 0)],
    "nothing": [],
}
READERS = {
    "row": ALL_ROWS,
    "layout": LAYOUTS,
    "kv_scale": KV_SCALES,
    "named": [False, True],
}


def make_table(rng, count: int) -> np.ndarray:
    """Three pages of each request, as a part of a wider table."""
    wide = np.full((count, PAGES + 2), -9, np.int32)
    for table in wide:
        table[:PAGES] = rng.permutation(PAGES)
    return wide[:, :PAGES]


def slots_of(table, start: int, length: int) -> np.ndarray:
    at = np.arange(start, start + length)
    return table[at // SIZE].astype(np.int64) * SIZE + at % SIZE


def scale_options(kv_scale) -> dict:
    return {} if np.isscalar(kv_scale) and kv_scale == 1 else {"kv_scale": kv_scale}


def test_gather_kv_cache():
    """Only rows of requests are written; workspaces of requests lie in any order."""
    spy = Spy(sparse_mla.gather_kv_cache, package.gather_kv_cache)

    def run(row, layout, kv_scale, named, requests, starts, gap, more):
        rng = np.random.default_rng(more)
        cache = Cache(row, layout, seed=more)
        lens = np.array([n for n, _ in REQUESTS[requests]], np.int32)
        first = np.array([p for _, p in REQUESTS[requests]], np.int32)
        first = first if starts else np.zeros_like(first)
        table = make_table(rng, len(lens))
        total = int(lens.sum())
        order = rng.permutation(len(lens))
        places = np.zeros(len(lens), np.int32)
        places[order] = np.cumsum([0, *lens[order]])[:-1]
        out = Guarded((total + more, row[1]), ref.BF16, row_gap=gap, poison=NO_NAN)
        options = cache.options(named) | scale_options(kv_scale)
        if starts:
            options["seq_starts"] = first
        got = spy(cache.array, table, lens, places, out=out.array, **options)
        assert got is out.array
        found = np.ascontiguousarray(out.check(written=False))
        assert (found[total:].view(np.uint8) == NO_NAN).all(), "a row of no request was written"
        for b, n in enumerate(lens):
            want = cache.bf16(slots_of(table[b], int(first[b]), int(n)), kv_scale)
            assert_same_bf16(found[places[b] : places[b] + n], want)

    options = READERS | {"requests": [*REQUESTS], "starts": [False, True], "gap": [0, 8]}
    run_table(cover(options | {"more": [0, 2]}, has_scale, has_pages), run, spy)


def test_dequantize_and_gather_k_cache():
    spy = Spy(sparse_mla.dequantize_and_gather_k_cache, package.dequantize_and_gather_k_cache)

    def run(row, layout, kv_scale, named, requests, lens, offset, gap):
        rng = np.random.default_rng(offset)
        cache = Cache(row, layout, seed=offset)
        whole = np.array([n + p for n, p in REQUESTS[requests]], np.int32)
        last = np.array([n for n, _ in REQUESTS[requests]], np.int32)
        count = last if lens else whole
        table = make_table(rng, len(whole))
        rows = int(count.max(initial=0)) + offset + 1
        out = Guarded((len(whole), rows, row[1]), ref.BF16, row_gap=gap, poison=NO_NAN)
        options = cache.options(named, has_size=False) | scale_options(kv_scale)
        got = spy(
            out.array, cache.array, whole, last if lens else None, table, SIZE, offset, **options
        )
        assert got is out.array
        found = np.ascontiguousarray(out.check(written=False))
        for b, n in enumerate(count):
            want = cache.bf16(slots_of(table[b], int(whole[b] - n), int(n)), kv_scale)
            assert_same_bf16(found[b, offset : offset + n], want)
            left = np.concatenate([found[b, :offset], found[b, offset + n :]])
            assert (left.view(np.uint8) == NO_NAN).all(), "a row past the tokens was written"

    options = READERS | {"requests": [*REQUESTS], "lens": [False, True], "offset": [0, 3]}
    run_table(cover(options | {"gap": [0, 8]}, has_scale, has_pages), run, spy, but=("block_size",))


def test_dequantize_kv_cache():
    spy = Spy(sparse_mla.dequantize_kv_cache, package.dequantize_kv_cache)

    def run(row, layout, kv_scale, named, dtype):
        cache = Cache(row, layout)
        options = cache.options(named) | scale_options(kv_scale)
        got = np.asarray(spy(cache.array, dtype=dtype, **options))
        got = got.reshape(-1, got.shape[-1])
        if layout == "padded" or got.shape[0] == SLOTS:
            slots = np.arange(SLOTS)
            if dtype == "bfloat16":
                assert_same_bf16(got, cache.bf16(slots, kv_scale))
            else:
                want = cache.fp32(slots, kv_scale)
                nan = np.isnan(want)
                assert np.array_equal(np.isnan(got), nan)
                assert_same_bits(np.where(nan, 0, got), np.where(nan, np.float32(0), want))
        else:
            raise AssertionError(f"{got.shape[0]} rows of {SLOTS}")

    run_table(cover(READERS | {"dtype": ["float32", "bfloat16"]}, has_scale), run, spy)
