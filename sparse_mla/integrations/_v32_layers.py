"""The layers of a DeepSeek-V3.2 model on a paged cache: the indexer chooses, SparseMLA attends."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import numpy as np
import torch
from transformers.models.deepseek_v32.modeling_deepseek_v32 import apply_rotary_pos_emb_interleave

import sparse_mla
from sparse_mla.integrations._mla_layers import PagedAttention, PagedLayers, config_fields
from sparse_mla.integrations._pages import Pages
from sparse_mla.integrations._v32_indexer import (
    INDEX_HEAD_DIM,
    Group,
    ModelIndexer,
    QuantizedIndexer,
    Step,
)
from sparse_mla.steps.v4 import INDEX_CACHE_DTYPES


class SparseAttention(PagedAttention):
    """Replaces one layer's attention, whose weights and indexer it uses."""

    def __init__(
        self, model: Any, config: sparse_mla.Config, num_pages: int, index_cache_dtype: Any
    ) -> None:
        mla = sparse_mla.SparseMLA(config, kv_b_proj=model.kv_b_proj)
        super().__init__(model, mla, num_pages)
        self.mla = mla
        self.indexer: ModelIndexer | QuantizedIndexer
        pages = num_pages, config.block_size
        if index_cache_dtype == "auto":
            self.indexer = ModelIndexer(model.indexer, *pages)
        else:
            self.indexer = QuantizedIndexer(model.indexer, *pages, index_cache_dtype)

    def forward(
        self,
        hidden_states: torch.Tensor,  # [1, T, hidden_size]
        position_embeddings: tuple[torch.Tensor, torch.Tensor],  # cos and sin, [1, T, 64]
        sparse_mla_step: Step,
        **unused: Any,
    ) -> tuple[torch.Tensor, None]:
        step, model, config = sparse_mla_step, self.model, self.mla.config
        q_resid = model.q_a_layernorm(model.q_a_proj(hidden_states))
        q = model.q_b_proj(q_resid).unflatten(-1, (config.num_heads, -1))
        q_nope, q_pe = q.split([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
        kv_c, k_pe = self.project_latents(hidden_states)
        q_pe, k_pe = apply_rotary_pos_emb_interleave(
            q_pe, k_pe[None, :, None], *position_embeddings, unsqueeze_dim=2
        )

        sparse_mla.concat_and_cache_mla(
            kv_c, k_pe[0, :, 0], self.kv_cache, step.metadata.slot_mapping
        )
        self.indexer.choose(step, hidden_states, q_resid, position_embeddings)
        ql_nope = self.mla.k_up_proj(q_nope[0].bfloat16())
        out, _ = self.mla.forward(
            (ql_nope, q_pe[0].bfloat16()), self.kv_cache, step.topk_indices, step.metadata
        )
        return self.project_values(self.mla.v_up_proj(out), hidden_states.dtype), None


class SparseLayers(PagedLayers):
    """All layers' attentions, and the plan of a step."""

    takes = frozenset({"prefill_workspace_tokens"})
    config: sparse_mla.Config

    def __init__(
        self,
        model: Any,
        num_pages: int,
        index_cache_dtype: Any,
        **limits: Any,
    ) -> None:
        sizes = model.config
        if index_cache_dtype not in ("auto", *INDEX_CACHE_DTYPES):
            raise ValueError(
                'ModelRunner: `index_cache_dtype` must be "auto" or one of '
                f"{', '.join(INDEX_CACHE_DTYPES)}, got {index_cache_dtype!r}"
            )
        if index_cache_dtype != "auto" and sizes.index_head_dim != INDEX_HEAD_DIM:
            raise ValueError(
                f'ModelRunner: `index_cache_dtype` must be "auto" unless index_head_dim is '
                f"{INDEX_HEAD_DIM}, got {index_cache_dtype!r} with {sizes.index_head_dim}"
            )
        self.config = sparse_mla.Config(
            topk_tokens=sizes.index_topk, **config_fields(model), **limits
        )
        self.pages = Pages(num_pages, self.config.block_size)
        self._builder = sparse_mla.MetadataBuilder(self.config)
        tokens, longest = self.config.prefill_workspace_tokens, self.config.max_model_len
        if tokens is not None and self._builder.workspace_bytes > 0 and tokens < longest:
            raise ValueError(
                "ModelRunner: `prefill_workspace_tokens` must be None or at least "
                f"max_model_len = {longest} on path 'separate', which gathers whole requests, got "
                f"{tokens}"
            )
        self.attentions = [
            SparseAttention(layer.self_attn, self.config, num_pages, index_cache_dtype)
            for layer in model.model.layers
        ]
        self._has_groups = index_cache_dtype == "auto"  # the library's indexer needs none

    def plan(self, common: sparse_mla.CommonAttentionMetadata, positions: torch.Tensor) -> Step:
        """Returns what all layers of a step share; positions [T] are those in the requests."""
        width = min(self.config.block_size * common.block_table.shape[1], self.config.topk_tokens)
        return Step(
            metadata=self._builder.build(common),
            groups=self._group(common, positions) if self._has_groups else [],
            block_table=common.block_table,
            context_lens=positions.int() + 1,
            topk_indices=torch.full(
                (len(positions), width), -1, dtype=torch.int32, device=positions.device
            ),
        )

    def _group(
        self, common: sparse_mla.CommonAttentionMetadata, positions: torch.Tensor
    ) -> list[Group]:
        block_size, seq_lens = self.config.block_size, np.asarray(common.seq_lens_cpu)
        groups, request, row = [], 0, 0
        for query_len, members in groupby(np.diff(common.query_start_loc_cpu).tolist()):
            requests = slice(request, request + len(list(members)))
            rows = slice(row, row + (requests.stop - request) * query_len)
            num_pages = -(-int(seq_lens[requests].max()) // block_size)
            its_positions = positions[rows].view(-1, query_len, 1)
            columns = torch.arange(num_pages * block_size, device=positions.device)
            groups.append(
                Group(
                    rows=rows,
                    block_table=common.block_table[requests, :num_pages],
                    slots=common.slot_mapping[rows],
                    positions=its_positions,
                    mask=torch.where(columns <= its_positions, 0.0, -torch.inf),
                )
            )
            request, row = requests.stop, rows.stop
        return groups
