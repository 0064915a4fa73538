"""The models of Transformers that context_parallel.py serves: a rank has the whole model, and its
own share of the caches. A module of it, not a script."""

from __future__ import annotations

import argparse
from typing import Any

import deepseek_v3
import deepseek_v32
import torch

import sparse_mla
from sparse_mla.integrations.transformers import ModelRunner

PAGE_SIZE = 16
VOCABULARY = 256
TOPK = 32  # keys that the indexer of DeepSeek-V3.2 chooses, fewer than the prompts have
BOUNDS = {"auto": 0.03, "fp8_ds_mla": 0.10}  # standard deviations of the logits


def make_model(options: argparse.Namespace, device: str) -> Any:
    """A small model with random weights, the same in every process."""
    sizes = [f"--layers={options.layers}", f"--heads={options.heads}", f"--device={device}"]
    if options.model == "deepseek_v3":
        return deepseek_v3.make_model(deepseek_v3.parse(sizes))
    return deepseek_v32.make_model(deepseek_v32.parse([*sizes, f"--topk={TOPK}"]))


class Served:
    """A model with the caches of some requests, or with a rank's share of these caches."""

    def __init__(
        self,
        model: Any,
        options: argparse.Namespace,
        ranks: Any,  # context_parallel.Ranks
        requests: int,
        longest: int,
    ) -> None:
        self.ranks, self.device, self.bound = ranks, model.device, BOUNDS[options.kv_cache_dtype]
        self.lens = torch.zeros(requests, dtype=torch.int32)
        # No rank has more tokens than the first.
        first = None if ranks.cp is None else (0, *ranks.cp[1:])
        own = sparse_mla.cp_local_lengths(torch.tensor([longest], dtype=torch.int32), cp=first)
        self.runner = ModelRunner(
            model,
            num_pages=requests * -(-int(own) // PAGE_SIZE),
            max_num_seqs=requests,
            max_num_batched_tokens=requests * options.chunk,
            max_model_len=longest,
            block_size=PAGE_SIZE,
            kv_cache_dtype=options.kv_cache_dtype,
            index_cache_dtype=options.index_cache_dtype,
            cp=ranks.cp,
            exchange=None if ranks.cp is None else ranks.gather,
        )

    def step(self, tokens: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Runs `counts` new tokens of each request; returns the logits of each request's last, and
        zeros where there is no new one."""
        parts = dict(enumerate(tokens.split(counts)))
        new = {request: part for request, part in parts.items() if len(part)}
        logits = torch.zeros(len(counts), VOCABULARY, device=self.device)
        logits[list(new)] = self.runner.step(new)
        self.lens += torch.tensor(counts, dtype=torch.int32)
        return logits
