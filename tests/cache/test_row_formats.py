"""Rows of keys of 512 values and of the indexer's keys: every byte of writers and readers, against
the reference in row_formats.py and the vectors of docs/formats.md (csrc/cpu/cache, csrc/cuda).

SMLA_RANDOM_ROWS=1000000 sets the number of random rows per format; a GPU gets as many without it.
"""

from __future__ import annotations

import os
import re

import cases
import device
import numpy as np
import pytest
import reference as ref
import row_formats as rows
from helpers import Guarded, assert_same_bf16, assert_same_bits
from library import ISAS, sparse_mla

FORMATS = list(rows.FORMATS)
SPLIT = [name for name in FORMATS if rows.FORMATS[name].split]
LAYOUTS = [(name, layout) for name in FORMATS for layout in rows.layouts_of(name)]
KV_SCALE = 0.37  # scale of caches that have one
RANDOM_ROWS = int(os.environ.get("SMLA_RANDOM_ROWS", 1_000_000 if device.ON_CUDA else 10_000))


def writer(name: str):
    is_index = rows.FORMATS[name].width == 128
    return (
        sparse_mla.indexer_k_quant_and_cache if is_index else sparse_mla.quantize_and_insert_k_cache
    )


def refuses(text: str, error=ValueError):
    return pytest.raises(error, match=re.escape(text))


def scale_of(name: str) -> dict:
    return {"kv_scale": KV_SCALE} if rows.FORMATS[name].scales == "cache" else {}


def write(pages: rows.Pages, k, slots, **options) -> None:
    got = writer(pages.format.name)(k, pages.cache, slots, **pages.options, **options)
    assert got is pages.cache


def check_write(pages: rows.Pages, k, slots, **options) -> None:
    """The library and the reference must leave the same bytes in the whole memory of the cache."""
    options = scale_of(pages.format.name) | options
    before = pages.memory.copy()
    write(pages, k, slots, **options)
    after = pages.memory.copy()
    pages.memory[...] = before
    bits = ref.to_bf16_bits(k[: len(slots)])
    pages.put(slots, *pages.format.encode(bits, options.get("kv_scale", 1.0)))
    assert_same_bits(after, pages.memory, f"{pages.format.name}, {pages.layout}")


# --- vectors -------------------------------------------------------------------------------------


def key(width=512, **values) -> np.ndarray:
    """A key of zeros but for x_i = value."""
    x = np.zeros((1, width), np.float32)
    for name, value in values.items():
        x[0, int(name[1:])] = value
    return x


def written(name: str, x: np.ndarray, **options) -> tuple[np.ndarray, np.ndarray]:
    """Data and scales of a key that is written to slot 3 of pages of 2 tokens."""
    pages = rows.Pages(name, block_size=2, pages=2)
    write(pages, x, np.array([3]), **options)
    data, scales = pages.get([3])
    return data[0], scales[0]


def test_vector_fp8_v4():
    x = key(x0=448, x1=-1, x64=450, x65=3, x128=1e-6, x448=1.5)
    data, scales = written("fp8_v4", x)
    want = np.zeros(576, np.uint8)
    want[:2], want[64:66], want[128], want[448:450] = (0x7E, 0xB8), (0x76, 0x3C), 0x48, (0xC0, 0x3F)
    assert_same_bits(data, want)
    assert scales.tolist() == [127, 128, 105, 105, 105, 105, 105, 0]


V41_KEY = {"x0": 1, "x1": -3, "x2": 0.3, "x16": 100, "x17": -41, "x511": 0.001}


@pytest.mark.parametrize("name", ["fp8_v41", "fp8_v41_split"])
def test_vector_fp8_v41(name):
    data, scales = written(name, key(**V41_KEY))
    want = np.zeros(512, np.uint8)
    want[:3], want[16:18], want[511] = (0x48, 0xD4, 0x3A), (0x7C, 0xF2), 0x78
    assert_same_bits(data, want)
    assert scales.tolist() == [125, *[105] * 14, 109]


@pytest.mark.parametrize("name", ["fp4_v41", "fp4_v41_split"])
def test_vector_fp4_v41(name):
    data, scales = written(name, key(**V41_KEY))
    want = np.zeros(256, np.uint8)
    want[:2], want[8], want[255] = (0xF4, 0x01), 0xD7, 0x10
    assert_same_bits(data, want)
    assert scales.tolist() == [0x30, 0x58, *[1] * 30]


def test_vector_mxfp4_index():
    data, scales = written("mxfp4_index", key(128, x0=6, x1=-3.1, x2=0.25, x3=0.75, x32=7, x33=1))
    want = np.zeros(64, np.uint8)
    want[:2], want[16] = (0xD7, 0x20), 0x16
    assert_same_bits(data, want)
    assert scales.tolist() == [127, 128, 1, 1]


