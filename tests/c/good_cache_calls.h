/* good_cache_calls.h: good calls of the operators that write, copy and read cache rows. */
#pragma once

#include "good_args.h"

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
make_transfer_kv_cache(void)
{
    return (any_args){.transfer = {.struct_size = sizeof(smla_transfer_kv_cache_args),
                                   .src = ZEROS(uint8, 2, 4, 656),
                                   .dst = ZEROS(uint8, 3, 2, 656),
                                   .src_slots = ZEROS(int64, 3),
                                   .dst_slots = ZEROS(int32, 3)}};
}
