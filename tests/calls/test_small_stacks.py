"""Calls from threads with stacks of 64 KiB (musl gives 128 KiB, Python allows 32) have the bytes of
other calls, and leave the memory beside the stack alone. tests/c/test_small_stacks.c calls the C
library.
"""

import json
import mmap
import threading

import cases
import device
import engine
import ml_dtypes
import numpy as np
import operators
import pytest
import v4_attend_cases as attend
from helpers import BESIDE_TESTS, assert_same_bits, printed_by_python

import sparse_mla

pytestmark = pytest.mark.skipif(device.ON_CUDA, reason="the stacks are those of the CPU's kernels")

STACK_BYTES = 64 << 10
RED = 0xA5
BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn


# --- calls that take more memory than those of good_calls.py -------------------------------------


def normal(*shape, dtype=np.float32) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape).astype(dtype)


def top_k(num_tokens, num_columns, dtype=np.float32):
    ends = np.full(num_tokens, num_columns, np.int32)
    logits = normal(num_tokens, num_columns, dtype=dtype)
    return lambda: sparse_mla.top_k_per_row(logits, 0 * ends, ends, k=100)


def scores(op, num_tokens, num_keys, **options):
    q, weights = normal(num_tokens, 4, 128, dtype=E4M3), normal(num_tokens, 4)
    keys = normal(num_keys, 128, dtype=E4M3), np.ones(num_keys, np.float32)
    ends = np.full(num_tokens, num_keys, np.int32)
    run = getattr(sparse_mla, op)
    return lambda: run(q, weights, keys, ends, starts=0 * ends, **options)


def attention(num_keys, width, **options):
    q, rows = normal(1, 128, 576, dtype=BF16), normal(64, 576, dtype=BF16)
    indices = np.full((1, width), -1, np.int32)
    indices[:, :num_keys] = np.arange(num_keys) % 64
    return lambda: sparse_mla.sparse_attention(q, rows, indices, softmax_scale=0.1, **options)


def projection(op, *w_shape, inner):
    w, x = normal(*w_shape, dtype=BF16), normal(70, w_shape[1], inner, dtype=BF16)
    return lambda: getattr(sparse_mla, op)(x, w)


def forward(path):
    step = engine.make_step(cases.make_batch([1, 2, 30], [40, 50, 60]), 2)
    config = engine.config(sparse_mla, num_heads=2, path=path)
    builder, layer = sparse_mla.MetadataBuilder(config), sparse_mla.SparseMLA(config)
    common = step.batch.common(sparse_mla)
    arrays = step.q, step.fp8_cache, step.topk_indices
    return lambda: layer.forward(*arrays, builder.build(common))


def v4_attend(path):
    case = attend.make_case(4, path, (1, 2, 9), (4, 5, 6))
    builder = sparse_mla.v4.MetadataBuilder(case.config)
    return lambda: case.layer.attend(case.q, case.caches, case.build(builder), case.topk)


def refused():
    """The text of an error."""
    try:
        sparse_mla.top_k_per_row(normal(1, 3), *np.zeros((2, 2), np.int32), k=100)
    except ValueError as error:
        return np.frombuffer(str(error).encode(), np.uint8)


def small(op):
    call = operators.FRAMEWORK_CALLS[op]()
    return lambda: call.run(sparse_mla)


def calls():
    return {
        **{op: small(op) for op in operators.FRAMEWORK_CALLS},
        "split_kv_b_proj": lambda: sparse_mla.split_kv_b_proj(
            normal(512, 2 * 256, dtype=BF16), num_heads=2, qk_nope_head_dim=128, v_head_dim=128
        ),
        "absorb": lambda: sparse_mla.absorb(
            *(normal(*shape) for shape in ((130, 2 * 192), (512, 2, 128), (512, 2, 96))),
            normal(300, 2 * 96),
            scheme=None,
        ),
        "top-k": top_k(1, 3000),
        "top-k of bf16": top_k(3, 3000, BF16),
        "top-k by chunks": top_k(1, 300_000),
        "logits": scores("indexer_logits", 1, 3000),
        "lightning": scores("lightning_indexer", 20, 3000, k=100),
        "attention": attention(2000, 2000),
        "attention of a wide list": attention(300, 5000),
        "attention to one key": attention(1, 700),
        "attention in given splits": attention(50, 700, num_splits=5),
        "k_up_proj of a block": projection("k_up_proj", 512, 2, 128, inner=128),
        "v_up_proj of a block": projection("v_up_proj", 512, 2, 128, inner=512),
        "kv_up_proj of a weight apart": lambda: sparse_mla.kv_up_proj(
            normal(70, 512, dtype=BF16), normal(512, 2 * 256, dtype=BF16)[:, ::2]
        ),
        "forward, separate": forward("separate"),
        "forward, mixed": forward("mixed"),
        "attend, direct": v4_attend("direct"),
        "attend, separate": v4_attend("separate"),
        "an error": refused,
    }


# --- a thread ------------------------------------------------------------------------------------


def as_tuple(x) -> tuple:
    return x if isinstance(x, tuple) else (x,)


def call_from_small_stack() -> None:
    """Prints the calls that wrote beside the stack, and checks all results."""
    runs = calls()
    want = {name: [np.array(x) for x in as_tuple(run())] for name, run in runs.items()}
    got, damage = {}, {}
    buffers = []
    is_mapped, is_ready = threading.Event(), threading.Event()

    def call_all():
        is_ready.set()
        is_mapped.wait()
        for name, run in runs.items():
            got[name] = run()
            damage[name] = sum(int((x != RED).sum()) for x in buffers)

    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=call_all)
    thread.start()
    is_ready.wait()
    for _ in range(8):  # the first lies right below the thread's stack
        buffers.append(np.frombuffer(mmap.mmap(-1, 1 << 20), np.uint8))
        buffers[-1][:] = RED
    is_mapped.set()
    thread.join()
    for name in runs:
        for x, y in zip(as_tuple(got[name]), want[name], strict=True):
            assert_same_bits(np.asarray(x), y, name)
    print(json.dumps([name for name in runs if damage[name]]))


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("log", ["0", "1"])
def test_every_operator(num_threads, log):
    """If the stack overflows into a page that nobody has, the other Python dies."""
    script = BESIDE_TESTS + "import test_small_stacks as t; t.call_from_small_stack()"
    flags = {"OMP_NUM_THREADS": str(num_threads), "SPARSE_MLA_LOG": log}
    assert json.loads(printed_by_python("-c", script, **flags)) == []
