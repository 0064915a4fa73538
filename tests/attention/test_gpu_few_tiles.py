"""mla_attention by Hopper's kernel for few tiles, where all splits of all tiles run at once. Which
calls it takes is in tests/c/test_cuda_few_tiles.c."""

from __future__ import annotations

import dataclasses
from functools import partial

import device
import numpy as np
import pytest
import reference as ref
from dense_cases import Dense, Mask
from dense_cases import check_twice as check
from device import import_quietly
from gpu import capture
from helpers import assert_kernels, assert_same_bits, assert_within_bounds
from library import sparse_mla

import sparse_mla as package

attend = sparse_mla.mla_attention
torch = import_quietly("torch")
CAUSAL = Mask(causal=True)
BLOCK = 64

if torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("the kernel is Hopper's", allow_module_level=True)


def make(lens: list[int], *, queries: int = 1, mask=CAUSAL, **more) -> Dense:
    return Dense([queries] * len(lens), lens, is_uniform=True, mask=mask, **more)


SETUP = """
import torch, sparse_mla
def call(count, heads, width, length, has_starts=False, **options):
    q = torch.zeros(count, 1, heads, width, dtype=torch.bfloat16, device="cuda")
    cache = torch.zeros(300, 64, width, dtype=torch.bfloat16, device="cuda")
    table = torch.zeros(count, -(-length // 64), dtype=torch.int32, device="cuda")
    lens = torch.full((count,), length, dtype=torch.int32, device="cuda")
    if has_starts:
        q = q.flatten(0, 1)
        options["cu_seqlens_q"] = torch.arange(count + 1, dtype=torch.int32, device="cuda")
    sparse_mla.mla_attention(q, cache, table, lens, softmax_scale=1.0, **options)
"""
FEW = "attention_few_sm90.cu, 64 heads per CTA"
DENSE = "attention_dense_sm90.cu, 64 heads per CTA"
CALLS = [
    ("1, 16, 576, 4096", f"{FEW} (tokens 1, splits 64)"),
    ("8, 16, 512, 4096, causal=True", f"{FEW} (tokens 8, splits 16)"),
    ("128, 64, 576, 100, window_size=(64, 0)", f"{FEW} (tokens 128, splits 1)"),
    ("4, 16, 576, 4096, has_starts=True", f"{FEW} (tokens 4, splits 32)"),
    ("128, 64, 576, 4096", f"{DENSE} (tokens 128, splits 1)"),
    ("256, 64, 576, 512", f"{FEW} (tokens 256, splits 1)"),
    ("265, 64, 576, 512", f"{DENSE} (tokens 265, splits 1)"),
    ("8, 16, 576, 4096, attention_chunk=64", f"{DENSE} (tokens 8, splits 1)"),
    ("8, 16, 576, 4096, num_splits=1", f"{DENSE} (tokens 8, splits 1)"),
]


def test_which_calls_it_takes():
    assert_kernels("mla_attention", SETUP, CALLS)


@pytest.mark.parametrize("heads", [1, 5, 16, 17, 40, 64, 65, 100, 128])
@pytest.mark.parametrize("queries", [1, 2, 3, 4])
def test_heads_and_queries(heads, queries):
    lens = [2000, 1, 700, 0, 129, 64]
    check(make(lens, queries=queries, heads=heads, sink=True))


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("fmt", ["bf16", "bf16_512"])
@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 2047, 2049])
def test_ends_of_blocks(length, fmt, heads):
    check(make([length], heads=heads, fmt=fmt))
    check(make([length, 4000 - length], heads=heads, fmt=fmt, queries=2, seed=1))


