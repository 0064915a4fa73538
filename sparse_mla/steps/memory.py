"""The arrays that `forward` writes between its operators. They belong to the metadata's builder, so
all layers share them, and a captured layer allocates nothing."""

from __future__ import annotations

from math import prod
from typing import Any

from sparse_mla import _C

Array = Any
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "int32": 4, "uint8": 1}


class Memory:
    """Arrays by name, each as large as its largest use needs. The first use makes an array in the
    framework of the layer's input."""

    def __init__(self) -> None:
        self._owned: dict[tuple[Any, ...], Array] = {}
        self._views: dict[str, tuple[tuple[Any, ...], Array]] = {}  # the latest of each name
        self.num_bytes = 0

    def view(
        self, like: Array, stream: Any, name: str, shape: tuple[int, ...], dtype: str, size: int
    ) -> Array:
        """A contiguous array of `shape`, the first part of one of `size` elements."""
        wanted = type(like), shape, dtype, size
        found = self._views.get(name)
        if found is None or found[0] != wanted:
            owned = self._own(like, stream, name, dtype, size)
            found = self._views[name] = wanted, owned[: prod(shape)].reshape(shape)
        return found[1]

    def _own(self, like: Array, stream: Any, name: str, dtype: str, size: int) -> Array:
        key = type(like), name, dtype, size
        if key not in self._owned:
            self._owned[key] = _C.new_array(name, like, (size,), dtype, stream, False)
            self.num_bytes += size * BYTES[dtype]
        return self._owned[key]
