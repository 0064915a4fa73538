"""Tensors, results and arrays of CuPy on a GPU (tensor_export.c, result.c, cupy.c), on the fake
GPUs of fake_gpu.py.
"""

import gc
import sys

import numpy as np
import pytest
from dlpack_producer import CUDA, Producer, assert_returned
from exchange_producer import NoMemory
from fake_gpu import (
    OUT_OF_MEMORY,
    Cupy,
    CupyArray,
    give_back,
    load,
    on_gpu,
)
from fake_gpu_calls import (
    LEGACY,
    STATES,
    WANT,
    assert_merged,
    exchanged,
    read,
)
from helpers import assert_same_bits

import sparse_mla

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
