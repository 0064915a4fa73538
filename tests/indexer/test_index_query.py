"""fused_indexer_q_rope_quant (csrc/cpu/norm, csrc/cuda/indexer): every byte and every weight."""

import device
import numpy as np
import operators
import pytest
import reference as ref
import row_formats as rows
from cases import angles
from helpers import Guarded, assert_same_bits
from library import sparse_mla

F32 = np.float32
SOFTMAX_SCALE = 128**-0.5
MAX_POS = 50


def turned_bits(q, positions, table) -> np.ndarray:
    """bf16 patterns of q [T, H, 128] after RoPE of its last 64 values, fp32 products, each
    rounded. A value that RoPE makes NaN is positive."""
    bits = ref.bits16(np.ascontiguousarray(q)).copy()
    x = ref.bf16_decode(bits)[..., 64:]
    by = np.asarray(table)[np.asarray(positions)[: len(x)]][:, None]
    cos, sin, a, b = by[..., :32], by[..., 32:], x[..., ::2], x[..., 1::2]
    with np.errstate(invalid="ignore", over="ignore"):
        pairs = np.stack([a * cos - b * sin, b * cos + a * sin], -1)
    assert pairs.dtype == F32
    pairs = np.where(np.isnan(pairs), F32(np.nan), pairs)
    bits[..., 64:] = ref.bf16_encode(pairs.reshape(x.shape))
    return bits


def reference(q, weights, positions, table, fp4: bool, head_scale: float) -> tuple:
    bits = turned_bits(q, positions, table)
    T, H = bits.shape[:2]
    known = rows.FORMATS["mxfp4_index" if fp4 else "fp8_index"]
    data, scales = known.encode(bits.reshape(T * H, 128))
    data = data.reshape(T, H, 64 if fp4 else 128)
    with np.errstate(all="ignore"):
        out = ref.to_f32(np.asarray(weights)) * F32(SOFTMAX_SCALE * head_scale)
        if fp4:
            return data, np.where(np.isnan(out), F32(np.nan), out), scales.reshape(T, H, 4)
        out = out * np.ascontiguousarray(scales).view(F32).reshape(T, H)
    assert out.dtype == F32
    return data, np.where(np.isnan(out), F32(np.nan), out)


def queries(T: int, H: int, seed=0, dtype=F32) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([seed, T, H])
    q = rows.random_keys(rng, T * H, 128).view(ref.BF16).reshape(T, H, 128)
    weights = (rng.standard_t(2, (T, H)) * 2.0 ** rng.integers(-9, 9, (T, H))).astype(F32)
    return q, weights if dtype == F32 else ref.to_bf16(weights)


def check(q, weights, positions, table, fp4: bool) -> None:
    """New results and given ones."""
    scale = float(q.shape[1]) ** -0.5
    want = reference(q, weights, positions, table, fp4, scale)
    options = {"softmax_scale": SOFTMAX_SCALE, "head_scale": scale}
    new = sparse_mla.fused_indexer_q_rope_quant(
        q, weights, positions, table, use_fp4=fp4, **options
    )
    assert len(new) == len(want)
    assert new[0].dtype in (np.uint8, np.uint8 if fp4 else ref.E4M3)  # CuPy gives e4m3 as bytes
    outs = [Guarded(x.shape, x.dtype, row_gap=8) for x in want]
    names = ("out", "out_weights", "out_scale")
    given = sparse_mla.fused_indexer_q_rope_quant(
        q, weights, positions, table, **options,
        **{name: out.array for name, out in zip(names, outs, strict=False)},
    )  # fmt: skip
    for x, out in zip(given, outs, strict=True):
        assert x is out.array
    for got in (new, [out.check(written=False) for out in outs]):
        for x, y, name in zip(got, want, names, strict=False):
            x = np.ascontiguousarray(x)
            assert_same_bits(x.view(np.uint8) if x.dtype == ref.E4M3 else x, y, name)


@pytest.mark.parametrize("fp4", [False, True])
@pytest.mark.parametrize("T", [0, 1, 3, 17, 200])
@pytest.mark.parametrize("H", [1, 2, 3, 5, 7, 32, 64, 130])
def test_queries(T, H, fp4):
    if T * H > 10_000:
        T = 9
    q, weights = queries(T, H, dtype=F32 if H % 2 else ref.BF16)
    positions = np.random.default_rng(1).integers(0, MAX_POS, T + 2)
    check(q, weights, positions.astype(np.int32 if fp4 else np.int64), angles(), fp4)


