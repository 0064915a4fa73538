"""A layer's attention in a paged step: which operators it calls, by the metadata and by what the
layer is. The operators check their own arguments; here is checked what only a step knows."""

from __future__ import annotations

from typing import Any

from sparse_mla import _C, ops
from sparse_mla._types import Array as Given
from sparse_mla._types import KvFormat, Like, Result
from sparse_mla.ops._declare import Stream
from sparse_mla.paged.scratch import Scratch, dtype_of
from sparse_mla.steps.common import wrong_type
from sparse_mla.steps.paged import Metadata

Array = Any
OP = "attention"
LATENT = 512  # the values of a row of latents
# "mixed" has decodes, too: as requests of one new token.
EXTENDING = ("extend", "mixed")


def attention(
    metadata: Metadata,
    q: Like[Result] | tuple[Like[Result], Given],
    k_cache: Given | None = None,
    v_cache: Given | None = None,
    *,
    softmax_scale: float,
    k: Given | tuple[Given, Given] | None = None,
    v: Given | None = None,
    prefix_chunk: tuple[Given, int] | None = None,
    qv: Given | None = None,
    sliding_window_size: int = -1,
    is_local: bool = False,
    is_cross: bool = False,
    quantize_q: bool = False,
    softcap: float = 0.0,
    attn_sink: Given | None = None,
    q_descale: float | Given | None = None,
    k_descale: float | Given | None = None,
    v_descale: float | Given | None = None,
    q_scale: float | Given = 1.0,
    kv_scale: float | Given = 1.0,
    kv_format: KvFormat | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    num_splits: int = 0,
    out: Given | None = None,
    lse: Given | None = None,
    workspace: Given | None = None,
    stream: Stream = None,
) -> tuple[Result, Result]:
    """Run one layer's attention, whose keys and values are in the cache already.

    The kind of the layer and the step's metadata say which tables, mask and parts there are::

        window (sliding_window_size >= 0)   (left, 0), over swa_page_table where there is one;
                                            a tree's rows over swa_spec_metadata
        local (is_local)                    attention_chunk, over swa_page_table where there is one
        cross (is_cross)                    an encoder's tokens, without a mask
        else                                causal, over page_table; a tree or a shared prefix as
                                            two parts, which are merged once, with the sinks

    Parts are fp32; of rows of latents bf16, and in JAX of the dtype of q.

    Parameters
    ----------
    metadata : Metadata
        The result of its builder's latest build of its mode.
    q : [T, H, D] bf16, fp16 or e4m3, or for rows of latents also a pair
        The query tokens of the step: as `paged_attention` or `mla_attention` take them.
    k_cache : [P, page_size, Hk, D], or rows of latents [P, page_size, row]
    v_cache : [P, page_size, Hk, Dv], or None
        None: k_cache has rows of latents, as `mla_attention` takes them.
    softmax_scale : float
    k, v : [Tk, Hk, D] and [Tk, Hk, Dv], optional
        "extend" and "mixed": keys and values as arrays, for `varlen_attention`, in place of caches.
        Those of the new tokens, or with `prefix_chunk` those of a chunk of cached ones.
    prefix_chunk : ([B + 1] int32, int), optional
        cu_seqlens_k and the longest part of a chunk. All its keys are seen.
    qv : [T, H, Dv], optional
        The absorbed form with latents as values, see `paged_attention`.
    sliding_window_size : int
        The keys that a query sees before its own; -1 = all. With a tree at most the config's.
    is_local : bool
        Whether queries see keys of their own attention_chunk positions alone.
    is_cross : bool
        Whether queries see the tokens of an encoder alone.
    quantize_q : bool
        Whether q is cast to e4m3, saturating, for a cache of e4m3.
    softcap : float
    attn_sink : [>= H] fp32, optional
    q_descale, k_descale, v_descale : float, an array of one fp32, or [n, Hk] fp32, optional
        What e4m3 values are multiplied with. Rows of a tree take their request's.
    q_scale, kv_scale : float, or an array of one fp32
        The scales of `mla_attention`, for rows of latents.
    kv_format : str or None
        The format of such rows.
    max_seqlen_q, max_seqlen_k : int, optional
        Hints; None = the metadata's.
    num_splits : int
    out : [T, H, Dv], optional
    lse : [T, H] fp32, optional
    workspace : [bytes] uint8, optional
    stream : int handle or stream object, optional

    Returns
    -------
    (out, lse). lse is a natural logarithm, without the sink.

    Raises
    ------
    TypeError, ValueError, BufferError, RuntimeError, MemoryError
        Metadata that a later build of its mode has replaced; a layer that the config does not
        serve: local without attention_chunk, cross without an encoder, a window beyond the config's
        with a tree, a window with a shared prefix; `k` in other modes; scratch memory that a
        capture would have to make; what the operators refuse.

    Source: SGLang's FlashAttentionBackend.forward_extend and forward_decode.

    Examples
    --------
    >>> import numpy as np, sparse_mla
    >>> config = sparse_mla.paged.Config(max_bs=2, max_num_tokens=8, max_context_len=8, page_size=4)
    >>> slots = np.array([[8, 9, 10, 11, 0, 1, 2, 3]], np.int32)
    >>> builder = sparse_mla.paged.MetadataBuilder(config, slots)
    >>> metadata = builder.build("decode", np.array([5], np.int32), np.array([0]))
    >>> q, cache = np.ones((1, 4, 64), np.float16), np.ones((3, 4, 2, 64), np.float16)
    >>> out, lse = sparse_mla.paged.attention(metadata, q, cache, cache, softmax_scale=1 / 64)
    >>> np.exp(lse - 1).round(2).tolist()  # five keys
    [[5.0, 5.0, 5.0, 5.0]]
    """
    if not isinstance(metadata, Metadata):
        wanted = "what paged.MetadataBuilder.build returned for this step"
        raise wrong_type(OP, "metadata", wanted, metadata)
    metadata._builder._check(metadata)
    layer = Layer(
        metadata,
        kinds=(sliding_window_size, is_local, is_cross),
        common={
            "softmax_scale": softmax_scale,
            "softcap": softcap,
            "num_splits": num_splits,
            "stream": stream,
        },
        hints=(max_seqlen_q, max_seqlen_k),
        results={"attn_sink": attn_sink, "out": out, "lse": lse},
        workspace=workspace,
    )
    if metadata._is_captured:
        layer.mark_use(q, stream)  # the arrays know the event of the capture, not of the replay
    try:
        if k is not None or v is not None or prefix_chunk is not None:
            _refuse_arrays(metadata, k_cache, k, v, prefix_chunk, layer)
            scales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
            return layer.run_arrays(q, k, v, prefix_chunk, scales)
        if k_cache is None:
            raise ValueError(f"{OP}: `k_cache` must be given without `k` and `v`, got None")
        if quantize_q:
            _refuse_cast(k_cache)
            q = layer.scratch.quantize("q", q, metadata._token_ids, stream)
            if qv is not None:
                qv = layer.scratch.quantize("qv", qv, metadata._token_ids, stream)
        if v_cache is None:
            if metadata.encoder_lens_int32 is not None:
                raise ValueError(f"{OP}: `v_cache` must be given with an encoder, got None")
            given = {"q_scale": q_scale, "kv_scale": kv_scale, "kv_format": kv_format}
            return layer.run_pages(q, (k_cache,), given)
        given = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale, "qv": qv}
        return layer.run_pages(q, (k_cache, v_cache), given)
    finally:
        layer.mark_use(q, stream)


