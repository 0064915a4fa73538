"""Context parallelism: the caches of requests split over processes, by torch.distributed.

    torchrun --nproc-per-node 2 examples/context_parallel.py                    on CPUs, by gloo
    torchrun --nproc-per-node 4 examples/context_parallel.py --device cuda      a GPU each, by NCCL
    python examples/context_parallel.py                                         one process
    torchrun --nproc-per-node 2 examples/context_parallel.py --model deepseek_v32

A small model of MLA layers with random weights continues prompts greedily: prefills in chunks, then
decodes, all as one batch. Runs of `--interleave` tokens of a request are dealt to the ranks in
turn, so a rank holds one part of each cache, and one part of the heads' weights. A layer does this:

    project       a rank makes the queries of its own heads, and all ranks gather those of all heads
    write         every rank turns the new keys; the owner of a token has a slot for it, others -1
    attend        `mla_attention(cp=...)`: all heads, the rank's own keys -> (out, lse)
    exchange      all_to_all: a rank gets all ranks' parts of its own heads. Attention writes heads
                  in front of tokens, which is the order of the buffer that is sent
    merge         `merge_attn_partials` in the order of ranks, from the buffer that was received
    project back  v_up_proj and the output projection of the rank's heads, summed by all_reduce

With `--exchange all_gather` every rank gets the parts of all heads, as a list, and merges its own.

With `--model deepseek_v3` or `deepseek_v32` the model is one of Transformers, and `ModelRunner`
does all this: a rank has the whole model, all heads included, and its share of the caches. The
runner is given an all_gather, by which ranks exchange parts, and what their indexers chose.

At the end each rank runs the same tokens alone, with whole caches, and compares. The exit status is
1 if a token is not the one that this run chooses, by more than rounding explains. A rank that is
lost makes the others fail: at once where its connections close, else after `--timeout` seconds.
"""

from __future__ import annotations

import argparse
import datetime
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

import sparse_mla

HIDDEN, VOCABULARY, LATENT, NOPE, ROPE, VALUE = 256, 512, 512, 64, 64, 64
SCALE = (NOPE + ROPE) ** -0.5
PAGE_SIZE = 16
BOUND = 0.03  # standard deviations of the logits


