"""The step of dense MLA: its config, its plan of a step, and the builder that makes it."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from sparse_mla import _C
from sparse_mla._types import ConcatFormat
from sparse_mla.steps import common as steps
from sparse_mla.steps.v32 import KV_CACHE_DTYPES

Array = Any

PATHS = ("mixed",)


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
        512 and 64, the only sizes that there are kernels for.
    qk_nope_head_dim, v_head_dim : int
        Pn and Pv.
    interleaved : bool
        Pairs of RoPE: neighbours, or with False the halves of a head.
    kv_cache_dtype : "auto" or "bfloat16" (576 bf16 a token), or "fp8_ds_mla" (656 bytes)
    block_size : int
        Tokens per page.
    max_num_seqs, max_num_batched_tokens, max_model_len : int
        The largest batch; every persistent buffer is sized by them.
    decode_threshold : int
        Query tokens that a decode has at most: 1 + the number of speculative tokens.
    path : "mixed", optional
        All tokens attend to the cache, absorbed.
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
    >>> sparse_mla.dense.Config(16, softmax_scale=192**-0.5, **limits).kv_cache_dtype
    'auto'
    """

    num_heads: int
    _: KW_ONLY
    softmax_scale: float
    kv_lora_rank: int = field(default=512, metadata={"only": 512})
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = field(default=64, metadata={"only": 64})
    v_head_dim: int = 128
    interleaved: bool = True
    kv_cache_dtype: ConcatFormat = "auto"
    block_size: int = 64
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    decode_threshold: int = 1
    path: str | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        steps.check_fields(self, "dense")
        for name, value, allowed in (
            ("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES),
            ("path", self.path, (None, *PATHS)),
        ):
            if value not in allowed:
                rule = " or ".join(map(repr, allowed))
                raise ValueError(f"Config: `{name}` must be {rule}, got {value!r}")


@dataclass(frozen=True, eq=False, repr=False)
class Part(steps.ShortRepr):
    """The decodes of a step, or its prefills. `MetadataBuilder.build` makes it.

    Attributes
    ----------
    block_table : [n, W] int32
        The part's rows of the caller's block table, like the next one of its lengths.
    seq_lens : [n] int32
    query_start_loc : [n + 1] int32
        Where the queries of each request start among the part's tokens; it begins with 0.

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


@dataclass(frozen=True, eq=False, repr=False)
class Metadata(steps.ShortRepr):
    """One step's plan, which every layer reads. It is valid until `MetadataBuilder.build` is called
    again.

    Attributes
    ----------
    path : "mixed"
    num_reqs, num_actual_tokens, num_input_tokens : int
        B, and T with padding tokens included, twice.
    max_query_len, max_seq_len : int
        Upper bounds, in tokens.
    num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens : int
        Decodes come first.
    query_start_loc : [B + 1] int32
        The engine's array, as are the next three.
    seq_lens : [B] int32
    slot_mapping : [>= T] int64 or int32
    block_table : [>= B, W] int32
    req_id_per_token : [T] int32
        The request of each token; 0 for padding tokens. A view of the builder's memory, as is
    input_positions : [T] int64
        where each token is in its request; 0 for padding tokens.
    head_dim : int
        576.
    decode, prefill : Part or None

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

    path: str
    num_reqs: int
    num_actual_tokens: int
    num_input_tokens: int
    max_query_len: int
    max_seq_len: int
    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int
    query_start_loc: Array
    seq_lens: Array
    slot_mapping: Array
    block_table: Array
    req_id_per_token: Array
    input_positions: Array
    head_dim: int
    decode: Part | None
    prefill: Part | None
    _step: _C.Step = field(repr=False)
    _generation: int = field(repr=False)


class MetadataBuilder(steps.Builder):
    """Plans steps. The builder holds every buffer of a plan, sized once for the largest batch.

    Only one thread may use it at a time; a second one gets a RuntimeError.

    Parameters
    ----------
    config : Config

    Attributes
    ----------
    config : Config
    workspace_bytes : int
        0: path "mixed" gathers nothing.

    Raises
    ------
    TypeError, ValueError, RuntimeError, MemoryError
        No Config, a device that this build lacks, no memory.

    Source: vLLM's MLACommonMetadataBuilder.

    Examples
    --------
    >>> import sparse_mla
    >>> limits = dict(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128)
    >>> config = sparse_mla.dense.Config(64, softmax_scale=0.1, **limits)
    >>> sparse_mla.dense.MetadataBuilder(config).workspace_bytes
    0
    """

    def __init__(self, config: Config) -> None:
        self._create("dense", config, Config, "a dense.Config", None)

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
        behind it writes positions and ranges from the device's `seq_lens`. Nothing is synchronised,
        and `seq_lens_cpu` may be an upper bound. `build` must not be captured in a graph.

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
            contradict each other, a batch beyond the config.

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
            decode=_make_part(common, 0, first, common.query_start_loc[: first + 1])
            if first > 0
            else None,
            prefill=_make_part(common, first, last, step["prefill_query_start_loc"])
            if step["num_prefills"] > 0
            else None,
            _step=self._step,
            _generation=step["generation"],
        )


def _make_part(
    common: steps.CommonAttentionMetadata, start: int, end: Any, query_start_loc: Any
) -> Part:
    return Part(common.block_table[start:end], common.seq_lens[start:end], query_start_loc)
