"""varlen_attention: every token attends to a range of its request's contiguous keys."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import reference as ref
from cases import bf16, e4m3, int32, picker, random_bf16
from dense_cases import MASK_ROWS, Mask
from device import ON_CUDA
from helpers import assert_same_bits, assert_within_bounds, check_seeds
from library import sparse_mla
from varlen_cases import F16, Varlen

attend = sparse_mla.varlen_attention
CAUSAL = Mask(causal=True)


def check(case: Varlen) -> dict:
    got = case.run(attend)
    assert_within_bounds(case.reference(), got)
    return got


# --- masks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n_q", "n_k", "mask", "rows"), MASK_ROWS)
def test_masks(n_q, n_k, mask, rows):
    """Values are unit vectors, so out shows which keys a query has."""
    v = np.zeros((n_k, 1, 8), ref.BF16)
    v[np.arange(n_k), 0, np.arange(n_k)] = 1
    q, k = np.zeros((n_q, 1, 8), ref.BF16), np.zeros((n_k, 1, 8), ref.BF16)
    options = {name: x for name, x in mask.options.items() if name != "cp"}
    out, lse = attend(q, k, v, int32(0, n_q), int32(0, n_k), softmax_scale=1, **options)
    seen = np.array([[key == "1" for key in row] for row in rows.split()])
    assert np.array_equal(np.asarray(out, np.float32)[:, 0, :n_k] > 0, seen)
    with np.errstate(divide="ignore"):
        assert np.allclose(lse[:, 0], np.log(seen.sum(1)), atol=1e-6)


# --- random batches ------------------------------------------------------------------------------


def draw(seed: int) -> Varlen:
    rng = np.random.default_rng(seed)
    pick = picker(rng)
    count = int(rng.integers(0, 5))
    kv_heads = pick(1, 2, 3)
    q_type = pick("bf16", "bf16", "fp16", "e4m3")
    most = pick(3, 40, 160)
    return Varlen(
        [int(rng.integers(0, pick(3, 90))) for _ in range(count)],
        [int(rng.integers(0, most + 1)) for _ in range(count)],
        heads=kv_heads * pick(1, 1, 2, 5),
        kv_heads=kv_heads,
        dims=pick((192, 128), (128, 128), (64, 64), (256, 256), (40, 24), (576, 512), (16, 8)),
        q_type=q_type,
        kv_type=pick(q_type, q_type, "e4m3") if q_type != "e4m3" else pick("bf16", "fp16", "e4m3"),
        pairs=pick("", "", "q", "k", "qk"),
        mask=Mask(
            causal=bool(rng.random() < 0.6),
            window=pick(
                (-1, -1), (-1, -1), (int(rng.integers(0, 90)), -1), (3, 5), (0, 0), (-1, 2)
            ),
            chunk=pick(0, 0, 0, 1, 7, 64),
        ),
        sink=bool(rng.random() < 0.3),
        softcap=pick(0.0, 0.0, 0.0, 0.3, 5.0, 50.0),
        padding=pick(0, 0, 2),
        is_spread=bool(rng.random() < 0.4),
        descales=pick("", "number", "one", "rows", "column"),
        out_type=pick(None, None, np.dtype(np.float32)),
        std=pick(1.0, 1.0, 4.0),
        num_splits=pick(0, 1, 64),
        seed=seed,
    )


@pytest.mark.parametrize("block", range(10))
def test_random_batches(block):
    check_seeds(range(40 * block, 40 * block + 40), lambda seed: check(draw(seed)))


@pytest.mark.parametrize("dims", [(192, 128), (128, 128), (64, 64), (256, 256), (40, 24)])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_head_sizes(dims, kv_heads):
    """More than a tile of rows, and more than a block of keys."""
    check(Varlen([150, 0, 7], [300, 9, 0], 4, kv_heads, dims, mask=CAUSAL, sink=True))


@pytest.mark.parametrize("heads", [1, 5, 16, 128])
def test_heads(heads):
    check(Varlen([3, 1], [70, 90], heads, 1, (64, 32), mask=CAUSAL, sink=True))


# Keys have the query's type or e4m3, and any type beside a query of e4m3.
TYPES = [("bf16", "bf16"), ("bf16", "e4m3"), ("fp16", "fp16"), ("fp16", "e4m3")]
TYPES += [("e4m3", "bf16"), ("e4m3", "fp16"), ("e4m3", "e4m3")]


@pytest.mark.parametrize(("q_type", "kv_type"), TYPES)
@pytest.mark.parametrize("descales", ["", "number", "one", "rows", "column"])
def test_types(q_type, kv_type, descales):
    check(
        Varlen(
            [20, 3], [70, 33], 4, 2, q_type=q_type, kv_type=kv_type, descales=descales, mask=CAUSAL
        )
    )


def test_bytes_are_e4m3():
    case = Varlen([20, 3], [70, 33], q_type="e4m3", kv_type="e4m3", descales="rows", mask=CAUSAL)
    got = check(case)
    for name in "qkv":
        setattr(case, name, getattr(case, name).view(np.uint8))
    again = case.run(attend)
    assert_same_bits(again["out"], got["out"])
    assert_same_bits(again["lse"], got["lse"])


@pytest.mark.parametrize("softcap", [2.0**-126, 1e-30, 0.01, 1.0, 30.0, 1e30])
@pytest.mark.parametrize("std", [0.01, 1.0, 6.0])
def test_softcap(softcap, std):
    """From logits far below the cap to logits far above it."""
    check(Varlen([20, 1], [150, 1], mask=CAUSAL, softcap=softcap, std=std))


# --- the same keys by other ways -----------------------------------------------------------------


@pytest.mark.parametrize("pairs", ["q", "k", "qk"])
@pytest.mark.parametrize("is_spread", [False, True])
def test_pairs_are_cut_arrays(pairs, is_spread):
    """One array gives the bits of two, and rows may be any distance apart."""
    case = Varlen([20, 3], [70, 33], 4, 2, pairs="k", rope_dim=64, mask=CAUSAL)
    whole = dataclasses.replace(case, pairs="")
    whole.k = case.k
    got = whole.run(attend)
    parts = dataclasses.replace(case, pairs=pairs, is_spread=is_spread)
    parts.k = case.k
    again = parts.run(attend)
    assert_same_bits(again["out"], got["out"])
    assert_same_bits(again["lse"], got["lse"])


def test_views_of_one_projection():
    """k_nope and v are views of kv_up_proj's [Tk, H, Pn + Pv]."""
    rng = np.random.default_rng(0)
    kv = random_bf16(rng, 9, 3, 128 + 128)
    q, k_pe = random_bf16(rng, 9, 3, 192), random_bf16(rng, 9, 64)
    starts = int32(0, 4, 9)
    options = {"softmax_scale": 0.1, "causal": True}
    k = np.concatenate([kv[..., :128], np.repeat(k_pe[:, None], 3, 1)], -1)
    want = attend(q, k, kv[..., 128:].copy(), starts, starts, **options)
    got = attend(q, (kv[..., :128], k_pe), kv[..., 128:], starts, starts, **options)
    assert_same_bits(got[0], want[0])
    assert_same_bits(got[1], want[1])


