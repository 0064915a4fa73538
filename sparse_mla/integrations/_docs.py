"""Docstrings of functions that repeat an operator for a framework."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar

from sparse_mla import ops

Function = TypeVar("Function", bound=Callable[..., Any])

_ENTRY = re.compile(r"^(\w[\w, ]*) : .*(?:\n +.*)*\n?", re.MULTILINE)


def repeats_operator(function: Function) -> Function:
    """Adds what `sparse_mla.ops` says: of the parameters that it has too, results and errors.

    The function's words come first, and its "Returns" in place of the operator's, its example last.
    """
    operator, own = inspect.getdoc(getattr(ops, function.__name__)), inspect.getdoc(function)
    if operator is None or own is None:  # python -OO
        return function
    own, prompt, example = own.partition(">>> ")
    words, title, results = own.partition("Returns\n-------\n")
    parameters, rest = _section(operator, "Parameters", "Returns"), _section(operator, "Returns")
    if title:
        rest = title + results.rstrip() + "\n\n" + _section(operator, "Raises")
    given = inspect.signature(function).parameters

    def keep(entry: re.Match[str]) -> str:
        names = [name for name in entry[1].split(", ") if name in given]
        return entry[0].replace(entry[1], ", ".join(names), 1) if names else ""

    function.__doc__ = (
        f"{words.rstrip()}\n\n{_ENTRY.sub(keep, parameters).rstrip()}\n\n{rest.rstrip()}\n\n"
        f"Examples\n--------\n{prompt}{example}"
    )
    return function


def _section(doc: str, title: str, end: str = "Examples") -> str:
    """From a section's title up to that of another."""
    return doc[doc.index(f"\n{title}\n---") + 1 : doc.index(f"\n{end}\n---")]
