"""The pages of a cache, and which request has which of them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Request:
    """What a request has of a cache: its pages, the first of which may be another request's."""

    pages: list[int] = field(default_factory=list)
    num_shared: int = 0  # pages of another request
    num_tokens: int = 0  # cached tokens


class Pages:
    """Gives pages to requests. A request is any hashable name; it begins with its first pages."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
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

    def reserve(self, op: str, new: Mapping[Hashable, int]) -> None:
        """Gives every request the pages for so many new tokens, or raises and gives none."""
        missing = {}
        for request, count in new.items():
            state = self.find(request)
            num_pages = -(-(state.num_tokens + count) // self.page_size)
            missing[request] = max(num_pages - len(state.pages), 0)  # pages of a failed step stay
        if sum(missing.values()) > self.num_free:
            raise MemoryError(
                f"{op}: {sum(missing.values())} more pages needed, {self.num_free} free: free() "
                "requests that are done, or make num_pages larger"
            )
        for request, count in missing.items():
            state = self.requests.setdefault(request, Request())
            state.pages += [self._free.pop() for _ in range(count)]

    def advance(self, request: Hashable, num_tokens: int) -> None:
        """Counts tokens that are in the cache now. Of drafts, those that were accepted: the others
        are overwritten."""
        self.requests[request].num_tokens += num_tokens

    def rewind(self, request: Hashable, num_tokens: int) -> None:
        """Forgets a request's last tokens. Pages behind the end go back."""
        state = self.requests[request]
        state.num_tokens -= num_tokens
        kept = max(-(-state.num_tokens // self.page_size), state.num_shared)
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
        """int64: where tokens at these positions of a request lie."""
        pages = np.array(self.requests[request].pages, np.int64)
        return pages[positions // self.page_size] * self.page_size + positions % self.page_size
