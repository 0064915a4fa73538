"""sparse_attention against fp64, within the bounds of the contract (csrc/cpu/attention/)."""

import re

import cases
import device
import library
import numpy as np
import pytest
import random_cases
import reference as ref
from cases import ATTENTION, INT32_MAX, INT32_MIN, AttentionCase
from helpers import (
    NO_NAN,
    Guarded,
    assert_same_bits,
    assert_within_bounds,
    guarded_attention,
    same_bits,
)
from library import sparse_mla

attend = sparse_mla.sparse_attention


def assert_same_results(a: dict, b: dict, what="") -> None:
    for name in a:
        assert_same_bits(a[name], b[name], f"{what} {name}")


@pytest.mark.parametrize("name", ATTENTION)
def test_case(name):
    """Results are within the bounds, fill their arrays and nothing else, and repeat every bit."""
    case = ATTENTION[name].make()
    got = guarded_attention(attend, case)
    assert_within_bounds(case.reference(), got)
    assert_same_results(got, guarded_attention(attend, case, row_gap=24), "strided outputs")


@pytest.mark.parametrize("num_heads", range(1, 129))
def test_every_head_count(num_heads):
    fmt = "bf16" if num_heads % 2 else "fp8"
    case = AttentionCase(2, num_heads, 33, fmt=fmt, pages=1, sink=num_heads % 3 == 0).make()
    assert_within_bounds(case.reference(), guarded_attention(attend, case))


@pytest.mark.parametrize("num_splits", range(65))
def test_every_split_count(num_splits):
    case = AttentionCase(
        2, 3, 200, num_splits=num_splits, pages=2, topk_length=True, sink=True, extra="bf16"
    ).make()
    assert_within_bounds(case.reference(), guarded_attention(attend, case))


@pytest.mark.parametrize("seed", range(40))
def test_random_inputs(seed):
    """test_gpu_random.py runs more of these cases on GPUs."""
    assert random_cases.failure_of(seed) is None


@pytest.mark.parametrize("name", ["flat", "paged"])
def test_offsets_past_32_bits(name):
    case = cases.huge_cases()[name]
    assert_within_bounds(case.reference(), guarded_attention(attend, case))


@pytest.mark.parametrize("fmt", ["fp8", "bf16"])
def test_a_cache_past_2_gib_is_read_in_place(fmt):
    """Rows beyond byte 2^31 of a real buffer, whose offsets would wrap as an int32 product.

    Its pages are the kernel's zero pages until they are written, so it takes little memory. This
    test always runs on the CPU; test_gpu_memory.py has the GPU's.
    """
    rows = cases.make_rows(np.random.default_rng(1), 2, fmt)
    count = 2**31 // rows[0].nbytes + 3
    kv = np.zeros((count, rows.shape[1]), rows.dtype)
    kv[-1], kv[1] = rows
    case = AttentionCase(1, 4, 4, fmt=fmt).make()
    case.kv, case.indices = kv, np.array([[count - 1, count, 1, -1]], np.int32)
    got = guarded_attention(library.package.sparse_attention, case)
    assert_within_bounds(case.reference(), got, units=16)


@pytest.mark.parametrize("fmt", ["fp8", "bf16"])
@pytest.mark.parametrize("K", [128, 2048])
def test_the_peer_s_tolerance_on_the_peer_s_data(fmt, K):
    """The contract's tighter bounds, which hold for q, k ~ N(0,1)/10 and power-of-two scales."""
    rng = np.random.default_rng(2)
    case = AttentionCase(2, 64, K, fmt=fmt, pages=40, data="pow2", indices="ordered").make()
    bits = ref.bf16_encode((rng.normal(0, 1, (40 * 64, 576)) / 10).astype(np.float32))
    rows = bits.view(ref.BF16)
    if fmt == "fp8":
        rows = ref.quantize_rows(bits[:, :512], bits[:, 512:])
        scales = rows[:, 512:528].view(np.float32)
        scales[:] = np.exp2(np.ceil(np.log2(scales)))
    case.kv = rows.reshape(40, 64, -1)
    case.q = cases.random_bf16(rng, 2, 64, 576, std=0.1)
    want, got = case.reference(), guarded_attention(attend, case)
    assert_within_bounds(want, got)
    out = got["out"].astype(np.float64)
    assert (np.abs(out - want.out) <= 1e-3 + 2.01 / 128 * np.abs(want.out)).all()
    norm = (out**2).sum() + (want.out**2).sum()
    assert 1 - 2 * (out * want.out).sum() / norm <= 5e-6
    assert (np.abs(got["lse"] - want.lse) <= 1e-6 + 8.01 / 65536 * np.abs(want.lse)).all()


