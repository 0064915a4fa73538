"""The streams that the parts of a layer run on, and the order between them.

A lane is a stream, with what makes it the current one of the arrays' framework. PyTorch and CuPy
have a current stream, on which their callables run; those of other frameworks get `stream=`. On a
CPU there is one lane, and it does nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

from sparse_mla import _C

MAX_SIDES = 3


Context = AbstractContextManager[Any]


class Lane:
    """One stream of a call. `with lane:` makes it the current one."""

    def __init__(
        self,
        handle: int | None = None,
        enter: Callable[[], Context] | None = None,
        keywords: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.handle: Any = handle  # None on the CPU, which has one lane
        self.keywords = keywords  # what a callable gets besides
        self._enter = enter  # None: the stream is the current one, or there is none
        self._contexts: list[Context] = []

    def __enter__(self) -> Lane:
        if self._enter is not None:
            context = self._enter()
            context.__enter__()
            self._contexts.append(context)
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._enter is not None:
            self._contexts.pop().__exit__(*exception)

    def call(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Calls a callable of the caller on this stream."""
        with self:
            return function(*arguments, **keywords, **self.keywords)


class Lanes:
    """The lanes of one call: `main`, and up to three beside it. The call is in the block `entered`,
    where the main stream is the current one."""

    def __init__(self, x: Any, stream: Any, streams: Sequence[Any]) -> None:
        given = check_streams(streams)
        self.device_id, handle = _C.find_stream(x, stream)
        self.main = self.entered = Lane()
        self.sides: list[Lane] = []
        self._forked: list[Lane] = []
        if self.device_id >= 0:
            make = _lane_maker(x, self.device_id)
            self.entered = make(stream, handle)
            self.main = Lane(handle, keywords=self.entered.keywords)
            self.sides = [make(side, _C.read_stream(side)) for side in given]

    def side(self, i: int, otherwise: Lane) -> Lane:
        """The lane beside the main one with this number, if there is one."""
        return self.sides[i] if i < len(self.sides) else otherwise

    def order(self, first: Lane, then: Lane) -> None:
        """Makes what is given to `then` from now on wait for what `first` has been given."""
        if first is not then:
            _C.order_streams(self.device_id, first.handle, then.handle)

    def fork(self, lanes: Iterable[Lane]) -> None:
        """Makes these lanes wait for the main one."""
        for lane in dict.fromkeys(lanes):
            if lane is not self.main:
                self.order(self.main, lane)
                self._forked.append(lane)

    def join(self) -> None:
        """Makes the main lane wait for those beside it."""
        while self._forked:
            self.order(self._forked.pop(), self.main)


def check_streams(streams: Any) -> Sequence[Any]:
    if isinstance(streams, (str, bytes)) or not isinstance(streams, Sequence):
        raise TypeError(
            f"SparseMLA.forward: `streams` must be a sequence of streams, got "
            f"{type(streams).__name__}"
        )
    if len(streams) > MAX_SIDES:
        raise ValueError(
            f"SparseMLA.forward: `streams` must be at most {MAX_SIDES} streams, got {len(streams)}"
        )
    for i, stream in enumerate(streams):
        if stream is None:
            raise TypeError(
                f"SparseMLA.forward: `streams[{i}]` must be a handle or a stream object, got None"
            )
    return streams


def _lane_maker(x: Any, device_id: int) -> Callable[[Any, int | None], Lane]:
    """What makes a lane of a stream as the caller gives it, None for the current one."""
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and isinstance(x, torch.Tensor):
        stream_type, context = torch.cuda.Stream, torch.cuda.stream
        external = torch.cuda.ExternalStream
    elif cupy is not None and isinstance(x, cupy.ndarray):
        stream_type, context = cupy.cuda.Stream, lambda stream: stream
        external = cupy.cuda.ExternalStream
    else:
        return lambda _, handle: Lane(handle, keywords={"stream": handle})

    def make(stream: Any, handle: int | None) -> Lane:
        if stream is None:
            return Lane(handle)
        own = stream if isinstance(stream, stream_type) else external(handle, device_id)
        return Lane(handle, lambda: context(own))

    return make
