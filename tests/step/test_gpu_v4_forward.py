"""A DeepSeek V4 layer on a GPU: against fp64, on one stream and on several, and in graphs that
replay after builds."""

from __future__ import annotations

import device
import gpu
import numpy as np
import pytest
import reference as ref
from gpu import capture, torch
from helpers import assert_same_bits
from test_v4_forward import FORMATS, PATHS, RATIOS, check_caches, keep_z, random_steps, tokens_of
from v4_world import World

import sparse_mla

LOGIT_UNIT = 2.0**-8  # the error of logits on FP8 tensor cores
REQUESTS, TOKENS = 5, 10


def put(x):
    return None if x is None else gpu.put(x)


class GpuWorld(World):
    """A world on the GPU. Its projections stay there: products of whole batches."""

    def __init__(self, ratio: int, lengths, **options) -> None:
        more = options.pop("options", {})
        super().__init__(
            sparse_mla, ratio, lengths, to=put, back=gpu.get, logit_unit=LOGIT_UNIT,
            options={"device": "cuda", **more}, **options,
        )  # fmt: skip
        self.fixed: dict = {}
        self.is_fixed = False

    def place(self, name, x):
        """With `is_fixed`, the arrays of an engine that captures graphs: at one address."""
        if not self.is_fixed:
            return put(x)
        if name not in self.fixed:
            self.fixed[name] = put(x)
        self.fixed[name].copy_(put(x))
        return self.fixed[name]

    def use_products(self) -> None:
        """Projections as an engine has them, which never leave the device."""
        for name, matrix in self.matrices.items():
            weight = put(matrix).bfloat16()
            is_wide = name.endswith("wkv_wgate")

            def multiply(x, weight=weight, is_wide=is_wide):
                y = x @ weight
                return y.float() if is_wide else y

            self.layer.projections[name] = multiply

    def caches_on_host(self) -> dict:
        return {name: self.bytes_of(name).copy() for name in self.memory}


def new_streams(count: int) -> list:
    return [torch.cuda.Stream() for _ in range(count)]


# --- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("formats", FORMATS, ids=lambda f: "-".join(map(str, f.values())))
@pytest.mark.parametrize("ratio", RATIOS)
def test_the_layer(ratio, formats, path):
    """Every result within the chained bounds, every byte of the caches as on the CPU."""
    lengths = (61, 40, 9)
    world = GpuWorld(ratio, lengths, seed=ratio, options={"path": path}, **formats)
    here = World(sparse_mla, ratio, lengths, seed=ratio, options={"path": path}, **formats)
    kept = keep_z(world)
    close = count = 0
    for parts, padding in random_steps(np.random.default_rng(ratio), lengths):
        world.step(parts, padding)
        here.step(parts, padding)
        world.sync()
        for t, (b, p) in enumerate(tokens_of(parts)):
            found = world.reference(b, p, gathered=path == "separate", **device.BOUNDS)
            count += 1
            close += found is None
            if found is not None:
                assert ref.worst_ratio(kept[-1][t : t + 1], *found) <= 1
    assert close <= count / 2
    for b, n in enumerate(lengths):
        check_caches(world, b, n)
    for name, bits in here.memory.items():
        assert_same_bits(world.bytes_of(name), bits)


# --- streams -------------------------------------------------------------------------------------


def decode_parts(lengths) -> list:
    return [(b, n - 1, 1) for b, n in enumerate(lengths)]


def filled(ratio: int, **options) -> tuple[GpuWorld, list]:
    """A world whose requests have all but their last token."""
    lengths = (61, 44, 130, 7)
    world = GpuWorld(ratio, lengths, **options)
    for b, n in enumerate(lengths):
        for start in range(0, n - 1, 40):
            world.step([(b, start, min(40, n - 1 - start))])
    return world, decode_parts(lengths)


@pytest.mark.parametrize("most", [1, 1024])
@pytest.mark.parametrize("ratio", RATIOS)
def test_streams_change_no_bit(ratio, most):
    """0, 1, 2 and 3 streams, a hundred calls and a hundred replays of each."""
    world, parts = filled(ratio, options={"overlap_gemm_tokens": most})
    world.use_products()
    metadata = world.build(parts, 1)
    x = put(world.inputs(parts, 1))
    want = world.layer.forward(x, world.caches, metadata)
    bits = world.caches_on_host()
    assert want.any()
    for count in range(4):
        streams = new_streams(count)

        def call(streams=streams):
            return world.layer.forward(x, world.caches, metadata, streams=streams)

        for _ in range(100):
            assert torch.equal(call(), want)
        graph, result = capture(call)
        for _ in range(100):
            result.fill_(float("nan"))
            graph.replay()
            assert torch.equal(result, want)
    for name, kept in bits.items():
        assert_same_bits(world.bytes_of(name), kept)


@pytest.mark.parametrize("late", range(3))
@pytest.mark.parametrize("ratio", [4, 16])
def test_a_delayed_stream_changes_nothing(ratio, late):
    """A kernel that sleeps on an auxiliary stream, before the call and inside a part."""
    world, parts = filled(ratio)
    world.use_products()
    metadata = world.build(parts)
    x = put(world.inputs(parts))
    want = world.layer.forward(x, world.caches, metadata).clone()
    streams = new_streams(3)
    projections = dict(world.layer.projections)

    def sleepy(name):
        def call(x):
            gpu.delay()
            return projections[name](x)

        return call

    for name in ("wkv_wgate", "index_wkv_wgate", "index_wq_b"):
        if name in projections:
            world.layer.projections[name] = sleepy(name)
    for _ in range(3):
        gpu.delay(streams[late])
        out = world.layer.forward(x, world.caches, metadata, streams=streams)
        assert torch.equal(out, want)


