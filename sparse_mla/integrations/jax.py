"""The operators for JAX inside `jit`, on the CPU, through JAX's foreign function interface.

The functions have the names and arguments of `sparse_mla`'s own, less `stream` and `workspace`, and
less `out` and the like where a result is new: JAX arrays are immutable, XLA plans their memory.
`concat_and_cache_mla` and `gather_kv_cache` return the array that they write to. It is written in
place when the caller donates it to `jit`, and XLA copies it first otherwise. Options are Python
values, fixed when a function is traced; results have the bits of an eager call.

Ranks that leave a result without a shape are a ValueError while tracing. All other errors come when
the program runs, as `jax.errors.JaxRuntimeError` with the text of an eager call. `vmap` runs the
calls one after the other, derivatives do not exist. Arrays on a GPU are a ValueError: eager calls
of `sparse_mla` take those.

Needs JAX 0.5 or later.

>>> import jax, jax.numpy as jnp
>>> import sparse_mla.integrations.jax as smla
>>> attend = jax.jit(lambda *arrays: smla.sparse_attention(*arrays, softmax_scale=1 / 576))
>>> q, kv = (jnp.ones(shape, jnp.bfloat16) for shape in ((1, 16, 576), (9, 576)))
>>> out, lse = attend(q, kv, jnp.array([[0, 3, -1]], jnp.int32))
>>> out.shape, round(float(lse[0, 0]), 4)
((1, 16, 512), 1.6931)
"""

from __future__ import annotations

from typing import Any

import numpy as np

try:
    import jax
    import jax.ffi
except ImportError as error:
    raise ImportError(
        "sparse_mla.integrations.jax needs JAX 0.5 or later: pip install jax"
    ) from error

from sparse_mla import _C
from sparse_mla.integrations import _results
from sparse_mla.integrations._docs import repeats_operator

__all__ = [
    "concat_and_cache_mla",
    "convert_req_index_to_global_index",
    "dequantize_kv_cache",
    "dynamic_per_tensor_quant",
    "gather_kv_cache",
    "k_up_proj",
    "merge_attn_states",
    "sparse_attention",
    "v_up_proj",
]


def __dir__() -> list[str]:
    """What tab completion offers."""
    return __all__


Array = Any  # jax.Array, or what jax.numpy.asarray takes

_TARGET = "sparse_mla"
jax.ffi.register_ffi_target(_TARGET, _C.xla_handler(), platform="cpu")


def _call(
    op: str,
    arrays: dict[str, Array | None],
    *results: _results.Result | None,
    written: str | None = None,
    **attributes: Any,
) -> list[jax.Array]:
    """One custom call. The array named `written` becomes its only result, in place.

    Arrays and results are in the order of the list in csrc/python/xla_ffi.c; None is absent.
    """
    given = {name: jax.numpy.asarray(x) for name, x in arrays.items() if x is not None}
    for name, x in given.items():
        if not isinstance(x, jax.core.Tracer) and any(d.platform != "cpu" for d in x.devices()):
            place = ", ".join(sorted(str(d) for d in x.devices()))
            raise ValueError(
                f"{op}: `{name}` must be on the CPU, got {place}: on a GPU call sparse_mla.{op}, "
                "outside jit"
            )
    if written is not None:
        results = ((given[written].shape, given[written].dtype.name),)
    present = [x is not None for x in (*arrays.values(), *results)]
    call = jax.ffi.ffi_call(
        _TARGET,
        [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in filter(None, results)],
        vmap_method="sequential",
        input_output_aliases=None if written is None else {list(given).index(written): 0},
    )
    return call(
        *given.values(),
        operator=op,
        present=np.int64(sum(1 << i for i, is_there in enumerate(present) if is_there)),
        **{name: x for name, x in attributes.items() if x is not None},
    )


# --- cache ---------------------------------------------------------------------------------------


