"""A step's plan, and the builder that makes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from sparse_mla import _C
from sparse_mla._compiled import names_integration
from sparse_mla.backend._words import ShortRepr, wrong_type
from sparse_mla.backend.batch import CommonAttentionMetadata
from sparse_mla.backend.config import Config

Array = Any
AnyMetadata = TypeVar("AnyMetadata")

# Fields that every builder's step hands over as they are.
_STEP_FIELDS = (
    *("path", "num_decodes", "num_prefills", "num_decode_tokens", "num_prefill_tokens"),
    "req_id_per_token",
)


def check_common(common: CommonAttentionMetadata) -> tuple[int, int, int]:
    """num_reqs, num_actual_tokens and max_seq_len of what `build` was given."""
    if not isinstance(common, CommonAttentionMetadata):
        wanted = "a CommonAttentionMetadata"
        raise wrong_type("MetadataBuilder.build", "common", wanted, common)
    # None of these is None any more: CommonAttentionMetadata fills in what its caller left out.
    sizes = (common.num_reqs, common.num_actual_tokens, common.max_seq_len)
    return cast(tuple[int, int, int], sizes)


def make_metadata(
    kind: type[AnyMetadata],
    common: CommonAttentionMetadata,
    builder: object,
    step: dict[str, Any],
    **fields: object,
) -> AnyMetadata:
    """Metadata of a step, with what every builder knows of it and these fields."""
    # A frozen dataclass would set its fields one by one, which takes three times as long.
    metadata = object.__new__(kind)
    metadata.__dict__.update(
        {name: step[name] for name in _STEP_FIELDS},
        num_reqs=common.num_reqs,
        num_actual_tokens=common.num_actual_tokens,
        max_query_len=common.max_query_len,
        max_seq_len=common.max_seq_len,
        query_start_loc=common.query_start_loc,
        slot_mapping=common.slot_mapping,
        block_table=common.block_table,
        _builder=builder,
        _generation=step["generation"],
        **fields,
    )
    return metadata


@dataclass(frozen=True, eq=False, repr=False)
class Chunk(ShortRepr):
    """Prefill requests whose rows fit the workspace together. `MetadataBuilder.build` makes it.

    Attributes
    ----------
    seq_lens : [n] int32
        Tokens of each request, context and query.
    tokens_slice : slice
        The chunk's query tokens among those of the batch.
    block_table : [n, W] int32
        The chunk's rows of the caller's block table.
    req_start_idx : int
        The chunk's first request; 0 is the batch's first prefill.
    workspace_starts : [n] int32
        First workspace row of each request.
    chunk_tot_seqlen : int
        Workspace rows in use, in tokens.

    Source: vLLM's FlashMLASparseMetadata.FP8SeparatePrefillDecode.Prefill.Chunk.

    Examples
    --------
    >>> import sparse_mla
    >>> sparse_mla.Chunk([4], slice(1, 5), [[1]], 0, [0], 4).chunk_tot_seqlen
    4
    """

    seq_lens: Array
    tokens_slice: slice
    block_table: Array
    req_start_idx: int
    workspace_starts: Array
    chunk_tot_seqlen: int


@dataclass(frozen=True, eq=False, repr=False)
class Decode(ShortRepr):
    """The decode part of paths "separate" and "direct". `MetadataBuilder.build` makes it.

    Attributes
    ----------
    decode_query_len : int
        Query tokens of each decode, 1 + speculative tokens.
    num_splits : int
        Number of ranges that the K columns are cut into, to attend to them in parallel.

    Source: vLLM's FlashMLASparseMetadata.FP8SeparatePrefillDecode.Decode.

    Examples
    --------
    >>> import sparse_mla
    >>> sparse_mla.Decode(decode_query_len=1, num_splits=1)
    Decode(decode_query_len=1, num_splits=1)
    """

    decode_query_len: int
    num_splits: int


@dataclass(frozen=True, eq=False, repr=False)
class Prefill(ShortRepr):
    """The prefill part of path "separate". `MetadataBuilder.build` makes it.

    Attributes
    ----------
    seq_lens : [prefills] int32
        Tokens of each request, context and query.
    request_ids : [T] int32
        Number of each token's prefill request; -1 for decode tokens.
    workspace_starts : [prefills] int32
        First workspace row of each request, counted from 0 in each chunk.
    chunks : list of Chunk
        Each chunk is one attention call.

    Source: vLLM's FlashMLASparseMetadata.FP8SeparatePrefillDecode.Prefill.

    Examples
    --------
    >>> import sparse_mla
    >>> len(sparse_mla.Prefill([4], [-1, 0, 0, 0, 0], [0], []).chunks)
    0
    """

    seq_lens: Array
    request_ids: Array
    workspace_starts: Array
    chunks: list[Chunk]


@dataclass(frozen=True, eq=False, repr=False)
class Metadata(ShortRepr):
    """One step's plan, which every layer reads. It is valid until `MetadataBuilder.build` is called
    again.

    Arrays that the engine gave are the engine's own objects. The others are read-only views of the
    builder's persistent buffers, at the same addresses in every step. On CUDA they are
    `sparse_mla.Tensor` objects, which every framework's from_dlpack takes.

    Attributes
    ----------
    path : "mixed", "separate", "bf16" or "direct"
        How the step runs, see help(sparse_mla.backend).
    num_reqs, num_actual_tokens : int
        R, and T with padding tokens included.
    max_query_len, max_seq_len : int
        Upper bounds, in tokens.
    num_decodes, num_prefills : int
        Numbers of requests; decodes come first.
    num_decode_tokens, num_prefill_tokens : int
        Query tokens of the decodes and of the prefills.
    block_size, topk_tokens : int
        Tokens per page, and K, from the config.
    query_start_loc : [R + 1] int32
        The engine's array, as are the next two.
    slot_mapping : [>= T] int64 or int32
    block_table : [>= R, W] int32
    req_id_per_token : [T] int32
        The request of each token; 0 for padding tokens.
    decode : Decode or None
        The decode part of a step with decodes on "separate" or "direct", else None.
    prefill : Prefill or None
        The prefill part of a step with prefills on "separate", else None.

    Source: vLLM's FlashMLASparseMetadata.

    Examples
    --------
    >>> import numpy as np, sparse_mla
    >>> limits = dict(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128)
    >>> config = sparse_mla.Config(16, softmax_scale=0.1, kv_cache_dtype="fp8_ds_mla", **limits)
    >>> starts, lens = np.array([0, 1, 5], np.int32), np.array([7, 4], np.int32)
    >>> slots = np.array([6, 64, 65, 66, 67])
    >>> table = np.array([[0], [1]], np.int32)
    >>> common = sparse_mla.CommonAttentionMetadata(starts, lens, slots, table)
    >>> metadata = sparse_mla.MetadataBuilder(config).build(common)
    >>> metadata.path, metadata.num_decodes, metadata.req_id_per_token.tolist()
    ('mixed', 1, [0, 1, 1, 1, 1])
    """

    path: str
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int
    block_size: int
    topk_tokens: int
    query_start_loc: Array
    slot_mapping: Array
    block_table: Array
    req_id_per_token: Array
    decode: Decode | None
    prefill: Prefill | None
    _builder: _C.Builder = field(repr=False)
    _generation: int = field(repr=False)


def _make_prefill(step: dict[str, Any], block_table: Array) -> Prefill:
    lens, starts = step["prefill_seq_lens"], step["prefill_workspace_starts"]
    first = step["num_decodes"]
    chunks = [
        Chunk(
            seq_lens=lens[req_start:req_end],
            tokens_slice=slice(token_start, token_end),
            block_table=block_table[first + req_start : first + req_end],
            req_start_idx=req_start,
            workspace_starts=starts[req_start:req_end],
            chunk_tot_seqlen=tot_seqlen,
        )
        for req_start, req_end, token_start, token_end, tot_seqlen in step["chunks"]
    ]
    return Prefill(lens, step["prefill_request_ids"], starts, chunks)


class MetadataBuilder:
    """Plans steps. The builder holds every buffer of a plan, sized once for the largest batch.

    Only one thread may use it at a time; a second one gets a RuntimeError.

    Parameters
    ----------
    config : Config
    workspace : [tokens, 576] bf16, optional
        The prefill workspace of path "separate", which all layers share. When left out, the builder
        makes its own. The builder keeps it alive as long as it lives itself.

    Attributes
    ----------
    config : Config
    workspace_bytes : int
        Bytes of the prefill workspace, 0 where the path needs none.

    Raises
    ------
    TypeError, ValueError, RuntimeError, MemoryError
        No Config, a workspace that does not fit the config, a device that this build lacks, no
        memory.

    Source: vLLM's FlashMLASparseMetadataBuilder.

    Examples
    --------
    >>> import sparse_mla
    >>> limits = dict(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128)
    >>> config = sparse_mla.Config(64, softmax_scale=0.1, kv_cache_dtype="fp8_ds_mla", **limits)
    >>> sparse_mla.MetadataBuilder(config).workspace_bytes == 5 * 128 * 576 * 2
    True
    """

    def __init__(self, config: Config, *, workspace: Array | None = None) -> None:
        if not isinstance(config, Config):
            raise wrong_type("MetadataBuilder", "config", "a Config", config)
        self.config = config
        self._builder = _C.Builder(
            config.num_heads,
            config.block_size,
            config.topk_tokens,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.max_model_len,
            config.decode_threshold,
            config.min_heads_for_bf16_prefill,
            config.prefill_workspace_tokens or 0,
            config.kv_cache_dtype,
            config.path,
            config.device,
            workspace,
        )

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the prefill workspace, 0 where the path needs none."""
        return self._builder.workspace_bytes

    def __repr__(self) -> str:
        return f"MetadataBuilder({self.config!r}, workspace_bytes={self.workspace_bytes})"

    @names_integration()
    def build(
        self,
        common: CommonAttentionMetadata,
        *,
        common_prefix_len: int = 0,
        fast_build: bool = False,
    ) -> Metadata:
        """Plan one step.

        Host arrays are read during the call; the block table is referenced until the next build. On
        CUDA the plan travels in one copy from pinned memory, on the current stream of the block
        table's framework (the legacy default stream where it cannot be known). Nothing is
        synchronised. The next build may follow at once, because it leaves staging memory alone that
        is still in flight. `build` must not be captured in a graph, see help(sparse_mla.backend).

        `seq_lens_cpu` may be an upper bound of `seq_lens`, for engines that do not wait until the
        device has told them the lengths. Results are right all the same, because topk_indices name
        the keys. The bounds decide how many rows path "separate" gathers and how it cuts chunks, so
        loose ones cost time. Up to its bound, a request has columns in the block table; on that
        path each of them holds a page of the cache, whichever it is. The CPU refuses other pages.

        Parameters
        ----------
        common : CommonAttentionMetadata
        common_prefix_len, fast_build : int and bool
            Accepted because engines pass them. They do not change the plan.

        Returns
        -------
        Metadata, valid until the next build of this builder. After an error the previous one stays
        valid.

        Raises
        ------
        TypeError
            `common` is no CommonAttentionMetadata, or its slot_mapping is no array.
        ValueError
            Lengths that are negative, decrease or contradict each other, a batch beyond the config,
            a block table too narrow, prefills before decodes (where the path has both parts), a
            request longer than the workspace.

        Source: vLLM's FlashMLASparseMetadataBuilder.build.

        Examples
        --------
        >>> import numpy as np, sparse_mla
        >>> limits = dict(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128)
        >>> config = sparse_mla.Config(64, softmax_scale=0.1, kv_cache_dtype="fp8_ds_mla", **limits)
        >>> builder = sparse_mla.MetadataBuilder(config)
        >>> starts, lens = np.array([0, 1, 5], np.int32), np.array([7, 4], np.int32)
        >>> slots, table = np.array([6, 64, 65, 66, 67]), np.array([[0], [1]], np.int32)
        >>> common = sparse_mla.CommonAttentionMetadata(starts, lens, slots, table)
        >>> metadata = builder.build(common)
        >>> metadata.path, metadata.num_decodes, metadata.prefill.chunks[0].tokens_slice
        ('separate', 1, slice(1, 5, None))
        """
        num_reqs, num_actual_tokens, _ = check_common(common)
        shape = getattr(common.slot_mapping, "shape", None)
        if shape is None:
            got = type(common.slot_mapping).__name__
            raise TypeError(f"MetadataBuilder.build: `slot_mapping` must be an array, got {got}")
        if len(shape) != 1 or shape[0] < num_actual_tokens:
            raise ValueError(
                f"MetadataBuilder.build: `slot_mapping` must have at least num_actual_tokens = "
                f"{num_actual_tokens} entries, got shape {list(shape)}"
            )
        step = self._builder.build(
            common.query_start_loc_cpu,
            common.seq_lens_cpu,
            common.block_table,
            num_reqs,
            num_actual_tokens,
        )
        decode = prefill = None
        if step["decode_query_len"]:
            decode = Decode(step["decode_query_len"], step["decode_num_splits"])
        if step["chunks"]:
            prefill = _make_prefill(step, common.block_table)
        return make_metadata(
            Metadata,
            common,
            self._builder,
            step,
            block_size=self.config.block_size,
            topk_tokens=self.config.topk_tokens,
            decode=decode,
            prefill=prefill,
        )
