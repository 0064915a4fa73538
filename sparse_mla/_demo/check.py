"""Judges a sample of every step against fp64 NumPy on the same cache bytes.

Path "separate" reads prefills from a bf16 workspace, so it is judged in two steps: the gather bit
for bit, then attention on the gathered rows. It is also judged against the FP8 bytes, with a bound
that allows for the rounding in between.
"""

from __future__ import annotations

import numpy as np

import sparse_mla
from sparse_mla._demo.engine import Engine, StepResult
from sparse_mla._demo.scheduler import Batch, Request
from sparse_mla._judge import FP8_ROW_BYTES, Fractions, exact_rows, judge_row, upconvert_rows


class Checker:
    def __init__(self, engine: Engine, *, seed: int, rows_per_part: int = 1) -> None:
        self.engine = engine
        self.rng = np.random.default_rng(seed)
        self.rows_per_part = rows_per_part
        self.units = 16 if engine.memory.device == "cpu" else 32  # see _judge.py
        self.fractions: dict[str, Fractions] = {}
        self.gathered_rows = 0
        self.wrong_gathered_rows = 0

    @property
    def within(self) -> bool:
        return self.wrong_gathered_rows == 0 and all(f.within for f in self.fractions.values())

    def check_step(self, batch: Batch, result: StepResult) -> None:
        """Samples the decodes' rows and the prefills' rows of a step that has just run."""
        self.kv_cache = self.engine.memory.get(self.engine.kv_cache)
        if result.metadata.prefill is not None:
            self._check_gather(batch, result, result.metadata.prefill.chunks[-1])
        num_decode_tokens = result.metadata.num_decode_tokens
        for start, end in ((0, num_decode_tokens), (num_decode_tokens, batch.num_tokens)):
            if start < end:
                for token in self.rng.integers(start, end, self.rows_per_part):
                    self._check_token(batch, result, int(token))

    def _cache_rows(self, request: Request, positions: np.ndarray) -> np.ndarray:
        block_size = self.engine.config.block_size
        pages = np.array(request.pages)[positions // block_size]
        return self.kv_cache[pages, positions % block_size]

    def _check_gather(self, batch: Batch, result: StepResult, chunk: sparse_mla.Chunk) -> None:
        """Compares the last chunk, which is what the workspace still holds."""
        get = self.engine.memory.get
        workspace = get(self.engine.workspace)
        first = result.metadata.num_decodes + chunk.req_start_idx
        for r, start in enumerate(get(chunk.workspace_starts)):
            seq_len = int(batch.seq_lens[first + r])
            rows = self._cache_rows(batch.requests[first + r], np.arange(seq_len))
            gathered = workspace[start : start + seq_len].view(np.uint16)
            wrong = (upconvert_rows(rows).view(np.uint16) != gathered).any(axis=1)
            self.gathered_rows += seq_len
            self.wrong_gathered_rows += int(wrong.sum())

    def _check_token(self, batch: Batch, result: StepResult, token: int) -> None:
        metadata = result.metadata
        request_idx = int(np.searchsorted(batch.query_start_loc, token, side="right")) - 1
        positions = result.topk_indices[token]
        rows = self._cache_rows(batch.requests[request_idx], positions[positions >= 0])
        if metadata.path == "separate" and token >= metadata.num_decode_tokens:
            self._judge("prefill on the gathered bf16 rows", result, token, upconvert_rows(rows))
            self._judge("prefill, gather included, on FP8", result, token, rows, gathered=True)
        else:
            part = "decode" if token < metadata.num_decode_tokens else "prefill"
            cache = "bf16" if metadata.path == "bf16" else "FP8"
            self._judge(f"{part} on the {cache} cache", result, token, rows)

    def _judge(
        self, what: str, result: StepResult, token: int, rows: np.ndarray, gathered: bool = False
    ) -> None:
        fractions = judge_row(
            np.concatenate([part[token] for part in result.q], axis=1),
            exact_rows(rows),
            result.out[token],
            result.lse[token],
            softmax_scale=self.engine.config.softmax_scale,
            gathered=gathered,
            units=self.units,
            f16_scales=self.units > 16 and rows.shape[1] == FP8_ROW_BYTES and not gathered,
        )
        self.fractions.setdefault(what, Fractions()).add(fractions)
