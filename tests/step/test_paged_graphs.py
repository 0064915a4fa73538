"""Layers of captured steps beside layers of eager builds, bit for bit. On a GPU the layers are in a
graph, and a replay of the metadata is in front of it or in it. On the CPU they are called again,
with arrays that stay where they are."""

from __future__ import annotations

import os

import device
import numpy as np
import pytest
from helpers import assert_same_bits
from paged_layers import Layer, kinds_of
from paged_replays import FIXED_MODES, LastingEngine
from paged_steps import called, check, paged

ROUNDS = int(os.environ.get("SMLA_RANDOM_CASES", 1000 if device.ON_CUDA else 60))
SIZES = (1, 3, 8, 16) if device.ON_CUDA else (1, 3)


def record(run):
    """What runs the work again: a graph, or the function itself."""
    if not device.ON_CUDA:
        return run
    import gpu

    return gpu.capture(run)[0].replay


class Captured:
    """A layer of a captured size, with its metadata inside and in front of a graph."""

    def __init__(self, engine: LastingEngine, bs: int, kind: str, left: int) -> None:
        self.engine, self.bs, self.kind, self.left = engine, bs, kind, left
        self.metadata = engine.capture(bs)
        counted = engine.pad(engine.draw(0, longest=1), bs)[1]
        arrays = self.arrays = engine.arrays(counted)
        layer = self.layer(counted)
        self.given = engine.layer_arrays((bs, kind), layer)
        shape = (engine.tokens(bs), layer.heads[0])
        self.out = engine.put(np.zeros((*shape, layer.dims[1]), layer.q.dtype))
        self.lse = engine.put(np.zeros(shape, np.float32))
        self.scale = layer.scale
        mode = called(engine.mode)

        def refresh() -> None:
            engine.builder.replay(mode, bs, spec_step=engine.spec_step, **arrays)

        def attend() -> None:
            self.attend(self.metadata, self.given, self.out, self.lse)

        def both() -> None:
            refresh()
            attend()

        both()
        self.refresh, self.layers, self.whole = refresh, record(attend), record(both)

    def layer(self, batch) -> Layer:
        return Layer(batch, self.kind, self.left, seed=int(self.engine.rng.integers(1000)))

    def attend(self, metadata, given, out, lse) -> None:
        paged.attention(
            metadata,
            *given,
            softmax_scale=self.scale,
            sliding_window_size=self.left if self.kind == "window" else -1,
            is_local=self.kind == "local",
            is_cross=self.kind == "cross",
            out=out,
            lse=lse,
        )

    def step(self, is_inside: bool) -> None:
        """The next batch of the engine, twice: replayed, and built for itself."""
        engine = self.engine
        counted = engine.pad(engine.draw(self.bs), self.bs)[1]
        engine.arrays(counted)
        engine.layer_arrays((self.bs, self.kind), self.layer(counted))
        if is_inside:
            self.whole()
        else:
            self.refresh()
            self.layers()
        check(counted, self.metadata)
        eager = counted.build()
        out, lse = (
            engine.put(np.full(x.shape, 7, device.host(x).dtype)) for x in (self.out, self.lse)
        )
        self.attend(eager, self.given, out, lse)
        used = int(device.host(eager.cu_seqlens_q)[-1])
        for got, want in ((self.out, out), (self.lse, lse)):
            assert_same_bits(device.host(got)[:used], device.host(want)[:used])


@pytest.mark.parametrize("mode", FIXED_MODES)
@pytest.mark.parametrize("page_size", [1, 16, 64] if device.ON_CUDA else [1, 4])
def test_random_steps(mode, page_size):
    for seed in range(4):
        rng = np.random.default_rng([seed, page_size, len(mode), 21])
        engine = LastingEngine(rng, mode, page_size, max_bs=max(SIZES))
        layers = []
        for bs in SIZES:
            kinds = kinds_of(rng, engine.draw(bs))
            layers.append(Captured(engine, bs, *kinds[int(rng.integers(len(kinds)))]))
        for i in range(-(-ROUNDS // 4)):
            layer = layers[int(rng.integers(len(layers)))]
            try:
                layer.step(is_inside=i % 2 == 0)
            except BaseException as error:
                error.add_note(
                    f"seed {seed}, {layer.bs}, {layer.kind}, {layer.left}, {engine.config}"
                )
                raise