# --- what excluded tokens, sinks and empty rows do ----------------------------------------------


# tokens, heads, columns, splits: a GPU has kernels of their own for few columns, and for many
EMPTY = [(3, 7, 70, 0), (3, 64, 70, 3), (150, 7, 300, 0), (150, 64, 300, 1), (2, 128, 4000, 0)]


@pytest.mark.parametrize("fmt", ["fp8", "bf16"])
@pytest.mark.parametrize("shape", EMPTY, ids=["-".join(map(str, s)) for s in EMPTY])
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_queries_of_empty_rows_do_not_matter(fmt, shape, value):
    tokens, heads, columns, splits = shape
    case = AttentionCase(
        tokens, heads, columns, fmt=fmt, num_splits=splits, indices="all_masked"
    ).make()
    case.q[1, ::3, 500] = case.q[1, 1::3, 570] = value
    got = guarded_attention(attend, case)
    assert_same_bits(got["out"].view(np.uint16), np.zeros((tokens, heads, 512), np.uint16))
    assert (got["lse"] == -np.inf).all()
    assert (got["max_logits"] == -np.inf).all()


@pytest.mark.parametrize("fmt", ["fp8", "bf16"])
@pytest.mark.parametrize("sink", [None, -np.inf, np.inf, 0.0])
def test_empty_rows(fmt, sink):
    case = AttentionCase(3, 7, 70, fmt=fmt, indices="all_masked").make()
    case.kv.view(np.uint8)[...] = 0xFF
    if sink is not None:
        case.options["attn_sink"] = np.full(7, sink, np.float32)
    got = guarded_attention(attend, case)
    assert_same_bits(got["out"].view(np.uint16), np.zeros((3, 7, 512), np.uint16), "out is +0")
    assert (got["lse"] == -np.inf).all()
    assert (got["max_logits"] == -np.inf).all()


def test_empty_cache():
    for kv in (np.zeros((0, 64, 656), np.uint8), np.zeros((0, 576), ref.BF16)):
        case = AttentionCase(2, 4, 8).make()
        case.kv = kv
        case.indices[...] = 0
        assert_within_bounds(case.reference(), guarded_attention(attend, case))


def test_sink_extremes():
    """A sink of -inf has no effect at all, +inf gives out = 0, and lse does not depend on sinks."""
    case = AttentionCase(2, 6, 70).make()
    plain = guarded_attention(attend, case)
    case.options["attn_sink"] = np.full(6, -np.inf, np.float32)
    assert_same_results(guarded_attention(attend, case), plain, "sink -inf")
    for sink in (np.inf, 3e38):
        case.options["attn_sink"] = np.full(6, sink, np.float32)
        got = guarded_attention(attend, case)
        assert (got["out"].astype(np.float32) == 0).all()
        assert_same_bits(got["lse"], plain["lse"])
        assert_same_bits(got["max_logits"], plain["max_logits"])


def test_duplicates_count():
    """The same key n times: lse rises by ln n, and out stays the key's value."""
    case = AttentionCase(1, 4, 8).make()
    case.indices[...] = ref.chosen_slots(case.indices, None, case.kv, 0)[0]
    assert_within_bounds(case.reference(), got := guarded_attention(attend, case))
    case.indices[0, 2:] = -1  # two keys: a single one is special (test_one_key_is_its_value)
    pair = guarded_attention(attend, case)
    assert np.allclose(got["lse"] - pair["lse"], np.log(4), rtol=0, atol=1e-5)


def spoil_query(case) -> None:
    case.q[2, 3, 100] = np.nan


def spoil_rope_of_query(case) -> None:
    case.q[2, 3, 570] = np.inf
    case.kv.view(np.uint8).reshape(320, -1)[:, -12:-10] = [0x80, 0x3F]  # all keys have a 1 there


def spoil_key(case, *columns) -> None:
    """Makes a key NaN that only token 2 selects, in these columns."""
    case.indices[case.indices == 7] = 8
    case.indices[2, list(columns)] = 7
    case.kv.view(np.uint8).reshape(320, -1)[7] = 0xFF


