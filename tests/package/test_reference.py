"""The reference compared with independent sources: ml_dtypes, results worked out by hand, test
vectors."""

import ml_dtypes
import numpy as np
import pytest
import reference as ref
import reference_plan as plan
from helpers import assert_same_bits


def random_floats(count: int, seed: int) -> np.ndarray:
    """fp32 patterns of every exponent, without NaN."""
    words = np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint64)
    value = words.astype(np.uint32).view(np.float32)
    return value[~np.isnan(value)]


def test_bf16_decode_is_ml_dtypes():
    bits = np.arange(2**16, dtype=np.uint16)
    want = bits.view(ml_dtypes.bfloat16).astype(np.float32)
    real = ~np.isnan(want)
    assert_same_bits(ref.bf16_decode(bits)[real], want[real])
    assert np.isnan(ref.bf16_decode(bits)[~real]).all()


def test_bf16_encode_is_ml_dtypes():
    value = random_floats(1_000_000, 1)
    with np.errstate(over="ignore"):
        want = value.astype(ml_dtypes.bfloat16).view(np.uint16)
    assert_same_bits(ref.bf16_encode(value), want)


def test_e4m3_decode_is_ml_dtypes():
    codes = np.arange(256, dtype=np.uint8)
    want = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    got = ref.e4m3_decode(codes)
    assert np.array_equal(got, want, equal_nan=True)
    assert np.array_equal(np.signbit(got), np.signbit(want))


def test_e4m3_encode_is_ml_dtypes_saturated():
    normal = np.random.default_rng(2).normal(0, 100, 500_000).astype(np.float32)
    ties = ref._E4M3_MIDPOINTS.astype(np.float32)
    beside = np.nextafter(ties, np.float32([[0], [np.inf]])).ravel()
    middle = np.concatenate([ties, beside])
    value = np.concatenate([random_floats(500_000, 3), normal, middle, -middle, [np.inf, -np.inf]])
    value = value.astype(np.float32)
    want = np.clip(value, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert_same_bits(ref.e4m3_encode(value), want)
    nan = np.array([np.nan, -np.nan], np.float32)
    assert ref.e4m3_encode(np.copysign(nan, [1, -1]).astype(np.float32)).tolist() == [0x7F, 0xFF]
    low = np.array([0x7F800001, 0xFF800001], np.uint32)  # NaN by a bit of the lower half alone
    assert ref.e4m3_encode(low.view(np.float32)).tolist() == [0x7F, 0xFF]


def test_quantised_row_by_hand():
    latent = np.zeros((1, 512), np.float32)
    latent[0, :3] = [896, -1, 0.0]
    latent[0, 128] = -0.0
    row = ref.quantize_rows(ref.bf16_encode(latent), np.full((1, 64), 0x3F80, np.uint16))
    codes, scales, rope = ref.split_fp8_row(row)
    assert scales.tolist() == [[2.0, 2.0**-126, 2.0**-126, 2.0**-126]]
    assert codes[0, :3].tolist() == [0x7E, 0xB0, 0x00]  # 448, -0.5, 0
    assert codes[0, 128:130].tolist() == [0x80, 0x00]
    assert (rope == 0x3F80).all()


def test_attention_of_two_keys_by_hand():
    """Logits 0 and ln 3, values 4 and 8: weights 1/4 and 3/4."""
    kv = np.zeros((2, 576), np.float32)
    kv[:, 0] = [4, 8]
    kv[1, 575] = 1
    q = np.zeros((1, 1, 576), np.float32)
    q[0, 0, 575] = 1
    options = {"softmax_scale": np.log(3.0), "attn_sink": np.array([np.log(4.0)], np.float32)}
    got = ref.attention(ref.to_bf16(q), ref.to_bf16(kv), [[1, -1, 0, 2]], **options)
    assert got.lse[0, 0] == pytest.approx(np.log(4.0), rel=1e-15)
    assert got.out[0, 0, 0] == pytest.approx(3.5, rel=1e-7)  # (4/4 + 3·8/4) / 2; sink is fp32
    assert got.max_logits[0, 0] == pytest.approx(np.log(3.0), rel=1e-15)
    assert got.logit_abs[0, 0] == pytest.approx(np.log(3.0), rel=1e-15)
    assert got.nope_abs[0, 0] == 0


def test_merge_is_the_attention_of_the_union():
    rng = np.random.default_rng(4)
    kv = ref.to_bf16(rng.normal(0, 1, (40, 576)))
    q = ref.to_bf16(rng.normal(0, 1, (2, 3, 576)))
    indices = np.tile(np.arange(40), (2, 1))
    part = [ref.attention(q, kv, i, softmax_scale=0.05) for i in (indices[:, :13], indices[:, 13:])]
    whole = ref.attention(q, kv, indices, softmax_scale=0.05)
    # The states are rounded to fp32, so the merge is not exact.
    a, b = ((p.out.astype(np.float32), p.lse.astype(np.float32)) for p in part)
    out, lse, _ = ref.merge_attn_states(*a, *b)
    assert np.allclose(out, whole.out, rtol=0, atol=1e-5)
    assert np.allclose(lse, whole.lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize("bad", ["out", "lse"])
def test_a_wrong_result_is_seen(bad):
    """The comparison can fail: one element that is changed gives a ratio above 1."""
    rng = np.random.default_rng(5)
    kv = ref.to_bf16(rng.normal(0, 1, (40, 576)))
    q = ref.to_bf16(rng.normal(0, 1, (2, 3, 576)))
    want = ref.attention(q, kv, np.tile(np.arange(40), (2, 1)), softmax_scale=0.05)
    result = {"out": ref.bf16_encode(want.out.astype(np.float32)), "lse": want.lse.copy()}
    assert max(ref.attention_ratios(want, **result).values()) <= 1
    if bad == "out":
        result["out"] = result["out"].copy()
        result["out"][1, 2, 300] ^= 0x20  # changes the value by a quarter of its power of two
    else:
        result["lse"][0, 1] += 1e-4
    assert ref.attention_ratios(want, **result)[bad] > 1
    result[bad].reshape(-1)[0] = 0x7FC0 if bad == "out" else np.nan
    assert ref.attention_ratios(want, **result)[bad] == np.inf


SPLITS = [
    # query lengths, threshold, uniform, tokens -> (decodes, prefills, decode and prefill tokens)
    ([2, 2, 1, 3, 2, 1, 2], 3, True, 13, (2, 5, 4, 9)),
    ([2, 1, 3, 4, 5, 6, 7, 8], 4, False, 36, (4, 4, 10, 26)),
    ([2, 2, 2, 0], 3, True, 8, (4, 0, 8, 0)),
]


@pytest.mark.parametrize(("lens", "threshold", "uniform", "tokens", "want"), SPLITS)
def test_split_vectors_of_the_contract(lens, threshold, uniform, tokens, want):
    start = np.concatenate([[0], np.cumsum(lens)])
    got = plan.split_decodes_and_prefills(
        start, tokens, decode_threshold=threshold, require_uniform=uniform
    )
    assert got == want


def test_chunk_vector_of_the_contract():
    assert plan.split_prefill_chunks([10, 15, 20, 5], 25) == [(0, 2), (2, 4)]
