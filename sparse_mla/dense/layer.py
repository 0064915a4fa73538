"""One layer of dense MLA in a step."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from sparse_mla import ops
from sparse_mla._types import Array as Given
from sparse_mla._types import Like, Result
from sparse_mla.ops.projection import find_weight
from sparse_mla.steps.common import show, wrong_type
from sparse_mla.steps.dense import Config, Metadata

Array = Any


class DenseMLA:
    """Runs one layer of a step: RoPE, cache write, and attention to the values of all heads, on the
    path of the step.

    Parameters
    ----------
    config : Config
    kv_b_proj : [512, H * (Pn + Pv)] or its transpose
        The layer's weight, bf16, fp16, fp32, or e4m3 with weight_scale_inv; or the layer itself, as
        for `sparse_mla.split_kv_b_proj`.
    weight_scale_inv : [ceil(rows / 128), ceil(columns / 128)] fp32, optional
    rope_table : [positions, 64] fp32 or bf16, optional
        Cosines, then sines, as `sparse_mla.rope_table` gives them. Without it q and k_pe must be
        turned already.

    Attributes
    ----------
    W_UK, W_UV : [512, H, Pn] and [512, H, Pv] bf16
        What decodes are absorbed with.
    kv_b_proj : [512, H * (Pn + Pv)] bf16, or None on path "mixed"
        What makes keys and values for prefills: a view of the bf16 weight that was given, else a
        copy.

    Raises
    ------
    TypeError, ValueError
        No Config, and the errors of `sparse_mla.split_kv_b_proj`.

    Source: vLLM's MLACommonImpl.

    Examples
    --------
    >>> import numpy as np, sparse_mla
    >>> limits = dict(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128)
    >>> config = sparse_mla.dense.Config(2, softmax_scale=0.1, **limits)
    >>> sparse_mla.dense.DenseMLA(config, kv_b_proj=np.ones((512, 512), np.float32)).W_UK.shape
    (512, 2, 128)
    """

    W_UK: Array
    W_UV: Array
    kv_b_proj: Array | None

    def __init__(
        self,
        config: Config,
        *,
        kv_b_proj: Array,
        weight_scale_inv: Array | None = None,
        rope_table: Array | None = None,
    ) -> None:
        if not isinstance(config, Config):
            raise wrong_type("DenseMLA", "config", "a dense.Config", config)
        self.config = config
        self.rope_table = rope_table
        weight = find_weight(kv_b_proj, weight_scale_inv)
        self.W_UK, self.W_UV = ops.split_kv_b_proj(
            weight,
            num_heads=config.num_heads,
            qk_nope_head_dim=config.qk_nope_head_dim,
            v_head_dim=config.v_head_dim,
            weight_scale_inv=weight_scale_inv,
        )
        is_mixed = config.path == "mixed"
        self.kv_b_proj = None if is_mixed else _as_matrix(weight, self.W_UK, self.W_UV)

    def __repr__(self) -> str:
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
        stream: Any = None,
    ) -> Any:
        """Run the layer for all tokens of the step.

        Parameters
        ----------
        q : [>= T, H, Pn + 64] bf16, or a pair ([>= T, H, Pn], [>= T, H, 64])
            [>= T, H, Pn] for a model without RoPE, whose k_pe is None.
        kv_c : [>= T, 512] bf16
            The latents of the step's tokens, after their norm.
        k_pe : [>= T, 64] bf16, or None
        kv_cache : [pages, block_size, row]
            The tokens are written to it first. With no pages nothing is written.
        metadata : Metadata or None
            The result of its builder's latest build. None, as engines give it to measure memory:
            `out` is returned as it is.
        kv_scale : float, or an array of one fp32
            1 for the caches that are served.
        out : [>= T, H, Pv] bf16, optional
        stream : int handle or stream object, optional

        Returns
        -------
        out, with as many rows as q when it was left out. Only the first num_actual_tokens rows are
        written; in an array that this call made, the others are zero.

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
        if metadata is None:
            return out
        if not isinstance(metadata, Metadata):
            wanted = "what dense.MetadataBuilder.build returned for this step"
            raise wrong_type("DenseMLA.forward", "metadata", wanted, metadata)
        results = metadata._step.layer(
            q=q,
            kv_c=kv_c,
            k_pe=k_pe,
            W_UK=self.W_UK,
            W_UV=self.W_UV,
            kv_b_proj=self.kv_b_proj,
            rope_table=self.rope_table,
            kv_scale=kv_scale,
            kv_cache=kv_cache,
            out=out,
            softmax_scale=self.config.softmax_scale,
            interleaved=self.config.interleaved,
            generation=metadata._generation,
            stream=stream,
        )
        return results[0]


def _as_matrix(weight: Array, W_UK: Array, W_UV: Array) -> Array:
    """The weight as [512, H * (Pn + Pv)] bf16: a view of a bf16 weight, else made of its parts."""
    if str(getattr(weight, "dtype", None)).endswith("bfloat16"):
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
