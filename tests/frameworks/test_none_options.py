"""The functions of the modules for PyTorch and JAX: what is false is not taken for an option that
was left out. tests/calls/test_none.py has those of the other modules."""

import inspect

import numpy as np
import operators
import pytest
from helpers import find_framework, with_marks

from sparse_mla import ops

FALSE = (0, 0.0, False, "", (), np.int64(0))
# Kinds of options that 0 is a value of.
COUNTS = ("count or none", "hint", "stream")


@pytest.mark.parametrize("framework", with_marks("torch", "jax"))
@pytest.mark.parametrize("op", operators.FRAMEWORK_CALLS)
def test_what_is_false_is_not_taken_for_none(op, framework):
    found = find_framework(framework)
    module = __import__(f"sparse_mla.integrations.{framework}", fromlist=["x"])
    if op not in module.__all__:
        pytest.skip(f"{op} is not there")
    function, call = getattr(module, op), operators.FRAMEWORK_CALLS[op]()
    kinds = dict(ops.OPERATORS[op].table)

    def put(x):
        if isinstance(x, tuple):
            return tuple(map(put, x))
        return found.put(x) if isinstance(x, np.ndarray) else x

    given = {name: put(x) for name, x in (call.args | call.kwargs).items()}
    taken = inspect.signature(function).parameters
    given = {name: x for name, x in given.items() if name in taken}
    for name, parameter in taken.items():
        if parameter.default is None and kinds.get(name) not in COUNTS:
            for value in FALSE:
                with pytest.raises((TypeError, ValueError, RuntimeError, BufferError)):
                    function(**given | {name: value})
