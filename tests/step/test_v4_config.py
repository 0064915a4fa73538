"""Config and Backend of sparse_mla.v4: each option from both sides of its limits, and what Backend
tells an engine."""

from __future__ import annotations

import numpy as np
import pytest
from v4_plans import v4

import sparse_mla as package

LIMITS = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64}


def test_defaults_are_the_model_s():
    config = v4.Config(64, **LIMITS)
    assert config.compress_ratios == (4, 128)
    assert config.state_block_sizes == {4: 4, 128: 8}
    assert (config.window, config.topk_tokens, config.block_size) == (128, 512, 256)
    assert config.softmax_scale == 512**-0.5
    assert config.kv_cache_dtype == config.compressed_kv_cache_dtype == "fp8_v4"
    assert hash(config) == hash(v4.Config(64, **LIMITS))


@pytest.mark.parametrize("name", ["auto", "fp8", "fp8_ds_mla", "fp8_v4"])
def test_names_of_the_v4_format(name):
    config = v4.Config(8, kv_cache_dtype=name, **LIMITS)
    assert config.kv_cache_dtype == config.compressed_kv_cache_dtype == "fp8_v4"
    assert v4.Backend.get_kv_cache_shape(3, 64, cache_dtype_str=name) == (3, 64, 584)


def test_ratios_may_be_those_of_all_layers():
    config = v4.Config(8, compress_ratios=[0, 1, 128, 4, 128, 4], **LIMITS)
    assert config.compress_ratios == (4, 128)
    assert v4.Config(8, compress_ratios=[], **LIMITS).compress_ratios == ()