@repeats_operator
def concat_and_cache_mla(
    kv_c: Array,
    k_pe: Array,
    kv_cache: Array,
    slot_mapping: Array,
    *,
    kv_cache_dtype: str | None = None,
) -> jax.Array:
    """The cache after `sparse_mla.concat_and_cache_mla`, in place of a donated `kv_cache`.

    Returns
    -------
    A new array, the shape and dtype of kv_cache.

    >>> import jax, jax.numpy as jnp
    >>> import sparse_mla.integrations.jax as smla
    >>> write = jax.jit(smla.concat_and_cache_mla, donate_argnums=2)
    >>> cache = jnp.zeros((2, 64, 656), jnp.uint8)
    >>> cache = write(jnp.ones((1, 512)), jnp.ones((1, 64)), cache, jnp.array([65]))
    >>> int(cache[0].sum()), int(cache[1, 1, 0])
    (0, 126)
    """
    arrays = {"kv_c": kv_c, "k_pe": k_pe, "kv_cache": kv_cache, "slot_mapping": slot_mapping}
    (cache,) = _call(
        "concat_and_cache_mla", arrays, written="kv_cache", kv_cache_dtype=kv_cache_dtype
    )
    return cache


@repeats_operator
def gather_kv_cache(
    kv_cache: Array,
    block_table: Array,
    seq_lens: Array,
    workspace_starts: Array,
    *,
    out: Array,
    seq_starts: Array | None = None,
) -> jax.Array:
    """`out` after `sparse_mla.gather_kv_cache`, in place of a donated `out`.

    Returns
    -------
    A new array, the shape and dtype of out.

    >>> import jax.numpy as jnp
    >>> import sparse_mla.integrations.jax as smla
    >>> cache, out = jnp.ones((4, 64, 576), jnp.bfloat16), jnp.zeros((9, 576), jnp.bfloat16)
    >>> out = smla.gather_kv_cache(cache, jnp.array([[3]]), jnp.array([7]), jnp.array([1]), out=out)
    >>> out[:, 0].astype(int).tolist()
    [0, 1, 1, 1, 1, 1, 1, 1, 0]
    """
    arrays = {
        "kv_cache": kv_cache,
        "block_table": block_table,
        "seq_lens": seq_lens,
        "workspace_starts": workspace_starts,
        "seq_starts": seq_starts,
        "out": out,
    }
    (gathered,) = _call("gather_kv_cache", arrays, written="out")
    return gathered


@repeats_operator
def dequantize_kv_cache(
    kv_cache: Array, *, kv_format: str | None = None, dtype: str = "float32"
) -> jax.Array:
    """Every value of a cache as floats, for inspection: `sparse_mla.dequantize_kv_cache`.

    >>> import jax.numpy as jnp
    >>> import sparse_mla.integrations.jax as smla
    >>> smla.dequantize_kv_cache(jnp.zeros((2, 64, 656), jnp.uint8)).shape
    (2, 64, 576)
    """
    result = _results.dequantize_kv_cache(np.shape(kv_cache), dtype)
    (values,) = _call("dequantize_kv_cache", {"kv_cache": kv_cache}, result, kv_format=kv_format)
    return values


# --- indices and attention -----------------------------------------------------------------------


@repeats_operator
def convert_req_index_to_global_index(
    req_id_per_token: Array,
    block_table: Array,
    topk_indices: Array,
    *,
    block_size: int,
    prefill_request_ids: Array | None = None,
    prefill_workspace_starts: Array | None = None,
    valid_counts: bool = False,
) -> Any:
    """Positions to slots: `sparse_mla.convert_req_index_to_global_index`.

    >>> import jax.numpy as jnp
    >>> import sparse_mla.integrations.jax as smla
    >>> ids, table, topk = jnp.array([0]), jnp.array([[5, 7]]), jnp.array([[0, 64, -1, 500]])
    >>> smla.convert_req_index_to_global_index(ids, table, topk, block_size=64).tolist()
    [[320, 448, -1, -1]]
    """
    arrays = {
        "req_id_per_token": req_id_per_token,
        "block_table": block_table,
        "topk_indices": topk_indices,
        "prefill_request_ids": prefill_request_ids,
        "prefill_workspace_starts": prefill_workspace_starts,
    }
    op = "convert_req_index_to_global_index"
    out, counts = _results.convert_req_index_to_global_index(np.shape(topk_indices))
    results = _call(
        op, arrays, out, counts if valid_counts else None, block_size=np.int64(block_size)
    )
    return tuple(results) if valid_counts else results[0]


