"""Logits that grow along an index list, on the GPU: once, in every block, by head, late.

A list has 1024 columns, which are 16 blocks of 64 keys for the kernel for bf16 rows. The logits are
in the RoPE parts of the keys: each RoPE value has one course of logits along the list, and a head's
query multiplies one of these values.
"""

import cases
import numpy as np
import pytest
import reference as ref
from cases import AttentionInputs
from helpers import (
    NO_NAN,
    assert_right_again,
    assert_same_bits,
    assert_within_bounds,
    guarded_attention,
)
from library import sparse_mla

attend = sparse_mla.sparse_attention

K = 1024
T = 3
BLOCK = np.arange(K) // 64
LAST = BLOCK.max()
LOOK = 24.0  # the query value that multiplies a course; softmax_scale undoes it
LN_2 = np.log(2)

every_format = pytest.mark.parametrize("fmt", ["fp8", "bf16"])
every_head_count = pytest.mark.parametrize("num_heads", [16, 100])
every_split = pytest.mark.parametrize("num_splits", [1, 2, 5])


def make(fmt, num_heads, courses, num_splits, *, indices=None, sink=False) -> AttentionInputs:
    """Column j names key j. courses [n, K] are logits as powers of two, and head h has course
    h % n."""
    courses = np.atleast_2d(courses)
    rng = np.random.default_rng([num_heads, num_splits, len(courses)])
    latent = ref.bf16_encode(rng.normal(0, 0.6, (K, 512)).astype(np.float32))
    rope = np.zeros((K, 64), np.float32)
    rope[:, : len(courses)] = courses.T * LN_2
    rope = ref.bf16_encode(rope)
    if fmt == "fp8":
        kv = ref.quantize_rows(latent, rope).reshape(-1, 64, 656)
    else:
        kv = np.concatenate([latent, rope], 1).view(ref.BF16).reshape(-1, 64, 576)
    q = rng.normal(0, 0.1, (T, num_heads, 576))
    q[:, :, 512:] = 0
    heads = np.arange(num_heads)
    q[:, heads, 512 + heads % len(courses)] = LOOK
    options = {"softmax_scale": 1 / LOOK}
    if sink:
        options["attn_sink"] = cases.make_sink(rng, num_heads)
    if indices is None:
        indices = np.arange(K)
    indices = np.broadcast_to(indices, (T, K)).astype(np.int32, order="C")
    return AttentionInputs(ref.to_bf16(q), kv, indices, options, num_splits)


def check(case: AttentionInputs) -> dict:
    """Asserts that results are within the bounds, with and without max_logits, and that a second
    run gives the same bits."""
    want = case.reference()
    got = guarded_attention(attend, case)
    assert_within_bounds(want, got)
    assert_right_again(attend, case, want, got)
    return got


def run(case: AttentionInputs) -> dict:
    """The results, which may be NaN."""
    return guarded_attention(attend, case, poison=NO_NAN)


def check_in_a_batch(case: AttentionInputs, rows: np.ndarray) -> None:
    """Asserts that `case` is within the bounds, and that in a batch of its `rows` every token has
    the bits that it has there, in every call."""
    alone = check(case)
    many = case.rows(rows)
    many.indices = np.ascontiguousarray(many.indices)
    for _ in range(5):
        got = run(many)
        for name, x in got.items():
            assert_same_bits(x, alone[name][rows], f"{name} in a call of {len(rows)} tokens")


# --- growth --------------------------------------------------------------------------------------

# Courses of logits, in units of the growth.
COURSES = {
    "in every block": BLOCK,
    "in every second block": BLOCK // 2,
    "in the second block": BLOCK >= 1,
    "in the third block": BLOCK >= 2,
    "in the middle": BLOCK >= 7,
    "in the last block but one alone": BLOCK == LAST - 1,
    "in the last block alone": BLOCK == LAST,
    "in the last two blocks": np.maximum(BLOCK - (LAST - 2), 0),
    "inside a block": np.arange(K) >= 64 * 6 + 37,
    "by one key": np.arange(K) == 701,
    "by the last key": np.arange(K) == K - 1,
    "up and down": BLOCK % 2,
    "down": -BLOCK,
    "down but for the last key": np.where(np.arange(K) == K - 1, 1, -BLOCK),
}
EVERY_COURSE = np.array([*COURSES.values()], float)


@every_split
@every_head_count
@every_format
@pytest.mark.parametrize("growth", [12, 41, 200, 1000])
@pytest.mark.parametrize("name", COURSES)
def test_growth(name, growth, fmt, num_heads, num_splits):
    check(make(fmt, num_heads, COURSES[name] * float(growth), num_splits))


