"""Paged steps on fake GPUs: what a build asks of CUDA, and the order of builds and layers."""

from __future__ import annotations

import functools

import numpy as np
import paged_steps
import pytest
from fake_gpu import CupyArray
from helpers import assert_same_bits
from paged_layers import Layer

PLACE = 1


def put(x):
    return None if x is None else CupyArray(x, PLACE)


class Engine:
    """Verification of drafts, as a chain or as a tree, on a fake GPU."""

    def __init__(self, package, topk: int) -> None:
        self.package, self.batch = package, paged_steps.make_verification(topk)
        config = package.paged.Config(**self.batch.config, device=f"cuda:{PLACE}")
        self.builder = package.paged.MetadataBuilder(config, put(self.batch.req_to_token))
        self.layer = Layer(self.batch, has_sink=True)
        self.arrays = [put(x) for x in (self.layer.q, *self.layer.caches)]

    def build(self, stream=None):
        batch = self.batch
        return self.builder.build(
            "target_verify",
            put(batch.seq_lens),
            put(batch.pool),
            custom_mask=put(batch.custom_mask),
            seq_lens_cpu=batch.seq_lens,
            stream=stream,
        )

    def fixed(self) -> dict:
        batch = self.batch
        given = {"seq_lens": put(batch.seq_lens), "req_pool_indices": put(batch.pool)}
        return {**given, "custom_mask": put(batch.custom_mask)}

    def attend(self, metadata, stream=None):
        sink = put(self.layer.sink)
        options = {"softmax_scale": self.layer.scale, "attn_sink": sink, "stream": stream}
        return self.package.paged.attention(metadata, *self.arrays, **options)


@pytest.mark.parametrize("topk", [1, 2])
def test_a_build_is_one_launch(package, gpu, cupy, topk):
    """Nothing is copied, and the host waits for nothing."""
    engine = Engine(package, topk)
    engine.build()
    gpu.calls()
    engine.build()
    names = [call.split("@")[0] for call in gpu.calls()]
    assert names.count("launch") == 1
    waits = {"cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize"}
    assert not waits & {*names}
    assert not any("Memcpy" in name or "Alloc" in name or "Malloc" in name for name in names)


@pytest.mark.parametrize("topk", [1, 2])
def test_a_layer_is_the_cpu_s(package, gpu, cupy, topk):
    engine = Engine(package, topk)
    stream = gpu.new_stream(PLACE)
    out, lse = engine.attend(engine.build(stream), stream)
    want = engine.layer.check(engine.batch.build())
    assert_same_bits(np.asarray(out.array), want["out"])
    assert_same_bits(np.asarray(lse.array), want["lse"])


def waits_for_another(gpu, cupy, run, stream) -> bool:
    """Whether a run on a stream, where arrays are ready, waits for another stream before it
    launches."""
    cupy.stream = stream
    gpu.calls()
    run()
    names = [call.split("@")[0] for call in gpu.calls()]
    return "cudaStreamWaitEvent" in names[: names.index("launch")]


@pytest.mark.parametrize("topk", [1, 2])
def test_builds_and_layers_follow_each_other(package, gpu, cupy, topk):
    """A layer on another stream waits for the build, and the next build for the layer."""
    engine = Engine(package, topk)
    first, second = (gpu.new_stream(PLACE) for _ in range(2))
    cupy.current = PLACE

    waits_first = functools.partial(waits_for_another, gpu, cupy)
    made = []
    assert not waits_first(lambda: made.append(engine.build(first)), first)
    assert waits_first(lambda: engine.attend(made[0], second), second)
    assert waits_first(lambda: made.append(engine.build(first)), first)
    assert not waits_first(lambda: made.append(engine.build(first)), first)


# --- captures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("topk", [1, 2])
def test_a_replay_is_one_launch(package, gpu, cupy, topk):
    """Nothing is copied or allocated, and the host waits for nothing and reads no lengths."""
    engine = Engine(package, topk)
    arrays = engine.fixed()
    metadata = engine.builder.capture("target_verify", 2, 6, **arrays)
    before = gpu.counts()
    gpu.calls()
    names = []
    for _ in range(1000):
        assert engine.builder.replay("target_verify", 2, **arrays) is metadata
        names += [call.split("@")[0] for call in gpu.calls()]
    assert names.count("launch") == 1000
    assert gpu.counts() == before
    forbidden = ("Synchronize", "Memcpy", "Memset", "Alloc", "Malloc", "Free")
    assert not [name for name in names if any(word in name for word in forbidden)]


@pytest.mark.parametrize("topk", [1, 2])
def test_steps_in_a_capture(package, gpu, cupy, topk):
    """A replay and a layer within a graph: their kernels alone, as without one."""
    engine = Engine(package, topk)
    stream = gpu.new_stream(PLACE)
    cupy.stream, cupy.current = stream, PLACE
    arrays = engine.fixed()
    metadata = engine.builder.capture("target_verify", 2, 6, **arrays, stream=stream)
    want = [np.asarray(x.array).copy() for x in engine.attend(metadata, stream)]
    before = gpu.counts()
    gpu.capture(stream)
    gpu.calls()
    engine.builder.replay("target_verify", 2, **arrays, stream=stream)
    got = engine.attend(metadata, stream)
    names = [call.split("@")[0] for call in gpu.calls()]
    gpu.capture(stream, False)
    assert names.count("launch") == (2 if topk == 1 else 4)  # two parts, and their merge
    assert gpu.counts() == before
    assert not {"cudaEventRecord", "cudaStreamWaitEvent", "cudaMemcpyAsync"} & {*names}
    for x, y in zip(got, want, strict=True):
        assert_same_bits(np.asarray(x.array), y)


@pytest.mark.parametrize("topk", [1, 2])
def test_replays_and_layers_follow_each_other(package, gpu, cupy, topk):
    """On streams of their own, whichever the capture was on."""
    engine = Engine(package, topk)
    first, second = (gpu.new_stream(PLACE) for _ in range(2))
    cupy.current = PLACE
    arrays = engine.fixed()
    metadata = engine.builder.capture("target_verify", 2, 6, **arrays, stream=second)
    engine.attend(metadata, second)

    waits_first = functools.partial(waits_for_another, gpu, cupy)

    def replay(stream):
        engine.builder.replay("target_verify", 2, **arrays, stream=stream)

    assert waits_first(lambda: replay(first), first)
    assert not waits_first(lambda: replay(first), first)
    assert waits_first(lambda: engine.attend(metadata, second), second)
    assert waits_first(lambda: replay(first), first)
