"""Where the engine's arrays are: in host memory, or on a GPU in the arrays of a framework.

The engine writes into its caches, so the framework's arrays must be writable. JAX's are not.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from sparse_mla import _info
from sparse_mla._judge import BF16


class Memory:
    """Host memory, in NumPy's arrays."""

    name = "NumPy"
    device = "cpu"

    def put(self, x: np.ndarray) -> Any:
        return x

    def get(self, x: Any) -> np.ndarray:
        return np.asarray(x)

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return self.put(np.zeros(shape, dtype))

    def wait(self) -> None:
        """Returns when the device has done all work."""


class Torch(Memory):
    name = "PyTorch"
    device = "cuda"

    def __init__(self, module: Any) -> None:
        self.module = module

    def put(self, x: np.ndarray) -> Any:
        if x.dtype == BF16:
            return self.put(x.view(np.int16)).view(self.module.bfloat16)
        return self.module.from_numpy(x).to(self.device)

    def get(self, x: Any) -> np.ndarray:
        x = self.module.from_dlpack(x)
        if x.dtype == self.module.bfloat16:
            return self.get(x.view(self.module.int16)).view(BF16)
        return x.cpu().numpy()

    def wait(self) -> None:
        self.module.cuda.synchronize()


class Cupy(Memory):
    name = "CuPy"
    device = "cuda"

    def __init__(self, module: Any) -> None:
        self.module = module

    def put(self, x: np.ndarray) -> Any:
        if x.dtype == BF16:  # CuPy does not copy bf16
            return self.put(x.view(np.uint16)).view(BF16)
        return self.module.asarray(x)

    def get(self, x: Any) -> np.ndarray:
        if x.dtype == BF16:
            return self.get(x.view(np.uint16)).view(BF16)
        return self.module.asnumpy(self.module.asarray(x))

    def wait(self) -> None:
        self.module.cuda.Device().synchronize()


def find_memory(device: str) -> Memory:
    """The host's memory, or the GPU's by the first framework that has any."""
    if device == "cpu":
        return Memory()
    lack = _info.what_cuda_lacks()
    if lack:
        raise ValueError(lack)
    reasons = []
    for framework, package in ((Torch, "torch"), (Cupy, "cupy")):
        if find_spec(package) is None:
            reasons.append(f"{framework.name} is not installed")
            continue
        module = import_module(package)
        if module.cuda.is_available():
            return framework(module)
        reasons.append(f"{framework.name} sees no GPU")
    raise ValueError(
        f"--device cuda needs PyTorch's or CuPy's arrays on the GPU: {' and '.join(reasons)}; "
        "JAX's cannot be written"
    )