@repeats_operator
def sparse_attention(
    q: Array | tuple[Array, Array],
    kv: Array,
    indices: Array,
    *,
    softmax_scale: float,
    topk_length: Array | None = None,
    attn_sink: Array | None = None,
    extra_kv: Array | None = None,
    extra_indices: Array | None = None,
    extra_topk_length: Array | None = None,
    num_splits: int = 0,
    kv_format: str | None = None,
    return_max_logits: bool = False,
) -> tuple[jax.Array, ...]:
    """Attention over the tokens that `indices` names: `sparse_mla.sparse_attention`.

    >>> import jax.numpy as jnp
    >>> import sparse_mla.integrations.jax as smla
    >>> q, kv = (jnp.ones(shape, jnp.bfloat16) for shape in ((1, 16, 576), (9, 576)))
    >>> out, lse = smla.sparse_attention(q, kv, jnp.array([[0, 3, -1]]), softmax_scale=1 / 576)
    >>> out.shape, round(float(lse[0, 0]), 4)
    ((1, 16, 512), 1.6931)
    """
    nope, rope = q if isinstance(q, (tuple, list)) else (q, None)
    arrays = {
        "q": nope,
        "q_pe": rope,
        "kv": kv,
        "indices": indices,
        "topk_length": topk_length,
        "attn_sink": attn_sink,
        "extra_kv": extra_kv,
        "extra_indices": extra_indices,
        "extra_topk_length": extra_topk_length,
    }
    out, lse, max_logits = _results.sparse_attention(np.shape(nope))
    results = _call(
        "sparse_attention",
        arrays,
        out,
        lse,
        max_logits if return_max_logits else None,
        softmax_scale=np.float64(softmax_scale),
        num_splits=np.int64(num_splits),
        kv_format=kv_format,
    )
    return tuple(results)


@repeats_operator
def merge_attn_states(
    out_a: Array, lse_a: Array, out_b: Array, lse_b: Array
) -> tuple[jax.Array, jax.Array]:
    """Two partial results over disjoint keys as one: `sparse_mla.merge_attn_states`.

    >>> import jax.numpy as jnp
    >>> import sparse_mla.integrations.jax as smla
    >>> ones, zero = jnp.ones((1, 1, 4)), jnp.zeros((1, 1))
    >>> out, lse = smla.merge_attn_states(ones, zero, 3 * ones, zero)
    >>> out[0, 0, 0].item(), round(lse.item(), 4)
    (2.0, 0.6931)
    """
    out_a = jax.numpy.asarray(out_a)
    arrays = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    results = _results.merge_attn_states(out_a.shape, out_a.dtype.name)
    out, lse = _call("merge_attn_states", arrays, *results)
    return out, lse


# --- absorption ----------------------------------------------------------------------------------


@repeats_operator
def k_up_proj(q_nope: Array, W_UK: Array) -> jax.Array:
    """W_UK absorbed into the query: `sparse_mla.k_up_proj`.

    >>> import jax.numpy as jnp
    >>> import sparse_mla.integrations.jax as smla
    >>> q, w = jnp.ones((1, 2, 4), jnp.bfloat16), jnp.ones((512, 2, 4), jnp.bfloat16)
    >>> smla.k_up_proj(q, w)[0, 0, 0].item()
    4.0
    """
    result = _results.k_up_proj(np.shape(q_nope))
    (out,) = _call("k_up_proj", {"q_nope": q_nope, "W_UK": W_UK}, result)
    return out


@repeats_operator
def v_up_proj(x: Array, W_UV: Array) -> jax.Array:
    """The latent output projected up: `sparse_mla.v_up_proj`.

    >>> import jax.numpy as jnp
    >>> import sparse_mla.integrations.jax as smla
    >>> x, w = jnp.ones((1, 2, 512), jnp.bfloat16), jnp.ones((512, 2, 4), jnp.bfloat16)
    >>> smla.v_up_proj(x, w).shape
    (1, 2, 4)
    """
    result = _results.v_up_proj(np.shape(x), np.shape(W_UV))
    (out,) = _call("v_up_proj", {"x": x, "W_UV": W_UV}, result)
    return out


@repeats_operator
def dynamic_per_tensor_quant(x: Array) -> tuple[jax.Array, jax.Array]:
    """An array as e4m3 and one scale: `sparse_mla.dynamic_per_tensor_quant`.

    >>> import jax.numpy as jnp
    >>> import sparse_mla.integrations.jax as smla
    >>> out, scale = smla.dynamic_per_tensor_quant(jnp.array([0.5, -2.0]))
    >>> out.tolist(), round(scale.item() * 448, 4)
    ([112.0, -448.0], 2.0)
    """
    results = _results.dynamic_per_tensor_quant(np.shape(x))
    out, scale = _call("dynamic_per_tensor_quant", {"x": x}, *results)
    return out, scale
