"""transfer_kv_cache between host memory and the fake GPUs of fake_gpu.py, whose driver knows what
is pinned."""

from __future__ import annotations

import ctypes
import gc
import sys

import numpy as np
import pytest
from fake_gpu import CupyArray
from fake_gpu_calls import exchanged
from helpers import assert_same_bits

WORDS = (
    "`{}` must be on cuda:0 like `src_slots` or in pinned host memory, got host memory that is "
    "not pinned"
)
SRC_SLOTS, DST_SLOTS = np.array([7, -1, 2, 0]), np.array([3, 5, -1, 11], np.int32)


def random_bytes(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def caches() -> tuple[np.ndarray, np.ndarray]:
    return random_bytes(1, 2, 4, 656), random_bytes(2, 3, 4, 656)


def copied(src: np.ndarray, dst: np.ndarray) -> np.ndarray:
    want = dst.copy()
    want[0, 3], want[2, 3] = src[1, 3], src[0, 0]
    return want


def pin(gpu, x: np.ndarray, reached_at: np.ndarray | None = None) -> None:
    """Pins an array's memory, which the device has where another array is, or at its address."""
    at = (x if reached_at is None else reached_at).ctypes.data
    gpu.ask("pin", ctypes.c_void_p(x.ctypes.data), ctypes.c_int64(x.nbytes), ctypes.c_void_p(at))


@pytest.fixture(params=["exchange API", "CuPy"])
def put(request, cupy):
    return exchanged if request.param == "exchange API" else CupyArray


def test_from_host_memory(package, gpu, put):
    src, dst = caches()
    pin(gpu, src)
    gpu.calls()
    on_gpu = put(dst)
    want = copied(src, dst)
    assert package.transfer_kv_cache(src, on_gpu, put(SRC_SLOTS), put(DST_SLOTS)) is on_gpu
    assert_same_bits(dst, want)
    made = [call.split("@")[0] for call in gpu.calls()]
    assert made.count("launch") == 1
    assert not any("ynchronize" in call or "copy" in call for call in made), made


def test_to_host_memory(package, gpu, put):
    src, dst = caches()
    pin(gpu, dst)
    want = copied(src, dst)
    assert package.transfer_kv_cache(put(src), dst, put(SRC_SLOTS), put(DST_SLOTS)) is dst
    assert_same_bits(dst, want)


def test_between_caches_of_one_pinned_buffer(package, gpu, put):
    whole = random_bytes(3, 5, 4, 656)
    pin(gpu, whole)
    want = copied(whole[:2], whole[2:])
    package.transfer_kv_cache(whole[:2], whole[2:], put(SRC_SLOTS), put(DST_SLOTS))
    assert_same_bits(whole[2:], want)


@pytest.mark.parametrize("shape", [(2, 4, 656), (2, 4, 584), (8, 656)])
def test_the_device_has_an_address_of_its_own(package, gpu, put, shape):
    """Only what the device reads there has values. Split pages have their scales there, too."""
    alias, dst = random_bytes(4, *shape), random_bytes(5, *shape)
    src = np.zeros_like(alias)
    pin(gpu, src, alias)
    slots = np.arange(8)
    package.transfer_kv_cache(src, put(dst), put(slots), put(slots))
    assert_same_bits(dst, alias)


@pytest.mark.parametrize(
    "what", ["nothing", "another array", "all but a byte", "all but the first"]
)
@pytest.mark.parametrize("name", ["src", "dst"])
def test_pageable_memory_is_refused(package, gpu, put, name, what):
    given = dict(zip(("src", "dst"), caches(), strict=True))
    host, before = given[name], [x.copy() for x in given.values()]
    pins = {"another array": random_bytes(6, 64), "all but a byte": host.reshape(-1)[:-1]}
    pins["all but the first"] = host.reshape(-1)[1:]
    if what in pins:
        pin(gpu, pins[what])
    arrays = {n: x if n == name else put(x) for n, x in given.items()}
    arrays |= {"src_slots": put(SRC_SLOTS), "dst_slots": put(DST_SLOTS)}
    gpu.calls()
    with pytest.raises(ValueError) as info:
        package.transfer_kv_cache(**arrays)
    assert str(info.value) == f"transfer_kv_cache: {WORDS.format(name)}"
    assert not any(call.startswith("launch") for call in gpu.calls())
    for x, y in zip(given.values(), before, strict=True):
        assert_same_bits(x, y)


@pytest.mark.parametrize("name", ["src_slots", "dst_slots"])
def test_slots_are_on_the_device(package, gpu, put, name):
    """Pinned or not: the slots of a call on the device are never in host memory."""
    src, dst = caches()
    given = {"src": put(src), "dst": put(dst), "src_slots": put(SRC_SLOTS)}
    given["dst_slots"] = put(DST_SLOTS)
    given[name] = {"src_slots": SRC_SLOTS, "dst_slots": DST_SLOTS}[name]
    pin(gpu, given[name])
    words = {
        "src_slots": "`dst_slots` must be on cpu like `src_slots`, got cuda:0",
        "dst_slots": "`dst_slots` must be on cuda:0 like `src_slots`, got cpu",
    }[name]
    with pytest.raises(ValueError, match=f"^transfer_kv_cache: {words}$"):
        package.transfer_kv_cache(**given)


def test_a_cache_of_another_device_is_refused(package, gpu):
    src, dst = caches()
    given = {"src": src, "dst": exchanged(dst, 1), "src_slots": exchanged(SRC_SLOTS)}
    given["dst_slots"] = exchanged(DST_SLOTS)
    pin(gpu, src)
    words = "`dst` must be on cuda:0 like `src_slots`, got cuda:1"
    with pytest.raises(ValueError, match=f"^transfer_kv_cache: {words}$"):
        package.transfer_kv_cache(**given, stream=gpu.new_stream())


@pytest.mark.parametrize("name", ["src", "dst"])
def test_host_memory_lives_until_the_work_is_over(package, gpu, put, name):
    given = dict(zip(("src", "dst"), caches(), strict=True))
    host = given[name]
    pin(gpu, host)
    arrays = {n: x if n == name else put(x) for n, x in given.items()}
    arrays |= {"src_slots": put(SRC_SLOTS), "dst_slots": put(DST_SLOTS)}
    held = sys.getrefcount(host)
    gpu.set_busy()
    package.transfer_kv_cache(**arrays)
    package.transfer_kv_cache(**arrays)
    assert sys.getrefcount(host) == held + 2
    gpu.finish()
    gc.collect()
    pin(gpu, host)
    package.transfer_kv_cache(**arrays)
    assert sys.getrefcount(host) == held + 1, "kept for the last call alone"


def test_captured_calls_keep_nothing(package, gpu):
    src, dst = caches()
    pin(gpu, src)
    stream = gpu.new_stream()
    held = sys.getrefcount(src)
    slots = [exchanged(SRC_SLOTS), exchanged(DST_SLOTS)]
    gpu.capture(stream)
    package.transfer_kv_cache(src, exchanged(dst), *slots, stream=stream)
    gpu.capture(stream, False)
    assert sys.getrefcount(src) == held
