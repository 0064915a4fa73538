"""The projections of queries and outputs with W_UK and W_UV absorbed."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from sparse_mla._types import Array, Like, Result
from sparse_mla.ops._declare import operator
from sparse_mla.ops.projection import layer_weight, without_grad
from sparse_mla.ops.projection_fp8 import scaled_quantize

__all__ = ["absorb"]

# A scheme's group of weights, as weights are stored: [out, in]. -1 is the whole axis.
WEIGHT_GROUPS = {
    "tensor": (-1, -1),
    "block": (128, 128),
    "token_tensor": (-1, -1),
    "token_channel": (1, -1),
}
TILE = 128
PLAIN, TRANSPOSED = 1, 2  # smla_storage
ROPE_DIM = 64  # models with RoPE have no other R


def absorb(
    q_proj: Array | tuple[Array, Array] | Callable[[Any], Any],
    W_UK: Array,
    W_UV: Array,
    o_proj: Array | tuple[Array, Array] | Callable[[Any], Any],
    *,
    scheme: str | None = None,
) -> Any:
    """Absorb W_UK into the projection of queries, and W_UV into that of outputs.

    W_Q_UK[q, h * L + l] = sum_n q_proj[q, h, n] * W_UK[l, h, n] over the Pn values without RoPE,
    and W_UV_O[h * L + l, o] = sum_v W_UV[l, h, v] * o_proj[o, h, v]. With them a decode is
    ql_nope = q_c @ W_Q_UK, q_pe = q_c @ W_QR, attention, and its result @ W_UV_O.

    Operands are fp32: values of fewer bits are exact, and e4m3 ones are multiplied by their scales.
    Products are summed in fp32, and rounded once to bf16; or, with `scheme`, quantised from fp32.

    Parameters
    ----------
    q_proj : [Lq, H * (Pn + R)] or its transpose, a pair, or a callable
        q_b_proj, or q_proj of a model whose queries have no latent: bf16, fp16 or fp32. A pair is
        (e4m3 [H * (Pn + R), Lq], scale). A scale is fp32: one value, one per output ([out] or [out,
        1]), or one per block of 128 x 128 ([ceil(out / 128), ceil(in / 128)]). A callable is a
        linear layer, as for `sparse_mla.split_kv_b_proj`, that has `in_features`, `input_size` or
        a `weight`, which tell Lq; a `weight` that fits both forms is taken as [H * (Pn + R), Lq]. R
        is 64 if the shape allows it, else what the shape says; a shape that fits both forms is
        taken as [Lq, H * (Pn + R)].
    W_UK : [L, H, Pn] bf16, fp16 or fp32, any strides
    W_UV : [L, H, Pv], likewise
        The parts of kv_b_proj, as `sparse_mla.split_kv_b_proj` gives them in bf16. Those of an e4m3
        weight are not rounded if they are given in fp32, as `sparse_mla.dense.DenseMLA` does.
    o_proj : [hidden, H * Pv] or its transpose, a pair, or a callable
        As q_proj; a pair is (e4m3 [hidden, H * Pv], scale), and a shape that fits both forms is
        taken as [hidden, H * Pv].
    scheme : "tensor", "block", "token_tensor" or "token_channel", optional
        How the first and the last result are quantised, by `sparse_mla.scaled_quantize`: with one
        scale, one per block of 128 x 128, one ("token_tensor" differs in its inputs), or one per
        output. "block" needs Lq and hidden that are multiples of 128.

    Returns
    -------
    (W_Q_UK [Lq, H * L], W_QR [Lq, H * R], W_UV_O [H * L, hidden]), bf16. With `scheme` the first
    and the last are pairs (e4m3 [out, in], descale), and W_QR stays bf16.

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        Shapes that do not fit each other or a scale, an unknown scheme, a layer that does not tell
        its inputs. `help(sparse_mla.ops)` lists the errors that every operator raises.

    Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1.2: W_UK absorbed into W_Q, W_UV into W_O.

    Examples
    --------
    >>> import numpy as np, sparse_mla
    >>> w_uk, w_uv = np.ones((512, 2, 128), np.float32), np.ones((512, 2, 96), np.float32)
    >>> q_proj, o_proj = np.ones((256, 2 * 192), np.float32), np.ones((384, 2 * 96), np.float32)
    >>> w_q_uk, w_qr, w_uv_o = sparse_mla.absorb(q_proj, w_uk, w_uv, o_proj)
    >>> w_q_uk.shape, w_qr.shape, w_uv_o.shape, w_q_uk[0, 0].item()
    ((256, 1024), (256, 128), (1024, 384), 128.0)
    >>> (weight, descale), _, _ = sparse_mla.absorb(q_proj, w_uk, w_uv, o_proj, scheme="block")
    >>> weight.shape, descale.shape
    ((1024, 256), (8, 2))
    """
    check_scheme("absorb", scheme)
    heads, nope = _head_sizes("W_UK", W_UK)
    q = read_q_proj(q_proj, heads, nope)
    o = read_o_proj(o_proj, *_head_sizes("W_UV", W_UV))
    W_Q_UK, W_UV_O = multiply_weights(q, W_UK, W_UV, o, scheme)
    return W_Q_UK, q.split(heads, nope, q.head_columns - nope)[1], W_UV_O


# --- operators -----------------------------------------------------------------------------------


@operator
def _split_weight(
    weight: Like[Result],
    weight_scale_inv: Array | None,
    num_rows: int,
    num_heads: int,
    first_dim: int,
    second_dim: int,
    dtype: str,
    storage: int,
    rows_are_outputs: bool,
) -> tuple[Result, Result]:
    """`split_kv_b_proj` of any weight [num_rows, H * (first_dim + second_dim)], to any dtype."""


@operator
def _absorb_q_proj(
    q_proj: Like[Result],
    q_scale: Array | None,
    W_UK: Array,
    num_rows: int,
    dtype: str,
    storage: int,
) -> Result:
    """The transpose of W_Q_UK, of a weight [num_rows, H * (Pn + R)]."""


@operator
def _absorb_o_proj(
    o_proj: Like[Result],
    o_scale: Array | None,
    W_UV: Array,
    num_rows: int,
    dtype: str,
    storage: int,
) -> Result:
    """The transpose of W_UV_O, of a weight [num_rows, H * Pv]."""


# --- weights -------------------------------------------------------------------------------------


class Weight:
    """A weight [rows, H * head_columns] that was told apart from its transpose."""

    def __init__(
        self, values: Any, scale: Any, rows: int, head_columns: int, storage: int, is_output: bool
    ) -> None:
        self.values = without_grad(values)
        self.scale = scale  # None unless values are e4m3
        self.rows = rows
        self.head_columns = head_columns
        self.storage = storage
        self.rows_are_outputs = is_output

    def matrix(self, num_heads: int) -> Any:
        """[H * head_columns, rows] in bf16: a view of bf16 values, else a copy."""
        if self.scale is None and str(getattr(self.values, "dtype", None)).endswith("bfloat16"):
            return transpose(self.values) if self.storage == PLAIN else self.values
        return transpose(self.split(num_heads, self.head_columns, 0)[0])

    def split(self, num_heads: int, first: int, second: int) -> tuple[Any, Any]:
        """[rows, H * first] and [rows, H * second] in bf16."""
        parts = _split_weight(
            self.values,
            self.scale,
            num_rows=self.rows,
            num_heads=num_heads,
            first_dim=first,
            second_dim=second,
            dtype="bfloat16",
            storage=self.storage,
            rows_are_outputs=self.rows_are_outputs,
        )
        return (
            flatten(parts[0], self.rows, num_heads * first),
            flatten(parts[1], self.rows, num_heads * second),
        )


def check_scheme(op: str, scheme: Any) -> None:
    if scheme is not None and scheme not in WEIGHT_GROUPS:
        names = ", ".join(map(repr, WEIGHT_GROUPS))
        raise ValueError(f"{op}: `scheme` must be None or one of {names}, got {scheme!r}")


def is_pair(given: Any) -> bool:
    return isinstance(given, (tuple, list))


def schemes_of(op: str, name: str, shape: Any, scale_shape: Any, out_dim: int) -> list[str]:
    """The schemes that an e4m3 weight may have by the shape of its scale, the likeliest first.
    Dimension `out_dim` of the weight, as it is stored, has the outputs."""
    shape, scale_shape = tuple(shape), tuple(scale_shape)
    blocks = tuple(-(-n // TILE) for n in shape)
    channels = tuple(n if dim == out_dim else 1 for dim, n in enumerate(shape))
    has_one = prod(scale_shape) == 1
    found = ["tensor", "token_tensor"] if has_one else []
    if scale_shape in (channels, (shape[out_dim],)) or (has_one and prod(channels) == 1):
        found.append("token_channel")
    if scale_shape == blocks or (has_one and prod(blocks) == 1):
        found.append("block")
    if not found:
        raise ValueError(
            f"{op}: `{name}` must have a scale of one value, or of shape [{shape[out_dim]}], "
            f"{list(channels)} or {list(blocks)}, got {list(scale_shape)}"
        )
    return found


def flatten(x: Any, rows: int, columns: int) -> Any:
    """The same values as [rows, columns]."""
    return (x if hasattr(x, "reshape") else np.asarray(x)).reshape(rows, columns)


def transpose(x: Any) -> Any:
    return (x if hasattr(x, "T") else np.asarray(x)).T


def sizes_of(op: str, name: str, weight: Any, text: str) -> tuple[int, int]:
    """The shape of a matrix."""
    shape = getattr(weight, "shape", None)
    if shape is None:
        raise TypeError(
            f"{op}: `{name}` must be an array, a layer or a pair, got {type(weight).__name__}"
        )
    if len(shape) != 2:
        raise ValueError(f"{op}: `{name}` must have shape {text}, got {list(shape)}")
    return int(shape[0]), int(shape[1])


def pair_of(op: str, name: str, given: Any) -> tuple[Any, Any]:
    """A pair's weight and scale."""
    if len(given) != 2 or getattr(given[1], "shape", None) is None:
        got = [type(x).__name__ for x in given]
        raise TypeError(f"{op}: `{name}` must be a pair (weight, scale) of arrays, got {got}")
    return tuple(given)


