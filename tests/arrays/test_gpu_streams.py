"""Which stream a call's work goes to, and that no other work races with it
(csrc/python/arrays/)."""

import gc
from concurrent.futures import ThreadPoolExecutor

import cases
import gpu
import numpy as np
import operators
import pytest
from gpu import (
    CALLS,
    TORCH,
    as_tuple,
    assert_same_values,
    come_late,
    is_busy,
    moved,
    outcome,
    torch,
)
from helpers import find_framework

import sparse_mla


class Protocol:
    """CUDA's own stream protocol, as a method."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self):
        return (0, self.handle)


class Attribute:
    """CUDA's own stream protocol, as a plain attribute."""

    def __init__(self, handle: int) -> None:
        self.__cuda_stream__ = (0, handle)


FORMS = {
    "int": lambda stream: stream.cuda_stream,
    "torch Stream": lambda stream: stream,
    "torch ExternalStream": lambda stream: torch.cuda.ExternalStream(stream.cuda_stream),
    "__cuda_stream__()": lambda stream: Protocol(stream.cuda_stream),
    "__cuda_stream__": lambda stream: Attribute(stream.cuda_stream),
}


def check_late_call(op, stream, run) -> None:
    """Asserts that `run(call)` returns before the call's inputs have been written on `stream`, and
    that the work reads the written values."""
    want = outcome(moved(CALLS[op]()))
    run(come_late(moved(CALLS[op]()), stream))  # the first use of a library may wait
    torch.cuda.synchronize()
    call = come_late(moved(CALLS[op]()), stream)
    results = run(call)
    assert is_busy(stream), "the call waited for the device"
    torch.cuda.synchronize()
    assert_same_values(gpu.values(results), want, op)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("op", ["sparse_attention", "merge_attn_states"])
def test_forms(op, form):
    stream = torch.cuda.Stream()

    def run(call):
        call.kwargs["stream"] = FORMS[form](stream)
        return call.run(sparse_mla)

    check_late_call(op, stream, run)


@pytest.mark.parametrize("op", CALLS)
def test_every_operator_on_a_given_stream(op):
    stream = torch.cuda.Stream()

    def run(call):
        call.kwargs["stream"] = stream
        return call.run(sparse_mla)

    check_late_call(op, stream, run)


@pytest.mark.parametrize("op", CALLS)
def test_every_operator_on_torch_s_current_stream(op):
    stream = torch.cuda.Stream()

    def run(call):
        with torch.cuda.stream(stream):
            return call.run(sparse_mla)

    check_late_call(op, stream, run)


@pytest.mark.parametrize("handle", [None, 0, 1, 2])
def test_default_streams(handle):
    """0 and 1 name the legacy default stream, which is torch's default. 2 names the thread's
    default stream, which waits for the legacy one."""
    stream = torch.cuda.default_stream()

    def run(call):
        call.kwargs["stream"] = handle
        return call.run(sparse_mla)

    check_late_call("sparse_attention", stream, run)


def test_minus_one_names_no_stream():
    """In DLPack -1 asks for no order between streams."""
    call = moved(CALLS["sparse_attention"]())
    call.kwargs["stream"] = -1
    with pytest.raises(ValueError, match=r"sparse_attention: `stream` must .*, got -1"):
        call.run(sparse_mla)


# --- cupy ----------------------------------------------------------------------------------------


def as_cupy(call, cupy):
    """The call's torch tensors as CuPy's arrays, on the same memory."""
    for name, x in {**call.args, **call.kwargs}.items():
        if isinstance(x, torch.Tensor):
            call.set(name, cupy.from_dlpack(x))
    return call


@pytest.mark.cupy
@pytest.mark.parametrize("op", CALLS)
def test_every_operator_on_cupy_s_current_stream(op, cupy):
    mine = cupy.cuda.Stream(non_blocking=True)
    stream = torch.cuda.ExternalStream(mine.ptr)
    want = outcome(moved(CALLS[op]()))
    for _ in range(2):  # the first call may load libraries
        call = moved(CALLS[op]())
        real = gpu.inputs(call)
        late = {name: torch.zeros_like(x) for name, x in real.items()}
        for name, x in late.items():
            call.set(name, x)
        as_cupy(call, cupy)
        torch.cuda.synchronize()
        gpu.delay(stream)
        with torch.cuda.stream(stream):
            for name, x in real.items():
                late[name].copy_(x)
        with mine:
            results = call.run(sparse_mla)
        was_busy = is_busy(stream)
        torch.cuda.synchronize()
    assert was_busy, "the call waited for the device"
    assert_same_values(gpu.values(results), want, op)


@pytest.mark.cupy
def test_cupy_stream_as_argument(cupy):
    mine = cupy.cuda.Stream(non_blocking=True)

    def run(call):
        call.kwargs["stream"] = mine
        return call.run(sparse_mla)

    check_late_call("sparse_attention", torch.cuda.ExternalStream(mine.ptr), run)


# --- several frameworks in one call --------------------------------------------------------------


def half_cupy(cupy) -> operators.Call:
    """merge_attn_states of a torch state and a CuPy state."""
    call = moved(CALLS["merge_attn_states"]())
    for name in ("out_b", "lse_b"):
        call.set(name, cupy.from_dlpack(call.get(name)))
    return call


