"""Continuous batching: requests arrive, are prefilled in chunks, decode, and give their pages back.

Vocabulary and order are vLLM's. A step has a budget of tokens; decodes take their tokens first and
prefills share the rest. A request is admitted when the pool has pages for all tokens that it will
ever write, so nothing is ever preempted.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Request:
    """One user's text: a prompt to prefill, then tokens that are decoded one by one."""

    name: int
    arrival_step: int
    text: np.ndarray  # [prompt + decoded tokens] bytes
    prompt_len: int
    num_computed: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def is_decoding(self) -> bool:
        return self.num_computed >= self.prompt_len

    @property
    def is_done(self) -> bool:
        return self.num_computed == len(self.text)


class PagePool:
    """The free pages of a paged cache, last in first out, so requests' pages are soon scattered."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.free_pages = list(range(num_pages))
        self.reserved = 0  # pages promised to admitted requests, not yet allocated
        self.peak = 0

    @property
    def in_use(self) -> int:
        return self.num_pages - len(self.free_pages)

    def reserve(self, count: int) -> bool:
        if len(self.free_pages) - self.reserved < count:
            return False
        self.reserved += count
        return True

    def allocate(self) -> int:
        self.reserved -= 1
        page = self.free_pages.pop()
        self.peak = max(self.peak, self.in_use)
        return page

    def free(self, pages: list[int]) -> None:
        self.free_pages.extend(pages)


@dataclass
class Batch:
    """One step: which tokens of which requests run, decodes first. The arrays are in host memory,
    one for each argument of the builder."""

    requests: list[Request]
    query_lens: list[int]
    query_start_loc: np.ndarray  # [R + 1] int32
    seq_lens: np.ndarray  # [R] int32, context and query
    slot_mapping: np.ndarray  # [T] int64, where each token is written
    block_table: np.ndarray  # [R, W] int32, pages of each request

    @property
    def num_tokens(self) -> int:
        return int(self.query_start_loc[-1])

    def parts(self) -> list[tuple[Request, slice, np.ndarray]]:
        """Each request with its rows in the batch and their positions in its text."""
        starts = self.query_start_loc
        return [
            (request, slice(starts[r], starts[r + 1]), np.arange(seq_len - query_len, seq_len))
            for r, (request, query_len, seq_len) in enumerate(
                zip(self.requests, self.query_lens, self.seq_lens, strict=True)
            )
        ]


class Scheduler:
    def __init__(
        self,
        requests: list[Request],
        *,
        num_pages: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        self.waiting = deque(requests)
        self.running: list[Request] = []
        self.pool = PagePool(num_pages)
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        # most tokens of one request in a step
        self.max_prefill_tokens = -(-max_num_batched_tokens // 2)
        self.max_pages = max(self.pages_for(len(r.text)) for r in requests)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def next_batch(self, step: int) -> Batch | None:
        """Plans a step; None when nothing can run in it, because no request has arrived."""
        self._admit(step)
        budget = self.max_num_batched_tokens
        planned: list[tuple[int, Request]] = []
        for request in sorted(self.running, key=lambda r: not r.is_decoding):  # a stable sort
            wanted = 1
            if not request.is_decoding:
                wanted = min(request.prompt_len - request.num_computed, self.max_prefill_tokens)
            query_len = min(wanted, budget)
            if query_len > 0:
                planned.append((query_len, request))
                budget -= query_len
        if not planned:
            return None
        # A prompt's last token alone looks like a decode, so it must stand among the decodes.
        planned.sort(key=lambda item: item[0] > 1)
        return self._make_batch(planned)

    def finish(self, batch: Batch) -> None:
        """Accounts for a computed step and frees the pages of requests that are done."""
        for request, query_len in zip(batch.requests, batch.query_lens, strict=True):
            request.num_computed += query_len
            if request.is_done:
                self.running.remove(request)
                self.pool.free(request.pages)
                request.pages = []

    def _admit(self, step: int) -> None:
        while self.waiting and self.waiting[0].arrival_step <= step:
            num_pages = self.pages_for(len(self.waiting[0].text))
            if len(self.running) == self.max_num_seqs or not self.pool.reserve(num_pages):
                return
            self.running.append(self.waiting.popleft())

    def _make_batch(self, planned: list[tuple[int, Request]]) -> Batch:
        requests = [request for _, request in planned]
        query_lens = [query_len for query_len, _ in planned]
        block_table = np.zeros((len(planned), self.max_pages), np.int32)
        slots = []
        for r, (query_len, request) in enumerate(planned):
            seq_len = request.num_computed + query_len
            while len(request.pages) < self.pages_for(seq_len):
                request.pages.append(self.pool.allocate())
            block_table[r, : len(request.pages)] = request.pages
            positions = np.arange(request.num_computed, seq_len)
            pages = block_table[r, positions // self.block_size].astype(np.int64)
            slots.append(pages * self.block_size + positions % self.block_size)
        return Batch(
            requests=requests,
            query_lens=query_lens,
            query_start_loc=np.cumsum([0, *query_lens], dtype=np.int32),
            seq_lens=np.array(
                [r.num_computed + n for r, n in zip(requests, query_lens, strict=True)], np.int32
            ),
            slot_mapping=np.concatenate(slots),
            block_table=block_table,
        )
