"""What a rank of context parallelism has of each request: its positions, lists and lengths.

The cache of a request is split over `ranks` devices, in runs of `interleave` tokens: position x
belongs to rank `x // interleave % ranks`. A rank numbers its own positions from 0 on. Its tables,
its slot mapping and its lists have these local positions; lengths and masks of `mla_attention` and
`paged_attention` stay those of the whole request. `merge_attn_partials` merges the ranks' results.
"""

from __future__ import annotations

from sparse_mla._types import Like, Result
from sparse_mla.ops._declare import Array, Stream, operator

__all__ = ["cp_local_lengths", "cp_local_positions", "cp_local_topk"]


@operator
def cp_local_positions(
    positions: Like[Result],
    *,
    cp: tuple[int, int, int] | None,
    out: Array | None = None,
    stream: Stream = None,
) -> Result:
    """Turn positions inside a request into a rank's own, each where it stands.

    A position of this rank becomes its local position, which is the number of the rank's positions
    in front of it. Positions of other ranks, and negative ones, become -1. A slot map follows from
    the local positions of new tokens, because no operator writes to slot -1. A list may have holes:
    `cp_local_topk` closes them.

    Parameters
    ----------
    positions : [N] or [T, K], int32 or int64
        Any strides.
    cp : (rank, ranks, interleave) or None
        Position x belongs to rank x // interleave % ranks. None: one rank has all.
    out : [N] or [T, K], dtype of positions, optional
        Rows may be any stride apart.
    stream : int handle or stream object, optional

    Returns
    -------
    out

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        A `cp` whose rank is not 0 to ranks - 1, or whose interleave is below 1.
        `help(sparse_mla.ops)` lists the errors that every operator raises.

    Source: the interleaved cache of vLLM's decode context parallelism.

    Examples
    --------
    >>> import numpy as np, sparse_mla
    >>> positions = np.array([0, 3, 4, 9, -1, 13])
    >>> [sparse_mla.cp_local_positions(positions, cp=(rank, 2, 4)).tolist() for rank in range(2)]
    [[0, 3, -1, 5, -1, -1], [-1, -1, 0, -1, -1, 5]]
    """


@operator
def cp_local_topk(
    topk_indices: Like[Result],
    *,
    cp: tuple[int, int, int] | None,
    out: Array | None = None,
    lens: Array | None = None,
    stream: Stream = None,
) -> tuple[Result, Result]:
    """Turn an indexer's choice into a rank's own lists, without holes, in one launch.

    The entries of this rank become local positions, as `cp_local_positions` gives them, and move
    left in their order. Behind them a row is -1. This is a second operator because most entries of
    a list belong to other ranks: with their number beside it, `sparse_attention` reads the rank's
    share alone. `out` and `lens` are named as in `compute_global_topk_indices_and_lens`, which
    turns such lists into slots; they are `indices`, after `convert_req_index_to_global_index`, and
    `topk_length` of `sparse_attention`.

    Parameters
    ----------
    topk_indices : [T, K] int32
        Positions in the whole request, -1 = none; rows may be any stride apart.
    cp : (rank, ranks, interleave) or None
        Position x belongs to rank x // interleave % ranks. None: one rank has all.
    out : [T, K] int32, optional
    lens : [T] int32, optional
    stream : int handle or stream object, optional

    Returns
    -------
    (out, lens): local positions, and their number for each token, which is 0 where the rank has
    none.

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        A `cp` whose rank is not 0 to ranks - 1, or whose interleave is below 1.
        `help(sparse_mla.ops)` lists the errors that every operator raises.

    Source: ours; the interleaved cache is that of vLLM's decode context parallelism.

    Examples
    --------
    >>> import numpy as np, sparse_mla
    >>> topk = np.array([[0, 3, 4, 9, 13, -1], [5, 6, -1, -1, -1, -1]], np.int32)
    >>> out, lens = sparse_mla.cp_local_topk(topk, cp=(0, 2, 4))
    >>> out.tolist(), lens.tolist()
    ([[0, 3, 5, -1, -1, -1], [-1, -1, -1, -1, -1, -1]], [3, 0])
    """


@operator
def cp_local_lengths(
    seq_lens: Like[Result],
    *,
    cp: tuple[int, int, int] | None,
    out: Array | None = None,
    stream: Stream = None,
) -> Result:
    """Count the positions that a rank has of requests of these lengths.

    Parameters
    ----------
    seq_lens : [B] int32
        Lengths of whole requests, any stride; one below 0 counts as 0.
    cp : (rank, ranks, interleave) or None
        Position x belongs to rank x // interleave % ranks. None: one rank has all.
    out : [B] int32, optional
    stream : int handle or stream object, optional

    Returns
    -------
    out: rows of each request's cache on this rank.

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        A `cp` whose rank is not 0 to ranks - 1, or whose interleave is below 1.
        `help(sparse_mla.ops)` lists the errors that every operator raises.

    Source: the interleaved cache of vLLM's decode context parallelism.

    Examples
    --------
    >>> import numpy as np, sparse_mla
    >>> lens = np.array([3, 6, 10, 14], np.int32)
    >>> [sparse_mla.cp_local_lengths(lens, cp=(rank, 2, 4)).tolist() for rank in range(2)]
    [[3, 4, 6, 8], [0, 2, 4, 6]]
    """
