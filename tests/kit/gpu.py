"""What the GPU tests share: inputs on the device, inputs that arrive late, captured graphs.

Only test_gpu_*.py import this; they are collected only with SMLA_DEVICE=cuda.
"""

from __future__ import annotations

import os

import cases
import device
import numpy as np
import operators
import reference as ref
from helpers import assert_same_bits, find_framework, guarded_attention

import sparse_mla

TORCH = find_framework("torch", "cuda")
torch = TORCH.module
put, get = TORCH.put, TORCH.get

DELAY_CYCLES = 100_000_000  # for torch.cuda._sleep: about 50 ms, far longer than any call
RESULTS = operators.RESULTS  # keywords for the caller's arrays
ALONE = "PYTEST_XDIST_WORKER" not in os.environ  # other workers take and free device memory


def as_tuple(x) -> tuple:
    return x if isinstance(x, tuple) else (x,)


def values(results) -> list[np.ndarray]:
    """The results of a call in NumPy, whichever framework they are in."""
    return [device.host(x) for x in as_tuple(results)]


def assert_same_values(got, want, what: str = "") -> None:
    """Compares bit for bit. e4m3 may be uint8, from a framework without that type."""
    for i, pair in enumerate(zip(got, want, strict=True)):
        x, y = (x.view(np.uint8) if x.dtype == ref.E4M3 else x for x in pair)
        assert_same_bits(x, y, f"{what} result {i}")


# --- good calls ----------------------------------------------------------------------------------


def split_attention() -> operators.Call:
    """Attention whose lists are split and combined: two launches and a workspace."""
    rng = np.random.default_rng(9)
    args = {
        "q": cases.random_bf16(rng, 3, 24, 576),
        "kv_cache": cases.make_rows(rng, 640, "fp8").reshape(10, 64, 656),
        "indices": rng.integers(-1, 640, (3, 400)).astype(np.int32),
    }
    kwargs = {
        "softmax_scale": 0.04,
        "num_splits": 5,
        "return_max_logits": True,
        "out": np.zeros((3, 24, 512), ref.BF16),
        "lse": np.zeros((3, 24), np.float32),
        "max_logits": np.zeros((3, 24), np.float32),
    }
    return operators.Call("sparse_attention", args, kwargs)


CALLS = {**operators.GOOD_CALLS, "sparse_attention in 5 splits": split_attention}


def moved(call: operators.Call, framework=TORCH, *, keep_results=False) -> operators.Call:
    """The call with its arrays in a framework; arrays for results are dropped if they can be."""
    if not keep_results and call.op not in operators.WRITTEN:
        for name in RESULTS:
            call.kwargs.pop(name, None)
    for name, x in {**call.args, **call.kwargs}.items():
        if isinstance(x, np.ndarray):
            call.set(name, framework.put(x))
    return call


def inputs(call: operators.Call) -> dict:
    """The arrays that the call reads."""
    written = {*RESULTS, *operators.WRITTEN.get(call.op, ())}
    pairs = {**call.args, **call.kwargs}.items()
    return {name: x for name, x in pairs if hasattr(x, "__dlpack__") and name not in written}


def outcome(call: operators.Call) -> list[np.ndarray]:
    """Runs the call eagerly on the GPU; returns its results in NumPy."""
    results = call.run(sparse_mla)
    torch.cuda.synchronize()  # the call may use another stream
    return values(results)


def turned(call: operators.Call, by: int) -> operators.Call:
    """The call with other values: arrays of floats and bytes are rolled along dimension 0."""
    for name, x in inputs(call).items():
        if x.dtype not in (np.int32, np.int64):
            call.set(name, np.roll(x, by, 0))
    return call


# --- streams -------------------------------------------------------------------------------------


def delay(stream=None, *, times: int = 1) -> None:
    """Delays all later work of the stream (None: the current one) by `times` times 50 ms."""
    with torch.cuda.stream(stream or torch.cuda.current_stream()):
        for _ in range(times):
            torch.cuda._sleep(DELAY_CYCLES)