SPOILT = {
    # what: (function that puts NaN there, heads of token 2 that the NaN reaches)
    "q": (spoil_query, [3]),
    "the RoPE part of q": (spoil_rope_of_query, [3]),
    "the first key": (lambda case: spoil_key(case, 0), range(5)),
    "a key": (lambda case: spoil_key(case, 77), range(5)),
    "a key, twice": (lambda case: spoil_key(case, 63, 199), range(5)),
    "the last key": (lambda case: spoil_key(case, 299), range(5)),
}


@pytest.mark.parametrize("num_splits", [0, 1, 3])
@pytest.mark.parametrize("fmt", ["fp8", "bf16"])
@pytest.mark.parametrize("what", SPOILT)
def test_nan_reaches_all_results_of_its_rows_and_no_other(what, fmt, num_splits):
    """A NaN reaches out, lse and max_logits wherever it stands, though a maximum could drop it."""
    spoil, heads = SPOILT[what]
    case = AttentionCase(4, 5, 300, fmt=fmt, num_splits=num_splits, indices="ordered").make()
    case.kv = np.ascontiguousarray(case.kv)
    spoil(case)
    got = guarded_attention(attend, case, poison=NO_NAN)
    others = np.ones((4, 5), bool)
    others[2, list(heads)] = False
    for name, x in got.items():
        assert np.isnan(ref.to_f32(x[~others])).all(), name
        assert np.isfinite(ref.to_f32(x[others])).all(), name
    case.q[2], case.indices[2] = 0, case.indices[1]
    clean = guarded_attention(attend, case)
    for name, x in got.items():
        assert_same_bits(x[[0, 1, 3]], clean[name][[0, 1, 3]], name)


@pytest.mark.parametrize("fmt", ["fp8", "bf16"])
def test_a_nan_row_of_q_stays_alone(fmt):
    """The token's other heads give the same bits as without the NaN."""
    case = AttentionCase(4, 5, 90, fmt=fmt).make()
    clean = guarded_attention(attend, case)
    spoil_query(case)
    got = guarded_attention(attend, case, poison=NO_NAN)
    others = np.ones((4, 5), bool)
    others[2, 3] = False
    for name, x in got.items():
        assert_same_bits(x[others], clean[name][others], name)
        assert np.isnan(ref.to_f32(x[2, 3])).all(), name


def test_masked_indices_equal_their_absence():
    """Dropping the -1s moves other keys: bits may change, but results stay within the bounds."""
    case = AttentionCase(1, 9, 150).make()
    keep = (case.indices[0] >= 0) & (case.indices[0] < ref.num_slots(case.kv))
    want = case.reference()
    case.indices = np.ascontiguousarray(case.indices[:, keep])
    assert_within_bounds(want, guarded_attention(attend, case))


def test_topk_length_is_a_cut_of_the_columns():
    case = AttentionCase(4, 5, 130).make()
    length = np.array([0, 1, 64, 129], np.int32)
    masked = case.indices.copy()
    masked[np.arange(130) >= length[:, None]] = -1
    case.options["topk_length"] = length
    with_length = guarded_attention(attend, case)
    del case.options["topk_length"]
    case.indices = masked
    assert_within_bounds(case.reference(), with_length)
    assert_within_bounds(case.reference(), guarded_attention(attend, case))


def test_extra_cache_is_one_softmax_over_both():
    """Splitting one cache's indices over kv and extra_kv changes nothing but rounding."""
    whole = AttentionCase(3, 6, 120, indices="ordered").make()
    want = whole.reference()
    split = AttentionCase(3, 6, 120, indices="ordered").make()
    split.options["extra_kv"] = split.kv
    split.options["extra_indices"] = split.indices[:, 50:]
    split.indices = split.indices[:, :50]
    assert_within_bounds(want, guarded_attention(attend, split))


# --- one key ------------------------------------------------------------------------------------


def half_step(x: np.ndarray) -> np.ndarray:
    """Half the distance between neighbouring bf16 numbers of this size."""
    return np.exp2(np.floor(np.log2(np.maximum(np.abs(x), 2.0**-126))) - 8)


