"""The drop-in for FlashAttention-3 compared with fp64, and with the operators behind it."""

from __future__ import annotations

import inspect
from dataclasses import replace

import numpy as np
import pytest
import reference as ref
from cases import int32
from dense_cases import Mask
from flash_attn_cases import Attn, draw
from flash_mla_cases import ON_GPU, Arrays
from helpers import assert_same_bits, assert_within_bounds

import sparse_mla
from sparse_mla import flash_attn
from sparse_mla.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

CAUSAL = Mask(causal=True)
NUMPY = Arrays("numpy")
on_host = pytest.mark.skipif(ON_GPU, reason="compares operators on NumPy arrays")


def assert_same(got, want) -> None:
    for x, y in zip(got, want, strict=True):
        assert_same_bits(np.ascontiguousarray(x), np.ascontiguousarray(y))


# --- the contract's vectors ----------------------------------------------------------------------

VECTORS = [
    ({}, [4, 3], [3, 4]),
    ({"window_size": (2, -1)}, [3, 0], [1, 1]),
    ({"attention_chunk": 4}, [0, 0], [0, 1]),
]


@pytest.mark.parametrize(("options", "want", "counts"), VECTORS)
@pytest.mark.parametrize("is_ragged", [False, True])
def test_slot_numbers(options, want, counts, is_ragged, arrays):
    """Pages of 2 tokens whose values are their slots' numbers: what 2 queries of q = 0 give."""
    q, k = np.zeros((1, 2, 1, 8), ref.BF16), np.zeros((4, 2, 1, 8), ref.BF16)
    v = np.broadcast_to(np.arange(8.0).reshape(4, 2, 1, 1), k.shape).astype(ref.BF16)
    more = {"cu_seqlens_q": int32(0, 2)} if is_ragged else {}
    out, lse = arrays.call(
        flash_attn_with_kvcache, q[0] if is_ragged else q, k, v, page_table=int32([3, 1, -1, 0]),
        cache_seqlens=int32(7), cache_leftpad=int32(1), softmax_scale=1.0, causal=True,
        return_softmax_lse=True, **more, **options,
    )  # fmt: skip
    assert out.shape == (2, 1, 8) if is_ragged else (1, 2, 1, 8)
    assert lse.shape == (1, 2) if is_ragged else (1, 1, 2)
    assert np.asarray(out, np.float32)[..., 0].ravel().tolist() == want
    assert np.allclose(np.exp(np.asarray(lse).ravel()), counts, rtol=1e-6)


def test_the_vector_of_qv(arrays):
    """Logits ln 3 and ln 2, of which one is q's and the other qv's."""
    unit = np.eye(8, dtype=np.float32)
    k = np.stack([unit[0], 0 * unit[0]]).reshape(1, 2, 1, 8).astype(ref.BF16)
    v = np.stack([0 * unit[1], unit[1]]).reshape(1, 2, 1, 8).astype(ref.BF16)
    q, qv = (
        (np.log(n) * unit[i]).reshape(1, 1, 1, 8).astype(ref.BF16) for n, i in ((3, 0), (2, 1))
    )
    out, lse = arrays.call(
        flash_attn_with_kvcache, q, k, v, qv=qv, softmax_scale=1.0, return_softmax_lse=True
    )
    assert np.abs(np.asarray(out, np.float32)[0, 0, 0] - 0.4 * unit[1]).max() < 4e-3
    assert abs(float(lse[0, 0, 0]) - np.log(5)) < 4e-3


# --- against fp64 --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(160))
def test_random_batches(seed):
    draw(seed).check(NUMPY)


@pytest.mark.parametrize("seed", range(12))
def test_random_batches_of_frameworks(seed, arrays):
    draw(1000 + seed).check(arrays)


KINDS = [(True, False), (False, False), (True, True), (False, True)]


@pytest.mark.parametrize(("is_uniform", "has_rooms"), KINDS)
@pytest.mark.parametrize("mask", [CAUSAL, Mask(False, (20, 3)), Mask(True, (-1, -1), 16)])
def test_masks(mask, is_uniform, has_rooms, arrays):
    case = Attn(
        [4, 4, 4], [70, 3, 0], 8, 2, (64, 64), mask=mask, leftpad=[5, 0, 2], sink=True,
        softcap=15.0, page_size=80 if has_rooms else 16, is_uniform=is_uniform, has_rooms=has_rooms,
    )  # fmt: skip
    case.check(arrays)