@pytest.mark.parametrize("fp4", [False, True])
def test_views(fp4):
    """Gaps between tokens, heads and rows of the table; tokens backwards; addresses off 16."""
    q, weights = queries(9, 6)
    positions = np.repeat(np.arange(12), 3)[::3]
    wide = np.zeros((MAX_POS, 70), F32)
    wide[:, 3:67] = angles()
    check(q[:, ::2], weights[:, :3], positions, wide[:, 3:67], fp4)
    check(q[::-1], weights[::-1], positions[::-1], angles(), fp4)
    shifted = np.zeros((9, 6, 136), ref.BF16)
    shifted[..., 3:131] = q
    check(shifted[..., 3:131], weights, positions, angles(), fp4)
    check(np.broadcast_to(q[:1], q.shape), weights, positions, angles(), fp4)


@pytest.mark.parametrize("fp4", [False, True])
@pytest.mark.parametrize("offset", [1, 2, 4])
def test_any_address_of_bytes(offset, fp4):
    q, weights = queries(5, 3)
    positions, width = np.arange(5), 64 if fp4 else 128
    want = reference(q, weights, positions, angles(), fp4, 1.0)
    raw = np.full(5 * 3 * 140 + 64, 0xA5, np.uint8)
    start = -raw.ctypes.data % 16 + offset
    out = np.ndarray((5, 3, width), np.uint8, raw.data, start, (3 * 137, 137, 1))
    sparse_mla.fused_indexer_q_rope_quant(
        q, weights, positions, angles(), softmax_scale=SOFTMAX_SCALE, head_scale=1.0, use_fp4=fp4,
        out=out,
    )  # fmt: skip
    assert_same_bits(np.ascontiguousarray(out), want[0])
    out[...] = 0xA5
    assert (raw == 0xA5).all(), "a write around the elements"


def test_vector():
    """The contract's: q of all 2 at p = 0, w .5, scale .25: bytes 78, s 2^-7, weight 2^-10."""
    q = ref.to_bf16(np.full((1, 2, 128), 2, F32))
    table = np.repeat([[1, 0]], 32, 1).reshape(1, 64).astype(F32)
    out, weights = sparse_mla.fused_indexer_q_rope_quant(
        q, np.full((1, 2), 0.5, F32), np.zeros(1, np.int64), table,
        softmax_scale=0.5, head_scale=0.5,
    )  # fmt: skip
    assert (np.asarray(out).view(np.uint8) == 0x78).all()
    assert (np.asarray(weights) == 2.0**-10).all()


def test_rare_values():
    """NaN and infinities in weights, in the table and in every place of a head."""
    rng = np.random.default_rng(5)
    q, weights = queries(40, 3)
    bits = ref.bits16(q).copy()
    spots = rng.random(bits.shape) < 0.03
    bits[spots] = rng.choice(
        np.array([0x7FC1, 0xFFC0, 0x7F80, 0xFF80, 0x8000, 1], np.uint16), spots.sum()
    )
    weights[3, 1], weights[4, 2], weights[5, 0], weights[6] = np.nan, np.inf, -np.inf, 3e38
    weights[7] = np.array([0xFFC00000], np.uint32).view(F32)
    table = angles()
    table[3, ::5], table[4, ::7], table[5], table[7, ::3] = np.nan, np.inf, 0, 3e38
    for fp4 in (False, True):
        check(bits.view(ref.BF16), weights, np.arange(40) % 20, table, fp4)


def test_the_scale_of_a_key():
    """A query's bytes are those that its values would have as a key of the cache."""
    q, weights = queries(20, 1)
    table = np.repeat([[1, 0]], 32, 1).reshape(1, 64).astype(F32)
    for fp4, fmt in ((False, "fp8_index"), (True, "mxfp4_index")):
        pages = rows.Pages(fmt, pages=4)
        options = {"softmax_scale": 1.0, "head_scale": 1.0, "use_fp4": fp4}
        out = sparse_mla.fused_indexer_q_rope_quant(
            q, weights, np.zeros(20, np.int64), table, **options
        )[0]
        turned = turned_bits(q, np.zeros(20, np.int64), table)[:, 0].view(ref.BF16)
        sparse_mla.indexer_k_quant_and_cache(turned, pages.cache, np.arange(20), **pages.options)
        assert_same_bits(np.asarray(out)[:, 0].view(np.uint8), pages.get(np.arange(20))[0], fmt)


