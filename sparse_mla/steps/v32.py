"""DeepSeek-V3.2's step: its config, its plan of a step, and the builder that makes it."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

from sparse_mla import _C
from sparse_mla._compiled import names_integration
from sparse_mla._format_names import takes_both
from sparse_mla._types import Path, RopeFormat
from sparse_mla.steps import common as steps

Array = Any

PATHS = ("mixed", "separate", "bf16", "direct")
HEAD_SIZE = max(_C.KV_FORMATS["bfloat16"].values())  # values of a key, its RoPE part included
CACHE_ROWS = {HEAD_SIZE: steps.rows_of(HEAD_SIZE, ("bfloat16", "fp8_ds_mla"))}
KV_CACHE_DTYPES = tuple(CACHE_ROWS[HEAD_SIZE])


@takes_both
@dataclass(frozen=True)
class Config:
    """What a model and an engine fix once.

    Parameters
    ----------
    num_heads : int
        Query heads on this device, 1 to 128.
    softmax_scale : float
        Multiplies q . k.
    kv_lora_rank, qk_rope_head_dim : int
        512 and 64, the only sizes that there are kernels for.
    qk_nope_head_dim, v_head_dim : int
        Pn and Pv of the absorbed projections.
    kv_cache_dtype : "auto" or "bfloat16" (576 bf16 a token), or "fp8_ds_mla" (656 bytes)
        `kv_format` is the same option, and the same attribute.
    block_size : int
        Tokens per page.
    topk_tokens : int
        K, the columns that topk_indices has at most.
    max_num_seqs, max_num_batched_tokens, max_model_len : int
        The largest batch; every persistent buffer is sized by them.
    decode_threshold : int
        Query tokens that a decode has at most: 1 + the number of speculative tokens.
    min_heads_for_bf16_prefill : int
        With an FP8 cache and fewer heads the path is "mixed". With more heads it is "separate", or
        "direct" in some steps, see help(sparse_mla.backend).
    prefill_workspace_tokens : int, optional
        Rows of the bf16 workspace of path "separate"; None = 5 * max_model_len.
    path : "mixed", "separate", "bf16" or "direct", optional
        Forces a path; a path that cannot serve the cache is a ValueError.
    cp : (rank, ranks, interleave), optional
        Context parallelism, as in `sparse_mla.mla_attention`: the cache has the tokens of this rank
        alone, block tables are of its own pages, and slot_mapping is -1 for tokens of other ranks.
        Lengths and topk_indices are those of whole requests, the same on every rank. Layers give
        this rank's part, (out, lse), to `sparse_mla.merge_attn_partials`, which takes attn_sink.
    device : str
        "cpu", "cuda" (the first GPU) or "cuda:1"; a torch.device too. The builder's buffers and all
        arrays of a step are on this device. `MetadataBuilder` finds out whether this build and this
        machine have it.

    Raises
    ------
    TypeError, ValueError
        A value of the wrong type, or out of range; the text names it.

    Source: vLLM's VllmConfig and AttentionSpec, what the sparse MLA backend reads of them.

    Examples
    --------
    >>> import sparse_mla
    >>> limits = dict(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=1024)
    >>> config = sparse_mla.Config(16, softmax_scale=192**-0.5, kv_format="fp8_ds_mla", **limits)
    >>> config.topk_tokens, config.kv_cache_dtype, config.kv_format
    (2048, 'fp8_ds_mla', 'fp8_ds_mla')
    """

    num_heads: int
    _: KW_ONLY
    softmax_scale: float
    kv_lora_rank: int = field(default=512, metadata={"only": 512})
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = field(default=64, metadata={"only": 64})
    v_head_dim: int = 128
    kv_cache_dtype: RopeFormat = "auto"
    block_size: int = 64
    topk_tokens: int = 2048
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    decode_threshold: int = 1
    min_heads_for_bf16_prefill: int = 32
    prefill_workspace_tokens: int | None = None
    path: Path | None = None
    cp: tuple[int, int, int] | None = None
    device: str = "cpu"
    if TYPE_CHECKING:
        kv_format: RopeFormat = "auto"  # the same option

    def __post_init__(self) -> None:
        steps.check_fields(self, "v32")
        self._check_names()

    def _check_names(self) -> None:
        steps.check_choice("Config", "kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        served = ("bf16",) if self.kv_cache_dtype != "fp8_ds_mla" else tuple(set(PATHS) - {"bf16"})
        if self.path is not None and self.path not in PATHS:
            rule = ", ".join(map(repr, PATHS))
            raise ValueError(f"Config: `path` must be None or one of {rule}, got {self.path!r}")
        if self.path is not None and self.path not in served:
            rule = " or ".join(repr(path) for path in PATHS if path in served)
            raise ValueError(
                f"Config: `path` must be {rule} for a {self.kv_cache_dtype} cache, "
                f"got {self.path!r}"
            )


@dataclass(frozen=True, eq=False, repr=False)
class Chunk(steps.ShortRepr):
    """Prefill requests whose rows fit the workspace together. `MetadataBuilder.build` makes it.

    Attributes
    ----------
    seq_lens : [n] int32
        Tokens of each request, context and query, with `Config.cp` this rank's; 0 for a request
        without query tokens.
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
class Decode(steps.ShortRepr):
    """The decode part of paths "separate" and "direct". `MetadataBuilder.build` makes it.

    Attributes
    ----------
    decode_query_len : int
        Query tokens of each decode that has any, 1 + speculative tokens; 0 if none has.
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
class Prefill(steps.ShortRepr):
    """The prefill part of path "separate". `MetadataBuilder.build` makes it.

    Attributes
    ----------
    seq_lens : [prefills] int32
        Tokens of each request, context and query, with `Config.cp` this rank's; 0 for a request
        without query tokens.
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
class Metadata(steps.StepMetadata):
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

    decode: Decode | None
    prefill: Prefill | None
    _step: _C.Step = field(repr=False)
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


class MetadataBuilder(steps.Builder):
    """Plans steps. The builder holds every buffer of a plan, sized once for the largest batch.

    Only one thread may use it at a time; a second one gets a RuntimeError. A copy, or what a pickle
    gives, is a new builder of the same config.

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
        self._create("v32", config, Config, "a Config", workspace)

    @names_integration()
    def build(
        self,
        common: steps.CommonAttentionMetadata,
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
        steps.check_common(common)
        num_actual_tokens: Any = common.num_actual_tokens
        shape = getattr(common.slot_mapping, "shape", None)
        if shape is None:
            got = type(common.slot_mapping).__name__
            raise TypeError(f"MetadataBuilder.build: `slot_mapping` must be an array, got {got}")
        if len(shape) != 1 or shape[0] < num_actual_tokens:
            raise ValueError(
                f"MetadataBuilder.build: `slot_mapping` must have at least num_actual_tokens = "
                f"{num_actual_tokens} entries, got shape {list(shape)}"
            )
        step = self._step.build(common)
        decode = prefill = None
        if step["num_decodes"] and step["path"] in ("separate", "direct"):
            decode = Decode(step["decode_query_len"], step["decode_num_splits"])
        if step["chunks"]:
            prefill = _make_prefill(step, common.block_table)
        return steps.make_metadata(
            Metadata,
            common,
            self,
            step,
            block_size=self.config.block_size,
            topk_tokens=self.config.topk_tokens,
            decode=decode,
            prefill=prefill,
        )
