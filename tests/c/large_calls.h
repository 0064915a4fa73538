/* large_calls.h: calls that need scratch, for which arrays of operators.h are too small. */
#pragma once

#include "operators.h"

enum { LARGE_KEYS = 700, LARGE_K = 100 };

static inline const DLTensor *
normal(array *a)
{
    return &fill_normal(a, 1.0)->tensor;
}

static inline any_args
make_large_top_k(void)
{
    return (any_args){.top_k = {.struct_size = sizeof(smla_top_k_args),
                                .logits = normal(ARRAY(fp32, 1, LARGE_KEYS)),
                                .starts = &VECTOR(int32, 0)->tensor,
                                .ends = &VECTOR(int32, LARGE_KEYS)->tensor,
                                .k = LARGE_K,
                                .out = &ARRAY(int32, 1, LARGE_K)->tensor}};
}

static inline any_args
make_large_logits(void)
{
    return (any_args){.logits = {.struct_size = sizeof(smla_indexer_logits_args),
                                 .q = normal(ARRAY(e4m3, 1, 4, 128)),
                                 .weights = normal(ARRAY(fp32, 1, 4)),
                                 .k_cache = normal(ARRAY(e4m3, LARGE_KEYS, 128)),
                                 .k_scale = normal(ARRAY(fp32, LARGE_KEYS)),
                                 .context_lens = &VECTOR(int32, LARGE_KEYS)->tensor,
                                 .starts = &VECTOR(int32, 0)->tensor,
                                 .out = &ARRAY(fp32, 1, LARGE_KEYS)->tensor}};
}

static inline any_args
make_large_lightning(void)
{
    const any_args scored = make_large_logits();
    return (any_args){.lightning = {.struct_size = sizeof(smla_lightning_indexer_args),
                                    .q = scored.logits.q,
                                    .weights = scored.logits.weights,
                                    .k_cache = scored.logits.k_cache,
                                    .k_scale = scored.logits.k_scale,
                                    .context_lens = scored.logits.context_lens,
                                    .starts = scored.logits.starts,
                                    .k = LARGE_K,
                                    .out = &ARRAY(int32, 1, LARGE_K)->tensor,
                                    .max_logits_bytes = 1 << 20,
                                    .workspace = ZEROS(uint8, 4 * LARGE_KEYS + 256)}};
}

static inline any_args
make_large_k_up(void)
{
    return (any_args){.k_up = {.struct_size = sizeof(smla_k_up_proj_args),
                               .q_nope = normal(ARRAY(bf16, 5, 1, 128)),
                               .w_uk = normal(ARRAY(bf16, 512, 1, 128)),
                               .out = &ARRAY(bf16, 5, 1, 512)->tensor}};
}

/* Keys in two of three splits. */
static inline any_args
make_large_attention(void)
{
    array *const indices = ARRAY(int32, 1, 600);
    for (int64_t i = 0; i < 600; i++) {
        SET(indices, (double)(i < 400 ? random_int(32) : -1), 0, i);
    }
    return (any_args){.attention = {.struct_size = sizeof(smla_sparse_attention_args),
                                    .q = normal(ARRAY(bf16, 1, 2, 576)),
                                    .kv_cache = normal(ARRAY(bf16, 32, 576)),
                                    .indices = &indices->tensor,
                                    .out = &ARRAY(bf16, 1, 2, 512)->tensor,
                                    .lse = &ARRAY(fp32, 1, 2)->tensor,
                                    .workspace = ZEROS(uint8, 4 << 20),
                                    .softmax_scale = 0.1}};
}

/* A long request in three parts, beside one that is too short for a second part. */
static inline any_args
make_large_paged(void)
{
    array *const table = ARRAY(int32, 2, 32);
    for (int64_t i = 0; i < 64; i++) {
        SET(table, (double)(i % 32), i / 32, i % 32);
    }
    array *const lens = VECTOR(int32, 500, 3);
    return (any_args){.paged = {.struct_size = sizeof(smla_paged_attention_args),
                                .q = normal(ARRAY(bf16, 2, 2, 64)),
                                .k_cache = normal(ARRAY(bf16, 32, 16, 1, 64)),
                                .v_cache = normal(ARRAY(bf16, 32, 16, 1, 64)),
                                .block_table = &table->tensor,
                                .cache_seqlens = &lens->tensor,
                                .out = &ARRAY(bf16, 2, 2, 64)->tensor,
                                .lse = &ARRAY(fp32, 2, 2)->tensor,
                                .softmax_scale = 0.1,
                                .num_splits = 3}};
}

typedef struct large_call {
    const char *name;
    smla_status (*call)(const any_args *, smla_error *);
    any_args (*make)(void);
    int num_allocations;
} large_call;

static const large_call large_calls[] = {
    {"top_k_per_row", call_top_k_per_row, make_large_top_k, 1},
    {"indexer_logits", call_indexer_logits, make_large_logits, 1},
    {"lightning_indexer", call_lightning_indexer, make_large_lightning, 1},
    {"k_up_proj", call_k_up_proj, make_large_k_up, 1},
    {"sparse_attention", call_sparse_attention, make_large_attention, 0},
    {"paged_attention", call_paged_attention, make_large_paged, 1},
};

enum { NUM_LARGE_CALLS = sizeof large_calls / sizeof large_calls[0] };
