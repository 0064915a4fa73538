"""Arrays of the drop-ins: shapes, scales, new arrays beside them, and a result that is written in
place."""

from __future__ import annotations

import math
import sys
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


def dtype_of(array: Array) -> str:
    """The name of a dtype, without its module. The core refuses what has none."""
    return str(getattr(array, "dtype", "")).rpartition(".")[2]


def has_codes(array: Array) -> bool:
    """Whether an array has e4m3 values, which may be called bytes."""
    return dtype_of(array) in ("float8_e4m3fn", "uint8", "int8")


def check_scales(op: str, are_served: bool, **scales: Array | None) -> None:
    """Refuses scales of dense FP8 unless they are served, and are one fp32 each, or all None."""
    given = [name for name, scale in scales.items() if scale is not None]
    if given and not are_served:
        rule = "None unless q and k_cache are e4m3 values, without `indices`"
        raise ValueError(f"{op}: `{given[0]}` must be {rule}, got an array")
    for name, scale in scales.items() if given else ():
        if scale is None:
            raise ValueError(f"{op}: `{name}` must be one fp32 beside `{given[0]}`, got None")
        if dtype_of(scale) != "float32":
            got = dtype_of(scale) or type(scale).__name__
            raise TypeError(f"{op}: `{name}` must be an array of one fp32, got {got}")
        if math.prod(scale.shape) != 1:
            got = f"shape {list(scale.shape)}"
            raise ValueError(f"{op}: `{name}` must be an array of one fp32, got {got}")


def default_scale(*head_dims: int) -> float:
    """1 / the root of all values that a score multiplies. The core refuses heads without values."""
    return max(sum(head_dims), 1) ** -0.5


def namespace_of(array: Array) -> Any:
    """The module whose functions make and change arrays of this framework."""
    if hasattr(array, "new_full"):  # a torch.Tensor, or a subclass of it in any module
        return sys.modules["torch"]
    if hasattr(array, "__array_namespace__"):
        return array.__array_namespace__()
    return sys.modules[type(array).__module__.partition(".")[0]]


def make_int32(like: Array, function: str, *arguments: Any) -> Array:
    """A new array by `full` or `arange`, on the device of `like`. Cupy's functions take no device:
    they allocate on the current one."""
    module = namespace_of(like)
    place = {} if module.__name__ == "cupy" else {"device": like.device}
    return getattr(module, function)(*arguments, dtype=module.int32, **place)


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
    """`out`, which must have this shape, as rows [T, H, Dv] without a copy. None as it is."""
    if out is None:
        return None
    shape = shape_of(op, "out", out, str(list(want)))
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
