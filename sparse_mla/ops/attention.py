"""Attends to the slots or to all tokens of a paged cache."""

from __future__ import annotations

from typing import Any

from sparse_mla import _C
from sparse_mla._types import KvFormat, Like, Result
from sparse_mla.ops._declare import Array, Stream, operator

__all__ = [
    "attention_workspace_size",
    "mla_attention",
    "sparse_attention",
    "sparse_mla_dsv4",
]


@operator
def sparse_attention(
    q: Like[Result] | tuple[Like[Result], Array],
    kv_cache: Array,
    indices: Array,
    *,
    softmax_scale: float,
    topk_length: Array | None = None,
    attn_sink: Array | None = None,
    extra_kv_cache: Array | None = None,
    extra_indices: Array | None = None,
    extra_topk_length: Array | None = None,
    q_scale: float | Array = 1.0,
    kv_scale: float | Array = 1.0,
    extra_kv_scale: float | Array = 1.0,
    num_splits: int = 0,
    kv_format: KvFormat | None = None,
    extra_kv_format: KvFormat | None = None,
    block_size: int | None = None,
    extra_block_size: int | None = None,
    return_max_logits: bool = False,
    out: Array | None = None,
    lse: Array | None = None,
    max_logits: Array | None = None,
    workspace: Array | None = None,
    stream: Stream = None,
) -> tuple[Result, ...]:
    """Attend to the cached tokens that `indices` names: one operator for decode and prefill.

    For query t and head h over J = {j : 0 <= indices[t, j] < slots, j < topk_length[t]}::

        s_j = softmax_scale * q_scale * kv_scale * (q[t, h] . k_j)    lse = ln(sum_J exp(s_j))
        out = sum_J exp(s_j - lse) * kv_scale * v_j       v_j = the first 512 values of k_j

    An empty J gives out = 0 and lse = -inf. A duplicate counts twice. Excluded entries are not
    read.

    Parameters
    ----------
    q : [T, H, 576] bf16, or a pair ([T, H, 512], [T, H, 64]); [T, H, 512] for keys of 512
        The pair (ql_nope, q_pe) is read in place. A query may be e4m3, as float8_e4m3fn or as its
        bytes, uint8, if it has 512 values or the cache is "fp8_e4m3".
    kv_cache : [pages, block_size, row]
        A paged cache (also with a head axis), or flat rows [tokens, row]. Keys have 576 values in
        rows of 576 bf16, 576 e4m3 or 656 bytes, and 512 in the formats of DeepSeek V4 and in rows
        of 512 bf16. Split pages also [pages, page_bytes], with `block_size`. FP4 rows can only be
        `extra_kv_cache`.
    indices : [T, K] int32
        Slots; negative or out of range = none. Any K, 0 included.
    softmax_scale : float
        Multiplies q . k; (qk_nope_head_dim + qk_rope_head_dim) ** -0.5 in DeepSeek's models. At
        most 2.35e38 in size, because kernels multiply it with log2(e).
    topk_length : [T] int32, optional
        Columns in use, clamped to [0, K].
    attn_sink : [>= H] fp32, optional
        Multiplies out by 1 / (1 + exp(sink - lse)); lse is unchanged.
    extra_kv_cache, extra_indices, extra_topk_length : a cache, [T, K'] and [T] int32, optional
        A second cache, its index list and lengths: one softmax over both. Its keys have as many
        values as those of `kv_cache`; formats and page sizes are free.
    q_scale : float, or an array of one fp32
        The scale of an e4m3 query; 1 for a bf16 one. An array has the shape of a number, or [1].
        Only what needs a scale takes an array, because its value is not read on a device. The
        product softmax_scale * q_scale must be 0, or 1.2e-38 to 2.35e38 in size, and at most as
        large times kv_scale, too. An array on a device is not checked; its logits are 0, infinite
        or NaN then.
    kv_scale, extra_kv_scale : float, or an array of one fp32
        The scale of an "fp8_e4m3" cache; 1, as a float, for every other format.
    num_splits : int
        0 lets the plan choose, which may cut long lists among short ones by the lengths of all
        lists. 1 to 64 cuts the K columns into that many ranges and so fixes the order of the sum:
        the bits of a token's result then do not depend on the rest of the batch.
    kv_format, extra_kv_format : str or None
        The formats of `kv_cache` and `extra_kv_cache`, such as "fp8_v4". None takes them from the
        dtype and the last dimension; several formats have rows of 528 or 288 bytes.
    block_size, extra_block_size : int, optional
        Tokens per page, for caches [pages, page_bytes].
    return_max_logits : bool
        Whether to return max_logits too. Giving `max_logits` has the same effect.
    out : [T, >= H, 512] bf16, optional
        Heads behind the first H stay as they are.
    lse, max_logits : [T, H] fp32, optional
    workspace : [bytes] uint8, optional
        Scratch memory of at least `attention_workspace_size` bytes, with any contents. Calls on one
        stream may share it. When left out, it is allocated like `out`. With room for the rows of
        the cache (`num_keys` there), a prefill may widen them first: all slots, so where a prefill
        reads a small part of a cache, gather its rows, as the layers do.
    stream : int handle or stream object, optional

    Returns
    -------
    (out, lse), or (out, lse, max_logits). lse is a natural logarithm, max_logits the largest s_j.

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        H outside 1 to 128, `num_splits` outside 0 to 64, a workspace too small.
        `help(sparse_mla.ops)` lists the errors that every operator raises.

    Source: FlashMLA's sparse decode and prefill kernels; DeepSeek-V3.2, equation of sparse MLA.

    Examples
    --------
    >>> import numpy as np, ml_dtypes, sparse_mla
    >>> q, kv = (np.ones(shape, ml_dtypes.bfloat16) for shape in ((1, 16, 576), (9, 576)))
    >>> slots = np.array([[0, 3, -1]], np.int32)
    >>> out, lse = sparse_mla.sparse_attention(q, kv, slots, softmax_scale=1 / 576)
    >>> list(out.shape), round(float(lse[0, 0]), 4)
    ([1, 16, 512], 1.6931)
    """


