/* good_calls.h: a good call of every operator. */
#pragma once

#include "good_args.h"

/* Makes an operator's good call: its member of any_args, and the fields of that. */
#define GOOD(operator, member, ...)                                                      \
    static inline any_args make_##operator(void)                                         \
    {                                                                                    \
        return (any_args){                                                               \
            .member = {.struct_size = sizeof(((any_args *)NULL)->member), __VA_ARGS__}}; \
    }

/* ---- Caches --------------------------------------------------------------------------------- */

GOOD(concat_and_cache_mla, write, .kv_c = ZEROS(bf16, 3, 512), .k_pe = ZEROS(bf16, 3, 64),
     .kv_cache = ZEROS(uint8, 2, 4, 656), .slot_mapping = ZEROS(int64, 3))

GOOD(gather_kv_cache, gather, .kv_cache = ZEROS(uint8, 2, 4, 656),
     .block_table = ZEROS(int32, 2, 3), .seq_lens = ZEROS(int32, 2),
     .workspace_starts = ZEROS(int32, 2), .seq_starts = ZEROS(int32, 2), .out = ZEROS(bf16, 5, 576))

GOOD(dequantize_kv_cache, dequantize, .kv_cache = ZEROS(uint8, 2, 4, 656),
     .out = ZEROS(fp32, 2, 4, 576))

GOOD(quantize_and_insert_k_cache, insert, .k = ZEROS(bf16, 3, 512),
     .k_cache = ZEROS(uint8, 2, 4, 512), .slot_mapping = ZEROS(int64, 3))

GOOD(indexer_k_quant_and_cache, index_insert, .k = ZEROS(bf16, 3, 128),
     .k_cache = ZEROS(uint8, 2, 4, 132), .slot_mapping = ZEROS(int64, 3))

GOOD(dequantize_and_gather_k_cache, gather_last, .out = ZEROS(bf16, 2, 5, 512),
     .k_cache = ZEROS(uint8, 2, 4, 512), .seq_lens = ZEROS(int32, 2),
     .gather_lens = ZEROS(int32, 2), .block_table = ZEROS(int32, 2, 3), .block_size = 4)

/* Scales of two heads. */
static inline const DLTensor *
ones_of_heads(void)
{
    array *const scales = ARRAY(fp32, 2);
    for (int head = 0; head < 2; head++) {
        ((float *)scales->data)[head] = 1.0f;
    }
    return &scales->tensor;
}

GOOD(reshape_and_cache, reshape, .k = ZEROS(bf16, 3, 2, 16), .v = ZEROS(bf16, 3, 2, 8),
     .k_cache = ZEROS(uint8, 2, 4, 2, 16), .v_cache = ZEROS(uint8, 2, 4, 2, 8),
     .slot_mapping = ZEROS(int64, 3), .k_scale.tensor = ones_of_heads(),
     .v_scale.tensor = ones_of_heads())

GOOD(transfer_kv_cache, transfer, .src = ZEROS(uint8, 2, 4, 656), .dst = ZEROS(uint8, 3, 2, 656),
     .src_slots = ZEROS(int64, 3), .dst_slots = ZEROS(int32, 3))

/* ---- Lists of keys -------------------------------------------------------------------------- */

GOOD(convert_req_index_to_global_index, convert, .req_id_per_token = ZEROS(int32, 3),
     .block_table = ZEROS(int32, 2, 3), .topk_indices = ZEROS(int32, 3, 4),
     .prefill_request_ids = ZEROS(int32, 3), .prefill_workspace_starts = ZEROS(int32, 2),
     .out = ZEROS(int32, 3, 4), .counts = ZEROS(int32, 3), .block_size = 16)

GOOD(compute_global_topk_indices_and_lens, global_topk, .topk_indices = ZEROS(int32, 3, 4),
     .req_id_per_token = ZEROS(int32, 3), .block_table = ZEROS(int32, 2, 3), .block_size = 16,
     .is_valid = ZEROS(uint8, 3), .out = ZEROS(int32, 3, 4), .lens = ZEROS(int32, 3))

