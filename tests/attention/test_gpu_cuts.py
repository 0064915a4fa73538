"""Long index lists among short ones, on Hopper.

Where a batch has no more work items than the GPU has SMs, and the call leaves the number of splits
to the plan, a launch for an FP8 cache cuts the work items with long lists. CTAs with short lists
take the pieces. Tokens that are not cut have the bits of one split, and so do all tokens of a bf16
cache.
"""

import cases
import gpu
import numpy as np
import pytest
import ragged
from cases import AttentionInputs
from helpers import NO_NAN, assert_same_bits, guarded_attention
from ragged import assert_right, attend, every_format, make

LENGTHS = ("any", "one is long", "few are long", "half are long", "half are empty")


def cut_rows(got: dict, whole: dict) -> np.ndarray:
    """The tokens whose out has other bits in `got` than in `whole`, which is not cut."""
    differs = got["out"].view(np.uint16) != whole["out"].view(np.uint16)
    return np.flatnonzero(differs.any((1, 2)))


def check(case: AttentionInputs, *, max_logits=True, **more) -> np.ndarray:
    """Asserts that results are within the bounds and have the same bits in every run, and that
    tokens that are not cut have the bits of one split. -> the tokens that were cut."""
    got, whole = ragged.run_often(case, times=5, max_logits=max_logits, **more)
    cut = cut_rows(got, whole)
    rest = np.setdiff1d(np.arange(case.shape[0]), cut)
    for name in ("out", "max_logits")[: 1 + max_logits]:
        assert_same_bits(got[name][rest], whole[name][rest], name)
    assert_right(case, got, np.union1d(cut[:: max(1, len(cut) // 12)], rest[:2]))
    return cut


@every_format
@pytest.mark.parametrize(
    ("num_tokens", "num_heads"),
    [(100, 64), (128, 64), (132, 64), (128, 16), (132, 32), (90, 40), (64, 128), (66, 72)],
)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_long_rows_are_cut(lengths, num_tokens, num_heads, fmt):
    case = make(fmt, lengths, num_tokens, num_heads, by_length=num_tokens % 3 == 0)
    cut = check(case, max_logits=num_heads != 16)
    assert (len(cut) > 0) == (fmt == "fp8")


@every_format
def test_equal_rows_are_not_cut(fmt):
    """Cuts would gain nothing where all lists are equally long: all tokens have the bits of one
    split."""
    case = make(fmt, "any", 128, 64)
    for length in (ragged.WIDTH, 1024, 100, 0):
        rng = np.random.default_rng(length)
        case.indices = rng.integers(0, ragged.NUM_SLOTS, (128, ragged.WIDTH)).astype(np.int32)
        case.indices[:, length:] = -1
        got, whole = ragged.run_often(case, times=0)
        for name, x in got.items():
            assert_same_bits(x, whole[name], name)


@every_format
@pytest.mark.parametrize("keys", ["half of them", "those of one warp", "few", "the last"])
def test_holes(keys, fmt):
    """Entries that name no key may stand anywhere in a list. Where they hide its length, the work
    item may stay whole."""
    case = make(fmt, "few are long", 128, 64)
    rng = np.random.default_rng(3)
    case.indices[::4] = cases.make_indices_with_holes(rng, 32, ragged.WIDTH, ragged.NUM_SLOTS, keys)
    check(case)


@every_format
def test_parts_of_one_key(fmt):
    """Among short lists, ten have one key per segment, in the column that the plan looks at. CTAs
    without a work item of their own take these lists segment by segment, so that parts have a
    single key."""
    num_tokens = 70
    case = make(fmt, "half are empty", num_tokens, 64)
    case.indices[:, 200:] = -1
    case.indices[1::2, :200] = case.indices[::2, :200]
    rows = np.arange(0, num_tokens, 7)
    case.indices[rows] = -1
    case.indices[rows[:, None], np.arange(64, 1024, 128)] = np.arange(8)
    cut = check(case)
    assert set(cut) <= set(rows)


@every_format
@pytest.mark.parametrize("value", [np.nan, 1e30, 0.0])
def test_rows_whose_numbers_do_not_fit(value, fmt):
    """Parts with a key whose numbers do not fit Hopper's kernel for FP8 rows are done again by
    portable code. A NaN reaches the results of its own token alone."""
    case = make(fmt, "any", 128, 64)
    is_key = ragged.spoil_rows(case, fmt, value)
    touched = np.arange(0, 128, 5)
    case.indices[touched, 0] = 3
    far = touched[is_key[touched].sum(1) > 1500]
    case.indices[far, 1400] = 5
    got = guarded_attention(attend, case, poison=NO_NAN)
    ragged.assert_nan_stays(case, got, value, touched, touched[:10])
    assert_right(case, got, np.setdiff1d(np.arange(128), touched)[:10])


@every_format
def test_results_off_the_grid(fmt):
    """The tokens of out do not begin at multiples of 16 bytes."""
    cut = check(make(fmt, "any", 100, 64), row_gap=1)
    assert (len(cut) > 0) == (fmt == "fp8")


@every_format
def test_any_workspace(fmt):
    gpu.check_any_workspace(attend, make(fmt, "any", 128, 64))


@every_format
def test_graphs(fmt):
    inputs = [make(fmt, lengths, 128, 64, seed=i) for i, lengths in enumerate(LENGTHS)]
    gpu.check_list_replays(inputs, times=3)