@every_split
@every_head_count
@every_format
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("growth", [41, 200, 1000])
def test_heads_that_grow_in_different_blocks(growth, sink, fmt, num_heads, num_splits):
    check(make(fmt, num_heads, EVERY_COURSE * growth, num_splits, sink=sink))


@every_split
@every_head_count
@every_format
@pytest.mark.parametrize("block", [2, 3, 8, 15])
def test_a_reference_jump_that_f16_rounds(block, fmt, num_heads, num_splits):
    """The FP8 kernel for Hopper finds the height of a jump in f16, which has steps of 2 above 2048.
    The keys behind the jump lie within a few octaves of each other: every head adds two courses."""
    jump = np.where(block <= BLOCK, 1900.0, -1900.0)
    fine = np.random.default_rng(block).uniform(-6, 6, K)
    case = make(fmt, num_heads, [jump, fine], num_splits)
    case.q[:, :, 512:514] = LOOK
    check(case)


@every_split
@every_format
@pytest.mark.parametrize("block", range(1, 16))
def test_one_head_grows_in_one_block(block, fmt, num_splits):
    """The logits of head 21 of 64 grow. On a bf16 cache the other heads have the bits that they
    have where those do not grow."""
    case = make(fmt, 64, [np.zeros(K), np.where(block <= BLOCK, 90.0, 0.0)], num_splits)
    case.q[:, :, 512:514] = 0
    still = check(case)
    case.q[:, 21, 513] = LOOK
    grown = check(case)
    if fmt == "bf16":
        others = np.arange(64) != 21
        for name, x in grown.items():
            assert_same_bits(x[:, others], still[name][:, others], f"{name} of other heads")


@every_split
@every_head_count
@every_format
@pytest.mark.parametrize("spread", [3, 10, 100])
def test_gaussian_logits(spread, fmt, num_heads, num_splits):
    courses = np.random.default_rng(spread).normal(0, spread / LN_2, (50, K))
    check(make(fmt, num_heads, courses, num_splits))


@every_split
@every_head_count
@every_format
def test_some_rows_are_a_hundred_times_the_rest(fmt, num_heads, num_splits):
    rng = np.random.default_rng(4)
    times = np.where(rng.random(K) < 0.02, 100, 1)
    check(make(fmt, num_heads, rng.normal(0, 2, (50, K)) * times, num_splits))


def test_growing_work_items_in_a_row():
    """Each CTA takes several work items, of every length. The references of one must not change the
    results of the next."""
    rng = np.random.default_rng(5)
    case = make("bf16", 64, EVERY_COURSE * 60, 1)
    rows = rng.integers(0, T, 450)
    case = case.rows(rows)
    case.indices = np.ascontiguousarray(case.indices)
    case.indices[::5] = case.indices[::5, ::-1]
    length = rng.integers(0, K + 1, 450).astype(np.int32)
    length[::7] = 0
    case.options["topk_length"] = length
    got = guarded_attention(attend, case)
    some = rng.permutation(450)[:40]
    alone = check(case.rows(some))
    for name, x in alone.items():
        assert_same_bits(x, got[name][some], f"{name} in another batch")


@pytest.mark.parametrize("num_heads", [16, 32, 64])
@pytest.mark.parametrize("growth", [20, 41])
def test_growth_at_the_end_of_every_work_item(growth, num_heads):
    """References move in the last block of a work item, while the other half of the CTA is about to
    read the sums. Every token of many has the bits that it has alone, in every call."""
    case = make("fp8", num_heads, COURSES["in the last block alone"] * float(growth), 1)
    check_in_a_batch(case, np.arange(2000) % T)


# --- a late start --------------------------------------------------------------------------------


@every_split
@every_head_count
@every_format
@pytest.mark.parametrize("growth", [0, 41])
@pytest.mark.parametrize("height", [0, 1000, -1000])
@pytest.mark.parametrize("first", [63, 64, 128, 192, 1023])
def test_no_key_in_front(first, height, growth, fmt, num_heads, num_splits):
    """The first key comes late. Logits may be far from 0, so a reference of 0 for the columns in
    front of it would not do."""
    indices = np.where(np.arange(K) < first, -1, np.arange(K))
    courses = np.stack([height + growth * BLOCK, height - growth * BLOCK])
    check(make(fmt, num_heads, courses, num_splits, indices=indices))


@every_split
@every_format
def test_keys_in_every_third_block(fmt, num_splits):
    indices = np.where(BLOCK % 3 == 2, np.arange(K), -1)
    check(make(fmt, 64, EVERY_COURSE * 100 - 500, num_splits, indices=indices))


