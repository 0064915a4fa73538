"""Two GPUs in one process: each call runs where its arrays are, whichever device is current."""

import engine
import gpu
import library
import numpy as np
import pytest
from gpu import CALLS, assert_same_values, moved, outcome, torch
from helpers import Torch, find_framework

import sparse_mla

if torch.cuda.device_count() < 2:
    pytest.skip("one GPU: nothing to tell apart", allow_module_level=True)


@pytest.fixture
def second():
    """The framework that puts arrays on cuda:1, while cuda:0 is the current device."""
    torch.cuda.set_device(0)
    return Torch("cuda:1")


@pytest.mark.parametrize("op", CALLS)
def test_arrays_of_the_second_device(op, second):
    want = outcome(moved(CALLS[op]()))
    results = moved(CALLS[op](), second).run(sparse_mla)
    assert torch.cuda.current_device() == 0, "the caller's device is restored"
    torch.cuda.synchronize(1)
    for x in results if isinstance(results, tuple) else (results,):
        assert x.device == torch.device("cuda", 1)
    assert_same_values(gpu.values(results), want, op)


@pytest.mark.parametrize("op", CALLS)
def test_its_current_stream_is_used(op, second):
    want = outcome(moved(CALLS[op]()))
    with torch.cuda.device(1):
        stream = torch.cuda.Stream(1)
        moved(CALLS[op](), second).run(sparse_mla)
        call = moved(CALLS[op](), second)
        real = gpu.inputs(call)
        late = {name: torch.zeros_like(x) for name, x in real.items()}
        torch.cuda.synchronize(1)
        torch.cuda.set_stream(stream)
        torch.cuda._sleep(gpu.DELAY_CYCLES)
        for name, x in late.items():
            x.copy_(real[name])
            call.set(name, x)
    results = call.run(sparse_mla)
    torch.cuda.synchronize(1)
    with torch.cuda.device(1):
        torch.cuda.set_stream(torch.cuda.default_stream(1))
    assert torch.cuda.current_device() == 0
    assert_same_values(gpu.values(results), want, op)


@pytest.mark.parametrize("name", ["q", "kv_cache", "indices", "attn_sink", "out"])
def test_arrays_of_two_devices_are_refused(name, second):
    call = moved(CALLS["sparse_attention"](), keep_results=True)
    good = call.get(name)
    call.set(name, good.to("cuda:1"))
    with pytest.raises(ValueError, match=r"sparse_attention: `\w+` must .*, got"):
        call.run(sparse_mla)
    assert torch.cuda.current_device() == 0
    call.set(name, good)
    call.run(sparse_mla)


def test_a_stream_of_another_device_is_refused(second):
    with torch.cuda.device(1):
        stream = torch.cuda.Stream(1)
    call = moved(CALLS["sparse_attention"]())
    call.kwargs["stream"] = stream
    with pytest.raises(ValueError, match=r"sparse_attention: `stream` must .*, got one of cuda:1"):
        call.run(sparse_mla)
    assert torch.cuda.current_device() == 0
    outcome(moved(CALLS["sparse_attention"]()))


def test_an_error_restores_the_device(second):
    call = moved(CALLS["sparse_attention"](), second)
    call.args["indices"] = call.args["indices"].to(torch.int64)
    with pytest.raises(TypeError):
        call.run(sparse_mla)
    assert torch.cuda.current_device() == 0


def test_a_builder_of_the_second_device(second):
    step = engine.make_step(engine.engine_batch(), 32)
    results = []
    for place, framework in (("cuda:0", gpu.TORCH), ("cuda:1", second)):
        config = engine.config(library.sparse_mla, device=place)
        names = ("query_start_loc", "seq_lens", "slot_mapping", "block_table")
        placed = {name: framework.put(getattr(step.batch, name)) for name in names}
        metadata = sparse_mla.MetadataBuilder(config).build(step.batch.common(sparse_mla, **placed))
        cache = framework.put(np.ascontiguousarray(step.fp8_cache))
        arrays = framework.put(step.q), cache, framework.put(step.topk_indices)
        got = sparse_mla.SparseMLA(config).forward(*arrays, metadata)
        torch.cuda.synchronize(place)
        results.append(gpu.values(got))
        assert torch.cuda.current_device() == 0
    assert_same_values(results[1], results[0])


@pytest.mark.cupy
def test_cupy_on_the_second_device(cupy):
    want = outcome(moved(CALLS["merge_attn_states"]()))
    framework = find_framework("cupy", "cuda")
    with cupy.cuda.Device(1):
        call = moved(CALLS["merge_attn_states"](), framework)
        cupy.cuda.Device(1).synchronize()
        results = call.run(sparse_mla)
        cupy.cuda.Device(1).synchronize()
        got = [framework.get(x) for x in results]
    assert all(x.device.id == 1 for x in results)
    assert_same_values(got, want)
