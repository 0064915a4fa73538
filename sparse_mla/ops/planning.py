"""Orders a batch, and cuts it into decodes, prefills and chunks of prefills; works on integers in
host memory."""

from __future__ import annotations

from typing import Any

from sparse_mla import _C

__all__ = [
    "get_prefill_workspace_size",
    "reorder_batch",
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
        Whether all decodes must be as long as the first one. Requests of length 0 may only stand at
        the end of a batch of decodes (graph padding).

    Returns
    -------
    (num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens).

    Raises
    ------
    TypeError, ValueError
        Starts that decrease or do not begin with 0, more tokens than num_actual_tokens, a request
        of length 0 anywhere but at the end of a batch of decodes, values beyond int32.

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

    A request with at most `decode_threshold` tokens is a decode. The first prefill is swapped with
    the last decode, the second with the one before it, and so on, while the decode stands behind
    the places of decodes. Few requests move, and a batch in order needs no swap.

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
