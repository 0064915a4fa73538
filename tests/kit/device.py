"""The device that this session tests (SMLA_DEVICE), and how NumPy arrays move there and back.

The whole buffer behind an array is copied, with its gaps and red zones, and the array becomes the
same strided view of the copy. Views of one buffer therefore still share memory. After the call the
buffer is copied back, so a test finds in its NumPy arrays what the kernels left in device memory.

torch holds the copies. CuPy describes the views with negative strides, which torch cannot have.
With SMLA_DEVICE=torch-cpu everything moves the same way through torch's CPU memory, which tests
this file and library.py on machines without a GPU.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import warnings

import numpy as np
import reference as ref

DEVICE = os.environ.get("SMLA_DEVICE", "cpu")
KNOWN = ("cpu", "cuda", "torch-cpu")
ON_CUDA = DEVICE == "cuda"
NAME = "cuda" if ON_CUDA else "cpu"  # for Config and attention_workspace_size
# Options of the accuracy bounds in reference.py: tensor cores add in another order, and Hopper's
# kernel multiplies e4m3 by its scale in f16. Calls on bf16 rows alone get no allowance for scales.
BOUNDS = {"units": 32, "f16_scales": True} if ON_CUDA else {}
RESIDUE = 256  # a copy has the address of its original modulo this, so the same alignment


@functools.cache
def import_quietly(name: str):
    """Imports a framework and drops the warnings of its import, which do not concern us."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


# --- buffers -------------------------------------------------------------------------------------


def address(x) -> int:
    """Address of the first element, on the host or on the device."""
    if isinstance(x, np.ndarray):
        return x.__array_interface__["data"][0]
    return as_torch(x).data_ptr()


def owner_of(x: np.ndarray) -> np.ndarray:
    """The array whose buffer `x` points into; `x` itself if NumPy does not know it."""
    owner = x
    while True:
        base = owner.base
        if type(base).__name__ == "DummyArray":  # between an as_strided view and its array
            base = base.base
        if not isinstance(base, np.ndarray):
            break
        owner = base
    low, high = np.lib.array_utils.byte_bounds(x)
    first, end = np.lib.array_utils.byte_bounds(owner)
    return owner if first <= low and high <= end else x


def memory_of(owner: np.ndarray) -> np.ndarray:
    """The bytes of an array's buffer, in the order of their addresses."""
    low, high = np.lib.array_utils.byte_bounds(owner)
    if not owner.size:
        return np.zeros(0, np.uint8)
    return np.frombuffer((ctypes.c_uint8 * (high - low)).from_address(low), np.uint8)


class HostCopy:
    """A copy of a buffer in host memory, for the CPU backend to work on."""

    def __init__(self, memory: np.ndarray, residue: int) -> None:
        self.storage = np.zeros(len(memory) + 2 * RESIDUE, np.uint8)
        start = (residue - self.storage.ctypes.data) % RESIDUE
        self.body = self.storage[start : start + len(memory)]
        self.start = start
        self.write(memory)

    def write(self, memory: np.ndarray) -> None:
        self.body[...] = memory

    def read(self) -> np.ndarray:
        return self.body

    def view(self, x: np.ndarray, offset: int):
        where = self.start + offset if x.size else 0
        return np.ndarray(x.shape, x.dtype, self.storage, where, x.strides)


