"""Attends to contiguous keys and values, the way to prefill."""

from __future__ import annotations

from sparse_mla._types import Like, Result
from sparse_mla.ops._declare import Array, Stream, operator

__all__ = ["varlen_attention"]


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
    q_descale, k_descale, v_descale : float, an array of one fp32, or [B, Hk] fp32, optional
        What e4m3 values are multiplied with; strides may be 0. None = 1. No product is rounded.
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
    >>> out.shape, np.exp(lse[:, 0] - 1).round(2).tolist()  # 1 key, 2 and 1
    ((3, 4, 128), [1.0, 2.0, 1.0])

    PyTorch
    -------
    Attention to contiguous keys and values of ragged requests: `sparse_mla.varlen_attention`.

    >>> import torch
    >>> import sparse_mla.integrations.torch as smla
    >>> q, k, v = (torch.ones(2, 4, n, dtype=torch.bfloat16) for n in (192, 192, 128))
    >>> starts = torch.tensor([0, 2], dtype=torch.int32)
    >>> out, lse = smla.varlen_attention(q, k, v, starts, starts, softmax_scale=1 / 192)
    >>> out.shape, round(lse[0, 0].item(), 4)
    (torch.Size([2, 4, 128]), 1.6931)

    JAX
    ---
    Attention to contiguous keys and values of ragged requests: `sparse_mla.varlen_attention`.

    >>> import jax.numpy as jnp
    >>> import sparse_mla.integrations.jax as smla
    >>> q, k, v = (jnp.ones((2, 4, n), jnp.bfloat16) for n in (192, 192, 128))
    >>> starts = jnp.array([0, 2])
    >>> out, lse = smla.varlen_attention(q, k, v, starts, starts, softmax_scale=1 / 192)
    >>> out.shape, round(float(lse[0, 0]), 4)
    ((2, 4, 128), 1.6931)
    """