# For flash_mla.py: here the lse of a query row without keys is +inf.
_attention_plus_inf = _C.Operator(vars(sparse_attention)["__wrapped__"], "_attention_plus_inf")


@operator
def sparse_mla_dsv4(
    query: Like[Result],
    swa_kv_cache: Array,
    workspace_buffer: Array | None,
    sparse_indices: Array,
    compressed_kv_cache: Array,
    sparse_topk_lens: Array,
    seq_lens: Array | None,
    *,
    bmm1_scale: float | Array,
    bmm2_scale: float | Array = 1.0,
    sinks: Array | None = None,
    window: int = 128,
    cum_seq_lens_q: Array | None = None,
    max_q_len: int | None = None,
    out: Array | None = None,
    stream: Stream = None,
) -> Result:
    """Attend as a layer of DeepSeek V4 does, with one table of slots for its two caches.

    This is `sparse_attention` over the window's tokens, in the first `window` columns, and
    compressed ones, in the other columns. For query t and head h, over the keys of both caches::

        s_j = bmm1_scale * (query[t, h] . k_j)
        out[t, h] = bmm2_scale * sum_j exp(s_j) v_j / (exp(sinks[h]) + sum_j exp(s_j))

    Here k_j = v_j are the 512 values of a cache row, without the scale of the whole cache.

    Parameters
    ----------
    query : [T, H, 512] bf16 or e4m3
        The query tokens of a batch, one after the other.
    swa_kv_cache : [pages, block_size, row], row = 512 bf16, 512 e4m3 or 584 bytes
        The cache of the sliding window: formats "bfloat16", "fp8_e4m3" and "fp8_v4".
    workspace_buffer : [bytes] uint8, or None
        Scratch memory of at least `attention_workspace_size(T, H, window, extra_topk=K')` bytes,
        with any contents. If it is None, it is allocated like `out`.
    sparse_indices : [T, window + K'] int32
        Slots of swa_kv_cache, then slots of compressed_kv_cache, as `build_mixed_sparse_indices`
        makes them. Negative or out of range = none.
    compressed_kv_cache : [pages, block_size, row], row = as in swa_kv_cache
        Pages and format are its own. A layer without compressed tokens has K' = 0 and gives its
        only cache twice.
    sparse_topk_lens : [T] int32
        Columns in use, those of the window included: it has min(length, window) columns, and the
        compressed part max(length - window, 0).
    seq_lens, cum_seq_lens_q : [R] and [R + 1] int32, or None
        Not read, because each row of the table belongs to one query token.
    bmm1_scale : float, or an array of one fp32
        softmax_scale * q_scale * kv_scale. An array has the shape of a number, or [1]. Like both
        scales, bmm1_scale / bmm2_scale must be positive: 1.2e-38 to 2.35e38, and bmm1_scale, too,
        is at most so large. An array on a device is not checked; its logits are 0, infinite or NaN
        then.
    bmm2_scale : float, or an array of one fp32
        kv_scale, the scale of each "fp8_e4m3" cache; 1 for other formats.
    sinks : [>= H] fp32, optional
    window : int
        At least 1.
    max_q_len : int, optional
        Not read.
    out : [T, >= H, 512] bf16, optional
        Heads behind the first H stay as they are.
    stream : int handle or stream object, optional

    Returns
    -------
    out; 0 for a token without keys.

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        H outside 1 to 128, a table narrower than `window`, a workspace too small.
        `help(sparse_mla.ops)` lists the errors that every operator raises.

    Source: FlashInfer's trtllm_batch_decode_sparse_mla_dsv4, as vLLM's DeepSeek V4 calls it.

    Examples
    --------
    >>> import numpy as np, ml_dtypes, sparse_mla
    >>> query, cache = (np.ones(shape, ml_dtypes.bfloat16) for shape in ((1, 16, 512), (9, 512)))
    >>> slots, lens = np.array([[0, -1, 3, 4]], np.int32), np.array([4], np.int32)
    >>> caches = {"swa_kv_cache": cache, "compressed_kv_cache": cache + 3}
    >>> out = sparse_mla.sparse_mla_dsv4(
    ...     0 * query, workspace_buffer=None, sparse_indices=slots, sparse_topk_lens=lens,
    ...     seq_lens=None, bmm1_scale=0.04, window=2, **caches)
    >>> list(out.shape), float(out[0, 0, 0])  # a key of ones, and two of fours
    ([1, 16, 512], 3.0)
    """


