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
    out, the same object. In JAX a new array.

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        A bad page, or rows beyond `out` (CPU), before anything is written.
        `help(sparse_mla.ops)` lists the errors that every operator raises.

    Source: the chunked upconvert-gather of vLLM, cp_gather_and_upconvert_fp8_kv_cache.

    Examples
    --------
    >>> import numpy as np, ml_dtypes, sparse_mla
    >>> cache, table = np.ones((4, 64, 576), ml_dtypes.bfloat16), np.array([[3]], np.int32)
    >>> out, lens = np.zeros((9, 576), ml_dtypes.bfloat16), np.array([7], np.int32)
    >>> out = sparse_mla.gather_kv_cache(cache, table, lens, lens - 6, out=out)
    >>> [int(x) for x in out[:, 0]]
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
    >>> values = sparse_mla.dequantize_kv_cache(np.zeros((2, 64, 656), np.uint8))
    >>> list(values.shape)
    [2, 64, 576]
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
    out, the same object. In JAX a new array.

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        A bad page, a gather_lens above its seq_lens, or rows beyond `out` (CPU), before anything is
        written. `help(sparse_mla.ops)` lists the errors that every operator raises.

    Source: vLLM's operator of this name for DeepSeek V4.

    Examples
    --------
    >>> import numpy as np, ml_dtypes, sparse_mla
    >>> rows = np.ones(512, np.float32) * np.arange(8, dtype=np.float32).reshape(2, 4, 1)
    >>> cache, out = rows.astype(ml_dtypes.bfloat16), np.zeros((1, 5, 512), ml_dtypes.bfloat16)
    >>> lens, three, table = (np.array(x, np.int32) for x in ([6], [3], [[1, 0]]))
    >>> out = sparse_mla.dequantize_and_gather_k_cache(out, cache, lens, three, table, 4, 1)
    >>> [int(x) for x in out[0, :, 0]]
    [0, 7, 0, 1, 0]
    """
