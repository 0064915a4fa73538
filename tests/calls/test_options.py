"""Options without a meaning: sizes of 0 and below, numbers that are none, unknown names, and scales
of the wrong form. Each is a ValueError or TypeError that names the option.

The options are drawn from the operators' tables, from the fields of the configs and from the
annotations of the other functions, so that a new option is tried without a line here.
"""

from __future__ import annotations

import dataclasses
import inspect
import math

import numpy as np
import operators
import pytest
from library import sparse_mla as moved

import sparse_mla

LEAST = -(2**63)
SIZES = (0, -1, -2, -(2**31), LEAST)
# How many integers an option of a kind is.
INTEGERS = {
    **dict.fromkeys(("int", "int32", "size", "count or none", "hint"), 1),
    "two ints": 2,
    "three ints or none": 3,
}
# Sizes of 0 and below that do mean something, by the option's name. All others are refused.
ZEROS = (
    *("num_splits", "attention_chunk", "cp", "max_seqlen_q", "max_seqlen_k", "offset", "M", "N"),
    *("prefill_tokens_with_context", "topk", "extra_topk", "num_tokens", "num_keys"),
    "max_context",
)
MEANT = {name: {0} for name in ZEROS} | {
    "window_size": {0, -1},
    "group": {-1},
    "input_group": {-1},
}


def make_call(op: str, *, with_results: bool) -> dict:
    """The arguments of a good call, by name."""
    if op == "attention_workspace_size":
        return {"num_tokens": 1, "num_heads": 1, "topk": 1, "device": "cpu"}
    if op == "lightning_indexer_workspace_size":
        return {"num_tokens": 1, "max_context": 9, "k": 1, "device": "cpu"}
    call = operators.FRAMEWORK_CALLS[op]()
    kept = call.kwargs
    if not with_results and op not in operators.WRITTEN:
        kept = {name: x for name, x in kept.items() if name not in operators.RESULTS}
    return call.args | kept


def scaled_call(op: str, name: str, value) -> dict:
    """A call with another scale. Queries by a scale are e4m3, which the call makes by itself."""
    options = make_call(op, with_results=True) | {name: value}
    if name == "q_scale_inv":
        del options["q_out"]
    return options


def options_of(*kinds: str) -> list[tuple[str, str, str]]:
    """Operator, option and kind, for all options of some kinds."""
    return [
        (op, name, kind)
        for op in operators.FACTS
        for name, kind in getattr(sparse_mla, op).table
        if kind in kinds
    ]


def refused(text: str, name: str, call, *errors) -> None:
    """A refusal begins with the operator and tells of the option."""
    with pytest.raises(errors or ValueError) as info:
        call()
    assert str(info.value).startswith(text), str(info.value)
    assert f"`{name}`" in str(info.value), str(info.value)


# --- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_results", [True, False])
@pytest.mark.parametrize(("op", "name", "kind"), options_of(*INTEGERS))
def test_sizes_of_operators(op, name, kind, with_results):
    count = INTEGERS[kind]
    for value in SIZES:
        for i in range(count):
            options = make_call(op, with_results=with_results)
            if count == 1:
                options[name] = value
            else:
                options[name] = tuple(value if i == j else 1 for j in range(count))
            run = lambda options=options: getattr(sparse_mla, op)(**options)  # noqa: E731
            if value not in MEANT.get(name, ()):
                refused(f"{op}: `", name, run)
                continue
            try:
                run()
            except ValueError as error:  # the other arguments do not fit such a size
                assert str(error).startswith(f"{op}: `")


LIMITS = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 16}
CONFIGS = {
    "v32": (sparse_mla.Config, sparse_mla.MetadataBuilder),
    "dense": (sparse_mla.dense.Config, sparse_mla.dense.MetadataBuilder),
    "v4": (sparse_mla.v4.Config, sparse_mla.v4.MetadataBuilder),
}


NO_ROPE = ("dense", "qk_rope_head_dim")


def integer_fields() -> list[tuple[str, str]]:
    return [
        (model, field.name)
        for model, (config, _) in CONFIGS.items()
        for field in dataclasses.fields(config)
        if "int" in str(field.type)
    ]


def changed_config(model: str, name: str, value):
    """Makes a builder of a config with one other value."""
    config, builder = CONFIGS[model]
    options = {"num_heads": 2, "softmax_scale": 0.1, **LIMITS, name: value}
    return builder(config(options.pop("num_heads"), **options))


@pytest.mark.parametrize("value", SIZES)
@pytest.mark.parametrize(("model", "name"), integer_fields())
def test_sizes_of_configs(model, name, value):
    values = [value]
    if name == "compress_ratios":
        values = [(value,), (4, value)]
    if name == "state_block_sizes":
        values = [{4: value}, {4: 4, 128: value}, {value: 4}]
    if name == "cp":
        values = [(0, value, 1), (0, 2, value), (value or -1, 2, 1)]
    for one in values:
        if value == 0 and (name == "compress_ratios" or (model, name) == NO_ROPE):
            changed_config(model, name, one)  # a layer of the window alone, keys without RoPE
        else:
            refused("", name, lambda one=one: changed_config(model, name, one))


