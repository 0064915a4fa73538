"""The operators as PyTorch custom operators: torch.compile and torch.export pass through them.

Importing this module registers `torch.ops.sparse_mla.*` for CPU and CUDA tensors, each with a fake
kernel. The functions here call them, with the names, arguments and results of `sparse_mla`'s own,
less `stream`: work goes to PyTorch's current stream. Eager or compiled, they give the same bits.

The operator of a name returns new tensors; its overload `.out` writes those of the caller and says
so in its schema, as `concat_and_cache_mla` and `gather_kv_cache` always do, so that a compiled
function keeps the order of writes and reads. A pair of queries is `q` and `q_pe` there.

The operators have no backward: while gradients are enabled, a tensor that requires them is a
BufferError.

>>> import torch
>>> import sparse_mla.integrations.torch as smla
>>> @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
... def attend(q, kv, slots):
...     return smla.sparse_attention(q, kv, slots, softmax_scale=1 / 576)
>>> q, kv = (torch.ones(shape, dtype=torch.bfloat16) for shape in ((1, 16, 576), (9, 576)))
>>> out, lse = attend(q, kv, torch.tensor([[0, 3, -1]], dtype=torch.int32))
>>> out.shape, round(lse[0, 0].item(), 4)
(torch.Size([1, 16, 512]), 1.6931)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

try:
    import torch
    from torch import Tensor
    from torch.autograd import forward_ad
except ImportError as error:
    raise ImportError("sparse_mla.integrations.torch needs PyTorch: pip install torch") from error

from sparse_mla import ops
from sparse_mla.integrations import _results
from sparse_mla.integrations._docs import repeats_operator

__all__ = [
    "concat_and_cache_mla",
    "convert_req_index_to_global_index",
    "dequantize_kv_cache",
    "dynamic_per_tensor_quant",
    "gather_kv_cache",
    "k_up_proj",
    "merge_attn_states",
    "sparse_attention",
    "v_up_proj",
]


def __dir__() -> list[str]:
    """What tab completion offers."""
    return __all__


_library = torch.library.Library("sparse_mla", "DEF")
_operators = torch.ops.sparse_mla


def _is_watched(x: Any) -> bool:
    """Whether autograd would record what is done with an argument."""
    if not isinstance(x, Tensor):
        return False
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        return True
    return x.requires_grad and torch.is_grad_enabled()


def _define(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Registers an operator; `fake` tells what it returns, from tensors without values."""
    name = schema.partition("(")[0]
    op, _, variant = name.partition(".")
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    overload = getattr(getattr(_operators, op), variant or "default")
    names = [argument.name for argument in overload._schema.arguments]

    def compute(*args: Any, **kwargs: Any) -> Any:
        """For parameters under no_grad, too: the direct call refuses what requires gradients."""
        args = tuple([x.detach() if getattr(x, "requires_grad", False) else x for x in args])
        for key, x in kwargs.items():
            if getattr(x, "requires_grad", False):
                kwargs[key] = x.detach()
        return kernel(*args, **kwargs)

    def refuse_gradients(keys: Any, *args: Any, **kwargs: Any) -> Any:
        for key, x in (*zip(names, args, strict=False), *kwargs.items()):
            if _is_watched(x):
                raise BufferError(
                    f"{op}: `{key}` must not require gradients, got a tensor that does: the "
                    "operators have no derivatives; call under torch.no_grad()"
                )
        return overload.redispatch(keys & torch._C._after_autograd_keyset, *args, **kwargs)

    def trace(*args: Any, **kwargs: Any) -> Any:
        """With the rule whose breach would not show in the results."""
        place = args[0].device
        for key, x in (*zip(names, args, strict=False), *kwargs.items()):
            if isinstance(x, Tensor) and x.device != place:
                raise ValueError(
                    f"{op}: `{key}` must be on {place} like `{names[0]}`, got {x.device}"
                )
        return fake(*args, **kwargs)

    for backend in ("CPU", "CUDA"):
        _library.impl(name, compute, backend)
    _library.impl(name, refuse_gradients, "Autograd", with_keyset=True)
    torch.library.register_fake(f"sparse_mla::{name}", trace, lib=_library)


