"""Metadata against its documentation: every field of a dataclass, and of those in it, has the type,
the dtype and the shape that the class's docstring says.

A size that the test does not know is the same wherever one object names it.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import reference as ref

DTYPES = {"int32": np.int32, "int64": np.int64, "bool": np.bool_, "bf16": ref.BF16}
Entry = tuple[str, list[list[str]]]  # a name, and the shapes that its array may have
PLAIN = {"int": int, "bool": bool, "slice": slice}


def shapes_of(text: str) -> list[list[str]]:
    """The shapes in a description: `[T, H / G * 4] fp32, or [T]`."""
    found = re.findall(r"\[((?:[^][]|\[[^]]*\])*)\]", text)
    return [[dim.strip() for dim in shape.split(",")] for shape in found if shape != "..."]


def entries_of(thing: Any) -> Iterator[Entry]:
    """The arrays of Parameters. Names that share an entry have its shapes in turn, where there are
    as many."""
    doc = inspect.getdoc(thing).split("\nParameters\n")[1].split("\nReturns\n")[0]
    for names, line in re.findall(r"^(\w[\w, ]*) : (.*)$", doc, re.M):
        shapes, each = shapes_of(line), names.split(", ")
        if line.startswith("a cache, ["):
            shapes = [["pages", "block_size", "row"], *shapes]
        if shapes and line.startswith(("[", "a cache, [")):
            in_turn = len(shapes) == len(each) > 1 and " or [" not in line
            for i, name in enumerate(each):
                yield name, [shapes[i]] if in_turn else shapes


def attributes_of(kind: type) -> dict[str, str]:
    """The types of a class's docstring, by name."""
    section = re.search(r"\n    Attributes\n    -+\n(.*?)\n\n", kind.__doc__ or "", re.DOTALL)
    assert section, kind
    rows = re.findall(r"^    (\w[\w, ]*) : (.+)$", section[1], re.MULTILINE)
    return {name: text for names, text in rows for name in names.split(", ")}


class Checker:
    """`engine`: the fields ("Class.field") that are the engine's arrays, or slices of them, whose
    type is `array`. `kinds`: the classes that documentation names."""

    def __init__(self, sizes: dict[str, int], array: type, engine: set[str], *kinds: type) -> None:
        self.sizes, self.array, self.engine = sizes, array, engine
        self.kinds = {kind.__name__: kind for kind in kinds}
        self.seen: set[str] = set()

    def check(self, value: Any) -> None:
        found = attributes_of(type(value))
        names = [f.name for f in dataclasses.fields(value) if not f.name.startswith("_")]
        assert sorted(found) == sorted(names), type(value)
        sizes = dict(self.sizes)
        for name in names:
            self.check_field(
                f"{type(value).__name__}.{name}", getattr(value, name), found[name], sizes
            )

    def check_field(self, where: str, value: Any, text: str, sizes: dict[str, int]) -> None:
        is_optional = " or None" in text
        text = text.replace(" or None", "").replace(", list", "")
        self.seen |= {where} if value is not None else set()
        if value is None:
            assert is_optional, where
        elif text.startswith("["):
            self.check_array(where, value, text, sizes)
        elif text.startswith('"'):
            assert value in re.findall(r'"(\w+)"', text), where
        elif text in PLAIN:
            assert type(value) is PLAIN[text], where
            if type(value) is slice:
                assert (type(value.start), type(value.stop), value.step) == (int, int, None), where
        elif text == "list of int":
            assert {type(x) for x in value} <= {int}, where
        elif text.startswith(("list of ", "dict of ")):
            items = value.values() if isinstance(value, dict) else value
            assert type(value).__name__ == text[:4], where
            for item in items:
                self.check_field(where, item, text[8:], sizes)
        elif isinstance(value, list):  # packed chunks
            for first, last, starts, lens in value:
                assert (type(first), type(last)) == (int, int), where
                for part in (starts, lens):
                    self.check_array(where, part, "[parts] int32", {"parts": last - first})
        else:
            assert type(value) is self.kinds[text], where
            self.check(value)

    def check_array(self, where: str, value: Any, text: str, sizes: dict[str, int]) -> None:
        dims, dtypes = re.match(r"\[(.*?)\] (.*)", text).groups()
        wanted = self.array if where in self.engine else np.ndarray
        assert type(value) is wanted, f"{where}: {type(value)}"
        allowed = re.findall(r"\b(int32|int64|bool|bf16)\b", dtypes)
        dtype = str(value.dtype).removeprefix("torch.")
        assert dtype in {np.dtype(DTYPES[x]).name for x in allowed}, f"{where}: {dtype}"
        dims = [dim.strip() for dim in dims.split(",")]
        assert len(value.shape) == len(dims), f"{where}: {value.shape}"
        for size, dim in zip(value.shape, dims, strict=True):
            self.check_size(where, int(size), dim, sizes)

    @staticmethod
    def check_size(where: str, size: int, dim: str, sizes: dict[str, int]) -> None:
        least, name, more = re.match(r"(>= )?(\w+)(?: \+ (\d+))?$", dim).groups()
        size -= int(more or 0)
        if least:
            assert size >= sizes[name], f"{where}: {dim}"
        else:
            assert size == sizes.setdefault(name, size), f"{where}: {dim}, {sizes}"
