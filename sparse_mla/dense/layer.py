"""One layer of dense MLA in a step."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from sparse_mla import ops
from sparse_mla._types import Array as Given
from sparse_mla._types import Like, Result
from sparse_mla.dense.absorbed import AbsorbedWeights, choose_scheme, is_bf16
from sparse_mla.ops.projection import find_weight, without_grad
from sparse_mla.ops.projection_weights import is_pair, transpose
from sparse_mla.steps.common import show, wrong_type
from sparse_mla.steps.dense import LATENT, Config, Metadata

Array = Any


class DenseMLA:
    """Runs one layer of a step: RoPE, cache write, and attention to the values of all heads, on the
    path of the step. With absorbed weights, the projections of queries and outputs, too.

    Parameters
    ----------
    config : Config
    kv_b_proj : [512, H * (Pn + Pv)] or its transpose, a pair, or a callable
        The layer's weight, bf16, fp16, fp32, or e4m3 with weight_scale_inv, which may be the second
        item of a pair; or the layer itself, as for `sparse_mla.split_kv_b_proj`. A shape that fits
        both forms is taken as [512, H * (Pn + Pv)], and in a pair as its transpose, [out, in].
    weight_scale_inv : fp32, optional
        One value, one per output ([out], or with 1 for the inputs), or one per 128 x 128 values, as
        the weight is stored.
    q_proj, o_proj : arrays, pairs or callables, optional
        The projections of queries and outputs, as `sparse_mla.absorb` takes them. Read with
        `absorb` alone.
    absorb : bool
        Whether weights absorb W_UK and W_UV. `forward` then begins with q_c, what q_proj
        multiplies, and ends with what o_proj gives. An absorbed layer of DeepSeek-V3 has 1.1 GB of
        weights in bf16, and half in e4m3. They are made of kv_b_proj itself, whose e4m3 values are
        multiplied by their scales in fp32, not of W_UK and W_UV in bf16.
    scheme : "tensor", "block", "token_tensor" or "token_channel", optional
        The quantisation of layers that are given as callables, which cannot tell it; of plain
        weights; and "token_tensor" of pairs with one scale, which are "tensor" otherwise. For e4m3
        Lq is a multiple of 128, and at most 8192, or about 1000 * H if that is more.
    requantize : bool
        Whether weights that absorb e4m3 ones are e4m3 again, quantised from the fp32 product: then
        all three must have one scheme, and decodes multiply by `sparse_mla.fp8_linear`. With False
        any mix gives bf16. With "tensor", one scale serves all rows of a step, padding included.
    rope_table : [positions, 64] fp32 or bf16, optional
        Cosines, then sines, as `sparse_mla.rope_table` gives them. Without it q and k_pe must be
        turned already; with `absorb`, which makes q's RoPE part, nothing is turned.

    Attributes
    ----------
    W_UK, W_UV : [512, H, Pn] and [512, H, Pv] bf16, or None with `absorb`
        What decodes are absorbed with.
    kv_b_proj : [512, H * (Pn + Pv)] bf16, or None on path "mixed"
        What makes keys and values for prefills: a view of the bf16 weight that was given, else a
        copy.
    absorbed : object or None
        With `absorb`, its W_Q_UK, W_QR and W_UV_O are as `sparse_mla.absorb` returns them, and
        scheme is their scheme, None for bf16. For prefills it has W_Q [Lq, H * Pn] and o_proj [H *
        Pv, hidden] in bf16, or None on path "mixed".

    Raises
    ------
    TypeError, ValueError
        No Config, the errors of `sparse_mla.split_kv_b_proj` and `sparse_mla.absorb`, schemes that
        differ, plain and e4m3 weights.

    Source: vLLM's MLACommonImpl.

    Examples
    --------
    >>> import numpy as np, sparse_mla
    >>> limits = dict(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128)
    >>> config = sparse_mla.dense.Config(2, softmax_scale=0.1, **limits)
    >>> sparse_mla.dense.DenseMLA(config, kv_b_proj=np.ones((512, 512), np.float32)).W_UK.shape
    (512, 2, 128)
    """

    W_UK: Array | None
    W_UV: Array | None
    kv_b_proj: Array | None
    absorbed: AbsorbedWeights | None

    def __init__(
        self,
        config: Config,
        *,
        kv_b_proj: Any,
        weight_scale_inv: Array | None = None,
        q_proj: Any = None,
        o_proj: Any = None,
        absorb: bool = False,
        scheme: str | None = None,
        requantize: bool = True,
        rope_table: Array | None = None,
    ) -> None:
        if not isinstance(config, Config):
            raise wrong_type("DenseMLA", "config", "a dense.Config", config)
        if scheme is not None and not absorb:
            raise ValueError(f"DenseMLA: `scheme` must be None without absorb=True, got {scheme!r}")
        self.config = config
        self.rope_table = without_grad(rope_table)
        weight, scale = _find_kv_b(kv_b_proj, weight_scale_inv)
        if absorb:
            if config.cp is not None and config.cp[1] > 1:
                raise ValueError(
                    "DenseMLA: `absorb` must be False with `cp` of several ranks, because W_UV_O "
                    f"adds up heads before ranks are merged, got {absorb!r} with {config.cp!r}"
                )
            for name, given in (("q_proj", q_proj), ("o_proj", o_proj)):
                if given is None:
                    raise ValueError(f"DenseMLA: `{name}` must be given to absorb, got none")
            scheme = choose_scheme(q_proj, weight, scale, o_proj, scheme, requantize)
        weight = without_grad(find_weight(weight, scale))
        parts = ops.split_kv_b_proj(
            weight,
            num_heads=config.num_heads,
            qk_nope_head_dim=config.qk_nope_head_dim,
            v_head_dim=config.v_head_dim,
            weight_scale_inv=scale,
        )
        is_mixed = config.path == "mixed"
        self.kv_b_proj = None if is_mixed else _as_matrix(weight, scale, *parts)
        self.W_UK, self.W_UV = (None, None) if absorb else parts
        self.absorbed = (
            AbsorbedWeights(config, q_proj, (weight, scale), parts, o_proj, scheme)
            if absorb
            else None
        )

    def __repr__(self) -> str:
        if self.absorbed is not None:
            scheme = self.absorbed.scheme
            return f"DenseMLA({self.config!r}, absorb=True, scheme={scheme!r})"
        return f"DenseMLA({self.config!r}, W_UK={show(self.W_UK)}, W_UV={show(self.W_UV)})"

    def forward(
        self,
        q: Like[Result] | tuple[Like[Result], Given],
        kv_c: Given,
        k_pe: Given | None,
        kv_cache: Given,
        metadata: Metadata | None,
        *,
        kv_scale: float | Given = 1.0,
        out: Given | None = None,
        lse: Given | None = None,
        return_lse: bool = False,
        stream: Any = None,
    ) -> Any:
        """Run the layer for all tokens of the step.

        Parameters
        ----------
        q : [>= T, H, Pn + 64] bf16, or a pair ([>= T, H, Pn], [>= T, H, 64])
            [>= T, H, Pn] for a model without RoPE, whose k_pe is None. With `absorb`, q_c [>= T,
            Lq] bf16.
        kv_c : [>= T, 512] bf16
            The latents of the step's tokens, after their norm.
        k_pe : [>= T, 64] bf16, or None
        kv_cache : [pages, block_size, row]
            The tokens are written to it first. With no pages nothing is written.
        metadata : Metadata or None
            The result of its builder's latest build. None, as engines give it to measure memory:
            `out` is returned as it is, and `lse` behind it if the call gives it or asks for it.
        kv_scale : float, or an array of one fp32
            1 for the caches that are served.
        out : [>= T, H, Pv] bf16, or [>= T, hidden] with `absorb`, optional
        lse : [>= T, H] fp32, optional
            Natural logarithms of the attention's sums; -inf for padding tokens, and where this rank
            of `Config.cp` has no key.
        return_lse : bool
            Whether to return lse, too, as a call with `lse` always does, and one with `Config.cp`.
        stream : int handle or stream object, optional

        Returns
        -------
        out, or (out, lse), with as many rows as q when they were left out. Only the first
        num_actual_tokens rows are written; in arrays that this call made, the others are zero.

        Raises
        ------
        TypeError, ValueError, BufferError, RuntimeError, MemoryError
            Metadata that a later build replaced, arrays that do not fit the config. All are raised
            before anything is written.

        Source: vLLM's MLACommonImpl.forward.

        Examples
        --------
        >>> import numpy as np, ml_dtypes, sparse_mla
        >>> limits = dict(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128)
        >>> config = sparse_mla.dense.Config(2, softmax_scale=192**-0.5, **limits)
        >>> layer = sparse_mla.dense.DenseMLA(config, kv_b_proj=np.ones((512, 512), np.float32))
        >>> bf16 = lambda *shape: np.ones(shape, ml_dtypes.bfloat16)
        >>> starts, lens = np.array([0, 1], np.int32), np.array([1], np.int32)
        >>> slots, table = np.array([70]), np.array([[1]], np.int32)  # one token, in page 1
        >>> common = sparse_mla.CommonAttentionMetadata(starts, lens, slots, table)
        >>> metadata = sparse_mla.dense.MetadataBuilder(config).build(common)
        >>> cache = np.zeros((4, 64, 576), ml_dtypes.bfloat16)
        >>> out = layer.forward(bf16(1, 2, 192), bf16(1, 512), bf16(1, 64), cache, metadata)
        >>> out.shape
        (1, 2, 128)
        """
        return_lse = return_lse or self.config.cp is not None
        if metadata is None:
            return (out, lse) if return_lse or lse is not None else out
        if not isinstance(metadata, Metadata):
            wanted = "what dense.MetadataBuilder.build returned for this step"
            raise wrong_type("DenseMLA.forward", "metadata", wanted, metadata)
        if self.absorbed is None:
            weights = {"q": q, "W_UK": self.W_UK, "W_UV": self.W_UV}
        else:
            weights = {"q_c": q, **self.absorbed.arguments()}
        *results, _ = metadata._step.layer(  # the last one is the cache
            **weights,
            kv_c=kv_c,
            k_pe=k_pe,
            kv_b_proj=self.kv_b_proj,
            rope_table=self.rope_table,
            kv_scale=kv_scale,
            kv_cache=kv_cache,
            out=out,
            lse=lse,
            return_lse=return_lse,
            softmax_scale=self.config.softmax_scale,
            interleaved=self.config.interleaved,
            generation=metadata._generation,
            stream=stream,
        )
        return results[0] if len(results) == 1 else tuple(results)


def _find_kv_b(given: Any, scale: Any) -> tuple[Any, Any]:
    """The weight and its scale, which may be a pair."""
    if not is_pair(given):
        return given, scale
    if scale is not None or len(given) != 2:
        raise ValueError(
            "DenseMLA: `kv_b_proj` must be a pair (weight, scale) without `weight_scale_inv`, got "
            f"{len(given)} items{'' if scale is None else ' and an array'}"
        )
    if tuple(getattr(given[0], "shape", ())) != (LATENT, LATENT):
        return tuple(given)
    # Both forms fit, and layers store [out, in].
    weight, scale = given
    return transpose(weight), transpose(scale) if len(getattr(scale, "shape", ())) == 2 else scale


def _as_matrix(weight: Array, scale: Array | None, W_UK: Array, W_UV: Array) -> Array:
    """The weight as [512, H * (Pn + Pv)] bf16: a view if it is that already, else made of parts."""
    if is_bf16(weight) and scale is None:
        columns = W_UK.shape[1] * (W_UK.shape[2] + W_UV.shape[2])
        if tuple(weight.shape) == (512, columns):
            return weight
        if hasattr(weight, "T"):
            return weight.T
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(W_UK, torch.Tensor):
        return torch.cat([W_UK, W_UV], dim=-1).flatten(1)
    namespace = getattr(W_UK, "__array_namespace__", lambda: np)()
    return namespace.concatenate([W_UK, W_UV], axis=-1).reshape(512, -1)
