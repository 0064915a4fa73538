"""Config and Backend of DeepSeek-V3.2 (csrc/step/plans/plan_v32.c): each option from both sides of
its limits, and what Backend tells an engine."""

import re

import engine
import library
import numpy as np
import pytest
from library import sparse_mla

ALL_PATHS = ["mixed", "separate", "bf16", "direct"]


# --- Config --------------------------------------------------------------------------------------

BAD_CONFIGS = [
    (ValueError, {"num_heads": 0}),
    (ValueError, {"num_heads": 129}),
    (ValueError, {"kv_cache_dtype": "fp7"}),
    (ValueError, {"block_size": 0}),
    (ValueError, {"topk_tokens": 0}),
    (ValueError, {"max_num_seqs": 0}),
    (ValueError, {"max_num_batched_tokens": -1}),
    (ValueError, {"max_model_len": 0}),
    (ValueError, {"decode_threshold": 0}),
    (ValueError, {"path": "fastest"}),
    (ValueError, {"path": "bf16"}),
    (ValueError, {"path": "mixed", "kv_cache_dtype": "bfloat16"}),
    (ValueError, {"path": "separate", "kv_cache_dtype": "bfloat16"}),
    (ValueError, {"path": "direct", "kv_cache_dtype": "bfloat16"}),
    (ValueError, {"kv_lora_rank": 256}),
    (ValueError, {"device": "tpu"}),
    (TypeError, {"max_num_seqs": "many"}),
    (TypeError, {"softmax_scale": "0.1"}),
    (TypeError, {"no_such_option": 1}),
]


@pytest.mark.parametrize(("error", "options"), BAD_CONFIGS, ids=lambda x: str(x))
def test_bad_configs(error, options):
    with pytest.raises(error) as info:
        sparse_mla.MetadataBuilder(engine.config(sparse_mla, **options))
    name, value = next(iter(options.items()))
    wrong = type(value).__name__ if error is TypeError else repr(value)
    if name in sparse_mla.Config.__dataclass_fields__:
        assert re.fullmatch(rf"Config: `{name}` must .*, got {wrong}", str(info.value))
    else:
        assert f"'{name}'" in str(info.value)


BOUNDS = {
    "num_heads": (1, 128),
    "kv_lora_rank": (512, 512),
    "qk_rope_head_dim": (64, 64),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "block_size", "topk_tokens"), (1, None)),
    **dict.fromkeys(("max_num_seqs", "max_num_batched_tokens", "max_model_len"), (1, None)),
    **dict.fromkeys(("decode_threshold", "min_heads_for_bf16_prefill"), (1, None)),
    "prefill_workspace_tokens": (1, None),
}
CONFIG = {"num_heads": 16, "softmax_scale": 0.5, "max_num_seqs": 4}
CONFIG |= {"max_num_batched_tokens": 64, "max_model_len": 100}


@pytest.mark.parametrize("name", BOUNDS)
def test_each_limit_of_a_config_from_both_sides(name):
    least, most = BOUNDS[name]
    for good in (least, np.int64(least), most or 1 << 40):
        value = getattr(sparse_mla.Config(**CONFIG | {name: good}), name)
        assert (value, type(value)) == (good, int)
    rule = {least: str(least), None: f"at least {least}"}.get(most, f"{least} to {most}")
    for bad in (least - 1, 0, -1, *([most + 1] if most else [])):
        with pytest.raises(ValueError, match=f"^Config: `{name}` must be {rule}, got {bad}$"):
            sparse_mla.Config(**CONFIG | {name: bad})
    for bad in (1.0, "1", np.zeros(2), *([] if name == "prefill_workspace_tokens" else [None])):
        text = f"^Config: `{name}` must be an int, got {type(bad).__name__}$"
        with pytest.raises(TypeError, match=text):
            sparse_mla.Config(**CONFIG | {name: bad})


def test_other_options_of_a_config_from_both_sides():
    def make(**changes):
        return sparse_mla.Config(**CONFIG | changes)

    for scale in (0, -1.5, np.float32(0.25), 3):
        value = make(softmax_scale=scale).softmax_scale
        assert (value, type(value)) == (scale, float)
    for bad in (float("inf"), float("-inf"), float("nan")):
        with pytest.raises(ValueError, match=f"^Config: `softmax_scale` must be finite, got {bad}"):
            make(softmax_scale=bad)
    for bad in ("1", None, [1.0], 1j):
        with pytest.raises(TypeError, match=r"^Config: `softmax_scale` must be a float, got "):
            make(softmax_scale=bad)
    for name in ("cpu", "cuda", "cuda:0", "cuda:12"):
        assert make(device=name).device == name
    for bad in ("", "CPU", "cpu:0", "cuda:", "cuda:x", "cuda:1 ", " cuda", "cuda:-1", 0, None):
        with pytest.raises(
            ValueError, match=r"^Config: `device` must be 'cpu', 'cuda' or 'cuda:N'"
        ):
            make(device=bad)
    served = {"auto": {"bf16"}, "bfloat16": {"bf16"}}
    served["fp8_ds_mla"] = {"mixed", "separate", "direct"}
    for dtype, paths in served.items():
        for path in (*ALL_PATHS, None):
            if path is None or path in paths:
                assert make(kv_cache_dtype=dtype, path=path).path == path
                continue
            names = " or ".join(f"'{x}'" for x in ALL_PATHS if x in paths)
            rule = f"must be {names} for a {dtype} cache, got '{path}'"
            with pytest.raises(ValueError, match=f"^Config: `path` {rule}$"):
                make(kv_cache_dtype=dtype, path=path)
    for name in ("kv_cache_dtype", "path"):
        for bad in ("", 0, False, "fp8", "BF16"):
            with pytest.raises(ValueError, match=f"^Config: `{name}` must be .*, got "):
                make(**{name: bad})
    with pytest.raises(ValueError, match=r"`kv_cache_dtype` must be .* got None"):
        make(kv_cache_dtype=None)


