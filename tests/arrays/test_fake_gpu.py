"""Streams, events and arrays on a GPU (stream.c, pending.c, cupy.c in csrc/python/arrays/), on the
fake GPUs of fake_gpu.py. test_gpu_streams.py and test_gpu_frameworks.py run on real ones."""

import ctypes
import gc
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import cases
import engine
import numpy as np
import operators
import pytest
import reference as ref
import v4_attend_cases as attend
from dlpack_producer import CUDA, NAMES, Legacy, Producer, api, assert_returned
from exchange_producer import DTYPE_OF, Exchanged, NoMemory
from fake_gpu import (
    OUT_OF_MEMORY,
    Cupy,
    CupyArray,
    LikeJax,
    LikePythonJax,
    LikeTorch,
    give_back,
    load,
    on_gpu,
)
from helpers import assert_keeps_nothing, assert_same_bits, assert_within_bounds

import sparse_mla

LEGACY = 1  # DLPack's number for the default stream


@pytest.fixture
def exchange(monkeypatch):
    monkeypatch.setattr(Exchanged, "streams", [])
    monkeypatch.setattr(Exchanged, "stream", 0)
    return Exchanged


def exchanged(x: np.ndarray, device_id: int = 0) -> Exchanged:
    return Exchanged(x, place=(CUDA, device_id))


rng = np.random.default_rng(5)
OUTS = [rng.normal(0, 1, (2, 3, 8)).astype(np.float32) for _ in "ab"]
LSES = [rng.normal(0, 1, (2, 3)).astype(np.float32) for _ in "ab"]
STATES = (OUTS[0], LSES[0], OUTS[1], LSES[1])  # the arguments of merge_attn_states
WANT = sparse_mla.merge_attn_states(*STATES)


def read(x) -> np.ndarray:
    """The values of a Tensor on a fake GPU, whose memory is the host's."""
    capsule = x.__dlpack__(stream=-1)
    tensor = Legacy.from_address(api.PyCapsule_GetPointer(capsule, NAMES[False])).tensor
    dtype = DTYPE_OF[tensor.code, tensor.bits]
    shape = tensor.shape[: tensor.ndim]
    if 0 in shape:
        return np.zeros(shape, dtype)
    strides = [n * dtype.itemsize for n in tensor.strides[: tensor.ndim]]
    span = sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + dtype.itemsize
    memory = (ctypes.c_uint8 * span).from_address(tensor.data)
    return np.ndarray(shape, dtype, memory, 0, strides).copy()


def assert_merged(results, get=read) -> None:
    for got, want in zip(results, WANT, strict=True):
        assert_same_bits(get(got), want)


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


def old_torch(monkeypatch, handle, taken=None):
    """Installs the modules that arrays without exchange API need; returns the devices asked for."""
    devices: list[int] = []

    def current_stream(device_id):
        devices.append(device_id)
        return SimpleNamespace(cuda_stream=handle)

    cuda, importer = ModuleType("torch.cuda"), ModuleType("torch.utils.dlpack")
    cuda.current_stream = current_stream
    importer.from_dlpack = lambda x: ("taken", x)
    monkeypatch.setitem(sys.modules, "torch.cuda", cuda)
    monkeypatch.setitem(sys.modules, "torch.utils.dlpack", importer)
    return devices


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


# --- what is kept while the device works ---------------------------------------------------------


def test_foreign_arrays_live_until_the_work_is_over(package, gpu):
    gpu.set_busy()
    arrays = [on_gpu(x) for x in STATES]
    results = package.merge_attn_states(*arrays)
    later = [on_gpu(x) for x in STATES]
    package.merge_attn_states(*later)
    assert [x.outstanding for x in (*arrays, *later)] == [1] * 8
    gpu.finish()
    package.merge_attn_states(*STATES)
    assert [x.outstanding for x in (*arrays, *later)] == [1] * 8, "the CPU's calls do not look"
    last = on_gpu(np.ones((2, 2), np.float32))
    package.dynamic_per_tensor_quant(last)
    assert_returned(*arrays, *later)
    assert last.outstanding == 1, "of the last call itself"
    assert_merged(results)


def test_the_oldest_work_is_looked_at_first(package, gpu):
    """Arrays of later calls are kept as long as those of an earlier call whose work goes on."""
    gpu.set_busy()
    first = on_gpu(np.ones((2, 2), np.float32))
    package.dynamic_per_tensor_quant(first)
    gpu.set_busy(False)
    second = on_gpu(np.ones((2, 2), np.float32))
    package.dynamic_per_tensor_quant(second)
    third = on_gpu(np.ones((2, 2), np.float32))
    package.dynamic_per_tensor_quant(third)
    assert [x.outstanding for x in (first, second, third)] == [1, 1, 1]


def test_foreign_arrays_live_as_objects_too(package, gpu, cupy):
    """CuPy frees memory in the order of its own stream, which is not the stream of the call."""
    cupy.stream = gpu.new_stream()
    gpu.set_busy()
    arrays = [CupyArray(x) for x in STATES]
    held = [sys.getrefcount(x) for x in arrays]
    package.merge_attn_states(*arrays, stream=gpu.new_stream())
    assert [sys.getrefcount(x) for x in arrays] == [count + 1 for count in held]
    gpu.finish()
    package.merge_attn_states(*arrays)
    assert [sys.getrefcount(x) for x in arrays] == held


@pytest.mark.parametrize(
    ("module", "is_torch"),
    [("torch", True), ("torch.nn", True), ("torchvision", False), ("tor", False)],
)
def test_packages_are_told_by_their_whole_name(package, gpu, monkeypatch, module, is_torch):
    """Only for arrays of an old PyTorch the current stream is asked for."""
    stream = gpu.new_stream()
    old_torch(monkeypatch, stream)
    kind = type("Array", (LikeTorch,), {"__module__": module})
    arrays = [kind(x) for x in STATES]
    package.merge_attn_states(*arrays)
    assert gpu.launch == (stream if is_torch else 0, 0)


def test_a_producer_that_loses_its_method(package, gpu):
    class Losing(Producer):
        looked = 0

        def __getattribute__(self, name):
            if name == "__dlpack__":
                Losing.looked += 1
                if Losing.looked > 1:
                    raise AttributeError("gone")
            return super().__getattribute__(name)

    x = Losing(np.ones((2, 2), np.float32), device=(CUDA, 0))
    with pytest.raises(BufferError, match="gone"):
        package.dynamic_per_tensor_quant(x)
    assert Losing.looked == 2


def test_one_tensor_and_one_foreign_array_are_kept(package, gpu, cupy):
    """A Tensor that the call writes, and an array whose framework frees in another order."""
    rows = np.zeros((2, 3, 656), np.uint8)
    out = package.dequantize_kv_cache(on_gpu(rows[0]), dtype="bfloat16")
    table, ints = exchanged(np.zeros((1, 1), np.int32)), exchanged(np.zeros(1, np.int32))
    cupy.stream = gpu.new_stream()
    gpu.set_busy()
    foreign = CupyArray(rows)
    held = sys.getrefcount(foreign)
    package.gather_kv_cache(foreign, table, ints, ints, out=out, stream=gpu.new_stream())
    assert sys.getrefcount(foreign) == held + 1
    gpu.finish()
    give_back(package)
    assert sys.getrefcount(foreign) == held


def test_what_a_call_asks_for_is_let_go(package, gpu):
    """A call keeps no reference to a new type's exchange table or to a `__cuda_stream__` pair."""

    class Fresh(Exchanged):
        pass

    class Stream:
        def __init__(self, pair):
            self.pair = pair

        def __cuda_stream__(self):
            return self.pair

    x = np.ones((2, 2), np.float32)
    table, pair = Exchanged.__dlpack_c_exchange_api__, (0, gpu.new_stream())
    held = sys.getrefcount(table), sys.getrefcount(pair)
    package.dynamic_per_tensor_quant(Fresh(x, place=(CUDA, 0)))
    package.dynamic_per_tensor_quant(on_gpu(x), stream=Stream(pair))
    assert (sys.getrefcount(table), sys.getrefcount(pair)) == held
    assert gpu.launch == (pair[1], 0)