GOOD(top_k_per_row, top_k, .logits = ZEROS(fp32, 3, 9), .starts = ZEROS(int32, 3),
     .ends = ZEROS(int32, 3), .k = 4, .slots_block_table = ZEROS(int32, 2, 3),
     .slots_block_size = 16, .req_id_per_token = ZEROS(int32, 3), .is_valid = ZEROS(uint8, 3),
     .out = ZEROS(int32, 3, 4), .slots = ZEROS(int32, 3, 4), .lens = ZEROS(int32, 3),
     .values = ZEROS(fp32, 3, 4))

GOOD(top_k_merge, top_k_merge, .indices = ZEROS(int32, 2, 3, 5), .values = ZEROS(fp32, 2, 3, 5),
     .k = 4, .out = ZEROS(int32, 3, 4))

GOOD(cp_local_positions, own_positions, .positions = ZEROS(int64, 3, 5), .cp_rank = 0, .cp_size = 2,
     .cp_interleave = 4, .out = ZEROS(int64, 3, 5))

GOOD(cp_local_topk, own_lists, .topk_indices = ZEROS(int32, 3, 5), .cp_rank = 0, .cp_size = 2,
     .cp_interleave = 4, .out = ZEROS(int32, 3, 5), .lens = ZEROS(int32, 3))

GOOD(cp_local_lengths, own_lengths, .seq_lens = ZEROS(int32, 3), .cp_rank = 0, .cp_size = 2,
     .cp_interleave = 4, .out = ZEROS(int32, 3))

GOOD(combine_topk_swa_indices, combine, .topk_indices = ZEROS(int32, 3, 4),
     .query_start_loc = ZEROS(int32, 3), .seq_lens = ZEROS(int32, 2),
     .gather_lens = ZEROS(int32, 2), .window = 5, .ratio = 4, .topk = 4, .M = 20, .N = 10,
     .align = 8, .out = ZEROS(int32, 3, 16), .lens = ZEROS(int32, 3))

GOOD(build_mixed_sparse_indices, mixed, .decode_swa_indices = ZEROS(int32, 2, 5),
     .decode_compressed_indices = ZEROS(int32, 2, 4), .decode_compressed_lens = ZEROS(int32, 2),
     .prefill_topk_indices = ZEROS(int32, 3, 3), .query_start_loc = ZEROS(int32, 3),
     .seq_lens = ZEROS(int32, 2), .req_id_per_token = ZEROS(int32, 5),
     .swa_block_table = ZEROS(int32, 2, 3), .swa_block_size = 16,
     .compressed_block_table = ZEROS(int32, 2, 3), .compressed_block_size = 4, .window = 5,
     .ratio = 4, .topk = 3, .decode_indices_are_local = 1, .is_valid = ZEROS(uint8, 2),
     .out = ZEROS(int32, 5, 9), .lens = ZEROS(int32, 5))

/* ---- Attention, and what is around it ------------------------------------------------------- */

/* A workspace for the good calls of attention. */
static inline const DLTensor *
make_workspace(void)
{
    const smla_attention_workspace_args shape = {.struct_size = sizeof shape,
                                                 .num_tokens = 3,
                                                 .num_heads = 2,
                                                 .topk = 5,
                                                 .extra_topk = 4,
                                                 .device = cpu};
    int64_t bytes = 0;
    EXPECT_OK(smla_attention_workspace_size(&shape, &bytes, &error));
    return ZEROS(uint8, bytes);
}

GOOD(sparse_attention, attention, .q = ZEROS(bf16, 3, 2, 512), .q_pe = ZEROS(bf16, 3, 2, 64),
     .kv_cache = ZEROS(uint8, 2, 4, 656), .indices = ZEROS(int32, 3, 5),
     .topk_length = ZEROS(int32, 3), .attn_sink = ZEROS(fp32, 2),
     .extra_kv_cache = ZEROS(uint8, 3, 4, 656), .extra_indices = ZEROS(int32, 3, 4),
     .extra_topk_length = ZEROS(int32, 3), .out = ZEROS(bf16, 3, 2, 512), .lse = ZEROS(fp32, 3, 2),
     .max_logits = ZEROS(fp32, 3, 2), .workspace = make_workspace(), .softmax_scale = 1.0)

