"""sparse_mla.flash_mla: calls as of the package flash_mla, judged by fp64 and its tolerances.

With SMLA_DEVICE=cuda torch's arrays are on the GPU. test_gpu_flash_mla.py runs the same code
through that package, too.
"""

import importlib
import inspect
import os
from dataclasses import dataclass

import cases
import numpy as np
import pytest
import reference as ref
from helpers import (
    ALL_FRAMEWORKS,
    assert_error_text,
    assert_same_bits,
    find_framework,
    with_marks,
)

from sparse_mla import flash_mla

ON_GPU = os.environ.get("SMLA_DEVICE") == "cuda"
DECODE, PREFILL = "flash_mla_with_kvcache", "flash_mla_sparse_fwd"


# --- arrays --------------------------------------------------------------------------------------


class Arrays:
    """Moves NumPy arrays to a framework, on the device under test, and back."""

    def __init__(self, name: str) -> None:
        self.framework = find_framework(name)
        self.is_torch = name == "torch"

    def put(self, x):
        if not isinstance(x, np.ndarray) or self.framework.name == "numpy":
            return x  # already there, with its strides
        x = self.framework.put(np.ascontiguousarray(x))
        return x.to("cuda") if self.is_torch and ON_GPU else x

    def get(self, x) -> np.ndarray:
        return self.framework.get(x.cpu() if self.is_torch else x)

    def call(self, function, *args, **kwargs) -> list[np.ndarray]:
        args = [self.put(x) for x in args]
        kwargs = {name: self.put(x) for name, x in kwargs.items()}
        return [self.get(x) for x in function(*args, **kwargs)]


@pytest.fixture(params=ALL_FRAMEWORKS)
def arrays(request) -> Arrays:
    return Arrays(request.param)


@pytest.fixture(params=with_marks("numpy", "torch"))
def writable_arrays(request) -> Arrays:
    return Arrays(request.param)


@pytest.fixture
def torch_arrays() -> Arrays:
    return Arrays("torch")


# --- inputs --------------------------------------------------------------------------------------


def peer_rows(rng, count: int, fmt: str) -> np.ndarray:
    """Cache rows as flash_mla's tests make them: N(0, 1) / 10, scales that are powers of two."""
    bits = ref.bf16_encode((rng.normal(0, 1, (count, 576)) / 10).astype(np.float32))
    if fmt == "bf16":
        return bits.view(ref.BF16)
    rows = ref.quantize_rows(bits[:, :512], bits[:, 512:])
    scales = rows[:, 512:528].view(np.float32)
    exact = np.exp2(np.ceil(np.log2(scales)))
    value = ref.bf16_decode(bits[:, :512]).reshape(count, 4, 128) / exact[..., None]
    rows[:, :512] = ref.e4m3_encode(value).reshape(count, 512)
    scales[:] = exact
    return rows


def peer_indices(rng, shape, num_slots: int) -> np.ndarray:
    indices = rng.integers(0, num_slots, shape).astype(np.int32)
    indices[rng.random(shape) < 0.1] = -1
    return indices


