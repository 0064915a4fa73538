"""scaled_quantize (csrc/cpu/projection/scaled_quantize.c, csrc/cuda/projection)."""

from __future__ import annotations

import cases
import numpy as np
import pytest
import reference as ref
from helpers import Guarded, assert_same_bits
from library import sparse_mla

F32 = np.float32
DTYPES = {"bf16": ref.to_bf16, "fp16": np.float16, "fp32": F32}


def check(x: np.ndarray, group: tuple[int, int], *, descale: np.ndarray | None = None) -> None:
    """Quantises into guarded memory, and compares every byte with NumPy's."""
    want, want_descale = ref.scaled_quantize(x, group)
    out = Guarded(x.shape, np.dtype(np.uint8), row_gap=16)
    if descale is None:
        buffer = Guarded(want_descale.shape, np.dtype(F32), row_gap=3)
        descale = buffer.array
    got = sparse_mla.scaled_quantize(x, group=group, out=out.array, descale=descale)
    assert got[0] is out.array
    assert got[1] is descale
    assert_same_bits(out.check(written=False), want)  # the poison is a code, too
    assert_same_bits(np.ascontiguousarray(descale), want_descale)


def cast(x: np.ndarray, dtype: str) -> np.ndarray:
    return DTYPES[dtype](x.astype(F32))


def spread(rng, *shape: int) -> np.ndarray:
    """Rows of all magnitudes that fp16 has, with zeros among the values."""
    x = rng.standard_t(1.5, shape) * np.exp2(rng.integers(-12, 8, (shape[0], 1)))
    x[rng.random(shape) < 0.05] = 0
    return x.clip(-60000, 60000)


# --- vectors of the contract ---------------------------------------------------------------------


def test_vectors():
    x = np.array([[1, -2], [0, 0.5]], F32)
    out, descale = sparse_mla.scaled_quantize(x, group=(-1, -1))
    assert np.asarray(out).view(np.uint8).tolist() == [[0x76, 0xFE], [0x00, 0x6E]]
    assert np.asarray(descale).round(8).tolist() == [[F32(0.00446429)]]
    values = ref.e4m3_decode(np.asarray(out)).astype(np.float64) * np.asarray(descale, np.float64)
    assert_same_bits(values.astype(F32), x)
    out, descale = sparse_mla.scaled_quantize(x, group=(-1, 1))
    assert ref.e4m3_decode(np.asarray(out)).tolist() == [[448, -448], [0, 112]]
    assert np.abs(np.asarray(descale) - [[0.00223214, 0.00446429]]).max() < 5e-9
    out, descale = sparse_mla.scaled_quantize(np.zeros((2, 4), F32), group=(1, 2))
    assert (np.asarray(out).view(np.uint8) == 0).all()
    assert (np.asarray(descale) == F32(1e-12) / F32(448)).all()


# --- every group ---------------------------------------------------------------------------------

# M, N, and groups of it
GROUPS = [
    (1, 128, [(1, 128), (1, -1), (-1, -1), (1, 1), (1, 64), (-1, 1)]),
    (6, 384, [(1, 128), (1, -1), (-1, -1), (-1, 1), (2, 96), (3, 1), (6, 4), (2, 32), (1, 16)]),
    (256, 512, [(128, 128), (1, 128), (1, -1), (-1, -1), (-1, 1), (64, 8), (128, -1), (-1, 128)]),
    (7, 77, [(1, -1), (-1, -1), (-1, 1), (7, 7), (1, 11), (1, 1), (1, 7)]),
    (3, 9000, [(1, -1), (-1, -1), (1, 4500), (3, 40), (-1, 1)]),
    (515, 33, [(1, -1), (-1, -1), (-1, 1), (5, 11), (103, 3), (1, 1)]),
    (300, 1, [(1, 1), (-1, 1), (-1, -1), (1, -1), (20, 1)]),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("M", "N", "groups"), GROUPS)
def test_every_group(M, N, groups, dtype):
    rng = np.random.default_rng(M + N)
    for group in groups:
        check(cast(spread(rng, M, N), dtype), group)


def test_a_million_values():
    """As many bytes as the contract asks of both devices, in the groups of the schemes."""
    rng = np.random.default_rng(1)
    x = cast(spread(rng, 512, 2048), "bf16")
    for group in ((1, 128), (1, -1), (-1, -1), (128, 128), (-1, 1)):
        check(x, group)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [(1, 128), (1, -1), (-1, -1), (128, 128), (-1, 1), (4, 2)])