def assert_is_the_value(case, kv, slot, got) -> None:
    """out[t] is the value in slot[t], times the sink's factor that follows from the given lse."""
    value = ref.decode_rows(kv, slot)[:, None, :512]
    sink = case.options.get("attn_sink")
    if sink is None and not ref.is_fp8(kv):
        bits = ref.raw_rows(kv, slot)[:, None, :512]
        assert_same_bits(ref.bits16(got["out"]), np.broadcast_to(bits, got["out"].shape), "out")
        return
    if sink is not None:
        with np.errstate(over="ignore"):
            factor = 1 / (1 + np.exp(sink.astype(np.float64) - got["lse"]))
        value = value * factor[:, :, None]
    error = np.abs(ref.to_f32(got["out"]).astype(np.float64) - value)
    assert (error <= half_step(value) + 2.0**-20 * np.abs(value)).all()


def place_keys(rng, columns, K, slots, num_slots) -> np.ndarray:
    """Index lists in which token t has the key slots[t] at columns[t], and no other key."""
    indices = rng.choice([-1, -1, INT32_MIN, INT32_MAX, num_slots], (len(columns), K))
    indices[np.arange(len(columns)), columns] = slots
    return indices.astype(np.int32)


SOME_COLUMNS = np.array([0, 1, 31, 32, 63, 255, 256, 300, 1023, 2047])


def make_one_key_case(rng, fmt, H, K, num_splits=0, data="normal", every=True) -> tuple:
    """Tokens with one key each, in every column or in some; returns the case and their slots."""
    columns = np.arange(K) if K <= 64 and every else SOME_COLUMNS[SOME_COLUMNS < K]
    case = AttentionCase(len(columns), H, K, fmt=fmt, data=data, num_splits=num_splits).make()
    rows = cases.make_rows(rng, 320, fmt, data)
    slots = rng.integers(0, 320, len(columns))
    case.indices = place_keys(rng, columns, K, slots, 320)
    cases.hide_unselected(rows, case.indices, None)
    case.kv = rows.reshape(5, 64, -1)
    return case, slots


def assert_is_the_logit(got: dict) -> None:
    """lse is the only logit. A GPU rounds, because it adds up 2^(logit - ceil(logit))."""
    if device.ON_CUDA:
        slack = 4 * 2.0**-24 * (1 + np.abs(got["max_logits"]))
        assert (np.abs(got["lse"] - got["max_logits"]) <= slack).all()
    else:
        assert_same_bits(got["lse"], got["max_logits"], "lse is the only logit")


@pytest.mark.parametrize("num_splits", [1, 2, 5])
@pytest.mark.parametrize("H", [1, 5, 16, 64, 128])
@pytest.mark.parametrize("K", [1, 7, 64, 2048])
@pytest.mark.parametrize("fmt", ["fp8", "bf16"])
def test_one_key_is_its_value(fmt, K, H, num_splits):
    """out is the value of a bf16 row, or that of an FP8 row rounded once, times a sink's factor."""
    rng = np.random.default_rng([K, H, num_splits])
    lanes_are_columns = device.ON_CUDA
    case, slots = make_one_key_case(rng, fmt, H, K, num_splits, every=lanes_are_columns)
    got = guarded_attention(attend, case)
    assert_within_bounds(case.reference(), got)
    assert_is_the_logit(got)
    assert_is_the_value(case, case.kv, slots, got)
    assert_same_results(guarded_attention(attend, case, row_gap=3), got, "rows off the grid")
    case.options["attn_sink"] = sink = rng.normal(0, 2, H).astype(np.float32)
    sink[1:3] = [np.inf, -np.inf][: max(H - 1, 0)]
    got = guarded_attention(attend, case)
    assert_within_bounds(case.reference(), got)
    assert_is_the_value(case, case.kv, slots, got)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("exponent", [-30, -12, -3, 0, 3, 12, 30])
def test_one_key_under_any_scale(exponent, num_splits):
    """Scales have random mantissas, and a third of the rows has scales of many magnitudes."""
    rng = np.random.default_rng(exponent + 100)
    case, slots = make_one_key_case(rng, "fp8", 16, 64, num_splits)
    scales = case.kv.reshape(320, 656)[:, 512:528].view(np.float32)
    scales[:] = rng.uniform(1, 10, scales.shape) * 10.0**exponent
    scales[::3] *= 10.0 ** rng.uniform(-6, 0, scales[::3].shape)
    case.options["softmax_scale"] = 10.0 ** -max(exponent + 6, 1)
    got = guarded_attention(attend, case)
    assert_within_bounds(case.reference(), got)
    assert_is_the_value(case, case.kv, slots, got)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("layout", ["paged", "odd_stride"])
