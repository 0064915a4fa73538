"""sparse_mla.Tensor: slices with steps, and their buffers and capsules (tensor.c, tensor_export.c
in csrc/python/arrays/). The expected values are NumPy arrays sliced in the same way."""

import ctypes
import re

import numpy as np
import pytest
import reference as ref
from dlpack_producer import Producer, Versioned, api
from helpers import assert_same_bits

import sparse_mla

pytestmark = pytest.mark.frameworks

VERSIONED = b"dltensor_versioned"


def make_tensors() -> dict:
    """Tensors of several dtypes and ranks, made by operators, with their expected values."""
    rng = np.random.default_rng(0)
    x = rng.normal(0, 1, (7, 3, 5)).astype(np.float32)
    codes, scale = sparse_mla.dynamic_per_tensor_quant(Producer(x))
    positions = rng.integers(0, 12, (7, 6)).astype(np.int32)
    arguments = (np.zeros(7, np.int32), np.array([[4, 0, 2]], np.int32))
    slots = sparse_mla.convert_req_index_to_global_index(
        Producer(arguments[0]), arguments[1], positions, block_size=4
    )
    want = sparse_mla.convert_req_index_to_global_index(*arguments, positions, block_size=4)
    states = [rng.normal(0, 1, shape).astype(np.float32) for shape in ((7, 3, 4), (7, 3)) * 2]
    out, lse = sparse_mla.merge_attn_states(Producer(states[0]), *states[1:])
    merged = sparse_mla.merge_attn_states(*states)
    wide, values = ref.to_bf16(x[:, :, :4]), ref.to_bf16(x[:, :, 1:])
    halves, _ = sparse_mla.merge_attn_states(Producer(wide), states[1], values, states[3])
    want_halves, _ = sparse_mla.merge_attn_states(wide, states[1], values, states[3])
    quantized, want_scale = sparse_mla.dynamic_per_tensor_quant(x)
    return {
        "int32": (slots, want),
        "float32": (lse, merged[1]),
        "float32, 3-D": (out, merged[0]),
        "bfloat16": (halves, want_halves),
        "float8_e4m3fn": (codes, quantized),
        "no dimensions": (scale, want_scale),
    }


TENSORS = make_tensors()
SLICED = [name for name in TENSORS if name != "no dimensions"]
HAVE_FORMATS = ("int32", "float32", "float32, 3-D", "no dimensions")

SLICES = [
    slice(None), slice(2, 5), slice(None, None, 2), slice(1, None, 3), slice(None, None, -1),
    slice(5, 1, -2), slice(-2, None), slice(None, -9, -3), slice(3, 3), slice(6, 2), slice(9, 20),
    slice(-99, 99, 4), slice(None, None, 100), slice(None, None, -100), slice(2, 5, 2**62),
    slice(2**70, None, -(2**70)), slice(-99, None, -1),
]  # fmt: skip


def address(tensor) -> int:
    return np.asarray(tensor).__array_interface__["data"][0]


def assert_shows(tensor, want: np.ndarray) -> None:
    """Asserts shape, strides, size and values, through every interface of a Tensor."""
    assert (tensor.shape, tensor.ndim, tensor.nbytes) == (want.shape, want.ndim, want.nbytes)
    in_bytes = [s * want.itemsize for n, s in zip(want.shape, tensor.strides, strict=True) if n > 1]
    if want.size:
        assert in_bytes == [s for n, s in zip(want.shape, want.strides, strict=True) if n > 1]
    assert_same_bits(np.asarray(tensor), want)
    assert f"shape={want.shape}" in repr(tensor)
    assert_same_bits(np.array(tensor, copy=True), want)
    if tensor.dtype in ("int32", "float32"):
        assert_same_bits(np.from_dlpack(tensor), want)
        assert_same_bits(np.asarray(memoryview(tensor)), want)
        assert memoryview(tensor).tobytes() == want.tobytes()
    copy = tensor.__dlpack__(max_version=(1, 0), copy=True)
    managed = Versioned.from_address(api.PyCapsule_GetPointer(copy, VERSIONED))
    assert managed.flags == 2, "a copy, and writable"
    assert ctypes.string_at(managed.tensor.data, want.nbytes) == want.tobytes()
    strides = managed.tensor.strides[: want.ndim]
    if want.size:
        compact = np.empty_like(want, order="C").strides
        assert [s * want.itemsize for s in strides] == list(compact)


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_show_their_values(name):
    assert_shows(*TENSORS[name])


