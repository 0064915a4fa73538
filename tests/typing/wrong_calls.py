"""Twenty calls that type checkers must refuse: one error on each marked line, none elsewhere."""

import numpy as np

import sparse_mla
from sparse_mla import flash_mla

x = np.zeros((1, 2, 576), np.float32)
i = np.zeros((1, 3), np.int32)
limits = sparse_mla.Config(
    2, softmax_scale=0.1, max_num_seqs=1, max_num_batched_tokens=1, max_model_len=9
)

sparse_mla.sparse_attention(x, x, [1], softmax_scale=0.1)  # wrong
sparse_mla.sparse_attention([1.0], x, i, softmax_scale=0.1)  # wrong
sparse_mla.sparse_attention(x, x, i, softmax_scale="0.1")  # wrong
sparse_mla.sparse_attention(x, x, i)  # wrong
sparse_mla.sparse_attention(x, x, i, softmax_scale=0.1, kv_format="fp8")  # wrong
sparse_mla.sparse_attention(x, x, i, softmax_scale=0.1, scale=1.0)  # wrong
sparse_mla.sparse_attention((x, x, x), x, i, softmax_scale=0.1)  # wrong
out, lse = sparse_mla.sparse_attention(x, x, i, softmax_scale=0.1, return_max_logits=True)  # wrong
a, b, c = sparse_mla.merge_attn_states(x, x, x, x)  # wrong
slots, counts, more = sparse_mla.convert_req_index_to_global_index(  # wrong
    i, i, i, block_size=64, valid_counts=True
)
chosen, lens = sparse_mla.top_k_per_row(  # wrong
    x, i, i, k=2, slots_block_table=i, slots_block_size=4, req_id_per_token=i
)
sparse_mla.dequantize_kv_cache(x, dtype="float16")  # wrong
sparse_mla.concat_and_cache_mla(x, x, x, i, kv_cache_dtype="fp8_v4")  # wrong
sparse_mla.indexer_k_quant_and_cache(x, x, i, kv_format="fp8_v4")  # wrong
sparse_mla.reshape_and_cache(x, x, x, x, i, k_scale=None)  # wrong
sparse_mla.fused_inv_rope_fp8_quant(x, i, x, groups=2, scale_layout="fp16")  # wrong
sparse_mla.gather_kv_cache(x, i, i, i)  # wrong
sparse_mla.k_up_proj(x, None)  # wrong
sparse_mla.MetadataBuilder("cpu")  # wrong
sparse_mla.Backend.get_kv_cache_shape(1, 64, cache_dtype_str="fp8")  # wrong
flash_mla.flash_mla_sparse_fwd(x, x, [[[1]]], 0.1)  # wrong
