/* operators.h: every operator, with a good call and the rules of its arrays, so that tests can
 * break one thing at a time in each of them.
 */
#pragma once

#include <stddef.h>

#include "operator_numbers.h"
#include "testing.h"

enum {
    OPTIONAL = 1 << 0,
    OUTPUT = 1 << 1,
    ANY_STRIDE = 1 << 2, /* the last dimension need not be contiguous */
    ANY_RANK = 1 << 3,
    CACHE = 1 << 4,  /* an fp8_ds_mla cache: 16-byte alignment */
    NEEDED = 1 << 5, /* optional, but the other arrays of the good call do not fit without it */
    BOOLS = 1 << 6,  /* uint8 or bool */
    PAGES = 1 << 7,  /* a cache with scales behind a page: test_cache.c has its rules */
    READ = 1 << 8,   /* the check itself reads its values on the CPU */
};

/* One array of an args struct. Bit i of `fixed` is set where dimension i may not grow by one. */
typedef struct slot {
    const char *name;
    size_t offset;
    unsigned flags;
    unsigned fixed;
} slot;

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

enum { MAX_SLOTS = 15 };

typedef struct operator_case {
    const char *name;
    size_t args_bytes;
    smla_status (*call)(const any_args *, smla_error *);
    any_args (*make)(void);
    slot slots[MAX_SLOTS]; /* in the order of the checks */
} operator_case;

static inline const DLTensor **
array_of(any_args *args, const slot *s)
{
    return (const DLTensor **)(void *)((uint8_t *)args + s->offset);
}

/* Fills an array with zeros, which are good values of index arrays and of all others. */
static inline const DLTensor *
zeros(array *a)
{
    memset(a->data, 0, a->bytes);
    return &a->tensor;
}

#define ZEROS(dtype, ...) zeros(ARRAY(dtype, __VA_ARGS__))

static inline any_args
make_write(void)
{
    return (any_args){.write = {.struct_size = sizeof(smla_concat_and_cache_mla_args),
                                .kv_c = ZEROS(bf16, 3, 512),
                                .k_pe = ZEROS(bf16, 3, 64),
                                .kv_cache = ZEROS(uint8, 2, 4, 656),
                                .slot_mapping = ZEROS(int64, 3)}};
}

static inline any_args
make_gather(void)
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
make_dequantize(void)
{
    return (any_args){.dequantize = {.struct_size = sizeof(smla_dequantize_kv_cache_args),
                                     .kv_cache = ZEROS(uint8, 2, 4, 656),
                                     .out = ZEROS(fp32, 2, 4, 576)}};
}

static inline any_args
make_insert(void)
{
    return (any_args){.insert = {.struct_size = sizeof(smla_insert_k_cache_args),
                                 .k = ZEROS(bf16, 3, 512),
                                 .k_cache = ZEROS(uint8, 2, 4, 512),
                                 .slot_mapping = ZEROS(int64, 3)}};
}

static inline any_args
make_index_insert(void)
{
    return (any_args){.index_insert = {.struct_size = sizeof(smla_indexer_k_cache_args),
                                       .k = ZEROS(bf16, 3, 128),
                                       .k_cache = ZEROS(uint8, 2, 4, 132),
                                       .slot_mapping = ZEROS(int64, 3)}};
}

static inline any_args
make_gather_last(void)
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
make_reshape(void)
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
make_convert(void)
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
make_global_topk(void)
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
make_top_k(void)
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
make_combine(void)
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
make_mixed(void)
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
make_attention(void)
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
make_dsv4(void)
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
make_mla(void)
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
make_varlen(void)
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
make_paged(void)
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
make_merge(void)
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
make_partials(void)
{
    return (any_args){.partials = {.struct_size = sizeof(smla_merge_attn_partials_args),
                                   .outs = {.stacked = ZEROS(bf16, 3, 3, 2, 4)},
                                   .lses = {.stacked = ZEROS(fp32, 3, 3, 2)},
                                   .attn_sink = ZEROS(fp32, 2),
                                   .out = ZEROS(bf16, 3, 2, 4),
                                   .lse = ZEROS(fp32, 3, 2)}};
}

static inline any_args
make_split(void)
{
    return (any_args){.split = {.struct_size = sizeof(smla_split_kv_b_proj_args),
                                .weight = ZEROS(bf16, 512, 10),
                                .weight_scale_inv = ZEROS(fp32, 4, 1),
                                .w_uk = ZEROS(bf16, 512, 2, 3),
                                .w_uv = ZEROS(bf16, 512, 2, 2)}};
}

static inline any_args
make_absorb_q(void)
{
    return (any_args){.absorb_q = {.struct_size = sizeof(smla_absorb_q_proj_args),
                                   .q_proj = ZEROS(bf16, 7, 10),
                                   .q_scale = ZEROS(fp32, 1, 10),
                                   .w_uk = ZEROS(fp32, 5, 2, 3),
                                   .out = ZEROS(fp32, 10, 7)}};
}

static inline any_args
make_absorb_o(void)
{
    return (any_args){.absorb_o = {.struct_size = sizeof(smla_absorb_o_proj_args),
                                   .o_proj = ZEROS(bf16, 130, 6),
                                   .o_scale = ZEROS(fp32, 2, 1),
                                   .w_uv = ZEROS(fp32, 5, 2, 3),
                                   .out = ZEROS(fp32, 130, 10)}};
}

