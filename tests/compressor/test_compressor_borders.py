"""save_partial_states and compress_norm_rope_store at the borders of how threads divide them, on
any number of threads (csrc/cpu/compressor)."""

from __future__ import annotations

import compressor_steps as steps
import device
import numpy as np
import pytest
import reference as ref
import reference_compressor as compressor
from borders import THREADS, constants, on_threads, sizes_around
from helpers import assert_same_bits
from library import sparse_mla

pytestmark = pytest.mark.skipif(device.ON_CUDA, reason="the borders are those of the CPU's plans")

PLAN = constants("cpu/compressor/compressor.c")
WORTH, LONG = PLAN["PARALLEL_WRITE_TOKENS"], PLAN["LONG_WRITE_ROWS"]
POOL = PLAN["SMLA_POOL_ROWS"]


def check(requests, **options) -> None:
    steps.check_both(requests, padding=0, **options)


@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize("layout", ["paged", "padded", "bytes"])
def test_tokens_that_are_worth_threads(layout, num_threads):
    for count in sizes_around(WORTH):
        for ratio in (4, 2):
            requests = ((0, count - 20), (7, 19), (3, 1))
            on_threads(num_threads, check_layout, requests, ratio, layout)


def check_layout(requests, ratio: int, layout: str) -> None:
    check(requests, ratio=ratio, fmt="fp8_v4", layout=layout, sbs=8)


def check_ratio(ratio: int, fmt: str, sbs: int) -> None:
    """Groups that begin inside a page, at its first and at its last position."""
    n = 2 * ratio + WORTH
    check(((0, n), (ratio - 1, 1), (sbs - 1, ratio + 1)), ratio=ratio, fmt=fmt, sbs=sbs)


@pytest.mark.parametrize("num_threads", THREADS)
def test_states_of_groups(num_threads):
    """As many states as are pooled at a time, one less and one more."""
    for ratio in (*sizes_around(POOL // 2, POOL, 2 * POOL), 128):
        for sbs in (ratio, 5):
            on_threads(num_threads, check_ratio, ratio, "fp8_index", sbs)


def save(count: int, num_threads: int) -> None:
    """States of a long write: in ranges of tokens, and by slots where two ranges share one."""
    rng = np.random.default_rng(1)
    ratio, width, sbs = 4, 2 * 128, 16
    pages = count // sbs + 2
    kv, score = (ref.to_bf16(rng.normal(0, 1, (count, width))) for _ in range(2))
    ape = rng.normal(0, 1, (ratio, width)).astype(np.float32)
    positions = rng.integers(0, 1000, count)
    border = count // max(num_threads, 2)
    rows = compressor.state_rows(kv, score, ape, positions)
    for a, b in ((None, None), (border - 1, border), (0, count - 1), (count - 1, 0)):
        slots = rng.permutation(pages * sbs)[:count]
        if a is not None:
            slots[a] = slots[b]
        state = np.full((pages, sbs, 2 * width), 7, np.float32)
        sparse_mla.save_partial_states(kv, score, ape, positions, state, slots)
        want = np.full((pages * sbs, 2 * width), 7, np.float32)
        keep = slots.copy()
        if a is not None:
            keep[min(a, b)] = -1
        want[keep[keep >= 0]] = rows[keep >= 0]
        assert_same_bits(state.reshape(want.shape), want, f"{count} tokens, {a} like {b}")


@pytest.mark.parametrize("num_threads", THREADS)
def test_long_writes_of_states(num_threads):
    for count in sizes_around(LONG * num_threads):
        on_threads(num_threads, save, count, num_threads)


def test_groups_of_one_position():
    """The least ratio there is."""
    rng = np.random.default_rng(2)
    kv, score = (rng.normal(0, 1, (3, 128)).astype(np.float32) for _ in range(2))
    ape = rng.normal(0, 1, (1, 128)).astype(np.float32)
    positions = np.array([0, 5, 6])
    state = np.zeros((1, 4, 256), np.float32)
    sparse_mla.save_partial_states(kv, score, ape, positions, state, np.array([3, 0, 1]))
    rows = compressor.state_rows(kv, score, ape, positions)
    assert_same_bits(state[0, [3, 0, 1]], rows, "ratio 1")
