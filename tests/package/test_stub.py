"""sparse_mla/_C.pyi against the compiled module: names, parameters, and types of what calls take
and return. What a type checker reads there is tried, because no checker compares it to C."""

from __future__ import annotations

import ast
import builtins
import contextlib
import inspect
import sys
from pathlib import Path
from typing import Any

import compiled
import numpy as np
import pytest
import reference as ref
from dlpack_producer import Producer

import sparse_mla
from sparse_mla import _C

STUB = ast.parse((Path(sparse_mla.__file__).parent / "_C.pyi").read_text())
CALLS = compiled.make_calls()


def flatten(body: list[ast.stmt], prefix: str = "") -> dict[str, ast.stmt]:
    """The declarations by their names; those for this version of Python only."""
    found: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, ast.If):
            assert ast.unparse(node.test) == "sys.version_info >= (3, 12)"
            found |= flatten(node.body, prefix) if sys.version_info >= (3, 12) else {}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[prefix + node.name] = node
            if isinstance(node, ast.ClassDef):
                found |= flatten(node.body, f"{node.name}.")
        elif isinstance(node, ast.AnnAssign):
            found[prefix + ast.unparse(node.target)] = node
    return found


DECLARED = flatten(STUB.body)
FUNCTIONS = {name: x for name, x in DECLARED.items() if isinstance(x, ast.FunctionDef)}
PROPERTIES = {
    name
    for name, x in FUNCTIONS.items()
    if any(ast.unparse(one) == "property" for one in x.decorator_list)
}


# --- types ---------------------------------------------------------------------------------------


def is_of(type_: ast.expr, value: Any) -> bool:
    """Whether a value is of an annotated type, exactly: True is no int, and 1 is no float."""
    text = ast.unparse(type_)
    if isinstance(type_, ast.BinOp):
        return is_of(type_.left, value) or is_of(type_.right, value)
    if text in ("Any", "object"):
        return True
    if text == "None":
        return value is None
    if not isinstance(type_, ast.Subscript):
        known = {"ndarray": np.ndarray, "memoryview": memoryview, "slice": slice}
        wanted = known.get(text) or getattr(_C, text, None) or getattr(builtins, text)
        return type(value) is wanted
    items = type_.slice.elts if isinstance(type_.slice, ast.Tuple) else [type_.slice]
    kind = ast.unparse(type_.value)
    if kind == "ndarray":
        return type(value) is np.ndarray
    if type(value).__name__ != kind:
        return False
    if kind == "dict":
        are_keys = all(is_of(items[0], x) for x in value)
        return bool(value) and are_keys and all(is_of(items[1], x) for x in value.values())
    if kind == "list" or ast.unparse(items[-1]) == "...":
        return bool(value) and all(is_of(items[0], x) for x in value)
    return len(value) == len(items) and all(map(is_of, items, value))


def test_types_are_told_apart():
    def declared(text: str) -> ast.expr:
        return ast.parse(text, mode="eval").body

    good = {"int": 1, "float": 1.0, "str | None": None, "tuple[int, ...]": (1, 2), "bool": True}
    good |= {"tuple[Any, str]": (1, ""), "dict[str, dict[int, int]]": {"a": {1: 2}}}
    bad = {"int": True, "float": 1, "str | None": 1, "tuple[int, ...]": (1, "2"), "bool": 1}
    bad |= {"tuple[Any, str]": ("", 1), "list[int]": [], "dict[str, dict[int, int]]": {"": {1: ""}}}
    assert [name for name, x in good.items() if not is_of(declared(name), x)] == []
    assert [name for name, x in bad.items() if is_of(declared(name), x)] == []


def make_tensor():
    out, _ = sparse_mla.dynamic_per_tensor_quant(Producer(np.ones((2, 3), np.float32)))
    assert type(out) is _C.Tensor
    return out


def owner(name: str) -> Any:
    """A real object that has the attribute or method of this name in the stub."""
    kind, _, attribute = name.rpartition(".")
    if kind == "Tensor":
        return make_tensor()
    if kind == "Operator":
        return sparse_mla.k_up_proj
    if kind == "Step" and attribute != "__new__":
        return CALLS[kind][0](*CALLS[kind][1])
    return getattr(_C, kind) if kind else _C


# --- names ---------------------------------------------------------------------------------------


def test_names_are_those_of_the_module():
    there = {x for x in vars(_C) if not x.startswith("__")} | {"__version__"}
    assert {name for name in DECLARED if "." not in name} == there


# What every type has, or the stub cannot say.
OWN = {"__doc__", "__module__", "__new__", "__repr__", "__dict__", "__hash__", "__reduce__"}
OWN |= {"__weakref__", "__buffer__", "__release_buffer__", "__text_signature__", "__setitem__"}
OWN |= {
    "__annotations__",
    "__delitem__",
    "__vectorcalloffset__",
    "__dictoffset__",
    "__weaklistoffset__",
}


