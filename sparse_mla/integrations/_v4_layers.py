"""The layers of a DeepSeek V4 model on paged caches: `sparse_mla.v4.SparseMLA` is their attention.
Its window and its compressors' states are in pages of few tokens, most of which live a step (see
_pages.py), compressed rows and the indexer's keys in pages of `block_size` tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

import sparse_mla
from sparse_mla import v4
from sparse_mla.integrations._pages import Recent, StepPages, Table
from sparse_mla.integrations._runner_checks import check_v4
from sparse_mla.integrations._v4_weights import (
    layer_weights,
    make_projections,
    make_rope_table,
    ratio_of,
)
from sparse_mla.v4.checks import INDEX_SIZE, state_groups
from sparse_mla.v4.config import HEAD_SIZE, INDEXED_RATIO

Put = Callable[[Any], torch.Tensor]
WINDOW_PAGE_SIZE = 16
STATE_PAGE_SIZE = 8
BLOCK_SIZE = 256


class V4Attention(torch.nn.Module):
    """Replaces one layer's attention, whose projections and other weights it uses."""

    def __init__(
        self,
        model: Any,
        config: v4.Config,
        rope_table: torch.Tensor,
        pages: Mapping[str, int],
        dtype: torch.dtype,  # the dtype of hidden states
    ) -> None:
        super().__init__()
        self.model, ratio = model, ratio_of(model)
        self.mla = v4.SparseMLA(
            config,
            ratio,
            v4.Weights(rope_table=rope_table, **layer_weights(model)),
            make_projections(model, dtype),
        )
        self.caches = make_caches(config, ratio, pages)

    def forward(
        self,
        hidden_states: torch.Tensor,  # [1, T, hidden_size]
        sparse_mla_step: tuple[v4.Metadata, Sequence[Any]],
        **unused: Any,  # among them the model's angles, which the RoPE table holds too
    ) -> tuple[torch.Tensor, None]:
        metadata, streams = sparse_mla_step
        out = self.mla.forward(hidden_states[0], self.caches, metadata, streams=streams)
        return out[None], None


def make_caches(config: v4.Config, ratio: int, pages: Mapping[str, int]) -> v4.Caches:
    """One layer's caches; `pages` has the number of pages of each kind."""

    def make(kind: str, name: str, block_size: int, compress_ratio: int = 1) -> torch.Tensor:
        kv_format: Any = getattr(config, name)
        shape = v4.Backend.get_kv_cache_shape(
            pages[kind], block_size, cache_dtype_str=kv_format, compress_ratio=compress_ratio
        )
        dtype = torch.bfloat16 if kv_format == "bfloat16" else torch.uint8
        return torch.zeros(shape, dtype=dtype, device=config.device)

    def make_state(size: int) -> torch.Tensor:
        shape = pages[f"states of {ratio}"], STATE_PAGE_SIZE, 2 * state_groups(ratio) * size
        return torch.zeros(shape, device=config.device)

    caches = v4.Caches(make("window", "kv_cache_dtype", config.swa_block_size))
    if ratio > 1:
        caches.compressed = make("whole", "compressed_kv_cache_dtype", config.block_size, ratio)
        caches.state = make_state(HEAD_SIZE)
    if ratio == INDEXED_RATIO:
        caches.index = make("whole", "index_cache_dtype", config.block_size, ratio)
        caches.index_state = make_state(INDEX_SIZE)
    return caches


class V4Layers:
    """All layers' attentions, their pages, and the plan of a step."""

    takes = frozenset({"compressed_kv_cache_dtype", "streams", "max_drafts"})
    block_size = BLOCK_SIZE

    def __init__(
        self,
        model: Any,
        num_pages: int,
        index_cache_dtype: Any,
        max_drafts: int,
        streams: Sequence[Any],
        **limits: Any,
    ) -> None:
        check_v4(model)
        layers = [layer.self_attn for layer in model.model.layers]
        ratios = sorted({ratio_of(layer) for layer in layers} - {1})
        sizes = model.config
        self.config = config = v4.Config(
            sizes.num_attention_heads,
            softmax_scale=layers[0].scaling,
            window=sizes.sliding_window,
            compress_ratios=ratios,
            topk_tokens=sizes.index_topk,
            index_n_heads=sizes.index_n_heads,
            o_groups=sizes.o_groups,
            index_cache_dtype="fp8_index" if index_cache_dtype == "auto" else index_cache_dtype,
            swa_block_size=WINDOW_PAGE_SIZE,
            state_block_sizes=dict.fromkeys(ratios, STATE_PAGE_SIZE),
            eps=sizes.rms_norm_eps,
            **limits,
        )
        self._builder = v4.MetadataBuilder(config)
        self._streams, self.max_drafts = streams, max_drafts
        rows = config.max_num_seqs, config.max_model_len

        def keep(page_size: int, seen: int) -> Recent:
            return Recent(page_size, *rows, seen + max_drafts, config.max_num_batched_tokens)

        recent = {"window": keep(WINDOW_PAGE_SIZE, config.window)}
        for ratio in ratios:
            recent[f"states of {ratio}"] = keep(STATE_PAGE_SIZE, state_groups(ratio) * ratio)
        self.pages = StepPages(num_pages, Table(config.block_size, *rows), recent)
        self._all_tables = {"whole": self.pages.whole, **recent}
        self._tables: dict[str, torch.Tensor] = {}  # those of the step's requests
        self._on_device = {
            name: torch.from_numpy(table.entries).to(config.device)  # on the CPU the same memory
            for name, table in self._all_tables.items()
        }
        numbers = {"whole": num_pages, **{name: its.num_pages for name, its in recent.items()}}
        angles = {
            kind: make_rope_table(model.model.rotary_emb, config, kind)
            for kind in ("main", "compress")
        }
        dtype = model.model.embed_tokens.weight.dtype
        self.attentions = [
            V4Attention(layer, config, angles[layer.rope_layer_type], numbers, dtype)
            for layer in layers
        ]

    def locate(
        self, positions: Mapping[Hashable, np.ndarray], put: Put
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The window's slots of a step's tokens, by their positions in their requests, and its
        block table. Tables are as wide as the longest request; but that of compressed rows always
        has the same width, because the memory of the indexer follows from it."""
        rows, _ = self.pages.rows(positions)
        its_rows = np.repeat(rows, [len(its) for its in positions.values()])
        slots = self.pages.recent["window"].slots(its_rows, np.concatenate([*positions.values()]))
        longest = 1 + max(int(its[-1]) for its in positions.values())
        is_range = (np.diff(rows) == 1).all()  # then the tables need no copy
        which = slice(rows[0], rows[-1] + 1) if is_range else put(rows)
        for name, table in self._all_tables.items():
            where, entries = table.take_changes()
            if self.config.device != "cpu" and len(where):
                self._on_device[name].view(-1)[put(where)] = put(entries)
            width = None if name == "whole" else -(-longest // table.page_size)
            self._tables[name] = self._on_device[name][:, :width][which]
        return put(slots), self._tables["window"]

    def plan(
        self, common: sparse_mla.CommonAttentionMetadata, positions: torch.Tensor
    ) -> tuple[v4.Metadata, Sequence[Any]]:
        """Returns what all layers of a step share."""
        ratios = self.config.compress_ratios
        metadata = self._builder.build(
            common,
            compressed=dict.fromkeys(ratios, self._tables["whole"]),
            states={ratio: self._tables[f"states of {ratio}"] for ratio in ratios},
        )
        return metadata, self._streams
