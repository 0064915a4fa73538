"""The parts of a DeepSeek V4 step's metadata, which the builder in v4.py makes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparse_mla.steps import common as steps

Array = Any


@dataclass(frozen=True, eq=False, repr=False)
class LayerMetadata(steps.ShortRepr):
    """What layers of one compress ratio, or their indexers, need beside the sliding window.
    `MetadataBuilder.build` makes it.

    Rows, slots and pages are those of the compressed cache. A token is valid if its entry in the
    step's slot_mapping is a slot. With `Config.cp`, all but the states is of this rank's own rows,
    which are numbered from 0 on.

    Attributes
    ----------
    block_table : [>= R, W] int32
        The engine's pages of the compressed cache.
    block_size : int
        Compressed rows per page: `Config.block_size // ratio`.
    slot_mapping : [T] int32
        Where a valid token that ends a group of `ratio` tokens stores its row; -1 for others, and
        for rows of other ranks.
    state_block_table : [>= R, W] int32 or None
        The engine's pages of the compressor's states.
    state_slot_mapping : [T] int32 or None
        Where a valid token stores its state; -1 for others. None without a table of states.
    context_lens : [T] int32
        Complete groups that a token sees, its own included; 0 for tokens that are not valid.
    decode_indices : [Td, Wc] int32 or None
        Slots of all these groups for decode tokens, then -1. Wc has room for `max_seq_len`. This
        and the next two are None where an indexer chooses.
    decode_lens : [Td] int32 or None
        Their number.
    prefill_indices : [Tp, Wc] int32 or None
        For prefill tokens the numbers 0, 1, ... of these groups, then -1.

    Source: vLLM's metadata of DeepSeek V4's compressed caches.

    Examples
    --------
    >>> import sparse_mla
    >>> lists = dict.fromkeys(sparse_mla.v4.LayerMetadata.__dataclass_fields__) | {"block_size": 64}
    >>> sparse_mla.v4.LayerMetadata(**lists).block_size
    64
    """

    block_table: Array
    block_size: int
    slot_mapping: Array
    state_block_table: Array
    state_slot_mapping: Array
    context_lens: Array
    decode_indices: Array
    decode_lens: Array
    prefill_indices: Array


@dataclass(frozen=True, eq=False, repr=False)
class Decode(steps.ShortRepr):
    """The decode part of a step. `MetadataBuilder.build` makes it.

    Attributes
    ----------
    decode_query_len : int
        Query tokens of the longest decode; speculative batches may be ragged.

    Source: vLLM's metadata of DeepSeek V4's decodes.

    Examples
    --------
    >>> import sparse_mla
    >>> sparse_mla.v4.Decode(decode_query_len=2)
    Decode(decode_query_len=2)
    """

    decode_query_len: int


@dataclass(frozen=True, eq=False, repr=False)
class Chunk(steps.ShortRepr):
    """Prefill requests that share the workspace. `MetadataBuilder.build` makes it.

    Attributes
    ----------
    req_start_idx : int
        The chunk's first request; 0 is the batch's first prefill.
    tokens_slice : slice
        The chunk's query tokens among those of the batch.
    seq_lens, gather_lens : [n] int32
        The chunk's entries of `Prefill.seq_lens` and `Prefill.gather_lens`.
    block_table : [n, W] int32
        The chunk's rows of the sliding window's block table.

    Source: vLLM's metadata of DeepSeek V4's prefills.

    Examples
    --------
    >>> import sparse_mla
    >>> sparse_mla.v4.Chunk(0, slice(1, 5), [4], [4], [[1]]).tokens_slice.stop
    5
    """

    req_start_idx: int
    tokens_slice: slice
    seq_lens: Array
    gather_lens: Array
    block_table: Array


@dataclass(frozen=True, eq=False, repr=False)
class Prefill(steps.ShortRepr):
    """The prefill part of a step. `MetadataBuilder.build` makes it.

    Attributes
    ----------
    seq_lens : [prefills] int32
        Tokens of each request, context and query; 0 for a request without query tokens.
    gather_lens : [prefills] int32
        The tokens that its queries see in the sliding window: the query, and up to `window - 1`
        tokens in front of it.
    chunks : list of Chunk
        Each chunk is one attention call of path "separate".

    Source: vLLM's metadata of DeepSeek V4's prefills.

    Examples
    --------
    >>> import sparse_mla
    >>> sparse_mla.v4.Prefill([300], [130], []).gather_lens
    [130]
    """

    seq_lens: Array
    gather_lens: Array
    chunks: list[Chunk]
