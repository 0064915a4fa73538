"""transfer_kv_cache, byte for byte (csrc/cpu/cache/cache.c, csrc/cuda/cache/cache_transfer.cu).

A cache is seen as bytes here: where the parts of a slot's row lie follows from docs/formats.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

import device
import numpy as np
import pytest
import reference as ref
from borders import on_threads
from helpers import assert_same_bits
from library import package, sparse_mla
from numpy.lib.stride_tricks import as_strided

copy = sparse_mla.transfer_kv_cache


U8, I8 = np.dtype(np.uint8), np.dtype(np.int8)


@dataclass(frozen=True)
class Row:
    """A row of a format: its bytes, and those of the scales that lie apart in split pages."""

    data: int
    scales: int = 0
    dtype: np.dtype = U8
    kv_format: str | None = None  # for rows whose size does not tell the format

    @property
    def elements(self) -> int:
        return (self.data + self.scales) // self.dtype.itemsize

    @property
    def options(self) -> dict:
        return {} if self.kv_format is None else {"kv_format": self.kv_format}


ROWS = {
    "bfloat16": Row(1152, dtype=ref.BF16),
    "bfloat16, 512": Row(1024, dtype=ref.BF16),
    "fp8_ds_mla": Row(656),
    "fp8_ds_mla, e4m3": Row(656, dtype=ref.E4M3),
    "fp8_token": Row(656, kv_format="fp8_token"),
    "fp8_v4": Row(576, 8),
    "fp8_v4 by vLLM's name": Row(576, 8, kv_format="fp8_ds_mla"),
    "fp8_e4m3": Row(512),
    "fp8_e4m3, 576": Row(576, kv_format="fp8_e4m3"),
    "fp8_index": Row(128, 4),
    "mxfp4_index": Row(64, 4, I8),
    "fp8_v41": Row(528, kv_format="fp8_v41"),
    "fp8_v41_split": Row(512, 16, kv_format="fp8_v41_split"),
    "fp4_v41": Row(288, kv_format="fp4_v41"),
    "fp4_v41_split": Row(256, 32, kv_format="fp4_v41_split"),
    "fp8_nope": Row(528, kv_format="fp8_nope"),
}
LAYOUTS = ("pages", "padded", "head axis", "flat")


def make_cache(rng, row: Row, layout: str, pages: int, page: int, shift: int = 0):
    """-> all bytes, and a cache of random ones in them, `shift` bytes behind a vector. Its size
    is that of the pages, or of all their slots where it is flat."""
    size = row.data + row.scales
    token = size + (48 if layout == "padded" and row.scales == 0 else 0)
    gap = 96 if layout == "padded" else 0
    used = pages * (page * token + gap)
    memory = np.zeros(used + 512, np.uint8)
    start = -memory.ctypes.data % 256 + shift
    memory[start : start + used] = rng.integers(0, 256, used, np.uint8)
    strides = {"head axis": (page * token, token, token, 1), "flat": (token, 1)}
    shapes = {"head axis": (pages, page, 1, size), "flat": (pages * page, size)}
    cache = np.ndarray(
        shapes.get(layout, (pages, page, size)),
        np.uint8,
        memory,
        start,
        strides.get(layout, (page * token + gap, token, 1)),
    )
    return memory, cache.view(row.dtype)


def parts_of(memory: np.ndarray, cache: np.ndarray, row: Row, slot: int) -> list[slice]:
    """The bytes of a slot's row: one part, or data and scales."""
    start = cache.ctypes.data - memory.ctypes.data
    if cache.ndim == 2:
        start += slot * cache.strides[0]
        return [slice(start, start + row.data)]
    page, offset = divmod(slot, cache.shape[1])
    start += page * cache.strides[0]
    if row.scales == 0:
        start += offset * cache.strides[1]
        return [slice(start, start + row.data)]
    scales = start + cache.shape[1] * row.data + offset * row.scales
    start += offset * row.data
    return [slice(start, start + row.data), slice(scales, scales + row.scales)]


