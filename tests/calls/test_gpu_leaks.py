"""Calls keep nothing on the GPU: memory of torch's allocator and of the device, over many calls."""

import gc
import sys

import cases
import device
import engine
import gpu
import library
import numpy as np
import pytest
import reference as ref
from gpu import ALONE, CALLS, moved, torch
from helpers import find_framework

import sparse_mla


def settle() -> int:
    """Bytes in use on the device, after all work is done and torch has freed its reserve."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def measure(run) -> tuple[int, int]:
    """Bytes in use on the device, and by torch's tensors, after one run while all streams are idle.

    This run gives back what earlier calls kept, because a call may keep arrays that its stream
    still reads until a later call finds the work done.
    """
    settle()
    run()
    return settle(), torch.cuda.memory_allocated()


def run_many(run, count: int) -> None:
    """Asserts that `count` runs leave no bytes of torch's tensors in use and far fewer allocations
    than runs, and hardly any bytes of the device where no other worker uses it."""
    for _ in range(5):
        run()
    device_before, before = measure(run)

    def runs() -> None:
        for _ in range(count):
            run()
        settle()

    assert gpu.count_kept(runs) < count / 2
    device_after, after = measure(run)
    assert after == before
    if ALONE:
        assert device_after - device_before < 8 << 20


@pytest.mark.parametrize("op", CALLS)
def test_good_calls(op):
    call = moved(CALLS[op]())
    arrays = list(gpu.inputs(call).values())
    call.run(sparse_mla)
    counts = [sys.getrefcount(x) for x in arrays]
    run_many(lambda: call.run(sparse_mla), 200)
    assert [sys.getrefcount(x) for x in arrays] == counts


@pytest.mark.parametrize("op", CALLS)
def test_failing_calls(op):
    """The calls fail after they have borrowed every array, because the last one has a wrong
    dtype."""
    call = moved(CALLS[op](), keep_results=True)
    arrays = gpu.inputs(call)
    name = list(arrays)[-1]
    call.set(name, arrays[name].to(torch.int16))
    counts = [sys.getrefcount(x) for x in arrays.values()]

    def run():
        with pytest.raises((TypeError, ValueError)):
            call.run(sparse_mla)

    run_many(run, 200)
    assert [sys.getrefcount(x) for x in arrays.values()] == counts


@pytest.mark.parametrize("op", CALLS)
def test_checked_calls(op, checked):
    call = moved(CALLS[op]())
    run_many(lambda: call.run(sparse_mla), 50)


def test_calls_on_many_streams():
    call = moved(CALLS["sparse_attention in 5 splits"]())
    streams = [torch.cuda.Stream() for _ in range(20)]

    def run():
        for stream in streams:
            call.kwargs["stream"] = stream
            call.run(sparse_mla)
        torch.cuda.synchronize()
        call.kwargs["stream"] = None
        call.run(sparse_mla)  # gives back what the others kept until their work was over

    run_many(run, 20)


def test_captures():
    call = moved(CALLS["sparse_attention in 5 splits"]())

    def run():
        graph, _ = gpu.capture(lambda: call.run(sparse_mla))
        graph.replay()
        torch.cuda.synchronize()

    run_many(run, 20)


@pytest.mark.jax
def test_tensors_are_freed():
    """A call has 1 GiB of results; if they were kept, 200 calls would need more than any device
    has."""
    framework = find_framework("jax", "cuda")
    q = framework.put(np.zeros((8192, 128, 576), ref.BF16))
    kv = framework.put(np.zeros((64, 656), np.uint8))
    indices = framework.put(np.full((8192, 1), -1, np.int32))
    for i in range(200):
        results = sparse_mla.sparse_attention(q, kv, indices, softmax_scale=0.1, num_splits=1)
        if i % 2:
            view = torch.from_dlpack(results[0])
            del results
            assert view.shape == (8192, 128, 512)
            del view
    torch.cuda.synchronize()


@pytest.mark.jax
def test_arrays_that_wait_for_a_busy_stream_are_freed():
    """The inputs of calls on a busy stream are kept while it works, and no longer."""
    framework = find_framework("jax", "cuda")
    case = cases.AttentionCase(64, 16, 64, num_splits=1).make()
    options = {**case.options, "num_splits": 1}
    arrays = [framework.put(x) for x in (case.q, case.kv, case.indices)]
    stream = torch.cuda.Stream()
    # The results are given, because freeing allocated results waits for the device.
    out, lse = sparse_mla.sparse_attention(*arrays, **options, stream=stream)
    stream.synchronize()

    def attend():
        sparse_mla.sparse_attention(*arrays, **options, stream=stream, out=out, lse=lse)

    def count_references():
        gc.collect()
        return [sys.getrefcount(x) for x in arrays]

    attend()
    stream.synchronize()
    last_call_only = count_references()
    for _ in range(20):
        gpu.delay(stream)
        attend()
    waiting = count_references()
    stream.synchronize()
    attend()  # gives back what the earlier calls kept, because their work is over
    stream.synchronize()
    assert all(now >= then + 19 for now, then in zip(waiting, last_call_only, strict=True))
    assert count_references() == last_call_only


def test_builders_are_freed():
    """Each builder has a workspace of 1 GiB, and has steps in flight when it is freed."""
    step = engine.make_step(engine.engine_batch(), 32)
    names = ("query_start_loc", "seq_lens", "slot_mapping", "block_table")
    placed = {name: gpu.put(getattr(step.batch, name)) for name in names}
    arrays = gpu.put(step.q), device.Journey().put(step.fp8_cache), gpu.put(step.topk_indices)
    config = engine.config(
        library.sparse_mla, prefill_workspace_tokens=(1 << 30) // 1152, path="separate"
    )

    def run():
        builder = sparse_mla.MetadataBuilder(config)
        for _ in range(3):
            metadata = builder.build(step.batch.common(sparse_mla, **placed))
            sparse_mla.SparseMLA(config).forward(*arrays, metadata)

    run_many(run, 200)
    kept = []  # and would be seen otherwise
    assert gpu.count_kept(lambda: kept.append(sparse_mla.MetadataBuilder(config))) > 0


def test_failing_builds_keep_nothing():
    config = engine.config(library.sparse_mla)
    builder = sparse_mla.MetadataBuilder(config)
    batch = engine.engine_batch()
    names = ("query_start_loc", "seq_lens", "slot_mapping", "block_table")
    placed = {name: gpu.put(getattr(batch, name)) for name in names}
    lens = batch.seq_lens.copy()
    lens[0] = -1
    counts = [sys.getrefcount(x) for x in placed.values()]

    def run():
        with pytest.raises(ValueError, match=r"seq_lens"):
            builder.build(batch.common(sparse_mla, **placed, seq_lens_cpu=lens))

    run_many(run, 100)
    assert [sys.getrefcount(x) for x in placed.values()] == counts
