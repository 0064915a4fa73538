"""DeepSeek V4's step: its config, its plan of a step, and the builder that makes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

from sparse_mla import _C
from sparse_mla._compiled import names_integration
from sparse_mla._format_names import takes_both
from sparse_mla._types import CacheDtypeV4, CompressedDtypeV4, IndexFormat, PathV4
from sparse_mla.steps import common as steps
from sparse_mla.steps.memory import Memory
from sparse_mla.steps.v4_parts import Chunk, Decode, LayerMetadata, Prefill

Array = Any
Tables = Mapping[int, Array]

HEAD_SIZE = 512
INDEXED_RATIO = 4  # its layers have an indexer
PATHS = ("direct", "separate")
NORMAL_FP32 = (2.0**-126, (2 - 2.0**-23) * 2.0**127)
SYNONYMS = dict.fromkeys(("auto", "fp8", "fp8_ds_mla"), "fp8_v4")
# What the compressed cache may hold, then what the sliding window's cache may, too.
COMPRESSED_DTYPES = tuple(
    name for name, rows in _C.KV_FORMATS.items() if HEAD_SIZE in rows.values()
)
KV_CACHE_DTYPES = tuple(name for name in COMPRESSED_DTYPES if not name.startswith("fp4"))
INDEX_CACHE_DTYPES = tuple(
    name for name, rows in _C.KV_FORMATS.items() if max(rows.values()) < HEAD_SIZE
)


def _check_name(name: str, value: object, allowed: Sequence[str]) -> str:
    found = SYNONYMS.get(value, value) if isinstance(value, str) else value
    if found not in allowed:
        rule = ", ".join(map(repr, allowed))
        raise ValueError(f"Config: `{name}` must be one of {rule}, got {value!r}")
    return str(found)


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
    window : int
        Tokens that a query sees in the sliding window, itself included.
    compress_ratios : sequence of int
        The ratios of the model's layers, at most four different ones above 1. Repetitions are left
        out, and so are ratios up to 1, which mean layers without compressed rows.
    topk_tokens : int
        Compressed rows that an indexer chooses at most.
    index_n_heads, o_groups : int
        Heads of the indexer, and groups of the output projection.
    kv_cache_dtype : str
        Format of the sliding window's cache: "fp8_v4" ("auto", "fp8" and "fp8_ds_mla" mean it),
        "bfloat16", "fp8_e4m3", "fp8_v41", "fp8_v41_split" or "fp8_nope".
    compressed_kv_cache_dtype : str, optional
        Format of the compressed caches: one of those, "fp4_v41" or "fp4_v41_split". None: the same.
    index_cache_dtype : "fp8_index" or "mxfp4_index"
        `kv_format`, `compressed_kv_format` and `index_kv_format` are the same options, and the same
        attributes.
    q_scale, kv_scale : float
        The scale of e4m3 queries, and that of "fp8_e4m3" caches.
    block_size, swa_block_size : int
        Tokens per page of the compressed caches (a multiple of every ratio), and of the sliding
        window's.
    state_block_sizes : dict of int
        Tokens per page of the compressors' states, for every ratio.
    max_num_seqs, max_num_batched_tokens, max_model_len : int
        The largest batch; every persistent buffer is sized by them.
    decode_threshold : int
        Query tokens that a decode has at most: 1 + the number of speculative tokens.
    prefill_chunk_size : int
        Prefills that share the workspace of path "separate" at a time.
    eps : float
        Of the layer's norms: 0, or a normal float32.
    overlap_gemm_tokens : int
        `SparseMLA.forward` with streams runs its first projections side by side up to this many
        tokens.
    path : "direct" or "separate", optional
        How prefills run, see help(sparse_mla.v4). None is "direct" without a workspace.
    cp : (rank, ranks, interleave), optional
        Context parallelism of compressed rows, which are dealt by their numbers as positions are in
        `sparse_mla.mla_attention`: the compressed caches and the indexer's have the rows of this
        rank alone, in pages of its own. The window's cache, the states, slot_mapping and all else
        of a step are whole on every rank. `SparseMLA.attend` then gives this rank's part, (out,
        lse), to `sparse_mla.merge_attn_partials`, which takes attn_sink; rank 0 attends to the
        window. Several ranks have path "direct" alone.
    device : str
        "cpu", "cuda" (the first GPU) or "cuda:1"; a torch.device too.

    Raises
    ------
    TypeError, ValueError
        A value of the wrong type, or out of range; the text names it.

    Source: vLLM's VllmConfig, and the settings of DeepSeek V4's attention in it.

    Examples
    --------
    >>> import sparse_mla
    >>> limits = dict(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=1024)
    >>> config = sparse_mla.v4.Config(64, compress_ratios=[1, 4, 128, 4], **limits)
    >>> config.compress_ratios, config.kv_cache_dtype, config.compressed_kv_cache_dtype
    ((4, 128), 'fp8_v4', 'fp8_v4')
    >>> config.kv_format, config.compressed_kv_format, config.index_kv_format
    ('fp8_v4', 'fp8_v4', 'fp8_index')
    """

    num_heads: int
    _: KW_ONLY
    softmax_scale: float = HEAD_SIZE**-0.5
    window: int = 128
    compress_ratios: Sequence[int] = (4, 128)
    topk_tokens: int = 512
    index_n_heads: int = 64
    o_groups: int = 8
    kv_cache_dtype: CacheDtypeV4 = "fp8_v4"
    compressed_kv_cache_dtype: CompressedDtypeV4 | None = None
    index_cache_dtype: IndexFormat = "fp8_index"
    q_scale: float = 1.0
    kv_scale: float = 1.0
    block_size: int = 256
    swa_block_size: int = 64
    state_block_sizes: Mapping[int, int] = field(default_factory=lambda: {4: 4, 128: 8}, hash=False)
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    decode_threshold: int = 1
    prefill_chunk_size: int = 4
    eps: float = 1e-6
    overlap_gemm_tokens: int = 1024
    path: PathV4 | None = None
    cp: tuple[int, int, int] | None = None
    device: str = "cpu"
    if TYPE_CHECKING:  # the same options
        kv_format: CacheDtypeV4 = "fp8_v4"
        compressed_kv_format: CompressedDtypeV4 | None = None
        index_kv_format: IndexFormat = "fp8_index"

    def __post_init__(self) -> None:
        steps.check_fields(self, "v4")
        self._check_ratios()
        self._check_formats()
        if self.path is not None and self.path not in PATHS:
            rule = " or ".join(map(repr, PATHS))
            raise ValueError(f"Config: `path` must be None, {rule}, got {self.path!r}")
        if self.path == "separate" and self.cp is not None and self.cp[1] > 1:
            raise ValueError(
                "Config: `path` must be 'direct' or None with `cp` of several ranks, whose "
                f"prefills read the caches, got {self.path!r}"
            )
        if self.eps != 0 and not NORMAL_FP32[0] <= self.eps <= NORMAL_FP32[1]:
            raise ValueError(
                f"Config: `eps` must be 0 or a normal float32, 1.2e-38 to 3.4e38, got {self.eps}"
            )

    def _check_ratios(self) -> None:
        if isinstance(self.compress_ratios, str) or not hasattr(self.compress_ratios, "__iter__"):
            raise steps.wrong_type("Config", "compress_ratios", "a sequence", self.compress_ratios)
        found = {steps.check_int("Config", "compress_ratios", r, 0) for r in self.compress_ratios}
        ratios = tuple(sorted(ratio for ratio in found if ratio > 1))
        if len(ratios) > 4:
            raise ValueError(
                f"Config: `compress_ratios` must be at most 4 above 1, got {len(ratios)}"
            )
        if not isinstance(self.state_block_sizes, Mapping):
            raise steps.wrong_type("Config", "state_block_sizes", "a dict", self.state_block_sizes)
        for ratio in ratios:
            if self.block_size % ratio:
                raise ValueError(
                    f"Config: `block_size` must be a multiple of the compress ratio {ratio}, got "
                    f"{self.block_size}"
                )
            if ratio not in self.state_block_sizes:
                raise ValueError(
                    f"Config: `state_block_sizes` must have an entry for ratio {ratio}, got "
                    f"{dict(self.state_block_sizes)}"
                )
        sizes = {
            ratio: steps.check_int("Config", "state_block_sizes", self.state_block_sizes[ratio], 1)
            for ratio in ratios
        }
        steps.set_fields(self, compress_ratios=ratios, state_block_sizes=sizes)

    def _check_formats(self) -> None:
        main = _check_name("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        given = self.compressed_kv_cache_dtype
        extra = main if given is None else given
        extra = _check_name("compressed_kv_cache_dtype", extra, COMPRESSED_DTYPES)
        steps.set_fields(self, kv_cache_dtype=main, compressed_kv_cache_dtype=extra)
        _check_name("index_cache_dtype", self.index_cache_dtype, INDEX_CACHE_DTYPES)
        if self.kv_scale != 1 and "fp8_e4m3" not in (main, extra):
            raise ValueError(
                f"Config: `kv_scale` must be 1 without a cache of fp8_e4m3, got {self.kv_scale}"
            )


@dataclass(frozen=True, eq=False, repr=False)
class Metadata(steps.StepMetadata):
    """One step's plan, which every layer reads. It is valid until `MetadataBuilder.build` is called
    again.

    Arrays that the engine gave are the engine's own objects. The others are read-only views of the
    builder's persistent buffers, at the same addresses in every step. On CUDA they are
    `sparse_mla.Tensor` objects, which every framework's from_dlpack takes. Behind the T tokens of a
    step, up to max_num_batched_tokens, slot mappings are -1 and lengths 0.

    Attributes
    ----------
    path : "direct" or "separate"
        How prefills run, see help(sparse_mla.v4).
    num_reqs, num_actual_tokens : int
        R, and T with padding tokens included.
    max_query_len, max_seq_len : int
        Upper bounds, in tokens.
    num_decodes, num_prefills : int
        Numbers of requests; decodes come first.
    num_decode_tokens, num_prefill_tokens : int
        Td and Tp: query tokens of the decodes and of the prefills.
    block_size, topk_tokens : int
        Tokens per page of the sliding window's cache, and K, from the config.
    query_start_loc : [R + 1] int32
        The engine's array, as are the next two.
    slot_mapping : [>= T] int64 or int32
        Slots in the sliding window's cache.
    block_table : [>= R, W] int32
        Pages of the sliding window's cache.
    req_id_per_token : [T] int32
        The request of each token; 0 for padding tokens.
    positions : [T] int32
        Each token's position in its request; 0 for padding tokens.
    is_valid : [T] bool, which is uint8 0 or 1 in memory
        Whether a token belongs to a request and has a slot.
    swa_indices : [T, window] int32
        Slots of the last tokens that each token sees, oldest first, then -1; all -1 for tokens that
        are not valid.
    swa_lens : [T] int32
        Their number.
    layers : dict of LayerMetadata
        By compress ratio, for the ratios whose block tables `build` got.
    index : LayerMetadata or None
        The caches of the indexer's keys, whose layers have ratio 4.
    decode : Decode or None
        The decode part; None without decodes.
    prefill : Prefill or None
        The prefill part; None without prefills.

    Source: vLLM's metadata of DeepSeek V4, in the vocabulary of its FlashMLASparseMetadata.

    Examples
    --------
    >>> import numpy as np, sparse_mla
    >>> limits = dict(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128)
    >>> config = sparse_mla.v4.Config(64, window=5, swa_block_size=4, **limits)
    >>> starts, lens = np.array([0, 1, 4], np.int32), np.array([10, 6], np.int32)
    >>> slots, table = np.array([37, 23, 8, 9]), np.array([[7, 3, 9], [5, 2, 4]], np.int32)
    >>> common = sparse_mla.CommonAttentionMetadata(starts, lens, slots, table)
    >>> metadata = sparse_mla.v4.MetadataBuilder(config).build(common)
    >>> metadata.positions.tolist(), metadata.swa_lens.tolist()
    ([9, 3, 4, 5], [5, 4, 5, 5])
    >>> metadata.swa_indices[0].tolist()
    [13, 14, 15, 36, 37]
    """

    positions: Array
    is_valid: Array
    swa_indices: Array
    swa_lens: Array
    layers: dict[int, LayerMetadata]
    index: LayerMetadata | None
    decode: Decode | None
    prefill: Prefill | None
    _step: _C.Step = field(repr=False)
    _generation: int = field(repr=False)
    _memory: Memory = field(repr=False)


def _make_prefill(step: dict[str, Any], block_table: Array) -> Prefill:
    first = step["num_decodes"]
    lens, gather_lens = step["seq_lens"], step["gather_lens"]
    chunks = [
        Chunk(
            req_start_idx=start,
            tokens_slice=slice(token_start, token_end),
            seq_lens=lens[start:end],
            gather_lens=gather_lens[start:end],
            block_table=block_table[first + start : first + end],
        )
        for start, end, token_start, token_end, _ in step["chunks"]
    ]
    return Prefill(lens, gather_lens, chunks)


class MetadataBuilder(steps.Builder):
    """Plans steps. The builder holds every buffer of a plan, sized once for the largest batch.

    Only one thread may use it at a time; a second one gets a RuntimeError. A copy, or what a pickle
    gives, is a new builder of the same config.

    Parameters
    ----------
    config : Config
    workspace : [rows, 512] or [prefill_chunk_size, M, 512] bf16, optional
        The prefill workspace of path "separate", which all layers share. Without a path, each step
        then chooses. It has `prefill_chunk_size * M` rows or more, all the same distance apart. M
        is ceil(max_model_len / the smallest ratio) + window + max_num_batched_tokens. When left
        out, path "separate" makes its own. The builder keeps it alive as long as it lives itself.

    Attributes
    ----------
    config : Config
    workspace_bytes : int
        Bytes of the prefill workspace, 0 on path "direct".
    forward_bytes : int
        Bytes that `SparseMLA.forward` has taken so far for what lies between its operators. All
        layers share them. They are sized for the largest batch by the first calls.

    Raises
    ------
    TypeError, ValueError, RuntimeError, MemoryError
        No Config, a workspace that does not fit the config, a device that this build lacks, no
        memory.

    Source: vLLM's metadata builders of DeepSeek V4.

    Examples
    --------
    >>> import sparse_mla
    >>> limits = dict(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128)
    >>> config = sparse_mla.v4.Config(64, path="separate", **limits)
    >>> builder = sparse_mla.v4.MetadataBuilder(config)
    >>> builder.workspace_bytes == 4 * (32 + 128 + 64) * 1024, builder.forward_bytes
    (True, 0)
    """

    def __init__(self, config: Config, *, workspace: Array | None = None) -> None:
        self._create("v4", config, Config, "a sparse_mla.v4.Config", workspace)
        self._memory = Memory()

    @property
    def forward_bytes(self) -> int:
        """Bytes that `SparseMLA.forward` has taken so far."""
        return self._memory.num_bytes

    @names_integration()
    def build(
        self,
        common: steps.CommonAttentionMetadata,
        *,
        compressed: Tables | None = None,
        states: Tables | None = None,
        index: Array | None = None,
        index_states: Array | None = None,
    ) -> Metadata:
        """Plan one step.

        Host arrays are read during the call; block tables are referenced until the next build. A
        position that a table has no page for (behind its last column, or an entry below 0) has slot
        -1. On CUDA the plan travels in one copy from pinned memory, and one kernel makes the lists,
        on the current stream of the block table's framework (the legacy default stream where it
        cannot be known). Nothing is synchronised. `build` must not be captured in a graph, see
        help(sparse_mla.v4).

        Parameters
        ----------
        common : CommonAttentionMetadata
            Its slot_mapping and block_table are those of the sliding window's cache. Decodes come
            first: requests of at most `decode_threshold` query tokens, of any lengths.
        compressed : dict of [>= R, W] int32, optional
            By compress ratio, the pages of the compressed caches.
        states : dict of [>= R, W] int32, optional
            By compress ratio, the pages of the compressors' states.
        index, index_states : [>= R, W] int32, optional
            The pages of the indexer's keys and of their states. When left out, they are those of
            ratio 4.

        Returns
        -------
        Metadata, valid until the next build of this builder. After an error the previous one stays
        valid.

        Raises
        ------
        TypeError
            `common` is no CommonAttentionMetadata, or another argument is no array or no dict.
        ValueError
            Lengths that are negative, decrease or contradict each other, a batch beyond the config,
            prefills before decodes, a ratio that is not in the config, states without a compressed
            cache.

        Source: vLLM's metadata builders of DeepSeek V4.

        Examples
        --------
        >>> import numpy as np, sparse_mla
        >>> limits = dict(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=1024)
        >>> config = sparse_mla.v4.Config(64, **limits)
        >>> starts, lens = np.array([0, 1], np.int32), np.array([384], np.int32)
        >>> table = np.arange(8, dtype=np.int32)[None]  # one decode of 384 tokens
        >>> common = sparse_mla.CommonAttentionMetadata(starts, lens, np.array([383]), table)
        >>> compressed = {128: np.array([[5, 6]], np.int32)}
        >>> metadata = sparse_mla.v4.MetadataBuilder(config).build(common, compressed=compressed)
        >>> layer = metadata.layers[128]
        >>> layer.decode_indices[0, :4].tolist(), layer.decode_lens.tolist()
        ([10, 11, 12, -1], [3])
        >>> layer.slot_mapping.tolist()  # token 383 ends the third group
        [12]
        """
        steps.check_common(common)
        compressed = self._check_tables("compressed", compressed)
        states = self._check_tables("states", states)
        ratios = self.config.compress_ratios
        if INDEXED_RATIO not in ratios and (index is not None or index_states is not None):
            raise ValueError(
                f"MetadataBuilder.build: `index` must be None for a config without compress ratio "
                f"{INDEXED_RATIO}, got ratios {ratios}"
            )
        step = self._step.build(
            common,
            compressed=(*map(compressed.get, ratios),),
            index=index,
            states=(*map(states.get, ratios),),
            index_states=index_states,
        )
        layers = {
            ratio: self._make_layer(ratio, step[i], compressed[ratio], states.get(ratio))
            for i, ratio in enumerate(ratios)
            if i in step
        }
        index_layer = None
        if len(ratios) in step:
            pages = compressed.get(INDEXED_RATIO) if index is None else index
            state = states.get(INDEXED_RATIO) if index_states is None else index_states
            index_layer = self._make_layer(INDEXED_RATIO, step[len(ratios)], pages, state)
        has_decodes, has_prefills = step["num_decodes"] > 0, step["num_prefills"] > 0
        return steps.make_metadata(
            Metadata,
            common,
            self,
            step,
            **{name: step[name] for name in ("positions", "is_valid", "swa_indices", "swa_lens")},
            block_size=self.config.swa_block_size,
            topk_tokens=self.config.topk_tokens,
            layers=layers,
            index=index_layer,
            decode=Decode(step["decode_query_len"]) if has_decodes else None,
            prefill=_make_prefill(step, common.block_table) if has_prefills else None,
            _memory=self._memory,
        )

    def _check_tables(self, name: str, tables: Tables | None) -> Tables:
        if tables is None:
            return {}
        if not isinstance(tables, Mapping):
            raise steps.wrong_type("MetadataBuilder.build", name, "a dict of block tables", tables)
        known = self.config.compress_ratios
        for ratio in tables:
            if ratio not in known:
                raise ValueError(
                    f"MetadataBuilder.build: `{name}` must have keys among the compress ratios "
                    f"{known} of the config, got {ratio!r}"
                )
        return {ratio: table for ratio, table in tables.items() if table is not None}

    def _make_layer(
        self, ratio: int, group: dict[str, Any], block_table: Array, state_block_table: Array
    ) -> LayerMetadata:
        return LayerMetadata(
            block_table=block_table,
            block_size=self.config.block_size // ratio,
            state_block_table=state_block_table,
            **group,
        )
