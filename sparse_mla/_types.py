"""The types of arguments and results, as type checkers see them.

What a call takes is checked when it runs; nothing here is looked at then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

if TYPE_CHECKING:
    from typing import overload

    from typing_extensions import Buffer, TypeVar  # what Python 3.11 lacks

    # The type of a result. It is Any where nothing is known about the first array.
    Result = TypeVar("Result", default=Any)
else:
    from typing import TypeVar

    Buffer = memoryview
    Result = TypeVar("Result")

    def overload(function):
        """typing's own would keep all overloads, and so this package, for good."""
        return function


class SupportsDLPack(Protocol):
    """An array of any framework: NumPy, PyTorch, JAX, CuPy, `sparse_mla.Tensor`."""

    def __dlpack__(self) -> Any:
        """A capsule with the array's memory."""

    def __dlpack_device__(self) -> tuple[Any, Any]:
        """DLPack's numbers of the device type and of the device."""


# The names that calls and configs take. tests/package/test_typing.py compares them with C's.
KvFormat = Literal[
    "auto",
    "bfloat16",
    "fp8_ds_mla",
    "fp8_v4",
    "fp8_e4m3",
    "fp8_v41",
    "fp4_v41",
    "fp8_v41_split",
    "fp4_v41_split",
    "fp8_nope",
    "fp8_token",
    "fp8_index",
    "mxfp4_index",
]
ConcatFormat = Literal["auto", "bfloat16", "fp8_ds_mla", "fp8_e4m3", "fp8_nope", "fp8_token"]
RopeFormat = Literal["auto", "bfloat16", "fp8_ds_mla"]  # those of rows with RoPE values, too
IndexFormat = Literal["fp8_index", "mxfp4_index"]
ScaleLayout = Literal["fp32", "ue8m0x4"]
CacheDtypeV4 = Literal[
    "auto",
    "fp8",
    "fp8_ds_mla",
    "bfloat16",
    "fp8_v4",
    "fp8_e4m3",
    "fp8_v41",
    "fp8_v41_split",
    "fp8_nope",
]
CompressedDtypeV4 = Literal[CacheDtypeV4, "fp4_v41", "fp4_v41_split"]
Path = Literal["mixed", "separate", "bf16", "direct"]
FlashFormat = Literal["V32", "V32_NO_ROPE", "V4", "V41", "V41_FP4"]
PathV4 = Literal["direct", "separate"]

Stream = Any


class _HasDtype(Protocol):
    @property
    def itemsize(self) -> int: ...


# What `dtype=` takes: a name, or the dtype object or scalar type of a framework.
Float = Literal["float32", "bfloat16"] | np.dtype[Any] | type[np.generic] | _HasDtype

Array = SupportsDLPack | Buffer

# An array that is written and returned, the same object.
Written = TypeVar("Written", bound=Array)

_Made = TypeVar("_Made", covariant=True)


class _NumPyLike(Protocol[_Made]):
    """ndarray, by methods that only it has. `choose` gives a plain ndarray of any dtype, as the
    operators do for subclasses, too."""

    def tofile(self, fid: str, /) -> None: ...
    def choose(self, choices: Any, /) -> _Made: ...


class _TorchLike(Protocol[_Made]):
    """torch.Tensor, and Parameter, from which operators make a Tensor, too."""

    def contiguous(self) -> _Made: ...


# An array whose framework the results are in. JAX's results are its own on the CPU, and
# sparse_mla.Tensor on a GPU, so that they are Any here.
Like = Array | _NumPyLike[Result] | _TorchLike[Result]