CONFIG_ERRORS = {
    "heads": ({"num_heads": 129}, "`num_heads` must be 1 to 128, got 129"),
    "window": ({"window": 0}, "`window` must be at least 1, got 0"),
    "ratio": ({"compress_ratios": [-1]}, "`compress_ratios` must be at least 0, got -1"),
    "five ratios": ({"compress_ratios": [2, 4, 8, 16, 32]}, "`compress_ratios` must be at most 4"),
    "block size": ({"block_size": 64}, "`block_size` must be a multiple of .* 128, got 64"),
    "state": ({"compress_ratios": [8]}, "`state_block_sizes` must have an entry for ratio 8"),
    "state size": (
        {"state_block_sizes": {4: 0, 128: 8}}, "`state_block_sizes` must be at least 1, got 0",
    ),
    "576 values": ({"kv_cache_dtype": "bf16"}, "`kv_cache_dtype` must be one of .*, got 'bf16'"),
    "fp4": ({"kv_cache_dtype": "fp4_v41"}, "`kv_cache_dtype` must be one of .*, got 'fp4_v41'"),
    "index keys": (
        {"compressed_kv_cache_dtype": "fp8_index"}, "`compressed_kv_cache_dtype` must be one of",
    ),
    "index format": ({"index_cache_dtype": "fp8_v4"}, "`index_cache_dtype` must be one of"),
    "path": ({"path": "mixed"}, "`path` must be None, 'direct' or 'separate', got 'mixed'"),
    "kv_scale": ({"kv_scale": 0.5}, "`kv_scale` must be 1 without a cache of fp8_e4m3, got 0.5"),
    "q_scale": ({"q_scale": 0.0}, "`q_scale` must be > 0, got 0.0"),
    "NaN": ({"q_scale": float("nan")}, "`q_scale` must be finite, got nan"),
    "device": ({"device": "tpu"}, "`device` must be 'cpu', 'cuda' or 'cuda:N', got 'tpu'"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIG_ERRORS)
def test_bad_configs(name):
    changes, rule = CONFIG_ERRORS[name]
    with pytest.raises(ValueError, match=f"^Config: {rule}"):
        v4.Config(**({"num_heads": 8} | LIMITS | changes))


@pytest.mark.parametrize("scale", [1e-46, 1e-40, 1e39])
@pytest.mark.parametrize("name", ["q_scale", "kv_scale"])
def test_scales_are_checked_as_the_floats_that_are_used(name, scale):
    config = v4.Config(8, **LIMITS, kv_cache_dtype="fp8_e4m3", **{name: scale})
    with pytest.raises(ValueError, match=name) as info:
        v4.MetadataBuilder(config)
    rule = f"`{name}` must be a positive normal float32, got {scale:g}"
    assert str(info.value).endswith(rule)


COUNTS = ["window", "topk_tokens", "index_n_heads", "o_groups", "swa_block_size", "max_num_seqs"]
COUNTS += ["max_num_batched_tokens", "max_model_len", "decode_threshold", "prefill_chunk_size"]


@pytest.mark.parametrize("name", ["num_heads", "block_size", *COUNTS])
def test_each_limit_of_a_config_from_both_sides(name):
    usual = {"num_heads": 8, "compress_ratios": ()} | LIMITS
    most = 128 if name == "num_heads" else None
    for good in (1, np.int64(1), most or 1 << 40):
        value = getattr(v4.Config(**usual | {name: good}), name)
        assert (value, type(value)) == (good, int)
    rule = "1 to 128" if most else "at least 1"
    for bad in (0, -1, *([129] if most else [])):
        with pytest.raises(ValueError, match=f"^Config: `{name}` must be {rule}, got {bad}$"):
            v4.Config(**usual | {name: bad})
    for bad in (1.0, None, "1"):
        with pytest.raises(TypeError, match=f"^Config: `{name}` must be an int, got "):
            v4.Config(**usual | {name: bad})


def test_other_options_of_a_config_from_both_sides():
    def make(**changes):
        return v4.Config(**{"num_heads": 8} | LIMITS | changes)

    for name in ("softmax_scale", "q_scale", "kv_scale"):
        value = getattr(make(**{name: 1}), name)
        assert (value, type(value)) == (1, float)
        for bad in (float("nan"), float("inf")):
            with pytest.raises(ValueError, match=f"^Config: `{name}` must be finite, got {bad}$"):
                make(**{name: bad})
    assert make(softmax_scale=0).softmax_scale == 0
    assert make(softmax_scale=-1).softmax_scale == -1
    for name in ("q_scale", "kv_scale"):
        for bad in (0, 0.0, -0.5):
            with pytest.raises(ValueError, match=f"^Config: `{name}` must be > 0, got "):
                make(**{name: bad, "kv_cache_dtype": "fp8_e4m3"})
    for formats in (("fp8_e4m3", "fp8_v4"), ("fp8_v4", "fp8_e4m3"), ("fp8_e4m3", None)):
        names = dict(zip(("kv_cache_dtype", "compressed_kv_cache_dtype"), formats, strict=True))
        assert make(kv_scale=0.5, **names).kv_scale == 0.5
    assert make(q_scale=0.5).q_scale == 0.5
    ratios = (2, 4, 8, 16)
    states = dict.fromkeys(ratios, 1)
    four = make(compress_ratios=iter((16, 1, 2, 0, 4, 8, 2)), state_block_sizes=states | {3: 7})
    assert four.compress_ratios == ratios
    assert four.state_block_sizes == states
    assert four.block_size == 256
    for bad in (0, None, 5, "44"):
        with pytest.raises(TypeError, match=r"^Config: `compress_ratios` must be a sequence, got "):
            make(compress_ratios=bad)
    for bad in (-1, -4):
        with pytest.raises(ValueError, match="`compress_ratios` must be at least 0"):
            make(compress_ratios=[4, bad])
    for bad in (None, [4, 4], 0, ()):
        with pytest.raises(TypeError, match=r"^Config: `state_block_sizes` must be a dict, got "):
            make(state_block_sizes=bad)
    for bad in ({}, {4: 4}, {128: 8}):
        with pytest.raises(ValueError, match="`state_block_sizes` must have an entry for ratio"):
            make(state_block_sizes=bad)
    for name in ("kv_cache_dtype", "compressed_kv_cache_dtype", "index_cache_dtype", "path"):
        for bad in ("", 0, False, "BF16"):
            with pytest.raises(ValueError, match=f"^Config: `{name}` must be .* got {bad!r}$"):
                make(**{name: bad})
    for name in ("kv_cache_dtype", "index_cache_dtype"):
        with pytest.raises(ValueError, match=f"^Config: `{name}` must be one of .* got None$"):
            make(**{name: None})
    split = make(kv_cache_dtype="bfloat16", compressed_kv_cache_dtype="auto")
    assert (split.kv_cache_dtype, split.compressed_kv_cache_dtype) == ("bfloat16", "fp8_v4")
    assert make(kv_cache_dtype="bfloat16").compressed_kv_cache_dtype == "bfloat16"
    for path in ("direct", "separate", None):
        assert make(path=path).path == path


def test_facts_from_both_sides():
    shape, get_bytes = v4.Backend.get_kv_cache_shape, v4.Backend.get_page_bytes
    rows = {"fp8_v4": 584, "bfloat16": 1024, "fp8_e4m3": 512, "fp8_index": 132, "mxfp4_index": 68}
    for name, row in rows.items():
        values = 128 if name.endswith("index") else 512
        elements = row // 2 if name == "bfloat16" else row
        assert shape(3, 8, 1, values, name) == shape(3, 8, 1, None, name) == (3, 8, elements)
        for ratio in (-1, 0, 1):
            assert shape(3, 8, 1, None, name, ratio) == (3, 8, elements)
            assert get_bytes(8, name, ratio, 1) == 8 * row
        for ratio in (2, 8):
            assert shape(3, 8, cache_dtype_str=name, compress_ratio=ratio) == (
                3, 8 // ratio, elements,
            )  # fmt: skip
            assert get_bytes(8, name, ratio, align=1) == 8 // ratio * row
        assert get_bytes(8, name) == get_bytes(8, name, 1, 576) == -(-8 * row // 576) * 576
        for bad in (0, 1, values - 1, 576, 640 - values, False):
            with pytest.raises(ValueError, match=f"`head_size` must be {values}, got {bad!r}"):
                shape(3, 8, head_size=bad, cache_dtype_str=name)
    assert get_bytes(1, "bfloat16", 1, 1024) == 1024
    assert get_bytes(1, "bfloat16", 1, 1023) == 2046
    for bad in (0, 2, -1, None):
        with pytest.raises(ValueError, match=f"`num_kv_heads` must be 1, got {bad!r}"):
            shape(3, 8, bad)
    for bad, ratio in ((0, 1), (-4, 4), (2, 4), (9, 4), (0, 0)):
        for call in (
            lambda: shape(3, bad, compress_ratio=ratio),  # noqa: B023
            lambda: get_bytes(bad, "fp8_v4", ratio),  # noqa: B023
        ):
            with pytest.raises(
                ValueError, match=rf"`block_size` must be a multiple of .* got {bad}"
            ):
                call()
    for bad in ("", "int8", None, 0):
        with pytest.raises(ValueError, match=f"`cache_dtype_str` must be one of .* got {bad!r}"):
            get_bytes(8, bad)
    for bad in (0, -1):
        with pytest.raises(ValueError, match=f"`align` must be at least 1, got {bad}"):
            get_bytes(8, "fp8_v4", 1, bad)


@pytest.mark.parametrize(
    "changes",
    [{"window": 2.5}, {"compress_ratios": 4}, {"softmax_scale": "1"}, {"state_block_sizes": [4]}],
)
def test_config_types(changes):
    with pytest.raises(TypeError, match=rf"^Config: `{next(iter(changes))}` must be"):
        v4.Config(8, **LIMITS, **changes)


def test_page_bytes_are_the_contract_s():
    get = v4.Backend.get_page_bytes
    assert get(256, "fp8_v4", 4) == 37440
    assert get(256, "fp8_v4", 128) == 1728
    assert get(256, "fp8_index", 4) == 8640
    assert get(256, "mxfp4_index", 4) == 4608
    assert get(256, "mxfp4_index", 4, 64) == 4352
    assert get(64, "fp8_v41_split", align=512) == 33792
    assert get(64, "fp4_v41_split", align=256) == 18432
    assert get(64, "bfloat16", align=1) == 64 * 1024


def test_backend_facts():
    backend = v4.Backend
    assert backend.name == "SPARSE_MLA_V4"
    assert backend.is_mla
    assert backend.is_sparse
    assert backend.supported_head_sizes == [512]
    assert not backend.supports_compute_capability(7, 5)
    assert backend.get_kv_cache_shape(5, 256, compress_ratio=128) == (5, 2, 584)
    shape = backend.get_kv_cache_shape(5, 256, 1, 128, "fp8_index", compress_ratio=4)
    assert shape == (5, 64, 132)
    assert backend.get_kv_cache_shape(5, 64, cache_dtype_str="bfloat16") == (5, 64, 512)
    assert backend.get_builder_cls() is package.v4.MetadataBuilder
    assert backend.get_impl_cls() is package.v4.SparseMLA
    for name in backend.supported_kv_cache_dtypes:
        v4.Config(8, kv_cache_dtype=name, **LIMITS)
    for bad in ({"num_kv_heads": 2}, {"head_size": 576}, {"cache_dtype_str": "int8"}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            backend.get_kv_cache_shape(5, 64, **bad)
    with pytest.raises(ValueError, match=r"`block_size` must be a multiple of .* 128, got 64"):
        backend.get_page_bytes(64, "fp8_v4", 128)
    with pytest.raises(ValueError, match="`align` must be at least 1, got 0"):
        backend.get_page_bytes(64, "fp8_v4", align=0)
