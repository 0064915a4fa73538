"""A hand-made DLPack producer: real capsules over NumPy memory, every corner case on demand.

`Producer(array, ...)` hands out one capsule per `__dlpack__` call and counts deleter calls. It
keeps the capsules. In the end the consumer must have deleted the tensor of each consumed capsule
("used_...") exactly once, and the tensors of the other capsules still belong to the producer.
(Normally a capsule's destructor deletes those, but one written in Python cannot run while an
exception is set.) The structs are written here from DLPack's text, not from the library's header.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref

import numpy as np
import reference as ref

READ_ONLY = 1
CPU, CUDA = 1, 2


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Legacy(ctypes.Structure):
    _fields_ = (("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", DELETER))


class Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", DELETER),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    )


NAMES = {True: b"dltensor_versioned", False: b"dltensor"}

DTYPES = {  # code, bits
    ref.BF16: (4, 16),
    ref.E4M3: (10, 8),
    np.dtype(np.float16): (2, 16),
    np.dtype(np.float32): (2, 32),
    np.dtype(np.float64): (2, 64),
    np.dtype(np.int8): (0, 8),
    np.dtype(np.int32): (0, 32),
    np.dtype(np.int64): (0, 64),
    np.dtype(np.uint8): (1, 8),
    np.dtype(np.uint16): (1, 16),
}

api = ctypes.pythonapi
api.PyCapsule_New.restype = ctypes.py_object
api.PyCapsule_New.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
api.PyCapsule_GetPointer.restype = ctypes.c_void_p
api.PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
api.PyCapsule_GetName.restype = ctypes.c_char_p
api.PyCapsule_GetName.argtypes = (ctypes.py_object,)
api.PyCapsule_SetName.argtypes = (ctypes.py_object, ctypes.c_char_p)

# Address of a managed tensor -> its producer and the objects that it points to. The producer keeps
# a deleted tensor in `dead`, so that a second deleter call still finds its producer and is counted.
_alive: dict[int, tuple] = {}
_owner: weakref.WeakValueDictionary = weakref.WeakValueDictionary()
_names_in_use: list[bytes] = []  # a capsule keeps a pointer to its name, so the bytes must live


@DELETER
def _delete(address):
    producer = _owner[address]
    producer.deleted += 1
    if address in _alive:
        producer.dead.append(_alive.pop(address))


def sizes_of(array: np.ndarray, strides=None):
    """C arrays of an array's shape and of its strides, or the given ones, in elements."""
    values = strides or [s // array.itemsize for s in array.strides]
    room = ctypes.c_int64 * max(array.ndim, 1)
    return room(*array.shape), room(*values)


def fill(tensor: DLTensor, array: np.ndarray, shape, strides) -> None:
    """Fills the fields of a DLTensor for an array in host memory."""
    tensor.data = array.__array_interface__["data"][0]
    tensor.device_type, tensor.device_id = CPU, 0
    tensor.ndim = array.ndim
    tensor.code, tensor.bits = DTYPES[array.dtype]
    tensor.lanes = 1
    tensor.shape, tensor.strides = shape, strides
    tensor.byte_offset = 0


class Producer:
    """An array of an unknown framework.

    versioned      hands out a versioned capsule when the caller's max_version allows it
    old_signature  `__dlpack__` does not know max_version (TypeError, as before DLPack 1.0)
    flags          of the versioned capsule, e.g. READ_ONLY
    byte_offset    number of bytes from `data` to the first element
    null_strides   strides = NULL (compact)
    device         (type, id) that the array claims; its memory is always the host's
    fields         DLTensor fields to overwrite, e.g. {"lanes": 2}
    version        of the versioned capsule
    """

    def __init__(
        self,
        array: np.ndarray,
        *,
        versioned=True,
        old_signature=False,
        flags=0,
        byte_offset=0,
        null_strides=False,
        device=(CPU, 0),
        fields=None,
        version=(1, 1),
        strides=None,
    ) -> None:
        self.array = array
        self.options = (versioned, flags, byte_offset, null_strides, device, fields or {}, version)
        self.strides = strides
        self.old_signature = old_signature
        self.deleted = 0
        self.capsules: list = []
        self.requests: list[dict] = []
        self.dead: list = []

    def __dlpack_device__(self):
        return self.options[4]

    def __dlpack__(self, **request):
        self.requests.append(request)
        if self.old_signature and set(request) - {"stream"}:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        limit = request.get("max_version")
        versioned = self.options[0] and limit is not None and limit[0] >= 1
        return self.capsule(versioned)

    def capsule(self, versioned: bool):
        _, flags, byte_offset, null_strides, device, fields, version = self.options
        managed = Versioned() if versioned else Legacy()
        if versioned:
            managed.major, managed.minor, managed.flags = (*version, flags)
        managed.deleter = _delete
        shape, strides = sizes_of(self.array, self.strides)
        tensor = managed.tensor
        fill(tensor, self.array, shape, None if null_strides else strides)
        tensor.data -= byte_offset
        tensor.device_type, tensor.device_id = device
        tensor.byte_offset = byte_offset
        for name, value in fields.items():
            setattr(tensor, name, value)
        place = ctypes.addressof(managed)
        _owner[place] = self
        _alive[place] = (self, managed, shape, strides, self.array)
        capsule = api.PyCapsule_New(place, NAMES[versioned], None)
        self.capsules.append(capsule)
        return capsule

    @property
    def consumed(self) -> int:
        return sum(api.PyCapsule_GetName(c).startswith(b"used_") for c in self.capsules)

    @property
    def outstanding(self) -> int:
        """Tensors taken over by the consumer and not yet deleted; negative: deleted too often."""
        return self.consumed - self.deleted

    def references(self) -> list[int]:
        """Reference counts of its capsules; 3 are those of the list, the loop and the argument."""
        return [sys.getrefcount(c) for c in self.capsules]

    def forget(self) -> None:
        """Drops the requests, the capsules and the deleted tensors."""
        for _, managed, *_ in self.dead:
            _owner.pop(ctypes.addressof(managed), None)
        for kept in (self.requests, self.capsules, self.dead):
            kept.clear()

    def assert_balanced(self) -> None:
        if self.outstanding or set(self.references()) - {3}:  # gc is slow when torch is loaded
            gc.collect()
        assert self.outstanding == 0, f"{self.consumed} consumed, {self.deleted} deleter calls"
        assert set(self.references()) <= {3}, f"references to the capsules: {self.references()}"


def assert_returned(*producers: Producer) -> None:
    """The tensor of every producer was taken at least once and deleted exactly as often."""
    for producer in producers:
        producer.assert_balanced()
        assert producer.consumed >= 1, "the producer's tensor was not taken"


class Consumed(Producer):
    """A producer whose capsules have already been consumed by someone else."""

    def capsule(self, versioned: bool):
        capsule = super().capsule(versioned)
        address = api.PyCapsule_GetPointer(capsule, NAMES[versioned])
        name = b"used_" + NAMES[versioned]
        _names_in_use.append(name)
        api.PyCapsule_SetName(capsule, name)
        _delete(address)
        return capsule


def as_numpy(x) -> np.ndarray:
    """A result of any type. A Tensor becomes an array of its dtype, ml_dtypes included."""
    return np.asarray(x)


def assert_same_bytes(got, want) -> None:
    for x, y in zip(got, want, strict=True):
        x = x.array if isinstance(x, Producer) else x
        assert as_numpy(x).tobytes() == y.tobytes()
