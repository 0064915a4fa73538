"""Orders a batch, and cuts it into decodes, prefills and chunks of prefills; works on integers in
host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from sparse_mla import _C
from sparse_mla._types import overload

__all__ = [
    "ContextChunks",
    "get_context_workspace_size",
    "get_prefill_workspace_size",
    "local_attention_batches",
    "reorder_batch",
    "split_context_chunks",
    "split_decodes_and_prefills",
    "split_prefill_chunks",
]


def split_decodes_and_prefills(
    query_start_loc: Any,
    num_actual_tokens: int,
    *,
    decode_threshold: int = 1,
    require_uniform: bool = False,
) -> tuple[int, int, int, int]:
    """Count the decodes that lead a batch, and the prefills that follow them.

    Parameters
    ----------
    query_start_loc : [R + 1] integers in host memory
        Where each request's query tokens start: an array, list or tuple that begins with 0 and
        never decreases.
    num_actual_tokens : int
        At least query_start_loc[R]; more means padding tokens.
    decode_threshold : int
        A leading request with at most this many query tokens is a decode.
    require_uniform : bool
        Whether all decodes must be as long as the first one. Requests of length 0 (idle ones,
        graph padding) count as long as the others: they are decodes before the first prefill, and
        prefills behind it.

    Returns
    -------
    (num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens).

    Raises
    ------
    TypeError, ValueError
        Starts that decrease or do not begin with 0, more tokens than num_actual_tokens, values
        beyond int32.

    Source: vLLM's split_decodes_and_prefills.

    Examples
    --------
    >>> import sparse_mla
    >>> sparse_mla.split_decodes_and_prefills([0, 1, 2, 9], 9)
    (2, 1, 2, 7)
    """
    return _C.split_decodes_and_prefills(
        query_start_loc, num_actual_tokens, decode_threshold, require_uniform
    )


def reorder_batch(
    num_scheduled_tokens: Any, *, decode_threshold: int = 1
) -> tuple[list[tuple[int, int]], int, int, int, int]:
    """Find the swaps of requests that put a batch's decodes before its prefills.

    A request with at most `decode_threshold` tokens is a decode, also one without tokens. The first
    prefill is swapped with the last decode, the second with the one before it, and so on, while the
    decode stands behind the places of decodes. Few requests move, and a batch in order needs no
    swap.

    Parameters
    ----------
    num_scheduled_tokens : [R] integers in host memory
        Query tokens of each request in this step: an array, list or tuple.
    decode_threshold : int
        At least 1.

    Returns
    -------
    (swaps, num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens): the pairs of requests
    to swap, one after another.

    Raises
    ------
    TypeError, ValueError
        A negative number of tokens, a `decode_threshold` below 1, values beyond int32.

    Source: reorder_batch of vLLM's MLACommonMetadataBuilder.

    Examples
    --------
    >>> import sparse_mla
    >>> sparse_mla.reorder_batch([100, 1, 200, 1])
    ([(0, 3)], 2, 2, 2, 300)
    """
    return _C.reorder_batch(num_scheduled_tokens, decode_threshold)


def split_prefill_chunks(seq_lens: Any, workspace_tokens: int) -> list[tuple[int, int]]:
    """Pack requests, in order, into chunks whose lengths together fit the workspace.

    Parameters
    ----------
    seq_lens : [R] integers in host memory
        An array, list or tuple.
    workspace_tokens : int
        A request longer than this is a ValueError that names both numbers.

    Returns
    -------
    [(start, end), ...]: requests start to end - 1 form a chunk.

    Raises
    ------
    TypeError, ValueError
        A negative length, one longer than the workspace, values beyond int32.

    Source: vLLM's split_prefill_chunks.

    Examples
    --------
    >>> import sparse_mla
    >>> sparse_mla.split_prefill_chunks([10, 15, 20, 5], 25)
    [(0, 2), (2, 4)]
    """
    return _C.split_prefill_chunks(seq_lens, workspace_tokens)


def get_prefill_workspace_size(max_model_len: int) -> int:
    """The default size of the prefill workspace in tokens: 5 * max_model_len.

    Parameters
    ----------
    max_model_len : int
        Tokens that a request has at most.

    Returns
    -------
    int, in tokens of 1152 bytes.

    Raises
    ------
    TypeError, ValueError
        `max_model_len` is not an int, is below 0, or is beyond int32.

    Source: vLLM's get_prefill_workspace_size.

    Examples
    --------
    >>> import sparse_mla
    >>> sparse_mla.get_prefill_workspace_size(163840)
    819200
    """
    return _C.get_prefill_workspace_size(max_model_len)


@dataclass(frozen=True, eq=False)
class ContextChunks:
    """The cached context of prefills, cut into chunks of equal rows. `split_context_chunks` makes
    it.

    Attributes
    ----------
    context_chunk_starts : [num_chunks, num_prefills] int32
        The first token of each prefill in each chunk: what `gather_kv_cache` takes as seq_starts.
    context_chunk_seq_lens : [num_chunks, num_prefills] int32
        How many tokens follow; 0 where a prefill has none left.
    context_chunk_cu_seq_lens : [num_chunks, num_prefills + 1] int32
        Where each prefill's rows begin in the workspace.
    context_chunk_seq_tot, context_chunk_max_seq_lens : list of int
        Each chunk's tokens, and those of its longest part.

    Source: ChunkedContextMetadata of vLLM's MLA backends.

    Examples
    --------
    >>> import sparse_mla
    >>> chunks = sparse_mla.split_context_chunks([0, 10, 300], 256, block_size=64)
    >>> chunks.context_chunk_starts.tolist(), chunks.context_chunk_seq_tot
    ([[0, 0, 0], [128, 128, 128], [256, 256, 256]], [138, 128, 44])
    """

    context_chunk_starts: np.ndarray[Any, np.dtype[np.int32]]
    context_chunk_seq_lens: np.ndarray[Any, np.dtype[np.int32]]
    context_chunk_cu_seq_lens: np.ndarray[Any, np.dtype[np.int32]]
    context_chunk_seq_tot: list[int]
    context_chunk_max_seq_lens: list[int]


PackedChunks = list[tuple[int, int, list[int], list[int]]]


@overload
def split_context_chunks(
    context_lens: Any,
    workspace_tokens: int,
    *,
    block_size: int,
    plan: Literal["equal"] = "equal",
) -> ContextChunks | None: ...
@overload
def split_context_chunks(
    context_lens: Any, workspace_tokens: int, *, block_size: int, plan: Literal["packed"]
) -> PackedChunks: ...
def split_context_chunks(
    context_lens: Any,
    workspace_tokens: int,
    *,
    block_size: int,
    plan: Literal["equal", "packed"] = "equal",
) -> ContextChunks | PackedChunks | None:
    """Cut the cached context of prefills into chunks that fit a workspace.

    A prefill attends to its new tokens, and to those that are cached already. The latter are
    gathered to a workspace chunk by chunk, and the partial results are merged. Every cached token
    is in exactly one chunk, and chunks begin at pages.

    "equal" gives every prefill that has context the same room, n pages, in every chunk: chunk c has
    its tokens from c * n * block_size on. "packed" fills a chunk prefill by prefill; one that does
    not fit is cut at a page and goes on in the next chunk. That takes fewer chunks where lengths
    differ.

    Parameters
    ----------
    context_lens : [num_prefills] integers in host memory
        Cached tokens of each prefill, 0 for a new request: an array, list or tuple.
    workspace_tokens : int
        Rows of the workspace, see `get_context_workspace_size`.
    block_size : int
        Tokens per page.
    plan : "equal" or "packed"

    Returns
    -------
    For "equal" ContextChunks, or None where no prefill has context. For "packed" a list of
    (first, last + 1, starts, lens): the chunk's prefills, which are neighbours, and the first
    token and the number of tokens of each. Only a chunk's first prefill can begin behind 0.

    Raises
    ------
    TypeError, ValueError
        A negative length, values beyond int32, a workspace without a page for each prefill that
        has context ("packed": without a page), another plan.

    Source: the chunked context of vLLM's MLA backends; "packed" is ours.

    Examples
    --------
    >>> import sparse_mla
    >>> chunks = sparse_mla.split_context_chunks([0, 10, 300], 256, block_size=64)
    >>> chunks.context_chunk_seq_lens.tolist()
    [[0, 10, 128], [0, 0, 128], [0, 0, 44]]
    >>> sparse_mla.split_context_chunks([0, 10, 300], 256, block_size=64, plan="packed")
    [(1, 3, [0, 0], [10, 192]), (2, 3, [192], [108])]
    """
    if plan not in ("equal", "packed"):
        raise ValueError(f"split_context_chunks: `plan` must be 'equal' or 'packed', got {plan!r}")
    chunks = _C.split_context_chunks(context_lens, workspace_tokens, block_size, plan == "packed")
    if plan == "packed":
        return chunks
    return _make_equal(chunks) if chunks else None


def _make_equal(chunks: Sequence[tuple[int, int, list[int], list[int]]]) -> ContextChunks:
    lens = np.array([row for *_, row in chunks], np.int32)
    cumulative = np.zeros((lens.shape[0], lens.shape[1] + 1), np.int32)
    np.cumsum(lens, axis=1, out=cumulative[:, 1:])
    return ContextChunks(
        context_chunk_starts=np.array([row for _, _, row, _ in chunks], np.int32),
        context_chunk_seq_lens=lens,
        context_chunk_cu_seq_lens=cumulative,
        context_chunk_seq_tot=cumulative[:, -1].tolist(),
        context_chunk_max_seq_lens=lens.max(axis=1).tolist(),
    )


def local_attention_batches(
    query_start_loc: Any,
    seq_lens: Any,
    block_table: Any,
    *,
    attention_chunk: int,
    block_size: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Make a batch of virtual requests, so that causal attention to it is local attention.

    Positions are cut into blocks of `attention_chunk`, and a query sees keys of its own block, up
    to itself. Every block in which a request has queries becomes a request of its own, with the
    pages of the block. Tokens keep their order. `attention_chunk=` of `varlen_attention` and
    `mla_attention` gives the same results without this plan, for any chunk.

    Parameters
    ----------
    query_start_loc : [R + 1] integers in host memory
        Where each request's query tokens start: an array, list or tuple that begins with 0.
    seq_lens : [R] integers in host memory
        Tokens of each request with this step's. Fewer than its query tokens mean padding.
    block_table : [R, W] integers in host memory
        Pages of each request, at least those of its tokens.
    attention_chunk : int
        Positions per block, a multiple of `block_size`. It may be longer than every request.
    block_size : int
        Tokens per page.

    Returns
    -------
    (query lengths [n], query starts [n + 1], key lengths [n], block table [n, attention_chunk /
    block_size]) int32 NumPy arrays. A request without queries yields no virtual request, padding
    one without keys. Columns behind W repeat the last one.

    Raises
    ------
    TypeError, ValueError
        An `attention_chunk` that is no multiple of `block_size`, starts that decrease or do not
        begin with 0, a negative length, a table with too few columns or rows, values beyond int32.

    Source: make_local_attention_virtual_batches of vLLM.

    Examples
    --------
    >>> import sparse_mla
    >>> plan = sparse_mla.local_attention_batches(
    ...     [0, 8], [12], [[0, 1, 2, 3, 4, 5]], attention_chunk=4, block_size=2
    ... )
    >>> [x.tolist() for x in plan]
    [[4, 4], [0, 4, 8], [4, 4], [[2, 3], [4, 5]]]
    """
    plan = _C.local_attention_batches(
        query_start_loc, seq_lens, block_table, attention_chunk, block_size
    )
    lens, starts, keys, pages = (np.frombuffer(x, np.int32) for x in plan)
    return lens, starts, keys, pages.reshape(len(lens), attention_chunk // block_size)


def get_context_workspace_size(max_model_len: int, max_num_seqs: int, block_size: int) -> int:
    """The default size of the workspace for cached context, in tokens.

    It has room for eight of the longest requests, or for four pages of each request where that is
    more, but at most 65536 tokens; and at least a page of each request.

    Parameters
    ----------
    max_model_len : int
        Tokens that a request has at most.
    max_num_seqs : int
        Requests of the largest batch.
    block_size : int
        Tokens per page.

    Returns
    -------
    int, a multiple of block_size.

    Raises
    ------
    TypeError, ValueError
        An argument that is not an int, is below 1, or is beyond int32.

    Source: the chunked prefill workspace of vLLM's MLA backends.

    Examples
    --------
    >>> import sparse_mla
    >>> sparse_mla.get_context_workspace_size(4096, 256, 64)
    65536
    """
    return _C.get_context_workspace_size(max_model_len, max_num_seqs, block_size)
