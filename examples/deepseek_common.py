"""What deepseek_v3.py, deepseek_v32.py and deepseek_v4.py share: prompts, a serving engine, and the
comparison with Transformers' eager attention. It is a module of theirs, not a script."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, ClassVar, Literal

import torch

from sparse_mla.integrations.transformers import ModelRunner

Format = Literal["bfloat16", "fp8_ds_mla", "fp8_v4"]
# of the standard deviation of eager's logits
BOUNDS: dict[Format, float] = {"bfloat16": 0.02, "fp8_ds_mla": 0.10}

BLOCK_SIZE = 64  # tokens per page

# Sizes of the small models, whose tokens are bytes. Sizes that are not here are the real ones.
# Every token uses all experts, because routing is a discontinuous choice and no part of sparse_mla.
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "bos_token_id": None,
    "eos_token_id": None,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}


# --- the model -----------------------------------------------------------------------------------


def draw_weights(model: Any, generator: torch.Generator) -> None:
    """Draws random weights: embeddings and projections have unit variance, what is added to the
    residual stream has a sixteenth of that. Weights of norms stay one."""
    for name, weight in model.named_parameters():
        if weight.ndim > 1:
            std = 1 if "embed" in name else weight.shape[-1] ** -0.5
            weight.normal_(0, std, generator=generator)
        if "o_proj" in name or "down_proj" in name:
            weight *= 0.25


def round_weights(model: Any) -> None:
    """Makes every weight a bf16 number, whatever its dtype."""
    for weight in model.parameters():
        weight.copy_(weight.bfloat16())


def cast(model: Any, dtype: torch.dtype, *, keeps_fp32: bool = True) -> None:
    """Casts the weights alone; with keeps_fp32 without those that are always fp32. The buffers of
    RoPE stay fp32, as Transformers loads them."""
    in_fp32 = set((keeps_fp32 and model._keep_in_fp32_modules_strict) or ())
    for name, weight in model.named_parameters():
        if in_fp32.isdisjoint(name.split(".")):
            weight.data = weight.data.to(dtype)


# --- serving -------------------------------------------------------------------------------------


@dataclass
class Request:
    prompt: torch.Tensor  # [n]
    generated: list[torch.Tensor] = field(default_factory=list)  # [1] each
    logits: list[torch.Tensor] = field(default_factory=list)  # [tokens, vocab] of each step
    num_computed: int = 0

    def next_tokens(self, budget: int) -> torch.Tensor:
        if self.generated:
            return self.generated[-1]
        return self.prompt[self.num_computed : self.num_computed + budget]

    def advance(self, logits: torch.Tensor) -> None:
        self.logits.append(logits)
        self.num_computed += len(logits)
        if self.num_computed >= len(self.prompt):
            self.generated.append(logits[-1:].argmax(dim=-1))

    @property
    def tokens(self) -> torch.Tensor:
        """All tokens that went through the model. The last generated token did not."""
        return torch.cat([self.prompt, *self.generated[:-1]])


class Engine:
    """Continuous batching: decodes come first, and prompts share the rest of a step's budget."""

    bounds: ClassVar[dict[Format, float]] = BOUNDS
    block_size = BLOCK_SIZE

    def __init__(self, model: Any, options: argparse.Namespace, kv_cache_dtype: Format) -> None:
        self.model = model
        self.options = options
        self.kv_cache_dtype: Format = kv_cache_dtype
        lengths = [length + options.new_tokens for length in prompt_lengths(options)]
        self.runner = ModelRunner(
            model,
            num_pages=sum(-(-length // self.block_size) for length in lengths),
            max_num_seqs=len(lengths),
            max_num_batched_tokens=options.tokens_per_step,
            max_model_len=max(lengths),
            block_size=self.block_size,
            kv_cache_dtype=kv_cache_dtype,
            **self.more_options(),
        )
        self.num_steps = self.num_mixed_steps = self.num_chunks = 0

    def more_options(self) -> dict[str, Any]:
        """Other options of the runner."""
        return {}

    def summary(self) -> str:
        return (
            f"{self.num_chunks} chunks of prompts in {self.num_steps} steps, "
            f"{self.num_mixed_steps} of them with decodes"
        )

    def serve(self, prompts: list[torch.Tensor]) -> list[Request]:
        requests = [Request(prompt) for prompt in prompts]
        running = dict(enumerate(requests))
        while running:
            step = self.plan(running)
            logits = self.run(step)
            lengths = [len(tokens) for tokens in step.values()]
            for name, rows in zip(step, logits.split(lengths), strict=True):
                self.advance(name, running[name], step[name], rows)
                if len(running[name].generated) == self.options.new_tokens:
                    del running[name]
                    self.runner.free(name)
        return requests

    def advance(
        self, name: int, request: Request, tokens: torch.Tensor, logits: torch.Tensor
    ) -> None:
        request.advance(logits)

    def plan(self, running: dict[int, Request]) -> dict[int, torch.Tensor]:
        step, budget = {}, self.options.tokens_per_step
        for name in sorted(running, key=lambda name: not running[name].generated):
            tokens = self.next_tokens(name, running[name], budget)
            if len(tokens):
                step[name] = tokens
                budget -= len(tokens)
        prefills = [name for name in step if not running[name].generated]
        self.num_steps += 1
        self.num_chunks += len(prefills)
        self.num_mixed_steps += 0 < len(prefills) < len(step)
        # A prompt's last token, if alone, counts as a decode: the runner puts it among the decodes.
        return dict(sorted(step.items(), key=lambda item: len(item[1]) > 1))

    def next_tokens(self, name: int, request: Request, budget: int) -> torch.Tensor:
        return request.next_tokens(budget)

    def run(self, step: dict[int, torch.Tensor]) -> torch.Tensor:
        """-> logits [tokens, vocab]"""
        return self.runner.step(step, all_logits=True).float()


# --- comparison ----------------------------------------------------------------------------------


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


@dataclass
class Report:
    """How far the logits with a cache of one format are from eager's."""

    kv_cache_dtype: Format
    against_eager: Comparison
    eager_in_bf16: Comparison  # Transformers' own rounding, not judged
    num_greedy_same: int
    num_greedy: int
    perplexity: float
    eager_perplexity: float

    @property
    def within(self) -> bool:
        return self.against_eager.within

    def rows(self) -> Iterator[str]:
        ours = f"ours, {self.kv_cache_dtype}"
        yield (
            f"{format_row(ours, 'eager', self.against_eager)} {self.num_greedy_same:6} of "
            f"{self.num_greedy:<5} {self.perplexity:8.2f} {self.eager_perplexity:9.2f}"
        )
        yield format_row("eager, bf16 model", "eager", self.eager_in_bf16, is_judged=False)


HEADER = """\
logits of         against         largest     rms same top   bound    where clear         \
greedy tokens  perplexity, eager's"""


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


def report_fields(
    engine: Engine,
    served: list[Request],
    eager: list[torch.Tensor],
    in_bf16: list[torch.Tensor],
    greedy: list[torch.Tensor],
) -> dict[str, Any]:
    """The fields of a Report, from every request's logits by eager in fp32 and in bf16."""
    ours = [torch.cat(request.logits) for request in served]
    prompts = [request.prompt for request in served]
    generated = [torch.cat(request.generated) for request in served]
    bound = engine.bounds[engine.kv_cache_dtype]
    eager_in_bf16 = compare(in_bf16, eager, bound)
    if engine.options.dtype == "bfloat16":
        bound += eager_in_bf16.largest
    return {
        "kv_cache_dtype": engine.kv_cache_dtype,
        "against_eager": compare(ours, eager, bound),
        "eager_in_bf16": eager_in_bf16,
        "num_greedy_same": count(a == b for a, b in zip(generated, greedy, strict=True)),
        "num_greedy": sum(map(len, greedy)),
        "perplexity": perplexity(ours, prompts),
        "eager_perplexity": perplexity(eager, prompts),
    }


def count(masks: Iterable[torch.Tensor]) -> int:
    return sum(int(mask.sum()) for mask in masks)


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


Judge = Callable[[Any, Any, list[torch.Tensor], list[torch.Tensor]], Report]


def run(
    title: str,
    header: str,
    model: Any,
    options: argparse.Namespace,
    engine_class: type[Engine],
    judge: Judge,
) -> int:
    """Serves the prompts with a cache of each format, prints the table, and returns the exit
    status. judge(model, engine, prompts, greedy) makes a format's report."""
    prompts = make_prompts(options)
    lengths = ", ".join(map(str, prompt_lengths(options)))
    print(
        f"{title}, {options.dtype} on {options.device}; {options.prompts} prompts of {lengths} "
        f"tokens, {options.new_tokens} generated for each\n\n{header}",
        flush=True,
    )
    greedy = continue_greedily(model, prompts, options.new_tokens)
    is_within, steps = True, ""
    for kv_cache_dtype in engine_class.bounds:
        cast(model, getattr(torch, options.dtype))
        engine = engine_class(model, options, kv_cache_dtype)
        report = judge(model, engine, prompts, greedy)
        print(*report.rows(), sep="\n", flush=True)
        is_within &= report.within
        steps = engine.summary()
    print(f"\n{steps}\n{'within the bounds' if is_within else 'OUTSIDE THE BOUNDS'}")
    return 0 if is_within else 1


def make_parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    add = parser.add_argument
    add("--device", type=torch.device, default="cpu", help="cpu, cuda or cuda:N (%(default)s)")
    add("--dtype", choices=["float32", "bfloat16"], default="float32", help="of activations")
    add("--layers", type=int, default=3, help="the first one without experts (%(default)s)")
    add("--heads", type=int, default=32, help="attention heads, 4 to 128 (%(default)s)")
    add("--prompts", type=int, default=8, help="requests (%(default)s)")
    add("--longest", type=int, default=701, help="tokens of the longest prompt (%(default)s)")
    add("--new-tokens", type=int, default=64, help="generated per request (%(default)s)")
    add("--tokens-per-step", type=int, default=256, help="the engine's budget (%(default)s)")
    add("--seed", type=int, default=0)
    return parser


def parse_with(parser: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    options = parser.parse_args(arguments)
    if options.tokens_per_step < options.prompts:
        parser.error("--tokens-per-step must be at least --prompts: decodes are never put off")
    return options
