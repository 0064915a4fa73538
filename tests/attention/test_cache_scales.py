"""Scales of caches, of queries and of logits, of any size: results are those of fp64 wherever they
fit, although a score, a sum of values or a product of two scales is beyond fp32."""

from __future__ import annotations

import device
import numpy as np
import pytest
import reference as ref
from helpers import assert_same_bits
from library import sparse_mla

E4M3 = np.dtype(ref.E4M3)
# The largest values of keys, and the least and the largest softmax_scale.
LARGEST = 3e38
LEAST, MOST = 2.0**-126, float.fromhex("0x1.62E42Ep+127")
T, H = 2, 3
SINK = np.array([0.0, 1.0, -2.0], np.float32)
CACHES = [1.2e-38, 1e-30, 1e-20, 1.0, 1e20, 7e35, 1e37, 3e38]
QUERIES = [1e-30, 1e-18, 1.0, 1e18]


class Keys:
    """A cache of one page: e4m3 with a scale, or bf16. Its values fit bf16."""

    def __init__(self, rng, count, scale, *, is_bf16=False) -> None:
        values = rng.uniform(-1, 1, (1, count, 512)) * min(30, LARGEST / scale)
        self.scale = float(np.float32(scale))
        if is_bf16:
            self.cache = ref.to_bf16((values * self.scale).astype(np.float32))
            self.values = ref.to_f32(self.cache)[0].astype(np.float64)
        else:
            self.cache = ref.e4m3_encode(values.astype(np.float32)).view(E4M3)
            codes = ref.e4m3_decode(self.cache[0].view(np.uint8)).astype(np.float64)
            self.values = codes * self.scale
        self.slots = np.tile(np.arange(count, dtype=np.int32), (T, 1))


def make_query(rng, size, q_scale=None):
    """bf16 values of about `size`, or e4m3 ones with a scale; and their values in fp64."""
    wide = rng.normal(0, 1, (T, H, 512))
    if q_scale is None:
        q = ref.to_bf16((wide * size).astype(np.float32))
        return q, ref.to_f32(q).astype(np.float64)
    codes = ref.e4m3_encode((wide * 8).astype(np.float32))
    return codes.view(E4M3), ref.e4m3_decode(codes).astype(np.float64) * q_scale


def check(want, out, lse=None) -> None:
    """The bounds of docs/accuracy.md, but relative to values of the caches' size."""
    error = device.BOUNDS.get("units", 16) * 2.0**-24 * want.logit_abs
    out = ref.to_f32(np.asarray(out)).astype(np.float64)
    tolerance = 2.0**-8 * (want.p_abs_v + np.abs(want.out)) + 2 * error[..., None] * want.p_abs_v
    assert np.abs(want.out).max() <= 1.001 * LARGEST
    assert ref.worst_ratio(out, want.out, tolerance + 2.0**-125) <= 1
    if lse is not None:
        assert ref.worst_ratio(np.asarray(lse), want.lse, error + 1e-6) <= 1


def usual_scale(*factors):
    """The softmax_scale that makes logits of about 1, or None if it is not one."""
    scale = 1.0
    for factor in (*factors, 16, 22):
        scale /= factor
    return float(np.float32(scale)) if LEAST <= scale <= MOST else None


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("count", [1, 2, 150])
@pytest.mark.parametrize("other", [None, "same", "smaller", "bf16"])
def test_scales_of_caches(other, count, num_splits):
    """Beside a query of any size, alone or beside another cache, with and without sinks."""
    rng = np.random.default_rng(count)
    num_cases = 0
    for scale in CACHES:
        for size in QUERIES:
            softmax_scale = usual_scale(scale, size, min(30, LARGEST / scale) / 30)
            if softmax_scale is None:
                continue
            num_cases += 1
            main = Keys(rng, count, scale)
            options = {"kv_scale": main.scale, "kv_format": "fp8_e4m3", "num_splits": num_splits}
            values = main.values
            if other is not None:
                small = max(scale * 1e-25, 1.2e-38) if other == "smaller" else scale
                extra = Keys(rng, count, small, is_bf16=other == "bf16")
                options |= {"extra_kv_cache": extra.cache, "extra_indices": extra.slots}
                if other != "bf16":
                    options |= {"extra_kv_scale": extra.scale, "extra_kv_format": "fp8_e4m3"}
                values = np.concatenate([values, extra.values])
            q, wide = make_query(rng, size)
            for sink in (None, SINK):
                want = ref.attend_keys(wide * softmax_scale, [values] * T, sink)
                got = sparse_mla.sparse_attention(
                    q, main.cache, main.slots, softmax_scale=softmax_scale, attn_sink=sink,
                    **options,
                )  # fmt: skip
                check(want, *got)
    assert num_cases >= 16


