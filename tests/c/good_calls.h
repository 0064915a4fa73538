/* good_calls.h: a good call of every operator. */
#pragma once

#include "testing.h"

typedef union any_args {
    size_t struct_size;
    smla_concat_and_cache_mla_args write;
    smla_gather_kv_cache_args gather;
    smla_dequantize_kv_cache_args dequantize;
    smla_insert_k_cache_args insert;
    smla_indexer_k_cache_args index_insert;
    smla_gather_k_cache_args gather_last;
    smla_reshape_and_cache_args reshape;
    smla_convert_req_index_args convert;
    smla_topk_slots_args global_topk;
    smla_top_k_args top_k;
    smla_combine_topk_swa_args combine;
    smla_mixed_indices_args mixed;
    smla_sparse_attention_args attention;
    smla_sparse_mla_dsv4_args dsv4;
    smla_mla_attention_args mla;
    smla_varlen_attention_args varlen;
    smla_paged_attention_args paged;
    smla_merge_attn_states_args merge;
    smla_merge_attn_partials_args partials;
    smla_split_kv_b_proj_args split;
    smla_absorb_q_proj_args absorb_q;
    smla_absorb_o_proj_args absorb_o;
    smla_k_up_proj_args k_up;
    smla_v_up_proj_args v_up;
    smla_kv_up_proj_args kv_up;
    smla_grouped_output_projection_args grouped;
    smla_dynamic_per_tensor_quant_args quant;
    smla_scaled_quantize_args scaled;
    smla_fp8_linear_args linear;
    smla_fused_q_kv_rmsnorm_args norm;
    smla_apply_rope_args apply_rope;
    smla_rope_and_cache_mla_args rope_and_cache;
    smla_fused_inv_rope_fp8_quant_args inverse;
    smla_qnorm_insert_args qnorm;
    smla_index_query_args index_query;
    smla_indexer_logits_args logits;
    smla_partial_states_args save;
    smla_compress_args compress;
    smla_lightning_indexer_args lightning;
} any_args;

static inline any_args
make_concat_and_cache_mla(void)
{
    return (any_args){.write = {.struct_size = sizeof(smla_concat_and_cache_mla_args),
                                .kv_c = ZEROS(bf16, 3, 512),
                                .k_pe = ZEROS(bf16, 3, 64),
                                .kv_cache = ZEROS(uint8, 2, 4, 656),
                                .slot_mapping = ZEROS(int64, 3)}};
}

static inline any_args
make_gather_kv_cache(void)
{
    return (any_args){.gather = {.struct_size = sizeof(smla_gather_kv_cache_args),
                                 .kv_cache = ZEROS(uint8, 2, 4, 656),
                                 .block_table = ZEROS(int32, 2, 3),
                                 .seq_lens = ZEROS(int32, 2),
                                 .workspace_starts = ZEROS(int32, 2),
                                 .seq_starts = ZEROS(int32, 2),
                                 .out = ZEROS(bf16, 5, 576)}};
}

static inline any_args
make_dequantize_kv_cache(void)
{
    return (any_args){.dequantize = {.struct_size = sizeof(smla_dequantize_kv_cache_args),
                                     .kv_cache = ZEROS(uint8, 2, 4, 656),
                                     .out = ZEROS(fp32, 2, 4, 576)}};
}

static inline any_args
make_quantize_and_insert_k_cache(void)
{
    return (any_args){.insert = {.struct_size = sizeof(smla_insert_k_cache_args),
                                 .k = ZEROS(bf16, 3, 512),
                                 .k_cache = ZEROS(uint8, 2, 4, 512),
                                 .slot_mapping = ZEROS(int64, 3)}};
}

static inline any_args
make_indexer_k_quant_and_cache(void)
{
    return (any_args){.index_insert = {.struct_size = sizeof(smla_indexer_k_cache_args),
                                       .k = ZEROS(bf16, 3, 128),
                                       .k_cache = ZEROS(uint8, 2, 4, 132),
                                       .slot_mapping = ZEROS(int64, 3)}};
}

static inline any_args
make_dequantize_and_gather_k_cache(void)
{
    return (any_args){.gather_last = {.struct_size = sizeof(smla_gather_k_cache_args),
                                      .out = ZEROS(bf16, 2, 5, 512),
                                      .k_cache = ZEROS(uint8, 2, 4, 512),
                                      .seq_lens = ZEROS(int32, 2),
                                      .gather_lens = ZEROS(int32, 2),
                                      .block_table = ZEROS(int32, 2, 3),
                                      .block_size = 4}};
}

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

