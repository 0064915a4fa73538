"""The operators that choose keys: the indexer's queries, its logits, and the whole choice. No
arithmetic."""

from __future__ import annotations

from typing import Any

from sparse_mla._types import Float, KvFormat, Like, Result
from sparse_mla.ops._declare import Array, Stream, operator

__all__ = [
    "fused_indexer_q_rope_quant",
    "indexer_logits",
    "lightning_indexer",
    "lightning_indexer_workspace_size",
]


@operator
def fused_indexer_q_rope_quant(
    q: Like[Result],
    weights: Array,
    positions: Array,
    rope_table: Array,
    *,
    softmax_scale: float,
    head_scale: float,
    use_fp4: bool = False,
    out: Array | None = None,
    out_weights: Array | None = None,
    out_scale: Array | None = None,
    stream: Stream = None,
) -> tuple[Result, ...]:
    """Turn the indexer's queries to their positions, and quantise them as its keys are.

    RoPE turns pairs (2i, 2i + 1) of the last 64 of a head's 128 values by the angles of the token's
    position: (a, b) -> (a cos - b sin, b cos + a sin), each product rounded to fp32, then the sum,
    then bf16. From these bf16 values x, per head or, with `use_fp4`, per 32 values::

        FP8: scale = the smallest power of two with 448 * scale >= max(amax, 1e-4)
             out = e4m3(x / scale)
             out_weights = weights * fp32(softmax_scale * head_scale) * scale
        FP4: scale = the smallest power of two with 6 * scale >= max(amax, 6 * 2**-126)
             out = e2m1(x / scale)
             out_weights = weights * fp32(softmax_scale * head_scale)

    Products are rounded once to fp32. NaN is left out of amax, and an infinity counts as
    FLT_MAX. A turned value or a weight that is NaN is positive. All devices give the same bytes.

    Parameters
    ----------
    q : [T, Hi, 128] bf16
        Any number of heads from 1. Tokens and heads any stride apart.
    weights : [T, Hi] bf16 or fp32
    positions : [>= T] int64 or int32
        A position that `rope_table` lacks is a ValueError on the CPU. CUDA does not turn that
        token.
    rope_table : [max_pos, 64] fp32
        32 cosines, then 32 sines, as `sparse_mla.rope_table` makes them. The indexer may
        have a table of its own.
    softmax_scale, head_scale : float
        Finite, and their product 0 or a normal float32 (1.2e-38 to 3.4e38 in size). DeepSeek's are
        128**-0.5 and Hi**-0.5.
    use_fp4 : bool
        Two e2m1 values per byte, the first in the low half, and scales of their own. An `out_scale`
        asks for it, too.
    out : [T, Hi, 128] float8_e4m3fn or uint8, or [T, Hi, 64] uint8 with `use_fp4`, optional
    out_weights : [T, Hi] fp32, optional
    out_scale : [T, Hi, 4] uint8, optional
        Exponents e of the scales 2**(e - 127). Four neighbours can be viewed as one int32.
    stream : int handle or stream object, optional

    Returns
    -------
    (out, out_weights), or with `use_fp4` (out, out_weights, out_scale): q, weights and q_scale of
    `indexer_logits`.

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        No heads, a position outside the table (CPU), a scale that is not finite.
        `help(sparse_mla.ops)` lists the errors that every operator raises.

    Source: DeepSeek V3.2's and V4's lightning indexer; vLLM's fused_indexer_q_rope_quant.

    Examples
    --------
    >>> import numpy as np, ml_dtypes, sparse_mla
    >>> q, w = np.full((1, 2, 128), 2, ml_dtypes.bfloat16), np.full((1, 2), 0.5, np.float32)
    >>> zero, table = np.array([0]), np.asarray(sparse_mla.rope_table(8))
    >>> scales = {"softmax_scale": 0.5, "head_scale": 0.5}
    >>> out, w = sparse_mla.fused_indexer_q_rope_quant(q, w, zero, table, **scales)
    >>> float(out[0, 1, 127]), float(w[0, 1]) == 2**-10
    (256.0, True)
    """


