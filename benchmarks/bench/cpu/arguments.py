"""Arguments of operators in any size, for the tables of sizes and of subnormal numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

import sparse_mla
from sparse_mla._judge import BF16
from sparse_mla._rows import KEY_DIM, row_of

Arrays = dict[str, Any]
SLOTS = 1024


# --- arrays --------------------------------------------------------------------------------------


_drawn = lru_cache(maxsize=32)(
    lambda seed, *shape: np.random.default_rng((seed, *shape)).standard_normal(shape, np.float32)
)


def normal(
    *shape: int, std: float = 1.0, mean: float = 0.0, dtype: Any = BF16, seed: int = 0
) -> np.ndarray:
    return (_drawn(seed, *shape) * np.float32(std) + np.float32(mean)).astype(dtype)


def codes(*shape: int) -> np.ndarray:
    """e4m3 bytes of both signs without NaN, from 2^-6 to 15."""
    rng = np.random.default_rng(shape)
    made: np.ndarray = rng.integers(8, 0x58, shape) | rng.integers(0, 2, shape) << 7
    return made.astype(np.uint8)


def cos_sin(rows: int) -> np.ndarray:
    angles = np.random.default_rng(2).uniform(0, 6, (rows, 32))
    return np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)


def starts(total: int, size: int) -> np.ndarray:
    """Where requests of `size` tokens begin and end, of which the last may have fewer."""
    return np.append(np.arange(0, total, size), total).astype(np.int32)


def full(count: int, value: Any, dtype: Any = np.int32) -> np.ndarray:
    return np.full(count, value, dtype)


def drawn(*shape: int, below: int = SLOTS) -> np.ndarray:
    return np.random.default_rng(shape).integers(0, below, shape).astype(np.int32)


def keep(indices: np.ndarray, which: str) -> np.ndarray:
    """A list of which some entries are left."""
    kept = indices.copy()
    if which != "all":
        kept[..., int(which == "one") :] = -1
    return kept


def place(x: np.ndarray, where: str) -> np.ndarray:
    """A copy that begins one element behind a cache line, or whose rows are an element apart."""
    if where == "rows apart":
        copy = np.empty((*x.shape[:-1], x.shape[-1] + 1), x.dtype)[..., :-1]
    else:
        memory = np.empty(x.nbytes + 128, np.uint8)
        begin = -memory.ctypes.data % 64 + (x.itemsize if where == "not aligned" else 0)
        copy = memory[begin : begin + x.nbytes].view(x.dtype).reshape(x.shape)
    copy[...] = x
    return copy


def placed(make: Callable[[], Arrays], *names: str) -> Callable[[str], Arrays]:
    def moved(where: str) -> Arrays:
        arrays = make()
        return arrays | {name: place(arrays[name], where) for name in names}

    return moved


def format_of(fmt: str) -> Arrays:
    """kv_format=, for formats that rows do not tell."""
    return {"kv_format": fmt} if fmt in ("fp8_v41", "fp8_nope") else {}


def pages_of(fmt: str, page: int) -> np.ndarray:
    if fmt == "bfloat16":
        return np.zeros((SLOTS // page, page, KEY_DIM), BF16)
    row = row_of(fmt)  # type: ignore[arg-type]
    return np.zeros((SLOTS // page, page, row), np.uint8)


def cache_of(fmt: str, page: int = 64) -> np.ndarray:
    keys, cache, slots = normal(SLOTS, KEY_DIM), pages_of(fmt, page), np.arange(SLOTS)
    if fmt in ("bfloat16", "fp8_ds_mla"):
        nope, rope = keys[:, :512].copy(), keys[:, 512:].copy()
        return sparse_mla.concat_and_cache_mla(nope, rope, cache, slots)
    if fmt.endswith("index"):
        keys = keys[:, :128].copy()
        return sparse_mla.indexer_k_quant_and_cache(keys, cache, slots)
    keys = keys[:, :512].copy()
    return sparse_mla.quantize_and_insert_k_cache(keys, cache, slots, **format_of(fmt))


def table(requests: int, tokens: int, page: int) -> np.ndarray:
    pages = -(-tokens // page)
    rows = np.arange(requests * pages) % (SLOTS // page)
    return rows.reshape(requests, pages).astype(np.int32)


# --- operators -----------------------------------------------------------------------------------


def concat(
    fmt: str, tokens: int = 128, page: int = 64, slots: str = "all", dtype: Any = BF16
) -> Arrays:
    return {
        "kv_c": normal(tokens, 512, dtype=dtype),
        "k_pe": normal(tokens, 64, dtype=dtype),
        "kv_cache": pages_of(fmt, page),
        "slot_mapping": keep(np.arange(tokens), slots),
    }


def insert(
    fmt: str, tokens: int = 128, page: int = 64, slots: str = "all", dtype: Any = BF16
) -> Arrays:
    return {
        "k": normal(tokens, 128 if fmt.endswith("index") else 512, dtype=dtype),
        "k_cache": pages_of(fmt, page),
        "slot_mapping": keep(np.arange(tokens), slots),
        **format_of(fmt),
    }


def gather(fmt: str, requests: int = 4, tokens: int = 64, page: int = 64) -> Arrays:
    dim = KEY_DIM if fmt in ("bfloat16", "fp8_ds_mla") else 512
    return {
        "kv_cache": cache_of(fmt, page),
        "block_table": table(requests, tokens, page),
        "seq_lens": full(requests, tokens),
        "workspace_starts": starts(requests * tokens, tokens)[:-1],
        "out": np.zeros((requests * tokens, dim), BF16),
        **format_of(fmt),
    }


def norm(width: int = 512, tokens: int = 128) -> Arrays:
    rows = {"q": normal(tokens, width), "kv": normal(tokens, 512)}
    return rows | {"q_weight": normal(width), "kv_weight": normal(512), "eps": 1e-6}


def turn(tokens: int = 32, heads: int = 8, dim: int = 64, kind: Any = BF16) -> Arrays:
    return {
        "positions": np.arange(tokens),
        "q_pe": normal(tokens, heads, dim, dtype=kind),
        "k_pe": normal(tokens, dim, dtype=kind),
        "rope_table": normal(tokens, dim, dtype=np.float32),
    }


def turn_and_write(
    fmt: str, tokens: int = 32, heads: int = 8, page: int = 64, slots: str = "all"
) -> Arrays:
    written = {"kv_c": normal(tokens, 512), "kv_cache": pages_of(fmt, page)}
    return turn(tokens, heads) | written | {"slot_mapping": keep(np.arange(tokens), slots)}


def inverse(tokens: int = 16, heads: int = 8, *, quantizes: bool) -> Arrays:
    return {
        "o": normal(tokens, heads, 512),
        "positions": np.arange(tokens),
        "rope_table": cos_sin(64),
        "groups": 1,
        "quantize": quantizes,
    }


def k_up(tokens: int = 8, heads: int = 2, dims: int = 128) -> Arrays:
    return {"q_nope": normal(tokens, heads, dims), "W_UK": normal(512, heads, dims)}


def v_up(tokens: int = 8, heads: int = 2, dims: int = 128) -> Arrays:
    return {"x": normal(tokens, heads, 512), "W_UV": normal(512, heads, dims)}


def kv_up(tokens: int = 8, columns: int = 256) -> Arrays:
    return {"kv_c": normal(tokens, 512), "kv_b_proj": normal(512, columns)}


def queries(tokens: int = 32, heads: int = 4, page: int = 64) -> Arrays:
    return {
        "q": normal(tokens, heads, 512),
        "kv": normal(tokens, 512),
        "positions": np.arange(tokens),
        "rope_table": cos_sin(64),
        "kv_cache": pages_of("fp8_v4", page),
        "slot_mapping": np.arange(tokens),
        "eps": 1e-6,
    }


def index_queries(tokens: int = 32, heads: int = 8, *, fp4: bool) -> Arrays:
    return {
        "q": normal(tokens, heads, 128),
        "weights": normal(tokens, heads, dtype=np.float32),
        "positions": np.arange(tokens),
        "rope_table": cos_sin(64),
        "softmax_scale": 0.1,
        "head_scale": 0.5,
        "use_fp4": fp4,
    }
