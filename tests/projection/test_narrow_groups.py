"""scaled_quantize of narrow groups and dynamic_per_tensor_quant of short rows, with the vectors of
each instruction set (csrc/cpu/cache/cache_kernel.c): every byte is NumPy's."""

from __future__ import annotations

import device
import numpy as np
import pytest
import reference as ref
import test_scaled_quantize as scaled
from borders import constants
from helpers import Guarded, assert_same_bits
from library import ISAS

import sparse_mla

pytestmark = pytest.mark.skipif(device.ON_CUDA, reason="instruction sets are the CPU's")

PLAN = constants("cpu/projection/scaled_quantize.c")
NARROW, ROOM = PLAN["NARROW"], PLAN["NARROW_COLUMNS"]
SHORT_ROW = constants("cpu/projection/quant.c")["SHORT_ROW"]


def values(rows: int, columns: int, gap: int, dtype: str) -> np.ndarray:
    """Rows that are `gap` values apart, among which are NaN and infinities."""
    rng = np.random.default_rng((rows, columns, gap))
    x = scaled.cast(scaled.spread(rng, rows, columns + gap), dtype)
    x[rng.random(x.shape) < 0.02] = np.nan
    x[rng.random(x.shape) < 0.01] = -np.inf
    return x[:, :columns]


def check(x: np.ndarray, group: tuple[int, int], gap: int, *, is_transposed: bool = False) -> None:
    """Results lie between red zones, `gap` elements apart."""
    want, want_descale = ref.scaled_quantize(x, group)
    out = Guarded(x.shape, np.dtype(np.uint8), row_gap=gap)
    m, n = want_descale.shape
    descale = Guarded((n, m) if is_transposed else (m, n), np.dtype(np.float32), row_gap=gap)
    given = descale.array.T if is_transposed else descale.array
    sparse_mla.scaled_quantize(x, group=group, out=out.array, descale=given)
    name = f"{x.shape} in groups of {group}, {gap} apart"
    assert_same_bits(out.check(written=False), want, name)  # the poison is a code, too
    descale.check()
    assert_same_bits(np.ascontiguousarray(given), want_descale, name)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", scaled.DTYPES)
def test_every_width(monkeypatch, dtype, isa):
    """One group, some, and more than a tile has; rows that follow each other, or are apart."""
    monkeypatch.setenv("SPARSE_MLA_CPU_ISA", isa)
    for width in range(1, NARROW + 2):
        for count in (1, 3, ROOM // width + 1):
            for gap in (0, 1):
                check(values(5, count * width, gap, dtype), (1, width), gap)
        check(values(6, 3 * width, 0, dtype), (3, width), 0)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_short_rows(monkeypatch, is_transposed, isa):
    """More rows than are copied together, down to a column, whose groups may have several rows."""
    monkeypatch.setenv("SPARSE_MLA_CPU_ISA", isa)
    for rows, columns, group in (
        (2060, 1, (1, 1)),
        (2060, 1, (10, 1)),
        (2060, 1, (-1, 1)),
        (1040, 2, (1, 1)),
        (520, 6, (1, 3)),
        (520, 6, (1, 6)),
        (5, 512, (1, 8)),
        (5, 520, (1, 8)),
    ):
        for gap in (0, 1, 3):
            x = values(rows, columns, gap, "bf16")
            check(x, group, gap, is_transposed=is_transposed)
    descale = np.asarray(sparse_mla.scaled_quantize(values(0, 1, 0, "bf16"), group=(-1, 1))[1])
    assert (descale == np.float32(1e-12) / np.float32(448)).all()  # a column without values


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", scaled.DTYPES)
def test_short_rows_of_a_tensor(monkeypatch, dtype, isa):
    """Both arrays have gaps, or one of them; rows may be columns of another array."""
    monkeypatch.setenv("SPARSE_MLA_CPU_ISA", isa)
    for columns in (*range(1, 20), 31, 33, SHORT_ROW - 1, SHORT_ROW, SHORT_ROW + 1):
        for gap, out_gap in ((1, 1), (0, 2), (3, 0)):
            x = scaled.spread(np.random.default_rng(columns), 2100 // columns, columns + gap)
            x = scaled.cast(x, dtype)[:, :columns]
            for given in (x, x.T, x[: len(x) // 3 * 3].reshape(3, -1, columns)):
                out = Guarded(given.shape, np.dtype(np.uint8), row_gap=out_gap)
                codes, want = ref.dynamic_per_tensor_quant(given)
                _, scale = sparse_mla.dynamic_per_tensor_quant(given, out=out.array)
                assert_same_bits(out.check(written=False), codes, f"{given.shape}, {gap}")
                assert_same_bits(np.asarray(scale), np.asarray(want))
