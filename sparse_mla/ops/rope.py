"""RoPE: tables of angles, and the rotation of queries, of keys and of what attention returns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from sparse_mla import _C
from sparse_mla._types import Like, Result, RopeFormat, ScaleLayout, Written
from sparse_mla.ops._declare import Array, Stream, operator

__all__ = [
    "apply_rope",
    "fused_inv_rope_fp8_quant",
    "mla_softmax_scale",
    "rope_and_cache_mla",
    "rope_table",
]

YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}  # defaults
BLOCK = 1 << 14  # positions that are computed at a time


def rope_table(
    max_pos: int | None = None,
    R: int = 64,
    base: float = 10000.0,
    yarn: Mapping[str, float] | None = None,
    *,
    fp32_angles: bool = False,
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The cosines and sines of RoPE for positions 0 to max_pos - 1.

    Pair i turns by the angle t * f_i at position t, with f_i = base**(-2 i / R). YaRN slows down
    the pairs that turn less than `beta_fast` times in `orig_max_pos` positions: those that turn
    less than `beta_slow` times by `factor`, those between in part. It also multiplies the table by
    g(factor, mscale) / g(factor, mscale_all_dim), where g(s, a) = 0.1 a ln(s) + 1.

    Parameters
    ----------
    max_pos : int, optional
        The number of positions. None means `orig_max_pos * factor` of `yarn`.
    R : int
        Values that RoPE turns, an even number.
    base : float
    yarn : dict, optional
        {"factor", "orig_max_pos"} and, where they differ, {"beta_fast": 32, "beta_slow": 1,
        "mscale": 1, "mscale_all_dim": 0}.
    fp32_angles : bool
        DeepSeek V4's table: f_i is rounded to fp32, the angle is an fp32 product, and YaRN does not
        multiply the table. Otherwise angles are fp64.

    Returns
    -------
    NumPy array [max_pos, R] fp32: R / 2 cosines, then R / 2 sines, each rounded once.

    Raises
    ------
    TypeError, ValueError
        An option that is no number, an odd R, a `base` of 1 or less, a `factor` below 1, a key that
        `yarn` does not have, neither `max_pos` nor `yarn`.

    Source: YaRN (arXiv:2309.00071), with the names of DeepSeek's configurations.

    Examples
    --------
    >>> import sparse_mla
    >>> [round(float(x), 6) for x in sparse_mla.rope_table(2, R=4)[1]]
    [0.540302, 0.99995, 0.841471, 0.01]
    """
    size = _number("rope_table", "R", R, int)
    if size < 2 or size % 2 != 0:
        raise ValueError(f"rope_table: `R` must be even and at least 2, got {R}")
    if not 1 < _number("rope_table", "base", base, float) < math.inf:
        raise ValueError(f"rope_table: `base` must be finite and above 1, got {base}")
    scaling = None if yarn is None else _read_yarn("rope_table", yarn)
    if max_pos is None:
        if scaling is None:
            raise ValueError("rope_table: `max_pos` must be given without `yarn`, got None")
        max_pos = round(scaling["orig_max_pos"] * scaling["factor"])
    if not 0 <= _number("rope_table", "max_pos", max_pos, int) < 2**31:
        raise ValueError(f"rope_table: `max_pos` must be 0 to {2**31 - 1}, got {max_pos}")
    return _C.call_exactly(lambda: _compute_table(max_pos, size, float(base), scaling, fp32_angles))


def mla_softmax_scale(qk_head_dim: int = 192, *, yarn: Mapping[str, float] | None = None) -> float:
    """The factor of q . k in MLA: qk_head_dim**-0.5, and what YaRN adds to it.

    With YaRN it is multiplied by g(factor, mscale_all_dim)**2, where g(s, a) = 0.1 a ln(s) + 1,
    which is 1 for an `mscale_all_dim` of 0.

    Parameters
    ----------
    qk_head_dim : int
        Values of a query's head before absorption, with and without RoPE: 128 + 64.
    yarn : dict, optional
        As in `rope_table`.

    Returns
    -------
    float

    Raises
    ------
    TypeError, ValueError
        A `qk_head_dim` that is no positive int, a `yarn` that `rope_table` refuses.

    Source: DeepSeek-V3's attention in Transformers and vLLM.

    Examples
    --------
    >>> import sparse_mla
    >>> yarn = {"factor": 40, "orig_max_pos": 4096, "mscale": 1, "mscale_all_dim": 1}
    >>> round(sparse_mla.mla_softmax_scale(yarn=yarn), 9)
    0.135233779
    """
    size = _number("mla_softmax_scale", "qk_head_dim", qk_head_dim, int)
    if size < 1:
        raise ValueError(f"mla_softmax_scale: `qk_head_dim` must be at least 1, got {size}")
    scaling = None if yarn is None else _read_yarn("mla_softmax_scale", yarn)

    def compute() -> float:
        factor = 1.0 if scaling is None else _magnitude(scaling, "mscale_all_dim")
        return factor * factor / math.sqrt(size)

    return _C.call_exactly(compute)


