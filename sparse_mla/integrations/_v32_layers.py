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
from sparse_mla.integrations._ranks import Ranks
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
        self,
        model: Any,
        config: sparse_mla.Config,
        num_pages: int,
        ranks: Ranks | None,
        index_cache_dtype: Any,
    ) -> None:
        mla = sparse_mla.SparseMLA(config, kv_b_proj=model.kv_b_proj)
        super().__init__(model, mla, num_pages, ranks)
        self.mla = mla
        self.indexer: ModelIndexer | QuantizedIndexer
        if index_cache_dtype == "auto":
            self.indexer = ModelIndexer(model.indexer, num_pages, whole_page_size(config))
        else:
            self.indexer = QuantizedIndexer(
                model.indexer, num_pages, config.block_size, index_cache_dtype, ranks
            )

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
        out, lse = self.mla.forward(
            (ql_nope, q_pe[0].bfloat16()), self.kv_cache, step.topk_indices, step.metadata
        )
        values = self.mla.v_up_proj(out)
        if self.ranks is not None:  # after W_UV, which is linear: a quarter of the bytes
            values = self.ranks.merge(values, lse)
        return self.project_values(values, hidden_states.dtype), None


def whole_page_size(config: sparse_mla.Config) -> int:
    """Tokens of a page for the tokens of all ranks."""
    return config.block_size * (1 if config.cp is None else config.cp[1])


class SparseLayers(PagedLayers):
    """All layers' attentions, and the plan of a step."""

    takes = frozenset({"prefill_workspace_tokens", "cp", "exchange"})
    config: sparse_mla.Config

    def __init__(
        self,
        model: Any,
        num_pages: int,
        index_cache_dtype: Any,
        exchange: Any,
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
        self.pages = Pages(num_pages, self.config.block_size, self.config.cp)
        self._builder = sparse_mla.MetadataBuilder(self.config)
        tokens, longest = self.config.prefill_workspace_tokens, self.config.max_model_len
        if tokens is not None and self._builder.workspace_bytes > 0 and tokens < longest:
            raise ValueError(
                "ModelRunner: `prefill_workspace_tokens` must be None or at least "
                f"max_model_len = {longest} on path 'separate', which gathers whole requests, got "
                f"{tokens}"
            )
        ranks = Ranks.of(self.config.cp, exchange)
        self.attentions = [
            SparseAttention(layer.self_attn, self.config, num_pages, ranks, index_cache_dtype)
            for layer in model.model.layers
        ]
        self._has_groups = index_cache_dtype == "auto"  # the library's indexer needs none

    def plan(self, common: sparse_mla.CommonAttentionMetadata, positions: torch.Tensor) -> Step:
        """Returns what all layers of a step share; positions [T] are those in the requests."""
        width = min(self._pad(int(np.max(common.seq_lens_cpu))), self.config.topk_tokens)
        return Step(
            metadata=self._builder.build(common),
            groups=self._group(common, positions) if self._has_groups else [],
            block_table=common.block_table,
            context_lens=sparse_mla.cp_local_lengths(positions.int() + 1, cp=self.config.cp),
            topk_indices=torch.full(
                (len(positions), width), -1, dtype=torch.int32, device=positions.device
            ),
        )

    def _pad(self, num_tokens: int) -> int:
        """Up to a multiple of block_size, so that many steps have arrays of the same size."""
        return -(-num_tokens // self.config.block_size) * self.config.block_size

    def _group(
        self, common: sparse_mla.CommonAttentionMetadata, positions: torch.Tensor
    ) -> list[Group]:
        seq_lens, page_size = np.asarray(common.seq_lens_cpu), whole_page_size(self.config)
        groups, request, row = [], 0, 0
        for query_len, members in groupby(np.diff(common.query_start_loc_cpu).tolist()):
            requests = slice(request, request + len(list(members)))
            rows = slice(row, row + (requests.stop - request) * query_len)
            its_positions = positions[rows].view(-1, query_len, 1)
            columns = torch.arange(
                self._pad(int(seq_lens[requests].max())), device=positions.device
            )
            pages = common.block_table[requests].long()[:, columns // page_size]
            groups.append(
                Group(
                    rows=rows,
                    slots=pages * page_size + columns % page_size,
                    positions=its_positions,
                    mask=torch.where(columns <= its_positions, 0.0, -torch.inf),
                )
            )
            request, row = requests.stop, rows.stop
        return groups