@every_split
@every_format
@pytest.mark.parametrize("num_heads", [1, 5, 16, 33, 64, 128])
@pytest.mark.parametrize("position", [0, 63, 64, 127, 128, 255, 256, 500, 1023])
def test_one_key_is_its_value(position, num_heads, fmt, num_splits):
    """Where a list has one key, out is the key's value: in every bit for a bf16 row, within half a
    bf16 step and 2^-20 of the value for an FP8 row."""
    indices = np.where(np.arange(K) == position, position, -1)
    for height in (0.0, 3.7, -1000.0):
        case = make(fmt, num_heads, np.full(K, height), num_splits, indices=indices)
        out = check(case)["out"]
        value = ref.decode_rows(case.kv, [position])[0, :512]
        if fmt == "bf16":
            want = np.broadcast_to(value.astype(np.float32), out.shape)
            assert_same_bits(ref.bits16(out), ref.bf16_encode(want))
        else:
            magnitude = np.maximum(np.abs(value), 2.0**-126)
            half_step = np.exp2(np.floor(np.log2(magnitude)) - 8)
            error = np.abs(ref.to_f32(out) - value)
            assert (error <= half_step + 2.0**-20 * np.abs(value)).all()


# --- NaN and infinities --------------------------------------------------------------------------


@every_split
@every_format
@pytest.mark.parametrize("position", [3, 70, 130, 700, 1023])
def test_a_row_of_nan(position, fmt, num_splits):
    """One token's list names a cache row of NaN. The results of that token are NaN, and the other
    tokens have the bits that they have without the NaN."""
    indices = np.tile(np.arange(K), (T, 1))
    indices[[0, 2], position] = -1
    case = make(fmt, 100, EVERY_COURSE * 60, num_splits, indices=indices)
    clean = run(case)
    case.kv.view(np.uint8).reshape(K, -1)[position] = 0xFF
    got = run(case)
    for name, x in got.items():
        assert np.isnan(ref.to_f32(x[1])).all(), name
        assert_same_bits(x[[0, 2]], clean[name][[0, 2]], f"{name} of other tokens")


@every_split
@every_format
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_head_of_the_query_that_is_bad(bad, fmt, num_splits):
    """One head's query has a NaN or an infinity, which meets values of both signs and zeros. The
    results of that head are NaN."""
    case = make(fmt, 64, EVERY_COURSE * 60, num_splits)
    others = np.ones((T, 64), bool)
    others[1, 5] = False
    want = case.reference().rows(others)
    clean = run(case)
    case.q[1, 5, 7] = bad
    got = run(case)
    for name, x in got.items():
        assert np.isnan(ref.to_f32(x[1, 5])).all(), name
    assert_within_bounds(want, {name: x[others] for name, x in got.items()})
    if fmt == "bf16":
        for name, x in got.items():
            assert_same_bits(x[others], clean[name][others], f"{name} of other heads")


@every_split
@every_format
@pytest.mark.parametrize("position", [3, 70, 130, 700, 1023])
def test_an_infinite_logit(position, fmt, num_splits):
    """A key has an infinity in its RoPE part. Heads for which its logit is +inf have results of
    NaN. For heads for which its logit is -inf the key has no weight."""
    num_heads = 64
    case = make(fmt, num_heads, [BLOCK * 41.0, np.zeros(K)], num_splits)
    likes = np.arange(num_heads) % 4 == 1
    case.q[:, :, 513] = np.where(likes, 1.0, -1.0)
    rope = case.kv.view(np.uint8).reshape(K, -1)[:, -128:].view(np.uint16)
    rope[position, 1] = 0x7F80
    got = run(case)
    for name, x in got.items():
        assert np.isnan(ref.to_f32(x[:, likes])).all(), name
    case.indices[:, position] = -1
    want = case.reference().rows((slice(None), ~likes))
    assert_within_bounds(want, {name: x[:, ~likes] for name, x in got.items()})


@every_split
def test_logits_of_minus_infinity_alone(num_splits):
    """A head whose logits are all -inf has the results of an empty list.

    This holds for bf16 rows; with FP8 rows a query that is not finite has results of NaN.
    """
    case = make("bf16", 64, np.stack([np.zeros(K), np.full(K, 0.5)]), num_splits)
    others = np.ones((T, 64), bool)
    others[1, 9] = False
    want = case.reference().rows(others)
    case.q[1, 9] = 0
    case.q[1, 9, 513] = -np.inf
    got = run(case)
    assert (ref.to_f32(got["out"][1, 9]) == 0).all()
    assert got["lse"][1, 9] == -np.inf
    assert got["max_logits"][1, 9] == -np.inf
    assert_within_bounds(want, {name: x[others] for name, x in got.items()})
