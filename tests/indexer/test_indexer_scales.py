"""indexer_logits with scales of keys and of queries, and weights, of any size: logits are those of
fp64 wherever they fit, although a score or a product of two factors is beyond fp32, or 0."""

from __future__ import annotations

import numpy as np
import pytest
import reference as ref
import reference_indexer as indexer
from library import sparse_mla
from test_indexer_logits import bound_of

F32, I32 = np.float32, np.int32
T, S = 3, 70


def draw(rng, shape, kind, exponent):
    """Codes, scales of about 2^exponent, and values in fp64: [..., 128 or 64], [..., 4], ..."""
    if kind == "fp4":
        codes = rng.integers(0, 256, (*shape, 64)).astype(np.uint8)
        scales = np.clip(rng.integers(-2, 3, (*shape, 4)) + exponent + 127, 0, 254).astype(np.uint8)
        return codes, scales, indexer.query_values(codes, scales)
    codes = ref.e4m3_encode(rng.normal(0, 20, (*shape, 128)).astype(F32))
    scale = (rng.uniform(1, 2, shape) * 2.0 ** min(exponent, 126)).astype(F32)
    values = ref.e4m3_decode(codes).astype(np.float64) * scale.astype(np.float64)[..., None]
    return codes, scale, values


def draw_weights(rng, num_heads, exponent):
    sign = rng.choice([-1, 1], (T, num_heads))
    return (sign * rng.uniform(1, 2, (T, num_heads)) * 2.0**exponent).astype(F32)


def check(q, weights, keys, q_scale=None, wide=None) -> None:
    codes, scale, values = keys
    lengths = np.full(T, S, I32)
    got = sparse_mla.indexer_logits(q, weights, (codes[0], scale[0]), lengths, q_scale=q_scale)
    wide = indexer.query_values(q) if wide is None else wide
    exists = [np.ones(S, bool)] * T
    want, size = indexer.logits(wide, weights, [values[0]] * T, exists, lengths, S)
    fits = size < 3e38
    assert fits.any()
    is_fp8 = q_scale is None and codes.shape[-1] == 128
    bound = bound_of(q.shape[1]) if is_fp8 else 2.0**-18
    tolerance = bound * size + 2.0**-126
    got = np.asarray(got).astype(np.float64)
    assert ref.worst_ratio(got[fits], want[fits], tolerance[fits]) <= 1


@pytest.mark.parametrize("key", [-126, -90, -60, 0, 60, 91, 100, 120, 126])
@pytest.mark.parametrize("kind", ["fp8", "fp4"])
@pytest.mark.parametrize("num_heads", [1, 5, 64])
def test_scales_of_keys_and_weights(key, kind, num_heads):
    """Of each size of keys, weights that make logits of about 1; a few of them are 0."""
    rng = np.random.default_rng(num_heads)
    keys = draw(rng, (1, S), kind, key)
    q = draw(rng, (T, num_heads), "fp8", 0)[0]
    weights = draw_weights(rng, num_heads, min(max(-key - 10, -120), 125))
    weights[:, 1::4] = 0
    check(q, weights, keys)


@pytest.mark.parametrize("exponents", [
    (100, 50, -120), (126, 100, -126), (120, -100, 0), (120, -126, 20), (100, -120, 60),
    (-100, 120, 20), (-126, 110, 30), (60, 60, -110), (40, -90, 100), (-60, -60, 120), (20, 90, 0),
])  # fmt: skip
@pytest.mark.parametrize("kind", ["fp8", "fp4"])
def test_three_factors(exponents, kind):
    """FP4 queries: scales of queries and of keys, and weights."""
    rng = np.random.default_rng(1)
    q, q_scale, wide = draw(rng, (T, 6), "fp4", exponents[0])
    keys = draw(rng, (1, S), kind, exponents[1])
    weights = draw_weights(rng, 6, exponents[2])
    if sum(exponents) > 80:
        keys[0][:, ::2] = 0
        keys[2][:, ::2] = 0
        weights[1] = 0
    check(q, weights, keys, q_scale, wide)


@pytest.mark.parametrize("exponents", [(0, 118, -118), (118, 0, -118), (-118, -118, 118)])
@pytest.mark.parametrize("key", [-100, -40, 0, 40, 100])
@pytest.mark.parametrize("kind", ["fp8", "fp4"])
@pytest.mark.parametrize("num_heads", [3, 64])
def test_weights_of_neighbours(num_heads, kind, key, exponents):
    """Tokens that have the same keys, and weights of very different sizes."""
    rng = np.random.default_rng(num_heads)
    keys = draw(rng, (1, S), kind, key)
    q = draw(rng, (T, num_heads), "fp8", 0)[0]
    weights = np.concatenate([draw_weights(rng, num_heads, x)[:1] for x in exponents])
    check(q, weights, keys)


@pytest.mark.parametrize("num_heads", [4, 64])
def test_ordinary_tokens_keep_their_bits(num_heads):
    """Beside a token with large weights and a key with a large scale."""
    rng = np.random.default_rng(2)
    q = draw(rng, (T, num_heads), "fp8", 0)[0]
    codes, scale, _ = draw(rng, (1, S), "fp8", 0)
    weights = rng.normal(0, 1, (T, num_heads)).astype(F32)
    lengths = np.full(T, S, I32)

    def run():
        pair = (codes[0], scale[0])
        return np.asarray(sparse_mla.indexer_logits(q, weights, pair, lengths)).copy()

    want = run()
    weights[1] *= F32(2.0**100)
    scale[0, 7] = 2.0**120
    got = run()
    same = np.delete(np.arange(S), 7)
    assert (got[::2][:, same] == want[::2][:, same]).all()
    if bound_of(num_heads) == 2.0**-18:  # Hopper's kernel adds such a token in another order
        assert (got[1][same] == want[1][same] * F32(2.0**100)).all()
