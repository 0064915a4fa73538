"""paged_attention: every token attends to a range of its request's keys, which lie in pages."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import reference as ref
from cases import int32, picker
from dense_cases import Mask
from device import ON_CUDA
from helpers import assert_same_bits, assert_within_bounds, check_seeds
from library import sparse_mla
from paged_cases import LAYOUTS, Paged, check
from varlen_cases import F16

attend = sparse_mla.paged_attention
CAUSAL = Mask(causal=True)
DIMS = [(64, 64), (80, 80), (128, 128), (192, 128), (256, 256), (40, 24), (576, 512)]
PAGE_SIZES = [1, 3, 16, 64, 256]


# --- the contract's vectors ----------------------------------------------------------------------


def slot_numbers(**options) -> tuple[list, list]:
    """Pages of 2 tokens whose values are their slots' numbers: what 2 queries of q = 0 give."""
    q, k = np.zeros((2, 1, 8), ref.BF16), np.zeros((4, 2, 1, 8), ref.BF16)
    v = np.broadcast_to(np.arange(8.0).reshape(4, 2, 1, 1), (4, 2, 1, 8)).astype(ref.BF16)
    table = options.pop("block_table", int32([3, 1, -1, 0]))
    common = {"cu_seqlens_q": int32(0, 2), "cache_leftpad": int32(1), "softmax_scale": 1.0}
    out, lse = attend(q, k, v, table, int32(7), **common, causal=True, **options)
    assert (np.asarray(out) == np.asarray(out)[..., :1]).all()
    return np.asarray(out, np.float32)[:, 0, 0].tolist(), np.exp(np.asarray(lse)[:, 0]).tolist()


VECTORS = [
    ({}, [4, 3], [3, 4]),
    ({"window_size": (2, -1)}, [3, 0], [1, 1]),
    ({"attention_chunk": 4}, [0, 0], [0, 1]),
    ({"block_table": None, "slot_table": int32([6, 7, 2, 3, 9, -1, 0])}, [4, 3], [3, 4]),
]


@pytest.mark.parametrize(("options", "out", "counts"), VECTORS)
def test_slot_numbers(options, out, counts):
    got, sums = slot_numbers(**options)
    assert got == out
    assert np.allclose(sums, counts, rtol=1e-6)


def test_the_vector_of_qv():
    """Logits ln 3 and ln 2, of which one is q's and the other qv's."""
    unit = np.eye(8, dtype=np.float32)
    k = np.stack([unit[0], 0 * unit[0]]).reshape(1, 2, 1, 8).astype(ref.BF16)
    v = np.stack([0 * unit[1], unit[1]]).reshape(1, 2, 1, 8).astype(ref.BF16)
    log2, log3 = (np.float32(np.log(n)) for n in (2, 3))
    q, qv = (ref.to_bf16(x * unit[i])[None, None] for i, x in ((0, log3), (1, log2)))
    out, lse = attend(q, k, v, int32([0]), int32(2), qv=qv, softmax_scale=1.0)
    rounded = [float(ref.to_f32(x).max()) for x in (q, qv)]
    want = np.exp(rounded[1]) / np.exp(rounded).sum()
    assert np.abs(np.asarray(out, np.float32)[0, 0] - want * unit[1]).max() < 2e-3
    assert abs(float(lse[0, 0]) - np.log(np.exp(rounded).sum())) < 1e-6
    assert abs(want - 0.4) < 2e-3
    assert abs(float(lse[0, 0]) - np.log(5)) < 4e-3


# --- random batches ------------------------------------------------------------------------------