GOOD(sparse_mla_dsv4, dsv4, .query = ZEROS(bf16, 3, 2, 512), .swa_kv_cache = ZEROS(bf16, 2, 4, 512),
     .workspace_buffer = make_workspace(), .sparse_indices = ZEROS(int32, 3, 9),
     .compressed_kv_cache = ZEROS(bf16, 3, 4, 512), .sparse_topk_lens = ZEROS(int32, 3),
     .bmm1_scale = {.value = 1.0}, .sinks = ZEROS(fp32, 2), .window = 5,
     .out = ZEROS(bf16, 3, 2, 512))

GOOD(mla_attention, mla, .q = ZEROS(bf16, 3, 2, 512), .q_pe = ZEROS(bf16, 3, 2, 64),
     .kv_cache = ZEROS(uint8, 2, 4, 656), .block_table = ZEROS(int32, 2, 3),
     .cache_seqlens = &VECTOR(int32, 9, 4)->tensor, .cu_seqlens_q = &VECTOR(int32, 0, 2, 3)->tensor,
     .attn_sink = ZEROS(fp32, 2), .out = ZEROS(bf16, 3, 2, 512), .lse = ZEROS(fp32, 3, 2),
     .workspace = make_workspace(), .softmax_scale = 1.0)

GOOD(varlen_attention, varlen, .q = ZEROS(bf16, 3, 2, 16), .q_pe = ZEROS(bf16, 3, 2, 8),
     .k = ZEROS(bf16, 5, 1, 16), .k_pe = ZEROS(bf16, 5, 8), .v = ZEROS(bf16, 5, 1, 16),
     .cu_seqlens_q = &VECTOR(int32, 0, 2, 3)->tensor,
     .cu_seqlens_k = &VECTOR(int32, 0, 4, 5)->tensor, .attn_sink = ZEROS(fp32, 2),
     .out = ZEROS(bf16, 3, 2, 16), .lse = ZEROS(fp32, 3, 2), .workspace = ZEROS(uint8, 4),
     .softmax_scale = 1.0)

GOOD(paged_attention, paged, .q = ZEROS(bf16, 3, 2, 8), .qv = ZEROS(bf16, 3, 2, 16),
     .k_cache = ZEROS(bf16, 2, 4, 1, 8), .v_cache = ZEROS(bf16, 2, 4, 1, 16),
     .block_table = ZEROS(int32, 2, 3), .cache_seqlens = &VECTOR(int32, 9, 4)->tensor,
     .cu_seqlens_q = &VECTOR(int32, 0, 2, 3)->tensor, .cache_leftpad = &VECTOR(int32, 1, 0)->tensor,
     .attn_sink = ZEROS(fp32, 2), .out = ZEROS(bf16, 3, 2, 16), .lse = ZEROS(fp32, 3, 2),
     .workspace = ZEROS(uint8, 4), .softmax_scale = 1.0)

GOOD(merge_attn_states, merge, .out_a = ZEROS(bf16, 3, 2, 4), .lse_a = ZEROS(fp32, 3, 2),
     .out_b = ZEROS(bf16, 3, 2, 4), .lse_b = ZEROS(fp32, 3, 2), .out = ZEROS(bf16, 3, 2, 4),
     .lse = ZEROS(fp32, 3, 2), .attn_sink = ZEROS(fp32, 2))

GOOD(merge_attn_partials, partials, .outs = {.stacked = ZEROS(bf16, 3, 3, 2, 4)},
     .lses = {.stacked = ZEROS(fp32, 3, 3, 2)}, .attn_sink = ZEROS(fp32, 2),
     .out = ZEROS(bf16, 3, 2, 4), .lse = ZEROS(fp32, 3, 2))

