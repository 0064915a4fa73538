"""merge_attn_states (csrc/cpu/attention/merge.c)."""

import cases
import device
import numpy as np
import pytest
import reference as ref
from helpers import Guarded, assert_merged, assert_parts_are_whole, assert_same_bits
from library import sparse_mla

pytestmark = pytest.mark.frameworks

DTYPES = {"bf16": ref.BF16, "fp16": np.dtype(np.float16), "fp32": np.dtype(np.float32)}


def states(dtype, shape=(5, 7), spread=3.0, seed=0):
    rng = np.random.default_rng(seed)

    def state():
        value = rng.standard_t(2, (*shape, 512)).astype(np.float32)
        out = ref.to_bf16(value) if dtype == ref.BF16 else value.astype(dtype)
        return out, rng.normal(0, spread, shape).astype(np.float32)

    return *state(), *state()


def merge(out_a, lse_a, out_b, lse_b, attn_sink=None, row_gap=0, **options):
    out = Guarded(out_a.shape, out_a.dtype, row_gap=row_gap)
    lse = Guarded(lse_a.shape, np.float32, row_gap=row_gap)
    result = sparse_mla.merge_attn_states(
        out_a, lse_a, out_b, lse_b, attn_sink=attn_sink, out=out.array, lse=lse.array, **options
    )
    assert result[0] is out.array
    assert result[1] is lse.array
    return out.check(), lse.check()


def check(*state, row_gap=0, **options):
    got = merge(*state, row_gap=row_gap, **options)
    assert_merged(got, ref.merge_attn_states(*state, **options))
    return got


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (5, 7), (3, 128)])
@pytest.mark.parametrize("spread", [0.1, 3.0, 200.0, 1e4])
def test_states(dtype, shape, spread):
    check(*states(DTYPES[dtype], shape, spread), row_gap=8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("empty", [-np.inf, np.inf])
def test_empty_states(dtype, empty):
    """A state is empty where its lse is -inf, or +inf, which counts as -inf. An empty state adds
    nothing, and where both states are empty out is out_a."""
    out_a, lse_a, out_b, lse_b = states(DTYPES[dtype], (4, 3))
    lse_a[0], lse_b[1], lse_a[2], lse_b[2] = (empty,) * 4
    out, lse = check(out_a, lse_a, out_b, lse_b)
    assert_same_bits(out[0], out_b[0], "only b")
    assert_same_bits(out[1], out_a[1], "only a")
    assert_same_bits(out[2], out_a[2], "neither")
    assert_same_bits(lse[0], lse_b[0])
    assert_same_bits(lse[1], lse_a[1])
    assert (lse[2] == -np.inf).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_inputs(dtype):
    out_a, lse_a, out_b, lse_b = states(DTYPES[dtype], (6, 5))
    check(out_a[::-1], lse_a[::-1], out_b[:, ::-1], lse_b[:, ::-1])
    check(out_a[::2, 1:], lse_a[::2, 1:], out_b[1::2, :4], lse_b[1::2, :4])
    one = np.broadcast_to(out_b[:1], out_b.shape)
    check(out_a, lse_a, one, np.broadcast_to(lse_b[:1], lse_b.shape))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("extra", [0, 3])
@pytest.mark.parametrize("spread", [0.1, 3.0, 200.0, 1e4])
def test_sinks(dtype, extra, spread):
    """A sink is as likely as the merged keys, far more and far less likely, and infinite."""
    state = states(DTYPES[dtype], (9, 7), spread, seed=1)
    lse = np.maximum(state[1], state[3])[0]
    sink = lse + np.array([0, 3, -3, 50, -50, np.inf, -np.inf], np.float32)
    sink = np.append(sink, np.full(extra, np.nan, np.float32))
    out, merged = check(*state, sink, row_gap=8)
    plain, plain_lse = merge(*state)
    assert_same_bits(merged, plain_lse, "lse has no part of the sink")
    assert (ref.to_f32(out[:, 5]) == 0).all()
    assert_same_bits(out[:, 6], plain[:, 6], "a sink of -inf")
    assert not np.array_equal(out[0, 0].view(np.uint8), plain[0, 0].view(np.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sinks_of_empty_states(dtype):
    """A single state is scaled. Where both are empty, out is out_a whatever the sink is."""
    state = states(DTYPES[dtype], (4, 3), seed=2)
    out_a, lse_a, out_b, lse_b = state
    lse_a[0], lse_b[1], lse_a[2], lse_b[2] = -np.inf, np.inf, np.inf, -np.inf
    out_a[0, 0, 0] = out_b[1, 0, 0] = np.nan
    for sink in ([0.5, -1, 2], [np.inf, -np.inf, 0]):
        out, lse = merge(*state, np.array(sink, np.float32))
        want = ref.merge_attn_states(
            np.nan_to_num(ref.to_f32(out_a)), lse_a, np.nan_to_num(ref.to_f32(out_b)), lse_b, sink
        )
        assert_merged((out, lse), want)
        assert_same_bits(out[2], out_a[2], "neither")


def test_parts_with_a_sink_are_the_whole():
    """Attention over three parts without a sink, merged with it, is attention with the sink."""
    case = cases.AttentionCase(4, 9, 200, pages=4).make()
    assert case.options.get("attn_sink") is None
    sink = np.random.default_rng(5).normal(3, 2, 12).astype(np.float32)
    want = sparse_mla.sparse_attention(
        case.q, case.kv, case.indices, **case.options, attn_sink=sink[:9]
    )
    parts = []
    for columns in (slice(0, 50), slice(50, 120), slice(120, None)):
        out, lse = sparse_mla.sparse_attention(
            case.q, case.kv, case.indices[:, columns], **case.options
        )
        parts += [ref.to_f32(out), lse]
    first = sparse_mla.merge_attn_states(*parts[:4])
    out, lse = sparse_mla.merge_attn_states(*first, *parts[4:], attn_sink=sink)
    reference = case.reference()
    tolerance = 3 * reference.out_tolerance(**device.BOUNDS)
    assert ref.worst_ratio(out, ref.to_f32(want[0]), tolerance) <= 1
    assert ref.worst_ratio(lse, want[1], 2 * reference.lse_tolerance(**device.BOUNDS)) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 2, 5])
def test_tokens_without_context(dtype, count):
    """Their rows are those of part b, whatever part a holds: here NaN."""
    out_a, lse_a, out_b, lse_b = states(DTYPES[dtype], (5, 7))
    lse_b[4, 0] = np.inf
    sink = np.linspace(-3, 3, 7).astype(np.float32)
    out_a[count:], lse_a[count:] = np.nan, np.nan
    out, lse = check(out_a, lse_a, out_b, lse_b, prefill_tokens_with_context=count)
    assert_same_bits(out[count:], out_b[count:])
    assert_same_bits(lse[count:], np.where(np.isinf(lse_b), -np.inf, lse_b)[count:])
    check(out_a, lse_a, out_b, lse_b, sink, prefill_tokens_with_context=count)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [7, 64, 512, 1500])