@pytest.mark.parametrize("name", SLICED)
def test_slices_with_steps(name):
    """Slices have the values of NumPy's slices, and so have slices and rows of slices."""
    tensor, want = TENSORS[name]
    for key in SLICES:
        part, values = tensor[key], want[key]
        assert_shows(part, values)
        assert len(part) == len(values)
        if not len(part):
            assert address(part) == address(tensor), "where nothing is, there is no end either"
        for second in (slice(None, None, -2), slice(1, None), slice(None, -1, 3)):
            assert_shows(part[second], values[second])
        for i in range(-len(values), len(values)):
            assert_shows(part[i], values[i])
        for i in (len(values), -len(values) - 1, 2**62):
            with pytest.raises(IndexError, match=f"below {len(values)}, got {i}"):
                part[i]


def test_indices_that_are_none():
    tensor, _ = TENSORS["int32"]
    with pytest.raises(ValueError, match="slice step cannot be zero"):
        tensor[::0]
    for key in ("0", 1.0, None, (0, 1), slice("a", None)):
        with pytest.raises(TypeError):
            tensor[key]
    scalar = TENSORS["no dimensions"][0]
    for use in (len, lambda x: x[0], lambda x: x[:]):
        with pytest.raises(TypeError, match="no dimensions"):
            use(scalar)


@pytest.mark.parametrize("key", SLICES[:7])
def test_slices_are_arguments(key):
    """A slice with any step can be read. One with a positive step can be written, and nothing
    outside it changes."""
    (out, want), (lse, want_lse) = TENSORS["float32, 3-D"], TENSORS["float32"]
    given, arrays = ((x[key], y[key]) * 2 for x, y in ((out, lse), (want, want_lse)))
    merged = sparse_mla.merge_attn_states(*arrays)
    for x, y in zip(sparse_mla.merge_attn_states(*given), merged, strict=True):
        assert type(x) is sparse_mla.Tensor
        assert_same_bits(np.asarray(x), y)
    states = [np.zeros_like(want), np.full_like(want_lse, 5)]
    target = sparse_mla.merge_attn_states(Producer(states[0]), states[1], *states)
    before = [np.array(x) for x in target]
    outputs = {"out": target[0][key], "lse": target[1][key]}
    if (key.step or 1) < 0:
        with pytest.raises(ValueError, match="must have positive strides"):
            sparse_mla.merge_attn_states(*given, **outputs)
    else:
        sparse_mla.merge_attn_states(*given, **outputs)
        for x, y in zip(before, merged, strict=True):
            x[key] = y
    for x, y in zip(target, before, strict=True):
        assert_same_bits(np.asarray(x), y)


# --- buffers -------------------------------------------------------------------------------------


class Buffer(ctypes.Structure):
    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.POINTER(ctypes.c_ssize_t)),
        ("strides", ctypes.POINTER(ctypes.c_ssize_t)),
        ("suboffsets", ctypes.POINTER(ctypes.c_ssize_t)),
        ("internal", ctypes.c_void_p),
    )


REQUESTS = {
    "simple": 0,
    "writable": 1,
    "format": 4,
    "shape": 8,
    "strides": 0x18,
    "C": 0x38,
    "Fortran": 0x58,
    "C or Fortran": 0x98,
    "indirect": 0x118,
    "all, writable": 0x11D,
}
FORMATS = {np.dtype(np.int32): b"i", np.dtype(np.float32): b"f"}
api.PyObject_GetBuffer.argtypes = (ctypes.py_object, ctypes.POINTER(Buffer), ctypes.c_int)
api.PyBuffer_Release.argtypes = (ctypes.POINTER(Buffer),)
api.PyBuffer_Release.restype = None


def may_have(want: np.ndarray, flags: int) -> bool:
    """Whether memory with the layout of `want` can be given for a request with these flags."""
    flat = {"C": want.flags.c_contiguous, "F": want.flags.f_contiguous}
    if flags & 0x10 == 0:
        return flat["C"]
    if flags & 0xE0 == 0x80:
        return flat["C"] or flat["F"]
    return flat["C" if flags & 0x20 else "F"] if flags & 0x60 else True


