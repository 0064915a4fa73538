"""Calls keep nothing: reference counts, traced allocations and resident memory over many calls."""

import gc
import os
import sys
import tracemalloc

import cases
import engine
import numpy as np
import pytest
from dlpack_producer import Producer

import sparse_mla

PAGE = os.sysconf("SC_PAGE_SIZE")


def resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * PAGE


def bad_call(op) -> cases.Call:
    """A call that fails after it has acquired its arrays: the last one has a wrong dtype."""
    call = cases.GOOD_CALLS[op]()
    name = list(call.arrays())[-1]
    call.set(name, np.zeros(call.get(name).shape, np.int16))
    return call


def run_failing(call) -> None:
    try:
        call.run(sparse_mla)
    except (TypeError, ValueError):
        return
    raise AssertionError("the call should fail")


CALLS = {
    "good": (cases.GOOD_CALLS.__getitem__, lambda call: call.run(sparse_mla)),
    "bad": (lambda op: lambda: bad_call(op), run_failing),
}


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("op", cases.GOOD_CALLS)
def test_reference_counts(op, kind):
    """500 calls leave the reference counts of their arguments, and of a dtype, a type, a string and
    a small integer, as they were."""
    make, run = CALLS[kind]
    call = make(op)()
    arrays = list(call.arrays().values())
    run(call)
    counts = [sys.getrefcount(x) for x in arrays]
    common = (np.dtype(np.float32), np.ndarray, "bfloat16", 512)
    before = [sys.getrefcount(x) for x in common]
    for _ in range(500):
        run(call)
    assert [sys.getrefcount(x) for x in arrays] == counts
    after = [sys.getrefcount(x) for x in common]
    assert all(abs(y - x) < 100 for x, y in zip(before, after, strict=True)), (before, after)


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("op", cases.GOOD_CALLS)
def test_traced_memory(op, kind):
    """After the first 100 calls, 500 more leave no allocations of Python's or NumPy's behind."""
    make, run = CALLS[kind]
    call = make(op)()
    for _ in range(100):
        run(call)
    gc.collect()
    tracemalloc.start()
    try:
        run(call)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(500):
            run(call)
        gc.collect()
        growth = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert growth < 8 << 10, f"{growth} bytes after 500 calls"


def test_new_outputs_are_freed():
    """A call has 4 MiB of results. If they were kept, 200 calls would take 800 MiB."""
    case = cases.AttentionCase(32, 128, 1, pages=1).make()
    for _ in range(5):
        case.run(sparse_mla.sparse_attention)
    before = resident()
    for _ in range(200):
        case.run(sparse_mla.sparse_attention)
    assert resident() - before < 64 << 20


def test_workspace_taken_inside_a_call_is_freed():
    case = cases.AttentionCase(16, 64, 300, num_splits=5).make()
    size = sparse_mla.attention_workspace_size(16, 64, 300, num_splits=5, device="cpu")
    for _ in range(3):
        case.run(sparse_mla.sparse_attention)
    before = resident()
    for _ in range(60):
        case.run(sparse_mla.sparse_attention)
    assert resident() - before < max(16 << 20, 20 * size)


def test_tensors_of_unknown_producers_are_freed():
    case = cases.AttentionCase(32, 128, 1, pages=1).make()
    make = lambda: sparse_mla.sparse_attention(  # noqa: E731
        Producer(case.q), case.kv, case.indices, **case.options
    )
    for _ in range(5):
        make()
    gc.collect()
    before = resident()
    for i in range(100):
        out, lse = make()
        view = np.asarray(lse)
        capsule = out.__dlpack__(max_version=(1, 0))
        del out, lse, view, capsule
        if i % 10 == 0:
            gc.collect()
    gc.collect()
    assert resident() - before < 64 << 20


def test_builders_and_layers_are_freed():
    """Each builder has persistent buffers of 2 MiB and more."""
    options = {"max_num_batched_tokens": 1 << 19, "max_num_seqs": 512}
    step = engine.make_step(engine.engine_batch(), 32)

    def once():
        config = engine.config(sparse_mla, **options)
        metadata = sparse_mla.MetadataBuilder(config).build(step.batch.common(sparse_mla))
        sparse_mla.SparseMLA(config).forward(step.q, step.fp8_cache, step.topk_indices, metadata)

    for _ in range(5):
        once()
    gc.collect()
    before = resident()
    for _ in range(100):
        once()
    gc.collect()
    assert resident() - before < 64 << 20


def test_failing_builds_keep_nothing():
    builder = sparse_mla.MetadataBuilder(engine.config(sparse_mla))
    batch = engine.engine_batch()
    lens = batch.seq_lens.copy()
    lens[0] = -1
    counts = sys.getrefcount(batch.block_table), sys.getrefcount(batch.slot_mapping)
    for _ in range(200):
        with pytest.raises(ValueError, match=r"seq_lens"):
            builder.build(batch.common(sparse_mla, seq_lens_cpu=lens, seq_lens=lens))
    gc.collect()
    assert (sys.getrefcount(batch.block_table), sys.getrefcount(batch.slot_mapping)) == counts
