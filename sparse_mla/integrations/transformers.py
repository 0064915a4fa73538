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

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np

try:
    import torch
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2ForCausalLM
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3ForCausalLM
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32ForCausalLM
except ImportError as error:
    raise ImportError(
        "sparse_mla.integrations.transformers needs PyTorch, and transformers 5.12 or later, whose "
        f"deepseek_v32 is tested: {error}"
    ) from error

import sparse_mla
from sparse_mla._format_names import takes_both
from sparse_mla._types import IndexFormat, Path, RopeFormat
from sparse_mla.integrations._dense_layers import DenseLayers
from sparse_mla.integrations._pages import Pages
from sparse_mla.integrations._v32_layers import SparseLayers

__all__ = ["ModelRunner"]

# The models that are served, and what serves their layers.
_LAYERS: dict[type, type[SparseLayers] | type[DenseLayers]] = {
    DeepseekV32ForCausalLM: SparseLayers,
    DeepseekV3ForCausalLM: DenseLayers,
    DeepseekV2ForCausalLM: DenseLayers,
}


def __dir__() -> list[str]:
    """What tab completion offers."""
    return __all__


@takes_both
class ModelRunner:
    """Runs a DeepSeek-V3.2, V3 or V2 model over requests whose keys lie in one paged cache.

    Only one thread may use it at a time, and the model belongs to that thread during a step.

    Parameters
    ----------
    model : DeepseekV32ForCausalLM, DeepseekV3ForCausalLM or DeepseekV2ForCausalLM
        In eval mode, all of it on one device, in bf16 or fp32. The up projections of its attention
        are copied (in bf16), so later changes of these weights have no effect; with `absorb` those
        of prefills are the model's own if it is in bf16.
    num_pages : int
        Pages of the cache, shared by all requests. A page has `block_size` tokens of every layer.
    max_num_seqs, max_num_batched_tokens : int
        Requests and tokens that a step has at most.
    max_model_len : int
        Tokens that a request has at most; not more than the model's max_position_embeddings.
    block_size : int
    kv_cache_dtype : "auto" or "bfloat16", or "fp8_ds_mla"
    index_cache_dtype : "auto", "fp8_index" or "mxfp4_index"
        What chooses the keys. "auto" is the model's own indexer, with keys of the model's dtype.
        The two formats stand for this library's indexer, whose queries and keys are quantised: a
        key has 132 or 68 bytes. `kv_format` and `index_kv_format` are the same two options. V3 and
        V2 have no indexer, so "auto" is all that they take.
    path : str, optional
        Forces a path of `config`.
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

    Attributes
    ----------
    config : sparse_mla.Config, or sparse_mla.dense.Config for V3 and V2
    num_free_pages : int

    Raises
    ------
    TypeError, ValueError
        Another model, a model in training mode or on several devices, limits that do not fit the
        model, a workspace that is too small for some step. Sizes without kernels: `kv_lora_rank`
        must be 512 and `qk_rope_head_dim` 64, and for this library's indexer `index_head_dim` 128.
        RoPE of V3 and V2 whose angles depend on the request's length ("longrope").

    Source: vLLM's model runner, in small.

    Examples
    --------
    examples/deepseek_v32.py and examples/deepseek_v3.py are whole engines.

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

    config: sparse_mla.Config | sparse_mla.dense.Config

    def __init__(
        self,
        model: DeepseekV32ForCausalLM | DeepseekV3ForCausalLM | DeepseekV2ForCausalLM,
        *,
        num_pages: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        block_size: int = 64,
        kv_cache_dtype: RopeFormat = "auto",
        index_cache_dtype: Literal["auto"] | IndexFormat = "auto",
        path: Path | None = None,
        prefill_workspace_tokens: int | None = None,
        absorb: bool = False,
        scheme: str | None = None,
        requantize: bool = True,
    ) -> None:
        make_layers = next((x for kind, x in _LAYERS.items() if isinstance(model, kind)), None)
        if make_layers is None:
            *most, last = (kind.__name__ for kind in _LAYERS)
            raise TypeError(
                f"ModelRunner: `model` must be a {', a '.join(most)} or a {last}, got "
                f"{type(model).__name__}"
            )
        devices = sorted({str(weight.device) for weight in model.parameters()})
        if len(devices) > 1:
            raise ValueError(
                f"ModelRunner: `model` must be on one device, got one on {', '.join(devices)}"
            )
        for name, given, default in (("scheme", scheme, None), ("requantize", requantize, True)):
            if given is not default and not absorb:
                raise ValueError(
                    f"ModelRunner: `{name}` must be {default} without absorb=True, got {given!r}"
                )
        weights: dict[str, Any] = {"absorb": absorb, "scheme": scheme, "requantize": requantize}
        if make_layers is SparseLayers:
            if absorb:
                raise ValueError(
                    f"ModelRunner: `absorb` must be False for a {type(model).__name__}, got True"
                )
            weights = {}
        if num_pages < 1:
            raise ValueError(f"ModelRunner: `num_pages` must be at least 1, got {num_pages}")
        most_positions = model.config.max_position_embeddings
        if max_model_len > most_positions:
            raise ValueError(
                "ModelRunner: `max_model_len` must be at most the model's max_position_embeddings "
                f"= {most_positions}, got {max_model_len}"
            )
        self.model = model
        self._check_eval()
        self._device = torch.device(devices[0])
        self._layers = make_layers(
            model,
            num_pages,
            index_cache_dtype,
            **weights,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            block_size=block_size,
            kv_cache_dtype=kv_cache_dtype,
            path=path,
            prefill_workspace_tokens=prefill_workspace_tokens,
            device=devices[0],
        )
        self.config = self._layers.config
        self._pages = Pages(num_pages, block_size)

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
            Ids that are not one-dimensional integers, a batch or a request beyond the limits.
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
        self._check_eval()
        if not isinstance(tokens, Mapping):
            raise TypeError(
                "ModelRunner.step: `tokens` must be a mapping of requests to their new token ids, "
                f"got {type(tokens).__name__}"
            )
        ids = {request: self._check_ids(request, new) for request, new in tokens.items()}
        self._check_limits(ids)
        self._pages.reserve("ModelRunner.step", {name: len(new) for name, new in ids.items()})
        rows: dict[Hashable, range] = {}  # the step's rows; the builder needs decodes first
        num_tokens = 0
        for request in sorted(ids, key=lambda request: len(ids[request]) > 1):
            rows[request] = range(num_tokens, num_tokens + len(ids[request]))
            num_tokens = rows[request].stop
        wanted = [row for r in ids for row in (rows[r] if all_logits else rows[r][-1:])]
        positions, step = self._plan(rows)
        with torch.no_grad(), self._attention_replaced():
            logits = self.model(
                input_ids=torch.cat([ids[request] for request in rows])[None],
                position_ids=positions[None],
                # Transformers takes a mask of four dimensions as it is; no layer reads this one.
                attention_mask=torch.empty((1, 1, 0, 0), device=self._device),
                use_cache=False,
                logits_to_keep=self._put(torch.tensor(wanted)),
                sparse_mla_step=step,
            ).logits[0]
        for request, its_rows in rows.items():
            self._pages.advance(request, len(its_rows))
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
            How many: 0 to all that it has.

        Raises
        ------
        KeyError
            There is no request of that name.
        TypeError, ValueError
            No int; less than 0, or more tokens than there are.

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
        if request not in self._pages.requests:
            raise KeyError(f"ModelRunner.rewind: there is no request {request!r}")
        if type(num_tokens) is not int:
            raise TypeError(
                f"ModelRunner.rewind: `num_tokens` must be an int, got {type(num_tokens).__name__}"
            )
        most = self._pages.find(request).num_tokens
        if not 0 <= num_tokens <= most:
            raise ValueError(
                f"ModelRunner.rewind: `num_tokens` must be 0 to the {most} tokens of request "
                f"{request!r}, got {num_tokens}"
            )
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
        if request not in self._pages.requests:
            raise KeyError(f"ModelRunner.free: there is no request {request!r}")
        self._pages.release(request)

    # --- checks ----------------------------------------------------------------------------------

    def _check_eval(self) -> None:
        if self.model.training:
            raise ValueError(
                "ModelRunner: `model` must be in eval mode, got one in training mode: there are no "
                "gradients through the cache; call model.eval()"
            )

    def _check_ids(self, request: Hashable, new: Any) -> torch.Tensor:
        ids = torch.as_tensor(new)
        what = f"ModelRunner.step: `tokens` of request {request!r} must"
        if ids.ndim != 1 or len(ids) == 0:
            raise ValueError(
                f"{what} have shape [n], n >= 1, without padding, got {list(ids.shape)}: requests "
                "of several lengths are several entries"
            )
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise TypeError(f"{what} be integers, got {ids.dtype}")
        vocab_size = self.model.config.vocab_size
        if ids.device.type == "cpu" and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            raise ValueError(
                f"{what} be 0 to {vocab_size - 1}, got {int(ids.min())} to {int(ids.max())}"
            )
        num_tokens = len(ids) + self._pages.find(request).num_tokens
        if num_tokens > self.config.max_model_len:
            raise ValueError(
                f"{what} leave it within max_model_len = {self.config.max_model_len}, got "
                f"{num_tokens} tokens in all"
            )
        return self._put(ids)

    def _check_limits(self, ids: dict[Hashable, torch.Tensor]) -> None:
        limits = {
            "max_num_seqs": (len(ids), "requests"),
            "max_num_batched_tokens": (sum(map(len, ids.values())), "tokens"),
        }
        for name, (number, what) in limits.items():
            most = getattr(self.config, name)
            if not 1 <= number <= most:
                raise ValueError(
                    f"ModelRunner.step: `tokens` must be 1 to {name} = {most} {what}, got {number}"
                )

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
        slots = np.concatenate([self._pages.slots(name, x) for name, x in each.items()])

        common = sparse_mla.CommonAttentionMetadata(
            self._put(query_start_loc),
            self._put(seq_lens),
            self._put(slots),
            self._put(self._pages.table(rows)),
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
