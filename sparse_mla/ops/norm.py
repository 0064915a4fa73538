"""Norms: what DeepSeek V4's layer does around its attention."""

from __future__ import annotations

from sparse_mla._types import KvFormat, Like, Result, Written
from sparse_mla.ops._declare import Array, Stream, operator

__all__ = [
    "fused_q_kv_rmsnorm",
    "fused_qnorm_rope_kv_insert",
]


@operator
def fused_q_kv_rmsnorm(
    q: Like[Result],
    kv: Array,
    q_weight: Array,
    kv_weight: Array,
    *,
    eps: float,
    q_out: Array | None = None,
    kv_out: Array | None = None,
    stream: Stream = None,
) -> tuple[Result, Result]:
    """Normalise the rows of q and of kv: y = bf16(x * rsqrt(mean(x**2) + eps) * weight).

    The arithmetic is fp32, with the same bits on every device. If a row's sum of squares overflows
    fp32, the row becomes 0, and NaN where x is infinite. Every NaN is the positive quiet one.

    Parameters
    ----------
    q : [T, any size] bf16
    kv : [T, 512] bf16
        q and kv are usually columns of one buffer.
    q_weight : [size of a row of q] bf16 or fp32
    kv_weight : [512] bf16 or fp32
    eps : float
        0, or a normal float32: 1.2e-38 to 3.4e38. With 0, a row of zeros becomes NaN.
    q_out : the shape of q, bf16, optional
        May be `q` itself.
    kv_out : [T, 512] bf16, optional
        May be `kv` itself.
    stream : int handle or stream object, optional

    Returns
    -------
    (q_out, kv_out).

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        Shapes that do not match, an `eps` out of its range, an output that overlaps its input
        in part.
        `help(sparse_mla.ops)` lists the errors that every operator raises.

    Source: vLLM's fused_q_kv_rmsnorm; RMSNorm is arXiv:1910.07467.

    Examples
    --------
    >>> import numpy as np, ml_dtypes, sparse_mla
    >>> both, ones = np.full((1, 1536), 3, ml_dtypes.bfloat16), np.ones(1024, np.float32)
    >>> q, kv = both[:, :1024], both[:, 1024:]
    >>> q, kv = sparse_mla.fused_q_kv_rmsnorm(q, kv, ones, 2 * ones[:512], eps=1e-6)
    >>> float(q[0, 0]), float(kv[0, 0])
    (1.0, 2.0)
    """


@operator
def fused_qnorm_rope_kv_insert(
    q: Like[Result],
    kv: Array,
    positions: Array,
    rope_table: Array,
    kv_cache: Written,
    slot_mapping: Array,
    *,
    eps: float,
    q_out: Array | None = None,
    q_scale_inv: float | Array | None = None,
    kv_scale: float | Array = 1.0,
    kv_format: KvFormat | None = None,
    block_size: int | None = None,
    stream: Stream = None,
) -> tuple[Result, Written]:
    """Normalise and turn the queries, turn the keys and write them into the cache, in one launch.

    RoPE turns pairs (2i, 2i + 1) of the last 64 values by the angles of the token's position:
    (a, b) -> (a cos - b sin, b cos + a sin), each product rounded to fp32, then the sum.

    Every head of q is divided by sqrt(mean(x**2) + eps), without a weight, then turned, in fp32,
    and rounded once to bf16: in place, or into `q_out`. With `q_scale_inv` it becomes
    e4m3(value * q_scale_inv) instead, saturating, without a rounding to bf16 before. Where the sum
    of a head's squares exceeds fp32, its values become 0.

    The row of token t, turned and rounded to bf16, goes to slot_mapping[t] of the cache, with the
    bytes of `quantize_and_insert_k_cache`. All devices give the same bytes. A value that the
    arithmetic makes NaN is the positive quiet NaN.

    Parameters
    ----------
    q : [>= T, H, 512] bf16
        Tokens and heads any stride apart. It is written where neither `q_out` nor `q_scale_inv` is
        given; then T is its length.
    kv : [>= T, 512] bf16
        Keys after their norm, not turned yet. Not written.
    positions : [>= T] int64 or int32
        A position that `rope_table` lacks is a ValueError on the CPU. CUDA does not turn that
        token.
    rope_table : [max_pos, 64] fp32
        32 cosines, then 32 sines, as `sparse_mla.rope_table` makes them.
    kv_cache : [pages, block_size, row], written
        A cache of 512 values a token, of any format of `quantize_and_insert_k_cache`. It may also
        have a head axis, or be flat; split pages may be [pages, bytes].
    slot_mapping : [<= T] int64 or int32
        The slots of the first tokens. A token with a negative slot is skipped. A slot past the end
        is a ValueError on the CPU, before anything is written; on CUDA its token is skipped.
    eps : float
        0, or a normal float32: 1.2e-38 to 3.4e38. With 0, a row of zeros becomes NaN.
    q_out : [T, >= H, 512] bf16, or with `q_scale_inv` float8_e4m3fn or uint8, optional
        May be `q` itself. Heads from H on become 0. `q` stays as it is.
    q_scale_inv : float, or [1] fp32, optional
        1 / the scale of e4m3 queries: what `sparse_attention` takes as q_scale is its inverse.
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
    (q_out, kv_cache). Without `q_out`, the first is q itself, or with `q_scale_inv` a new array
    [T, H, 512] float8_e4m3fn.

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        More slots than tokens, H outside 1 to 128, a position outside the table or a slot past the
        end (CPU), a scale that is not positive or where none belongs, an `eps` out of its range.
        `help(sparse_mla.ops)` lists the errors that every operator raises.

    Source: vLLM's fused insert of DeepSeek V4; RMSNorm is arXiv:1910.07467, RoPE arXiv:2104.09864.

    Examples
    --------
    >>> import numpy as np, ml_dtypes, sparse_mla
    >>> q, kv = (np.full(n, 3, ml_dtypes.bfloat16) for n in ((1, 2, 512), (1, 512)))
    >>> cache, table = np.zeros((2, 64, 584), np.uint8), np.asarray(sparse_mla.rope_table(8))
    >>> zero, slot = np.array([0]), np.array([65])
    >>> q, cache = sparse_mla.fused_qnorm_rope_kv_insert(q, kv, zero, table, cache, slot, eps=1e-6)
    >>> float(q[0, 1, 511]), cache[1].reshape(-1)[576:578].tolist()
    (1.0, [124, 124])
    """
