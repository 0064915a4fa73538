"""Pairwise tables: every value of an option meets every value of every other option in some call.

Faults of one option are found by its own tests, those of two together by a table. A family's
table, tests/<family>/test_<name>_pairs.py, lists an operator's options and their values, and makes
a call of each case that `cover` gives. The values come from the package's own facts where it has
them. `run_table` counts what the calls have given, so that a table which does not know a
parameter, or never gives it, fails: a new option cannot be forgotten.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from helpers import NO_NAN, Guarded, assert_same_bits

Case = dict[str, Any]
CANDIDATES = 6  # cases of which the one with the most new pairs is taken
# Its values belong to a device, so tests/arrays and tests/calls give it.
ELSEWHERE = {"stream"}


# --- cases ---------------------------------------------------------------------------------------


class Cover:
    """The search for cases. A case is a dict: option -> the number of its value."""

    def __init__(self, options: Mapping[str, Sequence[Any]], rules: Sequence[Callable]) -> None:
        self.options = {name: list(values) for name, values in options.items()}
        self.rules = [(list(inspect.signature(rule).parameters), rule) for rule in rules]
        self.ruled = {name for names, _ in self.rules for name in names}
        assert self.ruled <= set(options), f"rules about unknown options: {self.ruled}"
        self.random = random.Random(len(options))
        self.left = {
            ((a, i), (b, j))
            for a, b in itertools.combinations(self.options, 2)
            for i in range(len(self.options[a]))
            for j in range(len(self.options[b]))
        }
        self.order = {name: at for at, name in enumerate(self.options)}

    def values(self, case: Mapping[str, int]) -> Case:
        return {name: self.options[name][case[name]] for name in self.options if name in case}

    def allows(self, case: Mapping[str, int]) -> bool:
        return all(
            rule(*(self.options[name][case[name]] for name in names))
            for names, rule in self.rules
            if all(name in case for name in names)
        )

    def pair(self, a: tuple[str, int], b: tuple[str, int]):
        return (a, b) if self.order[a[0]] < self.order[b[0]] else (b, a)

    def gain(self, case: Mapping[str, int], name: str, i: int) -> int:
        return sum(self.pair((name, i), other) in self.left for other in case.items())

    def complete(self, case: dict[str, int], names: list[str]) -> dict[str, int] | None:
        """The case with a value of each of the names; None if the rules allow none."""
        if not names:
            return case
        name, rest = names[0], names[1:]
        ranked = [
            (-self.gain(case, name, i), self.random.random(), i)
            for i in range(len(self.options[name]))
        ]
        for _, _, i in sorted(ranked):
            more = case | {name: i}
            found = self.complete(more, rest) if self.allows(more) else None
            if found is not None:
                return found
        return None

    def case_of(self, pair) -> dict[str, int] | None:
        """A case of this pair that has many others; None if the rules forbid the pair."""
        best, most = None, -1
        for _ in range(CANDIDATES):
            names = [name for name in self.options if name not in dict(pair)]
            self.random.shuffle(names)
            # Options of rules come first: what is forbidden shows before the others multiply it.
            names.sort(key=lambda name: name not in self.ruled)
            found = self.complete(dict(pair), names) if self.allows(dict(pair)) else None
            if found is None:
                return None
            new = len(self.left & self.pairs(found))
            if new > most:
                best, most = found, new
        return best

    def pairs(self, case: Mapping[str, int]) -> set:
        return set(itertools.combinations([(name, case[name]) for name in self.options], 2))


def cover(options: Mapping[str, Sequence[Any]], *rules: Callable[..., bool]) -> list[Case]:
    """Cases with every pair of values that the rules allow. A rule is a function of some of the
    options, by its parameters' names, and says whether their values fit each other. The same
    options give the same cases."""
    search = Cover(options, rules)
    cases = []
    for pair in sorted(search.left, key=repr):
        if pair in search.left:
            found = search.case_of(pair)
            if found is not None:
                search.left -= search.pairs(found)
                cases.append(search.values(found))
    assert cases or not options
    return cases


# --- what calls give -----------------------------------------------------------------------------


def kind_of(value: Any) -> Any:
    """What distinguishes an argument for `Spy`."""
    if hasattr(value, "__dlpack__") or hasattr(value, "__array_interface__"):
        return "array"
    if isinstance(value, tuple | list) and any(kind_of(x) == "array" for x in value):
        return "pair"
    return repr(value)


class Spy:
    """A function, and what its calls have given for each parameter."""

    def __init__(self, function: Callable[..., Any], declared: Any = None) -> None:
        self.function = function
        signature = inspect.signature(declared or function)
        self.parameters = {
            name: p for name, p in signature.parameters.items() if p.kind not in (2, 4)
        }
        self.signature = signature
        self.given: dict[str, set] = {name: set() for name in self.parameters}

    def __call__(self, *args, **kwargs):
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        for name, value in bound.arguments.items():
            if name in self.given:
                self.given[name].add(kind_of(value))
        return self.function(*args, **kwargs)

    def forgotten(self) -> list[str]:
        """What a parameter's declaration allows, and no call has given."""
        found = []
        for name, p in self.parameters.items():
            given, words = self.given[name], str(p.annotation)
            is_array = "array" in given or "Array" in words
            if p.default is not p.empty and not given - {kind_of(p.default)}:
                found.append(f"{name}: nothing but its default")
            if p.default is not p.empty and kind_of(p.default) not in given:
                found.append(f"{name}: never its default")
            if not is_array and p.default is p.empty and len(given) < 2:
                found.append(f"{name}: never another value")
            if is_array and "array" not in given:
                found.append(f"{name}: no array")
            if "tuple[" in words and is_array and "pair" not in given:
                found.append(f"{name}: no pair")
            if "float" in words and is_array and not any(is_number(x) for x in given):
                found.append(f"{name}: no number")
        return found


