"""top_k_per_row at the borders of its plan, on any number of threads (csrc/cpu/topk)."""

from __future__ import annotations

import device
import numpy as np
import pytest
import test_top_k as top_k
from borders import THREADS, constants, on_threads, sizes_around
from helpers import Guarded, assert_same_bits

import sparse_mla

pytestmark = pytest.mark.skipif(device.ON_CUDA, reason="the borders are those of the CPU's plans")

PLAN = constants("cpu/topk/top_k.c")
CHUNK, MOST_CHUNKS = PLAN["MIN_CHUNK"], PLAN["MAX_CHUNKS"]
CANDIDATES = PLAN["SMLA_MAX_CANDIDATES"]
BLOCK = constants("cpu/topk/select_kernel.c")["BLOCK"]


# --- rows that threads share ---------------------------------------------------------------------


def chunk_borders(count: int) -> np.ndarray:
    """The first and the last columns of the chunks of a row."""
    num_chunks = min(count // CHUNK, MOST_CHUNKS) or 1
    first = np.arange(num_chunks) * -(-count // num_chunks)
    return np.unique(np.concatenate([first, first[1:] - 1, [count - 2, count - 1]]))


def share_rows(counts: list[int], dtype: str) -> None:
    """Rows of three values: few columns of 2, more of 1, some of them at the borders of chunks, and
    the rest 0. Each k ends in front of a tie, at it or behind it, down to the row's last column."""
    rng = np.random.default_rng(1)
    start, width = 5, max(counts) + 9
    ends = np.array([start + n for n in counts], np.int32)
    logits = np.full((len(counts), width), 3, top_k.DTYPES[dtype == "bf16"])  # outside of the rows
    order = []
    for row, count in zip(logits, counts, strict=True):
        ties = np.union1d(chunk_borders(count), rng.integers(0, count, 40))
        above = np.setdiff1d(rng.integers(0, count, 7), ties)
        row[start : start + count] = 0
        row[start + ties], row[start + above] = 1, 2
        rest = np.setdiff1d(np.arange(min(count, 200)), np.union1d(ties, above))
        order.append((above, ties, rest))
    num_above, num_ties = (min(len(x[i]) for x in order) for i in (0, 1))
    starts = np.full(len(counts), start, np.int32)
    for k in (1, num_above + 1, *(num_above + x for x in sizes_around(num_ties)), 100):
        want = np.stack([np.sort(np.concatenate(x)[:k]) for x in order]).astype(np.int32)
        out, values = Guarded(want.shape, np.int32, row_gap=3), Guarded(want.shape, logits.dtype)
        arrays = {"out": out.array, "values": values.array}
        sparse_mla.top_k_per_row(logits, starts, ends, k=k, **arrays)
        assert_same_bits(out.check(), want, f"k {k} of {counts}")
        chosen = np.take_along_axis(logits, want + start, 1)
        assert_same_bits(values.check(), chosen, f"values of k {k} of {counts}")


@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_one_row_in_chunks(dtype, num_threads):
    """As many columns as whole chunks have, and those beside."""
    for count in sizes_around(CHUNK, 2 * CHUNK, 3 * CHUNK, 7 * CHUNK):
        on_threads(num_threads, share_rows, [count], dtype)


@pytest.mark.parametrize("num_threads", THREADS)
def test_a_row_of_most_chunks(num_threads):
    counts = [n * CHUNK + step for n in (MOST_CHUNKS, MOST_CHUNKS + 1) for step in (-1, 0, 1)]
    for count in counts:
        on_threads(num_threads, share_rows, [count], "bf16")


@pytest.mark.parametrize("num_threads", THREADS)
def test_rows_of_any_lengths(num_threads):
    """One row less than there are threads, as many and one more; long rows among short ones."""
    lengths = [2 * CHUNK + 1, 300, 2 * CHUNK - 1, CHUNK, 3 * CHUNK, 5000]
    for count in sizes_around(2, num_threads):
        on_threads(num_threads, share_rows, (lengths * 3)[:count], "fp32")


# --- other rows ----------------------------------------------------------------------------------


def choose(shapes: list[tuple[int, int, int]], kind: str) -> None:
    for rows, columns, k in shapes:
        logits = top_k.make(kind, np.float32, rows, columns)
        top_k.check(logits, *top_k.whole(logits), k)


@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize("kind", ["few distinct", "random", "constant"])
def test_rows_for_several_threads(kind, num_threads):
    """Calls that are just worth several threads, or just not; as many rows as threads."""
    shapes = [(1, n, 9) for n in sizes_around(PLAN["MIN_PARALLEL_LOGITS"])]
    for rows in sizes_around(2, num_threads):
        columns = sizes_around(PLAN["MIN_PARALLEL_LOGITS"] // rows)
        shapes += [(rows, n, k) for n in columns for k in (1, n - 1)]
    on_threads(num_threads, choose, shapes, kind)


@pytest.mark.parametrize("kind", ["few distinct", "random", "constant"])
def test_blocks_of_columns(kind):
    columns = sizes_around(BLOCK, 2 * BLOCK)
    choose([(2, n, k) for n in columns for k in sizes_around(1, n // 2, n)], kind)


def test_as_many_candidates_as_fit():
    """Columns whose first digits are equal are listed, if they are few enough."""
    rng = np.random.default_rng(2)
    for count in sizes_around(CANDIDATES - BLOCK, CANDIDATES):
        logits = np.zeros((1, CANDIDATES + 3 * BLOCK), np.float32)
        first_digit = 0x3F800000 + rng.integers(0, 1 << 20, count)
        places = rng.permutation(logits.shape[1])[:count]
        logits[0, np.sort(places)] = first_digit.astype(np.uint32).view(np.float32)
        for k in (1, count // 2, count - 1, count, count + 1):
            top_k.check(logits, *top_k.whole(logits), k)


@pytest.mark.parametrize("isa", top_k.ISAS)
@pytest.mark.parametrize(
    "kind", ["constant", "two values", "few distinct", "nearly all NaN", "equal in 22 bits"]
)
def test_equal_keys(kind, isa, monkeypatch):
    """Keys that are equal, or of which a few are not, are counted together, listed or not."""
    monkeypatch.setenv("SPARSE_MLA_CPU_ISA", isa)
    for columns in (CANDIDATES // 2, CANDIDATES + 3 * BLOCK, CANDIDATES + 3 * BLOCK + 1):
        choose([(2, columns, k) for k in (1, BLOCK, columns // 2, columns - 1)], kind)
        logits = top_k.make(kind, np.float32, 2, columns)
        logits[0, 5], logits[1, -1] = 1.0000002, -3.4999998  # one key differs in its last digit
        for k in (1, columns // 3, columns - 1):
            top_k.check(logits, *top_k.whole(logits), k)
