"""A bad call raises one clear error and writes nothing; the next one works (csrc/ops).

Each row of the table changes one argument of a good call. It also names the arguments that the
error text may blame: if two shapes disagree, the text may name either.
"""

import re
import sys

import device
import numpy as np
import operators
import pytest
import reference as ref
from helpers import assert_error_text, assert_same_bits
from library import sparse_mla

import sparse_mla as package

pytestmark = pytest.mark.frameworks

BF16 = ref.BF16


def zeros(*shape, dtype=BF16) -> np.ndarray:
    return np.zeros(shape, dtype)


def apart(x: np.ndarray) -> np.ndarray:
    """The same array with a last dimension that is not contiguous."""
    wide = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def shifted(x: np.ndarray, num_bytes: int) -> np.ndarray:
    """The same array at an address `num_bytes` past a multiple of 64."""
    raw = np.zeros(x.nbytes + 128, np.uint8)
    start = -raw.__array_interface__["data"][0] % 64 + num_bytes
    view = np.frombuffer(raw.data, x.dtype, x.size, start).reshape(x.shape)
    view[...] = x
    return view


def reversed_rows(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x[::-1])[::-1]


def broadcast(x: np.ndarray) -> np.ndarray:
    view = np.broadcast_to(x[:1], x.shape)
    view.flags.writeable = True
    return view


def replaced(x, i, value):
    x = x.copy()
    x.reshape(-1)[i] = value
    return x


# op -> rows of (case, argument to change, how, exception, other names that may be blamed)
WRITE = [
    ("not an array", "kv_c", lambda x: "kv", TypeError, ()),
    ("None", "kv_cache", lambda x: None, TypeError, ()),
    ("list", "slot_mapping", lambda x: x.tolist(), TypeError, ()),
    ("float64", "kv_c", lambda x: x.astype(np.float64), TypeError, ()),
    ("int32 values", "k_pe", lambda x: x.astype(np.int32), TypeError, ()),
    ("other dtype", "k_pe", lambda x: x.astype(np.float32), TypeError, ("kv_c",)),
    ("float cache", "kv_cache", lambda x: zeros(3, 4, 656, dtype=np.float32), TypeError, ()),
    ("bf16 cache of 656", "kv_cache", lambda x: zeros(3, 4, 656), (TypeError, ValueError), ()),
    ("byte cache of 575", "kv_cache", lambda x: x[..., :575], (TypeError, ValueError), ()),
    ("width 655", "kv_cache", lambda x: x[..., :655], ValueError, ()),
    ("int16 slots", "slot_mapping", lambda x: x.astype(np.int16), TypeError, ()),
    ("uint64 slots", "slot_mapping", lambda x: x.astype(np.uint64), TypeError, ()),
    ("kv_c of 511", "kv_c", lambda x: x[:, :511], ValueError, ()),
    ("kv_c of rank 3", "kv_c", lambda x: x[None], ValueError, ()),
    ("k_pe of 63", "k_pe", lambda x: x[:, :63], ValueError, ()),
    ("few kv_c rows", "kv_c", lambda x: x[:4], ValueError, ("slot_mapping",)),
    ("few k_pe rows", "k_pe", lambda x: x[:4], ValueError, ("slot_mapping",)),
    ("cache of rank 1", "kv_cache", lambda x: x[0, 0], ValueError, ()),
    ("cache of rank 5", "kv_cache", lambda x: x[None, None], ValueError, ()),
    ("two KV heads", "kv_cache", lambda x: zeros(3, 4, 2, 656, dtype=np.uint8), ValueError, ()),
    ("block_size 0", "kv_cache", lambda x: x[:, :0], ValueError, ()),
    ("slots of rank 2", "slot_mapping", lambda x: x[None], ValueError, ()),
    ("slot past the end", "slot_mapping", lambda x: replaced(x, 3, 12), ValueError, ()),
    ("apart", "kv_c", apart, ValueError, ()),
    ("apart cache", "kv_cache", apart, ValueError, ()),
    ("cache address", "kv_cache", lambda x: shifted(x, 8), ValueError, ()),
    ("token stride", "kv_cache", lambda x: np.zeros((3, 4, 664), "u1")[..., :656], ValueError, ()),
    (
        "page stride",
        "kv_cache",
        lambda x: np.zeros((3, 2632), "u1")[:, :2624].reshape(3, 4, 656, copy=False),
        ValueError,
        (),
    ),
    ("negative pages", "kv_cache", reversed_rows, ValueError, ()),
    ("zero stride pages", "kv_cache", broadcast, ValueError, ()),
    ("unknown format", "kv_cache_dtype", lambda _: "fp7", ValueError, ()),
    (
        "another format",
        "kv_cache_dtype",
        lambda _: "bfloat16",
        (ValueError, TypeError),
        ("kv_cache",),
    ),
    ("format type", "kv_cache_dtype", lambda _: 8, TypeError, ()),
]

GATHER = [
    ("not an array", "kv_cache", lambda x: object(), TypeError, ()),
    ("flat cache", "kv_cache", lambda x: x.reshape(-1, 656), ValueError, ("block_table",)),
    ("int64 table", "block_table", lambda x: x.astype(np.int64), TypeError, ()),
    ("table of rank 1", "block_table", lambda x: x[0], ValueError, ()),
    ("few tables", "block_table", lambda x: x[:1], ValueError, ("seq_lens",)),
    ("float lengths", "seq_lens", lambda x: x.astype(np.float32), TypeError, ()),
    ("lengths of rank 2", "seq_lens", lambda x: x[None], ValueError, ()),
    ("few starts", "workspace_starts", lambda x: x[:1], ValueError, ("seq_lens",)),
    ("few seq_starts", "seq_starts", lambda _: np.zeros(1, np.int32), ValueError, ("seq_lens",)),
    ("seq_starts dtype", "seq_starts", lambda _: np.zeros(2, np.int64), TypeError, ()),
    ("fp32 out", "out", lambda x: zeros(16, 576, dtype=np.float32), TypeError, ()),
    ("out of 575", "out", lambda x: x[:, :575], ValueError, ()),
    ("out of rank 3", "out", lambda x: x[None], ValueError, ()),
    ("out too short", "out", lambda x: x[:13], ValueError, ("workspace_starts", "seq_lens")),
    ("out backwards", "out", lambda x: x[::-1], ValueError, ()),
    ("out zero stride", "out", broadcast, ValueError, ()),
    ("out apart", "out", apart, ValueError, ()),
    ("out missing", "out", lambda x: None, TypeError, ()),
]

INDEX = [
    ("int64 indices", "topk_indices", lambda x: x.astype(np.int64), TypeError, ()),
    ("indices of rank 1", "topk_indices", lambda x: x[0], ValueError, ()),
    ("int64 requests", "req_id_per_token", lambda x: x.astype(np.int64), TypeError, ()),
    ("few requests", "req_id_per_token", lambda x: x[:2], ValueError, ("topk_indices",)),
    ("bad request", "req_id_per_token", lambda x: replaced(x, 0, 2), ValueError, ()),
    ("table dtype", "block_table", lambda x: x.astype(np.uint32), TypeError, ()),
    ("table of rank 3", "block_table", lambda x: x[None], ValueError, ()),
    ("block_size 0", "block_size", lambda _: 0, ValueError, ()),
    ("block_size -4", "block_size", lambda _: -4, ValueError, ()),
    ("block_size text", "block_size", lambda _: "4", TypeError, ()),
    ("block_size 4.5", "block_size", lambda _: 4.5, TypeError, ()),
    (
        "ids alone",
        "prefill_workspace_starts",
        lambda _: None,
        (ValueError, TypeError),
        ("prefill_request_ids",),
    ),
    ("few ids", "prefill_request_ids", lambda x: x[:2], ValueError, ("topk_indices",)),
    ("bad id", "prefill_request_ids", lambda x: replaced(x, 2, 1), ValueError, ()),
    ("out shape", "out", lambda x: zeros(3, 4, dtype=np.int32), ValueError, ()),
    ("out dtype", "out", lambda x: zeros(3, 3, dtype=np.int64), TypeError, ()),
]

GLOBAL_TOPK = [
    ("not an array", "topk_indices", lambda x: 3, TypeError, ()),
    ("int64 indices", "topk_indices", lambda x: x.astype(np.int64), TypeError, ()),
    ("indices of rank 1", "topk_indices", lambda x: x[0], ValueError, ()),
    ("indices apart", "topk_indices", apart, ValueError, ()),
    ("few requests", "req_id_per_token", lambda x: x[:2], ValueError, ()),
    ("bad request", "req_id_per_token", lambda x: replaced(x, 1, 2), ValueError, ()),
    ("table of rank 3", "block_table", lambda x: x[None], ValueError, ()),
    ("block_size 0", "block_size", lambda _: 0, ValueError, ()),
    ("block_size 4.5", "block_size", lambda _: 4.5, TypeError, ()),
    ("few flags", "is_valid", lambda x: x[:2], ValueError, ()),
    ("flags of int32", "is_valid", lambda x: x.astype(np.int32), TypeError, ()),
    ("flags of int8", "is_valid", lambda x: x.view(np.int8), TypeError, ()),
    ("out shape", "out", lambda x: x[:, :3], ValueError, ()),
    ("out dtype", "out", lambda x: x.astype(np.int64), TypeError, ()),
    ("lens shape", "lens", lambda x: x[:2], ValueError, ()),
    ("lens dtype", "lens", lambda x: x.astype(np.int64), TypeError, ()),
    ("lens zero stride", "lens", broadcast, ValueError, ()),
]