static inline any_args
make_reshape_and_cache(void)
{
    return (any_args){.reshape = {.struct_size = sizeof(smla_reshape_and_cache_args),
                                  .k = ZEROS(bf16, 3, 2, 16),
                                  .v = ZEROS(bf16, 3, 2, 8),
                                  .k_cache = ZEROS(uint8, 2, 4, 2, 16),
                                  .v_cache = ZEROS(uint8, 2, 4, 2, 8),
                                  .slot_mapping = ZEROS(int64, 3),
                                  .k_scale.tensor = ones_of_heads(),
                                  .v_scale.tensor = ones_of_heads()}};
}

static inline any_args
make_convert_req_index_to_global_index(void)
{
    return (any_args){.convert = {.struct_size = sizeof(smla_convert_req_index_args),
                                  .req_id_per_token = ZEROS(int32, 3),
                                  .block_table = ZEROS(int32, 2, 3),
                                  .topk_indices = ZEROS(int32, 3, 4),
                                  .prefill_request_ids = ZEROS(int32, 3),
                                  .prefill_workspace_starts = ZEROS(int32, 2),
                                  .out = ZEROS(int32, 3, 4),
                                  .counts = ZEROS(int32, 3),
                                  .block_size = 16}};
}

static inline any_args
make_compute_global_topk_indices_and_lens(void)
{
    return (any_args){.global_topk = {.struct_size = sizeof(smla_topk_slots_args),
                                      .topk_indices = ZEROS(int32, 3, 4),
                                      .req_id_per_token = ZEROS(int32, 3),
                                      .block_table = ZEROS(int32, 2, 3),
                                      .block_size = 16,
                                      .is_valid = ZEROS(uint8, 3),
                                      .out = ZEROS(int32, 3, 4),
                                      .lens = ZEROS(int32, 3)}};
}

static inline any_args
make_top_k_per_row(void)
{
    return (any_args){.top_k = {.struct_size = sizeof(smla_top_k_args),
                                .logits = ZEROS(fp32, 3, 9),
                                .starts = ZEROS(int32, 3),
                                .ends = ZEROS(int32, 3),
                                .k = 4,
                                .slots_block_table = ZEROS(int32, 2, 3),
                                .slots_block_size = 16,
                                .req_id_per_token = ZEROS(int32, 3),
                                .is_valid = ZEROS(uint8, 3),
                                .out = ZEROS(int32, 3, 4),
                                .slots = ZEROS(int32, 3, 4),
                                .lens = ZEROS(int32, 3),
                                .values = ZEROS(fp32, 3, 4)}};
}

static inline any_args
make_combine_topk_swa_indices(void)
{
    return (any_args){.combine = {.struct_size = sizeof(smla_combine_topk_swa_args),
                                  .topk_indices = ZEROS(int32, 3, 4),
                                  .query_start_loc = ZEROS(int32, 3),
                                  .seq_lens = ZEROS(int32, 2),
                                  .gather_lens = ZEROS(int32, 2),
                                  .window = 5,
                                  .ratio = 4,
                                  .topk = 4,
                                  .M = 20,
                                  .N = 10,
                                  .align = 8,
                                  .out = ZEROS(int32, 3, 16),
                                  .lens = ZEROS(int32, 3)}};
}

static inline any_args
make_build_mixed_sparse_indices(void)
{
    return (any_args){.mixed = {.struct_size = sizeof(smla_mixed_indices_args),
                                .decode_swa_indices = ZEROS(int32, 2, 5),
                                .decode_compressed_indices = ZEROS(int32, 2, 4),
                                .decode_compressed_lens = ZEROS(int32, 2),
                                .prefill_topk_indices = ZEROS(int32, 3, 3),
                                .query_start_loc = ZEROS(int32, 3),
                                .seq_lens = ZEROS(int32, 2),
                                .req_id_per_token = ZEROS(int32, 5),
                                .swa_block_table = ZEROS(int32, 2, 3),
                                .swa_block_size = 16,
                                .compressed_block_table = ZEROS(int32, 2, 3),
                                .compressed_block_size = 4,
                                .window = 5,
                                .ratio = 4,
                                .topk = 3,
                                .decode_indices_are_local = 1,
                                .is_valid = ZEROS(uint8, 2),
                                .out = ZEROS(int32, 5, 9),
                                .lens = ZEROS(int32, 5)}};
}

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

