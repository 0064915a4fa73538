/* good_calls.h: a good call of every operator. good_lists.h has those that make lists of keys, and
 * good_cache_calls.h those of caches.
 */
#pragma once

#include "good_cache_calls.h"
#include "good_lists.h"

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
