"""Host time of a call with tiny work, so that the way into the library and back is measured."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

import sparse_mla
from bench.common.timing import Effort, Table, interleave
from sparse_mla._judge import BF16
from sparse_mla._rows import FP8_ROW_BYTES, KEY_DIM, KV_LORA_RANK

# Converts a NumPy array, an input or an output, into a framework's own.
Convert = Callable[[np.ndarray], Any]


def measure(effort: Effort, threads: int) -> Table:
    del threads  # one call at a time
    frameworks = find_frameworks()
    table = Table("Host time per call with out=", ["operator", *frameworks], [], [])
    for name, make in (("concat_and_cache_mla", make_write), ("sparse_attention", make_attention)):
        sides = {key: make(*converters) for key, converters in frameworks.items()}
        seconds = interleave(sides, effort)
        cells = [f"{1e6 * seconds[key]:.2f} µs" for key in frameworks]
        table.add([name, *cells], {"operator": name, "seconds": seconds})
    return table


def find_frameworks() -> dict[str, tuple[Convert, Convert]]:
    """Converters of inputs and outputs by framework. JAX arrays cannot be written, so outputs are
    NumPy's there."""
    frameworks: dict[str, tuple[Convert, Convert]] = {"NumPy": (np.asarray, np.asarray)}
    if find_spec("torch") is not None:
        from bench.common.composition import from_numpy

        frameworks["PyTorch"] = (from_numpy, from_numpy)
    if find_spec("jax") is not None:
        jax: Any = import_module("jax")

        cpu = jax.devices("cpu")[0]
        frameworks["JAX, out NumPy"] = (lambda array: jax.device_put(array, cpu), np.asarray)
    return frameworks


def make_write(given: Convert, written: Convert) -> Callable[[], object]:
    """Four arrays; the only slot is -1, so nothing is written."""
    kv_c = given(np.zeros((1, KV_LORA_RANK), BF16))
    k_pe = given(np.zeros((1, 64), BF16))
    kv_cache = written(np.zeros((1, 64, FP8_ROW_BYTES), np.uint8))
    slot_mapping = given(np.full(1, -1, np.int32))
    return lambda: sparse_mla.concat_and_cache_mla(kv_c, k_pe, kv_cache, slot_mapping)


def make_attention(
    given: Convert, written: Convert, device: str = "cpu", num_heads: int = 1
) -> Callable[[], object]:
    """Six arrays; one token, one key."""
    q = given(np.zeros((1, num_heads, KEY_DIM), BF16))
    kv = given(np.zeros((1, 64, FP8_ROW_BYTES), np.uint8))
    indices = given(np.zeros((1, 1), np.int32))
    size = sparse_mla.attention_workspace_size(1, num_heads, 1, device=device)
    out = written(np.zeros((1, num_heads, KV_LORA_RANK), BF16))
    lse = written(np.zeros((1, num_heads), np.float32))
    workspace = written(np.zeros(size, np.uint8))

    def attend() -> object:
        return sparse_mla.sparse_attention(
            q, kv, indices, softmax_scale=1.0, out=out, lse=lse, workspace=workspace
        )

    return attend
