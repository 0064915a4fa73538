"""fused_inv_rope_fp8_quant (csrc/cpu/rope and csrc/cuda/rope)."""

import cases
import device
import numpy as np
import pytest
import reference as ref
import reference_norm as norm
from cases import angles
from helpers import Guarded, assert_same_bits
from library import sparse_mla

F32 = np.float32


def attended(T: int, H: int, seed=0, heads=0, std=1.0) -> np.ndarray:
    """Attention's output, heavy-tailed: H of `heads` heads, with zero, tiny and huge tiles."""
    rng = np.random.default_rng(seed)
    o = rng.standard_t(2, (T, max(H, heads), 512)).astype(F32) * F32(std)
    o *= np.exp2(rng.integers(-30, 30, (T, o.shape[1], 4))).repeat(128, 2).astype(F32)
    o[rng.random(o.shape[:2]) < 0.1, 128:256] = 0
    return ref.to_bf16(o)[:, :H]


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
            "fused_inv_rope_fp8_quant: `positions` must be rows of `rope_table`, which has 50, got "
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