# Good calls of the functions that have an option of the type `int` and are no operators.
STARTS = np.array([0, 1, 3], np.int32)
FUNCTIONS = {
    "split_kv_b_proj": {
        "weight": np.zeros((512, 12), np.float32),
        "num_heads": 2,
        "qk_nope_head_dim": 4,
        "v_head_dim": 2,
    },
    "mla_softmax_scale": {"qk_head_dim": 192},
    "rope_table": {"max_pos": 4, "R": 64},
    "get_context_workspace_size": {"max_model_len": 64, "max_num_seqs": 2, "block_size": 16},
    "get_prefill_workspace_size": {"max_model_len": 64},
    "local_attention_batches": {
        "query_start_loc": STARTS,
        "seq_lens": [5, 6],
        "block_table": [[0, 1, 2], [3, 4, 5]],
        "attention_chunk": 4,
        "block_size": 2,
    },
    "reorder_batch": {"num_scheduled_tokens": [1, 2], "decode_threshold": 1},
    "split_context_chunks": {"context_lens": [5, 6], "workspace_tokens": 16, "block_size": 4},
    "split_decodes_and_prefills": {
        "query_start_loc": STARTS,
        "num_actual_tokens": 3,
        "decode_threshold": 1,
    },
    "split_prefill_chunks": {"seq_lens": [5, 6], "workspace_tokens": 16},
}
# Arguments for which a size of 0 is enough.
NOTHING = {"split_prefill_chunks": {"seq_lens": [0, 0]}}


def integer_options() -> list[tuple[str, str]]:
    """Functions and their options of the type `int`."""
    return [
        (name, option)
        for name in sparse_mla.__all__
        if inspect.isfunction(function := getattr(sparse_mla, name))
        and not hasattr(function, "table")
        for option, parameter in inspect.signature(function).parameters.items()
        if str(parameter.annotation).split(" | ")[0] == "int"
    ]


@pytest.mark.parametrize("value", SIZES)
@pytest.mark.parametrize(("function", "name"), integer_options())
def test_sizes_of_functions(function, name, value):
    call, good = getattr(sparse_mla, function), FUNCTIONS[function]
    call(**good)
    if (function, name, value) in {
        ("get_prefill_workspace_size", "max_model_len", 0),
        ("rope_table", "max_pos", 0),
        ("split_prefill_chunks", "workspace_tokens", 0),
    }:
        call(**good | {name: value} | NOTHING.get(function, {}))
    else:
        refused(f"{function}: `", name, lambda: call(**good | {name: value}))


# --- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("op", "name", "kind"), options_of("float", "scale", "scale or none"), ids=str
)
def test_numbers_that_are_none(op, name, kind, value):
    options = scaled_call(op, name, value)
    refused(f"{op}: `{name}` must ", name, lambda: getattr(sparse_mla, op)(**options))


@pytest.mark.parametrize("value", [0.0, -1.0, 1e-39])
@pytest.mark.parametrize(("op", "name", "kind"), options_of("scale", "scale or none"), ids=str)
def test_scales_that_are_no_scales(op, name, kind, value):
    options = scaled_call(op, name, value)
    refused(f"{op}: `{name}` must ", name, lambda: getattr(sparse_mla, op)(**options))


@pytest.mark.parametrize(("op", "name", "kind"), options_of("scale", "scale or none"), ids=str)
def test_arrays_that_are_no_scales(op, name, kind):
    call = getattr(sparse_mla, op)
    for array in (
        np.ones(3, np.float32),
        np.ones(0, np.float32),
        np.ones(1, np.float64),
        np.ones(1, np.int32),
    ):
        run = lambda array=array: call(**scaled_call(op, name, array))  # noqa: E731
        refused(f"{op}: `{name}` must ", name, run, ValueError, TypeError)


@pytest.mark.parametrize(
    "op", ["fused_q_kv_rmsnorm", "fused_qnorm_rope_kv_insert", "compress_norm_rope_store"]
)
def test_an_eps_is_checked_as_the_float_that_is_used(op):
    """Between 0 and the least normal float32 it would be 0 in some modes of the processor."""
    for eps in (5e-324, 1e-46, 1e-40, np.nextafter(2.0**-126, 0) * (1 - 2.0**-24)):
        call = operators.GOOD_CALLS[op]()
        call.set("eps", float(eps))
        with pytest.raises(ValueError, match="eps") as info:
            call.run(moved)
        rule = "`eps` must be 0 or a normal float32 (at least 1.17549e-38)"
        assert str(info.value) == f"{op}: {rule}, got {eps:g}"
    for eps in (0.0, -0.0, 2.0**-126, np.nextafter(2.0**-126, 0)):  # the last one is rounded up
        call = operators.GOOD_CALLS[op]()
        call.set("eps", float(eps))
        call.run(moved)


# --- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "name", "kind"), options_of("kv_format", "floats", "scales", "device")
)
def test_names_that_nobody_knows(op, name, kind):
    call = getattr(sparse_mla, op)
    for value in ("tpu", "", "bfloat16 ", "cuda:x"):
        options = make_call(op, with_results=True) | {name: value}
        text = f"{op}: `{name}` must "
        refused(text, name, lambda options=options: call(**options), ValueError, TypeError)
