"""What a layer of dense MLA multiplies with, once W_UK and W_UV are absorbed."""

from __future__ import annotations

from typing import Any

from sparse_mla.ops.projection_weights import (
    TILE,
    _split_weight,
    check_scheme,
    is_pair,
    multiply_weights,
    pair_of,
    read_o_proj,
    read_q_proj,
    refuse_bytes,
    schemes_of,
    sizes_of,
)
from sparse_mla.steps.dense import LATENT

# How the input of a product is quantised: rows and columns of a group.
INPUT_GROUPS = {
    "tensor": (-1, -1),
    "block": (1, TILE),
    "token_tensor": (1, -1),
    "token_channel": (1, -1),
}


def choose_scheme(
    q_proj: Any, kv_b: Any, kv_b_scale: Any, o_proj: Any, scheme: str | None, requantize: bool
) -> str | None:
    """The scheme of the absorbed weights; None: they are bf16. `kv_b` may be a layer."""
    check_scheme("DenseMLA", scheme)
    if not requantize:
        return None
    kinds = {
        "q_proj": _kinds("q_proj", q_proj, scheme),
        "kv_b_proj": _kinds_of_kv_b(kv_b, kv_b_scale, scheme),
        "o_proj": _kinds("o_proj", o_proj, scheme),
    }
    if all(kind == [None] for kind in kinds.values()):
        return scheme
    first, *rest = kinds.values()
    shared = [kind for kind in first if kind is not None and all(kind in other for other in rest)]
    if shared and scheme in (None, *shared):
        return scheme or shared[0]
    names = ", ".join(f"{name} {kind[0] or 'plain'}" for name, kind in kinds.items())
    asked = "" if scheme is None else f", where `scheme` is {scheme!r}"
    raise ValueError(
        "DenseMLA: `q_proj`, `kv_b_proj` and `o_proj` must have one scheme to be requantised, got "
        f"{names}{asked}; requantize=False keeps what absorbs them in bf16"
    )


def _kinds(name: str, given: Any, scheme: str | None) -> list[str | None]:
    """The schemes that a pair may have, or that of a layer, which only the caller knows; None for
    plain weights."""
    if is_pair(given):
        weight, scale = pair_of("DenseMLA", name, given)
        shape = sizes_of("DenseMLA", name, weight, "[out, in] in a pair")
        return [*schemes_of("DenseMLA", name, shape, scale.shape, 0)]
    refuse_bytes("DenseMLA", name, given)
    return [scheme if callable(given) else None]


def _kinds_of_kv_b(weight: Any, scale: Any, scheme: str | None) -> list[str | None]:
    if callable(weight):
        return [scheme]
    if scale is None:
        refuse_bytes("DenseMLA", "kv_b_proj", weight)
        return [None]
    weight, scale = pair_of("DenseMLA", "kv_b_proj", (weight, scale))
    shape = sizes_of("DenseMLA", "kv_b_proj", weight, "[512, n] or [n, 512]")
    out_dim = 1 if shape[0] == LATENT else 0
    return [*schemes_of("DenseMLA", "kv_b_proj", shape, scale.shape, out_dim)]


def is_bf16(weight: Any) -> bool:
    return str(getattr(weight, "dtype", None)).endswith("bfloat16")


class AbsorbedWeights:
    """The weights of a layer with `absorb=True`.

    Attributes: W_Q_UK, W_QR and W_UV_O as `sparse_mla.absorb` returns them, and for prefills on
    path "separate", else None, W_Q [Lq, H * Pn] and o_proj [H * Pv, hidden] in bf16.
    """

    def __init__(
        self,
        config: Any,
        q_proj: Any,
        kv_b: tuple[Any, Any],
        parts: tuple[Any, Any],
        o_proj: Any,
        scheme: str | None,
    ) -> None:
        """`kv_b` is kv_b_proj and its scale, `parts` are its W_UK and W_UV in bf16."""
        heads, nope = config.num_heads, config.qk_nope_head_dim
        rope, values = config.qk_rope_head_dim, config.v_head_dim
        q = read_q_proj(q_proj, heads, nope, rope)
        o = read_o_proj(o_proj, heads, values)
        if scheme is not None and q.rows % TILE:
            raise ValueError(
                "DenseMLA: `q_proj` must have a multiple of 128 inputs to be quantised, got "
                f"{q.rows}"
            )
        weight, scale = kv_b
        if not is_bf16(weight) or scale is not None:
            # The products take parts that are not rounded.
            parts = _split_weight(
                weight,
                scale,
                num_rows=LATENT,
                num_heads=heads,
                first_dim=nope,
                second_dim=values,
                dtype="float32",
                storage=0,
                rows_are_outputs=False,
            )
        self.scheme = scheme
        self.W_Q_UK, self.W_UV_O = multiply_weights(q, *parts, o, scheme)
        W_Q, self.W_QR = q.split(heads, nope, rope)
        is_mixed = config.path == "mixed"
        self.W_Q = None if is_mixed else W_Q
        self.o_proj = None if is_mixed else o.matrix(heads)

    def arguments(self) -> dict[str, Any]:
        """What the layer in C takes of them."""
        group = (0, 0) if self.scheme is None else INPUT_GROUPS[self.scheme]
        W_Q_UK, W_Q_UK_descale = (self.W_Q_UK, None) if self.scheme is None else self.W_Q_UK
        W_UV_O, W_UV_O_descale = (self.W_UV_O, None) if self.scheme is None else self.W_UV_O
        return {
            "W_Q_UK": W_Q_UK,
            "W_Q_UK_descale": W_Q_UK_descale,
            "W_QR": self.W_QR,
            "W_UV_O": W_UV_O,
            "W_UV_O_descale": W_UV_O_descale,
            "W_Q": self.W_Q,
            "o_proj": self.o_proj,
            "input_group": group,
        }