@pytest.mark.parametrize("has_qv", [False, True])
def test_e4m3_with_descales(has_qv, arrays):
    case = Attn(
        [2, 2], [70, 33], 4, 2, (64, 256 if has_qv else 64), "e4m3", "e4m3", descales="rows",
        has_qv=has_qv, is_uniform=True, mask=CAUSAL,
    )  # fmt: skip
    case.check(arrays)


@pytest.mark.parametrize("has_qv", [False, True])
def test_the_scale_that_is_left_out(has_qv, arrays):
    """(D + Dv of qv) ** -0.5, as the batch has it."""
    case = Attn([3], [40], 4, 2, (64, 256), has_qv=has_qv)
    options = case.kvcache()
    del options["softmax_scale"]
    out, lse = arrays.call(flash_attn_with_kvcache, **options, return_softmax_lse=True)
    assert_within_bounds(case.reference(), case.flat(out, lse))


# --- the same bits as the operators --------------------------------------------------------------


def of_operator(case: Attn) -> tuple[np.ndarray, np.ndarray]:
    options = {x: y for x, y in case.options.items() if x != "num_splits"}
    return sparse_mla.paged_attention(*case.arguments(), **options)


@on_host
@pytest.mark.parametrize("seed", range(30))
def test_kvcache_is_paged_attention(seed):
    case = draw(2000 + seed)
    out, lse = flash_attn_with_kvcache(**case.kvcache(), return_softmax_lse=True)
    assert lse.size < 2 or lse.base is not None  # a view
    got, want = case.flat(out, lse), of_operator(case)
    assert_same(got.values(), (x[: case.tokens] for x in want))
    assert_same([flash_attn_with_kvcache(**case.kvcache())], [out])


@on_host
@pytest.mark.parametrize("seed", range(30))
def test_varlen_with_a_table_is_paged_attention(seed):
    case = replace(draw(3000 + seed), is_uniform=False, has_rooms=False, leftpad=None)
    options = case.kvcache()
    keys = (options.pop(name) for name in ("k_cache", "v_cache"))
    out, lse = flash_attn_varlen_func(
        options.pop("q"), *keys, options.pop("cu_seqlens_q"), max_seqlen_q=3, max_seqlen_k=9,
        seqused_k=options.pop("cache_seqlens"), return_attn_probs=True, **options,
    )  # fmt: skip
    assert_same((out, lse.T), of_operator(case))
    assert_within_bounds(case.reference(), case.flat(out, lse))


@on_host
@pytest.mark.parametrize("sink", [False, True])
def test_contiguous_keys_are_varlen_attention(sink):
    case = Attn([4, 0, 9], [30, 5, 9], 8, 2, (192, 128), mask=CAUSAL, sink=sink)
    starts = [np.cumsum([0, *n]).astype(np.int32) for n in (case.query_lens, case.key_lens)]
    more = {"causal": True, "softmax_scale": 0.1}
    want = sparse_mla.varlen_attention(
        case.q, case.k, case.v, *starts, attn_sink=case.attn_sink, **more
    )
    out, lse = flash_attn_varlen_func(
        case.q,
        case.k,
        case.v,
        *starts,
        9,
        30,
        sinks=case.attn_sink,
        return_softmax_lse=True,
        **more,
    )
    assert_same((out, lse.T), want)
    assert np.shares_memory(lse, lse.base)


def test_contiguous_keys_with_qv(arrays):
    """Keys are one page; a request without keys and one without queries are there, too."""
    case = Attn([4, 0, 9, 2], [30, 5, 9, 0], 8, 2, (64, 256), mask=CAUSAL, has_qv=True, seed=3)
    starts = (np.cumsum([0, *n]).astype(np.int32) for n in (case.query_lens, case.key_lens))
    out, lse = arrays.call(
        flash_attn_varlen_func, case.q, case.k, case.v, *starts, qv=case.qv, causal=True,
        return_softmax_lse=True,
    )  # fmt: skip
    assert_within_bounds(case.reference(), case.flat(out, lse))


def test_contiguous_keys_in_use(arrays):
    """seqused_k of fewer keys, of all, and of more, which would be another request's."""
    case = Attn([4, 2, 9], [30, 5, 9], 8, 2, (64, 64), mask=CAUSAL)
    used, room = int32(30, 50, 9), [41, 5, 9]
    starts = np.cumsum([0, *room]).astype(np.int32)
    k, v = (np.full((55, 2, 64), np.nan, ref.BF16) for _ in range(2))
    for first, begin, n in zip(starts, (0, 30, 35), case.key_lens, strict=False):
        k[first : first + n], v[first : first + n] = (
            x[begin : begin + n] for x in (case.k, case.v)
        )
    out, lse = arrays.call(
        flash_attn_varlen_func, case.q, k, v, int32(0, 4, 6, 15), starts, seqused_k=used,
        causal=True, return_softmax_lse=True,
    )  # fmt: skip
    assert_within_bounds(case.reference(), case.flat(out, lse))


