"""rope_table, fused_q_kv_rmsnorm and fused_inv_rope_fp8_quant (csrc/cpu/norm, csrc/cpu/rope and
those of csrc/cuda)."""

import itertools
import math

import cases
import device
import numpy as np
import operators
import pytest
import reference as ref
import reference_norm as norm
from helpers import Guarded, assert_same_bits
from library import sparse_mla

F32 = np.float32
V3 = {"factor": 40, "orig_max_pos": 4096, "mscale": 1, "mscale_all_dim": 1}
V4 = {"factor": 16, "orig_max_pos": 65536, "beta_fast": 32, "beta_slow": 1}


# --- rope_table ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4, 64, 130])
@pytest.mark.parametrize("yarn", [None, V3, V4, {"factor": 2.5, "orig_max_pos": 100}], ids=str)
@pytest.mark.parametrize("base", [10000, 160000.0, 1.5])
def test_table(size, yarn, base):
    """fp64 angles, each value rounded once; NumPy's and C's cosines may differ in the last bit."""
    max_pos = 40
    table = sparse_mla.rope_table(max_pos, size, base, yarn)
    assert (table.shape, table.dtype) == ((max_pos, size), F32)
    assert table.flags.c_contiguous
    magnitude = 1.0
    if yarn is not None:
        mscales = (yarn.get("mscale", 1), yarn.get("mscale_all_dim", 0))
        first, second = (0.1 * a * math.log(yarn["factor"]) + 1 for a in mscales)
        magnitude = first / second
    for t, i in itertools.product(range(max_pos), range(size // 2)):
        angle = t * norm.yarn_frequency(i, size, base, yarn)
        for at, f in ((i, math.cos), (i + size // 2, math.sin)):
            assert abs(table[t, at] - magnitude * f(angle)) <= 2.0**-24 * magnitude + 1e-15 * t


@pytest.mark.parametrize("yarn", [None, V4], ids=str)
def test_table_of_fp32_angles(yarn):
    """DeepSeek V4's: the frequency and the product are rounded to fp32; no magnitude."""
    positions = [0, 1, 7, 65535, 999_999]
    table = sparse_mla.rope_table(10**6, 64, 160000.0, yarn, fp32_angles=True)
    for t, i in itertools.product(positions, range(32)):
        angle = F32(F32(t) * F32(norm.yarn_frequency(i, 64, 160000.0, yarn)))
        assert abs(table[t, i] - math.cos(float(angle))) <= 2.0**-25 * 1.001
        assert abs(table[t, 32 + i] - math.sin(float(angle))) <= 2.0**-25 * 1.001
    exact = sparse_mla.rope_table(10**6, 64, 160000.0, yarn)
    assert np.abs(exact[999_999] - table[999_999]).max() > 1e-3, "the option has an effect"


def test_table_vectors():
    """The contract's numbers of DeepSeek V3."""
    f = [norm.yarn_frequency(i, 64, 10000, V3) for i in range(32)]
    assert f[10] == pytest.approx(0.0562341325, rel=1e-9)
    assert f[11] == pytest.approx(0.0390069266, rel=1e-8)
    assert f[16] == pytest.approx(0.0055, rel=1e-9)
    assert f[23] == pytest.approx(3.33380358e-05, rel=1e-8)
    table = sparse_mla.rope_table(2, yarn=V3)
    for i in (10, 11, 16, 23, 31):
        assert table[1, 32 + i] == pytest.approx(math.sin(f[i]), rel=1e-6)
    assert sparse_mla.rope_table(2, R=4)[1].tolist() == [
        F32(x) for x in (math.cos(1), math.cos(0.01), math.sin(1), math.sin(0.01))
    ]


def test_sizes_of_tables():
    assert sparse_mla.rope_table(0).shape == (0, 64)
    assert sparse_mla.rope_table(yarn={"factor": 4, "orig_max_pos": 25}).shape == (100, 64)
    large = sparse_mla.rope_table(40_000)  # several blocks
    for t in (16383, 16384, 39_999):
        assert large[t, 0] == F32(math.cos(t))


def test_a_factor_of_one_changes_nothing():
    plain = sparse_mla.rope_table(50)
    yarn = {"factor": 1, "orig_max_pos": 4096, "mscale": 3}
    assert_same_bits(sparse_mla.rope_table(50, yarn=yarn), plain)


@pytest.mark.parametrize(
    ("args", "options", "error", "text"),
    [
        ((), {}, ValueError, "`max_pos` must be given without `yarn`, got None"),
        ((-1,), {}, ValueError, "`max_pos` must be 0 to 2147483647, got -1"),
        ((2**31,), {}, ValueError, "`max_pos` must be 0 to 2147483647, got 2147483648"),
        ((1.5,), {}, TypeError, "`max_pos` must be an int, got float"),
        ((True,), {}, TypeError, "`max_pos` must be an int, got bool"),
        ((4, 63), {}, ValueError, "`R` must be even and at least 2, got 63"),
        ((4, 0), {}, ValueError, "`R` must be even and at least 2, got 0"),
        ((4, 64.0), {}, TypeError, "`R` must be an int, got float"),
        ((4, 64, 1), {}, ValueError, "`base` must be finite and above 1, got 1"),
        ((4, 64, math.inf), {}, ValueError, "`base` must be finite and above 1, got inf"),
        ((4, 64, math.nan), {}, ValueError, "`base` must be finite and above 1, got nan"),
        ((4, 64, "10000"), {}, TypeError, "`base` must be a number, got str"),
        ((4,), {"yarn": 40}, TypeError, "`yarn` must be None or a dict, got int"),
        ((4,), {"yarn": {}}, ValueError, "`yarn` must have the key factor, got []"),
        (
            (4,),
            {"yarn": {"factor": 2}},
            ValueError,
            "`yarn` must have the key orig_max_pos, got ['factor']",
        ),
        ((4,), {"yarn": V3 | {"typo": 1}}, ValueError, "`yarn` must have keys of factor, orig_max_pos, beta_fast, beta_slow, mscale, mscale_all_dim, got typo"),  # noqa: E501
        ((4,), {"yarn": V3 | {"factor": 0.5}}, ValueError, "`yarn['factor']` must be finite and at least 1, got 0.5"),  # noqa: E501
        ((4,), {"yarn": V3 | {"beta_slow": 0}}, ValueError, "`yarn['beta_slow']` must be finite and positive, got 0"),  # noqa: E501
        ((4,), {"yarn": V3 | {"mscale": math.inf}}, ValueError, "`yarn['mscale']` must be finite and at least 0, got inf"),  # noqa: E501
        ((4,), {"yarn": V3 | {"factor": "2"}}, TypeError, "`yarn['factor']` must be a number, got str"),  # noqa: E501
    ],
)  # fmt: skip
def test_bad_tables(args, options, error, text):
    with pytest.raises(error) as info:
        sparse_mla.rope_table(*args, **options)
    assert str(info.value) == f"rope_table: {text}"


# --- fused_q_kv_rmsnorm --------------------------------------------------------------------------


def rows(T: int, size: int, seed=0, shift=0, gap=8) -> tuple[np.ndarray, np.ndarray]:
    """q and kv as columns of one buffer, heavy-tailed."""
    rng = np.random.default_rng(seed)
    buffer = ref.to_bf16(rng.standard_t(2, (T, shift + size + 512 + gap)).astype(F32))
    return buffer[:, shift : shift + size], buffer[:, shift + size : shift + size + 512]


def weights(size: int, dtype, seed=1) -> np.ndarray:
    value = np.random.default_rng(seed).normal(1, 0.5, size).astype(F32)
    return ref.to_bf16(value) if dtype == "bf16" else value


def check_norm(q, kv, q_weight, kv_weight, eps=1e-6, row_gap=0) -> tuple:
    outs = [Guarded(x.shape, ref.BF16, row_gap=row_gap) for x in (q, kv)]
    got = sparse_mla.fused_q_kv_rmsnorm(
        q, kv, q_weight, kv_weight, eps=eps, q_out=outs[0].array, kv_out=outs[1].array
    )
    assert got[0] is outs[0].array
    assert got[1] is outs[1].array
    results = [out.check() for out in outs]
    for x, w, y in zip((q, kv), (q_weight, kv_weight), results, strict=True):
        assert_same_bits(ref.bits16(y), norm.rms_norm_bits(x, w, eps))
    return tuple(results)


@pytest.mark.parametrize("T", [0, 1, 17, 300])
@pytest.mark.parametrize("size", [1, 7, 64, 255, 256, 264, 1024, 1536, 1544, 2500, 8192])
def test_norm(T, size):
    q, kv = rows(T, size, gap=0)
    kinds = ("bf16", "fp32") if size % 2 else ("fp32", "bf16")
    w = weights(size, kinds[0]), weights(512, kinds[1], 2)
    results = check_norm(q, kv, *w, row_gap=8 * (T % 2))
    for x, weight, y in zip((q, kv), w, results, strict=True):
        want, tolerance = norm.rms_norm(x, weight, 1e-6)
        assert ref.worst_ratio(y, want, tolerance) <= 1


@pytest.mark.parametrize("shift", [1, 4, 8])
@pytest.mark.parametrize("size", [96, 1024, 1025])
def test_norm_of_columns(shift, size):
    """Rows begin off a multiple of 16 bytes; rows go backwards; all rows are one row."""
    q, kv = rows(9, size, shift=shift, gap=3)
    w = weights(size + 1, "bf16")[1:], weights(513, "fp32")[1:]
    check_norm(q, kv, *w)
    check_norm(q[::-1], kv[::-1], *w, row_gap=1)
    check_norm(np.broadcast_to(q[:1], q.shape), np.broadcast_to(kv[:1], kv.shape), *w, row_gap=3)


@pytest.mark.parametrize("size", [96, 1024, 2500])
def test_norm_in_place(size):
    """Outputs are their inputs: columns of one buffer, whose other columns stay."""
    q, kv = rows(11, size, gap=5)
    buffer = q.base if q.base is not None else q
    want = check_norm(q.copy(), kv.copy(), weights(size, "bf16"), weights(512, "bf16"))
    rest = buffer[:, size + 512 :].copy()
    got = sparse_mla.fused_q_kv_rmsnorm(
        q, kv, weights(size, "bf16"), weights(512, "bf16"), eps=1e-6, q_out=q, kv_out=kv
    )
    assert got[0] is q
    assert got[1] is kv
    assert_same_bits(q, want[0])
    assert_same_bits(kv, want[1])
    assert_same_bits(buffer[:, size + 512 :], rest)


def test_norm_overlaps():
    """An output is its own input or shares nothing with it; the other input is no excuse."""
    buffer = ref.to_bf16(np.ones((4, 2100), F32))
    q, kv = buffer[:, :512], buffer[:, 512:1024]
    w = np.ones(512, F32)

    def refused(text, q=q, kv=kv, **outs):
        before = buffer.tobytes()
        with pytest.raises(ValueError, match="fused_q_kv_rmsnorm") as info:
            sparse_mla.fused_q_kv_rmsnorm(q, kv, w, w, eps=0.1, **outs)
        assert str(info.value) == f"fused_q_kv_rmsnorm: {text}, got arrays that share memory"
        assert buffer.tobytes() == before

    refused("`q_out` must be the whole of or not overlap `q`", q_out=buffer[:, 1:513])
    refused("`q_out` must be the whole of or not overlap `q`", q=q[::-1], q_out=q)
    refused("`q_out` must not overlap `kv`", q_out=kv)
    refused("`kv_out` must not overlap `q`", kv_out=q)
    refused("`q_out` must not overlap `kv`", q=buffer[:, 1200:1712], kv=q, q_out=q)
    refused("`q_out` must not overlap `kv`", kv=q, q_out=q)
    refused("`q_out` must not overlap `kv_out`", q_out=buffer[:, 1024:1536], kv_out=buffer[:, 1535:][:, :512])  # noqa: E501  # fmt: skip
    sparse_mla.fused_q_kv_rmsnorm(q, kv, w, w, eps=0.1, q_out=buffer[:, 1024:1536], kv_out=kv)


@pytest.mark.parametrize("eps", [0.0, 1e-6, 2.0**-126, 3.0, 3e38])
def test_norm_extremes(eps):
    """Zero rows, NaN, infinities, tiny values whose squares vanish, huge ones whose squares
    overflow: exactly the fp32 steps."""
    q = np.zeros((9, 300), F32)
    q[1, 5], q[2, 7], q[3, 0], q[3, 9] = np.nan, np.inf, -np.inf, 1
    q[4], q[5], q[6, 3], q[7] = 1e-30, 1e30, 3e38, 1e-19
    q[8, ::2], q[8, 1::2] = -0.0, 1e-40
    q = ref.to_bf16(q)
    q[1, 6] = ref.bits16(q[1, 6:7])[0] * 0 - ref.to_bf16(np.float32([np.nan]))[0]  # a negative NaN
    kv = ref.to_bf16(np.zeros((9, 512), F32))
    kv[:, :300] = q
    w = weights(300, "bf16"), weights(512, "fp32")
    w[0][2], w[1][3] = np.nan, np.inf
    q_out, _ = check_norm(q, kv, *w, eps=eps)
    assert np.isnan(ref.to_f32(q_out)[1]).all(), "a NaN reaches the whole row"
    if eps > 0:
        assert (ref.to_f32(q_out)[0, 3:] == 0).all()
        assert (ref.to_f32(q_out)[5, 3:] == 0).all(), "a sum that overflows"


@pytest.mark.parametrize(
    "op", ["fused_q_kv_rmsnorm", "fused_qnorm_rope_kv_insert", "compress_norm_rope_store"]
)
def test_an_eps_is_checked_as_the_float_that_is_used(op):
    """Between 0 and the least normal float32 it would be 0 in some modes of the processor."""
    for eps in (5e-324, 1e-46, 1e-40, np.nextafter(2.0**-126, 0) * (1 - 2.0**-24)):
        call = operators.GOOD_CALLS[op]()
        call.set("eps", float(eps))
        with pytest.raises(ValueError, match="eps") as info:
            call.run(sparse_mla)
        rule = "`eps` must be 0 or a normal float32 (at least 1.17549e-38)"
        assert str(info.value) == f"{op}: {rule}, got {eps:g}"
    for eps in (0.0, -0.0, 2.0**-126, np.nextafter(2.0**-126, 0)):  # the last one is rounded up
        call = operators.GOOD_CALLS[op]()
        call.set("eps", float(eps))
        call.run(sparse_mla)


def test_norm_results_are_new_arrays():
    q, kv = rows(3, 96)
    got = sparse_mla.fused_q_kv_rmsnorm(q, kv, weights(96, "bf16"), weights(512, "bf16"), eps=1e-6)
    want = check_norm(q, kv, weights(96, "bf16"), weights(512, "bf16"))
    for x, y in zip(got, want, strict=True):
        assert (type(x), x.dtype) == (np.ndarray, ref.BF16)
        assert_same_bits(x, y)


@pytest.mark.parametrize("size", [513, 1024, 1800])
def test_norm_of_many_tokens(size):
    """Enough for a GPU to give a warp both rows of a token."""
    q, kv = rows(8192, size)
    check_norm(q, kv, weights(size, "bf16"), weights(512, "bf16"))


# --- fused_inv_rope_fp8_quant --------------------------------------------------------------------


def attended(T: int, H: int, seed=0, heads=0, std=1.0) -> np.ndarray:
    """Attention's output, heavy-tailed: H of `heads` heads, with zero, tiny and huge tiles."""
    rng = np.random.default_rng(seed)
    o = rng.standard_t(2, (T, max(H, heads), 512)).astype(F32) * F32(std)
    o *= np.exp2(rng.integers(-30, 30, (T, o.shape[1], 4))).repeat(128, 2).astype(F32)
    o[rng.random(o.shape[:2]) < 0.1, 128:256] = 0
    return ref.to_bf16(o)[:, :H]


def angles(max_pos=50, seed=3) -> np.ndarray:
    turn = np.random.default_rng(seed).uniform(-7, 7, (max_pos, 32))
    return np.concatenate([np.cos(turn), np.sin(turn)], 1).astype(F32)


def places(T: int, dtype=np.int64, max_pos=50) -> np.ndarray:
    return np.random.default_rng(4).integers(0, max_pos, T).astype(dtype)


def assert_codes(got, want, what="") -> None:
    assert_same_bits(np.ascontiguousarray(got).view(np.uint8), want, what)


def check_inverse(o, positions, table, groups) -> None:
    """All three kinds of results, new and given, against NumPy's bytes."""
    codes, scales = norm.inverse(o, positions, table, groups)
    packed = norm.pack_scales(scales)
    for layout, want in (("fp32", scales), ("ue8m0x4", packed)):
        options = {"groups": groups, "scale_layout": layout}
        new = sparse_mla.fused_inv_rope_fp8_quant(o, positions, table, **options)
        out = Guarded(codes.shape, np.uint8, row_gap=8)
        scale = Guarded(want.shape, want.dtype, row_gap=4)
        given = sparse_mla.fused_inv_rope_fp8_quant(
            o, positions, table, out=out.array, out_scale=scale.array, **options
        )
        assert given[0] is out.array
        assert given[1] is scale.array
        for got in (new, (out.check(written=False), scale.check())):
            assert_codes(got[0], codes, layout)
            assert got[1].dtype == want.dtype
            assert_same_bits(np.ascontiguousarray(got[1]), want, layout)
    turned = norm.turn_back(o, positions, table)
    bits = ref.bf16_encode(turned)
    bits[..., :448] = ref.bits16(np.ascontiguousarray(o))[..., :448]
    out = Guarded(codes.shape, ref.BF16, row_gap=8)
    new = sparse_mla.fused_inv_rope_fp8_quant(o, positions, table, groups=groups, quantize=False)
    given = sparse_mla.fused_inv_rope_fp8_quant(
        o, positions, table, groups=groups, quantize=False, out=out.array
    )
    assert given is out.array
    for got in (new, out.check()):
        assert_same_bits(ref.bits16(np.ascontiguousarray(got)), norm.grouped(bits, groups))


SHAPES = [(0, 4, 2), (1, 1, 1), (1, 64, 8), (2, 6, 3), (3, 7, 7), (4, 3, 1), (5, 5, 5), (17, 8, 4)]
SHAPES += [(9, 40, 8), (8, 128, 16), (33, 16, 1)]


@pytest.mark.parametrize(("T", "H", "groups"), SHAPES)
def test_inverse(T, H, groups):
    check_inverse(attended(T, H), places(T), angles(), groups)


@pytest.mark.parametrize("H", [1, 6, 12, 127, 128])
def test_inverse_by_every_number_of_groups(H):
    for groups in (g for g in range(1, H + 1) if H % g == 0):
        check_inverse(attended(2, H), places(2, np.int32), angles(), groups)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_inverse_of_views(dtype):
    """Padded heads, more positions than tokens, a table with gaps, tokens backwards."""
    o = attended(7, 6, heads=9)
    table = np.repeat(angles(), 2, 0)[::2]
    wide = np.zeros((50, 70), F32)
    wide[:, 3:67] = table
    positions = np.repeat(places(12, dtype), 3)[::3]
    check_inverse(o, positions, table, 3)
    check_inverse(o[::-1], positions[::-1], wide[:, 3:67], 2)
    check_inverse(o[:, ::-1], positions, table[::-1], 6)
    shifted = np.zeros((7, 6, 520), ref.BF16)
    shifted[..., 3:515] = o
    check_inverse(shifted[..., 3:515], positions, table, 1)
    check_inverse(np.broadcast_to(o[:1], o.shape), positions, table, 1)


@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_inverse_to_any_address(offset):
    o, table, positions = attended(5, 4), angles(), places(5)
    codes, scales = norm.inverse(o, positions, table, 2)
    raw = np.full(5 * 2 * 1100 + 64, 0xA5, np.uint8)
    start = -raw.ctypes.data % 16 + offset
    out = np.ndarray((5, 2, 1024), np.uint8, raw.data, start, (2200, 1100, 1))
    _, scale = sparse_mla.fused_inv_rope_fp8_quant(o, positions, table, groups=2, out=out)
    assert_codes(out, codes)
    assert_same_bits(np.ascontiguousarray(scale), scales)
    out[...] = 0xA5
    assert (raw == 0xA5).all(), "a write around the elements"


@pytest.mark.parametrize("T", range(1, 10))
@pytest.mark.parametrize("layout", ["fp32", "ue8m0x4"])
def test_storage_of_new_results(T, layout):
    """Groups first; columns of scales before tokens, whose rows up to a multiple of 4 are 0."""
    o, table = attended(T, 6), angles()
    out, scale = sparse_mla.fused_inv_rope_fp8_quant(
        o, places(T), table, groups=2, scale_layout=layout
    )
    columns, padded = (12 if layout == "fp32" else 3), -(-T // 4) * 4
    assert (out.shape, out.dtype) == ((T, 2, 1536), ref.E4M3)
    assert (scale.shape, scale.itemsize) == ((T, 2, columns), 4)
    if device.DEVICE == "cpu":  # on CUDA the results come here as copies
        assert out.strides == (1536, T * 1536, 1)
        assert scale.strides == (4, 4 * columns * padded, 4 * padded)
        whole = np.lib.stride_tricks.as_strided(scale, (padded, 2, columns), scale.strides)
        assert not whole[T:].any()
        assert whole[:T].all()


@pytest.mark.parametrize("layout", ["fp32", "ue8m0x4"])
def test_rows_of_scales_behind_the_tokens(layout):
    """Of the rows that the caller gives, those up to a multiple of 4 become 0, and others stay."""
    o, table = attended(6, 4), angles()
    columns, dtype = (8, F32) if layout == "fp32" else (2, np.int32)
    for num_rows in (6, 7, 8, 11):
        storage = np.full((2, columns, 12), 77, dtype)
        scale = storage.transpose(2, 0, 1)[:num_rows]
        _, got = sparse_mla.fused_inv_rope_fp8_quant(
            o, places(6), table, groups=2, scale_layout=layout, out_scale=scale
        )
        assert got is scale
        want = norm.inverse(o, places(6), table, 2)[1]
        want = want if layout == "fp32" else norm.pack_scales(want)
        assert_same_bits(np.ascontiguousarray(scale[:6]), want)
        assert not scale[6:8].any()
        assert (storage.transpose(2, 0, 1)[min(num_rows, 8) :] == 77).all()


def test_vectors():
    """The contract's: P2, and cos 0, sin 1 on the pair (1, 0)."""
    for amax, scale in ((0, -42), (1, -8), (450, 1), (448, 0), (np.inf, 120), (1e-10, -42)):
        assert norm.power_of_two_scale(min(amax, np.finfo(F32).max), 448, 1e-10) == 2.0**scale
        o = np.zeros((1, 1, 512), F32)
        o[0, 0, 3] = amax
        _, got = sparse_mla.fused_inv_rope_fp8_quant(
            ref.to_bf16(o), np.zeros(1, np.int64), angles(1), groups=1
        )
        exact = norm.scales_of(ref.to_f32(ref.to_bf16(o))[0, :, :128])
        assert got[0, 0, 0] == exact[0]
        if ref.to_f32(ref.to_bf16(o))[0, 0, 3] == amax:
            assert got[0, 0, 0] == 2.0**scale
    o = np.zeros((1, 1, 512), F32)
    o[0, 0, 448] = 1
    table = np.concatenate([np.zeros((1, 32)), np.ones((1, 32))], 1).astype(F32)
    out, scale = sparse_mla.fused_inv_rope_fp8_quant(
        ref.to_bf16(o), np.zeros(1, np.int64), table, groups=1
    )
    assert out.view(np.uint8)[0, 0, 448:450].tolist() == [0x00, 0xF8]
    assert scale[0, 0, 3] == 2.0**-8


@pytest.mark.parametrize("mantissa", range(0, 128, 3))
def test_every_scale(mantissa):
    """amax of every exponent: the scale is the smallest power of two that reaches it."""
    bits = np.arange(0, 0x7F80, 0x80, dtype=np.uint16) + np.uint16(mantissa)
    o = np.zeros((len(bits), 1, 512), np.uint16)
    o[:, 0, 17], o[:, 0, 200] = bits, bits | 0x8000
    o = o.view(ref.BF16)
    _, scale = sparse_mla.fused_inv_rope_fp8_quant(
        o, np.zeros(len(bits), np.int64), angles(1), groups=1
    )
    want = norm.scales_of(ref.to_f32(o)[:, 0, :128])
    assert_same_bits(np.ascontiguousarray(scale[:, 0, 0]), want)
    assert_same_bits(np.ascontiguousarray(scale[:, 0, 1]), want)


def test_rare_values():
    """NaN of both signs, infinities, zeros of both signs, subnormal values, in tiles that RoPE
    turns and in others; tables with NaN, infinity and values far from cosines."""
    rng = np.random.default_rng(6)
    rare = np.array([0x7FC1, 0xFFC0, 0x7F80, 0xFF80, 0x8000, 0, 1, 0x8001, 0x7F7F], np.uint16)
    bits = ref.bits16(attended(40, 3)).copy()
    spots = rng.random(bits.shape) < 0.05
    bits[spots] = rng.choice(rare, spots.sum())
    bits[:10, :, 448:] = rng.choice(rare, (10, 3, 64))
    o = bits.view(ref.BF16)
    table = angles(20)
    table[3, ::5], table[4, ::7], table[5] = np.nan, np.inf, 0
    table[6], table[7, ::3], table[8] = -0.0, 3e38, 1e-42
    check_inverse(o, np.arange(40) % 20, table, 3)


def test_no_fused_multiply_add():
    """Products whose rounding errors decide the sum, so that an FMA would show in the bytes."""
    rng = np.random.default_rng(7)
    o = np.zeros((200, 2, 512), F32)
    o[..., 448:] = 1 + rng.integers(0, 128, (200, 2, 64)) / 128
    turn = np.float64(np.pi / 4) + rng.normal(0, 1e-3, (200, 32))
    table = np.concatenate([np.cos(turn), np.sin(turn)], 1).astype(F32)
    o[..., 449::2] = -o[..., 448::2]  # a cos + b sin is nearly 0
    check_inverse(ref.to_bf16(o), np.arange(200), table, 1)


def test_inverse_of_many_tokens():
    o = cases.random_bf16(np.random.default_rng(8), 1024, 64, 512)
    o = np.ascontiguousarray(np.broadcast_to(o, (8, 1024, 64, 512))).reshape(8192, 64, 512)
    o = o[:, :4]
    check_inverse(o, places(8192, np.int32), angles(), 2)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("bad", [-1, 50, 2**31 - 1, -(2**31)])
def test_bad_positions(dtype, bad):
    """The CPU refuses them before it writes. CUDA does not turn these tokens, and reads nothing
    outside the table."""
    o, table, positions = attended(6, 4), angles(), places(6, dtype)
    positions[4] = bad
    want = norm.inverse(np.delete(o, 4, 0), np.delete(positions, 4), table, 2)
    out, scale = Guarded((6, 2, 1024), np.uint8), Guarded((6, 2, 8), F32)

    def call():
        return sparse_mla.fused_inv_rope_fp8_quant(
            o, positions, table, groups=2, out=out.array, out_scale=scale.array
        )

    if device.DEVICE == "cpu":
        with pytest.raises(ValueError, match="positions") as info:
            call()
        assert str(info.value) == (
            "fused_inv_rope_fp8_quant: `positions` must be rows of `cos_sin`, which has 50, got "
            f"{bad} for token 4"
        )
        out.check(written=False)
        scale.check(written=False)
    else:
        call()
        assert_codes(np.delete(out.check(written=False), 4, 0), want[0])
        assert_same_bits(np.delete(scale.check(), 4, 0), want[1])


def test_positions_behind_the_tokens_are_not_read():
    o, table = attended(3, 2), angles()
    positions = np.append(places(3), [10**9, -5])
    check_inverse(o, positions, table, 1)


def test_out_scale_asks_for_quantisation():
    o, table = attended(3, 2), angles()
    scale = np.zeros((3, 1, 8), F32)
    got = sparse_mla.fused_inv_rope_fp8_quant(
        o, places(3), table, groups=1, quantize=False, out_scale=scale
    )
    assert got[1] is scale
    assert_codes(got[0], norm.inverse(o, places(3), table, 1)[0])


def test_texts():
    o, table = attended(3, 6), angles()
    for groups, text in (
        (4, "`o` must have a multiple of 4 heads (`groups`), got 6"),
        (7, "`o` must have a multiple of 7 heads (`groups`), got 6"),
        (0, "`groups` must be 1 to 128, got 0"),
        (-1, "`groups` must be 1 to 128, got -1"),
        (129, "`groups` must be 1 to 128, got 129"),
    ):
        with pytest.raises(ValueError, match="groups") as info:
            sparse_mla.fused_inv_rope_fp8_quant(o, places(3), table, groups=groups)
        assert str(info.value) == f"fused_inv_rope_fp8_quant: {text}"
    with pytest.raises(ValueError, match="scale_layout") as info:
        sparse_mla.fused_inv_rope_fp8_quant(o, places(3), table, groups=2, scale_layout="fp8")
    assert str(info.value) == (
        'fused_inv_rope_fp8_quant: `scale_layout` must be "fp32" or "ue8m0x4", got \'fp8\''
    )
