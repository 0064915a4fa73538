"""Which format of rows an array has as a cache, and the arrays, formats, scales and sizes that the
operators of caches refuse."""

from __future__ import annotations

import re

import device
import numpy as np
import pytest
import reference as ref
import row_formats as rows
from helpers import assert_same_bits
from library import sparse_mla
from row_writers import SPLIT, check_write, refuses, write, writer

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
    takes = f"{TAKES} (bfloat16 or fp8_ds_mla or fp8_e4m3 or fp8_nope or fp8_token)"
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
    with pytest.raises(
        ValueError, match=rf"^sparse_attention: `kv_cache` {TAKES} \(.*\), got {name}$"
    ):
        sparse_mla.sparse_attention(q, cache, slots, softmax_scale=1.0, kv_format=name)
    keys = np.zeros((9, 512), ref.BF16)
    text = rf"^sparse_attention: `extra_kv_cache` {TAKES} \(.*\), got {name}$"
    with pytest.raises(ValueError, match=text):
        sparse_mla.sparse_attention(
            q, keys, slots, softmax_scale=1.0, extra_kv_cache=cache, extra_indices=slots
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