def test_no_keys_at_all(arrays):
    q, k = np.ones((3, 2, 64), ref.BF16), np.ones((0, 2, 64), ref.BF16)
    qv, v = np.ones((3, 2, 256), ref.BF16), np.ones((0, 2, 256), ref.BF16)
    for more in ({}, {"qv": qv}, {"seqused_k": int32(0)}):
        out, lse = arrays.call(
            flash_attn_varlen_func, q, k, v, int32(0, 3), int32(0, 0), return_softmax_lse=True,
            **more,
        )  # fmt: skip
        assert not np.asarray(out, np.float32).any()
        assert np.isneginf(np.asarray(lse)).all()


# --- caches without a table, and lengths ---------------------------------------------------------


def test_rooms_in_the_cache(arrays):
    """cache_batch_idx is a table of one page; without it requests have the rooms in order."""
    rng = np.random.default_rng(1)
    q, cache = (rng.normal(0, 1, x).astype(ref.BF16) for x in ((3, 2, 4, 64), (5, 20, 2, 64)))

    def run(**options):
        return arrays.call(
            flash_attn_with_kvcache,
            q,
            cache,
            cache,
            causal=True,
            return_softmax_lse=True,
            **options,
        )

    lens, chosen = int32(20, 7, 11), int32(4, 0, 4)
    assert_same(
        run(cache_seqlens=lens, cache_batch_idx=chosen),
        run(cache_seqlens=lens, page_table=chosen[:, None]),
    )
    in_order = np.arange(3, dtype=np.int32)
    assert_same(run(cache_seqlens=lens), run(cache_seqlens=lens, page_table=in_order[:, None]))
    assert_same(run(), run(cache_seqlens=int32(20, 20, 20), cache_batch_idx=in_order))
    table = int32([1, 0], [2, 2], [3, 4])
    assert_same(run(page_table=table), run(page_table=table, cache_seqlens=int32(40, 40, 40)))
    assert_same(run(cache_seqlens=7), run(cache_seqlens=int32(7, 7, 7)))
    assert_same(run(cache_seqlens=np.int64(0)), run(cache_seqlens=int32(0, 0, 0)))


@pytest.mark.parametrize("num_queries", [0, 1, 3])
@pytest.mark.parametrize("batch", [0, 2])
def test_few_queries(batch, num_queries, arrays):
    q, cache = np.ones((batch, num_queries, 4, 64), ref.BF16), np.ones((2, 20, 2, 64), ref.BF16)
    out, lse = arrays.call(
        flash_attn_with_kvcache, q, cache, cache, cache_seqlens=9, return_softmax_lse=True
    )
    assert out.shape == q.shape
    assert lse.shape == (batch, 4, num_queries)


# --- options -------------------------------------------------------------------------------------


def ones_call(**changes) -> dict:
    found = {
        "q": np.random.default_rng(0).normal(0, 1, (2, 2, 4, 64)).astype(ref.BF16),
        "k_cache": np.random.default_rng(1).normal(0, 1, (3, 8, 2, 64)).astype(ref.BF16),
        "v_cache": np.random.default_rng(2).normal(0, 1, (3, 8, 2, 64)).astype(ref.BF16),
        "page_table": int32([0, 2], [1, 0]),
        "cache_seqlens": int32(14, 6),
        "return_softmax_lse": True,
    }
    return found | changes


def run(arrays: Arrays, **changes) -> list:
    return arrays.call(flash_attn_with_kvcache, **ones_call(**changes))


def test_sinks_scale_the_output_alone(arrays):
    """In bf16 too, as sgl-kernel and vLLM have them."""
    sinks = np.array([-1.0, 0.5, 3.0, -np.inf], np.float32)
    plain, lse = run(arrays)
    for name in ("sinks", "s_aux"):
        for dtype in (np.float32, ref.BF16):
            got = run(arrays, **{name: sinks.astype(dtype)})
            assert_same(got[1:], [lse])
            factor = 1 / (1 + np.exp(sinks[:, None] - np.asarray(lse, np.float64)))
            want = np.asarray(plain, np.float64) * factor.swapaxes(1, 2)[..., None]
            assert np.abs(np.asarray(got[0], np.float64) - want).max() < 0.02
    assert_same(got, run(arrays, sinks=sinks))