@pytest.mark.parametrize("kind", [x for x, n in DECLARED.items() if isinstance(n, ast.ClassDef)])
def test_attributes_are_those_of_the_types(kind):
    declared = {name.split(".")[1] for name in DECLARED if name.startswith(f"{kind}.")}
    assert declared - OWN == set(vars(getattr(_C, kind))) - OWN
    with pytest.raises(TypeError, match="is not an acceptable base type"):
        type("More", (getattr(_C, kind),), {})
    decorators = DECLARED[kind].decorator_list  # type: ignore[attr-defined]
    assert [ast.unparse(x) for x in decorators] == ["final"]


# --- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [x for x, n in DECLARED.items() if isinstance(n, ast.AnnAssign)])
def test_values_have_their_types(name):
    node = DECLARED[name]
    assert isinstance(node, ast.AnnAssign)
    assert is_of(node.annotation, getattr(_C, name))


@pytest.mark.parametrize("name", sorted(PROPERTIES - {"Tensor.__cuda_array_interface__"}))
def test_properties_have_their_types(name):
    value = getattr(owner(name), name.split(".")[1])
    assert is_of(FUNCTIONS[name].returns, value), value
    with pytest.raises((AttributeError, TypeError)):
        setattr(owner(name), name.split(".")[1], value)


# What a call of these returns depends on its arguments, or is a capsule, which has no type.
RETURN_ANY = {"Tensor.__dlpack__", "Operator.__call__", "call_exactly", "new_array"}


@pytest.mark.parametrize("name", sorted({*FUNCTIONS} - RETURN_ANY))
def test_results_have_one_type_and_one_that_says_something(name):
    text = ast.unparse(FUNCTIONS[name].returns)
    assert text not in ("Any", "object") and "|" not in text


# --- parameters ----------------------------------------------------------------------------------


def declared_parameters(node: ast.FunctionDef) -> list[tuple[str, str, str | None]]:
    """(name, kind, default) of each parameter but self and cls."""
    a = node.args
    rows = [(x.arg, "positional-only") for x in a.posonlyargs]
    rows += [(x.arg, "positional") for x in a.args]
    defaults = [None] * (len(rows) - len(a.defaults)) + [ast.unparse(x) for x in a.defaults]
    found = [(*row, default) for row, default in zip(rows, defaults, strict=True)]
    found += [
        (x.arg, "keyword", None if d is None else ast.unparse(d))
        for x, d in zip(a.kwonlyargs, a.kw_defaults, strict=True)
    ]
    found += [(a.kwarg.arg, "keywords", None)] if a.kwarg is not None else []
    return [row for row in found if row[0] not in ("self", "cls")]


KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: "positional-only",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "positional",
    inspect.Parameter.KEYWORD_ONLY: "keyword",
    inspect.Parameter.VAR_KEYWORD: "keywords",
}
# Slots, whose signatures are Python's own.
SLOTS = {"Tensor.__len__", "Tensor.__getitem__", "Tensor.__buffer__"}
SLOTS |= {"Operator.__call__", "Operator.__get__"}


@pytest.mark.parametrize("name", sorted({*FUNCTIONS} - PROPERTIES - SLOTS))
def test_parameters_are_those_of_the_signature(name):
    kind, _, method = name.rpartition(".")
    thing = getattr(_C, kind) if method == "__new__" else getattr(owner(name), method)
    signature = inspect.signature(thing)
    rows = [
        (p.name, KINDS[p.kind], None if p.default is p.empty else repr(p.default))
        for p in signature.parameters.values()
    ]
    assert declared_parameters(FUNCTIONS[name]) == rows


def annotations(node: ast.FunctionDef) -> list[ast.expr]:
    found = [x.annotation for x in (*node.args.posonlyargs, *node.args.args)]
    return [x for x in found if x is not None]


CALLED = [n for n, (_, args) in CALLS.items() if args or n not in _C.__dict__ or n.islower()]


def declaration(name: str) -> ast.FunctionDef:
    return FUNCTIONS[name if name in FUNCTIONS else f"{name}.__new__"]


@pytest.mark.parametrize("name", CALLED)
def test_results_have_their_types(name):
    call, args = CALLS[name]
    assert is_of(declaration(name).returns, call(*args))


OTHERS = {"dict": 3, "int": 2.5, "float": "0.1", "str": 7, "bool": None, "tuple": [1], "None": None}


def refuses(call, args) -> bool:
    with contextlib.suppress(TypeError, ValueError, AttributeError):
        call(*args)
        return False
    return True


