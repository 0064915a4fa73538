"""What the GPU's own tests share: inputs on the device, late inputs, captured graphs.

Only test_gpu_*.py import this; they are collected with SMLA_DEVICE=cuda.
"""

from __future__ import annotations

import cases
import device
import numpy as np
import reference as ref
from helpers import assert_same_bits, find_framework

import sparse_mla

TORCH = find_framework("torch", "cuda")
torch = TORCH.module
put, get = TORCH.put, TORCH.get

DELAY_CYCLES = 100_000_000  # of torch.cuda._sleep: some 50 ms, far longer than any call takes
RESULTS = ("out", "lse", "max_logits")  # keywords that take the caller's arrays


def as_tuple(x) -> tuple:
    return x if isinstance(x, tuple) else (x,)


def values(results) -> list[np.ndarray]:
    """Of the results of a call, whichever framework they are in."""
    return [device.host(x) for x in as_tuple(results)]


def assert_same_values(got, want, what: str = "") -> None:
    """Bit for bit; e4m3 may come as bytes, from a framework that does not know it."""
    for i, pair in enumerate(zip(got, want, strict=True)):
        x, y = (x.view(np.uint8) if x.dtype == ref.E4M3 else x for x in pair)
        assert_same_bits(x, y, f"{what} result {i}")


# --- good calls ----------------------------------------------------------------------------------


def split_attention() -> cases.Call:
    """Attention whose rows are cut into ranges and combined: two launches and a workspace."""
    rng = np.random.default_rng(9)
    args = {
        "q": cases.random_bf16(rng, 3, 24, 576),
        "kv": cases.make_rows(rng, 640, "fp8").reshape(10, 64, 656),
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
    return cases.Call("sparse_attention", args, kwargs)


CALLS = {**cases.GOOD_CALLS, "sparse_attention in 5 splits": split_attention}


def moved(call: cases.Call, framework=TORCH, *, keep_results=False) -> cases.Call:
    """The call with its arrays in a framework; without arrays for results where it can do so."""
    if not keep_results and call.op != "gather_kv_cache":
        for name in RESULTS:
            call.kwargs.pop(name, None)
    for name, x in {**call.args, **call.kwargs}.items():
        if isinstance(x, np.ndarray):
            call.set(name, framework.put(x))
    return call


def inputs(call: cases.Call) -> dict:
    """The arrays that the call reads."""
    written = {*RESULTS} | ({"kv_cache"} if call.op == "concat_and_cache_mla" else set())
    pairs = {**call.args, **call.kwargs}.items()
    return {name: x for name, x in pairs if hasattr(x, "__dlpack__") and name not in written}


def outcome(call: cases.Call) -> list[np.ndarray]:
    """The values of an eager run on the GPU, of a fresh copy of the call's arrays."""
    results = call.run(sparse_mla)
    torch.cuda.synchronize()  # the call may have a stream of its own
    return values(results)


def turned(call: cases.Call, by: int) -> cases.Call:
    """The call with other values: what is no index is rolled along its first dimension."""
    for name, x in inputs(call).items():
        if x.dtype not in (np.int32, np.int64):
            call.set(name, np.roll(x, by, 0))
    return call


# --- streams -------------------------------------------------------------------------------------


def delay(stream=None, *, times: int = 1) -> None:
    """Nothing that is put on the stream from now on runs for some 50 ms, or several times that."""
    with torch.cuda.stream(stream or torch.cuda.current_stream()):
        for _ in range(times):
            torch.cuda._sleep(DELAY_CYCLES)


def come_late(call: cases.Call, stream) -> cases.Call:
    """The call on arrays of zeros; the real values come on `stream`, after a delay.

    Work on any other stream finds zeros.
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


# --- graphs --------------------------------------------------------------------------------------


def capture(run):
    """-> a graph of what `run` puts on the current stream, and what it returned."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()  # first uses of kernels and libraries are no part of the graph
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return graph, results
