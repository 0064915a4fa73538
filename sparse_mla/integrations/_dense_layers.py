"""The layers of a DeepSeek-V3 or V2 model on a paged cache: DenseMLA attends to all tokens."""

from __future__ import annotations

from typing import Any

import torch

import sparse_mla
from sparse_mla import dense
from sparse_mla.integrations._mla_layers import PagedAttention, PagedLayers, config_fields
from sparse_mla.integrations._pages import Pages
from sparse_mla.integrations._ranks import Ranks
from sparse_mla.integrations._runner_checks import check_rope_type


class DenseAttention(PagedAttention):
    """Replaces one layer's attention, whose weights it uses. With `absorb` it has weights of its
    own, which take the place of the projections of queries and outputs."""

    def __init__(
        self,
        model: Any,
        config: dense.Config,
        num_pages: int,
        ranks: Ranks | None,
        rope_table: torch.Tensor,
        absorb: bool,
        **quantisation: Any,
    ) -> None:
        q_proj = model.q_proj if model.q_lora_rank is None else model.q_b_proj
        weights: dict[str, Any] = {"kv_b_proj": model.kv_b_proj}
        if absorb:
            weights = {
                "kv_b_proj": weight_of(model.kv_b_proj, True),
                "q_proj": weight_of(q_proj, True),
                "o_proj": weight_of(model.o_proj, False),
                **quantisation,
            }
        mla = dense.DenseMLA(config, absorb=absorb, rope_table=rope_table, **weights)
        super().__init__(model, mla, num_pages, ranks)
        self.mla = mla
        self.q_proj = None if absorb else q_proj

    def forward(
        self,
        hidden_states: torch.Tensor,  # [1, T, hidden_size]
        sparse_mla_step: dense.Metadata,
        **unused: Any,  # among them the model's angles, which the RoPE table holds too
    ) -> tuple[torch.Tensor, None]:
        model = self.model
        q = hidden_states
        if model.q_lora_rank is not None:
            q = model.q_a_layernorm(model.q_a_proj(hidden_states))
        if self.q_proj is not None:
            q = self.q_proj(q).unflatten(-1, (self.mla.config.num_heads, -1))
        kv_c, k_pe = self.project_latents(hidden_states)
        out = self.mla.forward(
            q[0].bfloat16(), kv_c.bfloat16(), k_pe.bfloat16(), self.kv_cache, sparse_mla_step
        )
        if self.ranks is not None:
            out = self.ranks.merge(*out)
        if self.q_proj is not None:
            return self.project_values(out, hidden_states.dtype), None
        out = out.to(hidden_states.dtype)
        return (out if model.o_proj.bias is None else out + model.o_proj.bias)[None], None


def weight_of(layer: Any, by_inputs: bool) -> Any:
    """A linear layer as DenseMLA takes it: the weight, [inputs, outputs] with `by_inputs`; a pair
    where Transformers has loaded e4m3; or else the layer, whose form only itself knows."""
    weight, scale = layer.weight, getattr(layer, "weight_scale_inv", None)
    if weight.dtype == torch.float8_e4m3fn and scale is not None:
        return weight.detach(), scale.detach().float()
    if type(layer) is torch.nn.Linear:
        return weight.detach().T if by_inputs else weight.detach()
    return layer


class DenseLayers(PagedLayers):
    """All layers' attentions, and the plan of a step."""

    takes = frozenset(
        {"absorb", "scheme", "requantize", "prefill_workspace_tokens", "cp", "exchange"}
    )
    config: dense.Config

    def __init__(
        self,
        model: Any,
        num_pages: int,
        index_cache_dtype: Any,
        absorb: bool,
        scheme: str | None,
        requantize: bool,
        exchange: Any,
        **limits: Any,
    ) -> None:
        if index_cache_dtype != "auto":
            raise ValueError(
                'ModelRunner: `index_cache_dtype` must be "auto" for a '
                f"{type(model).__name__}, which has no indexer, got {index_cache_dtype!r}"
            )
        # DeepSeek-V2 has no such flag: its pairs are always neighbours.
        interleaved = bool(getattr(model.config, "rope_interleave", True))
        self.config = dense.Config(interleaved=interleaved, **config_fields(model), **limits)
        _check_workspace(self.config)
        self.pages = Pages(num_pages, self.config.block_size, self.config.cp)
        self._builder = dense.MetadataBuilder(self.config)
        rope_table = make_rope_table(model.model.rotary_emb, self.config)
        ranks = Ranks.of(self.config.cp, exchange)
        shared = self.config, num_pages, ranks, rope_table, absorb
        self.attentions = [
            DenseAttention(layer.self_attn, *shared, scheme=scheme, requantize=requantize)
            for layer in model.model.layers
        ]

    def plan(
        self, common: sparse_mla.CommonAttentionMetadata, positions: torch.Tensor
    ) -> dense.Metadata:
        """Returns what all layers of a step share."""
        return self._builder.build(common)


def _check_workspace(config: dense.Config) -> None:
    """Refuses a workspace without a page for each prefill that a step may have. Those with context
    have two new tokens or more."""
    tokens = config.prefill_workspace_tokens
    prefills = min(config.max_num_seqs, config.max_num_batched_tokens // 2)
    if tokens is not None and config.path != "mixed" and tokens < prefills * config.block_size:
        raise ValueError(
            "ModelRunner: `prefill_workspace_tokens` must be None or at least "
            f"{prefills * config.block_size}, a page of block_size = {config.block_size} tokens "
            f"for each of {prefills} prefills, got {tokens}"
        )


def make_rope_table(rotary_emb: Any, config: dense.Config) -> torch.Tensor:
    """The model's cosines, then its sines, of every position: [max_model_len, 64] fp32."""
    check_rope_type(rotary_emb.rope_type)
    positions = torch.arange(config.max_model_len, device=config.device)[None]
    example = torch.empty(0, dtype=torch.float32, device=config.device)  # for dtype and device
    angles = rotary_emb(example, positions)
    if isinstance(angles, tuple):  # DeepSeek-V3: cos and sin, each of two equal halves
        cos, sin = (x.chunk(2, dim=-1)[0] for x in angles)
    else:  # DeepSeek-V2: cos + i sin
        cos, sin = angles.real, angles.imag
    return torch.cat([cos, sin], dim=-1)[0]
