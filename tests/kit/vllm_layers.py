"""vLLM's classes as tests use them: its modules, its config of a small model, a layer's
implementation and its builder, and a step."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import device
import engine
import helpers
import numpy as np
import pytest
import reference as ref

PREFIX = "model.layers.0.self_attn.attn"
TOPK = 48


def load() -> SimpleNamespace:
    """vLLM's modules, and those of this project that import them."""
    helpers.find_framework("vllm")
    return SimpleNamespace(
        backend=device.import_quietly("vllm.v1.attention.backend"),
        registry=device.import_quietly("vllm.v1.attention.backends.registry"),
        config=device.import_quietly("vllm.config"),
        current=device.import_quietly("vllm.config.vllm"),
        groups=device.import_quietly("vllm.distributed.parallel_state"),
        dcp=device.import_quietly("vllm.v1.attention.ops.dcp"),
        forward_context=device.import_quietly("vllm.forward_context"),
        workspace=device.import_quietly("vllm.v1.worker.workspace"),
        ours=device.import_quietly("sparse_mla.integrations.vllm"),
        dense=device.import_quietly("sparse_mla.integrations.vllm_dense"),
        cpu=device.import_quietly("sparse_mla.integrations.vllm_cpu"),
        indexer=device.import_quietly("sparse_mla.integrations.vllm_indexer"),
        torch=device.import_quietly("torch"),
        put=helpers.Torch().put,
        get=helpers.Torch().get,
    )


# ---- A layer's implementation --------------------------------------------------------------------


def impl_options(**changes) -> dict:
    """What vLLM's MLAAttention gives an impl of DeepSeek-V3's layers, by names."""
    return {
        "num_heads": 16,
        "head_size": 576,
        "scale": engine.SCALE,
        "num_kv_heads": 1,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": "auto",
        "logits_soft_cap": None,
        "attn_type": "decoder",
        "kv_sharing_target_layer_name": None,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "qk_head_dim": 192,
        "v_head_dim": 128,
        "kv_b_proj": None,
    } | changes


def engine_config(vllm, *, cp=None, speculative=None) -> SimpleNamespace:
    """vLLM's config of a small DeepSeek-V3.2, of a rank where `cp` is given.

    Plain numbers stand for vLLM's ModelConfig, which imports the model, and for its ParallelConfig,
    which imports the executors.
    """
    _, ranks, interleave = cp or (0, 1, 1)
    return SimpleNamespace(
        model_config=SimpleNamespace(
            max_model_len=512, hf_text_config=SimpleNamespace(index_topk=TOPK)
        ),
        scheduler_config=vllm.config.SchedulerConfig(
            max_model_len=512,
            is_encoder_decoder=False,
            max_num_batched_tokens=512,
            max_num_seqs=16,
        ),
        attention_config=vllm.config.AttentionConfig(),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=ranks,
            decode_context_parallel_size=ranks,
            cp_kv_cache_interleave_size=interleave,
            prefill_context_parallel_size=1,
            pcp_shard_decode_requests=False,
            dcp_comm_backend="ag_rs",
            num_ubatches=1,
        ),
        speculative_config=speculative,
        num_speculative_tokens=getattr(speculative, "num_speculative_tokens", 0),
        compilation_config=SimpleNamespace(static_forward_context={}),
        use_v2_model_runner=True,
    )


@contextmanager
def engine_of(
    vllm, *, num_heads, fp8=False, dense=False, block_size=64, cp=None, speculative=None, **given
):
    """A layer's implementation and its group's builder, of a rank where `cp` is given: `num_heads`
    are the heads of one rank."""
    configs = engine_config(vllm, cp=cp, speculative=speculative)
    backend = vllm.dense.DenseMLABackend if dense else vllm.ours.SparseMLABackend
    options = {"num_heads": num_heads, "kv_cache_dtype": "fp8_ds_mla" if fp8 else "auto"}
    options |= {} if dense else {"indexer": None, "topk_indices_buffer": None}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm.current, "_current_vllm_config", configs)
        if cp is not None:
            group = SimpleNamespace(rank_in_group=cp[0], world_size=cp[1])
            patch.setattr(vllm.groups, "_DCP", group)
        impl = backend.get_impl_cls()(**impl_options(**options | given))
    configs.compilation_config.static_forward_context[PREFIX] = SimpleNamespace(impl=impl)
    spec, place = SimpleNamespace(block_size=block_size), vllm.torch.device("cpu")
    yield impl, backend.get_builder_cls()(spec, [PREFIX], configs, place)


