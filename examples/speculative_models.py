"""The models of speculative.py, and their attention to pages. A module of it, not a script."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import deepseek_common as common
import torch
from transformers import (
    AttentionInterface,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave

import sparse_mla
from sparse_mla import paged

WINDOW = CHUNK = 48  # positions that a layer with a window sees, and those of a local layer

# --- the models ----------------------------------------------------------------------------------

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": None,
    "attn_implementation": "eager",
}
GQA = {"num_key_value_heads": 2, "head_dim": 64}
MODELS: dict[str, Callable[..., Any]] = {
    "llama": lambda **sizes: LlamaForCausalLM(LlamaConfig(**GQA, **sizes)),
    "mistral": lambda **sizes: MistralForCausalLM(
        MistralConfig(**GQA, sliding_window=WINDOW, **sizes)
    ),
    "llama4": lambda **sizes: Llama4ForCausalLM(
        Llama4TextConfig(
            **GQA,
            **sizes,
            intermediate_size_mlp=sizes["intermediate_size"],
            moe_layers=[],
            attention_chunk_size=CHUNK,
            layer_types=(["chunked_attention", "full_attention"] * 8)[: sizes["num_hidden_layers"]],
            attn_temperature_tuning=False,
        )
    ),
    "deepseek_v3": lambda **sizes: DeepseekV3ForCausalLM(
        DeepseekV3Config(
            num_key_value_heads=8,
            q_lora_rank=128,
            first_k_dense_replace=99,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            **sizes,
        )
    ),
}


def make_models(options: argparse.Namespace) -> tuple[Any, Any]:
    """The model, and a draft model: its first layer with a noisy head, or all of it, where all
    drafts are to be right, or to be wrong in a way that is known."""
    generator = torch.Generator().manual_seed(options.seed)
    model, draft = (
        MODELS[options.model](num_hidden_layers=layers, **SIZES).eval().requires_grad_(False)
        for layers in (options.layers, 1 if options.drafts == "some" else options.layers)
    )
    common.draw_weights(model, generator)
    common.round_weights(model)
    own = draft.state_dict().keys()
    draft.load_state_dict({name: x for name, x in model.state_dict().items() if name in own})
    if options.drafts == "some":
        head = draft.lm_head.weight
        head += 0.25 * head.std() * torch.randn(head.shape, generator=generator)
    return model.to(options.device), draft.to(options.device)


# --- attention -----------------------------------------------------------------------------------


@dataclass
class Step:
    """What the attention of all layers reads in a forward pass."""

    metadata: paged.Metadata
    slots: torch.Tensor  # [T]: where the new tokens go
    caches: list[Any]  # those of each layer


def attend_to_pages(
    module: Any,
    query: torch.Tensor,  # [1, H, T, D], like the next two
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float,
    paged_step: Step,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers calls this in the place of its attention."""
    q, k, v = (x[0].transpose(0, 1).bfloat16() for x in (query, key, value))
    k_cache, v_cache = paged_step.caches[module.layer_idx]
    sparse_mla.reshape_and_cache(k, v, k_cache, v_cache, paged_step.slots)
    out, _ = paged.attention(
        paged_step.metadata, q, k_cache, v_cache, softmax_scale=scaling, **kind_of(module)
    )
    return out[None].to(query.dtype), None


def kind_of(module: Any) -> dict[str, Any]:
    """What a layer sees: a window, its chunk of positions, or all."""
    config = module.config
    if isinstance(config, Llama4TextConfig):
        kind = (config.layer_types or [])[module.layer_idx]
        return {"is_local": True} if kind == "chunked_attention" else {}
    window = getattr(config, "sliding_window", None)
    return {} if window is None else {"sliding_window_size": window - 1}


AttentionInterface.register("sparse_mla_paged", attend_to_pages)


