"""The operators: signatures, defaults and documentation. The work is done by the C core.

What is declared below is called as any function; csrc/python/call/operator.c takes the call, and
the arguments have their C side in a table of csrc/python/ops/.

What holds for every operator. Arrays are anything that speaks DLPack, or NumPy arrays (ml_dtypes
included); the last dimension is contiguous unless a docstring says otherwise, all other strides are
honoured. Outputs are optional keywords; an array given as output is returned as the same object,
and one that is not given comes in the framework of the first array. All arrays of a call are on one
device. `stream` is an int handle or an object with `__cuda_stream__`, `.cuda_stream` or `.ptr`;
None is the first array's current stream where its framework tells (torch, cupy), else the legacy
default stream. The CPU ignores it.

Every operator raises TypeError (not an array, or the wrong dtype), ValueError (rank, shape, stride,
alignment, device, overlap, a bad value), BufferError (an array that cannot be exported, or cannot
be written: read-only, jax), RuntimeError (a device that this build lacks) and MemoryError. The text
reads "op: `argument` must RULE, got ACTUAL"; nothing was written then.

Shapes use T query tokens, H heads (1 to 128), K index columns, R requests, W block table columns.
A slot is `page * block_size + offset`. A cache is [pages, block_size, row], or with an MQA head
axis [pages, block_size, 1, row], or flat [tokens, row]; row is 576 bf16 ("bfloat16") or 656 bytes
of uint8, int8 or float8_e4m3fn ("fp8_ds_mla").

CUDA. A call enqueues its work on `stream` and returns: it never synchronises, and takes memory for
nothing but results and workspace that were left out, from the framework's allocator, so that it can
be captured in a graph (where there is no such allocator, give both). Shapes, dtypes, strides and
addresses are checked as on the CPU. Values in device memory are not read back: where the CPU raises
a ValueError for a bad slot, page, request id or length, the kernels stay inside the buffers, and do
what the operator's docstring says. SPARSE_MLA_CHECK=1 in the environment, a debugging aid, makes
calls synchronise and raise these ValueErrors too; it cannot be used during capture.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from os import path
from typing import Any, TypeVar, cast

from sparse_mla import _C, _results

Array = Any
Stream = Any
Declaration = TypeVar("Declaration", bound=Callable[..., Any])


OPERATORS: dict[str, Any] = {}  # that frameworks' integrations take over, by name


def _operator(results: _results.Rule | None = None) -> Callable[[Declaration], Declaration]:
    """The operator of C that has the name, parameters and defaults of a declaration.

    `results` tells what it returns; an operator without it is not taken over by integrations.
    """

    def declare(declaration: Declaration) -> Declaration:
        operator = _C.Operator(declaration, declaration.__name__)
        functools.update_wrapper(operator, declaration)
        if results is not None:
            vars(operator)["results"] = results
            OPERATORS[declaration.__name__] = operator
        return cast(Declaration, operator)

    return declare


# --- cache ---------------------------------------------------------------------------------------


@_operator(_results.none)
def concat_and_cache_mla(
    kv_c: Array,
    k_pe: Array,
    kv_cache: Array,
    slot_mapping: Array,
    *,
    kv_cache_dtype: str | None = None,
    stream: Stream = None,
) -> Array:
    """Write one token per entry of `slot_mapping` into a paged cache.

    The value is rounded to bf16 first. An fp8_ds_mla row stores, for each tile of 128 values,
    scale = max(amax / 448, FLT_MIN) and e4m3(x / scale), saturating; its RoPE part stays bf16.

    Parameters
    ----------
    kv_c : [>= T, 512] bf16, fp16 or fp32
        The compressed latents (NoPE part). T is the length of `slot_mapping`.
    k_pe : [>= T, 64], the dtype of kv_c
        The RoPE part of the keys.
    kv_cache : [pages, block_size, row], row = 576 bf16 or 656 bytes, written
        Or with a head axis, or flat.
    slot_mapping : [T] int64 or int32
        Where each token goes. Negative slots are skipped. A slot past the end is a ValueError on
        the CPU, found before anything is written, and skipped on CUDA.
    kv_cache_dtype : "bfloat16" (or "auto"), "fp8_ds_mla" or None
        None takes it from the cache's dtype and last dimension.
    stream : int handle or stream object, optional

    Returns
    -------
    kv_cache, the same object.

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        A slot past the end (CPU), a cache of no known format.
        Else as `help(sparse_mla.ops)` says, for every operator.

    Source: vLLM's operator of this name; row formats in csrc/core/kv_format.h.

    Examples
    --------
    >>> import numpy as np, sparse_mla
    >>> cache = np.zeros((2, 64, 656), np.uint8)
    >>> latent, rope = np.ones((1, 512), np.float32), np.ones((1, 64), np.float32)
    >>> _ = sparse_mla.concat_and_cache_mla(latent, rope, cache, np.array([65]))
    >>> cache.any(axis=2).sum(), int(cache[1, 1, 0])
    (np.int64(1), 126)
    """


@_operator(_results.none)
def gather_kv_cache(
    kv_cache: Array,
    block_table: Array,
    seq_lens: Array,
    workspace_starts: Array,
    *,
    out: Array,
    seq_starts: Array | None = None,
    stream: Stream = None,
) -> Array:
    """Gather the rows of several requests from a paged cache into a flat bf16 workspace.

    out[workspace_starts[r] + p] = bf16(row of position p + seq_starts[r]) for p < seq_lens[r];
    FP8 rows are upconverted as bf16(e4m3 * scale), one rounding.

    Parameters
    ----------
    kv_cache : [pages, block_size, row], row = 576 bf16 or 656 bytes
        Or with a head axis, or flat.
    block_table : [R, W] int32
        Page numbers of each request. A bad page is a ValueError on the CPU; on CUDA its rows are
        written as zeros.
    seq_lens, workspace_starts : [R] int32
        Tokens to gather, and the first row of `out`, per request. Length 0 writes nothing. Rows
        beyond `out` are a ValueError on the CPU, and left out on CUDA.
    out : [>= sum of seq_lens, 576] bf16, written
    seq_starts : [R] int32, optional
        First position to gather, per request; 0 when left out.
    stream : int handle or stream object, optional

    Returns
    -------
    out, the same object.

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        A bad page, or rows beyond `out` (CPU): found before anything is written.
        Else as `help(sparse_mla.ops)` says, for every operator.

    Source: the chunked upconvert-gather of vLLM, cp_gather_and_upconvert_fp8_kv_cache.

    Examples
    --------
    >>> import numpy as np, ml_dtypes, sparse_mla
    >>> cache = np.ones((4, 64, 576), ml_dtypes.bfloat16)
    >>> out, one = np.zeros((9, 576), ml_dtypes.bfloat16), np.array([7], np.int32)
    >>> _ = sparse_mla.gather_kv_cache(cache, np.array([[3]], np.int32), one, one - 6, out=out)
    >>> out[:, 0].astype(int).tolist()
    [0, 1, 1, 1, 1, 1, 1, 1, 0]
    """


@_operator(_results.dequantized)
def dequantize_kv_cache(
    kv_cache: Array, *, kv_format: str | None = None, dtype: str = "float32"
) -> Array:
    """Every value of a cache as floats, for inspection.

    Parameters
    ----------
    kv_cache : [pages, block_size, row], row = 576 bf16 or 656 bytes
        Or with a head axis, or flat.
    kv_format : "bfloat16" (or "auto"), "fp8_ds_mla" or None
        None takes it from the cache's dtype and last dimension.
    dtype : "float32" or "bfloat16"
        FP8 values are e4m3 * scale, the product in fp32, rounded once when this is bfloat16.

    Returns
    -------
    [pages, block_size, 576], or [tokens, 576] for a flat cache.

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        A cache of no known format, another `dtype`.
        Else as `help(sparse_mla.ops)` says, for every operator.

    Source: the row formats of csrc/core/kv_format.h, drawn in docs/formats.md.

    Examples
    --------
    >>> import numpy as np, sparse_mla
    >>> sparse_mla.dequantize_kv_cache(np.zeros((2, 64, 656), np.uint8)).shape
    (2, 64, 576)
    """


# --- indices and attention -----------------------------------------------------------------------


@_operator(_results.slots)
def convert_req_index_to_global_index(
    req_id_per_token: Array,
    block_table: Array,
    topk_indices: Array,
    *,
    block_size: int,
    prefill_request_ids: Array | None = None,
    prefill_workspace_starts: Array | None = None,
    valid_counts: bool = False,
    out: Array | None = None,
    stream: Stream = None,
) -> Any:
    """Turn positions inside each request into slots of the cache, or rows of the workspace.

    Position p of request r is slot `block_table[r, p // block_size] * block_size + p % block_size`;
    for a token with `prefill_request_ids[t] = i >= 0` it is row `prefill_workspace_starts[i] + p`.
    Negative positions, positions beyond the table and negative table entries give -1. The order is
    kept.

    Parameters
    ----------
    req_id_per_token : [T] int32
        An id outside 0 to R - 1 is a ValueError on the CPU, and gives a row of -1 on CUDA.
    block_table : [R, W] int32
    topk_indices : [T, K] int32
        Positions as an indexer gives them, -1 = none.
    block_size : int
        Tokens per page.
    prefill_request_ids : [T] int32, optional
        Number of the prefill request of each token, -1 for decode tokens.
    prefill_workspace_starts : [prefills] int32, with prefill_request_ids
        First workspace row of each prefill request.
    valid_counts : bool
        Whether to return the number of entries >= 0 per row too.
    out : [T, K] int32, optional
    stream : int handle or stream object, optional

    Returns
    -------
    out [T, K] int32, or (out, counts [T] int32) with `valid_counts`.

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        A `block_size` below 1, a bad request id (CPU), `prefill_request_ids` without its starts.
        Else as `help(sparse_mla.ops)` says, for every operator.

    Source: vLLM's triton_convert_req_index_to_global_index.

    Examples
    --------
    >>> import numpy as np, sparse_mla
    >>> table, topk = np.array([[5, 7]], np.int32), np.array([[0, 64, -1, 500]], np.int32)
    >>> ids = np.zeros(1, np.int32)
    >>> sparse_mla.convert_req_index_to_global_index(ids, table, topk, block_size=64).tolist()
    [[320, 448, -1, -1]]
    """


@_operator(_results.attended)
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
    out: Array | None = None,
    lse: Array | None = None,
    max_logits: Array | None = None,
    workspace: Array | None = None,
    stream: Stream = None,
) -> tuple[Array, ...]:
    """Attend to the cached tokens that `indices` names: one operator for decode and prefill.

    For query t and head h over J = {j : 0 <= indices[t, j] < slots, j < topk_length[t]}::

        s_j = softmax_scale * (q[t, h] . k_j)    lse = ln(sum_J exp(s_j))
        out = sum_J exp(s_j - lse) * v_j         v_j = the first 512 values of k_j

    An empty J gives out = 0 and lse = -inf. A duplicate counts twice. Excluded entries are not
    read.

    Parameters
    ----------
    q : [T, H, 576] bf16, or a pair ([T, H, 512], [T, H, 64])
        The pair (ql_nope, q_pe) is read in place.
    kv : [pages, block_size, row], row = 576 bf16 or 656 bytes
        A paged cache (also with a head axis), or flat rows [tokens, row].
    indices : [T, K] int32
        Slots; negative or out of range = none. Any K, 0 included.
    softmax_scale : float
        Multiplies q . k; (qk_nope_head_dim + qk_rope_head_dim) ** -0.5 in DeepSeek's models.
    topk_length : [T] int32, optional
        Columns in use, clamped to [0, K].
    attn_sink : [H] fp32, optional
        Multiplies out by 1 / (1 + exp(sink - lse)); lse is unchanged.
    extra_kv, extra_indices, extra_topk_length : a cache, [T, K'] and [T] int32, optional
        A second cache of any format, its index list and lengths: one softmax over both.
    num_splits : int
        0 lets the plan choose, and may cut long rows among short ones by the lengths of all lists;
        1 to 64 cuts the K columns into that many ranges and so fixes the order of the sum: a row's
        bits do not depend on the rest of the batch then.
    kv_format : "bfloat16" (or "auto"), "fp8_ds_mla" or None
        Of `kv`; None takes it from dtype and last dimension, as for `extra_kv` always.
    return_max_logits : bool
        Whether to return max_logits too (so does giving `max_logits`).
    out : [T, H, 512] bf16, optional
    lse, max_logits : [T, H] fp32, optional
    workspace : [bytes] uint8, optional
        Scratch memory of at least `attention_workspace_size` bytes, with any contents. Calls on one
        stream may share it. Left out, it is taken like `out`.
    stream : int handle or stream object, optional

    Returns
    -------
    (out, lse), or (out, lse, max_logits): lse a natural logarithm, max_logits the largest s_j.

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        H outside 1 to 128, `num_splits` outside 0 to 64, a workspace too small.
        Else as `help(sparse_mla.ops)` says, for every operator.

    Source: FlashMLA's sparse decode and prefill kernels; DeepSeek-V3.2, equation of sparse MLA.

    Examples
    --------
    >>> import numpy as np, ml_dtypes, sparse_mla
    >>> q, kv = (np.ones(shape, ml_dtypes.bfloat16) for shape in ((1, 16, 576), (9, 576)))
    >>> slots = np.array([[0, 3, -1]], np.int32)
    >>> out, lse = sparse_mla.sparse_attention(q, kv, slots, softmax_scale=1 / 576)
    >>> out.shape, round(float(lse[0, 0]), 4)
    ((1, 16, 512), 1.6931)
    """


# For flash_mla.py: the lse of a row without keys is +inf.
_attention_plus_inf = _C.Operator(vars(sparse_attention)["__wrapped__"], "_attention_plus_inf")


@_operator()
def attention_workspace_size(
    num_tokens: int,
    num_heads: int,
    topk: int,
    *,
    extra_topk: int = 0,
    num_splits: int = 0,
    device: Any,
) -> int:
    """Bytes of workspace that `sparse_attention` needs, from shapes alone.

    Parameters
    ----------
    num_tokens, num_heads, topk, extra_topk, num_splits : int
        T, H, K, K' and the argument of the same name. The size grows with each of T, H and K, so
        one workspace serves every smaller batch.
    device : "cpu", "cuda" (the first GPU), "cuda:1", or what prints itself so

    Returns
    -------
    int, in bytes; 0 where none is needed.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        H outside 1 to 128, `num_splits` outside 0 to 64, a negative size.

    Examples
    --------
    >>> import sparse_mla
    >>> sparse_mla.attention_workspace_size(0, 16, 2048, device="cpu") >= 0
    True
    """


@_operator(_results.merged)
def merge_attn_states(
    out_a: Array,
    lse_a: Array,
    out_b: Array,
    lse_b: Array,
    *,
    out: Array | None = None,
    lse: Array | None = None,
    stream: Stream = None,
) -> tuple[Array, Array]:
    """Merge two partial results over disjoint key sets, weighted by their softmax sums.

    lse = ln(exp(lse_a) + exp(lse_b)); out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b.
    An lse of +inf counts as -inf (an empty part); where both are, out is out_a and lse -inf.

    Parameters
    ----------
    out_a, out_b : [T, H, V] bf16 or fp32
    lse_a, lse_b : [T, H] fp32
        Natural logarithms.
    out : [T, H, V], the dtype of out_a, optional
    lse : [T, H] fp32, optional
    stream : int handle or stream object, optional

    Returns
    -------
    (out, lse).

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        Shapes that differ.
        Else as `help(sparse_mla.ops)` says, for every operator.

    Source: section 2.2 of "FlashInfer" (arXiv:2501.01005), the attention state's merge operator.

    Examples
    --------
    >>> import numpy as np, sparse_mla
    >>> ones, zero = np.ones((1, 1, 4), np.float32), np.zeros((1, 1), np.float32)
    >>> out, lse = sparse_mla.merge_attn_states(ones, zero, 3 * ones, zero)
    >>> out[0, 0, 0].item(), round(lse.item(), 4)
    (2.0, 0.6931)
    """


# --- absorption ----------------------------------------------------------------------------------


def split_kv_b_proj(
    weight: Array | Callable[[Array], Array],
    *,
    num_heads: int,
    qk_nope_head_dim: int,
    v_head_dim: int,
    weight_scale_inv: Array | None = None,
) -> tuple[Array, Array]:
    """Split the weight of kv_b_proj into W_UK and W_UV, in bf16.

    Parameters
    ----------
    weight : [512, H * (Pn + Pv)] or its transpose, or a callable
        bf16, fp16 or fp32; or e4m3 (float8_e4m3fn, uint8) with `weight_scale_inv`. Where both
        readings of a shape fit, it is [512, H * (Pn + Pv)]. A callable (a linear layer, quantised
        or not) is applied once to the identity matrix [512, 512] and gives the matrix, alone or as
        the first item of a tuple; a layer with a bias is refused. The identity is a float32 NumPy
        array or, for a layer with a torch `.weight`, a torch tensor on its device, in its dtype if
        that is a floating-point type of 16 bits or more, else in bf16.
    num_heads, qk_nope_head_dim, v_head_dim : int
        H, Pn and Pv.
    weight_scale_inv : [ceil(rows / 128), ceil(columns / 128)] fp32, optional
        One scale per 128 x 128 block of `weight` as it is stored.

    Returns
    -------
    (W_UK [512, H, Pn], W_UV [512, H, Pv]), bf16.

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        A shape that is not [512, H * (Pn + Pv)] either way, e4m3 without scales.
        Else as `help(sparse_mla.ops)` says, for every operator.

    Source: vLLM's process_weights_after_loading; the block scales are DeepSeek-V3's.

    Examples
    --------
    >>> import numpy as np, sparse_mla
    >>> sizes = dict(num_heads=2, qk_nope_head_dim=128, v_head_dim=64)
    >>> w_uk, w_uv = sparse_mla.split_kv_b_proj(np.ones((512, 384), np.float32), **sizes)
    >>> w_uk.shape, w_uv.shape
    ((512, 2, 128), (512, 2, 64))
    """
    if callable(weight):
        if weight_scale_inv is not None:
            raise ValueError(
                "split_kv_b_proj: `weight_scale_inv` must be None for a callable, got an array"
            )
        weight = _layer_weight(weight)
    return _split_kv_b_proj(weight, weight_scale_inv, num_heads, qk_nope_head_dim, v_head_dim)


@_operator()
def _split_kv_b_proj(
    weight: Array,
    weight_scale_inv: Array | None,
    num_heads: int,
    qk_nope_head_dim: int,
    v_head_dim: int,
) -> tuple[Array, Array]:
    """Of a matrix."""


def _layer_weight(layer: Callable[[Array], Any]) -> Array:
    """The matrix that a layer multiplies with, whatever form it is stored in."""
    if getattr(layer, "bias", None) is not None:
        raise ValueError("split_kv_b_proj: `weight` must be a layer without bias, got one with it")
    torch = sys.modules.get("torch")
    stored = getattr(layer, "weight", None)
    if torch is not None and isinstance(stored, torch.Tensor):
        plain = stored.dtype.is_floating_point and stored.dtype.itemsize > 1
        dtype = stored.dtype if plain else torch.bfloat16
        with torch.no_grad():
            result = layer(torch.eye(512, dtype=dtype, device=stored.device))
    else:
        import numpy as np

        result = layer(np.eye(512, dtype=np.float32))
    return result[0] if isinstance(result, tuple) else result


@_operator(_results.latents)
def k_up_proj(
    q_nope: Array, W_UK: Array, *, out: Array | None = None, stream: Stream = None
) -> Array:
    """Absorb W_UK into the query: out[t, h, l] = sum_p q_nope[t, h, p] * W_UK[l, h, p].

    Parameters
    ----------
    q_nope : [T, H, Pn] bf16
        The queries' part without RoPE.
    W_UK : [512, H, Pn] bf16
    out : [T, H, 512] bf16, optional
    stream : int handle or stream object, optional

    Returns
    -------
    out, accumulated in fp32.

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        H outside 1 to 128, shapes that do not match; on CUDA no cuBLAS, which is loaded when first
        needed.
        Else as `help(sparse_mla.ops)` says, for every operator.

    Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1.2: W_UK absorbed into W_Q.

    Examples
    --------
    >>> import numpy as np, ml_dtypes, sparse_mla
    >>> q, w = np.ones((1, 2, 4), ml_dtypes.bfloat16), np.ones((512, 2, 4), ml_dtypes.bfloat16)
    >>> sparse_mla.k_up_proj(q, w)[0, 0, 0].item()
    4.0
    """


@_operator(_results.projected_values)
def v_up_proj(x: Array, W_UV: Array, *, out: Array | None = None, stream: Stream = None) -> Array:
    """Project the latent output up: out[t, h, v] = sum_l x[t, h, l] * W_UV[l, h, v].

    Parameters
    ----------
    x : [T, H, 512] bf16
        What the attention returned.
    W_UV : [512, H, Pv] bf16
    out : [T, H, Pv] bf16, optional
    stream : int handle or stream object, optional

    Returns
    -------
    out, accumulated in fp32.

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        H outside 1 to 128, shapes that do not match; on CUDA no cuBLAS, which is loaded when first
        needed.
        Else as `help(sparse_mla.ops)` says, for every operator.

    Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1.2: W_UV absorbed into W_O.

    Examples
    --------
    >>> import numpy as np, ml_dtypes, sparse_mla
    >>> x, w = np.ones((1, 2, 512), ml_dtypes.bfloat16), np.ones((512, 2, 4), ml_dtypes.bfloat16)
    >>> sparse_mla.v_up_proj(x, w).shape
    (1, 2, 4)
    """


@_operator(_results.quantized)
def dynamic_per_tensor_quant(
    x: Array, *, out: Array | None = None, stream: Stream = None
) -> tuple[Array, Array]:
    """Quantise an array to e4m3 with one scale.

    scale = max(amax, 1e-10) / 448 and out = e4m3(x / scale), a true division, saturating.

    Parameters
    ----------
    x : [...] bf16, fp16 or fp32, any rank up to 8
        Any strides, the last dimension's included.
    out : the shape of x, float8_e4m3fn or uint8, optional
    stream : int handle or stream object, optional

    Returns
    -------
    (out, scale): scale is fp32 without dimensions; x is about out * scale.

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        An `out` of another shape, more than 8 dimensions.
        Else as `help(sparse_mla.ops)` says, for every operator.

    Source: vLLM's dynamic_per_batched_tensor_quant, with a true division.

    Examples
    --------
    >>> import numpy as np, sparse_mla
    >>> out, scale = sparse_mla.dynamic_per_tensor_quant(np.array([0.5, -2.0], np.float32))
    >>> out.tolist(), round(scale.item() * 448, 4)
    ([112.0, -448.0], 2.0)
    """


# --- planning ------------------------------------------------------------------------------------


def split_decodes_and_prefills(
    query_start_loc: Any,
    num_actual_tokens: int,
    *,
    decode_threshold: int = 1,
    require_uniform: bool = False,
) -> tuple[int, int, int, int]:
    """Count the decodes that lead a batch, and what follows them.

    Parameters
    ----------
    query_start_loc : [R + 1] integers in host memory
        Where each request's query tokens start; from 0, never decreasing. Array, list or tuple.
    num_actual_tokens : int
        At least query_start_loc[R]; more means padding tokens.
    decode_threshold : int
        A leading request with at most so many query tokens is a decode.
    require_uniform : bool
        Whether decodes must all have the first one's length. Requests of length 0 may only close a
        batch of decodes (graph padding).

    Returns
    -------
    (num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens).

    Raises
    ------
    TypeError, ValueError
        Starts that decrease or do not begin with 0, more tokens than num_actual_tokens, a request
        of length 0 anywhere but at the end of a batch of decodes, values beyond int32.

    Source: vLLM's split_decodes_and_prefills.

    Examples
    --------
    >>> import sparse_mla
    >>> sparse_mla.split_decodes_and_prefills([0, 1, 2, 9], 9)
    (2, 1, 2, 7)
    """
    return _C.split_decodes_and_prefills(
        query_start_loc, num_actual_tokens, decode_threshold, require_uniform
    )


def split_prefill_chunks(seq_lens: Any, workspace_tokens: int) -> list[tuple[int, int]]:
    """Pack requests, in order, into chunks whose lengths together fit the workspace.

    Parameters
    ----------
    seq_lens : [R] integers in host memory
        Array, list or tuple.
    workspace_tokens : int
        A request longer than this is a ValueError that names both numbers.

    Returns
    -------
    [(start, end), ...]: requests start to end - 1 form a chunk.

    Raises
    ------
    TypeError, ValueError
        A negative length, one longer than the workspace, values beyond int32.

    Source: vLLM's split_prefill_chunks.

    Examples
    --------
    >>> import sparse_mla
    >>> sparse_mla.split_prefill_chunks([10, 15, 20, 5], 25)
    [(0, 2), (2, 4)]
    """
    return _C.split_prefill_chunks(seq_lens, workspace_tokens)


def get_prefill_workspace_size(max_model_len: int) -> int:
    """Tokens of the prefill workspace by default: 5 * max_model_len.

    Parameters
    ----------
    max_model_len : int
        Tokens of the longest request.

    Returns
    -------
    int, in tokens of 1152 bytes.

    Raises
    ------
    TypeError, ValueError
        Not an int, or one below 0 or beyond int32.

    Source: vLLM's get_prefill_workspace_size.

    Examples
    --------
    >>> import sparse_mla
    >>> sparse_mla.get_prefill_workspace_size(163840)
    819200
    """
    return _C.get_prefill_workspace_size(max_model_len)


# --- introspection -------------------------------------------------------------------------------


def kernels() -> list[dict[str, Any]]:
    """The rows of the dispatch table: which kernel serves which arguments.

    Returns
    -------
    A list of dicts: device ("cpu", "cuda"), arch (instruction set, or the oldest architecture of
    GPUs), kv_format, heads, name (the source file), and whether this machine has it available and
    attention calls may have it selected. Of the rows that fit a call the first serves it; on a GPU,
    unless the call gives `num_splits`, the one that is estimated to be fastest. A build without
    CUDA has no rows of it.

    Examples
    --------
    >>> import sparse_mla
    >>> any(row["selected"] for row in sparse_mla.kernels())
    True
    """
    return _C.kernels()


def build_info() -> dict[str, Any]:
    """How this build was made, and what it found on this machine.

    Returns
    -------
    A dict: version, core_version, compiler, flags (the build variant), cuda (the toolkit's version
    and origin; "none: ..." and how to get it in a CPU-only build), cuda_archs (what the kernels
    were compiled for), dlpack and numpy_api (versions), openmp (its date as an int, 0 = none),
    cpu_features (instruction sets that there is a kernel for).

    Examples
    --------
    >>> import sparse_mla
    >>> sparse_mla.build_info()["version"] == sparse_mla.__version__
    True
    """
    return _C.build_info()


def get_include() -> str:
    """The folder of sparse_mla.h and dlpack/dlpack.h, for C code that calls the core.

    Returns
    -------
    str, a path for a compiler's -I.

    Examples
    --------
    >>> import sparse_mla
    >>> sparse_mla.get_include().endswith("include")
    True
    """
    return path.join(path.dirname(__file__), "include")