@operator
def mla_attention(
    q: Like[Result] | tuple[Like[Result], Array],
    kv_cache: Array,
    block_table: Array | None,
    cache_seqlens: Array,
    *,
    softmax_scale: float,
    cu_seqlens_q: Array | None = None,
    slot_table: Array | None = None,
    cp: tuple[int, int, int] | None = None,
    q_scale: float | Array = 1.0,
    kv_scale: float | Array = 1.0,
    kv_format: KvFormat | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    attn_sink: Array | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    num_splits: int = 0,
    out: Array | None = None,
    lse: Array | None = None,
    workspace: Array | None = None,
    stream: Stream = None,
) -> tuple[Result, Result]:
    """Attend to all tokens of a paged cache: dense MLA in its absorbed form, decode and prefill.

    Request b has n_q query tokens and n_k = cache_seqlens[b] keys, those of this step among them.
    Query i of the request is at position p = n_k - n_q + i, and sees key j where all that apply
    hold::

        j <= p (causal)    p - left <= j <= p + right (window_size)    j // C == p // C (chunks)

    Over these keys, s_j = softmax_scale * q_scale * kv_scale * (q[t, h] . k_j), with a softcap
    c > 0 then c * tanh(s_j / c); lse and out are as in `sparse_attention`, of the slots of these
    keys. A query that sees no key gives out = 0 and lse = -inf. Pages without a visible key are not
    read.

    Parameters
    ----------
    q : [T, H, D] or [B, n, H, D] bf16, or a pair ([..., 512], [..., 64])
        D = 576, or 512 for keys of 512 values. [B, n, H, D] has n tokens of each request. A query
        may be e4m3, as float8_e4m3fn or as its bytes, uint8, if it has 512 values or the cache is
        "fp8_e4m3".
    kv_cache : [pages, block_size, row]
        Keys of any format that `sparse_attention` takes as `kv_cache`, or of "fp8_token", in pages
        of any size.
    block_table : [>= B, W] int32, or None
        The pages of each request, in its order. An entry that is negative or past the cache hides
        its keys, and so does the end of the row.
    cache_seqlens : [B] int32
        n_k of each request.
    softmax_scale : float
        `mla_softmax_scale()` for DeepSeek's models.
    cu_seqlens_q : [B + 1] int32, optional
        The first query token of each request, then their number. Rows of q from the last number on
        are not read. Those of `out` and `lse` stay as they are in the caller's arrays; in new ones
        they are 0 and -inf. Without it, each request has one token.
    slot_table : [>= B, W] int32, optional
        The slot of each position, in place of `block_table`, which is None then.
    cp : (rank, ranks, interleave), optional
        Context parallelism: position x belongs to rank x // interleave % ranks. Tables have the
        rank's own keys only; lengths and masks count all. Results of all ranks are merged by their
        lse.
    q_scale, kv_scale : float, or an array of one fp32
        The scales of an e4m3 query and of an "fp8_e4m3" cache, as in `sparse_attention`.
    kv_format : str or None
        The cache's format; None takes it from the dtype and the last dimension.
    causal : bool
        Query i sees no key behind its position.
    window_size : (int, int)
        How many keys a query sees before and behind its position; -1 = all.
    attention_chunk : int
        C: a query sees keys of its own C positions only; 0 = of all.
    softcap : float
        0 = none; at most 2.35e38, as softmax_scale.
    attn_sink : [>= H] fp32, optional
        Multiplies out by 1 / (1 + exp(sink - lse)); lse is unchanged.
    max_seqlen_q, max_seqlen_k : int, optional
        Hints. Results are the same whatever they are.
    num_splits : int
        0 lets the plan choose. 1 to 64 cuts each request's n_k keys into that many ranges, so that
        the bits of a request's result do not depend on the rest of the batch.
    out : [T, >= H, 512] or [B, n, >= H, 512] bf16, optional
    lse : [T, H] or [B, n, H] fp32, optional
    workspace : [bytes] uint8, optional
        Scratch memory of at least `attention_workspace_size(T, H, longest n_k)` bytes, T = B * n,
        with any contents. Calls on one stream may share it. When left out, it is allocated like
        `out`.
    stream : int handle or stream object, optional

    Returns
    -------
    (out, lse). lse is a natural logarithm, without the sink.

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        Both tables or neither; on the CPU `cu_seqlens_q` that does not begin with 0, falls or ends
        past q; a negative window other than -1, a softcap or chunk below 0, a rank outside
        0...ranks - 1; tokens of [B, n, ...] that are not equally far apart.
        `help(sparse_mla.ops)` lists the errors that every operator raises.

    Source: vLLM's dense MLA decode; FlashMLA's dense decode kernel.

    Examples
    --------
    >>> import numpy as np, ml_dtypes, sparse_mla
    >>> q = np.ones((3, 16, 576), ml_dtypes.bfloat16)  # two tokens of request 0, one of request 1
    >>> cache = np.ones((4, 64, 576), ml_dtypes.bfloat16)
    >>> table, starts = np.array([[2, 0], [3, -1]], np.int32), np.array([0, 2, 3], np.int32)
    >>> lens, scale = np.array([70, 5], np.int32), 1 / 576
    >>> out, lse = sparse_mla.mla_attention(
    ...     q, cache, table, lens, cu_seqlens_q=starts, softmax_scale=scale, causal=True)
    >>> list(out.shape), [round(float(x), 2) for x in np.exp(lse[:, 0] - 1)]  # 69 keys, 70 and 5
    ([3, 16, 512], [69.0, 70.0, 5.0])
    """


