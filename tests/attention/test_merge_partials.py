"""merge_attn_partials (csrc/cpu/attention/merge.c)."""

import itertools
import sys

import cases
import numpy as np
import pytest
import reference as ref
from helpers import Guarded, assert_merged, assert_parts_are_whole, assert_same_bits
from library import sparse_mla

pytestmark = pytest.mark.frameworks

DTYPES = {"bf16": ref.BF16, "fp16": np.dtype(np.float16), "fp32": np.dtype(np.float32)}
EMPTY = (-np.inf, np.inf)


def make_parts(dtype, num_parts, shape=(5, 7), width=512, spread=3.0, seed=0):
    rng = np.random.default_rng(seed)
    outs = rng.standard_t(2, (num_parts, *shape, width)).astype(np.float32)
    lses = rng.normal(0, spread, (num_parts, *shape)).astype(np.float32)
    return (ref.to_bf16(outs) if dtype == ref.BF16 else outs.astype(dtype)), lses


def merge(outs, lses, attn_sink=None, dtype=None, row_gap=0):
    out = Guarded(outs[0].shape, dtype or outs[0].dtype, row_gap=row_gap)
    lse = Guarded(outs[0].shape[:2], np.float32, row_gap=row_gap)
    result = sparse_mla.merge_attn_partials(
        outs, lses, attn_sink=attn_sink, out=out.array, lse=lse.array
    )
    assert result[0] is out.array
    assert result[1] is lse.array
    return out.check(), lse.check()


def check(outs, lses, attn_sink=None, dtype=None, row_gap=0):
    got = merge(outs, lses, attn_sink, dtype, row_gap)
    # A product, a weight and a sum more for each part.
    assert_merged(got, ref.merge_attn_partials(outs, lses, attn_sink), len(outs) / 2)
    return got


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_vector_of_the_contract(dtype):
    """(1, lse 0) with (4, lse ln 2) is 3, lse ln 3; and (7, lse ln 3) makes it 5, lse ln 6."""
    outs = np.array([1, 4, 7], np.float32).reshape(3, 1, 1, 1).astype(DTYPES[dtype])
    lses = np.log(np.array([1, 2, 3], np.float32)).reshape(3, 1, 1)
    for count, value, lse in ((2, 3, 1.0986123), (3, 5, 1.7917595)):
        got = merge(outs[:count], lses[:count])
        assert abs(float(got[0].item()) - value) < 1e-6
        assert abs(got[1].item() - lse) < 2e-7
    got = sparse_mla.merge_attn_states(outs[0], lses[0], outs[1], lses[1])
    assert abs(float(got[0].item()) - 3) < 1e-6
    assert abs(got[1].item() - 1.0986123) < 2e-7


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_parts", [1, 2, 3, 5, 8, 64])
@pytest.mark.parametrize("spread", [0.1, 3.0, 200.0, 1e4])
def test_parts(dtype, num_parts, spread):
    for shape, width in ((0, 4), 512), ((1, 1), 512), ((5, 7), 512), ((3, 2), 129), ((2, 3), 1500):
        outs, lses = make_parts(DTYPES[dtype], num_parts, shape, width, spread)
        want = check(outs, lses, row_gap=8)
        for given in (list(outs), list(lses)), (tuple(outs), lses), (outs, list(lses)):
            got = merge(*given)
            assert_same_bits(got[0], want[0], "a list")
            assert_same_bits(got[1], want[1], "a list")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [7, 64, 512, 1500])
