"""Writes tokens to a cache, and reads rows of a cache back."""

from __future__ import annotations

from sparse_mla._types import (
    ConcatFormat,
    Float,
    IndexFormat,
    KvFormat,
    Like,
    Result,
    Written,
    overload,
)
from sparse_mla.ops._declare import Array, Stream, operator

__all__ = [
    "concat_and_cache_mla",
    "dequantize_and_gather_k_cache",
    "dequantize_kv_cache",
    "gather_kv_cache",
    "indexer_k_quant_and_cache",
    "quantize_and_insert_k_cache",
]


@overload
def concat_and_cache_mla(
    kv_c: Array,
    k_pe: Array | None,
    kv_cache: Written,
    slot_mapping: Array,
    *,
    kv_scale: float | Array = 1.0,
    kv_format: ConcatFormat | None = None,
    stream: Stream = None,
) -> Written: ...
@overload
def concat_and_cache_mla(
    kv_c: Array,
    k_pe: Array | None,
    kv_cache: Written,
    slot_mapping: Array,
    *,
    kv_scale: float | Array = 1.0,
    kv_cache_dtype: ConcatFormat | None = None,
    stream: Stream = None,
) -> Written: ...
@operator  # type: ignore[misc] # it takes either name of the format
def concat_and_cache_mla(
    kv_c: Array,
    k_pe: Array | None,
    kv_cache: Written,
    slot_mapping: Array,
    *,
    kv_scale: float | Array = 1.0,
    kv_cache_dtype: ConcatFormat | None = None,
    stream: Stream = None,
) -> Written:
    """Write one token per entry of `slot_mapping` into a paged cache.

    The latent and the RoPE part are two arrays; `quantize_and_insert_k_cache` writes whole keys.
    The value is rounded to bf16 first. An fp8_ds_mla row stores, for each tile of 128 values,
    scale = max(amax / 448, FLT_MIN) and e4m3(x / scale), saturating; its RoPE part stays bf16. The
    formats "fp8_e4m3" and "fp8_nope" are for keys of 512 values, without RoPE; their bytes are
    those of `quantize_and_insert_k_cache`.

    Parameters
    ----------
    kv_c : [>= T, 512] bf16, fp16 or fp32
        The compressed latents (the part without RoPE). T is the length of `slot_mapping`.
    k_pe : [>= T, 64], the dtype of kv_c
        The RoPE part of the keys. [>= T, 0] or None for keys of 512 values.
    kv_cache : [pages, block_size, row], row = 576 or 512 bf16, 656, 528 or 512 bytes, written
        The cache may also have a head axis, or be flat.
    slot_mapping : [T] int64 or int32
        The slot of each token. A token with a negative slot is skipped. A slot past the end is a
        ValueError on the CPU, before anything is written; on CUDA its token is skipped.
    kv_scale : float, or one fp32, default 1.0
        The scale of an "fp8_e4m3" cache, which its values are divided by.
    kv_cache_dtype : "bfloat16" (or "auto"), "fp8_ds_mla", "fp8_e4m3", "fp8_nope" or None
        None takes the format from the cache's dtype and last dimension; rows of 528 bytes need the
        name "fp8_nope". `kv_format` is the same option.
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

    PyTorch
    -------
    New tokens to their slots: `sparse_mla.concat_and_cache_mla`. Writes `kv_cache`.

    >>> import torch
    >>> import sparse_mla.integrations.torch as smla
    >>> cache = torch.zeros((2, 64, 656), dtype=torch.uint8)
    >>> write = torch.compile(smla.concat_and_cache_mla, backend="aot_eager")
    >>> write(torch.ones(1, 512), torch.ones(1, 64), cache, torch.tensor([65])) is cache
    True
    >>> cache[0].sum().item(), cache[1, 1, 0].item()
    (0, 126)

    JAX
    ---
    The cache after `sparse_mla.concat_and_cache_mla`, in place of a donated `kv_cache`.

    Returns: A new array, the shape and dtype of kv_cache.

    >>> import jax, jax.numpy as jnp
    >>> import sparse_mla.integrations.jax as smla
    >>> write = jax.jit(smla.concat_and_cache_mla, donate_argnums=2)
    >>> cache = jnp.zeros((2, 64, 656), jnp.uint8)
    >>> cache = write(jnp.ones((1, 512)), jnp.ones((1, 64)), cache, jnp.array([65]))
    >>> int(cache[0].sum()), int(cache[1, 1, 0])
    (0, 126)
    """


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
def quantize_and_insert_k_cache(
    k: Array,
    k_cache: Written,
    slot_mapping: Array,
    *,
    kv_scale: float | Array = 1.0,
    kv_format: KvFormat | None = None,
    block_size: int | None = None,
    stream: Stream = None,
) -> Written:
    """Write one key of 512 values per entry of `slot_mapping` into a paged cache.

    A key comes after norm and RoPE, and is rounded to bf16 first. Its row is what the format makes
    of it, byte for byte: docs/formats.md has the rules.

    Parameters
    ----------
    k : [>= T, 512] bf16, fp16 or fp32
        Keys, with their RoPE values last. T is the length of `slot_mapping`.
    k_cache : [pages, block_size, row], written
        A cache of 512 values a token: "fp8_v4" (584 bytes), "bfloat16" (512 values), "fp8_e4m3"
        (512 bytes), "fp8_v41", "fp8_v41_split" or "fp8_nope" (528 bytes), "fp4_v41" or
        "fp4_v41_split" (288 bytes). It may also have a head axis, or be flat; split pages may be
        [pages, bytes].
    slot_mapping : [T] int64 or int32
        The slot of each token. A token with a negative slot is skipped. A slot past the end is a
        ValueError on the CPU, before anything is written; on CUDA its token is skipped.
    kv_scale : float, or an array of one fp32
        The scale of an "fp8_e4m3" cache: codes are e4m3(x * (1 / kv_scale)). 1 for every other
        format.
    kv_format : name of a cache format, optional
        None takes the format from the cache's dtype and last dimension. Rows of 528 and 288 bytes
        and split pages as [pages, bytes] need it.
    block_size : int, optional
        Tokens per page. Only split pages as [pages, bytes] need it.
    stream : int handle or stream object, optional

    Returns
    -------
    k_cache, the same object.

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        A slot past the end (CPU), a format of other rows, a `kv_scale` where none belongs.
        `help(sparse_mla.ops)` lists the errors that every operator raises.

    Source: vLLM's operator of this name for DeepSeek V4; formats in csrc/core/kv_format.h.

    Examples
    --------
    >>> import numpy as np, sparse_mla
    >>> cache, k = np.zeros((2, 64, 584), np.uint8), np.full((1, 512), 2, np.float32)
    >>> _ = sparse_mla.quantize_and_insert_k_cache(k, cache, np.array([65]))
    >>> page = cache[1].reshape(-1)  # 64 rows of 576 bytes, then 64 rows of 8 scales
    >>> page[576:578].tolist(), page[64 * 576 + 8 :][:8].tolist()
    ([120, 120], [120, 120, 120, 120, 120, 120, 120, 0])

    PyTorch
    -------
    Whole keys to their slots: `sparse_mla.quantize_and_insert_k_cache`. Writes `k_cache`.

    >>> import torch
    >>> import sparse_mla.integrations.torch as smla
    >>> cache = torch.zeros((2, 64, 584), dtype=torch.uint8)
    >>> smla.quantize_and_insert_k_cache(torch.ones(1, 512), cache, torch.tensor([64])) is cache
    True
    >>> cache[0].sum().item(), cache[1, 0, 0].item()
    (0, 120)

    JAX
    ---
    The cache after `sparse_mla.quantize_and_insert_k_cache`, in place of a donated `k_cache`.

    Returns: A new array, the shape and dtype of k_cache.

    >>> import jax.numpy as jnp
    >>> import sparse_mla.integrations.jax as smla
    >>> cache = jnp.zeros((2, 64, 584), jnp.uint8)
    >>> cache = smla.quantize_and_insert_k_cache(jnp.ones((1, 512)), cache, jnp.array([64]))
    >>> int(cache[0].sum()), int(cache[1, 0, 0])
    (0, 120)
    """


