"""Turns positions into slots, and builds the index lists of DeepSeek V4's attention: windows of the
last tokens, compressed rows.

Compressed row j of a request stands for its tokens up to position `(j + 1) * ratio - 1`. An indexer
chooses rows by their number j, a position in the request's compressed cache.
"""

from __future__ import annotations

from typing import Any

from sparse_mla._types import Like, Result
from sparse_mla.ops._declare import Array, Stream, operator

__all__ = [
    "build_mixed_sparse_indices",
    "combine_topk_swa_indices",
    "compute_global_topk_indices_and_lens",
    "convert_req_index_to_global_index",
]


@operator
def convert_req_index_to_global_index(
    req_id_per_token: Like[Result],
    block_table: Array,
    topk_indices: Array,
    *,
    block_size: int,
    prefill_request_ids: Array | None = None,
    prefill_workspace_starts: Array | None = None,
    valid_counts: bool = False,
    out: Array | None = None,
    stream: Stream = None,
) -> Result | tuple[Result, Result]:
    """Turn positions inside each request into slots of the cache, or rows of the workspace.

    Position p of request r is slot `block_table[r, p // block_size] * block_size + p % block_size`;
    for a token with `prefill_request_ids[t] = i >= 0` it is row `prefill_workspace_starts[i] + p`.
    Negative positions, positions beyond the table and negative table entries give -1. The order of
    the entries is kept.

    Parameters
    ----------
    req_id_per_token : [T] int32
        An id outside 0 to R - 1 is a ValueError on the CPU, and gives a row of -1 on CUDA.
    block_table : [R, W] int32
    topk_indices : [T, K] int32
        Positions from an indexer, -1 = none.
    block_size : int
        Tokens per page.
    prefill_request_ids : [T] int32, optional
        Number of the prefill request of each token, -1 for decode tokens.
    prefill_workspace_starts : [prefills] int32, with prefill_request_ids
        First workspace row of each prefill request.
    valid_counts : bool
        Whether to return the number of entries >= 0 of each token too.
    out : [T, K] int32, optional
    stream : int handle or stream object, optional

    Returns
    -------
    out [T, K] int32, or (out, counts [T] int32) with `valid_counts`.

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        A `block_size` below 1, a bad request id (CPU), `prefill_request_ids` without its starts.
        `help(sparse_mla.ops)` lists the errors that every operator raises.

    Source: vLLM's triton_convert_req_index_to_global_index.

    Examples
    --------
    >>> import numpy as np, sparse_mla
    >>> table, topk = np.array([[5, 7]], np.int32), np.array([[0, 64, -1, 500]], np.int32)
    >>> ids = np.zeros(1, np.int32)
    >>> sparse_mla.convert_req_index_to_global_index(ids, table, topk, block_size=64).tolist()
    [[320, 448, -1, -1]]
    """


@operator
def compute_global_topk_indices_and_lens(
    topk_indices: Like[Result],
    req_id_per_token: Array,
    block_table: Array,
    block_size: int,
    is_valid: Array | None,
    *,
    out: Array | None = None,
    lens: Array | None = None,
    stream: Stream = None,
) -> tuple[Result, Result]:
    """Turn an indexer's choice into slots of the compressed cache, without holes.

    Position p of request r is slot `block_table[r, p // block_size] * block_size + p % block_size`.
    Entries without a slot (negative, beyond the table, on a page below 0) are dropped; the others
    move left in their order. Behind them a row is -1.

    Parameters
    ----------
    topk_indices : [T, K] int32
        Positions in the compressed cache, -1 = none.
    req_id_per_token : [>= T] int32
        An id outside 0 to R - 1 of a valid token is a ValueError on the CPU, and gives a row
        without slots on CUDA.
    block_table : [R, W] int32
    block_size : int
        Rows per page of the compressed cache.
    is_valid : [>= T] bool or uint8, or None
        False for padding, whose rows are -1. None: all tokens are valid.
    out : [T, K] int32, optional
    lens : [T] int32, optional
    stream : int handle or stream object, optional

    Returns
    -------
    (out, lens): slots, and their number for each token; `extra_indices` and `extra_topk_length` of
    `sparse_attention`.

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        A `block_size` below 1, a bad request id (CPU).
        `help(sparse_mla.ops)` lists the errors that every operator raises.

    Source: vLLM's compute_global_topk_indices_and_lens.

    Examples
    --------
    >>> import numpy as np, sparse_mla
    >>> topk, table = np.array([[3, 0, -1, 9]], np.int32), np.array([[6, 1]], np.int32)
    >>> ids = np.zeros(1, np.int32)
    >>> out, lens = sparse_mla.compute_global_topk_indices_and_lens(topk, ids, table, 4, None)
    >>> out.tolist(), lens.tolist()
    ([[27, 24, -1, -1]], [2])
    """


