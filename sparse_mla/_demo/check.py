"""Judges a sample of every step against fp64 NumPy on the same cache bytes.

Path "separate" reads prefills from a bf16 workspace, so it is judged in two steps: the gather bit
for bit, then attention on the gathered rows. It is also judged against the FP8 bytes, with a bound
that allows for the rounding in between.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparse_mla._demo.engine import StepResult
from sparse_mla._demo.scheduler import Batch, Request
from sparse_mla._judge import FP8_ROW_BYTES, Fractions, exact_rows, judge_row, upconvert_rows


class Checker:
    has_lse = True

    def __init__(self, engine: Any, *, seed: int, rows_per_part: int = 1) -> None:
        self.engine = engine
        self.rng = np.random.default_rng(seed)
        self.rows_per_part = rows_per_part
        self.fractions: dict[str, Fractions] = {}
        self.gathered_rows = 0
        self.wrong_gathered_rows = 0

    @property
    def within(self) -> bool:
        return self.wrong_gathered_rows == 0 and all(f.within for f in self.fractions.values())

    def check_step(self, batch: Batch, result: StepResult) -> None:
        """Samples the decodes' rows and the prefills' rows of a step that has just run."""
        self.kv_cache = self.engine.memory.get(self.engine.kv_cache)
        self.check_gather(batch, result)
        num_decode_tokens = result.metadata.num_decode_tokens
        for start, end in ((0, num_decode_tokens), (num_decode_tokens, batch.num_tokens)):
            if start < end:
                for token in self.rng.integers(start, end, self.rows_per_part).tolist():
                    starts = batch.query_start_loc
                    request_idx = int(np.searchsorted(starts, token, side="right")) - 1
                    self.check_token(batch, result, request_idx, token)

    def cache_rows(self, request: Request, positions: np.ndarray) -> np.ndarray:
        block_size = self.engine.config.block_size
        pages = np.array(request.pages)[positions // block_size]
        return self.kv_cache[pages, positions % block_size]

    def check_gather(self, batch: Batch, result: StepResult) -> None:
        """Compares the last chunk, which is what the workspace still holds."""
        if result.metadata.prefill is None:
            return
        chunk = result.metadata.prefill.chunks[-1]
        get = self.engine.memory.get
        workspace = get(self.engine.workspace)
        first = result.metadata.num_decodes + chunk.req_start_idx
        for r, start in enumerate(get(chunk.workspace_starts)):
            seq_len = int(batch.seq_lens[first + r])
            rows = self.cache_rows(batch.requests[first + r], np.arange(seq_len))
            gathered = workspace[start : start + seq_len].view(np.uint16)
            wrong = (upconvert_rows(rows).view(np.uint16) != gathered).any(axis=1)
            self.gathered_rows += seq_len
            self.wrong_gathered_rows += int(wrong.sum())

    def check_token(self, batch: Batch, result: StepResult, request_idx: int, token: int) -> None:
        metadata = result.metadata
        positions = result.topk_indices[token]
        rows = self.cache_rows(batch.requests[request_idx], positions[positions >= 0])
        if metadata.path == "separate" and token >= metadata.num_decode_tokens:
            self._judge("prefill on the gathered bf16 rows", result, token, upconvert_rows(rows))
            self._judge("prefill, gather included, on FP8", result, token, rows, gathered=True)
        else:
            self._judge(self.describe(result, token), result, token, rows)

    def describe(self, result: StepResult, token: int) -> str:
        part = "decode" if token < result.metadata.num_decode_tokens else "prefill"
        is_fp8 = self.kv_cache.itemsize == 1
        return f"{part} on the {'FP8' if is_fp8 else 'bf16'} cache"

    def allowed(self, rows: np.ndarray, *, gathered: bool = False) -> dict[str, Any]:
        """What the bounds of results on these cache rows allow for; see _judge.py."""
        on_gpu = self.engine.memory.device != "cpu"
        return {
            "softmax_scale": self.engine.config.softmax_scale,
            "gathered": gathered,
            "units": 32 if on_gpu else 16,
            "f16_scales": on_gpu and rows.shape[1] == FP8_ROW_BYTES and not gathered,
        }

    def _judge(
        self, what: str, result: StepResult, token: int, rows: np.ndarray, gathered: bool = False
    ) -> None:
        fractions = judge_row(
            np.concatenate([part[token] for part in result.q], axis=1),
            exact_rows(rows),
            result.out[token],
            result.lse[token],
            **self.allowed(rows, gathered=gathered),
        )
        self.fractions.setdefault(what, Fractions()).add(fractions)
