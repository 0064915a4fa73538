"""Index lists with holes, which are entries that name no key, on the GPU.

Hopper's kernels leave such entries out: each of four warps takes the keys of its quarter of the
columns, and a work item ends where the fullest quarter ends.
"""

import cases
import numpy as np
import pytest
import reference as ref
from cases import AttentionInputs
from helpers import (
    assert_right_again,
    assert_same_bits,
    assert_within_bounds,
    guarded_attention,
)
from library import sparse_mla

attend = sparse_mla.sparse_attention

T = 5
NUM_SLOTS = 1024

every_format = pytest.mark.parametrize("fmt", ["fp8", "bf16"])
every_width = pytest.mark.parametrize("width", [1, 3, 64, 100, 129, 2048, 4099])
every_split = pytest.mark.parametrize("num_splits", [1, 2, 5])


every_pattern = pytest.mark.parametrize("keys", cases.KEYS)


def make_indices(rng, num_tokens, width, keys) -> np.ndarray:
    return cases.make_indices_with_holes(rng, num_tokens, width, NUM_SLOTS, keys)


def make_lengths(rng, num_tokens, width) -> np.ndarray:
    length = rng.integers(0, width + 1, num_tokens).astype(np.int32)
    length[:4] = [width, 0, width + 9, width // 2]
    return length


def make(fmt, keys, width, num_splits, *, num_heads=64, num_tokens=T, ragged=False):
    rng = np.random.default_rng([width, num_splits, num_heads, num_tokens, ragged])
    rows = cases.make_rows(rng, NUM_SLOTS, fmt)
    options = {"softmax_scale": ref.HEAD_DIM**-0.5}
    if ragged:
        options["topk_length"] = make_lengths(rng, num_tokens, width)
    return AttentionInputs(
        q=cases.random_bf16(rng, num_tokens, num_heads, ref.HEAD_DIM),
        kv=rows.reshape(-1, 64, rows.shape[-1]),
        indices=make_indices(rng, num_tokens, width, keys),
        options=options,
        num_splits=num_splits,
    )


def add_list(case: AttentionInputs, fmt, keys, width, *, ragged=False) -> AttentionInputs:
    num_tokens = case.shape[0]
    rng = np.random.default_rng([width, 3])
    rows = cases.make_rows(rng, NUM_SLOTS, fmt)
    case.options["extra_kv_cache"] = rows.reshape(-1, 64, rows.shape[-1])
    case.options["extra_indices"] = make_indices(rng, num_tokens, width, keys)
    if ragged:
        case.options["extra_topk_length"] = make_lengths(rng, num_tokens, width)[::-1].copy()
    return case


def hide(kv, indices, length):
    """Writes NaN bytes into every cache row that no list names."""
    rows = kv.reshape(NUM_SLOTS, -1)
    assert np.shares_memory(rows, kv)
    cases.hide_unselected(rows, indices, length)


def check(case: AttentionInputs) -> dict:
    """Asserts that results are within the bounds, with and without max_logits, and that a second
    run, with NaN in all cache rows that are not selected, gives the same bits."""
    options = case.options
    want = case.reference()
    got = guarded_attention(attend, case)
    assert_within_bounds(want, got)
    hide(case.kv, case.indices, options.get("topk_length"))
    if "extra_kv_cache" in options:
        hide(options["extra_kv_cache"], options["extra_indices"], options.get("extra_topk_length"))
    assert_right_again(attend, case, want, got)
    return got


@every_split
@every_width
@every_format
@every_pattern
def test_one_list(keys, fmt, width, num_splits):
    check(make(fmt, keys, width, num_splits))


@every_split
@every_format
@every_pattern
@pytest.mark.parametrize("width", [100, 129, 2048])
def test_one_list_of_any_length(keys, fmt, width, num_splits):
    check(make(fmt, keys, width, num_splits, num_heads=100, ragged=True))


@every_split
@every_format
@every_pattern
@pytest.mark.parametrize("extra_keys", ["half of them", "those of one warp", "the last", "none"])
@pytest.mark.parametrize(("width", "extra_width"), [(129, 300), (300, 1)])
def test_two_lists(keys, extra_keys, width, extra_width, fmt, num_splits):
    case = make(fmt, keys, width, num_splits, ragged=True)
    check(add_list(case, fmt, extra_keys, extra_width, ragged=True))


@every_format
@pytest.mark.parametrize("num_heads", [1, 16, 32])
@pytest.mark.parametrize("keys", ["half of them", "those of one warp", "the last", "none"])
def test_fewer_heads(keys, num_heads, fmt):
    check(make(fmt, keys, 2048, 1, num_heads=num_heads))


@every_format
@pytest.mark.parametrize("has_extra", [False, True])
def test_work_items_in_a_row(has_extra, fmt):
    """Each CTA takes several work items, of every pattern and length. Tokens have the bits that
    they have in a batch of 40."""
    num_tokens, width = 450, 600
    case = make(fmt, "all", width, 1, num_tokens=num_tokens, ragged=True)
    rng = np.random.default_rng(6)
    patterns = [*cases.KEYS]
    for t in range(num_tokens):
        keys = patterns[rng.integers(len(patterns))]
        case.indices[t] = make_indices(rng, 1, width, keys)[0]
    if has_extra:
        add_list(case, fmt, "half of them", 200, ragged=True)
        case.options["extra_indices"][::3] = -1
    got = guarded_attention(attend, case)
    some = rng.permutation(num_tokens)[:40]
    alone = check(case.rows(some))
    for name, x in alone.items():
        assert_same_bits(x, got[name][some], f"{name} in another batch")


@every_format
@pytest.mark.parametrize("num_heads", [16, 64, 128])
@pytest.mark.parametrize("num_tokens", [133, 200, 264, 265, 396, 397, 529, 600])
def test_bits_in_any_order(num_tokens, num_heads, fmt):
    """A launch of two to four work items per CTA orders them by their lengths. Lists have any
    length, with and without holes, and some have one key or none. With the tokens in reverse order,
    each work item goes to another CTA and follows others, and its results have the same bits."""
    width = 400
    case = make(fmt, "all", width, 1, num_heads=num_heads, num_tokens=num_tokens, ragged=True)
    rng = np.random.default_rng(num_tokens)
    for t in rng.permutation(num_tokens)[: num_tokens // 2]:
        keys = ["half of them", "few", "the first", "none"][rng.integers(4)]
        case.indices[t] = make_indices(rng, 1, width, keys)[0]
    got = guarded_attention(attend, case)
    back = guarded_attention(attend, case.rows(np.arange(num_tokens)[::-1]))
    for name, x in got.items():
        assert_same_bits(back[name][::-1], x, f"{name}, tokens backwards")
    some = rng.permutation(num_tokens)[:24]
    assert_within_bounds(case.rows(some).reference(), {n: x[some] for n, x in got.items()})


@every_format
@pytest.mark.parametrize("topk_length", [0, 400])
def test_order_of_equal_lengths(topk_length, fmt):
    """Where all work items are equally long, the order has ties everywhere. Each must be done, and
    its results must be in its own place."""
    num_tokens = 301
    case = make(fmt, "all", 400, 1, num_tokens=num_tokens)
    case.options["topk_length"] = np.full(num_tokens, topk_length, np.int32)
    got = guarded_attention(attend, case)
    assert_within_bounds(case.reference(), got)