def num_slots(cache: np.ndarray) -> int:
    return cache.shape[0] if cache.ndim == 2 else cache.shape[0] * cache.shape[1]


def transfer(row, src, dst, src_slots, dst_slots) -> np.ndarray:
    """The bytes of dst's memory after the call, as they should be; src and dst are pairs of
    make_cache."""
    want = dst[0].copy()
    for i, j in zip(src_slots.tolist(), dst_slots.tolist(), strict=True):
        if i >= 0 and j >= 0:
            pairs = zip(parts_of(*src, row, i), parts_of(*dst, row, j), strict=True)
            for from_, to in pairs:
                want[to] = src[0][from_]
    return want


def check(row: Row, src, dst, src_slots, dst_slots, call=copy, **options) -> None:
    before = src[0].copy()
    want = transfer(row, src, dst, src_slots, dst_slots)
    assert call(src[1], dst[1], src_slots, dst_slots, **row.options, **options) is dst[1]
    assert_same_bits(dst[0], want, "the memory of dst")
    if src[0] is not dst[0]:
        assert_same_bits(src[0], before, "the memory of src")


def draw_slots(rng, count: int, *caches: np.ndarray) -> list[np.ndarray]:
    """Different slots of each cache, of which some are negative."""
    lists = [rng.permutation(num_slots(cache))[:count] for cache in caches]
    for i, slots in enumerate(lists):
        slots[i + 1 :: 7] = (-1, -(2**31))[i]
    return lists


# --- where rows lie ------------------------------------------------------------------------------


