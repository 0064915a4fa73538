"""Streams, captures and operators on a GPU (stream.c, cupy.c in csrc/python/arrays/), on the fake
GPUs of fake_gpu.py. test_gpu_streams.py and test_gpu_frameworks.py run on real ones.
"""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from dlpack_producer import CUDA, assert_returned
from fake_gpu import (
    CupyArray,
    LikeJax,
    LikeTorch,
    on_gpu,
)
from fake_gpu_calls import (
    LEGACY,
    LSES,
    OUTS,
    STATES,
    WANT,
    assert_merged,
    exchanged,
    old_torch,
    read,
)
from helpers import assert_same_bits

import sparse_mla

# --- which stream --------------------------------------------------------------------------------


def test_unknown_producers_are_told_the_stream(package, gpu):
    """Unknown producers get the call's stream, as a number: None could mean two streams."""
    stream = gpu.new_stream()
    for given, number in [(None, LEGACY), (0, LEGACY), (1, LEGACY), (2, 2), (stream, stream)]:
        arrays = [on_gpu(x) for x in STATES]
        results = package.merge_attn_states(*arrays, stream=given)
        assert [x.requests for x in arrays] == [[{"stream": number, "max_version": (1, 3)}]] * 4
        assert gpu.launch == (0 if number == LEGACY else number, 0)
        assert_merged(results)
        assert [(type(x).__name__, x.device) for x in results] == [("Tensor", "cuda:0")] * 2


def test_every_part_of_a_list_is_told_the_stream(package, gpu):
    """The parts of lists are exported, kept until the work is over, and then given back, like any
    other array."""
    stream = gpu.new_stream()
    outs, lses = ([on_gpu(x) for x in (*side, *side)] for side in (OUTS, LSES))
    results = package.merge_attn_partials(outs, lses, stream=stream)
    for x in (*outs, *lses):
        assert x.requests == [{"stream": stream, "max_version": (1, 3)}]
    assert gpu.launch == (stream, 0)
    want = sparse_mla.merge_attn_partials([*OUTS, *OUTS], [*LSES, *LSES])
    for got, same in zip(results, want, strict=True):
        assert_same_bits(read(got), same)
    gpu.finish()
    package.merge_attn_states(*map(on_gpu, STATES))
    assert_returned(*outs, *lses)


def test_producers_from_before_versions_are_told_the_stream(package, gpu):
    stream = gpu.new_stream()
    arrays = [on_gpu(x, old_signature=True) for x in STATES]
    assert_merged(package.merge_attn_states(*arrays, stream=stream))
    for x in arrays:
        assert x.requests[-1] == {"stream": stream}


def test_work_goes_to_the_device_of_the_arrays(package, gpu):
    stream = gpu.new_stream(1)
    for given, handle in [(None, 0), (stream, stream)]:
        results = package.merge_attn_states(*[on_gpu(x, 1) for x in STATES], stream=given)
        assert gpu.launch == (handle, 1)
        assert {x.device for x in results} == {"cuda:1"}
        calls = gpu.calls()
        assert "launch@1" in calls
        assert "cuCtxPopCurrent" in " ".join(calls), "the device that was current is so again"
    with pytest.raises(
        ValueError, match=r"`stream` must be a stream of the arrays' device, cuda:0"
    ):
        package.merge_attn_states(*map(on_gpu, STATES), stream=stream)


def test_the_stream_of_the_exchange_api(package, gpu, exchange):
    for handle in (0, LEGACY, gpu.new_stream()):
        exchange.stream = handle
        exchange.streams.clear()
        results = package.merge_attn_states(*map(exchanged, STATES))
        assert gpu.launch == (0 if handle == LEGACY else handle, 0)
        assert exchange.streams == [(CUDA, 0)], "neighbours are asked once"
        assert [x.place for x in results] == [(CUDA, 0)] * 2
        assert_merged(results, lambda x: x.array)
    assert gpu.num_events == 0, "memory that is freed in the order of its stream needs no event"


def test_a_question_that_fails(package, gpu, exchange):
    exchange.stream = None
    with pytest.raises(
        RuntimeError,
        match=r"^merge_attn_states: `out_a` must come from a framework that knows its current "
        r"stream, got an error$",
    ):
        package.merge_attn_states(*map(exchanged, STATES))
    assert "launch" not in gpu.calls()


