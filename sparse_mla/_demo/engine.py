"""How an engine calls the library: one layer, one step at a time.

Everything that lives longer than a step is made once: the caches, the prefill workspace, the
metadata builder and the output buffers. A step of SparseEngine writes the new tokens into the
caches, lets the indexer choose the top-k positions of every query, and runs the layer. `dense.py`
and `v4.py` have the engines of other layers.
"""

from __future__ import annotations

import abc
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

import sparse_mla
from sparse_mla._demo.memory import Memory
from sparse_mla._demo.model import INDEX_DIM, SOFTMAX_SCALE, ToyModel
from sparse_mla._demo.scheduler import Batch
from sparse_mla._judge import BF16
from sparse_mla._rows import BF16_ROW_BYTES, KEY_DIM, KV_LORA_RANK


@dataclass
class StepResult:
    """What a step computed, in host memory. On the CPU these are the engine's buffers, valid until
    the next step."""

    metadata: Any  # the builder's
    predicted: np.ndarray  # [T] the next byte, as the model sees it
    library_seconds: float  # time spent in sparse_mla
    total_seconds: float  # the same plus the toy model, and copies to a GPU and back
    # The absorbed query [T, H, 512] and [T, H, 64] bf16. Dense: [T, H, 128] not absorbed, and the
    # same. V4: [T, H, 512] alone.
    q: tuple[np.ndarray, ...]
    out: np.ndarray  # [T, H, 512] bf16; dense: the values [T, H, 128]; V4: [T, H, 64]
    topk_indices: Any = None  # [T, K] int32, positions inside each request; only of SparseEngine
    lse: Any = None  # [T, H] fp32; dense: None


