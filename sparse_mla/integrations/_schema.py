"""Operators in the form that frameworks need: each operator's table (csrc/python/call/operator.h)
joined with its declaration (sparse_mla.ops). Nothing is written twice, so a new operator is here as
soon as it is declared.
"""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Mapping
from typing import Any

from sparse_mla import _C, _results
from sparse_mla._format_names import rename
from sparse_mla.integrations._docs import document

# Kinds of arrays. A scale is a float or an array.
SCALES = ("scale", "scale or none")
READ = (
    *("input", "optional input", "input or none", "asking input", *SCALES),
    *("pair", "second", "parts", "input, maybe output", "input and output"),
)
# Options that are tuples of ints, and their lengths.
INTS = {kind: count for kind, (_, count, *_) in _C.OPTION_KINDS.items() if count > 1}
ALWAYS = ("output", "output or first", "result")  # returned by every call
MAYBE = ("output or none",)  # the same, but None where the results' rules have no such result
ASKED = ("asked output", "asked result")  # returned where the call asks for it
# Arrays that the caller may give to write to.
GIVEN = ("output", "output or none", "output or first", "asked output", "workspace")


class Schema:
    """One operator."""

    def __init__(self, operator: Any) -> None:
        self.operator = operator
        self.name: str = operator.__name__
        self.rows: dict[str, str] = dict(operator.table)  # name → kind
        self.rules = _results.Rules(operator)
        self.signature = inspect.signature(operator)
        self.parameters = self.signature.parameters
        self.defaults = {
            n: p.default for n, p in self.parameters.items() if p.default is not p.empty
        }
        self.positional = [
            n for n, p in self.parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD
        ]
        self.returned = self.names(*ALWAYS, *MAYBE, *ASKED)
        self.pair = dict(zip(self.names("pair"), self.names("second"), strict=True))
        # A scale's name -> the name of the argument that is its array.
        self.scales = {name: f"{name}_tensor" for name in self.names(*SCALES)}
        # The name of a list of parts, which is that of its first -> the name of the others.
        self.later = {name: f"{name}_later" for name in self.names("parts")}
        # The option that asks for more results, or the array that does so where it is given.
        self.ask = next(iter(self.names("ask", "asking input")), None)
        self.asks_by_array = self.ask is not None and self.rows[self.ask] == "asking input"
        self.written = next(iter(self.names("input and output")), None)

    def names(self, *kinds: str) -> list[str]:
        """The rows of these kinds, in the table's order."""
        return [name for name, kind in self.rows.items() if kind in kinds]

    def asks(self, values: Mapping[str, Any]) -> bool:
        """Whether a call with these arguments asks for more results."""
        if self.ask is None:
            return False
        asking = values[self.ask]
        return asking is not None if self.asks_by_array else bool(asking)

    def results(self, values: Mapping[str, Any]) -> dict[str, _results.Result]:
        """Shape and dtype of each result that a call with these arguments may have."""
        return self.rules.results(values)

    def maybe_writes(self, values: Mapping[str, Any]) -> bool:
        """Whether a call writes its arrays of kind "input, maybe output", as its table in C says:
        where it has the first optional input."""
        return values[self.names("optional input")[0]] is not None

    def part(self, values: dict[str, Any]) -> dict[str, Any]:
        """The arguments with pairs split in two, where the second is None if one array is given,
        with scales split into a number and an array or None, with lists of parts split into the
        first and a list of the others, or None if one array is given, and with dtypes as names."""
        for first, second in self.pair.items():
            given = values[first]
            is_pair = isinstance(given, (tuple, list))
            values = values | {first: given[0] if is_pair else given}
            values[second] = given[1] if is_pair else None
        for number, array in self.scales.items():
            given = values[number]
            # A symbolic number of a compiler is a float here, and nothing more.
            is_array = given is not None and not isinstance(given, (int, float, numbers.Number))
            values = values | {
                number: 1.0 if is_array else given,
                array: given if is_array else None,
            }
        for first, later in self.later.items():
            given = values[first]
            is_list = isinstance(given, (tuple, list))
            if is_list and not given:  # results are made like the first part
                raise ValueError(f"{self.name}: `{first}` must have 1 to 64 parts, got 0")
            values = values | {
                first: given[0] if is_list else given,
                later: list(given[1:]) if is_list else None,
            }
        for name in self.names("floats"):
            values = values | {name: _results.dtype_name(values[name])}
        return values

    def join(self, values: dict[str, Any]) -> dict[str, Any]:
        """The inverse of `part`."""
        values = dict(values)
        for first, second in self.pair.items():
            rest = values.pop(second, None)
            if rest is not None:
                values[first] = (values[first], rest)
        for number, array in self.scales.items():
            given = values.pop(array, None)
            if given is not None:
                values[number] = given
        for first, later in self.later.items():
            rest = values.pop(later, None)
            if rest is not None:
                values[first] = [values[first], *rest]
        return values

    def expose(
        self, call: Callable[[dict[str, Any]], Any], left_out: tuple[str, ...], module: str
    ) -> Callable[..., Any]:
        """Makes a function with the operator's signature, without parameters of kinds `left_out`.

        The function passes all its arguments to `call`, by their names.
        """
        parameters = [p for name, p in self.parameters.items() if self.rows[name] not in left_out]
        signature = self.signature.replace(parameters=parameters)
        known = {p.name for p in parameters}
        defaults = {name: x for name, x in self.defaults.items() if name in known}
        required = known - set(defaults)
        positional = [n for n in self.positional if n in known]

        def function(*args: Any, **kwargs: Any) -> Any:
            kwargs = rename(kwargs, known)
            given = dict(zip(positional, args, strict=False)) | kwargs
            fits = len(given) == len(args) + len(kwargs)
            if not (fits and all(n in known for n in kwargs) and all(n in given for n in required)):
                signature.bind(*args, **kwargs)  # raises a TypeError in Python's words
            values = defaults | given
            return call(values)

        function.__name__ = function.__qualname__ = self.name
        function.__module__ = module
        vars(function)["__signature__"] = signature
        document(function, self.operator, module.rpartition(".")[2])
        return function
