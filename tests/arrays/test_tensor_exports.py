"""What sparse_mla.Tensor gives to others: capsules, buffers and copies, and who keeps the memory
(tensor.c and tensor_export.c in csrc/python/arrays/). test_tensor.py has its slices."""

import binascii
import ctypes
import gc
import sys
import tracemalloc

import cases
import numpy as np
import pytest
import reference as ref
from dlpack_producer import Producer, assert_returned, assert_same_bytes
from helpers import ALL_FRAMEWORKS, assert_same_bits

import sparse_mla

pytestmark = pytest.mark.frameworks


def our_tensors(T=3, H=4):
    """out (bf16), lse (fp32) as sparse_mla.Tensor, because q's producer has no allocator."""
    call = cases.AttentionCase(T, H, 20, pages=2).make()
    want = call.run(sparse_mla.sparse_attention)
    q = Producer(call.q)
    got = sparse_mla.sparse_attention(q, call.kv, call.indices, **call.options)
    assert_returned(q)
    return got, want


def test_results_for_an_unknown_producer_are_tensors():
    (out, lse), _ = our_tensors()
    assert isinstance(out, sparse_mla.Tensor)
    assert isinstance(lse, sparse_mla.Tensor)
    assert tuple(out.shape) == (3, 4, 512)
    assert tuple(lse.shape) == (3, 4)
    text = repr(out)
    assert "Tensor" in text
    assert "bfloat16" in text
    assert "3, 4, 512" in text
    assert "cpu" in text.lower()


def test_tensor_buffer_protocol():
    (_, lse), want = our_tensors()
    view = memoryview(lse)
    assert (view.format, view.shape, view.itemsize, view.c_contiguous) == ("f", (3, 4), 4, True)
    assert_same_bits(np.asarray(lse), want[1])
    view[0, 0] = 5.0
    assert np.asarray(lse)[0, 0] == 5.0, "one memory"


def test_tensor_of_bf16_in_numpy():
    """Buffers have no bf16. NumPy gets an array of ml_dtypes on the same memory instead."""
    (out, _), want = our_tensors()
    first, second = np.asarray(out), np.asarray(out)
    assert_same_bits(first, want[0])
    assert np.shares_memory(first, second)
    with pytest.raises(BufferError, match="bfloat16"):
        memoryview(out)


def test_tensor_dlpack_by_numpy():
    (_, lse), want = our_tensors()
    assert tuple(lse.__dlpack_device__()) == (1, 0)
    got = np.from_dlpack(lse)
    assert_same_bits(got, want[1])
    address = np.asarray(lse).__array_interface__["data"][0]
    assert got.__array_interface__["data"][0] == address, "zero copy"


def capsule_name(capsule) -> bytes:
    get = ctypes.pythonapi.PyCapsule_GetName
    get.restype, get.argtypes = ctypes.c_char_p, (ctypes.py_object,)
    return get(capsule)


def test_tensor_capsules():
    (_, lse), _ = our_tensors()
    assert capsule_name(lse.__dlpack__()) == b"dltensor"
    assert capsule_name(lse.__dlpack__(max_version=(0, 8))) == b"dltensor"
    assert capsule_name(lse.__dlpack__(max_version=(1, 0))) == b"dltensor_versioned"
    assert capsule_name(lse.__dlpack__(stream=None, max_version=(1, 3))) == b"dltensor_versioned"


def test_tensor_array_copies_when_it_must():
    (out, _), want = our_tensors()
    memory, bf16, fp32 = np.asarray(out), ref.BF16, np.float32
    for options in ({}, {"dtype": bf16}, {"copy": False}, {"dtype": bf16, "copy": False}):
        assert np.shares_memory(np.array(out, **{"copy": None} | options), memory), options
        assert np.shares_memory(out.__array__(**options), memory), options
    for options in ({"dtype": fp32}, {"copy": True}, {"dtype": fp32, "copy": True}):
        copied = out.__array__(**options)
        assert not np.shares_memory(copied, memory), options
        assert_same_bits(copied, want[0].astype(options.get("dtype", bf16)))
    with pytest.raises(ValueError, match="Unable to avoid copy"):
        np.array(out, dtype=fp32, copy=False)
    with pytest.raises(TypeError, match="colour"):
        out.__array__(colour=1)


def test_buffers_of_slices_need_strides():
    (_, lse), want = our_tensors()
    assert b"".join([lse]) == want[1].tobytes()
    assert b"".join([lse[1:]]) == want[1][1:].tobytes()
    with pytest.raises(BufferError, match="not contiguous"):
        binascii.crc32(lse[::2])
    view = memoryview(lse[::2])
    assert (view.shape, view.strides, view.readonly) == ((2, 4), (32, 4), False)
    assert_same_bits(np.asarray(view), want[1][::2])


def test_versioned_exports_can_be_written():
    (_, lse), _ = our_tensors()
    assert np.from_dlpack(Bearer(lse.__dlpack__(max_version=(1, 0)))).flags.writeable


class Undecided:
    def __bool__(self):
        raise ValueError("yes and no")

    def __repr__(self):  # in the test's name, which must be the same in all xdist workers
        return "Undecided()"