class LatentAttention(torch.nn.Module):
    """DeepSeek-V3's attention over a cache of latents, absorbed: keys are never expanded."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.w_uk, self.w_uv = sparse_mla.split_kv_b_proj(
            model.kv_b_proj.weight.detach(),
            num_heads=model.num_heads,
            qk_nope_head_dim=model.qk_nope_head_dim,
            v_head_dim=model.v_head_dim,
        )

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: Any, paged_step: Step, **unused: Any
    ) -> tuple[torch.Tensor, None]:
        m = self.model
        q = m.q_b_proj(m.q_a_layernorm(m.q_a_proj(hidden_states)))
        q = q.unflatten(-1, (m.num_heads, -1)).transpose(1, 2)
        q_nope, q_pe = q.split([m.qk_nope_head_dim, m.qk_rope_head_dim], dim=-1)
        latent, k_pe = m.kv_a_proj_with_mqa(hidden_states).split([512, 64], dim=-1)
        q_pe, k_pe = apply_rotary_pos_emb_interleave(q_pe, k_pe[:, None], *position_embeddings)
        cache = paged_step.caches[m.layer_idx][0]
        latent = m.kv_a_layernorm(latent)[0].bfloat16()
        sparse_mla.concat_and_cache_mla(latent, k_pe[0, 0].bfloat16(), cache, paged_step.slots)
        q_nope, q_pe = (x[0].transpose(0, 1).bfloat16().contiguous() for x in (q_nope, q_pe))
        q = sparse_mla.k_up_proj(q_nope, self.w_uk), q_pe
        out, _ = paged.attention(paged_step.metadata, q, cache, softmax_scale=m.scaling)
        values = sparse_mla.v_up_proj(out, self.w_uv).flatten(1).to(hidden_states.dtype)
        return m.o_proj(values)[None], None


class Served:
    """A model with paged caches, and the metadata of its steps."""

    def __init__(
        self,
        model: Any,
        config: paged.Config,
        req_to_token: torch.Tensor,
        num_pages: int,
        is_fp8: bool,
    ) -> None:
        self.model, self.num_pages, self.is_fp8 = model, num_pages, is_fp8
        self.page_size = config.page_size
        self.device = req_to_token.device
        self.caches = [self.make_caches() for _ in model.model.layers]
        self.builder = paged.MetadataBuilder(config, req_to_token)
        if isinstance(model, DeepseekV3ForCausalLM):
            for layer in model.model.layers:
                layer.self_attn = LatentAttention(layer.self_attn)
        else:
            model.set_attn_implementation("sparse_mla_paged")

    def make_caches(self) -> tuple[torch.Tensor, ...]:
        """A layer's rows of latents, or its keys and values."""
        pages = (self.num_pages, self.page_size)
        if isinstance(self.model, DeepseekV3ForCausalLM):
            row, dtype = (656, torch.uint8) if self.is_fp8 else (576, torch.bfloat16)
            return (torch.zeros(*pages, row, dtype=dtype, device=self.device),)
        dtype = torch.float8_e4m3fn if self.is_fp8 else torch.bfloat16
        shape = (*pages, GQA["num_key_value_heads"], GQA["head_dim"])
        return tuple(torch.zeros(shape, dtype=dtype, device=self.device) for _ in range(2))

    @torch.no_grad()
    def forward(
        self, ids: Any, positions: Any, slots: Any, metadata: paged.Metadata
    ) -> torch.Tensor:
        """-> logits [T, vocab]"""
        return self.model(
            input_ids=ids[None],
            position_ids=positions[None],
            attention_mask=torch.empty((1, 1, 0, 0), device=ids.device),  # no layer reads it
            use_cache=False,
            paged_step=Step(metadata, slots, self.caches),
        ).logits[0]

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Moves tokens to other slots: those of an accepted branch to their positions."""
        for cache in (x for layer in self.caches for x in layer):
            rows = cache.view(torch.uint8).flatten(0, 1)
            rows[targets] = rows[sources]