def test_nan_infinity_and_tiny_values(group, dtype):
    rng = np.random.default_rng(2)
    x = rng.normal(0, 1, (128, 256)).astype(F32)
    x[3] = 0
    x[4] = -0.0
    x[5, ::3] = 1e-13
    x[6] *= F32(1e-38)
    x[7, 5], x[8, 130] = np.nan, -np.nan
    x[9, :128] = np.nan
    x[20, 40], x[21, 200] = np.inf, -np.inf
    if dtype != "fp16":
        x[22, 7] = 3e38
    with np.errstate(over="ignore"):
        x = cast(x, dtype)
    x.view(np.uint16)[9, ::2] |= 0x8000  # NaN of both signs, for the types of two bytes
    check(x, group)


# --- views ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [(1, 128), (1, -1), (-1, -1), (2, 128), (-1, 1), (3, 5)])
def test_rows_any_distance_apart(group):
    rng = np.random.default_rng(3)
    N = 640
    for offset, gap in ((0, 8), (1, 3), (3, 16)):
        wide = cast(rng.normal(0, 1, (6, offset + N + gap)), "bf16")
        check(wide[:, offset : offset + N], group)
    rows = cast(rng.normal(0, 1, (6, N)), "bf16")
    check(rows[::-1], group)
    check(rows[[0]].repeat(6, 0), group)
    check(np.broadcast_to(rows[:1], rows.shape), group)


@pytest.mark.parametrize("group", [(1, 128), (128, 128), (-1, 1), (1, -1)])
def test_descale_of_any_strides(group):
    """Its transpose, as weights that are stored transposed have it, and columns with gaps."""
    rng = np.random.default_rng(4)
    x = cast(rng.normal(0, 1, (256, 384)), "bf16")
    m, n = ref.scaled_quantize(x, group)[1].shape
    check(x, group, descale=np.zeros((n, m), F32).T)
    check(x, group, descale=np.zeros((m + 2, 3 * n), F32)[1 : m + 1, ::3])


def test_results_are_new_arrays():
    x = cases.random_bf16(np.random.default_rng(5), 4, 256)
    out, descale = sparse_mla.scaled_quantize(x, group=(2, 64))
    assert (type(out), out.dtype, out.shape) == (np.ndarray, ref.E4M3, (4, 256))
    assert (type(descale), descale.dtype, descale.shape) == (np.ndarray, F32, (2, 4))
    bytes_out = np.zeros((4, 256), np.uint8)
    assert sparse_mla.scaled_quantize(x, group=(2, 64), out=bytes_out)[0] is bytes_out
    assert_same_bits(bytes_out, np.asarray(out).view(np.uint8))


@pytest.mark.parametrize(
    ("shape", "group", "groups"),
    [
        ((0, 256), (1, 128), (0, 2)),
        ((0, 256), (-1, 128), (1, 2)),
        ((3, 0), (1, -1), (3, 1)),
        ((3, 0), (1, 128), (3, 0)),
        ((0, 0), (-1, -1), (1, 1)),
    ],
)
def test_groups_without_values(shape, group, groups):
    """A whole axis is one group, even if it is empty; its scale is that of zeros."""
    out, descale = sparse_mla.scaled_quantize(np.zeros(shape, F32), group=group)
    assert (out.shape, descale.shape) == (shape, groups)
    assert (np.asarray(descale) == F32(1e-12) / F32(448)).all()


def test_two_groups_say_nothing_of_each_other():
    rng = np.random.default_rng(6)
    x = cast(rng.normal(0, 1, (8, 512)), "bf16")
    whole, scales = sparse_mla.scaled_quantize(x, group=(4, 128))
    for i in range(2):
        for j in range(4):
            part = x[4 * i : 4 * i + 4, 128 * j : 128 * j + 128]
            out, descale = sparse_mla.scaled_quantize(part, group=(-1, -1))
            assert_same_bits(out, np.asarray(whole)[4 * i : 4 * i + 4, 128 * j : 128 * j + 128])
            assert_same_bits(descale, np.asarray(scales)[i : i + 1, j : j + 1])
