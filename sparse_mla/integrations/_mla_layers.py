"""What the layers of all models of transformers.py share: a paged cache, and the model's own
projections before and after the attention."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np
import torch

import sparse_mla
from sparse_mla.integrations._pages import Pages
from sparse_mla.integrations._ranks import Ranks


class PagedAttention(torch.nn.Module):
    """Replaces one layer's attention, whose weights it uses. A subclass adds `forward`."""

    def __init__(
        self,
        model: Any,
        mla: sparse_mla.SparseMLA | sparse_mla.dense.DenseMLA,
        num_pages: int,
        ranks: Ranks | None,
    ) -> None:
        super().__init__()
        self.model, self.ranks = model, ranks
        self.config = config = mla.config
        kv_format: Any = config.kv_cache_dtype  # one with RoPE values
        shape = sparse_mla.Backend.get_kv_cache_shape(
            num_pages, config.block_size, cache_dtype_str=kv_format
        )
        is_fp8 = kv_format == "fp8_ds_mla"
        self.kv_cache = torch.zeros(
            shape,
            dtype=torch.uint8 if is_fp8 else torch.bfloat16,
            device=model.kv_b_proj.weight.device,
        )

    def project_latents(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[1, T, hidden_size] -> kv_c [T, 512] after its norm, and k_pe [T, 64] before RoPE."""
        kv = self.model.kv_a_proj_with_mqa(hidden_states)[0]
        kv_c, k_pe = kv.split([self.config.kv_lora_rank, self.config.qk_rope_head_dim], dim=-1)
        return self.model.kv_a_layernorm(kv_c), k_pe

    def project_values(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Every head's result [T, H, v_head_dim] -> [1, T, hidden_size]."""
        return self.model.o_proj(values.flatten(1).to(dtype))[None]


class PagedLayers:
    """What the layers of a model are to a step: their pages, which all have the same numbers, and
    where these are. A subclass adds the attentions, and the plan."""

    block_size = 64  # tokens per page by default
    max_drafts: int | None = None  # any number of tokens may be forgotten
    pages: Pages

    def locate(
        self, positions: Mapping[Hashable, np.ndarray], put: Callable[[Any], torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The slots of a step's tokens, by their positions in their requests, and the block
        table."""
        slots = [self.pages.slots(request, its) for request, its in positions.items()]
        return put(np.concatenate(slots)), put(self.pages.table(positions))


def config_fields(model: Any) -> dict[str, Any]:
    """The fields that the configs of all layers take from a model of Transformers."""
    sizes = model.config
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return {
        "num_heads": sizes.num_attention_heads,
        "softmax_scale": model.model.layers[0].self_attn.scaling,  # it includes YaRN's factor
        **{name: getattr(sizes, name) for name in names},
    }
