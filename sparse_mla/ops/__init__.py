"""The operators: signatures, defaults and documentation. The work is done by the C core.

What is declared in this package is called as any function; csrc/python/call/operator.c takes the
call, and the arguments have their C side in a table of csrc/python/ops/.

What holds for every operator. Arrays are anything that speaks DLPack, or NumPy arrays (ml_dtypes
included); the last dimension is contiguous unless a docstring says otherwise, all other strides are
honoured. Outputs are optional keywords; an array given as output is returned as the same object,
and one that is not given comes in the framework of the first array. All arrays of a call are on one
device. `stream` is an int handle or an object with `__cuda_stream__`, `.cuda_stream` or `.ptr`;
None is the first array's current stream where its framework tells (torch, cupy), else the legacy
default stream. The CPU ignores it.

Every operator raises TypeError (not an array, or the wrong dtype), ValueError (rank, shape, stride,
alignment, device, overlap, a bad value), BufferError (an array that cannot be exported, or cannot
be written: read-only, jax), RuntimeError (a device that this build lacks) and MemoryError. The text
reads "op: `argument` must RULE, got ACTUAL"; nothing was written then.

Shapes use T query tokens, H heads (1 to 128), K index columns, R requests, W block table columns.
A slot is `page * block_size + offset`. A cache is [pages, block_size, row], or with an MQA head
axis [pages, block_size, 1, row], or flat [tokens, row]; row is 576 bf16 ("bfloat16"), 656 bytes of
uint8, int8 or float8_e4m3fn ("fp8_ds_mla"), or 512 bf16 ("bfloat16" without RoPE: then keys have
512 values where docstrings say 576, `k_pe` is [tokens, 0], and `q` is no pair).

CUDA. A call enqueues its work on `stream` and returns: it never synchronises, and takes memory for
nothing but results and workspace that were left out, from the framework's allocator, so that it can
be captured in a graph (where there is no such allocator, give both). Shapes, dtypes, strides and
addresses are checked as on the CPU. Values in device memory are not read back: where the CPU raises
a ValueError for a bad slot, page, request id or length, the kernels stay inside the buffers, and do
what the operator's docstring says. SPARSE_MLA_CHECK=1 in the environment, a debugging aid, makes
calls synchronise and raise these ValueErrors too; it cannot be used during capture.
"""

from sparse_mla.ops import absorption, attention, cache, facts, planning
from sparse_mla.ops._declare import OPERATORS as OPERATORS
from sparse_mla.ops.absorption import *
from sparse_mla.ops.absorption import _split_kv_b_proj as _split_kv_b_proj
from sparse_mla.ops.attention import *
from sparse_mla.ops.attention import _attention_plus_inf as _attention_plus_inf
from sparse_mla.ops.cache import *
from sparse_mla.ops.facts import *
from sparse_mla.ops.planning import *

__all__ = []
__all__ += absorption.__all__
__all__ += attention.__all__
__all__ += cache.__all__
__all__ += facts.__all__
__all__ += planning.__all__
