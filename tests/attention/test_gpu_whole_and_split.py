"""Batches a little larger than full waves of CTAs, on a Hopper GPU with 132 SMs.

Where the last wave of a batch would leave most SMs idle, the plan splits the tokens of that wave,
and one launch has the whole tokens in front and the splits. Whole tokens have the bits of one
split.
"""

import cases
import gpu
import numpy as np
import pytest
import ragged
from helpers import NO_NAN, assert_same_bits, guarded_attention
from ragged import assert_right, attend, every_format, make

LENGTHS = ("full", "any", "short", "one key", "few are long")

# Tokens, heads, and tokens in full waves: one to three of them.
BATCHES = [(140, 64, 132), (75, 128, 66), (160, 16, 132), (150, 100, 132), (420, 33, 396)]
every_batch = pytest.mark.parametrize(("num_tokens", "num_heads", "num_whole"), BATCHES)


def some_tokens(num_tokens: int, num_whole: int) -> np.ndarray:
    """The first and last whole tokens, and split ones."""
    return np.r_[0:3, num_whole - 2 : num_whole + 2, num_tokens - 3 : num_tokens]


@every_format
@every_batch
@pytest.mark.parametrize("lengths", LENGTHS)
def test_whole_and_split_tokens(lengths, num_tokens, num_heads, num_whole, fmt):
    """Whole tokens have the bits of one split; those behind them have others where lists are
    full."""
    case = make(fmt, lengths, num_tokens, num_heads, by_length=num_tokens % 3 == 0)
    got, whole = ragged.run_often(case, times=3, max_logits=num_heads != 16)
    for name, x in got.items():
        assert_same_bits(x[:num_whole], whole[name][:num_whole], name)
    if lengths == "full":
        assert (got["out"][num_whole:] != whole["out"][num_whole:]).any((1, 2)).all()
    assert_right(case, got, some_tokens(num_tokens, num_whole))


@every_format
@pytest.mark.parametrize("keys", ["half of them", "those of one warp", "few", "the last"])
def test_holes(keys, fmt):
    case = make(fmt, "full", 140, 64)
    rng = np.random.default_rng(3)
    case.indices[::4] = cases.make_indices_with_holes(rng, 35, ragged.WIDTH, ragged.NUM_SLOTS, keys)
    assert_right(case, guarded_attention(attend, case), np.r_[0:8, 128:140])


@every_format
@pytest.mark.parametrize("value", [np.nan, 1e30, 0.0])
def test_rows_whose_numbers_do_not_fit(value, fmt):
    """Whole tokens and splits with a key whose numbers do not fit Hopper's kernel for FP8 rows are
    done again by portable code. A NaN reaches the results of its own token alone."""
    case = make(fmt, "full", 140, 64)
    ragged.spoil_rows(case, fmt, value)
    touched = np.arange(0, 140, 5)
    case.indices[touched[::2], 0] = 3
    case.indices[touched[1::2], 1400] = 3
    got = guarded_attention(attend, case, poison=NO_NAN)
    ragged.assert_nan_stays(case, got, value, touched, touched[::3])
    assert_right(case, got, np.setdiff1d(np.arange(125, 140), touched))


@every_format
def test_queries_off_the_grid(fmt):
    """Rows that are not aligned go to the portable kernel, which has no whole tokens."""
    case = make(fmt, "any", 140, 64)
    wide = np.zeros((*case.q.shape[:2], 584), case.q.dtype)[..., 1:577]
    wide[...] = case.q
    case.q = wide
    assert_right(case, guarded_attention(attend, case), some_tokens(140, 132))


@every_format
def test_any_workspace(fmt):
    gpu.check_any_workspace(attend, make(fmt, "any", 140, 64))


@every_format
def test_graphs(fmt):
    inputs = [make(fmt, lengths, 140, 64, seed=i) for i, lengths in enumerate(LENGTHS)]
    gpu.check_list_replays(inputs, times=2)


@pytest.mark.sanitizer
def test_short_run():
    """Whole tokens, splits, and one of each that the portable code computes."""
    case = make("fp8", "any", 140, 64)
    ragged.spoil_rows(case, "fp8", 1e30)
    case.indices[[1, 138], 0] = 3
    assert_right(case, guarded_attention(attend, case), np.r_[0:2, 137:140])