def test_the_forms_of_a_window(arrays):
    want = run(arrays, window_size=(3, 1))
    assert_same(run(arrays, window_size=[3, 1]), want)
    options = ones_call(window_size=np.array([3, 1]))
    window = options.pop("window_size")  # an array of the host in every framework
    assert_same(
        arrays.call(lambda **x: flash_attn_with_kvcache(window_size=window, **x), **options), want
    )
    assert_same(run(arrays, window_size=None), run(arrays))
    assert (np.asarray(want[1]) != np.asarray(run(arrays)[1])).any()


UNREAD = {
    "cu_seqlens_k_new": int32(0, 3, 6),
    "rotary_seqlens": int32(3, 3),
    "rotary_interleaved": False,
    "scheduler_metadata": int32(1, 2, 3),
    "pack_gqa": True,
    "sm_margin": 8,
    "ver": 4,
    "fa_version": 2,
    "max_seqlen_q": 77,
    # Engines give descales with every cache; they are read for e4m3.
    "q_descale": np.full((2, 2), 3, np.float32),
    "k_descale": np.full((2, 2), 3, np.float32),
    "v_descale": np.full((2, 2), 3, np.float32),
}


@pytest.mark.parametrize("name", UNREAD)
def test_what_is_not_read(name, arrays):
    assert_same(run(arrays, **{name: UNREAD[name]}), run(arrays))


def test_two_names(arrays):
    want = run(arrays)
    table = ones_call()["page_table"]
    assert_same(run(arrays, page_table=None, block_table=table), want)
    case = Attn([2, 1], [9, 3], 4, 2, (64, 256), has_qv=True)
    options = case.kvcache()
    names = {
        "k_cache": "k",
        "v_cache": "v",
        "cache_seqlens": "seqused_k",
        "page_table": "block_table",
    }
    options = {names.get(name, name): x for name, x in options.items()}
    first = arrays.call(flash_attn_varlen_func, **options, return_softmax_lse=True)
    options["q_v"] = options.pop("qv")
    assert_same(arrays.call(flash_attn_varlen_func, **options, return_softmax_lse=True), first)
    assert_within_bounds(case.reference(), case.flat(*first))


def test_out_is_written(writable_arrays):
    put, get = writable_arrays.put, writable_arrays.get
    options = {name: put(x) for name, x in ones_call().items()}
    want, _ = run(writable_arrays)
    out = put(np.zeros((2, 2, 4, 64), ref.BF16))
    result, _ = flash_attn_with_kvcache(**options, out=out)
    assert result is out
    assert_same([get(out)], [want])
    q, k = put(np.ones((3, 4, 64), ref.BF16)), put(np.ones((3, 2, 64), ref.BF16))
    out, starts = put(np.zeros((3, 4, 64), ref.BF16)), put(int32(0, 3))
    assert flash_attn_varlen_func(q, k, k, starts, starts, 3, 3, out=out) is out
    assert (np.asarray(get(out), np.float32) == 1).all()


def test_queries_with_gaps_are_copied():
    want = run(NUMPY)
    larger = np.zeros((2, 5, 4, 64), ref.BF16)
    larger[:, :2] = ones_call()["q"]
    assert_same(run(NUMPY, q=larger[:, :2]), want)


@pytest.mark.torch
def test_tensors_of_pytorch(torch_arrays):
    torch = torch_arrays.framework.module
    options = {name: torch_arrays.put(x) for name, x in ones_call().items()}
    want = flash_attn_with_kvcache(**options)
    windows = torch.tensor([3, 1]), (3, 1)  # FlashAttention-3's own test gives a tensor
    first, second = (flash_attn_with_kvcache(**options, window_size=x)[0] for x in windows)
    assert torch.equal(first, second)
    for name in ("q", "k_cache", "v_cache"):
        options[name] = torch.nn.Parameter(options[name])
    options["sinks"] = torch.nn.Parameter(torch.full((4,), -torch.inf, device=options["q"].device))
    with torch.no_grad():
        got = flash_attn_with_kvcache(**options)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


# --- the signatures ------------------------------------------------------------------------------

SIGNATURE = """q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None,
cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None,
cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None,
v_descale=None, softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0,
softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None,
sm_margin=0, return_softmax_lse=False, sinks=None, ver=3"""


def test_signatures():
    """Positions are those of sgl-kernel, whose first are FlashAttention-3's."""
    found = inspect.signature(flash_attn_with_kvcache).parameters.values()
    given = [p for p in found if p.kind is p.POSITIONAL_OR_KEYWORD]
    words = (p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in given)
    assert ", ".join(words) == " ".join(SIGNATURE.split())
    found = inspect.signature(flash_attn_varlen_func).parameters.values()
    given = [p.name for p in found if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert given == ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    assert flash_attn.__all__ == dir(flash_attn)
