"""Turns declarations into operators of C."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from sparse_mla import _C, _results
from sparse_mla._types import Array as Array
from sparse_mla._types import Stream as Stream

Declaration = TypeVar("Declaration", bound=Callable[..., Any])

OPERATORS: dict[str, Any] = {}  # name -> operator, for the integrations


def operator(results: _results.Rule | None = None) -> Callable[[Declaration], Declaration]:
    """Makes the operator of C that has the name, parameters and defaults of a declaration.

    `results` is the rule for what the operator returns. Integrations leave out operators that have
    no such rule.
    """

    def declare(declaration: Declaration) -> Declaration:
        made = _C.Operator(declaration, declaration.__name__)
        functools.update_wrapper(made, declaration)
        vars(made)["__call__"] = made  # IPython shows its signature, beside the operator's
        if results is not None:
            vars(made)["results"] = results
            OPERATORS[declaration.__name__] = made
        return cast(Declaration, made)

    return declare
