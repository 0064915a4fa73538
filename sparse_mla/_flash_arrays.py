"""Arrays of the drop-in for `flash_mla`: their shapes, and a result that is written in place."""

from __future__ import annotations

import math
from typing import Any

Array = Any


def shape_of(op: str, name: str, array: Array, rule: str) -> tuple[int, ...]:
    """The shape of an array of the rank that `rule` has."""
    shape = getattr(array, "shape", None)
    if shape is None or not hasattr(array, "reshape"):
        got = type(array).__name__
        raise TypeError(
            f"{op}: `{name}` must be an array {rule} with `reshape` (torch, NumPy, cupy, jax), "
            f"got {got}"
        )
    if len(shape) != rule.count(",") + 1:
        raise ValueError(f"{op}: `{name}` must have shape {rule}, got {list(shape)}")
    return shape


def is_array(value: object) -> bool:
    return len(getattr(value, "shape", ())) > 0


def find_unserved(q: Array, k_cache: Array) -> str | None:
    """What only FlashMLA's own kernel of dense decoding takes: fp16 or several KV heads."""
    dtype, heads = str(q.dtype).rpartition(".")[2], (*k_cache.shape, 1, 1, 1)[2]
    is_served = dtype != "float16" and (len(k_cache.shape) < 4 or heads == 1)
    return None if is_served else f"{dtype} and {heads} KV heads"


def join_queries(q: Array) -> Array:
    """q [b, s_q, H, D] such that its first two dimensions join without a copy."""
    batch, s_q, num_heads, head_dim = q.shape
    if batch == 1 or s_q == 1:
        return q
    return q.reshape(batch * s_q, num_heads, head_dim).reshape(batch, s_q, num_heads, head_dim)


def check_flag(op: str, name: str, value: object) -> None:
    """Refuses an array, because vLLM's copies of these functions have `out` in a flag's place."""
    if is_array(value):
        got = type(value).__name__
        raise TypeError(f"{op}: `{name}` must be a bool, got {got}: pass `out` by its name")


def join_out(op: str, out: Array, want: tuple[int, ...]) -> Array:
    """`out`, which must have this shape, as rows [T, H, 512] without a copy. None as it is."""
    if out is None:
        return None
    shape = shape_of(op, "out", out, "[b, s_q, H, 512]" if len(want) == 4 else "[T, H, 512]")
    if tuple(shape) != want:
        raise ValueError(f"{op}: `out` must have shape {list(want)}, got {list(shape)}")
    if len(want) == 4 and want[0] > 1 and want[1] > 1:
        strides = out.stride() if hasattr(out, "stride") else getattr(out, "strides", None)
        if strides is not None and strides[0] != want[1] * strides[1]:
            rule = "batches that follow each other without a gap"
            raise ValueError(f"{op}: `out` must have {rule}, got strides {list(strides)}")
    return out.reshape(math.prod(want[:-2]), *want[-2:])


def per_query(op: str, name: str, lengths: Array, batch: int, s_q: int) -> Array:
    """[b] -> [b * s_q]: attention takes lengths per query token, FlashMLA's are per request."""
    shape = shape_of(op, name, lengths, "[b]")
    if shape[0] != batch:
        raise ValueError(f"{op}: `{name}` must have shape [{batch}], got {list(shape)}")
    if s_q == 1:
        return lengths
    if hasattr(lengths, "expand"):  # torch, whose `repeat` means something else
        return lengths.reshape(batch, 1).expand(batch, s_q).reshape(batch * s_q)
    return lengths.repeat(s_q)
