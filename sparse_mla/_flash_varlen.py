"""The functions of the drop-in for `flash_mla` over contiguous keys: dense prefill."""

from __future__ import annotations

from typing import Any

from sparse_mla import ops
from sparse_mla._compiled import names_integration
from sparse_mla._flash_arrays import default_scale, shape_of
from sparse_mla._types import Array as Given
from sparse_mla._types import Like, Result
from sparse_mla.ops.projection import without_grad
from sparse_mla.steps.common import check_int


def _attend(
    op: str,
    q: Any,
    k: Any,
    v: Any,
    *,
    starts: tuple[Any, Any],
    longest: tuple[int, int],
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
) -> tuple[Any, Any]:
    """One call of varlen_attention by FlashMLA's arguments."""
    _, _, head_dim = shape_of(op, "q", q, "[T, H, D]")
    if dropout_p != 0:
        raise ValueError(f"{op}: `dropout_p` must be 0, there is no dropout here, got {dropout_p}")
    return ops.varlen_attention(
        without_grad(q),
        without_grad(k),
        without_grad(v),
        starts[0],
        starts[1],
        softmax_scale=default_scale(head_dim) if softmax_scale is None else softmax_scale,
        causal=causal,
        max_seqlen_q=longest[0],
        max_seqlen_k=longest[1],
    )


@names_integration("varlen_attention")
def flash_attn_varlen_func(
    q: Like[Result],
    k: Given,
    v: Given,
    cu_seqlens_qo: Given,
    cu_seqlens_kv: Given,
    max_seqlen_qo: int,
    max_seqlen_kv: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
) -> tuple[Result, Result]:
    """Dense prefill: multi-head attention of ragged requests to contiguous keys and values.

    Parameters
    ----------
    q : [T, H, D] bf16 or fp16
    k, v : [S, Hk, D] and [S, Hk, Dv], the dtype of q
        Query head h reads KV head h // (H / Hk). D and Dv are multiples of 8, up to 576 and 512.
    cu_seqlens_qo, cu_seqlens_kv : [b + 1] int32
        Where the queries and the keys of each request start, then how many there are.
    max_seqlen_qo, max_seqlen_kv : int
        Hints for the schedule, which change no result.
    dropout_p : float
        0: there is no dropout.
    softmax_scale : float, optional
        When left out, D ** -0.5.
    causal : bool
        Whether a query sees no key behind its own; the last query is at the last key.
    deterministic, is_varlen : bool
        Not read: results are always deterministic, and lengths may always differ.

    Returns
    -------
    out : [T, H, Dv], the dtype of q
    lse : [T, H] fp32
        Natural logarithm; -inf for a query without keys, and out is 0 there.

    Raises
    ------
    TypeError, ValueError
        Dropout, and the errors of `sparse_mla.varlen_attention`.

    Source: the signature is that of FlashMLA. It has gradients there, and none here.

    Examples
    --------
    >>> import numpy as np, ml_dtypes
    >>> from sparse_mla import flash_mla
    >>> q, k, v = (np.ones((3, 2, n), ml_dtypes.bfloat16) for n in (192, 192, 128))
    >>> starts = np.array([0, 1, 3], np.int32)
    >>> out, lse = flash_mla.flash_attn_varlen_func(q, k, v, starts, starts, 2, 2, causal=True)
    >>> out.shape, (lse[:, 0] - 192**0.5).round(3).tolist()
    ((3, 2, 128), [0.0, 0.0, 0.6930000185966492])
    """
    return _attend(
        "flash_attn_varlen_func",
        q,
        k,
        v,
        starts=(cu_seqlens_qo, cu_seqlens_kv),
        longest=(max_seqlen_qo, max_seqlen_kv),
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
    )