@pytest.mark.parametrize(("src_page", "dst_page"), [(1, 16), (16, 64), (64, 1), (5, 5)])
@pytest.mark.parametrize("fmt", ROWS)
def test_formats_and_pages(fmt, src_page, dst_page):
    rng = np.random.default_rng(1)
    row = ROWS[fmt]
    layouts = LAYOUTS[: 3 if row.scales else 4]
    for src_layout, dst_layout in pairwise((*layouts, *layouts[:1])):
        src = make_cache(rng, row, src_layout, -(-70 // src_page), src_page)
        dst = make_cache(rng, row, dst_layout, -(-75 // dst_page), dst_page)
        check(row, src, dst, *draw_slots(rng, 67, src[1], dst[1]))


@pytest.mark.parametrize("fmt", ["fp8_v4", "fp8_index", "mxfp4_index", "fp8_v41_split"])
def test_pages_of_bytes(fmt):
    """[pages, bytes] with padding behind the scales, from and to pages whose shape is known."""
    rng = np.random.default_rng(2)
    row = ROWS[fmt]
    name = row.kv_format or fmt
    size = row.data + row.scales

    def whole(pages: int):
        memory = rng.integers(0, 256, (pages, 6 * size + 64), np.uint8)
        return memory, memory

    def seen(pair):
        memory, cache = pair
        strides = (cache.strides[0], size, 1)
        return memory.reshape(-1), np.ndarray((len(cache), 6, size), np.uint8, memory, 0, strides)

    pairs = [(whole(4), whole(5)), (whole(4), make_cache(rng, row, "padded", 5, 6))]
    for src, dst in pairs:
        slots = draw_slots(rng, 20, *(seen(x)[1] if x[1].ndim == 2 else x[1] for x in (src, dst)))
        want = transfer(row, seen(src), seen(dst) if dst[1].ndim == 2 else dst, *slots)
        copy(src[1], dst[1], *slots, kv_format=name, block_size=6)
        assert_same_bits(dst[0].reshape(-1), want)


SHIFTS = [("bfloat16", 2), ("bfloat16", 4), ("bfloat16", 8), ("fp8_v4", 8), ("fp8_index", 4)]
SHIFTS += [("fp8_index", 8), ("mxfp4_index", 4), ("fp8_ds_mla", 16)]


@pytest.mark.parametrize(("fmt", "shift"), SHIFTS)
def test_rows_off_vectors(fmt, shift):
    """The shorter words of a kernel, where either cache needs them, or both do."""
    rng = np.random.default_rng(3)
    row = ROWS[fmt]
    for shifts in ((shift, 0), (0, shift), (shift, shift)):
        src, dst = (make_cache(rng, row, "pages", 9, 8, by) for by in shifts)
        check(row, src, dst, *draw_slots(rng, 67, src[1], dst[1]))


def test_rows_of_any_strides():
    """Pages back to front and one page for all, which dst may not have; layers in turn."""
    rng = np.random.default_rng(4)
    row = ROWS["bfloat16"]
    memory, cache = make_cache(rng, row, "pages", 6, 8)
    layers = cache.reshape(2, 3, 8, 576).transpose(1, 0, 2, 3)
    dst = make_cache(rng, row, "padded", 5, 4)
    for pages in (cache[::-1], cache[:1].repeat(3, 0), layers[:, 1], cache[:, ::2]):
        src = (memory, pages) if pages.base is not None else (pages.reshape(-1).view("u1"), pages)
        check(row, src, dst, *draw_slots(rng, 18, pages, dst[1]))
    one = np.broadcast_to(cache[:1], (3, 8, 576))
    check(row, (memory, one), dst, *draw_slots(rng, 18, one, dst[1]))
    other = np.random.default_rng(5).integers(0, 256, memory.size, np.uint8)
    for i, j in ((0, 1), (1, 0)):
        memory[:] = other
        check(row, (memory, layers[:, i]), (memory, layers[:, j]), np.arange(7), np.arange(9, 16))


# --- slots ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtypes", [("i4", "i4"), ("i8", "i4"), ("i4", "i8"), ("i8", "i8")])
def test_slots_of_any_dtype_and_stride(dtypes):
    rng = np.random.default_rng(6)
    row = ROWS["fp8_ds_mla"]
    src, dst = (make_cache(rng, row, "pages", 7, 8) for _ in range(2))
    lists = draw_slots(rng, 40, src[1], dst[1])
    slots = [x.astype(dtype) for x, dtype in zip(lists, dtypes, strict=True)]
    for forms in (slots, [x[::-1] for x in slots], [x[::3] for x in slots]):
        check(row, src, dst, *forms)
    same = np.broadcast_to(slots[0][:1], 5)
    check(row, src, dst, same, slots[1][2:7])


def test_a_negative_slot_in_either_list_skips_its_row():
    rng = np.random.default_rng(7)
    row = ROWS["fp8_v4"]
    src, dst = (make_cache(rng, row, "pages", 2, 4) for _ in range(2))
    before = dst[0].copy()
    for slots in ([-1, -1, 3, -(2**63)], [0, 1, -1, -5]), ([-1] * 4, [0, 1, 2, 3]):
        check(row, src, dst, *map(np.array, slots))
        assert_same_bits(dst[0], before)


def test_nothing_to_copy():
    rng = np.random.default_rng(8)
    row = ROWS["fp8_ds_mla"]
    some, none = make_cache(rng, row, "pages", 2, 4), make_cache(rng, row, "pages", 0, 4)
    for src, dst in ((some, none), (none, some), (none, none), (some, some)):
        check(row, src, dst, np.zeros(0, np.int64), np.zeros(0, np.int32))
        check(row, src, dst, np.full(8, -1), np.arange(8) if dst is some else np.full(8, -7))


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("slot", [8, 2**31 - 1, 2**40, 2**63 - 1])
@pytest.mark.parametrize("name", ["src", "dst"])
def test_a_slot_past_the_end_writes_nothing(name, slot):
    """It is one where the other list skips its row, too."""
    rng = np.random.default_rng(9)
    row = ROWS["fp8_ds_mla"]
    src, dst = (make_cache(rng, row, "pages", 2, 4) for _ in range(2))
    before = dst[0].copy()
    slots = {"src_slots": np.array([1, 2, -1, 3]), "dst_slots": np.array([1, 2, -1, 3])}
    slots[f"{name}_slots"][2] = slot
    words = f"`{name}_slots` must be below the 8 slots of `{name}`, got {slot} at token 2"
    with pytest.raises(ValueError, match=f"^transfer_kv_cache: {words}$"):
        copy(src[1], dst[1], **slots)
    assert_same_bits(dst[0], before)


@pytest.mark.parametrize("fmt", ["bfloat16", "fp8_ds_mla", "fp8_v4", "mxfp4_index"])
@pytest.mark.parametrize("count", [255, 5000, 9000, 20_000])
def test_many_rows(fmt, count):
    """A warp copies one row, two or four, by their number; threads of the CPU get shares."""
    rng = np.random.default_rng(10)
    row = ROWS[fmt]
    src = make_cache(rng, row, "padded", count // 64 + 2, 64)
    dst = make_cache(rng, row, "pages", count // 16 + 2, 16)
    check(row, src, dst, *draw_slots(rng, count, src[1], dst[1]))


def draw_many(repeats: bool) -> tuple:
    """src, dst, and slots of dst that are given twice, or not."""
    rng = np.random.default_rng(11)
    src, dst = (make_cache(rng, ROWS["fp8_v4"], "pages", 100, 64) for _ in range(2))
    _, slots = draw_slots(rng, 5000, src[1], dst[1])
    return src, dst, slots % 900 if repeats else slots


def copy_many(repeats: bool) -> bytes:
    src, dst, slots = draw_many(repeats)
    package.transfer_kv_cache(src[1], dst[1], np.arange(5000), slots)
    return dst[1].tobytes()


@pytest.mark.skipif(device.ON_CUDA, reason="threads of the CPU")
@pytest.mark.parametrize("repeats", [False, True])
def test_any_number_of_threads(repeats):
    """Where a slot is given twice, the CPU lets the last row win."""
    src, dst, slots = draw_many(repeats)
    dst[0][:] = transfer(ROWS["fp8_v4"], src, dst, np.arange(5000), slots)
    want = dst[1].tobytes()
    for threads in (1, 2, 5):
        assert on_threads(threads, copy_many, repeats) == want


# --- one cache -----------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["bfloat16", "fp8_ds_mla", "fp8_v4"])
def test_rows_within_a_cache(fmt):
    """src is dst, and no row is both read and written. A row that is copied to itself stays."""
    rng = np.random.default_rng(12)
    row = ROWS[fmt]
    cache = make_cache(rng, row, "padded", 9, 8)
    slots = rng.permutation(72)
    for view in (cache[1], cache[1][:]):
        want = transfer(row, cache, cache, slots[:30], slots[30:60])
        got = copy(view, cache[1], slots[:30], slots[30:60], **row.options)
        assert got is cache[1]
        assert_same_bits(cache[0], want)
    copy(cache[1], cache[1], slots, slots, **row.options)
    assert_same_bits(cache[0], want)


# --- refusals ------------------------------------------------------------------------------------


def codes(*shape, dtype=np.uint8) -> np.ndarray:
    return np.full(shape, 0x5A, np.uint8).view(dtype)


def arguments() -> dict:
    slots = np.array([0, 5, 7])
    return {"src": codes(2, 4, 656), "dst": codes(3, 4, 656), "src_slots": slots,
            "dst_slots": slots}  # fmt: skip


BUFFER = codes(5, 4, 656)
FORMAT = "`dst` must be of the format of `src`, {} with {} elements a token, got {} with {}"
ERRORS = [
    ({"dst": codes(3, 4, 584)}, FORMAT.format("fp8_ds_mla", 656, "fp8_v4", 584)),
    ({"dst": codes(3, 4, 512)}, FORMAT.format("fp8_ds_mla", 656, "fp8_e4m3", 512)),
    ({"dst": codes(3, 4, 1152, dtype=ref.BF16)},
     FORMAT.format("fp8_ds_mla", 656, "bfloat16", 576)),
    ({"src": codes(3, 4, 1024, dtype=ref.BF16), "dst": codes(3, 4, 1152, dtype=ref.BF16)},
     FORMAT.format("bfloat16", 512, "bfloat16", 576)),
    ({"dst": codes(3, 4, 584), "kv_format": "fp8_ds_mla"},
     FORMAT.format("fp8_ds_mla", 656, "fp8_v4", 584)),
    ({"src": codes(3, 4, 512), "dst": codes(3, 4, 576), "kv_format": "fp8_e4m3"},
     FORMAT.format("fp8_e4m3", 512, "fp8_e4m3", 576)),
    ({"src": codes(2, 4, 528), "dst": codes(2, 4, 528)},
     "`src` must come with kv_format=\"fp8_v41\" or \"fp8_v41_split\" or \"fp8_nope\", got none "
     "for shape [2, 4, 528]"),
    ({"src": codes(2, 4, 600)}, "`src` must have a last dimension of "),
    ({"src": codes(2, 4, 2, 656)}, "`src` must have shape [pages, block_size, 656], "),
    ({"dst": codes(0, 0, 656)}, "`dst` must have at least one token per page, got shape"),
    ({"block_size": 4, "dst": codes(3, 8, 656)},
     "`dst` must have pages of block_size = 4 tokens, got 8"),
    ({"block_size": -1}, "`block_size` must be "),
    ({"src_slots": np.zeros((3, 1), np.int64)}, "`src_slots` must have shape [any], got [3, 1]"),
    ({"dst_slots": np.zeros(4, np.int64)},
     "`dst_slots` must have shape [3], got [4]: an entry per entry of `src_slots`"),
    ({"src": BUFFER[:3], "dst": BUFFER[2:]},
     "`dst` must be the whole of or not overlap `src`, got arrays that share memory"),
    ({"src": BUFFER[:3], "dst": BUFFER[:2]},
     "`dst` must be the whole of or not overlap `src`, got arrays that share memory"),
    ({"dst": as_strided(codes(1, 4, 656), (3, 4, 656), (0, 656, 1))},
     "`dst` must have positive strides (it is written), got 0 in dimension 0"),
    ({"dst": as_strided(codes(3, 4, 656), (3, 4, 656), (1312, 656, 1))},
     "`dst` must have elements that do not overlap (it is written)"),
    ({"dst": codes(3, 4, 1312)[..., ::2]},
     "`dst` must have a contiguous last dimension (stride 1), got stride 2"),
    ({"src": codes(2 * 4 * 656 + 8)[8:].reshape(2, 4, 656)},
     "`src` must be aligned to 16 bytes, got an address that is "),
]  # fmt: skip
TYPES = [
    ({"src": np.ones((2, 4, 656), np.float32)}, "`src` must be bfloat16 (576 or 512 values a "
     "token), or uint8, int8 or float8_e4m3fn (fp8_ds_mla, 656 or "),
    ({"kv_format": "bfloat16"}, "`src` must be bfloat16 for format bfloat16, got uint8"),
    ({"src_slots": np.zeros(3, np.int16)}, "`src_slots` must be int32 or int64, got int16"),
    ({"dst_slots": np.zeros(3, np.float32)}, "`dst_slots` must be int32 or int64, got float32"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words", "error"),
    [*((*row, ValueError) for row in ERRORS), *((*row, TypeError) for row in TYPES)],
)
def test_refusals(changes, words, error):
    given = arguments() | changes
    before = given["dst"].tobytes()
    with pytest.raises(error, match=f"^{re.escape(f'transfer_kv_cache: {words}')}"):
        copy(**given)
    assert given["dst"].tobytes() == before, "a call that raises has written"


def test_a_read_only_dst():
    given = arguments()
    given["dst"].setflags(write=False)
    with pytest.raises(BufferError, match="transfer_kv_cache: `dst` must be writable"):
        package.transfer_kv_cache(**given)
    given = arguments()
    given["src"].setflags(write=False)
    package.transfer_kv_cache(**given)


def test_the_good_call_is_good():
    copy(**arguments())