def test_a_slice_says_where_it_begins(package, gpu):
    out, _ = package.merge_attn_states(*map(on_gpu, STATES))
    first, part = out.__cuda_array_interface__, out[1:].__cuda_array_interface__
    assert (first["shape"], part["shape"]) == ((2, 3, 8), (1, 3, 8))
    assert part["data"][0] == first["data"][0] + 3 * 8 * 4


def test_what_is_kept_is_given_back_with_the_module(gpu):
    """The end of the module waits for the work first."""
    package = load()
    gpu.set_busy()
    arrays = [on_gpu(x) for x in STATES]
    package.merge_attn_states(*arrays)
    gpu.calls()
    del package
    gc.collect()
    assert "cudaEventSynchronize" in gpu.calls()
    assert_returned(*arrays)


def test_the_core_s_own_error_comes_first(package, gpu):
    """A launch fails, and so does the event behind it: the error is that of the launch."""
    package.merge_attn_states(*map(on_gpu, STATES))
    gpu.finish()
    gpu.calls()
    package.merge_attn_states(*map(on_gpu, STATES))
    num_good = gpu.calls().index("launch")
    gpu.fail(None, num_good, keeps=True)
    arrays = [on_gpu(x) for x in STATES]
    with pytest.raises(RuntimeError, match=r"^merge_attn_states: cudaLaunchKernelExC failed"):
        package.merge_attn_states(*arrays)
    for x in arrays:
        x.assert_balanced()


@pytest.mark.parametrize("call", ["cudaEventRecord", "cudaEventCreateWithFlags"])
def test_an_event_behind_the_work_that_fails(package, gpu, call):
    gpu.fail(call, code=OUT_OF_MEMORY)
    arrays = [on_gpu(x) for x in STATES]
    with pytest.raises(MemoryError, match=rf"^merge_attn_states: {call} failed: out of memory"):
        package.merge_attn_states(*arrays)
    assert "launch" in gpu.calls()
    for x in arrays:
        x.assert_balanced()


def test_refusals_keep_nothing(package, gpu):
    gpu.set_busy()
    arrays = [on_gpu(x) for x in (*STATES[:3], STATES[3][:1])]
    with pytest.raises(ValueError, match=r"`lse_b` must"):
        package.merge_attn_states(*arrays)
    for x in arrays:
        x.assert_balanced()
    assert gpu.num_events == 0


# --- tensors -------------------------------------------------------------------------------------


def make_tensors(package, gpu, stream: int):
    """Results whose work is still under way."""
    gpu.set_busy()
    results = package.merge_attn_states(*map(on_gpu, STATES), stream=stream)
    gpu.calls()
    return results


def test_a_tensor_s_readers_wait_for_its_writer(package, gpu):
    writer, reader = gpu.new_stream(), gpu.new_stream()
    out, lse = make_tensors(package, gpu, writer)
    assert gpu.followed(reader) is None
    package.merge_attn_states(out, lse, *map(on_gpu, STATES[2:]), stream=reader)
    assert gpu.followed(reader) == writer
    assert gpu.calls().count("cudaStreamWaitEvent") == 2
    third = gpu.new_stream()
    package.dynamic_per_tensor_quant(out[:1], stream=third)
    assert gpu.followed(third) == writer, "a slice has the event of the whole"
    gpu.finish()


def test_tensors_are_not_foreign(package, gpu):
    """Memory of Tensors outlives all work on the device, so calls keep no reference to Tensors."""
    out, lse = make_tensors(package, gpu, gpu.new_stream())
    held = sys.getrefcount(out), sys.getrefcount(lse)
    package.merge_attn_states(out, lse, out, lse)
    assert (sys.getrefcount(out), sys.getrefcount(lse)) == held


def test_tensors_written_beside_as_many_foreign_arrays(package, gpu):
    """Two Tensors and two foreign arrays: both kinds are kept until the work is over."""
    stream, reader = gpu.new_stream(), gpu.new_stream()
    out, lse = make_tensors(package, gpu, stream)
    foreign = [on_gpu(x) for x in STATES[2:]]
    results = package.merge_attn_states(out, lse, *foreign, stream=stream)
    assert [x.outstanding for x in foreign] == [1, 1]
    results[0].__dlpack__(stream=reader)
    assert gpu.followed(reader) == stream
    gpu.finish()
    give_back(package)
    assert_returned(*foreign)


def test_who_writes_a_tensor_last_is_waited_for(package, gpu):
    first, second, reader = (gpu.new_stream() for _ in "abc")
    out, lse = make_tensors(package, gpu, first)
    states = [on_gpu(x) for x in STATES]
    assert package.merge_attn_states(*states, out=out, lse=lse, stream=second)[0] is out
    assert gpu.followed(second) == first
    out.__dlpack__(stream=reader)
    assert gpu.followed(reader) == second


def test_captured_readers_do_not_wait(package, gpu):
    stream, writer = gpu.new_stream(), gpu.new_stream()
    out, lse = make_tensors(package, gpu, writer)
    gpu.capture(stream)
    written = [on_gpu(np.zeros_like(x)) for x in WANT]
    results = dict(zip(("out", "lse"), written, strict=True))
    package.merge_attn_states(out, lse, out, lse, **results, stream=stream)
    assert gpu.followed(stream) is None


@pytest.mark.parametrize(("stream", "waits"), [(None, True), (1, True), (2, True), (-1, False)])
def test_consumers_on_default_streams(package, gpu, stream, waits):
    writer = gpu.new_stream()
    out, _ = make_tensors(package, gpu, writer)
    out.__dlpack__(stream=stream, max_version=(1, 0))
    assert gpu.followed(0) == (writer if waits else None)


def test_consumers_that_capture(package, gpu):
    out, _ = make_tensors(package, gpu, gpu.new_stream())
    consumer = gpu.new_stream()
    gpu.capture(consumer)
    with pytest.raises(BufferError, match=r"^__dlpack__: `stream` must not be captured while"):
        out.__dlpack__(stream=consumer)
    gpu.finish()
    out.__dlpack__(stream=consumer)
    assert gpu.followed(consumer) is None


@pytest.mark.parametrize("call", ["cudaStreamWaitEvent", "cudaStreamIsCapturing"])
def test_consumers_whose_wait_fails(package, gpu, call):
    out, lse = make_tensors(package, gpu, gpu.new_stream())
    gpu.fail(call)
    with pytest.raises(RuntimeError, match=rf"^__dlpack__: {call} failed"):
        out.__dlpack__(stream=gpu.new_stream())
    gpu.fail(call)
    with pytest.raises(RuntimeError, match=rf"^merge_attn_states: {call} failed"):
        package.merge_attn_states(out, lse, out, lse, stream=gpu.new_stream())


def test_the_legacy_stream_waits_and_is_never_captured(package, gpu):
    """It need not be asked, and CUDA forbids to ask it during a capture."""
    out, _ = make_tensors(package, gpu, gpu.new_stream())
    gpu.fail("cudaStreamWaitEvent")
    with pytest.raises(RuntimeError, match=r"^__dlpack__: cudaStreamWaitEvent failed"):
        out.__dlpack__()
    gpu.fail("cudaStreamWaitEvent")
    with pytest.raises(RuntimeError, match=r"^__cuda_array_interface__: cudaStreamWaitEvent fa"):
        _ = out.__cuda_array_interface__
    gpu.calls()
    out.__dlpack__()
    assert "cudaStreamIsCapturing" not in gpu.calls()


