"""Reads rows of a cache back."""

from __future__ import annotations

from sparse_mla._types import Float, KvFormat, Like, Result, Written
from sparse_mla.ops._declare import Array, Stream, operator

__all__ = ["dequantize_and_gather_k_cache", "dequantize_kv_cache", "gather_kv_cache"]


@operator
def gather_kv_cache(
    kv_cache: Array,
    block_table: Array,
    seq_lens: Array,
    workspace_starts: Array,
    *,
    out: Written,
    seq_starts: Array | None = None,
    kv_scale: float | Array = 1.0,
    kv_format: KvFormat | None = None,
    block_size: int | None = None,
    stream: Stream = None,
) -> Written:
    """Gather the rows of several requests from a paged cache into a flat bf16 workspace.

    out[workspace_starts[r] + p] = bf16(row of position p + seq_starts[r]) for p < seq_lens[r];
    quantised rows are upconverted as bf16(code * scale), one rounding.

    Parameters
    ----------
    kv_cache : [pages, block_size, row], of any format
        The cache may also have a head axis, or be flat; split pages may be [pages, bytes].
    block_table : [R, W] int32
        Page numbers of each request. A bad page is a ValueError on the CPU; on CUDA its rows are
        written as zeros.
    seq_lens, workspace_starts : [R] int32
        Tokens to gather, and the first row of `out`, per request. Length 0 writes nothing. Rows
        beyond `out` are a ValueError on the CPU; on CUDA they are left out.
    out : [>= sum of seq_lens, 576] bf16, written
        512 values a row for formats of 512 values, 128 for the indexer's.
    seq_starts : [R] int32, optional
        First position to gather, per request; 0 when left out.
    kv_scale : float, or an array of one fp32
        The scale of an "fp8_e4m3" cache; 1 for every other format.
    kv_format : name of a cache format, optional
        None takes the format from the cache's dtype and last dimension. Rows of 528 and 288 bytes
        and split pages as [pages, bytes] need it.
    block_size : int, optional
        Tokens per page. Only split pages as [pages, bytes] need it.
    stream : int handle or stream object, optional

    Returns
    -------
    out, the same object.

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        A bad page, or rows beyond `out` (CPU), before anything is written.
        `help(sparse_mla.ops)` lists the errors that every operator raises.

    Source: the chunked upconvert-gather of vLLM, cp_gather_and_upconvert_fp8_kv_cache.

    Examples
    --------
    >>> import numpy as np, ml_dtypes, sparse_mla
    >>> cache = np.ones((4, 64, 576), ml_dtypes.bfloat16)
    >>> out, one = np.zeros((9, 576), ml_dtypes.bfloat16), np.array([7], np.int32)
    >>> _ = sparse_mla.gather_kv_cache(cache, np.array([[3]], np.int32), one, one - 6, out=out)
    >>> out[:, 0].astype(int).tolist()
    [0, 1, 1, 1, 1, 1, 1, 1, 0]

    PyTorch
    -------
    Rows of some requests to a flat workspace: `sparse_mla.gather_kv_cache`. Writes `out`.

    >>> import torch
    >>> import sparse_mla.integrations.torch as smla
    >>> cache = torch.ones((4, 64, 576), dtype=torch.bfloat16)
    >>> out, page, seven, one = cache.new_zeros(9, 576), *torch.tensor([3, 7, 1]).int()[:, None]
    >>> smla.gather_kv_cache(cache, page[None], seven, one, out=out)[:, 0].int().tolist()
    [0, 1, 1, 1, 1, 1, 1, 1, 0]

    JAX
    ---
    `out` after `sparse_mla.gather_kv_cache`, in place of a donated `out`.

    Returns: A new array, the shape and dtype of out.

    >>> import jax.numpy as jnp
    >>> import sparse_mla.integrations.jax as smla
    >>> cache, out = jnp.ones((4, 64, 576), jnp.bfloat16), jnp.zeros((9, 576), jnp.bfloat16)
    >>> out = smla.gather_kv_cache(cache, jnp.array([[3]]), jnp.array([7]), jnp.array([1]), out=out)
    >>> out[:, 0].astype(int).tolist()
    [0, 1, 1, 1, 1, 1, 1, 1, 0]
    """