def test_required_config_arguments():
    with pytest.raises(TypeError, match=r"4 required keyword-only arguments: 'softmax_scale'"):
        sparse_mla.Config(16)
    with pytest.raises(TypeError, match=r"3 required keyword-only arguments: 'max_num_seqs'"):
        sparse_mla.Config(16, softmax_scale=1.0)


def test_config_defaults():
    config = sparse_mla.Config(
        128, softmax_scale=0.1, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=1000
    )
    want = {
        "num_heads": 128,
        "softmax_scale": 0.1,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "kv_cache_dtype": "auto",
        "block_size": 64,
        "topk_tokens": 2048,
        "decode_threshold": 1,
        "min_heads_for_bf16_prefill": 32,
        "path": None,
        "device": "cpu",
    }
    assert {name: getattr(config, name) for name in want} == want
    assert config.prefill_workspace_tokens is None
    text = repr(config)
    assert text.startswith("Config(")
    assert "128" in text


# --- Backend -------------------------------------------------------------------------------------


def value_of(x):
    """A fact of the Backend, which may be an attribute or a static method."""
    return x() if callable(x) else x


def test_backend_describes_itself():
    backend = sparse_mla.Backend
    assert value_of(getattr(backend, "name", None) or backend.get_name) == "SPARSE_MLA"
    assert [str(x).split(".")[-1] for x in value_of(backend.supported_dtypes)] == ["bfloat16"]
    formats = list(value_of(backend.supported_kv_cache_dtypes))
    assert {"auto", "bfloat16", "fp8_ds_mla"} <= set(formats)
    assert list(value_of(backend.supported_head_sizes)) == [576]
    assert value_of(backend.is_mla) is True
    assert value_of(backend.is_sparse) is True
    assert value_of(backend.accept_output_buffer) is True
    assert value_of(backend.cudagraph_support) == "UNIFORM_BATCH"
    assert backend.get_builder_cls() is library.package.MetadataBuilder
    assert backend.get_impl_cls() is library.package.SparseMLA


@pytest.mark.parametrize(("cuda", "has_cuda"), [("13.0.88 from PATH", True), ("none: off", False)])
def test_compute_capabilities(monkeypatch, cuda, has_cuda):
    monkeypatch.setattr(library.package._C, "build_info", lambda: {"cuda": cuda})
    for capability, is_new in (((7, 5), False), ((8, 0), True), ((8, 6), True), ((9, 0), True)):
        supported = library.package.Backend.supports_compute_capability(*capability)
        assert supported is (has_cuda and is_new), capability


@pytest.mark.parametrize(("name", "width"), [("auto", 576), ("bfloat16", 576), ("fp8_ds_mla", 656)])
def test_kv_cache_shape(name, width):
    shape = sparse_mla.Backend.get_kv_cache_shape
    assert tuple(shape(7, 64, cache_dtype_str=name)) == (7, 64, width)
    assert tuple(shape(7, 1, 1, 576, name)) == (7, 1, width)


def test_kv_cache_shape_defaults_and_errors():
    shape = sparse_mla.Backend.get_kv_cache_shape
    rules = {"num_kv_heads": "1", "head_size": "576"}
    rules["cache_dtype_str"] = "'auto' or 'bfloat16' or 'fp8_ds_mla'"
    for name, rule in rules.items():
        for bad in (0, -1, 2, 575, 577, "", None):
            text = f"^Backend.get_kv_cache_shape: `{name}` must be {rule}, got {bad!r}$"
            with pytest.raises(ValueError, match=text):
                shape(7, 64, **{name: bad})
    assert tuple(shape(7, 64)) == (7, 64, 576)
    with pytest.raises(ValueError, match=r"cache_dtype_str"):
        shape(7, 64, cache_dtype_str="int4")
    with pytest.raises(ValueError, match=r"num_kv_heads"):
        shape(7, 64, num_kv_heads=2)
    with pytest.raises(ValueError, match=r"head_size"):
        shape(7, 64, head_size=512)
