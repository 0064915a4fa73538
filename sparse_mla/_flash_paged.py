"""What the drop-ins have in common over pages of keys and values of heads: one paged_attention."""

from __future__ import annotations

import math
from typing import Any

from sparse_mla import ops
from sparse_mla._flash_arrays import (
    default_scale,
    dtype_of,
    join_out,
    make_int32,
    namespace_of,
    shape_of,
)
from sparse_mla.ops.projection import without_grad

Array = Any

HEAD_DIM_V = 512  # the values of FlashMLA's keys that are its values, too


def attend_to_pages(
    op: str,
    q: Array,
    k_cache: Array,
    v_cache: Array,
    table: Array,
    cache_seqlens: Array,
    *,
    softmax_scale: float | None,
    starts: Array | None = None,
    qv: Array | None = None,
    out: Array | None = None,
    **options: Any,
) -> tuple[Array, Array]:
    """paged_attention of n queries of each request, q [B, n, H, D], or with `starts` (cu_seqlens_q)
    of ragged requests, q [T, H, D]. lse is a view [B, H, n] or [H, T]."""
    is_ragged = starts is not None
    rule = "[T, H, D{}]" if is_ragged else "[B, n, H, D{}]"
    *leading, num_heads, head_dim = shape_of(op, "q", q, rule.format(""))
    value_dim = shape_of(op, "v_cache", v_cache, "[pages, page_size, Hk, Dv]")[-1]
    if qv is not None:
        shape = shape_of(op, "qv", qv, rule.format("v"))
        if [*shape[:-1]] != [*leading, num_heads]:
            want = ", ".join(map(str, (*leading, num_heads, "Dv")))
            raise ValueError(f"{op}: `qv` must have shape [{want}], got {list(shape)}")
    if not is_ragged:
        starts = _uniform_starts(q, *leading)
    if softmax_scale is None:
        softmax_scale = default_scale(head_dim, value_dim if qv is not None else 0)
    result, lse = ops.paged_attention(
        _as_rows(q),
        without_grad(k_cache),
        without_grad(v_cache),
        table,
        cache_seqlens,
        cu_seqlens_q=starts,
        qv=_as_rows(qv),
        softmax_scale=softmax_scale,
        out=join_out(op, out, (*leading, num_heads, value_dim)),
        **options,
    )
    if out is None:
        out = result.reshape(*leading, num_heads, value_dim)
    return out, lse.reshape(*leading, num_heads).swapaxes(-1, -2)


def _uniform_starts(q: Array, batch: int, num_queries: int) -> Array | None:
    """cu_seqlens_q of requests with as many queries each. One token each needs none."""
    if num_queries == 1:
        return None
    if num_queries == 0:
        return make_int32(q, "full", (batch + 1,), 0)
    return make_int32(q, "arange", 0, batch * num_queries + 1, num_queries)


def _as_rows(x: Array) -> Array:
    """[B, n, H, D] -> [B * n, H, D], a view where strides allow it."""
    if x is None or len(x.shape) == 3:
        return without_grad(x)
    return without_grad(x).reshape(x.shape[0] * x.shape[1], *x.shape[2:])


# --- FlashMLA's dense decoding of several KV heads -----------------------------------------------


def has_heads(q: Array, k_cache: Array) -> bool:
    """Whether dense decoding is that of heads: fp16, or several KV heads of bf16."""
    dtype = dtype_of(q)
    has_many = len(k_cache.shape) == 4 and k_cache.shape[2] != 1
    is_served = dtype == "float16" or (dtype == "bfloat16" and has_many)
    return is_served and dtype_of(k_cache) == dtype


def decode_heads(
    op: str, q: Array, k_cache: Array, table: Array, cache_seqlens: Array, **options: Any
) -> tuple[Array, Array]:
    """Dense decoding of keys [pages, block_size, h_k, D], whose first 512 values are the values.
    lse is +inf for a query without keys."""
    shape_of(op, "k_cache", k_cache, "[pages, block_size, h_k, D]")
    values = k_cache[..., :HEAD_DIM_V]
    out, lse = attend_to_pages(op, q, k_cache, values, table, cache_seqlens, **options)
    inf = math.inf
    return out, namespace_of(lse).nan_to_num(lse, nan=math.nan, posinf=inf, neginf=inf)
