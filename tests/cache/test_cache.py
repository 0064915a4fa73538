"""concat_and_cache_mla and gather_kv_cache, byte for byte (csrc/cpu/cache/cache.c)."""

import cases
import numpy as np
import pytest
import reference as ref
from cases import storage
from helpers import Guarded, assert_same_bf16, assert_same_bits
from library import sparse_mla

pytestmark = pytest.mark.frameworks

FORMATS = ["fp8", "bf16", "bf16_512"]
LAYOUTS = ["paged", "mqa", "flat", "padded", "interleaved", "token_stride"]


def filled(layout: str, fmt: str, *, pages=4, block_size=5, seed=0) -> np.ndarray:
    """A writable cache of random bytes. The bytes between its rows must not change."""
    rng = np.random.default_rng(seed)
    width, dtype = (656, np.uint8) if fmt == "fp8" else (cases.head_dim(fmt), ref.BF16)
    rows = np.zeros((pages * block_size, width), dtype)
    rows.view(np.uint8)[...] = rng.integers(0, 256, rows.view(np.uint8).shape)
    return cases.lay_out(rows, block_size, layout)


def check_write(cache, kv_c, k_pe, slots, **options) -> None:
    """The library and the reference must leave the same bytes in the whole storage."""
    before = storage(cache).copy()
    assert sparse_mla.concat_and_cache_mla(kv_c, k_pe, cache, slots, **options) is cache
    after = storage(cache).copy()
    storage(cache)[...] = before
    ref.concat_and_cache_mla(kv_c, k_pe, cache, slots)
    assert_same_bits(after, storage(cache), "cache storage")


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("slot_dtype", [np.int64, np.int32])
def test_write_layouts(fmt, layout, slot_dtype):
    rng = np.random.default_rng(1)
    slots = np.array([19, 0, -1, 7, 4, 5, -(2**31), 12], slot_dtype)
    kv_c, k_pe = cases.random_bf16(rng, 8, 512), cases.random_bf16(rng, 8, cases.rope_dim(fmt))
    check_write(filled(layout, fmt), kv_c, k_pe, slots)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_write_dtypes_and_strided_inputs(fmt, dtype):
    """kv_c and k_pe are column slices of one buffer, as the projection leaves them."""
    value = np.random.default_rng(2).standard_t(1.5, (6, 600)).astype(np.float32)
    joint = ref.to_bf16(value) if dtype == "bfloat16" else value.astype(dtype)
    slots = np.array([3, 1, 2, 9, 8, 0], np.int64)
    end = 515 + cases.rope_dim(fmt)
    check_write(filled("padded", fmt), joint[:, 3:515], joint[:, 515:end], slots)
    check_write(filled("paged", fmt), joint[::-1, 3:515], joint[::-1, 515:end], slots)
    one = np.broadcast_to(joint[:1], joint.shape)
    check_write(filled("paged", fmt), one[:, 3:515], one[:, 515:end], slots)


def test_write_takes_the_count_from_slot_mapping():
    rng = np.random.default_rng(3)
    kv_c, k_pe = cases.random_bf16(rng, 9, 512), cases.random_bf16(rng, 7, 64)
    check_write(filled("paged", "fp8"), kv_c, k_pe, np.array([4, -1, 6], np.int64))
    check_write(filled("paged", "fp8"), kv_c, k_pe, np.zeros(0, np.int64))
    check_write(filled("paged", "fp8"), kv_c[:0], k_pe[:0], np.zeros(0, np.int64))


@pytest.mark.parametrize("block_size", [1, 3, 64, 100])
def test_write_block_sizes(block_size):
    rng = np.random.default_rng(4)
    cache = filled("padded", "fp8", pages=3, block_size=block_size)
    slots = rng.permutation(3 * block_size)[:7].astype(np.int64)
    n = len(slots)
    check_write(cache, cases.random_bf16(rng, n, 512), cases.random_bf16(rng, n, 64), slots)


