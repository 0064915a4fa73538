"""sparse_attention, mla_attention and sparse_mla_dsv4 at the borders of their plan, on any number
of threads, in a workspace of exactly the bytes that they ask for (csrc/cpu/attention)."""

from __future__ import annotations

import re

import device
import numpy as np
import pytest
import reference as ref
import test_dsv4
from borders import (
    THREADS,
    constants,
    every_address,
    on_any_threads,
    on_threads,
    sizes_around,
)
from cases import AttentionCase, AttentionInputs
from dense_cases import Dense, Mask
from helpers import NO_NAN, Guarded, assert_same_bits, assert_within_bounds, guarded_attention

import sparse_mla

pytestmark = pytest.mark.skipif(device.ON_CUDA, reason="the borders are those of the CPU's plans")

attend = sparse_mla.sparse_attention
PLAN = constants("cpu/attention/mqa.c")
PARTS, MOST_SPLITS = PLAN["MAX_PARALLEL_PARTS"], PLAN["SMLA_MAX_SPLITS"]
SPLIT = PLAN["MIN_COLUMNS_PER_SPLIT"]
ALIGN = PLAN["SMLA_WORKSPACE_ALIGN"]
BLOCKS = [constants(f"cpu/attention/mqa_unit_{unit}.h")["BLOCK_KEYS"] for unit in ("fp32", "bf16")]
KERNEL = constants("cpu/attention/mqa_kernel.c")
HOLES = constants("cpu/attention/mqa_block.h")["HOLES"]
STATE_KEYS = KERNEL["BLOCK_KEYS"] * KERNEL["STATE_BLOCKS"]  # as many for any unit

