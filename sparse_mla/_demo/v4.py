"""What `--v4` changes: a layer of DeepSeek V4 with compress ratio 4, from hidden states to values.

A query sees the last 128 tokens and the compressed rows that an indexer chooses. Compressed rows
and the indexer's keys stay, so they are in the pages that the scheduler gives to a request. Rows of
the window, and the states that compressed rows are made of, are needed for a short time only: each
request has a ring of pages for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

import sparse_mla
from sparse_mla import v4
from sparse_mla._demo.check import Checker
from sparse_mla._demo.engine import Engine, StepResult
from sparse_mla._demo.memory import Memory
from sparse_mla._demo.model import INDEX_DIM
from sparse_mla._demo.scheduler import Batch, Request
from sparse_mla._demo.v4_model import BYTE_DIM, HEAD_SIZE, RATIO, V4Model
from sparse_mla._judge import BF16, Fractions, exact_v4_rows, inverse_rope, judge_values
from sparse_mla.v4.checks import ALL_PROJECTIONS


def make_config(fields: dict[str, Any], topk: int) -> v4.Config:
    """A top-k above the rows that a request has means all of them."""
    return v4.Config(
        compress_ratios=[RATIO],
        topk_tokens=min(topk, -(-fields["max_model_len"] // RATIO)),
        index_n_heads=RATIO,  # a head for each place in a group
        o_groups=fields["num_heads"],
        swa_block_size=fields["block_size"],
        state_block_sizes={RATIO: fields["block_size"]},
        **fields,
    )


class V4Engine(Engine):
    bf16_row_bytes = 2 * HEAD_SIZE

    def __init__(self, model: V4Model, config: v4.Config, num_pages: int, memory: Memory) -> None:
        super().__init__(model, config, num_pages, memory)
        self.rope_table = sparse_mla.rope_table(config.max_model_len, fp32_angles=True)
        self.weights = model.weights | {"rope_table": self.rope_table}
        weights = v4.Weights(**{name: memory.put(x) for name, x in self.weights.items()})
        self.made: dict[str, Any] = {}  # what the step's projections returned, by name
        projections = {name: self.projection(name) for name in ALL_PROJECTIONS}
        self.builder = v4.MetadataBuilder(config)
        self.layer = v4.SparseMLA(config, RATIO, weights, projections)

    def make_caches(self, num_pages: int) -> None:
        config, zeros = self.config, self.memory.zeros
        size, kv_format = config.block_size, config.kv_cache_dtype
        # A ring has room for what a step's first token sees, and for all tokens of the step.
        self.ring_pages = -(-(config.window - 1 + config.max_num_batched_tokens) // size)
        num_ring_pages = config.max_num_seqs * self.ring_pages
        dtype = np.uint8 if kv_format == "fp8_v4" else BF16
        shape_of = v4.Backend.get_kv_cache_shape
        shape = shape_of(num_pages, size, cache_dtype_str=kv_format, compress_ratio=RATIO)
        index = shape_of(num_pages, size, cache_dtype_str="fp8_index", compress_ratio=RATIO)
        self.kv_cache = zeros(shape, dtype)
        self.caches = v4.Caches(
            swa=zeros(shape_of(num_ring_pages, size, cache_dtype_str=kv_format), dtype),
            compressed=self.kv_cache,
            state=zeros((num_ring_pages, size, 4 * HEAD_SIZE), np.float32),
            index=zeros(index, np.uint8),
            index_state=zeros((num_ring_pages, size, 4 * INDEX_DIM), np.float32),
        )

    def projection(self, name: str) -> Callable[[Any], Any]:
        """The model's projection, in this engine's memory."""

        def project(x: Any) -> Any:
            self.memory.wait()
            start = time.perf_counter()
            made = getattr(self.model, name)(self.memory.get(x).astype(np.float32))
            self.made[name] = self.memory.put(made)
            self.model_seconds += time.perf_counter() - start
            return self.made[name]

        return project

    def project(self, text: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, ...]:
        return (self.model.hidden(text, positions),)

    def ring(self, request: Request, positions: np.ndarray) -> np.ndarray:
        """The pages with the window rows and the states of a request's tokens at `positions`."""
        page = positions // self.config.block_size % self.ring_pages
        return request.name * self.ring_pages + page

    def describe(self, batch: Batch) -> dict[str, Any]:
        size, width = self.config.block_size, batch.block_table.shape[1]
        starts = np.arange(width) * size
        rings = np.stack([self.ring(r, starts) for r in batch.requests]).astype(np.int32)
        slots = [self.ring(r, p) * size + p % size for r, _, p in batch.parts()]
        ringed = replace(batch, slot_mapping=np.concatenate(slots), block_table=rings)
        described = super().describe(ringed)
        pages = {RATIO: self.memory.put(batch.block_table)}
        return described | {"compressed": pages, "states": {RATIO: described["common"].block_table}}

    def run_layer(
        self, metadata: v4.Metadata, *inputs: Any
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        (x,) = inputs
        values, lse = self.layer.forward(x, self.caches, metadata, return_lse=True)
        values = values.reshape(len(x), self.config.num_heads, BYTE_DIM)
        q = self.made["wq_b"]  # normed and turned in place
        return values, (q,), {"out": values, "lse": lse}


class V4Checker(Checker):
    """Judges values [H, 64] and lse of a token by the rows of its window, and those it chose."""

    engine: V4Engine

    def check_step(self, batch: Batch, result: StepResult) -> None:
        engine, m = self.engine, result.metadata
        # The layer chooses by these two operators, so it has the same rows.
        q, weights = sparse_mla.fused_indexer_q_rope_quant(
            engine.made["index_wq_b"],
            engine.made["index_weights_proj"],
            m.positions,
            engine.layer.weights.rope_table,
            softmax_scale=INDEX_DIM**-0.5,
            head_scale=RATIO**-0.5,
        )
        chosen = sparse_mla.lightning_indexer(
            q,
            weights,
            engine.caches.index,
            m.index.context_lens,
            k=engine.config.topk_tokens,
            block_table=m.index.block_table,
            req_id_per_token=m.req_id_per_token,
        )
        self.chosen = engine.memory.get(chosen)
        self.window = engine.memory.get(engine.caches.swa)
        super().check_step(batch, result)

    def check_gather(self, batch: Batch, result: StepResult) -> None:
        """What path "separate" gathers has no rounding: scales are powers of two."""

    def check_token(self, batch: Batch, result: StepResult, request_idx: int, token: int) -> None:
        engine, size = self.engine, self.engine.config.block_size
        request, rows, positions = batch.parts()[request_idx]
        position = positions[token - rows.start]
        seen = np.arange(max(position + 1 - engine.config.window, 0), position + 1)
        window = engine.ring(request, seen) * size + seen % size
        groups = self.chosen[token]
        groups = groups[groups >= 0]
        pages = np.array(request.pages)[groups // (size // RATIO)]
        slots = pages * (size // RATIO) + groups % (size // RATIO)
        keys = exact_v4_rows(self.window, window), exact_v4_rows(self.kv_cache, slots)
        judged = judge_values(
            result.q[0][token],
            np.concatenate(keys),
            engine.weights["wo_a"].transpose(2, 0, 1),
            result.out[token],
            result.lse[token],
            turn=inverse_rope(engine.rope_table[position]),
            sink=engine.weights["attn_sink"],
            **self.allowed(keys[0]),
        )
        self.fractions.setdefault(self.describe(result, token), Fractions()).add(judged)