def test_vector_fp8_index():
    """All 2: 448 s >= 2 for s = 2^-7, and 2 / s = 256. Zeros: s = 2^-22, as P2(0, 448, 1e-4) is."""
    data, scales = written("fp8_index", np.full((1, 128), 2, np.float32))
    assert set(data.tolist()) == {0x78}
    assert scales.view(np.float32)[0] == 2.0**-7
    data, scales = written("fp8_index", np.full((1, 128), -0.0, np.float32))
    assert set(data.tolist()) == {0x80}
    assert scales.view(np.float32)[0] == 2.0**-22


def test_vector_fp8_e4m3_and_fp8_nope():
    data, scales = written("fp8_e4m3", key(x0=1, x1=-450, x2=3), kv_scale=0.5)
    assert data[:4].tolist() == [0x40, 0xFE, 0x4C, 0]  # 2, -448, 6
    assert len(scales) == 0
    data, scales = written("fp8_nope", key(x0=1, x1=-0.5, x130=448))
    assert data[:3].tolist() == [0x7E, 0xF6, 0]
    assert data[130] == 0x7E
    assert scales.view(np.float32).tolist() == [
        np.float32(1) / np.float32(448),
        1,
        *[2.0**-126] * 2,
    ]


SPECIAL = {"x0": np.nan, "x1": -np.nan, "x2": np.inf, "x3": -np.inf, "x4": -0.0, "x5": 1.0}


@pytest.mark.parametrize(
    ("name", "codes", "scale"),
    [
        ("fp8_v4", [0x7F, 0xFF, 0x7E, 0xFE, 0x80, 0], [247]),  # s = 2^120, and 2^128 / s = 256
        ("fp8_v41", [0x7F, 0xFF, 0x7E, 0xFE, 0x80, 0], [247]),
        ("fp8_e4m3", [0x7F, 0xFF, 0x7E, 0xFE, 0x80, 0x38], []),
        ("mxfp4_index", [7, 7, 7, 15, 8, 0], [253]),
        ("fp4_v41", [7, 7, 7, 15, 8, 0], [0x7E]),
    ],
)
def test_nan_and_infinities(name, codes, scale):
    """An amax leaves out NaN and takes an infinity for FLT_MAX. In e2m1 every NaN is 7."""
    f = rows.FORMATS[name]
    data, scales = written(name, key(f.width, **SPECIAL))
    got = rows.split_nibbles(data[None])[0] if f.codes == "e2m1" else data
    assert got[:6].tolist() == codes
    assert scales[: len(scale)].tolist() == scale


def test_a_tile_of_nan_has_the_scale_of_zeros():
    data, scales = written("fp8_v4", np.full((1, 512), -np.nan, np.float32))
    assert set(data[:448].tolist()) == {0xFF}
    assert scales.tolist() == [105] * 7 + [0]


# --- writers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
@pytest.mark.parametrize("slot_dtype", [np.int64, np.int32])
def test_write_layouts(name, layout, slot_dtype):
    rng = np.random.default_rng(1)
    slots = np.array([19, 0, -1, 7, 4, 5, -(2**31), 12], slot_dtype)
    k = rows.random_keys(rng, 9, rows.FORMATS[name].width).view(ref.BF16)
    check_write(rows.Pages(name, layout), k, slots)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("block_size", [1, 2, 64, 256])
def test_write_block_sizes(name, block_size):
    rng = np.random.default_rng(2)
    slots = rng.permutation(3 * block_size)[: min(100, 3 * block_size)]
    k = rows.random_keys(rng, len(slots), rows.FORMATS[name].width).view(ref.BF16)
    for layout in rows.layouts_of(name):
        check_write(rows.Pages(name, layout, pages=3, block_size=block_size), k, slots)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_write_dtypes_and_strided_keys(name, dtype):
    """Keys are often columns of a wider buffer, as a projection leaves them."""
    width = rows.FORMATS[name].width
    value = np.random.default_rng(3).standard_t(1.5, (6, 600)).astype(np.float32)
    joint = ref.to_bf16(value) if dtype == "bfloat16" else value.astype(dtype)
    slots = np.array([3, 1, 2, 9, 8, 0])
    for start in (0, 3, 8):
        part = joint[:, start : start + width]
        for k in (part, part[::-1], np.broadcast_to(part[:1], part.shape), part.copy()):
            check_write(rows.Pages(name), k, slots)


@pytest.mark.parametrize("name", FORMATS)
def test_write_takes_the_count_from_slot_mapping(name):
    k = rows.random_keys(np.random.default_rng(4), 9, rows.FORMATS[name].width).view(ref.BF16)
    check_write(rows.Pages(name), k, np.array([4, -1, 6]))
    check_write(rows.Pages(name), k, np.zeros(0, np.int64))
    check_write(rows.Pages(name), k[:0], np.zeros(0, np.int64))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [np.int8, ref.E4M3])