@pytest.mark.parametrize("as_array", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_pages_and_scales_of_queries(softcap, as_array):
    """mla_attention: softmax_scale, q_scale, kv_scale and a softcap."""
    rng = np.random.default_rng(1)
    table, lens = np.zeros((T, 1), np.int32), np.array([40, 1], np.int32)
    num_cases = 0
    for scale in CACHES:
        for q_scale in (1e-38, 1e-25, 0.1, 1e20, 1e35):
            q_scale = float(np.float32(max(q_scale, LEAST)))
            softmax_scale = usual_scale(scale, q_scale, 8, min(30, LARGEST / scale) / 30)
            if softmax_scale is None or not LEAST <= softmax_scale * q_scale <= MOST:
                continue
            num_cases += 1
            keys = Keys(rng, 40, scale)
            q, wide = make_query(rng, 1.0, q_scale)
            scales = {"q_scale": q_scale, "kv_scale": keys.scale}
            if as_array:
                scales = {name: np.full(1, x, np.float32) for name, x in scales.items()}
            got = sparse_mla.mla_attention(
                q, keys.cache, table, lens, softmax_scale=softmax_scale, softcap=softcap,
                kv_format="fp8_e4m3", attn_sink=SINK, **scales,
            )  # fmt: skip
            want = ref.attend_keys(
                wide * softmax_scale, [keys.values, keys.values[:1]], SINK, softcap=softcap
            )
            check(want, *got)
    assert num_cases >= 12


@pytest.mark.parametrize("as_array", [False, True])
@pytest.mark.parametrize("bmm2", CACHES)
def test_both_scales_of_dsv4(bmm2, as_array):
    rng = np.random.default_rng(2)
    caches = [Keys(rng, 5, bmm2), Keys(rng, 60, bmm2)]
    q, wide = make_query(rng, 1.0)
    softmax_scale = usual_scale(bmm2, min(30, LARGEST / bmm2) / 30)
    if softmax_scale is None or softmax_scale < 2 * LEAST:
        softmax_scale = 2 * LEAST
    scales = {"bmm1_scale": softmax_scale * caches[0].scale, "bmm2_scale": caches[0].scale}
    scales = {name: float(np.float32(x)) for name, x in scales.items()}
    logit_scale = float(np.float32(scales["bmm1_scale"]) / np.float32(scales["bmm2_scale"]))
    if as_array:
        scales = {name: np.full(1, x, np.float32) for name, x in scales.items()}
    slots = np.concatenate([x.slots for x in caches], axis=1)
    got = sparse_mla.sparse_mla_dsv4(
        q, caches[0].cache, None, slots, caches[1].cache, np.array([65, 3], np.int32), None,
        window=5, sinks=SINK, **scales,
    )  # fmt: skip
    lists = [np.concatenate([x.values for x in caches]), caches[0].values[:3]]
    check(ref.attend_keys(wide * logit_scale, lists, SINK), got)


FORMS = [float, np.float32] if device.ON_CUDA else [float, np.float32, lambda x: np.full(1, x, "f")]


@pytest.mark.parametrize("form", FORMS)
def test_a_product_of_scales_of_dsv4_is_bounded(form):
    """bmm1_scale is all factors of logits, whatever bmm2_scale is. A GPU's arrays are not read."""
    keys = Keys(np.random.default_rng(6), 2, 1.0)
    q = np.zeros((T, H, 512), E4M3)
    with pytest.raises(
        ValueError, match=r"`bmm1_scale` must be at most 2\.35866e\+38 in size, got"
    ):
        sparse_mla.sparse_mla_dsv4(
            q, keys.cache, None, keys.slots, keys.cache, np.full(T, 2, np.int32), None, window=1,
            bmm1_scale=form(3e38), bmm2_scale=form(1e10),
        )  # fmt: skip


@pytest.mark.parametrize("scales", [(1e30, 1e-30), (1e-30, 1e30), (2.0**61, 2.0**-66)])
@pytest.mark.parametrize("zeros", [0, 1])
def test_scales_far_apart(scales, zeros):
    """Keys of zeros in one cache do not take away what the other has."""
    rng = np.random.default_rng(3)
    main, extra = (Keys(rng, 20, scale) for scale in scales)
    (main, extra)[zeros].cache[...] = 0
    (main, extra)[zeros].values[...] = 0
    softmax_scale = usual_scale(scales[1 - zeros])
    if softmax_scale * max(scales) > MOST:
        softmax_scale = MOST / max(scales) / 2
    q, wide = make_query(rng, 1.0)
    got = sparse_mla.sparse_attention(
        q, main.cache, main.slots, softmax_scale=softmax_scale, extra_kv_cache=extra.cache,
        extra_indices=extra.slots, kv_scale=main.scale, extra_kv_scale=extra.scale,
    )  # fmt: skip
    values = np.concatenate([main.values, extra.values])
    check(ref.attend_keys(wide * float(np.float32(softmax_scale)), [values] * T), *got)


@pytest.mark.parametrize("exponent", [-100, -70, -40, 40, 70, 110])
@pytest.mark.parametrize("count", [1, 2, 150])
def test_a_power_of_two_moves_between_scales(exponent, count):
    """Bits are the same, times the power, if softmax_scale has the inverse of kv_scale's power."""
    rng = np.random.default_rng(4)
    keys = Keys(rng, count, 0.37)
    q, _ = make_query(rng, 1.0)
    power = 2.0**exponent
    results = [
        sparse_mla.sparse_attention(
            q, keys.cache, keys.slots, softmax_scale=0.05 / x, kv_scale=keys.scale * x,
            attn_sink=SINK,
        )
        for x in (1.0, power)
    ]  # fmt: skip
    (want, want_lse), (got, got_lse) = results
    assert_same_bits(np.asarray(got_lse), np.asarray(want_lse))
    assert_same_bits(ref.to_f32(np.asarray(got)) / np.float32(power), ref.to_f32(np.asarray(want)))


def test_the_largest_softmax_scale_gives_finite_results():
    """Times log2(e) it is a float32; a larger one is refused (tests/calls/test_bounds.py)."""
    rng = np.random.default_rng(5)
    keys = Keys(rng, 3, 1.0)
    q, wide = make_query(rng, 1e-38)
    got = sparse_mla.sparse_attention(q, keys.cache, keys.slots, softmax_scale=MOST)
    check(ref.attend_keys(wide * MOST, [keys.values] * T), *got)
    zeros = np.zeros_like(q)
    out, lse = sparse_mla.sparse_attention(zeros, keys.cache, keys.slots, softmax_scale=MOST)
    assert np.isfinite(ref.to_f32(np.asarray(out))).all()
    assert np.allclose(np.asarray(lse), np.log(3))
    for scales in ({"q_scale": 1.25, "kv_scale": 1.0}, {"q_scale": 1.0, "kv_scale": 1.25}):
        with pytest.raises(
            ValueError, match=r"^sparse_attention: `.*_scale` must make .* 2\.35866e"
        ):
            sparse_mla.sparse_attention(
                zeros.astype(E4M3), keys.cache, keys.slots, softmax_scale=2e38, **scales
            )