@pytest.mark.parametrize("name", CALLED)
def test_parameters_have_their_types(name):
    """Good arguments are of the annotated types, and those of other types are refused. `Any` is for
    arrays, streams and what says no more than Any."""
    call, args = CALLS[name]
    types = annotations(declaration(name))
    assert len(types) == len(args)
    for i, (type_, value) in enumerate(zip(types, args, strict=True)):
        text = ast.unparse(type_)
        put = lambda x, i=i: (*args[:i], x, *args[i + 1 :])  # noqa: E731
        if text == "Any":
            names = [x.arg for x in declaration(name).args.posonlyargs][-len(args) :]
            is_plain = isinstance(value, (int, float, str, bool, tuple))
            assert not is_plain or names[i] in ("stream", "query_start_loc_cpu"), names[i]
            continue
        if text.startswith("Callable"):
            assert refuses(call, put(3))
            continue
        assert is_of(type_, value), (text, value)
        is_truth = text == "bool"  # whatever has a truth value
        takes_none = "None" in text
        assert is_truth or refuses(call, put(None)) is not takes_none, (text, i)
        base = text.split(" ")[0].split("[")[0]
        if not is_truth:
            assert refuses(call, put(OTHERS[base])), (text, i)
        if base == "tuple":
            for j in range(len(value)):
                if isinstance(value[j], (int, float)):
                    assert refuses(call, put((*value[:j], "x", *value[j + 1 :]))), (text, i)
        if base == "float":
            assert not refuses(call, put(1)), "an int is a float to type checkers"


NAMED = compiled.make_named_calls()
FIELDS = [*_C.CONFIG_FIELDS["v32"]]


@pytest.mark.parametrize("name", NAMED)
def test_what_steps_take_by_name_has_its_types(name):
    """The numbers and tuples of configs, builds and layers, which no signature shows."""
    call, args = NAMED[name]
    is_config = name.endswith("config")
    call(*args)
    for i, value in enumerate(args):
        put = lambda x, i=i: (*args[:i], x, *args[i + 1 :])  # noqa: E731
        if isinstance(value, (int, float, tuple, dict)):
            wrong = {int: 2.5, float: "0.1", tuple: 1, dict: 3}[type(value)]
            assert refuses(call, put(wrong)), (i, value)
        if isinstance(value, (int, float)) and value != 0:  # a stream may be None
            is_optional = name == "v32, config" and FIELDS[i] == "prefill_workspace_tokens"
            assert refuses(call, put(None)) is not is_optional, (i, value)
        if isinstance(value, float):
            assert not refuses(call, put(1)), "an int is a float to type checkers"
    for few in (args[:-1], args[:1]):
        assert refuses(call, few), "all of them must be given"
    assert refuses(call, (*args, 1)) is not is_config, "a config may have more, calls may not"


# --- the methods of Tensor and Operator ----------------------------------------------------------


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, ref.BF16)


METHODS = {
    "Tensor.__dlpack__": lambda x: x.__dlpack__(),
    "Tensor.__dlpack_device__": lambda x: x.__dlpack_device__(),
    "Tensor.__array__": lambda x: x.__array__(),
    "Tensor.__len__": lambda x: x.__len__(),
    "Tensor.__getitem__": lambda x: x[0],
    "Tensor.__buffer__": lambda x: memoryview(x),
    "Operator.__call__": lambda x: x(ones(1, 2, 4), ones(512, 2, 4)),
    "Operator.__get__": lambda x: x.__get__(None, int),
}


@pytest.mark.parametrize("name", [x for x in METHODS if x in FUNCTIONS])
def test_methods_return_their_types(name):
    thing = owner(name)
    if name in ("Tensor.__array__", "Tensor.__buffer__"):  # e4m3 is no dtype of buffers
        thing = sparse_mla.dynamic_per_tensor_quant(Producer(np.ones((2, 3), np.float32)))[1]
    assert is_of(FUNCTIONS[name].returns, METHODS[name](thing))


def test_options_of_a_tensor_s_export_have_their_types():
    tensor = make_tensor()
    options = dict(zip(*(FUNCTIONS["Tensor.__dlpack__"].args.kwonlyargs,) * 2, strict=True))
    types = {x.arg: x.annotation for x in options}
    good = {"stream": None, "max_version": (1, 0), "dl_device": (1, 0), "copy": False}
    wrong = {"max_version": 1, "dl_device": 1}
    assert set(good) == set(types)
    for name, value in good.items():
        assert is_of(types[name], value)
        assert is_of(types[name], None)
        for one in (value, None):
            tensor.__dlpack__(**{name: one})
    for name, value in wrong.items():
        assert not is_of(types[name], value)
        with pytest.raises((TypeError, ValueError, BufferError)):
            tensor.__dlpack__(**{name: value})
    assert is_of(types["copy"], True)
    assert ast.unparse(types["stream"]) == "Any"
    for key in (0, slice(1)):
        assert is_of(annotations(FUNCTIONS["Tensor.__getitem__"])[-1], key)
        assert type(tensor[key]) is _C.Tensor
    assert not is_of(annotations(FUNCTIONS["Tensor.__getitem__"])[-1], "0")


def test_every_declared_call_is_tried():
    tried = {*(x if x in FUNCTIONS else f"{x}.__new__" for x in CALLED), *METHODS, *PROPERTIES}
    assert {*FUNCTIONS} - tried == set()