def draw(seed: int) -> Paged:
    rng = np.random.default_rng([seed, 78])
    pick = picker(rng)
    happens = lambda share: bool(rng.random() < share)  # noqa: E731
    count = int(rng.integers(0, 5))
    is_decode = happens(0.3)
    queries, most = pick(2, 4, 60), pick(3, 40, 160, 300)
    q_type = pick("bf16", "bf16", "fp16", "e4m3")
    window = pick((-1, -1), (-1, -1), (int(rng.integers(0, 90)), -1), (3, 5), (0, 0), (-1, 2))
    has_qv = happens(0.25)
    cp = (int(rng.integers(3)), 3, pick(1, 4, 16)) if happens(0.15) else None
    pads = [int(rng.integers(0, pick(2, 70))) for _ in range(count)]
    return Paged(
        [1 if is_decode else int(rng.integers(0, queries)) for _ in range(count)],
        [int(rng.integers(0, most + 1)) for _ in range(count)],
        heads=(kv_heads := pick(1, 2, 8)) * pick(1, 4, 8),
        kv_heads=kv_heads,
        dims=pick((64, 512), (64, 512), (64, 64), (40, 24), (72, 504)) if has_qv else pick(*DIMS),
        q_type=q_type,
        kv_type=pick(q_type, q_type, "e4m3") if q_type != "e4m3" else pick("bf16", "fp16", "e4m3"),
        mask=Mask(happens(0.6), window, pick(0, 0, 0, 1, 7, 64), cp),
        sink=happens(0.3),
        softcap=pick(0.0, 0.0, 0.0, 0.3, 5.0, 50.0),
        padding=0 if is_decode else pick(0, 0, 2),
        is_spread=happens(0.4),
        descales=pick("", "number", "one", "rows", "column"),
        out_type=pick(None, None, np.dtype(np.float32)),
        std=pick(1.0, 1.0, 4.0),
        num_splits=pick(0, 0, 1, 2, 3, 64),
        seed=seed,
        page_size=pick(*PAGE_SIZES),
        layout=pick(*LAYOUTS),
        has_slots=happens(0.25),
        has_qv=has_qv,
        is_decode=is_decode,
        leftpad=pads if cp is None and happens(0.35) else None,
        holes=pick(0.0, 0.0, 0.1, 0.5),
        missing=pick(0, 0, 1, 3),
        has_bytes=happens(0.3),
    )


def with_long_request(case: Paged, number: int) -> Paged:
    """The batch behind a request of 131,072 keys. Heads are few and small, because the reference
    takes each key by itself. Every other mask lets a query see all keys in front of it."""
    mask = dataclasses.replace(case.mask, window=(-1, -1), chunk=0) if number % 2 else case.mask
    return dataclasses.replace(
        case,
        query_lens=[1 if case.is_decode else 2, *case.query_lens],
        key_lens=[131_072, *case.key_lens],
        heads=2,
        kv_heads=1,
        dims=(16, 8),
        mask=mask,
        num_splits=(0, 1, 3, 64)[number // 2 % 4],
        leftpad=None if case.leftpad is None else [70, *case.leftpad],
    )


@pytest.mark.parametrize("block", range(16))
def test_random_batches(block):
    def check_drawn(seed: int) -> None:
        case = draw(seed)
        check(with_long_request(case, block) if seed % 25 == 0 else case)

    check_seeds(range(25 * block, 25 * block + 25), check_drawn)


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("page_size", [3, 64])
def test_head_sizes(dims, kv_heads, page_size):
    """More than a tile of rows, and more than a block of keys."""
    lens = [40, 0, 7], [300, 9, 0]
    check(Paged(*lens, 8, kv_heads, dims, mask=CAUSAL, sink=True, page_size=page_size))


@pytest.mark.parametrize("dims", [(64, 512), (64, 64), (8, 8), (72, 504), (192, 128)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 1), (4, 2), (8, 8)])
def test_absorbed_sizes(dims, heads, kv_heads):
    """qv beside q, of which each has its part of the logit."""
    check(Paged([20, 1], [150, 70], heads, kv_heads, dims, has_qv=True, mask=CAUSAL))


