"""sparse_attention of tokens that see one key: the result is that key's value, and its log-sum-exp
is that key's logit."""

import cases
import device
import numpy as np
import pytest
import reference as ref
from cases import INT32_MAX, INT32_MIN, AttentionCase
from helpers import assert_same_bits, assert_same_results, assert_within_bounds, guarded_attention
from library import sparse_mla

attend = sparse_mla.sparse_attention


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
    case.options |= {"extra_kv_cache": rows.reshape(6, 7, -1), "extra_indices": extra_indices}
    got = guarded_attention(attend, case)
    assert_within_bounds(case.reference(), got)
    kv = case.options["extra_kv_cache"] if in_extra else case.kv
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
