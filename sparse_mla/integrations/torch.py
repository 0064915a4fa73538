"""The operators as PyTorch custom operators: torch.compile and torch.export pass through them.

Importing this module registers `torch.ops.sparse_mla.*` for CPU and CUDA tensors, each with a fake
kernel. The functions here call these operators. They have the names, arguments and results of
`sparse_mla`'s own, without `stream`, because work goes to PyTorch's current stream. Eager and
compiled calls give the same bits.

An operator returns new tensors. Its overload `.out` writes tensors of the caller and says so in its
schema, so that a compiled function keeps the order of writes and reads. `concat_and_cache_mla`,
`gather_kv_cache` and `fused_qnorm_rope_kv_insert` always do so. In the schemas a pair of queries is
`q` and `q_pe`, a scale such as `kv_scale` is a float and, where it is a tensor, `kv_scale_tensor`,
and a list of parts is its first tensor, `outs`, and the others, `outs_later`.

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

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

try:
    import torch
    from torch import Tensor
    from torch.autograd import forward_ad
except ImportError as error:
    raise ImportError("sparse_mla.integrations.torch needs PyTorch: pip install torch") from error

from sparse_mla import _C, _results
from sparse_mla.integrations._schema import ALWAYS, ASKED, GIVEN, MAYBE, Schema
from sparse_mla.ops import OPERATORS

if TYPE_CHECKING:
    from sparse_mla.ops import *  # noqa: F403 - the same functions without `stream`

__all__ = list(OPERATORS)


def __dir__() -> list[str]:
    """What tab completion offers."""
    return __all__


_library = torch.library.Library("sparse_mla", "DEF")
_operators = torch.ops.sparse_mla


def _is_watched(x: Any) -> bool:
    """Whether autograd would record what is done with an argument."""
    if isinstance(x, (tuple, list)):
        return any(map(_is_watched, x))
    if not isinstance(x, Tensor):
        return False
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        return True
    return x.requires_grad and torch.is_grad_enabled()


def _detach(x: Any) -> Any:
    if isinstance(x, (tuple, list)):
        return [_detach(item) for item in x]
    return x.detach() if getattr(x, "requires_grad", False) else x


def _each(arguments: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors among arguments, those of lists of parts too, by the names in errors."""
    for name, x in arguments:
        if isinstance(x, Tensor):
            yield name, x
        elif isinstance(x, (tuple, list)):
            yield from _each((f"{name}[{i}]", item) for i, item in enumerate(x))