def is_number(kind: str) -> bool:
    try:
        return float(kind) != 1
    except ValueError:
        return False


def assert_complete(*spies: Spy, but: Sequence[str] = ()) -> None:
    """Every parameter of the functions was left out and given, in each of its forms."""
    for spy in spies:
        left = [x for x in spy.forgotten() if x.split(":")[0] not in {*ELSEWHERE, *but}]
        assert not left, f"{getattr(spy.function, 'name', spy.function)} was never given {left}"


def assert_fields_differ(configs: Sequence[Any], but: Sequence[str] = ("device",)) -> None:
    """Every field of a Config has at least two values among the configs, but for those that have
    one value only."""
    for f in dataclasses.fields(configs[0]):
        if f.name not in but and "only" not in f.metadata:
            seen = {repr(getattr(config, f.name)) for config in configs}
            assert len(seen) > 1, f"no case changes Config.{f.name}"


def run_table(cases: Sequence[Case], run: Callable[..., None], *spies: Spy, but=()) -> None:
    """Runs every case, then checks what all the calls together have given."""
    for case in cases:
        try:
            run(**case)
        except Exception as error:
            raise AssertionError(f"{error}\nin the case {case}") from error
    assert_complete(*spies, but=but)


# --- outputs -------------------------------------------------------------------------------------

# How a result is given: left out, in memory of its own, with memory between its rows, or as a part
# of every row of a wider array.
OUTPUTS = ("made", "packed", "gap", "wide")
POISON = NO_NAN  # as a number of any type, no result of these tests


class Output:
    """Memory for a result [n, ...]. `given` is the argument, None for "made"."""

    def __init__(self, how: str, shape: Sequence[int], dtype) -> None:
        self.how, self.shape, self.guarded = how, tuple(shape), None
        if how == "made":
            self.given = None
            return
        wide = list(shape)
        if how == "wide":
            wide[1] += 2
        gap = 16 if how == "gap" else 0
        self.guarded = Guarded(wide, dtype, row_gap=gap, poison=POISON)
        self.given = self.guarded.array[:, : shape[1]] if how == "wide" else self.guarded.array

    def check(self, got) -> np.ndarray:
        """What the call has returned for it, all of which must be written, and nothing else."""
        if self.guarded is None:
            assert got.shape == self.shape
            return np.asarray(got)
        assert got is self.given, "a given result must be returned as the same object"
        self.guarded.check(written=False)
        data = np.ascontiguousarray(self.given)
        if data.size:
            left = (data.view(np.uint8).reshape(-1, data.itemsize) == POISON).all(1)
            assert not left.any(), f"{left.sum()} of {left.size} elements were not written"
        if self.how == "wide":
            behind = np.ascontiguousarray(self.guarded.array[:, self.shape[1] :])
            assert (behind.view(np.uint8) == POISON).all(), "a write behind the result"
        return data


def assert_same_results(got, want, what: str = "") -> None:
    for x, y in zip(got, want, strict=True):
        assert_same_bits(np.asarray(x), np.asarray(y), what)
