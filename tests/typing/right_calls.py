"""Calls that type checkers must take, with results in the framework of the first array."""

import array

import numpy as np

import sparse_mla

x = np.zeros((1, 2, 576), np.float32)
i = np.zeros((1, 3), np.int32)
flag = bool(i.any())

out, lse = sparse_mla.sparse_attention(x, x, i, softmax_scale=0.1)
out, lse, most = sparse_mla.sparse_attention(
    (x, x), x, i, softmax_scale=1, return_max_logits=True, kv_format="fp8_v4", kv_scale=x
)
results = sparse_mla.sparse_attention(x, x, i, softmax_scale=0.1, return_max_logits=flag)
slots, counts = sparse_mla.convert_req_index_to_global_index(
    i, i, i, block_size=64, valid_counts=True
)
values = sparse_mla.dequantize_kv_cache(x, dtype=np.float32).tolist()
values = sparse_mla.dequantize_kv_cache(x, dtype=np.dtype("float32")).tolist()
sparse_mla.sparse_attention(x, x, array.array("i", [1]), softmax_scale=0.1)
cache: np.ndarray = sparse_mla.concat_and_cache_mla(x, x, x, i, kv_cache_dtype="auto")
cache = sparse_mla.concat_and_cache_mla(x, x, x, i, kv_format="fp8_ds_mla")
k_cache, v_cache = sparse_mla.reshape_and_cache(x, x, x, x, i, k_scale=0.5, v_scale=x)
cache = k_cache if flag else v_cache
config = sparse_mla.Config(
    16,
    softmax_scale=1.0,
    kv_format="fp8_ds_mla",
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_model_len=1024,
)
text: str = config.kv_format
dense = sparse_mla.dense.Config(
    16,
    softmax_scale=1.0,
    kv_format="fp8_ds_mla",
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_model_len=1024,
)
text = dense.kv_format