def common_of(vllm, batch, **changes):
    """The step's batch as vLLM's own CommonAttentionMetadata."""
    starts, lens, slots, table = (
        vllm.torch.from_numpy(x)
        for x in (batch.query_start_loc, batch.seq_lens, batch.slot_mapping, batch.block_table)
    )
    options = {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts,
        "seq_lens": lens,
        "seq_lens_cpu_upper_bound": lens,
        "num_reqs": batch.num_reqs,
        "num_actual_tokens": batch.num_actual_tokens,
        "max_query_len": int(np.diff(batch.query_start_loc).max()),
        "max_seq_len": int(batch.seq_lens.max()),
        "block_table_tensor": table,
        "slot_mapping": slots,
    }
    return vllm.backend.CommonAttentionMetadata(**options | changes)


# ---- A layer of vLLM's own -----------------------------------------------------------------------

# The layer imports these for disaggregated serving and for images. Nothing here runs them, and they
# would need thirty more packages.
LEFT_OUT = ("vllm.distributed.kv_transfer", "vllm.multimodal")


class EmptyModule(ModuleType):
    """Every public name in it is an empty class."""

    __path__: ClassVar = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class LeftOut(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.startswith(LEFT_OUT):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return EmptyModule(spec.name)

    def exec_module(self, module):
        pass


def load_layer() -> Any:
    """vLLM's module of its MLA layer."""
    finder = LeftOut()
    sys.meta_path.insert(0, finder)
    try:
        return device.import_quietly("vllm.model_executor.layers.attention.mla_attention")
    finally:
        sys.meta_path.remove(finder)


def exact_projection(rng, num_heads):
    """kv_b_proj.weight [H * (128 + 128), 512]: each row has one power of two, so that any order of
    summation gives the same bits."""
    weight = np.zeros((num_heads, 256, 512), np.float32)
    for head in weight:
        columns = np.concatenate([rng.permutation(512)[:128] for _ in range(2)])
        head[np.arange(256), columns] = 2.0 ** rng.integers(-1, 2, 256)
    return weight.reshape(-1, 512).astype(ref.BF16)


@contextmanager
def layer_configs(vllm, mla_attention, *, dense=False, cp=None):
    """vLLM's current config, with our backend chosen as a user chooses it, by the name CUSTOM."""
    from sparse_mla_vllm import register

    register()
    custom = vllm.registry.AttentionBackendEnum.CUSTOM
    backend = vllm.dense.DenseMLABackend if dense else custom.get_class()
    configs = engine_config(vllm, cp=cp)
    configs.compilation_config = vllm.config.CompilationConfig(custom_ops=["none"])
    configs.attention_config = vllm.config.AttentionConfig(backend=custom)
    configs.kernel_config = SimpleNamespace(enable_jit_warmup=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm.current, "_current_vllm_config", configs)
        # A machine without a GPU has no platform that would ask for the class.
        patch.setattr(mla_attention, "get_attn_backend", lambda *_, **__: backend)
        yield configs


def run_layer(vllm, batch, cache, q, kv_c, k_pe, weight, *, indices=None, cp=None, **given):
    """A step of vLLM's MLAAttention, dense without `indices`; -> the layer, the step's metadata and
    the output [T, H * 128]. The layer writes the cache.

    A rank, `cp`, is one of the group that vLLM's module has.
    """
    torch, mla_attention, num_heads = vllm.torch, load_layer(), q.shape[1]
    projection = torch.nn.Linear(512, num_heads * 256, bias=False, dtype=torch.bfloat16)
    projection.weight.requires_grad_(False).copy_(vllm.put(weight))
    projection.quant_method = None
    is_dense = indices is None
    with layer_configs(vllm, mla_attention, dense=is_dense, cp=cp) as configs:
        layer = mla_attention.MLAAttention(
            num_heads,
            engine.SCALE,
            128,
            64,
            128,
            q_lora_rank=1536,
            kv_lora_rank=512,
            kv_b_proj=projection,
            cache_config=SimpleNamespace(
                kv_cache_dtype_skip_layers=[], enable_prefix_caching=False, **given
            ),
            prefix=PREFIX,
            use_sparse=not is_dense,
            topk_indices_buffer=None if is_dense else vllm.put(indices),
            prefill_backend_cls=lambda **_: None,  # our implementations call none
        )
        layer.process_weights_after_loading(torch.bfloat16)
        layer.bind_kv_cache(cache[:, None])
        make = layer.attn_backend.get_builder_cls()
        spec = SimpleNamespace(block_size=batch.block_size)
        metadata = make(spec, [PREFIX], configs, torch.device("cpu")).build(
            0, common_of(vllm, batch)
        )
        slots = vllm.put(batch.slot_mapping)
        forward = vllm.forward_context
        context = forward.ForwardContext({PREFIX: layer}, {PREFIX: metadata}, {PREFIX: slots})
        with forward.override_forward_context(context):
            shape = torch.Size((len(q), num_heads * 128))
            new = vllm.put(kv_c), vllm.put(k_pe)[:, None]
            return layer, metadata, layer(vllm.put(q), *new, output_shape=shape)
