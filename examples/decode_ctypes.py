"""One decode step over a paged FP8 cache through the C API, from ctypes: examples/c/decode.c again.

    make lib && LD_LIBRARY_PATH=build/lib python examples/decode_ctypes.py

Any language with a C interface can do the same: a DLTensor describes memory, an args struct names
the tensors of a call, and the call returns a status. The Python package only gives the workspace's
size, and the results that the example compares with.
"""

import ctypes
from ctypes import POINTER, Structure, byref, c_char, c_double, c_int32, c_size_t, c_void_p, sizeof

import ml_dtypes
import numpy as np

import sparse_mla

# --- dlpack/dlpack.h ---------------------------------------------------------------------------


class DLDevice(Structure):
    _fields_ = [("device_type", c_int32), ("device_id", c_int32)]


class DLDataType(Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class DLTensor(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("device", DLDevice),
        ("ndim", c_int32),
        ("dtype", DLDataType),
        ("shape", POINTER(ctypes.c_int64)),
        ("strides", POINTER(ctypes.c_int64)),  # NULL: compact
        ("byte_offset", ctypes.c_uint64),
    ]


CODES = {"i": 0, "u": 1, "f": 2}  # kDLInt, kDLUInt, kDLFloat
BFLOAT = 4


def describe(array: np.ndarray) -> DLTensor:
    """A contiguous array in CPU memory (kDLCPU = 1). Array and shape must outlive the call."""
    is_bf16 = array.dtype == ml_dtypes.bfloat16
    code = BFLOAT if is_bf16 else CODES[array.dtype.kind]
    shape = (ctypes.c_int64 * array.ndim)(*array.shape)
    dtype = DLDataType(code, 8 * array.itemsize, 1)
    return DLTensor(array.ctypes.data, DLDevice(1, 0), array.ndim, dtype, shape, None, 0)


# --- sparse_mla.h ------------------------------------------------------------------------------


class Error(Structure):
    _fields_ = [("status", c_int32), ("text", c_char * 508)]


def tensors(*names: str) -> list[tuple[str, type]]:
    return [(name, POINTER(DLTensor)) for name in names]


class WriteArgs(Structure):  # smla_concat_and_cache_mla_args
    _fields_ = [
        ("struct_size", c_size_t),
        *tensors("kv_c", "k_pe", "kv_cache", "slot_mapping"),
        ("kv_format", c_int32),
        ("stream", c_void_p),
    ]


class AttentionArgs(Structure):  # smla_sparse_attention_args
    _fields_ = [
        ("struct_size", c_size_t),
        *tensors("q", "q_pe", "kv_cache", "indices", "topk_length", "attn_sink"),
        *tensors("extra_kv_cache", "extra_indices", "extra_topk_length"),
        *tensors("out", "lse", "max_logits", "workspace"),
        ("softmax_scale", c_double),
        ("num_splits", c_int32),
        ("kv_format", c_int32),
        ("extra_kv_format", c_int32),
        ("lse_empty_is_plus_inf", c_int32),
        ("stream", c_void_p),
    ]


library = ctypes.CDLL("libsparse_mla.so.0")


def call(name: str, args: Structure, **arrays: np.ndarray) -> None:
    """Fills in the struct's size and tensors, makes the call, and raises the error it reports."""
    args.struct_size = sizeof(args)
    described = {key: describe(array) for key, array in arrays.items()}
    for key, tensor in described.items():
        setattr(args, key, ctypes.pointer(tensor))
    error = Error()
    if getattr(library, name)(byref(args), byref(error)):
        raise RuntimeError(error.text.decode())


# --- The decode step -----------------------------------------------------------------------------

rng = np.random.default_rng(0)
kv_c, k_pe = rng.standard_normal((100, 512), np.float32), rng.standard_normal((100, 64), np.float32)
# FP8 rows must be aligned to 16 bytes, as the memory of larger NumPy arrays is.
cache, slots = np.zeros((2, 64, 656), np.uint8), np.arange(100)
call(
    "smla_concat_and_cache_mla",
    WriteArgs(),
    kv_c=kv_c,
    k_pe=k_pe,
    kv_cache=cache,
    slot_mapping=slots,
)

q = rng.standard_normal((1, 4, 576), np.float32).astype(ml_dtypes.bfloat16)
indices = np.array([[10, 20, 90]], np.int32)
out, lse = np.zeros((1, 4, 512), ml_dtypes.bfloat16), np.zeros((1, 4), np.float32)
workspace = np.zeros(sparse_mla.attention_workspace_size(1, 4, 3, device="cpu"), np.uint8)
call(
    "smla_sparse_attention",
    AttentionArgs(softmax_scale=0.1),
    q=q,
    kv_cache=cache,
    indices=indices,
    out=out,
    lse=lse,
    workspace=workspace,
)
print("lse", lse)

want_out, want_lse = sparse_mla.sparse_attention(q, cache, indices, softmax_scale=0.1)
assert out.tobytes() == want_out.tobytes()
assert lse.tobytes() == want_lse.tobytes()
print("the bytes of the Python package")

try:
    call("smla_sparse_attention", AttentionArgs(), q=q.astype(np.float32))
except RuntimeError as error:
    print(error)
