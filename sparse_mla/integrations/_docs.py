"""Makes the docstrings of functions that offer an operator to a framework."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

from sparse_mla.integrations._words import WORDS

_ENTRY = re.compile(r"^(\w[\w, ]*) : .*(?:\n +.*)*\n?", re.MULTILINE)


def document(function: Callable[..., Any], operator: Any, framework: str) -> None:
    """Makes a function's docstring from its own words and from the operator's docstring, which
    describes the parameters that the function has too, the results and the errors.

    The own words come first. Their "Returns", if any, replaces the operator's; their example comes
    last.
    """
    doc = inspect.getdoc(operator)
    if operator.__doc__ is None or doc is None:  # python -OO
        return
    own = inspect.cleandoc(WORDS[operator.__name__][framework])
    own, prompt, example = own.partition(">>> ")
    words, title, results = own.partition("Returns\n-------\n")
    parameters, rest = _section(doc, "Parameters", "Returns"), _section(doc, "Returns")
    if title:
        rest = title + results.rstrip() + "\n\n" + _section(doc, "Raises")
    given = inspect.signature(function).parameters

    def keep(entry: re.Match[str]) -> str:
        names = [name for name in entry[1].split(", ") if name in given]
        return entry[0].replace(entry[1], ", ".join(names), 1) if names else ""

    function.__doc__ = (
        f"{words.rstrip()}\n\n{_ENTRY.sub(keep, parameters).rstrip()}\n\n{rest.rstrip()}\n\n"
        f"Examples\n--------\n{prompt}{example}"
    )


def _section(doc: str, title: str, end: str = "Examples") -> str:
    """The text from a section's title up to the title of another section."""
    return doc[doc.index(f"\n{title}\n---") + 1 : doc.index(f"\n{end}\n---")]
