"""The drop-in for `flash_mla` over contiguous keys: flash_attn_varlen_func and its packed forms."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import reference as ref
from dense_cases import Mask
from flash_mla_cases import Arrays
from helpers import assert_same_bits, assert_within_bounds
from varlen_cases import Varlen

import sparse_mla
from sparse_mla import flash_mla

SIZES = [(192, 128), (128, 128), (64, 64)]


def run(arrays: Arrays, case: Varlen, **options) -> list[np.ndarray]:
    q, k, v, starts_q, starts_k = case.arguments()
    longest = max(case.query_lens, default=0), max(case.key_lens, default=0)
    common = {"softmax_scale": case.softmax_scale, "causal": case.mask.causal} | options
    return arrays.call(
        flash_mla.flash_attn_varlen_func, q, k, v, starts_q, starts_k, *longest, **common
    )


def make(dims=(192, 128), causal=True, **changes) -> Varlen:
    """Also a request with fewer keys than queries, one without keys, and an empty one."""
    lens = [5, 70, 9, 3, 0], [40, 70, 4, 0, 0]
    return Varlen(*lens, dims=dims, mask=Mask(causal=causal), **changes)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dims", SIZES)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_values(arrays, dims, kv_heads, causal):
    case = make(dims, causal, kv_heads=kv_heads)
    out, lse = run(arrays, case)
    assert (out.shape, lse.shape) == ((87, 4, dims[1]), (87, 4))
    assert_within_bounds(case.reference(), {"out": out, "lse": lse})
    assert np.isneginf(lse[-3:]).all()


def test_fp16(arrays):
    case = make(q_type="fp16", kv_type="fp16")
    out, lse = run(arrays, case)
    assert out.dtype == np.float16
    assert_within_bounds(case.reference(), {"out": out, "lse": lse})


def test_a_call_is_varlen_attention():
    """Bit for bit, with the scale that is left out; what is a hint or not read changes nothing."""
    numpy = Arrays("numpy")
    case = make()
    want = sparse_mla.varlen_attention(*case.arguments(), softmax_scale=192**-0.5, causal=True)
    for options in (
        {},
        {"deterministic": True},
        {"is_varlen": False},
        {"dropout_p": 0},
    ):
        got = run(numpy, case, softmax_scale=None, **options)
        for x, y in zip(got, want, strict=True):
            assert_same_bits(x, y, f"{options}")
    q, k, v, starts_q, starts_k = case.arguments()
    for longest in ((1, 1), (0, 0), (10**6, 10**6)):
        got = flash_mla.flash_attn_varlen_func(q, k, v, starts_q, starts_k, *longest, causal=True)
        for x, y in zip(got, want, strict=True):
            assert_same_bits(x, y, f"{longest}")


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("dims", SIZES)
def test_packed_arrays(arrays, dims, dtype):
    """Views of one array, with the bits of three."""
    lens = [5, 70, 0, 9]
    case = Varlen(lens, lens, dims=dims, q_type=dtype, kv_type=dtype, mask=Mask(causal=True))
    q, k, v, starts, _ = case.arguments()
    want = run(arrays, case, softmax_scale=None)
    options = {"causal": True}
    qkv = np.concatenate([q, k, v], -1)
    got = arrays.call(
        flash_mla.flash_attn_varlen_qkvpacked_func, qkv, starts, 70, dims[0], **options
    )
    for x, y in zip(got, want, strict=True):
        assert_same_bits(x, y, "qkv")
    kv = np.concatenate([k, v], -1)
    got = arrays.call(
        *(flash_mla.flash_attn_varlen_kvpacked_func, q, kv, starts, starts, 70, 70, dims[0]),
        **options,
    )
    for x, y in zip(got, want, strict=True):
        assert_same_bits(x, y, "kv")


@pytest.mark.torch
def test_parameters(torch_arrays):
    """As the neighbours: there are no derivatives, so parameters need torch.no_grad()."""
    import torch

    case = make()
    arguments = [torch_arrays.put(x) for x in case.arguments()]
    parameters = [torch.nn.Parameter(x) for x in arguments[:3]]
    with torch.no_grad():
        got = flash_mla.flash_attn_varlen_func(*parameters, *arguments[3:], 70, 70, causal=True)
    want = flash_mla.flash_attn_varlen_func(*arguments, 70, 70, causal=True)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    with pytest.raises(BufferError, match=r"^varlen_attention: `q` must"):
        flash_mla.flash_attn_varlen_func(*parameters, *arguments[3:], 70, 70, causal=True)


FUNCTIONS = {
    "flash_attn_varlen_func": 3 * (np.zeros((4, 2, 16), ref.BF16),) + 2 * (np.array([0, 4]),),
    "flash_attn_varlen_qkvpacked_func": (np.zeros((4, 2, 48), ref.BF16), np.array([0, 4])),
    "flash_attn_varlen_kvpacked_func": (
        *(np.zeros((4, 2, 16), ref.BF16), np.zeros((4, 2, 32), ref.BF16)),
        *2 * (np.array([0, 4]),),
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_refused(name):
    arrays = [x.astype(np.int32) if x.dtype == np.int64 else x for x in FUNCTIONS[name]]
    sizes = {p: 4 for p in inspect.signature(getattr(flash_mla, name)).parameters if "max" in p}
    sizes |= {"head_dim_qk": 16} if "packed" in name else {}
    function = getattr(flash_mla, name)
    assert function(*arrays, **sizes)[0].shape == (4, 2, 16)
    with pytest.raises(ValueError, match=rf"^{name}: `dropout_p` must be 0, .* got 0\.1$"):
        function(*arrays, **sizes, dropout_p=0.1)
    with pytest.raises(TypeError, match=rf"^{name}: `(q|qkv)` must be an array"):
        function("x", *arrays[1:], **sizes)
    with pytest.raises(ValueError, match=rf"^{name}: `(q|qkv)` must have shape"):
        function(arrays[0][0], *arrays[1:], **sizes)
    with pytest.raises((TypeError, ValueError), match=r"^varlen_attention: `q` must"):
        function(arrays[0].astype(np.float32), *arrays[1:], **sizes)
    for size in (-16, 0, 33, 16.0) if "packed" in name else ():
        with pytest.raises((TypeError, ValueError), match=rf"^{name}: `head_dim_qk` must be"):
            function(*arrays, **(sizes | {"head_dim_qk": size}))


def test_signatures_are_those_of_flash_mla():
    rest = "dropout_p=0.0, softmax_scale=None, causal=False, deterministic=False, is_varlen=True"
    for name, first in {
        "flash_attn_varlen_func": "q, k, v, cu_seqlens_qo, cu_seqlens_kv, max_seqlen_qo, "
        "max_seqlen_kv",
        "flash_attn_varlen_qkvpacked_func": "qkv, cu_seqlens, max_seqlen, head_dim_qk",
        "flash_attn_varlen_kvpacked_func": "q, kv, cu_seqlens_qo, cu_seqlens_kv, max_seqlen_qo, "
        "max_seqlen_kv, head_dim_qk",
    }.items():
        parameters = inspect.signature(getattr(flash_mla, name)).parameters.values()
        bare = [p.replace(annotation=p.empty) for p in parameters]
        assert ", ".join(map(str, bare)) == f"{first}, {rest}"
        assert name in flash_mla.__all__
