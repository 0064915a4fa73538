"""Writes tokens to a cache, and copies rows between caches."""

from __future__ import annotations

from sparse_mla._types import ConcatFormat, IndexFormat, KvFormat, Written
from sparse_mla.ops._declare import Array, Stream, operator

__all__ = [
    "concat_and_cache_mla",
    "indexer_k_quant_and_cache",
    "quantize_and_insert_k_cache",
    "reshape_and_cache",
    "transfer_kv_cache",
]


@operator
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
    scale = max(amax / 448, FLT_MIN) and e4m3(x / scale), saturating; its RoPE part stays bf16. An
    fp8_token row is the same with one scale for all 512 values, written four times. An fp8_e4m3 row
    of 576 values stores e4m3(x / kv_scale) of both parts. Rows of 512 values without RoPE, of
    formats "fp8_e4m3" and "fp8_nope", are those of `quantize_and_insert_k_cache`.

    Parameters
    ----------
    kv_c : [>= T, 512] bf16, fp16 or fp32
        The compressed latents (the part without RoPE). T is the length of `slot_mapping`.
    k_pe : [>= T, 64], the dtype of kv_c
        The RoPE part of the keys. [>= T, 0] or None for keys of 512 values.
    kv_cache : [pages, block_size, row], row = 576 or 512 bf16, 656, 576, 528 or 512 bytes, written
        The cache may also have a head axis, or be flat.
    slot_mapping : [T] int64 or int32
        The slot of each token. A token with a negative slot is skipped. A slot past the end is a
        ValueError on the CPU, before anything is written; on CUDA its token is skipped.
    kv_scale : float, or one fp32, default 1.0
        The scale of an "fp8_e4m3" cache, which its values are divided by.
    kv_cache_dtype : "bfloat16" (or "auto"), "fp8_ds_mla", "fp8_e4m3", "fp8_nope", "fp8_token", None
        None takes the format from the cache's dtype and last dimension; rows of 528 bytes need the
        name "fp8_nope", and rows of 656 bytes are "fp8_token" by name alone. `kv_format` is the
        same option.
    stream : int handle or stream object, optional

    Returns
    -------
    kv_cache, the same object. In JAX a new array.

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
    >>> cache = sparse_mla.concat_and_cache_mla(latent, rope, cache, np.array([65]))
    >>> int((cache != 0).any(-1).sum()), int(cache[1, 1, 0])
    (1, 126)
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
    k_cache, the same object. In JAX a new array.

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
    >>> cache = sparse_mla.quantize_and_insert_k_cache(k, cache, np.array([65]))
    >>> page = cache[1].reshape(-1)  # 64 rows of 576 bytes, then 64 rows of 8 scales
    >>> page[576:578].tolist(), page[64 * 576 + 8 :][:8].tolist()
    ([120, 120], [120, 120, 120, 120, 120, 120, 120, 0])
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
    k_cache, the same object. In JAX a new array.

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
    >>> cache = sparse_mla.indexer_k_quant_and_cache(k, cache, np.array([5]), **how)
    >>> cache[1, 64:66].tolist(), cache[1, 4 * 64 + 4 :][:4].tolist()
    ([102, 102], [128, 128, 128, 128])
    """


@operator
def reshape_and_cache(
    k: Array,
    v: Array,
    k_cache: Written,
    v_cache: Written,
    slot_mapping: Array,
    *,
    k_scale: float | Array = 1.0,
    v_scale: float | Array = 1.0,
    stream: Stream = None,
) -> tuple[Written, Written]:
    """Write the keys and values of a token per entry of `slot_mapping` into pages.

    The pages are those that `paged_attention` reads, of GQA, MQA and MHA models. A cache of e4m3
    gets e4m3(x / scale), true division in fp32, saturating; NaN keeps its sign. Another cache gets
    copies.

    Parameters
    ----------
    k : [>= T, Hk, D] bf16, fp16 or fp32
        Keys of Hk KV heads. T is the length of `slot_mapping`. D is a multiple of 8, at most 576.
    v : [>= T, Hk, Dv], the dtype of k
        Values. Dv is a multiple of 8, at most 512.
    k_cache : [P, ps, Hk, D], the dtype of k, e4m3 or uint8, written
        Pages of ps tokens, with any strides but for a contiguous last dimension. Multiples of 16
        bytes, or of 8 in a cache of e4m3, are fast.
    v_cache : [P, ps, Hk, Dv], the dtype of k_cache, written
        Both caches may be views of one buffer: side by side in a row, or pages in turn.
    slot_mapping : [T] int64 or int32
        The slot of each token, page * ps + its row in the page. A token with a negative slot is
        skipped. A slot past the end is a ValueError on the CPU, before anything is written; on CUDA
        its token is skipped.
    k_scale, v_scale : float, or an array of one fp32 or of [Hk] fp32
        What the values of all heads, or of each, are divided by; `paged_attention` takes it as
        `k_descale` or `v_descale`, there [1, Hk]. 1 where the cache is not e4m3.
    stream : int handle or stream object, optional

    Returns
    -------
    k_cache, v_cache, the same objects. In JAX new arrays.

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        A slot past the end (CPU), caches of other pages, heads or dtypes, a scale where none
        belongs. `help(sparse_mla.ops)` lists the errors that every operator raises.

    Source: reshape_and_cache_flash of vLLM.

    Examples
    --------
    >>> import numpy as np, sparse_mla
    >>> k, v = np.full((1, 1, 8), 1.5, np.float32), np.full((1, 1, 8), -1e6, np.float32)
    >>> k_cache, v_cache = np.zeros((2, 2, 4, 1, 8), np.uint8)  # two pages of 4 tokens each
    >>> k_cache, v_cache = sparse_mla.reshape_and_cache(
    ...     k, v, k_cache, v_cache, np.array([6]), k_scale=0.5)
    >>> int(k_cache[1, 2, 0, 0]), int(v_cache[1, 2, 0, 0]), int((v_cache != 0).sum())
    (68, 254, 8)
    """


@operator
def transfer_kv_cache(
    src: Array,
    dst: Written,
    src_slots: Array,
    dst_slots: Array,
    *,
    kv_format: KvFormat | None = None,
    block_size: int | None = None,
    stream: Stream = None,
) -> Written:
    """Copy rows from one cache to another one of the same format, byte for byte.

    Row i goes from slot `src_slots[i]` of `src` to slot `dst_slots[i]` of `dst`. Engines move pages
    with it: to swap requests out and in, to share prefixes, to pass prefills on to decodes.

    On CUDA, where the slots are, each cache may be in memory of their device or in pinned host
    memory: a CPU tensor of PyTorch that is pinned, or an ndarray over memory of
    `cupy.cuda.alloc_pinned_memory`. The kernel reads and writes that memory in place, in one
    launch. The call returns at once, so the host must wait for the stream before it reads what was
    written, or writes what is read. A call that is not captured keeps the memory until it is over.
    In `torch.compile` both caches are on the device of the slots, and in JAX in one memory.

    Parameters
    ----------
    src : [pages, block_size, row]
        A cache of any format (docs/formats.md). It may also have a head axis, or be flat; split
        pages may be [pages, bytes].
    dst : [pages, block_size, row], the format of src, written
        Its page size and strides need not be those of `src`. It may be `src` itself if no row is
        both read and written; otherwise these rows are undefined. Views of one buffer must not
        share rows.
    src_slots : [N] int64 or int32
        Where rows come from. A row with a negative slot in either list is skipped. A slot past the
        end is a ValueError on the CPU, before anything is written; on CUDA its row is skipped.
    dst_slots : [N] int64 or int32
        Where rows go to. If a slot is there twice, the bytes of its row are undefined.
    kv_format : name of a cache format, optional
        That of both caches. None takes it from their dtypes and last dimensions. Rows of 528 and
        288 bytes and split pages as [pages, bytes] need it.
    block_size : int, optional
        Tokens per page of both caches. Only split pages as [pages, bytes] need it.
    stream : int handle or stream object, optional

    Returns
    -------
    dst, the same object. In JAX a new array.

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        A slot past the end (CPU), caches of two formats, caches that overlap, host memory that is
        not pinned. `help(sparse_mla.ops)` lists the errors that every operator raises.

    Source: swap_blocks and copy_blocks of vLLM; formats in csrc/core/kv_format.h.

    Examples
    --------
    >>> import numpy as np, sparse_mla
    >>> src, dst = np.full((2, 64, 656), 7, np.uint8), np.zeros((9, 16, 656), np.uint8)
    >>> dst = sparse_mla.transfer_kv_cache(src, dst, np.array([65, -1]), np.array([18, 0]))
    >>> int(dst[1, 2, 655]), int((dst != 0).sum())
    (7, 656)
    """
