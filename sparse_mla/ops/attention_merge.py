"""Merges partial results of attention."""

from __future__ import annotations

from collections.abc import Sequence

from sparse_mla._types import Like, Result
from sparse_mla.ops._declare import Array, Stream, operator

__all__ = ["merge_attn_partials", "merge_attn_states"]


@operator
def merge_attn_states(
    out_a: Like[Result],
    lse_a: Array,
    out_b: Array,
    lse_b: Array,
    *,
    attn_sink: Array | None = None,
    prefill_tokens_with_context: int | None = None,
    out: Array | None = None,
    lse: Array | None = None,
    stream: Stream = None,
) -> tuple[Result, Result]:
    """Merge two partial results over disjoint key sets, weighted by their softmax sums.

    lse = ln(exp(lse_a) + exp(lse_b)); out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b.
    An lse of +inf counts as -inf (an empty part); where both are, out is out_a and lse is -inf.
    With `attn_sink`, out is multiplied by 1 / (1 + exp(sink - lse)) where lse is not -inf; lse
    stays. The parts must have been computed without the sink.

    Part a may be the cached context of a batch's prefills, part b their new tokens. Tokens from
    number `prefill_tokens_with_context` on have no context: their rows are those of part b, and
    what part a holds for them is not read.

    Parameters
    ----------
    out_a, out_b : [T, H, V] bf16, fp16 or fp32
    lse_a, lse_b : [T, H] fp32
        Natural logarithms.
    attn_sink : [>= H] fp32, optional
        -inf has no effect, +inf makes out 0.
    prefill_tokens_with_context : int, optional
        0 to T; by default all tokens have both parts.
    out : [T, H, V], the dtype of out_a, optional
        May be out_a or out_b: the whole of it.
    lse : [T, H] fp32, optional
        May be lse_a or lse_b.
    stream : int handle or stream object, optional

    Returns
    -------
    (out, lse).

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        Shapes that differ; an output that overlaps an input without being the whole of it.
        `help(sparse_mla.ops)` lists the errors that every operator raises.

    Source: section 2.2 of "FlashInfer" (arXiv:2501.01005), the attention state's merge operator.

    Examples
    --------
    >>> import numpy as np, sparse_mla
    >>> ones, zero = np.ones((1, 1, 4), np.float32), np.zeros((1, 1), np.float32)
    >>> out, lse = sparse_mla.merge_attn_states(ones, zero, 3 * ones, zero)
    >>> out[0, 0, 0].item(), round(lse.item(), 4)
    (2.0, 0.6931)
    """


@operator
def merge_attn_partials(
    outs: Like[Result] | Sequence[Like[Result]],
    lses: Array | Sequence[Array],
    *,
    attn_sink: Array | None = None,
    out: Array | None = None,
    lse: Array | None = None,
    stream: Stream = None,
) -> tuple[Result, Result]:
    """Merge N partial results over disjoint key sets in one pass, weighted by their softmax sums.

    lse = ln(sum of exp(lses[i])); out = sum of exp(lses[i] - lse) outs[i]. Sums are in fp32, in the
    order of the parts, and are rounded once. Parts are what ranks of context parallelism computed,
    or chunks of the keys. Two parts give the bits of `merge_attn_states`.

    A part whose lse is -inf or +inf is empty and has no say, whatever its row holds; where all
    parts are empty, out is the row of part 0 and lse is -inf. With `attn_sink`, out is multiplied
    by 1 / (1 + exp(sink - lse)) where lse is not -inf; lse stays. The parts must have been computed
    without the sink.

    Parameters
    ----------
    outs : [N, T, H, V] bf16, fp16 or fp32, or a list of N arrays [T, H, V]
        1 to 64 parts. N, T and H may have any strides, in arrays of a list their own: the view of a
        buffer that all_to_all received, in whatever order, is taken as it is. Nothing is copied,
        but that JAX stacks the arrays of a list.
    lses : [N, T, H] fp32, or a list of N arrays [T, H]
        Natural logarithms, any strides.
    attn_sink : [>= H] fp32, optional
        -inf has no effect, +inf makes out 0. With heads split over ranks, the slice of the rank.
    out : [T, H, V], the dtype of outs, or bf16 or fp16 of fp32 outs, optional
        Its GPU merges, and arrays of a list may be in memory of other GPUs that this one can read:
        mapped (symmetric memory, cudaIpc, VMM) or with peer access. No order is made with what
        wrote them: put a barrier before the call. Without `out` and `lse`, the GPU of outs[0]
        merges.
    lse : [T, H] fp32, optional
    stream : int handle or stream object, optional

    Returns
    -------
    (out, lse).

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        No parts, more than 64, as many lses as there are not outs; shapes that differ; a part in
        memory that the GPU cannot read; an output that overlaps a part. `help(sparse_mla.ops)`
        lists the errors that every operator raises.

    Source: section 2.2 of "FlashInfer" (arXiv:2501.01005), the attention state's merge operator.

    Examples
    --------
    >>> import numpy as np, sparse_mla
    >>> ones, zero = np.ones((1, 1, 4), np.float32), np.zeros((1, 1), np.float32)
    >>> out, lse = sparse_mla.merge_attn_partials([ones, 3 * ones, 5 * ones], [zero] * 3)
    >>> out[0, 0, 0].item(), round(lse.item(), 4)
    (3.0, 1.0986)
    """