@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_decode(group, kv_heads):
    """One token of each request, and no cu_seqlens_q."""
    lens = [1, 0, 700, 64, 65, 3]
    check(Paged([1] * 6, lens, group * kv_heads, kv_heads, (128, 128), is_decode=True, sink=True))


# Keys have the query's type or e4m3, and any type beside a query of e4m3.
TYPES = [("bf16", "bf16"), ("bf16", "e4m3"), ("fp16", "fp16"), ("fp16", "e4m3")]
TYPES += [("e4m3", "bf16"), ("e4m3", "fp16"), ("e4m3", "e4m3")]


@pytest.mark.parametrize(("q_type", "kv_type"), TYPES)
@pytest.mark.parametrize("descales", ["", "number", "one", "rows", "column"])
@pytest.mark.parametrize("has_qv", [False, True])
def test_types(q_type, kv_type, descales, has_qv):
    """With qv, the value that it meets has its own descale, and q's is that of both."""
    types = {"q_type": q_type, "kv_type": kv_type, "descales": descales}
    check(Paged([20, 3], [70, 33], 4, 2, (64, 64), **types, has_qv=has_qv, mask=CAUSAL))


@pytest.mark.parametrize("dims", [(64, 512), (64, 72)])
@pytest.mark.parametrize("factor", [2.0**-60, 0.01, 1.0, 300.0, 2.0**60])
@pytest.mark.parametrize("q_type", ["bf16", "e4m3"])
def test_descales_of_the_two_parts_of_a_key(dims, factor, q_type):
    """The value's descale is `factor` times the key's; with one key, too."""
    case = Paged([20, 3, 1], [70, 33, 1], 4, 2, dims, q_type, "e4m3", descales="rows", has_qv=True)
    if factor > 1:
        case.scales["k"] = case.scales["v"] / np.float32(factor)
    else:
        case.scales["v"] = case.scales["k"] * np.float32(factor)
    check(case)


def test_bytes_are_e4m3():
    case = Paged([20, 3], [70, 33], q_type="e4m3", kv_type="e4m3", descales="rows", mask=CAUSAL)
    got = check(case)
    again = dataclasses.replace(case, has_bytes=True).run(attend)
    assert_same_bits(again["out"], got["out"])
    assert_same_bits(again["lse"], got["lse"])


@pytest.mark.parametrize("softcap", [1e-30, 0.01, 1.0, 30.0, 1e30])
@pytest.mark.parametrize("std", [0.01, 1.0, 6.0])
def test_softcap(softcap, std):
    """From logits far below the cap to logits far above it."""
    check(Paged([20, 1], [150, 1], dims=(64, 64), mask=CAUSAL, softcap=softcap, std=std))


@pytest.mark.parametrize("kv_heads", [1, 8])
def test_a_heavy_late_key(kv_heads):
    """The last key has nearly all weight, so that every sum before it is scaled away."""
    case = Paged([3, 1], [700, 400], 8, kv_heads, (128, 128), mask=CAUSAL, std=0.1)
    for last in (699, 1099):
        case.k[last] = 40 * np.sign(np.asarray(case.q[0, :kv_heads], np.float32))
    case.put_keys()
    check(case)


# --- lengths -------------------------------------------------------------------------------------


def test_negative_lengths_are_zero():
    case = Paged([2, 3, 1], [0, 20, 0], 4, 2, (64, 64), seed=2)
    assert case.seq_lens == [-2, 20, -2]
    got = check(case)
    assert not np.asarray(got["out"][[0, 1, 5]], np.float32).any()
    assert np.isneginf(got["lse"][[0, 1, 5]]).all()


def test_all_keys_are_padding():
    """cache_leftpad may be all of a request."""
    got = check(Paged([1, 2], [0, 5], 4, 2, (64, 64), leftpad=[9, 0]))
    assert np.isneginf(got["lse"][0]).all()


