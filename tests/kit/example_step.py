"""Examples of a step of the backend layer, for example_table.py."""

from __future__ import annotations

from typing import Any

import cases
import compiled
import engine
import numpy as np
import reference as ref
from example import Example

import sparse_mla
from sparse_mla import _C


def step(path: str, fp8: bool) -> Example:
    """A build and its forward: two decodes, and two prefills in two chunks.

    They are calls of the compiled builder, because sparse_mla.backend would make NumPy arrays of
    the host arrays first.
    """
    batch = cases.make_batch([1, 1, 3, 2], [9, 4, 12, 10], block_size=4)
    made = engine.make_step(batch, 2, topk=6)
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 16}
    config = sparse_mla.Config(
        2, softmax_scale=0.1, block_size=4, topk_tokens=6, path=path,
        kv_cache_dtype="fp8_ds_mla" if fp8 else "bfloat16", **limits,
    )  # fmt: skip
    cache = np.ascontiguousarray(made.fp8_cache)
    arrays = {
        "query_start_loc_cpu": batch.query_start_loc,
        "seq_lens_cpu": batch.seq_lens,
        "block_table": batch.block_table,
        "q": made.q,
        "kv_cache": cache if fp8 else sparse_mla.dequantize_kv_cache(cache, dtype="bfloat16"),
        "topk_indices": made.topk_indices,
        "attn_sink": made.attn_sink,
        "out": np.zeros((7, 2, 512), ref.BF16),
        "lse": np.zeros((7, 2), np.float32),
    }
    if path == "separate":
        arrays["workspace"] = np.zeros((16, 576), ref.BF16)

    def run(given: dict) -> Any:
        builder = _C.Step("v32", vars(config) | {"path": path}, given.get("workspace"))
        planned = [given[name] for name in ("query_start_loc_cpu", "seq_lens_cpu", "block_table")]
        plan = compiled.build(builder, *planned, 4, 7)
        names = ("q", "kv_cache", "topk_indices", "attn_sink", "out", "lse")
        results = compiled.forward(
            builder, *(given[n] for n in names), 0.1, plan["generation"], None
        )
        return plan, results

    return Example("forward", arrays, run)