TOP_K = [
    ("not an array", "logits", lambda x: 3, TypeError, ()),
    ("float64 logits", "logits", lambda x: x.astype(np.float64), TypeError, ()),
    ("fp16 logits", "logits", lambda x: x.astype(np.float16), TypeError, ()),
    ("logits of rank 1", "logits", lambda x: x[0], ValueError, ()),
    ("logits apart", "logits", apart, ValueError, ()),
    ("few starts", "starts", lambda x: x[:2], ValueError, ()),
    ("int64 starts", "starts", lambda x: x.astype(np.int64), TypeError, ()),
    ("few ends", "ends", lambda x: x[:2], ValueError, ()),
    ("ends of rank 2", "ends", lambda x: x[None], ValueError, ()),
    ("k 0", "k", lambda _: 0, ValueError, ()),
    ("k 2.5", "k", lambda _: 2.5, TypeError, ()),
    ("k of another out", "k", lambda _: 2, ValueError, ("out",)),
    ("table of rank 3", "slots_block_table", lambda x: x[None], ValueError, ()),
    ("size without table", "slots_block_table", lambda _: None, ValueError, ("slots_block_size",)),
    ("table without size", "slots_block_size", lambda _: None, ValueError, ()),
    ("slots_block_size 0", "slots_block_size", lambda _: 0, ValueError, ()),
    ("table without requests", "req_id_per_token", lambda _: None, ValueError, ()),
    ("few requests", "req_id_per_token", lambda x: x[:2], ValueError, ()),
    ("bad request", "req_id_per_token", lambda x: replaced(x, 1, 2), ValueError, ()),
    ("few flags", "is_valid", lambda x: x[:2], ValueError, ()),
    ("flags of int32", "is_valid", lambda x: x.astype(np.int32), TypeError, ()),
    ("out shape", "out", lambda x: x[:, :2], ValueError, ()),
    ("out dtype", "out", lambda x: x.astype(np.int64), TypeError, ()),
    ("slots shape", "slots", lambda x: x[:2], ValueError, ()),
    ("slots dtype", "slots", lambda x: x.astype(np.int64), TypeError, ()),
    ("lens shape", "lens", lambda x: x[:2], ValueError, ()),
    ("values shape", "values", lambda _: np.zeros((3, 2), np.float32), ValueError, ()),
    ("values of bf16", "values", lambda _: np.zeros((3, 3), BF16), TypeError, ()),
]

COMBINE = [
    ("int64 indices", "topk_indices", lambda x: x.astype(np.int64), TypeError, ()),
    ("a row too few", "topk_indices", lambda x: x[:3], ValueError, ("out",)),
    ("topk wider", "topk", lambda _: 4, ValueError, ("topk_indices",)),
    ("starts of rank 2", "query_start_loc", lambda x: x[None], ValueError, ()),
    ("few starts", "query_start_loc", lambda x: x[:2], ValueError, ()),
    ("no starts", "query_start_loc", lambda x: x[:0], ValueError, ()),
    ("starts decrease", "query_start_loc", lambda x: x[::-1], ValueError, ()),
    ("too many tokens", "query_start_loc", lambda x: replaced(x, 2, 8), ValueError, ()),
    ("int64 lengths", "seq_lens", lambda x: x.astype(np.int64), TypeError, ()),
    ("few lengths", "seq_lens", lambda x: x[:1], ValueError, ("query_start_loc",)),
    ("few gathered", "gather_lens", lambda x: x[:1], ValueError, ()),
    ("window 0", "window", lambda _: 0, ValueError, ()),
    ("ratio 0", "ratio", lambda _: 0, ValueError, ()),
    ("topk -1", "topk", lambda _: -1, ValueError, ()),
    ("M -1", "M", lambda _: -1, ValueError, ()),
    ("N -1", "N", lambda _: -1, ValueError, ()),
    ("align 0", "align", lambda _: 0, ValueError, ()),
    ("align text", "align", lambda _: "4", TypeError, ()),
    ("another align", "align", lambda _: 1, ValueError, ("out",)),
    ("out dtype", "out", lambda x: x.astype(np.int16), TypeError, ()),
    ("lens shape", "lens", lambda x: x[:3], ValueError, ()),
]

MIXED = [
    ("int64 windows", "decode_swa_indices", lambda x: x.astype(np.int64), TypeError, ()),
    ("windows of rank 1", "decode_swa_indices", lambda x: x[0], ValueError, ()),
    ("narrow windows", "decode_swa_indices", lambda x: x[:, :2], ValueError, ()),
    ("windows without columns", "decode_swa_indices", lambda x: x[:, :0], ValueError, ()),
    ("few decodes", "decode_compressed_indices", lambda x: x[:1], ValueError, ()),
    ("few lengths", "decode_compressed_lens", lambda x: x[:1], ValueError, ()),
    ("narrow top-k", "prefill_topk_indices", lambda x: x[:, :1], ValueError, ()),
    ("no top-k", "prefill_topk_indices", lambda x: None, ValueError, ()),
    ("few starts", "query_start_loc", lambda x: x[:2], ValueError, ()),
    ("starts decrease", "query_start_loc", lambda x: x[::-1], ValueError, ()),
    ("few seq_lens", "seq_lens", lambda x: x[:1], ValueError, ("query_start_loc",)),
    ("few requests", "req_id_per_token", lambda x: x[:3], ValueError, ()),
    ("bad decode", "req_id_per_token", lambda x: replaced(x, 0, 2), ValueError, ()),
    ("bad prefill", "req_id_per_token", lambda x: replaced(x, 3, -1), ValueError, ()),
    ("few tables", "swa_block_table", lambda x: x[:1], ValueError, ()),
    ("few compressed tables", "compressed_block_table", lambda x: x[:1], ValueError, ()),
    ("no compressed table", "compressed_block_table", lambda x: None, ValueError, ()),
    ("swa_block_size 0", "swa_block_size", lambda _: 0, ValueError, ()),
    ("compressed_block_size 0", "compressed_block_size", lambda _: 0, ValueError, ()),
    ("window 0", "window", lambda _: 0, ValueError, ()),
    ("ratio 0", "ratio", lambda _: 0, ValueError, ()),
    ("topk -1", "topk", lambda _: -1, ValueError, ()),
    ("topk wider", "topk", lambda _: 4, ValueError, ("prefill_topk_indices",)),
    ("few flags", "is_valid", lambda x: x[:1], ValueError, ()),
    ("out shape", "out", lambda x: x[:, :6], ValueError, ()),
    ("lens dtype", "lens", lambda x: x.astype(np.int64), TypeError, ()),
]

ATTENTION = [
    ("not an array", "q", lambda x: 3.0, TypeError, ()),
    ("fp16 q", "q", lambda x: x.astype(np.float16), TypeError, ()),
    ("q of 575", "q", lambda x: x[..., :575], ValueError, ()),
    ("q of rank 2", "q", lambda x: x[0], ValueError, ()),
    ("129 heads", "q", lambda x: zeros(3, 129, 576), ValueError, ()),
    ("no heads", "q", lambda x: x[:, :0], ValueError, ()),
    ("q apart", "q", apart, ValueError, ()),
    ("q of three", "q", lambda x: (x[..., :512], x[..., 512:], x), (TypeError, ValueError), ()),
    ("pair tokens", "q", lambda x: (x[..., :512], x[1:, :, 512:]), ValueError, ("q[1]", "q_pe")),
    (
        "pair widths",
        "q",
        lambda x: (x[..., :500], x[..., 500:]),
        ValueError,
        ("q[0]", "q[1]", "ql_nope", "q_pe"),
    ),
    (
        "pair dtypes",
        "q",
        lambda x: (x[..., :512], x[..., 512:].astype(np.float32)),
        TypeError,
        ("q[1]", "q_pe"),
    ),
    ("fp16 cache", "kv_cache", lambda x: zeros(5, 4, 576, dtype=np.float16), TypeError, ()),
    ("cache of 640", "kv_cache", lambda x: x[..., :640], ValueError, ()),
    ("cache address", "kv_cache", lambda x: shifted(x, 4), ValueError, ()),
    ("token stride", "kv_cache", lambda x: np.zeros((5, 4, 660), "u1")[..., :656], ValueError, ()),
    ("cache apart", "kv_cache", apart, ValueError, ()),
    ("block_size 0", "kv_cache", lambda x: x[:, :0], ValueError, ()),
    ("int64 indices", "indices", lambda x: x.astype(np.int64), TypeError, ()),
    ("index rows", "indices", lambda x: x[:2], ValueError, ("q",)),
    ("indices of rank 3", "indices", lambda x: x[:, None], ValueError, ()),
    ("indices apart", "indices", apart, ValueError, ()),
    ("topk_length dtype", "topk_length", lambda x: x.astype(np.int64), TypeError, ()),
    ("topk_length rows", "topk_length", lambda x: x[:2], ValueError, ()),
    ("topk_length of rank 2", "topk_length", lambda x: x[:, None], ValueError, ()),
    ("sink dtype", "attn_sink", lambda x: x.astype(np.float64), TypeError, ()),
    ("sink heads", "attn_sink", lambda x: x[:3], ValueError, ()),
    (
        "extra without indices",
        "extra_indices",
        lambda x: None,
        (ValueError, TypeError),
        ("extra_kv_cache",),
    ),
    (
        "extra without cache",
        "extra_kv_cache",
        lambda x: None,
        (ValueError, TypeError),
        ("extra_indices", "extra_topk_length"),
    ),
    ("extra rows", "extra_indices", lambda x: x[:2], ValueError, ()),
    ("extra dtype", "extra_indices", lambda x: x.astype(np.int16), TypeError, ()),
    ("extra length rows", "extra_topk_length", lambda x: x[:1], ValueError, ()),
    ("scale text", "softmax_scale", lambda _: "big", TypeError, ()),
    ("scale None", "softmax_scale", lambda _: None, TypeError, ()),
    ("splits 65", "num_splits", lambda _: 65, ValueError, ()),
    ("splits -1", "num_splits", lambda _: -1, ValueError, ()),
    ("splits 2^33", "num_splits", lambda _: 2**33, ValueError, ()),
    ("splits 1.5", "num_splits", lambda _: 1.5, TypeError, ()),
    ("format", "kv_format", lambda _: "int4", ValueError, ()),
    (
        "format that is not",
        "kv_format",
        lambda _: "bfloat16",
        (ValueError, TypeError),
        ("kv_cache",),
    ),
    ("out shape", "out", lambda x: zeros(3, 3, 512), ValueError, ()),
    ("out of 511", "out", lambda x: x[..., :511], ValueError, ()),
    ("out dtype", "out", lambda x: zeros(3, 4, 512, dtype=np.float32), TypeError, ()),
    ("out zero stride", "out", broadcast, ValueError, ()),
    ("out backwards", "out", lambda x: x[::-1], ValueError, ()),
    ("lse shape", "lse", lambda x: x.T, ValueError, ()),
    ("lse dtype", "lse", lambda x: zeros(3, 4), TypeError, ()),
    ("max_logits shape", "max_logits", lambda x: x[:2], ValueError, ()),
    ("workspace dtype", "workspace", lambda _: object(), TypeError, ()),
]

