"""One layer's attention in a step."""

from __future__ import annotations

from typing import Any, Literal

from sparse_mla import ops
from sparse_mla._compiled import names_integration
from sparse_mla._types import Array as Given
from sparse_mla._types import Like, Result, overload
from sparse_mla.steps.common import show, wrong_type
from sparse_mla.steps.v32 import Config, Metadata

Array = Any


class SparseMLA:
    """One layer's attention, and its absorbed projections.

    Parameters
    ----------
    config : Config
    kv_b_proj : [512, H * (Pn + Pv)] bf16, fp16, fp32 or e4m3, its transpose, or a layer, optional
        The `weight` of `split_kv_b_proj`, from which `W_UK` and `W_UV` are made. They are None
        without it.
    weight_scale_inv : [ceil(rows / 128), ceil(columns / 128)] fp32, optional
        Block scales of an e4m3 weight.

    Attributes
    ----------
    config : Config
    W_UK, W_UV : [512, H, Pn] and [512, H, Pv] bf16, or None

    Raises
    ------
    TypeError, ValueError
        `config` is no Config, or `split_kv_b_proj` raises.

    Source: vLLM's FlashMLASparseImpl.

    Examples
    --------
    >>> import numpy as np, sparse_mla
    >>> limits = dict(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128)
    >>> config = sparse_mla.Config(2, softmax_scale=0.1, **limits)
    >>> sparse_mla.SparseMLA(config, kv_b_proj=np.ones((512, 512), np.float32)).W_UK.shape
    (512, 2, 128)
    """

    W_UK: Array
    W_UV: Array

    def __init__(
        self,
        config: Config,
        *,
        kv_b_proj: Array | None = None,
        weight_scale_inv: Array | None = None,
    ) -> None:
        if not isinstance(config, Config):
            raise wrong_type("SparseMLA", "config", "a Config", config)
        self.config = config
        self.W_UK = self.W_UV = None
        if kv_b_proj is not None:
            self.W_UK, self.W_UV = ops.split_kv_b_proj(
                kv_b_proj,
                num_heads=config.num_heads,
                qk_nope_head_dim=config.qk_nope_head_dim,
                v_head_dim=config.v_head_dim,
                weight_scale_inv=weight_scale_inv,
            )

    def __repr__(self) -> str:
        return f"SparseMLA({self.config!r}, W_UK={show(self.W_UK)}, W_UV={show(self.W_UV)})"

    @overload
    def forward(
        self,
        q: Like[Result] | tuple[Like[Result], Given],
        kv_cache: Given,
        topk_indices: Given,
        metadata: Metadata,
        *,
        attn_sink: Given | None = None,
        out: Given | None = None,
        lse: Given | None = None,
        return_lse: Literal[True] = True,
        stream: Any = None,
    ) -> tuple[Result, Result]: ...
    @overload
    def forward(
        self,
        q: Like[Result] | tuple[Like[Result], Given],
        kv_cache: Given,
        topk_indices: Given,
        metadata: Metadata,
        *,
        return_lse: bool,
        attn_sink: Given | None = None,
        out: Given | None = None,
        lse: Given | None = None,
        stream: Any = None,
    ) -> Any: ...
    @names_integration()
    def forward(
        self,
        q: Like[Result] | tuple[Like[Result], Given],
        kv_cache: Given,
        topk_indices: Given,
        metadata: Metadata,
        *,
        attn_sink: Given | None = None,
        out: Given | None = None,
        lse: Given | None = None,
        return_lse: bool = True,
        stream: Any = None,
    ) -> Any:
        """Attend for all tokens of the step, on the metadata's path.

        Parameters
        ----------
        q : [>= T, H, 576] bf16, or a pair ([>= T, H, 512], [>= T, H, 64])
        kv_cache : [pages, block_size, row], row = 576 bf16 or 656 bytes as the config says
        topk_indices : [>= T, K] int32
            Positions inside each request, -1 = none, as the indexer gives them.
        metadata : Metadata
            The result of its builder's latest build.
        attn_sink : [H] fp32, optional
            Multiplies out by 1 / (1 + exp(sink - lse)); lse is unchanged. Of several ranks
            (`Config.cp`) the merge has it.
        out : [>= T, H, 512] bf16, optional
        lse : [>= T, H] fp32, optional
            Natural logarithms, without the sink; -inf where a token attends to nothing.
        return_lse : bool
            With False and without `lse` the result is out alone.
        stream : int handle or stream object, optional

        Returns
        -------
        (out, lse), with as many rows as q when they were left out. Only the first
        num_actual_tokens rows are written; in arrays that this call made, the others are zero.

        Raises
        ------
        TypeError, ValueError, BufferError, RuntimeError, MemoryError
            Metadata that a later build replaced, and the errors of `sparse_attention` and
            `gather_kv_cache`. All are raised before anything is written.

        Source: vLLM's FlashMLASparseImpl.forward_mqa.

        Examples
        --------
        >>> import numpy as np, ml_dtypes, sparse_mla
        >>> limits = dict(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128)
        >>> config = sparse_mla.Config(2, softmax_scale=192**-0.5, topk_tokens=3, **limits)
        >>> cache = np.ones((4, 64, 576), ml_dtypes.bfloat16)
        >>> starts, lens = np.array([0, 1], np.int32), np.array([7], np.int32)
        >>> slots, table = np.array([70]), np.array([[1]], np.int32)  # one decode, in page 1
        >>> common = sparse_mla.CommonAttentionMetadata(starts, lens, slots, table)
        >>> metadata = sparse_mla.MetadataBuilder(config).build(common)
        >>> q, topk = np.zeros((1, 2, 576), ml_dtypes.bfloat16), np.array([[0, 6, -1]], np.int32)
        >>> out, lse = sparse_mla.SparseMLA(config).forward(q, cache, topk, metadata)
        >>> out.shape, np.exp(lse).round(3).tolist()
        ((1, 2, 512), [[2.0, 2.0]])
        """
        if not isinstance(metadata, Metadata):
            wanted = "what MetadataBuilder.build returned for this step"
            raise wrong_type("SparseMLA.forward", "metadata", wanted, metadata)
        results = metadata._step.layer(
            q=q,
            kv_cache=kv_cache,
            topk_indices=topk_indices,
            attn_sink=attn_sink,
            out=out,
            lse=lse,
            softmax_scale=self.config.softmax_scale,
            generation=metadata._generation,
            stream=stream,
        )
        return results if return_lse or lse is not None else results[0]

    def k_up_proj(
        self, q_nope: Like[Result], *, out: Given | None = None, stream: Any = None
    ) -> Result:
        """`sparse_mla.k_up_proj` with this layer's W_UK.

        Parameters
        ----------
        q_nope : [T, H, Pn] bf16
        out : [T, H, 512] bf16, optional
        stream : int handle or stream object, optional

        Returns
        -------
        out.

        Raises
        ------
        TypeError, ValueError, BufferError, RuntimeError, MemoryError
            A layer without kv_b_proj, and the errors of `sparse_mla.k_up_proj`.

        Source: see `sparse_mla.k_up_proj`.

        Examples
        --------
        >>> import numpy as np, ml_dtypes, sparse_mla
        >>> limits = dict(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128)
        >>> config = sparse_mla.Config(2, softmax_scale=0.1, **limits)
        >>> layer = sparse_mla.SparseMLA(config, kv_b_proj=np.ones((512, 512), np.float32))
        >>> layer.k_up_proj(np.ones((1, 2, 128), ml_dtypes.bfloat16))[0, 0, 0].item()
        128.0
        """
        return ops.k_up_proj(q_nope, self._weight(self.W_UK, "k_up_proj"), out=out, stream=stream)

    def v_up_proj(self, x: Like[Result], *, out: Given | None = None, stream: Any = None) -> Result:
        """`sparse_mla.v_up_proj` with this layer's W_UV.

        Parameters
        ----------
        x : [T, H, 512] bf16
        out : [T, H, Pv] bf16, optional
        stream : int handle or stream object, optional

        Returns
        -------
        out.

        Raises
        ------
        TypeError, ValueError, BufferError, RuntimeError, MemoryError
            A layer without kv_b_proj, and the errors of `sparse_mla.v_up_proj`.

        Source: see `sparse_mla.v_up_proj`.

        Examples
        --------
        >>> import numpy as np, ml_dtypes, sparse_mla
        >>> limits = dict(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128)
        >>> config = sparse_mla.Config(2, softmax_scale=0.1, **limits)
        >>> layer = sparse_mla.SparseMLA(config, kv_b_proj=np.ones((512, 512), np.float32))
        >>> layer.v_up_proj(np.ones((1, 2, 512), ml_dtypes.bfloat16))[0, 0, 0].item()
        512.0
        """
        return ops.v_up_proj(x, self._weight(self.W_UV, "v_up_proj"), out=out, stream=stream)

    @staticmethod
    def _weight(weight: Array, op: str) -> Array:
        if weight is None:
            raise ValueError(f"{op}: `kv_b_proj` must be given to SparseMLA, got None")
        return weight