def test_the_cuda_array_interface(package, gpu):
    writer = gpu.new_stream()
    out, _ = make_tensors(package, gpu, writer)
    facts = out[1:].__cuda_array_interface__
    base = out.__cuda_array_interface__["data"][0]
    assert facts == {
        "version": 3,
        "shape": (1, 3, 8),
        "strides": (96, 32, 4),
        "typestr": "<f4",
        "data": (base + 96, False),
        "stream": 1,
    }
    assert gpu.followed(0) == writer


def test_a_dtype_without_a_name_there(package, gpu):
    tensor, scale = package.dynamic_per_tensor_quant(on_gpu(np.ones((2, 4), np.float32)))
    assert (tensor.dtype, tensor.device) == ("float8_e4m3fn", "cuda:0")
    with pytest.raises(AttributeError, match=r"has no name for this Tensor's dtype"):
        _ = tensor.__cuda_array_interface__
    assert not hasattr(tensor, "__cuda_array_interface__")
    assert read(scale) == np.float32(1 / 448)


def test_bytes_of_a_tensor_have_the_letter_of_bytes(package, gpu):
    indices = np.zeros((1, 2), np.int32)
    arguments = (np.zeros(1, np.int32), np.full((1, 1), 3, np.int32), indices)
    slots = package.convert_req_index_to_global_index(*map(on_gpu, arguments), block_size=4)
    assert slots.__cuda_array_interface__["typestr"] == "<i4"


def test_the_host_cannot_read_a_tensor_there(package, gpu):
    out, _ = package.merge_attn_states(*map(on_gpu, STATES))
    words = "on cuda:0, where the host cannot read it"
    with pytest.raises(TypeError, match=words):
        np.asarray(out)
    with pytest.raises(BufferError, match=words):
        memoryview(out)
    with pytest.raises(BufferError, match=r"exported without a copy only"):
        out.__dlpack__(copy=True)
    assert repr(out) == "Tensor(shape=(2, 3, 8), dtype=float32, device=cuda:0)"
    assert out.__dlpack_device__() == (CUDA, 0)
    with pytest.raises(BufferError, match=r"on its own device only"):
        out.__dlpack__(dl_device=(CUDA, 1))
    out.__dlpack__(dl_device=(CUDA, 0))


def test_memory_and_events_of_tensors_are_given_back(package, gpu):
    memory = gpu.num_memory
    out, lse = package.merge_attn_states(*map(on_gpu, STATES))
    assert gpu.num_memory == memory + 2
    part = out[1:]
    del out, lse
    assert gpu.num_memory == memory + 1
    del part
    assert gpu.num_memory == memory
    package.merge_attn_states(*STATES)
    package.dynamic_per_tensor_quant(on_gpu(np.ones(1, np.float32)))
    gc.collect()
    assert gpu.num_events == 1, "of the last call's own array"


def test_a_tensor_without_memory(package, gpu):
    gpu.fail("cudaMalloc", code=OUT_OF_MEMORY)
    arrays = [on_gpu(x) for x in STATES]
    with pytest.raises(MemoryError):
        package.merge_attn_states(*arrays)
    for x in arrays:
        x.assert_balanced()


# --- results -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("has_words", "words"), [(True, ": all is taken$"), (False, "$")])
def test_an_allocator_that_fails(package, gpu, exchange, has_words, words):
    start = "^merge_attn_states: its framework could not allocate a result"
    with (
        NoMemory(gpu.allocator(has_words)),
        pytest.raises(MemoryError, match=start + words),
    ):
        package.merge_attn_states(*map(exchanged, STATES))
    assert "launch" not in gpu.calls()


def test_results_beside_a_foreign_leader_are_foreign(package, gpu, exchange):
    """Results come from the allocator of a framework that is on another stream than the call."""
    exchange.stream = gpu.new_stream()
    gpu.set_busy()
    results = package.merge_attn_states(*map(exchanged, STATES), stream=gpu.new_stream())
    assert gpu.num_events == 1
    held = [sys.getrefcount(x) for x in results]
    gpu.finish()
    give_back(package)
    assert [sys.getrefcount(x) for x in results] == [count - 1 for count in held]


# --- cupy ----------------------------------------------------------------------------------------


def test_cupy_s_results_come_from_the_arrays_device(package, gpu, cupy):
    cupy.current = 0
    results = package.merge_attn_states(*(CupyArray(x, 1) for x in STATES))
    assert [x.data.device_id for x in results] == [1, 1]
    assert cupy.entered == [1, 1]
    assert cupy.left == [(None, None, None)] * 2
    assert cupy.current == 0
    assert_merged(results, lambda x: x.array)


def test_cupy_has_bytes_in_place_of_e4m3(package, gpu, cupy):
    x = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)
    values, scale = package.dynamic_per_tensor_quant(CupyArray(x))
    want, want_scale = sparse_mla.dynamic_per_tensor_quant(x)
    assert values.dtype == np.uint8
    assert_same_bits(values.array, want.view(np.uint8))
    assert_same_bits(scale.array, want_scale)


def test_cupy_s_strides_are_honoured(package, gpu, cupy):
    wide = np.zeros((3, 9), np.float32)
    wide[:, :4] = np.arange(12).reshape(3, 4)
    values, scale = package.dynamic_per_tensor_quant(CupyArray(wide[:, :4]))
    want, want_scale = sparse_mla.dynamic_per_tensor_quant(wide[:, :4])
    assert_same_bits(values.array, want.view(np.uint8))
    assert_same_bits(scale.array, want_scale)


@pytest.mark.parametrize("name", ["dtype", "shape", "strides", "data", "ptr", "device_id"])
def test_an_array_of_cupy_without_an_attribute(package, gpu, cupy, name):
    x = CupyArray(STATES[0])
    holder = x if name in vars(x) else x.data
    delattr(holder, name)
    with pytest.raises(AttributeError, match=name):
        package.merge_attn_states(x, *map(CupyArray, STATES[1:]))


@pytest.mark.parametrize(
    ("name", "value", "error", "words"),
    [
        ("shape", ("2", 3, 8), TypeError, "int"),
        ("strides", (96, None, 4), TypeError, "int"),
        (
            "strides",
            (97, 32, 4),
            ValueError,
            r"`out_a` must have strides in multiples of its 4-byte",
        ),
        ("shape", (1,) * 40, ValueError, r"`out_a` must have at most 8 dimensions, got 40"),
        ("dtype", "f4", TypeError, "`out_a`"),
        ("dtype", np.dtype("M8[s]"), TypeError, "`out_a`"),
    ],
)
def test_an_array_of_cupy_with_odd_attributes(package, gpu, cupy, name, value, error, words):
    x = CupyArray(STATES[0])
    setattr(x, name, value)
    if name == "shape" and len(value) > 3:
        x.strides = (4,) * len(value)
    with pytest.raises(error, match=words):
        package.merge_attn_states(x, *map(CupyArray, STATES[1:]))


@pytest.mark.parametrize(
    "place", ["get_current_stream", "empty", "Device", "__enter__", "__exit__"]
)
def test_a_cupy_that_fails(gpu, monkeypatch, place):
    """Each case has a new package, because a package keeps what it has found of CuPy."""
    package, module = load(), Cupy()
    monkeypatch.setitem(sys.modules, "cupy", module)

    def fail(*_):
        raise LookupError(place)

    if place == "empty":
        module.empty = fail
    elif hasattr(module.cuda, place):
        setattr(module.cuda, place, fail)
    else:
        setattr(module.cuda.Device, place, fail)
    arrays = [CupyArray(x, 1) for x in STATES]
    held = [sys.getrefcount(x) for x in arrays]
    with pytest.raises(LookupError, match=place):
        package.merge_attn_states(*arrays)
    assert [sys.getrefcount(x) for x in arrays] == held
    assert "launch@1" not in gpu.calls()