DSV4 = [
    ("fp16 query", "query", lambda x: x.astype(np.float16), TypeError, ()),
    ("query of 511", "query", lambda x: x[..., :511], ValueError, ()),
    ("no heads", "query", lambda x: x[:, :0], ValueError, ()),
    ("query apart", "query", apart, ValueError, ()),
    ("swa of 576", "swa_kv_cache", lambda x: zeros(5, 4, 576), ValueError, ()),
    ("compressed fp32", "compressed_kv_cache", lambda x: x.astype(np.float32), TypeError, ()),
    ("int64 table", "sparse_indices", lambda x: x.astype(np.int64), TypeError, ()),
    ("table apart", "sparse_indices", apart, ValueError, ()),
    ("table rows", "sparse_indices", lambda x: x[:2], ValueError, ("query",)),
    ("narrow table", "sparse_indices", lambda x: x[:, :3], ValueError, ("window",)),
    ("no lengths", "sparse_topk_lens", lambda _: None, (TypeError, ValueError), ()),
    ("length rows", "sparse_topk_lens", lambda x: x[:2], ValueError, ()),
    ("length dtype", "sparse_topk_lens", lambda x: x.astype(np.int64), TypeError, ()),
    ("sink dtype", "sinks", lambda x: x.astype(np.float64), TypeError, ()),
    ("bmm1 text", "bmm1_scale", lambda _: "big", TypeError, ()),
    ("bmm1 None", "bmm1_scale", lambda _: None, TypeError, ()),
    ("bmm1 infinite", "bmm1_scale", lambda _: np.inf, ValueError, ()),
    ("bmm2 of 2", "bmm2_scale", lambda _: 2.0, ValueError, ()),
    ("window 0", "window", lambda _: 0, ValueError, ()),
    ("window 1.5", "window", lambda _: 1.5, TypeError, ()),
    ("q_len text", "max_q_len", lambda _: "1", TypeError, ()),
    ("out shape", "out", lambda x: zeros(3, 3, 512), ValueError, ()),
    ("out dtype", "out", lambda x: zeros(3, 4, 512, dtype=np.float32), TypeError, ()),
    ("workspace dtype", "workspace_buffer", lambda _: zeros(9), TypeError, ()),
]

MLA = [
    ("not an array", "q", lambda x: 3.0, TypeError, ()),
    ("fp16 q", "q", lambda x: x.astype(np.float16), TypeError, ()),
    ("q of 575", "q", lambda x: x[..., :575], ValueError, ()),
    ("q of rank 2", "q", lambda x: x[0], ValueError, ()),
    ("q of rank 4", "q", lambda x: x[None], ValueError, ("out",)),
    ("129 heads", "q", lambda x: zeros(3, 129, 576), ValueError, ()),
    ("q apart", "q", apart, ValueError, ()),
    ("few tokens", "q", lambda x: x[:2], ValueError, ("cu_seqlens_q", "out")),
    ("pair tokens", "q", lambda x: (x[..., :512], x[1:, :, 512:]), ValueError, ("q[1]", "q_pe")),
    ("cache of 640", "kv_cache", lambda x: x[..., :640], ValueError, ()),
    ("cache address", "kv_cache", lambda x: shifted(x, 4), ValueError, ()),
    ("cache apart", "kv_cache", apart, ValueError, ()),
    ("int64 table", "block_table", lambda x: x.astype(np.int64), TypeError, ()),
    ("table of rank 1", "block_table", lambda x: x[0], ValueError, ()),
    ("few tables", "block_table", lambda x: x[:1], ValueError, ("cache_seqlens",)),
    ("no table", "block_table", lambda _: None, ValueError, ("slot_table",)),
    ("two tables", "slot_table", lambda _: np.zeros((2, 9), np.int32), ValueError,
     ("block_table",)),
    ("int64 lengths", "cache_seqlens", lambda x: x.astype(np.int64), TypeError, ()),
    ("few lengths", "cache_seqlens", lambda x: x[:1], ValueError, ("cu_seqlens_q",)),
    ("lengths of rank 2", "cache_seqlens", lambda x: x[None], ValueError, ()),
    ("no starts", "cu_seqlens_q", lambda _: None, ValueError, ("cache_seqlens",)),
    ("few starts", "cu_seqlens_q", lambda x: x[:2], ValueError, ()),
    ("int64 starts", "cu_seqlens_q", lambda x: x.astype(np.int64), TypeError, ()),
    ("sink dtype", "attn_sink", lambda x: x.astype(np.float64), TypeError, ()),
    ("sink heads", "attn_sink", lambda x: x[:3], ValueError, ()),
    ("q_scale of bf16", "q_scale", lambda _: 2.0, ValueError, ()),
    ("kv_scale of 2", "kv_scale", lambda _: 2.0, ValueError, ()),
    ("scale None", "softmax_scale", lambda _: None, TypeError, ()),
    ("window of 1", "window_size", lambda _: 3, TypeError, ()),
    ("window of 3", "window_size", lambda _: (1, 2, 3), ValueError, ()),
    ("window of floats", "window_size", lambda _: (1.0, 2), TypeError, ()),
    ("window below -1", "window_size", lambda _: (-2, 0), ValueError, ()),
    ("window None", "window_size", lambda _: None, TypeError, ()),
    ("window as an array", "window_size", lambda _: np.zeros(2, np.int32), TypeError, ()),
    ("chunk below 0", "attention_chunk", lambda _: -1, ValueError, ()),
    ("softcap below 0", "softcap", lambda _: -1.0, ValueError, ()),
    ("cp of 2", "cp", lambda _: (0, 1), ValueError, ()),
    ("cp of text", "cp", lambda _: "abc", TypeError, ()),
    ("rank past the end", "cp", lambda _: (2, 2, 1), ValueError, ()),
    ("no rank", "cp", lambda _: (0, 0, 1), ValueError, ()),
    ("q_len -1", "max_seqlen_q", lambda _: -1, ValueError, ()),
    ("k_len text", "max_seqlen_k", lambda _: "1", TypeError, ()),
    ("splits 65", "num_splits", lambda _: 65, ValueError, ()),
    ("format", "kv_format", lambda _: "int4", ValueError, ()),
    ("out shape", "out", lambda x: zeros(3, 3, 512), ValueError, ()),
    ("out dtype", "out", lambda x: zeros(3, 4, 512, dtype=np.float32), TypeError, ()),
    ("out backwards", "out", lambda x: x[::-1], ValueError, ()),
    ("lse shape", "lse", lambda x: x.T, ValueError, ()),
    ("lse dtype", "lse", lambda x: zeros(3, 4), TypeError, ()),
    ("workspace dtype", "workspace", lambda _: object(), TypeError, ()),
    ("small workspace", "workspace", lambda _: zeros(9, dtype=np.uint8), ValueError, ()),
]  # fmt: skip

