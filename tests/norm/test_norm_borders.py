"""Norms and what follows them at the borders of how threads divide them, on any number of threads
(csrc/cpu/norm): every byte."""

from __future__ import annotations

import device
import pytest
import test_norm
import test_qnorm_insert as qnorm
from borders import THREADS, constants, on_threads, sizes_around

pytestmark = pytest.mark.skipif(device.ON_CUDA, reason="the borders are those of the CPU's plans")

ROWS = constants("cpu/norm/norm.c")["PARALLEL_ROWS"]
HEADS = constants("cpu/norm/qnorm_insert.c")["PARALLEL_HEADS"]
TOKENS = constants("cpu/cache/slot_shares.h")["PARALLEL_WRITE_TOKENS"]
LONG = constants("cpu/cache/slot_shares.h")["LONG_WRITE_ROWS"]
SUMS = constants("cpu/norm/norm.h")["SMLA_NORM_SUMS"]


def normalize(shapes: list[tuple[int, int]]) -> None:
    for T, size in shapes:
        q, kv = test_norm.rows(T, size, shift=size % 3)
        test_norm.check_norm(q, kv, *(test_norm.weights(n, "fp32") for n in (size, 512)), row_gap=8)


@pytest.mark.parametrize("num_threads", THREADS)
def test_norms(num_threads):
    shapes = [(T, 40) for T in sizes_around(ROWS)]
    shapes += [(3, size) for size in sizes_around(SUMS, 2 * SUMS, 8, 32)]
    on_threads(num_threads, normalize, shapes)


def insert(shapes: list[tuple[int, int]], layout: str) -> None:
    for T, H in shapes:
        qnorm.check_all(qnorm.Case(T, H, layout=layout))


@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize("layout", ["paged", "bytes"])
def test_queries_and_inserts(layout, num_threads):
    shapes = [(n // h, h) for n in sizes_around(HEADS) for h in (1, 7, n) if n % h == 0]
    shapes += [(T, 2) for T in sizes_around(TOKENS)]
    on_threads(num_threads, insert, shapes, layout)


def insert_many(T: int) -> None:
    qnorm.Case(T, 1).check()


@pytest.mark.parametrize("num_threads", [2, 7])
def test_long_inserts(num_threads):
    for T in sizes_around(LONG * num_threads):
        on_threads(num_threads, insert_many, T)
