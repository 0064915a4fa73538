"""sparse_mla.flash_mla: calls as of the package flash_mla, judged by fp64 and its tolerances.

With SMLA_DEVICE=cuda torch's arrays are on the GPU. test_gpu_flash_mla.py runs the same code
through that package, too.
"""

import importlib
import inspect
from dataclasses import dataclass

import cases
import numpy as np
import pytest
import reference as ref
from flash_mla_cases import (
    DECODE,
    ON_GPU,
    PREFILL,
    Arrays,
    Decode,
    Prefill,
    assert_close,
    assert_results,
)
from helpers import assert_same_bits

from sparse_mla import flash_mla

# --- results -------------------------------------------------------------------------------------

# flash_mla serves these cases, too, so that both packages can run them
DECODES = {
    "plain": {},
    "one query": {"s_q": 1},
    "one request": {"b": 1, "s_q": 3},
    "sink": {"sink": True, "H": 128},
    "odd pages": {"block_size": 61, "pages": 9, "sink": True},
    "scale": {"softmax_scale": 0.21},
}

PREFILLS = {
    "plain": {},
    "sink": {"sink": True},
    "lengths": {"topk_length": True},
    "sink and lengths": {"sink": True, "topk_length": True, "H": 128},
    "without RoPE": {"d_qk": 512, "sink": True, "topk_length": True, "sm_scale": 512**-0.5},
    "scale": {"sm_scale": 0.3, "K": 256},
}

# only this library serves these; flash_mla's Hopper kernel refuses lengths in decode, for example
MORE_DECODES = {
    "lengths": {"topk_length": True, "sink": True, "s_q": 1},
    "lengths of several queries": {"topk_length": True, "s_q": 3},
    "extra cache": {"extra": True, "sink": True},
    "extra cache and lengths": {"extra": True, "topk_length": True, "s_q": 1, "H": 5},
    "bf16 cache": {"fmt": "bf16", "H": 16},
    "no requests": {"b": 0},
    "no queries": {"s_q": 0},
    "no indices": {"K": 0, "sink": True},
    **{f"{h} heads, {k} indices": {"H": h, "K": k, "b": 2, "block_size": size}
       for h, k, size in ((1, 1, 1), (3, 7, 3), (17, 65, 64), (100, 63, 100), (127, 33, 64))},
}  # fmt: skip

MORE_PREFILLS = {
    f"{t} tokens, {h} heads, {k} indices": {"T": t, "H": h, "K": k, "topk_length": True}
    for t, h, k in ((0, 16, 64), (1, 1, 1), (3, 2, 65), (2, 127, 7), (4, 48, 0))
}


@pytest.mark.parametrize("name", [*DECODES, *MORE_DECODES])
def test_decode(name, arrays):
    case = Decode(**(DECODES | MORE_DECODES)[name])
    assert_results(case.run(arrays), case.reference())


@pytest.mark.parametrize("name", [*PREFILLS, *MORE_PREFILLS])
def test_prefill(name, arrays):
    case = Prefill(**(PREFILLS | MORE_PREFILLS)[name])
    assert_results(case.run(arrays), case.reference())


def layer_of_a_model(mla, put, decode: Decode, prefill: Prefill):
    """Code as written for flash_mla, with strided inputs; `mla` is the imported module."""
    q, sink = put(decode.q), put(decode.options["attn_sink"])
    wide = put(np.zeros((*decode.q.shape[:3], 600), ref.BF16))
    wide[..., :576] = q
    storage = put(np.zeros((decode.pages, decode.block_size + 1, 1, 656), ref.E4M3))
    cache = storage[:, : decode.block_size]
    cache[:] = put(decode.k_cache.view(ref.E4M3))
    meta, splits = mla.get_mla_metadata()
    steps = []
    for _ in range(2):  # two layers share the metadata
        step = mla.flash_mla_with_kvcache(
            wide[..., :576], cache, None, None, 512, meta, splits, 576**-0.5, False, True,
            put(decode.indices), attn_sink=sink, use_legacy=True,
        )  # fmt: skip
        steps.append(step)
    rows = put(np.zeros((prefill.S, 2, 576), ref.BF16))
    rows[:, :1] = put(prefill.kv)
    prefilled = mla.flash_mla_sparse_fwd(
        put(prefill.q), rows[:, :1], put(prefill.indices), prefill.sm_scale,
        attn_sink=put(prefill.options["attn_sink"]),
        topk_length=put(prefill.options["topk_length"]), use_legacy=True,
    )  # fmt: skip
    return steps, prefilled


