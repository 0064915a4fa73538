"""Layers with `Config.cp` on the GPU: a captured rank replays after builds of other lengths."""

from __future__ import annotations

import dataclasses

import cases
import engine
import gpu
import library
import numpy as np
import pytest
from gpu import capture, torch
from rank_steps import take_share
from test_gpu_dense import MAX_LEN, PAGE, PAGES, REQUESTS, Engine

import sparse_mla

dense = sparse_mla.dense
NOTHING = np.zeros((PAGES, PAGE, 1), np.uint8)  # in place of a whole cache, which nothing needs


def share_of(batch: cases.Batch, cp) -> cases.Batch:
    """A rank's batch with a table of as many columns as any batch needs."""
    share, _ = take_share(batch, NOTHING, cp)
    table = np.full((len(batch.seq_lens), MAX_LEN // PAGE + 1), -1, np.int32)
    table[:, : share.block_table.shape[1]] = share.block_table
    return dataclasses.replace(share, block_table=table)


@pytest.mark.parametrize("cp", [(0, 2, 64), (1, 2, 1), (3, 4, 16)])
@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "fp8_ds_mla"])
def test_a_captured_rank_replays_after_builds(kv_cache_dtype, query_len, cp):
    """Replays have the bits of eager steps, in out, in lse and in the cache."""
    fixed = Engine(kv_cache_dtype, query_len, cp=cp)
    builder, other = dense.MetadataBuilder(fixed.config), dense.MetadataBuilder(fixed.config)
    batches = [fixed.batch(real, seed) for seed, real in enumerate((8, 5, 1, 8, 7, 2))]
    batches = [share_of(batch, cp) for batch in batches]
    fixed.load(batches[0])
    metadata = fixed.build(builder, batches[0])
    out, lse = fixed.make_out(), gpu.put(np.zeros((fixed.tokens, 16), np.float32))
    graph, _ = capture(lambda: fixed.forward(metadata, out=out, lse=lse))
    for i in range(60):
        batch = batches[i % len(batches)]
        fixed.load(batch)
        before = fixed.cache.clone()
        fixed.build(builder, batch)
        out.view(torch.uint8).fill_(0xFF)
        lse.view(torch.uint8).fill_(0xFF)
        graph.replay()
        replayed = fixed.cache.clone()
        fixed.cache.copy_(before)
        want, want_lse = fixed.forward(fixed.build(other, batch))
        assert torch.equal(out.view(torch.uint8), want.view(torch.uint8)), i
        assert torch.equal(lse.view(torch.uint8), want_lse.view(torch.uint8)), i
        assert torch.equal(replayed.view(torch.uint8), fixed.cache.view(torch.uint8)), i
        assert torch.isfinite(out).all()


@pytest.mark.parametrize("path", ["mixed", "bf16"])
def test_a_captured_rank_of_a_sparse_layer_replays(path):
    """The rank's lists are made inside the graph, from lists and tables of the moment."""
    cp = 1, 2, 16
    config = engine.config(
        library.sparse_mla, num_heads=16, fp8=path != "bf16", path=path, block_size=PAGE, cp=cp
    )
    layer = sparse_mla.SparseMLA(config)
    builder, other = sparse_mla.MetadataBuilder(config), sparse_mla.MetadataBuilder(config)
    rng = np.random.default_rng(5)
    lens = [rng.integers(1, MAX_LEN, REQUESTS).tolist() for _ in range(4)]
    wholes = [cases.make_batch([1] * REQUESTS, n, block_size=PAGE) for n in lens]
    steps = [engine.make_step(batch, 16, seed=i) for i, batch in enumerate(wholes)]
    shares = [share_of(batch, cp) for batch in wholes]
    rows = cases.make_rows(rng, PAGES * PAGE, "bf16" if path == "bf16" else "fp8")
    cache = gpu.put(rows.reshape(PAGES, PAGE, -1))
    names = ("query_start_loc", "seq_lens", "slot_mapping", "block_table")
    arrays = {name: gpu.put(getattr(shares[0], name)) for name in names}
    q, topk = gpu.put(steps[0].q), gpu.put(steps[0].topk_indices)
    metadata = builder.build(shares[0].common(sparse_mla, **arrays))
    out, lse = (x.clone() for x in layer.forward(q, cache, topk, metadata))
    graph, _ = capture(lambda: layer.forward(q, cache, topk, metadata, out=out, lse=lse))
    for i in range(12):
        share, step = shares[i % 4], steps[i % 4]
        for name, x in arrays.items():
            x.copy_(gpu.put(getattr(share, name)))
        q.copy_(gpu.put(step.q))
        topk.copy_(gpu.put(step.topk_indices))
        builder.build(share.common(sparse_mla, **arrays))
        out.view(torch.uint8).fill_(0xFF)
        lse.view(torch.uint8).fill_(0xFF)
        graph.replay()
        want = layer.forward(q, cache, topk, other.build(share.common(sparse_mla, **arrays)))
        for got, x in zip((out, lse), want, strict=True):
            assert torch.equal(got.view(torch.uint8), x.view(torch.uint8)), i
        assert torch.isfinite(out).all()
        assert out.any()