def test_what_went_wrong_first_is_raised(gpu, monkeypatch):
    """An allocation fails as if inside `with Device`: its error is raised after the exit."""
    package, module = load(), Cupy()
    monkeypatch.setitem(sys.modules, "cupy", module)
    working = module.empty

    def fail(*arguments):
        if module.current == 1:
            raise LookupError("first")
        return working(*arguments)

    module.empty = fail
    with pytest.raises(LookupError, match="first"):
        package.merge_attn_states(*(CupyArray(x, 1) for x in STATES))
    assert module.left == [(None, None, None)]
    assert module.current == 0


@pytest.mark.parametrize("name", ["ndarray", "empty", "cuda", "Device", "get_current_stream"])
def test_a_cupy_that_lacks_a_name_is_not_cupy(gpu, monkeypatch, name):
    """Arrays of such a module count as arrays of an unknown framework."""
    package, module = load(), Cupy()
    monkeypatch.setitem(sys.modules, "cupy", module)
    if name in ("Device", "get_current_stream"):
        delattr(module.cuda, name)
    elif name in ("ndarray", "empty"):
        monkeypatch.delattr(Cupy, name)
    else:
        delattr(module, name)
    with pytest.raises(TypeError, match=r"`out_a` must be an array that speaks DLPack"):
        package.merge_attn_states(*map(CupyArray, STATES))


def test_other_types_of_cupy_are_asked_for_dlpack(package, gpu, cupy):
    class Other(Producer):
        __module__ = "cupy"

    arrays = [Other(x, device=(CUDA, 0)) for x in STATES]
    assert_merged(package.merge_attn_states(*arrays))
    assert arrays[0].requests[0]["stream"] == LEGACY


# --- devices that are told badly -----------------------------------------------------------------


@pytest.mark.parametrize("answer", [None, (CUDA,), ("cuda", 0), [CUDA, 0], (CUDA, 0, 0)])
def test_a_device_that_is_no_pair_is_the_cpu(package, gpu, answer):
    class Vague(Producer):
        def __dlpack_device__(self):
            return answer

    results = package.merge_attn_states(*map(Vague, STATES))
    assert_merged(results, np.asarray)
    assert gpu.calls() == []


def test_a_device_that_cannot_be_told(package, gpu):
    class Failing(Producer):
        error: type[BaseException] = ValueError

        def __dlpack_device__(self):
            raise self.error

    arrays = [Failing(x) for x in STATES]
    assert_merged(package.merge_attn_states(*arrays), np.asarray)
    for error in (MemoryError, KeyboardInterrupt):
        Failing.error = error
        with pytest.raises(error):
            package.merge_attn_states(*arrays)
    for x in arrays:
        x.assert_balanced()


def test_an_export_that_fails(package, gpu):
    class Failing(Producer):
        error: BaseException = ValueError("not today")

        def __dlpack__(self, **request):
            raise self.error

    arrays = [on_gpu(STATES[0]), Failing(STATES[1], device=(CUDA, 0)), *map(on_gpu, STATES[2:])]
    with pytest.raises(
        BufferError,
        match=r"^merge_attn_states: `lse_a` must be exportable by DLPack, got from its __dlpack__: "
        r"not today$",
    ):
        package.merge_attn_states(*arrays)
    Failing.error = MemoryError()
    with pytest.raises(MemoryError):
        package.merge_attn_states(*arrays)
    for x in (arrays[0], *arrays[2:]):
        x.assert_balanced()
    assert "launch" not in gpu.calls()


def test_an_export_that_knows_no_version_and_fails(package, gpu):
    """The producer is asked twice, with a stream both times."""

    class Old(Producer):
        def __dlpack__(self, **request):
            self.requests.append(set(request))
            raise TypeError("no")

    x = Old(STATES[0], device=(CUDA, 0))
    with pytest.raises(BufferError, match=r"got from its __dlpack__: no$"):
        package.merge_attn_states(x, *map(on_gpu, STATES[1:]))
    assert x.requests == [{"stream", "max_version"}, {"stream"}]


def test_read_only_memory_is_seen_when_it_comes(package, gpu):
    out = on_gpu(np.zeros_like(WANT[0]), flags=1)
    with pytest.raises(BufferError, match=r"`out` must be writable, got a read-only Producer"):
        package.merge_attn_states(*map(on_gpu, STATES), out=out)
    out.assert_balanced()


def test_the_device_that_is_not_there(package, gpu):
    with pytest.raises(RuntimeError, match=r"\(cuda:0 to cuda:2\), got cuda:3"):
        package.merge_attn_states(*[on_gpu(x, 3) for x in STATES])
    with pytest.raises(RuntimeError, match=r"device of this build \(cpu or cuda\), got DLPack"):
        package.merge_attn_states(*[Producer(x, device=(10, 0)) for x in STATES])


# --- every operator ------------------------------------------------------------------------------


def moved(op: str, put) -> operators.Call:
    """A call without the outputs that can be left out, with its arrays moved by `put`."""
    call = operators.GOOD_CALLS[op]()
    for name in operators.RESULTS:
        if op not in operators.WRITTEN:
            call.kwargs.pop(name, None)
    if op == "sparse_attention":
        call.kwargs["num_splits"] = 3
    for name in call.arrays():
        call.set(name, put(call.get(name)))
    return call


def in_a_tuple(results) -> tuple:
    return results if isinstance(results, tuple) else (results,)


@pytest.mark.parametrize("op", operators.GOOD_CALLS)
def test_operators(package, gpu, op):
    """Results have the CPU's bits, because the fake GPUs run the CPU's kernels."""
    want = in_a_tuple(moved(op, np.asarray).run(sparse_mla))
    call = moved(op, on_gpu)
    stream = call.kwargs["stream"] = gpu.new_stream()
    got = in_a_tuple(call.run(package))
    assert gpu.launch == (stream, 0)
    for x, y in zip(got, want, strict=True):
        assert_same_bits(x.array if isinstance(x, Producer) else read(x), y, op)


@pytest.mark.parametrize("op", operators.GOOD_CALLS)
def test_operators_whose_launch_fails(package, gpu, op):
    """Everything that was taken for the call is given back."""
    memory = gpu.num_memory
    call = moved(op, on_gpu)
    gpu.fail("launch")
    with pytest.raises(RuntimeError, match=rf"^{op}: \w+ failed: a text \(code 999\)"):
        call.run(package)
    gpu.finish()
    give_back(package)
    for x in (*call.args.values(), *call.kwargs.values()):
        if isinstance(x, Producer):
            assert x.outstanding == 0
    gc.collect()
    assert gpu.num_memory == memory


@pytest.mark.parametrize("op", operators.GOOD_CALLS)
def test_operators_without_memory(package, gpu, op):
    """Memory runs out at each result and at the workspace in turn."""
    num_results = 0
    memory = gpu.num_memory
    while True:
        call = moved(op, on_gpu)
        gpu.fail("cudaMalloc", num_results, OUT_OF_MEMORY)
        try:
            call.run(package)
            break
        except MemoryError:
            num_results += 1
        for x in (*call.args.values(), *call.kwargs.values()):
            if isinstance(x, Producer):
                assert x.outstanding == 0
        assert gpu.num_memory == memory
    gpu.fail(None, -1)
    facts = operators.FACTS[op]
    assert num_results == facts.num_results + facts.takes_workspace