@pytest.mark.cupy
def test_mixed_frameworks_on_one_stream(cupy):
    want = outcome(moved(CALLS["merge_attn_states"]()))
    results = half_cupy(cupy).run(sparse_mla)
    assert all(TORCH.owns(x) for x in results)
    assert_same_values(gpu.values(results), want)
    side = torch.cuda.Stream()
    call = half_cupy(cupy)
    torch.cuda.synchronize()
    with torch.cuda.stream(side), cupy.cuda.Stream.from_external(side):
        results = call.run(sparse_mla)
    torch.cuda.synchronize()
    assert_same_values(gpu.values(results), want)


@pytest.mark.cupy
def test_mixed_frameworks_on_different_streams_are_refused(cupy):
    """Without stream= it is not known which of the two the caller means."""
    call = half_cupy(cupy)
    torch.cuda.synchronize()
    with (
        torch.cuda.stream(torch.cuda.Stream()),
        pytest.raises(ValueError, match=r"merge_attn_states: .*stream"),
    ):
        call.run(sparse_mla)
    call.run(sparse_mla)


@pytest.mark.cupy
@pytest.mark.parametrize("late", ["torch", "cupy"])
def test_mixed_frameworks_with_a_stream_given(late, cupy):
    """torch's values come late on the given stream, CuPy's on CuPy's current stream. The call's
    stream waits for CuPy's."""
    side, other = torch.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
    want = outcome(moved(CALLS["merge_attn_states"]()))
    call = moved(CALLS["merge_attn_states"]())
    names = ("out_a", "lse_a") if late == "torch" else ("out_b", "lse_b")
    real = {name: call.get(name).clone() for name in names}
    for name in names:
        call.get(name).zero_()
    target = {name: call.get(name) for name in names}
    for name in ("out_b", "lse_b"):
        call.set(name, cupy.from_dlpack(call.get(name)))
    torch.cuda.synchronize()
    stream = side if late == "torch" else torch.cuda.ExternalStream(other.ptr)
    gpu.delay(stream)
    with torch.cuda.stream(stream):
        for name in names:
            target[name].copy_(real[name])
    call.kwargs["stream"] = side
    with torch.cuda.stream(side), other:
        results = call.run(sparse_mla)
    torch.cuda.synchronize()
    assert_same_values(gpu.values(results), want)


# --- how long inputs live ------------------------------------------------------------------------


@pytest.mark.jax
def test_jax_arrays_dropped_while_the_stream_is_busy(jax):
    """JAX may give the memory of freed arrays to its next array at once, so a call must keep its
    arrays until they have been read."""
    framework = find_framework("jax", "cuda")
    case = cases.AttentionCase(8, 32, 300, pages=40, num_splits=1).make()
    want = [gpu.get(x) for x in case.run(sparse_mla.sparse_attention, gpu.put)]
    case.run(sparse_mla.sparse_attention, framework.put)
    stream = torch.cuda.Stream()
    arrays = [framework.put(x) for x in (case.q, case.kv, case.indices)]
    gpu.delay(stream)
    results = sparse_mla.sparse_attention(*arrays, **case.options, num_splits=1, stream=stream)
    sizes = [(x.shape, x.dtype) for x in arrays]
    del arrays
    gc.collect()
    churn = [jax.numpy.ones(shape, dtype) for _ in range(20) for shape, dtype in sizes]
    jax.block_until_ready(churn)
    torch.cuda.synchronize()
    assert_same_values(gpu.values(results), want)


def test_torch_tensors_dropped_after_the_call():
    """The tensors are freed on the stream that reads them, and torch's allocator reuses memory in
    stream order, so nothing needs to be kept."""
    case = cases.AttentionCase(8, 32, 300, pages=40, num_splits=1).make()
    want = [gpu.get(x) for x in case.run(sparse_mla.sparse_attention, gpu.put)]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        arrays = [gpu.put(x) for x in (case.q, case.kv, case.indices)]
        gpu.delay()
        results = sparse_mla.sparse_attention(*arrays, **case.options, num_splits=1)
        del arrays
        churn = [torch.full((1 << 20,), 255, dtype=torch.uint8, device="cuda") for _ in range(20)]
    stream.synchronize()
    assert len(churn) == 20
    assert_same_values(gpu.values(results), want)


# --- threads -------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", CALLS)
def test_threads_on_streams_of_their_own(op):
    want = outcome(moved(CALLS[op]()))

    def work(_):
        stream = torch.cuda.Stream()
        found = []
        with torch.cuda.stream(stream):
            calls = [moved(CALLS[op]()) for _ in range(10)]
            for call in calls:
                found.append(as_tuple(call.run(sparse_mla)))
            stream.synchronize()
        return [gpu.values(x) for x in found]

    with ThreadPoolExecutor(8) as pool:
        for results in pool.map(work, range(8)):
            for got in results:
                assert_same_values(got, want, op)


def test_an_error_in_one_thread_does_not_reach_others():
    want = outcome(moved(CALLS["sparse_attention"]()))

    def work(i):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(10):
                call = moved(CALLS["sparse_attention"]())
                if i % 2:
                    call.args["indices"] = call.args["indices"].to(torch.int64)
                    with pytest.raises(TypeError, match=r"`indices` must be int32, got int64"):
                        call.run(sparse_mla)
                else:
                    results = call.run(sparse_mla)
                    stream.synchronize()
                    assert_same_values(gpu.values(results), want)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


def test_the_current_device_and_stream_are_left_alone():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for make in CALLS.values():
            moved(make()).run(sparse_mla)
            assert torch.cuda.current_stream() == stream
            assert torch.cuda.current_device() == 0
    torch.cuda.synchronize()
    assert np.isfinite(float(torch.ones(3, device="cuda").sum()))
