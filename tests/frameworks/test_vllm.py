"""vLLM's plugin: vLLM's own classes, of the released wheel, with our backend behind them."""

import inspect
import os
from types import SimpleNamespace

import cases
import device
import engine
import helpers
import numpy as np
import pytest
import reference as ref
import vllm_layers
from entry_points import write_entry_point
from helpers import assert_same_bits
from library import sparse_mla
from vllm_layers import TOPK, common_of, engine_of, exact_projection, run_layer

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def vllm():
    return vllm_layers.load()


# ---- Contract ------------------------------------------------------------------------------------

PAIRS = [
    (kind, name, base)
    for kind, prefix in (("ours", "Sparse"), ("dense", "Dense"))
    for name, base in (
        (f"{prefix}MLABackend", "AttentionBackend"),
        (f"{prefix}MLAMetadataBuilder", "AttentionMetadataBuilder"),
        (f"{prefix}MLAImpl", "MLAAttentionImpl"),
    )
]


@pytest.mark.parametrize(("kind", "name", "base"), PAIRS)
def test_every_abstract_method_is_there(vllm, kind, name, base):
    ours, theirs = getattr(getattr(vllm, kind), name), getattr(vllm.backend, base)
    assert issubclass(ours, theirs)
    assert theirs.__abstractmethods__
    assert not ours.__abstractmethods__


@pytest.mark.parametrize(("kind", "name", "base"), PAIRS)
def test_signatures_take_what_vllm_passes(vllm, kind, name, base):
    """Our parameters begin with vLLM's, in order and with its defaults; more have defaults."""
    ours, theirs = getattr(getattr(vllm, kind), name), getattr(vllm.backend, base)
    shared = [
        n for n, f in vars(ours).items() if inspect.isroutine(f) or isinstance(f, staticmethod)
    ]
    shared = [n for n in shared if hasattr(theirs, n)]
    assert len(shared) >= 2
    for method in shared:
        mine = list(inspect.signature(getattr(ours, method)).parameters.values())
        wanted = list(inspect.signature(getattr(theirs, method)).parameters.values())
        for got, want in zip(mine, wanted, strict=False):
            assert (got.name, got.kind, got.default) == (want.name, want.kind, want.default)
        assert len(mine) >= len(wanted), method
        assert all(p.default is not p.empty for p in mine[len(wanted) :]), method


def test_facts(vllm):
    backend, torch = vllm.ours.SparseMLABackend, vllm.torch
    assert backend.get_impl_cls() is vllm.ours.SparseMLAImpl
    assert backend.get_builder_cls() is vllm.ours.SparseMLAMetadataBuilder
    assert (backend.is_mla(), backend.is_sparse()) == (True, True)
    assert [backend.supports_head_size(n) for n in (512, 576)] == [False, True]
    assert [backend.supports_dtype(t) for t in (torch.float16, torch.bfloat16)] == [False, True]
    assert backend.get_kv_cache_shape(3, 64, cache_dtype_str="fp8_ds_mla") == (3, 64, 656)
    assert (backend.supports_pcp(), backend.supports_dcp()) == (False, True)
    support = vllm.backend.AttentionCGSupport.UNIFORM_BATCH
    assert backend.get_builder_cls().get_cudagraph_support(None, None) is support


@pytest.mark.parametrize(
    "changes", [{}, {"kv_cache_dtype": "fp8_ds_mla", "block_size": 128}, {"use_dcp": True}]
)
def test_vllm_validates_what_is_served(vllm, changes):
    assert refusals(vllm, **changes) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_size": 512}, "head_size not supported"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype not supported"),
        ({"use_sparse": False}, "sparse not supported"),
        ({"use_mla": False}, "non-MLA not supported"),
        ({"has_sink": True}, "attention sinks not supported"),
        ({"use_pcp": True}, "PCP not supported"),
        ({"device_capability": (7, 5)}, "compute capability not supported"),
    ],
)
def test_vllm_refuses_what_is_not(vllm, changes, reason):
    assert any(reason in text for text in refusals(vllm, **changes))


