"""What a layer is made of, checked when it is made: projections by name, weights by shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from math import prod
from typing import Any

from sparse_mla._results import dtype_name
from sparse_mla.steps.v4 import HEAD_SIZE, INDEXED_RATIO, Config

OP = "SparseMLA"
INDEX_SIZE = 128  # values of an indexer's key
ROPE_SIZE = 64
SCALE_BLOCK = 128  # weights that share a scale, in both dimensions

# Projections by the layers that need them: all, those with compressed rows, those with an indexer.
EVERY_LAYER = ("fused_wqa_wkv", "wq_b", "wo_b")
COMPRESSED = ("wkv_wgate",)
INDEXED = ("index_weights_proj", "index_wkv_wgate", "index_wq_b")
ALL_PROJECTIONS = (*EVERY_LAYER, *COMPRESSED, *INDEXED)
QUERIES = ("wq_b", "index_wq_b")
ROUNDED = ("fused_wqa_wkv", *QUERIES)  # these return bf16 only

Projections = Mapping[str, Callable[..., Any]]


def state_groups(ratio: int) -> int:
    """c: the groups of tokens that a compressed row is made of."""
    return 2 if ratio == INDEXED_RATIO else 1


def needed_projections(ratio: int) -> tuple[str, ...]:
    return (
        *EVERY_LAYER,
        *(COMPRESSED if ratio > 1 else ()),
        *(INDEXED if ratio == INDEXED_RATIO else ()),
    )


def check_projections(ratio: int, given: Any) -> Projections:
    """The callables of a mapping, or of an object's attributes, by name."""
    needed = needed_projections(ratio)
    if isinstance(given, Mapping):
        unknown = [name for name in given if name not in ALL_PROJECTIONS]
        if unknown:
            raise ValueError(
                f"{OP}: `projections` must have names among {', '.join(ALL_PROJECTIONS)}, got "
                f"{', '.join(map(str, unknown))}"
            )
        found = {name: given[name] for name in needed if given.get(name) is not None}
    else:
        values = {name: getattr(given, name, None) for name in needed}
        found = {name: value for name, value in values.items() if value is not None}
    missing = [name for name in needed if name not in found]
    if missing:
        raise ValueError(
            f"{OP}: `projections` must have {', '.join(needed)} for compress ratio {ratio}, got "
            f"none for {', '.join(missing)}"
        )
    for name, value in found.items():
        if not callable(value):
            raise TypeError(
                f"{OP}: `projections.{name}` must be a callable, got {type(value).__name__}"
            )
    return found


def projected_widths(config: Config, ratio: int, weights: Any) -> dict[str, int]:
    """The values per token that each projection returns, but for wo_b, whose result is not read."""
    states = 2 * state_groups(ratio)
    return {
        "fused_wqa_wkv": weights.q_norm.shape[0] + HEAD_SIZE,
        "wq_b": config.num_heads * HEAD_SIZE,
        "wkv_wgate": states * HEAD_SIZE,
        "index_wkv_wgate": states * INDEX_SIZE,
        "index_weights_proj": config.index_n_heads,
        "index_wq_b": config.index_n_heads * INDEX_SIZE,
    }


def check_projected(name: str, result: Any, num_tokens: int, width: int) -> None:
    """Checks what a projection returned. Queries may have an axis of heads."""
    shape = tuple(getattr(result, "shape", ()))
    has_heads = name in QUERIES and shape[:1] == (num_tokens,)
    if shape != (num_tokens, width) and not (has_heads and prod(shape[1:]) == width):
        got = list(shape) if hasattr(result, "shape") else type(result).__name__
        raise ValueError(
            f"{OP}.forward: `projections.{name}` must return [{num_tokens}, {width}], got {got}"
        )
    dtypes = BF16 if name in ROUNDED else BF16 + FP32
    dtype = getattr(result, "dtype", None)
    if dtype is not None and _known_name(dtype) not in dtypes:
        raise TypeError(
            f"{OP}.forward: `projections.{name}` must return {' or '.join(dtypes)}, got "
            f"{_known_name(dtype)}"
        )


_known_name = lru_cache(maxsize=32)(dtype_name)  # NumPy takes 6 us for a dtype's name


# --- weights -------------------------------------------------------------------------------------

ANY = None  # a size that no rule names
BF16, FP32, E4M3 = ("bfloat16",), ("float32",), ("float8_e4m3fn", "uint8")


def check_weights(config: Config, ratio: int, weights: Any) -> None:
    """Checks what `forward` reads of a layer's weights, so that no step begins with wrong ones."""
    num_heads, groups = config.num_heads, config.o_groups
    if num_heads % groups:
        raise ValueError(
            f"{OP}: `config` must have a number of heads that is a multiple of o_groups, got "
            f"num_heads {num_heads} and o_groups {groups}"
        )
    width = num_heads // groups * HEAD_SIZE
    given = {name: x for name, x in vars(weights).items() if x is not None}
    has_scales = "wo_a_scale" in given
    _check(given, "q_norm", (ANY,), BF16 + FP32)
    _check(given, "kv_norm", (HEAD_SIZE,), BF16 + FP32)
    _check(given, "rope_table", (ANY, ROPE_SIZE), FP32)
    _check(given, "wo_a", (groups, ANY, width), E4M3 if has_scales else BF16)
    if has_scales:
        blocks = -(-given["wo_a"].shape[1] // SCALE_BLOCK)
        _check(given, "wo_a_scale", (groups, blocks, width // SCALE_BLOCK), FP32)
    if "attn_sink" in given:
        _check(given, "attn_sink", (ANY,), FP32)
        if given["attn_sink"].shape[0] < num_heads:
            raise ValueError(
                f"{OP}: `weights.attn_sink` must have at least {num_heads} values, got "
                f"{given['attn_sink'].shape[0]}"
            )
    if ratio > 1:
        _check(given, "ape", (ratio, state_groups(ratio) * HEAD_SIZE), FP32)
        _check(given, "compressor_norm", (HEAD_SIZE,), BF16 + FP32)
    if ratio == INDEXED_RATIO:
        _check(given, "index_ape", (ratio, state_groups(ratio) * INDEX_SIZE), FP32)
        _check(given, "index_norm", (INDEX_SIZE,), BF16 + FP32)
        if "index_rope_table" in given:
            _check(given, "index_rope_table", (ANY, ROPE_SIZE), FP32)


def _check(
    given: Mapping[str, Any], name: str, shape: tuple[int | None, ...], dtypes: tuple[str, ...]
) -> None:
    rule = f"[{', '.join('any' if size is ANY else str(size) for size in shape)}]"
    if name not in given:
        raise ValueError(f"{OP}: `weights.{name}` must have shape {rule}, got none")
    array = given[name]
    found = tuple(getattr(array, "shape", ()))
    if len(found) != len(shape) or any(
        size not in (ANY, n) for size, n in zip(shape, found, strict=True)
    ):
        raise ValueError(f"{OP}: `weights.{name}` must have shape {rule}, got {list(found)}")
    dtype = getattr(array, "dtype", None)  # DLPack does not ask for it: the operators check all
    if dtype is not None and dtype_name(dtype) not in dtypes:
        raise TypeError(
            f"{OP}: `weights.{name}` must be {' or '.join(dtypes)}, got {dtype_name(dtype)}"
        )
