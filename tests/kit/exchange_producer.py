"""A hand-made framework with DLPack's exchange API, as PyTorch has it: a table of C functions on
the type, which lend tensors for a call, share them for longer, and allocate results.

It counts what it gives out. Arrays may claim to be on a device, but their memory is the host's.
The structs are written from DLPack's text, as those of dlpack_producer.py are.
"""

from __future__ import annotations

import ctypes
import math
from typing import ClassVar

import numpy as np
from dlpack_producer import (
    CPU,
    DELETER,
    DTYPES,
    READ_ONLY,
    DLTensor,
    Versioned,
    api,
    fill,
    sizes_of,
)

POISON = 0xFF  # byte that fills the memory of results

DTYPE_OF = {pair: dtype for dtype, pair in DTYPES.items()}
ALLOCATE = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.POINTER(DLTensor),
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_void_p,
    ctypes.c_void_p,
)
SHARE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(ctypes.c_void_p))
ADOPT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))
LEND = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(DLTensor))
FIND_STREAM = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p)
)


class Table(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("previous", ctypes.c_void_p),
        ("allocate", ALLOCATE),
        ("share", SHARE),
        ("adopt", ADOPT),
        ("lend", LEND),
        ("find_stream", FIND_STREAM),
    )


_shared: dict[int, tuple] = {}  # address of a managed tensor -> its owner and struct


class Exchanged:
    """An array of this framework. The counters are class attributes: results are made in C."""

    lent = 0
    shared = 0  # tensors given out with a deleter
    deleted = 0
    allocated = 0  # results that the table's `allocate` made
    streams: ClassVar = []  # devices whose stream was asked for: (type, id)
    stream: ClassVar = 0  # handle of the current stream; None: the query fails

    def __init__(self, array: np.ndarray, *, is_read_only=False, place=(CPU, 0)) -> None:
        self.array = array
        self.is_read_only = is_read_only
        self.place = place
        self.outstanding = 0
        self.shape, self.strides = sizes_of(array)

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return self.array

    @classmethod
    def total_outstanding(cls) -> int:
        return cls.shared - cls.deleted


@DELETER
def _delete(address):
    owner, _ = _shared.pop(address)  # a second deletion is an error that pytest reports
    owner.outstanding -= 1
    Exchanged.deleted += 1


def _describe(x: Exchanged, tensor: DLTensor) -> None:
    fill(tensor, x.array, x.shape, x.strides)
    tensor.device_type, tensor.device_id = x.place


def _give(owner: Exchanged, out) -> None:
    managed = Versioned()
    managed.major, managed.minor = 1, 3
    managed.flags = READ_ONLY if owner.is_read_only else 0
    managed.deleter = _delete
    _describe(owner, managed.tensor)
    out[0] = ctypes.addressof(managed)
    _shared[out[0]] = (owner, managed)
    owner.outstanding += 1
    Exchanged.shared += 1


@LEND
def _lend(x, tensor):
    _describe(x, tensor.contents)
    Exchanged.lent += 1
    return 0


@SHARE
def _share(x, out):
    _give(x, out)
    return 0


@ALLOCATE
def _allocate(prototype, out, _context, _set_error):
    wanted = prototype.contents
    shape, dtype = wanted.shape[: wanted.ndim], DTYPE_OF[wanted.code, wanted.bits]
    memory = np.full(math.prod(shape) * dtype.itemsize, POISON, np.uint8)
    place = wanted.device_type, wanted.device_id
    _give(Exchanged(memory.view(dtype).reshape(shape), place=place), out)
    Exchanged.allocated += 1
    return 0


@ADOPT
def _adopt(address, out):
    owner = _shared[address][0]
    _delete(address)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))
    out[0] = id(owner)
    return 0


@FIND_STREAM
def _find_stream(device_type, device_id, out):
    Exchanged.streams.append((device_type, device_id))
    out[0] = Exchanged.stream
    return 0 if Exchanged.stream is not None else -1


TABLE = Table(1, 3, None, _allocate, _share, _adopt, _lend, _find_stream)
NAME = b"dlpack_exchange_api"
Exchanged.__dlpack_c_exchange_api__ = api.PyCapsule_New(ctypes.addressof(TABLE), NAME, None)


class LikeTorch(Exchanged):
    """An array of a package whose arrays the library knows to be always writable."""

    __module__ = "torch.of_these_tests"


class OtherExchanged(Exchanged):
    """An array of another framework: a table of its own, and a current stream of its own."""

    stream: ClassVar = 0


@FIND_STREAM
def _find_other_stream(device_type, device_id, out):
    Exchanged.streams.append((device_type, device_id))
    out[0] = OtherExchanged.stream
    return 0


OTHER_TABLE = Table(1, 3, None, _allocate, _share, _adopt, _lend, _find_other_stream)
OtherExchanged.__dlpack_c_exchange_api__ = api.PyCapsule_New(
    ctypes.addressof(OTHER_TABLE), NAME, None
)


class NoLoans:
    """A context in which the table has no function that lends, so every tensor is shared."""

    def __enter__(self) -> None:
        TABLE.lend = LEND()

    def __exit__(self, *_) -> None:
        TABLE.lend = _lend


class NoMemory:
    """A context in which results come from another allocator, a C function that fails."""

    def __init__(self, allocator) -> None:
        self.allocator = ctypes.cast(allocator, ALLOCATE)

    def __enter__(self) -> None:
        TABLE.allocate = self.allocator

    def __exit__(self, *_) -> None:
        TABLE.allocate = _allocate
