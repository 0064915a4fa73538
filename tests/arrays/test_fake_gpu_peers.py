"""merge_attn_partials of parts in the memory of several GPUs, on the fake GPUs of fake_gpu.py, of
which the driver knows what memory all can read. A rank merges on the GPU of `out`."""

from __future__ import annotations

import ctypes
import sys

import numpy as np
import pytest
from fake_gpu import CupyArray, on_gpu
from fake_gpu_calls import exchanged, read
from helpers import assert_same_bits

import sparse_mla

RANKS = 3
OWN = 0  # the GPU of this process; the others are device 1
WORDS = "`{}` must be in memory that cuda:0 can read, got memory of cuda:1 without peer access"


def make_world() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The memory that ranks lend to each other, and the outs and lses there."""
    rng = np.random.default_rng(0)
    memory = np.zeros(RANKS * (2 * 3 * 8 + 2 * 3), np.float32)
    outs = memory[: RANKS * 48].reshape(RANKS, 2, 3, 8)
    lses = memory[RANKS * 48 :].reshape(RANKS, 2, 3)
    outs[:], lses[:] = rng.normal(0, 1, outs.shape), rng.normal(0, 1, lses.shape)
    return memory, outs, lses


def map_memory(gpu, x: np.ndarray) -> None:
    gpu.ask("map", ctypes.c_void_p(x.ctypes.data), ctypes.c_int64(x.nbytes), 1)


@pytest.fixture(params=["exchange API", "CuPy", "unknown"])
def put(request, cupy):
    return {"exchange API": exchanged, "CuPy": CupyArray, "unknown": on_gpu}[request.param]


def results(device_id: int, put) -> tuple[np.ndarray, np.ndarray, dict]:
    out, lse = np.full((2, 3, 8), 7, np.float32), np.full((2, 3), 7, np.float32)
    return out, lse, {"out": put(out, device_id), "lse": put(lse, device_id)}


@pytest.mark.parametrize("own_rank", range(RANKS))
def test_each_rank_reads_the_memory_of_all(package, gpu, put, own_rank):
    """The first part is a peer's, or the own one: the list is in the order of ranks."""
    memory, outs, lses = make_world()
    want = sparse_mla.merge_attn_partials(list(outs), list(lses))
    map_memory(gpu, memory)
    gpu.calls()
    places = [OWN if rank == own_rank else 1 for rank in range(RANKS)]
    parts = [list(map(put, side, places)) for side in (outs, lses)]
    out, lse, given = results(OWN, put)
    got = package.merge_attn_partials(*parts, **given)
    assert got[0] is given["out"] and got[1] is given["lse"]
    assert_same_bits(out, want[0])
    assert_same_bits(lse, want[1])
    made = [call.split("@")[0] for call in gpu.calls()]
    assert gpu.launch == (0, OWN)
    assert made.count("launch") == 1
    assert made.count("cudaPointerGetAttributes") == 2 * (RANKS - 1)
    assert not any("ynchronize" in call or "opy" in call for call in made), made


def test_own_device_number_asks_nothing(package, gpu, put):
    """Symmetric memory often comes as arrays of the own device: they are as any other."""
    memory, outs, lses = make_world()
    gpu.calls()
    out, _, given = results(OWN, put)
    package.merge_attn_partials(list(map(put, outs)), list(map(put, lses)), **given)
    assert_same_bits(out, sparse_mla.merge_attn_partials(outs, lses)[0])
    assert not any("Attributes" in call for call in gpu.calls())
    assert memory.any()


def test_lse_is_made_where_out_is(package, gpu):
    memory, outs, lses = make_world()
    map_memory(gpu, memory)
    out, _, given = results(OWN, on_gpu)
    parts = [[on_gpu(x, 1) for x in side] for side in (outs, lses)]
    _, lse = package.merge_attn_partials(*parts, out=given["out"])
    assert lse.device == "cuda:0"
    want = sparse_mla.merge_attn_partials(outs, lses)
    assert_same_bits(out, want[0])
    assert_same_bits(read(lse), want[1])