@dataclass
class Decode:
    """A decode call; `reference` returns out [b, s_q, H, 512] and lse [b, H, s_q]."""

    b: int = 3
    s_q: int = 2
    H: int = 64
    K: int = 128
    pages: int = 7
    block_size: int = 64
    sink: bool = False
    topk_length: bool = False
    extra: bool = False
    fmt: str = "fp8"
    softmax_scale: float | None = None

    def __post_init__(self) -> None:
        rng = np.random.default_rng([self.b, self.s_q, self.H, self.K])
        self.q = cases.random_bf16(rng, self.b, self.s_q, self.H, 576, std=0.1)
        rows = peer_rows(rng, self.pages * self.block_size, self.fmt)
        self.k_cache = rows.reshape(self.pages, self.block_size, 1, -1)
        shape = (self.b, self.s_q, self.K)
        self.indices = peer_indices(rng, shape, len(rows))
        self.options: dict = {}
        if self.sink:
            sink = rng.normal(0, 3, self.H).astype(np.float32)
            sink[: min(self.H, 2)] = [np.inf, -np.inf][: self.H]
            self.options["attn_sink"] = sink
        if self.topk_length:
            length = rng.integers(0, self.K + 1, self.b).astype(np.int32)
            length[0] = 0
            self.options["topk_length"] = length
        if self.extra:
            extra = peer_rows(rng, 45, "fp8")
            self.options["extra_k_cache"] = extra.reshape(5, 9, 1, 656)
            self.options["extra_indices_in_kvcache"] = peer_indices(rng, (*shape[:2], 64), 45)
            length = rng.integers(0, 65, self.b).astype(np.int32)
            self.options["extra_topk_length"] = length
        if self.softmax_scale is not None:
            self.options["softmax_scale"] = self.softmax_scale

    def run(self, arrays: Arrays, module=flash_mla, **changes) -> list[np.ndarray]:
        meta, num_splits = module.get_mla_metadata()
        options = {"is_fp8_kvcache": self.fmt == "fp8", "indices": self.indices} | self.options
        q, k_cache = (changes.pop(name, getattr(self, name)) for name in ("q", "k_cache"))
        return arrays.call(
            getattr(module, DECODE),
            *(q, k_cache, None, None, 512, meta, num_splits),
            **(options | {"use_legacy": True} | changes),
        )

    def reference(self) -> tuple[np.ndarray, np.ndarray]:
        per_query = lambda x: None if x is None else np.repeat(x, self.s_q)  # noqa: E731
        rows = self.b * self.s_q
        flat = lambda x: None if x is None else x.reshape(rows, x.shape[-1])  # noqa: E731
        want = ref.attention(
            self.q.reshape(-1, self.H, 576),
            self.k_cache,
            flat(self.indices),
            softmax_scale=576**-0.5 if self.softmax_scale is None else self.softmax_scale,
            topk_length=per_query(self.options.get("topk_length")),
            attn_sink=self.options.get("attn_sink"),
            extra_kv=self.options.get("extra_k_cache"),
            extra_indices=flat(self.options.get("extra_indices_in_kvcache")),
            extra_topk_length=per_query(self.options.get("extra_topk_length")),
        )
        lse = np.where(np.isneginf(want.lse), np.inf, want.lse)
        shape = (self.b, self.s_q, self.H)
        return want.out.reshape(*shape, 512), lse.reshape(shape).swapaxes(1, 2)


@dataclass
class Prefill:
    """A prefill call; `reference` returns out [T, H, 512], max_logits [T, H] and lse [T, H]."""

    T: int = 5
    H: int = 64
    S: int = 200
    K: int = 128
    sink: bool = False
    topk_length: bool = False
    sm_scale: float = 576**-0.5
    d_qk: int = 576

    def __post_init__(self) -> None:
        rng = np.random.default_rng([self.T, self.H, self.S, self.K])
        self.q = cases.random_bf16(rng, self.T, self.H, self.d_qk, std=0.1)
        self.kv = peer_rows(rng, self.S, "bf16")[:, None, : self.d_qk]
        self.indices = peer_indices(rng, (self.T, 1, self.K), self.S)
        self.indices[self.indices == 0] = self.S + 3  # "numbers >= s_kv" are no keys, either
        self.options: dict = {}
        if self.sink:
            self.options["attn_sink"] = rng.normal(0, 3, self.H).astype(np.float32)
        if self.topk_length:
            length = rng.integers(0, self.K + 1, self.T).astype(np.int32)
            length[:1] = 0
            self.options["topk_length"] = length

    def run(self, arrays: Arrays, module=flash_mla, **changes) -> list[np.ndarray]:
        q, kv = (changes.pop(name, getattr(self, name)) for name in ("q", "kv"))
        indices = changes.pop("indices", self.indices)
        options = self.options | {"use_legacy": True} | changes
        return arrays.call(getattr(module, PREFILL), q, kv, indices, self.sm_scale, **options)

    def reference(self) -> tuple[np.ndarray, ...]:
        options = {"softmax_scale": self.sm_scale} | self.options
        want = ref.attention(self.q, self.kv[:, 0], self.indices[:, 0], **options)
        lse = np.where(np.isneginf(want.lse), np.inf, want.lse)
        return want.out, want.max_logits, lse


def assert_close(name: str, got, want, absolute: float, relative: float) -> None:
    """The rule of flash_mla's tests: the same infinities, and errors and cosine within bounds."""
    got, want = (ref.to_f32(x).astype(np.float64) for x in (got, np.asarray(want)))
    assert got.shape == want.shape, name
    infinite = np.isinf(want)
    assert np.array_equal(got[infinite], want[infinite]), f"{name}: infinities"
    got, want = got[~infinite], want[~infinite]
    assert np.isfinite(got).all(), f"{name}: not finite"
    excess = np.abs(got - want) - (absolute + relative * np.abs(want))
    assert excess.max(initial=0) <= 0, f"{name}: {excess.max()} beyond the tolerance"
    size = (got * got + want * want).sum()
    cosine = 2 * (got * want).sum() / size if size else 1
    assert abs(1 - cosine) <= 5e-6, f"{name}: cosine difference {1 - cosine}"


