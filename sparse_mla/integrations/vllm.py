"""The backend layer as a backend of vLLM, for DeepSeek-V3.2: vLLM's classes, done by ours.

`vllm_dense.py` has those of models without an indexer, DeepSeek V3 and V2, and `vllm_indexer.py` an
indexer for CPUs.

vLLM asks the backend for facts, makes an implementation per layer and a metadata builder per group
of layers, builds metadata once per step, and calls each implementation. Here the implementation has
the `Config`, the builder completes it and plans with a `MetadataBuilder`, and `forward_mqa` is
`SparseMLA.forward`. The top-k positions are those of the layer's indexer; they stay relative to
their request, because attention itself looks up their pages.

With decode context parallelism (DCP) a rank has the keys of its own tokens alone. vLLM gathers the
heads of all ranks before `forward_mqa`, and merges the parts that it returns.

docs/engines.md says how to choose this backend, and what it does not serve.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    MLAAttentionImpl,
)
from vllm.v1.attention.backend import CommonAttentionMetadata as VllmCommonMetadata

import sparse_mla
from sparse_mla.steps.v32 import HEAD_SIZE

__all__ = [
    "SparseMLABackend",
    "SparseMLAImpl",
    "SparseMLAMetadata",
    "SparseMLAMetadataBuilder",
]

logger = init_logger("vllm.plugins.sparse_mla")  # vLLM prints what its own loggers say


class SparseMLABackend(AttentionBackend):
    """The facts that vLLM asks for: those of `sparse_mla.Backend`.

    Source: vLLM's FlashMLASparseBackend.

    Examples
    --------
    >>> from sparse_mla.integrations.vllm import SparseMLABackend
    >>> SparseMLABackend.get_supported_head_sizes(), SparseMLABackend.supports_block_size(64)
    ([576], True)
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = sparse_mla.Backend.supported_kv_cache_dtypes

    @staticmethod
    def get_name() -> str:
        """The name in vLLM's registry."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[SparseMLAImpl]:
        return SparseMLAImpl

    @staticmethod
    def get_builder_cls() -> type[SparseMLAMetadataBuilder]:
        return SparseMLAMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int = 1,
        head_size: int = HEAD_SIZE,
        cache_dtype_str: Any = "auto",
    ) -> tuple[int, ...]:
        """`sparse_mla.Backend.get_kv_cache_shape`."""
        return sparse_mla.Backend.get_kv_cache_shape(
            num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str
        )

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return sparse_mla.Backend.supported_head_sizes

    @classmethod
    def is_mla(cls) -> bool:
        return sparse_mla.Backend.is_mla

    @classmethod
    def is_sparse(cls) -> bool:
        return sparse_mla.Backend.is_sparse

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """None stands for a CPU, which is always served."""
        if capability is None:
            return True
        return sparse_mla.Backend.supports_compute_capability(capability.major, capability.minor)

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """False: steps are planned from the query lengths in host memory."""
        return False


@dataclass
class SparseMLAMetadata(AttentionMetadata):
    """One step's plan: the fields that vLLM's layer reads, and ours.

    Attributes
    ----------
    step : sparse_mla.Metadata
        The plan. It is valid until its builder's next `build`.
    num_actual_tokens, num_decodes, num_prefills, num_decode_tokens : int
        Those of `step`.
    query_start_loc, seq_lens : [R + 1] and [R] int32
        Those of whole requests. The layer's merge of ranks reads which rows have no keys.
    prefill : None
        A prefill here would make vLLM's layer compute dense attention for it. The prefills are in
        `step`.

    Source: vLLM's SparseMLACommonMetadata.
    """

    step: sparse_mla.Metadata
    num_actual_tokens: int
    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    prefill: None = None


class SparseMLAMetadataBuilder(AttentionMetadataBuilder[SparseMLAMetadata]):
    """Plans steps with a `sparse_mla.MetadataBuilder`, from vLLM's CommonAttentionMetadata.

    Attributes
    ----------
    builder : sparse_mla.MetadataBuilder
        Its config is that of the first layer, with the block size and device of this builder, 1 +
        the number of speculative tokens as `decode_threshold`, and the rank as `cp`.

    Source: vLLM's FlashMLASparseMetadataBuilder.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport[
        sparse_mla.Backend.cudagraph_support
    ]

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, True, supports_dcp_with_varlen=True)
        layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        config = replace(
            layer.impl.config,
            block_size=kv_cache_spec.block_size,
            decode_threshold=self.reorder_batch_threshold,
            cp=find_rank(layer.impl, vllm_config),
            device=str(device),
        )
        workspace = _prefill_workspace(config, device)
        self.builder = sparse_mla.MetadataBuilder(config, workspace=workspace)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: VllmCommonMetadata,
        fast_build: bool = False,
    ) -> SparseMLAMetadata:
        """Plan one step. Nothing is read back from the device.

        Parameters
        ----------
        common_prefix_len, fast_build : int and bool
            They do not change the plan.
        common_attn_metadata : vLLM's CommonAttentionMetadata
            Where its lengths are on a GPU, `seq_lens_cpu_upper_bound` must be there. It is exact
            for prefills, and only their lengths change the plan.

        Returns
        -------
        SparseMLAMetadata, valid until the next build.

        Raises
        ------
        TypeError, ValueError
            Those of `sparse_mla.MetadataBuilder.build`.
        """
        given = common_attn_metadata
        lens = given.seq_lens_cpu_upper_bound
        if lens is not None:  # it counts draft tokens that no request can still take
            lens = np.minimum(lens.numpy(), self.builder.config.max_model_len)
        step = self.builder.build(as_common(given, seq_lens_cpu=lens))
        return SparseMLAMetadata(
            step=step,
            num_actual_tokens=step.num_actual_tokens,
            num_decodes=step.num_decodes,
            num_prefills=step.num_prefills,
            num_decode_tokens=step.num_decode_tokens,
            query_start_loc=given.query_start_loc,
            seq_lens=given.seq_lens,
        )


