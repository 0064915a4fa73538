"""What the tests of the backend layer share: a Config, filled caches, the inputs of a step."""

from __future__ import annotations

from dataclasses import dataclass

import cases
import device
import library
import numpy as np
import reference as ref
import reference_plan

SCALE = (128 + 64) ** -0.5


def config(sparse_mla, *, num_heads=32, fp8=True, **changes):
    """A Config. On a GPU it names the path that a CPU's plan would choose, because a GPU's plan
    chooses another one for small prefills. Only `path=None` leaves the path to the plan."""
    if device.ON_CUDA and sparse_mla is library.sparse_mla and "path" not in changes:
        least = changes.get("min_heads_for_bf16_prefill", 32)
        is_fp8 = changes.get("kv_cache_dtype", "fp8_ds_mla" if fp8 else "auto") == "fp8_ds_mla"
        if isinstance(least, int) and isinstance(num_heads, int):
            changes["path"] = reference_plan.choose_path(num_heads, is_fp8, min_heads=least)
    options = {
        "softmax_scale": SCALE,
        "device": device.NAME if sparse_mla is library.sparse_mla else "cpu",
        "kv_cache_dtype": "fp8_ds_mla" if fp8 else "bfloat16",
        "block_size": 64,
        "topk_tokens": 48,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
        "max_model_len": 512,
        "prefill_workspace_tokens": cases.ENGINE_WORKSPACE,
    } | changes
    return sparse_mla.Config(num_heads, **options)


def engine_batch(**options) -> cases.Batch:
    """The batch ENGINE_* of cases.py: 5 decodes, then 7 prefills that need 3 chunks."""
    return cases.make_batch(cases.ENGINE_QUERY_LENS, cases.ENGINE_SEQ_LENS, **options)


@dataclass
class Step:
    """The inputs of one layer in one step. Pages of the FP8 cache are padded with NaN."""

    batch: cases.Batch
    q: np.ndarray
    topk_indices: np.ndarray
    fp8_cache: np.ndarray
    attn_sink: np.ndarray

    def bf16_cache(self, sparse_mla) -> np.ndarray:
        """A bf16 cache filled from the FP8 one by gather_kv_cache, page by page."""
        pages, block_size = self.fp8_cache.shape[:2]
        cache = np.zeros((pages, block_size, ref.HEAD_DIM), ref.BF16)
        table = np.arange(pages, dtype=np.int32)[:, None]
        lens = np.full(pages, block_size, np.int32)
        starts = np.arange(pages, dtype=np.int32) * np.int32(block_size)
        flat = cache.reshape(-1, ref.HEAD_DIM)
        sparse_mla.gather_kv_cache(self.fp8_cache, table, lens, starts, out=flat)
        return cache

    def reference(self, path, kv, *, decode_threshold=1, sink=True):
        plan = reference_plan.build(
            self.batch,
            path=path,
            decode_threshold=decode_threshold,
            workspace_tokens=cases.ENGINE_WORKSPACE,
        )
        return reference_plan.forward(
            plan,
            self.q,
            kv,
            self.topk_indices,
            self.batch,
            softmax_scale=SCALE,
            attn_sink=self.attn_sink if sink else None,
        )


def make_step(batch: cases.Batch, num_heads: int, *, topk=48, seed=0) -> Step:
    rng = np.random.default_rng(seed)
    rows = cases.make_rows(rng, batch.num_pages * batch.block_size, "fp8")
    q = cases.random_bf16(rng, batch.num_actual_tokens, num_heads, ref.HEAD_DIM)
    return Step(
        batch=batch,
        q=q,
        topk_indices=cases.causal_topk(rng, batch, topk),
        fp8_cache=cases.lay_out(rows, batch.block_size, "padded"),
        attn_sink=cases.make_sink(rng, num_heads),
    )
