"""Dense MLA as a backend of vLLM, for DeepSeek V3 and V2 on its CPU platform.

vLLM's layer gives `forward_mha` all tokens of a step, and `DenseMLA.forward` does the rest: it
writes the cache, and takes for the step the path that costs less. The layer absorbs nothing.
A cache of `fp8` is another: rows of 576 e4m3 values with the layer's scale, which
`paged_attention` reads as one head of keys. There vLLM's layer absorbs all tokens, and so it does
with decode context parallelism (DCP), on any cache: it gathers the heads of all ranks, and
`forward_mqa` gives it the part of the rank's own keys, to merge.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    get_and_maybe_dequant_weights,
)
from vllm.v1.attention.backend import AttentionMetadata, AttentionMetadataBuilder, MLAAttentionImpl
from vllm.v1.attention.backend import CommonAttentionMetadata as VllmCommonMetadata

import sparse_mla
from sparse_mla.integrations.vllm import SparseMLABackend, as_common, find_rank, logger, refuse
from sparse_mla.steps.dense import LATENT
from sparse_mla.steps.v32 import HEAD_SIZE

__all__ = ["DenseMLABackend", "DenseMLAImpl", "DenseMLAMetadata", "DenseMLAMetadataBuilder"]

E4M3 = ("fp8", "fp8_e4m3")  # vLLM's two names of rows that have the layer's scale


class DenseMLABackend(SparseMLABackend):
    """The facts that vLLM asks for. Those not listed are those of SparseMLABackend.

    Source: vLLM's MLACommonBackend.

    Examples
    --------
    >>> from sparse_mla.integrations.vllm_dense import DenseMLABackend
    >>> DenseMLABackend.is_sparse(), DenseMLABackend.get_kv_cache_shape(3, 64, 1, 576, "fp8")
    (False, (3, 64, 576))
    """

    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "bfloat16", "fp8_ds_mla", *E4M3]

    @staticmethod
    def get_impl_cls() -> type[DenseMLAImpl]:
        return DenseMLAImpl

    @staticmethod
    def get_builder_cls() -> type[DenseMLAMetadataBuilder]:
        return DenseMLAMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int = 1,
        head_size: int = HEAD_SIZE,
        cache_dtype_str: Any = "auto",
    ) -> tuple[int, ...]:
        """`sparse_mla.dense.Backend.get_kv_cache_shape`; a row of "fp8" has 576 values, too."""
        dtype: Any = "auto" if cache_dtype_str in E4M3 else cache_dtype_str
        return sparse_mla.dense.Backend.get_kv_cache_shape(
            num_blocks, block_size, num_kv_heads, head_size, dtype
        )

    @classmethod
    def is_sparse(cls) -> bool:
        return False


@dataclass
class DenseMLAMetadata(AttentionMetadata):
    """One step: the fields that vLLM's layer reads, and ours.

    Attributes
    ----------
    num_actual_tokens, num_decodes, num_prefills, num_decode_tokens : int
        Decodes are what vLLM's layer absorbs: nothing, or with `fp8` or DCP all requests.
    decode : vLLM's CommonAttentionMetadata
        The step's arrays, which `forward_mqa` reads, and the layer's merge of ranks.
    query_start_loc : [R + 1] int32
    step : sparse_mla.dense.Metadata or None
        The plan of `forward_mha`. It is valid until its builder's next `build`.
    cp : (rank, ranks, interleave) or None
        The rank of DCP.
    prefill : None

    Source: vLLM's MLACommonMetadata.
    """

    num_actual_tokens: int
    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    decode: VllmCommonMetadata
    query_start_loc: torch.Tensor
    step: sparse_mla.dense.Metadata | None
    cp: tuple[int, int, int] | None
    prefill: None = None


class DenseMLAMetadataBuilder(AttentionMetadataBuilder[DenseMLAMetadata]):
    """Plans steps with a `sparse_mla.dense.MetadataBuilder`, from vLLM's CommonAttentionMetadata.

    Attributes
    ----------
    builder : sparse_mla.dense.MetadataBuilder or None
        None for a cache of `fp8` and with DCP, which need no plan. Its config is that of the first
        layer, with the block size and device of this builder, and 1 + the number of speculative
        tokens as `decode_threshold`.
    cp : (rank, ranks, interleave) or None
        The rank of DCP.

    Source: vLLM's MLACommonMetadataBuilder.
    """

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, True, supports_dcp_with_varlen=True)
        impl = vllm_config.compilation_config.static_forward_context[layer_names[0]].impl
        self.cp = find_rank(impl, vllm_config)
        self.builder = impl.config and sparse_mla.dense.MetadataBuilder(
            replace(
                impl.config,
                block_size=kv_cache_spec.block_size,
                decode_threshold=self.reorder_batch_threshold,
                device=str(device),
            )
        )

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: VllmCommonMetadata,
        fast_build: bool = False,
    ) -> DenseMLAMetadata:
        """Plan one step.

        Parameters
        ----------
        common_prefix_len, fast_build : int and bool
            They do not change the plan.
        common_attn_metadata : vLLM's CommonAttentionMetadata
            All of its arrays in host memory.

        Returns
        -------
        DenseMLAMetadata, valid until the next build.

        Raises
        ------
        TypeError, ValueError
            Those of `sparse_mla.dense.MetadataBuilder.build`.
        """
        given, step = common_attn_metadata, None
        if self.builder is not None:
            step = self.builder.build(as_common(given))
        return DenseMLAMetadata(
            num_actual_tokens=given.num_actual_tokens,
            num_decodes=given.num_reqs if step is None else 0,
            num_prefills=0 if step is None else given.num_reqs,
            num_decode_tokens=given.num_actual_tokens if step is None else 0,
            decode=given,
            query_start_loc=given.query_start_loc,
            step=step,
            cp=self.cp,
        )


class DenseMLAImpl(MLAAttentionImpl[DenseMLAMetadata]):
    """One layer's attention: `sparse_mla.dense.DenseMLA`, for all tokens of a step, or what
    `forward_mqa` says.

    It is made while vLLM's config is current, as vLLM's layer does.

    Attributes
    ----------
    config : sparse_mla.dense.Config or None
        The block size, decode threshold and device are left to the metadata builder. None for a
        cache of `fp8` and with DCP.
    layer : sparse_mla.dense.DenseMLA or None
        Made by `process_weights_after_loading`.

    Raises
    ------
    ValueError
        Sizes, or a kv_cache_dtype, that `sparse_mla.dense.Config` does not take.
    NotImplementedError
        ALiBi, sliding windows, soft caps, other kinds of attention, layers that share a cache,
        prefill context parallelism.

    Source: vLLM's MLACommonImpl.
    """

    is_sparse: ClassVar[bool] = False
    can_return_lse_for_decode: bool = True
    lse_base_on_e: bool = True
    supports_dcp: bool = True
    supports_mtp_with_cp_non_trivial_interleave_size: bool = True
    supports_quant_query_input: bool = False
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
        )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_b_proj = kv_b_proj
        self.layer: sparse_mla.dense.DenseMLA | None = None
        config = sparse_mla.dense.Config(  # it checks the sizes, also where it is not used
            num_heads,
            softmax_scale=scale,
            kv_lora_rank=kv_lora_rank,
            qk_nope_head_dim=qk_nope_head_dim,
            qk_rope_head_dim=qk_rope_head_dim,
            v_head_dim=v_head_dim,
            kv_cache_dtype="auto" if kv_cache_dtype in E4M3 else kv_cache_dtype,
            max_num_seqs=engine.scheduler_config.max_num_seqs,
            max_num_batched_tokens=engine.scheduler_config.max_num_batched_tokens,
            max_model_len=engine.model_config.max_model_len,
        )
        is_absorbed = kv_cache_dtype in E4M3 or self.dcp_world_size > 1
        self.config = None if is_absorbed else config

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Make the layer of the weights that vLLM has loaded; e4m3 ones become bf16."""
        if self.config is not None:
            weight = get_and_maybe_dequant_weights(self.kv_b_proj, out_dtype=act_dtype)
            self.layer = sparse_mla.dense.DenseMLA(self.config, kv_b_proj=weight.T)

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
        """Write the step's keys for `forward_mqa`; those of `forward_mha` are written by
        `DenseMLA.forward`. A cache of `fp8` has them divided by `k_scale`."""
        if self.config is not None or not kv_cache.numel():
            return
        slots = slot_mapping.flatten()
        if self.kv_cache_dtype in E4M3:
            sparse_mla.reshape_and_cache(
                k_pe,
                kv_c_normed[:, None],
                *_split(kv_cache),
                slots,
                k_scale=k_scale,
                v_scale=k_scale,
            )
        else:
            sparse_mla.concat_and_cache_mla(
                kv_c_normed, k_pe.squeeze(1), kv_cache, slots, kv_cache_dtype=kv_cache_dtype
            )

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: DenseMLAMetadata,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """Run the layer for all tokens of the step: `sparse_mla.dense.DenseMLA.forward`.

        Parameters
        ----------
        q : [T, H, Pn + 64] bf16
            After RoPE, as k_pe is.
        kv_c_normed : [T, 512] bf16
        k_pe : [T, 1, 64] bf16
        kv_c_and_k_pe_cache : [pages, block_size, row], row = 576 bf16 or 656 bytes
        attn_metadata : DenseMLAMetadata
        k_scale, output_scale : fp32
            Not used: the caches have no scale per tensor, and the layer quantises the output.
        output : [T, H * Pv] bf16, written

        Raises
        ------
        TypeError, ValueError, BufferError, RuntimeError, MemoryError
            Those of `sparse_mla.dense.DenseMLA.forward`.
        """
        if self.layer is None or attn_metadata.step is None:
            raise RuntimeError("DenseMLAImpl: process_weights_after_loading must be called first")
        logger.info_once("sparse_mla: DenseMLA attends, with a cache of %s", self.kv_cache_dtype)
        self.layer.forward(
            q,
            kv_c_normed,
            k_pe.squeeze(1),
            kv_c_and_k_pe_cache,
            attn_metadata.step,
            out=output.view(len(q), self.num_heads, -1),
        )

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: DenseMLAMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend for all tokens of the step to a cache of `fp8`, by `sparse_mla.paged_attention`,
        or with DCP to any cache, by `sparse_mla.mla_attention`. With DCP the result is the part of
        the rank's own keys, for the heads of all ranks; rows without a key have 0 and -inf.

        Parameters
        ----------
        q : [T, H, 576] bf16, or the pair (ql_nope, q_pe): [T, H, 512] and [T, H, 64]
        kv_c_and_k_pe_cache : [pages, block_size, row], row = 576 e4m3, 576 bf16 or 656 bytes
        attn_metadata : DenseMLAMetadata
        layer : vLLM's layer
            Its `_k_scale` is that of a cache of `fp8`.

        Returns
        -------
        ([T, H, 512] bf16, [T, H] fp32), the lse in natural logarithms.

        Raises
        ------
        TypeError, ValueError, BufferError, RuntimeError, MemoryError
            Those of `sparse_mla.paged_attention` and `sparse_mla.mla_attention`.
        """
        common = attn_metadata.decode
        keys = common.block_table_tensor, common.seq_lens
        options: dict[str, Any] = {
            "cu_seqlens_q": common.query_start_loc,
            "causal": True,
            "softmax_scale": self.scale,
            "cp": attn_metadata.cp,
            "max_seqlen_q": common.max_query_len,
        }
        if self.kv_cache_dtype not in E4M3:
            logger.info_once(
                "sparse_mla: mla_attention attends, with a cache of %s", self.kv_cache_dtype
            )
            return sparse_mla.mla_attention(q, kv_c_and_k_pe_cache, *keys, **options)
        logger.info_once("sparse_mla: paged_attention attends, with a cache of fp8_e4m3")
        nope, rope = q if isinstance(q, tuple) else (q[..., :LATENT], q[..., LATENT:])
        return sparse_mla.paged_attention(
            rope,
            *_split(kv_c_and_k_pe_cache),
            *keys,
            qv=nope,
            k_descale=layer._k_scale,
            v_descale=layer._k_scale,
            **options,
        )


def _split(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of 576 e4m3 values as one head of keys, the RoPE part, and one of values, the latent."""
    rows = cache.view(torch.float8_e4m3fn)[:, :, None]
    return rows[..., LATENT:], rows[..., :LATENT]