@names_integration("varlen_attention")
def flash_attn_varlen_qkvpacked_func(
    qkv: Like[Result],
    cu_seqlens: Given,
    max_seqlen: int,
    head_dim_qk: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
) -> tuple[Result, Result]:
    """`flash_attn_varlen_func` of queries, keys and values that are parts of one array.

    Parameters
    ----------
    qkv : [T, H, 2 * head_dim_qk + Dv] bf16 or fp16
        Read in place: queries, keys, then values of each head.
    cu_seqlens, max_seqlen : [b + 1] int32, and int
        Those of queries and of keys.
    head_dim_qk : int
    dropout_p, softmax_scale, causal, deterministic, is_varlen : object
        As in `flash_attn_varlen_func`.

    Returns
    -------
    out : [T, H, Dv], the dtype of qkv
    lse : [T, H] fp32

    Raises
    ------
    TypeError, ValueError
        As `flash_attn_varlen_func`.

    Source: the signature is that of FlashMLA.

    Examples
    --------
    >>> import numpy as np, ml_dtypes
    >>> from sparse_mla import flash_mla
    >>> qkv, starts = np.ones((3, 2, 40), ml_dtypes.bfloat16), np.array([0, 3], np.int32)
    >>> flash_mla.flash_attn_varlen_qkvpacked_func(qkv, starts, 3, 16)[0].shape
    (3, 2, 8)
    """
    packed: Any = qkv
    op = "flash_attn_varlen_qkvpacked_func"
    _, _, dim = shape_of(op, "qkv", packed, "[T, H, D]")
    check_int(op, "head_dim_qk", head_dim_qk, 1, dim // 2)
    parts = packed[..., :head_dim_qk], packed[..., head_dim_qk : 2 * head_dim_qk]
    return _attend(
        op,
        *parts,
        packed[..., 2 * head_dim_qk :],
        starts=(cu_seqlens,) * 2,
        longest=(max_seqlen,) * 2,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
    )


@names_integration("varlen_attention")
def flash_attn_varlen_kvpacked_func(
    q: Like[Result],
    kv: Given,
    cu_seqlens_qo: Given,
    cu_seqlens_kv: Given,
    max_seqlen_qo: int,
    max_seqlen_kv: int,
    head_dim_qk: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
) -> tuple[Result, Result]:
    """`flash_attn_varlen_func` of keys and values that are parts of one array.

    Parameters
    ----------
    q : [T, H, head_dim_qk] bf16 or fp16
    kv : [S, Hk, head_dim_qk + Dv], the dtype of q
        Read in place: keys, then values of each head.
    head_dim_qk : int
    cu_seqlens_qo, cu_seqlens_kv, max_seqlen_qo, max_seqlen_kv : object
        As in `flash_attn_varlen_func`, like the rest.
    dropout_p, softmax_scale, causal, deterministic, is_varlen : object

    Returns
    -------
    out : [T, H, Dv], the dtype of q
    lse : [T, H] fp32

    Raises
    ------
    TypeError, ValueError
        As `flash_attn_varlen_func`.

    Source: the signature is that of FlashMLA.

    Examples
    --------
    >>> import numpy as np, ml_dtypes
    >>> from sparse_mla import flash_mla
    >>> q, kv = (np.ones((3, heads, n), ml_dtypes.bfloat16) for heads, n in ((4, 16), (2, 24)))
    >>> starts = np.array([0, 3], np.int32)
    >>> flash_mla.flash_attn_varlen_kvpacked_func(q, kv, starts, starts, 3, 3, 16)[0].shape
    (3, 4, 8)
    """
    packed: Any = kv
    op = "flash_attn_varlen_kvpacked_func"
    _, _, dim = shape_of(op, "kv", packed, "[S, H, D]")
    check_int(op, "head_dim_qk", head_dim_qk, 1, dim)
    return _attend(
        op,
        q,
        packed[..., :head_dim_qk],
        packed[..., head_dim_qk:],
        starts=(cu_seqlens_qo, cu_seqlens_kv),
        longest=(max_seqlen_qo, max_seqlen_kv),
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
    )