@pytest.mark.parametrize("data", ["outlier", "heavy", "huge", "monotone"])
def test_write_data(data):
    rows = cases.make_rows(np.random.default_rng(5), 50, "bf16", data)
    cache = filled("paged", "fp8", pages=10)
    check_write(cache, rows[:, :512], rows[:, 512:], np.arange(50, dtype=np.int64))


@pytest.mark.parametrize("dtype", [np.int8, ref.E4M3])
def test_write_byte_dtypes(dtype):
    rng = np.random.default_rng(6)
    cache = filled("paged", "fp8").view(dtype)
    kv_c, k_pe = cases.random_bf16(rng, 3, 512), cases.random_bf16(rng, 3, 64)
    check_write(cache, kv_c, k_pe, np.array([1, 0, 5], np.int64))


@pytest.mark.parametrize(
    ("fmt", "name"), [("fp8", "fp8_ds_mla"), ("bf16", "bfloat16"), ("bf16", "auto")]
)
def test_write_named_format(fmt, name):
    rng = np.random.default_rng(7)
    kv_c, k_pe = cases.random_bf16(rng, 3, 512), cases.random_bf16(rng, 3, 64)
    slots = np.array([1, 0, 5], np.int64)
    check_write(filled("paged", fmt), kv_c, k_pe, slots, kv_cache_dtype=name)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("name", "row"), [("fp8_e4m3", 512), ("fp8_nope", 528)])
@pytest.mark.parametrize("kv_scale", [1.0, 0.3, np.float32([0.7])])
def test_write_fp8_rows_of_512_values(name, row, dtype, kv_scale):
    """The bytes of quantize_and_insert_k_cache, with no k_pe, or one without values."""
    value = np.random.default_rng(8).standard_t(1.5, (9, 530)).astype(np.float32)
    kv_c = (ref.to_bf16(value) if dtype == "bfloat16" else value.astype(dtype))[:, 7:519]
    slots = np.array([3, -1, 2, 9, 8, 0], np.int64)
    options = {"kv_scale": kv_scale} if name == "fp8_e4m3" else {}
    want = np.full((4, 5, row), 0x5A, np.uint8)
    sparse_mla.quantize_and_insert_k_cache(kv_c, want, slots, kv_format=name, **options)
    for k_pe in (None, kv_c[:, :0], kv_c[:6, :0]):
        cache = np.full((4, 5, row), 0x5A, np.uint8)
        sparse_mla.concat_and_cache_mla(kv_c, k_pe, cache, slots, kv_cache_dtype=name, **options)
        assert_same_bits(cache, want, f"{name}")
    if name == "fp8_e4m3":  # found by its shape, too
        for cache in (np.full((20, 512), 0x5A, np.uint8), np.full((4, 5, 1, 512), 0x5A, np.int8)):
            sparse_mla.concat_and_cache_mla(kv_c, None, cache, slots, **options)
            assert_same_bits(cache.view(np.uint8).reshape(want.shape), want)


def test_write_rows_of_512_values_without_k_pe():
    kv_c = cases.random_bf16(np.random.default_rng(9), 3, 512)
    cache = np.zeros((2, 4, 512), ref.BF16)
    sparse_mla.concat_and_cache_mla(kv_c, None, cache, np.array([5, 1, 0]))
    assert_same_bits(cache.reshape(8, 512)[[5, 1, 0]], kv_c)


