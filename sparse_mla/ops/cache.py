"""Writes tokens to a cache, and reads rows of a cache back."""

from __future__ import annotations

from sparse_mla import _results
from sparse_mla.ops._declare import Array, Stream, operator

__all__ = [
    "concat_and_cache_mla",
    "dequantize_kv_cache",
    "gather_kv_cache",
]


@operator(_results.none)
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
        The compressed latents (the part without RoPE). T is the length of `slot_mapping`.
    k_pe : [>= T, 64], the dtype of kv_c
        The RoPE part of the keys.
    kv_cache : [pages, block_size, row], row = 576 bf16, 512 bf16 or 656 bytes, written
        The cache may also have a head axis, or be flat.
    slot_mapping : [T] int64 or int32
        The slot of each token. A token with a negative slot is skipped. A slot past the end is a
        ValueError on the CPU, before anything is written; on CUDA its token is skipped.
    kv_cache_dtype : "bfloat16" (or "auto"), "fp8_ds_mla" or None
        None takes the format from the cache's dtype and last dimension.
    stream : int handle or stream object, optional

    Returns
    -------
    kv_cache, the same object.

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        A slot past the end (CPU), a cache of no known format.
        `help(sparse_mla.ops)` lists the errors that every operator raises.

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


@operator(_results.none)
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
    kv_cache : [pages, block_size, row], row = 576 bf16, 512 bf16 or 656 bytes
        The cache may also have a head axis, or be flat.
    block_table : [R, W] int32
        Page numbers of each request. A bad page is a ValueError on the CPU; on CUDA its rows are
        written as zeros.
    seq_lens, workspace_starts : [R] int32
        Tokens to gather, and the first row of `out`, per request. Length 0 writes nothing. Rows
        beyond `out` are a ValueError on the CPU; on CUDA they are left out.
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
    """


@operator(_results.dequantized)
def dequantize_kv_cache(
    kv_cache: Array, *, kv_format: str | None = None, dtype: str = "float32"
) -> Array:
    """Every value of a cache as floats, for inspection.

    Parameters
    ----------
    kv_cache : [pages, block_size, row], row = 576 bf16, 512 bf16 or 656 bytes
        The cache may also have a head axis, or be flat.
    kv_format : "bfloat16" (or "auto"), "fp8_ds_mla" or None
        None takes the format from the cache's dtype and last dimension.
    dtype : "float32" or "bfloat16"
        An FP8 value is e4m3 * scale. The product is fp32, and is rounded once for "bfloat16".

    Returns
    -------
    [pages, block_size, 576], or [tokens, 576] for a flat cache.

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
    """
