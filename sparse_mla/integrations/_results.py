"""What the operators return, for frameworks that must know before the call: shapes and dtypes.

Sizes may be symbolic. Only what a result's shape hangs on is checked, in the words of the C core;
the call itself checks everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Result = tuple[tuple[Any, ...], str]  # shape, dtype


def _sizes(op: str, name: str, shape: Sequence[Any], *ranks: int) -> tuple[Any, ...]:
    if len(shape) not in ranks:
        wanted = " or ".join(str(rank) for rank in ranks)
        raise ValueError(f"{op}: `{name}` must have {wanted} dimensions, got {len(shape)}")
    return tuple(shape)


def dequantize_kv_cache(kv_cache: Sequence[Any], dtype: str) -> Result:
    op = "dequantize_kv_cache"
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f'{op}: `dtype` must be "float32" or "bfloat16", got {dtype!r}')
    sizes = _sizes(op, "kv_cache", kv_cache, 2, 3, 4)
    return ((*(sizes[:1] if len(sizes) == 2 else sizes[:2]), 576), dtype)


def convert_req_index_to_global_index(topk_indices: Sequence[Any]) -> tuple[Result, Result]:
    """(out, counts)."""
    op = "convert_req_index_to_global_index"
    sizes = _sizes(op, "topk_indices", topk_indices, 2)
    return (sizes, "int32"), (sizes[:1], "int32")


def sparse_attention(q: Sequence[Any]) -> tuple[Result, Result, Result]:
    """(out, lse, max_logits)."""
    heads = _sizes("sparse_attention", "q", q, 3)[:2]
    return ((*heads, 512), "bfloat16"), (heads, "float32"), (heads, "float32")


def merge_attn_states(out_a: Sequence[Any], dtype: str) -> tuple[Result, Result]:
    """(out, lse)."""
    sizes = _sizes("merge_attn_states", "out_a", out_a, 3)
    return (sizes, dtype), (sizes[:2], "float32")


def k_up_proj(q_nope: Sequence[Any]) -> Result:
    return ((*_sizes("k_up_proj", "q_nope", q_nope, 3)[:2], 512), "bfloat16")


def v_up_proj(x: Sequence[Any], w_uv: Sequence[Any]) -> Result:
    columns = _sizes("v_up_proj", "W_UV", w_uv, 3)[2]
    return ((*_sizes("v_up_proj", "x", x, 3)[:2], columns), "bfloat16")


def dynamic_per_tensor_quant(x: Sequence[Any]) -> tuple[Result, Result]:
    """(out, scale)."""
    return (tuple(x), "float8_e4m3fn"), ((), "float32")