class SparseMLAImpl(MLAAttentionImpl[SparseMLAMetadata]):
    """One layer's attention: `sparse_mla.SparseMLA`, for all tokens of a step.

    It is made while vLLM's config is current, as vLLM's layer does.

    Attributes
    ----------
    config : sparse_mla.Config
        The block size, decode threshold, rank and device are left to the metadata builder. Its
        heads are those of `forward_mqa`: with DCP those of all ranks, which vLLM gathers.
    topk_indices_buffer : [>= T, K] int32, or None
        The indexer's positions inside each request, -1 = none.

    Raises
    ------
    ValueError
        Sizes, or a kv_cache_dtype, that `sparse_mla.Config` does not take.
    NotImplementedError
        ALiBi, sliding windows, soft caps, other kinds of attention, layers that share a cache,
        caches in host memory, prefill context parallelism.

    Source: vLLM's FlashMLASparseImpl.
    """

    is_sparse: ClassVar[bool] = True
    supports_dense_mha_prefill: bool = False
    can_return_lse_for_decode: bool = True
    lse_base_on_e: bool = True
    supports_dcp: bool = True
    supports_mtp_with_cp_non_trivial_interleave_size: bool = True
    supports_pcp: bool = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: Any,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        qk_head_dim: int,
        v_head_dim: int,
        kv_b_proj: Any,
        indexer: Any = None,
        q_pad_num_heads: int | None = None,
        topk_indices_buffer: torch.Tensor | None = None,
        index_group_builder: Any = None,
    ) -> None:
        from vllm.config import get_current_vllm_config

        engine = get_current_vllm_config()
        refuse(
            self,
            alibi_slopes=alibi_slopes,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
            attn_type=attn_type if attn_type != "decoder" else None,
            kv_sharing_target_layer_name=kv_sharing_target_layer_name,
            hisparse_config=engine.attention_config.hisparse_config,
        )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self.kv_cache_dtype = kv_cache_dtype
        self._indexer = indexer
        self._topk_indices_buffer = topk_indices_buffer
        max_model_len = engine.model_config.max_model_len
        factor = engine.attention_config.sparse_mla_prefill_workspace_factor
        self.config = sparse_mla.Config(
            num_heads * self.dcp_world_size,
            softmax_scale=scale,
            kv_lora_rank=kv_lora_rank,
            qk_nope_head_dim=qk_nope_head_dim,
            qk_rope_head_dim=qk_rope_head_dim,
            v_head_dim=v_head_dim,
            kv_cache_dtype=kv_cache_dtype,
            topk_tokens=engine.model_config.hf_text_config.index_topk,
            max_num_seqs=engine.scheduler_config.max_num_seqs,
            max_num_batched_tokens=engine.scheduler_config.max_num_batched_tokens,
            max_model_len=max_model_len,
            prefill_workspace_tokens=None if factor is None else factor * max_model_len,
        )
        self.layer = sparse_mla.SparseMLA(self.config)

    @property
    def topk_indices_buffer(self) -> torch.Tensor | None:
        """The indexer's buffer, looked up in each call because vLLM may replace it; without an
        indexer the buffer that the layer was given."""
        if self._indexer is not None:
            return self._indexer.topk_indices_buffer
        return self._topk_indices_buffer

    @topk_indices_buffer.setter
    def topk_indices_buffer(self, buffer: torch.Tensor | None) -> None:
        self._indexer, self._topk_indices_buffer = None, buffer

    def record_logical_topk_ready(self) -> None:
        """vLLM's layer says that the indexer has run. Nothing is to be done, because attention runs
        on the indexer's stream."""

    def reserve_workspace(self) -> None:
        """Allocate the prefill workspace while vLLM measures its memory. All layers share it."""
        if self.topk_indices_buffer is not None:
            _prefill_workspace(self.config, self.topk_indices_buffer.device)

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: Any,
        k_scale: torch.Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Write the step's keys: `sparse_mla.concat_and_cache_mla`. The scales are not used,
        because no format served has one per tensor."""
        if kv_cache.numel():
            sparse_mla.concat_and_cache_mla(
                kv_c_normed,
                k_pe.squeeze(1),
                kv_cache,
                slot_mapping.flatten(),
                kv_cache_dtype=kv_cache_dtype,
            )

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: SparseMLAMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend for all tokens of the step: `sparse_mla.SparseMLA.forward`. With DCP to the rank's
        own keys; the result is the rank's part, and rows without a key have 0 and -inf.

        Parameters
        ----------
        q : [T, H, 576] bf16, or the pair (ql_nope, q_pe): [T, H, 512] and [T, H, 64]
        kv_c_and_k_pe_cache : [pages, block_size, row], row = 576 bf16 or 656 bytes
        attn_metadata : SparseMLAMetadata
        layer : vLLM's layer
            Not used: no format served has scales per tensor.

        Returns
        -------
        ([T, H, 512] bf16, [T, H] fp32), the lse in natural logarithms.

        Raises
        ------
        TypeError, ValueError, BufferError, RuntimeError, MemoryError
            Those of `sparse_mla.SparseMLA.forward`, and a ValueError without a top-k buffer.
        """
        indices = self.topk_indices_buffer
        if indices is None:
            raise ValueError("SparseMLAImpl: `topk_indices_buffer` must be given, got None")
        logger.info_once("sparse_mla: SparseMLA attends, with a cache of %s", self.kv_cache_dtype)
        num_tokens = len(q[0]) if isinstance(q, tuple) else len(q)
        return self.layer.forward(q, kv_c_and_k_pe_cache, indices[:num_tokens], attn_metadata.step)