@operator
def combine_topk_swa_indices(
    topk_indices: Like[Result],
    query_start_loc: Array,
    seq_lens: Array,
    gather_lens: Array,
    window: int,
    ratio: int,
    topk: int,
    M: int,
    N: int,
    *,
    align: int = 128,
    out: Array | None = None,
    lens: Array | None = None,
    stream: Stream = None,
) -> tuple[Result, Result]:
    """Name the rows of a prefill chunk's workspace that each token attends to.

    The workspace has M rows per request. Those of request b begin at M * b with its compressed
    rows; from M * b + N on, they are its last `gather_lens[b]` tokens. The list of a token at
    position p begins with the first `tl = min((p + 1) // ratio, topk)` of its `topk_indices`, moved
    by M * b. Then come the rows of the window: its last `min(p + 1, window)` tokens.

    Parameters
    ----------
    topk_indices : [T, >= topk] int32
        Positions in the compressed cache. Negative entries give -1, and keep their place.
    query_start_loc : [R + 1] int32
        Where each request's tokens begin. Its first entry may be any number, and is token 0.
        Tokens past its last entry get no rows.
    seq_lens : [R] int32
        Length of each request, with the tokens of this step.
    gather_lens : [R] int32
        How many tokens of each request the workspace holds: the windows of all its tokens here, and
        at most `seq_lens` and M - N.
    window : int
        Tokens that a query sees, itself included.
    ratio : int
        Tokens per compressed row.
    topk : int
        Columns of `topk_indices` in use; 0 for layers without compressed rows.
    M, N : int
        Rows per request, and the first of them that holds a token.
    align : int
        The width of `out` is `topk + window`, rounded up to a multiple of this.
    out : [T, width] int32, optional
    lens : [T] int32, optional
    stream : int handle or stream object, optional

    Returns
    -------
    (out, lens): rows, then -1; lens is tl plus the tokens of the window.

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        A `topk` wider than its indices, a `query_start_loc` that decreases or passes T (CPU), a
        `gather_lens` out of its range (CPU; CUDA writes -1 for tokens that are not there).
        `help(sparse_mla.ops)` lists the errors that every operator raises.

    Source: vLLM's combine_topk_swa_indices.

    Examples
    --------
    >>> import numpy as np, sparse_mla
    >>> topk, starts = np.array([[0, -1], [1, 0]], np.int32), np.array([7, 9], np.int32)
    >>> seq_len = np.array([9], np.int32)
    >>> out, lens = sparse_mla.combine_topk_swa_indices(
    ...     topk, starts, seq_len, seq_len, 3, 4, 2, 20, 10, align=4)
    >>> out.tolist(), lens.tolist()
    ([[0, -1, 15, 16, 17, -1, -1, -1], [1, 0, 16, 17, 18, -1, -1, -1]], [5, 5])
    """