def test_write_byte_dtypes(name, dtype):
    pages = rows.Pages(name)
    if pages.cache.dtype == np.uint8:
        pages.cache = pages.cache.view(dtype)
        k = rows.random_keys(np.random.default_rng(5), 3, pages.format.width).view(ref.BF16)
        check_write(pages, k, np.array([1, 0, 5]))


def check_many(name: str, bits: np.ndarray, slots: np.ndarray, num_pages: int, some: int) -> None:
    """Writes and gathers keys. On a GPU library.py compares all bytes with those of the CPU; the
    reference judges the first `some` keys here."""
    block_size, scale = 64, scale_of(name)
    count, width = bits.shape
    pages = rows.Pages(name, pages=num_pages, block_size=block_size)
    write(pages, bits.view(ref.BF16), slots, **scale)
    data, scales = pages.get(slots[:some])
    want = pages.format.encode(bits[:some], KV_SCALE)
    assert_same_bits(data, want[0], f"{name}: data")
    assert_same_bits(scales, want[1], f"{name}: scales")
    out = np.zeros((1, count, width), ref.BF16)
    lens, table = np.array([count], np.int32), np.arange(pages.pages, dtype=np.int32)[None]
    sparse_mla.dequantize_and_gather_k_cache(
        out, pages.cache, lens, None, table, block_size, 0, kv_format=name, **scale
    )
    positions = slots[:some][slots[:some] < count]
    got = ref.bits16(out[0][positions])
    values = pages.values(positions, KV_SCALE)
    if pages.format.rope or pages.format.codes == "bf16":
        assert_same_bf16(got, np.where(np.isnan(values), 0x7FC0, ref.bf16_encode(values)), name)
    else:
        assert_same_bf16(got, ref.bf16_encode(values), name)