def refusals(vllm, **changes):
    """vLLM's own verdict on a configuration of DeepSeek-V3.2. A build without CUDA serves no GPU,
    so its compute capability is one reason more, which is left out unless it is the question."""
    major, minor = changes.pop("device_capability", (9, 0))
    options = {
        "head_size": 576,
        "dtype": vllm.torch.bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": 64,
        "use_mla": True,
        "has_sink": False,
        "use_sparse": True,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": SimpleNamespace(major=major, minor=minor),
        "attn_type": "decoder",
    }
    reasons = vllm.ours.SparseMLABackend.validate_configuration(**options | changes)
    if sparse_mla.build_info()["cuda"].startswith("none") and major >= 8:
        reasons.remove("compute capability not supported")
    return reasons


# ---- Plugin --------------------------------------------------------------------------------------

LOAD = """
from vllm.plugins import load_general_plugins
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
custom = AttentionBackendEnum.CUSTOM
assert not custom.is_overridden()
TAKEN and register_backend(custom, TAKEN)
load_general_plugins()
import sys
print("sparse_mla.integrations.vllm" in sys.modules)
from sparse_mla_vllm import register
register()  # vLLM may load it again
print(custom.get_path())
print([m.name for m in AttentionBackendEnum if m.is_overridden()])
if not TAKEN:
    print(custom.get_class().__name__)
"""
CLASS = "sparse_mla.integrations.vllm.SparseMLABackend"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A folder for sys.path with pyproject.toml's entry points, as an installation has them."""
    path = write_entry_point(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, path)))
    return {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_PLUGINS": "sparse_mla"}


def test_vllm_loads_the_plugin_and_resolves_the_backend(vllm, installed):
    printed = helpers.printed_by_python("-W", "ignore", "-c", f"TAKEN = ''{LOAD}", **installed)
    assert printed.splitlines() == ["False", CLASS, "['CUSTOM']", "SparseMLABackend"]


def test_the_plugin_leaves_another_s_backend_alone(vllm, installed):
    run = helpers.run_python("-W", "ignore", "-c", f"TAKEN = 'a.B'{LOAD}", **installed)
    assert run.stdout.splitlines() == ["False", "a.B", "['CUSTOM']"], run.stderr
    assert "CUSTOM attention backend is a.B already" in run.stderr


# ---- Steps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_pair", [False, True], ids=["one", "pair"])
@pytest.mark.parametrize(
    ("num_heads", "fp8", "path"), [(16, True, "mixed"), (33, True, "separate"), (16, False, "bf16")]
)
def test_forward_is_sparse_mla_s(vllm, num_heads, fp8, path, as_pair):
    step = engine.make_step(engine.engine_batch(), num_heads, topk=TOPK)
    kv = step.fp8_cache if fp8 else step.bf16_cache(sparse_mla)
    rows = len(step.q)
    buffer = np.full((rows + 5, TOPK), -1, np.int32)
    buffer[:rows] = step.topk_indices
    indexer = SimpleNamespace(topk_indices_buffer=vllm.put(buffer))
    with engine_of(vllm, num_heads=num_heads, fp8=fp8, indexer=indexer) as (impl, builder):
        metadata = builder.build(0, common_of(vllm, step.batch))
        q = vllm.put(step.q)
        pair = q[..., :512].contiguous(), q[..., 512:].contiguous()
        out, lse = impl.forward_mqa(pair if as_pair else q, vllm.put(kv), metadata, None)
    assert metadata.step.path == path
    assert (metadata.num_decodes, metadata.num_prefills, metadata.prefill) == (5, 7, None)
    assert metadata.num_decode_tokens + metadata.step.num_prefill_tokens == rows
    assert (metadata.step.prefill is not None) == (path == "separate")

    options = engine.config(
        sparse_mla,
        num_heads=num_heads,
        fp8=fp8,
        max_num_batched_tokens=512,
        prefill_workspace_tokens=None,
    )
    plan = sparse_mla.MetadataBuilder(options).build(step.batch.common(sparse_mla))
    want = sparse_mla.SparseMLA(options).forward(step.q, kv, step.topk_indices, plan)
    assert plan.path == path
    assert_same_bits(vllm.get(out), want[0])
    assert_same_bits(vllm.get(lse), want[1])
    assert np.abs(vllm.get(out).astype(np.float32)).max() > 0


# ---- A layer of vLLM's own -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_heads", "fp8", "path"), [(16, True, "mixed"), (33, True, "separate"), (16, False, "bf16")]
)
def test_a_layer_of_vllm_s_own_is_sparse_mla_s(vllm, num_heads, fp8, path):
    """vLLM's MLAAttention writes the step's keys, absorbs the queries, attends by our
    implementation, and multiplies the results by W_UV, as SparseMLA's functions do."""
    rng = np.random.default_rng(1)
    step = engine.make_step(engine.engine_batch(), num_heads, topk=TOPK)
    num_tokens = len(step.q)
    cache = step.fp8_cache.copy() if fp8 else step.bf16_cache(sparse_mla)
    kv_c, k_pe = (cases.random_bf16(rng, num_tokens, n) for n in (512, 64))
    q = cases.random_bf16(rng, num_tokens, num_heads, 192)
    weight = exact_projection(rng, num_heads)
    layer, metadata, got = run_layer(
        *(vllm, step.batch, vllm.put(cache.copy()), q, kv_c, k_pe, weight),
        cache_dtype="fp8_ds_mla" if fp8 else "auto",
        indices=step.topk_indices,
    )
    assert type(layer.impl) is vllm.ours.SparseMLAImpl
    assert metadata.step.path == path

    options = engine.config(
        sparse_mla,
        num_heads=num_heads,
        fp8=fp8,
        max_num_batched_tokens=512,
        prefill_workspace_tokens=None,
    )
    ours = sparse_mla.SparseMLA(options, kv_b_proj=weight)
    sparse_mla.concat_and_cache_mla(kv_c, k_pe, cache, step.batch.slot_mapping)
    plan = sparse_mla.MetadataBuilder(options).build(step.batch.common(sparse_mla))
    absorbed = ours.k_up_proj(np.ascontiguousarray(q[..., :128]))
    pair = absorbed, np.ascontiguousarray(q[..., 128:])
    out, _ = ours.forward(pair, cache, step.topk_indices, plan)
    want = ours.v_up_proj(out).reshape(num_tokens, -1)
    assert np.abs(want.astype(np.float32)).max() > 0
    assert_same_bits(vllm.get(got), want)
    assert_same_bits(vllm.get(layer.kv_cache), cache)


