"""The operators: signatures, defaults and documentation. The C core does the work.

An operator that is declared here is called like any function. csrc/python/call/operator.c takes the
call, and a table in csrc/python/ops/ describes the arguments to C.

The following holds for every operator. An array is anything that supports DLPack, or a NumPy array
(ml_dtypes included). Its last dimension is contiguous unless a docstring says otherwise; all other
strides are honoured. Outputs are optional keywords. An array given as output is returned as the
same object, and an output that is not given is made in the framework of the first array. All arrays
of a call are on one device. `stream` is an int handle or an object with `__cuda_stream__`,
`.cuda_stream` or `.ptr`. None means the first array's current stream where its framework tells it
(torch, cupy), else the legacy default stream. The CPU ignores `stream`. `kv_format`, the name of a
cache's format, may also be written `kv_cache_dtype`, as vLLM does.

Every operator raises TypeError (not an array, or the wrong dtype), ValueError (rank, shape, stride,
alignment, device, overlap, a bad value), BufferError (an array that cannot be exported, or cannot
be written: read-only, jax), RuntimeError (a device that this build lacks) and MemoryError. The text
reads "op: `argument` must RULE, got ACTUAL". A call that raises has written nothing.

Shapes use T query tokens, H heads (1 to 128), K index columns, R requests, W block table columns.
A slot is `page * block_size + offset`. A cache is [pages, block_size, row], or with an MQA head
axis [pages, block_size, 1, row], or flat [tokens, row]. row is 576 bf16 ("bfloat16"), 656 bytes of
uint8, int8 or float8_e4m3fn ("fp8_ds_mla"), 576 e4m3 ("fp8_e4m3"), or 512 bf16 ("bfloat16" without
RoPE). Without RoPE, keys have 512 values where docstrings say 576, `k_pe` is [tokens, 0], and `q`
is no pair. The operators of whole keys also write, and those that read a cache also read, the
formats of 512 and 128 values in docs/formats.md; some of them have split pages, which may be
[pages, bytes].

On CUDA a call enqueues its work on `stream` and returns; it never synchronises. It allocates memory
only for results and workspace that were left out, from the framework's allocator, so it can be
captured in a graph. Where the framework has no such allocator, give both. Shapes, dtypes, strides
and addresses are checked as on the CPU. Values in device memory are not read back: where the CPU
raises a ValueError for a bad slot, page, request id or length, the kernels stay inside the buffers
and do what the operator's docstring says. SPARSE_MLA_CHECK=1 in the environment is a debugging aid:
calls then synchronise and raise these ValueErrors too, and cannot be captured.
"""

from sparse_mla.ops import (
    attention,
    attention_merge,
    cache,
    cache_read,
    compressor,
    facts,
    index,
    index_ranks,
    indexer,
    norm,
    planning,
    projection,
    projection_fp8,
    projection_weights,
    rope,
    topk,
    varlen,
)
from sparse_mla.ops._declare import OPERATORS as OPERATORS
from sparse_mla.ops.attention import *
from sparse_mla.ops.attention import _attention_plans as _attention_plans
from sparse_mla.ops.attention import _attention_plus_inf as _attention_plus_inf
from sparse_mla.ops.attention import _mla_attention_plus_inf as _mla_attention_plus_inf
from sparse_mla.ops.attention_merge import *
from sparse_mla.ops.cache import *
from sparse_mla.ops.cache_read import *
from sparse_mla.ops.compressor import *
from sparse_mla.ops.facts import *
from sparse_mla.ops.index import *
from sparse_mla.ops.index_ranks import *
from sparse_mla.ops.indexer import *
from sparse_mla.ops.norm import *
from sparse_mla.ops.planning import *
from sparse_mla.ops.projection import *
from sparse_mla.ops.projection import _split_kv_b_proj as _split_kv_b_proj
from sparse_mla.ops.projection_fp8 import *
from sparse_mla.ops.projection_weights import *
from sparse_mla.ops.projection_weights import _absorb_o_proj as _absorb_o_proj
from sparse_mla.ops.projection_weights import _absorb_q_proj as _absorb_q_proj
from sparse_mla.ops.projection_weights import _split_weight as _split_weight
from sparse_mla.ops.rope import *
from sparse_mla.ops.topk import *
from sparse_mla.ops.varlen import *

__all__ = []
__all__ += projection.__all__
__all__ += projection_weights.__all__
__all__ += attention.__all__
__all__ += cache.__all__
__all__ += cache_read.__all__
__all__ += compressor.__all__
__all__ += facts.__all__
__all__ += projection_fp8.__all__
__all__ += index.__all__
__all__ += index_ranks.__all__
__all__ += indexer.__all__
__all__ += attention_merge.__all__
__all__ += norm.__all__
__all__ += rope.__all__
__all__ += planning.__all__
__all__ += topk.__all__
__all__ += varlen.__all__
