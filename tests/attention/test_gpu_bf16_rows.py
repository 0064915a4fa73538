"""Hopper's kernel for bf16 rows: softmax references that seldom move, and work items one after
another.

A head's reference is its maximum among the work item's first 64 keys. It moves where a later key is
2^40 times as heavy. A CTA takes several work items, of any length. test_gpu_attention.py tests
shapes and courses of logits, test_gpu_growth.py tests the courses that move references.
"""

import cases
import numpy as np
import pytest
import reference as ref
from cases import AttentionCase, AttentionInputs
from helpers import Guarded, assert_same_bits, assert_within_bounds, guarded_attention
from library import sparse_mla

attend = sparse_mla.sparse_attention


def check(case: AttentionInputs, **more) -> dict:
    """Asserts that results are within the bounds, and that a call without max_logits, which runs
    another instance of the kernel, gives the same bits."""
    got = guarded_attention(attend, case, **more)
    assert_within_bounds(case.reference(), got)
    num_tokens, num_heads = case.shape
    out = Guarded((num_tokens, num_heads, 512), ref.BF16)
    lse = Guarded((num_tokens, num_heads), np.float32)
    case.run(attend, out=out.array, lse=lse.array, **more)
    assert_same_bits(out.check(), got["out"], "out without max_logits")
    assert_same_bits(lse.check(), got["lse"], "lse without max_logits")
    return got


def make(rng, indices, *, T=2, H=64, num_slots=1024, first_rope=None, look=0.0, **options):
    """Keys whose first RoPE value is `first_rope`, and queries that multiply it by `look`."""
    rows = ref.to_f32(cases.make_rows(rng, num_slots, "bf16"))
    q = rng.normal(0, 0.3, (T, H, 576))
    if first_rope is not None:
        rows[:, 512] = first_rope
        q[:, :, 512] = look
    indices = np.broadcast_to(indices, (T, np.shape(indices)[-1])).astype(np.int32, order="C")
    options.setdefault("softmax_scale", ref.HEAD_DIM**-0.5)
    kv = ref.to_bf16(rows).reshape(-1, 64, 576)
    return AttentionInputs(ref.to_bf16(q), kv, indices, options)


ORDER = np.arange(512)
REFERENCES = {
    "keys a little heavier than the first": (ORDER / 16, 24.0, ORDER),
    "keys 2^60 as heavy as the first": (np.where(ORDER < 64, 0.0, 41.5), 24.0, ORDER),
    "keys 2^70 as heavy as the first": (np.where(ORDER < 64, 0.0, 48.5), 24.0, ORDER),
    "keys 2^200 as heavy as the first": (np.where(ORDER < 64, 0.0, 139.0), 24.0, ORDER),
    "keys 2^-60 as heavy as the first": (np.where(ORDER < 64, 41.5, 0.0), 24.0, ORDER),
    "keys 2^-200 as heavy as the first": (np.where(ORDER < 64, 139.0, 0.0), 24.0, ORDER),
    "one key in front, the rest heavier": (
        np.where(ORDER < 64, 0.0, 20.0),
        24.0,
        np.where((ORDER > 0) & (ORDER < 64), -1, ORDER),
    ),
    "no key in front": (ORDER / 64, 24.0, np.where(ORDER < 64, -1, ORDER)),
    "no key in the first two blocks": (ORDER / 64, 24.0, np.where(ORDER < 128, -1, ORDER)),
    "a key in the last column alone": (ORDER / 64, 24.0, np.where(ORDER < 511, -1, ORDER)),
    "keys in the second block alone": (ORDER / 64, 24.0, np.where(ORDER // 64 == 1, ORDER, -1)),
    "logits of -1000 in all keys": (np.full(512, 1000.0), -24.0, ORDER),
}


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("name", REFERENCES)
def test_references(name, num_splits):
    first_rope, look, indices = REFERENCES[name]
    first_rope = np.resize(first_rope, 1024)
    case = make(np.random.default_rng(3), indices, first_rope=first_rope, look=look)
    case.num_splits = num_splits
    check(case)


@pytest.mark.parametrize("scale", [-0.05, 0.0, 1e-30, 20.0])
def test_softmax_scales(scale):
    indices = np.random.default_rng(5).integers(-8, 1024, (2, 300))
    check(make(np.random.default_rng(4), indices, softmax_scale=scale))


def test_equal_weights_sum_without_drift():
    """4096 keys have the same weight, which is no power of two. Added without compensation, all of
    them would be rounded the same way."""
    rng = np.random.default_rng(6)
    indices = np.where(np.arange(4160) < 64, 0, 1)
    case = make(rng, indices, num_slots=64, first_rope=np.resize([3.0, 2.0], 64), look=11.0)
    check(case)


@pytest.mark.parametrize("num_heads", [64, 100])
def test_work_items_of_every_length_in_a_row(num_heads):
    """There are more work items than CTAs. Some are full, some have no columns, some have no keys,
    and some have their first key in a later block."""
    rng = np.random.default_rng(7)
    T = 450
    indices = rng.integers(0, 1024, (T, 330))
    indices[rng.random(indices.shape) < 0.1] = -1
    indices[5::7] = -1
    indices[3::11, :64] = -1
    first_rope = np.where(np.arange(1024) % 512 == 7, 100.0, 0.0)
    length = rng.integers(0, 331, T).astype(np.int32)
    length[rng.random(T) < 0.1] = 0
    case = make(
        rng, indices, T=T, H=num_heads, first_rope=first_rope, look=24.0, topk_length=length
    )
    case.num_splits = 1
    got = check(case)
    rows = rng.permutation(T)[:40]
    part = guarded_attention(attend, case.rows(rows))
    for name, x in part.items():
        assert_same_bits(x, got[name][rows], f"{name} in another batch")


def test_a_head_of_nan_touches_no_other():
    case = make(np.random.default_rng(8), np.arange(500), H=70)
    clean = guarded_attention(attend, case)
    case.q[1, 5] = np.nan
    case.q[0, 69, 3] = np.inf
    out, lse = np.zeros((2, 70, 512), ref.BF16), np.zeros((2, 70), np.float32)
    case.run(attend, out=out, lse=lse)
    bad = np.zeros((2, 70), bool)
    bad[1, 5] = bad[0, 69] = True
    assert np.isnan(ref.to_f32(out)[1, 5]).all()
    assert np.isnan(lse[1, 5])
    close = np.abs(ref.to_f32(out) - ref.to_f32(clean["out"])).max(-1)
    assert (close[~bad] < 0.02).all()
    assert (np.abs(lse - clean["lse"])[~bad] < 1e-5).all()


@pytest.mark.parametrize("gap", [1, 2, 8])
def test_results_at_every_alignment(gap):
    """The tokens of out are 2, 4 and 16 bytes further apart than they are long."""
    case = AttentionCase(3, 64, 200, fmt="bf16", pages=8).make()
    want = guarded_attention(attend, case)
    got = guarded_attention(attend, case, row_gap=gap)
    for name, x in got.items():
        assert_same_bits(np.ascontiguousarray(x), want[name], name)


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("K", [1, 64, 65, 128, 129, 193, 500])
def test_two_lists_of_any_length(K, num_splits):
    """The keys of the second list begin a new block, and the first list may have no key at all."""
    for length in (0, K):
        case = AttentionCase(3, 64, K, fmt="bf16", extra="bf16", num_splits=num_splits).make()
        case.options["topk_length"] = np.array([length, K, 0], np.int32)
        check(case)
