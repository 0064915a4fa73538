"""A DeepSeek V4 layer (sparse_mla/v4/forward.py) with PyTorch's arrays and modules, on the CPU."""

from __future__ import annotations

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