@pytest.mark.parametrize("bad", [-1, MAX_POS, 2**31 - 1])
@pytest.mark.parametrize("fp4", [False, True])
def test_bad_positions(bad, fp4):
    """The CPU refuses them before it writes. CUDA does not turn these tokens."""
    q, weights = queries(6, 4)
    positions, table = np.arange(6), angles()
    want = reference(q, weights, positions, table, fp4, 0.5)
    positions[4] = bad
    outs = [Guarded(x.shape, x.dtype) for x in want]
    names = ("out", "out_weights", "out_scale")

    def call():
        return sparse_mla.fused_indexer_q_rope_quant(
            q, weights, positions, table, softmax_scale=SOFTMAX_SCALE, head_scale=0.5,
            **{name: out.array for name, out in zip(names, outs, strict=False)},
        )  # fmt: skip

    if device.DEVICE == "cpu":
        with pytest.raises(ValueError, match="positions") as info:
            call()
        assert str(info.value) == (
            f"fused_indexer_q_rope_quant: `positions` must be rows of `rope_table`, which has "
            f"{MAX_POS}, got {bad} for token 4"
        )
        for out in outs:
            out.check(written=False)
        return
    call()
    for out, y in zip(outs, want, strict=True):
        assert_same_bits(np.delete(out.check(written=False), 4, 0), np.delete(y, 4, 0))


def test_scales_ask_for_fp4():
    q, weights = queries(3, 2)
    scale = np.zeros((3, 2, 4), np.uint8)
    got = sparse_mla.fused_indexer_q_rope_quant(
        q, weights, np.arange(3), angles(), softmax_scale=1.0, head_scale=1.0, out_scale=scale
    )
    assert got[2] is scale
    assert got[0].shape == (3, 2, 64)


def test_texts():
    call = operators.GOOD_CALLS["fused_indexer_q_rope_quant"]()
    for name, bad, text in (
        ("q", call.args["q"][:, :0], "`q` must have at least one head, got 0"),
        ("softmax_scale", np.inf, "`softmax_scale` must be finite, got inf"),
        ("head_scale", np.nan, "`head_scale` must be finite, got nan"),
    ):
        call = operators.GOOD_CALLS["fused_indexer_q_rope_quant"]()
        call.set(name, bad)
        with pytest.raises(ValueError, match=name) as info:
            call.run(sparse_mla)
        assert str(info.value) == f"fused_indexer_q_rope_quant: {text}"


@pytest.mark.parametrize(
    ("softmax_scale", "head_scale"),
    [(1e30, 1e10), (-1e30, 1e10), (1e300, 1e300), (1e-30, 1e-10), (1e-200, -1e-200)],
)
def test_a_product_of_scales_beyond_a_float_is_refused(softmax_scale, head_scale):
    """Its weights would be infinite, NaN for weights of 0, or 0."""
    call = operators.GOOD_CALLS["fused_indexer_q_rope_quant"]()
    call.set("softmax_scale", softmax_scale)
    call.set("head_scale", head_scale)
    with pytest.raises(ValueError, match="head_scale") as info:
        call.run(sparse_mla)
    rule = "`head_scale` must make 0 or a normal float32 of softmax_scale * head_scale"
    got = f"got {softmax_scale:g} * {head_scale:g}"
    assert str(info.value) == f"fused_indexer_q_rope_quant: {rule}, {got}"


@pytest.mark.parametrize(
    ("softmax_scale", "head_scale", "product"),
    [(1e200, 1e-200, 1.0), (0.0, 1e-300, 0.0), (1e-300, 0.0, 0.0), (2.0**-126, 1.0, 2.0**-126)],
)
def test_only_the_product_of_scales_must_be_a_float(softmax_scale, head_scale, product):
    got, want = (operators.GOOD_CALLS["fused_indexer_q_rope_quant"]() for _ in range(2))
    for call, scales in ((got, (softmax_scale, head_scale)), (want, (product, 1.0))):
        call.set("softmax_scale", scales[0])
        call.set("head_scale", scales[1])
    for x, y in zip(got.run(sparse_mla), want.run(sparse_mla), strict=True):
        assert_same_bits(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("factors", [
    (1e-38, 1e-18, 1e25), (1e-30, 1e-30, 1e38), (1e38, 2e-38, 1e38), (1e30, 1e15, 1e-9),
    (3e38, 3.0, 1e-30), (1e-20, 1e-20, 1e20), (2.0, 1e38, 1e-10),
])  # fmt: skip
def test_weights_of_three_factors(factors):
    """A weight, its two factors, and the query's scale: two of them may overflow, or make 0."""
    weight, head_scale, size = factors
    q = np.full((1, 2, 128), size, F32)
    q[..., 64:] = 0  # what RoPE turns
    q = ref.to_bf16(q)
    weights = np.array([[weight, -weight / 3]], F32)
    _, got = sparse_mla.fused_indexer_q_rope_quant(
        q, weights, np.zeros(1, np.int64), angles(), softmax_scale=1.0, head_scale=head_scale
    )
    amax = max(float(ref.to_f32(q).max()), 1e-4)
    scale = 2.0 ** np.ceil(np.log2(amax / 448))
    want = weights.astype(np.float64) * float(F32(head_scale)) * scale
    assert_same_bits(np.asarray(got), want.astype(F32))
