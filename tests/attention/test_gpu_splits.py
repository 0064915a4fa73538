"""Splits that take columns in turn, on Hopper.

Where the plan splits long lists, each split takes every n-th chunk of 128 columns, so that lists
with few keys, which engines fill from the front, give all splits as much to do. Where a call says
how many splits there are, a split has a range of columns.
"""

import cases
import numpy as np
import pytest
import ragged
from cases import AttentionInputs
from helpers import NO_NAN, assert_same_bits, guarded_attention
from ragged import assert_right, attend, every_format
from test_one_key import assert_is_the_value

import sparse_mla

# Tokens, heads: the plan gives them two splits or four. The lists' last chunks are not full.
every_batch = pytest.mark.parametrize(("num_tokens", "num_heads"), [(24, 64), (48, 60), (16, 128)])
WIDTH = 2000

LENGTHS = [0, 1, 100, 127, 128, 129, 300, 1000, 1024, 1500, 1999, WIDTH]


def make(fmt, num_tokens, num_heads, *, by_length=False) -> AttentionInputs:
    """Lists that have keys up to a length, which is their topk_length or has -1 behind it."""
    rng = np.random.default_rng([num_tokens, num_heads])
    length = np.resize(LENGTHS, num_tokens).astype(np.int32)
    return ragged.make_lists(rng, fmt, length, num_heads, WIDTH, by_length=by_length)


@every_format
@every_batch
def test_short_and_long_lists(num_tokens, num_heads, fmt):
    """Every run gives the same bits, and so do lists that end with their topk_length."""
    case = make(fmt, num_tokens, num_heads)
    got = guarded_attention(attend, case)
    assert_right(case, got, np.arange(len(LENGTHS)))
    by_length = make(fmt, num_tokens, num_heads, by_length=True)
    for again in (case, case, by_length):
        for name, x in guarded_attention(attend, again).items():
            assert_same_bits(x, got[name], name)


@every_format
@every_batch
def test_given_splits_have_ranges(num_tokens, num_heads, fmt):
    """No number of splits that a call may give has the bits of the plan's splits."""
    case = make(fmt, num_tokens, num_heads)
    got = guarded_attention(attend, case)
    full = np.resize(LENGTHS, num_tokens) == WIDTH
    for num_splits in range(1, 17):
        given = guarded_attention(attend, case, num_splits=num_splits)
        assert (given["out"][full] != got["out"][full]).any(), num_splits


@every_format
@pytest.mark.parametrize("keys", ["half of them", "those of one warp", "few", "the last"])
def test_holes(keys, fmt):
    case = make(fmt, 24, 64)
    rng = np.random.default_rng(3)
    case.indices[::3] = cases.make_indices_with_holes(rng, 8, WIDTH, ragged.NUM_SLOTS, keys)
    assert_right(case, guarded_attention(attend, case), np.arange(0, 24, 3))


@every_format
def test_one_key_in_any_chunk(fmt):
    """out is the key's value, whichever split has it."""
    case = make(fmt, 24, 64)
    del case.options["attn_sink"]
    slots = np.arange(24) * 7
    case.indices[:] = -1
    case.indices[np.arange(24), np.arange(24) * 83] = slots
    got = guarded_attention(attend, case)
    assert_right(case, got, np.arange(24))
    assert_is_the_value(case, case.kv, slots, got)


@every_format
@pytest.mark.parametrize("value", [np.nan, 1e30, 0.0])
def test_rows_whose_numbers_do_not_fit(value, fmt):
    """Splits with a key whose numbers do not fit Hopper's kernel for FP8 rows are done again by
    portable code, from the same columns. A NaN reaches the results of its own token alone."""
    case = make(fmt, 24, 64)
    is_key = ragged.spoil_rows(case, fmt, value)
    long = np.flatnonzero(is_key.sum(1) >= 1000)
    touched = long[::2]
    case.indices[touched[0], [5, 130]] = 3, 4
    case.indices[touched[1], 999] = 5
    case.indices[touched[2:], 300:800:150] = 6
    got = guarded_attention(attend, case, poison=NO_NAN)
    ragged.assert_nan_stays(case, got, value, touched, touched)
    assert_right(case, got, np.setdiff1d(np.arange(24), touched))


@pytest.mark.parametrize(("fmt", "extra"), [("fp8", "fp8"), ("bf16", "bf16"), ("fp8", "bf16")])
def test_two_lists(fmt, extra):
    """The chunks of the extra list go on where those of the main list end."""
    case = make(fmt, 24, 64)
    rng = np.random.default_rng(9)
    width = 700
    rows = cases.make_rows(rng, 640, extra)
    indices = rng.integers(0, 640, (24, width)).astype(np.int32)
    indices[np.arange(width) >= np.resize([0, 1, 130, 700], 24)[:, None]] = -1
    case.options |= {"extra_kv_cache": rows.reshape(10, 64, -1), "extra_indices": indices}
    got = guarded_attention(attend, case)
    assert_right(case, got, np.arange(24))
    for name, x in guarded_attention(attend, case).items():
        assert_same_bits(x, got[name], name)


@every_format
def test_the_rest_of_a_batch(fmt):
    """Tokens that fill the device run unsplit, and the few after them are split. The first ones
    have the bits of a call without splits, whatever comes behind them."""
    name = "fp8_ds_mla" if fmt == "fp8" else "bfloat16"
    for num_tokens in range(33, 400):  # how many fill it depends on the device
        plans = sparse_mla.ops._attention_plans(num_tokens, 64, 2048, device="cuda")
        runs = next(plan["runs"] for plan in plans if plan["kv_format"] == name)
        if len(runs) == 2:
            break
    assert [tokens for tokens, _, _ in runs] == [num_tokens - 1, 1]
    assert runs[0][1] == 1 < runs[1][1]
    rng = np.random.default_rng(num_tokens)
    length = np.full(num_tokens + 4, 2048, np.int32)
    case = ragged.make_lists(rng, fmt, length, 64, by_length=True)
    got, whole = ragged.run_often(case, times=0)
    for result, x in got.items():
        assert_same_bits(x[: num_tokens - 1], whole[result][: num_tokens - 1], result)
    assert (got["out"][-5:] != whole["out"][-5:]).any()
    assert_right(case, got, np.r_[:num_tokens:30, -5:0])