# For flash_mla.py, whose lse is +inf for a query without keys.
_mla_attention_plus_inf = _C.Operator(vars(mla_attention)["__wrapped__"], "_mla_attention_plus_inf")


@operator
def attention_workspace_size(
    num_tokens: int,
    num_heads: int,
    topk: int,
    *,
    extra_topk: int = 0,
    num_splits: int = 0,
    head_dim_v: int = 512,
    num_keys: int = 0,
    device: Any,
) -> int:
    """Bytes of workspace that attention needs, from shapes alone.

    Parameters
    ----------
    num_tokens, num_heads, topk, extra_topk, num_splits : int
        T, H, K, K' and the `num_splits` of `sparse_attention`. For `mla_attention` and
        `paged_attention` K is the longest n_k. The size never falls if T, H, K or `head_dim_v`
        grows, so one workspace serves every smaller batch, with any KV heads and types.
    head_dim_v : int
        Dv of `paged_attention`. All other calls have 512.
    num_keys : int
        Rows of the cache, pages times tokens per page. The size then has room for them, where a
        `sparse_attention` over "fp8_ds_mla" rows of this shape is faster when it widens the rows to
        f16 first: prefills of many tokens, on Hopper. Such a call does so with a workspace of this
        size, and reads the cache with less room. 0 leaves no such room.
    device : "cpu", "cuda" (the first GPU), "cuda:1", or an object whose str() is one of these

    Returns
    -------
    int, in bytes; 0 where none is needed.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        H outside 1 to 128, `num_splits` outside 0 to 64, `head_dim_v` outside 1 to 512, a negative
        size or `num_keys`.

    Examples
    --------
    >>> import sparse_mla
    >>> sparse_mla.attention_workspace_size(0, 16, 2048, device="cpu") >= 0
    True
    """


# For `python -m sparse_mla info --plan`: kernels, splits and workspace for each row format.
_attention_plans = _C.Operator(vars(attention_workspace_size)["__wrapped__"], "_attention_plans")
