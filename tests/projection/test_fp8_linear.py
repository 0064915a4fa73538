"""fp8_linear (csrc/cpu/projection, csrc/cuda/projection)."""

from __future__ import annotations

from dataclasses import dataclass

import cases
import device
import numpy as np
import pytest
import reference as ref
from helpers import Guarded, assert_same_bits
from library import sparse_mla

F32 = np.float32

# scheme -> input group, weight group in the orientation [out, in]
SCHEMES = {
    "tensor": ((-1, -1), (-1, -1)),
    "block": ((1, 128), (128, 128)),
    "token_tensor": ((1, -1), (-1, -1)),
    "token_channel": ((1, -1), (1, -1)),
}

# Up to so many tokens CUDA multiplies e4m3 without FP8 tensor cores (csrc/cuda/projection).
MOST_EXACT_TOKENS = 64


def quantize_weight(weight: np.ndarray, group: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """NumPy's scaled_quantize of a weight whose last blocks may be ragged."""
    out, k = weight.shape
    if group != (128, 128):
        return ref.scaled_quantize(weight.astype(F32), group)
    padded = np.zeros((-(-out // 128) * 128, k), F32)
    padded[:out] = weight
    codes, descale = ref.scaled_quantize(padded, group)
    return codes[:out].copy(), descale


@dataclass
class Layer:
    """A call, and the quantised operands that it stands for."""

    scheme: str
    x: np.ndarray
    weight: np.ndarray
    descale: np.ndarray

    @property
    def input_group(self) -> tuple[int, int]:
        return SCHEMES[self.scheme][0]

    def run(self, **given) -> np.ndarray:
        args = {"input_group": self.input_group} | given
        return sparse_mla.fp8_linear(self.x, self.weight, self.descale, **args)

    def want(self) -> tuple[np.ndarray, np.ndarray]:
        codes, scale = ref.scaled_quantize(self.x, self.input_group)
        weight_scale = self.descale.reshape(-1, 1) if self.scheme != "block" else self.descale
        return ref.fp8_linear(codes, scale, self.weight, weight_scale)

    def check(self) -> np.ndarray:
        out = Guarded((len(self.x), len(self.weight)), ref.BF16, row_gap=8)
        assert self.run(out=out.array) is out.array
        value, magnitude = self.want()
        exact = not device.ON_CUDA or len(self.x) <= MOST_EXACT_TOKENS
        unit = 2.0**-16 if exact else 2.0**-8
        tolerance = 2.0**-8 * np.abs(value) + unit * magnitude + 2.0**-134
        assert ref.worst_ratio(out.check(), value, tolerance) <= 1
        return out.array


def make_layer(scheme: str, T: int, out: int, k: int, seed=0, kind="flat") -> Layer:
    rng = np.random.default_rng(seed)
    draw = (
        (lambda *s: rng.normal(0, 1, s)) if kind == "flat" else (lambda *s: rng.uniform(0.9, 1, s))
    )
    x = ref.to_bf16(draw(T, k) * np.exp2(rng.integers(-6, 6, (T, 1))))
    weight = draw(out, k) * np.exp2(rng.integers(-3, 3, (out, 1))) / 16
    return Layer(scheme, x, *quantize_weight(weight, SCHEMES[scheme][1]))


# T, out, in; out is as ragged as it may be
SIZES = [
    (1, 1, 128),
    (1, 64, 512),
    (2, 129, 384),
    (5, 200, 1024),
    (16, 256, 640),
    (17, 127, 640),
    (63, 130, 128),
    (64, 300, 256),
    (65, 257, 896),
    (130, 300, 512),
]


@pytest.mark.parametrize("kind", ["flat", "alike"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("size", SIZES)
def test_every_scheme(size, scheme, kind):
    make_layer(scheme, *size, kind=kind).check()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("T", [1, 7, 64])
def test_an_absorbed_matrix(T, scheme):
    """Wide enough for the kernels that large weights have; [1536, 65536] is V3's."""
    make_layer(scheme, T, 36000, 384, kind="alike").check()


@pytest.mark.parametrize("size", [*SIZES, (1, 36000, 384), (33, 36000, 256)])
def test_block_has_the_bits_of_the_grouped_projection(size):
    layer = make_layer("block", *size)
    codes, scale = sparse_mla.scaled_quantize(layer.x, group=(1, 128))
    z = sparse_mla.grouped_output_projection(
        np.asarray(codes)[:, None],
        np.asarray(scale)[:, None],
        layer.weight[None],
        layer.descale[None],
    )
    assert_same_bits(np.asarray(layer.run()), np.asarray(z)[:, 0])


@pytest.mark.parametrize("T", [3, 70])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_views(scheme, T):
    """Strided rows and scales, any form of a scale, bytes or e4m3."""
    layer = make_layer(scheme, T, 140, 256)
    want = layer.check()
    wide = np.zeros((T, 280), ref.BF16)
    wide[:, 8:264] = layer.x
    assert_same_bits(Layer(scheme, wide[:, 8:264], layer.weight, layer.descale).check(), want)
    padded = np.zeros((150, 272), np.uint8)
    padded[:140, :256] = layer.weight
    assert_same_bits(Layer(scheme, layer.x, padded[:140, :256], layer.descale).check(), want)
    e4m3 = layer.weight.view(ref.E4M3)
    assert_same_bits(Layer(scheme, layer.x, e4m3, layer.descale).check(), want)
    apart = np.asfortranarray(np.repeat(layer.descale, 2, 0))[::2]
    assert_same_bits(Layer(scheme, layer.x, layer.weight, apart).check(), want)
    if scheme == "token_channel":
        assert_same_bits(Layer(scheme, layer.x, layer.weight, layer.descale[:, 0]).check(), want)
    elif scheme != "block":
        for shape in ((), (1,)):
            value = layer.descale.reshape(shape)
            assert_same_bits(np.asarray(Layer(scheme, layer.x, layer.weight, value).run()), want)


@pytest.mark.parametrize("offset", [1, 8])
def test_any_address(offset):
    """Rows of a weight need no alignment."""
    for T in (5, 70):
        layer = make_layer("token_channel", T, 140, 256)
        raw = np.zeros((140, 272), np.uint8)
        raw[:, offset : offset + 256] = layer.weight
        layer.weight = raw[:, offset : offset + 256]
        layer.check()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_workspace_of_the_caller(scheme):
    layer = make_layer(scheme, 5, 140, 384)
    groups = {"tensor": 1, "block": 15}.get(scheme, 5)
    needed = 5 * 384 + 4 * groups
    want = np.asarray(layer.run())
    memory = np.zeros(needed + 64, np.uint8)
    start = -memory.__array_interface__["data"][0] % 16
    memory[:] = 0x5C
    assert_same_bits(np.asarray(layer.run(workspace=memory[start : start + needed])), want)
    assert (memory[start + needed :] == 0x5C).all()
    assert (memory[:start] == 0x5C).all()
    if not device.ON_CUDA:
        odd = memory[start + 1 : start + 1 + needed + 15]
        assert_same_bits(np.asarray(layer.run(workspace=odd)), want)
    with pytest.raises(ValueError, match=rf"^fp8_linear: `workspace` must have at least {needed}"):
        layer.run(workspace=memory[start : start + needed - 1])


def test_nan_and_infinity_reach_their_own_results_only():
    for T in (4, 70):
        layer = make_layer("token_channel", T, 140, 256)
        layer.x[1, 30] = np.nan
        layer.x[2, 40] = np.inf
        layer.weight[7, 3] = 0x7F
        layer.descale[130] = np.nan
        value, _ = layer.want()
        nan = np.isnan(value)
        assert nan[1].all()
        assert nan.sum() == 140 + 2 * (T - 1)
        got = ref.to_f32(np.asarray(layer.run()))
        assert np.array_equal(np.isnan(got), nan)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_zeros(scheme):
    layer = make_layer(scheme, 6, 140, 256)
    layer.x[:] = 0
    assert (ref.to_f32(layer.check()) == 0).all()


@pytest.mark.parametrize("size", [(0, 40, 256), (3, 0, 256), (3, 40, 0)])
def test_nothing_to_sum_or_to_write(size):
    T, out, k = size
    x, weight = np.zeros((T, k), ref.BF16), np.zeros((out, k), np.uint8)
    for scheme, descale in (
        ("tensor", np.ones(1, F32)),
        ("block", np.ones((-(-out // 128), k // 128), F32)),
        ("token_channel", np.ones(out, F32)),
    ):
        got = sparse_mla.fp8_linear(x, weight, descale, input_group=SCHEMES[scheme][0])
        assert got.shape == (T, out)
        assert (ref.bits16(np.asarray(got)) == 0).all()


def test_what_names_no_scheme():
    layer = make_layer("token_channel", 3, 200, 256)
    cases_of = [
        ((-1, -1), (200, 1), "200, 1"),
        ((1, 128), (200, 1), "200, 1"),
        ((1, -1), (2, 2), "2, 2"),
        ((1, 128), (2, 1), "2, 1"),
        ((-1, 1), (1,), "1"),
        ((1, -1), (1, 200), "1, 200"),
        ((1, 128), (1,), "1"),
    ]
    for group, shape, text in cases_of:
        layer.descale = np.ones(shape, F32)
        with pytest.raises(ValueError) as caught:
            layer.run(input_group=group)
        assert str(caught.value) == (
            "fp8_linear: `descale` must have the form of one of four schemes, with their "
            "`input_group`: tensor, one value and (-1, -1); block, [2, 2] and (1, 128); "
            "token_tensor, one value and (1, -1); token_channel, [200] or [200, 1] and (1, -1), "
            f"got shape [{text}] and ({group[0]}, {group[1]})"
        )


def test_normal_data_keep_their_direction():
    """The error of FP8 layers against the plain product, over all outputs."""
    rng = np.random.default_rng(9)
    x = cases.random_bf16(rng, 16, 1536)
    weight = rng.normal(0, 1, (512, 1536))
    plain = ref.to_f32(x).astype(np.float64) @ weight.T
    for scheme, (group, weight_group) in SCHEMES.items():
        layer = Layer(scheme, x, *quantize_weight(weight, weight_group))
        got = ref.to_f32(np.asarray(layer.run(input_group=group))).astype(np.float64)
        assert np.linalg.norm(got - plain) < 0.05 * np.linalg.norm(plain)


def test_two_runs_give_the_same_bits():
    for T in (1, 33, 200):
        layer = make_layer("token_channel", T, 300, 1024)
        assert_same_bits(np.asarray(layer.run()), np.asarray(layer.run()))
