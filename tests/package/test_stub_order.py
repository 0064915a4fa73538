"""The order of positional-only parameters in sparse_mla/_C.pyi, against what the C code does with
each place: the name in its errors, and the variables that it parses arguments into. The stub and
`__text_signature__` are both written by hand, so that they may agree on a wrong order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_stub import CALLED, CALLS, declaration

SOURCES = "\n".join(
    path.read_text() for path in sorted((Path(__file__).parents[2] / "csrc/python").rglob("*.c"))
)
# What C calls a parameter whose name it cannot have, by the function.
OTHER_NAMES = {
    "Step": {"name": "plan", "0": "workspace", "1": "up_workspace"},
    "new_array": {"dims": "shape", "dtype_name": "dtype"},
}


def parameters_of(name: str) -> list[str]:
    return [x.arg for x in declaration(name).args.posonlyargs if x.arg not in ("self", "cls")]


def parsed(name: str) -> list[str]:
    """The variables that PyArg_ParseTuple fills for a function, in its order."""
    found = re.search(rf'PyArg_ParseTuple\(args, "[^"]*:{name}",(.*?)\)\)? *[{{|&]', SOURCES, re.S)
    if not found:
        return []
    names = [re.findall(r"\w+", x)[-1] for x in found[1].split(",") if "Type" not in x]
    return [OTHER_NAMES.get(name, {}).get(x, x) for x in names]


def named_in_error(name: str, i: int) -> str | None:
    """The parameter that the error names when the argument at a place is of no use."""
    call, args = CALLS[name]
    known = parameters_of(name)
    for bad in (object(), "x", -1, 2**70):
        try:
            call(*args[:i], bad, *args[i + 1 :])
        except (TypeError, ValueError, OverflowError) as error:
            named = [x for x in re.findall(r"`(\w+)`", str(error)) if x in known]
            if named:
                return named[0]
    return None


SEVERAL = [name for name in CALLED if len(parameters_of(name)) > 1]


@pytest.mark.parametrize("name", SEVERAL)
def test_places_are_those_of_the_names(name):
    """At most one parameter is named by nothing: it has the place that is left."""
    known = parameters_of(name)
    variables = parsed(name)
    if variables:
        assert variables == known, f"sparse_mla/_C.pyi, {name}: C parses {variables}"
        return
    named = [named_in_error(name, i) for i in range(len(known))]
    for place, (want, got) in enumerate(zip(known, named, strict=True)):
        assert got in (want, None), f"sparse_mla/_C.pyi, {name}: C names argument {place} `{got}`"
    assert named.count(None) <= 1, f"{name}: {named}"


def test_functions_with_several_parameters_are_found():
    assert len(SEVERAL) >= 11, SEVERAL
    assert sum(bool(parsed(name)) for name in SEVERAL) == 4
