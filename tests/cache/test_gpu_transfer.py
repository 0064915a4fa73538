"""transfer_kv_cache between a GPU and pinned host memory, in place, and rows past 4 GiB."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import reference as ref
from device import import_quietly
from gpu import delay
from helpers import assert_same_bits
from test_transfer import ROWS, check, draw_slots, make_cache

import sparse_mla

torch, cupy = import_quietly("torch"), import_quietly("cupy")

WORDS = (
    "transfer_kv_cache: `{}` must be on cuda:0 like `src_slots` or in pinned host memory, got "
    "host memory that is not pinned"
)


def tensor(x: np.ndarray):
    if x.dtype == ref.BF16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    if x.dtype == ref.E4M3:
        return torch.from_numpy(x.view(np.uint8)).view(torch.float8_e4m3fn)
    return torch.from_numpy(x)


def pinned_numpy(memory: np.ndarray) -> np.ndarray:
    """A copy in memory that CuPy has pinned; an ndarray keeps it."""
    pinned = cupy.cuda.alloc_pinned_memory(memory.nbytes + 256)
    whole = np.frombuffer(pinned, np.uint8, memory.nbytes + 256)
    start = -whole.ctypes.data % 256
    copy = whole[start : start + memory.nbytes]
    copy[:] = memory
    return copy


class Place:
    """A cache in one of the places that a call may have it, with all memory from its start on."""

    def __init__(self, where: str, pair: tuple[np.ndarray, np.ndarray]) -> None:
        memory, cache = pair
        self.host = memory[cache.ctypes.data - memory.ctypes.data :]
        if where == "cupy":
            self.memory = pinned_numpy(self.host)
            self.cache = np.ndarray(cache.shape, cache.dtype, self.memory, 0, cache.strides)
            return
        copy = torch.from_numpy(self.host.copy())
        self.memory = copy.pin_memory() if where == "torch" else copy.cuda()
        typed = self.memory[: len(self.host) // 16 * 16].view(tensor(cache[:0]).dtype)
        self.cache = typed.as_strided(cache.shape, [s // cache.itemsize for s in cache.strides])

    def fetch(self) -> None:
        """Copies the memory back."""
        torch.cuda.synchronize()
        self.host[:] = self.memory if isinstance(self.memory, np.ndarray) else self.memory.cpu()


PLACES = [(a, b) for a in ("device", "torch", "cupy") for b in ("device", "torch", "cupy")]


@pytest.mark.parametrize(("src_place", "dst_place"), PLACES)
@pytest.mark.parametrize("fmt", ["bfloat16", "fp8_ds_mla", "fp8_v4", "fp8_index", "fp4_v41_split"])
def test_places(fmt, src_place, dst_place):
    rng = np.random.default_rng(1)
    row = ROWS[fmt]
    for count in (67, 20_000):
        src = make_cache(rng, row, "padded", count // 64 + 2, 64)
        dst = make_cache(rng, row, "pages", count // 16 + 2, 16)
        slots = draw_slots(rng, count, src[1], dst[1])

        def call(src_cache, dst_cache, *lists, src=src, dst=dst, **options):
            places = Place(src_place, src), Place(dst_place, dst)
            on_gpu = [torch.from_numpy(x).cuda() for x in lists]
            given = [place.cache for place in places]
            assert sparse_mla.transfer_kv_cache(*given, *on_gpu, **options) is given[1]
            for place in places:
                place.fetch()
            return dst_cache

        check(row, src, dst, *slots, call)


def caches(seed: int = 2):
    """A cache on the device and another one in pinned memory, and slots of some rows of each."""
    rng = np.random.default_rng(seed)
    src, dst = (rng.integers(0, 256, (4, 16, 656), np.uint8) for _ in range(2))
    slots = [torch.from_numpy(rng.permutation(64)[:40]).cuda() for _ in range(2)]
    return torch.from_numpy(src).cuda(), torch.from_numpy(dst).pin_memory(), *slots


def copied(src, dst, src_slots, dst_slots) -> np.ndarray:
    want = dst.cpu().clone()
    want.flatten(0, 1)[dst_slots.cpu()] = src.cpu().flatten(0, 1)[src_slots.cpu()]
    return want.numpy()


@pytest.mark.parametrize("name", ["src", "dst"])
@pytest.mark.parametrize("kind", ["torch", "numpy", "pinned in part"])
def test_pageable_memory_is_refused(name, kind):
    device, _, *slots = caches()
    pageable = torch.zeros(4, 16, 656, dtype=torch.uint8)
    if kind == "pinned in part":  # all pages but the last one
        raw = np.zeros(64 * 4096, np.uint8)
        low = raw[-raw.ctypes.data % 4096 :][: 60 * 4096]
        cupy.cuda.runtime.hostRegister(low.ctypes.data, 40960, 0)
        pageable = torch.from_numpy(low[: 4 * 16 * 656].reshape(4, 16, 656))
    before = pageable.clone(), device.clone()
    given = {"src": device, "dst": device.clone()}
    given[name] = pageable.numpy() if kind == "numpy" else pageable
    try:
        with pytest.raises(ValueError) as info:
            sparse_mla.transfer_kv_cache(*given.values(), *slots)
        assert str(info.value) == WORDS.format(name)
    finally:
        if kind == "pinned in part":
            cupy.cuda.runtime.hostUnregister(low.ctypes.data)
    torch.cuda.synchronize()
    assert torch.equal(pageable, before[0])
    assert torch.equal(device, before[1])


@pytest.mark.parametrize("name", ["src_slots", "dst_slots"])
def test_pinned_slots_are_refused(name):
    device, host, *slots = caches()
    given = {"src": host, "dst": device, "src_slots": slots[0], "dst_slots": slots[1]}
    given[name] = given[name].cpu().pin_memory()
    with pytest.raises(ValueError, match="transfer_kv_cache: `dst_slots` must be on "):
        sparse_mla.transfer_kv_cache(**given)


@pytest.mark.parametrize("is_read", [True, False])
def test_a_graph_reads_and_writes_pinned_memory_in_place(is_read):
    device, host, *slots = caches()
    arrays = (host, device) if is_read else (device, host)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        sparse_mla.transfer_kv_cache(*arrays, *slots)  # keeps the first use out of the graph
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sparse_mla.transfer_kv_cache(*arrays, *slots)
    for seed in (3, 4):
        new_device, new_host, *new_slots = caches(seed)
        device.copy_(new_device)
        host.copy_(new_host)
        for old, new in zip(slots, new_slots, strict=True):
            old.copy_(new)
        torch.cuda.synchronize()
        want = copied(*arrays, *slots)
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(arrays[1].cpu().numpy(), want)


@pytest.mark.parametrize("kind", ["torch", "cupy"])
def test_a_call_returns_at_once_and_keeps_pinned_memory(kind):
    device, host, *slots = caches()
    if kind == "cupy":
        host = pinned_numpy(host.numpy().reshape(-1)).reshape(4, 16, 656)
    want = copied(torch.as_tensor(host), device, *slots)
    held = sys.getrefcount(host)
    torch.cuda.synchronize()
    stream = torch.cuda.current_stream()
    delay()
    sparse_mla.transfer_kv_cache(host, device, *slots)
    assert not stream.query(), "the call has waited for the device"
    assert sys.getrefcount(host) > held, "the memory may be freed before it is read"
    torch.cuda.synchronize()
    assert_same_bits(device.cpu().numpy(), want)
    sparse_mla.transfer_kv_cache(device, device, slots[0][:0], slots[1][:0])
    assert sys.getrefcount(host) == held


def test_by_pytorchs_operator():
    import sparse_mla.integrations.torch as smla

    device, host, *slots = caches()
    want = copied(device, host, *slots)
    assert smla.transfer_kv_cache(device, host, *slots) is host
    torch.cuda.synchronize()
    assert_same_bits(host.numpy(), want)


@pytest.mark.parametrize("slot", [64, 65, 2**31 - 1, 2**40, 2**63 - 1, -(2**63)])
def test_a_slot_outside_a_cache_is_skipped(slot):
    device, host, *slots = caches()
    for i in range(2):
        bad = [x.clone() for x in slots]
        bad[i][5] = slot
        kept = [torch.cat([x[:5], x[6:]]) for x in slots]
        dst = device.clone()
        want = copied(host, dst, *kept)
        sparse_mla.transfer_kv_cache(host, dst, *bad)
        assert_same_bits(dst.cpu().numpy(), want)


@pytest.mark.parametrize("page", [64, 1000])
def test_rows_past_4_gib(page):
    """Offsets do not fit in 32 bits, and a slot number need not either."""
    rows = (5 << 30) // 656 // page * page
    free, _ = torch.cuda.mem_get_info()
    if free < 12 << 30:
        pytest.skip("not enough memory of the device")
    src = torch.empty(rows // page, page, 656, dtype=torch.uint8, device="cuda")
    dst = torch.zeros_like(src)
    some = torch.randint(rows, (3000,), device="cuda").unique()
    src.flatten(0, 1)[some] = torch.randint(256, (len(some), 656), device="cuda").to(torch.uint8)
    to = torch.cat([torch.arange(10), torch.arange(rows - len(some) + 10, rows)]).cuda()
    sparse_mla.transfer_kv_cache(src, dst, some, to)
    assert torch.equal(dst.flatten(0, 1)[to], src.flatten(0, 1)[some])
    assert not dst.flatten(0, 1)[10 : rows - len(some) + 10].any()
