"""Streams of several producers in one call, on the fake GPU: what one of them answers says nothing
of the others."""

from __future__ import annotations

import itertools

import pytest
from dlpack_producer import CUDA
from exchange_producer import Exchanged, OtherExchanged
from fake_gpu import CupyArray
from fake_gpu_calls import LEGACY, STATES


def first(x):
    return Exchanged(x, place=(CUDA, 0))


def second(x):
    return OtherExchanged(x, place=(CUDA, 0))


@pytest.fixture
def streams(gpu, exchange, cupy, monkeypatch):
    """The current streams of three frameworks, no two of which are one."""
    exchange.stream, cupy.stream = gpu.new_stream(), gpu.new_stream()
    monkeypatch.setattr(OtherExchanged, "stream", gpu.new_stream())
    return {first: exchange.stream, second: OtherExchanged.stream, CupyArray: cupy.stream}


ORDERS = [
    order
    for order in itertools.product((first, second, CupyArray), repeat=4)
    if len(set(order)) > 1
]


def runs(order) -> list:
    """The producers in their order, each once where several arrays of it stand side by side."""
    return [make for make, _ in itertools.groupby(order)]


def test_every_producer_is_asked(package, gpu, streams):
    """A call waits for the stream of each, in whatever order their arrays come."""
    for order in ORDERS:
        stream = gpu.new_stream()
        arrays = [make(x) for make, x in zip(order, STATES, strict=True)]
        gpu.calls()
        package.merge_attn_states(*arrays, stream=stream)
        calls = gpu.calls()
        assert calls.count("cudaStreamWaitEvent") == len(runs(order)), order
        assert gpu.launch == (stream, 0)


def test_the_call_s_own_stream_is_not_waited_for(package, gpu, streams):
    for order, own in itertools.product(ORDERS[::5], (first, second, CupyArray)):
        arrays = [make(x) for make, x in zip(order, STATES, strict=True)]
        gpu.calls()
        package.merge_attn_states(*arrays, stream=streams[own])
        waits = gpu.calls().count("cudaStreamWaitEvent")
        assert waits == len([make for make in runs(order) if make is not own]), (order, own)


def test_two_producers_and_no_stream_given(package, gpu, streams):
    """The text names the first array of each, and both streams."""
    names = ("out_a", "lse_a", "out_b", "lse_b")
    for order in ORDERS:
        arrays = [make(x) for make, x in zip(order, STATES, strict=True)]
        other = next(i for i, make in enumerate(order) if make is not order[0])
        with pytest.raises(ValueError) as info:
            package.merge_attn_states(*arrays)
        assert str(info.value) == (
            f"merge_attn_states: `{names[other]}` must come from the current stream of `out_a` "
            f"({streams[order[0]]}), got one whose producer works on another "
            f"({streams[order[other]]}): pass stream=, or make the two equal"
        )


def test_two_producers_on_one_stream(package, gpu, streams, exchange, monkeypatch):
    monkeypatch.setattr(OtherExchanged, "stream", exchange.stream)
    package.merge_attn_states(*map(first, STATES[:2]), *map(second, STATES[2:]))
    assert gpu.launch == (exchange.stream, 0)
    monkeypatch.setattr(OtherExchanged, "stream", LEGACY)
    exchange.stream = 0
    package.merge_attn_states(*map(first, STATES[:2]), *map(second, STATES[2:]))
    assert gpu.launch == (0, 0)