@pytest.mark.parametrize("H", [1, 5, 16, 64, 128])
@pytest.mark.parametrize("K", [64, 2048])
def test_one_key_of_any_bits(K, H, layout, num_splits):
    """Any finite bf16 value, from zeros to the largest. The query's NoPE part is 0."""
    rng = np.random.default_rng(3)
    case, slots = make_one_key_case(rng, "bf16", H, K, num_splits)
    bits = case.kv.view(np.uint16).reshape(320, 576)
    bits[:, :512] = rng.integers(0, 0x7F80, (320, 512)) | rng.integers(0, 2, (320, 512)) << 15
    bits[:, :512:7] &= 0x80FF
    bits[:, :512:9] &= 0x8000
    case.kv = cases.lay_out(case.kv.reshape(320, 576), 64, layout)
    case.q[..., :512] = 0
    got = guarded_attention(attend, case)
    assert_is_the_value(case, case.kv, slots, got)
    assert_same_results(guarded_attention(attend, case, row_gap=3), got, "rows off the grid")


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("fmt", ["fp8", "bf16"])
def test_one_key_among_longer_rows(fmt, num_splits):
    """0, 1, 2, 32, 33 or all keys per token, more tokens than CTAs: no token affects another."""
    rng = np.random.default_rng(11)
    tokens = 900 if device.ON_CUDA else 120
    case = AttentionCase(tokens, 16, 300, fmt=fmt, indices="ordered", num_splits=num_splits).make()
    num_keys = rng.choice([0, 1, 1, 1, 2, 32, 33, 300], tokens)
    order = rng.permuted(np.tile(np.arange(300), (tokens, 1)), axis=1)
    case.indices = np.where(order < num_keys[:, None], case.indices, -1).astype(np.int32)
    got = guarded_attention(attend, case)
    assert_within_bounds(case.reference(), got)
    ones = np.flatnonzero(num_keys == 1)
    slots = case.indices[ones].max(1)
    assert_is_the_value(case, case.kv, slots, {"out": got["out"][ones]})


@pytest.mark.parametrize("num_splits", [1, 2, 5])
@pytest.mark.parametrize("in_extra", [False, True])
@pytest.mark.parametrize(("fmt", "extra"), [("fp8", "bf16"), ("bf16", "fp8"), ("fp8", "fp8")])
def test_one_key_in_two_lists(fmt, extra, in_extra, num_splits):
    rng = np.random.default_rng(num_splits)
    case, slots = make_one_key_case(rng, fmt, 17, 64, num_splits)
    rows = cases.make_rows(rng, 42, extra)
    extra_slots = rng.integers(0, 42, 64)
    extra_indices = place_keys(rng, rng.integers(0, 300, 64), 300, extra_slots, 42)
    (case.indices if in_extra else extra_indices)[...] = -1
    case.options |= {"extra_kv": rows.reshape(6, 7, -1), "extra_indices": extra_indices}
    got = guarded_attention(attend, case)
    assert_within_bounds(case.reference(), got)
    kv = case.options["extra_kv"] if in_extra else case.kv
    assert_is_the_value(case, kv, extra_slots if in_extra else slots, got)