@pytest.mark.torch
def test_code_written_for_the_package(torch_arrays):
    check_layer_of_a_model(flash_mla, torch_arrays)


def check_layer_of_a_model(module, torch_arrays) -> None:
    decode = Decode(sink=True)
    prefill = Prefill(sink=True, topk_length=True)
    steps, prefilled = layer_of_a_model(module, torch_arrays.put, decode, prefill)
    for step in steps:
        assert_results([torch_arrays.get(x) for x in step], decode.reference())
    assert_results([torch_arrays.get(x) for x in prefilled], prefill.reference())


# --- edges ---------------------------------------------------------------------------------------


def test_queries_without_keys(arrays):
    decode = Decode(H=16, K=64, sink=True)
    decode.indices[1] = -1
    out, lse = decode.run(arrays)
    assert np.isposinf(lse[1]).all()
    assert not ref.bits16(out)[1].any()
    assert np.isfinite(lse[[0, 2]]).all()
    prefill = Prefill(H=16, K=64, sink=True)
    prefill.indices[2] = prefill.S
    out, max_logits, lse = prefill.run(arrays)
    assert np.isposinf(lse[2]).all()
    assert np.isneginf(max_logits[2]).all()
    assert not ref.bits16(out)[2].any()
    assert np.isfinite(lse[[0, 1, 3, 4]]).all()


def test_tokens_that_no_index_names_are_not_read(arrays):
    decode = Decode(H=16, K=64, pages=9, topk_length=True)
    want = decode.run(arrays)
    rows = decode.k_cache.reshape(-1, 656)
    flat = decode.indices.reshape(-1, decode.K)
    lengths = np.repeat(decode.options["topk_length"], decode.s_q)
    cases.hide_unselected(rows, flat, lengths)
    assert (rows == 0xFF).all(1).any()
    for a, b in zip(decode.run(arrays), want, strict=True):
        assert_same_bits(a, b)


def test_lengths_are_per_request_in_decode(arrays):
    decode = Decode(s_q=3, H=16, K=70, topk_length=True)
    masked = decode.indices.copy()
    for request, length in enumerate(decode.options["topk_length"]):
        masked[request, :, length:] = -1
    for a, b in zip(
        decode.run(arrays), decode.run(arrays, indices=masked, topk_length=None), strict=True
    ):
        assert_close("masked", a, b, 1e-3, 2.01 / 128)


def strided_decode_inputs(put, case: Decode) -> dict[str, dict]:
    """Arguments that are views of wider memory, by name; torch and NumPy index alike."""
    b, s_q, num_heads, _ = case.q.shape
    wide = put(np.zeros((b, s_q + 1, num_heads + 2, 600), ref.BF16))
    joined = put(np.zeros((b, s_q, num_heads, 600), ref.BF16))
    head_major = put(np.zeros((num_heads, b, s_q, 576), ref.BF16))
    pages = put(np.zeros((case.pages, case.block_size + 1, 1, 656), np.uint8))
    layers = put(np.zeros((case.pages, 3, case.block_size, 1, 656), np.uint8))
    table = put(np.zeros((b, s_q + 2, case.K + 5), np.int32))
    views = {
        "q that does not join": {"q": wide[:, 1:, 1:-1, 7:583]},
        "q of a wider projection": {"q": joined[..., :576]},
        "pages with a gap": {"k_cache": pages[:, : case.block_size]},
        "pages of another layer between": {"k_cache": layers[:, 1]},
        "indices of a wider table": {"indices": table[:, 1:-1, 3:-2]},
    }
    if isinstance(head_major, np.ndarray):
        views["q head by head"] = {"q": head_major.transpose(1, 2, 0, 3)}
    else:
        views["q head by head"] = {"q": head_major.permute(1, 2, 0, 3)}
    for changes in views.values():
        for name, view in changes.items():
            view[...] = put(getattr(case, name))
    return views


