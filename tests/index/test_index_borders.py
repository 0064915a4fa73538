"""Index lists at the borders of how threads divide them, on any number of threads, and of the
widths that lists are rounded to (csrc/cpu/index)."""

from __future__ import annotations

import device
import index_lists as lists
import numpy as np
import pytest
import reference as ref
import reference_index
import test_index
from borders import constants, on_any_threads, sizes_around

import sparse_mla

pytestmark = pytest.mark.skipif(device.ON_CUDA, reason="the borders are those of the CPU's plans")

WORTH = constants("cpu/index/index_lists.c")["MIN_PARALLEL_ENTRIES"]
ALIGN = constants("step/plans/plan_v4.h")["SMLA_V4_LIST_ALIGN"]
BLOCK = 64  # rows of a page


def around_worth(width: int) -> list[int]:
    """Tokens whose lists are worth several threads together, and one token less."""
    return [WORTH // width - 1, -(-WORTH // width), WORTH // width + 1]


def convert(T: int, K: int) -> dict[str, np.ndarray]:
    requests, table, topk = test_index.inputs(T=T, K=K, R=9, block_size=BLOCK)
    out, counts = sparse_mla.convert_req_index_to_global_index(
        requests, table, topk, block_size=BLOCK, valid_counts=True
    )
    return {"out": np.asarray(out), "counts": np.asarray(counts)}


@pytest.mark.parametrize("K", sizes_around(BLOCK, 4 * BLOCK))
def test_positions(K):
    for T in around_worth(K):
        got = on_any_threads(convert, T, K)
        requests, table, topk = test_index.inputs(T=T, K=K, R=9, block_size=BLOCK)
        want, counts = ref.convert_req_index_to_global_index(
            requests, table, topk, block_size=BLOCK
        )
        assert np.array_equal(got["out"], want)
        assert np.array_equal(got["counts"], counts)


def topk_inputs(T: int, K: int) -> tuple:
    rng = np.random.default_rng([T, K])
    table = rng.integers(-1, 1000, (5, 7)).astype(np.int32)
    ids = rng.integers(0, 5, T).astype(np.int32)
    return lists.positions(rng, T, K, 7 * BLOCK), ids, table, BLOCK, None


def combine_inputs(num_reqs: int, topk: int, window: int) -> tuple:
    rng = np.random.default_rng([num_reqs, topk, window])
    batch = lists.make_batch(rng, decodes=0, prefills=num_reqs)
    rows = lists.positions(rng, batch.num_tokens, topk, 190)
    lens = lists.gathered(batch, window)
    return rows, batch.query_start_loc, batch.seq_lens, lens, window, 4, topk, 900, 190


def mixed_inputs(num_reqs: int, topk: int, window: int) -> tuple:
    rng = np.random.default_rng([num_reqs, topk, window])
    batch = lists.make_batch(rng, decodes=num_reqs // 2, prefills=num_reqs // 2)
    return lists.mixed_arguments(
        rng, batch, window=window, ratio=4, topk=topk, decode_topk=topk, local=False
    )


INPUTS = {lists.GLOBAL: topk_inputs, lists.COMBINE: combine_inputs, lists.MIXED: mixed_inputs}


def run(op: str, *sizes: int) -> dict[str, np.ndarray]:
    out, lens = getattr(sparse_mla, op)(*INPUTS[op](*sizes))
    return {"out": np.asarray(out), "lens": np.asarray(lens)}


def check(op: str, *sizes: int) -> None:
    got = on_any_threads(run, op, *sizes)
    want, lens = getattr(reference_index, op)(*INPUTS[op](*sizes))
    assert np.array_equal(got["out"], want)
    assert np.array_equal(got["lens"], lens)


@pytest.mark.parametrize("T", around_worth(512))
def test_slots_of_top_k(T):
    check(lists.GLOBAL, T, 512)


@pytest.mark.parametrize("op", [lists.COMBINE, lists.MIXED])
def test_batches_that_are_worth_threads(op):
    for num_reqs in (2, 12, 24):
        check(op, num_reqs, 300, 100)


@pytest.mark.parametrize("op", [lists.COMBINE, lists.MIXED])
@pytest.mark.parametrize("width", sizes_around(ALIGN // 2, ALIGN, 3 * ALIGN // 2, 2 * ALIGN))
def test_widths(op, width):
    """topk + window is as wide as a list is rounded to, one less and one more."""
    for window in (1, 5, width - 8):
        if window > 0:
            lists.check(op, *INPUTS[op](6, width - window, window))