@pytest.mark.parametrize("side", [0, 1])
def test_in_place(dtype, side, width):
    """The outputs may be those of either side, together or each alone."""
    given = [x[..., :width] if x.ndim == 3 else x for x in states(DTYPES[dtype], (40, 9))]
    if width > 512:
        given = [np.concatenate([x] * 3, -1)[..., :width] if x.ndim == 3 else x for x in given]
    given[1][3], given[3][4] = -np.inf, np.inf
    want, want_lse = merge(*given)
    for replaces in ("out", "lse"), ("out",), ("lse",):
        arrays = [np.array(x) for x in given]
        results = {name: arrays[2 * side + (name == "lse")] for name in replaces}
        out, lse = sparse_mla.merge_attn_states(*arrays, **results)
        assert_same_bits(out, want, f"{replaces}")
        assert_same_bits(lse, want_lse, f"{replaces}")


def test_bad_input():
    out_a, lse_a, out_b, lse_b = states(ref.BF16, (5, 7))
    for count in (6, 10):
        with pytest.raises(ValueError, match=rf"`prefill_tokens_with_context` .* 5 .*got {count}"):
            merge(out_a, lse_a, out_b, lse_b, prefill_tokens_with_context=count)
    with pytest.raises(
        ValueError, match="`prefill_tokens_with_context` must be at least 0, got -1"
    ):
        merge(out_a, lse_a, out_b, lse_b, prefill_tokens_with_context=-1)
    two = np.concatenate([out_a, out_b])
    with pytest.raises(ValueError, match="`out` must be the whole of or not overlap `out_a`"):
        sparse_mla.merge_attn_states(two[:5], lse_a, two[5:], lse_b, out=two[1:6])


def test_lse_of_one_dtype_of_state_only():
    out_a, lse_a, out_b, lse_b = states(ref.BF16)
    out, lse = sparse_mla.merge_attn_states(out_a, lse_a, out_b, lse_b)
    assert (type(out), out.dtype, type(lse), lse.dtype) == (
        np.ndarray,
        ref.BF16,
        np.ndarray,
        np.float32,
    )
    assert_same_bits(out, merge(out_a, lse_a, out_b, lse_b)[0])


def test_merge_of_two_halves_is_the_whole():
    """Attention over two parts of the keys is merged and compared with fp64 attention over all."""
    case = cases.AttentionCase(4, 9, 200, pages=4).make()
    want = case.reference()
    halves = []
    for columns in (slice(0, 77), slice(77, None)):
        out, lse = sparse_mla.sparse_attention(
            case.q, case.kv, case.indices[:, columns], **case.options
        )
        halves += [out, lse]
    got = sparse_mla.merge_attn_states(*halves)
    assert_parts_are_whole(got, want, ref.merge_attn_states(*halves))