def strided_prefill_inputs(put, case: Prefill) -> dict[str, dict]:
    wide = put(np.zeros((case.T, case.H + 1, 577), ref.BF16))
    rows = put(np.zeros((case.S, 3, 576), ref.BF16))
    odd = put(np.zeros((case.S, 1, 577), ref.BF16))
    table = put(np.zeros((case.T, 2, case.K + 1), np.int32))
    views = {
        "q": {"q": wide[:, 1:, 1:]},
        "rows of three layers": {"kv": rows[:, 1:2]},
        "rows at odd addresses": {"kv": odd[..., 1:]},
        "indices": {"indices": table[:, :1, 1:]},
    }
    for changes in views.values():
        for name, view in changes.items():
            view[...] = put(getattr(case, name))
    return views


@pytest.mark.parametrize("name", ["numpy", pytest.param("torch", marks=pytest.mark.torch)])
def test_strided_inputs_give_the_same_bits(name):
    arrays = Arrays(name)
    for case, views in ((Decode(H=16, sink=True), strided_decode_inputs),
                        (Prefill(H=16, sink=True), strided_prefill_inputs)):  # fmt: skip
        want = case.run(arrays)
        for what, changes in views(arrays.put, case).items():
            for a, b in zip(case.run(arrays, **changes), want, strict=True):
                assert_same_bits(a, b, what)


# --- keywords ------------------------------------------------------------------------------------


def test_scale_defaults_to_the_head_size(arrays):
    case = Decode(H=16)
    for a, b in zip(case.run(arrays), case.run(arrays, softmax_scale=576**-0.5), strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("zero", [0, 0.0, np.float64(0)])
def test_a_scale_of_0_is_no_scale_left_out(zero, arrays):
    """All keys weigh the same."""
    decode, prefill = Decode(H=16, softmax_scale=0.0), Prefill(H=16)
    got = decode.run(arrays, softmax_scale=zero)
    assert_results(got, decode.reference())
    assert not np.array_equal(got[0], decode.run(arrays, softmax_scale=None)[0])
    prefill.sm_scale = 0.0
    assert_results(prefill.run(arrays), prefill.reference())


@pytest.mark.parametrize("false", [0, np.False_, False])
def test_what_is_false_is_not_taken_for_none(false):
    case, prefill = Decode(H=16), Prefill(H=16)
    meta, _ = flash_mla.get_mla_metadata()

    def decode(**changes):
        options = {"head_dim_v": 512, "tile_scheduler_metadata": meta, "indices": case.indices}
        given = {"block_table": None, "cache_seqlens": None} | options | changes
        return flash_mla.flash_mla_with_kvcache(case.q, case.k_cache, **given)

    def refuse(call, name: str, value) -> None:
        named = {"extra_k_cache": "extra_kv_cache"}.get(
            name, name
        )  # the core's errors pass through
        with pytest.raises((TypeError, ValueError), match=rf": `{named}` must ") as error:
            call(**{name: value})
        assert "got None" not in str(error.value)

    options = {"causal": false, "use_legacy": false, "enable_batch_invariant": false}
    assert_results(decode(**options), case.reference())
    names = "num_splits descale_q descale_k is_fp8_kvcache kv_format indices attn_sink topk_length"
    names += " extra_k_cache extra_indices_in_kvcache extra_topk_length"
    for name in names.split():
        refuse(decode, name, false)
    for name in ("kv_format", "num_splits", "descale_q", "descale_k"):
        refuse(decode, name, "")
    args = (prefill.q, prefill.kv, prefill.indices, prefill.sm_scale)
    _, *nothing = flash_mla.flash_mla_sparse_fwd(*args, return_log2_lse=false)
    assert nothing == [None, None]
    for name in ("attn_sink", "topk_length"):
        refuse(lambda **one: flash_mla.flash_mla_sparse_fwd(*args, **one), name, false)
    assert flash_mla.get_mla_decoding_metadata(None, 128, 1, topk=false) == (None, None)


@pytest.mark.parametrize("kv_format", [None, "V32", "fp8_ds_mla"])
def test_kv_format_names_the_one_cache(kv_format, arrays):
    case = Decode(H=16)
    assert_results(case.run(arrays, kv_format=kv_format), case.reference())


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, ref.E4M3])
def test_bytes_of_a_cache_come_in_three_dtypes(dtype, arrays):
    case = Decode(H=16)
    got = case.run(arrays, k_cache=case.k_cache.view(dtype), is_fp8_kvcache=None)
    for a, b in zip(got, case.run(arrays), strict=True):
        assert_same_bits(a, b)


