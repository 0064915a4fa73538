"""kv_format and kv_cache_dtype are one option, in every call that has either."""

import dataclasses
import inspect

import device
import numpy as np
import pytest
from helpers import find_framework, require

import sparse_mla
from sparse_mla import _C, _format_names, ops

BOTH = ("kv_format", "kv_cache_dtype")
LIMITS = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 1024}


def write(concat, **options):
    """What a call leaves in its cache."""
    cache = np.zeros((2, 64, 656), np.uint8)
    latents, rope = np.ones((1, 512), np.float32), np.ones((1, 64), np.float32)
    concat(latents, rope, cache, np.array([3]), **options)
    return cache


@pytest.mark.parametrize("name", BOTH)
def test_operators_take_either_name(name):
    want = write(sparse_mla.concat_and_cache_mla)
    got = write(sparse_mla.concat_and_cache_mla, **{name: "fp8_ds_mla"})
    assert want.any() and (got == want).all()
    rows = sparse_mla.dequantize_kv_cache(got, **{name: "fp8_ds_mla"})
    assert (rows[0, 3] == 1).all()


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("operator", ops.OPERATORS.values(), ids=ops.OPERATORS)
def test_each_operator_with_a_format_knows_both_names(operator, name):
    known = inspect.signature(operator).parameters
    if not known.keys() & BOTH:
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            operator(*[None] * 30, **{name: None})
        return
    with pytest.raises(TypeError) as error:  # a TypeError of the arrays, or of what is missing
        operator(**{name: "auto"})
    assert "unexpected" not in str(error.value)


def test_a_format_has_one_name_at_a_time():
    with pytest.raises(TypeError, match="unexpected keyword argument 'kv_format'"):
        write(sparse_mla.concat_and_cache_mla, kv_format="auto", kv_cache_dtype="auto")
    with pytest.raises(TypeError, match="unexpected keyword argument 'kv_cache_dtype'"):
        sparse_mla.dequantize_kv_cache(np.zeros(0), kv_cache_dtype="auto", kv_format="auto")


CONFIGS = {"v32": sparse_mla.Config, "v4": sparse_mla.v4.Config, "dense": sparse_mla.dense.Config}


def test_the_other_plans_have_no_format():
    formats = {plan for plan, fields in _C.CONFIG_FIELDS.items() if fields.keys() & BOTH}
    assert formats == CONFIGS.keys() == _C.CONFIG_FIELDS.keys() - {"paged"}


@pytest.mark.parametrize("plan", CONFIGS)
def test_configs_take_either_name(plan):
    make, named = CONFIGS[plan], "bfloat16"
    for name in BOTH:
        config = make(16, softmax_scale=1.0, **{name: named}, **LIMITS)
        assert (config.kv_format, config.kv_cache_dtype) == (named, named)
    assert "kv_cache_dtype='bfloat16'" in repr(config)
    assert dataclasses.replace(config, max_model_len=99).kv_format == named
    assert dataclasses.replace(config, kv_cache_dtype="auto").kv_format != named
    with pytest.raises(TypeError, match="unexpected keyword argument 'kv_format'"):
        make(16, softmax_scale=1.0, kv_format="auto", kv_cache_dtype="auto", **LIMITS)


def test_v4_takes_either_name_of_each_cache():
    given = dict(zip(_format_names.NAMES, ("bfloat16", "fp8_v4", "mxfp4_index"), strict=True))
    config = sparse_mla.v4.Config(16, **given, **LIMITS)
    for first, second in _format_names.NAMES.items():
        assert getattr(config, first) == getattr(config, second) == given[first]


@pytest.mark.torch
@pytest.mark.transformers
def test_the_runner_takes_either_name():
    require("torch")
    require("transformers")
    from sparse_mla.integrations.transformers import ModelRunner

    with pytest.raises(TypeError, match="`model` must be"):
        formats = dict.fromkeys(_format_names.NAMES, "auto")
        ModelRunner(None, num_pages=1, **formats, **LIMITS)


@pytest.mark.jax
@pytest.mark.parametrize("name", BOTH)
def test_jax_operators_take_either_name(name):
    place = find_framework("jax", "cpu")
    smla = device.import_quietly("sparse_mla.integrations.jax")
    cache = write(sparse_mla.concat_and_cache_mla)
    rows = smla.dequantize_kv_cache(place.module.numpy.asarray(cache), **{name: "fp8_ds_mla"})
    assert (np.asarray(rows)[0, 3] == 1).all()
