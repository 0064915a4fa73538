"""Arrays of a device, so that one table serves both: NumPy's on the CPU, PyTorch's on CUDA. Types
go by their names in NumPy and PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.common.composition import from_numpy, torch
from sparse_mla._judge import BF16, E4M3, Fractions, exact_rows, judge_row
from sparse_mla._rows import FP8_ROW_BYTES

Array = Any


class NumPyArrays:
    is_cuda = False
    device = "cpu"
    units = 16  # a logit may be off by so many 2^-24
    num_samples = 128  # rows of a result that are looked at

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.drawn: dict[tuple[int, ...], Array] = {}

    def randn(self, *shape: int, dtype: str = "bfloat16") -> Array:
        return self.rng.standard_normal(shape, np.float32).astype(dtype, copy=False)

    def shared(self, *shape: int) -> Array:
        """The same values in each call with a shape: a host takes long to draw them."""
        if shape not in self.drawn:
            self.drawn[shape] = self.randn(*shape)
        return self.drawn[shape]

    def randint(self, low: int, high: int, *shape: int, dtype: str = "int32") -> Array:
        return self.rng.integers(low, high, shape, dtype)

    def randperm(self, count: int, dtype: str = "int64") -> Array:
        return self.rng.permutation(count).astype(dtype)

    def zeros(self, *shape: int, dtype: str = "bfloat16") -> Array:
        return np.zeros(shape, dtype)

    def put(self, x: np.ndarray) -> Array:
        """An array of NumPy on the device."""
        return x

    def get(self, x: Array) -> np.ndarray:
        """An array of the device in NumPy."""
        return np.asarray(x)

    def take(self, x: Array, at: Any) -> np.ndarray:
        """x[at], in NumPy."""
        return np.asarray(x[at])

    def wide(self, x: Array) -> np.ndarray:
        return self.get(x).astype(np.float64)

    def view(self, x: Array, dtype: str) -> Array:
        """The same bytes as another type."""
        return x.view(dtype)

    def tensor(self, x: Array) -> Any:
        """The same array as PyTorch's."""
        return from_numpy(x)

    def concat(self, parts: Sequence[Array], axis: int = 0) -> Array:
        return np.concatenate(parts, axis)

    def are_finite(self, arrays: Sequence[Array]) -> bool:
        return all(bool(np.isfinite(x.astype(np.float32)).all()) for x in arrays)

    def sample(self, count: int) -> np.ndarray:
        """Some numbers below `count`."""
        return np.random.default_rng(0).integers(count, size=min(count, self.num_samples))

    def judge(
        self, q: Array, rows: Array, out: Array, lse: Array, scale: float, sink: Array = None
    ) -> Fractions:
        """Judges a token, which attends to these rows of a cache."""
        return judge_row(q, exact_rows(rows), out, lse, softmax_scale=scale, sink=sink)


class TorchArrays(NumPyArrays):
    is_cuda = True  # also where a test gives it the CPU
    units = 32
    num_samples = 512

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def randn(self, *shape: int, dtype: str = "bfloat16") -> Array:
        return torch.randn(shape, device=self.device).to(getattr(torch, dtype))

    def shared(self, *shape: int) -> Array:
        return self.randn(*shape)

    def randint(self, low: int, high: int, *shape: int, dtype: str = "int32") -> Array:
        kind = getattr(torch, dtype)
        return torch.randint(low, high, shape, dtype=kind, device=self.device)

    def randperm(self, count: int, dtype: str = "int64") -> Array:
        return torch.randperm(count, device=self.device).to(getattr(torch, dtype))

    def zeros(self, *shape: int, dtype: str = "bfloat16") -> Array:
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=self.device)

    def put(self, x: np.ndarray) -> Array:
        return from_numpy(x).to(self.device)

    def get(self, x: Array) -> np.ndarray:
        tensor = x if isinstance(x, torch.Tensor) else torch.from_dlpack(x)
        for kind, bits in ((BF16, torch.int16), (E4M3, torch.uint8)):
            if tensor.dtype == getattr(torch, kind.name):  # NumPy knows them by their bits
                return tensor.contiguous().view(bits).cpu().numpy().view(kind)
        return tensor.cpu().numpy()

    def take(self, x: Array, at: Any) -> np.ndarray:
        if x.dtype == torch.float8_e4m3fn:  # PyTorch cannot index it everywhere
            return self.get(x.view(torch.uint8)[at]).view(E4M3)
        return self.get(x[at])

    def view(self, x: Array, dtype: str) -> Array:
        return x.view(getattr(torch, dtype))

    def tensor(self, x: Array) -> Any:
        return x

    def concat(self, parts: Sequence[Array], axis: int = 0) -> Array:
        return torch.cat([*parts], axis)

    def are_finite(self, arrays: Sequence[Array]) -> bool:
        return all(bool(x.isfinite().all()) for x in arrays)

    def judge(
        self, q: Array, rows: Array, out: Array, lse: Array, scale: float, sink: Array = None
    ) -> Fractions:
        from bench.cuda.judge import exact_keys, judge_token

        is_fp8 = rows.shape[-1] == FP8_ROW_BYTES
        return judge_token(q, exact_keys(rows), out, lse, scale, sink, is_fp8=is_fp8)