def test_kv_heads_are_shared():
    """H over Hk heads is attention to repeated keys and values."""
    case = Varlen([150, 7], [200, 33], 6, 2, (64, 64), mask=CAUSAL)
    got = check(case)
    again = dataclasses.replace(case, kv_heads=6)
    again.q, again.k, again.v = case.q, case.k.repeat(3, 1), case.v.repeat(3, 1)
    want = again.run(attend)
    assert_same_bits(got["out"], want["out"])
    assert_same_bits(got["lse"], want["lse"])


@pytest.mark.parametrize("cut", [1, 63, 64, 130, 199])
def test_parts_of_the_keys_merge_to_the_whole(cut):
    """Split at any key: the front half without a mask, the other one causal."""
    case = Varlen([30], [230], 4, 2, mask=CAUSAL)
    q, k, v, starts, _ = case.arguments()
    options = case.options
    front = attend(q, k[:cut], v[:cut], starts, int32(0, cut), **options | {"causal": False})
    behind = attend(q, k[cut:], v[cut:], starts, int32(0, 230 - cut), **options)
    out, lse = sparse_mla.merge_attn_states(*front, *behind)
    assert_within_bounds(case.reference(), {"out": out, "lse": lse}, merges=1)


@pytest.mark.parametrize("chunk", [1, 16, 48])
def test_chunks_are_requests_of_their_own(chunk):
    """Attention in chunks is causal attention of virtual requests, each of which has the tokens and
    the keys of one chunk."""
    case = Varlen([20, 1, 33], [90, 48, 33], 4, 2, (64, 64), mask=Mask(causal=True, chunk=chunk))
    q, _, _, _, _ = case.arguments()
    starts, key_starts, rows = [0], [0], []
    first_key = 0
    for n_q, n_k in zip(case.query_lens, case.key_lens, strict=True):
        for first in range((n_k - n_q) // chunk * chunk, n_k, chunk):
            end = min(first + chunk, n_k)
            starts.append(starts[-1] + end - max(first, n_k - n_q))
            key_starts.append(key_starts[-1] + end - first)
            rows += range(first_key + first, first_key + end)
        first_key += n_k
    options = case.options | {"attention_chunk": 0}
    k, v = case.k[rows], case.v[rows]
    out, lse = attend(q, k, v, int32(*starts), int32(*key_starts), **options)
    assert_within_bounds(case.reference(), {"out": out, "lse": lse})
    got = check(case)
    assert np.abs(lse - got["lse"]).max() < 1e-5


def test_is_mla_attention_of_projected_keys():
    """The absorbed form: keys of 512 + 64 values, of which the first 512 are the value."""
    rng = np.random.default_rng(0)
    cache = random_bf16(rng, 5, 16, 576)
    q, starts, lens = random_bf16(rng, 7, 4, 576), int32(0, 5, 7), int32(40, 21)
    table = int32([3, 0, 4], [1, 2, -1])
    options = {"softmax_scale": 576**-0.5, "causal": True}
    want = sparse_mla.mla_attention(q, cache, table, lens, cu_seqlens_q=starts, **options)
    rows = [cache[row].reshape(-1, 1, 576)[:n] for row, n in zip(table, lens, strict=True)]
    keys = np.concatenate(rows)
    out, lse = attend(q, keys, keys[..., :512], starts, int32(0, 40, 61), **options)
    assert np.abs(lse - want[1]).max() < 1e-5
    difference = np.asarray(out, np.float32) - np.asarray(want[0], np.float32)
    assert np.abs(difference).max() <= 2**-7 * np.abs(np.asarray(out, np.float32)).max()


@pytest.mark.parametrize("hint", [0, 1, 7, 10**6])
def test_hints_and_splits_change_nothing(hint):
    case = Varlen([3, 40], [200, 70], 4, 2, mask=CAUSAL)
    got = case.run(attend)
    scratch = np.zeros(5, np.uint8)
    more = {"max_seqlen_q": hint, "max_seqlen_k": hint, "workspace": scratch}
    again = dataclasses.replace(case, num_splits=min(hint, 64)).run(attend, **more)
    assert_same_bits(got["out"], again["out"])
    assert_same_bits(got["lse"], again["lse"])


# --- batch invariance ----------------------------------------------------------------------------


def part_of(case: Varlen, b: int, tokens: slice) -> tuple[Varlen, np.ndarray]:
    """Some query tokens at the end of one request of a batch, alone, and their numbers."""
    starts, keys = np.cumsum([0, *case.query_lens]), np.cumsum([0, *case.key_lens])
    rows = np.arange(starts[b], starts[b + 1])[tokens]
    alone = dataclasses.replace(case, query_lens=[len(rows)], key_lens=[case.key_lens[b]])
    alone.q = case.q[rows]
    alone.k, alone.v = (x[keys[b] : keys[b + 1]] for x in (case.k, case.v))
    alone.attn_sink = case.attn_sink
    return alone, rows


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("mask", [CAUSAL, Mask(causal=True, window=(70, 0))])
def test_a_row_does_not_depend_on_others(kv_heads, mask):
    """Alone, in a batch, and without the query rows in front of it."""
    rng = np.random.default_rng(3)
    queries = [int(x) for x in rng.integers(1, 160, 8)]
    lens = [n + int(x) for n, x in zip(queries, rng.integers(0, 160, 8), strict=True)]
    case = Varlen(queries, lens, 4, kv_heads, (64, 64), mask=mask, sink=True)
    got = case.run(attend)
    for b in (0, 3, 7):
        for tokens in (slice(None), slice(-1, None), slice(-5, None)):
            alone, rows = part_of(case, b, tokens)
            again = alone.run(attend)
            assert_same_bits(again["out"], got["out"][rows], "out")
            assert_same_bits(again["lse"], got["lse"][rows], "lse")


# --- bad keys ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_a_bad_key_that_the_mask_hides(bad, where, kv_heads):
    """The last key of a request, which only its last token sees, is NaN or infinite. It changes no
    bit of another request, and of the request's other tokens no lse. On the CPU it changes no bit
    of their results either."""
    case = Varlen([3, 40, 2], [80, 90, 70], 4, kv_heads, mask=CAUSAL)
    want = case.run(attend)
    getattr(case, where)[169] = bad
    got = case.run(attend)
    assert not np.isfinite(np.asarray(got["out"][42], np.float32)).all()
    others = [0, 1, 2, 43, 44]
    assert_same_bits(got["out"][others], want["out"][others])
    assert_same_bits(np.delete(got["lse"], 42, 0), np.delete(want["lse"], 42, 0))
    if not ON_CUDA:
        assert_same_bits(got["out"][3:42], want["out"][3:42])


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_a_bad_query_is_alone(kind):
    case = Varlen([40], [90], 4, 2, q_type=kind, kv_type=kind, mask=CAUSAL)
    want = case.run(attend)
    case.q[7] = np.nan
    got = case.run(attend)
    assert np.isnan(np.asarray(got["out"][7], np.float32)).all()
    assert np.isnan(got["lse"][7]).all()
    for name in ("out", "lse"):
        assert_same_bits(np.delete(got[name], 7, 0), np.delete(want[name], 7, 0))


@pytest.mark.parametrize("exponent", [-130, -60, 60, 70, 100])
def test_scales_of_values(exponent):
    """Values, and queries against keys, that fp32 products hold only together."""
    case = Varlen([9, 2], [70, 3], 4, 2, mask=CAUSAL)
    factor = ref.to_bf16(np.float64(2.0) ** exponent)
    case.v = ref.to_bf16(ref.to_f32(case.v).astype(np.float64) * ref.to_f32(factor))
    if abs(exponent) <= 100:
        case.q = ref.to_bf16(ref.to_f32(case.q) * ref.to_f32(factor))
        inverse = np.float32(2.0) ** -exponent
        case.k = ref.to_bf16(ref.to_f32(case.k) * inverse)
    check(case)


@pytest.mark.skipif(ON_CUDA, reason="kernels there add products in fp32")
@pytest.mark.parametrize("exponent", [45, 50, 51, 58, 60, 61, 62])
def test_products_that_fp32_cannot_hold(exponent):
    """Queries and keys so large that sums of their products leave fp32, but for a tiny scale."""
    case = Varlen([9, 2], [150, 3], 4, 2, (576, 64), mask=CAUSAL)
    want = case.reference()
    factor = ref.to_bf16(np.float64(2.0) ** exponent)
    case.q, case.k = case.q * factor, case.k * factor

    def attend_scaled(*arrays, softmax_scale, **options):
        return attend(*arrays, softmax_scale=softmax_scale * 4.0**-exponent, **options)

    assert_within_bounds(want, case.run(attend_scaled))


# --- lengths -------------------------------------------------------------------------------------


def ones(num_keys: int) -> tuple[np.ndarray, np.ndarray]:
    """Equal keys of any number, whose exact results are known."""
    return (np.broadcast_to(np.ones((1, 1, 8), ref.BF16), (num_keys, 1, 8)) for _ in range(2))


def test_lengths_from_one_to_many():
    lens = [1, 2, 63, 64, 65, 1000, 16384, 16385, 40000]
    q, (k, v) = np.ones((len(lens), 2, 8), ref.BF16), ones(sum(lens))
    starts = np.cumsum([0, *lens]).astype(np.int32)
    out, lse = attend(
        q, k, v, np.arange(len(lens) + 1, dtype=np.int32), starts, softmax_scale=0.125
    )
    assert (np.asarray(out, np.float32) == 1).all()
    assert np.abs(lse - (1 + np.log(lens)[:, None])).max() < 2e-6


def test_a_million_keys():
    """Equal terms all round the same way, so a plain sum of them would leave the bounds."""
    q, (k, v) = np.ones((1, 1, 8), ref.BF16), ones(1_000_000)
    out, lse = attend(q, k, v, int32(0, 1), int32(0, 1_000_000), softmax_scale=0.125)
    bound = 2.0**-7 if ON_CUDA else 2.0**-8  # the contract's; a step of bf16
    assert np.abs(np.asarray(out, np.float32) - 1).max() <= bound
    assert abs(float(lse[0, 0]) - (1 + np.log(1e6))) < 3e-6


def test_empty_batches():
    q, k, v = (np.ones((n, 2, 8), ref.BF16) for n in (3, 0, 0))
    out, lse = attend(q, k, v, int32(0, 3), int32(0, 0), softmax_scale=1)
    assert not np.asarray(out, np.float32).any()
    assert np.isneginf(lse).all()
    out, lse = attend(q[:0], q, q, int32(0), int32(0), softmax_scale=1)
    assert out.shape == (0, 2, 8)
    assert lse.shape == (0, 2)
    check(Varlen([0, 2, 0, 5], [5, 0, 0, 3], padding=3, mask=CAUSAL))
    check(Varlen([0, 0], [5, 9], padding=3))


def test_one_key_is_its_value():
    """To the bit, on the CPU and on CUDA."""
    case = Varlen([1, 1, 4], [1, 1, 4], mask=Mask(causal=True, window=(0, 0)))
    got = check(case)
    assert_same_bits(got["out"], case.v)


def test_results_have_the_query_s_type():
    for kind, wanted in (("bf16", ref.BF16), ("fp16", F16), ("e4m3", ref.BF16)):
        case = Varlen([3], [5], q_type=kind, kv_type=kind)
        out, lse = attend(*case.arguments(), **case.options)
        assert out.dtype == wanted
        assert out.shape == (3, 4, 128)
        assert lse.dtype == np.float32


def test_strided_vectors():
    case = Varlen([2, 1], [40, 9], mask=CAUSAL, sink=True)
    got = case.run(attend)
    apart = lambda x: np.repeat(x, 2, -1)[..., ::2]  # noqa: E731
    *arrays, starts, key_starts = case.arguments()
    options = case.options | {"attn_sink": apart(case.attn_sink)}
    lse = np.zeros((4, 3), np.float32).T
    out, lse = attend(*arrays, apart(starts), apart(key_starts), lse=lse, **options)
    assert_same_bits(out, got["out"])
    assert_same_bits(np.ascontiguousarray(lse), got["lse"])


# --- errors --------------------------------------------------------------------------------------


def call(**changes):
    arguments = {
        "q": bf16(3, 4, 24),
        "k": bf16(5, 2, 24),
        "v": bf16(5, 2, 16),
        "cu_seqlens_q": int32(0, 3),
        "cu_seqlens_k": int32(0, 5),
        "softmax_scale": 1.0,
    }
    return attend(**(arguments | changes))


ALL_E4M3 = {"q": e4m3(3, 4, 24), "k": e4m3(5, 2, 24), "v": e4m3(5, 2, 16)}
TWO = {"cu_seqlens_q": int32(0, 2, 3), "cu_seqlens_k": int32(0, 2, 5)}
ERRORS = [
    ({"q": bf16(3, 4)}, "`q` must have shape [any, any, any], got [3, 4]: tokens, heads, values"),
    ({"q": bf16(3, 129, 24)}, "`q` must have 1 to 128 heads, got 129"),
    ({"q": bf16(3, 4, 20)}, "`q` must have a multiple of 8 values per head, at most 576, got 20"),
    ({"q": bf16(3, 4, 584)}, "`q` must have a multiple of 8 values per head, at most 576, got 584"),
    ({"q": bf16(3, 4, 0)}, "`q` must have a multiple of 8 values per head, at most 576, got 0"),
    ({"q": (bf16(3, 4, 16), bf16(3, 4, 4))}, "`q[1]` must have a multiple of 8 values"),
    ({"q": (bf16(3, 4, 16), bf16(3, 3, 8))}, "`q[1]` must have shape [3, 4, any], got [3, 3, 8]"),
    (
        {"q": (bf16(3, 4, 512), bf16(3, 4, 72))},
        "`q[1]` must have a multiple of 8 values per head, ",
    ),
    ({"k": bf16(5, 3, 24)}, "`k` must have a number of heads that divides the 4 of `q`, got 3"),
    ({"k": bf16(5, 0, 24)}, "`k` must have a number of heads that divides the 4 of `q`, got 0"),
    ({"k": bf16(5, 2, 32)}, "`k` must have 24 values per head, as `q` has, got 32"),
    ({"k": bf16(5, 2)}, "`k` must have shape [any, any, any], got [5, 2]"),
    ({"k": (bf16(5, 2, 16), bf16(4, 8))}, "`k[1]` must have shape [5, any], got [4, 8]"),
    ({"k": (bf16(5, 2, 16), bf16(5, 2, 8))}, "`k[1]` must have shape [5, any], got [5, 2, 8]"),
    (
        {"q": (bf16(3, 4, 16), bf16(3, 4, 8)), "k": (bf16(5, 2, 8), bf16(5, 16))},
        "`k[1]` must have 8 values, as `q[1]` has, got 16",
    ),
    ({"v": bf16(4, 2, 16)}, "`v` must have shape [5, 2, any], got [4, 2, 16]"),
    ({"v": bf16(5, 2, 520)}, "`v` must have a multiple of 8 values per head, at most 512, got 520"),
    ({"cu_seqlens_q": int32()}, "`cu_seqlens_q` must have an entry more than there are requests"),
    ({"cu_seqlens_k": int32(0, 1, 5)}, "`cu_seqlens_k` must have shape [2], got [3]"),
    ({"window_size": (-2, 0)}, "`window_size` must have -1 (open) or a number of keys on its left"),
    ({"window_size": (0, -3)}, "number of keys on its right, got -3"),
    ({"window_size": (2**31, 0)}, "number of keys on its left, got 2147483648"),
    ({"attention_chunk": -1}, "`attention_chunk` must be 0 to 2147483647, got -1"),
    ({"softcap": -1.0}, "`softcap` must be 0 (none) or a positive normal float32, got -1"),
    ({"softcap": float("nan")}, "`softcap` must be finite"),
    ({"softcap": 1e-60}, "`softcap` must be 0 (none) or a positive normal float32"),
    ({"softcap": 3e38}, "`softcap` must be at most 2.35866e+38 in size, got 3e+38"),
    ({"softmax_scale": -3e38}, "`softmax_scale` must be at most 2.35866e+38 in size, got -3e+38"),
    ({"softcap": 2.0**-127}, "`softcap` must be 0 (none) or a positive normal float32"),
    ({"num_splits": 65}, "`num_splits` must be 0 (the plan chooses) or 1 to 64, got 65"),
    ({"num_splits": -1}, "`num_splits` must be 0 (the plan chooses) or 1 to 64, got -1"),
    ({"max_seqlen_q": -1}, "`max_seqlen_q` must be at least 0"),
    ({"max_seqlen_k": -1}, "`max_seqlen_k` must be at least 0"),
    ({"softmax_scale": float("nan")}, "`softmax_scale` must be finite"),
    ({"attn_sink": np.zeros(3, np.float32)}, "`attn_sink` must have shape [>= 4], got [3]"),
    ({"q_descale": 2.0}, "`q_descale` must be left out unless `q` is e4m3, got bfloat16"),
    ({"k_descale": np.ones(1, np.float32)}, "`k_descale` must be left out unless `k` is e4m3"),
    ({"v_descale": 0.5}, "`v_descale` must be left out unless `v` is e4m3, got bfloat16"),
    (ALL_E4M3 | {"q_descale": float("inf")}, "`q_descale` must be a positive normal float32"),
    (
        ALL_E4M3 | TWO | {"k_descale": np.ones((2, 4), np.float32)},
        "`k_descale` must have one value or shape [n, 2], where n divides the 2 requests, or be a "
        "float, got shape [2, 4]",
    ),
    (
        ALL_E4M3 | TWO | {"v_descale": np.ones(2, np.float32)},
        "`v_descale` must have one value or shape [n, 2], where n divides the 2 requests, or be a "
        "float, got shape [2]",
    ),
    ({"out": bf16(3, 4, 24)}, "`out` must have shape [3, 4, 16], got [3, 4, 24]"),
    ({"lse": np.zeros((3, 2), np.float32)}, "`lse` must have shape [3, 4], got [3, 2]"),
]


TYPE_ERRORS = [
    (
        {"q": np.ones((3, 4, 24), np.float32)},
        "`q` must be bfloat16, float16, uint8 or float8_e4m3fn",
    ),
    ({"q": (bf16(3, 4, 16), np.ones((3, 4, 8), np.float16))}, "`q[1]` must be bfloat16"),
    ({"k": np.ones((5, 2, 24), np.float16)}, "`k` must be bfloat16, uint8 or float8_e4m3fn"),
    ({"v": np.ones((5, 2, 16), np.float16)}, "`v` must be bfloat16, got float16"),
    ({"out": np.zeros((3, 4, 16), np.float16)}, "`out` must be bfloat16 or float32, got float16"),
    ({"cu_seqlens_k": np.array([0, 5], np.int64)}, "`cu_seqlens_k` must be int32, got int64"),
    ({"q": (bf16(3, 4, 8),) * 3}, "`q` must be an array or the pair"),
    ({"k": (bf16(5, 2, 8),)}, "`k` must be an array or the pair (k_nope, k_pe), got 1 items"),
]


@pytest.mark.parametrize(
    ("changes", "words", "error"),
    [*((*row, ValueError) for row in ERRORS), *((*row, TypeError) for row in TYPE_ERRORS)],
)
def test_errors(changes, words, error):
    with pytest.raises(error) as caught:
        call(**changes)
    assert str(caught.value).startswith("varlen_attention: ")
    assert words in str(caught.value)


@pytest.mark.skipif(ON_CUDA, reason="numbers on the device are clamped")
@pytest.mark.parametrize(
    ("starts", "words"),
    [
        ((1, 1), "begin with 0 and never fall, got 1 at 0"),
        ((0, -1), "begin with 0 and never fall, got -1 at 1"),
        ((0, 6), "end at most at the {}, got 6"),
    ],
)
def test_starts_are_checked(starts, words):
    for name, rows in (("cu_seqlens_q", "3 tokens of `q`"), ("cu_seqlens_k", "5 keys of `k`")):
        with pytest.raises(ValueError) as caught:
            call(**{name: int32(*starts)})
        assert f"varlen_attention: `{name}` must {words.format(rows)}" in str(caught.value)


@pytest.mark.skipif(ON_CUDA, reason="numbers on the device are not read")
@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, 1e-40])
def test_descales_are_checked(scale):
    rows = np.array([[1.0, scale]], np.float32)
    with pytest.raises(ValueError, match="`k_descale` must be a positive normal float32"):
        call(**ALL_E4M3, k_descale=rows)


@pytest.mark.parametrize("starts", [(5, 1, 9), (0, -3, 2), (-9, 4, 1), (2**31 - 1, -(2**31), 0)])
def test_wild_starts_harm_nothing(starts):
    """On a device they are clamped: results mean nothing, and no other memory is touched."""
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        try:
            call(**TWO | {name: int32(*starts)})
        except ValueError as error:
            assert not ON_CUDA, error
