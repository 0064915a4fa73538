"""grouped_output_projection (csrc/cpu/projection, csrc/cuda/projection)."""

from __future__ import annotations

import cases
import device
import numpy as np
import pytest
import reference as ref
import reference_norm as norm
from helpers import Guarded, assert_same_bits
from library import sparse_mla

F32 = np.float32


def flat(rng, *shape: int) -> np.ndarray:
    return rng.normal(0, 1, shape)


def peaky(rng, *shape: int) -> np.ndarray:
    """Heavy tails, a row whose first value is 2^12 times the others, and terms that cancel."""
    x = rng.standard_t(1.5, shape)
    x[0, ..., 0] = 2.0**12 * np.abs(x[0]).max()
    x[-1, ..., 1::2] = -x[-1, ..., ::2][..., : x.shape[-1] // 2]
    return x


def alike(rng, *shape: int) -> np.ndarray:
    """Products of one sign, whose rounding errors do not average out."""
    return rng.uniform(0.9, 1, shape)


KINDS = {"flat": flat, "peaky": peaky, "alike": alike}


def quantize(x: np.ndarray, rows: int, powers: bool) -> tuple[np.ndarray, np.ndarray]:
    """-> e4m3 codes of the shape of x, and a scale per `rows` x 128 values of its last axes."""
    lead, n, r = x.shape
    padded = np.zeros((lead, -(-n // rows) * rows, r))
    padded[:, :n] = x
    tiles = padded.reshape(lead, -1, rows, r // 128, 128)
    amax = np.maximum(np.abs(tiles).max((2, 4)), 1e-10)
    scale = np.exp2(np.ceil(np.log2(amax / 448))) if powers else amax / 448
    scale = scale.astype(F32)
    codes = ref.e4m3_encode((tiles / scale[:, :, None, :, None]).astype(F32))
    return codes.reshape(padded.shape)[:, :n].copy(), scale


class Call:
    """An e4m3 call: codes, fp32 scales, and what NumPy makes of them."""

    def __init__(self, T: int, G: int, N: int, R: int, kind="flat", seed=0) -> None:
        rng = np.random.default_rng(seed)
        self.o, self.o_scale = quantize(KINDS[kind](rng, T, G, R), 1, powers=True)
        self.weight, self.weight_scale = quantize(KINDS[kind](rng, G, N, R) / 64, 128, powers=False)

    def check(self, *, want=None, **given) -> np.ndarray:
        """Runs the call, with other forms of its arrays if `given`, and compares it with fp64."""
        values = vars(self) | given
        out = Guarded((len(self.o), *self.weight.shape[:2]), ref.BF16, row_gap=8)
        names = ("o", "o_scale", "weight", "weight_scale")
        args = [values[name] for name in names]
        assert sparse_mla.grouped_output_projection(*args, out=out.array) is out.array
        value, magnitude = want or ref.grouped_output_projection(*(vars(self)[n] for n in names))
        assert_close(out.check(), value, magnitude, len(self.o))
        return out.array


def bound(value, magnitude, unit) -> np.ndarray:
    return 2.0**-8 * np.abs(value) + unit * magnitude + 2.0**-134


def assert_close(got, value, magnitude, num_tokens: int, *, is_e4m3=True) -> None:
    """The spec's bound. That of FP8 tensor cores holds where these may compute the result."""
    coarse = is_e4m3 and device.ON_CUDA and num_tokens > MOST_EXACT_TOKENS
    unit = 2.0**-8 if coarse else 2.0**-16
    assert ref.worst_ratio(got, value, bound(value, magnitude, unit)) <= 1


# Up to so many tokens CUDA multiplies e4m3 without FP8 tensor cores (csrc/cuda/projection).
MOST_EXACT_TOKENS = 64

# T, G, N, R. 8 x (4096 -> 1024) is V4-Flash's; N and R are as odd as they may be.
SIZES = [
    (1, 1, 1, 128),
    (1, 8, 64, 512),
    (2, 3, 129, 384),
    (5, 2, 200, 1024),
    (17, 1, 127, 640),
    (33, 2, 256, 512),
    (63, 1, 130, 128),
    (64, 2, 128, 256),
    (65, 1, 257, 896),
    (130, 2, 300, 512),
    (3, 128, 8, 128),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_e4m3(size, kind):
    call = Call(*size, kind)
    call.check()
    call.check(o=call.o.view(ref.E4M3), weight=call.weight.view(ref.E4M3))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(1, 8, 64, 512), (5, 2, 200, 1024), (70, 2, 130, 1536)])
def test_packed_scales_are_the_same_scales(size, kind):
    call = Call(*size, kind)
    packed = norm.pack_scales(call.o_scale)
    assert packed.shape == (*call.o.shape[:2], call.o.shape[2] // 512)
    assert_same_bits(call.check(o_scale=packed), call.check())


@pytest.mark.parametrize("size", SIZES)
def test_bf16(size):
    rng = np.random.default_rng(1)
    T, G, N, R = size
    for width in (R, R - 3):
        for kind in KINDS.values():
            o = ref.to_bf16(kind(rng, T, G, width))
            weight = ref.to_bf16(kind(rng, G, N, width) / 64)
            value, magnitude = ref.grouped_output_projection(o, None, weight, None)
            out = Guarded(value.shape, ref.BF16, row_gap=8)
            got = sparse_mla.grouped_output_projection(o, None, weight, None, out=out.array)
            assert got is out.array
            assert_close(out.check(), value, magnitude, T, is_e4m3=False)


def test_model_s_size():
    """A group of V4: 8 heads, 4096 values, 1024 outputs."""
    for T in (1, 16, 96):
        Call(T, 2, 1024, 4096, "alike").check()


def test_results_are_new_arrays():
    call = Call(3, 2, 40, 256)
    got = sparse_mla.grouped_output_projection(*vars(call).values())
    assert (type(got), got.dtype, got.shape) == (np.ndarray, ref.BF16, (3, 2, 40))
    assert got.flags.c_contiguous
    assert_same_bits(got, call.check())


@pytest.mark.parametrize("size", [(0, 2, 40, 256), (3, 2, 0, 256), (3, 2, 40, 0)])
def test_nothing_to_sum_or_to_write(size):
    T, G, N, R = size
    o, weight = np.zeros((T, G, R), np.uint8), np.zeros((G, N, R), np.uint8)
    scales = np.ones((T, G, R // 128), F32), np.ones((G, -(-N // 128), R // 128), F32)
    out = Guarded((T, G, N), ref.BF16)
    sparse_mla.grouped_output_projection(o, scales[0], weight, scales[1], out=out.array)
    assert (ref.bits16(out.check()) == 0).all()
    out = Guarded((T, G, N), ref.BF16)
    args = [np.zeros(x.shape, ref.BF16) for x in (o, weight)]
    sparse_mla.grouped_output_projection(args[0], None, args[1], None, out=out.array)
    assert (ref.bits16(out.check()) == 0).all()


@pytest.mark.parametrize("T", [5, 70])
def test_views(T):
    """Group-major storage, rows with gaps, columns of scales first, groups backwards, repeats."""
    call = Call(T, 3, 140, 512)
    want = call.check()

    def same(**given) -> None:
        got = call.check(**given)
        # Kernels for rows that lie otherwise may sum in another order.
        if not device.ON_CUDA:
            assert_same_bits(got, want)

    group_major = np.ascontiguousarray(call.o.swapaxes(0, 1)).swapaxes(0, 1)
    columns_first = np.zeros((4, 3, T + 3), F32)
    columns_first[..., :T] = call.o_scale.transpose(2, 1, 0)
    same(o=group_major, o_scale=columns_first.transpose(2, 1, 0))
    wide = np.zeros((T, 3, 528), np.uint8)
    wide[..., :512] = call.o
    weight = np.zeros((3, 150, 544), np.uint8)
    weight[:, :140, :512] = call.weight
    same(o=wide[..., :512], weight=weight[:, :140, :512])
    scale = np.asfortranarray(call.weight_scale)
    same(weight_scale=scale, o_scale=call.o_scale.repeat(2, 2)[..., ::2])
    backwards = [np.ascontiguousarray(x[::-1])[::-1] for x in vars(call).values()]
    same(**dict(zip(vars(call), backwards, strict=True)))
    packed = norm.pack_scales(call.o_scale)
    more = np.concatenate([packed, packed])[::1]
    same(o_scale=more)


@pytest.mark.parametrize("T", range(2, 10))
def test_a_token_s_bits_do_not_depend_on_its_neighbours(T):
    """The second half of the sum is the first one with the other sign, so that what remains is
    what roundings have left: a product that is rounded before it is added leaves something else."""
    call = Call(T, 2, 140, 256, "alike")
    call.o[..., 128:] = call.o[..., :128] ^ 0x80
    call.weight[..., 128:] = call.weight[..., :128]
    for scale in (call.o_scale, call.weight_scale):
        scale[..., 1] = scale[..., 0]
    call.o_scale *= F32(1 / 3)
    together = call.check()
    for t in range(T):
        alone = Call(1, 2, 140, 256)
        alone.o, alone.o_scale = call.o[t : t + 1].copy(), call.o_scale[t : t + 1].copy()
        alone.weight, alone.weight_scale = call.weight, call.weight_scale
        # CUDA has kernels for few tokens, which may sum in another order.
        got = alone.check()
        if not device.ON_CUDA:
            assert_same_bits(got, together[t : t + 1])


@pytest.mark.parametrize("T", [5, 70])
@pytest.mark.parametrize("offset", [1, 3, 8])
def test_any_address(T, offset):
    """e4m3 rows need no alignment."""
    call = Call(T, 2, 140, 256)

    def moved(x: np.ndarray) -> np.ndarray:
        raw = np.zeros((*x.shape[:-1], x.shape[-1] + 16), np.uint8)
        view = raw[..., offset : offset + x.shape[-1]]
        view[...] = x
        return view

    call.check(o=moved(call.o))
    call.check(weight=moved(call.weight))


def test_repeated_rows():
    call = Call(4, 2, 140, 256)
    call.o[:], call.o_scale[:] = call.o[:1], call.o_scale[:1]
    call.check(
        o=np.broadcast_to(call.o[:1], call.o.shape),
        o_scale=np.broadcast_to(call.o_scale[:1], call.o_scale.shape),
    )


@pytest.mark.parametrize("T", [6, 80])
def test_zero_rows_and_tiny_scales(T):
    """Rows of zeros are exactly 0. Scales from 2^-127 up are exact."""
    call = Call(T, 2, 140, 512)
    call.o[1] = 0
    call.o[2] = 0x80
    call.o_scale[1:3] = 2.0**-127
    call.o_scale[3] = 2.0**-40
    call.o_scale[4] = 2.0**60
    call.weight[1, 7] = 0
    out = ref.to_f32(call.check())
    assert (out[1:3] == 0).all()
    assert (out[:, 1, 7] == 0).all()


@pytest.mark.parametrize("layout", ["fp32", "ue8m0x4"])
@pytest.mark.parametrize("T", [6, 80])
def test_nan_and_infinity_reach_their_own_results_only(T, layout):
    call = Call(T, 2, 140, 512)
    call.o[1, 0, 300] = 0x7F
    call.o[5, 1, 10] = 0xFF
    call.weight[1, 130, 511] = 0xFF
    call.weight_scale[0, 1, 2] = np.nan
    packed = norm.pack_scales(call.o_scale)
    if layout == "fp32":
        call.o_scale[3, 1, 1] = np.nan
        given = call.o_scale
    else:
        packed[3, 1, 0] |= 0xFF << 8
        given = packed
        call.o_scale[3, 1, 1] = np.nan
    value, magnitude = ref.grouped_output_projection(*vars(call).values())
    nan = np.isnan(value)
    assert 0 < nan.sum() < nan.size / 2
    got = sparse_mla.grouped_output_projection(call.o, given, call.weight, call.weight_scale)
    got = ref.to_f32(np.asarray(got))
    assert np.array_equal(np.isnan(got), nan)
    assert_close(np.where(nan, 0, got), np.where(nan, 0, value), np.where(nan, 0, magnitude), T)


def test_large_results_become_infinite():
    """fp32 holds the scales' product, bf16 does not hold the result."""
    call = Call(3, 1, 5, 128, "alike")
    call.o_scale[1] = 2.0**127
    call.weight_scale[:] = 1
    got = sparse_mla.grouped_output_projection(*vars(call).values())
    got = ref.to_f32(np.asarray(got))
    assert np.isposinf(got[1]).all()
    assert np.isfinite(got[[0, 2]]).all()


def test_two_runs_give_the_same_bits():
    for T in (1, 33, 200):
        call = Call(T, 2, 300, 1024, "peaky")
        args = list(vars(call).values())
        first, second = (sparse_mla.grouped_output_projection(*args) for _ in range(2))
        assert_same_bits(np.asarray(first), np.asarray(second))


@pytest.mark.parametrize("layout", ["fp32", "ue8m0x4"])
@pytest.mark.parametrize(("T", "H", "groups"), [(1, 64, 8), (3, 8, 4), (7, 6, 3), (66, 16, 2)])
def test_what_the_inverse_rope_writes(T, H, groups, layout):
    """The chain of V4's layer, o -> inverse RoPE and FP8 -> projection, beside fp64."""
    rng = np.random.default_rng(2)
    o = cases.random_bf16(rng, T, H, 512)
    turn = rng.uniform(-7, 7, (20, 32))
    table = np.concatenate([np.cos(turn), np.sin(turn)], 1).astype(F32)
    positions = rng.integers(0, 20, T)
    R, N = H // groups * 512, 72
    weight, weight_scale = quantize(rng.normal(0, 0.02, (groups, N, R)), 128, powers=False)
    codes, scale = sparse_mla.fused_inv_rope_fp8_quant(
        o, positions, table, groups=groups, scale_layout=layout
    )
    assert device.ON_CUDA or scale.strides[0] == 4, "columns of scales, as the layer has them"
    z = sparse_mla.grouped_output_projection(codes, scale, weight, weight_scale)
    want = norm.inverse(o, positions, table, groups)
    value, magnitude = ref.grouped_output_projection(*want, weight, weight_scale)
    assert_close(z, value, magnitude, T)
    turned = norm.grouped(norm.turn_back(o, positions, table).astype(np.float64), groups)
    w = weight_scale.astype(np.float64).repeat(128, 2).repeat(128, 1)[:, :N]
    w = w * ref.e4m3_decode(weight)
    exact = np.einsum("tgr,gnr->tgn", turned, w)
    loss = np.einsum("tgr,gnr->tgn", np.abs(turned), np.abs(w))
    assert (np.abs(ref.to_f32(np.asarray(z)) - exact) <= bound(exact, 2.0**-3 * loss, 1)).all()
    plain = sparse_mla.fused_inv_rope_fp8_quant(o, positions, table, groups=groups, quantize=False)
    value, magnitude = ref.grouped_output_projection(plain, None, ref.to_bf16(w), None)
    z = sparse_mla.grouped_output_projection(plain, None, ref.to_bf16(w), None)
    assert_close(z, value, magnitude, T, is_e4m3=False)
