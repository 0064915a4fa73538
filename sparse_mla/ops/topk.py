"""Chooses the keys of each token by their logits."""

from __future__ import annotations

from sparse_mla._types import Like, Result
from sparse_mla.ops._declare import Array, Stream, operator

__all__ = ["top_k_merge", "top_k_per_row"]


@operator
def top_k_per_row(
    logits: Like[Result],
    starts: Array,
    ends: Array,
    *,
    k: int,
    slots_block_table: Array | None = None,
    slots_block_size: int | None = None,
    req_id_per_token: Array | None = None,
    is_valid: Array | None = None,
    out: Array | None = None,
    slots: Array | None = None,
    lens: Array | None = None,
    values: Array | None = None,
    stream: Stream = None,
) -> Result | tuple[Result, Result, Result]:
    """Choose the k keys of each token that have the largest logits, exactly.

    Token t chooses among columns `starts[t]` to `ends[t] - 1` of its row, both clamped to 0 to N.
    It takes all of them where there are at most k, else the k largest. Of equal logits the smaller
    column wins; -0 equals 0, and NaN is below -inf. A row of `out` has the columns in ascending
    order, counted from `starts[t]`, then -1. The result is the same in every run and on every
    device, and does not depend on other rows.

    Parameters
    ----------
    logits : [T, N] fp32 or bf16
        Rows may be any stride apart. N is below 2**31.
    starts, ends : [>= T] int32
        A token whose start is not below its end has no keys.
    k : int
        At least 1; may be larger than N.
    slots_block_table : [R, W] int32, optional
        The block table of the attention's cache. With it the call returns slots, too: what
        `compute_global_topk_indices_and_lens` makes of `out`, in the same launch.
    slots_block_size : int, optional
        Rows per page of the attention's cache, with `slots_block_table`.
    req_id_per_token : [>= T] int32, optional
        The row of `slots_block_table` of each token, with that table. An id outside 0 to R - 1 of a
        valid token is a ValueError on the CPU, and gives a row without slots on CUDA.
    is_valid : [>= T] bool or uint8, optional
        False for padding, whose rows of `slots` are -1, of length 0. `out` does not depend on it.
    out : [T, k] int32, optional
    slots : [T, k] int32, optional
    lens : [T] int32, optional
    values : [T, k] dtype of logits, optional
        Receives the chosen logits, bit for bit, then -inf: for a top-k over several devices. Not in
        JAX, where `jnp.take_along_axis` of the logits gives them.
    stream : int handle or stream object, optional

    Returns
    -------
    out; with `slots_block_table` (out, slots, lens): `extra_indices` and `extra_topk_length` of
    `sparse_attention`.

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        A `k` below 1; `slots_block_table` without `slots_block_size` or `req_id_per_token`, or what
        belongs to it without the table; a bad request id (CPU).
        `help(sparse_mla.ops)` lists the errors that every operator raises.

    Source: the top-k of vLLM's sparse indexer (top_k_per_row), here with an order and a rule for
    equal logits.

    Examples
    --------
    >>> import numpy as np, sparse_mla
    >>> logits = np.array([[1, 3, np.nan, 3, 0, -0.0, 2]], np.float32)
    >>> start, end = np.array([0], np.int32), np.array([7], np.int32)
    >>> sparse_mla.top_k_per_row(logits, start, end, k=3).tolist()
    [[1, 3, 6]]
    >>> out, slots, lens = sparse_mla.top_k_per_row(
    ...     logits, start, end, k=3, slots_block_table=np.array([[6, 1]], np.int32),
    ...     slots_block_size=4, req_id_per_token=np.zeros(1, np.int32))
    >>> slots.tolist(), lens.tolist()
    ([[25, 27, 6]], [3])
    """


@operator
def top_k_merge(
    indices: Like[Result],
    values: Array,
    *,
    k: int,
    out: Array | None = None,
    stream: Stream = None,
) -> Result:
    """Choose the k best keys of each token from the choices of several devices, exactly.

    Each list has the positions that `top_k_per_row` chose from one share of a token's keys, and
    their scores. No two lists of a token share a position. The result is what `top_k_per_row`
    gives for all keys at once, if each list has the k best of its share: the k positions with the
    largest scores, in ascending order, then -1. Of equal scores the smaller position wins; -0
    equals 0, and NaN is below -inf. It depends neither on the order of the lists nor on the device.

    Parameters
    ----------
    indices : [N, T, K] int32
        1 to 64 lists of ascending positions in the whole request. Negative entries are none. Lists
        and rows may be any stride apart; N * K is below 2**31. Lists that do not ascend, or that
        share a position, give a row of no meaning.
    values : [N, T, K] fp32 or bf16
        The scores: `values` of `top_k_per_row` and of `lightning_indexer`.
    k : int
        At least 1; may be larger than N * K.
    out : [T, k] int32, optional
    stream : int handle or stream object, optional

    Returns
    -------
    out

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        A `k` below 1; no list, or more than 64 of them.
        `help(sparse_mla.ops)` lists the errors that every operator raises.

    Source: ours. An indexer whose cache is split over ranks sends k candidates per rank.

    Examples
    --------
    >>> import numpy as np, sparse_mla
    >>> positions = np.array([[[0, 3, 8]], [[5, 6, -1]]], np.int32)
    >>> scores = np.array([[[2, 1, 7]], [[7, 1, -np.inf]]], np.float32)
    >>> sparse_mla.top_k_merge(positions, scores, k=4).tolist()
    [[0, 3, 5, 8]]
    """
