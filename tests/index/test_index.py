"""convert_req_index_to_global_index, compared exactly (csrc/cpu/index/index.c)."""

import numpy as np
import pytest
import reference as ref
from helpers import Guarded, assert_same_bits
from library import sparse_mla

pytestmark = pytest.mark.frameworks

OP = "convert_req_index_to_global_index"


def inputs(T=9, R=4, W=5, K=13, block_size=16, seed=0):
    rng = np.random.default_rng(seed)
    requests = np.sort(rng.integers(0, R, T)).astype(np.int32)
    table = rng.integers(0, 1000, (R, W)).astype(np.int32)
    topk = rng.integers(-2, W * block_size + 5, (T, K)).astype(np.int32)
    if topk.size:
        special = [-1, 0, W * block_size - 1, W * block_size, 2**31 - 1, -(2**31)]
        topk.reshape(-1)[: len(special)] = special[: topk.size]
    return requests, table, topk


def check(requests, table, topk, block_size, **options) -> None:
    want, want_counts = ref.convert_req_index_to_global_index(
        requests, table, topk, block_size=block_size, **options
    )
    buffer = Guarded(topk.shape, np.int32, row_gap=3)
    got, counts = sparse_mla.convert_req_index_to_global_index(
        requests,
        table,
        topk,
        block_size=block_size,
        valid_counts=True,
        out=buffer.array,
        **options,
    )
    assert got is buffer.array
    assert_same_bits(buffer.check(), want, "out")
    assert_same_bits(counts, want_counts, "counts")
    fresh = sparse_mla.convert_req_index_to_global_index(
        requests, table, topk, block_size=block_size, **options
    )
    assert_same_bits(fresh, want, "new output")


@pytest.mark.parametrize("block_size", [1, 3, 16, 64, 100])
@pytest.mark.parametrize("K", [0, 1, 13, 2048])
def test_slots(block_size, K):
    check(*inputs(K=K, block_size=block_size), block_size)


def test_by_hand():
    table = np.array([[7, 3], [0, -1]], np.int32)
    topk = np.array([[0, 5, 4, -1, 8], [3, 4, 0, 1, 7]], np.int32)
    got, counts = sparse_mla.convert_req_index_to_global_index(
        np.array([0, 1], np.int32), table, topk, block_size=4, valid_counts=True
    )
    assert got.tolist() == [[28, 13, 12, -1, -1], [3, -1, 0, 1, -1]]
    assert counts.tolist() == [3, 3]


def test_negative_table_entries_give_minus_one():
    requests, table, topk = inputs()
    table[:, 2] = [-1, -7, -(2**31), 5]
    check(requests, table, topk, 16)


def test_prefill_tokens_go_to_the_workspace():
    requests, table, topk = inputs(T=9, R=4)
    options = {
        "prefill_request_ids": np.array([-1, -1, -1, 0, 0, 1, 1, 1, 2], np.int32),
        "prefill_workspace_starts": np.array([0, 500, 40], np.int32),
    }
    check(requests, table, topk, 16, **options)


def test_prefill_by_hand():
    """A position past the block table gives -1 for a prefill token too."""
    got = sparse_mla.convert_req_index_to_global_index(
        np.array([0, 1], np.int32),
        np.array([[7, 3], [5, 6]], np.int32),
        np.array([[5, -1, 8], [5, -1, 8]], np.int32),
        block_size=4,
        prefill_request_ids=np.array([-1, 0], np.int32),
        prefill_workspace_starts=np.array([100], np.int32),
    )
    assert got.tolist() == [[13, -1, -1], [105, -1, -1]]


def test_no_prefill_among_the_tokens():
    requests, table, topk = inputs()
    options = {
        "prefill_request_ids": np.full(9, -1, np.int32),
        "prefill_workspace_starts": np.zeros(0, np.int32),
    }
    check(requests, table, topk, 16, **options)


def test_no_tokens_and_no_pages():
    requests, table, topk = inputs(T=0)
    check(requests, table, topk, 16)
    requests, table, topk = inputs(W=0)
    check(requests, table, topk, 16)


def test_slots_beyond_int32_are_none():
    table = np.array([[2**26 - 1, 2**26, 2**31 - 1]], np.int32)
    topk = np.array([[31, 32, 63, 64, 128, 129]], np.int32)
    got = sparse_mla.convert_req_index_to_global_index(
        np.zeros(1, np.int32), table, topk, block_size=32
    )
    assert got.tolist() == [[2**31 - 1, -1, -1, -1, -1, -1]]


def test_strided_inputs():
    requests, table, topk = inputs(T=8, R=6, W=7, K=20)
    wide = np.repeat(table, 2, 0)[::-2]
    check(requests, wide, topk, 16)
    check(requests, table[:, 1:5], topk[:, 3:11], 16)
    check(requests, table, np.broadcast_to(topk[:1], topk.shape), 16)
    check(requests, np.broadcast_to(table[:1], table.shape), topk[::-1], 16)


def test_more_rows_of_requests_than_used():
    requests, table, topk = inputs()
    check(np.zeros_like(requests), table, topk, 16)


def test_out_may_hold_the_input_rows_elsewhere():
    """Two calls give the same bits and leave their inputs alone."""
    requests, table, topk = inputs(K=64)
    before = [x.copy() for x in (requests, table, topk)]
    first = sparse_mla.convert_req_index_to_global_index(requests, table, topk, block_size=16)
    second = sparse_mla.convert_req_index_to_global_index(requests, table, topk, block_size=16)
    assert_same_bits(first, second)
    for x, want in zip((requests, table, topk), before, strict=True):
        assert_same_bits(x, want)


BAD = {
    "request too large": ("req_id_per_token", 4, None),
    "negative request": ("req_id_per_token", -1, None),
    "prefill request too large": ("prefill_request_ids", None, 3),
}


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("name", BAD)
def test_bad_request_ids_write_nothing(name):
    argument, request, prefill = BAD[name]
    requests, table, topk = inputs()
    ids = np.full(9, -1, np.int32)
    if request is not None:
        requests[5] = request
    if prefill is not None:
        ids[8] = prefill
    buffer = Guarded(topk.shape, np.int32)
    before = buffer.storage.copy()
    with pytest.raises(ValueError, match=f"{OP}: `{argument}` must"):
        sparse_mla.convert_req_index_to_global_index(
            requests,
            table,
            topk,
            block_size=16,
            prefill_request_ids=ids,
            prefill_workspace_starts=np.zeros(3, np.int32),
            out=buffer.array,
        )
    assert_same_bits(buffer.storage, before, "nothing may be written")