MERGE = [
    ("integers", "out_a", lambda x: x.view(np.int16), TypeError, ()),
    ("two dtypes", "out_b", lambda x: x.astype(np.float32), TypeError, ("out_a",)),
    ("rank", "out_a", lambda x: x[0], ValueError, ()),
    ("heads", "out_b", lambda x: x[:, :3], ValueError, ("out_a",)),
    ("lse dtype", "lse_a", lambda x: x.astype(np.float64), TypeError, ()),
    ("lse shape", "lse_b", lambda x: x[:, :3], ValueError, ()),
    ("lse of rank 3", "lse_a", lambda x: x[..., None], ValueError, ()),
    ("few sinks", "attn_sink", lambda _: zeros(3, dtype=np.float32), ValueError, ()),
    ("bf16 sinks", "attn_sink", lambda _: zeros(4), TypeError, ()),
    ("out dtype", "out", lambda x: x.astype(np.float32), TypeError, ()),
    ("out shape", "out", lambda x: x[:2], ValueError, ()),
    ("new lse shape", "lse", lambda x: x[:2], ValueError, ()),
    ("out zero stride", "out", broadcast, ValueError, ()),
]

PARTIALS = [
    ("integers", "outs", lambda x: x.view(np.int16), TypeError, ()),
    ("rank", "outs", lambda x: x[0, 0], ValueError, ()),
    ("one part", "outs", lambda x: x[0], ValueError, ()),
    ("no parts", "outs", lambda x: x[:0], ValueError, ()),
    ("many parts", "outs", lambda x: np.repeat(x, 22, 0), ValueError, ()),
    ("lses dtype", "lses", lambda x: x.astype(np.float64), TypeError, ()),
    ("lses of fewer parts", "lses", lambda x: x[:2], ValueError, ()),
    ("lses of rank 2", "lses", lambda x: x[0], ValueError, ()),
    ("lses of fewer heads", "lses", lambda x: x[..., :3], ValueError, ()),
    ("few sinks", "attn_sink", lambda _: zeros(3, dtype=np.float32), ValueError, ()),
    ("out dtype", "out", lambda x: x.astype(np.float32), TypeError, ()),
    ("out shape", "out", lambda x: x[:2], ValueError, ()),
    ("new lse shape", "lse", lambda x: x[:2], ValueError, ()),
    ("out zero stride", "out", broadcast, ValueError, ()),
]

K_UP = [
    ("fp32", "q_nope", lambda x: x.astype(np.float32), TypeError, ()),
    ("width", "q_nope", lambda x: x[..., :100], ValueError, ("W_UK",)),
    ("heads", "W_UK", lambda x: x[:, :3], ValueError, ("q_nope",)),
    ("latent", "W_UK", lambda x: x[:500], ValueError, ()),
    ("weight rank", "W_UK", lambda x: x[:, 0], ValueError, ()),
    ("weight dtype", "W_UK", lambda x: x.astype(np.float32), TypeError, ()),
    ("out shape", "out", lambda x: x[..., :100], ValueError, ()),
    ("out dtype", "out", lambda x: x.astype(np.float32), TypeError, ()),
]

V_UP = [
    ("width", "x", lambda x: x[..., :500], ValueError, ("W_UV",)),
    ("rank", "x", lambda x: x[0], ValueError, ()),
    ("heads", "W_UV", lambda x: x[:, :3], ValueError, ("x",)),
    ("out shape", "out", lambda x: x[..., :100], ValueError, ()),
]

KV_UP = [
    ("fp32", "kv_c", lambda x: x.astype(np.float32), TypeError, ()),
    ("width", "kv_c", lambda x: x[:, :500], ValueError, ()),
    ("rank", "kv_c", lambda x: x[:, None], ValueError, ()),
    ("apart", "kv_c", apart, ValueError, ()),
    ("a layer's weight", "kv_b_proj", lambda x: x.T, ValueError, ("transpose",)),
    ("weight rank", "kv_b_proj", lambda x: x[..., None], ValueError, ()),
    ("weight dtype", "kv_b_proj", lambda x: x.astype(np.float16), TypeError, ()),
    ("out shape", "out", lambda x: x[:, :100], ValueError, ()),
    ("out tokens", "out", lambda x: x[:2], ValueError, ()),
    ("out dtype", "out", lambda x: x.astype(np.float32), TypeError, ()),
]

GROUPED = [
    ("fp16 o", "o", lambda x: x.astype(np.float16), TypeError, ()),
    ("rank", "o", lambda x: x[0], ValueError, ()),
    ("no groups", "o", lambda x: x[:, :0], ValueError, ()),
    ("129 groups", "o", lambda _: zeros(3, 129, 256, dtype=np.uint8), ValueError, ()),
    ("o apart", "o", apart, ValueError, ()),
    ("bf16 o with scales", "o", lambda _: zeros(3, 2, 256), ValueError, ("o_scale",)),
    ("no multiple of 128", "o", lambda x: x[..., :200], ValueError, ("weight",)),
    ("no o_scale", "o_scale", lambda _: None, ValueError, ()),
    ("bf16 o_scale", "o_scale", ref.to_bf16, TypeError, ()),
    ("few rows of o_scale", "o_scale", lambda x: x[:2], ValueError, ()),
    ("groups of o_scale", "o_scale", lambda x: x[:, :1], ValueError, ()),
    ("columns of o_scale", "o_scale", lambda x: x[..., :1], ValueError, ()),
    ("packed o_scale", "o_scale", lambda x: x[..., :1].astype(np.int32), ValueError, ("o",)),
    ("bf16 weight", "weight", lambda x: zeros(*x.shape), TypeError, ("o",)),
    ("groups of weight", "weight", lambda x: x[:1], ValueError, ("o",)),
    ("width of weight", "weight", lambda x: x[..., :128], ValueError, ("o",)),
    ("weight apart", "weight", apart, ValueError, ()),
    ("no weight_scale", "weight_scale", lambda _: None, ValueError, ()),
    ("fp64 weight_scale", "weight_scale", lambda x: x.astype(np.float64), TypeError, ()),
    ("rows of weight_scale", "weight_scale", lambda x: x[:, :1], ValueError, ()),
    ("columns of weight_scale", "weight_scale", lambda x: x[..., :1], ValueError, ()),
    ("out shape", "out", lambda x: x[..., :100], ValueError, ()),
    ("out dtype", "out", lambda x: x.astype(np.float32), TypeError, ()),
    ("out zero stride", "out", broadcast, ValueError, ()),
]

QUANT = [
    ("int32", "x", lambda x: x.astype(np.int32), TypeError, ()),
    ("text", "x", lambda x: "x", TypeError, ()),
    ("out shape", "out", lambda _: zeros(3, 41, dtype=np.uint8), ValueError, ()),
    ("out dtype", "out", lambda _: zeros(3, 40, dtype=np.float32), TypeError, ()),
]

SCALED = [
    ("int32", "x", lambda x: x.astype(np.int32), TypeError, ()),
    ("rank", "x", lambda x: x[0], ValueError, ()),
    ("x apart", "x", apart, ValueError, ()),
    ("rows", "x", lambda x: x[:3], ValueError, ()),
    ("columns", "x", lambda x: x[:, :47], ValueError, ()),
    ("no group", "group", lambda _: None, TypeError, ()),
    ("three sizes", "group", lambda _: (1, 2, 3), ValueError, ()),
    ("group of 0", "group", lambda _: (0, 16), ValueError, ()),
    ("group of -2", "group", lambda _: (2, -2), ValueError, ()),
    ("rows of a group", "group", lambda _: (3, 16), ValueError, ("x",)),
    ("columns of a group", "group", lambda _: (2, 7), ValueError, ("x",)),
    ("out shape", "out", lambda x: x[:, :32], ValueError, ()),
    ("out dtype", "out", lambda x: x.astype(np.float32), TypeError, ()),
    ("out apart", "out", apart, ValueError, ()),
    ("descale rows", "descale", lambda x: x[:1], ValueError, ()),
    ("descale columns", "descale", lambda x: x[:, :2], ValueError, ()),
    ("descale dtype", "descale", lambda x: x.astype(np.float16), TypeError, ()),
    ("descale zero stride", "descale", broadcast, ValueError, ()),
]

LINEAR = [
    ("fp32 x", "x", lambda x: x.astype(np.float32), TypeError, ()),
    ("rank", "x", lambda x: x[0], ValueError, ()),
    ("x apart", "x", apart, ValueError, ()),
    ("no multiple of 128", "x", lambda x: x[:, :200], ValueError, ()),
    ("another width", "x", lambda x: x[:, :128], ValueError, ("weight",)),
    ("bf16 weight", "weight", lambda x: zeros(*x.shape), TypeError, ()),
    ("width of weight", "weight", lambda x: x[:, :128], ValueError, ()),
    ("outputs of weight", "weight", lambda x: x[:100], ValueError, ("descale",)),
    ("weight apart", "weight", apart, ValueError, ()),
    ("no descale", "descale", lambda _: None, TypeError, ()),
    ("bf16 descale", "descale", ref.to_bf16, TypeError, ()),
    ("rows of descale", "descale", lambda x: x[:1], ValueError, ()),
    ("columns of descale", "descale", lambda x: x[:, :1], ValueError, ()),
    ("a scale per output", "descale", lambda _: np.ones(140, np.float32), ValueError, ()),
    ("another group", "input_group", lambda _: (1, -1), ValueError, ("descale",)),
    ("no scheme", "input_group", lambda _: (2, 128), ValueError, ("descale",)),
    ("one size", "input_group", lambda _: 128, TypeError, ()),
    ("out shape", "out", lambda x: x[:, :139], ValueError, ()),
    ("out dtype", "out", lambda x: x.astype(np.float32), TypeError, ()),
    ("out zero stride", "out", broadcast, ValueError, ()),
    ("small workspace", "workspace", lambda _: np.zeros(700, np.uint8), ValueError, ()),
    ("fp32 workspace", "workspace", lambda _: np.zeros(900, np.float32), TypeError, ()),
]

