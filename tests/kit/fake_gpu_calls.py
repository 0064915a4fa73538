"""What tests do on the fake GPUs of fake_gpu.py: merges of arrays, and runs whose calls of CUDA
fail in turn."""

import ctypes
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from dlpack_producer import CUDA, NAMES, Legacy, api
from exchange_producer import DTYPE_OF, Exchanged
from helpers import assert_same_bits

import sparse_mla

LEGACY = 1  # DLPack's number for the default stream


def exchanged(x: np.ndarray, device_id: int = 0) -> Exchanged:
    return Exchanged(x, place=(CUDA, device_id))


rng = np.random.default_rng(5)
OUTS = [rng.normal(0, 1, (2, 3, 8)).astype(np.float32) for _ in "ab"]
LSES = [rng.normal(0, 1, (2, 3)).astype(np.float32) for _ in "ab"]
STATES = (OUTS[0], LSES[0], OUTS[1], LSES[1])  # the arguments of merge_attn_states
WANT = sparse_mla.merge_attn_states(*STATES)


def read(x) -> np.ndarray:
    """The values of a Tensor on a fake GPU, whose memory is the host's."""
    capsule = x.__dlpack__(stream=-1)
    tensor = Legacy.from_address(api.PyCapsule_GetPointer(capsule, NAMES[False])).tensor
    dtype = DTYPE_OF[tensor.code, tensor.bits]
    shape = tensor.shape[: tensor.ndim]
    if 0 in shape:
        return np.zeros(shape, dtype)
    strides = [n * dtype.itemsize for n in tensor.strides[: tensor.ndim]]
    span = sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + dtype.itemsize
    memory = (ctypes.c_uint8 * span).from_address(tensor.data)
    return np.ndarray(shape, dtype, memory, 0, strides).copy()


def assert_merged(results, get=read) -> None:
    for got, want in zip(results, WANT, strict=True):
        assert_same_bits(get(got), want)


def old_torch(monkeypatch, handle, taken=None):
    """Installs the modules that arrays without exchange API need; returns the devices asked for."""
    devices: list[int] = []

    def current_stream(device_id):
        devices.append(device_id)
        return SimpleNamespace(cuda_stream=handle)

    cuda, importer = ModuleType("torch.cuda"), ModuleType("torch.utils.dlpack")
    cuda.current_stream = current_stream
    importer.from_dlpack = lambda x: ("taken", x)
    monkeypatch.setitem(sys.modules, "torch.cuda", cuda)
    monkeypatch.setitem(sys.modules, "torch.utils.dlpack", importer)
    return devices


# Calls of CUDA that return an error of their own, or one of earlier work.
MAY_FAIL = (
    *("cudaStreamIsCapturing", "cudaStreamWaitEvent", "cudaEventRecord"),
    *("cudaEventCreateWithFlags", "copy to device", "cudaMemsetAsync", "launch"),
)


def assert_each_failure_is_raised(gpu, run) -> None:
    """Lets each call of CUDA that a run makes fail in turn, between runs that are good."""
    run()
    gpu.calls()
    run()
    made = [call.split("@")[0] for call in gpu.calls()]
    counts = {name: made.count(name) for name in MAY_FAIL if name in made}
    assert {"launch", "cudaEventRecord", "cudaStreamWaitEvent"} <= counts.keys()
    for name, count in counts.items():
        for num_good in range(count):
            gpu.fail(name, num_good)
            with pytest.raises(RuntimeError, match=r"^[\w.]+: .* failed: a text"):
                run()
            gpu.fail(None, -1)
            run()
