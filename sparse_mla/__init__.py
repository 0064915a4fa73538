"""Sparse Multi-head Latent Attention for any array framework, through DLPack.

Operators write tokens to a paged cache, gather them back, turn positions into slots, attend to the
slots that an indexer chose, merge partial results, and absorb the up projections. `Config`,
`MetadataBuilder` and `SparseMLA` put them together for a continuously batching engine.

Any array that speaks DLPack is an array here; what a call returns comes in the framework of its
first array. Nothing is copied, and no framework is imported.

>>> import sparse_mla
>>> sparse_mla.get_prefill_workspace_size(1024)
5120
"""

from sparse_mla import flash_mla
from sparse_mla._C import Tensor, __version__
from sparse_mla.backend import (
    Backend,
    Chunk,
    CommonAttentionMetadata,
    Config,
    Decode,
    Metadata,
    MetadataBuilder,
    Prefill,
    SparseMLA,
)
from sparse_mla.ops import (
    attention_workspace_size,
    build_info,
    concat_and_cache_mla,
    convert_req_index_to_global_index,
    dequantize_kv_cache,
    dynamic_per_tensor_quant,
    gather_kv_cache,
    get_include,
    get_prefill_workspace_size,
    k_up_proj,
    kernels,
    merge_attn_states,
    sparse_attention,
    split_decodes_and_prefills,
    split_kv_b_proj,
    split_prefill_chunks,
    v_up_proj,
)

__all__ = [
    "Backend",
    "Chunk",
    "CommonAttentionMetadata",
    "Config",
    "Decode",
    "Metadata",
    "MetadataBuilder",
    "Prefill",
    "SparseMLA",
    "Tensor",
    "__version__",
    "attention_workspace_size",
    "build_info",
    "concat_and_cache_mla",
    "convert_req_index_to_global_index",
    "dequantize_kv_cache",
    "dynamic_per_tensor_quant",
    "flash_mla",
    "gather_kv_cache",
    "get_include",
    "get_prefill_workspace_size",
    "k_up_proj",
    "kernels",
    "merge_attn_states",
    "sparse_attention",
    "split_decodes_and_prefills",
    "split_kv_b_proj",
    "split_prefill_chunks",
    "v_up_proj",
]


def __dir__() -> list[str]:
    """What tab completion offers."""
    return __all__
