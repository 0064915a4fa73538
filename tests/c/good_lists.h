/* good_lists.h: a good call of every operator that makes lists of keys. */
#pragma once

#include "good_args.h"

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
make_top_k_merge(void)
{
    return (any_args){.top_k_merge = {.struct_size = sizeof(smla_top_k_merge_args),
                                      .indices = ZEROS(int32, 2, 3, 5),
                                      .values = ZEROS(fp32, 2, 3, 5),
                                      .k = 4,
                                      .out = ZEROS(int32, 3, 4)}};
}

static inline any_args
make_cp_local_positions(void)
{
    return (any_args){.own_positions = {.struct_size = sizeof(smla_cp_positions_args),
                                        .positions = ZEROS(int64, 3, 5),
                                        .cp_rank = 0,
                                        .cp_size = 2,
                                        .cp_interleave = 4,
                                        .out = ZEROS(int64, 3, 5)}};
}

static inline any_args
make_cp_local_topk(void)
{
    return (any_args){.own_lists = {.struct_size = sizeof(smla_cp_topk_args),
                                    .topk_indices = ZEROS(int32, 3, 5),
                                    .cp_rank = 0,
                                    .cp_size = 2,
                                    .cp_interleave = 4,
                                    .out = ZEROS(int32, 3, 5),
                                    .lens = ZEROS(int32, 3)}};
}

static inline any_args
make_cp_local_lengths(void)
{
    return (any_args){.own_lengths = {.struct_size = sizeof(smla_cp_lengths_args),
                                      .seq_lens = ZEROS(int32, 3),
                                      .cp_rank = 0,
                                      .cp_size = 2,
                                      .cp_interleave = 4,
                                      .out = ZEROS(int32, 3)}};
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
