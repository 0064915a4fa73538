"""torch.ops.sparse_mla on the GPU: the current stream, CUDA graphs, and tensors on two devices.

test_torch_ops.py runs on the GPU too, and compares results and errors with direct calls.
"""

import gpu
import pytest
from gpu import CALLS, as_tuple, moved, torch
from test_gpu_graphs import check_replays
from test_gpu_streams import check_late_call
from test_torch_ops import assert_same, step, step_inputs, torch_warns

import sparse_mla
import sparse_mla.integrations.torch as smla

pytestmark = [pytest.mark.torch, torch_warns]


@pytest.mark.parametrize("op", CALLS)
def test_work_goes_to_the_current_stream(op):
    """The call returns before its inputs have been written on that stream."""
    stream = torch.cuda.Stream()

    def run(call):
        with torch.cuda.stream(stream):
            return call.run(smla)

    check_late_call(op, stream, run)


@pytest.mark.parametrize("keep_results", [False, True], ids=["torch allocates", "out="])
@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("op", CALLS)
def test_captured_in_a_graph(op, how, keep_results):
    torch._dynamo.reset()
    call = moved(CALLS[op](), keep_results=keep_results)
    run = getattr(smla, call.op)
    if how == "compiled":
        run = torch.compile(run, fullgraph=True, backend="aot_eager")
    graph, results = gpu.capture(lambda: run(*call.args.values(), **call.kwargs))
    check_replays(op, call, graph.replay, as_tuple(results))


@pytest.mark.parametrize("fmt", ["fp8", "bf16"])
def test_a_compiled_step_in_a_graph(fmt):
    """A step writes the cache and attends to it, twice. Every replay continues with the cache that
    the replay before it left."""
    torch._dynamo.reset()
    run = torch.compile(step, fullgraph=True, backend="aot_eager")
    given, wanted = (step_inputs(gpu.TORCH, 6, fmt) for _ in range(2))
    graph, results = gpu.capture(lambda: run(smla, *given))
    step(sparse_mla, *wanted)  # as the run before the capture did
    for _ in range(2):
        graph.replay()
        want = step(sparse_mla, *wanted)
        assert_same(gpu.TORCH, results, want)
        assert_same(gpu.TORCH, given[3], wanted[3], "cache")


@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("name", ["kv_cache", "indices", "attn_sink", "out"])
def test_a_tensor_on_the_host_is_refused(name, how):
    torch._dynamo.reset()
    call = moved(CALLS["sparse_attention"](), keep_results=True)
    call.set(name, call.get(name).cpu())
    run = smla.sparse_attention
    if how == "compiled":
        run = torch.compile(run, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"sparse_attention: `\w+` must .*, got"):
        run(*call.args.values(), **call.kwargs)