def layouts() -> list:
    """Tensors of all memory layouts, and NumPy arrays of the same layouts."""
    found = [TENSORS[name] for name in HAVE_FORMATS]
    keys = (slice(None, None, 2), slice(None, None, -1), slice(2, 3), slice(3, 3), 4)
    found += [(t[key], x[key]) for t, x in found[:3] for key in keys]
    column, want = TENSORS["int32"]
    found.append((column[3][::2], want[3][::2]))
    return found


@pytest.mark.parametrize("request_", REQUESTS)
def test_buffers_are_what_was_asked_for(request_):
    """A simple buffer has neither shape nor strides, so only memory in C's order can be given as
    one."""
    flags = REQUESTS[request_]
    for tensor, want in layouts():
        buffer = Buffer(obj=1)
        if not may_have(want, flags):
            with pytest.raises(BufferError, match="the Tensor is not contiguous"):
                api.PyObject_GetBuffer(tensor, buffer, flags)
            assert not buffer.obj
            continue
        assert api.PyObject_GetBuffer(tensor, buffer, flags) == 0
        ndim = want.ndim
        assert (buffer.len, buffer.itemsize, buffer.ndim) == (want.nbytes, want.itemsize, ndim)
        assert not buffer.readonly
        assert buffer.format == (FORMATS[want.dtype] if flags & 4 else None)
        assert bool(buffer.shape) == bool(flags & 8)
        assert bool(buffer.strides) == (flags & 0x18 == 0x18)
        if buffer.shape:
            assert buffer.shape[:ndim] == list(want.shape)
        strides = list(want.strides)
        if buffer.strides and want.size:
            strides = buffer.strides[:ndim]
        if want.size:
            memory = (ctypes.c_uint8 * 4).from_address(buffer.buf)
            low = buffer.buf - ctypes.addressof(memory)
            view = np.lib.stride_tricks.as_strided(
                np.frombuffer(memory, want.dtype), want.shape, strides
            )
            assert low == 0
            assert_same_bits(view, want)
        api.PyBuffer_Release(buffer)
        assert not buffer.obj


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn"])
def test_buffers_have_no_word_for(name):
    tensor, _ = TENSORS[name]
    for flags in REQUESTS.values():
        with pytest.raises(BufferError, match=f"no format for {name}"):
            api.PyObject_GetBuffer(tensor, Buffer(), flags)


# --- capsules ------------------------------------------------------------------------------------

ASKED = {
    # name -> the arguments of __dlpack__, and the error or the major version of the capsule
    "nothing": ({}, 0),
    "None": ({"max_version": None, "dl_device": None, "copy": None, "stream": None}, 0),
    "an old version": ({"max_version": (0, 8)}, 0),
    "version 1": ({"max_version": (1, 0)}, 1),
    "a version of the future": ({"max_version": (7, 3)}, 1),
    "its device": ({"dl_device": (1, 0)}, 0),
    "another device": ({"dl_device": (2, 0)}, (BufferError, "on its own device only")),
    "another number": ({"dl_device": (1, 1)}, (BufferError, "on its own device only")),
    "no device": (
        {"dl_device": (1,)},
        (TypeError, "`dl_device` must be a pair of ints, got tuple"),
    ),
    **{
        f"version {bad!r}": (
            {"max_version": bad},
            (TypeError, f"`max_version` must be None or a pair of ints, got {bad!r}"),
        )
        for bad in ("1", 1, [1, 0], (1,), (1, 0, 0), ("1", 0), (2**40, 0))
    },
}


@pytest.mark.parametrize("what", ASKED)
def test_capsules(what):
    request, expected = ASKED[what]
    tensor, _ = TENSORS["float32"]
    if isinstance(expected, tuple):
        error, text = expected
        with pytest.raises(error, match=re.escape(text)):
            tensor.__dlpack__(**request)
        return
    name = api.PyCapsule_GetName(tensor.__dlpack__(**request))
    assert name == (VERSIONED if expected else b"dltensor")