@operator
def dequantize_kv_cache(
    kv_cache: Like[Result],
    *,
    kv_scale: float | Array = 1.0,
    kv_format: KvFormat | None = None,
    block_size: int | None = None,
    dtype: Float = "float32",
) -> Result:
    """Every value of a cache as floats, for inspection.

    Parameters
    ----------
    kv_cache : [pages, block_size, row], of any format
        The cache may also have a head axis, or be flat; split pages may be [pages, bytes].
    kv_scale : float, or an array of one fp32
        The scale of an "fp8_e4m3" cache; 1 for every other format.
    kv_format : name of a cache format, optional
        None takes the format from the cache's dtype and last dimension. Rows of 528 and 288 bytes
        and split pages as [pages, bytes] need it.
    block_size : int, optional
        Tokens per page. Only split pages as [pages, bytes] need it.
    dtype : "float32" or "bfloat16"
        A quantised value is code * scale. The product is fp32, and is rounded once for "bfloat16".

    Returns
    -------
    [pages, block_size, 576], or [tokens, 576] for a flat cache. Formats of 512 values have 512 in
    place of 576, and the indexer's formats 128.

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        A cache of no known format, another `dtype`.
        `help(sparse_mla.ops)` lists the errors that every operator raises.

    Source: the row formats of csrc/core/kv_format.h, drawn in docs/formats.md.

    Examples
    --------
    >>> import numpy as np, sparse_mla
    >>> sparse_mla.dequantize_kv_cache(np.zeros((2, 64, 656), np.uint8)).shape
    (2, 64, 576)

    PyTorch
    -------
    Every value of a cache as floats, for inspection: `sparse_mla.dequantize_kv_cache`.

    >>> import torch
    >>> import sparse_mla.integrations.torch as smla
    >>> smla.dequantize_kv_cache(torch.zeros((2, 64, 656), dtype=torch.uint8)).shape
    torch.Size([2, 64, 576])

    JAX
    ---
    Every value of a cache as floats, for inspection: `sparse_mla.dequantize_kv_cache`.

    >>> import jax.numpy as jnp
    >>> import sparse_mla.integrations.jax as smla
    >>> smla.dequantize_kv_cache(jnp.zeros((2, 64, 656), jnp.uint8)).shape
    (2, 64, 576)
    """


@operator
def dequantize_and_gather_k_cache(
    out: Written,
    k_cache: Array,
    seq_lens: Array,
    gather_lens: Array | None,
    block_table: Array,
    block_size: int,
    offset: int,
    *,
    kv_scale: float | Array = 1.0,
    kv_format: KvFormat | None = None,
    stream: Stream = None,
) -> Written:
    """Gather the last rows of each request from a paged cache into a part of `out`.

    out[r, offset + i] = bf16(row of position seq_lens[r] - g + i) for i < g = gather_lens[r].
    Nothing else in `out` changes.

    Parameters
    ----------
    out : [R, M, 512] bf16, written
        128 values a row for the indexer's formats, 576 for formats of 576 values.
    k_cache : [pages, block_size, row], of any format
        The cache may also have a head axis, or be flat; split pages may be [pages, bytes].
    seq_lens : [R] int32
        Cached tokens of each request.
    gather_lens : [R] int32 or None
        How many of them to gather, the last ones; None gathers all.
    block_table : [R, W] int32
        Page numbers of each request. A bad page is a ValueError on the CPU; on CUDA its rows are
        written as zeros.
    block_size : int
        Tokens per page.
    offset : int
        The first row of `out` that is written, 0 to M. Rows beyond M are a ValueError on the CPU;
        on CUDA they are left out.
    kv_scale : float, or an array of one fp32
        The scale of an "fp8_e4m3" cache; 1 for every other format.
    kv_format : name of a cache format, optional
        None takes the format from the cache's dtype and last dimension. Rows of 528 and 288 bytes
        and split pages as [pages, bytes] need it.
    stream : int handle or stream object, optional

    Returns
    -------
    out, the same object.

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        A bad page, a gather_lens above its seq_lens, or rows beyond `out` (CPU), before anything is
        written. `help(sparse_mla.ops)` lists the errors that every operator raises.

    Source: vLLM's operator of this name for DeepSeek V4.

    Examples
    --------
    >>> import numpy as np, ml_dtypes, sparse_mla
    >>> cache = np.arange(8, dtype=np.float32).repeat(512).reshape(2, 4, 512)
    >>> cache, out = cache.astype(ml_dtypes.bfloat16), np.zeros((1, 5, 512), ml_dtypes.bfloat16)
    >>> lens, three, table = (np.array(x, np.int32) for x in ([6], [3], [[1, 0]]))
    >>> _ = sparse_mla.dequantize_and_gather_k_cache(out, cache, lens, three, table, 4, 1)
    >>> out[0, :, 0].astype(int).tolist()
    [0, 7, 0, 1, 0]

    PyTorch
    -------
    The last rows of requests to a part of `out`: `sparse_mla.dequantize_and_gather_k_cache`. Writes
    `out`.

    >>> import torch
    >>> import sparse_mla.integrations.torch as smla
    >>> cache = torch.ones((4, 64, 512), dtype=torch.bfloat16)
    >>> out, table, seven = cache.new_zeros(1, 9, 512), *torch.tensor([[3], [7]]).int()
    >>> _ = smla.dequantize_and_gather_k_cache(out, cache, seven, None, table[None], 64, 1)
    >>> out[0, :, 0].int().tolist()
    [0, 1, 1, 1, 1, 1, 1, 1, 0]

    JAX
    ---
    `out` after `sparse_mla.dequantize_and_gather_k_cache`, in place of a donated `out`.

    Returns: A new array, the shape and dtype of out.

    >>> import jax.numpy as jnp
    >>> import sparse_mla.integrations.jax as smla
    >>> cache, out = jnp.ones((4, 64, 512), jnp.bfloat16), jnp.zeros((1, 9, 512), jnp.bfloat16)
    >>> table, seven = jnp.array([[3]]), jnp.array([7])
    >>> out = smla.dequantize_and_gather_k_cache(out, cache, seven, None, table, 64, 1)
    >>> out[0, :, 0].astype(int).tolist()
    [0, 1, 1, 1, 1, 1, 1, 1, 0]
    """