static inline any_args
make_sparse_attention(void)
{
    return (any_args){.attention = {.struct_size = sizeof(smla_sparse_attention_args),
                                    .q = ZEROS(bf16, 3, 2, 512),
                                    .q_pe = ZEROS(bf16, 3, 2, 64),
                                    .kv_cache = ZEROS(uint8, 2, 4, 656),
                                    .indices = ZEROS(int32, 3, 5),
                                    .topk_length = ZEROS(int32, 3),
                                    .attn_sink = ZEROS(fp32, 2),
                                    .extra_kv_cache = ZEROS(uint8, 3, 4, 656),
                                    .extra_indices = ZEROS(int32, 3, 4),
                                    .extra_topk_length = ZEROS(int32, 3),
                                    .out = ZEROS(bf16, 3, 2, 512),
                                    .lse = ZEROS(fp32, 3, 2),
                                    .max_logits = ZEROS(fp32, 3, 2),
                                    .workspace = make_workspace(),
                                    .softmax_scale = 1.0}};
}

static inline any_args
make_sparse_mla_dsv4(void)
{
    return (any_args){.dsv4 = {.struct_size = sizeof(smla_sparse_mla_dsv4_args),
                               .query = ZEROS(bf16, 3, 2, 512),
                               .swa_kv_cache = ZEROS(bf16, 2, 4, 512),
                               .workspace_buffer = make_workspace(),
                               .sparse_indices = ZEROS(int32, 3, 9),
                               .compressed_kv_cache = ZEROS(bf16, 3, 4, 512),
                               .sparse_topk_lens = ZEROS(int32, 3),
                               .bmm1_scale = {.value = 1.0},
                               .sinks = ZEROS(fp32, 2),
                               .window = 5,
                               .out = ZEROS(bf16, 3, 2, 512)}};
}

static inline any_args
make_mla_attention(void)
{
    return (any_args){.mla = {.struct_size = sizeof(smla_mla_attention_args),
                              .q = ZEROS(bf16, 3, 2, 512),
                              .q_pe = ZEROS(bf16, 3, 2, 64),
                              .kv_cache = ZEROS(uint8, 2, 4, 656),
                              .block_table = ZEROS(int32, 2, 3),
                              .cache_seqlens = &VECTOR(int32, 9, 4)->tensor,
                              .cu_seqlens_q = &VECTOR(int32, 0, 2, 3)->tensor,
                              .attn_sink = ZEROS(fp32, 2),
                              .out = ZEROS(bf16, 3, 2, 512),
                              .lse = ZEROS(fp32, 3, 2),
                              .workspace = make_workspace(),
                              .softmax_scale = 1.0}};
}

static inline any_args
make_varlen_attention(void)
{
    return (any_args){.varlen = {.struct_size = sizeof(smla_varlen_attention_args),
                                 .q = ZEROS(bf16, 3, 2, 16),
                                 .q_pe = ZEROS(bf16, 3, 2, 8),
                                 .k = ZEROS(bf16, 5, 1, 16),
                                 .k_pe = ZEROS(bf16, 5, 8),
                                 .v = ZEROS(bf16, 5, 1, 16),
                                 .cu_seqlens_q = &VECTOR(int32, 0, 2, 3)->tensor,
                                 .cu_seqlens_k = &VECTOR(int32, 0, 4, 5)->tensor,
                                 .attn_sink = ZEROS(fp32, 2),
                                 .out = ZEROS(bf16, 3, 2, 16),
                                 .lse = ZEROS(fp32, 3, 2),
                                 .workspace = ZEROS(uint8, 4),
                                 .softmax_scale = 1.0}};
}

