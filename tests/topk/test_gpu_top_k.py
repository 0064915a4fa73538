"""top_k_per_row on a GPU: grids and rows of every size, for which clusters of every size, rows in
shared memory and rows beyond it are chosen. tests/topk/test_top_k.py runs on the GPU, too."""

from __future__ import annotations

import numpy as np
import pytest
import reference as ref
from cases import int32
from gpu import torch
from helpers import assert_same_bits
from library import sparse_mla
from test_top_k import KINDS, expect, make, whole

import sparse_mla as package

# rows, columns, k
GRIDS = [
    (1, 1_048_576, 2048), (1, 131_072, 2048), (4, 128_000, 2048), (8, 65_536, 512),
    (64, 32_768, 512), (64, 32_768, 2048), (64, 131_072, 2048), (300, 32_768, 2048),
    (500, 16_384, 512), (3000, 2048, 100), (130, 40_000, 4096), (33, 33_333, 333),
    (40, 250_000, 2048), (3, 500_000, 1000), (1, 524_288, 2048), (1, 524_290, 2048),
    (20, 600_000, 2048), (1, 1_500_000, 200_000), (2, 2_000_000, 512),
]  # fmt: skip


def on_gpu(x: np.ndarray):
    bits = x.view(np.int16) if x.dtype == ref.BF16 else x
    moved = torch.from_numpy(np.ascontiguousarray(bits)).cuda()
    return moved.view(torch.bfloat16) if x.dtype == ref.BF16 else moved


@pytest.mark.parametrize("dtype", [np.float32, ref.BF16])
@pytest.mark.parametrize(("rows", "columns", "k"), GRIDS)
def test_grids(rows, columns, k, dtype):
    """Every CTA of a full device at once; the same bits in three runs and as the CPU's."""
    few = make("random", dtype, min(rows, 7), columns, seed=columns)
    logits = np.tile(few, (-(-rows // len(few)), 1))[:rows]
    starts = np.arange(rows, dtype=np.int32) % 5
    ends = columns - np.arange(rows, dtype=np.int32) % 3
    want = package.top_k_per_row(logits, starts, ends, k=k)
    some = [0, rows // 2, rows - 1]
    exact, _ = expect(logits[some], starts[some], ends[some], k)
    assert_same_bits(want[some], exact, "the CPU's")
    placed = [on_gpu(x) for x in (logits, starts, ends)]
    for _ in range(3):
        got = package.top_k_per_row(*placed, k=k)
        assert_same_bits(got.cpu().numpy(), want, "out")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "columns", "k"),
    [
        (64, 32_768, 2048),
        (140, 30_000, 500),
        (64, 100_000, 2048),
        (2, 200_000, 2048),
        (2, 700_001, 4096),
        (2, 1_048_576, 1_000_000),
    ],
)
def test_distributions_of_long_rows(rows, columns, k, kind):
    few = make(kind, np.float32, 2, columns)
    logits = np.tile(few, (rows // 2, 1))
    want, _ = expect(few, *whole(few), k)
    got = package.top_k_per_row(*(on_gpu(x) for x in (logits, *whole(logits))), k=k)
    assert_same_bits(got.cpu().numpy(), np.tile(want, (rows // 2, 1)), "out")


@pytest.mark.parametrize("columns", [70_000, 600_000])
@pytest.mark.parametrize("shift", range(9))
@pytest.mark.parametrize("dtype", [np.float32, ref.BF16])
def test_rows_anywhere_in_memory(dtype, shift, columns):
    """Long rows that begin and end inside a vector."""
    wide = make("random", dtype, 3, columns + 17, seed=shift)
    placed = on_gpu(wide)[:, shift : columns + 2 * shift]
    logits = wide[:, shift : columns + 2 * shift]
    want, _ = expect(logits, *whole(logits), 1000)
    got = package.top_k_per_row(placed, *(on_gpu(x) for x in whole(logits)), k=1000)
    assert_same_bits(got.cpu().numpy(), want, "out")


@pytest.mark.parametrize(("rows", "columns"), [(150, 50_000), (40, 700_000)])
def test_lengths_that_differ(rows, columns):
    """Neighbouring rows that are empty, shorter than k, and long, with slots."""
    rng = np.random.default_rng(1)
    k = 512
    logits = make("random", np.float32, rows, columns)
    lengths = [0, 1, 100, 511, 512, 513, 3000, columns // 4 * 3, columns - 1, columns]
    ends = rng.choice(lengths, rows).astype(np.int32)
    starts = np.zeros(rows, np.int32)
    table = rng.integers(-1, 2000, (4, columns // 71)).astype(np.int32)  # ends before the rows do
    options = {
        "slots_block_table": table,
        "slots_block_size": 64,
        "req_id_per_token": rng.integers(0, 4, rows).astype(np.int32),
        "is_valid": rng.random(rows) < 0.9,
    }
    out, _, _ = sparse_mla.top_k_per_row(logits, starts, ends, k=k, **options)  # and as the CPU's
    want, _ = expect(logits, starts, ends, k)
    assert_same_bits(out, want, "out")


def test_a_bad_request_has_no_slots():
    logits = make("random", np.float32, 2, 9)
    placed = [on_gpu(x) for x in (logits, *whole(logits))]
    out, slots, lens = package.top_k_per_row(
        *placed,
        k=3,
        slots_block_table=on_gpu(int32([1, 2])),
        slots_block_size=8,
        req_id_per_token=on_gpu(int32(0, 7)),
    )
    assert (out.cpu().numpy() >= 0).all()
    assert slots[1].tolist() == [-1, -1, -1]
    assert lens.tolist() == [3, 0]