@pytest.mark.parametrize("blocks", [16, 32, 64, 65, 128])
@pytest.mark.parametrize("beyond", [-1, 0, 1])
def test_ends_of_splits(blocks, beyond):
    """64 splits for one request of 16 heads, 16 for eight."""
    length = blocks * BLOCK + beyond
    check(make([length], heads=16))
    check(make([length, *[length // 2] * 7], heads=3))


@pytest.mark.parametrize("count", [1, 3, 31, 33, 64, 66, 128, 132, 133, 400])
def test_one_split(count):
    """Few keys: CTAs write the results themselves, of more than 132 tiles in waves."""
    lens = [int(x) for x in np.random.default_rng(count).integers(0, 130, count)]
    check(make(lens, heads=64, sink=True, block_size=64))


@pytest.mark.parametrize("table", ["pages", "slots"])
@pytest.mark.parametrize("block_size", [1, 5, 16, 64, 100])
@pytest.mark.parametrize("layout", ["paged", "mqa", "padded"])
def test_pages(table, block_size, layout):
    lens = [1000, 63, 0, 64, 320, 2]
    check(make(lens, heads=16, block_size=block_size, layout=layout, has_slots=table == "slots"))


@pytest.mark.parametrize("has_slots", [False, True])
@pytest.mark.parametrize("missing", [0, 1, 30])
def test_holes(missing, has_slots):
    """Entries that name no page, junk behind a request's end, and a table that ends too early."""
    check(make([900, 70, 640, 0], heads=20, holes=0.3, missing=missing, has_slots=has_slots))


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize(
    "mask",
    [
        Mask(),
        *(Mask(window=(left, 0)) for left in (0, 1, 62, 63, 64, 65, 500)),
        *(Mask(window=window) for window in [(3, 2), (-1, 1), (200, -1), (0, 70)]),
        Mask(causal=True, window=(130, 0)),
    ],
)
def test_masks(mask, queries):
    check(make([1500, 64, 3, 0, 129], queries=queries, heads=16, mask=mask))


def test_more_queries_than_keys():
    check(make([2, 0, 1, 70], queries=5, heads=30))


QUERIES = [[1] * 6, [2, 0, 1, 4, 0, 1], [0, 0, 3, 0, 0, 0], [0] * 6, [1, 1, 1, 1, 1, 20]]


@pytest.mark.parametrize("queries", QUERIES)
@pytest.mark.parametrize("padding", [0, 1, 5])
@pytest.mark.parametrize("heads", [16, 40, 128])
def test_starts_on_the_device(queries, padding, heads):
    """Results of tokens of no request stay as they are."""
    lens = [700, 64, 0, 1, 3000, 129]
    check(Dense(queries, lens, heads=heads, mask=CAUSAL, padding=padding, sink=True))
    check(Dense(queries, [x // 50 for x in lens], heads=heads, mask=CAUSAL, padding=padding))


@pytest.mark.parametrize("count", [31, 32, 33, 100])
def test_many_requests(count):
    """A warp looks at 32 requests at a time. One split, and several."""
    rng = np.random.default_rng(count)
    queries = [int(x) for x in rng.integers(0, 2, count)]
    lens = [int(x) for x in rng.integers(0, 400, count)]
    check(Dense(queries, lens, heads=16, mask=CAUSAL, padding=2))
    check(Dense([0] * (count - 2) + [1, 1], lens, heads=16, mask=CAUSAL))


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("rise", [0.5, 3.0, 60.0, -60.0])
def test_references_that_move(rise, splits):
    """Logits that grow or fall from key to key, by less and by more than a weight can hold."""
    length = 400 if splits == 1 else 9000
    case = make([length] * (132 if splits == 1 else 4), heads=16, key_std=0.1)
    case.q[...] = np.abs(case.q.astype(np.float32)).astype(ref.BF16)
    steps = np.float32(rise) * np.arange(length, dtype=np.float32) / length
    keys = case.cache.array.reshape(-1, 576)
    for slots in case.slots:
        keys[slots] = (keys[slots].astype(np.float32) + steps[: len(slots), None]).astype(ref.BF16)
    check(case)


def test_one_heavy_key():
    case = make([3000, 100], heads=64)
    keys = case.cache.array.reshape(-1, 576)
    for slots in case.slots:
        keys[slots[-1]] = (keys[slots[-1]].astype(np.float32) * 50).astype(ref.BF16)
    check(case)


@pytest.mark.parametrize("std", [1e-20, 0.01, 30.0])
def test_values_of_any_size(std):
    check(make([800, 65], heads=16, std=std, scale=0.05))


def test_the_workspace_s_bytes_do_not_matter():
    """What an earlier call has left there is not taken for a partial row."""
    case = make([900, 3, 64, 2000, 0], heads=16)
    size = package.attention_workspace_size(5, 16, 2048, device=device.NAME)
    want = case.run(attend)
    for byte in (0, 1, 255):
        got = case.run(attend, workspace=np.full(size, byte, np.uint8))
        assert_same_bits(got["out"], want["out"])
        assert_same_bits(got["lse"], want["lse"])


def test_a_request_s_bits_have_no_neighbours():
    """Beside other requests, whose lengths do not matter, with as many of them."""
    case = make([2000, 500, 64], heads=40)
    other = make([2000, 500, 64], heads=40)
    other.seq_lens[0] = 7
    want, got = case.run(attend), other.run(attend)
    assert_same_bits(got["out"][1:], want["out"][1:])
    assert_same_bits(got["lse"][1:], want["lse"][1:])


def test_replays_with_other_lengths():
    """A captured call, whose plan knows the table's width alone."""
    case = make([3000, 2990, 2, 700], heads=16, block_size=64)
    q, cache, table, lens = (torch.from_numpy(x.view(np.uint8)).cuda() for x in case.arguments())
    q = q.view(torch.bfloat16).view(case.q.shape)
    cache = cache.view(torch.bfloat16).view(case.cache.array.shape)
    table = table.view(torch.int32).view(case.table.shape)
    lens = lens.view(torch.int32)
    options = {"softmax_scale": case.softmax_scale, "causal": True}
    call = partial(package.mla_attention, q, cache, table, lens, **options)
    graph, (out, lse) = capture(call)
    for new in ([3000, 2990, 2, 700], [1, 64, 0, 65], [0, 0, 0, 0], [129, 2900, 1, 699]):
        shorter = dataclasses.replace(case, seq_lens=case.seq_lens)
        shorter.cache, shorter.table, shorter.q = case.cache, case.table, case.q
        shorter.seq_lens = new
        shorter.slots = shorter.find_slots(case.block_size)
        lens.copy_(torch.tensor(new, dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        bits = out.view(torch.int16).cpu().numpy().view(np.uint16).view(ref.BF16)
        got = {"out": bits.reshape(-1, 16, 512), "lse": lse.cpu().numpy().reshape(-1, 16)}
        assert_within_bounds(shorter.reference(), got)
