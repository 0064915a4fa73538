"""mla_attention over FP8 rows on Hopper: ranges of keys in pages or slots."""

import device
import numpy as np
import pytest
import reference as ref
from cases import picker
from dense_cases import Dense, Mask
from helpers import assert_same_bits, assert_within_bounds, check_seeds
from library import sparse_mla
from test_mla_attention import check

attend = sparse_mla.mla_attention

MASKS = [
    Mask(),
    Mask(causal=True),
    Mask(window=(50, 3)),
    Mask(causal=True, window=(5, 0)),
    Mask(chunk=48),
    Mask(causal=True, cp=(1, 2, 4)),
]


def lengths(count: int, most: int, seed=0) -> list[int]:
    return [int(x) for x in np.random.default_rng(seed).integers(0, most, count)]


def fp8(query_lens, seq_lens, heads=16, **more) -> Dense:
    return Dense(query_lens, seq_lens, heads=heads, fmt="fp8", **more)


def same_results(got: dict, want: dict) -> None:
    assert_same_bits(got["out"], want["out"], "out")
    assert_same_bits(got["lse"], want["lse"], "lse")


def leave_keys(case: Dense, token: int, part: slice) -> None:
    """Makes all keys but a part NaN, as if the token did not see them."""
    left = case.slots[token][part]
    case.cache.array.view(np.uint8).reshape(-1, 656)[np.setdiff1d(case.slots[token], left)] = 0xFF
    case.slots[token] = left


def test_hopper_takes_its_own_kernel():
    rows = [row for row in sparse_mla.kernels() if "fp8_dense" in row["name"]]
    assert [row["heads"] for row in rows] == ["33...128", "17...128", "1...128"]
    assert {row["kv_format"] for row in rows} == {"fp8_ds_mla, dense"}
    assert all(row["selected"] == row["available"] for row in rows)


# --- which keys ---


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
@pytest.mark.parametrize("has_slots", [False, True])
def test_masks_and_pages(block_size, mask, has_slots):
    """Four neighbours come with one copy where a page has a multiple of four tokens."""
    check(fp8([3, 1, 0, 2], [150, 70, 9, 331], block_size=block_size, mask=mask,
              has_slots=has_slots))  # fmt: skip


@pytest.mark.parametrize("heads", [5, 64])
@pytest.mark.parametrize("num_keys", [0, 3, 4, 5, 63, 127, 128, 129, 257, 385])
def test_lengths_around_a_step(heads, num_keys):
    """Three tokens see keys from 0, 1 and 2 on, so steps begin at and in front of a range."""
    check(fp8([3, 1], [num_keys, 60], heads, mask=Mask(window=(max(num_keys - 3, 0), -1))))


@pytest.mark.parametrize("heads", [1, 20, 33, 128])
@pytest.mark.parametrize("num_splits", [0, 1, 3, 64])
def test_heads_and_splits(heads, num_splits):
    mask = Mask(causal=True)
    check(fp8([2, 1, 1], [700, 1, 129], heads, mask=mask, num_splits=num_splits, sink=True))


@pytest.mark.parametrize("num_splits", [0, 1, 3])
@pytest.mark.parametrize("block_size", [3, 16])
def test_hidden_pages(block_size, num_splits):
    """Bad entries, and columns that the table lacks. Their keys are NaN, as all keys are that no
    token sees."""
    for seed in range(4):
        case = fp8([2, 1, 3], [300, 64, 150], block_size=block_size, num_splits=num_splits,
                   holes=0.3, missing=seed, seed=seed, mask=Mask(causal=True))  # fmt: skip
        check(case)


def test_hidden_pages_at_the_front():
    """More than a step of keys without a page, in front of the keys that there are."""
    case = fp8([1, 1], [500, 40], heads=64)
    case.table[0, :20] = -1
    leave_keys(case, 0, slice(320, None))
    check(case)


