"""sparse_attention against fp64, within the bounds of the contract (csrc/cpu/attention/)."""

import re

import cases
import device
import library
import numpy as np
import pytest
import random_cases
import reference as ref
from cases import ATTENTION, AttentionCase
from helpers import (
    NO_NAN,
    Guarded,
    assert_same_bits,
    assert_same_results,
    assert_within_bounds,
    guarded_attention,
    same_bits,
)
from library import sparse_mla

attend = sparse_mla.sparse_attention


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


# --- what excluded tokens, sinks and empty rows do -----------------------------------------------

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
    """Splitting one cache's indices over kv and extra_kv_cache changes nothing but rounding."""
    whole = AttentionCase(3, 6, 120, indices="ordered").make()
    want = whole.reference()
    split = AttentionCase(3, 6, 120, indices="ordered").make()
    split.options["extra_kv_cache"] = split.kv
    split.options["extra_indices"] = split.indices[:, 50:]
    split.indices = split.indices[:, :50]
    assert_within_bounds(want, guarded_attention(attend, split))


# --- bits ----------------------------------------------------------------------------------------


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


# --- results and workspace -----------------------------------------------------------------------


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