def _compute_table(
    max_pos: int, size: int, base: float, scaling: dict[str, float] | None, fp32_angles: bool
) -> np.ndarray[Any, np.dtype[np.float32]]:
    frequencies = base ** (-np.arange(0, size, 2) / size)
    magnitude = 1.0
    if scaling is not None:
        frequencies = _slow_down(frequencies, base, scaling)
        if not fp32_angles:
            magnitude = _magnitude(scaling, "mscale") / _magnitude(scaling, "mscale_all_dim")
    angle_type = np.float32 if fp32_angles else np.float64
    table = np.empty((max_pos, size), np.float32)
    for start in range(0, max_pos, BLOCK):
        rows = table[start : start + BLOCK]
        positions = np.arange(start, start + len(rows)).astype(angle_type)
        angles = np.multiply.outer(positions, frequencies.astype(angle_type)).astype(np.float64)
        rows[:, : size // 2] = magnitude * np.cos(angles)
        rows[:, size // 2 :] = magnitude * np.sin(angles)
    return table


def _number(op: str, name: str, value: Any, kind: type) -> Any:
    """`value`, if it is a number of this kind; a bool is none."""
    good = (int, np.integer) if kind is int else (int, float, np.integer, np.floating)
    if isinstance(value, bool) or not isinstance(value, good):
        wanted = "an int" if kind is int else "a number"
        raise TypeError(f"{op}: `{name}` must be {wanted}, got {type(value).__name__}")
    return value


def _read_yarn(op: str, yarn: Mapping[str, float]) -> dict[str, float]:
    """YaRN's numbers, with the defaults of those that are left out."""
    if not isinstance(yarn, Mapping):
        raise TypeError(f"{op}: `yarn` must be None or a dict, got {type(yarn).__name__}")
    known = ("factor", "orig_max_pos", *YARN)
    for key in yarn:
        if key not in known:
            raise ValueError(f"{op}: `yarn` must have keys of {', '.join(known)}, got {key}")
    for key in known[:2]:
        if key not in yarn:
            raise ValueError(f"{op}: `yarn` must have the key {key}, got {sorted(yarn)}")
    scaling = YARN | {key: float(_number(op, f"yarn[{key!r}]", yarn[key], float)) for key in yarn}
    limits = {"factor": 1.0, "orig_max_pos": 1.0, "mscale": 0.0, "mscale_all_dim": 0.0}
    for key, value in scaling.items():
        least = limits.get(key)
        good = value > 0 if least is None else value >= least
        if not (good and math.isfinite(value)):
            rule = "positive" if least is None else f"at least {least:g}"
            raise ValueError(f"{op}: `yarn[{key!r}]` must be finite and {rule}, got {value:g}")
    return scaling


def _slow_down(frequencies: Any, base: float, yarn: Mapping[str, float]) -> Any:
    """YaRN's frequencies."""
    size = 2 * len(frequencies)

    def pair_of(turns: float) -> float:
        """The pair that turns this often in `orig_max_pos` positions, as a real number."""
        return size * math.log(yarn["orig_max_pos"] / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(pair_of(yarn["beta_fast"])), 0)
    high = float(min(math.ceil(pair_of(yarn["beta_slow"])), size - 1))
    high += 0.001 if high == low else 0.0
    ramp = np.clip((np.arange(len(frequencies)) - low) / (high - low), 0, 1)
    return frequencies / yarn["factor"] * ramp + frequencies * (1 - ramp)


def _magnitude(yarn: Mapping[str, float], key: str) -> float:
    factor = yarn["factor"]
    return 1.0 if factor <= 1 else 0.1 * yarn[key] * math.log(factor) + 1.0


@operator
def apply_rope(
    positions: Like[Result],
    q_pe: Array,
    k_pe: Array | None,
    rope_table: Array,
    *,
    interleaved: bool = True,
    inverse: bool = False,
    q_out: Array | None = None,
    k_out: Array | None = None,
    stream: Stream = None,
) -> tuple[Result, Result | None]:
    """Turn the RoPE parts of queries and keys to their tokens' positions.

    A pair (a, b) becomes (a cos - b sin, b cos + a sin). Each product is rounded to fp32, then the
    sum, and the result once to the dtype of the arrays. The layout is kept. A value that becomes
    NaN is the positive quiet NaN. All devices give the same bytes.

    Parameters
    ----------
    positions : [>= T] int64 or int32
        A position that `rope_table` lacks is a ValueError on the CPU. CUDA copies that token as
        it is, and reports it in checked mode.
    q_pe : [T, H, R] bf16 or fp32
        R is even. Tokens and heads any stride apart: `q[..., 128:]` is taken in place.
    k_pe : [T, R] in the dtype of `q_pe`, or None
    rope_table : [rows, R] fp32 or bf16
        R / 2 cosines, then R / 2 sines per position, as `sparse_mla.rope_table` makes them. Rows
        any stride apart.
    interleaved : bool
        True: pairs are values 2i and 2i + 1 (GPT-J, DeepSeek). False: values i and i + R / 2
        (NeoX).
    inverse : bool
        True turns by the negative angles, back to position 0.
    q_out, k_out : shape of `q_pe` and of `k_pe`, dtype of `q_pe`, optional
        May be views of larger rows, or `q_pe` and `k_pe` themselves: then they are turned in place.
    stream : int handle or stream object, optional

    Returns
    -------
    (q_out, k_out); (q_out, None) where `k_pe` is None.

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        An odd R, `k_out` without `k_pe`, an output that overlaps an input and is not all of it, a
        position outside the table (CPU).
        `help(sparse_mla.ops)` lists the errors that every operator raises.

    Source: RoFormer (arXiv:2104.09864); vLLM's rotary_embedding, for the layouts.

    Examples
    --------
    >>> import numpy as np, sparse_mla
    >>> q, k = np.array([[[1, 0, 2, 0]]], np.float32), np.array([[0, 1, 0, 2]], np.float32)
    >>> table = np.asarray(sparse_mla.rope_table(8, R=4))
    >>> q_out, k_out = sparse_mla.apply_rope(np.array([1]), q, k, table)
    >>> list(q_out.shape), [round(float(x), 4) for x in k_out[0]]
    ([1, 1, 4], [-0.8415, 0.5403, -0.02, 1.9999])
    """


@operator
def rope_and_cache_mla(
    positions: Like[Result],
    q_pe: Array,
    k_pe: Array,
    rope_table: Array,
    kv_c: Array,
    kv_cache: Written,
    slot_mapping: Array,
    *,
    interleaved: bool = True,
    kv_scale: float = 1.0,
    kv_cache_dtype: RopeFormat | None = None,
    q_out: Array | None = None,
    stream: Stream = None,
) -> tuple[Result, Written]:
    """Turn queries, and turn keys on their way into the cache, in one launch.

    The results are those of `apply_rope` on `q_pe` and `k_pe`, then of `concat_and_cache_mla` with
    the turned and rounded `k_pe`, byte for byte. `k_pe` itself is not written.

    Parameters
    ----------
    positions : [>= T] int64 or int32
        A position that `rope_table` lacks is a ValueError on the CPU. CUDA does not turn that
        token, and reports it in checked mode.
    q_pe : [T, H, 64] bf16 or fp32
        Tokens and heads any stride apart: `q[..., 128:]` is taken in place.
    k_pe : [T, 64], the dtype of `q_pe`
        The RoPE part of the keys, not turned yet. Rows any stride apart.
    rope_table : [rows, 64] fp32 or bf16
        32 cosines, then 32 sines per position, as `sparse_mla.rope_table` makes them. Rows any
        stride apart.
    kv_c : [>= S, 512], the dtype of `q_pe`
        The compressed latents, after their norm. S is the length of `slot_mapping`.
    kv_cache : [pages, block_size, row], row = 576 bf16 or 656 bytes, written
        The cache may also have a head axis, or be flat.
    slot_mapping : [S] int64 or int32, S <= T
        The slots of the first tokens. A token with a negative slot is skipped. A slot past the end
        is a ValueError on the CPU, before anything is written; on CUDA its token is skipped.
    interleaved : bool
        True: pairs are values 2i and 2i + 1 (GPT-J, DeepSeek). False: values i and i + 32 (NeoX).
    kv_scale : float
        1: rows of neither format have a scale of the whole cache.
    kv_cache_dtype : "bfloat16" (or "auto"), "fp8_ds_mla" or None
        None takes the format from the cache's dtype and last dimension. `kv_format` is the same
        option.
    q_out : [T, H, 64], the dtype of `q_pe`, optional
        May be a view of larger rows, or `q_pe` itself, which is then turned in place.
    stream : int handle or stream object, optional

    Returns
    -------
    (q_out, kv_cache)

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        Arrays of other dtypes than `q_pe`, more slots than tokens, a cache of another format, a
        position outside the table or a slot past the end (CPU).
        `help(sparse_mla.ops)` lists the errors that every operator raises.

    Source: vLLM's rotary_embedding and concat_and_cache_mla, one after the other.

    Examples
    --------
    >>> import numpy as np, ml_dtypes, sparse_mla
    >>> shapes = (1, 2, 64), (1, 64), (1, 512), (2, 64, 576)
    >>> q, k, kv_c, cache = (np.ones(shape, ml_dtypes.bfloat16) for shape in shapes)
    >>> given = q, k, np.asarray(sparse_mla.rope_table(8)), kv_c, cache, np.array([65])
    >>> q_out, cache = sparse_mla.rope_and_cache_mla(np.array([5]), *given)
    >>> list(q_out.shape), bool((cache[1, 1, 512:] == q_out[0, 0]).all())
    ([1, 2, 64], True)
    """


@operator
def fused_inv_rope_fp8_quant(
    o: Like[Result],
    positions: Array,
    rope_table: Array,
    *,
    groups: int,
    scale_layout: ScaleLayout = "fp32",
    quantize: bool = True,
    out: Array | None = None,
    out_scale: Array | None = None,
    stream: Stream = None,
) -> Result | tuple[Result, Result]:
    """Turn the output of attention back to position 0 and quantise it for the output projection.

    The last 64 values of every head are pairs (2i, 2i + 1), which turn by the negative angles of
    the token's position: (a, b) -> (a cos + b sin, b cos - a sin), each product rounded to fp32,
    then the sum. Per 128 of a head's 512 values, without a rounding before it::

        scale = the smallest power of two with 448 * scale >= max(amax, 1e-10)
        out = e4m3(x / scale)

    NaN is left out of amax, and an infinity counts as FLT_MAX. A turned value that is NaN is
    positive. All devices give the same bytes.

    Parameters
    ----------
    o : [T, H, 512] bf16
        Tokens and heads any stride apart: H may be a slice of more heads.
    positions : [>= T] int64 or int32
        A position that `rope_table` lacks is a ValueError on the CPU. CUDA does not turn that
        token.
    rope_table : [max_pos, 64] fp32
        32 cosines, then 32 sines, as `sparse_mla.rope_table` makes them.
    groups : int
        G, which divides H. Group g has heads g * H / G and on.
    scale_layout : "fp32" or "ue8m0x4"
        "ue8m0x4" packs the exponents (scale = 2**(e - 127)) of a head's four scales into an int32,
        the first into its low byte.
    quantize : bool
        False gives `out` as bf16, rounded once, and no scales, unless `out_scale` is given.
    out : [T, G, H / G * 512] float8_e4m3fn, uint8, or without scales bf16, optional
    out_scale : [>= T, G, H / G * 4] fp32, or [>= T, G, H / G] int32 for "ue8m0x4", optional
        Any positive strides. Rows from T on, up to the next multiple of 4, become 0.
    stream : int handle or stream object, optional

    Returns
    -------
    (out, out_scale), or out without quantisation. A new `out` is stored as [G, T, values], and a
    new `out_scale` as [G, columns, T rounded up to 4], whose columns from T on are 0. JAX's arrays
    are contiguous.

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        `groups` that do not divide H, H outside 1 to 128, a position outside the table (CPU).
        `help(sparse_mla.ops)` lists the errors that every operator raises.

    Source: vLLM's fused_inv_rope_fp8_quant; DeepGEMM, for the order of the scales.

    Examples
    --------
    >>> import numpy as np, ml_dtypes, sparse_mla
    >>> o, table = np.ones((3, 4, 512), ml_dtypes.bfloat16), np.asarray(sparse_mla.rope_table(8))
    >>> positions = np.array([0, 5, 7])
    >>> out, scale = sparse_mla.fused_inv_rope_fp8_quant(o, positions, table, groups=2)
    >>> list(out.shape), list(scale.shape), float(scale[0, 0, 0])
    ([3, 2, 1024], [3, 2, 8], 0.00390625)
    """