static inline any_args
make_paged_attention(void)
{
    return (any_args){.paged = {.struct_size = sizeof(smla_paged_attention_args),
                                .q = ZEROS(bf16, 3, 2, 8),
                                .qv = ZEROS(bf16, 3, 2, 16),
                                .k_cache = ZEROS(bf16, 2, 4, 1, 8),
                                .v_cache = ZEROS(bf16, 2, 4, 1, 16),
                                .block_table = ZEROS(int32, 2, 3),
                                .cache_seqlens = &VECTOR(int32, 9, 4)->tensor,
                                .cu_seqlens_q = &VECTOR(int32, 0, 2, 3)->tensor,
                                .cache_leftpad = &VECTOR(int32, 1, 0)->tensor,
                                .attn_sink = ZEROS(fp32, 2),
                                .out = ZEROS(bf16, 3, 2, 16),
                                .lse = ZEROS(fp32, 3, 2),
                                .workspace = ZEROS(uint8, 4),
                                .softmax_scale = 1.0}};
}

static inline any_args
make_merge_attn_states(void)
{
    return (any_args){.merge = {.struct_size = sizeof(smla_merge_attn_states_args),
                                .out_a = ZEROS(bf16, 3, 2, 4),
                                .lse_a = ZEROS(fp32, 3, 2),
                                .out_b = ZEROS(bf16, 3, 2, 4),
                                .lse_b = ZEROS(fp32, 3, 2),
                                .out = ZEROS(bf16, 3, 2, 4),
                                .lse = ZEROS(fp32, 3, 2),
                                .attn_sink = ZEROS(fp32, 2)}};
}

static inline any_args
make_merge_attn_partials(void)
{
    return (any_args){.partials = {.struct_size = sizeof(smla_merge_attn_partials_args),
                                   .outs = {.stacked = ZEROS(bf16, 3, 3, 2, 4)},
                                   .lses = {.stacked = ZEROS(fp32, 3, 3, 2)},
                                   .attn_sink = ZEROS(fp32, 2),
                                   .out = ZEROS(bf16, 3, 2, 4),
                                   .lse = ZEROS(fp32, 3, 2)}};
}

static inline any_args
make_split_kv_b_proj(void)
{
    return (any_args){.split = {.struct_size = sizeof(smla_split_kv_b_proj_args),
                                .weight = ZEROS(bf16, 512, 10),
                                .weight_scale_inv = ZEROS(fp32, 4, 1),
                                .w_uk = ZEROS(bf16, 512, 2, 3),
                                .w_uv = ZEROS(bf16, 512, 2, 2)}};
}

static inline any_args
make_absorb_q_proj(void)
{
    return (any_args){.absorb_q = {.struct_size = sizeof(smla_absorb_q_proj_args),
                                   .q_proj = ZEROS(bf16, 7, 10),
                                   .q_scale = ZEROS(fp32, 1, 10),
                                   .w_uk = ZEROS(fp32, 5, 2, 3),
                                   .out = ZEROS(fp32, 10, 7)}};
}

static inline any_args
make_absorb_o_proj(void)
{
    return (any_args){.absorb_o = {.struct_size = sizeof(smla_absorb_o_proj_args),
                                   .o_proj = ZEROS(bf16, 130, 6),
                                   .o_scale = ZEROS(fp32, 2, 1),
                                   .w_uv = ZEROS(fp32, 5, 2, 3),
                                   .out = ZEROS(fp32, 130, 10)}};
}

static inline any_args
make_k_up_proj(void)
{
    return (any_args){.k_up = {.struct_size = sizeof(smla_k_up_proj_args),
                               .q_nope = ZEROS(bf16, 3, 2, 4),
                               .w_uk = ZEROS(bf16, 512, 2, 4),
                               .out = ZEROS(bf16, 3, 2, 512)}};
}

static inline any_args
make_v_up_proj(void)
{
    return (any_args){.v_up = {.struct_size = sizeof(smla_v_up_proj_args),
                               .x = ZEROS(bf16, 3, 2, 512),
                               .w_uv = ZEROS(bf16, 512, 2, 4),
                               .out = ZEROS(bf16, 3, 2, 4)}};
}

static inline any_args
make_kv_up_proj(void)
{
    return (any_args){.kv_up = {.struct_size = sizeof(smla_kv_up_proj_args),
                                .kv_c = ZEROS(bf16, 3, 512),
                                .kv_b_proj = ZEROS(bf16, 512, 4),
                                .out = ZEROS(bf16, 3, 4)}};
}

