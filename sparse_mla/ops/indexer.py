"""The operators that choose keys: the indexer's queries. No arithmetic."""

from __future__ import annotations

from typing import Any

from sparse_mla import _results
from sparse_mla.ops._declare import Array, Stream, operator

__all__ = ["fused_indexer_q_rope_quant"]


@operator(_results.index_query)
def fused_indexer_q_rope_quant(
    q: Array,
    weights: Array,
    positions: Array,
    cos_sin: Array,
    *,
    softmax_scale: float,
    head_scale: float,
    use_fp4: bool = False,
    out: Array | None = None,
    out_weights: Array | None = None,
    out_scale: Array | None = None,
    stream: Stream = None,
) -> Any:
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

    Products are fp32, from left to right. NaN is left out of amax, and an infinity counts as
    FLT_MAX. A turned value or a weight that is NaN is positive. All devices give the same bytes.

    Parameters
    ----------
    q : [T, Hi, 128] bf16
        Any number of heads from 1. Tokens and heads any stride apart.
    weights : [T, Hi] bf16 or fp32
    positions : [>= T] int64 or int32
        A position that `cos_sin` lacks is a ValueError on the CPU. CUDA does not turn that token.
    cos_sin : [max_pos, 64] fp32
        32 cosines, then 32 sines: `rope_table`. The indexer may have a table of its own.
    softmax_scale, head_scale : float
        Finite. DeepSeek's are 128**-0.5 and Hi**-0.5.
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
    (out, out_weights), or with `use_fp4` (out, out_weights, out_scale).

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
    >>> zero, table = np.array([0]), sparse_mla.rope_table(8)
    >>> scales = {"softmax_scale": 0.5, "head_scale": 0.5}
    >>> out, w = sparse_mla.fused_indexer_q_rope_quant(q, w, zero, table, **scales)
    >>> out.dtype.name, out[0, 1, 127].item(), w[0, 1].item() == 2**-10
    ('float8_e4m3fn', 256.0, True)
    """
