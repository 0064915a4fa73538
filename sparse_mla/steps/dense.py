"""The step of dense MLA: its config, its plan of a step, and the builder that makes it."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from sparse_mla import _C
from sparse_mla._format_names import takes_both
from sparse_mla._types import ConcatFormat
from sparse_mla.ops.index_ranks import cp_local_lengths
from sparse_mla.ops.planning import ContextChunks
from sparse_mla.steps import common as steps

Array = Any

PATHS = ("separate", "mixed")
CONTEXT_PLANS = ("equal", "packed")
LATENT = 512
# The caches by values of a key, which is a latent and 64 RoPE values or none.
CACHE_ROWS = {LATENT + rope: steps.rows_of(LATENT + rope, _C.CONCAT_KV_FORMATS) for rope in (64, 0)}
NO_ROPE = -1  # C's qk_rope_head_dim for 0, because its 0 is the default


@takes_both
@dataclass(frozen=True)
class Config:
    """What a model and an engine fix once.

    Parameters
    ----------
    num_heads : int
        Query heads on this device, 1 to 128.
    softmax_scale : float
        Multiplies q . k; `sparse_mla.mla_softmax_scale()` for DeepSeek's models.
    kv_lora_rank, qk_rope_head_dim : int
        512, and 64 or 0: the only sizes that there are kernels for. With 0, for models without
        RoPE, keys are the 512 values of a latent.
    qk_nope_head_dim, v_head_dim : int
        Pn and Pv.
    interleaved : bool
        Pairs of RoPE: neighbours, or with False the halves of a head.
    kv_cache_dtype : "auto" or "bfloat16" (576 bf16 a token), or "fp8_ds_mla" (656 bytes)
        Also "fp8_token" (656 bytes, one scale a token) and "fp8_e4m3" (576 bytes, and `kv_scale` of
        the layer). Without RoPE: 512 bf16, "fp8_e4m3" (512 bytes) or "fp8_nope" (528 bytes).
        `kv_format` is the same option and attribute.
    block_size : int
        Tokens per page.
    max_num_seqs, max_num_batched_tokens, max_model_len : int
        The largest batch; every persistent buffer is sized by them.
    decode_threshold : int
        Query tokens that a decode has at most: 1 + the number of speculative tokens.
    prefill_workspace_tokens : int, optional
        Cached tokens of prefills that path "separate" gathers at a time; None =
        `sparse_mla.get_context_workspace_size`. There is one row of 576 bf16 for each, and one of
        H * (Pn + Pv): with 65536 rows and 128 heads the latter take 4.3 GB.
    context_plan : "equal" or "packed"
        How that context is cut into chunks, see `sparse_mla.split_context_chunks`.
    path : "separate" or "mixed", optional
        With "separate", decodes attend to the cache, absorbed, and prefills to keys and values of
        all heads, which are made of the new latents and of the cached ones. With "mixed", all
        tokens attend to the cache, absorbed. None gives each step the path that is estimated to
        take less time on its device: "mixed" where few new tokens stand over a long context, up to
        some hundreds of DeepSeek-V3.
    cp : (rank, ranks, interleave), optional
        Context parallelism, as in `sparse_mla.mla_attention`: the cache has the tokens of this rank
        alone, block tables are of its own pages, and slot_mapping is -1 for tokens of other ranks.
        All else of a step is that of whole requests, the same on every rank, as are the other
        options. Layers give this rank's part, (out, lse), to `sparse_mla.merge_attn_partials`. In
        prefills on path "separate" rank 0 attends to the new tokens.
    device : str
        "cpu", "cuda" (the first GPU) or "cuda:1"; a torch.device too.

    Raises
    ------
    TypeError, ValueError
        A value of the wrong type, or out of range; the text names it.

    Source: vLLM's MLACommonMetadataBuilder, what it reads of VllmConfig.

    Examples
    --------
    >>> import sparse_mla
    >>> limits = dict(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=1024)
    >>> config = sparse_mla.dense.Config(16, softmax_scale=0.1, kv_format="fp8_ds_mla", **limits)
    >>> config.kv_cache_dtype, config.kv_format
    ('fp8_ds_mla', 'fp8_ds_mla')
    """

    num_heads: int
    _: KW_ONLY
    softmax_scale: float
    kv_lora_rank: int = field(default=LATENT, metadata={"only": LATENT})
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    interleaved: bool = True
    kv_cache_dtype: ConcatFormat = "auto"
    block_size: int = 64
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    decode_threshold: int = 1
    prefill_workspace_tokens: int | None = None
    context_plan: str = "equal"
    path: str | None = None
    cp: tuple[int, int, int] | None = None
    device: str = "cpu"
    if TYPE_CHECKING:
        kv_format: ConcatFormat = "auto"  # the same option

    def __post_init__(self) -> None:
        steps.check_fields(self, "dense")
        ropes = [head_size - LATENT for head_size in CACHE_ROWS]
        steps.check_choice("Config", "qk_rope_head_dim", self.qk_rope_head_dim, ropes)
        formats = CACHE_ROWS[LATENT + self.qk_rope_head_dim]
        steps.check_choice("Config", "kv_cache_dtype", self.kv_cache_dtype, formats)
        steps.check_choice("Config", "context_plan", self.context_plan, CONTEXT_PLANS)
        steps.check_choice("Config", "path", self.path, (None, *PATHS))


@dataclass(frozen=True, eq=False, repr=False)
class Part(steps.ShortRepr):
    """The decodes of a step, or its prefills. `MetadataBuilder.build` makes it.

    Attributes
    ----------
    block_table : [n, W] int32
        The part's rows of the caller's block table, like the next one of its lengths.
    seq_lens : [n] int32
    query_start_loc : [n + 1] int32
        Where the queries of each request start among the part's tokens; it begins with 0. A view of
        the builder's memory.

    Source: vLLM's MLACommonDecodeMetadata and MLACommonPrefillMetadata.

    Examples
    --------
    >>> import sparse_mla
    >>> sparse_mla.dense.Part([[1]], [4], [0, 1]).seq_lens
    [4]
    """

    block_table: Array
    seq_lens: Array
    query_start_loc: Array


# Chunks as `sparse_mla.split_context_chunks` gives them for either plan.
Chunks = ContextChunks | list[tuple[int, int, Array, Array]] | None


@dataclass(frozen=True, eq=False, repr=False)
class PrefillPart(Part):
    """The prefills of a step. `MetadataBuilder.build` makes it.

    Attributes
    ----------
    block_table : [n, W] int32
        These three as in `Part`.
    seq_lens : [n] int32
    query_start_loc : [n + 1] int32
    max_query_len : int
        The longest query, in tokens.
    context_lens : [n] int32, in host memory
        Tokens of each request that were cached before the step, with `Config.cp` by this rank; 0
        for a request without query tokens, whose context is not gathered.
    chunks : ContextChunks, list or None
        Path "separate" with context: its chunks, as `sparse_mla.split_context_chunks` gives them
        for "equal" or "packed". Starts and lengths are views of the builder's memory.

    Source: vLLM's MLACommonPrefillMetadata.

    Examples
    --------
    >>> import sparse_mla
    >>> sparse_mla.dense.PrefillPart([[1]], [4], [0, 3], 3, [1], None).context_lens
    [1]
    """

    max_query_len: int
    context_lens: Array
    chunks: Chunks


@dataclass(frozen=True, eq=False, repr=False)
class Metadata(steps.BatchMetadata):
    """One step's plan, which every layer reads. It is valid until `MetadataBuilder.build` is called
    again.

    Attributes
    ----------
    path : "separate" or "mixed"
    num_reqs, num_actual_tokens, num_input_tokens : int
        B, and T with padding tokens included, twice.
    max_query_len, max_seq_len : int
        Upper bounds, in tokens.
    num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens : int
        Decodes come first.
    query_start_loc : [B + 1] int32
        The engine's own object, as are the next three.
    seq_lens : [B] int32
    slot_mapping : [>= T] int64 or int32
    block_table : [>= B, W] int32
    req_id_per_token : [T] int32
        The request of each token; 0 for padding tokens. A view of the builder's memory, as is
    input_positions : [T] int64
        where each token is in its request; 0 for padding tokens.
    head_dim : int
        576, or 512 without RoPE: values of a key.
    has_context : bool
        Whether prefills gather cached tokens, which they do on path "separate". Otherwise the next
        six are None.
    context_chunk_starts, context_chunk_seq_lens : [num_chunks, num_prefills] int32 or None
        With context_plan "equal", like the next one, see `sparse_mla.ContextChunks`. Views of the
        builder's memory.
    context_chunk_cu_seq_lens : [num_chunks, num_prefills + 1] int32 or None
    context_chunk_seq_tot, context_chunk_max_seq_lens : list of int or None
        Each chunk's tokens, and those of its longest part.
    chunked_prefill_workspace : [rows, head_dim] bf16 or None
    decode : Part or None
    prefill : PrefillPart or None

    Source: vLLM's MLACommonMetadata.

    Examples
    --------
    >>> import numpy as np, sparse_mla
    >>> limits = dict(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128)
    >>> config = sparse_mla.dense.Config(16, softmax_scale=0.1, **limits)
    >>> starts, lens = np.array([0, 1, 5], np.int32), np.array([7, 4], np.int32)
    >>> slots, table = np.array([6, 64, 65, 66, 67]), np.array([[0], [1]], np.int32)
    >>> common = sparse_mla.CommonAttentionMetadata(starts, lens, slots, table)
    >>> metadata = sparse_mla.dense.MetadataBuilder(config).build(common)
    >>> metadata.num_decodes, metadata.input_positions.tolist()
    (1, [6, 0, 1, 2, 3])
    """

    num_input_tokens: int
    query_start_loc: Array
    seq_lens: Array
    slot_mapping: Array
    block_table: Array
    req_id_per_token: Array
    input_positions: Array
    head_dim: int
    has_context: bool
    context_chunk_starts: Array | None
    context_chunk_seq_lens: Array | None
    context_chunk_cu_seq_lens: Array | None
    context_chunk_seq_tot: list[int] | None
    context_chunk_max_seq_lens: list[int] | None
    chunked_prefill_workspace: Array | None
    decode: Part | None
    prefill: PrefillPart | None
    _step: _C.Step = field(repr=False)
    _generation: int = field(repr=False)


class MetadataBuilder(steps.Builder):
    """Plans steps. The builder holds every buffer of a plan, sized once for the largest batch.

    Only one thread may use it at a time; a second one gets a RuntimeError. A copy, or what a pickle
    gives, is a new builder of the same config.

    Parameters
    ----------
    config : Config
    workspace : [rows, 576] bf16, or [rows, 512] without RoPE, optional
        The gathered context of path "separate". When left out, the builder makes it.
    up_workspace : [rows, H * (Pn + Pv)] bf16, optional
        The keys and values of that context, and of a step's new tokens: as many rows as the former,
        and at least max_num_batched_tokens.

    Attributes
    ----------
    config : Config
    workspace_bytes : int
        Everything that steps use of the device: both workspaces, queries, results and plans.

    Raises
    ------
    TypeError, ValueError, RuntimeError, MemoryError
        No Config, workspaces that do not fit the config, a device that this build lacks, no memory.

    Source: vLLM's MLACommonMetadataBuilder.

    Examples
    --------
    >>> import sparse_mla
    >>> limits = dict(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128)
    >>> config = sparse_mla.dense.Config(64, softmax_scale=0.1, **limits)
    >>> sparse_mla.dense.MetadataBuilder(config).workspace_bytes > 2048 * 64 * 256 * 2
    True
    """

    def __init__(
        self, config: Config, *, workspace: Array | None = None, up_workspace: Array | None = None
    ) -> None:
        has_rope = getattr(config, "qk_rope_head_dim", 0) != 0
        changes = {} if has_rope else {"qk_rope_head_dim": NO_ROPE}
        self._create("dense", config, Config, "a dense.Config", workspace, up_workspace, **changes)

    def build(
        self,
        common: steps.CommonAttentionMetadata,
        *,
        common_prefix_len: int = 0,
        fast_build: bool = False,
    ) -> Metadata:
        """Plan one step.

        Host arrays are read during the call; block_table, slot_mapping and seq_lens are referenced
        until the next build. On CUDA the plan travels in one copy from pinned memory, and a kernel
        behind it writes positions and ranges from the device's `seq_lens`. Nothing is synchronised.
        `seq_lens_cpu` may be an upper bound for decodes, and on path "mixed" for all requests; the
        context of prefills is counted by it. Path "separate" needs decodes in front of prefills
        (`sparse_mla.reorder_batch`); without a path, other batches are "mixed". `build` must not
        be captured in a graph.

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
        TypeError, ValueError
            `common` is no CommonAttentionMetadata; lengths that are negative, decrease or
            contradict each other, a batch beyond the config, a block table without a page for each
            token (on CUDA: of a prefill, but on path "mixed"), a workspace that is too small for a
            page of each prefill with context ("packed": for one page).

        Source: vLLM's MLACommonMetadataBuilder.build.

        Examples
        --------
        >>> import numpy as np, sparse_mla
        >>> limits = dict(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128)
        >>> config = sparse_mla.dense.Config(64, softmax_scale=0.1, **limits)
        >>> starts, lens = np.array([0, 1, 5], np.int32), np.array([7, 4], np.int32)
        >>> slots, table = np.array([6, 64, 65, 66, 67]), np.array([[0], [1]], np.int32)
        >>> common = sparse_mla.CommonAttentionMetadata(starts, lens, slots, table)
        >>> sparse_mla.dense.MetadataBuilder(config).build(common).num_prefill_tokens
        4
        """
        steps.check_common(common)
        step = self._step.build(common)
        sizes: Any = common  # build has made ints of its sizes
        first, last = step["num_decodes"], sizes.num_reqs
        return Metadata(
            path=step["path"],
            num_reqs=sizes.num_reqs,
            num_actual_tokens=sizes.num_actual_tokens,
            num_input_tokens=sizes.num_actual_tokens,
            max_query_len=sizes.max_query_len,
            max_seq_len=sizes.max_seq_len,
            **{
                name: step[name]
                for name in (
                    *("num_decodes", "num_prefills", "num_decode_tokens", "num_prefill_tokens"),
                    *("req_id_per_token", "input_positions"),
                )
            },
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            slot_mapping=common.slot_mapping,
            block_table=common.block_table,
            head_dim=self.config.kv_lora_rank + self.config.qk_rope_head_dim,
            **_describe_context(step),
            decode=Part(
                common.block_table[:first],
                common.seq_lens[:first],
                step["query_start_loc"][: first + 1],
            )
            if first > 0
            else None,
            prefill=_make_prefills(common, step, first, last, self.config.cp)
            if first < last
            else None,
            _step=self._step,
            _generation=step["generation"],
        )


_EQUAL = ("context_chunk_starts", "context_chunk_seq_lens", "context_chunk_cu_seq_lens")
_LISTS = ("context_chunk_seq_tot", "context_chunk_max_seq_lens")


def _describe_context(step: dict[str, Any]) -> dict[str, Any]:
    """The fields of Metadata about cached context."""
    has_context = "context_chunk_starts" in step
    is_equal = has_context and step["context_chunk_starts"].ndim == 2
    return {
        "has_context": has_context,
        **{name: step[name] if is_equal else None for name in _EQUAL},
        **{name: step.get(name) for name in (*_LISTS, "chunked_prefill_workspace")},
    }


def _list_chunks(step: dict[str, Any]) -> Chunks:
    if "context_chunk_starts" not in step:
        return None
    starts, lens = step["context_chunk_starts"], step["context_chunk_seq_lens"]
    if starts.ndim == 2:
        return ContextChunks(**{name: step[name] for name in (*_EQUAL, *_LISTS)})
    parts = zip(
        *(step[f"context_chunk_{name}"] for name in ("req_start", "req_end", "first")), strict=True
    )
    return [
        (start, end, starts[first : first + end - start], lens[first : first + end - start])
        for start, end, first in parts
    ]


def _make_prefills(
    common: steps.CommonAttentionMetadata,
    step: dict[str, Any],
    first: int,
    last: int,
    cp: tuple[int, int, int] | None,
) -> PrefillPart:
    starts: Any = common.query_start_loc_cpu
    lens: Any = common.seq_lens_cpu
    query_lens = np.diff(starts[first:].astype(np.int32))  # build has checked that they fit
    context_lens = (lens[first:].astype(np.int32) - query_lens) * (query_lens > 0)
    return PrefillPart(
        common.block_table[first:last],
        common.seq_lens[first:last],
        step["prefill_query_start_loc"],
        max_query_len=int(query_lens.max()),
        context_lens=cp_local_lengths(context_lens, cp=cp) if cp else context_lens,
        chunks=_list_chunks(step),
    )