@pytest.mark.parametrize("num_splits", [1, 2, 5])
@pytest.mark.parametrize("fmt", ["fp8", "bf16"])
def test_one_key_before_the_length(fmt, num_splits):
    """Entries behind topk_length are no second key; a duplicate of the key is one."""
    rng = np.random.default_rng(7)
    case, slots = make_one_key_case(rng, fmt, 16, 64, num_splits)
    case.options["topk_length"] = np.arange(1, 65, dtype=np.int32)
    case.kv = np.ascontiguousarray(case.kv)
    case.kv.view(np.uint8)[0] = 0xFF
    slots[slots < 64] = 64 + slots[slots < 64]
    rows = cases.make_rows(rng, 320, fmt).reshape(5, 64, -1)
    case.kv[1:] = rows[1:]
    case.indices[...] = np.where(np.arange(64) > np.arange(64)[:, None], 5, -1)
    case.indices[np.arange(64), np.arange(64)] = slots
    got = guarded_attention(attend, case)
    assert_within_bounds(case.reference(), got)
    assert_is_the_value(case, case.kv, slots, got)
    case.indices[1:, 0] = slots[1:]
    twice = guarded_attention(attend, case)
    assert_within_bounds(want := case.reference(), twice)
    # a GPU scores FP8 keys with f16 scales, but a single key without them
    slack = want.lse_tolerance(**device.BOUNDS)[1:] if device.ON_CUDA else 1e-5
    assert (np.abs(twice["lse"] - got["lse"] - np.log(2))[1:] <= slack).all()


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("fmt", ["fp8", "bf16"])
def test_one_key_that_is_not_finite(fmt, num_splits):
    """A NaN key gives NaN, and so does a logit of +inf. A key whose logit is -inf is no key."""
    rng = np.random.default_rng(8)
    case, _ = make_one_key_case(rng, fmt, 4, 64, num_splits)
    case.indices[:] = -1
    case.indices[0, 3], case.indices[1, 60] = 100, 101
    case = case.rows(slice(2))
    rows = case.kv.view(np.uint8).reshape(320, -1)
    rows[100] = 0xFF
    rows[101] = cases.make_rows(rng, 1, fmt).view(np.uint8)
    rows[101, -2:] = np.array([0x7F80], np.uint16).view(np.uint8)  # +inf
    case.q[1, :, -1] = [1, -1, 2, -2]
    got = {
        "out": np.zeros((2, 4, 512), ref.BF16),
        "lse": np.zeros((2, 4), np.float32),
        "max_logits": np.zeros((2, 4), np.float32),
    }
    case.run(attend, return_max_logits=True, **got)
    for name, x in got.items():
        assert np.isnan(ref.to_f32(x[0])).all(), name
        assert np.isnan(ref.to_f32(x[1, ::2])).all(), name
    assert (got["out"][1, 1::2].view(np.uint16) == 0).all()
    assert (got["lse"][1, 1::2] == -np.inf).all()
    assert (got["max_logits"][1, 1::2] == -np.inf).all()


# --- bits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_splits", [1, 2, 5, 64])
@pytest.mark.parametrize("fmt", ["fp8", "bf16"])
def test_batch_invariance(num_splits, fmt):
    """With a fixed num_splits a token's bits do not depend on the other tokens of the call."""
    case = AttentionCase(
        9, 20, 300, fmt=fmt, num_splits=num_splits, topk_length=True, sink=True
    ).make()
    whole = guarded_attention(attend, case)
    for rows in ([4], [8, 0], [1, 2, 3], list(range(8, -1, -1))):
        part = guarded_attention(attend, case.rows(rows))
        assert_same_results(part, {n: x[rows] for n, x in whole.items()}, f"rows {rows}")


@pytest.mark.parametrize("name", ["h17_k63", "h128_k2048", "extra_same", "heavy", "splits_3"])
def test_same_bits_on_every_run(name):
    case = ATTENTION[name].make()
    first = guarded_attention(attend, case)
    for _ in range(5):
        assert_same_results(guarded_attention(attend, case), first)


@pytest.mark.parametrize("fmt", ["fp8", "bf16"])
def test_bits_do_not_depend_on_the_layout(fmt):
    """The same keys and queries give the same bits in every layout of cache and q."""
    fp8_only, bf16_only = (["token_stride"], ["odd_stride"])
    layouts = ["paged", "mqa", "flat", "padded", "interleaved", "negative"]
    layouts += fp8_only if fmt == "fp8" else bf16_only
    first = None
    for layout in layouts:
        for q_layout in ("compact", "pair", "head_major", "negative", "odd_stride"):
            case = AttentionCase(3, 9, 100, fmt=fmt, layout=layout, q_layout=q_layout).make()
            got = guarded_attention(attend, case)
            first = first or got
            assert_same_results(got, first, f"{layout} {q_layout}")


@pytest.mark.parametrize("dtype", [np.int8, ref.E4M3])
def test_byte_dtypes_of_the_cache(dtype):
    case = AttentionCase(3, 9, 100).make()
    want = guarded_attention(attend, case)
    case.kv = case.kv.view(dtype)
    assert_same_results(guarded_attention(attend, case), want)


