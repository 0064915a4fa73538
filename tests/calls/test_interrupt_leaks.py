"""Calls that a signal ends give back all that they had: references to arrays, results, scratch and
threads. tests/c/test_interrupt.c ends calls at every question. Here Python's handler raises in
every operator that asks at all, and in layers of several calls."""

from __future__ import annotations

import gc
import os
import signal
import sys

import numpy as np
import pytest
import reference as ref
from cases import int32
from helpers import malloc_bytes
from test_interrupt import Alarm

import sparse_mla

pytestmark = pytest.mark.frameworks

SECONDS = 0.03  # from a call's start to its signal; a call asks after 0.05 at the earliest
TIMES = 4


def same(x: np.ndarray, count: int) -> np.ndarray:
    """`count` rows that are one in memory."""
    return np.broadcast_to(x, (count, *x.shape[1:]))


def bf16(*shape: int) -> np.ndarray:
    return ref.to_bf16(np.random.default_rng(1).standard_normal(shape).astype(np.float32))


def e4m3(*shape: int) -> np.ndarray:
    return np.random.default_rng(2).integers(0, 120, shape).astype(np.uint8).view(ref.E4M3)


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


TOKENS, KEYS = 3000, 4096
PAGES = np.arange(KEYS // 64, dtype=np.int32)[None]


def each(value: int) -> np.ndarray:
    """The same integer for every token."""
    return same(int32(value), TOKENS)


def indices() -> np.ndarray:
    return same(np.arange(2048, dtype=np.int32)[None], TOKENS)


def scored() -> tuple:
    """What the indexer's operators begin with."""
    keys = e4m3(KEYS, 128), ones(KEYS)
    return same(e4m3(1, 64, 128), TOKENS), same(ones(1, 64), TOKENS), keys, each(KEYS)


# By operator, the positional arguments and the options of a long call.
CALLS = {
    "sparse_attention": lambda: (
        (same(bf16(1, 32, 576), TOKENS), bf16(KEYS, 576), indices()),
        {"softmax_scale": 0.1},
    ),
    "sparse_mla_dsv4": lambda: (
        (
            *(same(bf16(1, 32, 512), TOKENS), bf16(KEYS // 64, 64, 512), None, indices()),
            *(bf16(KEYS // 64, 64, 512), each(2048), None),
        ),
        {"bmm1_scale": 0.1},
    ),
    "mla_attention": lambda: (
        (same(bf16(1, 32, 576), TOKENS), bf16(KEYS // 64, 64, 576), PAGES, int32(KEYS)),
        {"softmax_scale": 0.1, "cu_seqlens_q": int32(0, TOKENS)},
    ),
    "varlen_attention": lambda: (
        (
            *(same(bf16(1, 32, 192), TOKENS), bf16(KEYS, 32, 192), bf16(KEYS, 32, 128)),
            *(int32(0, TOKENS), int32(0, KEYS)),
        ),
        {"softmax_scale": 0.1},
    ),
    "paged_attention": lambda: (
        (
            *(same(bf16(1, 32, 128), TOKENS), *(bf16(KEYS // 64, 64, 8, 128),) * 2),
            *(PAGES, int32(KEYS)),
        ),
        {"softmax_scale": 0.1, "cu_seqlens_q": int32(0, TOKENS)},
    ),
    "indexer_logits": lambda: (scored(), {"starts": each(0)}),
    "lightning_indexer": lambda: (
        scored(),
        {"starts": each(0), "k": 64, "max_logits_bytes": 1 << 24},
    ),
    "top_k_per_row": lambda: (
        (same(np.arange(1 << 16, dtype=np.float32)[None], TOKENS), each(0), each(1 << 16)),
        {"k": 2048},
    ),
    "k_up_proj": lambda: ((same(bf16(1, 32, 128), TOKENS), bf16(512, 32, 128)), {}),
    "v_up_proj": lambda: ((same(bf16(1, 128, 512), TOKENS), bf16(512, 128, 128)), {}),
    "kv_up_proj": lambda: ((same(bf16(1, 512), TOKENS), bf16(512, 8192)), {}),
    "grouped_output_projection": lambda: (
        (same(bf16(1, 8, 4096), TOKENS), None, bf16(8, 512, 4096), None),
        {},
    ),
    "scaled_quantize": lambda: ((same(bf16(1, 8192), 4 * TOKENS),), {"group": (1, 128)}),
    "fp8_linear": lambda: (
        (same(bf16(1, 4096), TOKENS), e4m3(4096, 4096), ones(32, 32)),
        {"input_group": (1, 128)},
    ),
}


@pytest.fixture
def interrupts(monkeypatch):
    """interrupts(call) ends a call by a signal. The slowest kernels make all calls long."""
    monkeypatch.setenv("SPARSE_MLA_CPU_ISA", "base")

    def raise_it(*_):
        raise Alarm

    def run(call) -> None:
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        with pytest.raises(Alarm):
            call()

    before = signal.signal(signal.SIGALRM, raise_it)
    yield run
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def assert_keeps_nothing_when_ended(interrupts, call, given) -> None:
    """After the first call, `given` objects have their references, and no memory or thread is left.
    The smallest of these calls' results and scratch are larger than what may be left."""
    interrupts(call)
    gc.collect()
    held = [sys.getrefcount(x) for x in given]
    threads = num_threads()
    before = malloc_bytes(), sys.getallocatedblocks()
    for _ in range(TIMES):
        interrupts(call)
    gc.collect()
    assert [sys.getrefcount(x) for x in given] == held
    assert num_threads() <= threads
    assert malloc_bytes() - before[0] < 64 << 10
    assert sys.getallocatedblocks() - before[1] < 50 * TIMES


def arrays_of(*values) -> list:
    return [
        x
        for value in values
        for x in (value if isinstance(value, tuple) else (value,))
        if isinstance(x, np.ndarray)
    ]


@pytest.mark.parametrize("op", CALLS)
def test_operators(op, interrupts):
    args, options = CALLS[op]()
    call = getattr(sparse_mla, op)
    given = [*arrays_of(*args, *options.values()), call, args, options]
    assert_keeps_nothing_when_ended(interrupts, lambda: call(*args, **options), given)


def test_workers_of_an_ended_call_are_done(interrupts):
    """None still writes the results when the call returns."""
    args, options = CALLS["sparse_attention"]()
    out = np.zeros((TOKENS, 32, 512), ref.BF16)
    interrupts(lambda: sparse_mla.sparse_attention(*args, **options, out=out))
    seen = [out.view(np.uint16).astype(np.int64).sum() for _ in range(2)]
    assert seen[0] == seen[1]
    assert not out[-1].view(np.uint16).any(), "the call was ended"


@pytest.mark.parametrize("path", ["mixed", "separate"])
def test_layers(path, interrupts):
    """A layer that was ended leaves its step whole: the next forward is right."""
    config = sparse_mla.Config(
        32,
        softmax_scale=0.1,
        kv_cache_dtype="fp8_ds_mla",
        path=path,
        max_num_seqs=2,
        max_num_batched_tokens=TOKENS,
        max_model_len=KEYS,
    )
    common = sparse_mla.CommonAttentionMetadata(
        int32(0, TOKENS), int32(KEYS), np.zeros(TOKENS, np.int64), PAGES
    )
    builder, layer = sparse_mla.MetadataBuilder(config), sparse_mla.SparseMLA(config)
    metadata = builder.build(common)
    arrays = same(bf16(1, 32, 576), TOKENS), np.zeros((KEYS // 64, 64, 656), np.uint8), indices()
    given = [*arrays, metadata, builder, layer]
    call = lambda: layer.forward(*arrays, metadata)  # noqa: E731
    assert_keeps_nothing_when_ended(interrupts, call, given)
    few = sparse_mla.CommonAttentionMetadata(int32(0, 2), int32(9), np.zeros(2, np.int64), PAGES)
    out, _ = layer.forward(arrays[0][:2], arrays[1], arrays[2][:2], builder.build(few))
    assert not out.view(np.uint16).any(), "all values of the cache are 0"
