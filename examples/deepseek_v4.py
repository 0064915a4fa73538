"""DeepSeek V4 of Transformers on sparse_mla.v4, with drafts, compared with Transformers' attention.

    python examples/deepseek_v4.py                    on the CPU
    python examples/deepseek_v4.py --device cuda
    python examples/deepseek_v4.py --drafts 3         two tokens of ten are guessed wrong

A model whose layers have a window alone, compressed rows that an indexer chooses from, or all
compressed rows, with the attention's real head sizes and random weights, continues prompts of
several lengths greedily. `sparse_mla.integrations.transformers.ModelRunner` serves the requests
together, with chunks of prompts among other requests' decodes, once with a bf16 and once with an
FP8 cache. Then Transformers' eager attention runs the same tokens, request by request, and every
logit is compared. The bound is 3 % (bf16) or 18 % (FP8) of the standard deviation of eager's
logits. The exit status is 1 if a logit differs by more, or if the top token differs where eager's
first two are further apart than that.

With --drafts N a decode checks N guesses of the next tokens, and forgets those that are wrong:
`ModelRunner.rewind`. The guesses are the tokens that `generate` gave, some of them changed, in the
place of a draft model's.

Experts are chosen by the token, and the indexer chooses all rows, because other choices are
discontinuous: rounding exchanges them. With a smaller --topk it does.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any, ClassVar

import deepseek_common as common
import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

LAYER_TYPES = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
    "compressed_sparse_attention",
)

# DeepSeek V4's own, but for the length before YaRN, which the prompts exceed here.
YARN = {
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 160,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}


def make_model(options: argparse.Namespace, **sizes: Any) -> DeepseekV4ForCausalLM:
    """A small model whose tokens are bytes. Sizes that are not given are the real ones."""
    sizes = {
        **common.SIZES,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "layer_types": [LAYER_TYPES[i % len(LAYER_TYPES)] for i in range(options.layers)],
        "mlp_layer_types": ["hash_moe"] * options.layers,
        "num_experts_per_tok": 2,
        "q_lora_rank": 256,
        "o_groups": 2,
        "o_lora_rank": 128,
        "index_n_heads": 8,
        "index_topk": options.topk,
        "hc_mult": 2,
        "max_position_embeddings": 2560,
        "rope_parameters": dict(YARN),
        **sizes,
    }
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**sizes)).eval().requires_grad_(False)
    draw_weights(model, torch.Generator().manual_seed(options.seed))
    return model.to(options.device)


def draw_weights(model: Any, generator: torch.Generator) -> None:
    """Draws random weights, sinks, offsets of compressors, mixtures of hyper-connections and the
    experts of every token."""
    common.draw_weights(model, generator)
    for name, weight in model.named_parameters():
        if name.endswith(("position_bias", "sinks", "base")):
            weight.normal_(0, 1, generator=generator)
        elif name.endswith("scale"):
            weight.fill_(1)
    for name, experts in model.named_buffers():
        if name.endswith("tid2eid"):
            drawn = torch.rand(len(experts), model.config.n_routed_experts, generator=generator)
            experts.copy_(drawn.argsort(dim=1)[:, : experts.shape[1]])
    common.round_weights(model)


class Engine(common.Engine):
    """Checks `guesses` of the next tokens, in decodes of 1 + `num_drafts` tokens."""

    bounds: ClassVar[dict[common.Format, float]] = {"bfloat16": 0.03, "fp8_v4": 0.18}
    block_size = 256

    def __init__(self, model: Any, options: argparse.Namespace, *others: Any) -> None:
        super().__init__(model, options, *others)
        self.generator = torch.Generator().manual_seed(options.seed)
        self.guesses: list[torch.Tensor] = []  # what each request may continue with
        self.num_drafts = self.num_rejected = 0

    def more_options(self) -> dict[str, Any]:
        return {"max_drafts": self.options.drafts}

    def summary(self) -> str:
        return f"{super().summary()}; {self.num_rejected} of {self.num_drafts} drafts rejected"

    def next_tokens(self, name: int, request: common.Request, budget: int) -> torch.Tensor:
        tokens = request.next_tokens(budget)
        if not request.generated or self.options.drafts == 0:
            return tokens
        known = len(request.generated)
        last = min(known + self.options.drafts, self.options.new_tokens - 1)
        drafts = self.guesses[name][known:last].clone()
        is_wrong = torch.rand(len(drafts), generator=self.generator) < 0.2
        drafts[is_wrong.to(drafts.device)] += 1
        return torch.cat([tokens, drafts % self.model.config.vocab_size])

    def advance(
        self, name: int, request: common.Request, tokens: torch.Tensor, logits: torch.Tensor
    ) -> None:
        if not request.generated:
            request.advance(logits)
            return
        best, drafts = logits.argmax(dim=-1), tokens[1:]
        num_right = int((best[:-1] == drafts).cumprod(0).sum())
        self.num_drafts += len(drafts)
        self.num_rejected += len(drafts) - num_right
        self.runner.rewind(name, len(drafts) - num_right)
        for i in range(num_right + 1):
            request.advance(logits[i : i + 1])


@torch.no_grad()
def run_eager(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """-> logits [n, vocab] of Transformers' attention"""
    return model(tokens[None], use_cache=False).logits[0].float()


def judge(
    model: Any, engine: Any, prompts: list[torch.Tensor], greedy: list[torch.Tensor]
) -> common.Report:
    """Serves the prompts, then runs Transformers on the same tokens and compares."""
    engine.guesses = greedy
    served = engine.serve(prompts)
    # Transformers' attention up to 5.17 does not run in bf16 with norms in fp32.
    common.cast(model, torch.bfloat16, keeps_fp32=False)
    in_bf16 = [run_eager(model, request.tokens) for request in served]
    common.cast(model, torch.float32)
    eager = [run_eager(model, request.tokens) for request in served]
    return common.Report(**common.report_fields(engine, served, eager, in_bf16, greedy))


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    title = f"DeepSeek V4, {options.layers} layers, {options.heads} heads, {options.drafts} drafts"
    model = make_model(options)
    return common.run(title, common.HEADER, model, options, Engine, judge)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = common.make_parser(__doc__)
    parser.set_defaults(layers=4)
    add = parser.add_argument
    add("--topk", type=int, default=256, help="rows that an indexer chooses (%(default)s)")
    add("--drafts", type=int, default=0, help="guesses that a decode checks (%(default)s)")
    options = common.parse_with(parser, arguments)
    if options.tokens_per_step < options.prompts * (1 + options.drafts):
        parser.error("--tokens-per-step must be at least --prompts times 1 + --drafts")
    return options


if __name__ == "__main__":
    sys.exit(main())