def test_a_workspace_of_the_call_s_own_lives_until_the_work_is_over(package, gpu):
    """The caller does not hold such a workspace."""
    memory = gpu.num_memory
    call = moved("sparse_attention", on_gpu)
    call.kwargs.pop("return_max_logits", None)
    gpu.set_busy()
    results = call.run(package)
    assert gpu.num_memory == memory + len(results) + 1
    results = None
    assert gpu.num_memory == memory + 1
    gpu.finish()
    give_back(package)
    assert gpu.num_memory == memory


FRAMEWORKS = {
    "unknown": on_gpu,
    "old signature": lambda x: on_gpu(x, old_signature=True),
    "old torch": LikeTorch,
    "jax": LikeJax,
    "jax in Python": LikePythonJax,
    "cupy": CupyArray,
    "exchange": exchanged,
}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_references_to_small_things(package, gpu, cupy, monkeypatch, name):
    """Numbers, dtypes, modules and arrays have as many references after calls as before."""
    devices = old_torch(monkeypatch, 0)
    arrays = [FRAMEWORKS[name](x) for x in STATES]
    core = ModuleType("jax.core")
    core.Tracer = type("Tracer", (), {})
    monkeypatch.setitem(sys.modules, "jax.core", core)
    things = [-1, 1, 0, 2, 3, 8, np.dtype(np.float32), "out", *sys.modules.values(), CupyArray]
    things += [core.Tracer, *arrays, *(y for x in arrays for y in vars(x).values())]

    def counts():
        return [sys.getrefcount(x) for x in things]

    def run():
        package.merge_attn_states(*arrays)
        for x in arrays:
            getattr(x, "forget", lambda: None)()
        for kept in (cupy.asked, Exchanged.streams, devices):
            kept.clear()

    assert_keeps_nothing(run, calls=60)
    before = counts()
    for _ in range(200):
        run()
    grown = [after - count for after, count in zip(counts(), before, strict=True)]
    assert max(grown) < 100, [x for x, more in zip(things, grown, strict=True) if more >= 100]


def test_tracers_are_refused(package, gpu, monkeypatch):
    core = ModuleType("jax.core")
    core.Tracer = LikePythonJax
    monkeypatch.setitem(sys.modules, "jax.core", core)
    arrays = [LikePythonJax(x) for x in STATES]
    with pytest.raises(BufferError, match=r"`out_a` must be a concrete array, got a jax tracer"):
        package.merge_attn_states(*arrays)
    core.Tracer = 7
    with pytest.raises(BufferError, match=r"got from its __dlpack__: isinstance\(\) arg 2 must be"):
        package.merge_attn_states(*arrays)
    assert [x.requests for x in arrays] == [[]] * 4


def test_types_are_forgotten_with_the_module(gpu, monkeypatch):
    cupy = Cupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    things = [Exchanged, CupyArray, cupy.cuda.Device]
    held = [sys.getrefcount(x) for x in things]
    package = load()
    package.merge_attn_states(*map(exchanged, STATES))
    package.merge_attn_states(*map(CupyArray, STATES))
    assert all(sys.getrefcount(x) > count for x, count in zip(things, held, strict=True))
    del package
    gc.collect()
    assert [sys.getrefcount(x) for x in things] == held


def test_steps_keep_nothing(package, gpu, cupy):
    """Neither builds nor forwards with new results keep anything."""
    step = small_step()
    config = make_config(package, "separate")
    builder, layer = package.MetadataBuilder(config), package.SparseMLA(config)
    common = place(package, step.batch)
    arrays = [on_gpu(x) for x in (step.q, step.fp8_cache)] + [CupyArray(step.topk_indices)]

    def run():
        layer.forward(*arrays, builder.build(common))
        for x in arrays[:2]:
            x.forget()
        cupy.reset()

    assert_keeps_nothing(run, calls=30)
    assert_keeps_nothing(lambda: package.MetadataBuilder(config), calls=30)


def test_refusals_of_a_tensor_there_keep_nothing(package, gpu):
    tensor, _ = package.dynamic_per_tensor_quant(on_gpu(np.ones((2, 3), np.float32)))
    refusals = [
        tensor.__array__,
        lambda: memoryview(tensor),
        lambda: tensor.__dlpack__(copy=True),
        lambda: tensor.__dlpack__(dl_device=(CUDA, 1)),
        lambda: tensor.__cuda_array_interface__,
        lambda: package.split_prefill_chunks(tensor, 9),
    ]

    for refuse in refusals:
        with pytest.raises((TypeError, ValueError, BufferError, AttributeError)):
            refuse()
        assert_keeps_nothing(refuse, TypeError, ValueError, BufferError, AttributeError)


def test_host_integers_are_not_read_from_a_device(package, gpu):
    with pytest.raises(ValueError, match=r"`query_start_loc` must be in host memory, got a device"):
        package.split_decodes_and_prefills(on_gpu(np.arange(3, dtype=np.int32)), 2)


# --- the builder ---------------------------------------------------------------------------------

HEADS = 8


def place(package, batch, device_id=0):
    """A step's description with its arrays on the GPU."""
    names = ("query_start_loc", "seq_lens", "slot_mapping", "block_table")
    arrays = {name: CupyArray(getattr(batch, name), device_id) for name in names}
    return batch.common(package, **arrays)


def make_config(package, path, device_id=0, **changes):
    options = {"num_heads": HEADS, "fp8": path != "bf16", "path": path}
    return engine.config(package, **(options | changes), device=f"cuda:{device_id}")


def small_step(num_heads=HEADS, lens=(1, 2, 30)):
    return engine.make_step(cases.make_batch(lens, [n + 9 for n in lens]), num_heads)


@pytest.mark.parametrize("path", ["mixed", "separate", "direct", "bf16"])
def test_a_step_of_a_layer(package, gpu, cupy, path):
    """The step is within its bound, with mirrors and a workspace in the GPU's memory."""
    step = engine.make_step(engine.engine_batch(), HEADS)
    kv = step.bf16_cache(sparse_mla) if path == "bf16" else step.fp8_cache
    config = make_config(package, path, 1)
    stream, cupy.stream, cupy.current = gpu.new_stream(1), gpu.new_stream(1), 1
    metadata = package.MetadataBuilder(config).build(place(package, step.batch, 1))
    assert metadata.path == path
    assert metadata.req_id_per_token.device == "cuda:1"
    outputs = {
        "out": CupyArray(np.zeros((*step.q.shape[:2], 512), ref.BF16), 1),
        "lse": CupyArray(np.zeros(step.q.shape[:2], np.float32), 1),
    }
    inputs = [CupyArray(x, 1) for x in (step.q, kv, step.topk_indices)]
    sink = CupyArray(step.attn_sink, 1)
    package.SparseMLA(config).forward(*inputs, metadata, attn_sink=sink, **outputs, stream=stream)
    assert gpu.launch == (stream, 1)
    want = step.reference(path, kv)
    assert_within_bounds(want, {name: x.array for name, x in outputs.items()})
    assert gpu.followed(stream) == cupy.stream


@pytest.mark.parametrize("path", ["mixed", "direct"])
def test_rows_behind_the_step_are_zero(package, gpu, cupy, path):
    step = small_step()
    tokens = len(step.q)
    config = make_config(package, path)
    metadata = package.MetadataBuilder(config).build(place(package, step.batch))
    more = [np.concatenate([x, x[:5]]) for x in (step.q, step.topk_indices)]
    arrays = [CupyArray(x) for x in (more[0], step.fp8_cache, more[1])]
    stream = gpu.new_stream()
    for gives in (CupyArray, on_gpu):  # results by CuPy's allocator, or as Tensors
        q = gives(more[0])
        out, lse = package.SparseMLA(config).forward(q, *arrays[1:], metadata, stream=stream)
        values = [x.array if gives is CupyArray else read(x) for x in (out, lse)]
        assert [len(x) for x in values] == [tokens + 5] * 2
        got = {"out": values[0][:tokens], "lse": values[1][:tokens]}
        assert_within_bounds(step.reference(path, step.fp8_cache, sink=False), got)
        assert not any(x[tokens:].view(np.uint8).any() for x in values)
    gpu.fail("cudaMemsetAsync")
    with pytest.raises(RuntimeError, match=r"^forward: cudaMemsetAsync failed"):
        package.SparseMLA(config).forward(*arrays, metadata, stream=stream)