def _new(like: Tensor, *results: _results.Result) -> tuple[Tensor, ...]:
    """Tensors of these shapes and dtypes, where `like` is."""
    return tuple(like.new_empty(shape, dtype=getattr(torch, dtype)) for shape, dtype in results)


def _writes(kernel: Callable[..., Any]) -> Callable[..., None]:
    """The kernel, whose results are all arguments."""

    def run(*args: Any, **kwargs: Any) -> None:
        kernel(*args, **kwargs)

    return run


def _nothing(*args: Any, **kwargs: Any) -> None:
    """The fake of an operator whose results are all arguments."""


# --- cache ---------------------------------------------------------------------------------------

_define(
    "concat_and_cache_mla(Tensor kv_c, Tensor k_pe, Tensor(a!) kv_cache, Tensor slot_mapping, *, "
    "str? kv_cache_dtype=None) -> ()",
    _writes(ops.concat_and_cache_mla),
    _nothing,
)
_define(
    "gather_kv_cache(Tensor kv_cache, Tensor block_table, Tensor seq_lens, "
    "Tensor workspace_starts, *, Tensor(a!) out, Tensor? seq_starts=None) -> ()",
    _writes(ops.gather_kv_cache),
    _nothing,
)
_define(
    'dequantize_kv_cache(Tensor kv_cache, *, str? kv_format=None, str dtype="float32") -> Tensor',
    ops.dequantize_kv_cache,
    lambda kv_cache, dtype="float32", **_: _new(
        kv_cache, _results.dequantize_kv_cache(kv_cache.shape, dtype)
    )[0],
)


@repeats_operator
def concat_and_cache_mla(
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    kv_cache_dtype: str | None = None,
) -> Tensor:
    """New tokens to their slots: `sparse_mla.concat_and_cache_mla`. Writes `kv_cache`.

    >>> import torch
    >>> import sparse_mla.integrations.torch as smla
    >>> cache = torch.zeros((2, 64, 656), dtype=torch.uint8)
    >>> write = torch.compile(smla.concat_and_cache_mla, backend="aot_eager")
    >>> write(torch.ones(1, 512), torch.ones(1, 64), cache, torch.tensor([65])) is cache
    True
    >>> cache[0].sum().item(), cache[1, 1, 0].item()
    (0, 126)
    """
    _operators.concat_and_cache_mla.default(
        kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype=kv_cache_dtype
    )
    return kv_cache


@repeats_operator
def gather_kv_cache(
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    workspace_starts: Tensor,
    *,
    out: Tensor,
    seq_starts: Tensor | None = None,
) -> Tensor:
    """Rows of some requests to a flat workspace: `sparse_mla.gather_kv_cache`. Writes `out`.

    >>> import torch
    >>> import sparse_mla.integrations.torch as smla
    >>> cache = torch.ones((4, 64, 576), dtype=torch.bfloat16)
    >>> out, page, seven, one = cache.new_zeros(9, 576), *torch.tensor([3, 7, 1]).int()[:, None]
    >>> smla.gather_kv_cache(cache, page[None], seven, one, out=out)[:, 0].int().tolist()
    [0, 1, 1, 1, 1, 1, 1, 1, 0]
    """
    _operators.gather_kv_cache.default(
        kv_cache, block_table, seq_lens, workspace_starts, out=out, seq_starts=seq_starts
    )
    return out


