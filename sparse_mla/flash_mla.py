"""Drop-in for the `flash_mla` package: sparse MLA of DeepSeek-V3.2 and V4, dense decoding and dense
prefill.

    from sparse_mla import flash_mla                           was: import flash_mla
    from sparse_mla.flash_mla import flash_mla_with_kvcache    was: from flash_mla import ...

Signatures, shapes and results are those of FlashMLA: natural logarithms, lse +inf and max_logits
-inf for a query without keys. Its limits are gone where this library does not need them: there may
be 1 to 128 heads, any number of indices and any page size, and indices outside the cache count as
-1. A decode without indices attends to all keys of a request, which may have several KV heads.
docs/flash_mla.md describes every name.

Arrays are torch tensors, or arrays of any framework that gives them `shape`, `reshape` and
`swapaxes`: NumPy, cupy, jax. Everything runs on the caller's current stream and can be captured in
a graph. Leading dimensions are joined as views. The framework copies q and indices whose batch and
sequence strides do not join, and the lengths of a decode with more than one query per request.

>>> from sparse_mla import flash_mla
>>> flash_mla.has_legacy()
True
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from sparse_mla import _C, ops
from sparse_mla._compiled import names_integration
from sparse_mla._flash_arrays import (
    check_flag,
    check_scales,
    has_codes,
    is_array,
    join_out,
    join_queries,
    per_query,
    shape_of,
)
from sparse_mla._flash_paged import HEAD_DIM_V, decode_heads, has_heads
from sparse_mla._flash_varlen import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from sparse_mla._types import Array as Given
from sparse_mla._types import FlashFormat, KvFormat, Like, Result, overload
from sparse_mla.ops.projection import without_grad

__all__ = [
    "FlashMLASchedMeta",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_decoding_metadata",
    "get_mla_metadata",
    "has_legacy",
]

Array = Any


def _either(numbers: Iterable[int]) -> str:
    return " or ".join(map(str, numbers))


def __dir__() -> list[str]:
    """What tab completion offers."""
    return __all__


# FlashMLA's name of a cache format -> ours. For caches whose `kv_format` is left out, the first
# format with rows of their size is taken.
KV_FORMATS = {
    "V32": "fp8_ds_mla",
    "V4": "fp8_v4",
    "V41": "fp8_v41",
    "V41_FP4": "fp4_v41",
    "V32_NO_ROPE": "fp8_nope",
}
# Formats whose rows have become records since FlashMLA's older kernels -> their older pages.
LEGACY_KV_FORMATS = {"fp8_v41": "fp8_v41_split", "fp4_v41": "fp4_v41_split"}
LOG2_E = math.log2(math.e)

# Names of the operators in error texts.
DECODE = "flash_mla_with_kvcache"
PREFILL = "flash_mla_sparse_fwd"

# Our formats that are served here -> {last dimension of a cache: number of values in a key}.
_INDEX_HEAD_DIM = 128
_FORMATS = {
    name: rows for name, rows in _C.KV_FORMATS.items() if _INDEX_HEAD_DIM not in rows.values()
}
_BF16_ROWS = _FORMATS["bfloat16"]
_BYTE_ROWS = dict.fromkeys(row for name in KV_FORMATS.values() for row in _FORMATS[name])
_EXTRA_BYTE_ROWS = [row for name in _FORMATS if name.startswith("fp4") for row in _FORMATS[name]]
_HEAD_SIZES = {row: size for rows in _FORMATS.values() for row, size in rows.items()}
_HEAD_DIMS = sorted(set(_HEAD_SIZES.values()), reverse=True)
_SERVED = (
    "this library serves sparse MLA of DeepSeek-V3.2 and V4 and dense MLA, caches of "
    f"{_either(_BYTE_ROWS)} bytes or {_either(_BF16_ROWS)} bf16 or e4m3 a token"
)


# --- metadata ------------------------------------------------------------------------------------


@dataclass
class FlashMLASchedMeta:
    """The object that `get_mla_metadata` returns and every decode call takes.

    It plans nothing, because attention's schedule comes from shapes alone, at no cost. So one
    object serves any calls, shapes and lengths, also between graph replays. The fields exist for
    code that reads, resets or assigns them; this library does not read them.

    Attributes
    ----------
    have_initialized : bool
        Whether a decode call has taken this object.
    config, tile_scheduler_metadata, num_splits : object
        None, or what the caller assigned.

    Source: the class of this name in FlashMLA.

    Examples
    --------
    >>> from sparse_mla import flash_mla
    >>> flash_mla.FlashMLASchedMeta().have_initialized
    False
    """

    have_initialized: bool = False
    config: Any = None
    tile_scheduler_metadata: Any = None
    num_splits: Any = None


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """A new FlashMLASchedMeta, and None.

    Parameters
    ----------
    args, kwargs : object
        Arguments that older versions of FlashMLA take; not read.

    Returns
    -------
    (FlashMLASchedMeta, None): the first for `flash_mla_with_kvcache`.

    Examples
    --------
    >>> from sparse_mla import flash_mla
    >>> flash_mla.get_mla_metadata()[1] is None
    True
    """
    return FlashMLASchedMeta(), None


def get_mla_decoding_metadata(
    seqlens_k: Array,
    num_q_tokens_per_head_k: int,
    h_k: int,
    h_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
    use_legacy: bool = False,
) -> tuple[None, None]:
    """(None, None), to be assigned to a FlashMLASchedMeta: there is no schedule to plan ahead.

    Parameters
    ----------
    seqlens_k : [b] int32
        Not read, like all other parameters.
    num_q_tokens_per_head_k, h_k, h_q : int
    is_fp8_kvcache, use_legacy : bool
    topk : int, optional
        K; None for dense decoding.

    Returns
    -------
    (None, None).

    Raises
    ------
    TypeError
        A parameter without default is left out.

    Source: the signature is that of the wheel sgl-flash-mla 1.0.0.

    Examples
    --------
    >>> from sparse_mla import flash_mla
    >>> flash_mla.get_mla_decoding_metadata(None, 128, 1, topk=2048)
    (None, None)
    """
    return None, None


def has_legacy() -> bool:
    """Whether what FlashMLA calls legacy is served: the 656-byte cache, and older pages of V4.1.

    Returns
    -------
    bool: True.

    Examples
    --------
    >>> from sparse_mla import flash_mla
    >>> flash_mla.has_legacy()
    True
    """
    return True


# --- attention -----------------------------------------------------------------------------------


@names_integration("sparse_attention")
def flash_mla_with_kvcache(
    q: Like[Result],
    k_cache: Given,
    block_table: Given | None,
    cache_seqlens: Given | None,
    head_dim_v: int,
    tile_scheduler_metadata: object,
    num_splits: object = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool | None = None,
    indices: Given | None = None,
    attn_sink: Given | None = None,
    extra_k_cache: Given | None = None,
    extra_indices_in_kvcache: Given | None = None,
    topk_length: Given | None = None,
    extra_topk_length: Given | None = None,
    enable_batch_invariant: bool = False,
    use_legacy: bool = False,
    kv_format: FlashFormat | KvFormat | None = None,
    descale_q: Given | None = None,
    descale_k: Given | None = None,
    *,
    out: Result | None = None,
) -> tuple[Result, Result]:
    """Decoding: each query attends to the cached tokens that `indices` names, or without `indices`
    to all tokens of its request.

    Parameters
    ----------
    q : [b, s_q, H, 576] or [b, s_q, H, 512] bf16
        Each head has as many values as a key of the cache. Without `indices` fp16 is taken, too,
        and e4m3 beside a cache of e4m3 values.
    k_cache : [pages, block_size, 1, row] float8_e4m3fn, uint8 or int8
        Rows of 656 bytes for DeepSeek-V3.2, 584 for V4, 528 for V4.1, 576 or 512 for dense FP8.
        Pages may be any multiple of 16 bytes apart, of 8 for V4. [pages, block_size, 1, 576 or 512]
        bf16 is taken too, and without `indices` [pages, block_size, h_k, 576 or 512] of the dtype
        of q: head h reads key head h // (H / h_k), whose first 512 values are its values.
    block_table, cache_seqlens : [b, W] and [b] int32, or None
        The pages of each request, and its number of tokens with those of q. Not read with
        `indices`, which are slots already.
    head_dim_v : int
        512.
    tile_scheduler_metadata : object
        What `get_mla_metadata` returns, FlashMLA's own object, an older version's tensor or None.
        Not read. Of these, only a FlashMLASchedMeta of this module is told that a call took it.
    num_splits : None
        Beside an older version's tensor, that version's second tensor; not read.
    softmax_scale : float, optional
        When left out, (the head size of q) ** -0.5.
    causal : bool
        Without `indices`: whether a query sees no token behind its own; the last query is the
        request's last token. False with `indices`.
    is_fp8_kvcache : bool, optional
        Must agree with k_cache. When left out, k_cache decides.
    indices : [b, s_q, K] int32, optional
        Slots, page * block_size + offset. -1 and any slot outside the cache mean none. Left out,
        decoding is dense.
    attn_sink : [H] fp32, optional
        Multiplies out by 1 / (1 + exp(sink - lse)); lse is unchanged.
    extra_k_cache, extra_indices_in_kvcache : a cache and [b, s_q, K'] int32, optional
        A second cache and its indices: one softmax over both. Its keys have as many values as those
        of k_cache; its page size is free, and so is its format. It may be FP4, 288 bytes a token.
    topk_length, extra_topk_length : [b] int32, optional
        Columns in use, per request.
    enable_batch_invariant : bool
        Whether the bits of a query's result must not depend on the rest of the batch. If True, K is
        not split.
    use_legacy : bool
        Whether pages of V4.1 are those of FlashMLA's older kernels: the scales of all tokens behind
        their data. For other formats it means nothing.
    kv_format : "V32", "V32_NO_ROPE", "V4", "V41", "V41_FP4" or a name of this library, optional
        The format of each cache whose rows have that format's size. Other caches go by their size:
        656 bytes are V32, 584 are V4, 528 are V41 and 288 are V41_FP4.
    descale_q, descale_k : [1] fp32, optional
        The scales of q and k_cache, where both are e4m3 and decoding is dense: both, or None for 1.
    out : [b, s_q, H, 512] of the dtype of q, or bf16 where that is e4m3, optional
        Where the result is written. Its first two dimensions must join to one, which they do when
        b or s_q is 1; heads may be any distance apart.

    Returns
    -------
    out : [b, s_q, H, 512] of the dtype of q, or bf16 where that is e4m3
        The object given as `out`, or a new array.
    lse : [b, H, s_q] fp32
        Natural logarithm; +inf where a query has no keys, and out is 0 there.

    Raises
    ------
    TypeError, ValueError
        Scales beside other arrays, other head sizes and cache formats, and the errors of
        `sparse_mla.sparse_attention`, `sparse_mla.mla_attention` and `sparse_mla.paged_attention`.

    Source: the signature is that of FlashMLA and of the wheel sgl-flash-mla 1.0.0.

    Examples
    --------
    >>> import numpy as np, ml_dtypes
    >>> from sparse_mla import flash_mla
    >>> q, cache = np.ones((2, 1, 16, 576), ml_dtypes.bfloat16), np.zeros((4, 64, 1, 656), np.uint8)
    >>> slots = np.array([[[0, 65, -1]], [[-1, -1, -1]]], np.int32)
    >>> meta, _ = flash_mla.get_mla_metadata()
    >>> out, lse = flash_mla.flash_mla_with_kvcache(
    ...     q, cache, None, None, 512, meta, is_fp8_kvcache=True, indices=slots)
    >>> out.shape, lse.shape, np.exp(lse[:, 0, 0]).round(3).tolist()
    ((2, 1, 16, 512), (2, 16, 1), [2.0, inf])
    """
    op = DECODE
    batch, s_q, num_heads, head_dim = shape_of(op, "q", q, "[b, s_q, H, D]")
    _check_head_dims(op, "head_dim_v", head_dim, head_dim_v)
    if num_splits is not None and not is_array(tile_scheduler_metadata):
        raise ValueError(f"{op}: `num_splits` must be None, got {type(num_splits).__name__}")
    check_flag(op, "enable_batch_invariant", enable_batch_invariant)
    check_flag(op, "use_legacy", use_legacy)
    num_splits = 1 if enable_batch_invariant else 0
    softmax_scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    row = _check_cache(op, "k_cache", k_cache, head_dim, is_fp8_kvcache)
    is_dense_fp8 = indices is None and row in _BF16_ROWS and has_codes(k_cache) and has_codes(q)
    check_scales(op, is_dense_fp8, descale_q=descale_q, descale_k=descale_k)
    if indices is None:
        names = "extra_k_cache", "extra_indices_in_kvcache", "topk_length", "extra_topk_length"
        of_lists = extra_k_cache, extra_indices_in_kvcache, topk_length, extra_topk_length
        for name in (name for name, x in zip(names, of_lists, strict=True) if x is not None):
            raise ValueError(f"{op}: `{name}` must be None without `indices`, got an array")
        if isinstance(tile_scheduler_metadata, FlashMLASchedMeta):
            tile_scheduler_metadata.have_initialized = True
        options: dict[str, Any] = {
            "causal": causal,
            "attn_sink": without_grad(attn_sink),
            "softmax_scale": softmax_scale,
            "num_splits": num_splits,
            "out": out,
        }
        found = _find_formats(op, (row, None), kv_format, use_legacy)[0]
        if row is not None and has_heads(q, k_cache):
            return decode_heads(op, q, k_cache, block_table, cache_seqlens, **options)
        if descale_q is not None:
            options["q_scale"], options["kv_scale"] = map(without_grad, (descale_q, descale_k))
        rows = join_queries(without_grad(q))
        result, lse = ops._mla_attention_plus_inf(
            rows, k_cache, block_table, cache_seqlens, kv_format=found, **options
        )
        return result, lse.swapaxes(1, 2)
    if causal:
        raise ValueError(f"{op}: `causal` must be False with `indices`, got {causal!r}")
    extra_row = _check_cache(op, "extra_k_cache", extra_k_cache, head_dim, None)
    kv_formats = _find_formats(op, (row, extra_row), kv_format, use_legacy)
    extra_indices = extra_topk = None
    if extra_indices_in_kvcache is not None:
        name = "extra_indices_in_kvcache"
        extra_indices = _join_rows(op, name, extra_indices_in_kvcache, batch, s_q)
    if extra_topk_length is not None:
        extra_topk = per_query(op, "extra_topk_length", extra_topk_length, batch, s_q)
    if topk_length is not None:
        topk_length = per_query(op, "topk_length", topk_length, batch, s_q)
    rows = batch * s_q
    out_rows: Array = join_out(op, out, (batch, s_q, num_heads, HEAD_DIM_V))
    if isinstance(tile_scheduler_metadata, FlashMLASchedMeta):
        tile_scheduler_metadata.have_initialized = True
    result, lse = ops._attention_plus_inf(
        without_grad(q).reshape(rows, num_heads, head_dim),
        k_cache,
        _join_rows(op, "indices", indices, batch, s_q),
        topk_length=topk_length,
        attn_sink=without_grad(attn_sink),
        extra_kv_cache=extra_k_cache,
        extra_indices=extra_indices,
        extra_topk_length=extra_topk,
        softmax_scale=softmax_scale,
        num_splits=num_splits,
        kv_format=kv_formats[0],
        extra_kv_format=kv_formats[1],
        out=out_rows,
    )
    if out is None:
        out = result.reshape(batch, s_q, num_heads, HEAD_DIM_V)
    if s_q == 1:
        return out, lse.reshape(batch, num_heads, 1)
    return out, lse.reshape(batch, s_q, num_heads).swapaxes(1, 2)


@overload
def flash_mla_sparse_fwd(
    q: Like[Result],
    kv: Given,
    indices: Given,
    sm_scale: float,
    d_v: int = HEAD_DIM_V,
    attn_sink: Given | None = None,
    topk_length: Given | None = None,
    use_legacy: bool = False,
    return_log2_lse: Literal[True] | None = None,
    *,
    out: Result | None = None,
) -> tuple[Result, Result, Result]: ...
@overload
def flash_mla_sparse_fwd(
    q: Like[Result],
    kv: Given,
    indices: Given,
    sm_scale: float,
    d_v: int = HEAD_DIM_V,
    attn_sink: Given | None = None,
    topk_length: Given | None = None,
    use_legacy: bool = False,
    return_log2_lse: bool | None = None,
    *,
    out: Result | None = None,
) -> tuple[Result, Result | None, Result | None]: ...
@names_integration("sparse_attention")
def flash_mla_sparse_fwd(
    q: Like[Result],
    kv: Given,
    indices: Given,
    sm_scale: float,
    d_v: int = HEAD_DIM_V,
    attn_sink: Given | None = None,
    topk_length: Given | None = None,
    use_legacy: bool = False,
    return_log2_lse: bool | None = None,
    *,
    out: Result | None = None,
) -> tuple[Result, Result | None, Result | None]:
    """Sparse prefill: each query attends to the rows of `kv` that `indices` names.

    Parameters
    ----------
    q : [T, H, 576] or [T, H, 512] bf16
    kv : [S, 1, 576] or [S, 1, 512] bf16
        Rows may be any distance apart. [S, 1, 656] and [S, 1, 528] bytes of an FP8 cache are taken
        too, as V32 and V41.
    indices : [T, 1, K] int32
        Rows of kv; negative or at least S = none.
    sm_scale : float
    d_v : int
        512.
    attn_sink : [H] fp32, optional
        Multiplies out by 1 / (1 + exp(sink - lse)); lse and max_logits are unchanged.
    topk_length : [T] int32, optional
        Columns in use, per query.
    use_legacy : bool
        Not read: there is one set of kernels.
    return_log2_lse : bool, optional
        None: max_logits and lse are natural logarithms. False: both are None. True: both are in
        base 2, at the price of a multiplication of each.
    out : [T, H, 512] bf16, optional
        Where the result is written. Tokens and heads may be any distance apart.

    Returns
    -------
    out : [T, H, 512] bf16
        The object given as `out`, or a new array.
    max_logits : [T, H] fp32, or None
        The largest sm_scale * q . k; -inf where a query has no keys.
    lse : [T, H] fp32, or None
        +inf where a query has no keys, and out is 0 there.

    Raises
    ------
    TypeError, ValueError
        Other head sizes, more than one key head, and the errors of `sparse_mla.sparse_attention`.

    Source: the signature is that of FlashMLA and of the wheel sgl-flash-mla 1.0.0.

    Examples
    --------
    >>> import numpy as np, ml_dtypes
    >>> from sparse_mla import flash_mla
    >>> q, kv = (np.ones(shape, ml_dtypes.bfloat16) for shape in ((1, 16, 576), (9, 1, 576)))
    >>> rows = np.array([[[0, 3, -1]]], np.int32)
    >>> out, max_logits, lse = flash_mla.flash_mla_sparse_fwd(q, kv, rows, 1 / 576)
    >>> out.shape, max_logits[0, 0].item(), round(lse[0, 0].item(), 4)
    ((1, 16, 512), 1.0, 1.6931)
    """
    op = PREFILL
    num_tokens, num_heads, head_dim = shape_of(op, "q", q, "[T, H, D]")
    _check_head_dims(op, "d_v", head_dim, d_v)
    num_rows, num_kv_heads, row = shape_of(op, "kv", kv, "[S, 1, D]")
    if num_kv_heads != 1:
        raise ValueError(f"{op}: `kv` must have one head, got {num_kv_heads}")
    _check_cache(op, "kv", kv, head_dim, None)
    kv_format, _ = _find_formats(op, (row, None), None, False)
    if kv_format in _C.SPLIT_KV_FORMATS:
        raise ValueError(
            f"{op}: `kv` must have rows that stand alone, unlike those of split pages, got {row} "
            "bytes a token"
        )
    check_flag(op, "use_legacy", use_legacy)
    join_out(op, out, (num_tokens, num_heads, HEAD_DIM_V))
    wants_statistics = return_log2_lse is None or bool(return_log2_lse)
    result, lse, *max_logits = ops._attention_plus_inf(
        without_grad(q),
        without_grad(kv).reshape(num_rows, row),
        _join_rows(op, "indices", indices, num_tokens, 1),
        topk_length=topk_length,
        attn_sink=without_grad(attn_sink),
        softmax_scale=sm_scale,
        kv_format=kv_format,
        return_max_logits=wants_statistics,
        out=out,
    )
    out = result if out is None else out
    if not wants_statistics:
        return out, None, None
    if return_log2_lse:
        return out, max_logits[0] * LOG2_E, lse * LOG2_E
    return out, max_logits[0], lse


# --- rules that the core cannot see, in FlashMLA's names -----------------------------------------


def _check_head_dims(op: str, v_name: str, head_dim: int, head_dim_v: int) -> None:
    if head_dim not in _HEAD_DIMS:
        dims = _either(_HEAD_DIMS)
        raise ValueError(f"{op}: `q` must have {dims} values a head, {_SERVED}, got {head_dim}")
    if head_dim_v != HEAD_DIM_V:
        raise ValueError(f"{op}: `{v_name}` must be 512, {_SERVED}, got {head_dim_v!r}")


def _check_cache(
    op: str, name: str, cache: Array, head_dim: int, is_fp8: bool | None
) -> int | None:
    """The size of a cache row, which must be served, have a key as wide as queries and fit is_fp8.
    None for no cache."""
    row = (getattr(cache, "shape", None) or (None,))[-1]
    if row is None:  # the core refuses what is no array at all
        return None
    taken = [
        row
        for row in (*_BYTE_ROWS, *_BF16_ROWS)
        if name == "extra_k_cache" or row not in _EXTRA_BYTE_ROWS
    ]
    if row not in taken:
        raise ValueError(
            f"{op}: `{name}` must have a last dimension of {_either(taken)}, {_SERVED}, got {row}"
        )
    wanted = _HEAD_SIZES[row]
    if head_dim != wanted:
        raise ValueError(
            f"{op}: `q` must have {wanted} values a head, as keys of `{name}` have, {_SERVED}, "
            f"got {head_dim}"
        )
    if is_fp8 is not None and bool(is_fp8) != (row in _BYTE_ROWS or has_codes(cache)):
        raise ValueError(
            f"{op}: `is_fp8_kvcache` must agree with a cache of {row} elements a token, "
            f"got {is_fp8!r}"
        )
    return row


def _find_formats(
    op: str, rows: tuple[int | None, ...], kv_format: str | None, use_legacy: bool
) -> list[str | None]:
    """Our formats of caches with rows of these sizes. None where the dtype decides."""
    given = [row for row in rows if row is not None]
    named = KV_FORMATS.get(kv_format or "", kv_format)
    if named is not None and named not in _FORMATS:
        rule = ", ".join(repr(name) for name in KV_FORMATS)
        raise ValueError(f"{op}: `kv_format` must be one of {rule} ({_SERVED}), got {kv_format!r}")
    if named is not None and given and not set(given) & set(_FORMATS[named]):
        raise ValueError(
            f"{op}: `kv_format` must be the format of a cache, which has {_either(given)} elements "
            f"a token, got {kv_format!r}, which has {_either(_FORMATS[named])}"
        )
    names = [named, *KV_FORMATS.values()] if named is not None else [*KV_FORMATS.values()]
    found = [next((name for name in names if row in _FORMATS[name]), None) for row in rows]
    if use_legacy and kv_format not in _FORMATS:
        found = [LEGACY_KV_FORMATS.get(name or "", name) for name in found]
    return found


def _join_rows(op: str, name: str, indices: Array, batch: int, s_q: int) -> Array:
    """[b, s_q, K] -> [b * s_q, K]. In prefill b is the number of tokens, and s_q is 1, one head."""
    shape = shape_of(op, name, indices, "[b, s_q, K]" if op == DECODE else "[T, 1, K]")
    if shape[0] != batch or shape[1] != s_q:
        raise ValueError(f"{op}: `{name}` must have shape [{batch}, {s_q}, K], got {list(shape)}")
    return indices.reshape(batch * s_q, shape[2])
