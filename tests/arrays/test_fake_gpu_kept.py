"""What a call keeps while a device works (pending.c), and every operator, on the fake GPUs of
fake_gpu.py.
"""

import gc
import sys
from types import ModuleType

import numpy as np
import operators
import pytest
from dlpack_producer import CUDA, Producer, assert_returned
from exchange_producer import Exchanged
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
from fake_gpu_calls import (
    STATES,
    assert_merged,
    exchanged,
    old_torch,
    read,
)
from helpers import assert_keeps_nothing, assert_same_bits

import sparse_mla

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