# ---- The rest of the layer's protocol ------------------------------------------------------------


def test_an_upper_bound_of_the_lengths_changes_no_result(vllm):
    """vLLM counts the draft tokens of decodes, even past the longest sequence that there may be."""
    step = engine.make_step(engine.engine_batch(), 33, topk=TOPK)
    upper = vllm.torch.from_numpy(step.batch.seq_lens.copy())
    upper[:5] += 512
    buffer = vllm.put(step.topk_indices)
    with engine_of(vllm, num_heads=33, fp8=True, topk_indices_buffer=buffer) as (impl, builder):
        arrays = vllm.put(step.q), vllm.put(step.fp8_cache)
        exact = builder.build(0, common_of(vllm, step.batch))
        want = [vllm.get(x) for x in impl.forward_mqa(*arrays, exact, None)]
        common = common_of(vllm, wide(step.batch), seq_lens_cpu_upper_bound=upper)
        got = impl.forward_mqa(*arrays, builder.build(0, common), None)
    assert_same_bits(vllm.get(got[0]), want[0])
    assert_same_bits(vllm.get(got[1]), want[1])


def wide(batch):
    """The batch with a block table for max_model_len, as vLLM's is."""
    table = np.zeros((len(batch.block_table), 8), np.int32)
    width = min(batch.block_table.shape[1], 8)
    table[:, :width] = batch.block_table[:, :width]
    return SimpleNamespace(
        query_start_loc=batch.query_start_loc,
        seq_lens=batch.seq_lens,
        slot_mapping=batch.slot_mapping,
        block_table=table,
        num_reqs=batch.num_reqs,
        num_actual_tokens=batch.num_actual_tokens,
    )


def test_speculative_tokens_are_decodes(vllm):
    drafts = SimpleNamespace(num_speculative_tokens=2, parallel_drafting=False)
    with engine_of(vllm, num_heads=33, fp8=True, speculative=drafts) as (_, builder):
        assert builder.reorder_batch_threshold == 3
        assert builder.builder.config.decode_threshold == 3
    with engine_of(vllm, num_heads=33, fp8=True) as (_, builder):
        assert builder.reorder_batch_threshold == 1


