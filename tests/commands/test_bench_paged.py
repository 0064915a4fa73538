"""The benchmarks of paged attention on CUDA, whose calls run on the CPU here."""

from __future__ import annotations

import numpy as np
import pytest

import sparse_mla
from bench.common.arrays import TorchArrays
from bench.common.rows import Bench
from bench.cuda.timing import CudaEffort
from bench.tables import paged, paged_layer, paged_steps
from bench.tables.paged import Shape
from bench.tables.paged_steps import (
    KINDS,
    PAGE_SIZE,
    Batch,
    find_differences,
    make_build,
    make_replay,
)

SHAPES = (
    Shape(3, 50, 16, heads=8, kv_heads=2, dim=64),
    Shape(1, 70, 1, heads=4, kv_heads=4, kv_type="float8_e4m3fn"),
)


def bench_of(timer=None) -> Bench:
    """The bench of CUDA, whose arrays are on the CPU."""
    return Bench(TorchArrays("cpu"), CudaEffort(), timer)


@pytest.mark.torch
@pytest.mark.parametrize(("factor", "failures"), [(1, 0), (1.5, 2)])
def test_rows_are_judged(torch, factor, failures, monkeypatch):
    """A kernel that is wrong is told. The peer has the keys of the same requests, in order."""
    attend = sparse_mla.paged_attention
    results = []

    def wrong(*arrays, **options):
        out, lse = attend(*arrays, **options)
        return out * factor, lse

    def timer(sides, effort):
        results.append({name: call() for name, call in sides.items()})
        return {"ours": 1e-3, "PyTorch": 2e-3}

    monkeypatch.setattr(paged, "CUDA", SHAPES)
    monkeypatch.setattr(paged, "floor_seconds", lambda flop, num_bytes: 4e-4)
    monkeypatch.setattr(sparse_mla, "paged_attention", wrong)
    table = paged.measure(bench_of(timer))
    assert len(table.failures) == failures
    assert table.rows[0][:5] == ["bfloat16", "8/2", "3 × 50", "16", "1000.0"]
    assert table.rows[1][6:] == ["400.0", "2000.0", "2.00×"]
    assert table.records[0]["peer_us"] == 2000
    for found in results:
        ours, theirs = found["ours"][0] / factor, found["PyTorch"][:, :, 0]
        assert (ours.float() - theirs.float()).abs().max() < 0.03


@pytest.mark.torch
@pytest.mark.parametrize(("shift", "failures"), [(0, 0), (1, 3)])
def test_layers_are_judged(torch, shift, failures, monkeypatch):
    """Verifications, and a prefix that is read once."""
    attend = sparse_mla.paged.attention

    def wrong(*arrays, **options):
        out, lse = attend(*arrays, **options)
        return out + shift, lse

    def timer(sides, effort):
        assert all(call() for call in sides.values())
        return {"ours": 1e-3, "beside": 2e-3}

    monkeypatch.setitem(paged_layer.SHAPES, ("cuda", False), ((3, 70), (3, 128, 20)))
    monkeypatch.setattr(sparse_mla.paged, "attention", wrong)
    table = paged_layer.measure(bench_of(timer))
    assert len(table.failures) == failures
    assert [row[0] for row in table.rows] == [
        "verify, a chain of 8",
        "verify, a tree of 8",
        "decode, a prefix read once",
    ]
    assert table.rows[2][1] == "3 × (128 + 20)"
    assert table.rows[2][3:] == ["1000.0", "read by each request", "2000.0", "0.50"]


@pytest.mark.torch
def test_builds_are_compared_with_chains_of_operators(torch, monkeypatch):
    """In PyTorch; the next test has NumPy's."""
    times = {"ours": 1e-6, "replay": 2e-6, "chain": 3e-6}
    given = {"DECODES": ((3, 70),), "OTHERS": (3, 300)}
    given |= {
        "host_seconds": lambda sides, batch, effort: times,
        "device_seconds": lambda sides, effort: times,
    }
    for name, value in given.items():
        monkeypatch.setattr(paged_steps, name, value)
    table = paged_steps.measure(bench_of())
    assert table.failures == []
    assert [row[0] for row in table.rows] == [kind.name for kind in KINDS]
    assert table.rows[0][3:] == ["1.0", "1.0", "2.0", "2.0", "3.0", "3.0"]
    assert table.rows[4][3:] == ["1.0", "1.0", "–", "–", "3.0", "3.0"]  # an extend


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_wrong_builds_are_told(kind):
    batch = Batch(3, 300, np, "cpu")
    found = kind.chain(batch)
    build = make_build(kind, batch)
    assert find_differences(build(), found, np.asarray) == []
    batch.pool_table[...] += PAGE_SIZE
    batch.lens[...] -= 1
    for call in filter(None, (build, make_replay(kind, batch))):
        wrong = find_differences(call(), found, np.asarray)
        assert {"page_table", "cu_seqlens_k"} <= set(wrong)
