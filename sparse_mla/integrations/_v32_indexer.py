"""How a layer of DeepSeek-V3.2 chooses its keys: Transformers' indexer, and this library's.

Both use the weights of the model's indexer, and keep their keys in pages with the numbers of the
attention's pages. `choose` writes the keys of a step, and each token's choice to topk_indices.

Where the cache is split over ranks, this library's indexer has the rank's own keys, and the ranks
exchange what each has chosen. Transformers' indexer gives no scores to exchange. So every rank has
all of its keys, in pages of as many more tokens, and makes the same choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import sparse_mla
from sparse_mla._types import IndexFormat
from sparse_mla.integrations._ranks import Ranks

INDEX_HEAD_DIM = 128  # Transformers' indexer may have another, this library's may not
ROPE_DIM = 64


@dataclass(frozen=True)
class Group:
    """Neighbouring requests with equally many new tokens, which share one call of the indexer."""

    rows: slice  # the group's tokens among those of the step
    slots: torch.Tensor  # [B, N] int64: where the first N tokens of each request lie
    positions: torch.Tensor  # [B, S, 1]
    # [B, S, N] fp32: 0 for positions up to the token itself, else -inf. Every release
    # of Transformers adds such a mask to the scores. Those before 5.16 add one of bool, too.
    mask: torch.Tensor

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """The group's part [B, S, ...] of a step's tensor [1, T, ...]."""
        return x[0, self.rows].unflatten(0, self.positions.shape[:2])


@dataclass(frozen=True)
class Step:
    """What all layers of a step share."""

    metadata: sparse_mla.Metadata
    groups: list[Group]
    block_table: torch.Tensor  # [R, W] int32
    context_lens: torch.Tensor  # [T] int32: keys of this rank that a token sees
    topk_indices: torch.Tensor  # [T, K] int32, written by each layer in turn


@dataclass(frozen=True)
class _IndexKeys:
    """One layer's index keys, in pages. Transformers' indexer takes it for a cache."""

    pages: torch.Tensor  # [num_pages, block_size, index_head_dim]
    group: Group

    def update_indexer(self, keys: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Writes keys [B, S, D]; returns all keys of these requests, [B, N, D]. Those that no query
        sees are 0, because a NaN that a page has held would stay one behind -inf."""
        rows, group = self.pages.flatten(0, 1), self.group
        rows[group.slots.gather(1, group.positions[..., 0])] = keys
        return rows[group.slots].masked_fill_(group.mask[:, -1, :, None] < 0, 0)


class ModelIndexer:
    """Transformers' indexer itself, with keys in the model's dtype."""

    def __init__(self, model: Any, num_pages: int, page_size: int) -> None:
        self.model = model
        self.keys = model.k_norm.weight.new_zeros((num_pages, page_size, model.head_dim))

    def choose(
        self,
        step: Step,
        hidden_states: torch.Tensor,  # [1, T, hidden_size]
        q_resid: torch.Tensor,  # [1, T, q_lora_rank]
        position_embeddings: tuple[torch.Tensor, torch.Tensor],  # cos and sin, [1, T, 64]
    ) -> None:
        for group in step.groups:
            chosen = self.model(
                group.take(hidden_states),
                group.take(q_resid),
                tuple(map(group.take, position_embeddings)),
                group.mask,
                None,
                _IndexKeys(self.keys, group),  # unnamed: 5.24 gave this argument another name
            )  # [B, S, <= K] positions; where fewer are visible, invisible ones fill the rest
            chosen = chosen.masked_fill(chosen > group.positions, -1)
            step.topk_indices[group.rows, : chosen.shape[2]] = chosen.flatten(0, 1)


class QuantizedIndexer:
    """The same scores from quantised queries and keys, by this library's operators."""

    def __init__(
        self,
        model: Any,
        num_pages: int,
        block_size: int,
        kv_format: IndexFormat,
        ranks: Ranks | None,
    ) -> None:
        self.model, self.ranks = model, ranks
        self.use_fp4 = kv_format == "mxfp4_index"
        shape = sparse_mla.v4.Backend.get_kv_cache_shape(
            num_pages, block_size, head_size=INDEX_HEAD_DIM, cache_dtype_str=kv_format
        )
        self.keys = torch.zeros(shape, dtype=torch.uint8, device=model.k_norm.weight.device)

    def choose(
        self,
        step: Step,
        hidden_states: torch.Tensor,  # [1, T, hidden_size]
        q_resid: torch.Tensor,  # [1, T, q_lora_rank]
        position_embeddings: tuple[torch.Tensor, torch.Tensor],  # cos and sin, [1, T, 64]
    ) -> None:
        model, lens = self.model, step.context_lens
        # The halves of cos and of sin are equal: one angle for each pair of values.
        cos, sin = (x[0, :, : ROPE_DIM // 2].float() for x in position_embeddings)
        k = pairs_last(model.k_norm(model.wk(hidden_states))[0].float())
        sparse_mla.indexer_k_quant_and_cache(
            rotate_pairs(k, cos, sin), self.keys, step.metadata.slot_mapping
        )
        q, weights, *q_scale = sparse_mla.fused_indexer_q_rope_quant(
            pairs_last(model.wq_b(q_resid)[0].unflatten(-1, (-1, INDEX_HEAD_DIM)).bfloat16()),
            model.weights_proj(hidden_states.to(model.weights_proj.weight.dtype))[0].float(),
            torch.arange(len(k), dtype=torch.int32, device=k.device),
            torch.cat([cos, sin], dim=1),  # a table of the step's tokens
            softmax_scale=model.softmax_scale,
            head_scale=model.n_heads**-0.5,
            use_fp4=self.use_fp4,
        )
        values = None if self.ranks is None else k.new_empty(step.topk_indices.shape)
        sparse_mla.lightning_indexer(
            q,
            weights,
            self.keys,
            lens,
            k=step.topk_indices.shape[1],
            out=step.topk_indices,
            values=values,
            block_table=step.block_table,
            req_id_per_token=step.metadata.req_id_per_token,
            q_scale=q_scale[0] if q_scale else None,
        )
        if self.ranks is not None:
            self.ranks.choose(step.topk_indices, values)


def pairs_last(x: torch.Tensor) -> torch.Tensor:
    """Values [..., 128] in this library's order, which leaves dot products as they are.

    The model turns values i and i + 32 of the first 64 together, this library turns neighbours of
    the last 64.
    """
    rope, rest = x.split([ROPE_DIM, INDEX_HEAD_DIM - ROPE_DIM], dim=-1)
    return torch.cat([rest, rope.unflatten(-1, (2, -1)).mT.flatten(-2)], dim=-1)


def rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE of keys [T, 128] in this library's order, by angles [T, 32]."""
    rest, rope = x.split([INDEX_HEAD_DIM - ROPE_DIM, ROPE_DIM], dim=-1)
    a, b = rope[:, 0::2], rope[:, 1::2]
    turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1)
    return torch.cat([rest, turned.flatten(-2)], dim=-1)