NORM = [
    ("fp32 q", "q", lambda x: x.astype(np.float32), TypeError, ()),
    ("fp32 kv", "kv", lambda x: x.astype(np.float32), TypeError, ()),
    ("q of rank 3", "q", lambda x: x[None], ValueError, ()),
    ("kv tokens", "kv", lambda x: x[:2], ValueError, ("q",)),
    ("kv width", "kv", lambda x: x[:, :511], ValueError, ()),
    ("q_weight width", "q_weight", lambda x: x[:95], ValueError, ("q",)),
    ("kv_weight width", "kv_weight", lambda _: zeros(513), ValueError, ()),
    ("fp16 weight", "q_weight", lambda x: x.astype(np.float16), TypeError, ()),
    ("weight apart", "kv_weight", apart, ValueError, ()),
    ("weight of rank 2", "kv_weight", lambda x: x[None], ValueError, ()),
    ("q_out shape", "q_out", lambda x: x[:, :95], ValueError, ()),
    ("kv_out dtype", "kv_out", lambda x: x.astype(np.float32), TypeError, ()),
    ("kv_out tokens", "kv_out", lambda x: x[:2], ValueError, ()),
    ("negative eps", "eps", lambda _: -1e-9, ValueError, ()),
    ("eps is NaN", "eps", lambda _: np.nan, ValueError, ()),
    ("eps is 0 in fp32", "eps", lambda _: 1e-46, ValueError, ()),
    (
        "eps is subnormal in fp32",
        "eps",
        lambda _: np.nextafter(2.0**-126, 0) * 0.999,
        ValueError,
        (),
    ),
    ("eps beyond fp32", "eps", lambda _: 1e39, ValueError, ()),
    ("eps is text", "eps", lambda _: "1e-6", TypeError, ()),
]

ROPE_AND_CACHE = [
    ("fp16 q_pe", "q_pe", lambda x: x.astype(np.float16), TypeError, ()),
    ("fp32 q_pe", "q_pe", lambda x: x.astype(np.float32), TypeError, ("k_pe",)),
    ("rank 2", "q_pe", lambda x: x[:, 0], ValueError, ()),
    ("another width", "q_pe", lambda x: x[..., :32], ValueError, ("k_pe",)),
    ("fewer tokens", "q_pe", lambda x: x[:2], ValueError, ("k_pe",)),
    ("q_pe apart", "q_pe", apart, ValueError, ()),
    ("few positions", "positions", lambda x: x[:2], ValueError, ()),
    ("int16 positions", "positions", lambda x: x.astype(np.int16), TypeError, ()),
    (
        "position past the end",
        "positions",
        lambda x: replaced(x, 1, 8),
        ValueError,
        ("rope_table",),
    ),
    ("negative position", "positions", lambda x: replaced(x, 2, -1), ValueError, ("rope_table",)),
    ("no k_pe", "k_pe", lambda _: None, TypeError, ()),
    ("fp32 k_pe", "k_pe", lambda x: x.astype(np.float32), TypeError, ()),
    ("k_pe of heads", "k_pe", lambda x: x[:, None], ValueError, ()),
    ("k_pe tokens", "k_pe", lambda x: x[:2], ValueError, ()),
    ("k_pe apart", "k_pe", apart, ValueError, ()),
    ("fp16 table", "rope_table", lambda x: x.astype(np.float16), TypeError, ()),
    ("table width", "rope_table", lambda x: x[:, :32], ValueError, ()),
    ("fp32 kv_c", "kv_c", lambda x: x.astype(np.float32), TypeError, ()),
    ("kv_c of 511", "kv_c", lambda x: x[:, :511], ValueError, ()),
    ("few kv_c rows", "kv_c", lambda x: x[:2], ValueError, ("slot_mapping",)),
    ("cache of 512", "kv_cache", lambda _: zeros(3, 4, 512), (TypeError, ValueError), ()),
    ("cache of 655", "kv_cache", lambda x: x[..., :655], ValueError, ()),
    ("apart cache", "kv_cache", apart, ValueError, ()),
    ("more slots", "slot_mapping", lambda x: x.repeat(2), ValueError, ("kv_c",)),
    ("int16 slots", "slot_mapping", lambda x: x.astype(np.int16), TypeError, ()),
    ("slot past the end", "slot_mapping", lambda x: replaced(x, 0, 12), ValueError, ()),
    ("fp32 q_out", "q_out", lambda x: x.astype(np.float32), TypeError, ()),
    ("q_out heads", "q_out", lambda x: x[:, :3], ValueError, ()),
    ("q_out apart", "q_out", apart, ValueError, ()),
    ("unknown format", "kv_cache_dtype", lambda _: "fp7", ValueError, ()),
    ("format type", "kv_cache_dtype", lambda _: 8, TypeError, ()),
]

APPLY_ROPE = [
    ("fp16 q_pe", "q_pe", lambda x: x.astype(np.float16), TypeError, ()),
    ("fp32 q_pe", "q_pe", lambda x: x.astype(np.float32), TypeError, ("k_pe",)),
    ("rank 2", "q_pe", lambda x: x[:, 0], ValueError, ()),
    ("rank 4", "q_pe", lambda x: x[None], ValueError, ()),
    ("odd width", "q_pe", lambda x: x[..., :15], ValueError, ()),
    ("no width", "q_pe", lambda x: x[..., :0], ValueError, ()),
    ("another width", "q_pe", lambda x: x[..., :14], ValueError, ("k_pe",)),
    ("q_pe apart", "q_pe", apart, ValueError, ()),
    ("fewer tokens", "q_pe", lambda x: x[:2], ValueError, ("k_pe",)),
    ("q_pe is a list", "q_pe", lambda x: x.tolist(), TypeError, ()),
    ("few positions", "positions", lambda x: x[:2], ValueError, ()),
    ("int16 positions", "positions", lambda x: x.astype(np.int16), TypeError, ()),
    ("positions of rank 2", "positions", lambda x: x[None], ValueError, ()),
    (
        "position past the end",
        "positions",
        lambda x: replaced(x, 1, 8),
        ValueError,
        ("rope_table",),
    ),
    ("negative position", "positions", lambda x: replaced(x, 2, -1), ValueError, ("rope_table",)),
    ("far position", "positions", lambda x: replaced(x, 0, 2**62), ValueError, ("rope_table",)),
    ("fp32 k_pe", "k_pe", lambda x: x.astype(np.float32), TypeError, ()),
    ("k_pe of heads", "k_pe", lambda x: x[:, None], ValueError, ()),
    ("k_pe width", "k_pe", lambda x: x[:, :8], ValueError, ()),
    ("k_pe tokens", "k_pe", lambda x: x[:2], ValueError, ()),
    ("no k_pe", "k_pe", lambda _: None, ValueError, ("k_out",)),
    ("k_pe apart", "k_pe", apart, ValueError, ()),
    ("fp16 table", "rope_table", lambda x: x.astype(np.float16), TypeError, ()),
    ("table width", "rope_table", lambda x: x[:, :8], ValueError, ()),
    ("empty table", "rope_table", lambda x: x[:0], ValueError, ("positions",)),
    ("table apart", "rope_table", apart, ValueError, ()),
    ("no table", "rope_table", lambda _: None, TypeError, ()),
    ("fp32 q_out", "q_out", lambda x: x.astype(np.float32), TypeError, ()),
    ("q_out heads", "q_out", lambda x: x[:, :3], ValueError, ()),
    ("q_out apart", "q_out", apart, ValueError, ()),
    ("k_out width", "k_out", lambda x: x[:, :8], ValueError, ()),
    ("k_out of heads", "k_out", lambda x: x[:, None], ValueError, ()),
]

INVERSE = [
    ("fp32 o", "o", lambda x: x.astype(np.float32), TypeError, ()),
    ("width", "o", lambda x: x[..., :448], ValueError, ()),
    ("rank", "o", lambda x: x[0], ValueError, ()),
    ("no heads", "o", lambda x: x[:, :0], ValueError, ()),
    ("129 heads", "o", lambda _: zeros(3, 129, 512), ValueError, ()),
    ("few positions", "positions", lambda x: x[:2], ValueError, ("o",)),
    ("int16 positions", "positions", lambda x: x.astype(np.int16), TypeError, ()),
    ("positions of rank 2", "positions", lambda x: x[None], ValueError, ()),
    (
        "position past the end",
        "positions",
        lambda x: replaced(x, 1, 8),
        ValueError,
        ("rope_table",),
    ),
    ("negative position", "positions", lambda x: replaced(x, 2, -1), ValueError, ("rope_table",)),
    ("far position", "positions", lambda x: replaced(x, 0, 2**62), ValueError, ("rope_table",)),
    ("empty table", "rope_table", lambda x: x[:0], ValueError, ("positions",)),
    ("bf16 table", "rope_table", ref.to_bf16, TypeError, ()),
    ("table width", "rope_table", lambda x: x[:, :32], ValueError, ()),
    ("table apart", "rope_table", apart, ValueError, ()),
    ("three groups", "groups", lambda _: 3, ValueError, ("o",)),
    ("no groups", "groups", lambda _: 0, ValueError, ("o",)),
    ("minus two groups", "groups", lambda _: -2, ValueError, ("o",)),
    ("groups are text", "groups", lambda _: "2", TypeError, ()),
    ("unknown layout", "scale_layout", lambda _: "fp16", ValueError, ()),
    ("layout is a number", "scale_layout", lambda _: 1, ValueError, ()),
    ("fp32 scales of ue8m0x4", "scale_layout", lambda _: "ue8m0x4", TypeError, ("out_scale",)),
    ("bf16 out with scales", "out", lambda x: zeros(*x.shape), TypeError, ()),
    ("out shape", "out", lambda x: x[..., :512], ValueError, ()),
    ("out groups", "out", lambda x: x[:, :1], ValueError, ()),
    ("few rows of scales", "out_scale", lambda x: x[:2], ValueError, ()),
    ("columns of scales", "out_scale", lambda x: x[..., :7], ValueError, ()),
    ("dtype of scales", "out_scale", lambda x: x.astype(np.float64), TypeError, ()),
]