@pytest.mark.parametrize("path", ["mixed", "separate", "bf16"])
def test_builds_and_forwards_on_streams_in_turn(package, gpu, cupy, path):
    """A forward waits for the build's copy, and the next build for the forward."""
    step = small_step()
    kv = step.bf16_cache(sparse_mla) if path == "bf16" else step.fp8_cache
    config = make_config(package, path)
    builder, layer = package.MetadataBuilder(config), package.SparseMLA(config)
    arrays = [CupyArray(x) for x in (step.q, kv, step.topk_indices)]
    common = place(package, step.batch)
    streams = [gpu.new_stream() for _ in range(4)]
    former = None
    for build_stream, forward_stream in (streams[:2], streams[2:]):
        cupy.stream = build_stream
        metadata = builder.build(common)
        assert gpu.followed(build_stream) == former
        cupy.stream = forward_stream
        layer.forward(*arrays, metadata)
        assert gpu.launch == (forward_stream, 0)
        assert gpu.followed(forward_stream) == build_stream
        former = forward_stream


def test_bounds_of_lengths_may_be_beyond_the_table(package, gpu, cupy):
    """Of a dense step on a GPU the host knows the lengths of prefills only, and not on "mixed"."""
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 256}
    starts, bounds = np.array([0, 1, 6], np.int32), np.array([17, 33], np.int32)
    arrays = [CupyArray(x) for x in (starts, bounds, np.arange(6), np.zeros((2, 2), np.int32))]
    common = package.CommonAttentionMetadata(
        *arrays, query_start_loc_cpu=starts, seq_lens_cpu=bounds
    )
    for path in ("mixed", "separate", None):
        config = package.dense.Config(
            2, softmax_scale=0.1, block_size=16, path=path, device="cuda:0", **limits
        )
        builder = package.dense.MetadataBuilder(config)
        bounds[:] = 33, 32
        assert builder.build(common).num_prefills == 1
        bounds[:] = 17, 33
        if path == "mixed":
            assert builder.build(common).num_prefills == 1
            continue
        rule = "`block_table` must have at least 3 columns for the 33 tokens of request 1, got 2$"
        with pytest.raises(ValueError, match=rule):
            builder.build(common)


def test_small_prefills_go_to_the_fp8_cache(package, gpu, cupy):
    """A GPU's plan does not gather small prefills, because that would not pay. A CPU's does."""
    paths = {}
    for name, lens in {"small": (1, 3), "large": (1, 250)}.items():
        step = engine.make_step(cases.make_batch(lens, lens), 32)
        config = make_config(package, None, num_heads=32, topk_tokens=2048)
        metadata = package.MetadataBuilder(config).build(place(package, step.batch))
        paths[name] = metadata.path, metadata.prefill is None
    assert paths["small"] == ("direct", True)
    config = engine.config(sparse_mla, num_heads=32)
    metadata = sparse_mla.MetadataBuilder(config).build(small_step().batch.common(sparse_mla))
    assert metadata.path == "separate"


def test_arrays_on_another_gpu_than_the_builder_s(package, gpu, cupy):
    step = small_step()
    config = make_config(package, "mixed")
    builder, layer = package.MetadataBuilder(config), package.SparseMLA(config)
    here, there = (
        [CupyArray(x, i) for x in (step.q, step.fp8_cache, step.topk_indices)] for i in range(2)
    )
    metadata = builder.build(place(package, step.batch, 1))
    with pytest.raises(ValueError, match=r"`block_table` must be on cuda:0 like `q`, got cuda:1"):
        layer.forward(*here, metadata)
    cupy.current = 1
    with pytest.raises(ValueError, match=r"`q` must be on the device of the config, got another"):
        layer.forward(*there, metadata)
    cupy.current = 0
    layer.forward(*here, builder.build(place(package, step.batch)))
    config = make_config(package, "separate")
    workspace = np.zeros((cases.ENGINE_WORKSPACE, 576), ref.BF16)
    package.MetadataBuilder(config, workspace=CupyArray(workspace))
    for other in (CupyArray(workspace, 1), workspace):
        with pytest.raises(
            ValueError, match=r"`workspace` must be on the device of the config, got another one"
        ):
            package.MetadataBuilder(config, workspace=other)


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_block_table_lives_until_the_next_one_s_work_is_over(package, gpu, cupy, is_busy):
    """The table of an unknown producer is kept for the forwards of its step, and after that until
    the copy of the next build is over."""
    step = small_step()
    builder = package.MetadataBuilder(make_config(package, "mixed"))

    class Table(Producer):
        def __init__(self, array):
            super().__init__(array, device=(CUDA, 0))
            self.shape = array.shape

    common = [place(package, step.batch) for _ in "ab"]
    tables = [Table(step.batch.block_table) for _ in "ab"]
    for description, table in zip(common, tables, strict=True):
        object.__setattr__(description, "block_table", table)
    gpu.set_busy(is_busy)
    builder.build(common[0])
    assert tables[0].outstanding == 1
    builder.build(common[1])
    assert [x.outstanding for x in tables] == [1, 1]
    gpu.finish()
    give_back(package)
    assert [x.outstanding for x in tables] == [0, 1]
    builder = None
    gc.collect()
    give_back(package)
    assert [x.outstanding for x in tables] == [0, 0]


def test_a_block_table_that_cannot_be_had(package, gpu, cupy):
    """The object is released, and the former step stays valid."""

    class Table(Producer):
        shape = (3, 4)

        def __dlpack__(self, **request):
            raise ValueError("gone")

    step = small_step()
    builder = package.MetadataBuilder(make_config(package, "mixed"))
    metadata = builder.build(place(package, step.batch))
    common, table = place(package, step.batch), Table(step.batch.block_table, device=(CUDA, 0))
    object.__setattr__(common, "block_table", table)
    held = sys.getrefcount(table)
    with pytest.raises(BufferError, match=r"`block_table` must be exportable by DLPack.*: gone$"):
        builder.build(common)
    assert sys.getrefcount(table) == held
    arrays = [CupyArray(x) for x in (step.q, step.fp8_cache, step.topk_indices)]
    package.SparseMLA(make_config(package, "mixed")).forward(*arrays, metadata)


@pytest.mark.parametrize(
    "call",
    ["cudaMalloc", "cudaHostAlloc", "cudaEventRecord", "copy to device", "cudaStreamWaitEvent"],
)
def test_builds_that_fail(gpu, cupy, monkeypatch, call):
    """A build that fails gives back all that it took, and the next build is right again."""
    package = load()
    monkeypatch.setitem(sys.modules, "cupy", Cupy())
    step = small_step()
    config = make_config(package, "separate")
    memory = gpu.num_memory
    num_failed, fails = 0, True
    while fails:
        gpu.fail(call, num_failed, OUT_OF_MEMORY)
        try:
            builder = package.MetadataBuilder(config)
            metadata = builder.build(place(package, step.batch))
            builder.build(place(package, step.batch))
            fails = False
        except MemoryError as error:
            assert str(error).startswith("MetadataBuilder")
            num_failed += 1
        metadata = builder = None
        assert gpu.num_memory == memory
    gpu.fail(None, -1)
    assert num_failed > 0 or call == "cudaStreamWaitEvent"
    builder = package.MetadataBuilder(config)
    metadata = builder.build(place(package, step.batch))
    assert metadata.num_actual_tokens == len(step.q)


