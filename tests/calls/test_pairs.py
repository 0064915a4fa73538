"""The pairwise tables themselves (tests/kit/pairs.py): every pair is in a case, a forgotten option
fails its table, and every operator has one in its family's folder."""

from __future__ import annotations

import dataclasses
import itertools
import re

import numpy as np
import operators
import pytest
from helpers import TESTS
from pairs import Output, Spy, assert_complete, assert_fields_differ, cover, run_table

from sparse_mla.ops._declare import Array

OPTIONS = {"a": [1, 2, 3], "b": ["x", "y"], "c": [None, 0], "d": [0.5, 1.5, 2.5, 3.5]}


def pairs_of(case: dict) -> set:
    return set(itertools.combinations(case.items(), 2))


@pytest.mark.parametrize(
    "rules",
    [
        (),
        (lambda a, b: a != 1 or b == "x",),
        (lambda b, c, d: (b, c, d) != ("y", 0, 0.5), lambda a, d: a + d != 2.5),
        # a = 3 forbids c = 0 by way of two rules, so that this pair is in no case.
        (lambda a, b: a != 3 or b == "x", lambda b, c: b != "x" or c is None),
    ],
    ids=["none", "one", "of three", "chained"],
)
def test_every_pair_that_the_rules_allow_is_in_a_case(rules):
    cases = cover(OPTIONS, *rules)
    allowed = [
        dict(zip(OPTIONS, values, strict=True)) for values in itertools.product(*OPTIONS.values())
    ]
    for rule in rules:
        names = rule.__code__.co_varnames
        allowed = [case for case in allowed if rule(*(case[name] for name in names))]
    assert all(case in allowed for case in cases)
    assert set().union(*map(pairs_of, cases)) == set().union(*map(pairs_of, allowed))
    assert len(cases) < len(allowed)
    assert cover(OPTIONS, *rules) == cases, "the same options give the same cases"


def test_rules_name_options():
    with pytest.raises(AssertionError, match="unknown options"):
        cover(OPTIONS, lambda a, e: True)


def test_a_case_that_fails_is_named():
    def run(a, b):
        assert (a, b) != (2, "y"), "the words of a check"

    with pytest.raises(AssertionError, match=r"(?s)the words of a check.*'a': 2, 'b': 'y'"):
        run_table(cover({"a": [1, 2], "b": ["x", "y"]}), run)


def operator(
    q: Array | tuple[Array, Array],
    *,
    scale: float | Array = 1.0,
    flag: bool = False,
    out: Array | None = None,
    stream: int | None = None,
) -> None:
    """A declaration as the operators have it."""


def test_options_that_no_call_gives_are_named():
    x = np.zeros(1)
    calls = {
        "q: no array": ((x, x), {}),
        "q: no pair": (x, {}),
        "scale: no number": (x, {"scale": 0.5}),
        "scale: nothing but its default": (x, {"scale": x}),
        "flag: nothing but its default": (x, {"flag": True}),
        "out: nothing but its default": (x, {"out": x}),
    }
    spy = Spy(lambda q, **options: None, operator)
    for q, options in calls.values():
        spy(q, **options)
    assert_complete(spy)
    for missing in calls:
        some = Spy(lambda q, **options: None, operator)
        for name, (q, options) in calls.items():
            if name.split(":")[0] != missing.split(":")[0]:
                some(q, **options)
        name = missing.split(":")[0]
        with pytest.raises(AssertionError, match=f"never given .*{name}"):
            assert_complete(some)


def test_an_option_that_every_call_gives_is_named():
    spy = Spy(lambda **options: None, operator)
    x = np.zeros(1)
    for q in (x, (x, x)):
        spy(q=q, scale=x, flag=True, out=x)
    assert "flag: never its default" in spy.forgotten()
    assert "out: never its default" in spy.forgotten()


def test_fields_of_a_config_that_no_case_changes_are_named():
    @dataclasses.dataclass
    class Config:
        heads: int
        path: str | None = None
        device: str = "cpu"

    assert_fields_differ([Config(1), Config(2, "mixed")])
    with pytest.raises(AssertionError, match=r"no case changes Config\.path"):
        assert_fields_differ([Config(1), Config(2)])


@pytest.mark.parametrize("how", ["packed", "gap", "wide"])
def test_outputs_see_what_is_written(how):
    result = Output(how, (3, 4, 8), np.float32)
    result.given[...] = 1
    assert (result.check(result.given) == 1).all()
    result.given[2, 3, 7] = np.frombuffer(b"\x7f" * 4, np.float32)[0]
    with pytest.raises(AssertionError, match="1 of 96 elements were not written"):
        result.check(result.given)
    if how != "packed":
        result.given[...] = 1
        memory = np.lib.stride_tricks.as_strided(
            result.given, (3, 5, 8), result.given.strides, writeable=True
        )
        memory[1, 4, 0] = 1  # this is past the row
        with pytest.raises(AssertionError, match="a write"):
            result.check(result.given)


def test_every_operator_has_a_table():
    """In the folder of its family, so that who changes it sees the table fail."""
    texts = [path.read_text() for path in sorted(TESTS.glob("*/test_*_pairs.py"))]
    for op in operators.FACTS:
        called = re.compile(rf'package\.{op}\b|"{op}"')
        assert any(map(called.search, texts)), f"{op} is in no pairwise table"
