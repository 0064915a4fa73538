"""DeepSeek-V3 or V2 of Transformers on sparse_mla.dense, compared with Transformers' own attention.

    python examples/deepseek_v3.py                    on the CPU
    python examples/deepseek_v3.py --device cuda --yarn
    python examples/deepseek_v3.py --model deepseek_v2

A model with the attention's real head sizes (queries and keys of 128 + 64 values, values of 128,
latents of 512) and random weights continues prompts of several lengths greedily.
`sparse_mla.integrations.transformers.ModelRunner` serves the requests together, with chunks of
prompts among other requests' decodes, once with a bf16 and once with an FP8 cache. Then
Transformers' eager attention runs the same tokens, request by request, and every logit is
compared. The bound is 2 % (bf16) or 10 % (FP8) of the standard deviation of eager's logits. The
exit status is 1 if a logit differs by more, or if the top token differs where eager's first two are
further apart than that.

The weights are bf16 numbers, and the activations outside the attention are fp32, because a bf16
model of Transformers alone may differ from the fp32 one by more than 2 %. The row "eager, bf16
model" shows this difference. `--dtype bfloat16` serves a bf16 model, and adds the difference to the
bounds.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any, TypeAlias

import deepseek_common as common
import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
)

Model: TypeAlias = DeepseekV3ForCausalLM | DeepseekV2ForCausalLM

# DeepSeek-V3's own, but for the length before YaRN, which the prompts exceed here.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def make_model(options: argparse.Namespace, **sizes: Any) -> Model:
    """A small model whose tokens are bytes. Sizes that are not given are the real ones."""
    sizes = {
        **common.SIZES,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "num_key_value_heads": options.heads,
        "q_lora_rank": options.q_lora_rank or None,
        "max_position_embeddings": 2560,
        "rope_parameters": YARN if options.yarn else ROPE,
        **sizes,
    }
    model: Model
    if options.model == "deepseek_v2":
        model = DeepseekV2ForCausalLM(DeepseekV2Config(**sizes))
    else:
        interleave = not options.halves
        model = DeepseekV3ForCausalLM(DeepseekV3Config(rope_interleave=interleave, **sizes))
    model.eval().requires_grad_(False)
    draw_weights(model, torch.Generator().manual_seed(options.seed))
    return model.to(options.device)


def draw_weights(model: Any, generator: torch.Generator) -> None:
    """Draws random weights whose attention is sharp, as that of trained ones is: products of
    queries and keys have a standard deviation of 2, so that few keys have most of the weight."""
    common.draw_weights(model, generator)
    for layer in model.model.layers:
        attention = layer.self_attn
        q_proj = attention.q_b_proj if model.config.q_lora_rank else attention.q_proj
        q_proj.weight *= 2
    common.round_weights(model)


@torch.no_grad()
def run_eager(model: Model, tokens: torch.Tensor) -> torch.Tensor:
    """-> logits [n, vocab] of Transformers' attention"""
    return model(tokens[None], use_cache=False).logits[0].float()


def judge(
    model: Model,
    engine: common.Engine,
    prompts: list[torch.Tensor],
    greedy: list[torch.Tensor],
) -> common.Report:
    """Serves the prompts, then runs Transformers on the same tokens and compares."""
    served = engine.serve(prompts)
    common.cast(model, torch.bfloat16)
    in_bf16 = [run_eager(model, request.tokens) for request in served]
    common.cast(model, torch.float32)
    eager = [run_eager(model, request.tokens) for request in served]
    return common.Report(**common.report_fields(engine, served, eager, in_bf16, greedy))


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    title = f"{options.model}, {options.layers} layers, {options.heads} heads"
    model = make_model(options)
    return common.run(title, common.HEADER, model, options, common.Engine, judge)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = common.make_parser(__doc__)
    add = parser.add_argument
    add("--model", choices=["deepseek_v3", "deepseek_v2"], default="deepseek_v3")
    add("--q-lora-rank", type=int, default=256, help="0: one q_proj (%(default)s)")
    add("--yarn", action="store_true", help="RoPE by YaRN, factor 40")
    add("--halves", action="store_true", help="RoPE of halves, not of neighbours; V3 alone")
    options = common.parse_with(parser, arguments)
    if options.halves and options.model == "deepseek_v2":
        parser.error("--halves is for deepseek_v3: the pairs of deepseek_v2 are always neighbours")
    return options


if __name__ == "__main__":
    sys.exit(main())
