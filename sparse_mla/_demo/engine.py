"""How an engine calls the library: one layer, one step at a time.

Everything that lives longer than a step is made once: the cache, the prefill workspace, the
metadata builder and the output buffers. A step writes the new tokens into the cache, selects the
top-k positions of every query, and runs the layer.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

import sparse_mla
from sparse_mla._demo.model import ToyModel
from sparse_mla._demo.scheduler import Batch, Request
from sparse_mla._judge import BF16, KV_LORA_RANK

KEY_DIM = 576  # values of a cached key: kv_lora_rank + qk_rope_head_dim


@dataclass
class StepResult:
    """What a step computed. Arrays are the engine's buffers, valid until the next step."""

    metadata: sparse_mla.Metadata
    q: tuple[np.ndarray, np.ndarray]  # absorbed: [T, H, 512], [T, H, 64] bf16
    topk_indices: np.ndarray  # [T, K] int32, positions inside each request
    out: np.ndarray  # [T, H, 512] bf16
    lse: np.ndarray  # [T, H] fp32
    predicted: np.ndarray  # [T] the next byte, as the model sees it
    library_seconds: float  # time spent in sparse_mla
    total_seconds: float  # the same plus the toy model and its top-k


class Engine:
    def __init__(self, model: ToyModel, config: sparse_mla.Config, num_pages: int) -> None:
        num_tokens = config.max_num_batched_tokens
        shape = sparse_mla.Backend.get_kv_cache_shape(
            num_pages, config.block_size, cache_dtype_str=config.kv_cache_dtype
        )
        is_fp8 = config.kv_cache_dtype == "fp8_ds_mla"
        self.kv_cache = np.zeros(shape, np.uint8 if is_fp8 else BF16)
        self.model = model
        self.config = config
        # Left out, the builder would make its own workspace; the check has to read this one.
        workspace_tokens = config.prefill_workspace_tokens
        if workspace_tokens is None:
            workspace_tokens = sparse_mla.get_prefill_workspace_size(config.max_model_len)
        self.workspace = np.zeros((workspace_tokens, KEY_DIM), BF16)
        self.builder = sparse_mla.MetadataBuilder(config, workspace=self.workspace)
        self.layer = sparse_mla.SparseMLA(config, kv_b_proj=model.kv_b_proj)
        self.out = np.zeros((num_tokens, model.num_heads, KV_LORA_RANK), BF16)
        self.lse = np.zeros((num_tokens, model.num_heads), np.float32)

    def run_step(self, batch: Batch) -> StepResult:
        start = time.perf_counter()
        kv_c, k_pe, q_nope, q_pe = self._project(batch)

        library_start = time.perf_counter()
        ql_nope = self.layer.k_up_proj(q_nope)  # the absorbed query works on the latent itself
        sparse_mla.concat_and_cache_mla(kv_c, k_pe, self.kv_cache, batch.slot_mapping)
        library_seconds = time.perf_counter() - library_start

        topk_indices = self._select_topk(batch, ql_nope, q_pe, kv_c, k_pe)

        library_start = time.perf_counter()
        metadata = self.builder.build(self._describe(batch))  # once per step, for all layers
        out, lse = self.layer.forward(
            (ql_nope, q_pe),
            self.kv_cache,
            topk_indices,
            metadata,
            out=self.out[: batch.num_tokens],
            lse=self.lse[: batch.num_tokens],
        )
        values = self.layer.v_up_proj(out)
        library_seconds += time.perf_counter() - library_start

        predicted = self.model.predict(values)
        return StepResult(
            metadata=metadata,
            q=(ql_nope, q_pe),
            topk_indices=topk_indices,
            out=out,
            lse=lse,
            predicted=predicted,
            library_seconds=library_seconds,
            total_seconds=time.perf_counter() - start,
        )

    @staticmethod
    def _describe(batch: Batch) -> sparse_mla.CommonAttentionMetadata:
        """On the CPU the host arrays are the device arrays."""
        return sparse_mla.CommonAttentionMetadata(
            batch.query_start_loc,
            batch.seq_lens,
            batch.slot_mapping,
            batch.block_table,
            query_start_loc_cpu=batch.query_start_loc,
            seq_lens_cpu=batch.seq_lens,
            num_reqs=len(batch.requests),
            num_actual_tokens=batch.num_tokens,
            max_query_len=max(batch.query_lens),
            max_seq_len=int(batch.seq_lens.max()),
        )

    def _project(self, batch: Batch) -> list[np.ndarray]:
        """The layer's inputs for the batch's tokens: kv_c, k_pe, q_nope, q_pe."""
        projected = [
            (
                *self.model.keys(request.text, positions),
                *self.model.queries(request.text, positions),
            )
            for request, _, positions in batch.parts()
        ]
        return [np.concatenate(arrays) for arrays in zip(*projected, strict=True)]

    def _select_topk(
        self,
        batch: Batch,
        ql_nope: np.ndarray,
        q_pe: np.ndarray,
        kv_c: np.ndarray,
        k_pe: np.ndarray,
    ) -> np.ndarray:
        """The indexer: for every query the K positions of its request with the largest q·k, summed
        over heads, in fp32; -1 fills the rows of shorter contexts."""
        queries = np.concatenate(
            [ql_nope.astype(np.float32).sum(axis=1), q_pe.astype(np.float32).sum(axis=1)], axis=1
        )
        keys = np.concatenate([kv_c, k_pe], axis=1).astype(np.float32)
        topk_indices = np.full((batch.num_tokens, self.config.topk_tokens), -1, np.int32)
        for request, rows, positions in batch.parts():
            index_keys = self._remember_keys(request, positions, keys[rows])
            scores = queries[rows] @ index_keys[: positions[-1] + 1].T
            select_topk(scores, positions, topk_indices[rows])
        return topk_indices

    @staticmethod
    def _remember_keys(request: Request, positions: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """The request's keys [len(text), 576] with the new ones written."""
        if request.index_keys is None:
            request.index_keys = np.zeros((len(request.text), KEY_DIM), np.float32)
        request.index_keys[positions] = keys
        return request.index_keys


def select_topk(scores: np.ndarray, positions: np.ndarray, topk_indices: np.ndarray) -> None:
    """Writes the causal top-k of scores [T, L] to topk_indices [T, K], which is filled with -1."""
    topk = topk_indices.shape[1]
    future = np.arange(scores.shape[1]) > positions[:, None]
    scores[future] = -np.inf
    if scores.shape[1] <= topk:
        everything = np.arange(scores.shape[1], dtype=np.int32)
        topk_indices[:, : scores.shape[1]] = np.where(future, -1, everything)
        return
    best = np.argpartition(scores, -topk, axis=1)[:, -topk:]
    topk_indices[:] = np.where(np.take_along_axis(future, best, axis=1), -1, best)
