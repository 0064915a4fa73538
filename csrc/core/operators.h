/* operators.h: the one list of operators. */
#pragma once

/* The operators that are one call on every backend: name, args, params, and the family whose folder
 * has their CPU and CUDA functions. A line makes
 *   - the public entry point smla_<name> (ops/dispatch.c),
 *   - a slot of smla_backend (backend.h),
 *   - the declarations of smla_check_<name> (ops/check.h), smla_cpu_<name> (cpu/cpu.h) and
 *     smla_cuda_launch_<name> (cuda/host/cuda.h), each to be defined,
 *   - a name for tests that go through all operators. */
#define SMLA_OPERATORS(X)                                                             \
    SMLA_LAUNCHED_OPERATORS(X)                                                        \
    X(lightning_indexer, smla_lightning_indexer_args, smla_lightning_params, indexer) \
    X(fp8_linear, smla_fp8_linear_args, smla_fp8_linear_params, projection)

/* Those that CUDA starts as one launch. lightning_indexer is a series of two of them, and
 * fp8_linear is scaled_quantize and a projection. */
#define SMLA_LAUNCHED_OPERATORS(X)                                                                 \
    X(concat_and_cache_mla, smla_concat_and_cache_mla_args, smla_cache_write_params, cache)        \
    X(gather_kv_cache, smla_gather_kv_cache_args, smla_gather_params, cache)                       \
    X(dequantize_kv_cache, smla_dequantize_kv_cache_args, smla_dequantize_params, cache)           \
    X(quantize_and_insert_k_cache, smla_insert_k_cache_args, smla_cache_write_params, cache)       \
    X(indexer_k_quant_and_cache, smla_indexer_k_cache_args, smla_cache_write_params, cache)        \
    X(dequantize_and_gather_k_cache, smla_gather_k_cache_args, smla_gather_params, cache)          \
    X(reshape_and_cache, smla_reshape_and_cache_args, smla_reshape_params, cache)                  \
    X(transfer_kv_cache, smla_transfer_kv_cache_args, smla_transfer_params, cache)                 \
    X(convert_req_index_to_global_index, smla_convert_req_index_args, smla_convert_params, index)  \
    X(compute_global_topk_indices_and_lens, smla_topk_slots_args, smla_topk_slots_params, index)   \
    X(combine_topk_swa_indices, smla_combine_topk_swa_args, smla_combine_topk_swa_params, index)   \
    X(build_mixed_sparse_indices, smla_mixed_indices_args, smla_mixed_indices_params, index)       \
    X(cp_local_positions, smla_cp_positions_args, smla_rank_lists_params, index)                   \
    X(cp_local_topk, smla_cp_topk_args, smla_rank_lists_params, index)                             \
    X(cp_local_lengths, smla_cp_lengths_args, smla_rank_lists_params, index)                       \
    X(top_k_per_row, smla_top_k_args, smla_top_k_params, topk)                                     \
    X(top_k_merge, smla_top_k_merge_args, smla_top_k_merge_params, topk)                           \
    X(merge_attn_states, smla_merge_attn_states_args, smla_merge_params, attention)                \
    X(merge_attn_partials, smla_merge_attn_partials_args, smla_merge_partials_params, attention)   \
    X(split_kv_b_proj, smla_split_kv_b_proj_args, smla_split_kv_b_proj_params, projection)         \
    X(absorb_q_proj, smla_absorb_q_proj_args, smla_absorb_params, projection)                      \
    X(absorb_o_proj, smla_absorb_o_proj_args, smla_absorb_params, projection)                      \
    X(dynamic_per_tensor_quant, smla_dynamic_per_tensor_quant_args, smla_quant_params, projection) \
    X(scaled_quantize, smla_scaled_quantize_args, smla_scaled_quantize_params, projection)         \
    X(fused_q_kv_rmsnorm, smla_fused_q_kv_rmsnorm_args, smla_q_kv_norm_params, norm)               \
    X(fused_qnorm_rope_kv_insert, smla_qnorm_insert_args, smla_qnorm_insert_params, norm)          \
    X(apply_rope, smla_apply_rope_args, smla_apply_rope_params, rope)                              \
    X(rope_and_cache_mla, smla_rope_and_cache_mla_args, smla_rope_and_cache_params, rope)          \
    X(fused_inv_rope_fp8_quant, smla_fused_inv_rope_fp8_quant_args, smla_inverse_rope_params,      \
      rope)                                                                                        \
    X(save_partial_states, smla_partial_states_args, smla_partial_states_params, compressor)       \
    X(compress_norm_rope_store, smla_compress_args, smla_compress_params, compressor)              \
    X(fused_indexer_q_rope_quant, smla_index_query_args, smla_index_query_params, indexer)         \
    X(indexer_logits, smla_indexer_logits_args, smla_logits_params, indexer)

/* The attentions, by name and args. All have the params of attention and the slot `attend`. */
#define SMLA_ATTENTIONS(X)                          \
    X(sparse_attention, smla_sparse_attention_args) \
    X(sparse_mla_dsv4, smla_sparse_mla_dsv4_args)   \
    X(mla_attention, smla_mla_attention_args)       \
    X(varlen_attention, smla_varlen_attention_args) \
    X(paged_attention, smla_paged_attention_args)

/* The projections, whose arrays differ and whose params are the same: all have the slot
 * `projection`. */
#define SMLA_PROJECTIONS(X)                                                                   \
    X(k_up_proj, smla_k_up_proj_args, smla_projection_params, projection)                     \
    X(v_up_proj, smla_v_up_proj_args, smla_projection_params, projection)                     \
    X(kv_up_proj, smla_kv_up_proj_args, smla_projection_params, projection)                   \
    X(grouped_output_projection, smla_grouped_output_projection_args, smla_projection_params, \
      projection)
