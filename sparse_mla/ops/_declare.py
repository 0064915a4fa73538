"""Turns declarations into operators of C."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from sparse_mla import _C
from sparse_mla._types import Array as Array
from sparse_mla._types import Stream as Stream
from sparse_mla.ops._sections import add_sections

Declaration = TypeVar("Declaration", bound=Callable[..., Any])

OPERATORS: dict[str, Any] = {}  # name -> operator, for the integrations


def operator(declaration: Declaration) -> Declaration:
    """Makes the operator of C that has the name, parameters and defaults of a declaration.

    Integrations get the public operators that take arrays.
    """
    name = declaration.__name__
    made = _C.Operator(declaration, name)
    takes_arrays = made.table[-1][1].startswith("stream")
    if takes_arrays and not name.startswith("_"):
        OPERATORS[name] = made
        if declaration.__doc__ is not None:  # python -OO
            declaration.__doc__ = add_sections(name, declaration.__doc__, made.table)
    functools.update_wrapper(made, declaration)
    vars(made)["__call__"] = made  # IPython shows its signature, beside the operator's
    return cast(Declaration, made)