def _refuse_arrays(
    metadata: Metadata, k_cache: Array, k: Array, v: Array, chunk: Array, layer: Layer
) -> None:
    """Checks a call whose keys are arrays."""
    if k is None or v is None:
        name = "k" if k is None else "v"
        raise ValueError(f"{OP}: `{name}` must be given beside keys that are arrays, got None")
    if metadata.mode not in EXTENDING:
        modes = " or ".join(map(repr, EXTENDING))
        raise ValueError(f"{OP}: `k` must be None unless the mode is {modes}, got an array")
    if k_cache is not None:
        raise ValueError(f"{OP}: `k_cache` must be None beside `k`, got an array")
    if layer.kind not in ("full", "window") or (layer.kind == "window" and chunk is not None):
        raise ValueError(f"{OP}: `k` must be None for a layer with such a mask, got an array")


def _refuse_cast(cache: Array) -> None:
    """Queries are cast for a cache of e4m3 alone."""
    if dtype_of(cache) in (name := str(cache.dtype)):
        rule = "False unless the cache is e4m3"
        raise ValueError(f"{OP}: `quantize_q` must be {rule}, got one of {name}")


class Layer:
    """One call: the metadata, what the layer is, and what all of its operators are given."""

    def __init__(
        self,
        metadata: Metadata,
        *,
        kinds: tuple[int, bool, bool],
        common: dict[str, Any],
        hints: tuple[int | None, int | None],
        results: dict[str, Any],
        workspace: Array | None,
    ) -> None:
        self.metadata, self.builder = metadata, metadata._builder
        self.common, self.hints, self.results = common, hints, results
        self.workspace = {} if workspace is None else {"workspace": workspace}
        self.scratch = Scratch(self.builder, OP)
        self.left, is_local, is_cross = kinds
        self.kind = self._choose(is_local, is_cross)

    def _choose(self, is_local: bool, is_cross: bool) -> str:
        """What the layer is, if the step serves it."""
        m, config = self.metadata, self.builder.config
        if is_local and is_cross:
            raise ValueError(f"{OP}: `is_local` must be False for a cross layer, got True")
        if is_local and not config.attention_chunk:
            raise ValueError(f"{OP}: `is_local` must be False without attention_chunk, got True")
        if is_cross and m.encoder_lens_int32 is None:
            raise ValueError(f"{OP}: `is_cross` must be False without an encoder, got True")
        if is_local or is_cross:
            return "local" if is_local else "cross"
        if self.left < -1:
            raise ValueError(f"{OP}: `sliding_window_size` must be at least -1, got {self.left}")
        if self.left >= 0:
            most = config.sliding_window_size
            if m.expand is not None and self.left > most:
                rule = f"at most the config's {most} with a tree"
                raise ValueError(f"{OP}: `sliding_window_size` must be {rule}, got {self.left}")
            if m.prefix is not None:
                rule = "-1 with a shared prefix"
                raise ValueError(f"{OP}: `sliding_window_size` must be {rule}, got {self.left}")
            return "window"
        return "full"

    def mark_use(self, q: Array, stream: Any) -> None:
        """Orders this call behind the builds so far, and before later ones, on any streams."""
        if self.builder.config.device != "cpu":
            array = q[0] if isinstance(q, tuple) else q
            self.builder._step.mark_use(_C.find_stream(array, stream)[1])

    # --- one call of an operator ------------------------------------------------------------------

    def _sizes(self, part: Any) -> dict[str, Any]:
        """Hints of a part."""
        most_q, most_k = self.hints
        return {
            "max_seqlen_q": part.max_seq_len_q if most_q is None else most_q,
            "max_seqlen_k": part.max_seq_len_k if most_k is None else most_k,
        }

    def _mask(self) -> dict[str, Any]:
        """The mask of a layer in one part."""
        if self.kind == "window":
            return {"causal": True, "window_size": (self.left, 0)}
        chunk = self.builder.config.attention_chunk
        return {"causal": True} | ({"attention_chunk": chunk} if self.kind == "local" else {})

    def run_arrays(
        self, q: Array, k: Array, v: Array, chunk: tuple[Array, int] | None, scales: dict[str, Any]
    ) -> Any:
        m = self.metadata
        starts, most, mask = m.cu_seqlens_q, m.max_seq_len_q, self._mask()
        if chunk is not None:
            (starts, most), mask = chunk, {}
        return ops.varlen_attention(
            q,
            k,
            v,
            m.cu_seqlens_q,
            starts,
            max_seqlen_q=m.max_seq_len_q if self.hints[0] is None else self.hints[0],
            max_seqlen_k=most if self.hints[1] is None else self.hints[1],
            **mask,
            **scales,
            **self.results,
            **self.common,
            **self.workspace,
        )

    def run_pages(self, q: Array, caches: tuple[Array, ...], given: dict[str, Any]) -> Any:
        """Keys and values of heads in two caches, or in one rows of latents, which heads share."""
        is_latent = len(caches) == 1
        op: Any = ops.mla_attention if is_latent else ops.paged_attention
        value_dim = LATENT if is_latent else caches[1].shape[-1]

        def attend(table: dict[str, Any], lens: Array, **more: Any) -> Any:
            return op(
                q,
                *caches,
                table.get("page_table"),
                lens,
                slot_table=table.get("slot_table"),
                **given,
                **more,
                **self.common,
                **self.workspace,
            )

        return self._run(q, attend, value_dim, is_latent=is_latent)

    # --- the calls of a layer ---------------------------------------------------------------------

    def _run(self, q: Array, attend: Any, value_dim: int, *, is_latent: bool) -> Any:
        m = self.metadata
        if self.kind == "window" and m.swa_spec_metadata is not None:
            part = m.swa_spec_metadata
            return attend(
                {"slot_table": part.slot_table},
                part.cache_seqlens_int32,
                **self._mask(),
                **self._sizes(part),
                **self.results,
            )
        if self.kind == "cross":
            most_q, most_k = self.hints
            return attend(
                {"page_table": m.encoder_page_table},
                m.encoder_lens_int32,
                cu_seqlens_q=m.cu_seqlens_q,
                max_seqlen_q=m.max_seq_len_q if most_q is None else most_q,
                max_seqlen_k=m.encoder_max_seq_len_k if most_k is None else most_k,
                **self.results,
            )
        if self.kind == "full" and (m.expand is not None or m.prefix is not None):
            is_tree = m.expand is not None
            calls = self._tree() if is_tree else self._shared_prefix(is_latent=is_latent)
            return self._cascade(q, attend, calls, value_dim, is_latent=is_latent)
        table = m.page_table
        if self.kind != "full" and m.swa_page_table is not None:
            table = m.swa_page_table
        pad = {} if m.cache_leftpad is None else {"cache_leftpad": m.cache_leftpad}
        return attend(
            {"page_table": table},
            m.cache_seqlens_int32,
            cu_seqlens_q=m.cu_seqlens_q,
            **pad,
            **self._mask(),
            **self._sizes(m),
            **self.results,
        )

    def _tree(self) -> list[tuple[Any, ...]]:
        """The prefix of each request, and the drafts that each row sees."""
        m: Any = self.metadata
        part = m.expand
        return [
            (
                {"page_table": m.page_table},
                m.cache_seqlens_int32,
                {"cu_seqlens_q": m.cu_seqlens_q, **self._sizes(m)},
            ),
            ({"slot_table": part.slot_table}, part.cache_seqlens_int32, self._sizes(part)),
        ]

    def _shared_prefix(self, *, is_latent: bool) -> list[tuple[Any, ...]]:
        """The prefix once for all queries, and what is behind it of each request. Rows of latents
        have no keys in front of the first one, so their prefix ends with a page."""
        m: Any = self.metadata
        prefix = m.prefix
        first = {"cu_seqlens_q": prefix.cu_seqlens_q, **self._sizes(prefix)}
        rest = {"cu_seqlens_q": m.cu_seqlens_q, "causal": True, **self._sizes(m)}
        if is_latent:
            return [
                ({"page_table": prefix.page_table}, m._prefix_pages, first),
                ({"page_table": m._rest_table}, m._rest_seqlens, rest),
            ]
        rest["cache_leftpad"] = m.cache_leftpad
        return [
            ({"page_table": prefix.page_table}, prefix.cache_seqlens_int32, first),
            ({"page_table": m.page_table}, m.cache_seqlens_int32, rest),
        ]

    def _cascade(
        self,
        q: Array,
        attend: Any,
        calls: list[tuple[Any, ...]],
        value_dim: int,
        *,
        is_latent: bool,
    ) -> Any:
        """Two parts, each with its lse, merged once. The sinks belong to the merge."""
        array = q[0] if isinstance(q, tuple) else q
        out, stream = self.results["out"], self.common["stream"]
        dtype = "bfloat16" if is_latent else "float32"
        parts = []
        for i, (table, lens, more) in enumerate(calls):
            memory = {}
            if array.shape[0] <= len(self.metadata._token_ids):  # else with rows of no request
                memory = self.scratch.part(i, array, (array.shape[1], value_dim), dtype, stream)
            parts.append(attend(table, lens, **more, **memory))
        outs, lses = zip(*parts, strict=True)
        if out is None and dtype_of(outs[0]) != (wanted := dtype_of(array)):
            out = _C.new_array("out", array, tuple(outs[0].shape), wanted, stream, True)
        return ops.merge_attn_partials(
            [*outs],
            [*lses],
            attn_sink=self.results["attn_sink"],
            out=out,
            lse=self.results["lse"],
            stream=stream,
        )