def test_batch_invariance(arrays):
    """Requests give the same bits alone and in a batch. K is so large that usual plans differ: the
    CPU cuts it into 4 for up to 16 requests, then into 3, into 2 from 22 on, not at all from 33."""
    case = Decode(b=65, s_q=1, H=3, K=1024)
    rng = np.random.default_rng(5)
    case.q[..., :512] = 0
    cases.cancel_neighbours(case.k_cache.reshape(-1, 656))
    pairs = 2 * rng.integers(0, 7 * 32, (65, 512))
    case.indices[:, 0] = rng.permuted(np.concatenate([pairs, pairs + 1], 1), axis=1)

    def run(count: int, is_invariant: bool) -> list[np.ndarray]:
        part = slice(count)
        options = {"q": case.q[part], "indices": case.indices[part]}
        return case.run(arrays, **options, enable_batch_invariant=is_invariant)

    whole = run(case.b, True)
    planned = []
    for count in (1, 16, 21, 22, 32, 33, 64):
        for a, b in zip(run(count, True), whole, strict=True):
            assert_same_bits(a, b[:count])
        planned.append([x[:1].tobytes() for x in run(count, False)])
    if not ON_GPU:
        assert planned[0] == planned[1] != planned[2] != planned[3] == planned[4] != planned[5]
        assert planned[5] == planned[6] == [x[:1].tobytes() for x in whole]


def test_statistics_in_base_2_or_left_out(arrays):
    case = Prefill(H=16)
    case.indices[1] = -1
    out, max_logits, lse = case.run(arrays)
    out_2, max_logits_2, lse_2 = case.run(arrays, return_log2_lse=True)
    assert_same_bits(out_2, out)
    assert_close("max_logits", max_logits_2, max_logits * np.log2(np.e), 0, 2.0**-22)
    assert_close("lse", lse_2, lse * np.log2(np.e), 0, 2.0**-22)
    put = arrays.put
    args = (put(case.q), put(case.kv), put(case.indices), case.sm_scale)
    out_3, *nothing = flash_mla.flash_mla_sparse_fwd(*args, return_log2_lse=False)
    assert nothing == [None, None]
    assert_same_bits(arrays.get(out_3), out)


def test_one_metadata_object_serves_any_call(arrays):
    meta, num_splits = flash_mla.get_mla_metadata(None, 64, 1, num_heads_q=64, topk=128)
    assert num_splits is None
    assert not meta.have_initialized
    for case in (Decode(b=1, s_q=1, H=16, K=33), Decode(H=8)):
        got = arrays.call(
            flash_mla.flash_mla_with_kvcache,
            *(case.q, case.k_cache, None, None, 512, meta, num_splits),
            indices=case.indices,
        )
        assert_results(got, case.reference())
        assert meta.have_initialized
        meta.tile_scheduler_metadata, meta.num_splits = flash_mla.get_mla_decoding_metadata(
            None, 64, 1, topk=case.K, is_fp8_kvcache=True
        )