@pytest.mark.parametrize(("fmt", "name"), [("fp8", "fp8_ds_mla"), ("bf16", "bfloat16")])
def test_named_format(fmt, name):
    case = AttentionCase(3, 9, 100, fmt=fmt).make()
    want = guarded_attention(attend, case)
    assert_same_results(guarded_attention(attend, case, kv_format=name), want)


def test_inputs_are_left_alone():
    case = ATTENTION["extra_same"].make()
    arrays = [case.q, case.kv, case.indices, *case.options.values()]
    arrays = [x for x in arrays if isinstance(x, np.ndarray)]
    before = [np.ascontiguousarray(x).tobytes() for x in arrays]
    guarded_attention(attend, case)
    for x, want in zip(arrays, before, strict=True):
        assert np.ascontiguousarray(x).tobytes() == want


# --- results and workspace ----------------------------------------------------------------------


def test_new_outputs():
    case = AttentionCase(3, 9, 100).make()
    want = guarded_attention(attend, case)
    out, lse = case.run(attend)
    assert (type(out), out.dtype, out.shape) == (np.ndarray, ref.BF16, (3, 9, 512))
    assert (type(lse), lse.dtype, lse.shape) == (np.ndarray, np.float32, (3, 9))
    assert_same_bits(out, want["out"])
    assert_same_bits(lse, want["lse"])
    out, lse, max_logits = case.run(attend, return_max_logits=True)
    assert_same_bits(max_logits, want["max_logits"])
    mine = np.zeros((3, 9), np.float32)
    assert case.run(attend, lse=mine)[1] is mine


OUTPUTS = ("out", "lse", "max_logits")


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("given", range(8))
def test_any_outputs_may_be_given(given, asked):
    """Any subset may be given. A given `max_logits=` is written and returned unasked, too."""
    case = AttentionCase(3, 9, 100, sink=True).make()
    want = guarded_attention(attend, case)
    shapes = {"out": ((3, 9, 512), ref.BF16), "lse": ((3, 9), np.float32)}
    shapes["max_logits"] = shapes["lse"]
    mine = {n: Guarded(*shapes[n]) for i, n in enumerate(OUTPUTS) if given >> i & 1}
    outputs = {name: buffer.array for name, buffer in mine.items()}
    results = case.run(attend, return_max_logits=asked, **outputs)
    names = OUTPUTS if asked or "max_logits" in mine else OUTPUTS[:2]
    assert len(results) == len(names)
    for name, x in zip(names, results, strict=True):
        assert x is outputs.get(name, x), name
        assert_same_bits(x, want[name], name)
    for buffer in mine.values():
        buffer.check()
    assert not same_bits(want["lse"], want["max_logits"])


@pytest.mark.parametrize("num_splits", [0, 1, 7])
def test_workspace(num_splits):
    """A workspace of the promised size and any content is enough; less than needed is refused."""
    case = AttentionCase(3, 9, 300, num_splits=num_splits, extra="fp8").make()
    want = guarded_attention(attend, case)
    size = sparse_mla.attention_workspace_size(
        3, 9, 300, extra_topk=37, num_splits=num_splits, device=device.NAME
    )
    assert type(size) is int
    assert size > 0, "the CPU packs its queries there, and dense attention its ranges"

    def serve(count, offset=0):
        buffer = Guarded((count + offset,), np.uint8)
        workspace = buffer.array[offset:]
        assert_same_results(guarded_attention(attend, case, workspace=workspace), want)
        buffer.check(written=False)

    serve(size)
    serve(size, offset=1)
    if device.ON_CUDA and num_splits == 1:
        serve(0)  # nothing is combined there
        return
    rule = r"sparse_attention: `workspace` must have at least (\d+) bytes, got 0"
    with pytest.raises(ValueError, match=rule) as info:
        case.run(attend, workspace=np.zeros(0, np.uint8))
    least = int(re.search(rule, str(info.value))[1])
    assert least <= size, "the promise covers the need"
    serve(least)
    with pytest.raises(ValueError, match=rule[:-2]):
        case.run(attend, workspace=np.zeros(least // 2, np.uint8))


def test_workspace_size_covers_smaller_batches():
    sizes = [
        sparse_mla.attention_workspace_size(t, 128, 2048, num_splits=4, device=device.NAME)
        for t in (0, 1, 7, 64, 512)
    ]
    assert sizes == sorted(sizes)
    assert sizes[0] == 0 < sizes[1] < sizes[2]