@operator
def indexer_logits(
    q: Like[Result],
    weights: Array,
    k_cache: Array | tuple[Array, Array],
    context_lens: Array,
    *,
    block_table: Array | None = None,
    req_id_per_token: Array | None = None,
    starts: Array | None = None,
    q_scale: Array | None = None,
    clean: bool = True,
    dtype: Float = "float32",
    kv_format: KvFormat | None = None,
    block_size: int | None = None,
    out: Array | None = None,
    stream: Stream = None,
) -> Result:
    """Score every key that a token sees: the lightning indexer's logits.

    logit[t, n] = sum_h weights[t, h] * relu(q[t, h] . k_n) for n < context_lens[t], where k_n is
    dequantised row n of the token's request: one operator for prefills and decodes, any number of
    heads, any number of query tokens per request. Rows of a request should follow each other,
    because a tile of keys is then read once for all of them.

    Columns from context_lens[t] on are -inf, and so are those whose key does not exist: a page
    number or position that the table or the cache lacks. relu passes NaN on, so a NaN in a query, a
    weight or a key shows in the logits that it takes part in, and in no other.

    The error is at most 2**-18 * u with u = sum_h |weights| * sum_d |q k|. On Hopper, FP8 tensor
    cores serve e4m3 queries of 32 or 64 heads on FP8 keys (16-byte aligned), with 2**-8 * u,
    because their sums have 14 bits. To get the precise class there, add a head of weight 0. On a
    CPU, products below 2**-126 count as zero. This adds at most 2**-117 * sum_h max(1, |weights|)
    for keys that have a scale of 2**-74 or more, else nothing. Beside a weight of 2**60 or more,
    weights 2**122 times as small count as zero there, too. A row's bits depend on its own query,
    keys and length alone, not on T, N, other rows or chunks.

    Parameters
    ----------
    q : [T, Hi, 128] float8_e4m3fn or uint8, or with `q_scale` [T, Hi, 64] uint8
        Tokens and heads any stride apart: what `fused_indexer_q_rope_quant` gives.
    weights : [T, Hi] fp32
    k_cache : cache of fp8_index or mxfp4_index rows, or the pair (k, scale)
        Pages with `block_table`, or flat: k [S, 128] float8_e4m3fn or uint8 with scale [S] fp32, or
        k [S, 64] uint8 with scale [S, 4] uint8. Keys and queries may be of different formats.
    context_lens : [>= T] int32
        Keys that a token sees, clamped to 0...N: (position + 1) // ratio, 0 for padding.
    block_table : [R, W] int32, for pages
    req_id_per_token : [>= T] int32, for pages
        For a token with keys, a bad id is a ValueError on the CPU. On CUDA its columns are -inf.
    starts : [>= T] int32, optional, for flat keys
        The key of column 0; None is 0.
    q_scale : [T, Hi, 4] uint8, optional
        UE8M0 scales of FP4 queries.
    clean : bool
        False leaves columns from the context on as they are.
    dtype : "float32" or "bfloat16"
        The dtype of a new `out`; bf16 is one more rounding.
    kv_format, block_size : optional
        Pages as [pages, bytes] need both.
    out : [T, N] fp32 or bf16, optional
        Any N; left out, W * block_size or S columns.
    stream : int handle or stream object, optional

    Returns
    -------
    out

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        No heads, a bad request id (CPU), an argument that belongs to the other kind of keys.
        `help(sparse_mla.ops)` lists the errors that every operator raises.

    Source: DeepSeek V3.2's lightning indexer; DeepGEMM's fp8_mqa_logits and fp8_paged_mqa_logits.

    Examples
    --------
    >>> import numpy as np, ml_dtypes, sparse_mla
    >>> one = np.ones((1, 2, 128), ml_dtypes.float8_e4m3fn)
    >>> keys = one[0], np.array([1, -1], np.float32)
    >>> lens = np.array([2], np.int32)
    >>> sparse_mla.indexer_logits(one, np.ones((1, 2), np.float32), keys, lens).tolist()
    [[256.0, 0.0]]
    """