@pytest.mark.parametrize("heads", [1, 64])
@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_one_key(heads, num_splits):
    """A length of one, a window of one, and a page of one key among pages that are not there."""
    check(fp8([1, 1], [1, 1], heads, num_splits=num_splits, sink=True))
    check(fp8([4], [300], heads, num_splits=num_splits, mask=Mask(window=(0, 0))))
    case = fp8([1], [200], heads, block_size=1, num_splits=num_splits)
    case.table[0, np.arange(200) != 150] = -1
    leave_keys(case, 0, slice(150, 151))
    check(case)


@pytest.mark.parametrize("block", range(6))
def test_random_batches(block):
    check_seeds(range(30 * block, 30 * block + 30), lambda seed: check(draw(seed)))


def draw(seed: int) -> Dense:
    rng = np.random.default_rng(seed)
    pick = picker(rng)
    count = int(rng.integers(1, 6))
    return fp8(
        [int(rng.integers(0, 10)) for _ in range(count)],
        [int(rng.integers(0, 701)) for _ in range(count)],
        pick(1, 5, 16, 64, 128),
        block_size=pick(1, 3, 16, 64),
        mask=MASKS[rng.integers(len(MASKS))],
        has_slots=bool(rng.random() < 0.3),
        is_pair=bool(rng.random() < 0.4),
        sink=bool(rng.random() < 0.3),
        num_splits=pick(0, 0, 1, 3, 64),
        padding=pick(0, 0, 2),
        holes=pick(0.0, 0.0, 0.2),
        missing=pick(0, 0, 1, 3),
        std=pick(1.0, 1.0, 4.0),
        seed=seed,
    )


def test_is_sparse_attention_of_the_slots():
    for heads in (16, 64):
        case = fp8([4, 1, 3], [90, 700, 33], heads, mask=Mask(causal=True, window=(500, 0)))
        got = check(case)
        indices = np.full((case.tokens, max(map(len, case.slots))), -1, np.int32)
        for t, slots in enumerate(case.slots):
            indices[t, : len(slots)] = slots
        out, lse = sparse_mla.sparse_attention(
            case.q, case.cache.array, indices, softmax_scale=case.softmax_scale
        )
        assert_within_bounds(case.reference(), {"out": out, "lse": lse})
        difference = np.asarray(out, np.float32) - np.asarray(got["out"], np.float32)
        assert np.abs(difference).max() <= 2**-7 * np.abs(np.asarray(out, np.float32)).max()


# --- rows of the cache ---


@pytest.mark.parametrize("row_bytes", [656, 672])
@pytest.mark.parametrize("page_rows", [16, 17])
def test_spaced_rows(row_bytes, page_rows):
    """Bytes between pages and between rows are NaN as codes and as scales."""
    case = fp8([1, 2], [300, 70], heads=64, mask=Mask(causal=True))
    dense = case.cache.array
    wide = np.full((dense.shape[0], page_rows, row_bytes), 0xFF, np.uint8)
    wide[:, :16, :656] = dense.view(np.uint8)
    got = case.run(attend)
    case.cache.array = wide.view(dense.dtype)[:, :16, :656]
    same_results(check(case), got)


@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_keys_that_grow(heads, num_splits):
    """Logits grow along a request, so references move; keys of other requests stay small."""
    case = fp8([1, 1], [1500, 300], heads, num_splits=num_splits)
    rng = np.random.default_rng(heads)
    for part in range(1, 6):
        case.cache.write(rng, case.slots[0][250 * part : 250 * part + 250], 1.0 + 0.8 * part)
    check(case)


@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_few_keys_are_far_larger(heads, num_splits):
    case = fp8([2, 1], [2100, 300], heads, num_splits=num_splits, mask=Mask(causal=True))
    rng = np.random.default_rng(heads)
    large = rng.choice(case.slots[1][200:], 40, replace=False)
    case.cache.write(rng, large, 20.0)
    check(case)