@pytest.mark.parametrize("fp8", [True, False])
def test_the_cache_is_written_as_ours(vllm, fp8):
    kv_c, k_pe = vllm.torch.randn(3, 512), vllm.torch.randn(3, 1, 64)
    shape, dtype = ((2, 64, 656), np.uint8) if fp8 else ((2, 64, 576), ref.BF16)
    got, want = vllm.put(np.zeros(shape, dtype)), np.zeros(shape, dtype)
    slots = vllm.torch.tensor([65, -1, 3])
    with engine_of(vllm, num_heads=16, fp8=fp8) as (impl, _):
        scale = vllm.torch.ones(1)
        impl.do_kv_cache_update(kv_c, k_pe, got, slots, impl.kv_cache_dtype, scale)
    sparse_mla.concat_and_cache_mla(kv_c.numpy(), k_pe[:, 0].numpy(), want, slots.numpy())
    assert want.view(np.uint8).any()
    assert_same_bits(vllm.get(got), want)


def test_the_indexer_s_buffer_may_be_replaced(vllm):
    first, second, third = (vllm.torch.full((4, TOPK), i, dtype=vllm.torch.int32) for i in range(3))
    indexer = SimpleNamespace(topk_indices_buffer=first)
    with engine_of(vllm, num_heads=16, fp8=True, indexer=indexer) as (impl, _):
        indexer.topk_indices_buffer = second
        assert impl.topk_indices_buffer is second
        impl.topk_indices_buffer = third
        assert impl.topk_indices_buffer is third


def test_without_a_buffer(vllm):
    step = engine.make_step(engine.engine_batch(), 16, topk=TOPK)
    with engine_of(vllm, num_heads=16, fp8=True) as (impl, builder):
        metadata = builder.build(0, common_of(vllm, step.batch))
        with pytest.raises(ValueError, match="`topk_indices_buffer` must be given, got None"):
            impl.forward_mqa(vllm.put(step.q), vllm.put(step.fp8_cache), metadata, None)


@pytest.mark.parametrize(
    "given", [{"alibi_slopes": [1.0]}, {"sliding_window": 4}, {"attn_type": "encoder"}]
)
def test_what_is_not_served_is_refused(vllm, given):
    with (
        pytest.raises(NotImplementedError, match=next(iter(given))),
        engine_of(vllm, num_heads=16, fp8=True, **given),
    ):
        pass


@pytest.mark.parametrize(("num_heads", "fp8"), [(33, True), (16, True), (33, False)])
def test_the_workspace_is_reserved_where_vllm_measures(vllm, num_heads, fp8, monkeypatch):
    """All layers and builders share it, through vLLM's manager. A path that gathers nothing has
    none."""
    manager = vllm.workspace.WorkspaceManager(vllm.torch.device("cpu"))
    monkeypatch.setattr(vllm.workspace, "_manager", manager)
    buffer = vllm.torch.zeros((1, TOPK), dtype=vllm.torch.int32)
    options = {"num_heads": num_heads, "fp8": fp8, "topk_indices_buffer": buffer}
    with engine_of(vllm, **options) as (impl, builder):
        manager.lock()  # another workspace would be an error now
        impl.reserve_workspace()
    kept = list(manager._persistent_resources[0].values())
    if fp8 and num_heads == 33:
        assert [x.shape for x in kept] == [(builder.builder.workspace_bytes // 1152, 576)]
    else:
        assert (kept, builder.builder.workspace_bytes) == ([], 0)


@pytest.mark.parametrize("model_type", ["deepseek_v4", "deepseek_v32"])
@pytest.mark.parametrize("name", ["CUSTOM", "FLASHMLA"])
def test_a_v4_model_is_refused_on_gpus(vllm, model_type, name):
    """Where CUSTOM is chosen. vLLM alone would take another backend for it."""
    plugin = device.import_quietly("sparse_mla_vllm")
    backends = vllm.registry.AttentionBackendEnum
    updated = []

    class Platform:
        @classmethod
        def check_and_update_config(cls, vllm_config):
            updated.append((cls, vllm_config))

    for _ in range(2):  # each of vLLM's processes loads plugins more than once
        plugin.watch_models(Platform, backends.CUSTOM)
    config = SimpleNamespace(
        attention_config=SimpleNamespace(backend=backends[name], backend_per_kind={}),
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(model_type=model_type)),
    )
    if (model_type, name) == ("deepseek_v4", "CUSTOM"):
        with pytest.raises(NotImplementedError, match="CUSTOM: deepseek_v4 is not served"):
            Platform.check_and_update_config(config)
    else:
        Platform.check_and_update_config(config)
        assert updated == [(Platform, config)]