def test_bad_scales_and_rope_parts():
    kv_c, k_pe = np.zeros((2, 512), ref.BF16), np.zeros((2, 64), ref.BF16)
    slots = np.array([0, 1])
    e4m3, nope = np.zeros((2, 4, 512), np.uint8), np.zeros((2, 4, 528), np.uint8)
    with_rope = np.zeros((2, 4, 656), np.uint8)

    def refuses(text, *args, error=ValueError, **options):
        with pytest.raises(error, match=f"^concat_and_cache_mla: {text}"):
            sparse_mla.concat_and_cache_mla(*args, slots, **options)

    refuses("`k_pe` must be given, got none", kv_c, None, with_rope)
    refuses(r"`k_pe` must have shape \[any, 0\], got \[2, 64\]", kv_c, k_pe, e4m3)
    none_of_it = (
        "`kv_scale` must be 1 for format {}, which has no scale of the whole cache, got 0.5"
    )
    refuses(none_of_it.format("fp8_nope"), kv_c, None, nope, kv_format="fp8_nope", kv_scale=0.5)
    refuses(none_of_it.format("fp8_ds_mla"), kv_c, k_pe, with_rope, kv_scale=0.5)
    for scale in (0.0, -1.0, np.nan):
        refuses("`kv_scale` must be a positive normal float32", kv_c, None, e4m3, kv_scale=scale)
    two = np.ones(2, np.float32)
    refuses("`kv_scale` must have one value, or be a float", kv_c, None, e4m3, kv_scale=two)


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("slot", [20, 2**31 - 1, 2**40, 2**63 - 1])
def test_a_slot_past_the_end_writes_nothing(slot):
    rng = np.random.default_rng(8)
    cache = filled("interleaved", "fp8")
    before = storage(cache).copy()
    kv_c, k_pe = cases.random_bf16(rng, 4, 512), cases.random_bf16(rng, 4, 64)
    with pytest.raises(ValueError, match=r"concat_and_cache_mla: `slot_mapping` must"):
        sparse_mla.concat_and_cache_mla(kv_c, k_pe, cache, np.array([1, 2, slot, 3], np.int64))
    assert_same_bits(storage(cache), before, "nothing may be written")


def test_a_later_token_of_the_same_slot_is_one_of_the_two():
    """Two tokens for one slot: the row is one of the two in full, not a mixture."""
    rng = np.random.default_rng(9)
    kv_c, k_pe = cases.random_bf16(rng, 2, 512), cases.random_bf16(rng, 2, 64)
    cache = filled("paged", "fp8")
    sparse_mla.concat_and_cache_mla(kv_c, k_pe, cache, np.array([6, 6], np.int64))
    rows = ref.quantize_rows(ref.bits16(kv_c), ref.bits16(k_pe))
    assert cache[1, 1].tobytes() in (rows[0].tobytes(), rows[1].tobytes())


# --- gather --------------------------------------------------------------------------------------


def check_gather(cache, table, lens, starts, rows, *, seq_starts=None, row_gap=0) -> None:
    width = 576 if ref.is_fp8(cache) else cache.shape[-1]
    buffer = Guarded((rows, width), ref.BF16, row_gap=row_gap)
    want = np.ascontiguousarray(buffer.array).view(np.uint16).copy()
    options = {} if seq_starts is None else {"seq_starts": seq_starts}
    got = sparse_mla.gather_kv_cache(cache, table, lens, starts, out=buffer.array, **options)
    assert got is buffer.array
    ref.gather_kv_cache(cache, table, lens, starts, want, seq_starts)
    assert_same_bf16(buffer.check(written=False), want, "gathered rows")


def gather_inputs(layout, fmt, block_size=5, seed=10):
    rng = np.random.default_rng(seed)
    pages = 12
    cache = cases.lay_out(cases.make_rows(rng, pages * block_size, fmt), block_size, layout)
    table = np.full((3, 6), -1, np.int32)
    order = rng.permutation(pages)
    table[0, :4], table[1, :2], table[2, :5] = order[:4], order[4:6], order[6:11]
    return cache, table[:, :5]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(
    "layout", ["paged", "mqa", "padded", "interleaved", "token_stride", "negative", "zero"]
)
def test_gather_layouts(fmt, layout):
    cache, table = gather_inputs(layout, fmt)
    lens = np.array([17, 0, 25], np.int32)
    starts = np.array([0, 17, 17], np.int32)
    check_gather(cache, table, lens, starts, 42)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("row_gap", [0, 8, 1])
def test_gather_leaves_holes_and_order_alone(fmt, row_gap):
    """Requests in any order with holes between them: rows of no request stay as they are."""
    cache, table = gather_inputs("paged", fmt)
    lens = np.array([3, 10, 1], np.int32)
    starts = np.array([30, 2, 20], np.int32)
    check_gather(cache, table, lens, starts, 40, row_gap=row_gap)


