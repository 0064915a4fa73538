"""What sparse_mla.integrations.jax refuses: while a program is traced, or when it runs."""

import inspect

import cases
import numpy as np
import pytest
from jax_calls import CALLS, jitted, moved, plain

import sparse_mla

pytestmark = pytest.mark.jax


@pytest.mark.parametrize("op", CALLS)
def test_errors_have_the_direct_call_s_text(place, smla, op):
    """The last array has a wrong dtype."""
    call = plain(op)
    name = list(call.arrays())[-1]
    call.set(name, call.get(name).astype(np.int16))
    with pytest.raises(TypeError) as caught:
        call.run(sparse_mla)
    for key, x in call.arrays().items():
        call.set(key, place.put(x))
    call.args.pop("workspace_buffer", None)
    arrays, run = jitted(place.module, getattr(smla, op), call)
    with pytest.raises(RuntimeError) as failed:
        place.module.block_until_ready(run(arrays))
    text = str(caught.value).removesuffix(" (ml_dtypes.bfloat16 in NumPy)")  # a hint of NumPy's own
    assert text in str(failed.value)
    assert "INVALID_ARGUMENT" in str(failed.value)


def test_bad_values_are_reported_and_nothing_is_written(place, smla):
    call = moved("concat_and_cache_mla", place)
    call.args["slot_mapping"] = call.args["slot_mapping"].at[1].set(12)
    arrays, run = jitted(place.module, smla.concat_and_cache_mla, call)
    with pytest.raises(RuntimeError, match=r"concat_and_cache_mla: `slot_mapping` must .*12"):
        place.module.block_until_ready(run(arrays))
    assert not np.asarray(arrays["kv_cache"]).any()


@pytest.mark.parametrize(
    ("op", "name", "value"),
    [
        ("sparse_attention", "num_splits", 65),
        ("sparse_attention", "num_splits", -1),
        ("sparse_attention", "num_splits", 2**32 + 1),
        ("sparse_attention", "kv_format", "bfloat16"),
        ("sparse_attention", "kv_format", "fp8"),
        ("concat_and_cache_mla", "kv_cache_dtype", "auto"),
        ("convert_req_index_to_global_index", "block_size", 0),
    ],
)
def test_bad_options_are_reported(place, smla, op, name, value):
    call = plain(op)
    call.kwargs[name] = value
    with pytest.raises((TypeError, ValueError, OverflowError), match=f"{op}: `"):
        call.run(sparse_mla)
    call = moved(op, place)
    call.kwargs[name] = value
    with pytest.raises(RuntimeError, match=rf"INVALID_ARGUMENT.*{op}: `\w+` must .*, got"):
        place.module.block_until_ready(call.run(smla))


@pytest.mark.parametrize("op", CALLS)
def test_options_of_zero_are_refused_as_by_calls(place, smla, op):
    """0 is no None to a size and no scale, and a float is no int."""
    names = inspect.signature(getattr(smla, op)).parameters
    given = plain(op)
    for name, kind in getattr(sparse_mla, op).table:
        zeros = (0, 0.0) if kind in ("size", "scale", "scale or none") else (1.5,)
        if name not in names or (kind not in ("int", "int32") and zeros == (1.5,)):
            continue
        for zero in zeros:
            with pytest.raises((TypeError, ValueError)) as caught:
                getattr(sparse_mla, op)(**(given.args | given.kwargs | {name: zero}))
            call = moved(op, place)
            with pytest.raises((TypeError, RuntimeError)) as failed:
                arguments = call.args | call.kwargs | {name: zero}
                place.module.block_until_ready(getattr(smla, op)(**arguments))
            assert str(caught.value) in str(failed.value)


def test_a_rank_without_a_result_is_refused_while_tracing(place, smla):
    call = moved("sparse_attention", place)
    call.args["q"] = call.args["q"][0]
    with pytest.raises(ValueError, match="sparse_attention: `q` must have 3 dimensions, got 2"):
        call.run(smla)


def test_options_are_fixed_when_tracing(place, smla):
    jax, call = place.module, moved("sparse_attention", place)
    run = jax.jit(lambda scale: smla.sparse_attention(*call.args.values(), softmax_scale=scale))
    rule = r"`softmax_scale` must be a Python value, got a traced array: .*static_argnames="
    with pytest.raises(TypeError, match=f'sparse_attention: {rule}"softmax_scale"'):
        run(0.04)
    for option in ("num_splits", "return_max_logits"):
        run = jax.jit(smla.sparse_attention, static_argnames="softmax_scale")
        with pytest.raises(TypeError, match=f'static_argnames="{option}"'):
            run(*call.args.values(), softmax_scale=0.04, **{option: 1})
    static = jax.jit(smla.sparse_attention, static_argnames="softmax_scale")
    static(*call.args.values(), softmax_scale=0.04)
    run = jax.jit(lambda lens, rank: smla.cp_local_lengths(lens, cp=(rank, 2, 4)))
    with pytest.raises(
        TypeError, match=r"`cp` must be a Python value, got a traced .* jax.lax.switch"
    ):
        run(call.args["indices"][0], 1)


@pytest.mark.parametrize(
    ("attributes", "text"),
    [
        ({"operator": "no_such_thing", "present": 0b101}, "`operator` must name an operator"),
        ({"present": 0b101}, "`operator` must name an operator"),
        ({"operator": "k_up_proj"}, "`present` must be a 64-bit scalar"),
        ({"operator": "k_up_proj", "present": 0b001}, "`present` must name the 2 arrays"),
        ({"operator": "k_up_proj", "present": 0b111}, "`present` must name the 2 arrays"),
        ({"operator": "k_up_proj", "present": 0b1101}, "`present` must name the 2 arrays"),
        ({"operator": "k_up_proj", "present": -1}, "`present` must name the 2 arrays"),
        ({"operator": "k_up_proj", "present": 0b101}, "`W_UK` must be given, got none"),
        ({"operator": "sparse_attention", "present": 0b101}, "`softmax_scale` must be a 64-bit"),
        ({"operator": "sparse_attention", "present": 1 << 63}, "`present` must name the 2 arrays"),
    ],
)
def test_call_sites_of_another_making(place, smla, attributes, text):
    """Call sites that the package did not make: the handler checks every attribute."""
    jax = place.module
    x = place.put(cases.random_bf16(np.random.default_rng(1), 2, 4, 16))
    if "present" in attributes:
        attributes = attributes | {"present": np.uint64(attributes["present"] % 2**64).view("i8")}
    call = jax.ffi.ffi_call("sparse_mla", jax.ShapeDtypeStruct((2, 4, 512), "bfloat16"))
    with pytest.raises(RuntimeError, match=text):
        jax.block_until_ready(call(x, **attributes))