QNORM = [
    ("fp32 q", "q", lambda x: x.astype(np.float32), TypeError, ()),
    ("q is a list", "q", lambda _: [1.0], TypeError, ()),
    ("q width", "q", lambda x: x[..., :448], ValueError, ()),
    ("q rank", "q", lambda x: x[0], ValueError, ()),
    ("no heads", "q", lambda x: x[:, :0], ValueError, ()),
    ("129 heads", "q", lambda _: zeros(5, 129, 512), ValueError, ()),
    ("few queries", "q", lambda x: x[:4], ValueError, ("q_out",)),
    ("fp32 kv", "kv", lambda x: x.astype(np.float32), TypeError, ()),
    ("few keys", "kv", lambda x: x[:4], ValueError, ()),
    ("kv width", "kv", lambda x: x[:, :448], ValueError, ()),
    ("few positions", "positions", lambda x: x[:4], ValueError, ()),
    ("int16 positions", "positions", lambda x: x.astype(np.int16), TypeError, ()),
    (
        "position past the end",
        "positions",
        lambda x: replaced(x, 4, 8),
        ValueError,
        ("rope_table",),
    ),
    ("negative position", "positions", lambda x: replaced(x, 2, -1), ValueError, ("rope_table",)),
    ("bf16 table", "rope_table", ref.to_bf16, TypeError, ()),
    ("table width", "rope_table", lambda x: x[:, :32], ValueError, ()),
    ("fp32 cache", "kv_cache", lambda x: x.astype(np.float32), TypeError, ()),
    ("cache of 656", "kv_cache", lambda _: zeros(3, 4, 656, dtype=np.uint8), ValueError, ()),
    ("cache of 528", "kv_cache", lambda _: zeros(3, 4, 528, dtype=np.uint8), ValueError, ()),
    ("many slots", "slot_mapping", lambda _: zeros(6, dtype=np.int64), ValueError, ()),
    ("fp32 slots", "slot_mapping", lambda x: x.astype(np.float32), TypeError, ()),
    ("slot past the end", "slot_mapping", lambda x: replaced(x, 1, 12), ValueError, ("kv_cache",)),
    ("kv_scale 0", "kv_scale", lambda _: 0.0, ValueError, ()),
    ("two scales", "kv_scale", lambda _: zeros(2, dtype=np.float32), ValueError, ()),
    ("kv_scale is None", "kv_scale", lambda _: None, TypeError, ()),
    ("q_scale_inv 0", "q_scale_inv", lambda _: 0.0, ValueError, ("q_out",)),
    ("q_scale_inv is text", "q_scale_inv", lambda _: "1", TypeError, ()),
    ("bf16 codes", "q_scale_inv", lambda _: 1.0, TypeError, ("q_out",)),
    ("codes without a scale", "q_out", lambda x: zeros(*x.shape, dtype=np.uint8), TypeError, ()),
    ("fewer heads", "q_out", lambda x: x[:, :3], ValueError, ()),
    ("q_out width", "q_out", lambda x: x[..., :448], ValueError, ()),
    ("many results", "q_out", lambda _: zeros(6, 5, 512), ValueError, ()),
    ("negative eps", "eps", lambda _: -1e-9, ValueError, ()),
    ("eps is NaN", "eps", lambda _: np.nan, ValueError, ()),
    ("eps is 0 in fp32", "eps", lambda _: 1e-46, ValueError, ()),
    (
        "eps is subnormal in fp32",
        "eps",
        lambda _: np.nextafter(2.0**-126, 0) * 0.999,
        ValueError,
        (),
    ),
    ("unknown format", "kv_format", lambda _: "fp5", ValueError, ()),
    ("block_size 0", "block_size", lambda _: 0, ValueError, ()),
]

INDEX_QUERY = [
    ("fp32 q", "q", lambda x: x.astype(np.float32), TypeError, ()),
    ("width", "q", lambda x: x[..., :64], ValueError, ()),
    ("rank", "q", lambda x: x[0], ValueError, ()),
    ("no heads", "q", lambda x: x[:, :0], ValueError, ()),
    ("q apart", "q", apart, ValueError, ()),
    ("fp16 weights", "weights", lambda x: x.astype(np.float16), TypeError, ()),
    ("heads of weights", "weights", lambda x: x[:, :1], ValueError, ("q",)),
    ("tokens of weights", "weights", lambda x: x[:2], ValueError, ("q",)),
    ("few positions", "positions", lambda x: x[:2], ValueError, ("q",)),
    (
        "position past the end",
        "positions",
        lambda x: replaced(x, 1, 8),
        ValueError,
        ("rope_table",),
    ),
    ("negative position", "positions", lambda x: replaced(x, 2, -1), ValueError, ("rope_table",)),
    ("bf16 table", "rope_table", ref.to_bf16, TypeError, ()),
    ("table width", "rope_table", lambda x: x[:, :32], ValueError, ()),
    ("e4m3 out", "out", lambda x: x.view(ref.E4M3), TypeError, ()),
    ("out width", "out", lambda _: zeros(3, 2, 128, dtype=np.uint8), ValueError, ()),
    ("out heads", "out", lambda x: x[:, :1], ValueError, ()),
    ("bf16 weights out", "out_weights", ref.to_bf16, TypeError, ()),
    ("shape of weights out", "out_weights", lambda x: x[:2], ValueError, ("q",)),
    ("int32 scales", "out_scale", lambda _: zeros(3, 2, 1, dtype=np.int32), TypeError, ()),
    ("columns of scales", "out_scale", lambda x: x[..., :3], ValueError, ()),
    ("softmax_scale is NaN", "softmax_scale", lambda _: np.nan, ValueError, ()),
    ("head_scale is infinite", "head_scale", lambda _: np.inf, ValueError, ()),
    ("head_scale is text", "head_scale", lambda _: "1", TypeError, ()),
]

LOGITS = [
    ("fp32 q", "q", lambda x: x.astype(np.float32), TypeError, ()),
    ("q width", "q", lambda x: x[..., :64], ValueError, ("q_scale",)),
    ("q rank", "q", lambda x: x[0], ValueError, ()),
    ("no heads", "q", lambda x: x[:, :0], ValueError, ()),
    ("q apart", "q", apart, ValueError, ()),
    ("bf16 weights", "weights", ref.to_bf16, TypeError, ()),
    ("heads of weights", "weights", lambda x: x[:, :1], ValueError, ("q",)),
    ("tokens of weights", "weights", lambda x: x[:2], ValueError, ("q",)),
    ("fp32 keys", "k_cache", lambda x: x.astype(np.float32), TypeError, ()),
    ("keys of 656", "k_cache", lambda _: zeros(5, 4, 656, dtype=np.uint8), ValueError, ()),
    ("flat pages", "k_cache", lambda x: x[:, 0], ValueError, ("block_size", "kv_format")),
    ("int64 lengths", "context_lens", lambda x: x.astype(np.int64), TypeError, ()),
    ("few lengths", "context_lens", lambda x: x[:2], ValueError, ("q",)),
    ("int64 table", "block_table", lambda x: x.astype(np.int64), TypeError, ()),
    ("table rank", "block_table", lambda x: x[0], ValueError, ()),
    ("few ids", "req_id_per_token", lambda x: x[:2], ValueError, ("q",)),
    ("bad id", "req_id_per_token", lambda x: replaced(x, 1, 2), ValueError, ("block_table",)),
    ("starts", "starts", lambda _: zeros(3, dtype=np.int32), ValueError, ()),
    ("q_scale of e4m3", "q_scale", lambda _: zeros(3, 2, 4, dtype=np.uint8), ValueError, ("q",)),
    ("fp16 out", "out", lambda x: x.astype(np.float16), TypeError, ()),
    ("out tokens", "out", lambda x: x[:2], ValueError, ()),
    ("out apart", "out", apart, ValueError, ()),
    ("unknown dtype", "dtype", lambda _: "float16", ValueError, ()),
    ("unknown format", "kv_format", lambda _: "fp5", ValueError, ()),
    ("block_size", "block_size", lambda _: 5, ValueError, ("k_cache",)),
]

