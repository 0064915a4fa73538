"""Drop-in for FlashAttention-3's inference functions: attention to keys and values of heads, in
pages of a cache or contiguous.

    from sparse_mla.flash_attn import flash_attn_with_kvcache    was: from flash_attn_interface ...

Names, arguments and shapes are those of FlashAttention-3 as sgl-kernel, vLLM and fa3-fwd have them:
q [B, n, H, D] or ragged [T, H, D], lse [B, H, n] or [H, T], a view. Pages have any size, and calls
run on CPUs, too. Keys of a step are in the cache before the call: `sparse_mla.reshape_and_cache`
writes them, and `sparse_mla.apply_rope` turns them. Sinks scale the output and are not part of lse,
where FlashAttention-3 counts them in; lse is -inf for a query without keys.

Arrays are torch tensors, or arrays of any framework that gives them `shape`, `reshape` and
`swapaxes`: NumPy, cupy, jax. Everything runs on the caller's current stream and can be captured in
a graph. No key is copied.

>>> from sparse_mla import flash_attn
>>> flash_attn.__all__
['flash_attn_varlen_func', 'flash_attn_with_kvcache']
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparse_mla import ops
from sparse_mla._compiled import names_integration
from sparse_mla._flash_arrays import (
    default_scale,
    dtype_of,
    is_array,
    make_int32,
    namespace_of,
    shape_of,
)
from sparse_mla._flash_paged import attend_to_pages
from sparse_mla._types import Array as Given
from sparse_mla._types import Like, Result
from sparse_mla.ops.projection import without_grad
from sparse_mla.steps.common import check_int

__all__ = ["flash_attn_varlen_func", "flash_attn_with_kvcache"]

Array = Any

E4M3 = ("float8_e4m3fn", "uint8")  # their bytes, too
MAX_LENGTH = 2**31 - 1


def __dir__() -> list[str]:
    """What tab completion offers."""
    return __all__


@names_integration("paged_attention")
def flash_attn_with_kvcache(
    q: Like[Result],
    k_cache: Given,
    v_cache: Given,
    k: None = None,
    v: None = None,
    qv: Given | None = None,
    rotary_cos: None = None,
    rotary_sin: None = None,
    cache_seqlens: int | Given | None = None,
    cache_batch_idx: Given | None = None,
    cache_leftpad: Given | None = None,
    page_table: Given | None = None,
    cu_seqlens_q: Given | None = None,
    cu_seqlens_k_new: object = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: object = None,
    q_descale: float | Given | None = None,
    k_descale: float | Given | None = None,
    v_descale: float | Given | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | None = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: object = None,
    num_splits: int = 0,
    pack_gqa: object = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    sinks: Given | None = None,
    ver: object = 3,
    *,
    block_table: Given | None = None,
    s_aux: Given | None = None,
    fa_version: object = 3,
    out: Result | None = None,
) -> Any:
    """Attention to a cache of keys and values: decode, extend and speculative steps.

    Parameters
    ----------
    q : [B, n, H, D] bf16, fp16 or e4m3, or [T, H, D] with `cu_seqlens_q`
    k_cache, v_cache : [pages, page_size, Hk, D] and [pages, page_size, Hk, Dv], of any strides
        Of the dtype of q, or e4m3. Query head h reads KV head h // (H / Hk). Without `page_table`
        a page is all room of a request: [requests, S, Hk, D].
    k, v, rotary_cos, rotary_sin : None
        Keys of the step are written and turned before the call.
    qv : [B, n, H, Dv] or [T, H, Dv], the dtype of q, optional
        A second part of each query, which meets the values: scores are q . k + qv . v. D + Dv is
        at most 576.
    cache_seqlens : int or [B] int32, optional
        The positions of each request in the cache, those of q among them. When left out, all.
    cache_batch_idx : [B] int32, optional
        Without `page_table`: the page of each request. When left out, they are in order.
    cache_leftpad : [B] int32, optional
        Positions in front of a request's first key.
    page_table, block_table : [B, W] int32, optional
        The pages of each request, by one of two names. What is behind a request's last page is not
        read.
    cu_seqlens_q : [B + 1] int32, optional
        The first query of each request, then their number: requests may differ in queries.
    max_seqlen_q : int, optional
        A hint, which changes no result.
    q_descale, k_descale, v_descale : float, an array of one fp32, or [n, Hk] fp32, optional
        What e4m3 values are multiplied with; n divides B. An array beside other values is not
        read, because engines give one for every cache.
    softmax_scale : float, optional
        When left out, D ** -0.5, or (D + Dv) ** -0.5 with `qv`.
    causal : bool
        Whether a query sees no key behind its position; the last query is at the last key.
    window_size : (int, int), or None
        How many keys a query sees before and behind its position; -1 or None = all.
    attention_chunk : int
        C: a query sees keys of its own C positions only; 0 = of all.
    softcap : float
        c: scores are c * tanh(score / c); 0 = none.
    num_splits : int
        Into how many parts a request's keys are cut at most; 0 = the plan chooses.
    return_softmax_lse : bool
        Whether to return lse, too.
    sinks, s_aux : [H] bf16 or fp32, optional
        Multiplies out by 1 / (1 + exp(sink - lse)), by one of two names. The framework widens bf16.
    cu_seqlens_k_new, rotary_seqlens, rotary_interleaved : object
        Not read: they belong to `k` and `rotary_cos`.
    scheduler_metadata, pack_gqa, sm_margin, ver, fa_version : object
        Not read: there is no schedule to plan ahead, and one set of kernels.
    out : [B, n, H, Dv] or [T, H, Dv] of the dtype of q, or fp32, optional
        Where the result is written. Its first two of four dimensions must join to one.

    Returns
    -------
    out : [B, n, H, Dv] or [T, H, Dv], the dtype of q, bf16 for e4m3
        The object given as `out`, or a new array.
    lse : [B, H, n] or [H, T] fp32, with `return_softmax_lse`
        Natural logarithm, without sinks; -inf for a query without keys, and out is 0 there.

    Raises
    ------
    TypeError, ValueError
        Keys or rotary tables, `cache_batch_idx` beside `page_table`, without both fewer pages than
        requests, and the errors of `sparse_mla.paged_attention`, where `page_table` and
        `cache_batch_idx` are `block_table`, and `sinks` is `attn_sink`.

    Source: the signature is that of FlashAttention-3 with the sinks of sgl-kernel.

    Examples
    --------
    >>> import numpy as np, ml_dtypes
    >>> from sparse_mla import flash_attn
    >>> q = np.ones((2, 1, 8, 128), ml_dtypes.bfloat16)
    >>> k_cache, v_cache = np.ones((2, 4, 16, 2, 128), ml_dtypes.bfloat16)  # 4 pages of 16 tokens
    >>> table, lens = np.array([[2, 0], [3, -1]], np.int32), np.array([20, 5], np.int32)
    >>> out, lse = flash_attn.flash_attn_with_kvcache(
    ...     q, k_cache, v_cache, cache_seqlens=lens, page_table=table, softmax_scale=1 / 128,
    ...     causal=True, return_softmax_lse=True)
    >>> out.shape, lse.shape, np.exp(lse[:, 0, 0] - 1).round(2).tolist()
    ((2, 1, 8, 128), (2, 8, 1), [20.0, 5.0])
    """
    op = "flash_attn_with_kvcache"
    for name, x in {"k": k, "v": v, "rotary_cos": rotary_cos, "rotary_sin": rotary_sin}.items():
        _require_none(
            op, name, x, ", because keys are turned by sparse_mla.apply_rope and written by "
            "sparse_mla.reshape_and_cache before the call"
        )  # fmt: skip
    table = _either(op, "[B, W]", page_table=page_table, block_table=block_table)
    num_pages, page_size, _, _ = shape_of(op, "k_cache", k_cache, "[pages, page_size, Hk, D]")
    if cu_seqlens_q is None:
        batch = shape_of(op, "q", q, "[B, n, H, D]")[0]
    else:
        batch = max(shape_of(op, "cu_seqlens_q", cu_seqlens_q, "[B + 1]")[0] - 1, 0)
    if table is None:
        table = _own_pages(op, q, cache_batch_idx, batch, num_pages)
    else:
        _require_none(op, "cache_batch_idx", cache_batch_idx, " beside a table of pages")
    if cache_seqlens is None:
        cache_seqlens = page_size * table.shape[1]
    if not is_array(cache_seqlens):
        length = check_int(op, "cache_seqlens", cache_seqlens, 0, MAX_LENGTH)
        cache_seqlens = make_int32(q, "full", (batch,), length)
    result = attend_to_pages(
        op,
        q,
        k_cache,
        v_cache,
        table,
        cache_seqlens,
        starts=cu_seqlens_q,
        qv=qv,
        cache_leftpad=cache_leftpad,
        max_seqlen_q=max_seqlen_q,
        out=out,
        **_common(
            q,
            k_cache,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window_size,
            attention_chunk=attention_chunk,
            softcap=softcap,
            num_splits=num_splits,
            sinks=_either(op, "[H]", sinks=sinks, s_aux=s_aux),
            descales=(q_descale, k_descale, v_descale),
        ),
    )
    return result if return_softmax_lse else result[0]


@names_integration("varlen_attention")
def flash_attn_varlen_func(
    q: Like[Result],
    k: Given,
    v: Given,
    cu_seqlens_q: Given,
    cu_seqlens_k: Given | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    seqused_q: None = None,
    seqused_k: Given | None = None,
    page_table: Given | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Given | None = None,
    q_descale: float | Given | None = None,
    k_descale: float | Given | None = None,
    v_descale: float | Given | None = None,
    window_size: Sequence[int] | None = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 0,
    pack_gqa: object = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    return_softmax_lse: bool = False,
    sinks: Given | None = None,
    ver: object = 3,
    dropout_p: float = 0.0,
    alibi_slopes: None = None,
    scheduler_metadata: object = None,
    block_table: Given | None = None,
    q_v: Given | None = None,
    s_aux: Given | None = None,
    fa_version: object = 3,
    out: Result | None = None,
) -> Any:
    """Attention of ragged requests to contiguous keys and values, or with a table to pages of them.

    The three packages order what follows `max_seqlen_k` differently, so it is taken by name.

    Parameters
    ----------
    q : [T, H, D] bf16, fp16 or e4m3
    k, v : [S, Hk, D] and [S, Hk, Dv], or with a table [pages, page_size, Hk, D] and [..., Dv]
        Of the dtype of q, or e4m3. Query head h reads KV head h // (H / Hk).
    cu_seqlens_q : [B + 1] int32
        The first query of each request, then their number.
    cu_seqlens_k : [B + 1] int32, optional
        The first key of each request, then their number. With a table it is None.
    max_seqlen_q, max_seqlen_k : int, optional
        Hints, which change no result.
    seqused_k : [B] int32, optional
        The keys of each request. A table needs it; without one it takes that many of the request's
        keys, at most all.
    page_table, block_table : [B, W] int32, optional
        The pages of each request, by one of two names.
    qv, q_v : [T, H, Dv], the dtype of q, optional
        As in `flash_attn_with_kvcache`, by one of two names.
    softmax_scale, causal, window_size, attention_chunk, softcap, num_splits : object
        As in `flash_attn_with_kvcache`.
    q_descale, k_descale, v_descale : float, an array of one fp32, or [n, Hk] fp32, optional
    sinks, s_aux : [H] bf16 or fp32, optional
        Likewise.
    return_softmax_lse, return_attn_probs : bool
        Whether to return lse, too.
    dropout_p : float
        0: there is no dropout.
    seqused_q, alibi_slopes : None
        Queries follow each other without gaps, and scores have no bias.
    pack_gqa, deterministic, sm_margin, ver, fa_version, scheduler_metadata : object
        Not read: results are always deterministic.
    out : [T, H, Dv] of the dtype of q, or fp32, optional
        Where the result is written.

    Returns
    -------
    out : [T, H, Dv], the dtype of q, bf16 for e4m3
        The object given as `out`, or a new array.
    lse : [H, T] fp32, where it is asked for
        As in `flash_attn_with_kvcache`.

    Raises
    ------
    TypeError, ValueError
        A table without `seqused_k` or beside `cu_seqlens_k`, neither of both tables and
        `cu_seqlens_k`, dropout, `seqused_q`, `alibi_slopes`, and the errors of
        `sparse_mla.paged_attention` and `sparse_mla.varlen_attention`.

    Source: the signatures are those of FlashAttention-3, sgl-kernel and vLLM.

    Examples
    --------
    >>> import numpy as np, ml_dtypes
    >>> from sparse_mla import flash_attn
    >>> q, k, v = (np.ones((3, 2, n), ml_dtypes.bfloat16) for n in (192, 192, 128))
    >>> starts = np.array([0, 1, 3], np.int32)
    >>> out, lse = flash_attn.flash_attn_varlen_func(
    ...     q, k, v, starts, starts, 2, 2, causal=True, return_softmax_lse=True)
    >>> out.shape, lse.shape, (lse[0] - 192**0.5).round(3).tolist()
    ((3, 2, 128), (2, 3), [0.0, 0.0, 0.6930000185966492])
    """
    op = "flash_attn_varlen_func"
    if dropout_p != 0:
        raise ValueError(f"{op}: `dropout_p` must be 0, there is no dropout here, got {dropout_p}")
    _require_none(op, "seqused_q", seqused_q, ", because queries follow each other without gaps")
    _require_none(op, "alibi_slopes", alibi_slopes, ", because scores have no bias here")
    table = _either(op, "[B, W]", page_table=page_table, block_table=block_table)
    qv = _either(op, "[T, H, Dv]", qv=qv, q_v=q_v)
    q_shape = shape_of(op, "q", q, "[T, H, D]")
    shape_of(op, "cu_seqlens_q", cu_seqlens_q, "[B + 1]")
    options = _common(
        q,
        k,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        num_splits=num_splits,
        sinks=_either(op, "[H]", sinks=sinks, s_aux=s_aux),
        descales=(q_descale, k_descale, v_descale),
    )
    options |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k, "out": out}
    result: tuple[Array, Array]
    if table is not None:
        _require_none(op, "cu_seqlens_k", cu_seqlens_k, " beside a table of pages")
        if seqused_k is None:
            raise ValueError(f"{op}: `seqused_k` must be given beside a table of pages, got None")
        result = attend_to_pages(
            op, q, k, v, table, seqused_k, starts=cu_seqlens_q, qv=qv, **options
        )
    elif cu_seqlens_k is None:
        raise ValueError(f"{op}: `cu_seqlens_k` must be given without a table of pages, got None")
    elif qv is None and seqused_k is None:
        if softmax_scale is None:
            options["softmax_scale"] = default_scale(q_shape[-1])
        rows, lse = ops.varlen_attention(
            without_grad(q),
            without_grad(k),
            without_grad(v),
            cu_seqlens_q,
            cu_seqlens_k,
            **options,
        )
        result = rows, lse.swapaxes(0, 1)
    else:
        result = _attend_to_one_page(
            op, q, k, v, cu_seqlens_k, seqused_k, starts=cu_seqlens_q, qv=qv, **options
        )
    return result if return_softmax_lse or return_attn_probs else result[0]


# --- tables --------------------------------------------------------------------------------------


def _own_pages(op: str, q: Array, indices: Array, batch: int, num_pages: int) -> Array:
    """The table [B, 1] of a cache without one: each request has a page."""
    if indices is None:
        if num_pages < batch:
            raise ValueError(
                f"{op}: `k_cache` must have a page for each of the {batch} requests without "
                f"`page_table` and `cache_batch_idx`, got {num_pages}"
            )
        indices = make_int32(q, "arange", batch)
    shape = shape_of(op, "cache_batch_idx", indices, "[B]")
    if shape[0] != batch:
        raise ValueError(f"{op}: `cache_batch_idx` must have shape [{batch}], got {list(shape)}")
    return indices.reshape(batch, 1)


def _attend_to_one_page(
    op: str, q: Array, k: Array, v: Array, cu_seqlens_k: Array, lengths: Array, **options: Any
) -> tuple[Array, Array]:
    """Contiguous keys are one page, in which a request begins behind its `cache_leftpad`."""
    num_keys = shape_of(op, "k", k, "[S, Hk, D]")[0]
    shape_of(op, "v", v, "[S, Hk, Dv]")
    batch = max(shape_of(op, "cu_seqlens_k", cu_seqlens_k, "[B + 1]")[0] - 1, 0)
    first, ends = cu_seqlens_k[:-1], cu_seqlens_k[1:]
    if lengths is not None:
        shape = shape_of(op, "seqused_k", lengths, "[B]")
        if shape[0] != batch:
            raise ValueError(f"{op}: `seqused_k` must have shape [{batch}], got {list(shape)}")
        ends = namespace_of(ends).minimum(first + lengths, ends)
    # A page has a token at least. Without keys there is no page.
    caches = (k[None], v[None]) if num_keys else (k[:, None], v[:, None])
    table = make_int32(q, "full", (batch, 1), 0)
    return attend_to_pages(op, q, *caches, table, ends, cache_leftpad=first, **options)


# --- arguments of both ---------------------------------------------------------------------------


def _require_none(op: str, name: str, value: object, why: str) -> None:
    if value is not None:
        got = "an array" if is_array(value) else repr(value)
        raise ValueError(f"{op}: `{name}` must be None{why}, got {got}")


def _either(op: str, rule: str, **names: Array) -> Array:
    """An array of this shape that has two names, or None."""
    given = [name for name, x in names.items() if x is not None]
    if not given:
        return None
    if len(given) == 2:
        why = f" beside `{given[1]}`, its other name"
        _require_none(op, given[0], names[given[0]], why)
    shape_of(op, given[0], names[given[0]], rule)
    return names[given[0]]


def _common(
    q: Array,
    k: Array,
    *,
    window_size: Any,
    sinks: Array,
    descales: tuple[Any, Any, Any],
    **options: Any,
) -> dict[str, Any]:
    """The options of both operators."""
    if window_size is None:
        window_size = (-1, -1)
    options["window_size"] = tuple(window_size) if is_array(window_size) else window_size
    options["attn_sink"] = _as_fp32(sinks)
    # Engines give descales for every cache, which FlashAttention-3 reads for e4m3 alone.
    for name, x, descale in zip("qkv", (q, k, k), descales, strict=True):
        if not is_array(descale) or dtype_of(x) in E4M3:
            options[f"{name}_descale"] = descale
    return options


def _as_fp32(sinks: Array) -> Array:
    """Sinks, which FlashAttention-3 takes in bf16, as the operators take them."""
    if sinks is None:
        return None
    sinks = without_grad(sinks)
    if dtype_of(sinks) != "bfloat16":
        return sinks
    return sinks.float() if hasattr(sinks, "float") else sinks.astype("float32")
