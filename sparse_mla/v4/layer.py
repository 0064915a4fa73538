"""One DeepSeek V4 layer in a step: its attention, and the whole of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from sparse_mla import _C
from sparse_mla._compiled import names_integration
from sparse_mla._types import Array as Given
from sparse_mla._types import Like, Result, overload
from sparse_mla.ops.projection import without_grad
from sparse_mla.steps.common import ShortRepr, check_int, wrong_type
from sparse_mla.steps.v4 import Config, Metadata
from sparse_mla.v4 import forward
from sparse_mla.v4.checks import check_projections, check_weights, projected_widths
from sparse_mla.v4.lanes import Lanes

Array = Any


@dataclass(eq=False, repr=False)
class Caches(ShortRepr):
    """One layer's caches.

    Parameters
    ----------
    swa : [pages, swa_block_size, row] or, of split pages, [pages, page bytes]
        The sliding window's cache, a row per token; row = 584 uint8 for "fp8_v4".
    compressed : [pages, block_size // ratio, row] or [pages, page bytes], optional
        A row per `ratio` tokens; row = 584 uint8 for "fp8_v4".
    state : [pages, state_block_size, 2 * c * 512] fp32, optional
        The compressor's scratch rows; c is 2 for ratio 4, else 1.
    index : [pages, block_size // 4, row] or [pages, page bytes], optional
        The indexer's keys; row = 132 uint8 for "fp8_index".
    index_state : [pages, state_block_size, 512] fp32, optional
        The scratch rows of the indexer's compressor.

    Source: vLLM's KV caches of DeepSeek V4.

    Examples
    --------
    >>> import numpy as np, sparse_mla
    >>> sparse_mla.v4.Caches(np.zeros((2, 64, 584), np.uint8))
    Caches(swa=uint8[2, 64, 584], compressed=None, state=None, index=None, index_state=None)
    """

    swa: Array
    compressed: Array = None
    state: Array = None
    index: Array = None
    index_state: Array = None


@dataclass(eq=False, repr=False)
class Weights(ShortRepr):
    """One layer's weights outside its dense projections. `attend` reads `attn_sink` alone.

    Parameters
    ----------
    q_norm, kv_norm : [q_lora] and [512] bf16 or fp32
    attn_sink : [>= H] fp32 or None
        Multiplies out by 1 / (1 + exp(sink - lse)).
    rope_table : [max_pos, 64] fp32
        The angles of RoPE, as `rope_table` makes them.
    wo_a, wo_a_scale : [G, N, R] e4m3 with fp32 scales, or bf16 without
        The output projection of each group.
    ape : [ratio, c * 512] fp32, optional
        The compressor's offsets; c is 2 for ratio 4, else 1.
    compressor_norm : [512] bf16 or fp32, optional
    index_ape, index_norm : [4, 256] fp32 and [128] bf16 or fp32, optional
        Those of the indexer's compressor.
    index_rope_table : [max_pos, 64] fp32, optional
        The indexer's angles; None: `rope_table`.

    Source: the parameters of vLLM's DeepSeek V4 layers.

    Examples
    --------
    >>> import numpy as np, sparse_mla
    >>> sink = np.zeros(64, np.float32)
    >>> sparse_mla.v4.Weights(None, None, sink, None, None).attn_sink.shape
    (64,)
    """

    q_norm: Array
    kv_norm: Array
    attn_sink: Array
    rope_table: Array
    wo_a: Array
    wo_a_scale: Array = None
    ape: Array = None
    compressor_norm: Array = None
    index_ape: Array = None
    index_norm: Array = None
    index_rope_table: Array = None


class SparseMLA:
    """One layer.

    Parameters
    ----------
    config : Config
    compress_ratio : int
        The layer's ratio: one of the config's, or up to 1 for the sliding window alone.
    weights : Weights
    projections : mapping of callables, or an object that has them as attributes, optional
        The layer's dense projections, which belong to the caller. `forward` needs them, `attend`
        does not. Each takes an array [T, any] and returns a new one::

            fused_wqa_wkv       hidden states -> [T, q_lora + 512] bf16: the latent query, the key
            wq_b                the latent query -> [T, H * 512] bf16; it is written
            wo_b                [T, G * N] bf16 -> what `forward` returns
            wkv_wgate           hidden states -> [T, 2 c 512] fp32 or bf16: the compressor's values
                                and scores; c is 2 for ratio 4, else 1
            index_wkv_wgate     hidden states -> [T, 512] fp32 or bf16: those of the indexer's
            index_weights_proj  hidden states -> [T, index_n_heads] bf16 or fp32
            index_wq_b          the latent query -> [T, index_n_heads * 128] bf16

        All layers need the first three, those of a ratio above 1 `wkv_wgate`, those of ratio 4
        all.

    Attributes
    ----------
    config : Config
    compress_ratio : int
    weights : Weights
    projections : dict of callables, or None

    Raises
    ------
    TypeError, ValueError
        No Config, no Weights, a ratio that is not in the config. With `projections`: names that are
        missing or unknown, weights of another shape, heads that o_groups does not divide.

    Source: vLLM's attention layers of DeepSeek V4.

    Examples
    --------
    >>> import sparse_mla
    >>> limits = dict(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128)
    >>> config = sparse_mla.v4.Config(64, **limits)
    >>> weights = sparse_mla.v4.Weights(*5 * [None])
    >>> sparse_mla.v4.SparseMLA(config, 128, weights).compress_ratio
    128
    """

    def __init__(
        self,
        config: Config,
        compress_ratio: int,
        weights: Weights,
        projections: Mapping[str, Callable[..., Any]] | object | None = None,
    ) -> None:
        if not isinstance(config, Config):
            raise wrong_type("SparseMLA", "config", "a sparse_mla.v4.Config", config)
        if not isinstance(weights, Weights):
            raise wrong_type("SparseMLA", "weights", "a sparse_mla.v4.Weights", weights)
        ratio = check_int("SparseMLA", "compress_ratio", compress_ratio, 0)
        if ratio > 1 and ratio not in config.compress_ratios:
            raise ValueError(
                f"SparseMLA: `compress_ratio` must be at most 1 or one of "
                f"{config.compress_ratios}, got {ratio}"
            )
        self.config = config
        self.compress_ratio = ratio
        kept = {name: without_grad(x) for name, x in vars(weights).items()}
        is_same = all(kept[name] is x for name, x in vars(weights).items())
        self.weights = weights if is_same else replace(weights, **kept)
        self.projections = None
        if projections is not None:
            self.projections = check_projections(ratio, projections)
            check_weights(config, ratio, weights)
            self._widths = projected_widths(config, ratio, weights)

    def __repr__(self) -> str:
        return f"SparseMLA({self.config!r}, {self.compress_ratio}, {self.weights!r})"

    @overload
    def attend(
        self,
        q: Like[Result],
        caches: Caches,
        metadata: Metadata | None,
        topk_indices: Given | None = None,
        *,
        slots: Given | None = None,
        lens: Given | None = None,
        out: Given | None = None,
        lse: Given | None = None,
        return_lse: Literal[True] = True,
        stream: Any = None,
    ) -> tuple[Result, Result]: ...
    @overload
    def attend(
        self,
        q: Like[Result],
        caches: Caches,
        metadata: Metadata | None,
        topk_indices: Given | None = None,
        *,
        return_lse: bool,
        slots: Given | None = None,
        lens: Given | None = None,
        out: Given | None = None,
        lse: Given | None = None,
        stream: Any = None,
    ) -> Any: ...
    @names_integration()
    def attend(
        self,
        q: Like[Result],
        caches: Caches,
        metadata: Metadata | None,
        topk_indices: Given | None = None,
        *,
        slots: Given | None = None,
        lens: Given | None = None,
        out: Given | None = None,
        lse: Given | None = None,
        return_lse: bool = True,
        stream: Any = None,
    ) -> Any:
        """Attend for all tokens of the step, whose rows are in the caches already.

        Parameters
        ----------
        q : [>= T, H, 512] bf16 or e4m3
            RoPE is applied already. e4m3 values are multiplied by `Config.q_scale`.
        caches : Caches
            `swa` and, for a ratio above 1, `compressed` are read.
        metadata : Metadata or None
            The result of its builder's latest build. None, as engines pass it to warm up: all rows
            of the results become 0.
        topk_indices : [>= T, K] int32, optional
            The rows that the indexer of a layer of ratio 4 chose, as numbers inside each request,
            -1 = none. Other layers take none. It may be left out with `slots`, unless the step has
            prefills on path "separate", which find rows by their numbers. With `Config.cp` the rows
            of all ranks, as `top_k_merge` chooses them.
        slots, lens : [>= T, K] and [>= T] int32, optional
            The same rows as slots of the compressed cache, and how many each token has:
            `lightning_indexer` writes them with the choice, so that nothing has to find them here.
            Not with several ranks.
        out : [>= T, >= H, 512] bf16, optional
            Heads behind the first H are left alone.
        lse : [>= T, H] fp32, optional
            Natural logarithms, without the sink.
        return_lse : bool
            With False and without `lse` the result is out alone.
        stream : int handle or stream object, optional

        Returns
        -------
        (out, lse), with as many rows as q when they were left out. Only the first
        num_actual_tokens rows are written; in arrays that this call made, the others are zero. A
        token that is not valid (see `Metadata.is_valid`) has out 0 and lse -inf. Path "separate"
        does not look at the slots of its prefill tokens: they see what their positions see.

        Raises
        ------
        TypeError, ValueError, BufferError, RuntimeError, MemoryError
            Metadata that a later build replaced or that lacks the layer's block table, and the
            errors of `sparse_attention` and `dequantize_and_gather_k_cache`. All are raised before
            anything is written.

        Source: vLLM's attention layers of DeepSeek V4.

        Examples
        --------
        >>> import numpy as np, ml_dtypes, sparse_mla
        >>> limits = dict(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=512)
        >>> config = sparse_mla.v4.Config(2, kv_cache_dtype="bfloat16", **limits)
        >>> starts, lens = np.array([0, 1], np.int32), np.array([257], np.int32)
        >>> table = np.arange(5, dtype=np.int32)[None]  # one decode, position 256
        >>> common = sparse_mla.CommonAttentionMetadata(starts, lens, np.array([256]), table)
        >>> pages = {128: np.array([[1, 0]], np.int32)}
        >>> metadata = sparse_mla.v4.MetadataBuilder(config).build(common, compressed=pages)
        >>> zeros = np.zeros((5, 64, 512), ml_dtypes.bfloat16)
        >>> caches = sparse_mla.v4.Caches(zeros, np.zeros((2, 2, 512), ml_dtypes.bfloat16))
        >>> layer = sparse_mla.v4.SparseMLA(config, 128, sparse_mla.v4.Weights(*5 * [None]))
        >>> q = np.zeros((1, 2, 512), ml_dtypes.bfloat16)
        >>> out, lse = layer.attend(q, caches, metadata)  # 128 tokens, 2 compressed rows
        >>> out.shape, np.exp(lse).round(2).tolist()
        ((1, 2, 512), [[130.0, 130.0]])
        """
        if not isinstance(caches, Caches):
            raise wrong_type("SparseMLA.attend", "caches", "a sparse_mla.v4.Caches", caches)
        if metadata is None:
            results = _C.Step.warm_up(q, out, lse, self.config.num_heads, stream)
        elif not isinstance(metadata, Metadata):
            wanted = "what MetadataBuilder.build returned for this step, or None"
            raise wrong_type("SparseMLA.attend", "metadata", wanted, metadata)
        else:
            results = metadata._step.layer(
                q=q,
                swa=caches.swa,
                compressed=caches.compressed if self.compress_ratio > 1 else None,
                topk_indices=topk_indices,
                slots=slots,
                lens=lens,
                attn_sink=self.weights.attn_sink,
                out=out,
                lse=lse,
                compress_ratio=max(self.compress_ratio, 1),
                generation=metadata._generation,
                stream=stream,
            )
        return results if return_lse or lse is not None else results[0]

    @names_integration()
    def forward(
        self,
        x: Array,
        caches: Caches,
        metadata: Metadata | None,
        *,
        streams: Sequence[Any] = (),
        out: Array = None,
        return_lse: bool = False,
        stream: Any = None,
    ) -> Array:
        """Run the layer for all tokens of the step, from hidden states to the result of `wo_b`.

        The step's rows go into the caches first, so that its tokens see each other. A token that
        is not valid (see `Metadata.is_valid`) writes nothing, and `wo_b` gets zeros for it.

        What lies between the operators belongs to the builder (`MetadataBuilder.forward_bytes`),
        and the first calls make it. So call `forward` once before a capture; a captured layer then
        allocates nothing but what the projections do.

        Parameters
        ----------
        x : [>= T, hidden], the dtype of the projections
            Hidden states: an array of NumPy, PyTorch or CuPy, or of a framework whose arrays have
            slices, `reshape` and `swapaxes`. Rows behind the first num_actual_tokens are not read.
        caches : Caches
            Written: `swa`; for a ratio above 1 also `compressed` and `state`; for ratio 4 also
            `index` and `index_state`.
        metadata : Metadata or None
            The result of its builder's latest build, with a block table for each of these caches.
            None, as engines pass it to warm up: only `wo_b` runs, on zeros.
        streams : sequence of up to three handles or stream objects
            GPU streams beside the main one, which run parts of the layer at the same time: the
            indexer on the first, the compressor on the second, the indexer's compressor on the
            third (a layer without an indexer: the compressor on the first). Parts without a stream
            run on the main one. A part's projections run on its stream: PyTorch's and CuPy's under
            it as their current stream, those of other frameworks get `stream=`, a handle. The main
            stream waits for all of them. No result depends on it. The CPU ignores streams.
        out : shape of what wo_b returns, dtype of that, optional
            Is passed on to `wo_b` as `out=`.
        return_lse : bool
            Whether to return lse, too.
        stream : int handle or stream object, optional
            The main stream.

        Returns
        -------
        What `wo_b` returned for an array [rows of x, G * N]. With return_lse a pair of that and a
        new lse [rows of x, H] fp32: natural logarithms, without the sink. A token that is not valid
        has -inf; rows behind num_actual_tokens are zero.

        Raises
        ------
        TypeError, ValueError, BufferError, RuntimeError, MemoryError
            A layer without projections or of several ranks (see `attend`), metadata that a later
            build replaced or that lacks a block table, too few or too many rows of x, a missing
            cache, more than three streams: before anything is written. Then a projection that
            returns another shape or dtype, and the errors of the operators and of the projections.

        Source: vLLM's DeepSeek V4 attention layer, with its multi-stream overlap.

        Examples
        --------
        >>> import numpy as np, ml_dtypes, sparse_mla
        >>> bf16, limits = ml_dtypes.bfloat16, dict(max_num_seqs=8, max_num_batched_tokens=64)
        >>> config = sparse_mla.v4.Config(2, o_groups=1, max_model_len=512, **limits)
        >>> table = sparse_mla.rope_table(512, fp32_angles=True)
        >>> ones, wo_a = np.ones(512, bf16), np.full((1, 4, 1024), 1 / 1024, bf16)
        >>> weights = sparse_mla.v4.Weights(ones[:64], ones, None, table, wo_a)
        >>> rng = np.random.default_rng(0)
        >>> shapes = {"fused_wqa_wkv": (32, 576), "wq_b": (64, 1024), "wo_b": (4, 32)}
        >>> w = {name: rng.normal(0, 0.1, shape) for name, shape in shapes.items()}
        >>> projections = {name: lambda x, m=m: (x @ m).astype(bf16) for name, m in w.items()}
        >>> layer = sparse_mla.v4.SparseMLA(config, 1, weights, projections)
        >>> starts, lens = np.array([0, 3], np.int32), np.array([3], np.int32)
        >>> pages = np.array([[0]], np.int32)
        >>> common = sparse_mla.CommonAttentionMetadata(starts, lens, np.arange(3), pages)
        >>> metadata = sparse_mla.v4.MetadataBuilder(config).build(common)  # a prompt of 3 tokens
        >>> caches = sparse_mla.v4.Caches(np.zeros((1, 64, 584), np.uint8))
        >>> x = rng.normal(0, 1, (3, 32)).astype(bf16)
        >>> layer.forward(x, caches, metadata).shape
        (3, 32)
        """
        if self.projections is None:
            raise ValueError(
                "SparseMLA.forward: `projections` must be given to SparseMLA, got none"
            )
        if not isinstance(caches, Caches):
            raise wrong_type("SparseMLA.forward", "caches", "a sparse_mla.v4.Caches", caches)
        if self.config.cp is not None and self.config.cp[1] > 1:
            raise ValueError(
                "SparseMLA.forward: `cp` must be of one rank, because ranks are merged between "
                f"attention and the output projection (call `attend`), got {self.config.cp!r}"
            )
        if metadata is not None and not isinstance(metadata, Metadata):
            wanted = "what MetadataBuilder.build returned for this step, or None"
            raise wrong_type("SparseMLA.forward", "metadata", wanted, metadata)
        lanes = Lanes(x, stream, streams)
        with lanes.entered:
            return forward.run(self, x, caches, metadata, lanes, out=out, return_lse=return_lse)