def test_the_stream_of_cupy(package, gpu, cupy):
    cupy.stream = gpu.new_stream(1)
    arrays = [CupyArray(x, 1) for x in STATES]
    cupy.current = 1
    results = package.merge_attn_states(*arrays)
    assert gpu.launch == (cupy.stream, 1)
    assert cupy.asked == [1]
    assert [type(x) for x in results] == [CupyArray] * 2
    assert_merged(results, lambda x: x.array)
    assert cupy.entered == []
    assert gpu.num_events == 0


def test_the_stream_of_an_old_torch(package, gpu, monkeypatch):
    """An old torch need not wait for other work, because the call is on its current stream."""
    stream = gpu.new_stream()
    devices = old_torch(monkeypatch, stream)
    arrays = [LikeTorch(x) for x in STATES]
    results = package.merge_attn_states(*arrays)
    assert gpu.launch == (stream, 0)
    assert devices == [0]
    assert [x.requests for x in arrays] == [[{"stream": -1, "max_version": (1, 3)}]] * 4
    assert [word for word, _ in results] == ["taken"] * 2
    assert_merged([x for _, x in results])
    assert_returned(*arrays)


def test_an_old_torch_without_its_modules(package, gpu, monkeypatch):
    for name in ("torch.cuda", "torch.utils.dlpack"):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, name)
    results = package.merge_attn_states(*map(LikeTorch, STATES))
    assert gpu.launch == (0, 0)
    assert [type(x).__name__ for x in results] == ["Tensor"] * 2


@pytest.mark.parametrize(
    ("current_stream", "error"),
    [
        (lambda _: 1 / 0, ZeroDivisionError),
        (lambda _: object(), AttributeError),
        (lambda _: SimpleNamespace(cuda_stream=1 << 70), OverflowError),
    ],
)
def test_an_old_torch_that_fails(package, gpu, monkeypatch, current_stream, error):
    old_torch(monkeypatch, 0)
    sys.modules["torch.cuda"].current_stream = current_stream
    arrays = [LikeTorch(x) for x in STATES]
    with pytest.raises(error):
        package.merge_attn_states(*arrays)
    assert_returned(*arrays)


def test_a_stream_that_is_no_number_tells_nothing(package, gpu, monkeypatch):
    old_torch(monkeypatch, "main")
    package.merge_attn_states(*map(LikeTorch, STATES))
    assert gpu.launch == (0, 0)


def test_arrays_of_jax(package, gpu):
    """The host waits for JAX's arrays, and results stay Tensors."""
    arrays = [LikeJax(x) for x in STATES]
    results = package.merge_attn_states(*arrays, stream=gpu.new_stream())
    assert [x.waits for x in arrays] == [1] * 4
    assert [type(x).__name__ for x in results] == ["Tensor"] * 2
    assert_merged(results)


# --- order ---------------------------------------------------------------------------------------


def test_two_streams_and_none_given(package, gpu, exchange, cupy):
    exchange.stream, cupy.stream = gpu.new_stream(), gpu.new_stream()
    arrays = [*map(exchanged, STATES[:2]), *map(CupyArray, STATES[2:])]
    with pytest.raises(ValueError) as info:
        package.merge_attn_states(*arrays)
    assert str(info.value) == (
        f"merge_attn_states: `out_b` must come from the current stream of `out_a` "
        f"({exchange.stream}), got one whose producer works on another ({cupy.stream}): pass "
        f"stream=, or make the two equal"
    )
    cupy.stream = exchange.stream
    package.merge_attn_states(*arrays)
    assert gpu.launch == (exchange.stream, 0)
    exchange.stream, cupy.stream = LEGACY, 0
    package.merge_attn_states(*arrays)
    assert gpu.launch == (0, 0)


def test_a_call_is_put_behind_its_producers(package, gpu, exchange, cupy):
    exchange.stream, cupy.stream = gpu.new_stream(), gpu.new_stream()
    arrays = [*map(exchanged, STATES[:2]), *map(CupyArray, STATES[2:])]
    for stream, others in [
        (gpu.new_stream(), 2),
        (exchange.stream, 1),
        (cupy.stream, 1),
    ]:
        gpu.calls()
        package.merge_attn_states(*arrays, stream=stream)
        assert gpu.launch == (stream, 0)
        calls = gpu.calls()
        assert calls.count("cudaStreamWaitEvent") == others, "a framework's arrays once"
        assert calls.index("cudaStreamWaitEvent") < calls.index("launch")
    assert gpu.followed(cupy.stream) == exchange.stream
    assert gpu.followed(exchange.stream) == cupy.stream


