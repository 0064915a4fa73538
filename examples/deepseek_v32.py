"""DeepSeek-V3.2 of Transformers on sparse_mla, compared with Transformers' own eager attention.

    python examples/deepseek_v32.py                   on the CPU
    python examples/deepseek_v32.py --device cuda

A model with the attention's real head sizes and random weights continues prompts of several lengths
greedily. `sparse_mla.integrations.transformers.ModelRunner` serves the requests together, with
chunks of prompts among other requests' decodes, once with a bf16 and once with an FP8 cache. Then
Transformers runs the same tokens, request by request, and every logit is compared. The bound is 2 %
(bf16) or 10 % (FP8) of the standard deviation of eager's logits. The exit status is 1 if a logit
differs by more, or if the top token differs where eager's first two are further apart than that.

Two decisions make the comparison sharp:

- The weights are bf16 numbers, and the activations outside the attention are fp32. In Transformers
  alone a bf16 model differs from the fp32 one by more than 2 %; the row "eager, bf16 model" shows
  this difference. `--dtype bfloat16` serves a bf16 model, and adds the difference to the bounds.
- Which keys belong to the top-k is a discontinuous choice: rounding can exchange keys at its edge.
  Therefore eager runs twice, with its own choice and with ours ("our keys"). The same bound applies
  to both, and the share of keys that are not the same is shown.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import deepseek_common as common
import torch
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

# --- the model -----------------------------------------------------------------------------------


def make_model(options: argparse.Namespace) -> DeepseekV32ForCausalLM:
    """A small DeepSeek-V3.2 whose tokens are bytes. Sizes that are not given are the real ones."""
    config = DeepseekV32Config(
        **common.SIZES,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.heads,
        q_lora_rank=256,
        index_topk=options.topk,
        index_n_heads=8,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    model = DeepseekV32ForCausalLM(config).eval().requires_grad_(False)
    draw_weights(model, torch.Generator().manual_seed(options.seed))
    return model.to(options.device)


def draw_weights(model: DeepseekV32ForCausalLM, generator: torch.Generator) -> None:
    """Draws random weights, but for an attention and an indexer that look for the same keys, as
    trained ones do."""
    common.draw_weights(model, generator)
    # The first value of the residual stream is a constant, which the indexer's weights read.
    for name, weight in model.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            weight[..., 0, :] = 0
    model.model.embed_tokens.weight[:, 0] = 4
    model.lm_head.weight[:, 0] = 0
    for attention in attentions(model):
        align_indexer(attention, generator)
    common.round_weights(model)


def attentions(model: DeepseekV32ForCausalLM) -> list[Any]:
    """The attention of each layer. PyTorch says of a module's parts only that they are modules or
    tensors, so they are Any here."""
    return [layer.self_attn for layer in model.model.layers]


def align_indexer(attention: Any, generator: torch.Generator) -> None:
    """Makes all heads, and the indexer, prefer the same few keys.

    Then a key at the edge of the top-k has little weight. With a random indexer such a key has as
    much weight as any other, and keys exchanged at the edge moved a logit by 18 % of the standard
    deviation.
    """
    indexer = attention.indexer
    num_heads, num_pairs = attention.num_heads, indexer.n_heads // 2
    q = attention.q_b_proj.weight.view(num_heads, 192, -1)  # 128 nope, 64 rope
    kv = attention.kv_b_proj.weight.view(num_heads, 256, 512)  # 128 keys, 128 values
    kv_a = attention.kv_a_proj_with_mqa.weight  # 512 latents, 64 rope
    preferred = torch.randn(q.shape[1:], generator=generator) * q.shape[2] ** -0.5
    for part in (slice(0, 64), slice(128, 192)):
        q[:, part] = 0.3 * q[:, part] + 2 * preferred[part]
    kv[:, :64] = torch.eye(64, 512)

    # RoPE turns pairs (2i, 2i + 1) in the attention and (i, i + 32) in the indexer.
    rope = torch.cat([torch.arange(0, 64, 2), torch.arange(1, 64, 2)])
    indexer.wk.weight.copy_(torch.cat([kv_a[512:][rope], kv_a[:64]]))
    queries = torch.cat([q[:num_pairs, 128:][:, rope], q[:num_pairs, :64]], dim=1)
    # relu(x) - relu(-x) = x, so a pair of heads has no ties at zero.
    indexer.wq_b.weight.copy_(torch.cat([queries, -queries]).flatten(0, 1))
    indexer.weights_proj.weight.zero_()
    indexer.weights_proj.weight[:num_pairs, 0] = 1
    indexer.weights_proj.weight[num_pairs:, 0] = -1


@contextmanager
def watch_indexers(
    model: DeepseekV32ForCausalLM, hook: Callable[[int, torch.Tensor], torch.Tensor | None]
) -> Iterator[None]:
    """Calls hook(layer, topk_indices [B, S, K]) after every indexer. Indices that the hook returns
    replace the indexer's."""
    handles = [
        attention.indexer.register_forward_hook(
            lambda module, args, out, number=number: hook(number, out)
        )
        for number, attention in enumerate(attentions(model))
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# --- serving -------------------------------------------------------------------------------------


class Engine(common.Engine):
    """An engine that keeps the keys that the indexers chose."""

    def serve(self, prompts: list[torch.Tensor]) -> list[common.Request]:
        # One list per request, of [tokens, layers, K] per step.
        self.chosen: list[list[torch.Tensor]] = [[] for _ in prompts]
        return super().serve(prompts)

    def run(self, step: dict[int, torch.Tensor]) -> torch.Tensor:
        layers: list[list[torch.Tensor]] = [[] for _ in self.model.model.layers]

        def keep(layer: int, chosen: torch.Tensor) -> None:
            """Short contexts have fewer than K columns. Repeated columns do not change the set of
            keys."""
            repeated = chosen[..., :1].expand(-1, -1, self.options.topk - chosen.shape[-1])
            layers[layer].append(torch.cat([chosen, repeated], dim=-1).flatten(0, 1))

        with watch_indexers(self.model, keep):
            logits = super().run(step)
        chosen = torch.stack([torch.cat(parts) for parts in layers], dim=1)
        lengths = [len(tokens) for tokens in step.values()]
        for name, rows in zip(step, chosen.split(lengths), strict=True):
            self.chosen[name].append(rows)
        return logits


# --- comparison ----------------------------------------------------------------------------------


@torch.no_grad()
def run_eager(
    model: DeepseekV32ForCausalLM, tokens: torch.Tensor, chosen: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs Transformers' attention on its own choice of keys, or on `chosen`.

    -> logits [n, vocab], and its own choice [n, layers, n], true for keys that a token attends to
    """
    own = []

    def hook(layer: int, indices: torch.Tensor) -> torch.Tensor | None:
        own.append(indices[0])
        return None if chosen is None else chosen[None, :, layer]

    with watch_indexers(model, hook):
        logits = model(tokens[None], use_cache=False).logits[0]
    return logits.float(), as_mask(torch.stack(own, dim=1))


def visible_only(indices: torch.Tensor) -> torch.Tensor:
    """The indices [n, layers, K] without keys that a token cannot see. A top-k with more columns
    than visible keys has taken all of these, so the other columns may become the token itself."""
    own = torch.arange(len(indices), device=indices.device)
    return indices.minimum(own[:, None, None])


def as_mask(indices: torch.Tensor) -> torch.Tensor:
    mask = indices.new_zeros((*indices.shape[:2], len(indices)), dtype=torch.bool)
    return mask.scatter(-1, visible_only(indices).long(), True)


@dataclass
class Report(common.Report):
    """How far the logits with a cache of one format are from eager's."""

    against_eager_on_our_keys: common.Comparison
    other_keys: float  # share of eager's keys that are not ours

    @property
    def within(self) -> bool:
        return self.against_eager.within and self.against_eager_on_our_keys.within

    def rows(self) -> Iterator[str]:
        first, last = super().rows()
        yield f"{first} {100 * self.other_keys:8.2f} %"
        ours = f"ours, {self.kv_cache_dtype}"
        yield common.format_row(ours, "eager, our keys", self.against_eager_on_our_keys)
        yield last


def judge(
    model: DeepseekV32ForCausalLM,
    engine: Engine,
    prompts: list[torch.Tensor],
    greedy: list[torch.Tensor],
) -> Report:
    """Serves the prompts, then runs Transformers on the same tokens and compares."""
    served = engine.serve(prompts)
    keys = [visible_only(torch.cat(chosen)) for chosen in engine.chosen]
    common.cast(model, torch.bfloat16)
    in_bf16 = [run_eager(model, request.tokens)[0] for request in served]
    common.cast(model, torch.float32)
    eager = [run_eager(model, request.tokens) for request in served]
    free, masks = [logits for logits, _ in eager], [mask for _, mask in eager]
    pinned = [run_eager(model, r.tokens, its)[0] for r, its in zip(served, keys, strict=True)]

    fields = common.report_fields(engine, served, free, in_bf16, greedy)
    ours = [torch.cat(request.logits) for request in served]
    others = [mask & ~as_mask(its) for mask, its in zip(masks, keys, strict=True)]
    return Report(
        **fields,
        against_eager_on_our_keys=common.compare(ours, pinned, fields["against_eager"].bound),
        other_keys=common.count(others) / common.count(masks),
    )


# --- the run -------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    title = f"{options.layers} layers, {options.heads} heads, top-{options.topk}"
    header = f"{common.HEADER}  other keys"
    return common.run(title, header, make_model(options), options, Engine, judge)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = common.make_parser(__doc__)
    parser.add_argument(
        "--topk", type=int, default=128, help="keys that the indexer chooses (%(default)s)"
    )
    return common.parse_with(parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
