"""What a DeepSeek V4 layer of Transformers gives to `sparse_mla.v4.SparseMLA`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sparse_mla import v4
from sparse_mla.integrations._runner_checks import check_rope_type

Projection = Callable[[torch.Tensor], torch.Tensor]


def ratio_of(attention: Any) -> int:
    """Tokens of a compressed row; 1 for a layer with a window alone."""
    return int(attention.config.compress_rates.get(attention.layer_type, 1))


def layer_weights(model: Any) -> dict[str, torch.Tensor]:
    """All but the RoPE table, by reference: norms, sinks and offsets where they are fp32, o_a_proj
    where it is bf16 or e4m3. Others are copied."""
    compressor, indexer = model.compressor, getattr(model.compressor, "indexer", None)
    found = {"q_norm": model.q_a_norm.weight, "kv_norm": model.kv_norm.weight}
    found["attn_sink"] = model.sinks
    if compressor is not None:
        found |= {"ape": compressor.position_bias, "compressor_norm": compressor.kv_norm.weight}
    if indexer is not None:
        found |= {"index_ape": indexer.position_bias, "index_norm": indexer.kv_norm.weight}
    in_fp32 = {name: weight.detach().float() for name, weight in found.items()}
    return in_fp32 | output_weights(model.o_a_proj)


def output_weights(o_a_proj: Any) -> dict[str, torch.Tensor]:
    """[G, N, R]: views of bf16 weights, or of e4m3 ones that Transformers has loaded with scales of
    blocks of 128 by 128."""
    groups = o_a_proj.n_groups
    weight, scale = o_a_proj.weight.detach(), getattr(o_a_proj, "weight_scale_inv", None)
    if weight.dtype != torch.float8_e4m3fn or scale is None:
        return {"wo_a": weight.bfloat16().unflatten(0, (groups, -1))}
    scales = scale.detach().float().unflatten(0, (groups, -1))
    return {"wo_a": weight.unflatten(0, (groups, -1)), "wo_a_scale": scales}


def make_projections(model: Any, dtype: torch.dtype) -> dict[str, Projection]:
    """What SparseMLA calls, made of a layer's own projections."""
    compressor, indexer = model.compressor, getattr(model.compressor, "indexer", None)

    def join(first: Any, second: Any) -> Projection:
        return lambda x: torch.cat([first(x), second(x)], dim=-1)

    make_latents = join(model.q_a_proj, model.kv_proj)
    found = {
        "fused_wqa_wkv": lambda x: make_latents(x).bfloat16(),
        "wq_b": lambda x: model.q_b_proj(x.to(dtype)).bfloat16(),
        "wo_b": lambda x: model.o_b_proj(x.to(dtype)),
    }
    if compressor is not None:
        found["wkv_wgate"] = join(compressor.kv_proj, compressor.gate_proj)
    if indexer is not None:
        found["index_wkv_wgate"] = join(indexer.kv_proj, indexer.gate_proj)
        found["index_weights_proj"] = indexer.scorer.weights_proj
        found["index_wq_b"] = lambda x: indexer.q_b_proj(x.to(dtype)).bfloat16()
    return found


def make_rope_table(rotary_emb: Any, config: v4.Config, kind: str) -> torch.Tensor:
    """The model's cosines, then its sines, of every position: [max_model_len, 64] fp32."""
    check_rope_type(rotary_emb.rope_type[kind])
    positions = torch.arange(config.max_model_len, device=config.device)[None]
    example = torch.empty(0, dtype=torch.float32, device=config.device)  # for dtype and device
    return torch.cat(rotary_emb(example, positions, layer_type=kind), dim=-1)[0]
