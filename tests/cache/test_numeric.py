"""bf16, fp16, fp32 and e4m3 conversions, seen through the cache operators (csrc/core/numeric.h)."""

import numpy as np
import pytest
import reference as ref
from helpers import assert_same_bf16, assert_same_bits
from library import sparse_mla

ALL_BF16 = np.arange(2**16, dtype=np.uint16)


def write(kv_c, k_pe, width) -> np.ndarray:
    """The rows of a new cache of one page after concat_and_cache_mla."""
    n = len(kv_c)
    dtype = np.uint8 if width == ref.FP8_ROW_BYTES else ref.BF16
    cache = np.zeros((1, n, width), dtype)
    sparse_mla.concat_and_cache_mla(kv_c, k_pe, cache, np.arange(n, dtype=np.int64))
    return cache[0]


def rounding_ties(dtype) -> np.ndarray:
    """Values of `dtype` around every bf16 tie: half way, and one step to either side."""
    if dtype == np.float16:
        return np.arange(2**16, dtype=np.uint16).view(np.float16)
    bf16 = np.concatenate([ALL_BF16[:0x7F80], ALL_BF16[0x8000:0xFF80]]).astype(np.uint32)
    tie = (bf16 << np.uint32(16)) | np.uint32(0x8000)
    words = np.concatenate([tie - np.uint32(1), tie, tie + np.uint32(1), bf16 << np.uint32(16)])
    special = np.array([np.inf, -np.inf, 3.4e38, -3.4e38, 3.3961775e38, 1e-45], np.float32)
    return np.concatenate([words.view(np.float32), special])


