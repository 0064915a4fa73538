"""Rows of keys of 512 values and of the indexer's keys: every byte of writers and readers, against
the reference in row_formats.py and the vectors of docs/formats.md (csrc/cpu/cache, csrc/cuda).

SMLA_RANDOM_ROWS=1000000 sets the number of random rows per format; a GPU gets as many without it.
"""

from __future__ import annotations

import os

import cases
import device
import numpy as np
import pytest
import reference as ref
import row_formats as rows
from helpers import Guarded, assert_same_bf16, assert_same_bits
from library import ISAS, sparse_mla
from row_writers import FORMATS, KV_SCALE, check_write, scale_of, write, writer

LAYOUTS = [(name, layout) for name in FORMATS for layout in rows.layouts_of(name)]
RANDOM_ROWS = int(os.environ.get("SMLA_RANDOM_ROWS", 1_000_000 if device.ON_CUDA else 10_000))


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