static inline any_args
make_k_up(void)
{
    return (any_args){.k_up = {.struct_size = sizeof(smla_k_up_proj_args),
                               .q_nope = ZEROS(bf16, 3, 2, 4),
                               .w_uk = ZEROS(bf16, 512, 2, 4),
                               .out = ZEROS(bf16, 3, 2, 512)}};
}

static inline any_args
make_v_up(void)
{
    return (any_args){.v_up = {.struct_size = sizeof(smla_v_up_proj_args),
                               .x = ZEROS(bf16, 3, 2, 512),
                               .w_uv = ZEROS(bf16, 512, 2, 4),
                               .out = ZEROS(bf16, 3, 2, 4)}};
}

static inline any_args
make_kv_up(void)
{
    return (any_args){.kv_up = {.struct_size = sizeof(smla_kv_up_proj_args),
                                .kv_c = ZEROS(bf16, 3, 512),
                                .kv_b_proj = ZEROS(bf16, 512, 4),
                                .out = ZEROS(bf16, 3, 4)}};
}

static inline any_args
make_grouped(void)
{
    return (any_args){.grouped = {.struct_size = sizeof(smla_grouped_output_projection_args),
                                  .o = ZEROS(uint8, 3, 2, 128),
                                  .o_scale = ZEROS(fp32, 3, 2, 1),
                                  .weight = ZEROS(uint8, 2, 4, 128),
                                  .weight_scale = ZEROS(fp32, 2, 1, 1),
                                  .out = ZEROS(bf16, 3, 2, 4)}};
}

static inline any_args
make_quant(void)
{
    return (any_args){.quant = {.struct_size = sizeof(smla_dynamic_per_tensor_quant_args),
                                .x = ZEROS(fp32, 3, 5),
                                .out = ZEROS(uint8, 3, 5),
                                .scale = ZEROS(fp32, 1)}};
}

static inline any_args
make_scaled(void)
{
    return (any_args){.scaled = {.struct_size = sizeof(smla_scaled_quantize_args),
                                 .x = ZEROS(fp32, 3, 6),
                                 .out = ZEROS(uint8, 3, 6),
                                 .descale = ZEROS(fp32, 3, 2),
                                 .group_rows = 1,
                                 .group_columns = 3}};
}

static inline any_args
make_linear(void)
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
make_norm(void)
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
make_rope_and_cache(void)
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
make_inverse(void)
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
make_qnorm(void)
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
make_index_query(void)
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
make_logits(void)
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
make_save(void)
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
make_compress(void)
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
make_lightning(void)
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

#define CALL(member, function)                                                \
    static inline smla_status call_##member(const any_args *a, smla_error *e) \
    {                                                                         \
        return function(a == NULL ? NULL : &a->member, e);                    \
    }

CALL(write, smla_concat_and_cache_mla)
CALL(gather, smla_gather_kv_cache)
CALL(dequantize, smla_dequantize_kv_cache)
CALL(insert, smla_quantize_and_insert_k_cache)
CALL(index_insert, smla_indexer_k_quant_and_cache)
CALL(gather_last, smla_dequantize_and_gather_k_cache)
CALL(reshape, smla_reshape_and_cache)
CALL(convert, smla_convert_req_index_to_global_index)
CALL(global_topk, smla_compute_global_topk_indices_and_lens)
CALL(top_k, smla_top_k_per_row)
CALL(combine, smla_combine_topk_swa_indices)
CALL(mixed, smla_build_mixed_sparse_indices)
CALL(attention, smla_sparse_attention)
CALL(dsv4, smla_sparse_mla_dsv4)
CALL(mla, smla_mla_attention)
CALL(varlen, smla_varlen_attention)
CALL(paged, smla_paged_attention)
CALL(merge, smla_merge_attn_states)
CALL(partials, smla_merge_attn_partials)
CALL(split, smla_split_kv_b_proj)
CALL(absorb_q, smla_absorb_q_proj)
CALL(absorb_o, smla_absorb_o_proj)
CALL(k_up, smla_k_up_proj)
CALL(v_up, smla_v_up_proj)
CALL(kv_up, smla_kv_up_proj)
CALL(grouped, smla_grouped_output_projection)
CALL(quant, smla_dynamic_per_tensor_quant)
CALL(scaled, smla_scaled_quantize)
CALL(linear, smla_fp8_linear)
CALL(norm, smla_fused_q_kv_rmsnorm)
CALL(apply_rope, smla_apply_rope)
CALL(rope_and_cache, smla_rope_and_cache_mla)
CALL(inverse, smla_fused_inv_rope_fp8_quant)
CALL(qnorm, smla_fused_qnorm_rope_kv_insert)
CALL(index_query, smla_fused_indexer_q_rope_quant)
CALL(logits, smla_indexer_logits)
CALL(save, smla_save_partial_states)
CALL(compress, smla_compress_norm_rope_store)
CALL(lightning, smla_lightning_indexer)

#undef CALL
#define AT_FIELD(member, field) offsetof(any_args, member.field)

