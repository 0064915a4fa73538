"""The memory of a paged layer between its operators: partial results, and queries cast to e4m3. It
belongs to the builder, so all layers share it, and a captured layer allocates nothing."""

from __future__ import annotations

import sys
from math import prod
from typing import Any

from sparse_mla import ops
from sparse_mla.steps.memory import BYTES

Array = Any
HALVES = ("bfloat16", "float16")
COLUMNS = 8  # the least values of a head


def dtype_of(x: Array) -> str:
    """The dtype of results for queries of x's dtype."""
    name = str(x.dtype).rpartition(".")[2]
    return name if name in (*HALVES, "float32") else "bfloat16"


def is_writable(x: Array) -> bool:
    """Whether operators can write arrays of this framework: JAX has none."""
    jax = sys.modules.get("jax")
    return hasattr(x, "reshape") and (jax is None or not isinstance(x, jax.Array))


class Scratch:
    """What one call takes of the builder's memory."""

    def __init__(self, builder: Any, op: str) -> None:
        self.builder, self.op = builder, op

    def view(
        self, like: Array, stream: Any, name: str, shape: tuple[int, ...], dtype: str
    ) -> Array:
        """A contiguous array of `shape`, the first part of one with a row for each token of the
        largest batch."""
        size = self.builder._most_tokens * prod(shape[1:])
        try:
            return self.builder._memory.view(
                like, stream, name, shape, dtype, max(size, prod(shape))
            )
        except RuntimeError as error:
            if "before a capture" not in str(error):
                raise
            size = max(size, prod(shape)) * BYTES[dtype]
            raise ValueError(
                f"{self.op}: `stream` must not be capturing before the builder has {size} bytes of "
                f"{name}, got one that is: call attention once before the capture"
            ) from None

    def part(
        self, number: int, q: Array, sizes: tuple[int, int], dtype: str, stream: Any
    ) -> dict[str, Array]:
        """`out` and `lse` of a part; none where the operator has to make them."""
        if not is_writable(q):
            return {}
        shape = (q.shape[0], *sizes)
        return {
            "out": self.view(q, stream, f"part {number}", shape, dtype),
            "lse": self.view(q, stream, f"lse of part {number}", shape[:2], "float32"),
        }

    def quantize(self, name: str, x: Array, token_ids: Array, stream: Any) -> Array:
        """x as e4m3, saturating: what a cache of e4m3 makes of keys. The values beside them are of
        no use, so they are as few as there may be. Rows of no request stay as they are."""
        if isinstance(x, tuple):
            raise TypeError(f"{self.op}: `{name}` must be one array with quantize_q, got a tuple")
        if not is_writable(x):
            rule = "False for arrays that nobody can write"
            raise TypeError(f"{self.op}: `quantize_q` must be {rule}, got True")
        rows, num_heads, values = x.shape
        cast = self.view(x, stream, f"{name} in e4m3", (rows, 1, num_heads, values), "uint8")
        rest = self.view(x, stream, "unused values", (rows, 1, num_heads, COLUMNS), "uint8")
        num_tokens = min(rows, len(token_ids))
        used = x[:num_tokens]
        ops.reshape_and_cache(
            used, used[..., :COLUMNS], cast, rest, token_ids[:num_tokens], stream=stream
        )
        return cast.reshape(rows, num_heads, values)