def test_empty_batches():
    q, cache = np.ones((3, 2, 8), ref.BF16), np.ones((0, 4, 2, 8), ref.BF16)
    table, none = np.zeros((3, 0), np.int32), int32(5, 0, -1)
    out, lse = attend(q, cache, cache, table, none, softmax_scale=1.0)  # P = W = 0
    assert not np.asarray(out, np.float32).any()
    assert np.isneginf(lse).all()
    out, lse = attend(q[:0], cache, cache, table[:0], none[:0], softmax_scale=1.0)
    assert out.shape == (0, 2, 8)
    assert lse.shape == (0, 2)
    more = {"cu_seqlens_q": int32(0), "softmax_scale": 1.0}
    out, lse = attend(q, cache, cache, table, none[:0], **more)  # B = 0
    assert out.shape == (3, 2, 8)
    assert np.isneginf(lse).all()
    check(Paged([0, 2, 0, 5], [5, 0, 0, 3], padding=3, mask=CAUSAL))
    check(Paged([0, 0], [5, 9], padding=3))


def test_a_million_keys():
    """Equal terms all round the same way, so a plain sum of them would leave the bounds."""
    q, cache = np.ones((1, 1, 8), ref.BF16), np.ones((1, 64, 1, 8), ref.BF16)
    table = np.zeros((1, 15_625), np.int32)  # one page, many times
    out, lse = attend(q, cache, cache, table, int32(1_000_000), softmax_scale=0.125)
    bound = 2.0**-7 if ON_CUDA else 2.0**-8  # the contract's; a step of bf16
    assert np.abs(np.asarray(out, np.float32) - 1).max() <= bound
    assert abs(float(lse[0, 0]) - (1 + np.log(1e6))) < 3e-6


def test_one_key_is_its_value():
    """To the bit, on the CPU and on CUDA."""
    case = Paged([1, 1, 4], [1, 1, 4], mask=Mask(causal=True, window=(0, 0)))
    got = check(case)
    assert_same_bits(got["out"], case.v)


def test_results_have_the_query_s_type():
    for kind, wanted in (("bf16", ref.BF16), ("fp16", F16), ("e4m3", ref.BF16)):
        case = Paged([3], [5], q_type=kind, kv_type=kind)
        out, lse = attend(*case.arguments(), **case.options)
        assert out.dtype == wanted
        assert out.shape == (3, 4, 128)
        assert lse.dtype == np.float32


@pytest.mark.parametrize("hint", [1, 7, 10**6])
def test_hints_change_nothing(hint):
    case = Paged([20, 3, 0, 130], [70, 33, 5, 70], 4, 2, mask=CAUSAL)
    got = case.run(attend)
    more = {"max_seqlen_q": hint, "max_seqlen_k": hint, "workspace": np.zeros(5, np.uint8)}
    again = dataclasses.replace(case, num_splits=1).run(attend, **more)
    assert_same_bits(got["out"], again["out"])
    assert_same_bits(got["lse"], again["lse"])


@pytest.mark.skipif(ON_CUDA, reason="kernels there add products in fp32")
@pytest.mark.parametrize("has_qv", [False, True])
def test_products_that_fp32_cannot_hold(has_qv):
    """Queries and keys so large that sums of their products leave fp32, but for a tiny scale."""
    case = Paged([9, 2], [150, 3], 4, 2, (64, 64), mask=CAUSAL, has_qv=has_qv)
    want = case.reference()
    for name in ("q", "k"):
        setattr(case, name, getattr(case, name) * ref.to_bf16(np.float32(2.0**61)))
    if has_qv:
        case.qv = case.qv * ref.to_bf16(np.float32(2.0**61))
        case.k = case.k * ref.to_bf16(np.float32(2.0**-61))
    case.put_keys()

    def attend_scaled(*arrays, softmax_scale, **options):
        power = 61 if has_qv else 122
        return attend(*arrays, softmax_scale=softmax_scale * 2.0**-power, **options)

    assert_within_bounds(want, case.run(attend_scaled))
