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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Literal

import torch
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

from sparse_mla.integrations.transformers import ModelRunner

Format = Literal["bfloat16", "fp8_ds_mla"]
# of the standard deviation of eager's logits
BOUNDS: dict[Format, float] = {"bfloat16": 0.02, "fp8_ds_mla": 0.10}


# --- the model -----------------------------------------------------------------------------------


def make_model(options: argparse.Namespace) -> DeepseekV32ForCausalLM:
    """A small DeepSeek-V3.2 whose tokens are bytes. Sizes that are not given are the real ones.

    Every token uses all experts, because routing is a discontinuous choice, too, and no part of
    sparse_mla.
    """
    eager: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}
    config = DeepseekV32Config(
        vocab_size=256,
        hidden_size=512,
        intermediate_size=1024,
        moe_intermediate_size=256,
        num_hidden_layers=options.layers,
        first_k_dense_replace=1,
        n_routed_experts=4,
        num_experts_per_tok=4,
        n_group=1,
        topk_group=1,
        num_attention_heads=options.heads,
        num_key_value_heads=options.heads,
        q_lora_rank=256,
        index_topk=options.topk,
        index_n_heads=8,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=None,
        eos_token_id=None,
        **eager,
    )
    model = DeepseekV32ForCausalLM(config).eval().requires_grad_(False)
    draw_weights(model, torch.Generator().manual_seed(options.seed))
    return model.to(options.device)


def draw_weights(model: DeepseekV32ForCausalLM, generator: torch.Generator) -> None:
    """Draws random weights, but for an attention and an indexer that look for the same keys, as
    trained ones do.

    Embeddings and projections have unit variance. What is added to the residual stream has a
    sixteenth of that.
    """
    for name, weight in model.named_parameters():
        if weight.ndim > 1:
            std = 1 if "embed" in name else weight.shape[-1] ** -0.5
            weight.normal_(0, std, generator=generator)
        if "o_proj" in name or "down_proj" in name:
            weight *= 0.25
            weight[..., 0, :] = 0
    # The first value of the residual stream is a constant, which the indexer's weights read.
    model.model.embed_tokens.weight[:, 0] = 4
    model.lm_head.weight[:, 0] = 0
    for attention in attentions(model):
        align_indexer(attention, generator)
    for weight in model.parameters():
        weight.copy_(weight.bfloat16())


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
    common = torch.randn(q.shape[1:], generator=generator) * q.shape[2] ** -0.5
    for part in (slice(0, 64), slice(128, 192)):
        q[:, part] = 0.3 * q[:, part] + 2 * common[part]
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


def cast(model: DeepseekV32ForCausalLM, dtype: torch.dtype) -> None:
    """Casts the weights alone. The buffers of RoPE stay fp32, as Transformers loads them."""
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)


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


@dataclass
class Request:
    prompt: torch.Tensor  # [n]
    generated: list[torch.Tensor] = field(default_factory=list)  # [1] each
    logits: list[torch.Tensor] = field(default_factory=list)  # [tokens, vocab] of each step
    chosen: list[torch.Tensor] = field(default_factory=list)  # [tokens, layers, K] of each step
    num_computed: int = 0

    def next_tokens(self, budget: int) -> torch.Tensor:
        if self.generated:
            return self.generated[-1]
        return self.prompt[self.num_computed : self.num_computed + budget]

    def advance(self, logits: torch.Tensor, chosen: torch.Tensor) -> None:
        self.logits.append(logits)
        self.chosen.append(chosen)
        self.num_computed += len(logits)
        if self.num_computed >= len(self.prompt):
            self.generated.append(logits[-1:].argmax(dim=-1))

    @property
    def tokens(self) -> torch.Tensor:
        """All tokens that went through the model. The last generated token did not."""
        return torch.cat([self.prompt, *self.generated[:-1]])