@repeats_operator
def dequantize_kv_cache(
    kv_cache: Tensor, *, kv_format: str | None = None, dtype: str = "float32"
) -> Tensor:
    """Every value of a cache as floats, for inspection: `sparse_mla.dequantize_kv_cache`.

    >>> import torch
    >>> import sparse_mla.integrations.torch as smla
    >>> smla.dequantize_kv_cache(torch.zeros((2, 64, 656), dtype=torch.uint8)).shape
    torch.Size([2, 64, 576])
    """
    return _operators.dequantize_kv_cache.default(kv_cache, kv_format=kv_format, dtype=dtype)


# --- indices and attention -----------------------------------------------------------------------

_CONVERT = (
    "(Tensor req_id_per_token, Tensor block_table, Tensor topk_indices, *, SymInt block_size, "
    "Tensor? prefill_request_ids=None, Tensor? prefill_workspace_starts=None"
)
_count_too = functools.partial(ops.convert_req_index_to_global_index, valid_counts=True)


def _converted(
    req_id_per_token: Tensor, block_table: Tensor, topk_indices: Tensor, **_: Any
) -> tuple[Tensor, ...]:
    results = _results.convert_req_index_to_global_index(topk_indices.shape)
    return _new(topk_indices, *results)


_define(
    f"convert_req_index_to_global_index{_CONVERT}) -> Tensor",
    ops.convert_req_index_to_global_index,
    lambda *args, **options: _converted(*args, **options)[0],
)
_define(
    f"convert_req_index_to_global_index.valid_counts{_CONVERT}) -> (Tensor, Tensor)",
    _count_too,
    _converted,
)
_define(
    f"convert_req_index_to_global_index.out{_CONVERT}, Tensor(a!) out) -> ()",
    _writes(ops.convert_req_index_to_global_index),
    _nothing,
)
_define(
    f"convert_req_index_to_global_index.valid_counts_out{_CONVERT}, Tensor(a!) out) -> Tensor",
    lambda *args, **options: _count_too(*args, **options)[1],
    lambda *args, **options: _converted(*args, **options)[1],
)

_ATTENTION = (
    "(Tensor q, Tensor kv, Tensor indices, *, float softmax_scale, Tensor? q_pe=None, "
    "Tensor? topk_length=None, Tensor? attn_sink=None, Tensor? extra_kv=None, "
    "Tensor? extra_indices=None, Tensor? extra_topk_length=None, int num_splits=0, "
    "str? kv_format=None"
)


def _attend(
    q: Tensor, kv: Tensor, indices: Tensor, *, q_pe: Tensor | None = None, **options: Any
) -> tuple[Tensor, ...]:
    return ops.sparse_attention(q if q_pe is None else (q, q_pe), kv, indices, **options)


def _attended(q: Tensor, kv: Tensor, indices: Tensor, **_: Any) -> tuple[Tensor, ...]:
    return _new(q, *_results.sparse_attention(q.shape))


_define(
    f"sparse_attention{_ATTENTION}) -> (Tensor, Tensor)",
    _attend,
    lambda *args, **options: _attended(*args, **options)[:2],
)
_define(
    f"sparse_attention.return_max_logits{_ATTENTION}) -> (Tensor, Tensor, Tensor)",
    functools.partial(_attend, return_max_logits=True),
    _attended,
)
_define(
    f"sparse_attention.out{_ATTENTION}, Tensor(a!) out, Tensor(b!) lse, "
    "Tensor(c!)? max_logits=None, Tensor(d!)? workspace=None) -> ()",
    _writes(_attend),
    _nothing,
)
_define(
    "merge_attn_states(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor, Tensor)",
    ops.merge_attn_states,
    lambda out_a, *_: _new(out_a, *_merged(out_a)),
)
_define(
    "merge_attn_states.out(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, *, "
    "Tensor(a!) out, Tensor(b!) lse) -> ()",
    _writes(ops.merge_attn_states),
    _nothing,
)


def _merged(out_a: Tensor) -> tuple[_results.Result, ...]:
    return _results.merge_attn_states(out_a.shape, str(out_a.dtype).removeprefix("torch."))


