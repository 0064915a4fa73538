"""Shapes that docstrings and C's headers state, against the arrays of good calls (tests/kit): what
is written as a number is that number in the call, and a letter stands for one size in all arrays
of a call."""

from __future__ import annotations

import ast
import inspect
import itertools
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import compiled
import pytest
import reference as ref
from documented import Entry, entries_of, shapes_of
from operators import FACTS
from v4_world import World

import sparse_mla

ROOT = Path(__file__).parents[2]
HEADERS = "\n".join(path.read_text() for path in sorted((ROOT / "csrc/sparse_mla").glob("*.h")))


def fields_of(struct: str) -> Iterator[Entry]:
    """The arrays of a struct of C whose comments begin with a shape."""
    body = re.search(rf"typedef struct {struct} \{{\n(.*?)\n\}}", HEADERS, re.S)
    for name, comment in re.findall(r"\*(\w+);\s*/\*\s*(.*?)\*/", body[1] if body else "", re.S):
        text = re.sub(r"\s*\n \* *|\s+\* ", " ", comment)
        if re.match(r"(?:out )?\[", text):
            yield name, shapes_of(re.split("[:;]", text)[0])


# --- sizes ---------------------------------------------------------------------------------------

# Sizes that are free in each array: caches and tables of a call differ in them.
FREE = {"pages", "block_size", "row", "rows", "page bytes", "page_bytes", "tokens", "W", "bytes"}
FREE |= {"any size", "size of a row of q", "size below", "max_pos", "S", "state_block_size"}
FREE |= {"attention_workspace_size", "any", "T rounded up to 4"}
FREE |= {"prefills", "block", "slots"}


class Unfit(Exception):
    """A shape that is not the documented one."""


def plain(dim: str) -> str:
    """A size as an expression of Python: `2 c D`, `N = H (Pn + Pv)`, `window + K'`, `in / 128`."""
    text = dim.split(" = ")[0].replace("'", "_prime").replace("ceil(", "math.ceil(")
    text = re.sub(r"\b(in|group)\b(?!\[)", r"\1_", text)
    return re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", text)


def names_in(text: str) -> set[str]:
    return {x.id for x in ast.walk(ast.parse(text)) if isinstance(x, ast.Name)} - {"math"}


def fit(shape: tuple[int, ...], dims: list[str], sizes: dict[str, Any]) -> list[tuple[int, str]]:
    """Binds letters that stand alone, and returns the sizes to be compared when all are bound."""
    if dims[0] == "pages" and len(shape) == 2:  # pages of bytes
        return []
    if len(shape) != len(dims):
        raise Unfit
    later = []
    for size, dim in zip(shape, dims, strict=True):
        if dim.lstrip(">= ") in FREE or dim.startswith(">= sum of"):
            continue
        if dim.isdigit() and int(dim) != size:
            raise Unfit
        if not dim.isdigit() and dim[0] not in "><" and plain(dim).isidentifier():
            if sizes.setdefault(plain(dim), size) != size:
                raise Unfit
        elif not dim.isdigit():
            later.append((size, dim))
    return later


def compare(later: list[tuple[int, str]], sizes: dict[str, Any]) -> None:
    """Compares sizes. A letter that only they have is what the first of them says: B of [B + 1]."""
    if "r" in sizes:  # a compressor's ratio
        sizes.setdefault("c", 2 if sizes["r"] == 4 else 1)
    for size, dim in sorted(later, key=lambda x: x[1][0] in "><"):
        sign, rest = re.fullmatch(r"(>= |<= |)(.*)", dim).groups()
        text = plain(rest)
        unknown = names_in(text) - set(sizes)
        if len(unknown) == 1 and not sign:
            (name,) = unknown
            fitting = (
                x for x in range(size + 2) if eval(text, {"math": math}, sizes | {name: x}) == size
            )
            sizes[name] = next(fitting, -1)
        elif unknown:
            raise Unfit
        value = eval(text, {"math": math}, sizes)
        if not {"": size == value, ">= ": size >= value, "<= ": size <= value}[sign]:
            raise Unfit


def check(entries: list[Entry], arrays: dict[str, Any], told: dict[str, Any]) -> str:
    """ "" if some choice among the documented shapes fits all arrays, else what does not."""
    rows = [(name, shapes) for name, shapes in entries if hasattr(arrays.get(name), "shape")]
    assert rows
    for choice in itertools.product(*(shapes for _, shapes in rows)):
        sizes, later = dict(told), []
        try:
            for (name, _), dims in zip(rows, choice, strict=True):
                later += fit(tuple(map(int, arrays[name].shape)), dims, sizes)
            compare(later, sizes)
            return ""
        except Unfit:
            continue
    shapes = {name: tuple(arrays[name].shape) for name, _ in rows}
    return f"the good call has {shapes}, documented are {dict(rows)}"


def told_by(arguments: dict[str, Any]) -> dict[str, Any]:
    """The sizes that a call's numbers tell, by the letters of the docs."""
    told = {n: x for n, x in arguments.items() if isinstance(x, (int, tuple)) and x is not True}
    told |= {"r": arguments["ratio"]} if "ratio" in arguments else {}
    if "group" in arguments:
        told |= dict(zip(("group_rows", "group_columns"), arguments["group"], strict=True))
    return told | ({"G": arguments["groups"]} if "groups" in arguments else {})


# --- operators -----------------------------------------------------------------------------------

CALLS = {name: facts.good() for name, facts in FACTS.items() if facts.good}
WITH_SHAPES = [name for name in CALLS if list(entries_of(getattr(sparse_mla, name)))]


