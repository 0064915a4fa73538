"""The compressor of DeepSeek V4: states of tokens, and groups of them as rows of a cache."""

from __future__ import annotations

from sparse_mla._types import KvFormat, Written
from sparse_mla.ops._declare import Array, Stream, operator

__all__ = [
    "compress_norm_rope_store",
    "save_partial_states",
]


@operator
def save_partial_states(
    kv: Array,
    score: Array,
    ape: Array,
    positions: Array,
    state: Written,
    slot_mapping: Array,
    *,
    stream: Stream = None,
) -> Written:
    """Keep what a compressor needs of each token until its group is complete.

    Groups have r positions, and D (512 or 128) is the width of a compressed row. With r = 4 groups
    overlap and c is 2, else c is 1. The state of a token is kv, then score + ape[position % r], in
    fp32: one addition. All devices give the same bytes; a score that the addition makes NaN is the
    positive quiet NaN.

    Parameters
    ----------
    kv, score : [>= T, c D] fp32 or bf16
        Usually the halves of one projection's result. With c = 2 the first D channels are for the
        group after the token's own, the last D for its own.
    ape : [r, c D] fp32
        Added to the scores of each position of a group.
    positions : [>= T] int64 or int32
        A negative position is a ValueError on the CPU. CUDA skips that token.
    state : [pages, block_size, 2 c D] fp32, written
        Pages and rows any stride apart.
    slot_mapping : [T] int64 or int32
        A token with a negative slot is skipped. A slot past the end is a ValueError on the CPU,
        before anything is written; on CUDA its token is skipped. Tokens must have different slots:
        otherwise the CPU keeps the last of them, and CUDA's row may be a mixture.
    stream : int handle or stream object, optional

    Returns
    -------
    state, the same object. In JAX a new array.

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        A width that does not belong to the ratio, a negative position or a slot past the end (CPU).
        `help(sparse_mla.ops)` lists the errors that every operator raises.

    Source: vLLM's save_partial_states; the compressor is DeepSeek V4's.

    Examples
    --------
    >>> import numpy as np, sparse_mla
    >>> kv, score = np.ones((3, 128), np.float32), np.zeros((3, 128), np.float32)
    >>> ape = np.array([[0], [5]], np.float32) * np.ones((2, 128), np.float32)
    >>> state, slots = np.zeros((2, 4, 256), np.float32), np.array([4, 5, -1])
    >>> state = sparse_mla.save_partial_states(kv, score, ape, np.array([6, 7, 8]), state, slots)
    >>> state[1, :3, 0].tolist(), state[1, :3, 255].tolist()
    ([1.0, 1.0, 0.0], [0.0, 5.0, 0.0])
    """


@operator
def compress_norm_rope_store(
    state: Array,
    block_table: Array,
    req_id_per_token: Array,
    positions: Array,
    slot_mapping: Array,
    kv_cache: Written,
    kv_slot_mapping: Array,
    norm_weight: Array,
    rope_table: Array,
    *,
    eps: float,
    ratio: int,
    kv: Array | None = None,
    score: Array | None = None,
    ape: Array | None = None,
    kv_scale: float | Array = 1.0,
    kv_format: KvFormat | None = None,
    block_size: int | None = None,
    stream: Stream = None,
) -> Written:
    """Pool the states of each group that a step completes, and write them as rows of a cache.

    Token t at position p closes a group where (p + 1) % r is 0 and neither of its slots is
    negative. The states of the last c r positions of its request are pooled channel by channel:
    the sum of kv, weighted by the softmax of the scores. Where c is 2 (r = 4), the r positions of
    the group before take part with their first D channels, the others with their last. A position
    without a page, and a score of -inf, take no part; a channel without any part is 0. Then
    x / sqrt(mean(x**2) + eps) * norm_weight, RoPE on the last 64 values at the position that begins
    the group, one rounding to bf16, and the bytes of `quantize_and_insert_k_cache` or
    `indexer_k_quant_and_cache`. All devices give the same bytes. No other row is written.

    With `kv`, `score` and `ape` it does `save_partial_states` first, in the same launch, with the
    same bytes as the two calls. The tokens of a request must then be neighbours, in the order of
    their positions, as a step of an engine has them.

    Parameters
    ----------
    state : [pages, block_size, 2 c D] fp32
        Written where `kv` is given, else only read.
    block_table : [R, W] int32
        The pages of `state` of each request. A negative entry has no states, and neither have
        positions past the table. A page past the end is a ValueError on the CPU; on CUDA it has no
        states. Pages may repeat, as in a ring, if no two positions of use share a row.
    req_id_per_token : [>= T] int32
        The row of `block_table`. A request that it lacks is a ValueError on the CPU, where its
        token closes a group. CUDA skips that token.
    positions : [>= T] int64 or int32
        A position that `rope_table` lacks is a ValueError on the CPU. On CUDA the row of that
        token is undefined.
    slot_mapping : [T] int64 or int32
        The rows of `state`, as `save_partial_states` takes them.
    kv_cache : [pages, block_size, row], written
        A cache of D values a row, of any format of `quantize_and_insert_k_cache` for 512 or of
        `indexer_k_quant_and_cache` for 128. It may also have a head axis, or be flat; split pages
        may be [pages, bytes].
    kv_slot_mapping : [>= T] int64 or int32
        The rows of `kv_cache`. Slots past the end are as in `slot_mapping`.
    norm_weight : [D] bf16 or fp32
    rope_table : [max_pos, 64] fp32
        32 cosines, then 32 sines, as `sparse_mla.rope_table` makes them.
    eps : float
        0, or a normal float32: 1.2e-38 to 3.4e38. With 0, a key of zeros becomes NaN.
    ratio : int
        r, at least 1.
    kv, score : [>= T, c D] fp32 or bf16, optional
        As in `save_partial_states`. Given together with `ape`, or not at all.
    ape : [r, c D] fp32, optional
    kv_scale : float, or an array of one fp32
        The scale of an "fp8_e4m3" cache; 1 for every other format.
    kv_format : name of a cache format, optional
        None takes the format from the cache's dtype and last dimension. Rows of 528 and 288 bytes
        and split pages as [pages, bytes] need it.
    block_size : int, optional
        Rows per page of the cache. Only split pages as [pages, bytes] need it.
    stream : int handle or stream object, optional

    Returns
    -------
    kv_cache, the same object. In JAX a new array, or with `kv` two, (state, kv_cache).

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        A width that does not belong to the ratio and the cache, one of `kv`, `score` and `ape`
        without the others, a position, slot, page or request outside its array (CPU), a scale where
        none belongs, an `eps` out of its range. `help(sparse_mla.ops)` lists the errors that
        every operator raises.

    Source: vLLM's compressor of DeepSeek V4; RMSNorm is arXiv:1910.07467, RoPE arXiv:2104.09864.

    Examples
    --------
    >>> import numpy as np, ml_dtypes, sparse_mla
    >>> state, table = np.ones((1, 2, 1024), np.float32), np.array([[0]], np.int32)
    >>> cache, weight = np.zeros((1, 1, 512), ml_dtypes.bfloat16), np.full((512,), 5, np.float32)
    >>> ids, positions, slots = np.array([0, 0], np.int32), np.array([0, 1]), np.array([-1, 0])
    >>> arrays = state, table, ids, positions, positions, cache, slots, weight
    >>> angles = np.asarray(sparse_mla.rope_table(8))
    >>> cache = sparse_mla.compress_norm_rope_store(*arrays, angles, eps=0.0, ratio=2)
    >>> float(cache[0, 0, 0])
    5.0
    """
