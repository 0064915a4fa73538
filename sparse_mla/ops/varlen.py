"""Attends to keys and values of heads: contiguous ones, the way to prefill, or pages of a cache."""

from __future__ import annotations

from sparse_mla._types import Like, Result
from sparse_mla.ops._declare import Array, Stream, operator

__all__ = ["paged_attention", "varlen_attention"]


@operator
def varlen_attention(
    q: Like[Result] | tuple[Like[Result], Array],
    k: Array | tuple[Array, Array],
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    *,
    softmax_scale: float,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    attn_sink: Array | None = None,
    q_descale: float | Array | None = None,
    k_descale: float | Array | None = None,
    v_descale: float | Array | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    num_splits: int = 0,
    out: Array | None = None,
    lse: Array | None = None,
    workspace: Array | None = None,
    stream: Stream = None,
) -> tuple[Result, Result]:
    """Attend to contiguous keys and values of ragged requests: multi-head prefill.

    Request b has the n_q query tokens cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1, and the n_k keys
    from cu_seqlens_k[b] on likewise. Either may be none. Query head h reads KV head h // (H / Hk).
    Query i of a request is at position p = n_k - n_q + i, and sees the keys that the masks of
    `mla_attention` let it see. Over these keys::

        s_j = softmax_scale * (q_descale q[t, h] . k_descale k[j, h // (H / Hk)])

    With a softcap c > 0, s_j becomes c * tanh(s_j / c); lse and out = softmax(s) v are as in
    `sparse_attention`. A query that sees no key gives out = 0 and lse = -inf.

    Parameters
    ----------
    q : [Tq, H, D] bf16, fp16 or e4m3, or a pair (q_nope [Tq, H, Pn], q_pe [Tq, H, R])
        D = Pn + R is at most 576. e4m3 is float8_e4m3fn, or its bytes as uint8.
    k : [Tk, Hk, D], or a pair (k_nope [Tk, Hk, Pn], k_pe [Tk, R])
        Of the dtype of q, or e4m3; with an e4m3 query of any of the three. All heads share k_pe.
        Where only one of q and k is a pair, the other is cut likewise. Hk divides H.
    v : [Tk, Hk, Dv], the dtype of k
        Dv is at most 512. Pn, R, D and Dv are multiples of 8. Nothing is copied or padded: k_nope
        and v may be views of one array [Tk, Hk, Pn + Dv].
    cu_seqlens_q, cu_seqlens_k : [B + 1] int32
        The first token and the first key of each request, then their numbers. Rows from the last
        number on are not read. Those of `out` and `lse` stay as they are in the caller's arrays; in
        new ones they are 0 and -inf.
    softmax_scale : float
        `mla_softmax_scale()` for DeepSeek's models. At most 2.35e38 in size, because kernels
        multiply it with log2(e).
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
    q_descale, k_descale, v_descale : float, an array of one fp32, or [n, Hk] fp32, optional
        What e4m3 values are multiplied with. n divides the number of requests, and as many of them
        share each row; strides may be 0. None = 1. No product is rounded.
    max_seqlen_q, max_seqlen_k : int, optional
        Hints. Results are the same whatever they are.
    num_splits : int
        0 to 64. It changes nothing: keys are not split, because there are enough rows. A row's bits
        do not depend on the rest of the batch.
    out : [Tq, H, Dv] of the dtype of q, or fp32, optional
        For an e4m3 query bf16, or fp32.
    lse : [Tq, H] fp32, optional
    workspace : [bytes] uint8, optional
        Not needed. A GPU's kernels take 16 bytes of it to divide long calls better.
    stream : int handle or stream object, optional

    Returns
    -------
    (out, lse). lse is a natural logarithm, without the sink.

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        Heads of k that do not divide those of q; other sizes than said above; on the CPU
        `cu_seqlens_q` or `cu_seqlens_k` that does not begin with 0, falls, or ends past its array,
        and a descale that is not positive; a descale of values that are not e4m3; a negative window
        other than -1, a softcap or chunk below 0.
        `help(sparse_mla.ops)` lists the errors that every operator raises.

    Source: vLLM's MLA prefill; flash_attn_varlen_func.

    Examples
    --------
    >>> import numpy as np, ml_dtypes, sparse_mla
    >>> q, k = (np.ones((3, 4, 192), ml_dtypes.bfloat16) for _ in range(2))
    >>> v, starts = np.ones((3, 4, 128), ml_dtypes.bfloat16), np.array([0, 2, 3], np.int32)
    >>> out, lse = sparse_mla.varlen_attention(
    ...     q, k, v, starts, starts, softmax_scale=1 / 192, causal=True)
    >>> list(out.shape), [round(float(x), 2) for x in np.exp(lse[:, 0] - 1)]  # 1 key, 2 and 1
    ([3, 4, 128], [1.0, 2.0, 1.0])
    """


