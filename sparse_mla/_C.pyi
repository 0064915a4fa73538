"""The compiled module: positional functions. sparse_mla.ops gives them names and defaults."""

import sys
from typing import Any, final

from numpy import ndarray

__version__: str
KV_FORMATS: dict[str, int]

@final
class Tensor:
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def strides(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def ndim(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> ndarray[Any, Any]: ...
    if sys.version_info >= (3, 12):
        def __buffer__(self, flags: int, /) -> memoryview: ...
    def __len__(self) -> int: ...
    def __getitem__(self, key: int | slice, /) -> Tensor: ...

@final
class Builder:
    def __new__(
        cls,
        num_heads: int,
        block_size: int,
        topk_tokens: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        decode_threshold: int,
        min_heads_for_bf16_prefill: int,
        prefill_workspace_tokens: int,
        kv_cache_dtype: str | None,
        path: str | None,
        device: str,
        workspace: Any,
        /,
    ) -> Builder: ...
    @property
    def workspace_bytes(self) -> int: ...
    def build(
        self,
        query_start_loc_cpu: Any,
        seq_lens_cpu: Any,
        block_table: Any,
        num_reqs: int,
        num_actual_tokens: int,
        stream: Any,
        /,
    ) -> dict[str, Any]: ...
    def forward(
        self,
        q: Any,
        kv_cache: Any,
        topk_indices: Any,
        attn_sink: Any,
        out: Any,
        lse: Any,
        softmax_scale: float,
        generation: int,
        stream: Any,
        /,
    ) -> tuple[Any, Any]: ...

def concat_and_cache_mla(
    kv_c: Any,
    k_pe: Any,
    kv_cache: Any,
    slot_mapping: Any,
    kv_cache_dtype: str | None,
    stream: Any,
    /,
) -> Any: ...
def gather_kv_cache(
    kv_cache: Any,
    block_table: Any,
    seq_lens: Any,
    workspace_starts: Any,
    seq_starts: Any,
    out: Any,
    stream: Any,
    /,
) -> Any: ...
def dequantize_kv_cache(kv_cache: Any, kv_format: str | None, dtype: str, /) -> Any: ...
def convert_req_index_to_global_index(
    req_id_per_token: Any,
    block_table: Any,
    topk_indices: Any,
    prefill_request_ids: Any,
    prefill_workspace_starts: Any,
    out: Any,
    block_size: int,
    valid_counts: bool,
    stream: Any,
    /,
) -> Any: ...
def sparse_attention(
    q: Any,
    kv: Any,
    indices: Any,
    topk_length: Any,
    attn_sink: Any,
    extra_kv: Any,
    extra_indices: Any,
    extra_topk_length: Any,
    out: Any,
    lse: Any,
    max_logits: Any,
    workspace: Any,
    softmax_scale: float,
    num_splits: int,
    kv_format: str | None,
    return_max_logits: bool,
    empty_lse_is_plus_inf: bool,
    stream: Any,
    /,
) -> tuple[Any, ...]: ...
def attention_workspace_size(
    num_tokens: int, num_heads: int, topk: int, extra_topk: int, num_splits: int, device: Any, /
) -> int: ...
def merge_attn_states(
    out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, out: Any, lse: Any, stream: Any, /
) -> tuple[Any, Any]: ...
def split_kv_b_proj(
    weight: Any, weight_scale_inv: Any, num_heads: int, qk_nope_head_dim: int, v_head_dim: int, /
) -> tuple[Any, Any]: ...
def k_up_proj(q_nope: Any, W_UK: Any, out: Any, stream: Any, /) -> Any: ...
def v_up_proj(x: Any, W_UV: Any, out: Any, stream: Any, /) -> Any: ...
def dynamic_per_tensor_quant(x: Any, out: Any, stream: Any, /) -> tuple[Any, Any]: ...
def split_decodes_and_prefills(
    query_start_loc: Any, num_actual_tokens: int, decode_threshold: int, require_uniform: bool, /
) -> tuple[int, int, int, int]: ...
def split_prefill_chunks(seq_lens: Any, workspace_tokens: int, /) -> list[tuple[int, int]]: ...
def get_prefill_workspace_size(max_model_len: int, /) -> int: ...
def kernels() -> list[dict[str, Any]]: ...
def build_info() -> dict[str, Any]: ...
def xla_handler() -> object: ...
