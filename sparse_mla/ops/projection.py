"""The weights that MLA absorbs, their projections, and quantisation."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from sparse_mla._types import Like, Result
from sparse_mla.ops._declare import Array, Stream, operator

__all__ = [
    "dynamic_per_tensor_quant",
    "grouped_output_projection",
    "k_up_proj",
    "kv_up_proj",
    "split_kv_b_proj",
    "v_up_proj",
]


def split_kv_b_proj(
    weight: Like[Result] | Callable[[Any], Any],
    *,
    num_heads: int,
    qk_nope_head_dim: int,
    v_head_dim: int,
    weight_scale_inv: Array | None = None,
) -> tuple[Result, Result]:
    """Split the weight of kv_b_proj into W_UK and W_UV, in bf16.

    Parameters
    ----------
    weight : [512, H * (Pn + Pv)] or its transpose, or a callable
        bf16, fp16 or fp32; or e4m3 (float8_e4m3fn, uint8) with `weight_scale_inv`. A shape that
        fits both forms is taken as [512, H * (Pn + Pv)]. A callable (a linear layer, quantised or
        not) is applied once to the identity matrix [512, 512] and returns the matrix, alone or as
        the first item of a tuple; a layer with a bias is refused. The identity is a float32 NumPy
        array. For a layer with a torch `.weight` it is a torch tensor on the weight's device, in
        the weight's dtype if that is a floating-point type of 16 bits or more, else in bf16.
    num_heads, qk_nope_head_dim, v_head_dim : int
        H, Pn and Pv.
    weight_scale_inv : [ceil(rows / 128), ceil(columns / 128)] fp32, optional
        One scale per 128 x 128 block of `weight` as it is stored; or one value, of any rank; or one
        per output, [out], or as the weight is stored with 1 for its inputs.

    Returns
    -------
    (W_UK [512, H, Pn], W_UV [512, H, Pv]), bf16.

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        A shape that is not [512, H * (Pn + Pv)] either way, e4m3 without scales.
        `help(sparse_mla.ops)` lists the errors that every operator raises.

    Source: vLLM's process_weights_after_loading; the block scales are DeepSeek-V3's.

    Examples
    --------
    >>> import numpy as np, sparse_mla
    >>> sizes = dict(num_heads=2, qk_nope_head_dim=128, v_head_dim=64)
    >>> w_uk, w_uv = sparse_mla.split_kv_b_proj(np.ones((512, 384), np.float32), **sizes)
    >>> list(w_uk.shape), list(w_uv.shape)
    ([512, 2, 128], [512, 2, 64])
    """
    matrix = find_weight(weight, weight_scale_inv)
    return _split_kv_b_proj(matrix, weight_scale_inv, num_heads, qk_nope_head_dim, v_head_dim)


def find_weight(weight: Any, weight_scale_inv: Any) -> Any:
    """kv_b_proj as an array: what was given, or the matrix of a layer."""
    if not callable(weight):
        return weight
    if weight_scale_inv is not None:
        raise ValueError(
            "split_kv_b_proj: `weight_scale_inv` must be None for a callable, got an array"
        )
    return layer_weight(weight, 512, "split_kv_b_proj", "weight")


@operator
def _split_kv_b_proj(
    weight: Like[Result],
    weight_scale_inv: Array | None,
    num_heads: int,
    qk_nope_head_dim: int,
    v_head_dim: int,
) -> tuple[Result, Result]:
    """`split_kv_b_proj` of a matrix: `weight` is no callable here."""


def layer_weight(layer: Callable[[Any], Any], size: int, op: str, name: str) -> Any:
    """The matrix [size, outputs] that a layer multiplies with, in whatever form it stores it."""
    if getattr(layer, "bias", None) is not None:
        raise ValueError(f"{op}: `{name}` must be a layer without bias, got one with it")
    torch = sys.modules.get("torch")
    stored = getattr(layer, "weight", None)
    if torch is not None and isinstance(stored, torch.Tensor):
        plain = stored.dtype.is_floating_point and stored.dtype.itemsize > 1
        dtype = stored.dtype if plain else torch.bfloat16
        with torch.no_grad():
            result = layer(torch.eye(size, dtype=dtype, device=stored.device))
            return without_grad(result[0] if isinstance(result, tuple) else result)
    import numpy as np

    result = layer(np.eye(size, dtype=np.float32))
    return result[0] if isinstance(result, tuple) else result


def without_grad(array: Any) -> Any:
    """The same memory without gradients, of a PyTorch tensor where gradients are off.

    A layer that keeps such a weight is called where gradients are on, too. And older PyTorch does
    not export a parameter.
    """
    if getattr(array, "requires_grad", False):
        torch = sys.modules.get("torch")
        if torch is not None and not torch.is_grad_enabled():
            return array.detach()
    return array


@operator
def k_up_proj(
    q_nope: Like[Result], W_UK: Array, *, out: Array | None = None, stream: Stream = None
) -> Result:
    """Absorb W_UK into the query: out[t, h, l] = sum_p q_nope[t, h, p] * W_UK[l, h, p].

    Parameters
    ----------
    q_nope : [T, H, Pn] bf16
        The part of the queries without RoPE.
    W_UK : [512, H, Pn] bf16
    out : [T, H, 512] bf16, optional
    stream : int handle or stream object, optional

    Returns
    -------
    out, accumulated in fp32.

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        H outside 1 to 128, shapes that do not match; on CUDA a missing cuBLAS, which is loaded when
        first needed.
        `help(sparse_mla.ops)` lists the errors that every operator raises.

    Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1.2: W_UK absorbed into W_Q.

    Examples
    --------
    >>> import numpy as np, ml_dtypes, sparse_mla
    >>> q, w = np.ones((1, 2, 4), ml_dtypes.bfloat16), np.ones((512, 2, 4), ml_dtypes.bfloat16)
    >>> float(sparse_mla.k_up_proj(q, w)[0, 0, 0])
    4.0
    """


@operator
def v_up_proj(
    x: Like[Result], W_UV: Array, *, out: Array | None = None, stream: Stream = None
) -> Result:
    """Project the latent output up: out[t, h, v] = sum_l x[t, h, l] * W_UV[l, h, v].

    Parameters
    ----------
    x : [T, H, 512] bf16
        The output of the attention.
    W_UV : [512, H, Pv] bf16
    out : [T, H, Pv] bf16, optional
    stream : int handle or stream object, optional

    Returns
    -------
    out, accumulated in fp32.

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        H outside 1 to 128, shapes that do not match; on CUDA a missing cuBLAS, which is loaded when
        first needed.
        `help(sparse_mla.ops)` lists the errors that every operator raises.

    Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1.2: W_UV absorbed into W_O.

    Examples
    --------
    >>> import numpy as np, ml_dtypes, sparse_mla
    >>> x, w = np.ones((1, 2, 512), ml_dtypes.bfloat16), np.ones((512, 2, 4), ml_dtypes.bfloat16)
    >>> out = sparse_mla.v_up_proj(x, w)
    >>> list(out.shape), float(out[0, 0, 0])
    ([1, 2, 4], 512.0)
    """


@operator
def kv_up_proj(
    kv_c: Like[Result], kv_b_proj: Array, *, out: Array | None = None, stream: Stream = None
) -> Result:
    """Latents to keys and values of every head: out[t, n] = sum_l kv_c[t, l] * kv_b_proj[l, n].

    This is what prefill as multi-head attention reads. As [T, H, Pn + Pv], `out` holds the keys'
    parts without RoPE in [..., :Pn] and the values in [..., Pn:]; `varlen_attention` takes both as
    these views.

    Parameters
    ----------
    kv_c : [T, 512] bf16
        Latents, after their norm: as `gather_kv_cache` returns them in [:, :512], for example.
    kv_b_proj : [512, N] bf16, any strides
        N = H * (Pn + Pv). The weight of a linear layer, which is stored as [N, 512], is given as
        its transpose `weight.T`, a view that no memory is copied for.
    out : [T, N] bf16, optional
        Its rows may be any distance apart.
    stream : int handle or stream object, optional

    Returns
    -------
    out, accumulated in fp32 and rounded once.

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        Shapes that do not match; on CUDA a missing cuBLAS, which is loaded when first needed.
        `help(sparse_mla.ops)` lists the errors that every operator raises.

    Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1.2: kv_b_proj is W_UK beside W_UV.

    Examples
    --------
    >>> import numpy as np, ml_dtypes, sparse_mla
    >>> kv_c, weight = (np.ones((n, 512), ml_dtypes.bfloat16) for n in (3, 2 * (128 + 64)))
    >>> kv = sparse_mla.kv_up_proj(kv_c, weight.T).reshape(3, 2, 128 + 64)
    >>> k_nope, v = kv[..., :128], kv[..., 128:]
    >>> list(v.shape), float(v[0, 0, 0])
    ([3, 2, 64], 512.0)
    """


@operator
def grouped_output_projection(
    o: Like[Result],
    o_scale: Array | None,
    weight: Array,
    weight_scale: Array | None,
    *,
    out: Array | None = None,
    stream: Stream = None,
) -> Result:
    """Project each group of heads: out[t, g, n] = sum_r o[t, g, r] * weight[g, n, r].

    For e4m3 the terms are o * o_scale * weight * weight_scale. Every 128 values of r are summed,
    and the sum is multiplied in fp32 by the product of its two scales. The result is rounded to
    bf16 once. It is finite wherever the exact one fits bf16, although the product of scales may not
    fit fp32. A token that is 0 gives 0, unless a scale or a weight is infinite or NaN.

    With z the exact result and u = sum_r |o * weight|, scales included, an error is at most
    2**-8 * |z| + 2**-16 * u. On Hopper, e4m3 of more than 64 tokens runs on the FP8 tensor cores,
    whose sums are coarser: 2**-8 * |z| + 2**-8 * u. On a CPU, products of bf16 below 2**-126 count
    as zero, which adds at most R * 2**-125, unless the values of a row of `o` are all below 2**-74.
    On a GPU, a product of scales below 2**-126 loses bits.

    Parameters
    ----------
    o : [T, G, R] bf16, or float8_e4m3fn or uint8
        G is 1 to 128. For e4m3, R is a multiple of 128, and of 512 if the scales are packed.
    o_scale : [>= T, G, R / 128] fp32, or [>= T, G, R / 512] int32; None for bf16
        Any strides. An int32 holds four exponents (scale = 2**(e - 127)), the first in its low
        byte. `fused_inv_rope_fp8_quant` makes `o` and both kinds of scales.
    weight : [G, N, R], bf16 or e4m3 as `o`
        wo_a of DeepSeek V4: N is o_lora_rank.
    weight_scale : [G, ceil(N / 128), R / 128] fp32; None for bf16
        One scale per block of 128 x 128 weights. Any strides.
    out : [T, G, N] bf16, optional
    stream : int handle or stream object, optional

    Returns
    -------
    out, accumulated in fp32.

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        G outside 1 to 128, shapes that do not match, `o` and `weight` of different types, e4m3
        without scales, bf16 with scales, R that is no multiple of 128; on CUDA, for bf16, a missing
        cuBLAS, which is loaded when first needed.
        `help(sparse_mla.ops)` lists the errors that every operator raises.

    Source: DeepSeek-V4's grouped output projection ("bhr,hdr->bhd"), with the scales of DeepGEMM.

    Examples
    --------
    >>> import numpy as np, ml_dtypes, sparse_mla
    >>> o, weight = np.full((3, 2, 512), 0x38, np.uint8), np.full((2, 4, 512), 0x40, np.uint8)
    >>> o_scale, weight_scale = np.full((3, 2, 4), 0.5, np.float32), np.ones((2, 1, 4), np.float32)
    >>> z = sparse_mla.grouped_output_projection(o, o_scale, weight, weight_scale)
    >>> list(z.shape), float(z[0, 0, 0])
    ([3, 2, 4], 512.0)
    >>> o, weight = (np.ones(shape, ml_dtypes.bfloat16) for shape in ((3, 2, 8), (2, 4, 8)))
    >>> float(sparse_mla.grouped_output_projection(o, None, weight, None)[0, 0, 0])
    8.0
    """


@operator
def dynamic_per_tensor_quant(
    x: Like[Result], *, out: Array | None = None, stream: Stream = None
) -> tuple[Result, Result]:
    """Quantise an array to e4m3 with one scale.

    scale = max(amax, 1e-10) / 448 and out = e4m3(x / scale), a true division, saturating.

    Parameters
    ----------
    x : [...] bf16, fp16 or fp32, any rank up to 8
        Any strides, also of the last dimension.
    out : the shape of x, float8_e4m3fn or uint8, optional
    stream : int handle or stream object, optional

    Returns
    -------
    (out, scale): scale is fp32 without dimensions; x is about out * scale.

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        An `out` of another shape, more than 8 dimensions.
        `help(sparse_mla.ops)` lists the errors that every operator raises.

    Source: vLLM's dynamic_per_batched_tensor_quant, with a true division.

    Examples
    --------
    >>> import numpy as np, sparse_mla
    >>> out, scale = sparse_mla.dynamic_per_tensor_quant(np.array([0.5, -2.0], np.float32))
    >>> [float(x) for x in out], round(float(scale) * 448, 4)
    ([112.0, -448.0], 2.0)
    """