class Engine(abc.ABC):
    """What the engines of all layers share."""

    builder: Any
    layer: Any
    kv_cache: Any  # its pages are those that the scheduler gives to requests
    bf16_row_bytes = BF16_ROW_BYTES

    def __init__(self, model: Any, config: Any, num_pages: int, memory: Memory) -> None:
        self.memory = memory
        self.model = model
        self.config = config
        self.model_seconds = 0.0  # time that the layer has spent in the toy model's projections
        self.make_caches(num_pages)

    def make_caches(self, num_pages: int) -> None:
        """A cache with a row per token."""
        shape = sparse_mla.Backend.get_kv_cache_shape(
            num_pages, self.config.block_size, cache_dtype_str=self.config.kv_cache_dtype
        )
        is_fp8 = self.config.kv_cache_dtype == "fp8_ds_mla"
        self.kv_cache = self.memory.zeros(shape, np.uint8 if is_fp8 else BF16)

    @abc.abstractmethod
    def project(self, text: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, ...]:
        """The layer's inputs for the tokens at `positions` of `text`."""

    @abc.abstractmethod
    def run_layer(self, metadata: Any, *inputs: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Runs the layer on what `project` gave.

        -> every head's values, as the model's `predict` takes them, and a StepResult's q and its
        other arrays
        """

    def run_step(self, batch: Batch) -> StepResult:
        start = time.perf_counter()
        get, put = self.memory.get, self.memory.put
        projected = [
            self.project(request.text, positions) for request, _, positions in batch.parts()
        ]
        inputs = [put(np.concatenate(arrays)) for arrays in zip(*projected, strict=True)]
        described = self.describe(batch)
        self.model_seconds = 0.0

        self.memory.wait()
        library_start = time.perf_counter()
        metadata = self.builder.build(**described)  # once per step, for all layers
        values, q, arrays = self.run_layer(metadata, *inputs)
        self.memory.wait()
        library_seconds = time.perf_counter() - library_start - self.model_seconds

        predicted = self.model.predict(get(values))
        return StepResult(
            metadata=metadata,
            predicted=predicted,
            library_seconds=library_seconds,
            q=tuple(map(get, q)),
            **{name: get(x) for name, x in arrays.items()},
            total_seconds=time.perf_counter() - start,
        )

    def describe(self, batch: Batch) -> dict[str, Any]:
        """The builder's arguments. On the CPU the host arrays are the device arrays."""
        put = self.memory.put
        common = sparse_mla.CommonAttentionMetadata(
            put(batch.query_start_loc),
            put(batch.seq_lens),
            put(batch.slot_mapping),
            put(batch.block_table),
            query_start_loc_cpu=batch.query_start_loc,
            seq_lens_cpu=batch.seq_lens,
            num_reqs=len(batch.requests),
            num_actual_tokens=batch.num_tokens,
            max_query_len=max(batch.query_lens),
            max_seq_len=int(batch.seq_lens.max()),
        )
        return {"common": common}


def make_config(fields: dict[str, Any], topk: int) -> sparse_mla.Config:
    """The workspace is small on purpose: a busy step needs several chunks."""
    return sparse_mla.Config(
        softmax_scale=SOFTMAX_SCALE,
        topk_tokens=topk,
        prefill_workspace_tokens=fields["max_model_len"],
        **fields,
    )


class SparseEngine(Engine):
    def __init__(
        self, model: ToyModel, config: sparse_mla.Config, num_pages: int, memory: Memory
    ) -> None:
        super().__init__(model, config, num_pages, memory)
        num_tokens = config.max_num_batched_tokens
        index_shape = sparse_mla.v4.Backend.get_kv_cache_shape(
            num_pages, config.block_size, head_size=INDEX_DIM, cache_dtype_str="fp8_index"
        )
        self.index_cache = memory.zeros(index_shape, np.uint8)  # in pages of the same numbers
        self.index_rope_table = memory.put(sparse_mla.rope_table(config.max_model_len))
        # Left out, the builder would make its own workspace; the check has to read this one.
        workspace_tokens = config.prefill_workspace_tokens
        if workspace_tokens is None:
            workspace_tokens = sparse_mla.get_prefill_workspace_size(config.max_model_len)
        self.workspace = memory.zeros((workspace_tokens, KEY_DIM), BF16)
        self.builder = sparse_mla.MetadataBuilder(config, workspace=self.workspace)
        self.layer = sparse_mla.SparseMLA(config, kv_b_proj=memory.put(model.kv_b_proj))
        self.first_keys = memory.zeros((num_tokens,), np.int32)
        self.topk_indices = memory.zeros((num_tokens, config.topk_tokens), np.int32)
        self.out = memory.zeros((num_tokens, model.num_heads, KV_LORA_RANK), BF16)
        self.lse = memory.zeros((num_tokens, model.num_heads), np.float32)

    def project(self, text: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, ...]:
        """kv_c, k_pe, q_nope, q_pe, then the indexer's keys, queries, weights, and positions."""
        model = self.model
        return (
            *model.keys(text, positions),
            *model.queries(text, positions),
            model.index_keys(text, positions),
            *model.index_queries(text, positions),
            positions.astype(np.int32),
        )

    def run_layer(
        self, metadata: sparse_mla.Metadata, *inputs: Any
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        kv_c, k_pe, q_nope, q_pe, *index_inputs = inputs
        num_tokens = len(kv_c)
        ql_nope = self.layer.k_up_proj(q_nope)  # the absorbed query works on the latent itself
        sparse_mla.concat_and_cache_mla(kv_c, k_pe, self.kv_cache, metadata.slot_mapping)
        topk_indices = self._select_topk(metadata, *index_inputs)
        out, lse = self.layer.forward(
            (ql_nope, q_pe),
            self.kv_cache,
            topk_indices,
            metadata,
            out=self.out[:num_tokens],
            lse=self.lse[:num_tokens],
        )
        arrays = {"topk_indices": topk_indices, "out": out, "lse": lse}
        return self.layer.v_up_proj(out), (ql_nope, q_pe), arrays

    def _select_topk(
        self,
        metadata: sparse_mla.Metadata,
        keys: Any,
        queries: Any,
        weights: Any,
        positions: Any,
    ) -> Any:
        """The lightning indexer: [T, K] positions with the best scores in each token's request, of
        those up to the token's own; -1 fills the rows of shorter contexts."""
        lens, num_tokens = positions + 1, len(positions)
        sparse_mla.indexer_k_quant_and_cache(keys, self.index_cache, metadata.slot_mapping)
        queries, weights = sparse_mla.fused_indexer_q_rope_quant(
            queries,
            weights,
            positions,
            self.index_rope_table,
            softmax_scale=INDEX_DIM**-0.5,
            head_scale=queries.shape[1] ** -0.5,
        )
        logits = sparse_mla.indexer_logits(
            queries,
            weights,
            self.index_cache,
            lens,
            block_table=metadata.block_table,
            req_id_per_token=metadata.req_id_per_token,
            clean=False,
        )
        topk_indices = self.topk_indices[:num_tokens]
        sparse_mla.top_k_per_row(
            logits,
            self.first_keys[:num_tokens],
            lens,
            k=self.config.topk_tokens,
            out=topk_indices,
        )
        return topk_indices
