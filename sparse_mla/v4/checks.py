"""What a layer is made of, checked when it is made: projections by name, weights by shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sparse_mla.steps.v4 import HEAD_SIZE, INDEXED_RATIO, Config

OP = "SparseMLA"
INDEX_SIZE = 128  # values of an indexer's key
SCALE_BLOCK = 128  # weights that share a scale, in both dimensions

# Projections by the layers that need them: all, those with compressed rows, those with an indexer.
EVERY_LAYER = ("fused_wqa_wkv", "wq_b", "wo_b")
COMPRESSED = ("wkv_wgate",)
INDEXED = ("index_weights_proj", "index_wkv_wgate", "index_wq_b")
ALL_PROJECTIONS = (*EVERY_LAYER, *COMPRESSED, *INDEXED)

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


# --- weights -------------------------------------------------------------------------------------

ANY = None  # a size that no rule names


def check_weights(config: Config, ratio: int, weights: Any) -> None:
    """Checks what `forward` reads of a layer's weights."""
    num_heads, groups = config.num_heads, config.o_groups
    if num_heads % groups:
        raise ValueError(
            f"{OP}: `config` must have a number of heads that is a multiple of o_groups, got "
            f"num_heads {num_heads} and o_groups {groups}"
        )
    width = num_heads // groups * HEAD_SIZE
    _check(weights, "q_norm", (ANY,))
    _check(weights, "kv_norm", (HEAD_SIZE,))
    _check(weights, "cos_sin", (ANY, 64))
    _check(weights, "wo_a", (groups, ANY, width))
    rank = weights.wo_a.shape[1]
    scales = (groups, -(-rank // SCALE_BLOCK), width // SCALE_BLOCK)
    _check(weights, "wo_a_scale", scales, is_optional=True)
    _check_sink(weights, num_heads)
    if ratio > 1:
        _check(weights, "ape", (ratio, state_groups(ratio) * HEAD_SIZE))
        _check(weights, "compressor_norm", (HEAD_SIZE,))
    if ratio == INDEXED_RATIO:
        _check(weights, "index_ape", (ratio, state_groups(ratio) * INDEX_SIZE))
        _check(weights, "index_norm", (INDEX_SIZE,))
        _check(weights, "index_cos_sin", (ANY, 64), is_optional=True)


def _check(
    weights: Any, name: str, shape: tuple[int | None, ...], *, is_optional: bool = False
) -> None:
    array = getattr(weights, name)
    if array is None and is_optional:
        return
    rule = f"[{', '.join('any' if size is None else str(size) for size in shape)}]"
    found = tuple(getattr(array, "shape", ()))
    if array is None or len(found) != len(shape):
        got = "none" if array is None else str(list(found))
        raise ValueError(f"{OP}: `weights.{name}` must have shape {rule}, got {got}")
    if any(size not in (ANY, n) for size, n in zip(shape, found, strict=True)):
        raise ValueError(f"{OP}: `weights.{name}` must have shape {rule}, got {list(found)}")


def _check_sink(weights: Any, num_heads: int) -> None:
    sink = weights.attn_sink
    if sink is not None and (len(sink.shape) != 1 or sink.shape[0] < num_heads):
        raise ValueError(
            f"{OP}: `weights.attn_sink` must have at least {num_heads} values, got shape "
            f"{list(sink.shape)}"
        )