@dataclass
class OtherSchedule:
    """FlashMLASchedMeta as FlashMLA and vLLM's copy of it define the class."""

    have_initialized: bool = False
    config: object = None


SCHEDULES = {
    "of this module": (flash_mla.FlashMLASchedMeta(), None),
    "of another package": (OtherSchedule(), None),
    "none": (None, None),
    "the older tensors": (np.zeros((1, 8), np.int32), np.zeros(4, np.int32)),
    "the older tensor alone": (np.zeros((1, 8), np.int32), None),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("s_q", [1, 2])
def test_decode_writes_out_beside_any_schedule(schedule, s_q, writable_arrays):
    """vLLM's and SGLang's engines pass a slice of their layer's output."""
    case = Decode(s_q=s_q, H=16, K=64, topk_length=True, sink=True)
    arrays, (meta, num_splits) = writable_arrays, SCHEDULES[schedule]
    want = case.run(arrays)
    q, cache, indices = (arrays.put(x) for x in (case.q, case.k_cache, case.indices))
    options = {name: arrays.put(x) for name, x in case.options.items()}
    buffer = arrays.put(np.full((case.b * s_q + 2, 16, 512), 7, ref.BF16))
    out = buffer[1:-1].reshape(case.b, s_q, 16, 512)
    meta, num_splits = arrays.put(meta), arrays.put(num_splits)
    got, lse = flash_mla.flash_mla_with_kvcache(
        q, cache, None, None, 512, meta, num_splits, indices=indices, out=out, **options
    )
    assert got is out
    assert_same_bits(arrays.get(out), want[0])
    assert_same_bits(arrays.get(lse), want[1])
    whole = arrays.get(buffer)
    assert_same_bits(whole[1:-1], want[0].reshape(-1, 16, 512))
    assert (whole[[0, -1]] == 7).all()
    if isinstance(meta, OtherSchedule):
        assert meta == OtherSchedule(), "another package plans by its own object"


@pytest.mark.parametrize("heads", [16, 24])
def test_prefill_writes_out(heads, writable_arrays):
    """Of `heads` heads of the buffer, the call writes the first 16."""
    case, arrays = Prefill(H=16), writable_arrays
    want = case.run(arrays)
    buffer = arrays.put(np.full((case.T + 2, heads, 512), 7, ref.BF16))
    out = buffer[1:-1, :16]
    args = (arrays.put(x) for x in (case.q, case.kv, case.indices))
    got, *statistics = flash_mla.flash_mla_sparse_fwd(*args, case.sm_scale, out=out)
    assert got is out
    whole = arrays.get(buffer)
    assert_same_bits(whole[1:-1, :16], want[0])
    assert (whole[[0, -1]] == 7).all()
    assert (whole[:, 16:] == 7).all()
    for x, y in zip(statistics, want[1:], strict=True):
        assert_same_bits(arrays.get(x), y)


@pytest.mark.parametrize("b_and_s_q", [(1, 4), (4, 1), (2, 2)])
def test_out_may_have_gaps_that_rows_allow(b_and_s_q, writable_arrays):
    """Heads of a wider buffer, and a batch or a sequence of one with any other stride."""
    case, arrays = Decode(*b_and_s_q, H=16, K=64), writable_arrays
    want = case.run(arrays)
    b, s_q = b_and_s_q
    buffer = arrays.put(np.full((b, s_q + (1 in b_and_s_q), 24, 512), 7, ref.BF16))
    out = buffer[:, :s_q, 8:]
    got, _ = flash_mla.flash_mla_with_kvcache(
        *(arrays.put(x) for x in (case.q, case.k_cache)), None, None, 512, None,
        indices=arrays.put(case.indices), out=out,
    )  # fmt: skip
    assert got is out
    assert_same_bits(arrays.get(out), want[0])
    assert (arrays.get(buffer)[:, :, :8] == 7).all()


@pytest.mark.jax
def test_out_of_jax_is_refused():
    """Its arrays cannot be written."""
    jax, case = Arrays("jax"), Decode(H=16, K=64)
    with pytest.raises(BufferError, match="`out`"):
        case.run(jax, out=np.zeros((3, 2, 16, 512), ref.BF16))


def test_signatures_take_the_package_s_arguments():
    check_signatures(flash_mla)


def check_signatures(module) -> None:
    """Arguments can be given by position and by name, in this order."""
    decode = (
        "q k_cache block_table cache_seqlens head_dim_v tile_scheduler_metadata num_splits "
        "softmax_scale causal is_fp8_kvcache indices attn_sink extra_k_cache "
        "extra_indices_in_kvcache topk_length extra_topk_length enable_batch_invariant use_legacy "
        "kv_format descale_q descale_k"
    )
    prefill = "q kv indices sm_scale d_v attn_sink topk_length use_legacy return_log2_lse"
    for name, want in ((DECODE, decode), (PREFILL, prefill)):
        parameters = inspect.signature(getattr(module, name)).parameters.values()
        by_position = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
        assert by_position == want.split()


@pytest.mark.torch
def test_parameters_are_taken_where_gradients_are_off(torch_arrays):
    """An nn.Parameter is refused while gradients are on, because no gradient would flow."""
    torch = importlib.import_module("torch")
    put = torch_arrays.put
    decode, prefill = Decode(H=16, sink=True), Prefill(H=16, sink=True)
    meta, _ = flash_mla.get_mla_metadata()

    def decoded():
        q = torch.nn.Parameter(put(decode.q))
        sink = torch.nn.Parameter(put(decode.options["attn_sink"]))
        return flash_mla.flash_mla_with_kvcache(
            q, put(decode.k_cache), None, None, 512, meta,
            indices=put(decode.indices), attn_sink=sink,
        )  # fmt: skip

    def prefilled():
        sink = torch.nn.Parameter(put(prefill.options["attn_sink"]))
        q, kv = (torch.nn.Parameter(put(x)) for x in (prefill.q, prefill.kv))
        return flash_mla.flash_mla_sparse_fwd(
            q, kv, put(prefill.indices), prefill.sm_scale, attn_sink=sink
        )

    for function, case in ((decoded, decode), (prefilled, prefill)):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                got = function()
            assert_results([torch_arrays.get(x) for x in got], case.reference())
        with pytest.raises(BufferError, match="gradients"):
            function()


# --- hot path ------------------------------------------------------------------------------------


@pytest.mark.torch
def test_one_query_per_request_copies_nothing(torch_arrays):
    """Between the caller's tensors and the kernel, torch makes nothing but views."""
    torch = importlib.import_module("torch")
    dispatch = importlib.import_module("torch.utils._python_dispatch")
    seen = []

    class Record(dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    def work() -> list[str]:
        quiet = ("view", "alias", "transpose", "expand", "empty", "detach")
        return [name for name in seen if not any(word in name for word in quiet)]

    put = torch_arrays.put
    decode = Decode(s_q=1, H=16, K=64, topk_length=True, sink=True, extra=True)
    options = {name: put(x) for name, x in decode.options.items()}
    q, cache, indices = put(decode.q), put(decode.k_cache), put(decode.indices)
    prefill = Prefill(H=16)
    strided = torch.zeros(prefill.S, 2, 576, dtype=torch.bfloat16, device=q.device)[:, 1:]
    others = put(prefill.q), strided, put(prefill.indices)
    meta, _ = flash_mla.get_mla_metadata()
    with Record():
        flash_mla.flash_mla_with_kvcache(
            q, cache, None, None, 512, meta, indices=indices, **options
        )
        flash_mla.flash_mla_sparse_fwd(*others, 0.04)
        assert seen
        assert work() == []
        q.clone()
        assert work(), "a copy is noticed"
