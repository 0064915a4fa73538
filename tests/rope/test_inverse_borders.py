"""fused_inv_rope_fp8_quant at the borders of how threads divide its rows, on any number of threads
(csrc/cpu/rope/rope.c): every byte."""

from __future__ import annotations

import device
import pytest
from borders import THREADS, constants, on_threads, sizes_around
from cases import angles
from test_inverse_rope import attended, check_inverse, places

pytestmark = pytest.mark.skipif(device.ON_CUDA, reason="the borders are those of the CPU's plans")

INVERSE_ROWS = constants("cpu/rope/rope.c")["PARALLEL_ROWS"]
FETCHED = constants("cpu/rope/rope.c")["FETCHED_ROWS"]


def turn_back(shapes: list[tuple[int, int, int]]) -> None:
    for T, H, groups in shapes:
        check_inverse(attended(T, H), places(T), angles(), groups)


@pytest.mark.parametrize("num_threads", THREADS)
def test_inverse_rope(num_threads):
    rows = sizes_around(INVERSE_ROWS, FETCHED)
    shapes = [(n // h, h, g) for n in rows for h, g in ((1, 1), (3, 3), (n, 1)) if n % h == 0]
    on_threads(num_threads, turn_back, shapes)