def refuse_bytes(op: str, name: str, weight: Any) -> None:
    """Refuses e4m3 values that come without their scale."""
    dtype = str(getattr(weight, "dtype", None))
    if dtype.endswith(("float8_e4m3fn", "uint8")):
        raise ValueError(f"{op}: `{name}` must be a pair (weight, scale) for e4m3, got no scale")


def _layer_inputs(layer: Any, is_output: Any) -> int:
    """How many inputs a layer of queries has."""
    for name in ("in_features", "input_size"):
        size = getattr(layer, name, None)
        if isinstance(size, int):
            return size
    shape = tuple(getattr(getattr(layer, "weight", None), "shape", ()))
    if len(shape) == 2:
        # [out, in] is how layers store it, so this form comes first where both sizes fit outputs.
        for outputs, inputs in (shape, shape[::-1]):
            if is_output(outputs):
                return int(inputs)
    raise ValueError(
        "absorb: `q_proj` must be a layer that tells its inputs by in_features, input_size or "
        f"weight, got a {type(layer).__name__} without"
    )


def _head_sizes(name: str, weight: Any) -> tuple[int, int]:
    """H, and the values of a head, of W_UK or W_UV."""
    shape = getattr(weight, "shape", None)
    if shape is None:
        raise TypeError(f"absorb: `{name}` must be an array, got {type(weight).__name__}")
    if len(shape) != 3 or shape[1] == 0:
        raise ValueError(f"absorb: `{name}` must have shape [L, H, n], got {list(shape)}")
    return int(shape[1]), int(shape[2])


