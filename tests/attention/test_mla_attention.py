"""mla_attention: every token attends to a range of its request's keys in a paged cache."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import reference as ref
from cases import int32, picker, random_bf16
from dense_cases import MASK_ROWS, Dense, Mask, has_rope, takes_e4m3
from device import ON_CUDA
from helpers import assert_same_bits, assert_within_bounds, check_seeds
from library import sparse_mla

attend = sparse_mla.mla_attention
FORMATS = [
    *("bf16", "bf16_512", "fp8", "fp8_nope", "fp8_e4m3", "fp8_e4m3_576"),
    *("fp8_v4", "fp8_v41", "fp8_v41_split", "fp8_token"),
]


def check(case: Dense) -> dict:
    got = case.run(attend)
    assert_within_bounds(case.reference(), got)
    return got


# --- masks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n_q", "n_k", "mask", "rows"), MASK_ROWS)
def test_masks(n_q, n_k, mask, rows):
    """One key is its own value, so a cache of unit vectors shows which keys a query has."""
    seen = np.array([[mask.sees(j, n_k - n_q + i) for j in range(n_k)] for i in range(n_q)])
    assert ["".join(row) for row in seen.astype(int).astype(str)] == rows.split()
    cache = np.zeros((n_k, 1, 576), ref.BF16)
    cache[np.arange(n_k), 0, np.arange(n_k)] = 1
    table = np.arange(n_k, dtype=np.int32)[None]
    q = np.zeros((n_q, 1, 576), ref.BF16)
    starts = np.array([0, n_q], np.int32)
    lens = np.array([n_k], np.int32)
    out, lse = attend(q, cache, table, lens, cu_seqlens_q=starts, softmax_scale=1, **mask.options)
    assert np.array_equal(np.asarray(out, np.float32)[:, 0, :n_k] > 0, seen)
    count = seen.sum(1)
    with np.errstate(divide="ignore"):
        assert np.allclose(lse[:, 0], np.log(count), atol=1e-6)


def test_ranks_have_their_own_positions():
    """cp = (r, 2, 4): positions of a request by rank, and results that merge to the whole."""
    q = random_bf16(np.random.default_rng(0), 3, 4, 576)
    rows = random_bf16(np.random.default_rng(1), 14, 576)
    starts, lens = np.array([0, 3], np.int32), np.array([14], np.int32)
    common = {"cu_seqlens_q": starts, "softmax_scale": 0.05, "causal": True}
    whole = attend(q, rows[:, None], np.arange(14, dtype=np.int32)[None], lens, **common)
    parts = []
    for rank, own in ((0, [0, 1, 2, 3, 8, 9, 10, 11]), (1, [4, 5, 6, 7, 12, 13])):
        table = np.arange(len(own), dtype=np.int32)[None]
        parts.append(attend(q, rows[own][:, None], table, lens, cp=(rank, 2, 4), **common))
    merged = sparse_mla.merge_attn_states(*parts[0], *parts[1])
    assert np.abs(merged[1] - whole[1]).max() < 1e-5
    difference = np.asarray(merged[0], np.float32) - np.asarray(whole[0], np.float32)
    assert np.abs(difference).max() < 0.02


def test_a_rank_without_keys_gives_nothing():
    case = Dense([2], [3], mask=Mask(causal=True, cp=(1, 2, 4)))
    got = check(case)
    assert not np.asarray(got["out"], np.float32).any()
    assert np.isneginf(got["lse"]).all()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("heads", [4, 16, 64, 128])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_queries_of_empty_rows_do_not_matter(fmt, heads, value):
    """A request without keys, and a query before the first key."""
    for num_splits in (0, 1, 3):
        mask = Mask(causal=True)
        case = Dense([1, 2, 3, 1], [40, 0, 2, 99], heads, fmt, mask=mask, num_splits=num_splits)
        q = np.asarray(case.q, np.float32)
        q[1:4, ::2, ::5] = value
        case.q = q.astype(ref.BF16)
        got = check(case)
        assert not np.asarray(got["out"][1:4], np.float32).any()
        assert np.isneginf(got["lse"][1:4]).all()
        assert np.isfinite(np.asarray(got["out"], np.float32)).all()


# --- random batches ------------------------------------------------------------------------------


def draw(seed: int) -> Dense:
    rng = np.random.default_rng(seed)
    pick = picker(rng)
    count = int(rng.integers(0, 5))
    heads = pick(1, 5, 5, 16, 16, 128)
    query_lens = [int(rng.integers(0, 10)) for _ in range(count)]
    is_uniform = count > 0 and rng.random() < 0.3
    if is_uniform:
        query_lens = [int(rng.integers(0, 4))] * count
    most = pick(3, 40, 700)
    seq_lens = [int(rng.integers(0, most + 1)) for _ in range(count)]
    fmt = pick("bf16", "bf16", "fp8", "fp8", *FORMATS[1:])
    mask = Mask(
        causal=bool(rng.random() < 0.6),
        window=pick((-1, -1), (-1, -1), (int(rng.integers(0, 90)), -1), (3, 5), (0, 0), (-1, 2)),
        chunk=pick(0, 0, 0, 1, 7, 64),
        cp=pick(None, None, None, (0, 2, 4), (1, 3, 1), (2, 3, 16), (0, 1, 5)),
    )
    return Dense(
        query_lens,
        seq_lens,
        heads=heads,
        fmt=fmt,
        block_size=pick(1, 3, 16, 64),
        mask=mask,
        has_slots=bool(rng.random() < 0.3),
        is_uniform=is_uniform,
        is_pair=has_rope(fmt) and bool(rng.random() < 0.4),
        e4m3=takes_e4m3(fmt) and bool(rng.random() < 0.4),
        sink=bool(rng.random() < 0.3),
        softcap=pick(0.0, 0.0, 0.0, 0.3, 5.0, 50.0),
        num_splits=pick(0, 0, 1, 3, 64),
        padding=0 if is_uniform else pick(0, 0, 2),
        holes=pick(0.0, 0.0, 0.2),
        missing=pick(0, 0, 1, 3),
        std=pick(1.0, 1.0, 4.0),
        seed=seed,
    )


@pytest.mark.parametrize("block", range(10))
def test_random_batches(block):
    check_seeds(range(40 * block, 40 * block + 40), lambda seed: check(draw(seed)))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("num_splits", [0, 1, 3, 64])
def test_formats(fmt, num_splits):
    mask = Mask(causal=True)
    check(Dense([3, 1, 0, 2], [300, 1, 9, 130], 16, fmt, mask=mask, num_splits=num_splits))


@pytest.mark.parametrize("heads", [1, 2, 16, 33, 64, 128])
def test_heads(heads):
    check(Dense([1, 2], [200, 90], heads, "fp8", mask=Mask(causal=True), sink=True))


@pytest.mark.parametrize("softcap", [2.0**-126, 1e-30, 0.01, 1.0, 30.0, 1e30])
@pytest.mark.parametrize("std", [0.01, 1.0, 6.0])
def test_softcap(softcap, std):
    """From logits far below the cap to logits far above it."""
    check(Dense([2, 1], [150, 1], 16, mask=Mask(causal=True), softcap=softcap, std=std))


# --- the same keys by other ways -----------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["bf16", "fp8", "bf16_512"])
def test_is_sparse_attention_of_the_slots(fmt):
    case = Dense([4, 1, 3], [90, 200, 33], 16, fmt, mask=Mask(causal=True, window=(50, 0)))
    got = check(case)
    indices = np.full((case.tokens, max(map(len, case.slots))), -1, np.int32)
    for t, slots in enumerate(case.slots):
        indices[t, : len(slots)] = slots
    scale = case.softmax_scale
    out, lse = sparse_mla.sparse_attention(case.q, case.cache.array, indices, softmax_scale=scale)
    assert np.abs(lse - got["lse"]).max() < 1e-5
    difference = np.asarray(out, np.float32) - np.asarray(got["out"], np.float32)
    assert np.abs(difference).max() <= 2**-7 * np.abs(np.asarray(out, np.float32)).max()


def test_slots_and_pages_are_the_same():
    case = Dense([3, 2], [70, 21], 16, "fp8", mask=Mask(causal=True))
    got = case.run(attend)
    rows = case.table[:2].repeat(16, 1) * 16 + np.tile(np.arange(16, dtype=np.int32), 5)
    slots = dataclasses.replace(case, has_slots=True)
    slots.table, slots.cache, slots.q = rows.astype(np.int32), case.cache, case.q
    again = slots.run(attend)
    assert_same_bits(got["out"], again["out"])
    assert_same_bits(got["lse"], again["lse"])


def by_slots(case: Dense) -> np.ndarray:
    """Row b has the slots of request b's keys, in order."""
    rows = [case.table[b] for b in range(len(case.seq_lens))]
    within = np.arange(case.block_size, dtype=np.int64)
    return np.stack(
        [(row[:, None].astype(np.int64) * case.block_size + within).ravel() for row in rows]
    )