def test_without_results_the_first_part_decides(package, gpu):
    memory, outs, lses = make_world()
    map_memory(gpu, memory)
    parts = [[on_gpu(x, 1) for x in side] for side in (outs, lses)]
    out, lse = package.merge_attn_partials(*parts)
    assert (out.device, lse.device, gpu.launch[1]) == ("cuda:1", "cuda:1", 1)
    assert not any("Attributes" in call for call in gpu.calls())


def test_producers_elsewhere_are_told_no_order(package, gpu):
    """A stream of this device would mean nothing to them."""
    memory, outs, lses = make_world()
    map_memory(gpu, memory)
    stream = gpu.new_stream()
    _, _, given = results(OWN, on_gpu)
    parts = [[on_gpu(x, rank != 1) for rank, x in enumerate(side)] for side in (outs, lses)]
    package.merge_attn_partials(*parts, **given, stream=stream)
    for side in parts:
        told = [x.requests[0]["stream"] for x in side]
        assert told == [-1, stream, -1]


def test_memory_elsewhere_is_kept_until_the_work_is_over(package, gpu):
    """Its producer's stream does not know when the merge has read it."""
    memory, outs, lses = make_world()
    map_memory(gpu, memory)
    _, _, given = results(OWN, exchanged)
    parts = [[exchanged(x, 1) for x in side] for side in (outs, lses)]
    counts = [sys.getrefcount(parts[0][0])]
    gpu.set_busy()
    package.merge_attn_partials(*parts, **given)
    counts.append(sys.getrefcount(parts[0][0]))
    gpu.finish()
    package.merge_attn_partials(exchanged(outs), exchanged(lses))
    counts.append(sys.getrefcount(parts[0][0]))
    assert counts == [counts[0], counts[0] + 1, counts[0]]


@pytest.mark.parametrize("part", range(RANKS))
@pytest.mark.parametrize("name", ["outs", "lses"])
def test_memory_out_of_reach_is_refused(package, gpu, put, name, part):
    """One text, and nothing is written or launched."""
    memory, outs, lses = make_world()
    map_memory(gpu, memory)
    sides = {"outs": list(outs), "lses": list(lses)}
    sides[name][part] = sides[name][part].copy()
    out, lse, given = results(OWN, put)
    parts = {side: [put(x, 1) for x in arrays] for side, arrays in sides.items()}
    gpu.calls()
    with pytest.raises(ValueError) as info:
        package.merge_attn_partials(**parts, **given)
    assert str(info.value) == f"merge_attn_partials: {WORDS.format(f'{name}[{part}]')}"
    assert (out == 7).all() and (lse == 7).all()
    assert not any(call.startswith("launch") for call in gpu.calls())


def test_what_must_be_on_the_device_of_out(package, gpu, put):
    """Sinks, lse and stacked parts are not lists of peers' memory; nor is host memory a peer's."""
    memory, outs, lses = make_world()
    map_memory(gpu, memory)
    parts = [[put(x, 1) for x in side] for side in (outs, lses)]
    _, _, given = results(OWN, put)
    sinks = put(np.zeros(3, np.float32), 1)
    like = "must be on cuda:0 like `outs\\[0\\]`, got"
    with pytest.raises(ValueError, match=f"`attn_sink` {like} cuda:1"):
        package.merge_attn_partials(*parts, attn_sink=sinks, **given)
    with pytest.raises(ValueError, match=f"`lse` {like} cuda:1"):
        package.merge_attn_partials(*parts, out=given["out"], lse=results(1, put)[2]["lse"])
    with pytest.raises(ValueError, match=f"`lses` {like} cuda:1"):
        package.merge_attn_partials(parts[0], put(lses, 1), **given)
    with pytest.raises(
        ValueError, match=r"`outs\[2\]` must be on cuda:0 like `outs\[0\]`, got cpu"
    ):
        package.merge_attn_partials([*parts[0][:2], outs[2]], parts[1], **given)
    with pytest.raises(ValueError, match="`out` must be on cuda:1 like `outs`, got cuda:0"):
        package.merge_attn_partials(put(outs, 1), put(lses, 1), **given)