def as_common(given: VllmCommonMetadata, **lens: Any) -> sparse_mla.CommonAttentionMetadata:
    """vLLM's arrays of a step as those of `sparse_mla`'s builders."""
    return sparse_mla.CommonAttentionMetadata(
        given.query_start_loc,
        given.seq_lens,
        given.slot_mapping,
        given.block_table_tensor,
        query_start_loc_cpu=given.query_start_loc_cpu,
        num_reqs=given.num_reqs,
        num_actual_tokens=given.num_actual_tokens,
        **lens,
    )


def find_rank(layer: Any, vllm_config: Any) -> tuple[int, int, int] | None:
    """A layer's share of a cache that is split by tokens (DCP), as `cp` of `sparse_mla.Config` and
    `sparse_mla.mla_attention` has it; None for a whole cache. Builders ask for it, because vLLM may
    set the interleave after it has made the layers."""
    if layer.dcp_world_size == 1:
        return None
    interleave = vllm_config.parallel_config.cp_kv_cache_interleave_size
    return layer.dcp_rank, layer.dcp_world_size, interleave


def refuse(impl: MLAAttentionImpl[Any], **given: Any) -> None:
    """A NotImplementedError that names the first option of a layer which is not None, or prefill
    context parallelism, which no layer serves."""
    kind = type(impl).__name__
    for name, value in given.items():
        if value is not None:
            raise NotImplementedError(f"{kind}: {name} = {value!r} is not served")
    if impl.pcp_world_size > 1:
        raise NotImplementedError(
            f"{kind}: prefill context parallelism of {impl.pcp_world_size} ranks is not served; "
            "decode context parallelism is"
        )


def _prefill_workspace(config: sparse_mla.Config, device: torch.device) -> torch.Tensor | None:
    """The one workspace of a worker that has a workspace manager and needs this memory; else None,
    with which a builder makes its own."""
    from vllm.v1.worker.workspace import current_workspace_manager, is_workspace_manager_initialized

    gathers = (
        config.kv_cache_dtype == "fp8_ds_mla"
        and config.num_heads >= config.min_heads_for_bf16_prefill
    )
    if not gathers or not is_workspace_manager_initialized():
        return None
    usual = sparse_mla.get_prefill_workspace_size(config.max_model_len)
    shape = config.prefill_workspace_tokens or usual, HEAD_SIZE
    return current_workspace_manager().get_persistent_resource(
        ("sparse_mla prefill workspace", shape),
        lambda: torch.empty(shape, dtype=torch.bfloat16, device=device),
    )