@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_scales_that_do_not_fit(heads, num_splits):
    """The first keys' scales are a millionth of a later one's: the portable code computes the item
    again, and no other."""
    case = fp8([1, 1, 1], [900, 300, 1], heads, num_splits=num_splits, scale=1e-3)
    rng = np.random.default_rng(heads)
    case.cache.write(rng, case.slots[0][:400], 1e-4)
    case.cache.write(rng, case.slots[0][700:], 1e2)
    check(case)


# --- plans ---

# Name -> the lengths of n requests.
RAGGED = {
    "any": lambda n: lengths(n, 1500),
    "one is long": lambda n: [3000 if i == n // 2 else 200 for i in range(n)],
    "half are empty": lambda n: [1700 if i % 2 else 0 for i in range(n)],
    "none is long": lambda n: lengths(n, 100),
}


@pytest.mark.parametrize("name", RAGGED)
@pytest.mark.parametrize("heads", [16, 64])
def test_items_are_cut(name, heads):
    """As many requests as a GPU has SMs: long ones are cut among CTAs with short ones. What an
    earlier call has left in the workspace does not matter, nor does the width of the table."""
    case = fp8([1] * 120, RAGGED[name](120), heads, mask=Mask(causal=True), sink=True, padding=2)
    want = check(case)
    size = sparse_mla.attention_workspace_size(122, heads, 4096, device=device.NAME)
    for byte in (0, 255):
        same_results(case.run(attend, workspace=np.full(size, byte, np.uint8)), want)
    case.table = np.pad(case.table, ((0, 0), (0, 3000)), constant_values=-1)
    for _ in range(5):
        same_results(case.run(attend), want)


@pytest.mark.parametrize(("count", "heads"), [(135, 16), (160, 16), (145, 128), (700, 16)])
def test_items_are_ordered(count, heads):
    """More items than SMs: in an order by length, in two runs, or in many rounds. A token of 128
    heads is two items."""
    query_lens = [i % 3 for i in range(count)]
    case = fp8(query_lens, lengths(count, 90_000 // count, count), heads, mask=Mask(causal=True))
    want = case.reference()
    for num_splits in (0, 1):
        case.num_splits = num_splits
        assert_within_bounds(want, case.run(attend))


def test_a_scale_marks_its_own_part():
    """In a long request that is cut, only one part of one request goes to the portable code."""
    case = fp8([1] * 100, [4000 if i == 7 else 150 for i in range(100)], heads=64, scale=1e-3)
    rng = np.random.default_rng(0)
    case.cache.write(rng, case.slots[7][:3900], 1e-4)
    case.cache.write(rng, case.slots[7][3900:], 1e2)
    check(case)


@pytest.mark.parametrize("heads", [16, 40])
def test_the_last_request_s_bits(heads):
    """A request's bits with one split, whatever stands beside it and however wide the table is: 0
    to 300 requests in front, the longest of which sets the width."""
    alone = fp8([2], [500], heads, mask=Mask(causal=True), num_splits=1)
    want = alone.run(attend)
    for count in (1, 40, 300):
        queries = [int(x) for x in np.random.default_rng(5).integers(0, 4, count)]
        case = fp8([*queries, 2], [*lengths(count - 1, 300), 3000, 500], heads,
                   mask=Mask(causal=True), num_splits=1)  # fmt: skip
        keys = case.cache.array.reshape(-1, 656)
        own = alone.cache.array.reshape(-1, 656)
        keys[case.slots[-1]] = own[alone.slots[-1]]
        case.q[-2:] = alone.q
        got = case.run(attend)
        same_results({name: x[-2:] for name, x in got.items()}, want)


# --- calls that other kernels take ---


def test_softcap():
    check(fp8([1, 2], [300, 70], mask=Mask(causal=True), softcap=30.0))


def test_rows_that_are_not_aligned():
    """Queries that begin 2 bytes past a multiple of 16."""
    case = fp8([1, 2], [300, 70], mask=Mask(causal=True))
    wide = np.zeros((*case.q.shape[:2], 584), ref.BF16)[..., 1:577]
    wide[...] = case.q
    case.q = wide
    check(case)
