"""Long rows among short ones, on Hopper: where a batch has no more works than the GPU has SMs, and
the call leaves the number of splits to the plan, the long rows of an FP8 cache are cut, and CTAs
with short rows take the pieces. Short rows stay as they are without that, and so do bf16 rows."""

import cases
import gpu
import numpy as np
import pytest
import reference as ref
from cases import AttentionInputs
from gpu import capture, torch
from helpers import NO_NAN, assert_same_bits, assert_within_bounds, guarded_attention
from library import sparse_mla as library

import sparse_mla

attend = library.sparse_attention

NUM_SLOTS = 4096
WIDTH = 2048

every_format = pytest.mark.parametrize("fmt", ["fp8", "bf16"])

# Name -> lengths of n lists of WIDTH columns.
LENGTHS = {
    "any": lambda rng, n: rng.integers(1, WIDTH + 1, n),
    "one is long": lambda rng, n: np.where(np.arange(n) == n // 2, WIDTH, 200),
    "few are long": lambda rng, n: np.where(np.arange(n) % 9 == 0, WIDTH, rng.integers(0, 300, n)),
    "half are long": lambda rng, n: np.where(np.arange(n) % 2 == 0, WIDTH, 100),
    "half are empty": lambda rng, n: np.where(np.arange(n) % 2 == 0, 1700, 0),
}


def make(fmt, lengths, num_tokens, num_heads, *, by_length=False, seed=0) -> AttentionInputs:
    """Lists of keys up to a length, by topk_length or with -1 behind."""
    rng = np.random.default_rng([num_tokens, num_heads, seed])
    length = LENGTHS[lengths](rng, num_tokens).astype(np.int32)
    rows = cases.make_rows(rng, NUM_SLOTS, fmt)
    indices = rng.integers(0, NUM_SLOTS, (num_tokens, WIDTH)).astype(np.int32)
    options = {"softmax_scale": ref.HEAD_DIM**-0.5, "attn_sink": cases.make_sink(rng, num_heads)}
    if by_length:
        options["topk_length"] = length
    else:
        indices[np.arange(WIDTH) >= length[:, None]] = -1
    return AttentionInputs(
        q=cases.random_bf16(rng, num_tokens, num_heads, ref.HEAD_DIM),
        kv=rows.reshape(-1, 64, rows.shape[-1]),
        indices=indices,
        options=options,
        num_splits=0,
    )


def cut_rows(got: dict, whole: dict) -> np.ndarray:
    """The tokens that have other bits than without cuts."""
    differs = got["out"].view(np.uint16) != whole["out"].view(np.uint16)
    return np.flatnonzero(differs.any((1, 2)))


def check(case: AttentionInputs, *, max_logits=True, **more) -> np.ndarray:
    """Within the bounds, the same bits on every run; rows that are not cut have those of one split.
    -> the tokens that were cut."""
    got = guarded_attention(attend, case, max_logits=max_logits, **more)
    for _ in range(5):
        for name, x in guarded_attention(attend, case, max_logits=max_logits, **more).items():
            assert_same_bits(x, got[name], f"{name} of another run")
    whole = guarded_attention(attend, case, max_logits=max_logits, num_splits=1, **more)
    cut = cut_rows(got, whole)
    rest = np.setdiff1d(np.arange(case.shape[0]), cut)
    for name in ("out", "max_logits")[: 1 + max_logits]:
        assert_same_bits(got[name][rest], whole[name][rest], name)
    some = np.union1d(cut[:: max(1, len(cut) // 12)], rest[:2])
    assert_within_bounds(case.rows(some).reference(), {n: x[some] for n, x in got.items()})
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
    """Nothing is gained, and a row has the bits that it has alone."""
    case = make(fmt, "any", 128, 64)
    for length in (WIDTH, 1024, 100, 0):
        rng = np.random.default_rng(length)
        case.indices = rng.integers(0, NUM_SLOTS, (128, WIDTH)).astype(np.int32)
        case.indices[:, length:] = -1
        got = guarded_attention(attend, case)
        whole = guarded_attention(attend, case, num_splits=1)
        for name, x in got.items():
            assert_same_bits(x, whole[name], name)


@every_format
@pytest.mark.parametrize("keys", ["half of them", "those of one warp", "few", "the last"])
def test_holes(keys, fmt):
    """Entries that are none anywhere: where they hide a row's length, it may stay whole."""
    case = make(fmt, "few are long", 128, 64)
    rng = np.random.default_rng(3)
    case.indices[::4] = cases.make_indices_with_holes(rng, 32, WIDTH, NUM_SLOTS, keys)
    check(case)


@every_format
def test_parts_of_one_key(fmt):
    """Ten rows of one key a segment, in the column that is looked at, among short ones; CTAs
    without a work of their own take them segment by segment. One key's value is exact as ever."""
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
    """Parts with such a key are done again in portable code; a NaN is its token's alone."""
    case = make(fmt, "any", 128, 64)
    rows = case.kv.reshape(NUM_SLOTS, -1)
    if fmt == "fp8":
        rows[:32, 512:528].view(np.float32)[:] = value
    else:
        rows[:32, :512] = min(value, 1e4)
    is_key = case.indices >= 0
    case.indices[is_key] = np.maximum(case.indices[is_key], 32)
    touched = np.arange(0, 128, 5)
    case.indices[touched, 0] = 3
    far = touched[is_key[touched].sum(1) > 1500]
    case.indices[far, 1400] = 5
    got = guarded_attention(attend, case, poison=NO_NAN)
    others = np.setdiff1d(np.arange(128), touched)
    if np.isnan(value):
        assert np.isnan(got["out"][touched].astype(np.float32)).all()
        assert np.isnan(got["lse"][touched]).all()
    else:
        some = touched[:10]
        assert_within_bounds(case.rows(some).reference(), {n: x[some] for n, x in got.items()})
    some = others[:10]
    assert_within_bounds(case.rows(some).reference(), {n: x[some] for n, x in got.items()})


@every_format
def test_results_off_the_grid(fmt):
    """Rows of out that are not on 16 bytes."""
    cut = check(make(fmt, "any", 100, 64), row_gap=1)
    assert (len(cut) > 0) == (fmt == "fp8")


@every_format
def test_any_workspace(fmt):
    """What a workspace held before is not looked at, and one that was used does again."""
    case = make(fmt, "any", 128, 64)
    want = guarded_attention(attend, case)
    size = sparse_mla.attention_workspace_size(128, 64, WIDTH, device="cuda")
    rng = np.random.default_rng(1)
    for content in (np.zeros(size), np.full(size, 0xFF), rng.integers(0, 256, size)):
        workspace = gpu.put(content.astype(np.uint8))
        for _ in range(3):
            got = guarded_attention(attend, case, workspace=workspace)
            for name, x in got.items():
                assert_same_bits(x, want[name], name)


@every_format
def test_graphs(fmt):
    """Replays with other lists and lengths have the bits of eager calls."""
    cases_ = [make(fmt, lengths, 128, 64, seed=i) for i, lengths in enumerate(LENGTHS)]
    first = cases_[0]
    q, kv, indices = (gpu.put(x) for x in (first.q, first.kv, first.indices))
    options = {n: gpu.put(x) if isinstance(x, np.ndarray) else x for n, x in first.options.items()}

    def run():
        return sparse_mla.sparse_attention(q, kv, indices, **options)

    graph, results = capture(run)
    for case in cases_ * 3:
        indices.copy_(gpu.put(case.indices))
        torch.cuda.synchronize()
        graph.replay()
        gpu.assert_same_values(gpu.values(results), gpu.values(run()))
