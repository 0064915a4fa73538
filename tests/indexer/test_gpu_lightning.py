"""lightning_indexer on the GPU at an engine's sizes: the choice of the two calls from chunks of any
size, in graphs, and in a bounded workspace. test_lightning_indexer.py has the edges."""

import pytest
from gpu import capture, torch

import sparse_mla
from bench.cuda import logits as bench


def choose(work, k: int, **options):
    return sparse_mla.lightning_indexer(
        work.q, work.weights, (work.keys, work.scales), work.lens, k=k, **options
    )


def two_calls(work, k: int):
    logits = work.call()
    return sparse_mla.top_k_per_row(logits, torch.zeros_like(work.lens), work.lens, k=k)


@pytest.mark.parametrize("heads", [64, 32, 65, 7])
@pytest.mark.parametrize(
    ("T", "N", "k"), [(1, 5000, 512), (300, 2048, 512), (2048, 8192, 2048), (1000, 70_000, 2048)]
)
def test_prefills(T, N, k, heads):
    work = bench.make_prefill(T, N, heads)
    want = two_calls(work, k)
    row = -(-4 * N // 128) * 128
    for limit in (row, 63 * row, 200 * row, 2**29):
        if T * row // limit < 400:  # many chunks take long
            assert torch.equal(choose(work, k, max_logits_bytes=limit), want)


@pytest.mark.parametrize("heads", [64, 7])
def test_short_tokens_are_not_scored(heads):
    """A causal prefill from position 0: the workspace rows of the first k tokens stay as they are,
    and the others' choice is that of the two calls."""
    work = bench.make_prefill(1000, 1000, heads)
    # Chunks are multiples of 64 tokens: 1024 rows, and room to align them, make it one.
    workspace = torch.full((1024 * 4096 + 128,), 0xA5, dtype=torch.uint8, device=bench.DEVICE)
    got = choose(work, 512, workspace=workspace)
    assert torch.equal(got, two_calls(work, 512))
    start = -workspace.data_ptr() % 128
    rows = workspace[start : start + 1000 * 4096].view(1000, 4096) != 0xA5
    assert not rows[:512].any()
    assert rows[512:].any(1).all()


@pytest.mark.parametrize("heads", [64, 7])
def test_a_graph_reads_what_is_there_when_it_runs(heads):
    """A graph of six chunks, replayed with other queries and lengths."""
    work = bench.make_prefill(300, 4096, heads)
    graph, out = capture(lambda: choose(work, 512, max_logits_bytes=64 * 4096 * 4))
    work.q.copy_(bench.make_queries(300, heads)[0])
    work.lens.copy_(torch.randint(0, 4097, (300,)).int())
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, two_calls(work, 512))


def test_memory_of_a_long_prefill():
    """4096 tokens against 2^20 keys: 16 GiB of logits through 512 MiB, and no more than that."""
    if torch.cuda.mem_get_info()[0] < 8 << 30:
        pytest.skip("needs 8 GiB")
    q, weights = bench.make_queries(4096, 64)
    keys = torch.randn(2**20, 128, device=bench.DEVICE).to(torch.float8_e4m3fn)
    scales = torch.rand(2**20, device=bench.DEVICE) + 0.5
    lens = torch.arange(2**20 - 4095, 2**20 + 1, device=bench.DEVICE).int()
    out = torch.empty(4096, 2048, dtype=torch.int32, device=bench.DEVICE)
    size = sparse_mla.lightning_indexer_workspace_size(4096, 2**20, k=2048, device="cuda")
    assert size == 2**29 + 128
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    sparse_mla.lightning_indexer(q, weights, (keys, scales), lens, k=2048, out=out)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= size + (2 << 20)
    for t in (0, 127, 128, 4095):
        some = slice(t, t + 1)
        logits = sparse_mla.indexer_logits(q[some], weights[some], (keys, scales), lens[some])
        want = sparse_mla.top_k_per_row(logits, torch.zeros_like(lens[some]), lens[some], k=2048)
        assert torch.equal(out[some], want)