@repeats_operator
def convert_req_index_to_global_index(
    req_id_per_token: Tensor,
    block_table: Tensor,
    topk_indices: Tensor,
    *,
    block_size: int,
    prefill_request_ids: Tensor | None = None,
    prefill_workspace_starts: Tensor | None = None,
    valid_counts: bool = False,
    out: Tensor | None = None,
) -> Any:
    """Positions to slots: `sparse_mla.convert_req_index_to_global_index`.

    >>> import torch
    >>> import sparse_mla.integrations.torch as smla
    >>> ids, table, topk = (torch.tensor(x).int() for x in ([0], [[5, 7]], [[0, 64, -1, 500]]))
    >>> smla.convert_req_index_to_global_index(ids, table, topk, block_size=64).tolist()
    [[320, 448, -1, -1]]
    """
    op = _operators.convert_req_index_to_global_index
    arrays = (req_id_per_token, block_table, topk_indices)
    options = {
        "block_size": block_size,
        "prefill_request_ids": prefill_request_ids,
        "prefill_workspace_starts": prefill_workspace_starts,
    }
    if out is None:
        return (op.valid_counts if valid_counts else op.default)(*arrays, **options)
    if valid_counts:
        return out, op.valid_counts_out(*arrays, **options, out=out)
    op.out(*arrays, **options, out=out)
    return out


