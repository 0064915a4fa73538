"""Good calls of the operators that sparse_mla.integrations.jax has, with JAX's arrays."""

import operators

CALLS = operators.FRAMEWORK_CALLS


def plain(op: str) -> operators.Call:
    """A good call without arrays for results, so that the results are new."""
    call = CALLS[op]()
    for name in operators.RESULTS:
        if name not in operators.WRITTEN.get(op, ()):
            call.kwargs.pop(name, None)
    return call


def moved(op: str, place) -> operators.Call:
    call = plain(op)
    for name, x in call.arrays().items():
        call.set(name, place.put(x))
    call.args.pop("workspace_buffer", None)  # JAX's functions do not take it
    return call


def split_options(call: operators.Call) -> tuple[dict, dict]:
    """(arrays, options): the arguments of a program, and the values that are fixed in it."""
    given = {**call.args, **call.kwargs}
    arrays = {name: x for name, x in given.items() if hasattr(x, "shape")}
    return arrays, {name: x for name, x in given.items() if name not in arrays}


def jitted(jax, function, call: operators.Call, **jit_options):
    """-> the call's arrays, and a compiled program that takes them."""
    arrays, options = split_options(call)
    return arrays, jax.jit(lambda arrays: function(**arrays, **options), **jit_options)