def read_q_proj(given: Any, heads: int, nope: int, rope_dim: int | None = None) -> Weight:
    """The projection of queries as [Lq, H * (Pn + R)]. R is `rope_dim`, if that is known."""
    fits = [lambda n: n == heads * (nope + (ROPE_DIM if rope_dim is None else rope_dim))]
    if rope_dim is None:
        fits += [
            lambda n: n == heads * nope,
            lambda n: heads > 0 and n % heads == 0 and n > heads * nope,
        ]
    more = "R" if rope_dim is None else str(rope_dim)
    columns_text = f"{heads} heads x ({nope} + {more})"
    text = f"[Lq, n] or [n, Lq], where n is {columns_text}"
    scale = None
    storages = [PLAIN, TRANSPOSED]
    if is_pair(given):
        given, scale = pair_of("absorb", "q_proj", given)
        storages, text = [TRANSPOSED], f"[n, Lq] in a pair, where n is {columns_text}"
    elif callable(given):
        size = _layer_inputs(given, lambda n: any(f(n) for f in fits))
        given = layer_weight(given, size, "absorb", "q_proj")
        storages = [PLAIN]
    shape = sizes_of("absorb", "q_proj", given, text)
    if scale is None:
        refuse_bytes("absorb", "q_proj", given)
    for fit in fits:
        for storage in storages:
            columns, rows = shape[2 - storage], shape[storage - 1]
            if fit(columns):
                return Weight(given, scale, rows, columns // heads, storage, False)
    raise ValueError(f"absorb: `q_proj` must have shape {text}, got {list(shape)}")


def read_o_proj(given: Any, heads: int, values: int) -> Weight:
    """The projection of outputs as [hidden, H * Pv]."""
    text = f"[hidden, n] or [n, hidden], where n is {heads} heads x {values}"
    scale = None
    storages = [PLAIN, TRANSPOSED]
    if is_pair(given):
        given, scale = pair_of("absorb", "o_proj", given)
        storages, text = [PLAIN], f"[hidden, n] in a pair, where n is {heads} heads x {values}"
    elif callable(given):
        given = layer_weight(given, heads * values, "absorb", "o_proj")
        storages = [TRANSPOSED]
    shape = sizes_of("absorb", "o_proj", given, text)
    if scale is None:
        refuse_bytes("absorb", "o_proj", given)
    for storage in storages:
        if shape[2 - storage] == heads * values:
            return Weight(given, scale, shape[storage - 1], values, storage, True)
    raise ValueError(f"absorb: `o_proj` must have shape {text}, got {list(shape)}")


# --- products ------------------------------------------------------------------------------------


def multiply_weights(q: Weight, W_UK: Any, W_UV: Any, o: Weight, scheme: str | None) -> Any:
    """W_Q_UK and W_UV_O, as `absorb` returns them."""
    if scheme == "block" and (q.rows % TILE or o.rows % TILE):
        raise ValueError(
            "absorb: `scheme` must not be 'block' unless Lq and hidden are multiples of 128, got "
            f"{q.rows} and {o.rows}"
        )
    dtype = "bfloat16" if scheme is None else "float32"
    by_query = _absorb_q_proj(q.values, q.scale, W_UK, q.rows, dtype, q.storage)
    if scheme is None:
        by_output = _absorb_o_proj(o.values, o.scale, W_UV, o.rows, dtype, o.storage)
        return transpose(by_query), transpose(by_output)
    W_Q_UK = scaled_quantize(by_query, group=WEIGHT_GROUPS[scheme])
    del by_query  # in fp32 it has more bytes than all results
    by_output = _absorb_o_proj(o.values, o.scale, W_UV, o.rows, dtype, o.storage)
    return W_Q_UK, scaled_quantize(by_output, group=WEIGHT_GROUPS[scheme])