static const operator_case operators[NUM_OPERATORS] = {
    [OP_concat_and_cache_mla] = {"concat_and_cache_mla",
                                 sizeof(smla_concat_and_cache_mla_args),
                                 call_write,
                                 make_write,
                                 {{"kv_c", AT_FIELD(write, kv_c), 0, 2},
                                  {"k_pe", AT_FIELD(write, k_pe), 0, 2},
                                  {"kv_cache", AT_FIELD(write, kv_cache), OUTPUT | CACHE, 4},
                                  {"slot_mapping", AT_FIELD(write, slot_mapping), ANY_STRIDE, 0}}},
    [OP_gather_kv_cache] = {"gather_kv_cache",
                            sizeof(smla_gather_kv_cache_args),
                            call_gather,
                            make_gather,
                            {{"kv_cache", AT_FIELD(gather, kv_cache), CACHE, 4},
                             {"block_table", AT_FIELD(gather, block_table), ANY_STRIDE, 0},
                             {"seq_lens", AT_FIELD(gather, seq_lens), ANY_STRIDE, 1},
                             {"workspace_starts", AT_FIELD(gather, workspace_starts), ANY_STRIDE,
                              1},
                             {"seq_starts", AT_FIELD(gather, seq_starts), ANY_STRIDE | OPTIONAL, 1},
                             {"out", AT_FIELD(gather, out), OUTPUT, 2}}},
    [OP_dequantize_kv_cache] = {"dequantize_kv_cache",
                                sizeof(smla_dequantize_kv_cache_args),
                                call_dequantize,
                                make_dequantize,
                                {{"kv_cache", AT_FIELD(dequantize, kv_cache), CACHE, 4},
                                 {"out", AT_FIELD(dequantize, out), OUTPUT, 7}}},
    [OP_reshape_and_cache] = {"reshape_and_cache",
                              sizeof(smla_reshape_and_cache_args),
                              call_reshape,
                              make_reshape,
                              {{"k", AT_FIELD(reshape, k), 0, 4},
                               {"v", AT_FIELD(reshape, v), 0, 6},
                               {"k_cache", AT_FIELD(reshape, k_cache), OUTPUT, 12},
                               {"v_cache", AT_FIELD(reshape, v_cache), OUTPUT, 15},
                               {"slot_mapping", AT_FIELD(reshape, slot_mapping), ANY_STRIDE, 0},
                               {"k_scale", AT_FIELD(reshape, k_scale.tensor),
                                ANY_STRIDE | ANY_RANK | OPTIONAL | READ, 1},
                               {"v_scale", AT_FIELD(reshape, v_scale.tensor),
                                ANY_STRIDE | ANY_RANK | OPTIONAL | READ, 1}}},
    [OP_convert_req_index_to_global_index] =
        {"convert_req_index_to_global_index",
         sizeof(smla_convert_req_index_args),
         call_convert,
         make_convert,
         {{"req_id_per_token", AT_FIELD(convert, req_id_per_token), ANY_STRIDE, 0},
          {"block_table", AT_FIELD(convert, block_table), ANY_STRIDE, 0},
          {"topk_indices", AT_FIELD(convert, topk_indices), 0, 1},
          {"prefill_request_ids", AT_FIELD(convert, prefill_request_ids), ANY_STRIDE | OPTIONAL, 1},
          {"prefill_workspace_starts", AT_FIELD(convert, prefill_workspace_starts), ANY_STRIDE, 0},
          {"out", AT_FIELD(convert, out), OUTPUT, 3},
          {"counts", AT_FIELD(convert, counts), OUTPUT | ANY_STRIDE | OPTIONAL, 1}}},
    [OP_sparse_attention] =
        {"sparse_attention",
         sizeof(smla_sparse_attention_args),
         call_attention,
         make_attention,
         {{"q[0]", AT_FIELD(attention, q), 0, 4},
          {"q[1]", AT_FIELD(attention, q_pe), OPTIONAL, 7},
          {"kv_cache", AT_FIELD(attention, kv_cache), CACHE, 4},
          {"indices", AT_FIELD(attention, indices), 0, 1},
          {"topk_length", AT_FIELD(attention, topk_length), ANY_STRIDE | OPTIONAL, 1},
          {"attn_sink", AT_FIELD(attention, attn_sink), ANY_STRIDE | OPTIONAL, 0},
          {"extra_kv_cache", AT_FIELD(attention, extra_kv_cache), CACHE, 4},
          {"extra_indices", AT_FIELD(attention, extra_indices), 0, 1},
          {"extra_topk_length", AT_FIELD(attention, extra_topk_length), ANY_STRIDE | OPTIONAL, 1},
          {"out", AT_FIELD(attention, out), OUTPUT, 5},
          {"lse", AT_FIELD(attention, lse), OUTPUT | ANY_STRIDE, 3},
          {"max_logits", AT_FIELD(attention, max_logits), OUTPUT | ANY_STRIDE | OPTIONAL, 3},
          {"workspace", AT_FIELD(attention, workspace), OUTPUT, 0}}},
    [OP_varlen_attention] =
        {"varlen_attention",
         sizeof(smla_varlen_attention_args),
         call_varlen,
         make_varlen,
         {{"q[0]", AT_FIELD(varlen, q), 0, 4},
          {"q[1]", AT_FIELD(varlen, q_pe), NEEDED, 7},
          {"k[0]", AT_FIELD(varlen, k), 0, 4},
          {"k[1]", AT_FIELD(varlen, k_pe), NEEDED, 3},
          {"v", AT_FIELD(varlen, v), 0, 7},
          {"cu_seqlens_q", AT_FIELD(varlen, cu_seqlens_q), ANY_STRIDE | READ, 0},
          {"cu_seqlens_k", AT_FIELD(varlen, cu_seqlens_k), ANY_STRIDE | READ, 1},
          {"attn_sink", AT_FIELD(varlen, attn_sink), ANY_STRIDE | OPTIONAL, 0},
          {"out", AT_FIELD(varlen, out), OUTPUT, 7},
          {"lse", AT_FIELD(varlen, lse), OUTPUT | ANY_STRIDE, 3},
          {"workspace", AT_FIELD(varlen, workspace), OUTPUT | OPTIONAL, 0}}},
    [OP_paged_attention] =
        {"paged_attention",
         sizeof(smla_paged_attention_args),
         call_paged,
         make_paged,
         {{"q", AT_FIELD(paged, q), 0, 4},
          {"qv", AT_FIELD(paged, qv), OPTIONAL, 7},
          {"k_cache", AT_FIELD(paged, k_cache), 0, 8},
          {"v_cache", AT_FIELD(paged, v_cache), 0, 7},
          {"cache_seqlens", AT_FIELD(paged, cache_seqlens), ANY_STRIDE | READ, 0},
          {"cu_seqlens_q", AT_FIELD(paged, cu_seqlens_q), ANY_STRIDE | NEEDED | READ, 1},
          {"block_table", AT_FIELD(paged, block_table), ANY_STRIDE | NEEDED, 0},
          {"cache_leftpad", AT_FIELD(paged, cache_leftpad), ANY_STRIDE | OPTIONAL | READ, 1},
          {"attn_sink", AT_FIELD(paged, attn_sink), ANY_STRIDE | OPTIONAL, 0},
          {"out", AT_FIELD(paged, out), OUTPUT, 7},
          {"lse", AT_FIELD(paged, lse), OUTPUT | ANY_STRIDE, 3},
          {"workspace", AT_FIELD(paged, workspace), OUTPUT | OPTIONAL, 0}}},
    [OP_merge_attn_states] = {"merge_attn_states",
                              sizeof(smla_merge_attn_states_args),
                              call_merge,
                              make_merge,
                              {{"out_a", AT_FIELD(merge, out_a), 0, 0},
                               {"lse_a", AT_FIELD(merge, lse_a), ANY_STRIDE, 3},
                               {"out_b", AT_FIELD(merge, out_b), 0, 7},
                               {"lse_b", AT_FIELD(merge, lse_b), ANY_STRIDE, 3},
                               {"attn_sink", AT_FIELD(merge, attn_sink), ANY_STRIDE | OPTIONAL, 0},
                               {"out", AT_FIELD(merge, out), OUTPUT, 7},
                               {"lse", AT_FIELD(merge, lse), OUTPUT | ANY_STRIDE, 3}}},
    [OP_merge_attn_partials] = {"merge_attn_partials",
                                sizeof(smla_merge_attn_partials_args),
                                call_partials,
                                make_partials,
                                {{"outs", AT_FIELD(partials, outs.stacked), ANY_RANK, 0},
                                 {"lses", AT_FIELD(partials, lses.stacked), ANY_STRIDE, 7},
                                 {"attn_sink", AT_FIELD(partials, attn_sink), ANY_STRIDE | OPTIONAL,
                                  0},
                                 {"out", AT_FIELD(partials, out), OUTPUT, 7},
                                 {"lse", AT_FIELD(partials, lse), OUTPUT | ANY_STRIDE, 3}}},
    [OP_split_kv_b_proj] = {"split_kv_b_proj",
                            sizeof(smla_split_kv_b_proj_args),
                            call_split,
                            make_split,
                            {{"weight", AT_FIELD(split, weight), ANY_STRIDE, 0},
                             {"weight_scale_inv", AT_FIELD(split, weight_scale_inv),
                              ANY_STRIDE | ANY_RANK | OPTIONAL, 3},
                             {"w_uk", AT_FIELD(split, w_uk), OUTPUT, 1},
                             {"w_uv", AT_FIELD(split, w_uv), OUTPUT, 3}}},
    [OP_absorb_q_proj] = {"absorb",
                          sizeof(smla_absorb_q_proj_args),
                          call_absorb_q,
                          make_absorb_q,
                          {{"q_proj", AT_FIELD(absorb_q, q_proj), ANY_STRIDE, 0},
                           {"q_scale", AT_FIELD(absorb_q, q_scale),
                            ANY_STRIDE | ANY_RANK | OPTIONAL, 3},
                           {"W_UK", AT_FIELD(absorb_q, w_uk), ANY_STRIDE, 0},
                           {"out", AT_FIELD(absorb_q, out), OUTPUT, 1}}},
    [OP_absorb_o_proj] = {"absorb",
                          sizeof(smla_absorb_o_proj_args),
                          call_absorb_o,
                          make_absorb_o,
                          {{"o_proj", AT_FIELD(absorb_o, o_proj), ANY_STRIDE, 0},
                           {"o_scale", AT_FIELD(absorb_o, o_scale),
                            ANY_STRIDE | ANY_RANK | OPTIONAL, 3},
                           {"W_UV", AT_FIELD(absorb_o, w_uv), ANY_STRIDE, 0},
                           {"out", AT_FIELD(absorb_o, out), OUTPUT, 2}}},
    [OP_k_up_proj] = {"k_up_proj",
                      sizeof(smla_k_up_proj_args),
                      call_k_up,
                      make_k_up,
                      {{"q_nope", AT_FIELD(k_up, q_nope), 0, 0},
                       {"W_UK", AT_FIELD(k_up, w_uk), 0, 7},
                       {"out", AT_FIELD(k_up, out), OUTPUT, 7}}},
    [OP_v_up_proj] = {"v_up_proj",
                      sizeof(smla_v_up_proj_args),
                      call_v_up,
                      make_v_up,
                      {{"x", AT_FIELD(v_up, x), 0, 4},
                       {"W_UV", AT_FIELD(v_up, w_uv), 0, 3},
                       {"out", AT_FIELD(v_up, out), OUTPUT, 7}}},
    [OP_kv_up_proj] = {"kv_up_proj",
                       sizeof(smla_kv_up_proj_args),
                       call_kv_up,
                       make_kv_up,
                       {{"kv_c", AT_FIELD(kv_up, kv_c), 0, 2},
                        {"kv_b_proj", AT_FIELD(kv_up, kv_b_proj), ANY_STRIDE, 1},
                        {"out", AT_FIELD(kv_up, out), OUTPUT, 3}}},
    [OP_dynamic_per_tensor_quant] =
        {"dynamic_per_tensor_quant",
         sizeof(smla_dynamic_per_tensor_quant_args),
         call_quant,
         make_quant,
         {{"x", AT_FIELD(quant, x), ANY_STRIDE | ANY_RANK, 0},
          {"out", AT_FIELD(quant, out), OUTPUT | ANY_STRIDE | ANY_RANK, 3},
          {"scale", AT_FIELD(quant, scale), OUTPUT | ANY_STRIDE | ANY_RANK, 1}}},
    [OP_scaled_quantize] = {"scaled_quantize",
                            sizeof(smla_scaled_quantize_args),
                            call_scaled,
                            make_scaled,
                            {{"x", AT_FIELD(scaled, x), 0, 2},
                             {"out", AT_FIELD(scaled, out), OUTPUT, 3},
                             {"descale", AT_FIELD(scaled, descale), OUTPUT | ANY_STRIDE, 3}}},
    [OP_fp8_linear] = {"fp8_linear",
                       sizeof(smla_fp8_linear_args),
                       call_linear,
                       make_linear,
                       {{"x", AT_FIELD(linear, x), 0, 2},
                        {"weight", AT_FIELD(linear, weight), 0, 2},
                        {"descale", AT_FIELD(linear, descale), ANY_STRIDE | ANY_RANK, 1},
                        {"out", AT_FIELD(linear, out), OUTPUT, 3},
                        {"workspace", AT_FIELD(linear, workspace), OUTPUT | NEEDED, 0}}},
    [OP_fused_q_kv_rmsnorm] = {"fused_q_kv_rmsnorm",
                               sizeof(smla_fused_q_kv_rmsnorm_args),
                               call_norm,
                               make_norm,
                               {{"q", AT_FIELD(norm, q), 0, 0},
                                {"kv", AT_FIELD(norm, kv), 0, 3},
                                {"q_weight", AT_FIELD(norm, q_weight), 0, 1},
                                {"kv_weight", AT_FIELD(norm, kv_weight), 0, 1},
                                {"q_out", AT_FIELD(norm, q_out), OUTPUT, 3},
                                {"kv_out", AT_FIELD(norm, kv_out), OUTPUT, 3}}},
    [OP_apply_rope] = {"apply_rope",
                       sizeof(smla_apply_rope_args),
                       call_apply_rope,
                       make_apply_rope,
                       {{"q_pe", AT_FIELD(apply_rope, q_pe), 0, 0}, /* checked first */
                        {"positions", AT_FIELD(apply_rope, positions), ANY_STRIDE, 0},
                        {"k_pe", AT_FIELD(apply_rope, k_pe), NEEDED, 3},
                        {"rope_table", AT_FIELD(apply_rope, rope_table), 0, 2},
                        {"q_out", AT_FIELD(apply_rope, q_out), OUTPUT, 7},
                        {"k_out", AT_FIELD(apply_rope, k_out), OUTPUT, 3}}},
    [OP_rope_and_cache_mla] = {"rope_and_cache_mla",
                               sizeof(smla_rope_and_cache_mla_args),
                               call_rope_and_cache,
                               make_rope_and_cache,
                               {{"q_pe", AT_FIELD(rope_and_cache, q_pe), 0, 0}, /* checked first */
                                {"positions", AT_FIELD(rope_and_cache, positions), ANY_STRIDE, 0},
                                {"k_pe", AT_FIELD(rope_and_cache, k_pe), 0, 3},
                                {"rope_table", AT_FIELD(rope_and_cache, rope_table), 0, 2},
                                {"q_out", AT_FIELD(rope_and_cache, q_out), OUTPUT, 7},
                                {"kv_c", AT_FIELD(rope_and_cache, kv_c), 0, 2},
                                {"kv_cache", AT_FIELD(rope_and_cache, kv_cache), OUTPUT | CACHE, 4},
                                {"slot_mapping", AT_FIELD(rope_and_cache, slot_mapping), ANY_STRIDE,
                                 0}}},
    [OP_fused_inv_rope_fp8_quant] = {"fused_inv_rope_fp8_quant",
                                     sizeof(smla_fused_inv_rope_fp8_quant_args),
                                     call_inverse,
                                     make_inverse,
                                     {{"o", AT_FIELD(inverse, o), 0, 4},
                                      {"positions", AT_FIELD(inverse, positions), ANY_STRIDE, 0},
                                      {"rope_table", AT_FIELD(inverse, rope_table), 0, 2},
                                      {"out", AT_FIELD(inverse, out), OUTPUT, 7},
                                      {"out_scale", AT_FIELD(inverse, out_scale),
                                       OUTPUT | ANY_STRIDE | OPTIONAL, 6}}},
    [OP_compute_global_topk_indices_and_lens] =
        {"compute_global_topk_indices_and_lens",
         sizeof(smla_topk_slots_args),
         call_global_topk,
         make_global_topk,
         {{"topk_indices", AT_FIELD(global_topk, topk_indices), 0, 0},
          {"req_id_per_token", AT_FIELD(global_topk, req_id_per_token), ANY_STRIDE, 0},
          {"block_table", AT_FIELD(global_topk, block_table), ANY_STRIDE, 0},
          {"is_valid", AT_FIELD(global_topk, is_valid), ANY_STRIDE | OPTIONAL | BOOLS, 0},
          {"out", AT_FIELD(global_topk, out), OUTPUT, 3},
          {"lens", AT_FIELD(global_topk, lens), OUTPUT | ANY_STRIDE, 1}}},
    [OP_combine_topk_swa_indices] =
        {"combine_topk_swa_indices",
         sizeof(smla_combine_topk_swa_args),
         call_combine,
         make_combine,
         {{"topk_indices", AT_FIELD(combine, topk_indices), 0, 0},
          {"query_start_loc", AT_FIELD(combine, query_start_loc), ANY_STRIDE, 1},
          {"seq_lens", AT_FIELD(combine, seq_lens), ANY_STRIDE, 0},
          {"gather_lens", AT_FIELD(combine, gather_lens), ANY_STRIDE, 1},
          {"out", AT_FIELD(combine, out), OUTPUT, 3},
          {"lens", AT_FIELD(combine, lens), OUTPUT | ANY_STRIDE, 1}}},
    [OP_build_mixed_sparse_indices] =
        {"build_mixed_sparse_indices",
         sizeof(smla_mixed_indices_args),
         call_mixed,
         make_mixed,
         {{"decode_swa_indices", AT_FIELD(mixed, decode_swa_indices), NEEDED, 2},
          {"decode_compressed_indices", AT_FIELD(mixed, decode_compressed_indices), OPTIONAL, 1},
          {"decode_compressed_lens", AT_FIELD(mixed, decode_compressed_lens), ANY_STRIDE | OPTIONAL,
           0},
          {"prefill_topk_indices", AT_FIELD(mixed, prefill_topk_indices), NEEDED, 0},
          {"query_start_loc", AT_FIELD(mixed, query_start_loc), ANY_STRIDE, 1},
          {"seq_lens", AT_FIELD(mixed, seq_lens), ANY_STRIDE, 0},
          {"req_id_per_token", AT_FIELD(mixed, req_id_per_token), ANY_STRIDE, 0},
          {"swa_block_table", AT_FIELD(mixed, swa_block_table), ANY_STRIDE, 0},
          {"compressed_block_table", AT_FIELD(mixed, compressed_block_table), ANY_STRIDE, 0},
          {"is_valid", AT_FIELD(mixed, is_valid), ANY_STRIDE | OPTIONAL | BOOLS, 0},
          {"out", AT_FIELD(mixed, out), OUTPUT, 3},
          {"lens", AT_FIELD(mixed, lens), OUTPUT | ANY_STRIDE, 1}}},
    [OP_quantize_and_insert_k_cache] = {"quantize_and_insert_k_cache",
                                        sizeof(smla_insert_k_cache_args),
                                        call_insert,
                                        make_insert,
                                        {{"k", AT_FIELD(insert, k), 0, 2},
                                         {"k_cache", AT_FIELD(insert, k_cache), OUTPUT | CACHE, 4},
                                         {"slot_mapping", AT_FIELD(insert, slot_mapping),
                                          ANY_STRIDE, 0}}},
    [OP_indexer_k_quant_and_cache] =
        {"indexer_k_quant_and_cache",
         sizeof(smla_indexer_k_cache_args),
         call_index_insert,
         make_index_insert,
         {{"k", AT_FIELD(index_insert, k), 0, 2},
          {"k_cache", AT_FIELD(index_insert, k_cache), OUTPUT | PAGES, 4},
          {"slot_mapping", AT_FIELD(index_insert, slot_mapping), ANY_STRIDE, 0}}},
    [OP_dequantize_and_gather_k_cache] =
        {"dequantize_and_gather_k_cache",
         sizeof(smla_gather_k_cache_args),
         call_gather_last,
         make_gather_last,
         {{"k_cache", AT_FIELD(gather_last, k_cache), CACHE, 6},
          {"out", AT_FIELD(gather_last, out), OUTPUT, 4},
          {"seq_lens", AT_FIELD(gather_last, seq_lens), ANY_STRIDE, 1},
          {"gather_lens", AT_FIELD(gather_last, gather_lens), ANY_STRIDE | OPTIONAL, 1},
          {"block_table", AT_FIELD(gather_last, block_table), ANY_STRIDE, 1}}},
    [OP_sparse_mla_dsv4] = {"sparse_mla_dsv4",
                            sizeof(smla_sparse_mla_dsv4_args),
                            call_dsv4,
                            make_dsv4,
                            {{"query", AT_FIELD(dsv4, query), 0, 4},
                             {"sparse_indices", AT_FIELD(dsv4, sparse_indices), 0, 1},
                             {"sparse_topk_lens", AT_FIELD(dsv4, sparse_topk_lens), ANY_STRIDE, 1},
                             {"swa_kv_cache", AT_FIELD(dsv4, swa_kv_cache), 0, 4},
                             {"sinks", AT_FIELD(dsv4, sinks), ANY_STRIDE | OPTIONAL, 0},
                             {"compressed_kv_cache", AT_FIELD(dsv4, compressed_kv_cache), 0, 4},
                             {"out", AT_FIELD(dsv4, out), OUTPUT, 5},
                             {"workspace_buffer", AT_FIELD(dsv4, workspace_buffer), OUTPUT, 0}}},
    [OP_mla_attention] = {"mla_attention",
                          sizeof(smla_mla_attention_args),
                          call_mla,
                          make_mla,
                          {{"q[0]", AT_FIELD(mla, q), 0, 4},
                           {"q[1]", AT_FIELD(mla, q_pe), OPTIONAL, 7},
                           {"kv_cache", AT_FIELD(mla, kv_cache), CACHE, 4},
                           {"attn_sink", AT_FIELD(mla, attn_sink), ANY_STRIDE | OPTIONAL, 0},
                           {"cache_seqlens", AT_FIELD(mla, cache_seqlens), ANY_STRIDE | READ, 0},
                           {"cu_seqlens_q", AT_FIELD(mla, cu_seqlens_q), ANY_STRIDE | NEEDED | READ,
                            1},
                           {"block_table", AT_FIELD(mla, block_table), ANY_STRIDE | NEEDED, 0},
                           {"out", AT_FIELD(mla, out), OUTPUT, 5},
                           {"lse", AT_FIELD(mla, lse), OUTPUT | ANY_STRIDE, 3},
                           {"workspace", AT_FIELD(mla, workspace), OUTPUT, 0}}},
    [OP_fused_qnorm_rope_kv_insert] = {"fused_qnorm_rope_kv_insert",
                                       sizeof(smla_qnorm_insert_args),
                                       call_qnorm,
                                       make_qnorm,
                                       {{"q", AT_FIELD(qnorm, q), 0, 4},
                                        {"q_out", AT_FIELD(qnorm, q_out), OUTPUT | OPTIONAL, 5},
                                        {"kv", AT_FIELD(qnorm, kv), 0, 2},
                                        {"positions", AT_FIELD(qnorm, positions), ANY_STRIDE, 0},
                                        {"rope_table", AT_FIELD(qnorm, rope_table), 0, 2},
                                        {"kv_cache", AT_FIELD(qnorm, kv_cache), OUTPUT | CACHE, 4},
                                        {"slot_mapping", AT_FIELD(qnorm, slot_mapping), ANY_STRIDE,
                                         1}}},
    [OP_grouped_output_projection] = {"grouped_output_projection",
                                      sizeof(smla_grouped_output_projection_args),
                                      call_grouped,
                                      make_grouped,
                                      {{"o", AT_FIELD(grouped, o), 0, 4},
                                       {"o_scale", AT_FIELD(grouped, o_scale), ANY_STRIDE, 6},
                                       {"weight", AT_FIELD(grouped, weight), 0, 5},
                                       {"weight_scale", AT_FIELD(grouped, weight_scale), ANY_STRIDE,
                                        7},
                                       {"out", AT_FIELD(grouped, out), OUTPUT, 7}}},
    [OP_top_k_per_row] =
        {"top_k_per_row",
         sizeof(smla_top_k_args),
         call_top_k,
         make_top_k,
         {{"logits", AT_FIELD(top_k, logits), 0, 0},
          {"starts", AT_FIELD(top_k, starts), ANY_STRIDE, 0},
          {"ends", AT_FIELD(top_k, ends), ANY_STRIDE, 0},
          {"slots_block_table", AT_FIELD(top_k, slots_block_table), ANY_STRIDE | NEEDED, 0},
          {"req_id_per_token", AT_FIELD(top_k, req_id_per_token), ANY_STRIDE | NEEDED, 0},
          {"is_valid", AT_FIELD(top_k, is_valid), ANY_STRIDE | OPTIONAL | BOOLS, 0},
          {"out", AT_FIELD(top_k, out), OUTPUT, 6},
          {"slots", AT_FIELD(top_k, slots), OUTPUT | NEEDED, 6},
          {"lens", AT_FIELD(top_k, lens), OUTPUT | ANY_STRIDE | NEEDED, 1},
          {"values", AT_FIELD(top_k, values), OUTPUT | OPTIONAL, 0}}},
    [OP_fused_indexer_q_rope_quant] =
        {"fused_indexer_q_rope_quant",
         sizeof(smla_index_query_args),
         call_index_query,
         make_index_query,
         {{"q", AT_FIELD(index_query, q), 0, 4},
          {"weights", AT_FIELD(index_query, weights), 0, 3},
          {"positions", AT_FIELD(index_query, positions), ANY_STRIDE, 0},
          {"rope_table", AT_FIELD(index_query, rope_table), 0, 2},
          {"out", AT_FIELD(index_query, out), OUTPUT, 7},
          {"out_weights", AT_FIELD(index_query, out_weights), OUTPUT, 3},
          {"out_scale", AT_FIELD(index_query, out_scale), OUTPUT | NEEDED, 7}}},
    [OP_indexer_logits] = {"indexer_logits",
                           sizeof(smla_indexer_logits_args),
                           call_logits,
                           make_logits,
                           {{"q", AT_FIELD(logits, q), 0, 4},
                            {"weights", AT_FIELD(logits, weights), 0, 3},
                            {"q_scale", AT_FIELD(logits, q_scale), NEEDED, 7},
                            {"k_cache[0]", AT_FIELD(logits, k_cache), 0, 2},
                            {"k_cache[1]", AT_FIELD(logits, k_scale), ANY_STRIDE | NEEDED, 1},
                            {"context_lens", AT_FIELD(logits, context_lens), ANY_STRIDE, 0},
                            {"starts", AT_FIELD(logits, starts), ANY_STRIDE | OPTIONAL, 0},
                            {"out", AT_FIELD(logits, out), OUTPUT, 1}}},
    [OP_save_partial_states] = {"save_partial_states",
                                sizeof(smla_partial_states_args),
                                call_save,
                                make_save,
                                {{"slot_mapping", AT_FIELD(save, slot_mapping), ANY_STRIDE, 0},
                                 {"ape", AT_FIELD(save, ape), 0, 2},
                                 {"kv", AT_FIELD(save, kv), 0, 2},
                                 {"score", AT_FIELD(save, score), 0, 2},
                                 {"positions", AT_FIELD(save, positions), ANY_STRIDE, 0},
                                 {"state", AT_FIELD(save, state), OUTPUT, 4}}},
    [OP_compress_norm_rope_store] =
        {"compress_norm_rope_store",
         sizeof(smla_compress_args),
         call_compress,
         make_compress,
         {{"norm_weight", AT_FIELD(compress, norm_weight), 0, 1},
          {"state", AT_FIELD(compress, state), OUTPUT, 4},
          {"block_table", AT_FIELD(compress, block_table), ANY_STRIDE, 0},
          {"slot_mapping", AT_FIELD(compress, slot_mapping), ANY_STRIDE, 0},
          {"req_id_per_token", AT_FIELD(compress, req_id_per_token), ANY_STRIDE, 0},
          {"positions", AT_FIELD(compress, positions), ANY_STRIDE, 0},
          {"rope_table", AT_FIELD(compress, rope_table), 0, 2},
          {"kv_cache", AT_FIELD(compress, kv_cache), OUTPUT | CACHE, 4},
          {"kv_slot_mapping", AT_FIELD(compress, kv_slot_mapping), ANY_STRIDE, 0},
          {"ape", AT_FIELD(compress, ape), 0, 3},
          {"kv", AT_FIELD(compress, kv), 0, 2},
          {"score", AT_FIELD(compress, score), 0, 2}}},
    [OP_lightning_indexer] =
        {"lightning_indexer",
         sizeof(smla_lightning_indexer_args),
         call_lightning,
         make_lightning,
         {{"q", AT_FIELD(lightning, q), 0, 4},
          {"weights", AT_FIELD(lightning, weights), 0, 3},
          {"q_scale", AT_FIELD(lightning, q_scale), NEEDED, 7},
          {"k_cache[0]", AT_FIELD(lightning, k_cache), 0, 2},
          {"k_cache[1]", AT_FIELD(lightning, k_scale), ANY_STRIDE | NEEDED, 1},
          {"context_lens", AT_FIELD(lightning, context_lens), ANY_STRIDE, 0},
          {"starts", AT_FIELD(lightning, starts), ANY_STRIDE | OPTIONAL, 0},
          {"slots_block_table", AT_FIELD(lightning, slots_block_table), ANY_STRIDE | NEEDED, 0},
          {"req_id_per_token", AT_FIELD(lightning, req_id_per_token), ANY_STRIDE | NEEDED, 0},
          {"is_valid", AT_FIELD(lightning, is_valid), ANY_STRIDE | OPTIONAL | BOOLS, 0},
          {"out", AT_FIELD(lightning, out), OUTPUT, 7},
          {"slots", AT_FIELD(lightning, slots), OUTPUT | NEEDED, 7},
          {"lens", AT_FIELD(lightning, lens), OUTPUT | ANY_STRIDE | NEEDED, 1},
          {"values", AT_FIELD(lightning, values), OUTPUT | OPTIONAL, 2},
          {"workspace", AT_FIELD(lightning, workspace), OUTPUT | NEEDED, 0}}},
};
