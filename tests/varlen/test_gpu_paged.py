"""paged_attention on a GPU: pages without a visible key need not be memory."""

from __future__ import annotations

import ctypes

import gpu
import numpy as np
import pytest
from device import import_quietly

import sparse_mla

cupy = import_quietly("cupy")

PAGE, HEADS, DIM = 64, 2, 128
PAGE_BYTES = PAGE * HEADS * DIM * 2
NUM_REQS, LENGTH = 3, 6 * PAGE - 5
MASKS = [
    {"window_size": (100, 0), "causal": True},
    {"attention_chunk": 2 * PAGE},
    {"cache_leftpad": [4 * PAGE, 4 * PAGE + 3, 5 * PAGE]},
]


class Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class Allocation(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("unused", ctypes.c_void_p),
        ("flags", ctypes.c_uint8 * 8),
    ]


class Access(ctypes.Structure):
    _fields_ = [("location", Location), ("flags", ctypes.c_int)]


class HalfMemory:
    """Addresses of which the first half is memory of the GPU, and the second is none."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        device = Location(1, gpu.torch.cuda.current_device())
        properties = Allocation(type=1, location=device)
        granularity, handle = ctypes.c_size_t(), ctypes.c_uint64()
        self.address = ctypes.c_uint64()
        self.call("cuMemGetAllocationGranularity", ctypes.byref(granularity), properties, 0)
        self.bytes = granularity.value
        size = ctypes.c_size_t(self.bytes)
        self.call("cuMemCreate", ctypes.byref(handle), size, properties, ctypes.c_uint64(0))
        self.call(
            "cuMemAddressReserve",
            ctypes.byref(self.address),
            ctypes.c_size_t(2 * self.bytes),
            ctypes.c_size_t(0),
            ctypes.c_uint64(0),
            ctypes.c_uint64(0),
        )
        none = (ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
        self.call("cuMemMap", self.address, size, *none)
        access = Access(device, 3)
        self.call("cuMemSetAccess", self.address, size, ctypes.byref(access), ctypes.c_size_t(1))
        self.call("cuMemRelease", handle)

    def call(self, name: str, *args) -> None:
        by_address = [ctypes.byref(x) if isinstance(x, Allocation) else x for x in args]
        status = getattr(self.cuda, name)(*by_address)
        assert status == 0, f"{name} returned {status}"

    def array(self, num_pages: int):
        """Pages of keys, of which those in the second half do not exist."""
        memory = cupy.cuda.UnownedMemory(self.address.value, 2 * self.bytes, self)
        shape = (num_pages, PAGE, HEADS, DIM)
        return cupy.ndarray(shape, np.float16, cupy.cuda.MemoryPointer(memory, 0))

    def close(self) -> None:
        size = ctypes.c_size_t(self.bytes)
        gpu.torch.cuda.synchronize()
        self.call("cuMemUnmap", self.address, size)
        self.call("cuMemAddressFree", self.address, ctypes.c_size_t(2 * self.bytes))


@pytest.mark.parametrize("mask", MASKS)
def test_pages_that_nobody_sees_are_no_memory(mask):
    memories = [HalfMemory(), HalfMemory()]
    half = memories[0].bytes // PAGE_BYTES
    caches = [memory.array(2 * half) for memory in memories]
    rng = np.random.default_rng(0)
    whole = [np.full((2 * half, PAGE, HEADS, DIM), np.nan, np.float16) for _ in caches]
    for cache, x in zip(caches, whole, strict=True):
        x[:half] = rng.normal(0, 1, (half, PAGE, HEADS, DIM))
        cache[:half] = cupy.asarray(x[:half])
    table = rng.permutation(half)[: NUM_REQS * 8].reshape(NUM_REQS, 8).astype(np.int32)
    table[:, :4] += half  # pages in front of what is seen
    table[:, 6:] += half  # pages behind the last key
    q = rng.normal(0, 1, (NUM_REQS, 8, DIM)).astype(np.float16)
    lens = np.full(NUM_REQS, LENGTH, np.int32)
    options = {key: np.array(x, np.int32) if isinstance(x, list) else x for key, x in mask.items()}
    arrays = (q, *whole, table, lens)
    want = sparse_mla.paged_attention(*arrays, softmax_scale=0.1, **options)
    moved = {key: cupy.asarray(x) if isinstance(x, np.ndarray) else x for key, x in options.items()}
    sent = (cupy.asarray(q), *caches, *map(cupy.asarray, (table, lens)))
    out, lse = map(cupy.asnumpy, sparse_mla.paged_attention(*sent, softmax_scale=0.1, **moved))
    assert np.abs(lse - want[1]).max() < 1e-4
    assert np.abs(out.astype(np.float32) - want[0].astype(np.float32)).max() < 4e-3
    for memory in memories:
        memory.close()