def come_late(call: operators.Call, stream) -> operators.Call:
    """The call on arrays of zeros, which `stream` overwrites with the real values after a delay.

    Work that does not wait for `stream` reads zeros.
    """
    real = inputs(call)
    late = {name: torch.zeros_like(x) for name, x in real.items()}
    torch.cuda.synchronize()
    delay(stream)
    with torch.cuda.stream(stream):
        for name, x in real.items():
            late[name].copy_(x)
    for name, x in late.items():
        call.set(name, x)
    return call


def is_busy(stream) -> bool:
    return not stream.query()


# --- what a run does of the device ---------------------------------------------------------------

TAKES, GIVES = ("cudaMalloc", "cudaMallocAsync"), ("cudaFree", "cudaFreeAsync")


def profile(run) -> list:
    """What torch's profiler saw of `run` and of the work that it started: calls of CUDA's runtime,
    kernels and copies. It sees the runtime that is linked into the library, too, and only this
    process, whatever others do on the same GPU."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities, acc_events=True) as events:
        run()
        torch.cuda.synchronize()
    return events.events()


def device_work(run) -> list[str]:
    """The names of the kernels and copies that `run` starts."""
    cuda = torch.autograd.DeviceType.CUDA
    return [event.name for event in profile(run) if event.device_type == cuda]


def count_tensors() -> int:
    """How often torch's allocator has given memory. It hardly ever calls CUDA for that."""
    return torch.cuda.memory_stats()["allocation.all.allocated"]


def allocations(run) -> list[str]:
    """How `run` takes memory of the device: its calls of CUDA's runtime, and a "tensor" for each
    time that torch's allocator gives memory."""
    before = count_tensors()
    names = [event.name for event in profile(run)]
    return [name for name in names if name in TAKES] + ["tensor"] * (count_tensors() - before)


def count_kept(run) -> int:
    """How many allocations of CUDA's runtime `run` does not give back, but for torch's reserve."""

    def count() -> int:
        return torch.cuda.memory_stats()["segment.all.current"]

    before = count()
    names = [event.name for event in profile(run)]
    kept = sum(name in TAKES for name in names) - sum(name in GIVES for name in names)
    return kept - (count() - before)


# --- graphs --------------------------------------------------------------------------------------


def capture(run):
    """Returns a graph of the work that `run` puts on the current stream, and its results."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()  # keeps the first use of kernels and libraries out of the graph
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return graph, results


def check_list_replays(inputs: list[cases.AttentionInputs], *, times: int) -> None:
    """Asserts that replays with the lists of other inputs, of other lengths, give the bits of
    eager calls."""
    first = inputs[0]
    q, kv, indices = (put(x) for x in (first.q, first.kv, first.indices))
    options = {n: put(x) if isinstance(x, np.ndarray) else x for n, x in first.options.items()}

    def run():
        return sparse_mla.sparse_attention(q, kv, indices, **options)

    graph, results = capture(run)
    for case in inputs * times:
        indices.copy_(put(case.indices))
        torch.cuda.synchronize()
        graph.replay()
        assert_same_values(values(results), values(run()))


def check_any_workspace(attend, case: cases.AttentionInputs) -> None:
    """Asserts that neither the former contents of a workspace nor an earlier call with it change
    the results."""
    want = guarded_attention(attend, case)
    size = sparse_mla.attention_workspace_size(
        *case.q.shape[:2], case.indices.shape[1], device="cuda"
    )
    rng = np.random.default_rng(1)
    for content in (np.zeros(size), np.full(size, 0xFF), rng.integers(0, 256, size)):
        workspace = put(content.astype(np.uint8))
        for _ in range(3):
            got = guarded_attention(attend, case, workspace=workspace)
            for name, x in got.items():
                assert_same_bits(x, want[name], name)