SAVE = [
    ("fp16 kv", "kv", lambda x: x.astype(np.float16), TypeError, ()),
    ("kv is a list", "kv", lambda _: [1.0], TypeError, ()),
    ("kv width", "kv", lambda x: x[:, :64], ValueError, ()),
    ("few rows", "kv", lambda x: x[:4], ValueError, ()),
    ("another dtype", "score", ref.to_bf16, TypeError, ()),
    ("score width", "score", lambda x: x[:, :64], ValueError, ()),
    ("bf16 ape", "ape", ref.to_bf16, TypeError, ()),
    ("no rows", "ape", lambda x: x[:0], ValueError, ()),
    ("r 4 with c 1", "ape", lambda _: zeros(4, 128, dtype=np.float32), ValueError, ()),
    ("r 3 with c 2", "ape", lambda _: zeros(3, 256, dtype=np.float32), ValueError, ()),
    ("few positions", "positions", lambda x: x[:4], ValueError, ()),
    ("fp32 positions", "positions", lambda x: x.astype(np.float32), TypeError, ()),
    ("negative position", "positions", lambda x: replaced(x, 2, -1), ValueError, ()),
    ("bf16 state", "state", ref.to_bf16, TypeError, ()),
    ("state width", "state", lambda x: x[..., :128], ValueError, ()),
    ("flat state", "state", lambda x: x[0], ValueError, ()),
    ("no rows per page", "state", lambda x: x[:, :0], ValueError, ()),
    ("state twice", "state", broadcast, ValueError, ()),
    ("many slots", "slot_mapping", lambda _: zeros(7, dtype=np.int64), ValueError, ("kv",)),
    ("int16 slots", "slot_mapping", lambda x: x.astype(np.int16), TypeError, ()),
    ("slot past the end", "slot_mapping", lambda x: replaced(x, 1, 12), ValueError, ("state",)),
]

COMPRESS = [
    ("bf16 state", "state", ref.to_bf16, TypeError, ()),
    ("state width", "state", lambda x: x[..., :512], ValueError, ()),
    ("no rows per page", "state", lambda x: x[:, :0], ValueError, ()),
    ("int64 table", "block_table", lambda x: x.astype(np.int64), TypeError, ()),
    ("page past the end", "block_table", lambda x: replaced(x, 1, 3), ValueError, ("state",)),
    ("few ids", "req_id_per_token", lambda x: x[:4], ValueError, ()),
    ("int64 ids", "req_id_per_token", lambda x: x.astype(np.int64), TypeError, ()),
    (
        "request past the end",
        "req_id_per_token",
        lambda x: replaced(x, 1, 2),
        ValueError,
        ("block_table",),
    ),
    ("few positions", "positions", lambda x: x[:4], ValueError, ()),
    (
        "position past the end",
        "positions",
        lambda x: replaced(x, 4, 8),
        ValueError,
        ("rope_table",),
    ),
    ("negative position", "positions", lambda x: replaced(x, 2, -1), ValueError, ("rope_table",)),
    ("fp32 slots", "slot_mapping", lambda x: x.astype(np.float32), TypeError, ()),
    ("slot past the end", "slot_mapping", lambda x: replaced(x, 1, 12), ValueError, ("state",)),
    ("fp32 cache", "kv_cache", lambda x: x.astype(np.float32), TypeError, ()),
    ("cache of 656", "kv_cache", lambda _: zeros(3, 4, 656, dtype=np.uint8), ValueError, ()),
    ("cache of 528", "kv_cache", lambda _: zeros(3, 4, 528, dtype=np.uint8), ValueError, ()),
    ("few kv slots", "kv_slot_mapping", lambda x: x[:4], ValueError, ()),
    (
        "kv slot past the end",
        "kv_slot_mapping",
        lambda x: replaced(x, 1, 12),
        ValueError,
        ("kv_cache",),
    ),
    ("weight width", "norm_weight", lambda x: x[:128], ValueError, ("state",)),
    ("127 weights", "norm_weight", lambda x: x[:127], ValueError, ()),
    ("fp16 weight", "norm_weight", lambda x: x.astype(np.float16), TypeError, ()),
    ("bf16 table", "rope_table", ref.to_bf16, TypeError, ()),
    ("table width", "rope_table", lambda x: x[:, :32], ValueError, ()),
    ("ratio 0", "ratio", lambda _: 0, ValueError, ()),
    ("ratio 4", "ratio", lambda _: 4, ValueError, ("state",)),
    ("ratio is a float", "ratio", lambda _: 2.0, TypeError, ()),
    ("kv alone", "kv", lambda _: zeros(5, 512, dtype=np.float32), ValueError, ("ape",)),
    ("score alone", "score", lambda _: zeros(5, 512, dtype=np.float32), ValueError, ("ape",)),
    ("ape alone", "ape", lambda _: zeros(2, 512, dtype=np.float32), ValueError, ("kv",)),
    ("ape of another ratio", "ape", lambda _: zeros(3, 512, dtype=np.float32), ValueError, ()),
    ("kv_scale 0", "kv_scale", lambda _: 0.0, ValueError, ()),
    ("two scales", "kv_scale", lambda _: zeros(2, dtype=np.float32), ValueError, ()),
    ("negative eps", "eps", lambda _: -1e-9, ValueError, ()),
    ("eps is NaN", "eps", lambda _: np.nan, ValueError, ()),
    ("eps is 0 in fp32", "eps", lambda _: 1e-46, ValueError, ()),
    (
        "eps is subnormal in fp32",
        "eps",
        lambda _: np.nextafter(2.0**-126, 0) * 0.999,
        ValueError,
        (),
    ),
    ("unknown format", "kv_format", lambda _: "fp5", ValueError, ()),
    ("block_size 0", "block_size", lambda _: 0, ValueError, ()),
]

TABLE = {
    "indexer_logits": LOGITS,
    "fused_indexer_q_rope_quant": INDEX_QUERY,
    "save_partial_states": SAVE,
    "compress_norm_rope_store": COMPRESS,
    "fused_q_kv_rmsnorm": NORM,
    "fused_qnorm_rope_kv_insert": QNORM,
    "apply_rope": APPLY_ROPE,
    "rope_and_cache_mla": ROPE_AND_CACHE,
    "fused_inv_rope_fp8_quant": INVERSE,
    "concat_and_cache_mla": WRITE,
    "gather_kv_cache": GATHER,
    "convert_req_index_to_global_index": INDEX,
    "compute_global_topk_indices_and_lens": GLOBAL_TOPK,
    "top_k_per_row": TOP_K,
    "combine_topk_swa_indices": COMBINE,
    "build_mixed_sparse_indices": MIXED,
    "sparse_attention": ATTENTION,
    "sparse_mla_dsv4": DSV4,
    "mla_attention": MLA,
    "merge_attn_states": MERGE,
    "merge_attn_partials": PARTIALS,
    "k_up_proj": K_UP,
    "v_up_proj": V_UP,
    "kv_up_proj": KV_UP,
    "grouped_output_projection": GROUPED,
    "dynamic_per_tensor_quant": QUANT,
    "scaled_quantize": SCALED,
    "fp8_linear": LINEAR,
}

# Errors in the values of arrays, which calls check on the CPU, and on a GPU in checked mode.
VALUE_ROWS = (
    "slot past the end", "kv slot past the end", "page past the end", "request past the end",
    "flat cache", "out too short", "bad request", "bad id",
    "position past the end", "negative position", "far position", "empty table",
    "starts decrease", "too many tokens", "bad decode", "bad prefill",
)  # fmt: skip
ROWS = [pytest.param(op, *row, id=f"{op}: {row[0]}") for op, rows in TABLE.items() for row in rows]


@pytest.mark.parametrize(("op", "name", "argument", "bend", "error", "others"), ROWS)
def test_bad_call(op, name, argument, bend, error, others, request):
    if name in VALUE_ROWS:
        request.getfixturevalue("checked")
    call = operators.GOOD_CALLS[op]()
    good = call.args.get(argument, call.kwargs.get(argument))
    bad = bend(good)
    call.set(argument, bad)
    arrays = call.arrays()
    before = {name: np.ascontiguousarray(x).tobytes() for name, x in arrays.items()}
    references = {name: sys.getrefcount(x) for name, x in arrays.items()}
    with pytest.raises(error) as info:
        call.run(sparse_mla)
    assert_error_text(info.value, op, (argument, *others))
    info = None
    for name, x in arrays.items():
        assert np.ascontiguousarray(x).tobytes() == before[name], f"{name} was written"
        assert sys.getrefcount(x) == references[name], f"{name} was leaked"
    if good is None and argument not in call.args:
        del call.kwargs[argument]
    else:
        call.set(argument, good)
    call.run(sparse_mla)


# --- the call itself -----------------------------------------------------------------------------


@pytest.mark.parametrize("op", operators.GOOD_CALLS)
def test_too_few_too_many_and_unknown_arguments(op):
    call = operators.GOOD_CALLS[op]()
    run = getattr(sparse_mla, op)
    with pytest.raises(TypeError):
        run(*list(call.args.values())[:-1], **call.kwargs)
    with pytest.raises(TypeError):
        run(*call.args.values(), None, **call.kwargs)
    with pytest.raises(TypeError, match=r"no_such_option"):
        run(*call.args.values(), **call.kwargs, no_such_option=1)
    with pytest.raises(TypeError):
        run()


@pytest.mark.parametrize("op", operators.GOOD_CALLS)
@pytest.mark.parametrize("stream", ["main", 1.5, object()])
def test_bad_streams(op, stream):
    call = operators.GOOD_CALLS[op]()
    call.kwargs["stream"] = stream
    with pytest.raises(TypeError, match=r"`stream` must .*, got"):
        call.run(sparse_mla)