@pytest.mark.parametrize(
    ("request_", "error", "text"),
    [
        ({"stream": "main"}, TypeError, "__dlpack__: `stream` must .*, got str"),
        ({"max_version": (1,)}, TypeError, "__dlpack__: `max_version` must .*, got"),
        ({"max_version": ("1", 0)}, TypeError, "__dlpack__: `max_version` must .*, got"),
        ({"dl_device": "moon"}, (TypeError, ValueError), "__dlpack__: `dl_device` must .*, got"),
        ({"dl_device": (2, 0)}, BufferError, "on its own device only"),
        ({"dl_device": (1, 1)}, BufferError, "on its own device only"),
        ({"copy": Undecided()}, ValueError, "yes and no"),
        ({"colour": 1}, TypeError, "colour"),
    ],
    ids=str,
)
def test_exports_that_cannot_be_had(request_, error, text):
    (_, lse), _ = our_tensors()
    before = sys.getrefcount(lse)
    with pytest.raises(error, match=text):
        lse.__dlpack__(**request_)
    assert sys.getrefcount(lse) == before
    assert capsule_name(lse.__dlpack__(dl_device=(1, 0), copy=False)) == b"dltensor"


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_copies_are_compact_and_their_own(version):
    (out, lse), want = our_tensors(T=5)
    before = sys.getrefcount(lse)
    for tensor, wanted in ((lse, want[1]), (lse[1::2], want[1][1::2]), (lse[3:3], want[1][3:3])):
        capsule = tensor.__dlpack__(max_version=version, copy=True)
        copied = np.from_dlpack(Bearer(capsule))
        assert_same_bits(copied, wanted)
        assert copied.flags.c_contiguous
        assert not np.shares_memory(copied, np.asarray(lse))
    del tensor, capsule, copied
    assert sys.getrefcount(lse) == before
    rows = sparse_mla.merge_attn_states(out, lse, out, lse)[0].__dlpack__(copy=True)
    assert capsule_name(rows) == b"dltensor"


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_an_unused_capsule_keeps_and_frees_its_tensor(version):
    (_, lse), _ = our_tensors()
    before = sys.getrefcount(lse)
    capsule = lse.__dlpack__(max_version=version)
    assert sys.getrefcount(lse) == before + 1, "kept"
    del capsule
    assert sys.getrefcount(lse) == before, "freed"


def test_tensors_leave_nothing():
    """Tensors leave neither their memory nor the few hundred bytes of their objects."""
    (out, lse), _ = our_tensors()
    for _ in range(2):  # the first round fills caches
        tracemalloc.start()
        for _ in range(200):
            _ = out[1:], lse.__dlpack__(), np.asarray(lse)
        held = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
    assert held < 20_000


class Bearer:
    """An array that gives a capsule which was made before."""

    def __init__(self, capsule):
        self.capsule = capsule

    def __dlpack__(self, **_):
        return self.capsule

    def __dlpack_device__(self):
        return (1, 0)


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_a_capsule_outlives_the_tensor(version):
    """The consumer that takes the capsule over gives the memory back, once."""
    (_, lse), want = our_tensors()
    before = sys.getrefcount(lse)
    view = np.from_dlpack(Bearer(lse.__dlpack__(max_version=version)))
    assert sys.getrefcount(lse) == before + 1
    del view
    assert sys.getrefcount(lse) == before
    bearer = Bearer(lse.__dlpack__(max_version=version))
    del lse
    churn = [np.full((3, 4), -1, np.float32) for _ in range(500)]
    assert_same_bits(np.from_dlpack(bearer), want[1])
    del churn


def test_views_outlive_the_tensor():
    (out, lse), want = our_tensors()
    by_dlpack, by_buffer, bf16 = np.from_dlpack(lse), np.asarray(lse), np.asarray(out)
    del out, lse
    gc.collect()
    churn = [np.full(2048, 255, np.uint8) for _ in range(500)]
    assert_same_bits(by_dlpack, want[1])
    assert_same_bits(by_buffer, want[1])
    assert_same_bits(bf16, want[0])
    del churn


def test_a_tensor_is_an_argument_again():
    """Results go back in as arguments, and the merge of Tensors gives Tensors."""
    (out, lse), want = our_tensors()
    merged = sparse_mla.merge_attn_states(out, lse, out, lse)
    plain = sparse_mla.merge_attn_states(*want, *want)
    assert all(isinstance(x, sparse_mla.Tensor) for x in merged)
    assert_same_bytes(merged, plain)
    assert sparse_mla.merge_attn_states(*want, *want, out=out, lse=lse)[0] is out
    assert_same_bytes((out, lse), plain)


@pytest.mark.parametrize("framework", ALL_FRAMEWORKS[1:], indirect=True)
def test_tensor_in_frameworks(framework):
    name = framework.name
    (out, lse), want = our_tensors()
    importer = (
        framework.module.from_dlpack if name == "torch" else framework.module.dlpack.from_dlpack
    )
    got = [importer(x) for x in (out, lse)]
    if name == "torch":
        address = np.asarray(lse).__array_interface__["data"][0]
        assert framework.address(got[1]) == address, "zero copy"
    del out, lse
    gc.collect()
    for x, y in zip(got, want, strict=True):
        assert framework.owns(x)
        assert_same_bits(framework.get(x), y)


def test_tensor_of_no_elements():
    (out, lse), _ = our_tensors(T=0)
    assert tuple(out.shape) == (0, 4, 512)
    assert np.from_dlpack(lse).shape == (0, 4)
