"""The pages of caches: of all tokens of requests, and for DeepSeek V4 also of their last ones."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

import sparse_mla


@dataclass
class Request:
    """What a request has of a cache: its pages, the first of which may be another request's."""

    pages: list[int] = field(default_factory=list)
    num_shared: int = 0  # pages of another request
    num_tokens: int = 0  # cached tokens
    num_forgotten: int = 0  # tokens that `rewind` took, and that no later ones have replaced
    row: int = -1  # its row of the tables of StepPages


class Pages:
    """Gives pages to requests. A request is any hashable name; it begins with its first pages.

    Of a cache that is split over ranks a page has this rank's tokens alone. A request has as many
    pages on every rank as on rank 0, which has the most tokens of it: so all ranks give the same
    pages, and run out of them in the same step.
    """

    def __init__(
        self, num_pages: int, page_size: int, cp: tuple[int, int, int] | None = None
    ) -> None:
        self.page_size, self.cp = page_size, cp
        self.requests: dict[Hashable, Request] = {}
        self._free = list(range(num_pages))

    @property
    def num_free(self) -> int:
        """Pages that belong to no request."""
        return len(self._free)

    def find(self, request: Hashable) -> Request:
        """What a request has: nothing, if it has not begun."""
        return self.requests.get(request) or Request()

    def share(self, request: Hashable, first: Hashable) -> None:
        """Begins a request with the tokens of another one, which fill their pages."""
        shared = self.requests[first]
        assert shared.num_tokens == len(shared.pages) * self.page_size
        self.requests[request] = Request(list(shared.pages), len(shared.pages), shared.num_tokens)

    def reserve(self, op: str, new: Mapping[Hashable, int]) -> dict[Hashable, int]:
        """Gives requests pages for so many new tokens each, or raises. Returns how many pages."""
        missing = {}
        for request, count in new.items():
            state = self.find(request)
            num_pages = self._count(state.num_tokens + count)
            missing[request] = max(num_pages - len(state.pages), 0)  # pages of a failed step stay
        if sum(missing.values()) > self.num_free:
            raise MemoryError(
                f"{op}: {sum(missing.values())} more pages needed, {self.num_free} free: free() "
                "requests that are done, or make num_pages larger"
            )
        for request, count in missing.items():
            state = self.requests.setdefault(request, Request())
            state.pages += [self._free.pop() for _ in range(count)]
        return missing

    def advance(self, request: Hashable, num_tokens: int) -> None:
        """Counts tokens that are in the cache now. Of drafts, those that were accepted: the others
        are overwritten."""
        state = self.requests[request]
        state.num_tokens += num_tokens
        state.num_forgotten = max(state.num_forgotten - num_tokens, 0)

    def settle(self, requests: Iterable[Hashable]) -> None:
        """Takes back what requests needed during a step alone, whether or not it succeeded."""

    def rewind(self, request: Hashable, num_tokens: int) -> None:
        """Forgets a request's last tokens. Pages behind the end go back."""
        state = self.requests[request]
        state.num_tokens -= num_tokens
        state.num_forgotten += num_tokens
        kept = max(self._count(state.num_tokens), state.num_shared)
        self._free += state.pages[kept:]
        del state.pages[kept:]

    def release(self, request: Hashable) -> None:
        """Takes the pages of a request back."""
        state = self.requests.pop(request)
        self._free += state.pages[state.num_shared :]

    def table(self, requests: Iterable[Hashable]) -> np.ndarray:
        """[requests, W] int32: their pages, then zeros."""
        lists = [self.requests[request].pages for request in requests]
        table = np.zeros((len(lists), max(map(len, lists), default=0)), np.int32)
        for row, pages in zip(table, lists, strict=True):
            row[: len(pages)] = pages
        return table

    def slots(self, request: Hashable, positions: np.ndarray) -> np.ndarray:
        """int64: where tokens at these positions of a request lie; -1 on another rank."""
        pages = np.array(self.requests[request].pages, np.int64)
        local = sparse_mla.cp_local_positions(positions, cp=self.cp)
        slots = pages[local // self.page_size] * self.page_size + local % self.page_size
        return np.where(local < 0, -1, slots)

    def _count(self, num_tokens: int) -> int:
        """How many pages so many tokens of a request fill."""
        if self.cp is not None:
            _, ranks, interleave = self.cp
            lens = np.array([num_tokens], np.int32)
            num_tokens = int(sparse_mla.cp_local_lengths(lens, cp=(0, ranks, interleave))[0])
        return -(-num_tokens // self.page_size)


class Table:
    """The pages of requests, a row for each: `entries` is [rows, W] int32. Entries of pages that a
    request has no more stay as they are; nothing reads them."""

    def __init__(self, page_size: int, num_rows: int, max_model_len: int) -> None:
        self.page_size, self._changed = page_size, list[int]()
        self.entries = np.zeros((num_rows, -(-max_model_len // page_size)), np.int32)

    def fill(self, row: int, column: int, pages: list[int]) -> None:
        """Sets entries of a row from a column on."""
        self.entries[row, column : column + len(pages)] = pages
        first = row * self.entries.shape[1] + column
        self._changed += range(first, first + len(pages))

    def take_changes(self) -> tuple[np.ndarray, np.ndarray]:
        """Where the flat table has changed since the last call, int64, and what is there."""
        where, self._changed = np.array(self._changed, np.int64), []
        return where, self.entries.reshape(-1)[where]

    def slots(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """int64: where tokens at these positions of the rows' requests lie."""
        pages = self.entries[rows, positions // self.page_size].astype(np.int64)
        return pages * self.page_size + positions % self.page_size


class Recent(Table):
    """Pages for the last tokens of requests, `kept` of each between steps. n consecutive tokens
    touch at most (n + 2 page_size - 2) // page_size pages. There are as many as all tokens that are
    kept, and those of a step, touch at most, so they cannot run out."""

    def __init__(self, page_size: int, num_rows: int, max_model_len: int, kept: int, max_new: int):
        super().__init__(page_size, num_rows, max_model_len)
        self.kept = kept
        self.num_pages = (num_rows * (kept + 2 * page_size - 2) + max_new) // page_size
        self.free = list(range(self.num_pages))
        # A row has the pages of its columns from `begins` to before `ends`.
        self.begins, self.ends = np.zeros((2, num_rows), np.int64)

    def borrow(self, rows: np.ndarray, num_tokens: np.ndarray) -> None:
        """Gives rows the pages up to so many tokens."""
        firsts, ends = self.ends[rows], -(-num_tokens // self.page_size)
        for i in np.flatnonzero(ends > firsts):
            pages = [self.free.pop() for _ in range(firsts[i], ends[i])]
            self.fill(int(rows[i]), int(firsts[i]), pages)
        self.ends[rows] = np.maximum(firsts, ends)

    def settle(self, rows: np.ndarray, num_tokens: np.ndarray) -> None:
        """Takes back what rows with so many tokens need no more: with none, all that they have."""
        firsts, lasts = self.begins[rows], self.ends[rows]
        begins = np.maximum(firsts, (num_tokens - self.kept) // self.page_size)
        ends = -(-num_tokens // self.page_size)
        for i in np.flatnonzero((begins > firsts) | (ends < lasts)):
            pages, behind = self.entries[rows[i]], max(begins[i], ends[i])
            self.free += pages[firsts[i] : begins[i]].tolist() + pages[behind : lasts[i]].tolist()
        self.begins[rows], self.ends[rows] = np.minimum(begins, ends), ends


class StepPages(Pages):
    """Pages for all tokens of a limited number of requests, and recent ones by name."""

    def __init__(self, num_pages: int, table: Table, recent: Mapping[str, Recent]) -> None:
        super().__init__(num_pages, table.page_size)
        self.whole, self.recent = table, recent
        self._free_rows = list(range(len(table.entries)))[::-1]

    def reserve(self, op: str, new: Mapping[Hashable, int]) -> dict[Hashable, int]:
        number, most = len(self.requests.keys() | new.keys()), len(self.whole.entries)
        if number > most:
            raise ValueError(
                f"{op}: `tokens` must leave max_num_seqs = {most} requests at most, got {number}"
            )
        given = super().reserve(op, new)
        for request, count in given.items():
            state = self.requests[request]
            state.row = self._free_rows.pop() if state.row < 0 else state.row
            first = len(state.pages) - count
            self.whole.fill(state.row, first, state.pages[first:])
        rows, num_tokens = self.rows(new)
        for recent in self.recent.values():
            recent.borrow(rows, num_tokens + list(new.values()))
        return given

    def settle(self, requests: Iterable[Hashable]) -> None:
        for recent in self.recent.values():
            recent.settle(*self.rows(requests))

    def rewind(self, request: Hashable, num_tokens: int) -> None:
        super().rewind(request, num_tokens)
        self.settle([request])

    def release(self, request: Hashable) -> None:
        state = self.requests[request]
        state.num_tokens = 0
        self.settle([request])
        super().release(request)
        self._free_rows.append(state.row)

    def rows(self, requests: Iterable[Hashable]) -> tuple[np.ndarray, np.ndarray]:
        """int64: the tables' rows of requests, and how many tokens these have."""
        states = [self.requests[request] for request in requests]
        return np.array([x.row for x in states]), np.array([x.num_tokens for x in states])