class Engine:
    """Continuous batching: decodes come first, and prompts share the rest of a step's budget."""

    def __init__(
        self, model: DeepseekV32ForCausalLM, options: argparse.Namespace, kv_cache_dtype: Format
    ) -> None:
        self.model = model
        self.options = options
        self.kv_cache_dtype: Format = kv_cache_dtype
        block_size = 64
        lengths = [length + options.new_tokens for length in prompt_lengths(options)]
        self.runner = ModelRunner(
            model,
            num_pages=sum(-(-length // block_size) for length in lengths),
            max_num_seqs=len(lengths),
            max_num_batched_tokens=options.tokens_per_step,
            max_model_len=max(lengths),
            block_size=block_size,
            kv_cache_dtype=kv_cache_dtype,
        )
        self.num_steps = self.num_mixed_steps = self.num_chunks = 0

    def serve(self, prompts: list[torch.Tensor]) -> list[Request]:
        requests = [Request(prompt) for prompt in prompts]
        running = dict(enumerate(requests))
        while running:
            step = self.plan(running)
            logits, chosen = self.run(step)
            lengths = [len(tokens) for tokens in step.values()]
            for name, *rows in zip(step, logits.split(lengths), chosen.split(lengths), strict=True):
                running[name].advance(*rows)
                if len(running[name].generated) == self.options.new_tokens:
                    del running[name]
                    self.runner.free(name)
        return requests

    def plan(self, running: dict[int, Request]) -> dict[int, torch.Tensor]:
        step, budget = {}, self.options.tokens_per_step
        for name in sorted(running, key=lambda name: not running[name].generated):
            tokens = running[name].next_tokens(budget)
            if len(tokens):
                step[name] = tokens
                budget -= len(tokens)
        prefills = [name for name in step if not running[name].generated]
        self.num_steps += 1
        self.num_chunks += len(prefills)
        self.num_mixed_steps += 0 < len(prefills) < len(step)
        # A prompt's last token, if alone, counts as a decode: the runner puts it among the decodes.
        return dict(sorted(step.items(), key=lambda item: len(item[1]) > 1))

    def run(self, step: dict[int, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """-> logits [tokens, vocab] and the keys chosen [tokens, layers, K]."""
        layers: list[list[torch.Tensor]] = [[] for _ in self.model.model.layers]

        def keep(layer: int, chosen: torch.Tensor) -> None:
            """Short contexts have fewer than K columns. Repeated columns do not change the set of
            keys."""
            repeated = chosen[..., :1].expand(-1, -1, self.options.topk - chosen.shape[-1])
            layers[layer].append(torch.cat([chosen, repeated], dim=-1).flatten(0, 1))

        with watch_indexers(self.model, keep):
            logits = self.runner.step(step, all_logits=True)
        return logits.float(), torch.stack([torch.cat(parts) for parts in layers], dim=1)


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


def perplexity(logits: list[torch.Tensor], prompts: list[torch.Tensor]) -> float:
    """The perplexity of the prompts, which are real text: of each token after those before it."""
    pairs = [(its[: len(p) - 1], p[1:]) for its, p in zip(logits, prompts, strict=True)]
    rows, targets = map(torch.cat, zip(*pairs, strict=True))
    return torch.nn.functional.cross_entropy(rows, targets).exp().item()


@dataclass
class Comparison:
    """Logits compared with eager's. Differences are in standard deviations of eager's logits."""

    largest: float
    rms: float
    bound: float
    same_top: float  # share of tokens
    num_clear: int  # tokens whose first two logits are further apart than the bound
    num_clear_same: int

    @property
    def within(self) -> bool:
        return self.largest <= self.bound and self.num_clear_same == self.num_clear


def compare(logits: list[torch.Tensor], eager: list[torch.Tensor], bound: float) -> Comparison:
    got, want = torch.cat(logits), torch.cat(eager)
    std = want.std()
    difference = (got - want) / std
    first_two = want.topk(2).values
    is_clear = first_two[:, 0] - first_two[:, 1] > bound * std
    is_same = got.argmax(dim=-1) == want.argmax(dim=-1)
    return Comparison(
        largest=difference.abs().max().item(),
        rms=difference.square().mean().sqrt().item(),
        bound=bound,
        same_top=is_same.float().mean().item(),
        num_clear=int(is_clear.sum()),
        num_clear_same=int((is_clear & is_same).sum()),
    )


# --- the run -------------------------------------------------------------------------------------


def prompt_lengths(options: argparse.Namespace) -> list[int]:
    return [options.longest * (i + 1) // options.prompts for i in range(options.prompts)]


def make_prompts(options: argparse.Namespace) -> list[torch.Tensor]:
    """Prompts from an essay that sparse_mla contains, each from another place."""
    text = resources.files("sparse_mla").joinpath("data", "attention.txt").read_bytes()
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().to(options.device)
    lengths = prompt_lengths(options)
    apart = (len(tokens) - lengths[-1]) // len(lengths)
    return [tokens[i * apart : i * apart + length] for i, length in enumerate(lengths)]


def continue_greedily(
    model: Any, prompts: list[torch.Tensor], new_tokens: int
) -> list[torch.Tensor]:
    """The tokens that Transformers generates by itself after each prompt. The model is Any, because
    the declaration of generate() does not fit Transformers' own models."""
    return [
        model.generate(
            prompt[None],
            attention_mask=torch.ones_like(prompt)[None],
            do_sample=False,
            max_new_tokens=new_tokens,
        )[0, len(prompt) :]
        for prompt in prompts
    ]


@dataclass
class Report:
    """How far the logits with a cache of one format are from eager's."""

    kv_cache_dtype: Format
    against_eager: Comparison
    against_eager_on_our_keys: Comparison
    eager_in_bf16: Comparison  # Transformers' own rounding, not judged
    other_keys: float  # share of eager's keys that are not ours
    num_greedy_same: int
    num_greedy: int
    perplexity: float
    eager_perplexity: float

    @property
    def within(self) -> bool:
        return self.against_eager.within and self.against_eager_on_our_keys.within

    def rows(self) -> Iterator[str]:
        ours = f"ours, {self.kv_cache_dtype}"
        yield (
            f"{format_row(ours, 'eager', self.against_eager)} {self.num_greedy_same:6} of "
            f"{self.num_greedy:<5} {self.perplexity:8.2f} {self.eager_perplexity:9.2f} "
            f"{100 * self.other_keys:8.2f} %"
        )
        yield format_row(ours, "eager, our keys", self.against_eager_on_our_keys)
        yield format_row("eager, bf16 model", "eager", self.eager_in_bf16, is_judged=False)


HEADER = """\
logits of         against         largest     rms same top   bound    where clear         \
greedy tokens  perplexity, eager's  other keys"""


def format_row(name: str, other: str, row: Comparison, *, is_judged: bool = True) -> str:
    text = (
        f"{name:17} {other:15} {100 * row.largest:5.2f} % {100 * row.rms:5.2f} % "
        f"{100 * row.same_top:6.2f} %"
    )
    if not is_judged:
        return text
    return (
        f"{text} {100 * row.bound:5.1f} % {row.num_clear_same:5} of {row.num_clear:<5}"
        f"{'within' if row.within else 'MISSED'}"
    )


def judge(
    model: DeepseekV32ForCausalLM,
    engine: Engine,
    prompts: list[torch.Tensor],
    greedy: list[torch.Tensor],
    options: argparse.Namespace,
) -> Report:
    """Serves the prompts, then runs Transformers on the same tokens and compares."""
    served = engine.serve(prompts)
    ours = [torch.cat(request.logits) for request in served]
    keys = [visible_only(torch.cat(request.chosen)) for request in served]
    cast(model, torch.bfloat16)
    in_bf16 = [run_eager(model, request.tokens)[0] for request in served]
    cast(model, torch.float32)
    eager = [run_eager(model, request.tokens) for request in served]
    free, masks = [logits for logits, _ in eager], [mask for _, mask in eager]
    pinned = [run_eager(model, r.tokens, its)[0] for r, its in zip(served, keys, strict=True)]

    kv_cache_dtype = engine.kv_cache_dtype
    bound = BOUNDS[kv_cache_dtype]
    eager_in_bf16 = compare(in_bf16, free, bound)
    if options.dtype == "bfloat16":
        bound += eager_in_bf16.largest
    others = [mask & ~as_mask(its) for mask, its in zip(masks, keys, strict=True)]
    generated = [torch.cat(request.generated) for request in served]
    return Report(
        kv_cache_dtype=kv_cache_dtype,
        against_eager=compare(ours, free, bound),
        against_eager_on_our_keys=compare(ours, pinned, bound),
        eager_in_bf16=eager_in_bf16,
        other_keys=count(others) / count(masks),
        num_greedy_same=count(a == b for a, b in zip(generated, greedy, strict=True)),
        num_greedy=sum(map(len, greedy)),
        perplexity=perplexity(ours, prompts),
        eager_perplexity=perplexity(free, prompts),
    )


def count(masks: Iterable[torch.Tensor]) -> int:
    return sum(int(mask.sum()) for mask in masks)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    model, prompts = make_model(options), make_prompts(options)
    lengths = ", ".join(map(str, prompt_lengths(options)))
    print(
        f"{options.layers} layers, {options.heads} heads, top-{options.topk}, {options.dtype} on "
        f"{options.device}; {options.prompts} prompts of {lengths} tokens, {options.new_tokens} "
        f"generated for each\n\n{HEADER}",
        flush=True,
    )
    greedy = continue_greedily(model, prompts, options.new_tokens)
    is_within, steps = True, ""
    for kv_cache_dtype in BOUNDS:
        cast(model, getattr(torch, options.dtype))
        engine = Engine(model, options, kv_cache_dtype)
        report = judge(model, engine, prompts, greedy, options)
        print(*report.rows(), sep="\n", flush=True)
        is_within &= report.within
        steps = (
            f"{engine.num_chunks} chunks of prompts in {engine.num_steps} steps, "
            f"{engine.num_mixed_steps} of them with decodes"
        )
    print(f"\n{steps}\n{'within the bounds' if is_within else 'OUTSIDE THE BOUNDS'}")
    return 0 if is_within else 1


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--device", type=torch.device, default="cpu", help="cpu, cuda or cuda:N (%(default)s)")
    add("--dtype", choices=["float32", "bfloat16"], default="float32", help="of activations")
    add("--layers", type=int, default=3, help="the first one without experts (%(default)s)")
    add("--heads", type=int, default=32, help="attention heads, 4 to 128 (%(default)s)")
    add("--topk", type=int, default=128, help="keys that the indexer chooses (%(default)s)")
    add("--prompts", type=int, default=8, help="requests (%(default)s)")
    add("--longest", type=int, default=701, help="tokens of the longest prompt (%(default)s)")
    add("--new-tokens", type=int, default=64, help="generated per request (%(default)s)")
    add("--tokens-per-step", type=int, default=256, help="the engine's budget (%(default)s)")
    add("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.tokens_per_step < options.prompts:
        parser.error("--tokens-per-step must be at least --prompts: decodes are never put off")
    return options


if __name__ == "__main__":
    sys.exit(main())