GOOD(split_kv_b_proj, split, .weight = ZEROS(bf16, 512, 10), .weight_scale_inv = ZEROS(fp32, 4, 1),
     .w_uk = ZEROS(bf16, 512, 2, 3), .w_uv = ZEROS(bf16, 512, 2, 2))

GOOD(absorb_q_proj, absorb_q, .q_proj = ZEROS(bf16, 7, 10), .q_scale = ZEROS(fp32, 1, 10),
     .w_uk = ZEROS(fp32, 5, 2, 3), .out = ZEROS(fp32, 10, 7))

GOOD(absorb_o_proj, absorb_o, .o_proj = ZEROS(bf16, 130, 6), .o_scale = ZEROS(fp32, 2, 1),
     .w_uv = ZEROS(fp32, 5, 2, 3), .out = ZEROS(fp32, 130, 10))

GOOD(k_up_proj, k_up, .q_nope = ZEROS(bf16, 3, 2, 4), .w_uk = ZEROS(bf16, 512, 2, 4),
     .out = ZEROS(bf16, 3, 2, 512))

GOOD(v_up_proj, v_up, .x = ZEROS(bf16, 3, 2, 512), .w_uv = ZEROS(bf16, 512, 2, 4),
     .out = ZEROS(bf16, 3, 2, 4))

GOOD(kv_up_proj, kv_up, .kv_c = ZEROS(bf16, 3, 512), .kv_b_proj = ZEROS(bf16, 512, 4),
     .out = ZEROS(bf16, 3, 4))

GOOD(grouped_output_projection, grouped, .o = ZEROS(uint8, 3, 2, 128),
     .o_scale = ZEROS(fp32, 3, 2, 1), .weight = ZEROS(uint8, 2, 4, 128),
     .weight_scale = ZEROS(fp32, 2, 1, 1), .out = ZEROS(bf16, 3, 2, 4))

GOOD(dynamic_per_tensor_quant, quant, .x = ZEROS(fp32, 3, 5), .out = ZEROS(uint8, 3, 5),
     .scale = ZEROS(fp32, 1))

GOOD(scaled_quantize, scaled, .x = ZEROS(fp32, 3, 6), .out = ZEROS(uint8, 3, 6),
     .descale = ZEROS(fp32, 3, 2), .group_rows = 1, .group_columns = 3)

GOOD(fp8_linear, linear, .x = ZEROS(bf16, 3, 128), .weight = ZEROS(uint8, 4, 128),
     .descale = ZEROS(fp32, 1), .out = ZEROS(bf16, 3, 4),
     .workspace = ZEROS(uint8, 4 * 128 + 4 * 4 + 15), .input_group_rows = 1,
     .input_group_columns = -1)

GOOD(fused_q_kv_rmsnorm, norm, .q = ZEROS(bf16, 3, 10), .kv = ZEROS(bf16, 3, 512),
     .q_weight = ZEROS(fp32, 10), .kv_weight = ZEROS(bf16, 512), .q_out = ZEROS(bf16, 3, 10),
     .kv_out = ZEROS(bf16, 3, 512), .eps = 1e-6)

GOOD(apply_rope, apply_rope, .positions = ZEROS(int64, 3), .q_pe = ZEROS(bf16, 3, 4, 16),
     .k_pe = ZEROS(bf16, 3, 16), .rope_table = ZEROS(fp32, 5, 16), .q_out = ZEROS(bf16, 3, 4, 16),
     .k_out = ZEROS(bf16, 3, 16))

GOOD(rope_and_cache_mla, rope_and_cache, .positions = ZEROS(int64, 3),
     .q_pe = ZEROS(bf16, 3, 4, 64), .k_pe = ZEROS(bf16, 3, 64), .rope_table = ZEROS(fp32, 5, 64),
     .kv_c = ZEROS(bf16, 3, 512), .kv_cache = ZEROS(uint8, 2, 4, 656),
     .slot_mapping = ZEROS(int64, 3), .q_out = ZEROS(bf16, 3, 4, 64))

