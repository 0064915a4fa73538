"""The operators for JAX inside `jit`, on CPUs and NVIDIA GPUs, through JAX's foreign function
interface.

The functions have the names and arguments of `sparse_mla`'s own, without `stream` and workspaces.
Where a result is new they have no `out` and the like either, because JAX arrays are immutable and
XLA plans their memory. `concat_and_cache_mla` and `gather_kv_cache` return the array that they
write to; `fused_qnorm_rope_kv_insert` returns its queries, then that array, and with `kv`
`compress_norm_rope_store` returns (state, kv_cache). A written array is written in place when the
caller donates it to `jit`; otherwise XLA copies it first.
Options are Python values, fixed when a function is traced. Where one differs by device, as the rank
of `cp` in `shard_map` does, `jax.lax.switch` chooses between calls. Results have the same bits as
those of an eager call.

An array whose rank leaves a result without a shape is a ValueError while tracing. All other errors
are raised when the program runs, as `jax.errors.JaxRuntimeError` with the text of an eager call.
`vmap` runs the calls one after the other; there are no derivatives. On a GPU a call puts its work
on XLA's stream, takes its scratch from XLA and waits for nothing.

This module needs JAX 0.6 or later.

>>> import jax, jax.numpy as jnp
>>> import sparse_mla.integrations.jax as smla
>>> attend = jax.jit(lambda *arrays: smla.sparse_attention(*arrays, softmax_scale=1 / 576))
>>> q, kv = (jnp.ones(shape, jnp.bfloat16) for shape in ((1, 16, 576), (9, 576)))
>>> out, lse = attend(q, kv, jnp.array([[0, 3, -1]], jnp.int32))
>>> out.shape, round(float(lse[0, 0]), 4)
((1, 16, 512), 1.6931)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

try:
    import jax
    import jax.ffi
except ImportError as error:
    raise ImportError(
        "sparse_mla.integrations.jax needs JAX 0.6 or later: pip install jax"
    ) from error

from sparse_mla import _C
from sparse_mla.integrations._schema import ASKED, GIVEN, INTS, MAYBE, READ, SCALES, Schema
from sparse_mla.ops import OPERATORS
from sparse_mla.steps.common import as_int

if TYPE_CHECKING:
    from sparse_mla.ops import *  # noqa: F403 - the same functions with fewer arguments

__all__ = list(OPERATORS)


def __dir__() -> list[str]:
    """What tab completion offers."""
    return __all__


_TARGET = "sparse_mla"
for _platform, _handler in _C.xla_handlers().items():
    jax.ffi.register_ffi_target(_TARGET, _handler, platform=_platform)


_TYPES: dict[str, Any] = {"int": np.int64, "bool": np.int64, "float": np.float64, "str": str}
_ATTRIBUTES = {
    kind: _TYPES[name] for kind, (name, *_) in _C.OPTION_KINDS.items() if kind not in INTS
} | dict.fromkeys(SCALES, np.float64)


def _as_ints(op: str, name: str, value: Any, count: int) -> tuple[int, ...]:
    """A tuple of ints, or an error in the words of the C core."""
    is_tuple = isinstance(value, (tuple, list))
    if not is_tuple or len(value) != count:
        error = ValueError if is_tuple else TypeError
        raise error(f"{op}: `{name}` must be a tuple of {count} ints, got {value!r}")
    return tuple(as_int(op, name, x) for x in value)


def _is_traced(value: Any) -> bool:
    items = value if isinstance(value, (tuple, list)) else (value,)
    return any(isinstance(x, jax.core.Tracer) for x in items)


def _call(schema: Schema, values: dict[str, Any]) -> Any:
    """Makes one custom call in the form that csrc/python/xla/xla_ffi.c takes. Arrays that are both
    read and written become the call's last results, in place."""
    values = schema.part(values)
    for name, later in schema.later.items():
        if values[later] is not None:
            values[name] = jax.numpy.stack([values[name], *values[later]])
    for name, kind in schema.rows.items():
        if kind not in READ and _is_traced(values.get(name)):
            raise TypeError(
                f"{schema.name}: `{name}` must be a Python value, got a traced array: give jax.jit "
                f'static_argnames="{name}", fix the option outside (functools.partial), or let '
                "jax.lax.switch choose between calls"
            )
        if _C.OPTION_KINDS.get(kind, ("",))[:2] == ("int", 1) and values[name] is not None:
            values[name] = as_int(schema.name, name, values[name])  # NumPy would cut a float
        if kind in INTS and values[name] is not None:
            values[name] = _as_ints(schema.name, name, values[name], INTS[kind])
    given = {}
    for name in schema.names(*READ):
        array = values[schema.scales.get(name, name)]
        if array is not None:
            values[name] = given[name] = jax.numpy.asarray(array)
    unasked = () if schema.asks(values) else schema.names(*ASKED)
    results = {n: x[:2] for n, x in schema.results(values).items() if n not in unasked}
    order = [*schema.names(*READ), *schema.returned]
    aliases = {}
    for name in schema.names("input, maybe output", "input and output"):
        order.append(name)
        if schema.rows[name] == "input and output" or schema.maybe_writes(values):
            aliases[list(given).index(name)] = len(results)
            results[name] = (given[name].shape, given[name].dtype.name)
    read = len(schema.names(*READ))
    present = sum(
        1 << i for i, name in enumerate(order) if (name in given if i < read else name in results)
    )
    call = jax.ffi.ffi_call(
        _TARGET,
        [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results.values()],
        vmap_method="sequential",
        input_output_aliases=aliases or None,
    )
    attributes = {
        name: _ATTRIBUTES[kind](values[name])
        for name, kind in schema.rows.items()
        if kind in _ATTRIBUTES and values[name] is not None and name not in given
    }
    for option in schema.names(*INTS):
        for i, x in enumerate(values[option] or ()):
            attributes[f"{option}[{i}]"] = np.int64(x)
    outcome = call(*given.values(), operator=schema.name, present=np.int64(present), **attributes)
    arrays = dict(zip(results, outcome, strict=True))
    names = [n for n in order[read:] if n in arrays or schema.rows[n] in MAYBE]
    return arrays[names[0]] if len(names) == 1 else tuple(arrays.get(name) for name in names)


def _take_over(operator: Any) -> Callable[..., Any]:
    schema = Schema(operator)
    return schema.expose(lambda values: _call(schema, values), ("stream", *GIVEN), __name__)


globals().update({name: _take_over(operator) for name, operator in OPERATORS.items()})
