"""indexer_logits on the GPU at an engine's sizes: against PyTorch in fp64, in graphs, and with the
same bits from every way of sharing the work. test_indexer_logits.py has the edges."""

import gpu
import numpy as np
import pytest
from gpu import capture, torch

import sparse_mla
from bench.cuda import logits as bench


@pytest.mark.parametrize("heads", [64, 32, 65, 7])
@pytest.mark.parametrize(("T", "N"), [(1, 1000), (300, 2048), (2048, 8192), (1000, 70_000)])
def test_prefills(T, N, heads):
    work = bench.make_prefill(T, max(T, N), heads)
    assert work.judge(work.call()) <= 1


@pytest.mark.parametrize("heads", [64, 32, 65])
@pytest.mark.parametrize("next_n", [1, 2, 3, 4, 8, 9])
@pytest.mark.parametrize(("R", "N"), [(1, 32768), (64, 4096), (3, 131072)])
def test_decodes(R, N, next_n, heads):
    work = bench.make_decode(R, N, heads, next_n)
    assert work.judge(work.call()) <= 1


@pytest.mark.parametrize("heads", [64, 32, 7])
def test_bits_do_not_depend_on_the_shape(heads):
    """One token, few and many tokens per request go different ways on Hopper."""
    work = bench.make_prefill(500, 4096, heads)
    whole = work.call()
    for first, end in ((0, 1), (17, 18), (3, 9), (100, 108), (250, 499)):
        some = slice(first, end)
        part = sparse_mla.indexer_logits(
            work.q[some], work.weights[some], (work.keys, work.scales), work.lens[some]
        )
        assert torch.equal(part.view(torch.int32), whole[some].view(torch.int32))
    again = sparse_mla.indexer_logits(work.q, work.weights, (work.keys, work.scales), work.lens)
    assert torch.equal(again.view(torch.int32), whole.view(torch.int32))


@pytest.mark.parametrize("heads", [64, 7])
def test_a_graph_reads_what_is_there_when_it_runs(heads):
    work = bench.make_decode(5, 2048, heads)
    graph, out = capture(work.call)
    work.q.copy_(bench.make_queries(5, heads)[0])
    work.lens.copy_(torch.tensor([2048, 0, 1, 77, 640]).int())
    graph.replay()
    torch.cuda.synchronize()
    assert work.judge(out) <= 1


@pytest.mark.parametrize("heads", [64, 7])
def test_more_than_4_gib_of_logits(heads):
    """Offsets beyond 2^31 elements."""
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB")
    T, N = 20_000, 120_000
    q, weights = bench.make_queries(T, heads)
    keys = torch.randn(300, 128, device=bench.DEVICE).to(torch.float8_e4m3fn)
    scales = torch.ones(300, device=bench.DEVICE)
    lens = torch.full((T,), 300, device=bench.DEVICE).int()
    out = torch.empty(T, N, dtype=torch.bfloat16, device=bench.DEVICE)
    sparse_mla.indexer_logits(q, weights, (keys, scales), lens, out=out)
    want = sparse_mla.indexer_logits(
        q[-3:], weights[-3:], (keys, scales), lens[-3:], dtype="bfloat16"
    )
    assert torch.equal(out[-3:, :300], want)
    assert torch.isneginf(out[-1, 300:]).all()
    assert np.isneginf(gpu.get(out[0, -5:].float())).all()


@pytest.mark.parametrize("heads", [64, 32])
@pytest.mark.parametrize(
    ("counts", "N"),
    [
        ([1, 2, 6], 4096),  # as many tokens as three each
        ([3] * 5, 1000),
        ([5] * 4, 3000),
        ([7] * 3, 2000),
        ([0, 4, 1, 1], 2000),  # not equally many
        ([1, 3] * 16, 20_000),  # shared evenly
    ],
)
def test_tokens_per_request(counts, N, heads):
    """Blocks of tokens follow the mean count of tokens per request, and bits do not."""
    R, T, blocks = len(counts), sum(counts), N // bench.BLOCK_SIZE + 1
    q, weights = bench.make_queries(T, heads)
    slots = R * blocks * bench.BLOCK_SIZE
    keys = torch.randn(slots, bench.DIM, device="cuda").to(torch.float8_e4m3fn)
    scales = torch.rand(slots, device="cuda") + 0.5
    parts = [x.view(torch.uint8).view(R * blocks, -1) for x in (keys, scales)]
    cache = torch.cat(parts, 1).view(R * blocks, bench.BLOCK_SIZE, bench.FP8_ROW)
    table = torch.randperm(R * blocks, device="cuda").int().view(R, blocks)
    req = torch.arange(R, device="cuda").int().repeat_interleave(torch.tensor(counts).cuda())
    lens = torch.randint(0, N + 1, (T,), device="cuda").int()

    def score(some):
        given = {"block_table": table, "req_id_per_token": req[some]}
        return sparse_mla.indexer_logits(q[some], weights[some], cache, lens[some], **given)

    whole = score(slice(None))
    for t in range(T):
        alone = score(slice(t, t + 1))
        assert torch.equal(whole[t].view(torch.int32), alone[0].view(torch.int32))