@operator
def indexer_k_quant_and_cache(
    k: Array,
    k_cache: Written,
    slot_mapping: Array,
    *,
    kv_format: IndexFormat | None = None,
    block_size: int | None = None,
    stream: Stream = None,
) -> Written:
    """Write one key of the indexer per entry of `slot_mapping` into a paged cache.

    A key of 128 values is rounded to bf16 first. "fp8_index" stores e4m3(x / s) and one fp32 scale
    s = the smallest power of two with 448 s >= max(amax, 1e-4). "mxfp4_index" stores e2m1(x / s)
    and a scale per 32 values, the smallest power of two with 6 s >= amax.

    Parameters
    ----------
    k : [>= T, 128] bf16, fp16 or fp32
        Keys of the indexer. T is the length of `slot_mapping`.
    k_cache : [pages, block_size, row], row = 132 or 68 bytes, written
        The cache may also have a head axis. Its pages are split, and may be [pages, bytes]: so
        "mxfp4_index" fits into pages of 132 bytes a token.
    slot_mapping : [T] int64 or int32
        The slot of each token. A token with a negative slot is skipped. A slot past the end is a
        ValueError on the CPU, before anything is written; on CUDA its token is skipped.
    kv_format : "fp8_index", "mxfp4_index" or None
        None takes the format from the last dimension. Pages as [pages, bytes] need it.
    block_size : int, optional
        Tokens per page. Only split pages as [pages, bytes] need it.
    stream : int handle or stream object, optional

    Returns
    -------
    k_cache, the same object.

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        A slot past the end (CPU), a format that is not the indexer's.
        `help(sparse_mla.ops)` lists the errors that every operator raises.

    Source: vLLM's operator of this name; formats in csrc/core/kv_format.h.

    Examples
    --------
    >>> import numpy as np, sparse_mla
    >>> cache, k = np.zeros((2, 132 * 4), np.uint8), np.full((1, 128), 7, np.float32)
    >>> how = {"kv_format": "mxfp4_index", "block_size": 4}
    >>> _ = sparse_mla.indexer_k_quant_and_cache(k, cache, np.array([5]), **how)
    >>> cache[1, 64:66].tolist(), cache[1, 4 * 64 + 4 :][:4].tolist()
    ([102, 102], [128, 128, 128, 128])

    PyTorch
    -------
    The indexer's keys to their slots: `sparse_mla.indexer_k_quant_and_cache`. Writes `k_cache`.

    >>> import torch
    >>> import sparse_mla.integrations.torch as smla
    >>> cache = torch.zeros((2, 64, 132), dtype=torch.uint8)
    >>> smla.indexer_k_quant_and_cache(torch.ones(1, 128), cache, torch.tensor([64])) is cache
    True
    >>> cache[0].sum().item(), cache[1, 0, 0].item()
    (0, 120)

    JAX
    ---
    The cache after `sparse_mla.indexer_k_quant_and_cache`, in place of a donated `k_cache`.

    Returns: A new array, the shape and dtype of k_cache.

    >>> import jax.numpy as jnp
    >>> import sparse_mla.integrations.jax as smla
    >>> cache = jnp.zeros((2, 64, 132), jnp.uint8)
    >>> cache = smla.indexer_k_quant_and_cache(jnp.ones((1, 128)), cache, jnp.array([64]))
    >>> int(cache[0].sum()), int(cache[1, 0, 0])
    (0, 120)
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