@pytest.mark.parametrize("has_sink", [False, True])
def test_two_parts_have_the_bits_of_merge_attn_states(dtype, width, has_sink):
    """Rows where the first or the second lse is larger, far larger, the same, empty or NaN."""
    outs, lses = make_parts(DTYPES[dtype], 2, (60, 9), width)
    lses[:, 10:20] *= 100
    lses[1, 20] = lses[0, 20]
    for token, (a, b) in enumerate(((0, 1), (1, 0), (0, 0), (1, 1)), 21):
        lses[0, token, ::2], lses[1, token, 1::2] = EMPTY[a], EMPTY[b]
    lses[:, 25], lses[0, 26], lses[1, 27] = -np.inf, np.nan, np.nan
    outs[0, 28:30] *= np.asarray(0, outs.dtype)
    sink = np.linspace(-3, 3, 9).astype(np.float32) if has_sink else None
    want = sparse_mla.merge_attn_states(outs[0], lses[0], outs[1], lses[1], attn_sink=sink)
    got = merge(outs, lses, sink)
    known = np.arange(60) // 2 != 13  # a NaN has no promised bits
    assert_same_bits(got[0][known], np.asarray(want[0])[known])
    assert_same_bits(got[1][known], np.asarray(want[1])[known])
    assert np.isnan(ref.to_f32(got[0][~known])).all()
    assert np.isnan(got[1][~known]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("empty", EMPTY)
def test_empty_parts(dtype, empty):
    """An empty part has no say, whatever its row holds. Where all are empty, out is part 0's."""
    outs, lses = make_parts(DTYPES[dtype], 4, (6, 3))
    lses[0, 0], lses[1:3, 1], lses[:, 2], lses[1:, 3], lses[:3, 4] = (empty,) * 5
    some = np.isinf(lses) & (np.arange(6) != 2)[:, None]
    clean = check(outs, lses)
    outs[some] = np.nan
    out, lse = merge(outs, lses)
    assert_same_bits(out, clean[0])
    assert_same_bits(lse, clean[1])
    assert_same_bits(out[2], outs[0, 2], "all are empty")
    assert_same_bits(out[3], outs[0, 3], "part 0 alone")
    assert_same_bits(out[4], outs[3, 4], "the last part alone")
    assert_same_bits(lse[4], lses[3, 4])
    assert (lse[2] == -np.inf).all()
    three = merge(outs[1:], lses[1:])
    assert_same_bits(out[0], three[0][0], "as without the part")
    assert_same_bits(lse[0], three[1][0], "as without the part")


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_part_is_copied(dtype):
    outs, lses = make_parts(DTYPES[dtype], 1)
    outs[0, 1, 2, 5] = np.nan
    lses[0, 2, 3] = np.inf
    out, lse = merge(outs, lses)
    assert_same_bits(lse, np.where(np.isinf(lses[0]), -np.inf, lses[0]).astype(np.float32))
    is_nan = np.isnan(ref.to_f32(outs[0]))
    assert np.isnan(ref.to_f32(out[is_nan])).all()  # fp16 has many NaN
    assert_same_bits(np.where(is_nan, 0, out), np.where(is_nan, 0, outs[0]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [0.1, 3.0, 200.0])
def test_sinks(dtype, spread):
    """A sink is as likely as the merged keys, far more and far less likely, and infinite."""
    outs, lses = make_parts(DTYPES[dtype], 5, (9, 7), spread=spread, seed=1)
    lses[:, 8] = -np.inf
    sink = lses.max(0)[0] + np.array([0, 3, -3, 50, -50, np.inf, -np.inf], np.float32)
    out, lse = check(outs, lses, np.append(sink, np.float32(np.nan)), row_gap=8)
    plain, plain_lse = merge(outs, lses)
    assert_same_bits(lse, plain_lse, "lse has no part of the sink")
    assert (ref.to_f32(out[:8, 5]) == 0).all()
    assert_same_bits(out[:, 6], plain[:, 6], "a sink of -inf")
    assert_same_bits(out[8], plain[8], "all are empty")
    assert not np.array_equal(out[0, 0].view(np.uint8), plain[0, 0].view(np.uint8))


@pytest.mark.parametrize("num_parts", [1, 2, 5])
@pytest.mark.parametrize("width", [6, 512, 1500])
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_16_bits_from_fp32(num_parts, width, kind):
    """The sum in fp32 is rounded once."""
    outs, lses = make_parts(DTYPES["fp32"], num_parts, (40, 3), width)
    out, lse = check(outs, lses, dtype=DTYPES[kind], row_gap=8)
    exact, exact_lse = merge(outs, lses)
    assert_same_bits(out, ref.to_bf16(exact) if kind == "bf16" else exact.astype(DTYPES[kind]))
    assert_same_bits(lse, exact_lse)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides(dtype):
    """Each part has strides of its own; one array has any."""
    outs, lses = make_parts(DTYPES[dtype], 4, (6, 5))
    want = merge([x[::2, 1:4] for x in outs], [x[::2, 1:4] for x in lses])
    wide = np.zeros((6, 5, 4, 520), outs.dtype)
    wide[..., :512] = outs.transpose(1, 2, 0, 3)
    views = [wide[::2, 1:4, i, :512] for i in range(4)]
    views[1] = np.array(views[1])
    views[2] = np.array(views[2][::-1])[::-1]
    states = [x[::2, 1:4] for x in np.asfortranarray(lses)]
    states[3] = np.array(states[3])
    got = check(views, states)
    assert_same_bits(got[0], want[0])
    assert_same_bits(got[1], want[1])
    backwards = merge(outs[::-1], lses[::-1])
    turned = merge(np.array(outs[::-1]), np.array(lses[::-1]))
    assert_same_bits(backwards[0], turned[0])
    one = np.broadcast_to(outs[:1], outs.shape)
    check(one, np.broadcast_to(lses[:1], lses.shape))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_parts", [1, 2, 3, 4])
@pytest.mark.parametrize("has_sink", [False, True])
def test_a_few_parts_have_the_bits_of_many(dtype, num_parts, has_sink):
    """GPUs have a kernel for few parts of the same strides. Another stride, and an empty part more,
    take the one for many."""
    outs, lses = make_parts(DTYPES[dtype], num_parts, (40, 9), 520, seed=7)
    lses[:, 10:20] *= 100
    lses[:, 20] = lses[0, 20]
    for token in range(21, 21 + 2**num_parts - 1):
        empty = [bool((token - 20) >> part & 1) for part in range(num_parts)]
        lses[empty, token], outs[empty, token] = EMPTY[token % 2], np.nan
    lses[:, 37] = -np.inf
    sink = np.linspace(-3, 3, 9).astype(np.float32) if has_sink else None
    few = merge(outs, lses, sink)
    wide = np.zeros((*outs.shape[1:3], 528), outs.dtype)
    wide[..., :520] = outs[0]
    wider = np.zeros((40, 18), np.float32)
    wider[:, ::2] = lses[0]
    ones = np.full((6 - num_parts, *outs.shape[1:]), 1).astype(outs.dtype)
    none = np.full((6 - num_parts, *lses.shape[1:]), -np.inf, np.float32)
    for many in (
        (list(outs), [wider[:, ::2], *lses[1:]]),
        ([wide[..., :520], *outs[1:]], list(lses)),
        (np.concatenate([outs, ones]), np.concatenate([lses, none])),
    ):
        out, lse = merge(*many, sink)
        known = ~np.isneginf(lse)
        assert_same_bits(out[known], few[0][known])
        assert_same_bits(lse, few[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_receive_buffers_are_merged_as_they_are(dtype, ranks):
    """Heads are split over ranks, and each rank merges what all_to_all gave it: [N, T, H / N, V]
    from results [T, H, V], or [N, H / N, T, V] from results [H, T, V]. Each has its sinks."""
    outs, lses = make_parts(DTYPES[dtype], ranks, (6, 16), seed=3)
    lses[1, 2, :5], lses[0, :, 5], outs[0, :, 5] = -np.inf, np.inf, np.nan
    sink = np.linspace(-3, 3, 16).astype(np.float32)
    kind = DTYPES["bf16"] if dtype == "fp32" else None
    want = check(outs, lses, sink, kind)

    def exchange(sent, rank):
        return np.stack([x[rank] for x in sent])

    def by_rank(x):
        return np.ascontiguousarray(np.moveaxis(x.reshape(6, ranks, -1, *x.shape[2:]), 1, 0))

    def heads_first(x):
        return np.ascontiguousarray(x.swapaxes(0, 1)).reshape(ranks, -1, 6, *x.shape[2:])

    for rank in range(ranks):
        own = slice(rank * 16 // ranks, (rank + 1) * 16 // ranks)
        parts = [exchange([by_rank(x) for x in side], rank) for side in (outs, lses)]
        turned = [exchange([heads_first(x) for x in side], rank) for side in (outs, lses)]
        views = [x.swapaxes(1, 2) for x in turned]
        whole = [x[:, :, own] for x in (outs, lses)]
        apart = [[np.array(x) for x in side[::-1]][::-1] for side in whole]  # made last to first
        for given in (parts, views, whole, apart, [list(x) for x in views]):
            out, lse = merge(*given, sink[own], kind)
            assert_same_bits(out, want[0][:, own])
            assert_same_bits(lse, want[1][:, own])


def test_lses_of_any_strides():
    """Backwards, in another order of dimensions, and one for all parts or heads."""
    outs, lses = make_parts(ref.BF16, 3, (6, 8))
    orders = itertools.permutations(range(3))
    turned = [np.ascontiguousarray(lses.transpose(x)).transpose(np.argsort(x)) for x in orders]
    for given in (*turned, np.ascontiguousarray(lses[::-1])[::-1], list(turned[-1])):
        got = merge(outs, given)
        want = merge(outs, lses)
        assert_same_bits(got[0], want[0])
        assert_same_bits(got[1], want[1])
    for one in (lses[:1], lses[:, :, :1]):
        view = np.broadcast_to(one, lses.shape)
        assert_same_bits(merge(outs, view)[0], merge(outs, np.array(view))[0])


@pytest.mark.parametrize("num_parts", [2, 3, 7])
def test_parts_of_the_keys_are_the_whole(num_parts):
    """Attention over parts of the keys is merged and compared with fp64 attention over all."""
    case = cases.AttentionCase(4, 9, 200, pages=4).make()
    want = case.reference()
    cuts = np.linspace(0, 200, num_parts + 1).astype(int)
    parts = [
        sparse_mla.sparse_attention(case.q, case.kv, case.indices[:, a:b], **case.options)
        for a, b in itertools.pairwise(cuts)
    ]
    outs, lses = [x[0] for x in parts], [x[1] for x in parts]
    got = sparse_mla.merge_attn_partials(outs, lses)
    assert_parts_are_whole(got, want, ref.merge_attn_partials(outs, lses), num_parts / 2)


def test_results_are_made():
    outs, lses = make_parts(ref.BF16, 3)
    for given in (outs, lses), (list(outs), list(lses)):
        out, lse = sparse_mla.merge_attn_partials(*given)
        assert (type(out), out.dtype, type(lse), lse.dtype) == (
            *(np.ndarray, ref.BF16),
            *(np.ndarray, np.float32),
        )
        assert_same_bits(out, merge(outs, lses)[0])


def bad_calls():
    outs, lses = make_parts(ref.BF16, 3)
    few, out, lse = list(outs), outs[0].copy(), lses[0].copy()
    yield ([], lses), {}, "`outs` must have 1 to 64 parts, got 0"
    yield (few * 22, lses), {}, "`outs` must have 1 to 64 parts, got 66"
    yield (few, []), {}, "`lses` must have 1 to 64 parts, got 0"
    yield (few, list(lses[:2])), {}, "`lses` must have the 3 parts of `outs`, got 2"
    yield (few, [*lses[:2], lses[2, :4]]), {}, r"`lses\[2\]` must have shape \[5, 7\], got \[4, 7\]"
    yield (few, lses[:2]), {}, r"`lses` must have shape \[3, 5, 7\], got \[2, 5, 7\]"
    yield (
        ([*few[:2], outs[2, :, :6]], lses),
        {},
        r"`outs\[2\]` must have shape \[5, 7, 512\], got \[5, 6, 512\]",
    )
    yield ([x[0] for x in few], lses), {}, r"`outs\[0\]` must have shape \[any, any, any\], got"
    yield (
        (outs[0], lses),
        {},
        r"`outs` must have shape \[any, any, any, any\] or be a list of arrays, got \[5, 7, 512\]",
    )
    for i in range(3):
        text = rf"`out` must not overlap `outs\[{i}\]`, got arrays that share memory"
        yield (few, lses), {"out": outs[i]}, text
        text = rf"`lse` must not overlap `lses\[{i}\]`, got arrays that share memory"
        yield (outs.copy(), list(lses)), {"lse": lses[i]}, text
    yield (outs, lses), {"out": outs[1]}, "`out` must not overlap `outs`, got arrays that"
    two = np.zeros((2, 5, 7, 512), np.float32)
    yield (
        (list(two), list(lses[:2])),
        {"lse": two[1, ..., 0]},
        r"`lse` must not overlap `outs\[1\]`, got arrays that share memory",
    )
    sink = np.zeros(6, np.float32)
    yield (few, lses), {"attn_sink": sink}, "at least a sink per head of `outs`"
    yield (few, lses), {"out": out[:4]}, r"`out` must have shape \[5, 7, 512\], got \[4, 7, 512\]"
    yield (few, lses), {"lse": lse[:4]}, r"`lse` must have shape \[5, 7\], got \[4, 7\]"


@pytest.mark.parametrize("number", range(len(list(bad_calls()))))
def test_bad_input(number):
    args, kwargs, text = list(bad_calls())[number]
    with pytest.raises(ValueError, match=f"^merge_attn_partials: .*{text}"):
        sparse_mla.merge_attn_partials(*args, **kwargs)


def test_bad_dtypes():
    outs, lses = make_parts(ref.BF16, 3)
    mixed = [outs[0], outs[1], outs[2].astype(np.float32)]
    with pytest.raises(TypeError, match=r"`outs\[2\]` must be bfloat16, got float32"):
        sparse_mla.merge_attn_partials(mixed, lses)
    with pytest.raises(TypeError, match=r"`lses\[1\]` must be float32, got float64"):
        sparse_mla.merge_attn_partials(outs, [lses[0], lses[1].astype(np.float64), lses[2]])
    with pytest.raises(TypeError, match="`out` must be bfloat16, got float32"):
        sparse_mla.merge_attn_partials(outs, lses, out=outs[0].astype(np.float32))
    with pytest.raises(TypeError, match="`out` must be float16, got bfloat16"):
        sparse_mla.merge_attn_partials(outs.astype(np.float16), lses, out=outs[0].copy())
    with pytest.raises(TypeError, match=r"`outs\[1\]` must be an array"):
        sparse_mla.merge_attn_partials([outs[0], None, outs[1]], lses)


def test_references_are_given_back():
    """A call holds the arrays of a list no longer than it runs, also where it fails."""
    outs, lses = make_parts(ref.BF16, 5)
    outs, lses = [np.array(x) for x in outs], [np.array(x) for x in lses]
    before = [sys.getrefcount(x) for x in (*outs, *lses)]
    for _ in range(3):
        sparse_mla.merge_attn_partials(outs, lses)
        with pytest.raises(TypeError):
            sparse_mla.merge_attn_partials([*outs, None], lses)
        with pytest.raises(ValueError):
            sparse_mla.merge_attn_partials(outs, lses[:4])
    assert [sys.getrefcount(x) for x in (*outs, *lses)] == before