@pytest.mark.parametrize("ratio", RATIOS)
def test_steps_on_streams_of_their_own(ratio):
    """A build on one stream, its layer on another, whichever is late: the next build waits for all
    that reads the step."""
    lengths = (40, 33)
    worlds = [GpuWorld(ratio, lengths) for _ in range(2)]
    for world in worlds:
        world.use_products()
    steps = [([(0, 0, 20), (1, 0, 7)], 0), ([(0, 20, 1), (1, 7, 2)], 1), ([(0, 21, 19)], 0)]
    want = [worlds[0].step(*step) for step in steps]
    world, results = worlds[1], []
    inputs = [put(world.inputs(*step)) for step in steps]  # kept: a late stream reads them
    for x, (parts, padding) in zip(inputs, steps, strict=True):
        with torch.cuda.stream(torch.cuda.Stream()):
            metadata = world.build(parts, padding)
        main = torch.cuda.Stream()
        main.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(main):
            gpu.delay()
            results.append(world.layer.forward(x, world.caches, metadata, streams=new_streams(2)))
    torch.cuda.synchronize()
    for got, expected in zip(results, want, strict=True):
        assert_same_bits(gpu.get(got)[: len(expected)], expected)


# --- graphs --------------------------------------------------------------------------------------


def decodes(rng, world: World) -> tuple[list, int]:
    """Up to five requests with two tokens each, anywhere, filled up with empty requests and padding
    tokens."""
    real = int(rng.integers(1, REQUESTS + 1))
    starts = [int(rng.integers(0, n - 2)) for n in world.lengths[:real]]
    parts = [(b, start, 2) for b, start in enumerate(starts)]
    return parts + [(0, 0, 0)] * (REQUESTS - real), TOKENS - 2 * real


@pytest.mark.parametrize("count", [0, 3])
@pytest.mark.parametrize("ratio", RATIOS)
def test_a_captured_layer_replays_after_builds(ratio, count):
    """A thousand replays, each after a build of other lengths, have the bits of eager calls."""
    lengths = (150, 90, 40, 20, 60)
    fixed, eager = (GpuWorld(ratio, lengths, seed=3) for _ in range(2))
    for world in (fixed, eager):
        world.use_products()
        for b, n in enumerate(lengths):
            for start in range(0, n, 50):
                world.step([(b, start, min(50, n - start))])
    fixed.is_fixed = True
    rng = np.random.default_rng(ratio)
    parts, padding = decodes(rng, fixed)
    metadata = fixed.build(parts, padding)
    x = put(fixed.inputs(parts, padding))
    streams = new_streams(count)
    graph, result = capture(lambda: fixed.layer.forward(x, fixed.caches, metadata, streams=streams))
    steps = [decodes(rng, fixed) for _ in range(25)]
    inputs = [put(fixed.inputs(*step)) for step in steps]
    size = fixed.builder.forward_bytes
    for i in range(1000):
        step = steps[i % len(steps)]
        x.copy_(inputs[i % len(steps)])
        fixed.build(*step)
        result.fill_(float("nan"))
        graph.replay()
        want = eager.layer.forward(inputs[i % len(steps)], eager.caches, eager.build(*step))
        assert torch.equal(result, want), i
    assert fixed.builder.forward_bytes == size
    for name, bits in eager.caches_on_host().items():
        assert_same_bits(fixed.bytes_of(name), bits)


@pytest.mark.parametrize("ratio", RATIOS)
def test_a_layer_allocates_nothing_of_its_own(ratio):
    """Projections that write into arrays of the caller leave nothing to allocate."""
    world, parts = filled(ratio)
    world.use_products()
    given = {}
    projections = dict(world.layer.projections)
    for name, function in projections.items():

        def keep(x, name=name, function=function):
            if name not in given:
                given[name] = function(x)
            return given[name]

        world.layer.projections[name] = keep
    metadata = world.build(parts)
    x = put(world.inputs(parts))
    world.layer.forward(x, world.caches, metadata, streams=new_streams(3))
    assert gpu.allocations(lambda: world.layer.forward(x, world.caches, metadata)) == []


# --- launches ------------------------------------------------------------------------------------

MOST_LAUNCHES = {4: 9, 16: 6, 1: 5}


@pytest.mark.parametrize("ratio", RATIOS)
def test_launches_of_a_small_step(ratio):
    """Without the products of projections, and without a combine of splits."""
    world, parts = filled(ratio)
    world.use_products()
    metadata = world.build(parts)
    x = put(world.inputs(parts))
    world.layer.forward(x, world.caches, metadata)
    kernels = gpu.device_work(lambda: world.layer.forward(x, world.caches, metadata))
    ours = [
        name for name in kernels
        if not any(part in name for part in ("gemm", "cutlass", "nvjet", "at::", "Mem", "combine",
                                             "project"))
    ]  # fmt: skip
    assert 0 < len(ours) <= MOST_LAUNCHES[ratio], kernels