def test_a_call_behind_the_legacy_stream(package, gpu, exchange):
    stream = gpu.new_stream()
    package.merge_attn_states(*map(exchanged, STATES), stream=stream)
    assert gpu.followed(stream) == LEGACY


@pytest.mark.parametrize(
    ("call", "num_good"),
    [
        ("cudaStreamIsCapturing", 0),
        ("cudaStreamIsCapturing", 1),
        ("cudaEventCreateWithFlags", 0),
        ("cudaEventRecord", 0),
        ("cudaStreamWaitEvent", 0),
        ("launch", 0),
    ],
)
def test_calls_of_cuda_that_fail(package, gpu, exchange, call, num_good):
    """Each of these calls fails before any work has been launched."""
    exchange.stream = gpu.new_stream()
    arrays = [*map(exchanged, STATES[:2]), *map(on_gpu, STATES[2:])]
    gpu.fail(call, num_good)
    with pytest.raises(RuntimeError, match=r"^merge_attn_states: \w+ failed: a text \(code 999\)"):
        package.merge_attn_states(*arrays, stream=gpu.new_stream())
    assert ("launch" in gpu.calls()) == (call == "launch")
    gpu.finish()
    package.merge_attn_states(*map(on_gpu, STATES))
    for x in arrays[2:]:
        x.assert_balanced()
    assert_merged(package.merge_attn_states(*arrays), lambda x: x.array)


def test_arrays_on_two_devices_are_refused(package, gpu, exchange):
    arrays = [exchanged(STATES[0]), *(exchanged(x, 1) for x in STATES[1:])]
    with pytest.raises(ValueError, match=r"`lse_a` must be on cuda:0 like `out_a`, got cuda:1"):
        package.merge_attn_states(*arrays)
    assert exchange.streams == [(CUDA, 0)], "the other device has no say"


def test_minus_one_names_no_stream(package, gpu):
    with pytest.raises(ValueError, match=r"^merge_attn_states: `stream` must be .*, got -1, which"):
        package.merge_attn_states(*map(on_gpu, STATES), stream=-1)
    sparse_mla.merge_attn_states(*STATES, stream=-1)  # -1 means nothing to the CPU


# --- captures ------------------------------------------------------------------------------------


def test_a_capture_takes_no_part_in_order(package, gpu, exchange):
    """A capture cannot wait for work outside of it, so no event is recorded for such work."""
    stream = gpu.new_stream()
    gpu.capture(stream)
    for other in (0, gpu.new_stream()):
        exchange.stream = other
        gpu.calls()
        package.merge_attn_states(*map(exchanged, STATES), stream=stream)
        assert gpu.launch == (stream, 0)
        calls = gpu.calls()
        assert "cudaEventRecord" not in calls
        assert calls.count("cudaStreamIsCapturing") == (2 if other == 0 else 3)
    assert gpu.followed(stream) is None


def test_two_captured_streams_are_ordered(package, gpu, exchange):
    stream, exchange.stream = gpu.new_stream(), gpu.new_stream()
    for captured in (stream, exchange.stream):
        gpu.capture(captured)
    package.merge_attn_states(*map(exchanged, STATES), stream=stream)
    assert gpu.followed(stream) == exchange.stream


def test_arrays_of_a_capture_outside_of_it(package, gpu, exchange):
    stream, exchange.stream = gpu.new_stream(), gpu.new_stream()
    gpu.capture(exchange.stream)
    with pytest.raises(ValueError) as info:
        package.merge_attn_states(*map(exchanged, STATES), stream=stream)
    assert str(info.value) == (
        "merge_attn_states: `stream` must be the stream whose work is captured, since `out_a` is "
        f"made on that ({exchange.stream}), got {stream}"
    )


def test_results_inside_a_capture_must_be_given(package, gpu):
    """Addresses of new results would go into the graph, and nobody would keep their memory."""
    stream = gpu.new_stream()
    gpu.capture(stream)
    with pytest.raises(ValueError) as info:
        package.merge_attn_states(*map(on_gpu, STATES), stream=stream)
    assert str(info.value) == (
        "merge_attn_states: `out` must be given inside a capture (192 bytes), got None: the "
        "framework of its arrays has no allocator"
    )
    results = [on_gpu(np.zeros_like(x)) for x in WANT]
    arrays = [on_gpu(x) for x in STATES]
    gpu.set_busy()
    package.merge_attn_states(*arrays, out=results[0], lse=results[1], stream=stream)
    assert_merged(results, lambda x: x.array)
    assert gpu.num_events == 0
    assert_returned(*arrays, *results)  # at once: the caller keeps arrays for replays
