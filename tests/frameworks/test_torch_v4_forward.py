"""A DeepSeek V4 layer (sparse_mla/v4/forward.py) with PyTorch's arrays and modules, on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import assert_same_bits, find_framework
from v4_world import World

import sparse_mla

pytestmark = pytest.mark.torch
STEPS = [([(0, 0, 20), (1, 0, 9)], 1), ([(0, 20, 2), (1, 9, 1)], 0), ([(1, 10, 12)], 2)]


@pytest.fixture(scope="module")
def framework():
    return find_framework("torch", "cpu")


@pytest.mark.parametrize("path", ["direct", "separate"])
@pytest.mark.parametrize("ratio", [1, 4, 16])
def test_the_bits_are_those_of_numpy(framework, ratio, path):
    worlds = [
        World(sparse_mla, ratio, (22, 22), options={"path": path}, **arrays)
        for arrays in ({}, {"to": put(framework), "back": framework.get})
    ]
    for parts, padding in STEPS:
        want, got = (world.step(parts, padding) for world in worlds)
        assert_same_bits(got, want)
    for name in worlds[0].memory:
        assert_same_bits(worlds[1].bytes_of(name), worlds[0].bytes_of(name))


def put(framework):
    return lambda x: None if x is None else framework.put(x)


def test_modules_as_projections(framework):
    """What an engine has: modules, whose results are tensors; `wo_b` may write into `out`."""
    torch = framework.module
    world = World(sparse_mla, 4, (22, 22), to=put(framework), back=framework.get)

    class Projection(torch.nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            is_wide = name.endswith("wkv_wgate")
            self.dtype = torch.float32 if is_wide else torch.bfloat16
            weight = torch.from_numpy(world.matrices[name])
            self.weight = torch.nn.Parameter(weight)

        def forward(self, x, out=None):
            y = (x.float() @ self.weight).to(self.dtype)
            return y if out is None else out.copy_(y)

    for name in world.layer.projections:
        world.layer.projections[name] = Projection(name)
    with torch.no_grad():
        metadata = world.build([(0, 0, 20)])
        x = world.to(world.inputs([(0, 0, 20)]))
        want = world.layer.forward(x, world.caches, metadata)
        assert isinstance(want, torch.Tensor)
        out = torch.zeros_like(want)
        assert world.layer.forward(x, world.caches, metadata, out=out) is out
        assert torch.equal(out, want)
        assert out.any()
        assert not world.layer.forward(x, world.caches, None).any()


@pytest.mark.parametrize("ratio", [1, 4, 16])
def test_layers_of_two_frameworks_share_a_builder(framework, ratio):
    """Projections get arrays of their layer's framework, whoever used the builder's memory last."""
    kinds = {np.ndarray: {}, framework.module.Tensor: {"to": put(framework), "back": framework.get}}
    worlds = [World(sparse_mla, ratio, (22, 22), **arrays) for arrays in kinds.values()]
    met: set[type] = set()

    def watched(projection):
        def project(x, *more, **options):
            met.add(type(x))
            return projection(x, *more, **options)

        return project

    for world in worlds:
        world.builder = worlds[0].builder
        projections = world.layer.projections
        projections |= {name: watched(projection) for name, projection in projections.items()}
    for parts, padding in STEPS:
        results = []
        for world, kind in zip(worlds, kinds, strict=True):
            met.clear()
            results.append(world.step(parts, padding))
            assert met == {kind}
        assert_same_bits(*results)