def normalise(x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


class Weights:
    """Those of the whole model, the same in every process. A rank uses those of its heads."""

    def __init__(self, layers: int, heads: int, device: str) -> None:
        random = torch.Generator().manual_seed(0)

        def draw(*shape: int, fan_in: int = HIDDEN) -> torch.Tensor:
            return (torch.randn(shape, generator=random) * fan_in**-0.5).to(device)

        self.embedding = draw(VOCABULARY, HIDDEN, fan_in=1)
        self.layers = [
            {
                "q": draw(HIDDEN, heads, NOPE + ROPE),
                "kv": draw(HIDDEN, LATENT + ROPE),
                "w_uk": draw(LATENT, heads, NOPE, fan_in=NOPE).bfloat16(),
                "w_uv": draw(LATENT, heads, VALUE, fan_in=LATENT).bfloat16(),
                "o": draw(heads, VALUE, HIDDEN, fan_in=heads * VALUE),
                "up": draw(HIDDEN, 2 * HIDDEN),
                "down": draw(2 * HIDDEN, HIDDEN, fan_in=2 * HIDDEN),
            }
            for _ in range(layers)
        ]


class Ranks:
    """What this process has of the caches and of the heads; None is a run of one process."""

    cp: tuple[int, int, int] | None

    def __init__(self, interleave: int | None, heads: int, exchange: str = "all_to_all") -> None:
        self.rank, self.size, self.cp, self.exchange = 0, 1, None, exchange
        if interleave is not None:
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            self.cp = (self.rank, self.size, interleave)
        self.own = slice(self.rank * heads // self.size, (self.rank + 1) * heads // self.size)

    def gather_heads(self, x: torch.Tensor) -> torch.Tensor:
        """[T, heads of a rank, ...] of every rank -> [T, all heads, ...]"""
        if self.size == 1:
            return x
        return torch.cat(self.gather(x.contiguous()), 1)

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x)
        return parts

    def find_parts(self, x: torch.Tensor) -> torch.Tensor | list[torch.Tensor]:
        """[all heads, T, ...] of this rank's keys -> ranks times [T, own heads, ...] of all keys.
        Nothing is transposed: these are views of what was received."""
        if self.size > 1 and self.exchange == "all_gather":
            return [part[self.own].transpose(0, 1) for part in self.gather(x)]
        received = x
        if self.size > 1:
            received = torch.empty_like(x)
            dist.all_to_all_single(received.view(torch.uint8), x.view(torch.uint8))
        return received.unflatten(0, (self.size, -1)).transpose(1, 2)

    def add(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' parts, on every rank."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """The best tokens, as rank 0 has them."""
        tokens = logits.argmax(-1)
        if self.size > 1:
            dist.broadcast(tokens, 0)
        return tokens


class Engine(Protocol):
    """A model with the caches of some requests, or with a rank's share of these caches."""

    ranks: Ranks
    device: torch.device
    bound: float
    lens: torch.Tensor  # the requests' lengths

    def step(self, tokens: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Runs `counts` new tokens of each request; returns the logits of each request's last.
        Those of a request without a new token are of no use."""
        ...


class Model:
    """The Engine of the small model."""

    bound = BOUND

    def __init__(self, weights: Weights, ranks: Ranks, requests: int, longest: int) -> None:
        self.weights, self.ranks, self.device = weights, ranks, weights.embedding.device
        self.lens = torch.zeros(requests, dtype=torch.int32, device=self.device)
        most = torch.full((1,), longest, dtype=torch.int32, device=self.device)
        own = sparse_mla.cp_local_lengths(most, cp=ranks.cp)
        pages = -(-int(own) // PAGE_SIZE) or 1
        shuffled = torch.randperm(requests * pages, generator=torch.Generator().manual_seed(1))
        self.table = shuffled.view(requests, pages).int().to(self.device)
        shape = (requests * pages, PAGE_SIZE, LATENT + ROPE)
        self.caches = [
            torch.zeros(shape, dtype=torch.bfloat16, device=self.device) for _ in weights.layers
        ]
        self.rope = torch.from_numpy(sparse_mla.rope_table(longest, ROPE)).to(self.device)

    def find_slots(self, requests: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The slots of new tokens, -1 where another rank has the token."""
        local = sparse_mla.cp_local_positions(positions, cp=self.ranks.cp)
        pages = self.table[requests, local.clamp(min=0) // PAGE_SIZE]
        return torch.where(local < 0, -1, pages * PAGE_SIZE + local % PAGE_SIZE)

    def step(self, tokens: torch.Tensor, counts: list[int]) -> torch.Tensor:
        number = torch.tensor(counts, device=self.device)
        starts = torch.cat([number.new_zeros(1), number.cumsum(0)]).int()
        requests = torch.arange(len(counts), device=self.device).repeat_interleave(number)
        inside = torch.arange(len(tokens), device=self.device) - starts[requests]
        positions = self.lens[requests].long() + inside
        slots = self.find_slots(requests, positions)
        self.lens += number.int()
        x = self.weights.embedding[tokens]
        for weights, cache in zip(self.weights.layers, self.caches, strict=True):
            x = x + self.attend(normalise(x), weights, cache, positions, slots, starts)
            up = torch.nn.functional.gelu(normalise(x) @ weights["up"])
            x = x + up @ weights["down"]
        return normalise(x[starts[1:] - 1]) @ self.weights.embedding.T

    def attend(
        self,
        x: torch.Tensor,
        weights: dict[str, torch.Tensor],
        cache: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        starts: torch.Tensor,
    ) -> torch.Tensor:
        ranks, own = self.ranks, self.ranks.own
        kv_c, k_pe = (x @ weights["kv"]).bfloat16().split([LATENT, ROPE], -1)
        kv_c = normalise(kv_c.float()).bfloat16()
        q = torch.einsum("td,dhn->thn", x, weights["q"][:, own]).bfloat16()
        q_nope, q_pe = q.split([NOPE, ROPE], -1)
        q_pe, _ = sparse_mla.rope_and_cache_mla(
            positions, q_pe.contiguous(), k_pe.contiguous(), self.rope, kv_c, cache, slots
        )
        latent = sparse_mla.k_up_proj(q_nope.contiguous(), weights["w_uk"][:, own].contiguous())
        query = ranks.gather_heads(torch.cat([latent, q_pe], -1))
        num_tokens, heads, _ = query.shape
        out = query.new_empty(heads, num_tokens, LATENT)
        lse = query.new_empty(heads, num_tokens, dtype=torch.float32)
        sparse_mla.mla_attention(
            query,
            cache,
            self.table,
            self.lens,
            cu_seqlens_q=starts,
            softmax_scale=SCALE,
            causal=True,
            cp=ranks.cp,
            out=out.transpose(0, 1),
            lse=lse.T,
        )
        merged, _ = sparse_mla.merge_attn_partials(ranks.find_parts(out), ranks.find_parts(lse))
        values = sparse_mla.v_up_proj(merged, weights["w_uv"][:, own].contiguous())
        return ranks.add(torch.einsum("thv,hvd->td", values.float(), weights["o"][own]))


def feed(model: Engine, prompts: list[list[int]], chunk: int) -> torch.Tensor:
    """Prefills in chunks of up to `chunk` tokens per request; returns the last tokens' logits."""
    logits = torch.zeros(1, device=model.device)
    for first in range(0, max(map(len, prompts)), chunk):
        parts = [prompt[first : first + chunk] for prompt in prompts]
        tokens = torch.tensor([x for part in parts for x in part], device=model.device)
        some = torch.tensor([bool(part) for part in parts], device=model.device)
        logits = torch.where(
            some[:, None], model.step(tokens, [len(part) for part in parts]), logits
        )
    return logits


def generate(model: Engine, prompts: list[list[int]], options: argparse.Namespace) -> torch.Tensor:
    """The tokens that follow the prompts, [requests, new tokens]."""
    ranks = model.ranks
    chosen = [ranks.choose(feed(model, prompts, options.chunk))]
    for step in range(1, options.new_tokens):
        if step == options.lose_rank_at and ranks.rank == ranks.size - 1:
            os.kill(os.getpid(), getattr(signal, f"SIG{options.lose_by}"))
        chosen.append(ranks.choose(model.step(chosen[-1], [1] * len(prompts))))
    return torch.stack(chosen, 1)


def judge(
    model: Engine, prompts: list[list[int]], tokens: torch.Tensor, chunk: int
) -> tuple[int, int]:
    """Runs the same tokens in one process. Returns how many of them are not the best there, but
    nearly, and how many are worse."""
    logits, num_near, num_wrong = feed(model, prompts, chunk), 0, 0
    for i, column in enumerate(tokens.T):
        given = logits.gather(1, column[:, None])[:, 0]
        behind = (logits.max(-1).values - given) / logits.std(-1)
        num_near += int(((behind > 0) & (behind <= model.bound)).sum())
        num_wrong += int((behind > model.bound).sum())
        if i + 1 < tokens.shape[1]:
            logits = model.step(column, [1] * len(prompts))
    return num_near, num_wrong


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    models = ["small", "deepseek_v3", "deepseek_v32"]
    parser.add_argument("--model", default="small", choices=models)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--longest-prompt", type=int, default=150)
    parser.add_argument("--new-tokens", type=int, default=50)
    parser.add_argument("--chunk", type=int, default=64, help="prompt tokens per step")
    parser.add_argument("--interleave", type=int, default=16, help="neighbouring tokens of a rank")
    parser.add_argument("--exchange", default="all_to_all", choices=["all_to_all", "all_gather"])
    formats = ["auto", "fp8_ds_mla"]
    parser.add_argument("--kv-cache-dtype", default="auto", choices=formats, help="not of small")
    formats = ["auto", "fp8_index", "mxfp4_index"]
    parser.add_argument("--index-cache-dtype", default="auto", choices=formats, help="of V3.2")
    parser.add_argument("--timeout", type=float, default=60, help="seconds for one exchange")
    parser.add_argument(
        "--lose-rank-at", type=int, default=-1, help="the step at which the last rank is lost"
    )
    parser.add_argument("--lose-by", default="KILL", choices=["KILL", "STOP"], help="its signal")
    return parser.parse_args(arguments)


def choose_model(options: argparse.Namespace, device: str) -> tuple[Callable[..., Engine], int]:
    """Engine(ranks, requests, longest) of the model, and the size of its vocabulary."""
    if options.model == "small":
        return partial(Model, Weights(options.layers, options.heads, device)), VOCABULARY
    import context_parallel_models as models  # needs Transformers

    return partial(models.Served, models.make_model(options, device), options), models.VOCABULARY


def main() -> int:
    options = parse()
    if "RANK" not in os.environ:  # without torchrun: one process
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ.setdefault("MASTER_PORT", "0")
    device = options.device
    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if options.device == "cuda" else "gloo",
        timeout=datetime.timedelta(seconds=options.timeout),
    )
    rank, size = dist.get_rank(), dist.get_world_size()
    if options.heads % size:
        sys.exit(f"context_parallel: --heads must be a multiple of {size} ranks")
    random = np.random.default_rng(2)
    lens = random.integers(1, options.longest_prompt + 1, options.requests)
    make, vocabulary = choose_model(options, device)
    prompts = [random.integers(0, vocabulary, n).tolist() for n in lens]
    longest = options.longest_prompt + options.new_tokens
    ranks = Ranks(options.interleave, options.heads, options.exchange)
    split = make(ranks, len(prompts), longest)
    alone = make(Ranks(None, options.heads), len(prompts), longest)
    tokens = generate(split, prompts, options)
    num_near, num_wrong = judge(alone, prompts, tokens, options.chunk)
    rows = [int(x) for x in sparse_mla.cp_local_lengths(split.lens, cp=split.ranks.cp)]
    print(
        f"rank {rank} of {size}: {tokens.numel()} tokens, {num_near} nearly as good as one "
        f"process's, {num_wrong} wrong; cache rows {rows} of {split.lens.tolist()}",
        flush=True,
    )
    dist.destroy_process_group()
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
