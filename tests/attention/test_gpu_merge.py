"""merge_attn_partials on GPUs: receive buffers in a CUDA graph, and parts in the memory of another
GPU, where there are two."""

from __future__ import annotations

import pytest
import torch
from gpu import capture
from helpers import run_python

import sparse_mla

TOKENS, HEADS = 9, 32


def fill(received, lses, seed: int) -> None:
    """New parts in the same memory. Some have no key, in one row none has."""
    random = torch.Generator(device="cuda").manual_seed(seed)
    received.copy_(torch.randn(received.shape, generator=random, device="cuda"))
    lses.copy_(3 * torch.randn(lses.shape, generator=random, device="cuda"))
    lses[seed % len(lses), :, seed % TOKENS] = -torch.inf
    received[seed % len(lses), :, seed % TOKENS] = torch.nan
    lses[:, 3, 4], received[:, 3, 4] = -torch.inf, 0


@pytest.mark.parametrize("num_parts", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_receive_buffers_in_a_graph(dtype, num_parts):
    """A replay merges what all_to_all has received since, to bf16: heads are in front of tokens."""
    received = torch.zeros(num_parts, HEADS, TOKENS, 512, dtype=dtype, device="cuda")
    received_lse = torch.zeros(num_parts, HEADS, TOKENS, device="cuda")
    sinks = torch.linspace(-3, 3, 4 * HEADS, device="cuda").chunk(4)[1]
    parts, lses = received.transpose(1, 2), received_lse.transpose(1, 2)
    results = {
        "out": torch.zeros(TOKENS, HEADS, 512, dtype=torch.bfloat16, device="cuda"),
        "lse": torch.zeros(TOKENS, HEADS, device="cuda"),
    }
    fill(received, received_lse, 0)
    graph, _ = capture(
        lambda: sparse_mla.merge_attn_partials(parts, lses, attn_sink=sinks, **results)
    )
    for seed in range(1, 4):
        fill(received, received_lse, seed)
        graph.replay()
        torch.cuda.synchronize()
        stacked, states = parts.contiguous(), lses.contiguous()
        again = torch.zeros_like(results["out"])
        sparse_mla.merge_attn_partials(stacked, states, attn_sink=sinks, out=again)
        assert torch.equal(results["out"].view(torch.int16), again.view(torch.int16))
        weights = (states - states.logsumexp(0)).exp().nan_to_num()[..., None].double()
        exact = (weights * stacked.nan_to_num().double()).sum(0)
        factor = torch.sigmoid(states.logsumexp(0) - sinks)[..., None]
        error = (results["out"].double() - factor * exact).abs()
        assert (error <= 0.01 * exact.abs() + 0.01).all()
        assert torch.isneginf(results["lse"][4, 3])


PEERS = """
import torch, sparse_mla
outs = torch.randn(4, 9, 32, 512, device="cuda:0").bfloat16()
lses = torch.randn(4, 9, 32, device="cuda:0")
want = sparse_mla.merge_attn_partials(outs, lses)
host = outs.cpu(), lses.cpu()  # not from GPU to GPU, for which PyTorch turns on peer access
there = [x.to("cuda:1") for x in host]
torch.cuda.synchronize(1)
parts = [[x[i] if i == 2 else y[i] for i in range(4)] for x, y in zip((outs, lses), there)]
out, lse = torch.full_like(want[0], 7), torch.full_like(want[1], 7)
try:
    sparse_mla.merge_attn_partials(*parts, out=out, lse=lse)
    raise SystemExit("memory without peer access was read")
except ValueError as error:
    assert str(error) == (
        "merge_attn_partials: `outs[0]` must be in memory that cuda:0 can read, got memory of "
        "cuda:1 without peer access"), error
assert (out == 7).all() and (lse == 7).all()
torch.zeros(1, device="cuda:0").to("cuda:1")
torch.zeros(1, device="cuda:1").to("cuda:0")
torch.cuda.synchronize()
sparse_mla.merge_attn_partials(*parts, out=out, lse=lse)
torch.cuda.synchronize()
assert torch.equal(out.view(torch.int16), want[0].view(torch.int16)) and torch.equal(lse, want[1])
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    sparse_mla.merge_attn_partials(*parts, out=out, lse=lse)
out.fill_(7)
graph.replay()
torch.cuda.synchronize()
assert torch.equal(out.view(torch.int16), want[0].view(torch.int16))
"""


@pytest.mark.skipif(
    torch.cuda.device_count() < 2 or not torch.cuda.can_device_access_peer(0, 1),
    reason="needs two GPUs of which the first can read the other's memory",
)
def test_parts_of_another_gpu():
    """A process of its own, where peer access is still off."""
    done = run_python("-c", PEERS)
    assert done.returncode == 0, done.stdout + done.stderr
