"""Makes the docstrings of functions that offer an operator to a framework."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

# Framework → the section of an operator's docstring that is about it.
SECTIONS = {"torch": "PyTorch", "jax": "JAX"}

_ENTRY = re.compile(r"^(\w[\w, ]*) : .*(?:\n +.*)*\n?", re.MULTILINE)


def document(function: Callable[..., Any], operator: Any, framework: str) -> None:
    """Makes a function's docstring from the operator's: first what it does and the words of the
    framework's section, then those parameters that the function has too, the results and the
    errors, and last the section's example.
    """
    doc = inspect.getdoc(operator)
    if operator.__doc__ is None or doc is None:  # python -OO
        return
    words, prompt, example = _section(doc, SECTIONS[framework]).partition(">>> ")
    given = inspect.signature(function).parameters

    def keep(entry: re.Match[str]) -> str:
        names = [name for name in entry[1].split(", ") if name in given]
        return entry[0].replace(entry[1], ", ".join(names), 1) if names else ""

    sections = {
        "Parameters": _ENTRY.sub(keep, _section(doc, "Parameters")),
        "Returns": _section(doc, "Returns"),
        "Raises": _section(doc, "Raises"),
        "Examples": prompt + example,
    }
    texts = [f"{title}\n{'-' * len(title)}\n{text.rstrip()}" for title, text in sections.items()]
    function.__doc__ = "\n\n".join([doc.partition("\n\n")[0], words.rstrip(), *texts])


def _section(doc: str, title: str) -> str:
    """The text below a section's title, up to the next section."""
    found = re.search(rf"^{title}\n-+\n(.*?)(?=^\w+\n-+\n|\Z)", doc, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"a docstring without the section {title}: {doc.splitlines()[0]}")
    return found[1]