@pytest.mark.parametrize("stream", [2**64, 2**70, -(2**63) - 1])
def test_streams_beyond_a_handle(stream):
    call = operators.GOOD_CALLS["merge_attn_states"]()
    call.kwargs["stream"] = stream
    with pytest.raises((ValueError, TypeError), match=r"`stream` must .*, got"):
        call.run(sparse_mla)


class Protocol:
    def __init__(self, answer):
        self.answer = answer

    def __cuda_stream__(self):
        return self.answer


@pytest.mark.parametrize("answer", [5, (0,), (0, "x"), (0, 5, 0), [0, 5]], ids=str)
def test_answers_of_the_stream_protocol_that_are_none(answer):
    call = operators.GOOD_CALLS["merge_attn_states"]()
    call.kwargs["stream"] = Protocol(answer)
    with pytest.raises(TypeError, match=r"`stream` must be None, an int .*, got Protocol"):
        call.run(sparse_mla)


def test_the_stream_protocol_answers_version_and_handle():
    call = operators.GOOD_CALLS["merge_attn_states"]()
    call.kwargs["stream"] = Protocol((2**70, 0))
    call.run(sparse_mla)
    call.kwargs["stream"] = Protocol((0, 2**70))
    with pytest.raises(ValueError, match=r"`stream` must be a handle of at most 64 bits, got"):
        call.run(sparse_mla)


@pytest.mark.parametrize("op", operators.GOOD_CALLS)
def test_stream_none_is_the_default(op):
    call = operators.GOOD_CALLS[op]()
    call.kwargs["stream"] = None
    call.run(sparse_mla)


# --- overlap -------------------------------------------------------------------------------------


def test_gather_into_its_own_cache():
    storage = zeros(40, 576)
    cache = storage[:20].reshape(5, 4, 576)
    table = np.array([[4, 0, 2]], np.int32)
    one = np.array([9], np.int32)
    with pytest.raises(ValueError, match=r"gather_kv_cache: `out` must .*, got"):
        sparse_mla.gather_kv_cache(cache, table, one, one * 0, out=storage[10:30])
    sparse_mla.gather_kv_cache(cache, table, one, one * 0, out=storage[20:30])


def test_write_over_its_own_input():
    cache = zeros(3, 4, 576)
    before = cache.copy()
    with pytest.raises(ValueError, match=r"concat_and_cache_mla: `kv_cache` must .*`kv_c`"):
        sparse_mla.concat_and_cache_mla(
            cache[0, :, :512], zeros(4, 64) + 1, cache, np.arange(4, dtype=np.int64)
        )
    assert_same_bits(cache, before)


def test_pages_that_overlap_cannot_be_written():
    """With a page stride below the page's size, two slots would share bytes."""
    raw = np.zeros(3 * 2624, np.uint8)
    cache = np.lib.stride_tricks.as_strided(raw, (3, 4, 656), (1312, 656, 1))
    call = operators.GOOD_CALLS["concat_and_cache_mla"]()
    call.args["kv_cache"] = cache
    with pytest.raises(ValueError, match=r"concat_and_cache_mla: `kv_cache` must .*, got"):
        call.run(sparse_mla)
    assert not raw.any()


HINTS = [
    ("int64 indices", "indices", lambda x: x.astype(np.int64), "make it int32"),
    ("float32 q", "q", lambda x: x.astype(np.float32), "nothing is cast here"),
    ("bits of q", "q", lambda x: x.view(np.uint16), "view the bits as bfloat16"),
    ("heads before tokens", "q", lambda x: x.swapaxes(0, 1), "a row per token of the query"),
    ("q without RoPE", "q", lambda x: x[..., :512], "512 latent and 64 RoPE values"),
    ("pair reversed", "q", lambda x: (x[..., 512:], x[..., :512]), "then 64 of RoPE"),
    ("one length", "topk_length", lambda x: x[:1], "a length per token"),
    ("length as an int", "topk_length", lambda x: 3, "make an array of it"),
    ("list of lengths", "topk_length", lambda x: x.tolist(), "make an array of it"),
    ("one sink", "attn_sink", lambda x: x[:1], "a value per head"),
    ("bytes of a bf16 cache", "kv_cache", lambda x: zeros(5, 4, 1152, dtype=np.uint8), "656"),
]


@pytest.mark.parametrize(
    ("argument", "bend", "hint"), [row[1:] for row in HINTS], ids=[row[0] for row in HINTS]
)
def test_plausible_mistakes_are_told_what_to_do(argument, bend, hint):
    call = operators.GOOD_CALLS["sparse_attention"]()
    call.set(argument, bend(call.args.get(argument, call.kwargs.get(argument))))
    with pytest.raises((TypeError, ValueError)) as info:
        call.run(sparse_mla)
    assert hint in str(info.value).partition(" must ")[2]


def test_objects_of_the_backend_layer_are_not_mixed_up():
    limits = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_model_len": 1}
    config = package.Config(1, softmax_scale=1.0, **limits)
    builder, layer = package.MetadataBuilder(config), package.SparseMLA(config)
    for call, text in (
        (lambda: package.MetadataBuilder(16), "`config` must be a Config, got int"),
        (lambda: package.SparseMLA(builder), "`config` must be a Config, got MetadataBuilder"),
        (lambda: builder.build(config), "`common` must be a CommonAttentionMetadata, got Config"),
        (lambda: layer.forward(None, None, None, builder), "`metadata` must be what Meta"),
    ):
        with pytest.raises(TypeError, match=re.escape(text)):
            call()
    with pytest.raises(ValueError, match="`kv_lora_rank` must be 512, got 256"):
        package.Config(1, softmax_scale=1.0, kv_lora_rank=256, **limits)


def test_a_missing_page_size_or_head_count_is_named():
    with pytest.raises(ValueError, match=r"sparse_attention: `q` must .*128.*, got .*129"):
        sparse_mla.sparse_attention(
            zeros(1, 129, 576), zeros(1, 1, 576), np.zeros((1, 1), np.int32), softmax_scale=1.0
        )


# --- host-only operators -------------------------------------------------------------------------

SIZE = {"num_tokens": 4, "num_heads": 8, "topk": 64}


@pytest.mark.parametrize(
    ("changes", "error", "name"),
    [
        ({"num_tokens": -1}, ValueError, "num_tokens"),
        ({"num_heads": 0}, ValueError, "num_heads"),
        ({"num_heads": 129}, ValueError, "num_heads"),
        ({"topk": -1}, ValueError, "topk"),
        ({"extra_topk": -1}, ValueError, "extra_topk"),
        ({"num_splits": 65}, ValueError, "num_splits"),
        ({"head_dim_v": 513}, ValueError, "head_dim_v"),
        ({"num_keys": -1}, ValueError, "num_keys"),
        ({"device": "tpu"}, ValueError, "device"),
        ({"device": 3}, TypeError, "device"),
        ({"num_tokens": "4"}, TypeError, "num_tokens"),
        ({"num_tokens": 2**70}, (ValueError, OverflowError), "num_tokens"),
    ],
)
def test_bad_workspace_sizes(changes, error, name):
    arguments = {**SIZE, "device": device.NAME, **changes}
    positional = [arguments.pop(key) for key in SIZE]
    with pytest.raises(error) as info:
        sparse_mla.attention_workspace_size(*positional, **arguments)
    assert_error_text(info.value, "attention_workspace_size", (name,))


WEIGHT = {"num_heads": 3, "qk_nope_head_dim": 128, "v_head_dim": 128}


@pytest.mark.parametrize(
    ("weight", "changes", "error", "name"),
    [
        (zeros(512, 767), {}, ValueError, "weight"),
        (zeros(512), {}, ValueError, "weight"),
        (zeros(500, 768), {}, ValueError, "weight"),
        (zeros(512, 768, dtype=np.int32), {}, TypeError, "weight"),
        ("weight", {}, TypeError, "weight"),
        (zeros(512, 768), {"num_heads": 0}, ValueError, "num_heads"),
        (zeros(512, 768), {"num_heads": 4}, ValueError, "weight"),
        (zeros(512, 768, dtype=np.uint8), {}, (TypeError, ValueError), "weight_scale_inv"),
        (
            zeros(512, 768, dtype=np.uint8),
            {"weight_scale_inv": zeros(4, 5, dtype=np.float32)},
            ValueError,
            "weight_scale_inv",
        ),
    ],
    ids=str,
)
def test_bad_weights(weight, changes, error, name):
    with pytest.raises(error) as info:
        sparse_mla.split_kv_b_proj(weight, **(WEIGHT | changes))
    assert_error_text(info.value, "split_kv_b_proj", (name, "weight"))


def test_bad_dequantize():
    with pytest.raises(ValueError, match=r"dequantize_kv_cache: `kv_cache` must .*, got"):
        sparse_mla.dequantize_kv_cache(np.zeros((2, 4, 655), np.uint8))
    with pytest.raises(ValueError, match=r"dequantize_kv_cache: `kv_format` must .*, got"):
        sparse_mla.dequantize_kv_cache(np.zeros((2, 4, 656), np.uint8), kv_format="int4")
    with pytest.raises((TypeError, ValueError), match=r"dequantize_kv_cache: `dtype` must .*, got"):
        sparse_mla.dequantize_kv_cache(np.zeros((2, 4, 656), np.uint8), dtype="int8")