@pytest.mark.parametrize("name", FORMATS)
def test_many_rows(name):
    """All kinds of tiles, at once from many threads or warps. On a GPU the reference judges some
    of the rows."""
    piece = min(RANDOM_ROWS, 100_000)
    some = 2_000 if device.ON_CUDA else piece
    for first in range(0, RANDOM_ROWS, piece):
        rng = np.random.default_rng([6, first])
        count = min(piece, RANDOM_ROWS - first)
        num_pages = -(-count // 64)
        slots = rng.permutation(num_pages * 64)[:count]
        bits = rows.random_patterns(rng, count, rows.FORMATS[name].width)
        check_many(name, bits, slots, num_pages, some)


@pytest.mark.skipif(device.ON_CUDA, reason="of the CPU's instruction sets")
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_every_instruction_set(name, isa, monkeypatch):
    monkeypatch.setenv("SPARSE_MLA_CPU_ISA", isa)
    rng = np.random.default_rng(7)
    width, slots = rows.FORMATS[name].width, rng.permutation(2048)[:2000]
    check_many(name, rows.random_keys(rng, 1000, width), slots[:1000], 32, 1000)
    check_many(name, rows.random_patterns(rng, 2000, width), slots, 32, 2000)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.usefixtures("checked")
def test_a_slot_past_the_end_writes_nothing(name):
    pages = rows.Pages(name)
    before = pages.memory.copy()
    k = rows.random_keys(np.random.default_rng(7), 4, pages.format.width).view(ref.BF16)
    op = writer(name)
    for slot in (20, 2**31 - 1, 2**40):
        rule = r": `slot_mapping` must be below the 20 slots of `k_cache`, got "
        with pytest.raises(ValueError, match=rule + str(slot)):
            op(k, pages.cache, np.array([1, 2, slot, 3]), **pages.options)
        assert_same_bits(pages.memory, before, "nothing may be written")


def test_scales_of_the_cache_are_floats_or_arrays():
    k = rows.random_keys(np.random.default_rng(8), 3, 512).view(ref.BF16)
    slots = np.array([0, 1, 2])
    want = rows.Pages("fp8_e4m3")
    check_write(want, k, slots, kv_scale=1.7)
    for scale in (
        np.float32(1.7),
        np.full((), 1.7, np.float32),
        np.full((1,), 1.7, np.float32),
        np.full((1, 1), 1.7, np.float32),
        np.full(5, 1.7, np.float32)[2:3],
    ):
        pages = rows.Pages("fp8_e4m3")
        write(pages, k, slots, kv_scale=scale)
        assert_same_bits(pages.memory, want.memory, f"kv_scale {scale!r}")
        assert_same_bits(
            sparse_mla.dequantize_kv_cache(pages.cache, kv_scale=scale),
            want.values(range(20), 1.7).reshape(4, 5, 512),
        )
    pages = rows.Pages("fp8_e4m3")
    write(pages, k, slots)  # 1 where it is left out
    one = rows.Pages("fp8_e4m3")
    write(one, k, slots, kv_scale=1)
    assert_same_bits(pages.memory, one.memory)
    for scale in (2.0**-126, 3.4028234e38):  # the ends of what is accepted
        check_write(rows.Pages("fp8_e4m3"), k, slots, kv_scale=scale)


# --- readers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dequantize_any_bytes(name, layout, dtype):
    """A cache of random bytes: every code, every scale byte, NaN in both."""
    pages = rows.Pages(name, layout, pages=9, block_size=7)
    got = sparse_mla.dequantize_kv_cache(
        pages.cache, dtype=dtype, **pages.options, **scale_of(name)
    )
    width = pages.format.width
    assert got.shape == ((63, width) if layout == "flat" else (9, 7, width))
    want = pages.values(range(63), KV_SCALE)
    got = np.asarray(got).reshape(63, width)
    if dtype == "bfloat16":
        assert_same_bf16(got, ref.bf16_encode(want), name)
    else:
        nan = np.isnan(want)
        assert np.array_equal(np.isnan(got), nan)
        assert_same_bits(np.where(nan, 0, got), np.where(nan, 0, want), name)


def gathered(pages, table, first, count) -> np.ndarray:
    position = np.arange(first, first + count)
    slots = table[position // pages.block_size] * pages.block_size + position % pages.block_size
    return ref.bf16_encode(pages.values(slots, KV_SCALE))


@pytest.mark.parametrize(("name", "layout"), [x for x in LAYOUTS if x[1] != "flat"])
def test_gather_layouts(name, layout):
    pages = rows.Pages(name, layout, pages=12)
    table = np.array([[3, 1, 0, 7, -1], [2, 9, -1, -1, -1], [11, 4, 5, 6, 8]], np.int32)
    lens, starts = np.array([17, 0, 20], np.int32), np.array([2, 0, 21], np.int32)
    first = np.array([2, 0, 5], np.int32)
    buffer = Guarded((42, pages.format.width), ref.BF16, row_gap=8)
    want = np.ascontiguousarray(buffer.array).view(np.uint16).copy()
    for r in range(3):
        want[starts[r] : starts[r] + lens[r]] = gathered(pages, table[r], first[r], lens[r])
    got = sparse_mla.gather_kv_cache(
        pages.cache, table, lens, starts, out=buffer.array, seq_starts=first,
        **pages.options, **scale_of(name),
    )  # fmt: skip
    assert got is buffer.array
    assert_same_bf16(buffer.check(written=False), want, name)


@pytest.mark.parametrize(("name", "layout"), [x for x in LAYOUTS if x[1] != "flat"])
@pytest.mark.parametrize("block_size", [1, 5, 64])
@pytest.mark.parametrize("takes_all", [True, False])
def test_dequantize_and_gather(name, layout, block_size, takes_all):
    """The last gather_lens positions of each request; nothing else in out changes."""
    pages = rows.Pages(name, layout, pages=12, block_size=block_size)
    table = np.array([[3, 1, 0, 7, -1], [2, 9, -1, -1, -1], [11, 4, 5, 6, 8]], np.int32)
    seq_lens = np.array([4 * block_size, 0, 5 * block_size - block_size // 2], np.int32)
    lens = None if takes_all else np.array([seq_lens[0] - 1, 0, min(7, seq_lens[2])], np.int32)
    counts = seq_lens if takes_all else lens
    offset, size = 3, 3 + 5 * block_size
    width = pages.format.width
    buffer = Guarded((3, size, width), ref.BF16, row_gap=16)
    want = np.ascontiguousarray(buffer.array).view(np.uint16).copy()
    for r in range(3):
        part = gathered(pages, table[r], seq_lens[r] - counts[r], counts[r])
        want[r, offset : offset + counts[r]] = part
    options = {} if layout != "bytes" and not pages.format.needs_name else {"kv_format": name}
    got = sparse_mla.dequantize_and_gather_k_cache(
        buffer.array, pages.cache, seq_lens, lens, table, block_size, offset,
        **options, **scale_of(name),
    )  # fmt: skip
    assert got is buffer.array
    assert_same_bf16(buffer.check(written=False), want, name)


def test_dequantize_and_gather_of_rows_of_576():
    """The formats of DeepSeek-V3.2 are formats like any other here."""
    cache = cases.make_rows(np.random.default_rng(9), 20, "fp8").reshape(5, 4, 656)
    table, lens = np.array([[4, 0], [1, 3]], np.int32), np.array([7, 5], np.int32)
    out = np.zeros((2, 6, 576), ref.BF16)
    sparse_mla.dequantize_and_gather_k_cache(out, cache, lens, lens - 2, table, 4, 0)
    values = ref.upconvert_rows(cache.reshape(20, 656))
    want = np.zeros((2, 6, 576), np.uint16)
    want[0, :5], want[1, :3] = values[[18, 19, 0, 1, 2]], values[[6, 7, 12]]
    assert_same_bf16(out, want)


def test_nothing_to_gather():
    pages = rows.Pages("fp8_v4")
    table, zero = np.zeros((2, 1), np.int32), np.zeros(2, np.int32)
    for shape in ((2, 3, 512), (2, 0, 512), (0, 3, 512)):
        out = np.zeros(shape, ref.BF16)
        n = shape[0]
        sparse_mla.dequantize_and_gather_k_cache(
            out, pages.cache, zero[:n], None, table[:n], 5, shape[1]
        )
        assert not out.view(np.uint16).any()


BAD_GATHERS = {
    "page past the end": ("block_table", {"block_table": [[0, 12], [1, 2]]}),
    "negative page": ("block_table", {"block_table": [[0, 1], [1, -1]]}),
    "table too narrow": ("block_table", {"block_table": [[0], [1]]}),
    "negative length": ("gather_lens", {"gather_lens": [3, -1]}),
    "more than there are": ("gather_lens", {"gather_lens": [7, 4]}),
    "past the rows": ("offset", {"offset": 7}),
    "past the rows, all keys": ("offset", {"gather_lens": None}),
    "negative seq_lens": ("seq_lens", {"gather_lens": None, "seq_lens": [6, -1]}),
}


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("name", BAD_GATHERS)
def test_a_bad_gather_writes_nothing(name):
    argument, change = BAD_GATHERS[name]
    call = {"seq_lens": [6, 9], "gather_lens": [6, 4], "block_table": [[0, 1], [1, 2]], "offset": 4}
    call |= change
    offset = call.pop("offset")
    arrays = {n: x if x is None else np.array(x, np.int32) for n, x in call.items()}
    pages = rows.Pages("fp8_v4")
    buffer = Guarded((2, 10, 512), ref.BF16)
    before = buffer.storage.copy()
    with pytest.raises(
        ValueError, match=f"dequantize_and_gather_k_cache: `{argument}` must .*, got"
    ):
        sparse_mla.dequantize_and_gather_k_cache(
            buffer.array, pages.cache, arrays["seq_lens"], arrays["gather_lens"],
            arrays["block_table"], 5, offset,
        )  # fmt: skip
    assert_same_bits(buffer.storage, before, "nothing may be written")


@pytest.mark.parametrize("pair", [("fp8_v41", "fp8_v41_split"), ("fp4_v41", "fp4_v41_split")])
def test_split_pages_are_no_records(pair):
    """The same keys have other bytes in split pages; read as records they are other values. Only
    pages of one token are the same."""
    bits = ref.bf16_encode(np.random.default_rng(10).normal(0, 1, (4, 512)).astype(np.float32))
    for block_size in (1, 2):
        found = {}
        for name in pair:
            pages = rows.Pages(name, pages=4, block_size=block_size)
            write(pages, bits.view(ref.BF16), np.arange(4))
            found[name] = pages
        records, split = (found[name] for name in pair)
        read = [
            np.asarray(sparse_mla.dequantize_kv_cache(split.cache, kv_format=name))
            .reshape(-1, 512)[:4]
            .tobytes()
            for name in pair
        ]
        same_bytes = records.memory[: 4 * records.format.row_bytes].tobytes() == (
            split.memory[: 4 * split.format.row_bytes].tobytes()
        )
        assert same_bytes == (block_size == 1)
        assert (read[0] == read[1]) == (block_size == 1)
        assert read[1] == records.values(range(4)).tobytes()


# --- formats of arrays ---------------------------------------------------------------------------


def cache_of(dtype, *shape: int) -> np.ndarray:
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("dtype", "row", "values"),
    [
        (ref.BF16, 576, 576), (ref.BF16, 512, 512), (np.uint8, 656, 576), (np.int8, 584, 512),
        (ref.E4M3, 512, 512), (np.uint8, 132, 128), (np.uint8, 68, 128),
    ],
)  # fmt: skip
def test_formats_are_inferred(dtype, row, values):
    assert sparse_mla.dequantize_kv_cache(cache_of(dtype, 2, 3, row)).shape == (2, 3, values)
    assert sparse_mla.dequantize_kv_cache(cache_of(dtype, 2, 3, 1, row)).shape == (2, 3, values)


@pytest.mark.parametrize(
    ("row", "names"),
    [
        (528, '"fp8_v41" or "fp8_v41_split" or "fp8_nope"'),
        (288, '"fp4_v41" or "fp4_v41_split"'),
    ],
)
def test_ambiguous_rows_need_a_name(row, names):
    cache, k = cache_of(np.uint8, 2, 3, row), np.zeros((1, 512), np.float32)
    rule = f"must come with kv_format={names}, got none for shape [2, 3, {row}]"
    with pytest.raises(ValueError, match=re.escape(f"dequantize_kv_cache: `kv_cache` {rule}")):
        sparse_mla.dequantize_kv_cache(cache)
    with pytest.raises(
        ValueError, match=re.escape(f"quantize_and_insert_k_cache: `k_cache` {rule}")
    ):
        sparse_mla.quantize_and_insert_k_cache(k, cache, np.array([0]))


def test_the_peers_name_of_rows_of_584_bytes():
    """vLLM calls them fp8_ds_mla, too."""
    pages, k = rows.Pages("fp8_v4"), np.ones((1, 512), np.float32)
    twin = rows.Pages("fp8_v4")
    write(pages, k, np.array([3]))
    sparse_mla.quantize_and_insert_k_cache(k, twin.cache, np.array([3]), kv_format="fp8_ds_mla")
    assert_same_bits(pages.memory, twin.memory)


@pytest.mark.parametrize("name", SPLIT)
def test_split_pages_as_bytes_may_be_larger(name):
    """As engines allocate them: in units of 576 bytes, or as large as those of another format."""
    f = rows.FORMATS[name]
    k = rows.random_keys(np.random.default_rng(11), 3, f.width).view(ref.BF16)
    slots = np.array([0, 9, 5])
    pages = rows.Pages(name, "bytes", pages=3, block_size=4)
    check_write(pages, k, slots)
    exact = np.zeros((3, 4 * f.row_bytes), np.uint8)
    writer(name)(k, exact, slots, kv_format=name, block_size=4)
    data, scales = pages.get(slots)
    for slot, row, scale in zip(slots, data, scales, strict=True):
        page, offset = exact[slot // 4], slot % 4
        at = 4 * f.data_bytes + offset * f.scale_bytes
        assert_same_bits(page[offset * f.data_bytes :][: f.data_bytes], row)
        assert_same_bits(page[at : at + f.scale_bytes], scale)
    short = np.zeros((3, 4 * f.row_bytes - 1), np.uint8)
    rule = f"must have at least {4 * f.row_bytes} bytes per page of 4 tokens of {name}, got shape"
    with pytest.raises(ValueError, match=rule):
        writer(name)(k, short, slots, kv_format=name, block_size=4)


# --- bad input -----------------------------------------------------------------------------------


def apart_pages(name: str, gap: int, pages=3) -> np.ndarray:
    """Pages of 4 tokens, each `gap` bytes behind the end of the one before."""
    f = rows.FORMATS[name]
    stride = 4 * f.row_bytes + gap
    memory = np.zeros(3 * 5 * f.row_bytes + 128, np.uint8)
    start = -memory.ctypes.data % 64
    return np.lib.stride_tricks.as_strided(
        memory[start:], (pages, 4, f.row_bytes), (stride, f.row_bytes, 1), writeable=True
    )


@pytest.mark.parametrize("name", SPLIT)
def test_strides_of_split_pages(name):
    f = rows.FORMATS[name]
    op, k, slots = writer(name), np.zeros((1, f.width), np.float32), np.array([5])
    unit, least = f.alignment, 4 * f.row_bytes
    for gap in (0, unit, 5 * unit):
        op(k, apart_pages(name, gap), slots, kv_format=name)
    rule = f"must have page and token strides in multiples of {unit} bytes, got {least + unit // 2}"
    with refuses(rule):
        op(k, apart_pages(name, unit // 2), slots, kv_format=name)
    rule = f"`kv_cache` must have a page stride of at least {least} bytes, got "
    for gap in (unit, least, 2 * least):
        closer = apart_pages(name, 0)[::-1] if gap == 2 * least else apart_pages(name, -gap)
        with refuses(rule + str(least - gap)):
            sparse_mla.dequantize_kv_cache(closer, kv_format=name)
    sparse_mla.dequantize_kv_cache(apart_pages(name, -unit, pages=1), kv_format=name)


@pytest.mark.parametrize("name", SPLIT)
def test_tokens_of_split_pages(name):
    f = rows.FORMATS[name]
    op, k, slots = writer(name), np.zeros((1, f.width), np.float32), np.array([1])
    wide = np.zeros((2, 4, f.row_bytes + f.alignment), np.uint8)[..., : f.row_bytes]
    rule = f"contiguous pages (a token stride of {f.row_bytes} bytes), got a stride of "
    with refuses(f"`k_cache` must have {rule}{f.row_bytes + f.alignment}"):
        op(k, wide, slots, kv_format=name)
    op(k, wide[:, :1], slots, kv_format=name)  # pages of one token have no token stride
    memory = np.zeros(3 * f.row_bytes * 4 + 128, np.uint8)
    start = -memory.ctypes.data % 64 + f.alignment // 2
    shifted = memory[start:][: 3 * 4 * f.row_bytes].reshape(3, 4, f.row_bytes)
    with refuses(f"`k_cache` must be aligned to {f.alignment} bytes"):
        op(k, shifted, slots, kv_format=name)


def test_split_pages_need_their_size_and_name():
    k, slots = np.zeros((1, 512), np.float32), np.array([0])
    insert = sparse_mla.quantize_and_insert_k_cache
    pages = np.zeros((2, 4 * 584), np.uint8)
    rule = "block_size= for pages of fp8_v4 as [pages, bytes], got none for shape [2, 2336]"
    with refuses(f"`k_cache` must come with {rule}"):
        insert(k, pages, slots, kv_format="fp8_v4")
    with refuses("`k_cache` must have a last dimension of 512 for format"):
        insert(k, pages.view(ref.BF16), slots, block_size=4)
    with refuses("`k_cache` must come with kv_format= as [pages, bytes], got none for shape [2, "):
        insert(k, pages, slots, block_size=4)
    rule = "a last dimension of 584 for format fp8_v4 or 512 for format fp8_e4m3"
    with refuses(f"`k_cache` must have {rule}"):
        insert(k, pages, slots)
    shapes = "[pages, block_size, 584], [pages, block_size, 1, 584] or [pages, bytes]"
    rule = f"{shapes} with block_size= and kv_format= (tokens of 584 bytes), got [2, 584]"
    with refuses(f"`k_cache` must have shape {rule}"):
        insert(k, np.zeros((2, 584), np.uint8), slots)
    with refuses("`k_cache` must have pages of block_size = 8 tokens, got 4"):
        insert(k, np.zeros((2, 4, 584), np.uint8), slots, block_size=8)
    insert(k, np.zeros((2, 4, 584), np.uint8), slots, block_size=4)
    for size in (0, -4):
        with refuses(f"`block_size` must be at least 1, got {size}"):
            insert(k, pages, slots, kv_format="fp8_v4", block_size=size)
    with refuses("`block_size` must be 1 to 2147483647, got 2147483648"):
        insert(k, pages, slots, kv_format="fp8_v4", block_size=2**31)
    with refuses("`block_size`", TypeError):
        insert(k, pages, slots, kv_format="fp8_v4", block_size="4")


KEYS = "bfloat16 or fp8_v4 or fp8_e4m3 or fp8_v41 or fp8_v41_split or fp4_v41 or fp4_v41_split"
TAKES = "must be of a format that this operator takes"


def test_formats_that_an_operator_does_not_take():
    k, slots = np.zeros((1, 512), np.float32), np.array([0])
    insert = sparse_mla.quantize_and_insert_k_cache
    who = "quantize_and_insert_k_cache: `k_cache`"
    for row, dtype, name in ((656, "u1", "fp8_ds_mla"), (132, "u1", "fp8_index")):
        with refuses(f"{who} {TAKES} ({KEYS} or fp8_nope), got {name}"):
            insert(k, np.zeros((2, 4, row), dtype), slots)
    with refuses(f"{who} {TAKES} ({KEYS} or fp8_nope), got bfloat16"):  # rows of 576 values
        insert(k, np.zeros((2, 4, 576), ref.BF16), slots)
    v4 = np.zeros((2, 4, 584), np.uint8)
    with refuses(f"indexer_k_quant_and_cache: `k_cache` {TAKES} (fp8_index or mxfp4_index)"):
        sparse_mla.indexer_k_quant_and_cache(k[:, :128], v4, slots)
    who = "concat_and_cache_mla: `kv_cache`"
    takes = f"{TAKES} (bfloat16 or fp8_ds_mla or fp8_e4m3 or fp8_nope)"
    with refuses(f"{who} {takes}, got fp8_v4"):
        sparse_mla.concat_and_cache_mla(k, k[:, :64], v4, slots)
    nope = np.zeros((2, 4, 528), np.uint8)
    with refuses(f'{who} must come with kv_format="fp8_v41" or "fp8_v41_split" or "fp8_nope", got'):
        sparse_mla.concat_and_cache_mla(k, None, nope, slots)
    with refuses(f"{who} {takes}, got fp8_v41"):
        sparse_mla.concat_and_cache_mla(k, None, nope, slots, kv_format="fp8_v41")


@pytest.mark.parametrize("name", rows.INDEX_FORMATS)
def test_attention_refuses_keys_of_the_indexer(name):
    f = rows.FORMATS[name]
    q, slots = np.zeros((1, 2, 512), ref.BF16), np.zeros((1, 3), np.int32)
    cache = np.zeros((2, 4, f.row_bytes), np.uint8)
    with pytest.raises(ValueError, match=rf"^sparse_attention: `kv` {TAKES} \(.*\), got {name}$"):
        sparse_mla.sparse_attention(q, cache, slots, softmax_scale=1.0, kv_format=name)
    keys = np.zeros((9, 512), ref.BF16)
    text = rf"^sparse_attention: `extra_kv` {TAKES} \(.*\), got {name}$"
    with pytest.raises(ValueError, match=text):
        sparse_mla.sparse_attention(
            q, keys, slots, softmax_scale=1.0, extra_kv=cache, extra_indices=slots
        )


@pytest.mark.parametrize("name", [name for name in rows.FORMATS if name != "bfloat16"])
def test_the_layer_of_v3_refuses_the_formats_of_v4(name):
    limits = {"max_num_seqs": 1, "max_num_batched_tokens": 8, "max_model_len": 64}
    with refuses("Config: `kv_cache_dtype` must be "):
        sparse_mla.Config(2, softmax_scale=1.0, kv_cache_dtype=name, **limits)


def test_keys_of_another_width():
    one, slots = np.array([0]), np.array([0, 1])
    v4, index = np.zeros((2, 4, 584), np.uint8), np.zeros((2, 4, 132), np.uint8)
    insert, insert_index = writer("fp8_v4"), writer("fp8_index")
    hint = ": tokens, and the values of their keys"
    with refuses(
        f"quantize_and_insert_k_cache: `k` must have shape [any, 512], got [1, 448]{hint}"
    ):
        insert(np.zeros((1, 448), np.float32), v4, one)
    with refuses("indexer_k_quant_and_cache: `k` must have shape [any, 128], got [1, 512]"):
        insert_index(np.zeros((1, 512), np.float32), index, one)
    rule = "`k` must have at least one row per entry of `slot_mapping` (2), got 1"
    with refuses(f"quantize_and_insert_k_cache: {rule}"):
        insert(np.zeros((1, 512), np.float32), v4, slots)


@pytest.mark.parametrize("value", [0, 0.0, -1.0, np.nan, np.inf, 1e-39, 1e39])
def test_scales_that_are_no_scales(value):
    k, slots = np.zeros((1, 512), np.float32), np.array([0])
    cache = np.zeros((2, 4, 512), np.uint8)
    rule = "quantize_and_insert_k_cache: `kv_scale` must be a positive normal float32, got "
    with refuses(rule):
        sparse_mla.quantize_and_insert_k_cache(k, cache, slots, kv_scale=value)
    if not device.ON_CUDA and abs(value) < 1e39:  # values on a GPU are not read back
        with refuses(rule):
            sparse_mla.quantize_and_insert_k_cache(k, cache, slots, kv_scale=np.float32([value]))


def test_scales_where_none_belongs():
    k, slots = np.zeros((1, 512), np.float32), np.array([0])
    cache = np.zeros((2, 4, 584), np.uint8)
    who = "quantize_and_insert_k_cache: `kv_scale` must be"
    what = "for format fp8_v4, which has no scale of the whole cache, got"
    for value in (2.0, np.nan, -1):
        with refuses(f"{who} 1 {what} {value:g}"):
            sparse_mla.quantize_and_insert_k_cache(k, cache, slots, kv_scale=value)
    with refuses(f"{who} left out {what} an array"):
        sparse_mla.quantize_and_insert_k_cache(k, cache, slots, kv_scale=np.ones(1, np.float32))
    with refuses("dequantize_kv_cache: `kv_scale` must be 1 for format bfloat16"):
        sparse_mla.dequantize_kv_cache(np.zeros((2, 4, 512), ref.BF16), kv_scale=2)
    plain = np.zeros((2, 4, 512), np.uint8)
    for scale in (np.ones(2, np.float32), np.ones(0, np.float32)):
        with refuses("`kv_scale` must have one value, or be a float, got shape"):
            sparse_mla.dequantize_kv_cache(plain, kv_scale=scale)
    for scale in (np.ones(1), np.ones(1, np.int32), "1", None):
        with refuses("dequantize_kv_cache: `kv_scale` must be", TypeError):
            sparse_mla.dequantize_kv_cache(plain, kv_scale=scale)


def test_sizes_of_a_gather_that_do_not_fit():
    pages = rows.Pages("fp8_v4")
    lens, table = np.array([3, 4], np.int32), np.zeros((2, 2), np.int32)
    out = np.zeros((2, 6, 512), ref.BF16)

    def gather(**changes):
        call = {"out": out, "k_cache": pages.cache, "seq_lens": lens, "gather_lens": None}
        call |= {"block_table": table, "block_size": 5, "offset": 0}
        sparse_mla.dequantize_and_gather_k_cache(*(call | changes).values())

    gather()
    with refuses("`k_cache` must have pages of block_size = 4 tokens, got 5"):
        gather(block_size=4)
    for size in (0, -1):
        with refuses(f"`block_size` must be 1 to 2147483647, got {size}"):
            gather(block_size=size)
    for offset in (-1, 7):
        with refuses(f"`offset` must be 0 to 6, got {offset}"):
            gather(offset=offset)
    with refuses(
        "`out` must have shape [any, any, 512], got [2, 6, 576]: requests, rows, values of a key"
    ):
        gather(out=np.zeros((2, 6, 576), ref.BF16))
    with refuses("`seq_lens` must have shape [2], got [1]"):
        gather(seq_lens=lens[:1])
    with refuses("`gather_lens` must have shape [2], got [1]"):
        gather(gather_lens=lens[:1])
    with refuses("`block_table` must have a row per request of `out` (2), got 3"):
        gather(block_table=np.zeros((3, 2), np.int32))
