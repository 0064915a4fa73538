"""The arrays that `forward` writes between its operators. They belong to the metadata's builder, so
all layers share them, and a captured layer allocates nothing."""

from __future__ import annotations

from math import prod
from typing import Any

from sparse_mla import _C

Array = Any
BYTES = {"bfloat16": 2, "float32": 4, "int32": 4, "uint8": 1}


class Memory:
    """Arrays by name, each as large as its largest use needs. The first use makes an array in the
    framework of the layer's input."""

    def __init__(self) -> None:
        self._owned: dict[tuple[Any, ...], Array] = {}
        self._views: dict[tuple[Any, ...], tuple[tuple[int, ...], Array]] = {}
        self.num_bytes = 0

    def view(
        self, like: Array, stream: Any, name: str, shape: tuple[int, ...], dtype: str, size: int
    ) -> Array:
        """A contiguous array of `shape`, the first part of one of `size` elements."""
        key = (type(like), name, dtype, size)
        found = self._views.get(key)
        if found is None or found[0] != shape:
            if key not in self._owned:
                self._owned[key] = _C.new_array(name, like, (size,), dtype, stream, False)
                self.num_bytes += size * BYTES[dtype]
            found = self._views[key] = shape, self._owned[key][: prod(shape)].reshape(shape)
        return found[1]
