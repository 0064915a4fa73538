"""Calls one after another on one stream. On Hopper a grid starts before the grid in front of it is
done, and waits for it on the device. Results must be the same as without the early start."""

import subprocess
import sys

import gpu
import numpy as np
import pytest
from cases import AttentionCase, random_bf16
from gpu import assert_same_values, capture, torch

import sparse_mla

CALLS = 12
TOPK = 512
# 0: the plan chooses. 1: attention writes out itself. 2, 4, 8: large and small splits, combined.
SPLITS = [0, 1, 2, 4, 8]


class Chain:
    """Calls that share one workspace; the query of each is the out of the call before it."""

    def __init__(self, num_tokens: int, num_heads: int, num_splits: int) -> None:
        case = AttentionCase(num_tokens, num_heads, TOPK, pages=20, num_splits=num_splits).make()
        rng = np.random.default_rng(num_heads)
        self.num_splits = num_splits
        self.options = case.options | {"softmax_scale": 0.3}
        self.kv = gpu.put(case.kv)
        self.indices = [gpu.put(np.roll(case.indices, i, 1)) for i in range(CALLS)]
        self.first = gpu.put(random_bf16(rng, num_tokens, num_heads, 512))
        self.rope = gpu.put(random_bf16(rng, num_tokens, num_heads, 64))
        shape = (num_tokens, num_heads)
        self.out = [torch.empty((*shape, 512), dtype=torch.bfloat16, device="cuda") for _ in "ab"]
        self.lse = [torch.empty(shape, device="cuda") for _ in range(CALLS)]
        size = sparse_mla.attention_workspace_size(
            num_tokens, num_heads, TOPK, num_splits=num_splits, device="cuda"
        )
        self.workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")

    def run(self, after=lambda query: None) -> tuple:
        """Makes the calls. Two outs take turns, so a call writes what the call before it reads."""
        query = self.first.clone()
        for i in range(CALLS):
            out = self.out[i % 2]
            sparse_mla.sparse_attention(
                (query, self.rope),
                self.kv,
                self.indices[i],
                **self.options,
                num_splits=self.num_splits,
                workspace=self.workspace,
                out=out,
                lse=self.lse[i],
            )
            after(query)
            query = out
        return (*self.out, *self.lse)

    def values(self) -> list[np.ndarray]:
        """The results of calls of which none starts before the one in front of it is done."""
        return gpu.values(self.run(after=lambda query: torch.cuda.synchronize()))


@pytest.mark.parametrize("num_splits", SPLITS)
@pytest.mark.parametrize(("num_tokens", "num_heads"), [(1, 16), (2, 128), (40, 64)])
def test_calls_that_feed_each_other(num_tokens, num_heads, num_splits):
    chain = Chain(num_tokens, num_heads, num_splits)
    want = chain.values()
    for _ in range(3):
        assert_same_values(gpu.values(chain.run()), want)
    # Outside graphs only streams with a priority let grids start early.
    with torch.cuda.stream(torch.cuda.Stream(priority=-1)):
        for _ in range(3):
            assert_same_values(gpu.values(chain.run()), want)
    graph, results = capture(chain.run)
    for _ in range(100):
        graph.replay()
    assert_same_values(gpu.values(results), want)


@pytest.mark.parametrize("num_splits", SPLITS)
def test_kernels_of_others_in_between(num_splits):
    """A kernel behind each call overwrites the call's query. It must not do so before the call has
    read the query."""
    chain = Chain(1, 64, num_splits)
    want = chain.values()

    def overwrite(query):
        query.fill_(float("nan"))

    assert_same_values(gpu.values(chain.run(overwrite))[2:], want[2:])
    with torch.cuda.stream(torch.cuda.Stream(priority=-1)):
        assert_same_values(gpu.values(chain.run(overwrite))[2:], want[2:])
    graph, results = capture(lambda: chain.run(overwrite))
    for _ in range(20):
        graph.replay()
    assert_same_values(gpu.values(results)[2:], want[2:])


# Makes and destroys contexts, each with some milliseconds of work.
ANOTHER_PROCESS = """
import ctypes, time
cuda = ctypes.CDLL("libcuda.so.1")
assert cuda.cuInit(0) == 0
end = time.monotonic() + 6
while time.monotonic() < end:
    context, memory = ctypes.c_void_p(), ctypes.c_uint64()
    assert cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0) == 0
    assert cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(1 << 28)) == 0
    for _ in range(200):
        cuda.cuMemsetD8_v2(memory, 0xFF, ctypes.c_size_t(1 << 28))
    assert cuda.cuCtxDestroy_v2(context) == 0
"""


@pytest.mark.parametrize("num_heads", [16, 64, 128])
def test_rows_done_again_beside_other_processes(num_heads):
    """The GPU stops kernels at any place to run other contexts. Most work items of this chain have
    numbers that do not fit Hopper's kernel and are done again, in shared memory that had barriers
    before."""
    chain = Chain(40, num_heads, 0)
    want = chain.values()
    graph, results = capture(chain.run)
    command = [sys.executable, "-c", ANOTHER_PROCESS]
    others = [subprocess.Popen(command) for _ in range(3)]
    try:
        while any(other.poll() is None for other in others):
            for _ in range(30):
                graph.replay()
            assert_same_values(gpu.values(results), want)
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert [other.returncode for other in others] == [0, 0, 0]


@pytest.mark.parametrize("num_splits", SPLITS)
def test_a_workspace_of_two_streams_in_turn(num_splits):
    """Only events order the two streams."""
    chain = Chain(2, 32, num_splits)
    want = chain.values()
    streams = [torch.cuda.Stream() for _ in range(2)]
    for _ in range(10):
        for stream, other in (streams, streams[::-1]):
            stream.wait_stream(other)
            with torch.cuda.stream(stream):
                results = chain.run()
    torch.cuda.synchronize()
    assert_same_values(gpu.values(results), want)