class DeviceCopy:
    """A copy of a buffer in the device's memory; its views are torch or CuPy arrays."""

    def __init__(self, memory: np.ndarray, residue: int) -> None:
        self.torch = import_quietly("torch")
        size = -(-(len(memory) + RESIDUE) // 8) * 8
        self.storage = self.torch.zeros(size, dtype=self.torch.uint8, device=NAME)
        self.start = (residue - self.storage.data_ptr()) % RESIDUE
        self.body = self.storage[self.start : self.start + len(memory)]
        self.write(memory)

    def write(self, memory: np.ndarray) -> None:
        self.body.copy_(self.torch.from_numpy(memory.copy()))

    def read(self) -> np.ndarray:
        return self.body.cpu().numpy()

    def view(self, x: np.ndarray, offset: int):
        where = self.start + offset if x.size else 0
        lasting = [s if n > 1 else abs(s) for s, n in zip(x.strides, x.shape, strict=True)]
        if x.size and min(lasting, default=0) < 0:
            return self.view_with_negative_strides(x, where)
        dtype = torch_dtype(self.torch, x.dtype)
        assert where % x.itemsize == 0, "torch has no arrays off their elements' alignment"
        strides = [abs(s) // x.itemsize for s in x.strides]
        return self.storage.view(dtype).as_strided(x.shape, strides, where // x.itemsize)

    def view_with_negative_strides(self, x: np.ndarray, where: int):
        if not ON_CUDA:
            return np.ndarray(x.shape, x.dtype, self.storage.numpy(), where, x.strides)
        cuda = import_quietly("cupy").cuda
        memory = cuda.UnownedMemory(self.storage.data_ptr(), self.storage.numel(), self.storage)
        dtype = np.dtype(np.uint8) if x.dtype == ref.E4M3 else x.dtype
        pointer = cuda.MemoryPointer(memory, where)
        return import_quietly("cupy").ndarray(x.shape, dtype, pointer, x.strides)


def torch_dtype(torch, dtype: np.dtype):
    names = {ref.BF16: "bfloat16", ref.E4M3: "float8_e4m3fn"}
    return getattr(torch, names.get(dtype, dtype.name))


class Journey:
    """The arrays of one call. Every buffer is copied once, however many arrays view it.

    With `former`, buffers that an earlier call left on the device are used again, after the values
    of their NumPy arrays have been copied to them.
    """

    def __init__(self, make_copy=DeviceCopy, former: Journey | None = None) -> None:
        self.make_copy = make_copy
        self.copies = dict(former.copies) if former else {}  # address -> owner, bytes, copy
        self.moved = {}  # id(NumPy array) -> NumPy array, its view on the device
        for _, memory, copy in self.copies.values():
            copy.write(memory)

    def put(self, x):
        """Moves a NumPy array, or those of a tuple or list; returns everything else unchanged."""
        if isinstance(x, list):
            return [self.put(each) for each in x]
        if isinstance(x, tuple):
            return tuple(self.put(each) for each in x)
        movable = isinstance(x, np.ndarray) and x.dtype.isnative and x.dtype.kind != "O"
        if not movable:
            return x
        if id(x) not in self.moved:
            owner = owner_of(x)
            low = np.lib.array_utils.byte_bounds(owner)[0]
            if low not in self.copies or len(self.copies[low][1]) < owner.nbytes:
                memory = memory_of(owner)
                copy = self.make_copy(memory, low % RESIDUE)
                self.copies[low] = (owner, memory, copy)
            self.moved[id(x)] = (x, self.copies[low][2].view(x, address(x) - low))
        return self.moved[id(x)][1]

    def fetch(self) -> None:
        """Copies device memory back into the NumPy arrays."""
        for owner, memory, copy in self.copies.values():
            now = copy.read()
            if not np.array_equal(now, memory):
                assert owner.flags.writeable, "a read-only array was written"
                memory[...] = now

    def results(self, got):
        """The results of a call in NumPy: the caller's own arrays, or copies of new ones."""
        if isinstance(got, tuple):
            return tuple(self.results(x) for x in got)
        if got is None:  # a result that the call does not have
            return None
        for mine, theirs in self.moved.values():
            if got is theirs:
                return mine
        assert not ON_CUDA or is_on_gpu(got), f"a result on the host: {type(got)}"
        return host(got)


def peek(address: int, count: int, dtype) -> np.ndarray:
    """A copy of `count` elements at an address of the device."""
    if not ON_CUDA:
        size = count * np.dtype(dtype).itemsize
        return np.frombuffer(ctypes.string_at(address, size), dtype)
    cupy = import_quietly("cupy")
    memory = cupy.cuda.UnownedMemory(address, count * np.dtype(dtype).itemsize, None)
    return cupy.asnumpy(cupy.ndarray(count, dtype, cupy.cuda.MemoryPointer(memory, 0)))


def is_on_gpu(x) -> bool:
    device = getattr(x, "__dlpack_device__", None)
    return device is not None and device()[0] == 2


def as_torch(x):
    """An array of any framework as a torch tensor on the same memory."""
    torch = import_quietly("torch")
    return x if isinstance(x, torch.Tensor) else torch.from_dlpack(x)


def host(x) -> np.ndarray:
    """The values of any array, in NumPy."""
    if isinstance(x, np.ndarray) or not hasattr(x, "__dlpack__"):
        return np.asarray(x)
    x = as_torch(x).detach().cpu()
    torch = import_quietly("torch")
    for name, dtype, carrier in (
        ("bfloat16", ref.BF16, "int16"),
        ("float8_e4m3fn", ref.E4M3, "uint8"),
    ):
        if x.dtype is getattr(torch, name):
            return x.view(getattr(torch, carrier)).numpy().view(dtype)
    return x.numpy()