def as_rows(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """-> kv_c [n, 512] and k_pe [n, 64], each of which has every value."""
    n = max(-(-len(values) // 64), 1)
    k_pe = np.resize(values, (n, 64))
    return np.resize(values, (n, 512)), k_pe


def test_bf16_patterns_are_copied_into_a_bf16_cache():
    bits = ALL_BF16.reshape(-1, 64)
    kv_c = np.resize(ALL_BF16, (1024, 512))
    rows = write(kv_c.view(ref.BF16), bits.view(ref.BF16), 576)
    assert_same_bits(rows.view(np.uint16), np.concatenate([kv_c, bits], 1))


def test_bf16_patterns_are_copied_into_the_rope_part():
    bits = ALL_BF16.reshape(-1, 64)
    rows = write(np.zeros((1024, 512), ref.BF16), bits.view(ref.BF16), 656)
    assert_same_bits(rows[:, 528:].copy().view(np.uint16), bits)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_inputs_round_to_nearest_even_bf16(dtype):
    kv_c, k_pe = as_rows(rounding_ties(dtype))
    rows = write(kv_c, k_pe, 576)
    want = np.concatenate([ref.to_bf16_bits(kv_c), ref.to_bf16_bits(k_pe)], 1)
    assert_same_bf16(rows, want, f"{np.dtype(dtype)} to bf16")


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_wide_inputs_are_rounded_to_bf16_before_they_are_quantised(dtype):
    """Values are rounded twice on purpose: the FP8 bytes come from the bf16 value."""
    rng = np.random.default_rng(3)
    kv_c = rng.normal(0, 1, (64, 512)).astype(dtype)
    k_pe = rng.normal(0, 1, (64, 64)).astype(dtype)
    rows = write(kv_c, k_pe, 656)
    assert_same_bits(rows, ref.quantize_rows(ref.to_bf16_bits(kv_c), ref.to_bf16_bits(k_pe)))


@pytest.mark.parametrize("order", ["sorted", "shuffled"])
def test_all_bf16_patterns_quantise(order):
    """Tiles have neighbouring patterns (NaN and infinities among them), or mixed exponents."""
    bits = ALL_BF16 if order == "sorted" else np.random.default_rng(4).permutation(ALL_BF16)
    kv_c = bits.reshape(-1, 512)
    k_pe = kv_c[:, :64].copy()
    rows = write(kv_c.view(ref.BF16), k_pe.view(ref.BF16), 656)
    assert_same_bits(rows, ref.quantize_rows(kv_c, k_pe))


def test_e4m3_ties_go_to_even():
    """The scale of a tile is exactly 1 where its largest value is 448. Such tiles have every tie
    between e4m3 numbers that bf16 can hold."""
    ties = ref._E4M3_MIDPOINTS.astype(np.float32)
    ties = ties[ref.bf16_decode(ref.bf16_encode(ties)) == ties]
    assert len(ties) == 126, "all ties between e4m3 neighbours are bf16 numbers"
    tile = np.concatenate([[448.0], ties, [-448.0]]).astype(np.float32)
    kv_c = np.concatenate([tile, -tile, tile[::-1], -tile[::-1]])[None]
    rows = write(kv_c, np.zeros((1, 64), np.float32), 656)
    codes, scales, _ = ref.split_fp8_row(rows)
    assert (scales == 1).all()
    assert_same_bits(codes, ref.e4m3_encode(kv_c))
    assert ((codes[0, 1:127] & 1) == 0).all(), "a tie went to the odd code"


def test_division_is_true_not_by_a_reciprocal():
    """In the chosen tiles, x * (1/scale) lies on the other side of a tie than x / scale."""
    rng = np.random.default_rng(5)
    value = ref.bf16_decode(ref.bf16_encode(rng.normal(0, 1, (6000, 128)).astype(np.float32)))
    scale = np.abs(value).max(1, keepdims=True) / np.float32(448)
    divided = ref.e4m3_encode(value / scale)
    multiplied = ref.e4m3_encode(value * (np.float32(1) / scale))
    telling = value[(divided != multiplied).any(1)]
    assert len(telling) >= 4, "the input must be able to tell the two apart"
    kv_c = telling[: len(telling) // 4 * 4].reshape(-1, 512)
    rows = write(kv_c, np.zeros((len(kv_c), 64), np.float32), 656)
    assert_same_bits(
        rows, ref.quantize_rows(ref.bf16_encode(kv_c), np.zeros((len(kv_c), 64), "<u2"))
    )


SPECIAL_TILES = {
    "zero": np.zeros(128),
    "negative zero": np.full(128, -0.0),
    "nan only": np.full(128, np.nan),
    "one nan": np.r_[np.nan, np.linspace(-2, 2, 127)],
    "negative nan": np.r_[-np.nan, np.linspace(-2, 2, 127)],
    "inf": np.r_[np.inf, np.linspace(-2, 2, 127)],
    "negative inf": np.r_[-np.inf, np.nan, np.linspace(-2, 2, 126)],
    "inf and the largest": np.r_[np.inf, 3.38e38, np.linspace(-3e38, 3e38, 126)],
    "subnormal": np.linspace(-1e-39, 1e-39, 128),
    "smallest subnormal": np.r_[2.0**-133, np.zeros(127)],
    "below FLT_MIN·448": np.linspace(-5e-36, 5e-36, 128),
    "around FLT_MIN·448": np.linspace(-5.3e-36, 5.3e-36, 128),
}


@pytest.mark.parametrize("name", SPECIAL_TILES)
def test_special_tiles(name):
    tile = ref.bf16_encode(SPECIAL_TILES[name].astype(np.float32))
    if name == "negative nan":
        tile[0] = 0xFFC1
    kv_c = np.stack([np.tile(tile, 4), np.roll(np.tile(tile, 4), 128)])
    k_pe = np.zeros((2, 64), np.uint16)
    rows = write(kv_c.view(ref.BF16), k_pe.view(ref.BF16), 656)
    assert_same_bits(rows, ref.quantize_rows(kv_c, k_pe), name)
    if name in ("zero", "negative zero", "nan only"):
        assert (rows[:, 512:528].copy().view(np.float32) == ref.FLT_MIN).all()


SCALES = [1.0, 2.0**-126, 2.0**-149, 1e-30, 0.1, 1 / 3, 1e4, 3e36, -1.0, 0.0, np.inf, np.nan]


@pytest.mark.parametrize("scale", SCALES)
def test_all_e4m3_bytes_dequantise(scale):
    rows = np.zeros((1, 2, 656), np.uint8)
    rows[0, :, :512] = np.resize(np.arange(256, dtype=np.uint8), (2, 512))
    rows[0, :, 512:528] = np.full(4, scale, np.float32).view(np.uint8)
    rows[0, :, 528:] = np.arange(128, dtype=np.uint16).view(np.uint8).reshape(2, 128)
    with np.errstate(over="ignore", invalid="ignore"):
        want = ref.dequantize_rows(rows[0])
        want_bits = ref.upconvert_rows(rows[0])
    got = sparse_mla.dequantize_kv_cache(rows)
    assert got.shape == (1, 2, 576)
    assert got.dtype == np.float32
    real = ~np.isnan(want)
    assert_same_bits(got[0][real], want[real], "fp32")
    assert np.isnan(got[0][~real]).all()
    out = np.zeros((2, 576), ref.BF16)
    one, zero = np.array([2], np.int32), np.zeros(1, np.int32)
    sparse_mla.gather_kv_cache(rows, zero[None], one, zero, out=out)
    assert_same_bf16(out, want_bits, "gather")


def test_dequantize_bf16_cache_is_exact():
    cache = np.resize(ALL_BF16, (2, 60, 576)).view(ref.BF16)
    got = sparse_mla.dequantize_kv_cache(cache)
    want = ref.bf16_decode(ref.bits16(cache))
    assert np.array_equal(got, want, equal_nan=True)


def test_gather_rounds_the_fp32_product_once_to_nearest_even():
    """The scales have 24 random bits, so that products are rounded in every way."""
    rng = np.random.default_rng(6)
    rows = rng.integers(0, 256, (1, 300, 656)).astype(np.uint8)
    rows[0, :, 512:528] = rng.uniform(0.001, 2, (300, 4)).astype(np.float32).view(np.uint8)
    out = np.zeros((300, 576), ref.BF16)
    length, zero = np.array([300], np.int32), np.zeros(1, np.int32)
    sparse_mla.gather_kv_cache(rows, zero[None], length, zero, out=out)
    want = ref.upconvert_rows(rows[0])
    assert_same_bf16(out[:, :512], want[:, :512])
    assert_same_bits(ref.bits16(out[:, 512:]), want[:, 512:], "RoPE is copied, NaN bits too")
