"""scaled_quantize and dynamic_per_tensor_quant at the borders of their plans, on any number of
threads (csrc/cpu/projection/scaled_quantize.c, quant.c): every byte is NumPy's."""

from __future__ import annotations

import device
import numpy as np
import pytest
import reference as ref
import test_scaled_quantize as scaled
from borders import THREADS, constants, on_threads, sizes_around
from helpers import Guarded, assert_same_bits

import sparse_mla

pytestmark = pytest.mark.skipif(device.ON_CUDA, reason="the borders are those of the CPU's plans")

PLAN = constants("cpu/projection/scaled_quantize.c")
WORTH, PIECE = PLAN["LEAST_SHARED"], PLAN["PIECE"]

# Groups down and across that are fewer, as many and more than the threads.
GRIDS = sorted({grid for n in THREADS for m in sizes_around(n) for grid in ((1, m), (m, 1))})
GRIDS += [(2, 3), (3, 5), (4, 4)]


def large_groups() -> list[tuple[int, int, int, int]]:
    """M, N and a group of it, whose rows are pieces that threads share, or just too small."""
    shapes = [(1, n) for n in sizes_around(WORTH)]
    shapes += [(1 + WORTH // n, n) for n in sizes_around(PLAN["NARROW"], PIECE, 2 * PIECE)]
    found = [(rows, columns, rows, columns) for rows, columns in shapes]
    for width in (WORTH // 4, PLAN["TILE_COLUMNS"] // 4):  # a tile has one such group, or several
        rows = WORTH // width + 1
        found += [(down * rows, across * width, rows, width) for down, across in GRIDS]
    found += [(2 * m, 3 * n, m, n) for m, n in shapes[3:]]
    return found


def small_groups() -> list[tuple[int, int, int, int]]:
    """As many groups as a tile has, one less and one more, of widths beside the borders, in calls
    that are worth several threads."""
    wide = PLAN["TILE_COLUMNS"]
    found = []
    for width in (1, 16, *sizes_around(PLAN["NARROW"], wide), 128):
        most = PLAN["NARROW_COLUMNS"] if width < PLAN["NARROW"] else wide
        for count in sizes_around(max(most // width, 1)):
            columns = count * width
            rows = 3 * (WORTH // (3 * columns) + 1)
            found += [(rows, columns, 1, width), (rows, columns, 3, width)]
    rows = sizes_around(WORTH // 256)  # whether a call is worth several threads
    return found + [(n, 256, 1, 64) for n in rows]


def quantize(cases: list[tuple[int, int, int, int]], dtype: str) -> None:
    """Checks each case, whose results lie between red zones."""
    rng = np.random.default_rng(1)
    for M, N, rows, columns in cases:
        try:
            scaled.check(scaled.cast(scaled.spread(rng, M, N), dtype), (rows, columns))
        except AssertionError as error:
            raise AssertionError(f"[{M}, {N}] in groups of ({rows}, {columns}): {error}") from error


@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize("groups", [large_groups, small_groups])
def test_groups(groups, num_threads):
    on_threads(num_threads, quantize, groups(), "bf16")


def quantize_tensors(shapes: list[tuple[int, ...]]) -> None:
    """Tensors whose largest value is the first or the last one, contiguous and apart."""
    rng = np.random.default_rng(2)
    for shape in shapes:
        for largest in (0, -1):
            x = rng.standard_normal((*shape[:-1], shape[-1] + 3)).astype(np.float32)
            x = ref.to_bf16(x)[..., : shape[-1]]
            x[(largest,) * x.ndim] = -1000
            codes, want_scale = ref.dynamic_per_tensor_quant(x)
            for given in (x, np.ascontiguousarray(x)):
                out = Guarded(shape, np.uint8, row_gap=5)
                _, scale = sparse_mla.dynamic_per_tensor_quant(given, out=out.array)
                assert np.asarray(scale).reshape(()) == want_scale
                assert_same_bits(out.check(written=False), codes, f"{shape}")


@pytest.mark.parametrize("num_threads", THREADS)
def test_tensors(num_threads):
    worth = 1 << 14
    shapes = [(1, n) for n in sizes_around(PIECE, 2 * PIECE, worth)]
    shapes += [(3, n) for n in sizes_around(PIECE, worth // 3)] + [(n, 64) for n in (255, 256, 257)]
    on_threads(num_threads, quantize_tensors, shapes)
