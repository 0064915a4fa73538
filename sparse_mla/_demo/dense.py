"""What `--dense` changes: the engine runs a dense layer, and a step is judged by its values.

The layer turns queries and keys by RoPE, writes the cache, and attends to every token up to the
query's own, so this engine has no indexer, and no query of its own to absorb.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import sparse_mla
from sparse_mla import dense
from sparse_mla._demo.check import Checker
from sparse_mla._demo.engine import Engine, StepResult
from sparse_mla._demo.memory import Memory
from sparse_mla._demo.model import HEAD_DIM, SOFTMAX_SCALE, ToyModel
from sparse_mla._demo.scheduler import Batch
from sparse_mla._judge import BF16, Fractions, exact_rows, judge_values


def make_config(fields: dict[str, Any], topk: int) -> dense.Config:
    """The judge knows absorbed attention, which is path "mixed"."""
    return dense.Config(softmax_scale=SOFTMAX_SCALE, **fields | {"path": "mixed"})


class DenseEngine(Engine):
    def __init__(
        self, model: ToyModel, config: dense.Config, num_pages: int, memory: Memory
    ) -> None:
        super().__init__(model, config, num_pages, memory)
        num_tokens = config.max_num_batched_tokens
        self.rope_table = memory.put(sparse_mla.rope_table(config.max_model_len))
        self.builder = dense.MetadataBuilder(config)
        self.layer = dense.DenseMLA(
            config, kv_b_proj=memory.put(model.kv_b_proj), rope_table=self.rope_table
        )
        self.values = memory.zeros((num_tokens, model.num_heads, HEAD_DIM), BF16)

    def project(self, text: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, ...]:
        """kv_c, k_pe, q_nope, q_pe."""
        keys = self.model.keys(text, positions, has_rope=False)
        return (*keys, *self.model.queries(text, positions, has_rope=False))

    def run_layer(
        self, metadata: dense.Metadata, *inputs: Any
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        kv_c, k_pe, q_nope, q_pe = inputs
        q = q_nope, q_pe
        values = self.layer.forward(
            q, kv_c, k_pe, self.kv_cache, metadata, out=self.values[: len(kv_c)]
        )
        return values, q, {"out": values}


class DenseChecker(Checker):
    """Judges values [H, 128] of a token by all cache rows up to it."""

    engine: DenseEngine
    has_lse = False

    def check_step(self, batch: Batch, result: StepResult) -> None:
        engine, memory = self.engine, self.engine.memory
        get = memory.get
        # The layer turns and absorbs queries by these two operators, so it has the same bits.
        q_nope, q_pe = map(memory.put, result.q)
        ql_nope = sparse_mla.k_up_proj(q_nope, engine.layer.W_UK)
        turned = memory.zeros(q_pe.shape, BF16)
        positions = result.metadata.input_positions
        sparse_mla.apply_rope(positions, q_pe, None, engine.rope_table, q_out=turned)
        self.q = np.concatenate([get(ql_nope), get(turned)], axis=2)
        self.w_uv = get(engine.layer.W_UV)
        super().check_step(batch, result)

    def check_gather(self, batch: Batch, result: StepResult) -> None:
        """A dense layer gathers nothing: it reads the cache itself."""

    def check_token(self, batch: Batch, result: StepResult, request_idx: int, token: int) -> None:
        request, _, positions = batch.parts()[request_idx]
        position = positions[token - batch.query_start_loc[request_idx]]
        rows = self.cache_rows(request, np.arange(position + 1))
        values, allowed = result.out[token], self.allowed(rows)
        judged = judge_values(self.q[token], exact_rows(rows), self.w_uv, values, **allowed)
        self.fractions.setdefault(self.describe(result, token), Fractions()).add(judged)