def _define(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Registers an operator; `fake` makes results without values from tensors without values."""
    name = schema.partition("(")[0]
    op, _, variant = name.partition(".")
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    overload = getattr(getattr(_operators, op), variant or "default")
    names = [argument.name for argument in overload._schema.arguments]

    def compute(*args: Any, **kwargs: Any) -> Any:
        """Detaches parameters, because `kernel` refuses tensors that require gradients."""
        return kernel(*map(_detach, args), **{key: _detach(x) for key, x in kwargs.items()})

    def refuse_gradients(keys: Any, *args: Any, **kwargs: Any) -> Any:
        for key, x in (*zip(names, args, strict=False), *kwargs.items()):
            if _is_watched(x):
                raise BufferError(
                    f"{op}: `{key}` must not require gradients, got a tensor that does: the "
                    "operators have no derivatives; call under torch.no_grad()"
                )
        return overload.redispatch(keys & torch._C._after_autograd_keyset, *args, **kwargs)

    def trace(*args: Any, **kwargs: Any) -> Any:
        """Calls `fake`, and checks the one rule whose breach would not show in its results."""
        given = list(_each((*zip(names, args, strict=False), *kwargs.items())))
        first, place = given[0][0], given[0][1].device
        for key, x in given:
            if x.device != place:
                raise ValueError(f"{op}: `{key}` must be on {place} like `{first}`, got {x.device}")
        return fake(*args, **kwargs)

    for backend in ("CPU", "CUDA"):
        _library.impl(name, compute, backend)
    _library.impl(name, refuse_gradients, "Autograd", with_keyset=True)
    torch.library.register_fake(f"sparse_mla::{name}", trace, lib=_library)


# --- overloads -----------------------------------------------------------------------------------

_TYPES = {
    "input": "Tensor",
    "optional input": "Tensor?",
    "input or none": "Tensor?",
    "asking input": "Tensor?",
    "scale": "float",
    "scale or none": "float?",
    "pair": "Tensor",
    "parts": "Tensor",
}


def _type_of(kind: str) -> str | None:
    """The type of an option in PyTorch's schema language; None for what is no option."""
    if kind not in _C.OPTION_KINDS:
        return _TYPES.get(kind)
    name, count, is_int32, may_be_none = _C.OPTION_KINDS[kind]
    if count > 1:
        return "int[]?" if may_be_none else f"int[{count}]"
    return ("SymInt" if count == 1 and not is_int32 else name) + "?" * may_be_none


def _declare(schema: Schema, outputs: list[str]) -> str:
    """The arguments of an overload that writes `outputs`, in PyTorch's schema language.

    An output that every call returns is required, because the overload exists to write it.
    """
    positional: list[str] = []
    keywords: list[str] = []
    marks = iter("abcdefgh")
    for name, parameter in schema.parameters.items():
        kind = schema.rows[name]
        has_default = parameter.default is not parameter.empty and kind not in ALWAYS
        is_optional = has_default or kind == "workspace"
        if kind in ("input and output", "input, maybe output") or name in outputs:
            text = f"Tensor({next(marks)}!){'?' * is_optional} {name}"
        elif type_of := _type_of(kind):
            text = f"{type_of} {name}"
        else:
            continue
        if has_default:
            default = parameter.default
            default = list(default) if isinstance(default, tuple) else default
            text += f'="{default}"' if isinstance(default, str) else f"={default}"
        (keywords if parameter.kind is parameter.KEYWORD_ONLY else positional).append(text)
    seconds = (*schema.pair.values(), *schema.scales.values())
    keywords += [f"Tensor? {name}=None" for name in seconds]
    keywords += [f"Tensor[]? {name}=None" for name in schema.later.values()]
    return ", ".join([*positional, *(["*", *keywords] if keywords else [])])


def _one_or_all(results: list[Tensor | None]) -> Any:
    return None if not results else results[0] if len(results) == 1 else tuple(results)


def _named(names: list[str], results: Any) -> dict[str, Tensor]:
    """The inverse of `_one_or_all`: the results by their names."""
    return dict(zip(names, results if isinstance(results, tuple) else (results,), strict=False))


def _new(given: Iterable[Any], result: _results.Result) -> Tensor:
    """A tensor of this shape and dtype, where the first tensor of `given` is. One with strides has
    groups, dimension 1, first in its storage, whose other elements are 0."""
    shape, dtype, *strides = result
    like = next(x for _, x in _each(("", x) for x in given))
    if not strides:
        return like.new_empty(shape, dtype=getattr(torch, dtype))
    size = shape[1] * strides[0][1]
    return like.new_zeros(size, dtype=getattr(torch, dtype)).as_strided(shape, strides[0])


def _register(schema: Schema, variant: str, outputs: list[str], new: list[str]) -> Any:
    """An overload that writes `outputs` of the caller, and returns the results `new`."""
    asked = schema.names(*ASKED)
    options = {}
    if schema.ask and not schema.asks_by_array:
        options[schema.ask] = not set(asked).isdisjoint(new)
    left_out = {"ask", "stream", *(() if outputs else GIVEN)}
    names = [n for n in schema.parameters if schema.rows[n] not in left_out]
    # A workspace that is no keyword still has to be given to the operator.
    absent = dict.fromkeys(n for n in schema.positional if n not in names)
    returned = [schema.written] if schema.written else schema.returned

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if schema.pair or schema.scales or schema.later or absent:
            args, kwargs = (), schema.join(dict(zip(names, args, strict=False)) | kwargs)
        results = _named(returned, schema.operator(*args, **kwargs, **options, **absent))
        return _one_or_all([results[name] for name in new])

    def fake(*args: Any, **kwargs: Any) -> Any:
        values = schema.defaults | dict(zip(names, args, strict=False)) | kwargs | options
        results = schema.results(values)
        return _one_or_all([_new(args, results[name]) if name in results else None for name in new])

    tensors = ", ".join(["Tensor"] * len(new))
    _define(
        f"{schema.name}{'.' * bool(variant)}{variant}({_declare(schema, outputs)}) -> "
        + (tensors if len(new) == 1 else f"({tensors})"),
        kernel,
        fake if new else lambda *args, **kwargs: None,
    )
    return getattr(getattr(_operators, schema.name), variant or "default")


# --- functions -----------------------------------------------------------------------------------


def _take_over(operator: Any) -> Callable[..., Any]:
    """Registers all overloads of an operator, and returns a function that calls the right one."""
    schema = Schema(operator)
    always, asked = schema.names(*ALWAYS, *MAYBE), schema.names(*ASKED)
    outputs = schema.names(*GIVEN)
    ask, written = schema.ask, schema.written
    never_given, never_given_asked = schema.names("result"), schema.names("asked result")

    usual = _register(schema, "", outputs, []) if written else _register(schema, "", [], always)
    usual_asked = _register(schema, ask, [], schema.returned) if ask else usual
    writing = usual
    if outputs and not written:
        writing = _register(schema, "out", outputs, never_given)
    writing_asked = writing
    if never_given_asked:
        new = never_given + never_given_asked
        writing_asked = _register(schema, f"{ask}_out", outputs, new)

    def run(overload: Any, values: dict[str, Any]) -> Any:
        given = [values.pop(name) for name in schema.positional if name in values]
        return overload(*given, **values)

    def write(values: dict[str, Any], asks: bool) -> Any:
        """Writes results to the caller's tensors, and makes those that the caller left out."""
        results = schema.results(({ask: asks} if ask else {}) | values)
        arguments = [values[name] for name in schema.positional]
        for name in outputs:
            is_made = name in results and (name in always or (asks and name in asked))
            if values[name] is None and is_made:
                made = _new(arguments, results[name])
                # The operator takes it for the caller's, whose rows of no request it leaves alone.
                padding = schema.rules.padding.get(name)
                values[name] = made if padding is None else made.fill_(padding)
        given = {name: values[name] for name in outputs if values[name] is not None}
        got = run(writing_asked if asks else writing, values)
        rest = never_given + (never_given_asked if asks else [])
        given |= _named(rest, got)
        names = [n for n in schema.returned if n in given or schema.rows[n] in MAYBE]
        return _one_or_all([given.get(name) for name in names])

    def update(values: dict[str, Any]) -> Any:
        """Writes to the array that the caller always gives, and to results. A result that the
        caller left out is the first argument, if that has the result's dtype."""
        first = values[schema.positional[0]]
        for name, (shape, dtype, *_) in schema.results(values).items():
            if values[name] is None:
                is_over = first.dtype == getattr(torch, dtype)
                values[name] = first if is_over else _new((first,), (shape, dtype))
        run(usual, dict(values))
        names = [*schema.returned, *schema.names("input and output")]
        return _one_or_all([values[name] for name in names])

    def call(values: dict[str, Any]) -> Any:
        values = schema.part(values)
        if written:
            return update(values)
        asks = schema.asks(values)
        if ask and not schema.asks_by_array:
            del values[ask]
        if any(values[name] is not None for name in outputs):
            return write(values, asks)
        for name in outputs:
            del values[name]
        return run(usual_asked if asks else usual, values)

    return schema.expose(call, ("stream",), __name__)


globals().update({name: _take_over(operator) for name, operator in OPERATORS.items()})
