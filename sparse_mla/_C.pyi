"""The compiled module. sparse_mla.ops declares the operators."""

import sys
from collections.abc import Callable
from typing import Any, final

from numpy import ndarray

__version__: str
KV_FORMATS: dict[str, dict[int, int]]  # name -> {last dimension of a cache: head size}
SPLIT_KV_FORMATS: tuple[str, ...]  # names of formats in split pages
CONCAT_KV_FORMATS: tuple[str, ...]  # names of formats that concat_and_cache_mla writes

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
class Operator:
    def __new__(cls, declaration: Callable[..., Any], name: str, /) -> Operator: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __get__(self, obj: Any, owner: Any = None, /) -> Operator: ...
    @property
    def table(self) -> tuple[tuple[str, str], ...]: ...
    @property
    def results(self) -> tuple[tuple[Any, ...], ...]: ...
    @property
    def limits(self) -> tuple[tuple[str, str, int, int], ...]: ...

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
        kv_cache_dtype: str,
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

@final
class V4Builder:
    def __new__(
        cls,
        num_heads: int,
        window: int,
        topk_tokens: int,
        block_size: int,
        swa_block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        decode_threshold: int,
        prefill_chunk_size: int,
        scales: tuple[float, float, float],
        compress_ratios: tuple[int, ...],
        state_block_sizes: tuple[int, ...],
        kv_cache_dtype: str,
        compressed_kv_cache_dtype: str,
        path: str | None,
        device: str,
        workspace: Any,
        /,
    ) -> V4Builder: ...
    @property
    def workspace_bytes(self) -> int: ...
    def build(
        self,
        query_start_loc_cpu: Any,
        seq_lens_cpu: Any,
        block_table: Any,
        slot_mapping: Any,
        compressed: tuple[Any, ...],
        states: tuple[Any, ...],
        num_reqs: int,
        num_actual_tokens: int,
        max_seq_len: int,
        /,
    ) -> dict[str, Any]: ...
    def attend(
        self,
        q: Any,
        swa: Any,
        compressed: Any,
        topk_indices: Any,
        attn_sink: Any,
        out: Any,
        lse: Any,
        compress_ratio: int,
        generation: int,
        stream: Any,
        /,
    ) -> tuple[Any, Any]: ...
    @classmethod
    def warm_up(
        cls, q: Any, out: Any, lse: Any, num_heads: int, stream: Any, /
    ) -> tuple[Any, Any]: ...

def split_decodes_and_prefills(
    query_start_loc: Any, num_actual_tokens: int, decode_threshold: int, require_uniform: bool, /
) -> tuple[int, int, int, int]: ...
def split_prefill_chunks(seq_lens: Any, workspace_tokens: int, /) -> list[tuple[int, int]]: ...
def get_prefill_workspace_size(max_model_len: int, /) -> int: ...
def kernels() -> list[dict[str, Any]]: ...
def build_info() -> dict[str, Any]: ...
def call_exactly(function: Callable[[], Any], /) -> Any: ...
def xla_handlers() -> dict[str, object]: ...
