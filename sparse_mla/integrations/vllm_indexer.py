"""The indexer of DeepSeek-V3.2 on vLLM's CPU platform: its metadata, and the operator that writes
and chooses keys. `vllm_cpu.py` puts them in the places of vLLM's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.parallel_state import get_dcp_group, get_dcp_world_size_and_rank
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import AttentionMetadata, AttentionMetadataBuilder
from vllm.v1.attention.backend import CommonAttentionMetadata as VllmCommonMetadata

import sparse_mla
from sparse_mla.integrations._ranks import find_positions
from sparse_mla.integrations.vllm import find_rank, logger

__all__ = ["IndexerMetadata", "IndexerMetadataBuilder", "index"]


@dataclass
class IndexerMetadata(AttentionMetadata):
    """What the indexer reads of a step.

    Attributes
    ----------
    slot_mapping : [T] int64
        Where the step's keys go.
    block_table : [B, W] int32
    req_id_per_token, context_lens : [T] int32
        The request of each token, and the keys that it sees, those of all ranks.
    cp : (rank, ranks, interleave) or None
        The rank of decode context parallelism (DCP), which has the keys of its own tokens alone.
    """

    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    req_id_per_token: torch.Tensor
    context_lens: torch.Tensor
    cp: tuple[int, int, int] | None


class IndexerMetadataBuilder(AttentionMetadataBuilder[IndexerMetadata]):
    """Makes IndexerMetadata of vLLM's CommonAttentionMetadata, whose arrays are the host's."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, True, supports_dcp_with_varlen=True)
        self.dcp_world_size, self.dcp_rank = get_dcp_world_size_and_rank()
        self.cp = find_rank(self, vllm_config)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: VllmCommonMetadata,
        fast_build: bool = False,
    ) -> IndexerMetadata:
        """Give each token its request, and the number of keys up to its own.

        Parameters
        ----------
        common_prefix_len, fast_build : int and bool
            Not read.
        common_attn_metadata : vLLM's CommonAttentionMetadata
            All of its arrays in host memory.

        Returns
        -------
        IndexerMetadata
        """
        given, num_tokens = common_attn_metadata, common_attn_metadata.num_actual_tokens
        starts = given.query_start_loc_cpu
        ids = torch.repeat_interleave(torch.arange(given.num_reqs), starts.diff())
        behind = starts[ids + 1] - torch.arange(num_tokens) - 1  # its request's later tokens
        lens = (given.seq_lens[ids] - behind).int()
        slots = given.slot_mapping[:num_tokens]
        return IndexerMetadata(slots, given.block_table_tensor, ids.int(), lens, self.cp)


@torch.library.custom_op("sparse_mla_vllm::index", mutates_args=("topk_indices",))
def index(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    topk_indices: torch.Tensor,
    softmax_scale: float,
    layer: str,
) -> None:
    """Write a step's keys to the indexer's cache, then choose each token's best keys. With DCP each
    rank scores its own keys, and all ranks have the same choice.

    Parameters
    ----------
    q : [>= T, Hi, 128] bf16
        After RoPE, as k is.
    k : [>= T, 128] bf16
    weights : [>= T, Hi] bf16
    topk_indices : [>= T, K] int32, written
        Positions inside a token's request, -1 = none.
    softmax_scale : float
    layer : str
        The name of the indexer's cache, which finds it and its metadata in vLLM's forward context.
        Without metadata, while vLLM measures its memory, nothing is done.

    Raises
    ------
    TypeError, ValueError, MemoryError
        Those of `indexer_k_quant_and_cache`, `fused_indexer_q_rope_quant` and `lightning_indexer`,
        and with DCP of `cp_local_lengths` and `top_k_merge`.
    """
    context = get_forward_context()
    if not isinstance(context.attn_metadata, dict):
        return
    step, cache = context.attn_metadata[layer], context.no_compile_layers[layer].kv_cache
    num_tokens = len(step.context_lens)
    logger.info_once("sparse_mla: lightning_indexer chooses %d keys", topk_indices.shape[1])
    sparse_mla.indexer_k_quant_and_cache(k, cache, step.slot_mapping)
    q8, scaled = sparse_mla.fused_indexer_q_rope_quant(
        q[:num_tokens],
        weights[:num_tokens],
        torch.zeros(num_tokens, dtype=torch.int32),
        torch.tensor([[1.0] * 32 + [0.0] * 32]),  # turned already: cosines are 1, sines 0
        softmax_scale=softmax_scale,
        head_scale=q.shape[1] ** -0.5,
    )
    chosen, cp = topk_indices[:num_tokens], step.cp
    options = {
        "k": chosen.shape[1],
        "block_table": step.block_table,
        "req_id_per_token": step.req_id_per_token,
        "out": chosen,
    }
    if cp is None:
        sparse_mla.lightning_indexer(q8, scaled, cache, step.context_lens, **options)
        return
    own_lens = sparse_mla.cp_local_lengths(step.context_lens, cp=cp)
    scores = torch.empty(chosen.shape, dtype=torch.float32)
    sparse_mla.lightning_indexer(q8, scaled, cache, own_lens, values=scores, **options)
    candidates = find_positions(chosen, cp), scores
    every = [get_dcp_group().all_gather(x[None], dim=0) for x in candidates]
    sparse_mla.top_k_merge(*every, k=chosen.shape[1], out=chosen)