@operator
def build_mixed_sparse_indices(
    decode_swa_indices: Array | None,
    decode_compressed_indices: Array | None,
    decode_compressed_lens: Array | None,
    prefill_topk_indices: Array | None,
    query_start_loc: Array,
    seq_lens: Array,
    req_id_per_token: Array,
    swa_block_table: Array,
    swa_block_size: int,
    compressed_block_table: Array | None,
    compressed_block_size: int,
    window: int,
    ratio: int,
    topk: int,
    *,
    decode_indices_are_local: bool = False,
    is_valid: Array | None = None,
    out: Array | None = None,
    lens: Array | None = None,
    stream: Stream = None,
) -> tuple[Any, Any]:
    """Build the slots that a batch attends to, for decodes and prefills in one array.

    A row has `window` columns for the window and C = max(topk, D) compressed columns, rounded up to
    4. Unused columns are -1. There are Td decode tokens, then prefill tokens.

    Decode tokens take their windows from `decode_swa_indices`, and their compressed columns from
    `decode_compressed_indices`. With `decode_indices_are_local` these are positions and become
    slots, where they stand; the compressed length is then the number of entries >= 0, and 0 for
    invalid tokens, whose compressed columns are -1.

    The window of a prefill token at position p has the slots of its last `min(p + 1, window)`
    tokens, oldest first. Its compressed columns are the slots of the first
    `min((p + 1) // ratio, topk)` entries of `prefill_topk_indices`, which is their length.

    Parameters
    ----------
    decode_swa_indices : [Td, window] int32 or None
        Slots of the window's cache. None: no decodes.
    decode_compressed_indices : [Td, D] int32 or None
        Slots of the compressed cache, or positions. None: D is 0.
    decode_compressed_lens : [>= Td] int32 or None
        Lengths of rows of slots, clamped to 0 to D. None: D. Not read for positions.
    prefill_topk_indices : [T - Td, >= topk] int32 or None
        Positions in the compressed cache, -1 = none. None: `topk` is 0, and T is the length of
        `req_id_per_token`.
    query_start_loc : [R + 1] int32
        Where each request's tokens begin. Prefill tokens past its last entry have no slots.
    seq_lens : [R] int32
        Length of each request, with the tokens of this step.
    req_id_per_token : [>= T] int32
        An id outside 0 to R - 1 of a token that needs one is a ValueError on the CPU, and gives no
        slots on CUDA.
    swa_block_table : [>= R, W] int32
    swa_block_size : int
        Tokens per page of the window's cache.
    compressed_block_table : [>= R, W] int32 or None
        May be None where no positions become slots of the compressed cache.
    compressed_block_size : int
        Rows per page of the compressed cache.
    window : int
        Tokens that a query sees, itself included.
    ratio : int
        Tokens per compressed row.
    topk : int
        Columns of `prefill_topk_indices` in use.
    decode_indices_are_local : bool
        Whether `decode_compressed_indices` are positions.
    is_valid : [>= Td] bool or uint8, optional
        False for padding among the decodes.
    out : [T, window + C] int32, optional
    lens : [T] int32, optional
    stream : int handle or stream object, optional

    Returns
    -------
    (out, lens): slots, and `window` plus the compressed length of each token.

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        A `topk` wider than its indices, positions without `compressed_block_table`; a
        `query_start_loc` that decreases, a bad request id (CPU).
        `help(sparse_mla.ops)` lists the errors that every operator raises.

    Source: vLLM's build_flashinfer_mixed_sparse_indices.

    Examples
    --------
    >>> import numpy as np, sparse_mla
    >>> swa, local = np.array([[8, 9, -1]], np.int32), np.array([[2, -1]], np.int32)
    >>> starts, seq_lens = np.array([0, 1, 2], np.int32), np.array([2, 8], np.int32)
    >>> ids, topk = np.array([0, 1], np.int32), np.array([[1, 0]], np.int32)
    >>> pages, compressed = np.array([[4, 0], [2, 5]], np.int32), np.array([[7], [3]], np.int32)
    >>> out, lens = sparse_mla.build_mixed_sparse_indices(
    ...     swa, local, None, topk, starts, seq_lens, ids, pages, 4, compressed, 4, 3, 4, 2,
    ...     decode_indices_are_local=True)
    >>> out.tolist(), lens.tolist()
    ([[8, 9, -1, 30, -1, -1, -1], [21, 22, 23, 13, 12, -1, -1]], [4, 5])
    """