def assert_results(got, want) -> None:
    """Checks (out, *statistics), the results of either function."""
    assert len(got) == len(want)
    assert got[0].dtype == ref.BF16
    assert_close("out", got[0], want[0], 1e-3, 2.01 / 128)
    for i, (a, b) in enumerate(zip(got[1:], want[1:], strict=True)):
        assert a.dtype == np.float32
        assert_close(f"statistic {i}", a, b, 1e-6, 8.01 / 65536)


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
        named = {"extra_k_cache": "extra_kv"}.get(name, name)  # the core's errors pass through
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


# --- refusals ------------------------------------------------------------------------------------


def zeros(*shape, dtype=ref.BF16) -> np.ndarray:
    return np.zeros(shape, dtype)


REFUSED_DECODES = {
    "dense, two KV heads": (
        {"indices": None, "k_cache": zeros(2, 64, 2, 576)}, ValueError, "q",
    ),
    "dense, fp16": (
        {"indices": None, "q": zeros(3, 2, 16, 576, dtype=np.float16)}, ValueError, "q",
    ),
    "dense, lengths of lists": (
        {"indices": None, "topk_length": zeros(3, dtype=np.int32)}, ValueError, "topk_length",
    ),
    "dense, extra cache": (
        {"indices": None, "extra_k_cache": zeros(2, 4, 1, 576)}, ValueError, "extra_k_cache",
    ),
    "causal": ({"causal": True}, ValueError, "causal"),
    "old splits": ({"num_splits": zeros(4)}, ValueError, "num_splits"),
    "splits alone": (
        {"tile_scheduler_metadata": None, "num_splits": zeros(4)}, ValueError, "num_splits",
    ),
    "out in a flag's place": (
        {"enable_batch_invariant": zeros(3, 2, 16, 512)}, TypeError, "enable_batch_invariant",
    ),
    "out in another's": ({"use_legacy": zeros(3, 2, 16, 512)}, TypeError, "use_legacy"),
    "out of rank 3": ({"out": zeros(6, 16, 512)}, ValueError, "out"),
    "out of more heads": ({"out": zeros(3, 2, 17, 512)}, ValueError, "out"),
    "out of keys' size": ({"out": zeros(3, 2, 16, 576)}, ValueError, "out"),
    "out turned": ({"out": zeros(2, 3, 16, 512)}, ValueError, "out"),
    "out with a gap": ({"out": zeros(3, 3, 16, 512)[:, 1:]}, ValueError, "out"),
    "out is a list": ({"out": [0]}, TypeError, "out"),
    "dense FP8": ({"descale_q": zeros(1)}, ValueError, "descale_q"),
    "v of 64": ({"head_dim_v": 64}, ValueError, "head_dim_v"),
    "V4 queries": ({"q": zeros(3, 2, 16, 512)}, ValueError, "q"),
    "V4 cache": ({"k_cache": zeros(2, 64, 1, 584, dtype=np.uint8)}, ValueError, "q"),
    "no format's cache": ({"k_cache": zeros(2, 64, 1, 640, dtype=np.uint8)}, ValueError, "k_cache"),
    "V4 format": ({"kv_format": "V4"}, ValueError, "kv_format"),
    "bf16 of FP8": ({"is_fp8_kvcache": False}, ValueError, "is_fp8_kvcache"),
    "FP8 of bf16": (
        {"k_cache": zeros(2, 64, 1, 576), "is_fp8_kvcache": True}, ValueError, "is_fp8_kvcache",
    ),
    "q of rank 3": ({"q": zeros(6, 16, 576)}, ValueError, "q"),
    "q is a list": ({"q": [1, 2]}, TypeError, "q"),
    "indices of rank 2": ({"indices": zeros(6, 64, dtype=np.int32)}, ValueError, "indices"),
    "indices turned": ({"indices": zeros(2, 3, 64, dtype=np.int32)}, ValueError, "indices"),
    "lengths per query": ({"topk_length": zeros(6, dtype=np.int32)}, ValueError, "topk_length"),
    "extra lengths": (
        {"extra_topk_length": zeros(1, dtype=np.int32)}, ValueError, "extra_topk_length",
    ),
    "extra V4 cache": (
        {"extra_k_cache": zeros(2, 4, 1, 288, dtype=np.uint8)}, ValueError, "q",
    ),
    "extra indices": (
        {"extra_indices_in_kvcache": zeros(3, 64, dtype=np.int32)},
        ValueError,
        "extra_indices_in_kvcache",
    ),
}  # fmt: skip
REFUSED_PREFILLS = {
    "V4 queries": ({"q": zeros(5, 16, 512)}, ValueError, "q"),
    "q of rank 4": ({"q": zeros(5, 1, 16, 576)}, ValueError, "q"),
    "v of 576": ({"d_v": 576}, ValueError, "d_v"),
    "two key heads": ({"kv": zeros(9, 2, 576)}, ValueError, "kv"),
    "flat keys": ({"kv": zeros(9, 576)}, ValueError, "kv"),
    "keys of no format": ({"kv": zeros(9, 1, 448)}, ValueError, "kv"),
    "keys without RoPE": ({"kv": zeros(9, 1, 512)}, ValueError, "q"),
    "flat indices": ({"indices": zeros(5, 64, dtype=np.int32)}, ValueError, "indices"),
    "other tokens": ({"indices": zeros(4, 1, 64, dtype=np.int32)}, ValueError, "indices"),
    "two index heads": ({"indices": zeros(5, 2, 64, dtype=np.int32)}, ValueError, "indices"),
    "out in a flag's place": ({"use_legacy": zeros(5, 16, 512)}, TypeError, "use_legacy"),
    "out of rank 4": ({"out": zeros(5, 1, 16, 512)}, ValueError, "out"),
    "out of more tokens": ({"out": zeros(6, 16, 512)}, ValueError, "out"),
    "out of more heads": ({"out": zeros(5, 17, 512)}, ValueError, "out"),
    "out is a list": ({"out": [0]}, TypeError, "out"),
}