GOOD(fused_inv_rope_fp8_quant, inverse, .o = ZEROS(bf16, 3, 4, 512), .positions = ZEROS(int64, 3),
     .rope_table = ZEROS(fp32, 5, 64), .out = ZEROS(uint8, 3, 2, 1024),
     .out_scale = ZEROS(fp32, 3, 2, 8), .groups = 2)

GOOD(fused_qnorm_rope_kv_insert, qnorm, .q = ZEROS(bf16, 3, 2, 512),
     .q_out = ZEROS(bf16, 3, 2, 512), .kv = ZEROS(bf16, 3, 512), .positions = ZEROS(int64, 3),
     .rope_table = ZEROS(fp32, 5, 64), .kv_cache = ZEROS(uint8, 2, 4, 512),
     .slot_mapping = ZEROS(int64, 3), .eps = 1e-6)

GOOD(fused_indexer_q_rope_quant, index_query, .q = ZEROS(bf16, 3, 2, 128),
     .weights = ZEROS(fp32, 3, 2), .positions = ZEROS(int64, 3), .rope_table = ZEROS(fp32, 5, 64),
     .out = ZEROS(uint8, 3, 2, 64), .out_weights = ZEROS(fp32, 3, 2),
     .out_scale = ZEROS(uint8, 3, 2, 4), .softmax_scale = 0.1, .head_scale = 0.5)

GOOD(indexer_logits, logits, .q = ZEROS(uint8, 3, 2, 64), .weights = ZEROS(fp32, 3, 2),
     .k_cache = ZEROS(uint8, 9, 128), .k_scale = ZEROS(fp32, 9), .context_lens = ZEROS(int32, 3),
     .starts = ZEROS(int32, 3), .q_scale = ZEROS(uint8, 3, 2, 4), .out = ZEROS(fp32, 3, 9))

GOOD(save_partial_states, save, .kv = ZEROS(fp32, 3, 128), .score = ZEROS(fp32, 3, 128),
     .ape = ZEROS(fp32, 2, 128), .positions = ZEROS(int64, 3), .state = ZEROS(fp32, 2, 4, 256),
     .slot_mapping = ZEROS(int64, 2))

GOOD(compress_norm_rope_store, compress, .state = ZEROS(fp32, 2, 4, 1024),
     .block_table = ZEROS(int32, 2, 3), .req_id_per_token = ZEROS(int32, 3),
     .positions = ZEROS(int64, 3), .slot_mapping = ZEROS(int64, 2),
     .kv_cache = ZEROS(uint8, 2, 4, 512), .kv_slot_mapping = ZEROS(int64, 3),
     .norm_weight = ZEROS(fp32, 512), .rope_table = ZEROS(fp32, 5, 64), .eps = 1e-6, .ratio = 1,
     .kv = ZEROS(fp32, 3, 512), .score = ZEROS(fp32, 3, 512), .ape = ZEROS(fp32, 1, 512))

GOOD(lightning_indexer, lightning, .q = ZEROS(uint8, 3, 2, 64), .weights = ZEROS(fp32, 3, 2),
     .k_cache = ZEROS(uint8, 9, 128), .k_scale = ZEROS(fp32, 9), .context_lens = ZEROS(int32, 3),
     .k = 4, .req_id_per_token = ZEROS(int32, 3), .starts = ZEROS(int32, 3),
     .q_scale = ZEROS(uint8, 3, 2, 4), .slots_block_table = ZEROS(int32, 2, 3),
     .slots_block_size = 16, .is_valid = ZEROS(uint8, 3), .out = ZEROS(int32, 3, 4),
     .slots = ZEROS(int32, 3, 4), .lens = ZEROS(int32, 3), .values = ZEROS(fp32, 3, 4),
     .max_logits_bytes = 512, .workspace = ZEROS(uint8, 600))

#undef GOOD
