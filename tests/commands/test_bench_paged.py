"""The benchmark of paged_attention on CUDA, whose calls run on the CPU here."""

from __future__ import annotations

import pytest

import sparse_mla
from sparse_mla._bench.common.paged import Shape

SHAPES = (Shape(3, 50, 16, heads=8, kv_heads=2, dim=64), Shape(1, 70, 1, heads=4, kv_heads=4))
TIMES = {"ours": 1e-3, "peer": 2e-3}


@pytest.mark.torch
@pytest.mark.parametrize(("factor", "failures"), [(1, 0), (1.5, 2)])
def test_rows_are_judged(torch, factor, failures, monkeypatch):
    """A kernel that is wrong is told. The peer has the keys of the same requests, in order."""
    from sparse_mla._bench.cuda import paged
    from sparse_mla._bench.cuda.timing import CudaEffort

    attend = sparse_mla.paged_attention
    results = []

    def wrong(*arrays, **options):
        out, lse = attend(*arrays, **options)
        return out * factor, lse

    def interleave(sides, effort):
        results.append({name: calls[0]() for name, calls in sides.items()})
        return TIMES

    given = {"DEVICE": "cpu", "SHAPES": SHAPES, "interleave_flushed": interleave}
    for name, value in (given | {"floor_seconds": lambda flop, num_bytes: 4e-4}).items():
        monkeypatch.setattr(paged, name, value)
    monkeypatch.setattr(sparse_mla, "paged_attention", wrong)
    table = paged.measure_paged(CudaEffort())
    assert len(table.failures) == failures
    assert table.rows[0][:5] == ["bfloat16", "8/2", "3 × 50", "16", "1000.0"]
    assert table.rows[1][6:] == ["400.0", "2000.0", "2.00×"]
    assert table.records[0]["peer_us"] == 2000
    for found in results:
        ours, theirs = found["ours"][0] / factor, found["peer"][:, :, 0]
        assert (ours.float() - theirs.float()).abs().max() < 0.03
