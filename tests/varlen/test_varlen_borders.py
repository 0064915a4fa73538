"""varlen_attention and the merges at the borders of their plans, on any number of threads
(csrc/cpu/attention)."""

from __future__ import annotations

import device
import numpy as np
import pytest
import test_merge as states
import test_merge_partials as partials
from borders import THREADS, constants, on_any_threads, sizes_around
from dense_cases import Mask
from helpers import assert_within_bounds
from varlen_cases import Varlen

import sparse_mla

pytestmark = pytest.mark.skipif(device.ON_CUDA, reason="the borders are those of the CPU's plans")

PLAN = constants("cpu/attention/mha.c")
ROWS, TILES = PLAN["SMLA_MHA_ROWS"], PLAN["TILES_PER_THREAD"]
BLOCKS = [constants(f"cpu/attention/mha_unit_{unit}.h")["BLOCK_KEYS"] for unit in ("fp32", "bf16")]
KERNEL = constants("cpu/attention/mha_kernel.c")
MOST_PARTS = constants("cpu/attention/merge.c")["SMLA_MAX_PARTS"]
CAUSAL = Mask(causal=True)


# --- varlen_attention ----------------------------------------------------------------------------


def run(case: Varlen) -> dict[str, np.ndarray]:
    return case.run(sparse_mla.varlen_attention)


def check(*fields, **more) -> None:
    case = Varlen(*fields, **more)
    assert_within_bounds(case.reference(), on_any_threads(run, case))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 2)])
def test_rows_of_tiles(heads, kv_heads):
    """Requests whose rows fill tiles of either size, with one query less or more, beside empty and
    short ones."""
    group = heads // kv_heads
    for queries in sizes_around(ROWS // 2 // group, ROWS // group):
        lens = [3, queries, 0, 1]
        check(lens, [40, 50, 7, 9], heads, kv_heads, (32, 16), mask=Mask(window=(9, 3)))


@pytest.mark.parametrize("heads", [1, 3])
def test_as_many_tiles_as_threads_want(heads):
    """Requests of one tile each: fewer, as many and more than make tiles of the larger size."""
    counts = {n // heads for threads in THREADS for n in sizes_around(TILES * threads, least=heads)}
    for count in sorted(counts):
        check([2] * count, [3] * count, heads, heads, (16, 8), mask=CAUSAL)
        check([1] * (count - 1) + [300], [5] * count, heads, heads, (16, 8), mask=CAUSAL)


@pytest.mark.parametrize("q_type", ["bf16", "fp16"])
def test_keys_of_blocks(q_type):
    for keys in sizes_around(KERNEL["KEYS_AHEAD"], *BLOCKS, 2 * BLOCKS[-1]):
        lens = [keys, 1, keys + 1]
        check([2, 1, 5], lens, 2, 2, (64, 32), q_type=q_type, kv_type=q_type, mask=CAUSAL)


def test_as_many_keys_as_a_state_takes():
    for keys in sizes_around(KERNEL["STATE_KEYS"]):
        check([2], [keys], 1, 1, (16, 8), std=0.3)


def test_padded_dimensions():
    pad = constants("cpu/attention/mha.h")["SMLA_MHA_PAD"]
    for dim, value_dim in ((pad, pad), (pad - 8, pad + 8), (pad + 8, pad - 8), (2 * pad + 8, 8)):
        check([5, 30], [70, 30], 3, 1, (dim, value_dim), mask=CAUSAL)


# --- merges --------------------------------------------------------------------------------------


def merge_parts(num_parts: int, shape: tuple[int, int], width: int) -> dict[str, np.ndarray]:
    outs, lses = partials.make_parts(partials.DTYPES["bf16"], num_parts, shape, width)
    lses[0, ::2], lses[-1, 1::3] = -np.inf, np.inf
    sink = np.linspace(-3, 3, shape[1]).astype(np.float32)
    out, lse = partials.check(outs, lses, sink, row_gap=8)
    return {"out": out, "lse": lse}


@pytest.mark.parametrize("rows", sizes_around(64))
def test_rows_that_are_worth_threads(rows):
    """As many rows as several threads merge, one less and one more; of few parts and the most."""
    heads = next(n for n in (5, 3, 1) if rows % n == 0)
    for num_parts in (1, *sizes_around(2, MOST_PARTS, most=MOST_PARTS)):
        on_any_threads(merge_parts, num_parts, (rows // heads, heads), 24)


def merge_some(tokens: int, merged: int) -> dict[str, np.ndarray]:
    """Tokens behind the first `merged` ones have no first part."""
    state = states.states(np.dtype(np.float32), (tokens, 5))
    out, lse = states.check(*state, row_gap=8, prefill_tokens_with_context=merged)
    return {"out": out, "lse": lse}


def test_tokens_without_a_first_part():
    for tokens in (2, 13, 40):
        for merged in sizes_around(0, 1, tokens // 2, tokens, least=0, most=tokens):
            on_any_threads(merge_some, tokens, merged)
