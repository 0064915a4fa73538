"""DeepSeek models of Hugging Face Transformers, served from a paged cache, step by step.

The tokens of a step run through the model as one row, without padding. Embedding, norms, MLP, MoE
and lm_head are Transformers' own, and so are the projections of the attention. The rest of the
attention is this library's. DeepSeek-V3.2 attends to the keys that its indexer chooses, which is
Transformers' own unless `index_cache_dtype` asks for ours:

    q_a, q_b and kv_a projections, RoPE     the model's
    concat_and_cache_mla                    the new latents to their pages
    indexer                                 the model's, or ours; keys in pages of the same numbers
    k_up_proj, SparseMLA.forward, v_up_proj absorb, attend to the chosen keys, project to the heads
    o_proj                                  the model's

DeepSeek-V3 and V2 attend to all tokens of a request:

    q (or q_a and q_b) and kv_a projections the model's
    dense.DenseMLA.forward                  RoPE, the new latents to their pages, attention
    o_proj                                  the model's

With `absorb`, DenseMLA takes q_a's result, or hidden states, and gives that of o_proj.

DeepSeek V4's layers attend to a window, and to compressed rows:

    all projections but o_a                 the model's
    v4.SparseMLA.forward                    norms, RoPE, compressors, indexer, attention, o_a

The attention is replaced while a step runs; between steps the model is as it was. On CUDA the work
goes to torch's current stream, and nothing here waits for the device.

This module needs PyTorch, and transformers 5.12 or later.

>>> from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
>>> from sparse_mla.integrations.transformers import ModelRunner
>>> sizes = {"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 64}
>>> sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32}
>>> model = DeepseekV3ForCausalLM(DeepseekV3Config(vocab_size=50, **sizes)).eval()
>>> limits = {"max_num_seqs": 2, "max_num_batched_tokens": 9, "max_model_len": 99}
>>> runner = ModelRunner(model, kv_cache_dtype="fp8_ds_mla", num_pages=4, **limits)
>>> prompt = runner.step({"a": [3, 1, 4]})
>>> runner.step({"a": prompt.argmax(dim=1), "b": [1, 5]}).shape  # a decode and a prefill
torch.Size([2, 50])
>>> runner.free("b")
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np

try:
    import torch
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2ForCausalLM
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3ForCausalLM
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4ForCausalLM
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32ForCausalLM
except ImportError as error:
    raise ImportError(
        "sparse_mla.integrations.transformers needs PyTorch, and transformers 5.12 or later, whose "
        f"deepseek_v32 is tested: {error}"
    ) from error

import sparse_mla
from sparse_mla._format_names import takes_both
from sparse_mla._types import (
    CacheDtypeV4,
    CompressedDtypeV4,
    IndexFormat,
    Path,
    PathV4,
    RopeFormat,
)
from sparse_mla.integrations._dense_layers import DenseLayers
from sparse_mla.integrations._runner_checks import (
    check_counts,
    check_eval,
    check_model,
    check_options,
    check_request,
    check_rewind,
    check_share,
    check_tokens,
)
from sparse_mla.integrations._v4_layers import V4Layers
from sparse_mla.integrations._v32_layers import SparseLayers

__all__ = ["ModelRunner"]

# The models that are served, and what serves their layers.
_LAYERS: dict[type, type[V4Layers] | type[SparseLayers] | type[DenseLayers]] = {
    DeepseekV32ForCausalLM: SparseLayers,
    DeepseekV3ForCausalLM: DenseLayers,
    DeepseekV2ForCausalLM: DenseLayers,
    DeepseekV4ForCausalLM: V4Layers,
}


def __dir__() -> list[str]:
    """What tab completion offers."""
    return __all__


@takes_both
class ModelRunner:
    """Runs a DeepSeek V4, V3.2, V3 or V2 model over requests whose keys lie in paged caches.

    Only one thread may use it at a time, and the model belongs to that thread during a step.

    Parameters
    ----------
    model : DeepseekV4ForCausalLM, DeepseekV32-, DeepseekV3- or DeepseekV2ForCausalLM
        In eval mode, all of it on one device, in bf16 or fp32. The up projections of its attention
        are copied (in bf16), so later changes of these weights have no effect; with `absorb` those
        of prefills are the model's own if it is in bf16, and so is V4's o_a_proj.
    num_pages : int
        Pages of the cache, shared by all requests. A page has `block_size` tokens of every layer;
        of V4 compressed rows and the indexer's keys. Windows and states have their own memory.
    max_num_seqs, max_num_batched_tokens : int
        Requests and tokens that a step has at most. With V4 no more requests can be alive.
    max_model_len : int
        Tokens that a request has at most; not more than the model's max_position_embeddings.
    max_drafts : int
        Tokens that `rewind` can forget of a V4 request, which keeps as many more of its window and
        of its states. Other models can forget any number. A decode has up to 1 + max_drafts tokens.
    block_size : int, optional
        Tokens of a page, of V4 a multiple of its compress rates. None is 64, and with V4 256.
    kv_cache_dtype : str
        "auto" (or "bfloat16"), or "fp8_ds_mla". V4: "auto" (or "fp8_v4"), "bfloat16", "fp8_e4m3" or
        another one of `sparse_mla.v4.Config`, for its window and for its compressed rows.
    compressed_kv_cache_dtype : str, optional
        V4: another format for compressed rows, as `sparse_mla.v4.Config` has it.
    index_cache_dtype : "auto", "fp8_index" or "mxfp4_index"
        What chooses the keys. "auto" is the model's own indexer, with keys of the model's dtype.
        The two formats stand for this library's indexer, whose queries and keys are quantised: a
        key has 132 or 68 bytes. V4 always has it, with "fp8_index" for "auto". V3 and V2 have no
        indexer, so "auto" is all that they take. `kv_format`, `compressed_kv_format` and
        `index_kv_format` are the same options.
    path : str, optional
        Forces a path of `config`.
    streams : sequence of streams
        V4 on CUDA: up to three streams beside the current one, for parts of a layer.
    prefill_workspace_tokens : int, optional
        Rows of the workspace that path "separate" gathers cached tokens to; None = the default of
        `config`. V3.2 needs max_model_len of them, V3 and V2 a page for each prefill of a step.
    absorb : bool
        V3 and V2: whether each layer multiplies by weights that have absorbed the up projections,
        as `sparse_mla.dense.DenseMLA` makes them, instead of by the model's q and o projections.
    scheme : str, optional
        With `absorb`, the quantisation of these weights to e4m3: "tensor", "block", "token_tensor"
        or "token_channel". Layers that Transformers has loaded as e4m3 keep theirs without it.
    requantize : bool
        With `absorb`, whether weights that absorb e4m3 ones are e4m3 again. With False they are
        bf16, and a layer's weights may be any mix of both.
    cp : (rank, ranks, interleave), optional
        V3.2, V3 and V2: the caches of requests are split over several runners, one per rank:
        position x is of rank x // interleave % ranks. A page then has `block_size` tokens of this
        rank. All ranks are given the same model, options and steps, and have the same results, free
        pages and errors. With "auto", V3.2's index keys are whole on every rank; those of this
        library's indexer are split, too. One rank is as None. docs/parallel.md has an example.
    exchange : callable, optional
        With several ranks: takes a contiguous array of this rank, [T, ...] bf16, fp32 or int32, and
        returns the arrays that all ranks have in its place, in the order of ranks, as an all_gather
        does. All ranks call it equally often. An error that it raises ends the step.

    Attributes
    ----------
    config : sparse_mla.Config, or sparse_mla.dense.Config or sparse_mla.v4.Config
    num_free_pages : int

    Raises
    ------
    TypeError, ValueError
        Another model, a model in training mode or on several devices, limits that do not fit the
        model, a workspace that is too small for some step. Sizes without kernels: `kv_lora_rank`
        must be 512 and `qk_rope_head_dim` 64, and for this library's indexer `index_head_dim` 128;
        of V4 `head_dim` 512, and the indexer's compress rate 4. RoPE whose angles depend on the
        request's length ("longrope"). A tensor-parallel part of V4. Options of other models. A rank
        that is not 0 to ranks - 1; several ranks without `exchange`, of V4, or with `absorb`.

    Source: vLLM's model runner, in small.

    Examples
    --------
    examples/deepseek_v4.py, deepseek_v32.py and deepseek_v3.py are whole engines.

    >>> from transformers import DeepseekV32Config, DeepseekV32ForCausalLM
    >>> from sparse_mla.integrations.transformers import ModelRunner
    >>> sizes = {"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 64}
    >>> sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32}
    >>> model = DeepseekV32ForCausalLM(DeepseekV32Config(vocab_size=50, **sizes)).eval()
    >>> limits = {"max_num_seqs": 2, "max_num_batched_tokens": 9, "max_model_len": 99}
    >>> runner = ModelRunner(model, num_pages=4, **limits)
    >>> runner.step({"a": [3, 1, 4], "b": [1, 5]}).shape
    torch.Size([2, 50])
    >>> runner.step({"b": [9]}).shape, runner.num_free_pages
    (torch.Size([1, 50]), 2)
    >>> runner.free("a"), runner.num_free_pages
    (None, 3)
    >>> runner = ModelRunner(model, num_pages=4, index_cache_dtype="fp8_index", **limits)
    >>> runner.step({"a": [3, 1, 4]}).shape
    torch.Size([1, 50])
    """

    config: sparse_mla.Config | sparse_mla.dense.Config | sparse_mla.v4.Config

    def __init__(
        self,
        model: DeepseekV4ForCausalLM
        | DeepseekV32ForCausalLM
        | DeepseekV3ForCausalLM
        | DeepseekV2ForCausalLM,
        *,
        num_pages: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_drafts: int = 0,
        block_size: int | None = None,
        kv_cache_dtype: RopeFormat | CacheDtypeV4 = "auto",
        compressed_kv_cache_dtype: CompressedDtypeV4 | None = None,
        index_cache_dtype: Literal["auto"] | IndexFormat = "auto",
        path: Path | PathV4 | None = None,
        streams: Sequence[Any] = (),
        prefill_workspace_tokens: int | None = None,
        absorb: bool = False,
        scheme: str | None = None,
        requantize: bool = True,
        cp: tuple[int, int, int] | None = None,
        exchange: Callable[[torch.Tensor], Sequence[torch.Tensor]] | None = None,
    ) -> None:
        device = check_model(model, _LAYERS)
        make_layers = next(x for kind, x in _LAYERS.items() if isinstance(model, kind))
        cp, exchange = check_share(cp, exchange)
        options: dict[str, Any] = {
            "cp": cp,
            "exchange": exchange,
            "absorb": absorb,
            "scheme": scheme,
            "requantize": requantize,
            "prefill_workspace_tokens": prefill_workspace_tokens,
            "compressed_kv_cache_dtype": compressed_kv_cache_dtype,
            "streams": streams,
            "max_drafts": max_drafts,
        }
        options = check_options(model, options, make_layers.takes)
        check_counts(model, num_pages, max_model_len, max_drafts)
        self.model = model
        self._device = torch.device(device)
        self._layers = make_layers(
            model,
            num_pages,
            index_cache_dtype,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            decode_threshold=1 + max_drafts,
            block_size=make_layers.block_size if block_size is None else block_size,
            kv_cache_dtype=kv_cache_dtype,
            path=path,
            device=device,
            **options,
        )
        self.config = self._layers.config
        self._pages = self._layers.pages

    @property
    def num_free_pages(self) -> int:
        """Pages that belong to no request."""
        return self._pages.num_free

    def step(
        self, tokens: Mapping[Any, Sequence[int] | torch.Tensor], *, all_logits: bool = False
    ) -> torch.Tensor:
        """Append tokens to requests, run them through the model, and give the next token's logits.

        Parameters
        ----------
        tokens : mapping of requests to [n] token ids, integers, n >= 1
            A request is any hashable name; it begins with its first tokens. A prompt may come in
            any number of chunks, in steps that decode other requests. Ids may be a list or a
            tensor. The host does not read a tensor on a GPU.
        all_logits : bool
            Whether to return logits of every new token, not only of each request's last token.

        Returns
        -------
        [requests, vocab_size], or [tokens, vocab_size] with `all_logits`; in the order of `tokens`.

        Raises
        ------
        TypeError, ValueError
            Ids that are not one-dimensional integers; a batch, a request or, of V4, requests beyond
            the limits. An `exchange` that returns another number or shape of arrays.
        MemoryError
            Too few free pages. As after every error, the requests keep the tokens that they had.

        Source: vLLM's scheduler output, in small.

        Examples
        --------
        >>> from transformers import DeepseekV32Config, DeepseekV32ForCausalLM
        >>> from sparse_mla.integrations.transformers import ModelRunner
        >>> sizes = {"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 64}
        >>> sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32}
        >>> model = DeepseekV32ForCausalLM(DeepseekV32Config(vocab_size=50, **sizes)).eval()
        >>> limits = {"max_num_seqs": 2, "max_num_batched_tokens": 9, "max_model_len": 99}
        >>> runner = ModelRunner(model, num_pages=4, **limits)
        >>> runner.step({"a": [3, 1, 4], "b": [1, 5]}).shape
        torch.Size([2, 50])
        >>> runner.step({"b": [9, 2]}, all_logits=True).shape
        torch.Size([2, 50])
        """
        check_eval(self.model)
        ids = check_tokens(tokens, self._pages, self.model.config.vocab_size, self.config)
        self._pages.reserve("ModelRunner.step", {name: len(new) for name, new in ids.items()})
        rows: dict[Hashable, range] = {}  # the step's rows; the builder needs decodes first
        num_tokens, most = 0, self.config.decode_threshold
        for request in sorted(ids, key=lambda request: len(ids[request]) > most):
            rows[request] = range(num_tokens, num_tokens + len(ids[request]))
            num_tokens = rows[request].stop
        wanted = [row for r in ids for row in (rows[r] if all_logits else rows[r][-1:])]
        try:
            positions, step = self._plan(rows)
            with torch.no_grad(), self._attention_replaced():
                logits = self.model(
                    input_ids=torch.cat([self._put(ids[request]) for request in rows])[None],
                    position_ids=positions[None],
                    # Transformers takes a mask of four dimensions as it is; no layer reads it.
                    attention_mask=torch.empty((1, 1, 0, 0), device=self._device),
                    use_cache=False,
                    logits_to_keep=self._put(torch.tensor(wanted)),
                    sparse_mla_step=step,
                ).logits[0]
            for request, its_rows in rows.items():
                self._pages.advance(request, len(its_rows))
        finally:
            self._pages.settle(rows)
        return logits

    def rewind(self, request: Hashable, num_tokens: int) -> None:
        """Forget the last tokens of a request, as drafts that were rejected.

        Later tokens take their places, with the results of a run that never had them. Pages behind
        the end go back.

        Parameters
        ----------
        request : hashable
            Its name.
        num_tokens : int
            How many: 0 to all that it has. Of a V4 request at most `max_drafts`, less those that it
            has forgotten and that no later tokens have replaced.

        Returns
        -------
        None

        Raises
        ------
        KeyError
            There is no request of that name.
        TypeError, ValueError
            No int; less than 0, or more tokens than these.

        Source: vLLM's handling of rejected draft tokens, in small.

        Examples
        --------
        >>> from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
        >>> from sparse_mla.integrations.transformers import ModelRunner
        >>> sizes = {"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 64}
        >>> sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32}
        >>> model = DeepseekV3ForCausalLM(DeepseekV3Config(vocab_size=50, **sizes)).eval()
        >>> limits = {"max_num_seqs": 2, "max_num_batched_tokens": 9, "max_model_len": 99}
        >>> runner = ModelRunner(model, num_pages=4, **limits)
        >>> first = runner.step({"a": [3, 1, 4]})
        >>> drafts = runner.step({"a": [1, 5, 9]}, all_logits=True)
        >>> runner.rewind("a", 2)  # the first one stays
        >>> runner.step({"a": [2]}).shape
        torch.Size([1, 50])
        """
        check_rewind(self._pages, request, num_tokens, self._layers.max_drafts)
        self._pages.rewind(request, num_tokens)

    def free(self, request: Hashable) -> None:
        """Forget a request and take its pages back.

        Parameters
        ----------
        request : hashable
            Its name.

        Returns
        -------
        None

        Raises
        ------
        KeyError
            There is no request of that name.

        Examples
        --------
        >>> from transformers import DeepseekV32Config, DeepseekV32ForCausalLM
        >>> from sparse_mla.integrations.transformers import ModelRunner
        >>> sizes = {"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 64}
        >>> sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32}
        >>> model = DeepseekV32ForCausalLM(DeepseekV32Config(vocab_size=50, **sizes)).eval()
        >>> limits = {"max_num_seqs": 2, "max_num_batched_tokens": 9, "max_model_len": 99}
        >>> runner = ModelRunner(model, num_pages=4, **limits)
        >>> _ = runner.step({"a": [3, 1, 4]})
        >>> runner.num_free_pages, runner.free("a"), runner.num_free_pages
        (3, None, 4)
        """
        check_request("ModelRunner.free", self._pages, request)
        self._pages.release(request)

    # --- a step ----------------------------------------------------------------------------------

    def _put(self, x: np.ndarray | torch.Tensor) -> torch.Tensor:
        """Copies to the device without waiting for it, by way of pinned memory."""
        x = torch.as_tensor(x)
        if x.device.type == "cpu" and self._device.type == "cuda":
            x = x.pin_memory()
        return x.to(self._device, non_blocking=True)

    def _plan(self, rows: dict[Hashable, range]) -> tuple[torch.Tensor, Any]:
        """Returns positions [T] of the step's tokens in their requests, and what layers need."""
        contexts = [self._pages.find(request).num_tokens for request in rows]
        query_lens = [len(its_rows) for its_rows in rows.values()]
        seq_lens = np.add(contexts, query_lens, dtype=np.int32)
        query_start_loc = np.cumsum([0, *query_lens], dtype=np.int32)
        each = dict(zip(rows, map(np.arange, contexts, seq_lens), strict=True))
        positions = np.concatenate(list(each.values()))
        slots, block_table = self._layers.locate(each, self._put)
        common = sparse_mla.CommonAttentionMetadata(
            self._put(query_start_loc),
            self._put(seq_lens),
            slots,
            block_table,
            query_start_loc_cpu=query_start_loc,
            seq_lens_cpu=seq_lens,
        )
        where = self._put(positions)
        return where, self._layers.plan(common, where)

    @contextmanager
    def _attention_replaced(self) -> Iterator[None]:
        layers = self.model.model.layers
        originals = [layer.self_attn for layer in layers]
        try:
            for layer, attention in zip(layers, self._layers.attentions, strict=True):
                layer.self_attn = attention
            yield
        finally:
            for layer, original in zip(layers, originals, strict=True):
                layer.self_attn = original