@repeats_operator
def sparse_attention(
    q: Tensor | tuple[Tensor, Tensor],
    kv: Tensor,
    indices: Tensor,
    *,
    softmax_scale: float,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_kv: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    num_splits: int = 0,
    kv_format: str | None = None,
    return_max_logits: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    max_logits: Tensor | None = None,
    workspace: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Attention over the tokens that `indices` names: `sparse_mla.sparse_attention`.

    >>> import torch
    >>> import sparse_mla.integrations.torch as smla
    >>> q, kv = (torch.ones(shape, dtype=torch.bfloat16) for shape in ((1, 16, 576), (9, 576)))
    >>> slots = torch.tensor([[0, 3, -1]], dtype=torch.int32)
    >>> out, lse = smla.sparse_attention(q, kv, slots, softmax_scale=1 / 576)
    >>> out.shape, round(lse[0, 0].item(), 4)
    (torch.Size([1, 16, 512]), 1.6931)
    """
    op = _operators.sparse_attention
    nope, rope = q if isinstance(q, (tuple, list)) else (q, None)
    options = {
        "softmax_scale": softmax_scale,
        "q_pe": rope,
        "topk_length": topk_length,
        "attn_sink": attn_sink,
        "extra_kv": extra_kv,
        "extra_indices": extra_indices,
        "extra_topk_length": extra_topk_length,
        "num_splits": num_splits,
        "kv_format": kv_format,
    }
    if out is None and lse is None and max_logits is None and workspace is None:
        overload = op.return_max_logits if return_max_logits else op.default
        return overload(nope, kv, indices, **options)
    wanted = 3 if return_max_logits or max_logits is not None else 2
    specs = _results.sparse_attention(nope.shape)[:wanted]
    results = _given_or_new(nope, (out, lse, max_logits), specs)
    names = ("out", "lse", "max_logits")
    given = dict(zip(names, results, strict=False))
    op.out(nope, kv, indices, **options, **given, workspace=workspace)
    return results


@repeats_operator
def merge_attn_states(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Two partial results over disjoint keys as one: `sparse_mla.merge_attn_states`.

    >>> import torch
    >>> import sparse_mla.integrations.torch as smla
    >>> ones, zero = torch.ones(1, 1, 4), torch.zeros(1, 1)
    >>> out, lse = smla.merge_attn_states(ones, zero, 3 * ones, zero)
    >>> out[0, 0, 0].item(), round(lse.item(), 4)
    (2.0, 0.6931)
    """
    op = _operators.merge_attn_states
    if out is None and lse is None:
        return op.default(out_a, lse_a, out_b, lse_b)
    results = _given_or_new(out_a, (out, lse), _merged(out_a))
    op.out(out_a, lse_a, out_b, lse_b, out=results[0], lse=results[1])
    return results


def _given_or_new(
    like: Tensor, given: tuple[Tensor | None, ...], specs: tuple[_results.Result, ...]
) -> tuple[Tensor, ...]:
    """One tensor per spec: the caller's, or a new one."""
    return tuple(
        _new(like, spec)[0] if x is None else x for x, spec in zip(given, specs, strict=False)
    )


# --- absorption ----------------------------------------------------------------------------------

_define(
    "k_up_proj(Tensor q_nope, Tensor W_UK) -> Tensor",
    ops.k_up_proj,
    lambda q_nope, W_UK: _new(q_nope, _results.k_up_proj(q_nope.shape))[0],
)
_define(
    "k_up_proj.out(Tensor q_nope, Tensor W_UK, *, Tensor(a!) out) -> ()",
    _writes(ops.k_up_proj),
    _nothing,
)
_define(
    "v_up_proj(Tensor x, Tensor W_UV) -> Tensor",
    ops.v_up_proj,
    lambda x, W_UV: _new(x, _results.v_up_proj(x.shape, W_UV.shape))[0],
)
_define(
    "v_up_proj.out(Tensor x, Tensor W_UV, *, Tensor(a!) out) -> ()",
    _writes(ops.v_up_proj),
    _nothing,
)
_define(
    "dynamic_per_tensor_quant(Tensor x) -> (Tensor, Tensor)",
    ops.dynamic_per_tensor_quant,
    lambda x: _new(x, *_results.dynamic_per_tensor_quant(x.shape)),
)
_define(
    "dynamic_per_tensor_quant.out(Tensor x, *, Tensor(a!) out) -> Tensor",
    lambda x, out: ops.dynamic_per_tensor_quant(x, out=out)[1],
    lambda x, out: _new(x, _results.dynamic_per_tensor_quant(x.shape)[1])[0],
)


@repeats_operator
def k_up_proj(q_nope: Tensor, W_UK: Tensor, *, out: Tensor | None = None) -> Tensor:
    """W_UK absorbed into the query: `sparse_mla.k_up_proj`.

    >>> import torch
    >>> import sparse_mla.integrations.torch as smla
    >>> q, w = (torch.ones(shape, dtype=torch.bfloat16) for shape in ((1, 2, 4), (512, 2, 4)))
    >>> smla.k_up_proj(q, w)[0, 0, 0].item()
    4.0
    """
    if out is None:
        return _operators.k_up_proj.default(q_nope, W_UK)
    _operators.k_up_proj.out(q_nope, W_UK, out=out)
    return out


@repeats_operator
def v_up_proj(x: Tensor, W_UV: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The latent output projected up: `sparse_mla.v_up_proj`.

    >>> import torch
    >>> import sparse_mla.integrations.torch as smla
    >>> x, w = (torch.ones(shape, dtype=torch.bfloat16) for shape in ((1, 2, 512), (512, 2, 4)))
    >>> smla.v_up_proj(x, w).shape
    torch.Size([1, 2, 4])
    """
    if out is None:
        return _operators.v_up_proj.default(x, W_UV)
    _operators.v_up_proj.out(x, W_UV, out=out)
    return out


@repeats_operator
def dynamic_per_tensor_quant(x: Tensor, *, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """A tensor as e4m3 and one scale: `sparse_mla.dynamic_per_tensor_quant`.

    >>> import torch
    >>> import sparse_mla.integrations.torch as smla
    >>> out, scale = smla.dynamic_per_tensor_quant(torch.tensor([0.5, -2.0]))
    >>> out.tolist(), round(scale.item() * 448, 4)
    ([112.0, -448.0], 2.0)
    """
    if out is None:
        return _operators.dynamic_per_tensor_quant.default(x)
    return out, _operators.dynamic_per_tensor_quant.out(x, out=out)