def test_the_builder_of_c_takes_what_python_gives(package):
    core = package.ops.facts._C
    with pytest.raises(TypeError, match=r"^MetadataBuilder: takes positional arguments only"):
        core.Step("v32", {}, workspace=None)
    with pytest.raises(TypeError):
        core.Step("v32", {})


def test_cpu_features_name_no_gpu(package):
    rows = package.kernels()
    assert any(row["device"] == "cuda" and row["available"] for row in rows)
    assert package.build_info()["cpu_features"] == sparse_mla.build_info()["cpu_features"]
    assert {row["arch"] for row in rows if row["device"] == "cuda"}.isdisjoint(
        package.build_info()["cpu_features"]
    )


def test_plans_of_a_gpu_name_its_kernels(package):
    names = {row["name"] for row in package.kernels() if row["device"] == "cuda"}
    plans = package.ops._attention_plans(300, 64, 2048, device="cuda")
    assert [plan["head_dim"] for plan in plans] == [576, 512, 576, 512, 512, 576, *[512] * 3]
    for plan in plans:
        assert sum(tokens for tokens, _, _ in plan["runs"]) == 300
        assert {name for _, _, name in plan["runs"]} <= names
        assert plan["workspace_bytes"] <= package.attention_workspace_size(
            300, 64, 2048, device="cuda"
        )


@pytest.mark.parametrize("fmt", ["fp8", "fp8_v4"])
def test_rows_are_widened_where_there_is_room(package, fmt):
    """The fake GPU fills the rows' part of a workspace, which lies behind all that others need and
    ends with the workspace, but for what alignment takes."""
    T, H, K, pages = 132, 128, 1000, 3
    rng = np.random.default_rng(0)
    row, dim, options = (656, 576, {}) if fmt == "fp8" else (584, 512, {"kv_format": fmt})
    kv = np.zeros((pages, 16, row), np.uint8)
    q = cases.random_bf16(rng, T, H, dim)
    indices = rng.integers(0, pages * 16, (T, K)).astype(np.int32)

    def run(size, residue=0):
        memory = np.zeros(size + 128, np.uint8)
        first = -memory.ctypes.data % 64 + residue
        workspace = on_gpu(memory[first : first + size])
        package.sparse_attention(
            on_gpu(q),
            on_gpu(kv),
            on_gpu(indices),
            softmax_scale=1.0,
            workspace=workspace,
            **options,
        )
        return memory[:first], memory[first : first + size], memory[first + size :]

    size_of = lambda n: package.attention_workspace_size(T, H, K, num_keys=n, device="cuda")  # noqa: E731
    least, rows = size_of(0), pages * 16
    assert size_of(rows) == least + 128 + (rows + 1) * 1152
    assert size_of(10**9) == least
    for residue in (0, 1, 16):
        before, workspace, behind = run(size_of(rows), residue)
        filled = np.flatnonzero(workspace)
        assert filled.size == (rows + 1) * 1152
        assert filled[0] >= least
        assert not before.any()
        assert not behind.any()
    for size in (size_of(rows) - 1, least):
        assert not run(size)[1].any()


# Calls of CUDA that return an error of their own, or one of earlier work.
MAY_FAIL = (
    *("cudaStreamIsCapturing", "cudaStreamWaitEvent", "cudaEventRecord"),
    *("cudaEventCreateWithFlags", "copy to device", "cudaMemsetAsync", "launch"),
)


def assert_each_failure_is_raised(gpu, run) -> None:
    """Lets each call of CUDA that a run makes fail in turn, between runs that are good."""
    run()
    gpu.calls()
    run()
    made = [call.split("@")[0] for call in gpu.calls()]
    counts = {name: made.count(name) for name in MAY_FAIL if name in made}
    assert {"launch", "cudaEventRecord", "cudaStreamWaitEvent"} <= counts.keys()
    for name, count in counts.items():
        for num_good in range(count):
            gpu.fail(name, num_good)
            with pytest.raises(RuntimeError, match=r"^[\w.]+: .* failed: a text"):
                run()
            gpu.fail(None, -1)
            run()


@pytest.mark.parametrize("path", ["mixed", "separate", "direct", "bf16"])
def test_a_step_raises_whatever_fails(package, gpu, cupy, path):
    """Also where a call ends its use of the metadata: the next build would not wait for it."""
    step = small_step()
    kv = step.bf16_cache(sparse_mla) if path == "bf16" else step.fp8_cache
    config = make_config(package, path)
    builder, layer = package.MetadataBuilder(config), package.SparseMLA(config)
    arrays = [CupyArray(x) for x in (step.q, kv, step.topk_indices)]
    common = place(package, step.batch)
    streams = [gpu.new_stream() for _ in range(2)]

    def run() -> None:
        cupy.stream = streams[0]
        metadata = builder.build(common)
        cupy.stream = streams[1]
        layer.forward(*arrays, metadata)

    assert_each_failure_is_raised(gpu, run)


# --- DeepSeek V4's builder -----------------------------------------------------------------------


def with_path(case, path):
    return replace(case.config, path=path)


class V4Step:
    """A layer of `package` and the arrays of a step, on a fake GPU."""

    def __init__(self, package, ratio, path, device_id=0, case=None, workspace=None) -> None:
        v4 = package.v4
        self.case = case or attend.make_case(ratio, path)
        fields = vars(self.case.config) | {"device": f"cuda:{device_id}"}
        self.config = v4.Config(fields.pop("num_heads"), **fields)

        def put(x):
            return None if x is None else CupyArray(x, device_id)

        self.builder = v4.MetadataBuilder(self.config, workspace=put(workspace))
        extra = self.case.compressed
        self.caches = v4.Caches(put(self.case.swa.cache), put(extra and extra.cache))
        weights = v4.Weights(None, None, put(self.case.sink), None, None)
        self.layer = v4.SparseMLA(self.config, ratio, weights)
        names = ("query_start_loc", "seq_lens", "slot_mapping", "block_table")
        arrays = {name: put(getattr(self.case.batch, name)) for name in names}
        self.common = self.case.batch.common(package, **arrays)
        self.tables = {r: put(x) for r, x in self.case.batch.compressed.items()}
        self.q, self.topk = put(self.case.q), put(self.case.topk)

    def build(self):
        return self.builder.build(self.common, compressed=self.tables)

    def attend(self, metadata, **options):
        return self.layer.attend(self.q, self.caches, metadata, self.topk, **options)

    def check(self, results) -> None:
        tokens = self.case.batch.num_tokens
        got = {name: x.array[:tokens] for name, x in zip(("out", "lse"), results, strict=True)}
        assert_within_bounds(self.case.reference(), got)


@pytest.mark.parametrize("path", ["direct", "separate"])
@pytest.mark.parametrize("ratio", attend.RATIOS)
def test_a_v4_step_sends_one_copy_and_waits_for_nothing(package, gpu, cupy, ratio, path):
    step = V4Step(package, ratio, path, 1)
    cupy.current = 1
    build_stream, stream = gpu.new_stream(1), gpu.new_stream(1)
    for _ in range(2):
        cupy.stream = build_stream
        gpu.calls()
        metadata = step.build()
        calls = [call.split("@")[0] for call in gpu.calls()]
        assert calls.count("copy") == 1
        assert not any("Synchronize" in call for call in calls)
        assert gpu.launch == (build_stream, 1)
        assert metadata.swa_indices.device == "cuda:1"
        step.check(step.attend(metadata, stream=stream))
        assert gpu.launch == (stream, 1)
        assert gpu.followed(stream) == build_stream
        calls = [call.split("@")[0] for call in gpu.calls()]
        assert "copy" not in calls
        assert not any("Synchronize" in call for call in calls)