@operator
def lightning_indexer(
    q: Like[Result],
    weights: Array,
    k_cache: Array | tuple[Array, Array],
    context_lens: Array,
    *,
    k: int,
    block_table: Array | None = None,
    req_id_per_token: Array | None = None,
    starts: Array | None = None,
    q_scale: Array | None = None,
    dtype: Float = "float32",
    kv_format: KvFormat | None = None,
    block_size: int | None = None,
    slots_block_table: Array | None = None,
    slots_block_size: int | None = None,
    is_valid: Array | None = None,
    out: Array | None = None,
    slots: Array | None = None,
    lens: Array | None = None,
    values: Array | None = None,
    max_logits_bytes: int = 2**29,
    workspace: Array | None = None,
    stream: Stream = None,
) -> Result | tuple[Result, Result, Result]:
    """Choose the k best keys of each token: `top_k_per_row` of `indexer_logits`, in bounded memory.

    The results are bit for bit those of the two calls::

        logits = indexer_logits(q, weights, k_cache, context_lens, ...)  # [T, N] of `dtype`
        out = top_k_per_row(logits, 0, context_lens, k=k, ...)

    but a matrix of logits exists only for a chunk of tokens at a time. The number of chunks follows
    from shapes, `max_logits_bytes` and the size of `workspace`, so a call can be captured. No
    result depends on it.

    A token with at most k keys takes all of them: its keys are not scored, unless `values` are
    wanted. If N <= k, no token has logits, and the call needs no workspace.

    Parameters
    ----------
    q : [T, Hi, 128] float8_e4m3fn or uint8, or with `q_scale` [T, Hi, 64] uint8
        This and what follows up to `block_size`: see `indexer_logits`.
    weights : [T, Hi] fp32
    k_cache : cache of fp8_index or mxfp4_index rows, or the pair (k, scale)
        Pages, or k [S, 128] float8_e4m3fn or uint8 with scale [S] fp32, or k [S, 64] uint8 with
        scale [S, 4] uint8. N, the number of columns, is W * block_size or S.
    context_lens : [>= T] int32
        Clamped to 0...N.
    k : int
        At least 1; may be larger than N.
    block_table : [R, W] int32, for pages
    req_id_per_token : [>= T] int32, for pages and for slots
        The row of `block_table`, and of `slots_block_table`. For a token with keys, a bad id is a
        ValueError on the CPU.
    starts : [>= T] int32, optional, for flat keys
        The key of column 0, from which `out` counts; None is 0.
    q_scale : [T, Hi, 4] uint8, optional
    dtype : "float32" or "bfloat16"
        Of the logits, and so of `values`. bf16 halves the workspace, and rounds before the choice.
    kv_format, block_size : optional
        Pages as [pages, bytes] need both.
    slots_block_table : [R, W] int32, optional
        The block table of the attention's cache. With it the call returns slots, too. This and what
        follows up to `values`: see `top_k_per_row`.
    slots_block_size : int, optional
    is_valid : [>= T] bool or uint8, optional
    out : [T, k] int32, optional
    slots : [T, k] int32, optional
    lens : [T] int32, optional
    values : [T, k] fp32 or bf16, as `dtype` says, optional
        Receives the chosen logits, then -inf. Not in JAX.
    max_logits_bytes : int
        What the logits of a chunk may take. A token's logits must fit: N values of `dtype`, rounded
        up to 128 bytes.
    workspace : [lightning_indexer_workspace_size] uint8 or int8, optional
        Any contents, any alignment. A smaller one makes smaller chunks, down to one token.
    stream : int handle or stream object, optional

    Returns
    -------
    out, or with `slots_block_table` (out, slots, lens)

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        What `indexer_logits` and `top_k_per_row` raise; `max_logits_bytes` or a workspace that is
        too small for the logits of a token.
        `help(sparse_mla.ops)` lists the errors that every operator raises.

    Source: DeepSeek V3.2's lightning indexer.

    Examples
    --------
    >>> import numpy as np, ml_dtypes, sparse_mla
    >>> q = np.ones((1, 2, 128), ml_dtypes.float8_e4m3fn)
    >>> keys = np.ones((4, 128), ml_dtypes.float8_e4m3fn), np.array([1, 3, -1, 2], np.float32)
    >>> weights, lens = np.ones((1, 2), np.float32), np.array([4], np.int32)
    >>> sparse_mla.lightning_indexer(q, weights, keys, lens, k=2).tolist()
    [[1, 3]]
    """


@operator
def lightning_indexer_workspace_size(
    num_tokens: int,
    max_context: int,
    *,
    k: int,
    dtype: Float = "float32",
    max_logits_bytes: int = 2**29,
    device: Any,
) -> int:
    """Bytes of workspace that `lightning_indexer` takes, from shapes alone.

    On a GPU it is the logits of all tokens, on the CPU as much as stays in a cache or the logits of
    8 tokens; in both cases at most `max_logits_bytes` and 128 bytes for alignment.

    Parameters
    ----------
    num_tokens, max_context : int
        T and N of `lightning_indexer`: N is the keys that a row of `block_table` can have, or the
        number of flat keys. The size never falls if one of them grows, so one workspace serves
        every smaller batch.
    k : int
    dtype : "float32" or "bfloat16"
    max_logits_bytes : int
        As in the call.
    device : "cpu", "cuda" (the first GPU), "cuda:1", or an object whose str() is one of these

    Returns
    -------
    int, in bytes; 0 if max_context <= k, because then nothing is scored.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        A negative size, a k below 1, `max_logits_bytes` below the logits of a token.

    Examples
    --------
    >>> import sparse_mla
    >>> sparse_mla.lightning_indexer_workspace_size(4096, 2**20, k=2048, device="cpu") // 2**20
    32
    """