# Letters that a docstring's text explains: C = max(topk, D), rounded up to 4.
MIXED = CALLS["build_mixed_sparse_indices"]
TOLD = {
    "build_mixed_sparse_indices": {
        "C": -(-max(MIXED.get("topk"), MIXED.get("decode_compressed_indices").shape[1]) // 4) * 4
    }
}


@pytest.mark.parametrize("name", WITH_SHAPES)
def test_docstrings_of_operators(name):
    arguments = CALLS[name].args | CALLS[name].kwargs
    entries = list(entries_of(getattr(sparse_mla, name)))
    text = check(entries, arguments, told_by(arguments) | TOLD.get(name, {}))
    assert not text, (
        f"{inspect.getsourcefile(getattr(sparse_mla, name).__wrapped__)}, {name}: {text}"
    )


def in_two_arrays(arguments: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """The same call with its query as `q` and `q_pe`, where C takes these."""
    if {"q", "q_pe", "kv_c"} & set(fields) != {"q", "q_pe"}:
        return arguments
    q = arguments["q"]
    return arguments | {"q": q[..., : ref.V_DIM], "q_pe": q[..., ref.V_DIM :]}


STRUCTS = [name for name in CALLS if list(fields_of(f"smla_{name}_args"))]


@pytest.mark.parametrize("name", STRUCTS)
def test_headers_of_operators(name):
    arguments = CALLS[name].args | CALLS[name].kwargs
    fields = list(fields_of(f"smla_{name}_args"))
    for given in (arguments, in_two_arrays(arguments, dict(fields))):
        text = check(fields, given, told_by(given))
        assert not text, f"csrc/sparse_mla, smla_{name}_args: {text}"


def test_operators_are_found():
    assert len(WITH_SHAPES) >= len(CALLS) - 2
    assert len(STRUCTS) > 20, STRUCTS


def test_the_shapes_of_the_page_about_c():
    """In a row of docs/c.md that names a function, `name` [shape] is that of the struct's field."""
    seen = 0
    for line in (ROOT / "docs/c.md").read_text().split("\n"):
        function = re.search(r"`smla_(\w+)`", line)
        fields = dict(fields_of(f"smla_{function[1]}_args")) if function else {}
        for name, shape in re.findall(r"`(\w+)` \[([^]]*)\]", line):
            if name in fields:
                known = [[dim.lstrip(">= ") for dim in dims] for dims in fields[name]]
                assert shape.split(", ") in known, f"docs/c.md: `{name}` [{shape}], not {known}"
                seen += 1
    assert seen == 2


# --- layers --------------------------------------------------------------------------------------


def v4_arrays(ratio: int) -> dict[str, tuple[Any, dict[str, Any], dict[str, Any]]]:
    """The weights and caches of a layer of DeepSeek V4: class, arrays, sizes that they have."""
    world = World(sparse_mla, ratio, (200,))
    told = {
        "H": world.heads,
        "r": ratio,
        "ratio": ratio,
        "swa_block_size": world.config.swa_block_size,
    }
    told |= {"block_size": world.config.block_size, "c": 2 if ratio == 4 else 1}
    told |= {"state_block_size": world.config.state_block_sizes.get(ratio, 0)}
    weights = {name: x for name, x in world.weights.items() if name != "wo_a_scale"}
    return {
        f"Weights, {ratio}": (sparse_mla.v4.Weights, weights, told),
        f"Caches, {ratio}": (sparse_mla.v4.Caches, world.memory, told),
    }


V32, V4 = compiled.make_v32(), compiled.make_v4()
LAYERS = {
    "forward of V3.2": (sparse_mla.SparseMLA.forward, V32.layer, {"T": 4}),
    "attend of V4": (sparse_mla.v4.SparseMLA.attend, V4.layer, {"T": 4}),
    **{name: case for ratio in (1, 4, 16) for name, case in v4_arrays(ratio).items()},
}


@pytest.mark.parametrize("name", LAYERS)
def test_docstrings_of_layers(name):
    thing, arrays, told = LAYERS[name]
    text = check(list(entries_of(thing)), arrays, told)
    assert not text, f"{inspect.getsourcefile(thing)}, {thing.__qualname__}: {text}"


FORWARDS = {"smla_forward_args": V32.layer, "smla_v4_attend_args": V4.layer}


@pytest.mark.parametrize("struct", FORWARDS)
def test_headers_of_layers(struct):
    text = check(list(fields_of(struct)), FORWARDS[struct], {"T": 4})
    assert not text, f"csrc/sparse_mla, {struct}: {text}"


# --- the check itself ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("[T, H, 512]", "[T, H, 576]"),  # a number
        ("[512, H, Pn]", "[H, 512, Pn]"),  # the order
        ("[T, H, Pn]", "[H, T, Pn]"),
        ("[T, H, Pn]", "[T, Pn]"),  # a dimension
        ("[512, H, Pn]", "[512, H, Pn + 1]"),  # an expression
        ("[512, H, Pn]", "[512, H, >= Pn + 1]"),
    ],
)
def test_a_wrong_shape_is_found(right, wrong):
    arguments = CALLS["k_up_proj"].args | CALLS["k_up_proj"].kwargs
    doc = inspect.getdoc(sparse_mla.k_up_proj)
    assert right in doc

    class Wrong:
        __doc__ = doc.replace(right, wrong, 1)

    assert not check(list(entries_of(sparse_mla.k_up_proj)), arguments, {})
    assert check(list(entries_of(Wrong)), arguments, {})
