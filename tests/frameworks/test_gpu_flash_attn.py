"""sparse_mla.flash_attn on a GPU: without waiting, and in CUDA graphs."""

from __future__ import annotations

from dataclasses import replace

import helpers
import numpy as np
import pytest
from dense_cases import Mask
from flash_attn_cases import Attn, Heads, draw
from flash_mla_cases import Arrays
from helpers import assert_same_bits, assert_within_bounds

from sparse_mla import flash_attn

torch = helpers.find_framework("torch").module


@pytest.fixture(params=["torch", "cupy"])
def gpu_arrays(request) -> Arrays:
    return Arrays(request.param)


@pytest.mark.parametrize("seed", range(60))
def test_random_batches(seed, gpu_arrays):
    draw(5000 + seed).check(gpu_arrays)


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_dense_decoding_of_heads(kind, gpu_arrays):
    lens = [300, 0, 1, 64]
    Heads([2] * 4, lens, 16, 2, (576, 512), kind, kind, mask=Mask(causal=True)).check(gpu_arrays)


@pytest.mark.parametrize("has_rooms", [False, True])
@pytest.mark.parametrize("num_queries", [1, 3])
def test_graph_replay_reads_new_contents(num_queries, has_rooms):
    """What a call makes itself, tables, lengths and starts, is made again in each replay."""
    arrays = Arrays("torch")
    common = {"mask": Mask(causal=True), "is_uniform": True, "has_rooms": has_rooms, "sink": True}
    first = Attn(
        [num_queries] * 3,
        [40, 3, 17],
        8,
        2,
        (128, 128),
        page_size=48 if has_rooms else 16,
        **common,
    )
    second = replace(first, key_lens=[39, 9, 20], seed=2)  # as many pages
    given = {name: arrays.put(x) for name, x in first.kvcache().items()}
    given["return_softmax_lse"] = True
    flash_attn.flash_attn_with_kvcache(**given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = flash_attn.flash_attn_with_kvcache(**given)
    for case in (first, second):
        for name, x in case.kvcache().items():
            if isinstance(x, np.ndarray):
                given[name].copy_(arrays.put(x))
        graph.replay()
        torch.cuda.synchronize()
        assert_within_bounds(case.reference(), case.flat(*(arrays.get(x) for x in results)))


def test_one_length_and_rooms_in_order_in_a_graph():
    rng = np.random.default_rng(1)
    q, cache = (rng.normal(0, 1, x).astype(np.float16) for x in ((3, 2, 4, 64), (3, 20, 2, 64)))
    arrays = Arrays("torch")
    q, cache = arrays.put(q), arrays.put(cache)

    def run():
        return flash_attn.flash_attn_with_kvcache(
            q, cache, cache, cache_seqlens=9, causal=True, return_softmax_lse=True
        )

    want = [arrays.get(x.clone()) for x in run()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    graph.replay()
    torch.cuda.synchronize()
    for x, y in zip(results, want, strict=True):
        assert_same_bits(np.ascontiguousarray(arrays.get(x)), np.ascontiguousarray(y))