@operator
def paged_attention(
    q: Like[Result],
    k_cache: Array,
    v_cache: Array,
    block_table: Array | None,
    cache_seqlens: Array,
    *,
    softmax_scale: float,
    cu_seqlens_q: Array | None = None,
    slot_table: Array | None = None,
    qv: Array | None = None,
    cache_leftpad: Array | None = None,
    cp: tuple[int, int, int] | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    attn_sink: Array | None = None,
    q_descale: float | Array | None = None,
    k_descale: float | Array | None = None,
    v_descale: float | Array | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    num_splits: int = 0,
    out: Array | None = None,
    lse: Array | None = None,
    workspace: Array | None = None,
    stream: Stream = None,
) -> tuple[Result, Result]:
    """Attend to keys and values in pages of a cache: decode and extend of GQA, MQA and MHA models.

    Request b has n_q query tokens and n_k = cache_seqlens[b] - cache_leftpad[b] keys, those of this
    step among them. Query head h reads KV head h // (H / Hk). Query i of a request is at position
    p = n_k - n_q + i, and sees the keys that the masks of `mla_attention` let it see. Over these
    keys::

        s_j = softmax_scale * q_descale * (q[t, h] . k_descale k_j + qv[t, h] . v_descale v_j)

    With a softcap c > 0, s_j becomes c * tanh(s_j / c); lse and out = softmax(s) v are as in
    `sparse_attention`. A query that sees no key gives out = 0 and lse = -inf. Pages without a
    visible key are not read. No bit of a result depends on the size of pages.

    Parameters
    ----------
    q : [T, H, D] bf16, fp16 or e4m3
        e4m3 is float8_e4m3fn, or its bytes as uint8.
    k_cache : [P, ps, Hk, D]
        Of the dtype of q, or e4m3; with an e4m3 query of any of the three. Hk divides H. ps, the
        tokens of a page, is any number from 1 on.
    v_cache : [P, ps, Hk, Dv], the dtype of k_cache
        D is at most 576 and Dv at most 512, multiples of 8. Both caches have strides of their own:
        they may be views of one buffer.
    block_table : [>= B, W] int32, or None
        The pages of each request, in its order. An entry that is negative or past the cache hides
        its keys, and so does the end of the row.
    cache_seqlens : [B] int32
        The positions of each request; a negative number counts as 0.
    softmax_scale : float
        At most 2.35e38 in size, because kernels multiply it with log2(e).
    cu_seqlens_q : [B + 1] int32, optional
        The first query token of each request, then their number. Rows of q from the last number on
        are not read. Those of `out` and `lse` stay as they are in the caller's arrays; in new ones
        they are 0 and -inf. Without it, each request has one token.
    slot_table : [>= B, W] int32, optional
        The slot of each position, in place of `block_table`, which is None then.
    qv : [T, H, Dv], the dtype of q, optional
        The absorbed form of MLA: q meets the RoPE part of a key, and qv its latent, which is the
        value. D + Dv is at most 576.
    cache_leftpad : [B] int32, optional
        Positions in front of a request's first key. Not together with `cp`.
    cp : (rank, ranks, interleave), optional
        Context parallelism, as in `mla_attention`.
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
    q_descale, k_descale, v_descale : float, an array of one fp32, or [n, Hk] fp32, optional
        What e4m3 values are multiplied with. n divides the number of requests, and as many of them
        share each row; strides may be 0. None = 1. No product is rounded.
    max_seqlen_q, max_seqlen_k : int, optional
        Hints. Results are the same whatever they are.
    num_splits : int
        0: the plan chooses, from the shapes, the device and the requests' lengths. A number from 1
        to 64 cuts the n_k keys of each request into as many ranges of whole blocks of 64 keys. Then
        a row's bits do not depend on other requests, nor, where it is 1, on the other queries of
        its own. On a GPU more than one are the portable kernel's.
    out : [T, H, Dv] of the dtype of q, or fp32, optional
        For an e4m3 query bf16, or fp32.
    lse : [T, H] fp32, optional
    workspace : [bytes] uint8, optional
        Of `attention_workspace_size(T, H, longest n_k, num_splits=num_splits)` bytes, with any
        contents. With a smaller one a GPU's kernels do not split keys, or where num_splits is 2 or
        more, the call is refused.
    stream : int handle or stream object, optional

    Returns
    -------
    (out, lse). lse is a natural logarithm, without the sink.

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        Both tables or neither; caches of unlike pages, heads or dtypes; heads of the caches that do
        not divide those of q; other sizes than said above; on the CPU `cu_seqlens_q` that does not
        begin with 0, falls or ends past q, a `cache_leftpad` outside 0...cache_seqlens, and a
        descale that is not positive; a descale of values that are not e4m3; a negative window other
        than -1, a softcap or chunk below 0, a rank outside 0...ranks - 1; num_splits outside
        0...64. `help(sparse_mla.ops)` lists the errors that every operator raises.

    Source: flash_attn_with_kvcache; SGLang's FlashAttention backend.

    Examples
    --------
    >>> import numpy as np, ml_dtypes, sparse_mla
    >>> q = np.ones((3, 8, 128), ml_dtypes.bfloat16)  # two tokens of request 0, one of request 1
    >>> k_cache, v_cache = np.ones((2, 4, 16, 2, 128), ml_dtypes.bfloat16)  # 4 pages of 16 tokens
    >>> table, starts = np.array([[2, 0], [3, -1]], np.int32), np.array([0, 2, 3], np.int32)
    >>> lens, scale = np.array([20, 5], np.int32), 1 / 128
    >>> out, lse = sparse_mla.paged_attention(
    ...     q, k_cache, v_cache, table, lens, cu_seqlens_q=starts, softmax_scale=scale, causal=True)
    >>> list(out.shape), [round(float(x), 2) for x in np.exp(lse[:, 0] - 1)]  # 19 keys, 20 and 5
    ([3, 8, 128], [19.0, 20.0, 5.0])
    """