static inline any_args
make_grouped_output_projection(void)
{
    return (any_args){.grouped = {.struct_size = sizeof(smla_grouped_output_projection_args),
                                  .o = ZEROS(uint8, 3, 2, 128),
                                  .o_scale = ZEROS(fp32, 3, 2, 1),
                                  .weight = ZEROS(uint8, 2, 4, 128),
                                  .weight_scale = ZEROS(fp32, 2, 1, 1),
                                  .out = ZEROS(bf16, 3, 2, 4)}};
}

static inline any_args
make_dynamic_per_tensor_quant(void)
{
    return (any_args){.quant = {.struct_size = sizeof(smla_dynamic_per_tensor_quant_args),
                                .x = ZEROS(fp32, 3, 5),
                                .out = ZEROS(uint8, 3, 5),
                                .scale = ZEROS(fp32, 1)}};
}

static inline any_args
make_scaled_quantize(void)
{
    return (any_args){.scaled = {.struct_size = sizeof(smla_scaled_quantize_args),
                                 .x = ZEROS(fp32, 3, 6),
                                 .out = ZEROS(uint8, 3, 6),
                                 .descale = ZEROS(fp32, 3, 2),
                                 .group_rows = 1,
                                 .group_columns = 3}};
}

static inline any_args
make_fp8_linear(void)
{
    return (any_args){.linear = {.struct_size = sizeof(smla_fp8_linear_args),
                                 .x = ZEROS(bf16, 3, 128),
                                 .weight = ZEROS(uint8, 4, 128),
                                 .descale = ZEROS(fp32, 1),
                                 .out = ZEROS(bf16, 3, 4),
                                 .workspace = ZEROS(uint8, 4 * 128 + 4 * 4 + 15),
                                 .input_group_rows = 1,
                                 .input_group_columns = -1}};
}

static inline any_args
make_fused_q_kv_rmsnorm(void)
{
    return (any_args){.norm = {.struct_size = sizeof(smla_fused_q_kv_rmsnorm_args),
                               .q = ZEROS(bf16, 3, 10),
                               .kv = ZEROS(bf16, 3, 512),
                               .q_weight = ZEROS(fp32, 10),
                               .kv_weight = ZEROS(bf16, 512),
                               .q_out = ZEROS(bf16, 3, 10),
                               .kv_out = ZEROS(bf16, 3, 512),
                               .eps = 1e-6}};
}

static inline any_args
make_apply_rope(void)
{
    return (any_args){.apply_rope = {.struct_size = sizeof(smla_apply_rope_args),
                                     .positions = ZEROS(int64, 3),
                                     .q_pe = ZEROS(bf16, 3, 4, 16),
                                     .k_pe = ZEROS(bf16, 3, 16),
                                     .rope_table = ZEROS(fp32, 5, 16),
                                     .q_out = ZEROS(bf16, 3, 4, 16),
                                     .k_out = ZEROS(bf16, 3, 16)}};
}

static inline any_args
make_rope_and_cache_mla(void)
{
    return (any_args){.rope_and_cache = {.struct_size = sizeof(smla_rope_and_cache_mla_args),
                                         .positions = ZEROS(int64, 3),
                                         .q_pe = ZEROS(bf16, 3, 4, 64),
                                         .k_pe = ZEROS(bf16, 3, 64),
                                         .rope_table = ZEROS(fp32, 5, 64),
                                         .kv_c = ZEROS(bf16, 3, 512),
                                         .kv_cache = ZEROS(uint8, 2, 4, 656),
                                         .slot_mapping = ZEROS(int64, 3),
                                         .q_out = ZEROS(bf16, 3, 4, 64)}};
}

static inline any_args
make_fused_inv_rope_fp8_quant(void)
{
    return (any_args){.inverse = {.struct_size = sizeof(smla_fused_inv_rope_fp8_quant_args),
                                  .o = ZEROS(bf16, 3, 4, 512),
                                  .positions = ZEROS(int64, 3),
                                  .rope_table = ZEROS(fp32, 5, 64),
                                  .out = ZEROS(uint8, 3, 2, 1024),
                                  .out_scale = ZEROS(fp32, 3, 2, 8),
                                  .groups = 2}};
}

