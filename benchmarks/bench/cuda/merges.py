"""Merges of partial attention results on a CUDA device, as moves of memory.py."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import sparse_mla
from bench.common.moves import Move
from bench.cuda.inputs import sample
from bench.cuda.timing import DEVICE, torch

MERGE_SHAPE = (2048, 128, 512)
PARTIALS_SHAPE = (128, 128, 512)
NUM_BUFFERS = 4  # more than the calls of a replay


def is_merged(outs: torch.Tensor, lses: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> bool:
    """Compares with fp64, within one rounding of out to bf16 and a few of lse in fp32."""
    tokens = sample(len(out))
    exact_lse = torch.logsumexp(lses[:, tokens].double(), 0)
    weights = (lses[:, tokens].double() - exact_lse).exp()[..., None]
    parts = weights * outs[:, tokens].double()
    exact, magnitude = parts.sum(0), parts.abs().sum(0)
    out_error = (out[tokens].double() - exact).abs() - 2 * 2.0**-9 * (magnitude + exact.abs())
    lse_error = (lse[tokens].double() - exact_lse).abs()
    lse_error -= 16 * 2.0**-24 * (1 + exact_lse.abs())
    return bool((out_error <= 1e-6).all()) and bool((lse_error <= 1e-6).all())


def move_merged() -> Iterator[Move]:
    outs = torch.randn((2, *MERGE_SHAPE), device=DEVICE).bfloat16()
    lses = torch.randn((2, *MERGE_SHAPE[:2]), device=DEVICE)
    out, lse = torch.zeros_like(outs[0]), torch.zeros_like(lses[0])

    def call() -> object:
        return sparse_mla.merge_attn_states(outs[0], lses[0], outs[1], lses[1], out=out, lse=lse)

    num_bytes = 3 * out.nbytes + 3 * lse.nbytes
    yield Move("merge_attn_states, bf16", call, num_bytes, lambda: is_merged(outs, lses, out, lse))


def move_partials() -> Iterator[Move]:
    """The parts of 8 ranks of context parallelism in a decode, in one array and in a list."""
    outs = torch.randn((8, *PARTIALS_SHAPE), device=DEVICE).bfloat16()
    lses = torch.randn((8, *PARTIALS_SHAPE[:2]), device=DEVICE)
    out, lse = torch.zeros_like(outs[0]), torch.zeros_like(lses[0])
    num_bytes = outs.nbytes + lses.nbytes + out.nbytes + lse.nbytes
    for kind, parts in ("an array", (outs, lses)), ("a list", (list(outs), list(lses))):

        def call(parts: Any = parts) -> object:
            return sparse_mla.merge_attn_partials(*parts, out=out, lse=lse)

        yield Move(
            f"merge_attn_partials, bf16, 8 parts, {kind}",
            call,
            num_bytes,
            lambda: is_merged(outs, lses, out, lse),
        )


def move_rank_partials() -> Iterator[Move]:
    """What a rank of 4 merges in a decode: its heads or all, and its heads as all_to_all gives them
    if attention has written heads in front of tokens. Calls in a row have arrays of their own,
    because those of one call fit in the L2 cache."""
    num_tokens, all_heads, value_dim = PARTIALS_SHAPE
    for num_heads, order in ((all_heads // 4, ""), (all_heads, ""), (all_heads // 4, " in front")):
        shape = (num_heads, num_tokens) if order else (num_tokens, num_heads)
        calls = []
        for _ in range(NUM_BUFFERS):
            outs = torch.randn((4, *shape, value_dim), device=DEVICE).bfloat16()
            lses = torch.randn((4, *shape), device=DEVICE)
            parts = (outs.transpose(1, 2), lses.transpose(1, 2)) if order else (outs, lses)
            out = torch.zeros((num_tokens, num_heads, value_dim), dtype=outs.dtype, device=DEVICE)
            calls.append((*parts, out, torch.zeros(out.shape[:2], device=DEVICE)))
        turn = itertools.cycle(calls)

        def call(turn: Iterator[Any] = turn) -> object:
            outs, lses, out, lse = next(turn)
            return sparse_mla.merge_attn_partials(outs, lses, out=out, lse=lse)

        def is_right(first: Any = calls[0]) -> bool:
            return is_merged(*first)

        num_bytes = sum(x.nbytes for x in calls[0])
        name = f"merge_attn_partials, 4 parts, {num_heads} heads{order}"
        yield Move(name, call, num_bytes, is_right)