# Tokens and splits with as many parts as run in parallel, one less, one more, and others.
PARTS_OF_TOKENS = sorted(
    {(n, m) for parts in sizes_around(PARTS) for n in range(1, parts + 1) if parts % n == 0
     for m in [parts // n] if m <= MOST_SPLITS}
)  # fmt: skip


def run_case(case: AttentionCase) -> dict[str, np.ndarray]:
    return guarded_attention(attend, case.make())


def check(case: AttentionCase) -> dict[str, np.ndarray]:
    """The bits of any number of threads are the same, and within the bounds of fp64's."""
    got = on_any_threads(run_case, case)
    assert_within_bounds(case.make().reference(), got)
    return got


# --- parts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("T", "splits"), PARTS_OF_TOKENS)
def test_as_many_parts_as_run_in_parallel(T, splits):
    """A token has the same bits where its parts run in parallel and where they run in turn."""
    K = splits * ALIGN - 1
    case = AttentionCase(T, 3, K, fmt="bf16", num_splits=splits, sink=True)
    got = check(case)
    inputs = case.make()
    alone = guarded_attention(attend, inputs.rows(slice(T - 1, T)))
    many = guarded_attention(attend, inputs.rows([T - 1] * (PARTS + 1)))
    for name, x in got.items():
        assert_same_bits(alone[name][0], x[-1], f"{name} of a token alone")
        assert_same_bits(many[name][-1], x[-1], f"{name} of many tokens")


@pytest.mark.parametrize("extra", [None, "fp8"])
def test_splits_that_the_plan_chooses(extra):
    """Lists of as many columns as one split has, and so on, up to more than any plan has."""
    for K in sizes_around(SPLIT, 2 * SPLIT, MOST_SPLITS * SPLIT, (MOST_SPLITS + 1) * SPLIT):
        for T in (1, 2) if K < SPLIT * MOST_SPLITS - 1 else (1,):
            check(AttentionCase(T, 2, K, fmt="bf16", extra=extra))


@pytest.mark.parametrize("T", sizes_around(PARTS // 2, PARTS))
def test_as_many_tokens_as_parts(T):
    check(AttentionCase(T, 2, 2 * SPLIT + 1, fmt="bf16"))


@pytest.mark.parametrize("H", sizes_around(PLAN["SMLA_HEAD_ALIGN"], PLAN["SMLA_FOLD_HEADS"], 64))
def test_heads(H):
    """Whole vectors of heads, whole tasks of a fold, and one head less or more."""
    for splits in (1, 3):
        check(AttentionCase(2, H, 200, num_splits=splits, sink=True))


# --- keys ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["fp8", "bf16", "bf16_512"])
def test_blocks_of_keys(fmt):
    for K in sizes_around(HOLES, *BLOCKS, 2 * BLOCKS[-1]):
        check(AttentionCase(3, 5, K, fmt=fmt, num_splits=1, topk_length=K % 2 == 0))


@pytest.mark.parametrize("fmt", ["fp8", "bf16"])
def test_as_many_keys_as_a_state_takes(fmt):
    for K in sizes_around(STATE_KEYS):
        check(AttentionCase(1, 2, K, fmt=fmt, num_splits=1, indices="ordered"))


def test_runs_of_holes():
    """Holes are skipped by as many columns as HOLES; a key stands in front of, in and behind such a
    run, wherever it begins."""
    rng = np.random.default_rng(3)
    case = AttentionCase(3 * HOLES, 3, 5 * HOLES, fmt="bf16", indices="ordered").make()
    for run_length in sizes_around(HOLES, 2 * HOLES):
        indices = np.full_like(case.indices, -1)
        for t in range(len(indices)):
            columns = [t, t + 1, (t + run_length) % (5 * HOLES), (t + run_length + 1) % (5 * HOLES)]
            indices[t, columns] = rng.integers(0, 5 * 64, len(columns))
        rows = AttentionCase(1, 1, 320, fmt="bf16", indices="ordered").make().kv
        holes = AttentionInputs(case.q, rows, indices, case.options, num_splits=1)
        assert_within_bounds(holes.reference(), guarded_attention(attend, holes))


# --- requests ------------------------------------------------------------------------------------


def run_dense(*fields, **more) -> dict[str, np.ndarray]:
    return Dense(*fields, **more).run(sparse_mla.mla_attention)


@pytest.mark.parametrize("splits", [0, 1, 3, MOST_SPLITS])
def test_dense_requests(splits):
    """Requests of as many keys as a page, a block and a split have, beside longer ones; as many
    tokens as parts."""
    lens = sizes_around(16, ALIGN, BLOCKS[-1], SPLIT)
    for queries in ([1] * len(lens), [1, 2, 3] * 4, [13] * 5):
        count = min(len(queries), len(lens))
        case = Dense(queries[:count], lens[:count], mask=Mask(causal=True), num_splits=splits)
        fields = (case.query_lens, case.seq_lens, 5, "bf16", 16, case.mask)
        fields += (False, False, False, False, False, 0.0, splits)
        got = on_any_threads(run_dense, *fields)
        assert_within_bounds(case.reference(), got)


@pytest.mark.parametrize("requests", [1, 2, 3])
@pytest.mark.parametrize("tokens", [1, 2])
def test_results_of_requests_may_be_apart(requests, tokens):
    """[B, n, H, 512] and its lse as parts of larger arrays, with any number of requests."""
    lens = [[tokens] * requests, [40, 9, 77][:requests]]
    case = Dense(*lens, 5, mask=Mask(causal=True), is_uniform=True)
    want = case.run(sparse_mla.mla_attention)
    gap = 0 if tokens > 1 else 2  # tokens must be in equal steps
    shape = (requests, tokens + gap, 9)
    out = Guarded((*shape, 512), ref.BF16, poison=NO_NAN)
    lse = Guarded(shape, np.float32, poison=NO_NAN)
    given = {"out": out.array[:, :tokens, 3:8], "lse": lse.array[:, :tokens, 3:8]}
    sparse_mla.mla_attention(*case.arguments(), **case.options, **given)
    for name, buffer in (("out", out), ("lse", lse)):
        got = np.ascontiguousarray(given[name]).reshape(want[name].shape)
        assert_same_bits(got, want[name], name)
        given[name].view(np.uint8)[...] = NO_NAN
        left = np.ascontiguousarray(buffer.check(written=False)).view(np.uint8)
        assert (left == NO_NAN).all(), f"{name}: a write between the rows"


# --- workspaces ----------------------------------------------------------------------------------


def check_workspaces(call, size: int, name: str = "workspace") -> None:
    """`size` bytes at any address are enough. So are the bytes that an error asks for, and one less
    is refused. All give the bits of the call's own workspace."""
    want = call()
    for memory in every_address(size, ALIGN):
        for key, x in call(**{name: memory}).items():
            assert_same_bits(x, want[key], key)
    rule = rf"`{name}` must have at least (\d+) bytes, got"
    for offset, byte in enumerate(every_address(1, ALIGN)):
        with pytest.raises(ValueError, match=rule) as refused:
            call(**{name: byte})
        least = int(re.search(rule, str(refused.value))[1])
        assert least <= size, f"more than promised at address {offset}"
        if offset not in (0, 1, ALIGN - 1):
            continue
        for other, memory in enumerate(every_address(least, ALIGN)):
            if other == offset:
                for key, x in call(**{name: memory}).items():
                    assert_same_bits(x, want[key], key)
                with pytest.raises(ValueError, match=rule):
                    call(**{name: memory[:-1]})


def check_sparse(T: int, H: int, K: int, splits: int) -> None:
    case = AttentionCase(T, H, K, fmt="bf16", num_splits=splits).make()
    size = sparse_mla.attention_workspace_size(T, H, K, num_splits=splits, device="cpu")
    check_workspaces(lambda **more: guarded_attention(attend, case, **more), size)


def check_dense(lens: list[int], splits: int) -> None:
    case = Dense([2] * len(lens), lens, 3, mask=Mask(causal=True), num_splits=splits)
    tokens, longest = 2 * len(lens), max(lens)
    sizes = {"num_splits": splits, "device": "cpu"}
    size = sparse_mla.attention_workspace_size(tokens, 3, longest, **sizes)
    check_workspaces(lambda **more: case.run(sparse_mla.mla_attention, **more), size)


def check_v4() -> None:
    layer = test_dsv4.Layer()
    tokens, heads = layer.q.shape[:2]
    size = sparse_mla.attention_workspace_size(
        tokens, heads, layer.W, extra_topk=layer.K, device="cpu"
    )
    check_workspaces(lambda **more: {"out": layer.run(**more)}, size, "workspace_buffer")


@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize(
    ("T", "H", "K", "splits"),
    [
        (1, 3, 130, 1),
        (1, 17, 700, 0),
        (3, 2, 257, 0),
        *((T, 2, ALIGN * n, n) for T, n in PARTS_OF_TOKENS if n > 1 and T in (1, 5, 8, 13, 21)),
    ],
)
def test_exact_workspaces(T, H, K, splits, num_threads):
    on_threads(num_threads, check_sparse, T, H, K, splits)


@pytest.mark.parametrize("num_threads", THREADS)
def test_exact_workspaces_of_dense_calls(num_threads):
    for lens, splits in (([300, 40], 0), ([300, 40], 5), ([70], 1), ([9] * 33, 2)):
        on_threads(num_threads, check_dense, lens, splits)


@pytest.mark.parametrize("num_threads", THREADS)
def test_exact_workspaces_of_v4(num_threads):
    on_threads(num_threads, check_v4)