static inline any_args
make_fused_qnorm_rope_kv_insert(void)
{
    return (any_args){.qnorm = {.struct_size = sizeof(smla_qnorm_insert_args),
                                .q = ZEROS(bf16, 3, 2, 512),
                                .q_out = ZEROS(bf16, 3, 2, 512),
                                .kv = ZEROS(bf16, 3, 512),
                                .positions = ZEROS(int64, 3),
                                .rope_table = ZEROS(fp32, 5, 64),
                                .kv_cache = ZEROS(uint8, 2, 4, 512),
                                .slot_mapping = ZEROS(int64, 3),
                                .eps = 1e-6}};
}

static inline any_args
make_fused_indexer_q_rope_quant(void)
{
    return (any_args){.index_query = {.struct_size = sizeof(smla_index_query_args),
                                      .q = ZEROS(bf16, 3, 2, 128),
                                      .weights = ZEROS(fp32, 3, 2),
                                      .positions = ZEROS(int64, 3),
                                      .rope_table = ZEROS(fp32, 5, 64),
                                      .out = ZEROS(uint8, 3, 2, 64),
                                      .out_weights = ZEROS(fp32, 3, 2),
                                      .out_scale = ZEROS(uint8, 3, 2, 4),
                                      .softmax_scale = 0.1,
                                      .head_scale = 0.5}};
}

static inline any_args
make_indexer_logits(void)
{
    return (any_args){.logits = {.struct_size = sizeof(smla_indexer_logits_args),
                                 .q = ZEROS(uint8, 3, 2, 64),
                                 .weights = ZEROS(fp32, 3, 2),
                                 .k_cache = ZEROS(uint8, 9, 128),
                                 .k_scale = ZEROS(fp32, 9),
                                 .context_lens = ZEROS(int32, 3),
                                 .starts = ZEROS(int32, 3),
                                 .q_scale = ZEROS(uint8, 3, 2, 4),
                                 .out = ZEROS(fp32, 3, 9)}};
}

static inline any_args
make_save_partial_states(void)
{
    return (any_args){.save = {.struct_size = sizeof(smla_partial_states_args),
                               .kv = ZEROS(fp32, 3, 128),
                               .score = ZEROS(fp32, 3, 128),
                               .ape = ZEROS(fp32, 2, 128),
                               .positions = ZEROS(int64, 3),
                               .state = ZEROS(fp32, 2, 4, 256),
                               .slot_mapping = ZEROS(int64, 2)}};
}

static inline any_args
make_compress_norm_rope_store(void)
{
    return (any_args){.compress = {.struct_size = sizeof(smla_compress_args),
                                   .state = ZEROS(fp32, 2, 4, 1024),
                                   .block_table = ZEROS(int32, 2, 3),
                                   .req_id_per_token = ZEROS(int32, 3),
                                   .positions = ZEROS(int64, 3),
                                   .slot_mapping = ZEROS(int64, 2),
                                   .kv_cache = ZEROS(uint8, 2, 4, 512),
                                   .kv_slot_mapping = ZEROS(int64, 3),
                                   .norm_weight = ZEROS(fp32, 512),
                                   .rope_table = ZEROS(fp32, 5, 64),
                                   .eps = 1e-6,
                                   .ratio = 1,
                                   .kv = ZEROS(fp32, 3, 512),
                                   .score = ZEROS(fp32, 3, 512),
                                   .ape = ZEROS(fp32, 1, 512)}};
}

static inline any_args
make_lightning_indexer(void)
{
    return (any_args){.lightning = {.struct_size = sizeof(smla_lightning_indexer_args),
                                    .q = ZEROS(uint8, 3, 2, 64),
                                    .weights = ZEROS(fp32, 3, 2),
                                    .k_cache = ZEROS(uint8, 9, 128),
                                    .k_scale = ZEROS(fp32, 9),
                                    .context_lens = ZEROS(int32, 3),
                                    .k = 4,
                                    .req_id_per_token = ZEROS(int32, 3),
                                    .starts = ZEROS(int32, 3),
                                    .q_scale = ZEROS(uint8, 3, 2, 4),
                                    .slots_block_table = ZEROS(int32, 2, 3),
                                    .slots_block_size = 16,
                                    .is_valid = ZEROS(uint8, 3),
                                    .out = ZEROS(int32, 3, 4),
                                    .slots = ZEROS(int32, 3, 4),
                                    .lens = ZEROS(int32, 3),
                                    .values = ZEROS(fp32, 3, 4),
                                    .max_logits_bytes = 512,
                                    .workspace = ZEROS(uint8, 600)}};
}