@pytest.mark.parametrize("ratio", attend.RATIOS)
def test_large_v4_prefills_are_gathered_to_a_workspace(package, gpu, cupy, ratio):
    """A GPU's plan chooses for each step of a builder that was given a workspace. Both kinds of
    steps have the metadata and the results of a builder of that path."""
    cupy.stream = gpu.new_stream()
    large, small = attend.make_large_case(ratio), attend.make_case(ratio, None)
    for case, want in ((large, "separate"), (small, "direct")):
        step = V4Step(package, ratio, None, case=case, workspace=attend.make_workspace(case.config))
        metadata = step.build()
        assert metadata.path == want
        got = step.attend(metadata)
        step.check(got)
        fixed = V4Step(package, ratio, None, case=replace(case, config=with_path(case, want)))
        for x, y in zip(got, fixed.attend(fixed.build()), strict=True):
            assert_same_bits(x.array, y.array)


@pytest.mark.parametrize(
    "changes",
    [
        {"heads": 64},
        {"heads": 32},
        {"formats": ("bfloat16", "fp8_v4")},
        {"formats": ("fp8_v4", "fp8_v41")},
        {"e4m3": True},
        {"prefill_chunk_size": 1},
    ],
    ids=str,
)
def test_v4_prefills_that_are_not_gathered(package, gpu, cupy, changes):
    case = attend.make_large_case(4, **changes)
    step = V4Step(package, 4, None, case=case, workspace=attend.make_workspace(case.config))
    assert step.build().path == "direct"


def test_v4_prefills_without_a_workspace(package, gpu, cupy):
    step = V4Step(package, 4, None, case=attend.make_large_case(4))
    assert step.builder.workspace_bytes == 0
    assert step.build().path == "direct"


@pytest.mark.parametrize("check", ["0", "1"])
@pytest.mark.parametrize("ratio", attend.RATIOS)
def test_v4_tokens_without_slots(package, gpu, cupy, monkeypatch, ratio, check):
    """Tokens that are not valid have no keys, with and without the checks of their request ids."""
    monkeypatch.setenv("SPARSE_MLA_CHECK", check)
    cupy.stream = gpu.new_stream()
    for tokens in ([0, 3], [4, 12], [1, *range(5, 33)]):
        case = attend.case_without_slots(ratio, "direct", tokens)
        step = V4Step(package, ratio, "direct", case=case)
        step.check(step.attend(step.build()))


CHECKED_TABLES = {
    "compact": lambda x: x.copy(),
    "padded": lambda x: np.pad(x, ((0, 0), (1, 2)))[:, 1:-2],
    "transposed": lambda x: np.asfortranarray(x),
    "gaps in both": lambda x: np.pad(x.repeat(2, 0).repeat(3, 1), ((0, 1), (0, 1)))[:-1:2, :-1:3],
    "backwards": lambda x: x[::-1, ::-1].copy()[::-1, ::-1],
}


@pytest.mark.parametrize("layout", CHECKED_TABLES)
@pytest.mark.parametrize("shape", [(3, 5), (5, 3)])
def test_checked_tables(package, gpu, cupy, monkeypatch, shape, layout):
    """In checked mode each entry of a block table is looked at where its strides say, and the bad
    one is named; before and after it the gather works."""
    monkeypatch.setenv("SPARSE_MLA_CHECK", "1")
    reqs, blocks = shape
    cache = np.random.default_rng(1).integers(0, 99, (16, 2, 656)).astype(np.uint8)
    good = np.random.default_rng(2).permutation(16)[: reqs * blocks].reshape(shape)
    seq_lens = np.full(reqs, 2 * blocks, np.int32)
    starts = (np.arange(reqs) * 2 * blocks).astype(np.int32)

    def gather(table):
        out = np.zeros((2 * reqs * blocks, 576), ref.BF16)
        arrays = [CupyArray(x) for x in (cache, CHECKED_TABLES[layout](table), seq_lens, starts)]
        package.gather_kv_cache(*arrays, out=CupyArray(out))
        return out

    want = sparse_mla.gather_kv_cache(
        cache, good.astype(np.int32), seq_lens, starts, out=np.zeros((30, 576), ref.BF16)
    )
    assert_same_bits(gather(good.astype(np.int32)), want)
    for req, block in np.ndindex(shape):
        table = good.astype(np.int32)
        table[req, block] = 16
        gpu.calls()
        with pytest.raises(ValueError, match=rf"`block_table` must .* got 16 .*{req}.*{block}"):
            gather(table)
        assert not any(call.startswith("launch") for call in gpu.calls())


def test_a_v4_build_waits_for_the_layers_before_it(package, gpu, cupy):
    step = V4Step(package, 16, "direct")
    streams = [gpu.new_stream() for _ in range(3)]
    cupy.stream = streams[0]
    metadata = step.build()
    step.attend(metadata, stream=streams[1])
    cupy.stream = streams[2]
    step.build()
    assert gpu.followed(streams[2]) == streams[1]


def test_v4_captures(package, gpu, cupy):
    """A layer may be captured, a build may not."""
    step = V4Step(package, 4, "direct")
    cupy.stream = gpu.new_stream()
    metadata = step.build()
    want = [x.array.copy() for x in step.attend(metadata)]
    stream = cupy.stream = gpu.new_stream()
    gpu.capture(stream)
    with pytest.raises(ValueError, match=r"build: `stream` must not be capturing a CUDA graph"):
        step.build()
    results = step.attend(metadata)
    zeros = step.layer.attend(step.q, step.caches, None)
    gpu.capture(stream, False)
    for x, y in zip(results, want, strict=True):
        assert x.array.tobytes() == y.tobytes()
    assert not any(x.array.view(np.uint8).any() for x in zeros)


@pytest.mark.parametrize("call", ["copy to device", "launch", "cudaEventRecord"])
def test_a_v4_build_that_fails_leaves_no_step(package, gpu, cupy, call):
    step = V4Step(package, 16, "direct")
    cupy.stream = gpu.new_stream()
    metadata = step.build()
    gpu.fail(call)
    with pytest.raises(RuntimeError, match=r"^MetadataBuilder\.build: .* failed"):
        step.build()
    with pytest.raises(ValueError, match=r"^attend: `builder` must have built a step, got none"):
        step.attend(metadata)
    step.check(step.attend(step.build()))


def test_v4_arrays_on_another_gpu(package, gpu, cupy):
    step, other = (V4Step(package, 16, "direct", i) for i in range(2))
    stream = gpu.new_stream()
    cupy.current = 1
    with pytest.raises(ValueError, match=r"`block_table` must be on the device of the config"):
        step.builder.build(other.common)
    cupy.current = 0
    metadata = step.build()
    with pytest.raises(ValueError, match=r"must be on cuda:0 like"):
        step.builder.build(step.common, compressed=other.tables)
    step.check(step.attend(metadata, stream=stream))


def test_v4_steps_keep_nothing(package, gpu, cupy):
    step = V4Step(package, 4, "separate")
    stream = gpu.new_stream()

    def run():
        step.attend(step.build(), stream=stream)
        gpu.calls()
        cupy.reset()

    assert_keeps_nothing(run, calls=30)
    assert_keeps_nothing(lambda: package.v4.MetadataBuilder(step.config), calls=30)


@pytest.mark.parametrize("path", ["direct", "separate"])
@pytest.mark.parametrize("ratio", attend.RATIOS)
def test_a_v4_step_raises_whatever_fails(package, gpu, cupy, ratio, path):
    step = V4Step(package, ratio, path)
    streams = [gpu.new_stream() for _ in range(2)]

    def run() -> None:
        cupy.stream = streams[0]
        metadata = step.build()
        cupy.stream = streams[1]
        step.attend(metadata)

    assert_each_failure_is_raised(gpu, run)