@pytest.mark.parametrize("name", REFUSED_DECODES)
def test_refused_decode(name):
    changes, error, argument = REFUSED_DECODES[name]
    case = Decode(H=16, K=64)
    arguments = {
        "q": case.q,
        "k_cache": case.k_cache,
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": 512,
        "tile_scheduler_metadata": flash_mla.get_mla_metadata()[0],
        "indices": case.indices,
    }
    with pytest.raises(error) as caught:
        flash_mla.flash_mla_with_kvcache(**(arguments | changes))
    assert_error_text(caught.value, DECODE, [argument])


@pytest.mark.parametrize("name", REFUSED_PREFILLS)
def test_refused_prefill(name):
    changes, error, argument = REFUSED_PREFILLS[name]
    case = Prefill(H=16, K=64)
    arguments = {"q": case.q, "kv": case.kv, "indices": case.indices, "sm_scale": 0.04}
    with pytest.raises(error) as caught:
        flash_mla.flash_mla_sparse_fwd(**(arguments | changes))
    assert_error_text(caught.value, PREFILL, [argument])


@pytest.mark.parametrize("what", ["two heads", "q", "k_cache", "descale_q"])
def test_refusals_say_what_is_served(what):
    names = {
        "two heads": "dense, two KV heads",
        "q": "V4 queries",
        "k_cache": "no format's cache",
        "descale_q": "dense FP8",
    }
    changes, error, _ = REFUSED_DECODES[names[what]]
    case = Decode(H=16, K=64)
    meta, _ = flash_mla.get_mla_metadata()
    arguments = {"indices": case.indices} | changes
    q, k_cache = arguments.pop("q", case.q), arguments.pop("k_cache", case.k_cache)
    with pytest.raises(error, match=r"sparse MLA of DeepSeek-V3\.2"):
        flash_mla.flash_mla_with_kvcache(q, k_cache, None, None, 512, meta, **arguments)


def test_dense_decoding_needs_no_metadata():
    assert flash_mla.get_mla_decoding_metadata(None, 128, 1) == (None, None)


def test_the_core_s_errors_pass_through(arrays):
    case = Decode(H=16, K=64)
    with pytest.raises(TypeError, match="indices"):
        case.run(arrays, indices=case.indices.astype(np.float32))
    with pytest.raises(ValueError, match="128 heads"):
        Decode(H=129, K=64, b=1).run(arrays)


def test_the_core_checks_out():
    numpy, decode, prefill = Arrays("numpy"), Decode(H=16, K=64), Prefill(H=16, K=64)
    for case, shape in ((decode, (3, 2, 16, 512)), (prefill, (prefill.T, 16, 512))):
        for dtype in (np.float32, np.float16, np.uint16):
            with pytest.raises(TypeError, match="`out` must be bfloat16, got "):
                case.run(numpy, out=zeros(*shape, dtype=dtype))
        read_only = zeros(*shape)
        read_only.flags.writeable = False
        with pytest.raises(BufferError, match="`out` must be writable"):
            case.run(numpy, out=read_only)
        with pytest.raises(ValueError, match="`out` must not overlap `q`"):
            case.run(numpy, out=case.q[..., :512])