@pytest.mark.parametrize("cut", [1, 63, 64, 130, 199])
@pytest.mark.parametrize("fmt", ["bf16", "fp8"])
def test_parts_of_the_keys_merge_to_the_whole(fmt, cut):
    """Split at any key: the front half without a mask, the other one causal."""
    case = Dense([3, 1], [203, 260], 16, fmt, mask=Mask(causal=True))
    slots = by_slots(case).astype(np.int32)
    options = {**case.options, "causal": False}
    lens = np.array(case.seq_lens, np.int32)
    front = attend(
        case.q, case.cache.array, None, np.minimum(lens, cut), slot_table=slots, **options
    )
    behind = attend(
        case.q, case.cache.array, None, lens - cut, slot_table=slots[:, cut:], **case.options
    )
    out, lse = sparse_mla.merge_attn_states(*front, *behind)
    assert_within_bounds(case.reference(), {"out": out, "lse": lse}, merges=1)


@pytest.mark.parametrize("chunk", [1, 16, 48])
@pytest.mark.parametrize("fmt", ["bf16", "fp8"])
def test_chunks_are_requests_of_their_own(fmt, chunk):
    """Attention in chunks is causal attention of virtual requests, each of which has the tokens
    and the keys of one chunk."""
    case = Dense([20, 1, 33], [90, 48, 33], 16, fmt, mask=Mask(causal=True, chunk=chunk))
    slots = by_slots(case)
    starts, lens, rows = [0], [], []
    for b, (n_q, n_k) in enumerate(zip(case.query_lens, case.seq_lens, strict=True)):
        for first in range((n_k - n_q) // chunk * chunk, n_k, chunk):
            end = min(first + chunk, n_k)
            starts.append(starts[-1] + end - max(first, n_k - n_q))
            lens.append(end - first)
            rows.append(np.resize(slots[b, first:end], chunk))
    options = case.options | {"attention_chunk": 0, "cu_seqlens_q": int32(*starts)}
    table = np.stack(rows).astype(np.int32)
    out, lse = attend(case.q, case.cache.array, None, int32(*lens), slot_table=table, **options)
    assert_within_bounds(case.reference(), {"out": out, "lse": lse})
    got = check(case)
    assert np.abs(lse - got["lse"]).max() < 1e-5


@pytest.mark.parametrize("hint", [1, 7, 10**6])
def test_hints_change_nothing(hint):
    case = Dense([3, 1], [200, 700], 16, "fp8", mask=Mask(causal=True))
    got = case.run(attend)
    again = case.run(attend, max_seqlen_q=hint, max_seqlen_k=hint)
    assert_same_bits(got["out"], again["out"])
    assert_same_bits(got["lse"], again["lse"])


# --- batch invariance ----------------------------------------------------------------------------


def part_of(case: Dense, b: int, tokens: slice) -> Dense:
    """Some query tokens at the end of one request of a batch, alone."""
    starts = np.cumsum([0, *case.query_lens])
    rows = np.arange(starts[b], starts[b + 1])[tokens]
    alone = dataclasses.replace(case, query_lens=[len(rows)], seq_lens=[case.seq_lens[b]])
    alone.cache, alone.table, alone.q = case.cache, case.table[b : b + 1], case.q[rows]
    alone.attn_sink = case.attn_sink
    return alone


@pytest.mark.parametrize("fmt", ["bf16", "fp8"])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_a_row_does_not_depend_on_others(fmt, num_splits):
    """Alone, in a batch of 64, and without the query rows in front of it."""
    rng = np.random.default_rng(3)
    lens = [int(x) for x in rng.integers(4, 260, 64)]
    queries = [int(x) for x in rng.integers(1, 4, 64)]
    case = Dense(queries, lens, 16, fmt, mask=Mask(causal=True), num_splits=num_splits, sink=True)
    got = case.run(attend)
    starts = np.cumsum([0, *queries])
    for b in (0, 17, 40, 63):
        for tokens in (slice(None), slice(-1, None)):
            alone = part_of(case, b, tokens).run(attend)
            rows = np.arange(starts[b], starts[b + 1])[tokens]
            assert_same_bits(alone["out"], got["out"][rows], "out")
            assert_same_bits(alone["lse"], got["lse"][rows], "lse")


def test_splits_are_cut_from_the_request_s_own_length():
    """A wider table moves no border of a split."""
    case = Dense([1, 1], [300, 64], 16, "bf16", num_splits=3)
    got = case.run(attend)
    wide = np.full((3, 4000), -1, np.int32)
    wide[:2, : case.table.shape[1]] = case.table[:2]
    case.table = wide
    assert_same_bits(case.run(attend)["out"], got["out"])


# --- bad keys ---


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("heads", [1, 16])
@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_a_bad_key_that_the_mask_hides(bad, heads, num_splits):
    """The last key of a request, which only its last token sees, is NaN or infinite. It changes no
    bit of another request, and of the request's other tokens no lse. On the CPU it changes no bit
    of their results either."""
    case = Dense([3, 4, 2], [80, 90, 70], heads, mask=Mask(causal=True), num_splits=num_splits)
    want = case.run(attend)
    case.cache.array.reshape(-1, 576)[case.slots[6][-1]] = bad
    got = case.run(attend)
    assert np.isnan(np.asarray(got["out"][6], np.float32)).any()
    others = [0, 1, 2, 7, 8]
    assert_same_bits(got["out"][others], want["out"][others])
    assert_same_bits(np.delete(got["lse"], 6, 0), np.delete(want["lse"], 6, 0))
    if not ON_CUDA:
        assert_same_bits(got["out"][3:6], want["out"][3:6])


# --- lengths -------------------------------------------------------------------------------------


def ones_cache(num_keys: int, block_size=64) -> tuple[np.ndarray, np.ndarray]:
    """One page of equal keys under any length, whose exact results are known."""
    pages = -(-num_keys // block_size)
    return np.ones((1, block_size, 576), ref.BF16), np.zeros((1, pages), np.int32)


@pytest.mark.parametrize("num_splits", [0, 1, 64])
def test_lengths_from_one_to_many(num_splits):
    lens = np.array([1, 2, 63, 64, 65, 1000, 9000, 131072], np.int32)
    cache, row = ones_cache(131072)
    table = np.repeat(row, len(lens), 0)
    q = np.ones((len(lens), 2, 576), ref.BF16)
    out, lse = attend(q, cache, table, lens, softmax_scale=1 / 576, num_splits=num_splits)
    assert (np.asarray(out, np.float32) == 1).all()
    assert np.abs(lse - (1 + np.log(lens)[:, None])).max() < 2e-6


@pytest.mark.parametrize("num_splits", [0, 1])
def test_a_million_keys(num_splits):
    """Equal terms all round the same way, so a plain sum of them would leave the bounds."""
    cache, table = ones_cache(1_000_000)
    q = np.ones((1, 1, 576), ref.BF16)
    lens = np.array([1_000_000], np.int32)
    out, lse = attend(q, cache, table, lens, softmax_scale=1 / 576, num_splits=num_splits)
    bound = 2.0**-7 if ON_CUDA else 2.0**-8  # the contract's; a step of bf16
    assert np.abs(np.asarray(out, np.float32) - 1).max() <= bound
    assert abs(float(lse[0, 0]) - (1 + np.log(1e6))) < 3e-6


def test_empty_batches():
    cache = np.ones((2, 4, 576), ref.BF16)
    none = np.zeros(0, np.int32)
    out, lse = attend(
        np.ones((0, 3, 576), ref.BF16), cache, none.reshape(0, 5), none, softmax_scale=1
    )
    assert out.shape == (0, 3, 512)
    assert lse.shape == (0, 3)
    q = np.ones((2, 3, 576), ref.BF16)
    lens = np.array([4, 5], np.int32)
    for pages, width in ((2, 0), (0, 3)):
        table = np.zeros((2, width), np.int32)
        out, lse = attend(q, cache[:pages], table, lens, softmax_scale=1)
        assert not np.asarray(out, np.float32).any()
        assert np.isneginf(lse).all()
    out, lse = attend(
        q, cache, np.zeros((2, 1), np.int32), np.array([-7, 0], np.int32), softmax_scale=1
    )
    assert np.isneginf(lse).all()


def test_tokens_of_no_request_are_left_alone():
    check(Dense([0, 2, 0], [5, 9, 3], padding=3, mask=Mask(causal=True), num_splits=3))
    check(Dense([0, 0], [5, 9], padding=3))


def test_one_key_is_its_value():
    """To the bit, on the CPU and on CUDA."""
    case = Dense([1, 1], [1, 1], 16, "bf16")
    got = check(case)
    want = np.stack([case.cache.array.reshape(-1, 576)[s[0], :512] for s in case.slots])
    assert_same_bits(got["out"], np.repeat(want[:, None], 16, 1))


# --- layouts -------------------------------------------------------------------------------------


def test_strided_arrays():
    case = Dense([2, 1], [40, 9], 5, "bf16", mask=Mask(causal=True))
    got = case.run(attend)
    apart = lambda x: np.repeat(x, 2, -1)[..., ::2]  # noqa: E731
    q, cache, table, lens = case.arguments()
    options = case.options
    options["cu_seqlens_q"] = apart(options["cu_seqlens_q"])
    wide = np.zeros((3, 7, 600), ref.BF16)
    wide[:, 1:6, 8:584] = q
    lse = np.zeros((5, 3), np.float32).T
    out, lse = attend(wide[:, 1:6, 8:584], cache, apart(table), apart(lens), lse=lse, **options)
    assert_same_bits(out, got["out"])
    assert_same_bits(np.ascontiguousarray(lse), got["lse"])


def test_tokens_of_requests_may_be_apart():
    """[B, n, H, D] as a view of a larger array, where its tokens are in equal steps."""
    case = Dense([3, 3], [40, 9], 5, "bf16", mask=Mask(causal=True), is_uniform=True)
    got = case.run(attend)
    larger = np.zeros((2, 3, 9, 576), ref.BF16)
    larger[:, :, :5] = case.q
    out, lse = attend(larger[:, :, :5], *case.arguments()[1:], **case.options)
    assert out.shape == (2, 3, 5, 512)
    assert lse.shape == (2, 3, 5)
    assert_same_bits(out.reshape(6, 5, 512), got["out"])
    gaps = np.zeros((2, 4, 5, 576), ref.BF16)[:, :3]
    with pytest.raises(ValueError, match="`q` must have the tokens of one request behind those"):
        attend(gaps, *case.arguments()[1:], **case.options)


# --- workspace -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_splits", [0, 1, 5])
def test_workspace(num_splits):
    """The size for the longest request is enough, wherever the workspace begins."""
    case = Dense([2, 1], [300, 40], 16, "fp8", mask=Mask(causal=True), num_splits=num_splits)
    got = case.run(attend)
    device = "cuda" if ON_CUDA else "cpu"
    size = sparse_mla.attention_workspace_size(3, 16, 300, num_splits=num_splits, device=device)
    for offset in (0, 1, 63):
        memory = np.full(size + offset, 0xFF, np.uint8)
        again = case.run(attend, workspace=memory[offset:])
        assert_same_bits(again["out"], got["out"])
    with pytest.raises(ValueError, match="`workspace` must have at least"):
        case.run(attend, workspace=np.zeros(35, np.uint8))


# --- errors --------------------------------------------------------------------------------------

ONE = np.array([1], np.int32)
TABLE = np.zeros((1, 2), np.int32)


def call(**changes):
    arguments = {
        "q": np.ones((1, 2, 576), ref.BF16),
        "kv_cache": np.ones((2, 4, 576), ref.BF16),
        "block_table": TABLE,
        "cache_seqlens": ONE,
        "softmax_scale": 1.0,
    }
    return attend(**(arguments | changes))


UNIFORM = {"q": np.ones((1, 1, 2, 576), ref.BF16)}
ERRORS = [
    ({"slot_table": TABLE}, "`block_table` must be given, or `slot_table` in its place, got both"),
    ({"block_table": None}, "`slot_table` in its place, got neither"),
    ({"cache_seqlens": int32(1, 2)}, "`cache_seqlens` must have shape [1]"),
    ({"block_table": TABLE[0]}, "`block_table` must"),
    ({"block_table": TABLE[:0]}, "`block_table` must"),
    ({"cu_seqlens_q": int32(0)}, "`cu_seqlens_q` must have shape [2]"),
    (UNIFORM | {"cu_seqlens_q": int32(0, 1)}, "`cu_seqlens_q` must be left out for a query"),
    (UNIFORM | {"lse": np.zeros((1, 2), np.float32)}, "`lse` must have 3 dimensions beside"),
    ({"window_size": (-2, 0)}, "`window_size` must have -1 (open) or a number of keys on its left"),
    ({"window_size": (0, -3)}, "number of keys on its right, got -3"),
    ({"attention_chunk": -1}, "`attention_chunk` must be"),
    ({"softcap": -1.0}, "`softcap` must be 0 (none) or a positive normal float32, got -1"),
    ({"softcap": float("nan")}, "`softcap` must be"),
    ({"softcap": 1e-60}, "`softcap` must be 0 (none) or a positive normal float32"),
    ({"softcap": 2.0**-127}, "`softcap` must be 0 (none) or a positive normal float32"),
    ({"cp": (2, 2, 1)}, "`cp` must be (rank, ranks, interleave)"),
    ({"cp": (0, 0, 1)}, "`cp` must be (rank, ranks, interleave)"),
    ({"cp": (0, 2, 0)}, "`cp` must be (rank, ranks, interleave)"),
    ({"cp": (-1, 2, 1)}, "`cp` must be (rank, ranks, interleave)"),
    ({"cp": (0, 2)}, "`cp` must be a tuple of 3 ints"),
    ({"num_splits": 65}, "`num_splits` must be 0 (the plan chooses) or 1 to 64"),
    ({"kv_scale": 2.0}, "`kv_scale` must"),
    ({"max_seqlen_k": -1}, "`max_seqlen_k` must be at least 0"),
    ({"q": np.ones((1, 2, 512), ref.BF16)}, "`q` must"),
    ({"q": np.ones((1, 129, 576), ref.BF16)}, "`q` must have 1 to 128 heads"),
    ({"kv_cache": np.ones((2, 4, 640), ref.BF16)}, "`kv_cache` must"),
    ({"kv_format": "fp8_ds_mla", "kv_cache": np.zeros((2, 4, 640), np.uint8)}, "`kv_cache` must"),
    ({"softmax_scale": float("nan")}, "`softmax_scale` must"),
    ({"q_scale": 0.5}, "`q_scale` must"),
    ({"attn_sink": np.zeros(1, np.float32)}, "`attn_sink` must"),
    ({"window_size": (2**31, 0)}, "number of keys on its left, got 2147483648"),
    ({"max_seqlen_q": -1}, "`max_seqlen_q` must be at least 0"),
    ({"cp": (0, 2**31, 1)}, "`cp` must be (rank, ranks, interleave)"),
    ({"cp": (0, 2, 2**31)}, "`cp` must be (rank, ranks, interleave)"),
    ({"num_splits": -1}, "`num_splits` must be 0 (the plan chooses) or 1 to 64"),
    ({"lse": np.zeros((1, 3), np.float32)}, "`lse` must"),
    ({"out": np.zeros((1, 1, 512), ref.BF16)}, "`out` must"),
]


@pytest.mark.parametrize(("changes", "words"), ERRORS)
def test_errors(changes, words):
    with pytest.raises(ValueError) as caught:
        call(**changes)
    assert str(caught.value).startswith("mla_attention: ")
    assert words in str(caught.value)


@pytest.mark.parametrize("value", [3, (1, 2.5), None])
def test_a_window_is_two_ints(value):
    with pytest.raises(TypeError, match="mla_attention: `window_size` must be"):
        call(window_size=value)


@pytest.mark.skipif(ON_CUDA, reason="numbers on the device are clamped")
@pytest.mark.parametrize(
    ("starts", "words"),
    [
        ((1, 1), "begin with 0 and never fall, got 1 at 0"),
        ((0, -1), "begin with 0 and never fall, got -1 at 1"),
        ((0, 2), "end at most at the 1 tokens of `q`, got 2"),
    ],
)
def test_query_starts_are_checked(starts, words):
    with pytest.raises(ValueError, match=f"mla_attention: `cu_seqlens_q` must {words}"):
        call(cu_seqlens_q=int32(*starts))


@pytest.mark.parametrize("starts", [(5, 1, 9), (0, -3, 2), (-9, 4, 1), (2**31 - 1, -(2**31), 0)])
def test_wild_query_starts_harm_nothing(starts):
    """On a device they are clamped: results mean nothing, and no other memory is touched."""
    lens, table = int32(3, 2**31 - 1), np.zeros((2, 2), np.int32)
    q = np.ones((4, 2, 576), ref.BF16)
    try:
        call(q=q, cache_seqlens=lens, block_table=table, cu_seqlens_q=int32(*starts))
    except ValueError as error:
        assert not ON_CUDA, error
