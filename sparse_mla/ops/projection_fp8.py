"""Quantisation to e4m3 in groups, and linear layers of e4m3."""

from __future__ import annotations

from sparse_mla._types import Like, Result
from sparse_mla.ops._declare import Array, Stream, operator

__all__ = ["fp8_linear", "scaled_quantize"]


@operator
def scaled_quantize(
    x: Like[Result],
    *,
    group: tuple[int, int],
    out: Array | None = None,
    descale: Array | None = None,
    stream: Stream = None,
) -> tuple[Result, Result]:
    """Quantise a matrix to e4m3 with a scale for each group of values.

    For each group of `group[0]` x `group[1]` values, amax = max(max |x|, 1e-12),
    out = e4m3(x * (448 / amax)), saturating, and descale = amax / 448, with each step rounded to
    fp32. In amax a NaN counts as 0 and an infinity as the largest fp32.

    Parameters
    ----------
    x : [M, N] bf16, fp16 or fp32
        Its rows may be any distance apart.
    group : (int, int)
        Rows and columns of a group, divisors of M and N. -1 is the whole axis, which is one group
        even if it is empty. (1, 128) is the input of DeepSeek-V3's layers, (128, 128) their
        weights, (1, -1) a scale per token, (-1, -1) one for the matrix, and (-1, 1) one for each
        output of a weight [in, out].
    out : [M, N] float8_e4m3fn or uint8, optional
        Its rows may be any distance apart.
    descale : [M / group[0], N / group[1]] fp32, optional
        Any strides, so that it may be the transpose of a buffer.
    stream : int handle or stream object, optional

    Returns
    -------
    (out, descale): x is about out times the descale of its group.

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        Rows or columns that are no multiple of the group's, a size that is 0 or below -1.
        `help(sparse_mla.ops)` lists the errors that every operator raises.

    Source: vLLM's scaled_quantize, whose descale is 1 / (448 / amax) instead of amax / 448.

    Examples
    --------
    >>> import numpy as np, sparse_mla
    >>> x = np.array([[1.0, -2.0], [0.0, 0.5]], np.float32)
    >>> out, descale = sparse_mla.scaled_quantize(x, group=(-1, 1))
    >>> [float(x) for x in out.reshape(-1)], [round(float(x) * 448, 4) for x in descale[0]]
    ([448.0, -448.0, 0.0, 112.0], [1.0, 2.0])
    """


@operator
def fp8_linear(
    x: Like[Result],
    weight: Array,
    descale: Array,
    *,
    input_group: tuple[int, int],
    out: Array | None = None,
    workspace: Array | None = None,
    stream: Stream = None,
) -> Result:
    """Multiply by an e4m3 weight: out[t, n] = sum_k x[t, k] * weight[n, k], scales included.

    `x` is quantised first, by `scaled_quantize` in groups of `input_group`. The input group and the
    shape of `descale` name one of four schemes:

    - tensor: (-1, -1) and one value;
    - block: (1, 128) and [ceil(out / 128), in / 128];
    - token_tensor: (1, -1) and one value;
    - token_channel: (1, -1) and [out] or [out, 1].

    Every 128 products are summed, and the sum is multiplied in fp32 by the input's scale times the
    weight's; a scale per output multiplies the whole sum instead. With `block` the bits are those
    of `grouped_output_projection` with one group.

    With z the exact result of the quantised operands and u = sum_k |x * weight|, scales included,
    an error is at most 2**-8 * |z| + 2**-16 * u. On Hopper, more than 64 tokens run on the FP8
    tensor cores, whose sums are coarser: 2**-8 * |z| + 2**-8 * u. That comes on top of what
    quantisation loses. Scales may be of any size: a result is finite wherever z fits bf16, although
    a product of scales, or a part of the sum, may not fit fp32. Results below 2**-126 may be 0, and
    on a GPU a product of scales below that loses bits.

    Parameters
    ----------
    x : [T, in] bf16
        `in` is a multiple of 128. Its rows may be any distance apart.
    weight : [out, in] float8_e4m3fn or uint8
        As linear layers store it, so its values of k are contiguous.
    descale : [1], [ceil(out / 128), in / 128], [out] or [out, 1] fp32
        The scales that the weight's values are multiplied with, in the form of a scheme. Any
        strides; one value may have any rank.
    input_group : (int, int)
    out : [T, out] bf16, optional
    workspace : [n] uint8, optional
        n is T * in + 4 * (number of input groups), and up to 15 more if it is not aligned to 16
        bytes. It holds the quantised input during the call.
    stream : int handle or stream object, optional

    Returns
    -------
    out, accumulated in fp32 and rounded once.

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        A `descale` and an `input_group` that name no scheme, `in` that is no multiple of 128, a
        workspace that is too small.
        `help(sparse_mla.ops)` lists the errors that every operator raises.

    Source: the FP8 layers that vLLM's MLA requantises absorbed matrices for.

    Examples
    --------
    >>> import numpy as np, ml_dtypes, sparse_mla
    >>> weight, x = np.full((384, 256), 0.5, np.float32), np.ones((3, 256), ml_dtypes.bfloat16)
    >>> codes, descale = sparse_mla.scaled_quantize(weight, group=(128, 128))
    >>> y = sparse_mla.fp8_linear(x, codes, descale, input_group=(1, 128))
    >>> list(y.shape), float(y[0, 0])
    ([3, 384], 128.0)
    """