@pytest.mark.parametrize("block_size", [1, 3, 64, 100])
def test_gather_seq_starts(block_size):
    cache, table = gather_inputs("padded", "fp8", block_size)
    first = np.array([block_size // 2, 0, 2 * block_size + 1], np.int32)
    lens = np.array([2 * block_size, 2 * block_size, 2 * block_size - 1], np.int32)
    starts = np.concatenate([[0], np.cumsum(lens[:-1])]).astype(np.int32)
    check_gather(cache, table, lens, starts, int(lens.sum()), seq_starts=first)


def test_gather_nothing():
    cache, table = gather_inputs("paged", "fp8")
    zero = np.zeros(3, np.int32)
    check_gather(cache, table, zero, zero, 4)
    check_gather(cache, table, zero, zero, 0)
    check_gather(cache, table[:0], zero[:0], zero[:0], 4)


def test_gather_ignores_pages_past_the_sequence():
    """Table entries that no position needs may hold anything."""
    cache, table = gather_inputs("paged", "fp8")
    table = table.copy()
    table[0, 2:] = [2**31 - 1, -(2**31), 99]
    lens, starts = np.array([10], np.int32), np.zeros(1, np.int32)
    check_gather(cache, table[:1], lens, starts, 10)


BAD_GATHERS = {
    "page past the end": ("block_table", lambda c: c["block_table"].__setitem__((0, 1), 12)),
    "negative page": ("block_table", lambda c: c["block_table"].__setitem__((2, 0), -1)),
    "table too narrow": ("block_table", lambda c: c["seq_lens"].__setitem__(0, 26)),
    "negative length": ("seq_lens", lambda c: c["seq_lens"].__setitem__(1, -1)),
    "workspace overflow": ("workspace_starts", lambda c: c["workspace_starts"].__setitem__(2, 40)),
    "negative start": ("workspace_starts", lambda c: c["workspace_starts"].__setitem__(0, -1)),
    "negative seq_starts": ("seq_starts", lambda c: c["seq_starts"].__setitem__(0, -1)),
}


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("name", BAD_GATHERS)
def test_a_bad_gather_writes_nothing(name):
    argument, bend = BAD_GATHERS[name]
    cache, table = gather_inputs("paged", "fp8")
    call = {
        "block_table": table.copy(),
        "seq_lens": np.array([17, 5, 20], np.int32),
        "workspace_starts": np.array([0, 17, 22], np.int32),
        "seq_starts": np.zeros(3, np.int32),
    }
    buffer = Guarded((42, 576), ref.BF16)
    before = buffer.storage.copy()
    bend(call)
    with pytest.raises(ValueError, match=f"gather_kv_cache: `{argument}` must .*, got"):
        sparse_mla.gather_kv_cache(
            cache,
            call["block_table"],
            call["seq_lens"],
            call["workspace_starts"],
            seq_starts=call["seq_starts"],
            out=buffer.array,
        )
    assert_same_bits(buffer.storage, before, "nothing may be written")


def test_write_then_gather_returns_the_rounded_rows():
    """Round trip through pages: gather returns the quantised rows, upconverted."""
    batch = cases.make_batch([40, 7], [40, 7], block_size=16)
    rng = np.random.default_rng(11)
    rows = cases.make_rows(rng, batch.num_actual_tokens, "bf16")
    for width, dtype in ((656, np.uint8), (576, ref.BF16)):
        cache = np.zeros((batch.num_pages, 16, width), dtype)
        sparse_mla.concat_and_cache_mla(rows[:, :512], rows[:, 512:], cache, batch.slot_mapping)
        out = np.zeros((47, 576), ref.BF16)
        starts = batch.query_start_loc[:2].copy()
        sparse_mla.gather_kv_cache(cache, batch.block_table, batch.seq_lens, starts, out=out)
        bits = ref.bits16(rows)
        if width == 656:
            bits = ref.upconvert_rows(ref.quantize_rows(bits[:, :512], bits[:, 512:]))
        assert_same_bits(ref.bits16(out), bits, f"width {width}")
